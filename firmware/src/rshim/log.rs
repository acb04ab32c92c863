//! The boot log: the meaning of lines, and detection of new ones.
//!
//! The log is a scratch buffer of 1 KiB on the card that every boot stage writes to. When it is full, the *newest* text
//! is cut or dropped until the host reads and clears it (Linux, drivers/platform/mellanox/mlxbf-bootctl.c:
//! `rsh_log_store`). So a missing line proves nothing, and only lines that were read count.

/// The meaning of a boot log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogKind {
    /// A line that neither ends nor completes the boot.
    Plain,
    /// The stream's kernel runs its first process.
    LinuxUp,
    /// The stream has completed, and what it started is serving.
    Ready,
    /// An installer has finished and restarts the card.
    Rebooting,
    /// A card that runs has installed an image.
    RuntimeFinished,
    /// A card that runs could not install an image.
    RuntimeFailed,
    /// The card came up as a plain NIC: its Arm cores do not run.
    NicMode,
    /// An installer has failed.
    Critical,
    /// A boot stage reports an error.
    Error,
    /// The card's Linux reports an error, such as an installer that goes on without an optional part.
    SystemError,
    /// A boot stage stopped at a failed assertion.
    Assert,
    /// A boot stage stopped.
    Panic,
    /// A boot stage was stopped by the processor.
    Exception,
}

impl LogKind {
    /// Return whether the card, or what boots it, has failed.
    pub const fn is_failure(self) -> bool {
        matches!(self, Self::Critical | Self::Error | Self::Assert | Self::Panic | Self::Exception)
    }
}

/// Return the meaning of a line. The phrases are those that Mellanox/rshim-user-space's bfb-install looks for, ignoring
/// case, and the levels those of its rshim_log.c.
pub fn kind_of(line: &str) -> LogKind {
    let line = line.trim().to_ascii_lowercase();
    let words = [
        ("critical error", LogKind::Critical),
        ("in enhanced nic mode", LogKind::NicMode),
        ("dpu is ready", LogKind::Ready),
        ("linux up", LogKind::LinuxUp),
        ("rebooting...", LogKind::Rebooting),
        ("runtime upgrade finished", LogKind::RuntimeFinished),
        // Our agent's.
        ("runtime upgrade failed", LogKind::RuntimeFailed),
    ];
    let levels = [
        // The driver gives no other module to what Linux writes.
        ("err[misc]", LogKind::SystemError),
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
        // An error is an error whatever its text says: `ERR[MISC]: not Linux up`.
        (_, Some(kind)) | (Some(kind), None) => kind,
        (None, None) => LogKind::Plain,
    }
}

/// Finds the new lines of each reading.
#[derive(Debug)]
pub struct LogReader {
    /// Whether reading clears the log.
    clears: bool,
    last: Vec<String>,
}

impl LogReader {
    /// Follow a log from the state in `last`; `clears` if reading clears it.
    pub fn new(clears: bool, last: Vec<String>) -> Self {
        Self { clears, last }
    }

    /// Return the new lines of a reading.
    ///
    /// If reading does not clear the log, old lines reappear, except those that were overwritten: the longest suffix of
    /// the last reading that is a prefix of this one is old. A new line that repeats an old one exactly may be missed,
    /// but an old line is never reported as new.
    pub fn new_lines(&mut self, lines: Vec<String>) -> Vec<String> {
        if self.clears {
            return lines;
        }
        let longest = self.last.len().min(lines.len());
        let known = (0..=longest).rev().find(|len| self.last[self.last.len() - len..] == lines[..*len]).unwrap_or(0);
        let new = lines[known..].to_vec();
        self.last = lines;
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_classified_by_level_and_phrase() {
        for (line, kind) in [
            ("INFO[BL2]: start", LogKind::Plain),
            ("WARN[UEFI]: PXE error", LogKind::Plain),
            (" INFO[MISC]: Linux up", LogKind::LinuxUp),
            ("INFO[MISC]: DPU is ready", LogKind::Ready),
            ("INFO[MISC]: Rebooting...", LogKind::Rebooting),
            ("INFO[MISC]: rebooting soon", LogKind::Plain),
            ("INFO[MISC]: In Enhanced NIC mode", LogKind::NicMode),
            ("INFO[MISC]: Runtime upgrade finished: 1.2.3", LogKind::RuntimeFinished),
            ("INFO[MISC]: Runtime upgrade failed: no space", LogKind::RuntimeFailed),
            ("ERR[BL1]: PSC error -60", LogKind::Error),
            ("ERR[UEFI]: PXE error", LogKind::Error),
            ("ERR[MISC]: DPU is ready for nothing", LogKind::SystemError),
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
        reader.new_lines(lines.split_whitespace().map(str::to_owned).collect()).join(" ")
    }

    #[test]
    fn all_lines_are_new_if_reading_clears_the_log() {
        let mut reader = LogReader::new(true, vec!["a".into()]);
        assert_eq!(read(&mut reader, "a b"), "a b");
        assert_eq!(read(&mut reader, "b c"), "b c");
    }

    #[test]
    fn only_new_lines_are_reported_if_the_log_is_kept() {
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
