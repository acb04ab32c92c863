//! The agent's log: the console, and the card's boot log.
//!
//! Tools on the host read the boot log (`rsh_log` of the driver mlxbf-bootctl) over rshim: they wait for [`LINUX_UP`]
//! and [`DPU_IS_READY`], and [`CRITICAL`] means failure. It is a scratch buffer of 1 KiB that wraps, so only short
//! lines and few of them are written. A machine without it has only the console.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;

/// The first message for the host: the kernel runs the agent.
pub const LINUX_UP: &str = "Linux up";
/// The last message: the runtime is serving, though perhaps without a controller.
pub const DPU_IS_READY: &str = "DPU is ready";
/// Tells the host that the agent has failed.
pub const CRITICAL: &str = "Critical error";

/// The driver's file, depending on the kernel.
const RSH_LOGS: [&str; 2] =
    ["/sys/devices/platform/MLNXBF04:00/rsh_log", "/sys/bus/platform/devices/MLNXBF04:00/driver/rsh_log"];

/// The maximum length of a line in the boot log, in bytes: an eighth of the log.
const LINE_MAX_BYTES: usize = 128;

/// The severity of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Progress.
    Info,
    /// Something is wrong, and the agent continues.
    Warning,
    /// Something failed.
    Error,
}

impl Level {
    /// Return the driver's name of the level.
    const fn word(self) -> &'static str {
        match self {
            Self::Info => "INFO",
            Self::Warning => "WARN",
            Self::Error => "ERR",
        }
    }
}

/// The console and the boot log.
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
    /// Write to the console and to the first of these files that exists; they may appear later.
    pub fn new(rsh_logs: impl IntoIterator<Item = PathBuf>) -> Self {
        Self { rsh_logs: rsh_logs.into_iter().collect() }
    }

    /// Write a line. Errors are ignored: logging must not stop the agent.
    pub fn write(&self, level: Level, text: &str) {
        // One write per line, so that lines of several processes do not mix.
        let _ = io::stderr().write_all(format!("sumac {}: {text}\n", level.word()).as_bytes());
        let line = format!("{} {text}", level.word());
        for path in &self.rsh_logs {
            let log = OpenOptions::new().write(true).open(path);
            if log.and_then(|mut log| log.write_all(shortened(&line).as_bytes())).is_ok() {
                return;
            }
        }
    }

    /// Log progress.
    pub fn info(&self, text: &str) {
        self.write(Level::Info, text);
    }

    /// Log a problem.
    pub fn warn(&self, text: &str) {
        self.write(Level::Warning, text);
    }
}

/// Truncate a line to what fits the boot log, at a character boundary.
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
    fn lines_are_written_to_the_first_existing_boot_log() {
        let folder = tempfile::tempdir().expect("a folder");
        let [absent, first, second] = ["absent", "first", "second"].map(|name| folder.path().join(name));
        fs::write(&first, "").expect("written");
        fs::write(&second, "").expect("written");
        let log = Log::new([absent.clone(), first.clone(), second.clone()]);
        log.info(LINUX_UP);
        let read = |path| fs::read_to_string(path).expect("readable");
        assert_eq!((read(&first), read(&second)), ("INFO Linux up".into(), String::new()));
        assert!(!absent.exists(), "a missing file is not created");
        // Truncated to the limit. sysfs takes each write as a line; an ordinary file is overwritten.
        log.write(Level::Error, &"é".repeat(200));
        assert_eq!(read(&first), format!("ERR {}", "é".repeat(62)));
    }

    #[test]
    fn messages_are_recognised_by_the_hosts_log_parser() {
        for (text, kind) in
            [(LINUX_UP, LogKind::LinuxUp), (DPU_IS_READY, LogKind::Ready), (CRITICAL, LogKind::Critical)]
        {
            assert_eq!(kind_of(&format!("INFO[MISC]: {text}")), kind);
        }
        assert_eq!(kind_of(&format!("ERR[MISC]: {CRITICAL}: why")), LogKind::Critical);
    }
}
