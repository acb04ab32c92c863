//! The agent's log: the console, and the card's boot log.
//!
//! Tools on the host read the boot log (`rsh_log` of the driver mlxbf-bootctl) over rshim: they wait for [`LINUX_UP`]
//! and [`DPU_IS_READY`], and [`CRITICAL`] means failure. A machine without it has only the console.
//!
//! It is a scratch buffer of 1 KiB (Linux, drivers/platform/mellanox/mlxbf-bootctl.c: `rsh_log_store`). Until the host
//! has read it, the driver cuts or drops what does not fit, without an error, and nothing tells the card that it was
//! read. So only short lines are written, few warnings, and the line that the host waits for more than once. The host
//! locks the buffer while it reads; a write then fails after 100 ms and is tried again.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

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
/// The maximum length of a warning there, in bytes.
const WARNING_MAX_BYTES: usize = 64;
/// How many warnings are written there; the others are on the console only.
const WARNINGS_MAX: usize = 4;
/// How often a line is tried while the host has locked the boot log, each time for 100 ms.
const WRITE_TRIES: usize = 20;

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
    /// The number of warnings so far, of all clones.
    warnings: Arc<AtomicUsize>,
}

impl Default for Log {
    fn default() -> Self {
        Self::new(RSH_LOGS.map(PathBuf::from))
    }
}

impl Log {
    /// Write to the console and to the first of these files that exists; they may appear later.
    pub fn new(rsh_logs: impl IntoIterator<Item = PathBuf>) -> Self {
        Self { rsh_logs: rsh_logs.into_iter().collect(), warnings: Arc::default() }
    }

    /// Write a line. Errors are ignored: logging must not stop the agent.
    pub fn write(&self, level: Level, text: &str) {
        // One write per line, so that lines of several processes do not mix.
        let _ = io::stderr().write_all(format!("sumac {}: {text}\n", level.word()).as_bytes());
        let line = format!("{} {text}", level.word());
        match level {
            Level::Info | Level::Error => self.write_boot_log(shortened(&line, LINE_MAX_BYTES)),
            Level::Warning => match self.warnings.fetch_add(1, Ordering::Relaxed) {
                0..WARNINGS_MAX => self.write_boot_log(shortened(&line, WARNING_MAX_BYTES)),
                WARNINGS_MAX => self.write_boot_log("WARN more warnings: see the console"),
                _ => {}
            },
        }
    }

    /// Write a line to the boot log only, as one that was written before.
    pub fn tell_host(&self, level: Level, text: &str) {
        self.write_boot_log(shortened(&format!("{} {text}", level.word()), LINE_MAX_BYTES));
    }

    /// Write a line to the boot log, with as many tries as it takes while the host reads it.
    fn write_boot_log(&self, line: &str) {
        for path in &self.rsh_logs {
            for _ in 0..WRITE_TRIES {
                let log = OpenOptions::new().write(true).open(path);
                match log.and_then(|mut log| log.write_all(line.as_bytes())) {
                    Ok(()) => return,
                    Err(error) if error.kind() == io::ErrorKind::TimedOut => {}
                    Err(_) => break,
                }
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

/// Truncate a line to `max` bytes, at a character boundary.
fn shortened(line: &str, max: usize) -> &str {
    let end = (0..=max.min(line.len())).rev().find(|&end| line.is_char_boundary(end));
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
    fn boot_log_gets_few_warnings_and_a_hint() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("rsh_log");
        fs::write(&path, "").expect("written");
        let log = Log::new([path.clone()]);
        let last = |text: &str| {
            fs::write(&path, "").expect("written");
            log.clone().warn(text);
            fs::read_to_string(&path).expect("readable")
        };
        let long = "m".repeat(200);
        let lines: Vec<_> = (0..8).map(|_| last(&long)).collect();
        assert!(
            lines[..4].iter().all(|line| line.len() == WARNING_MAX_BYTES && line.starts_with("WARN m")),
            "{lines:?}"
        );
        assert_eq!(lines[4..], ["WARN more warnings: see the console", "", "", ""]);
        // In words of the buffer, with a header each: there is room for what the host waits for.
        let words: usize = lines.iter().filter(|line| !line.is_empty()).map(|line| 1 + line.len().div_ceil(8)).sum();
        assert!(words < 127 / 2, "{words} of 127 words");
        log.info("x");
        assert_eq!(fs::read_to_string(&path).expect("readable"), "INFO x", "other lines are written");
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
