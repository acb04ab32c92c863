//! The machine's watchdog: it resets the machine when the kernel hangs, and firmware then goes on with its boot order.
//!
//! Opening the device starts it, with the driver's own time limit (Linux, Documentation/watchdog/watchdog-api.rst). It
//! is never stopped: process 1 keeps it up for as long as the agent runs.

use crate::log::Log;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// How often it is fed: drivers' limits are 10 s (sbsa_gwdt) and more.
pub const FEED_INTERVAL: Duration = Duration::from_secs(2);

const DEVICE: &str = "/dev/watchdog";

/// An open watchdog, if the machine has one.
#[derive(Debug)]
pub struct Watchdog(Option<File>);

impl Watchdog {
    /// Start the machine's watchdog.
    pub fn start(log: &Log) -> Self {
        Self::open(Path::new(DEVICE), log)
    }

    fn open(path: &Path, log: &Log) -> Self {
        match OpenOptions::new().write(true).open(path) {
            Ok(file) => {
                log.info("watchdog is running");
                Self(Some(file))
            }
            Err(error) => {
                log.warn(&format!("no watchdog ({error}): a hang needs a reset by hand"));
                Self(None)
            }
        }
    }

    /// Put off the reset.
    pub fn feed(&mut self) {
        if let Some(file) = &mut self.0 {
            // Any byte but the one that allows stopping it. If this fails, the watchdog does what it is for.
            let _ = file.write_all(b"1");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watchdog_is_fed_and_never_allowed_to_stop() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("watchdog");
        std::fs::write(&path, "").expect("written");
        let mut watchdog = Watchdog::open(&path, &Log::new([]));
        watchdog.feed();
        watchdog.feed();
        drop(watchdog);
        assert_eq!(std::fs::read(&path).expect("readable"), b"11");
        Watchdog::open(&folder.path().join("none"), &Log::new([])).feed();
    }
}
