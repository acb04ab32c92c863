//! Where the agent tells how far it is: the console, and the card's boot log.
//!
//! The boot log (`rsh_log` of the driver mlxbf-bootctl) is what the host's tools read over rshim: they wait for
//! [`LINUX_UP`] and [`DPU_IS_READY`], and take [`CRITICAL`] for the end. It is a scratch buffer of 1 KiB that wraps, so
//! there is little in it, and lines are short. A machine without it has the console alone.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;

/// The first words for the host: the kernel runs the agent.
pub const LINUX_UP: &str = "Linux up";
/// The last ones: the runtime serves. It need not have a controller yet.
pub const DPU_IS_READY: &str = "DPU is ready";
/// What tells the host that it waits in vain.
pub const CRITICAL: &str = "Critical error";

/// Where the driver has its file, by kernel.
const RSH_LOGS: [&str; 2] =
    ["/sys/devices/platform/MLNXBF04:00/rsh_log", "/sys/bus/platform/devices/MLNXBF04:00/driver/rsh_log"];

/// The longest line of the boot log, in bytes: an eighth of it.
const LINE_MAX_BYTES: usize = 128;

/// How much a line matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// How far it is.
    Info,
    /// Something is not as it was told, and the agent goes on.
    Warning,
    /// Something failed.
    Error,
}

impl Level {
    /// Return the driver's word for it.
    const fn word(self) -> &'static str {
        match self {
            Self::Info => "INFO",
            Self::Warning => "WARN",
            Self::Error => "ERR",
        }
    }
}

/// Both logs.
#[derive(Debug, Clone)]
pub struct Log {
    rsh_logs: Vec<PathBuf>,
}

impl Default for Log {
    fn default() -> Self {
        Self::new(RSH_LOGS.map(PathBuf::from))
    }
}

impl Log {
    /// Write to the console and to the first of these files that there is; they may come later.
    pub fn new(rsh_logs: impl IntoIterator<Item = PathBuf>) -> Self {
        Self { rsh_logs: rsh_logs.into_iter().collect() }
    }

    /// Say something. Where nobody listens, that is no reason to stop.
    pub fn say(&self, level: Level, text: &str) {
        // One write a line, so that lines of several processes stay whole.
        let _ = io::stderr().write_all(format!("sumac {}: {text}\n", level.word()).as_bytes());
        let line = format!("{} {text}", level.word());
        for path in &self.rsh_logs {
            let log = OpenOptions::new().write(true).open(path);
            if log.and_then(|mut log| log.write_all(shortened(&line).as_bytes())).is_ok() {
                return;
            }
        }
    }

    /// Say how far it is.
    pub fn info(&self, text: &str) {
        self.say(Level::Info, text);
    }

    /// Say what is not as it was told.
    pub fn warn(&self, text: &str) {
        self.say(Level::Warning, text);
    }
}

/// Cut a line to what the boot log has room for, between two characters.
fn shortened(line: &str) -> &str {
    let end = (0..=LINE_MAX_BYTES.min(line.len())).rev().find(|&end| line.is_char_boundary(end));
    &line[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use sumac_firmware::rshim::{LogKind, kind_of};

    #[test]
    fn lines_go_to_the_first_boot_log_that_there_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let [absent, first, second] = ["absent", "first", "second"].map(|name| folder.path().join(name));
        fs::write(&first, "").expect("written");
        fs::write(&second, "").expect("written");
        let log = Log::new([absent.clone(), first.clone(), second.clone()]);
        log.info(LINUX_UP);
        let read = |path| fs::read_to_string(path).expect("readable");
        assert_eq!((read(&first), read(&second)), ("INFO Linux up".into(), String::new()));
        assert!(!absent.exists(), "a file of sysfs can't be made");
        // As long as what is cut: sysfs takes each write for a line, a file in its place only overwrites.
        log.say(Level::Error, &"é".repeat(200));
        assert_eq!(read(&first), format!("ERR {}", "é".repeat(62)));
    }

    #[test]
    fn the_hosts_tools_understand_what_is_said() {
        for (text, kind) in
            [(LINUX_UP, LogKind::LinuxUp), (DPU_IS_READY, LogKind::Ready), (CRITICAL, LogKind::Critical)]
        {
            assert_eq!(kind_of(&format!("INFO[MISC]: {text}")), kind);
        }
        assert_eq!(kind_of(&format!("ERR[MISC]: {CRITICAL}: why")), LogKind::Critical);
    }
}
