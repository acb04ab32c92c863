//! The boot log: what a line means, and which lines of a reading are new.
//!
//! The log is a scratch buffer of 1 KiB on the card that every boot stage writes to, and it wraps: what is not read in
//! time is lost. So a line that is missing proves nothing, and only lines that were read are acted upon.

/// What a line of the boot log says about the boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogKind {
    /// Anything that neither ends the boot nor completes it.
    Plain,
    /// The kernel of the stream runs its first process.
    LinuxUp,
    /// What the stream was to do is done, and what it started serves.
    Ready,
    /// An installer has finished and restarts the card.
    Rebooting,
    /// The card came up as a plain NIC: its Arm cores do not run.
    NicMode,
    /// An installer gave up.
    Critical,
    /// A boot stage reports an error.
    Error,
    /// A boot stage stopped at a failed assertion.
    Assert,
    /// A boot stage stopped.
    Panic,
    /// A boot stage was stopped by the processor.
    Exception,
}

/// Tell what a line means. The words are those that Mellanox/rshim-user-space's bfb-install looks for, in any case,
/// and the levels those of its rshim_log.c.
pub fn kind_of(line: &str) -> LogKind {
    let line = line.trim().to_ascii_lowercase();
    let words = [
        ("critical error", LogKind::Critical),
        ("in enhanced nic mode", LogKind::NicMode),
        ("dpu is ready", LogKind::Ready),
        ("linux up", LogKind::LinuxUp),
        ("rebooting...", LogKind::Rebooting),
    ];
    let levels = [
        ("err[", LogKind::Error),
        ("assert[", LogKind::Assert),
        ("assert(", LogKind::Assert),
        ("panic(", LogKind::Panic),
        ("panic[", LogKind::Panic),
        ("exception(", LogKind::Exception),
        ("exception[", LogKind::Exception),
    ];
    let word = words.iter().find(|(word, _)| line.contains(word)).map(|(_, kind)| *kind);
    let level = levels.iter().find(|(level, _)| line.starts_with(level)).map(|(_, kind)| *kind);
    match (word, level) {
        (Some(LogKind::Critical), _) => LogKind::Critical,
        // An error is one whatever it talks about: `ERR[MISC]: not Linux up`.
        (_, Some(kind)) | (Some(kind), None) => kind,
        (None, None) => LogKind::Plain,
    }
}

/// Finds the lines of a reading that were not in the one before.
#[derive(Debug)]
pub struct LogReader {
    /// Reading empties the log.
    clears: bool,
    last: Vec<String>,
}

impl LogReader {
    /// Follow a log from the state that `last` shows; `clears` if reading empties it.
    pub fn new(clears: bool, last: Vec<String>) -> Self {
        Self { clears, last }
    }

    /// Return the new lines of a reading.
    ///
    /// Where reading does not empty the log, old lines come again, but for those that were overwritten: what the last
    /// reading ends with and this one begins with is old. A line that repeats an old one exactly may be taken for it;
    /// none is ever taken for new that is not.
    pub fn fresh(&mut self, lines: Vec<String>) -> Vec<String> {
        if self.clears {
            return lines;
        }
        let longest = self.last.len().min(lines.len());
        let known = (0..=longest).rev().find(|len| self.last[self.last.len() - len..] == lines[..*len]).unwrap_or(0);
        let fresh = lines[known..].to_vec();
        self.last = lines;
        fresh
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_mean_what_they_say() {
        for (line, kind) in [
            ("INFO[BL2]: start", LogKind::Plain),
            ("WARN[UEFI]: PXE error", LogKind::Plain),
            (" INFO[MISC]: Linux up", LogKind::LinuxUp),
            ("INFO[MISC]: DPU is ready", LogKind::Ready),
            ("INFO[MISC]: Rebooting...", LogKind::Rebooting),
            ("INFO[MISC]: rebooting soon", LogKind::Plain),
            ("INFO[MISC]: In Enhanced NIC mode", LogKind::NicMode),
            ("ERR[BL1]: PSC error -60", LogKind::Error),
            ("ERR[MISC]: DPU is ready for nothing", LogKind::Error),
            ("ASSERT[BL2]: ddr.c:12", LogKind::Assert),
            ("PANIC(BL31): PC = 0x0000000000001234", LogKind::Panic),
            ("Exception(BL2): syndrome = 0x96000010", LogKind::Exception),
            ("INFO[MISC]: Critical error: no disk", LogKind::Critical),
            ("ERR[MISC]: CRITICAL ERROR", LogKind::Critical),
            ("", LogKind::Plain),
        ] {
            assert_eq!(kind_of(line), kind, "{line}");
        }
    }

    fn read(reader: &mut LogReader, lines: &str) -> String {
        reader.fresh(lines.split_whitespace().map(str::to_owned).collect()).join(" ")
    }

    #[test]
    fn all_lines_are_new_where_reading_empties_the_log() {
        let mut reader = LogReader::new(true, vec!["a".into()]);
        assert_eq!(read(&mut reader, "a b"), "a b");
        assert_eq!(read(&mut reader, "b c"), "b c");
    }

    #[test]
    fn old_lines_are_told_from_new_ones_where_they_stay() {
        let mut reader = LogReader::new(false, vec!["a".into(), "ready".into()]);
        assert_eq!(read(&mut reader, "a ready"), "");
        assert_eq!(read(&mut reader, "a ready b"), "b");
        // Wrapped: the oldest lines are gone.
        assert_eq!(read(&mut reader, "ready b c d"), "c d");
        // Cleared by a reset, or wrapped more than once.
        assert_eq!(read(&mut reader, "x y"), "x y");
        assert_eq!(read(&mut reader, ""), "");
        assert_eq!(read(&mut reader, "z"), "z");
    }
}
