//! The runtime's process: started, listened to, and started again when it has ended.
//!
//! A life that was short doubles the wait before the next, up to a limit: what fails at once is not to take the machine's
//! time; a life that was long enough begins anew.
//!
//! Processes whose parents have ended are process 1's children, and are reaped here with all others.

use crate::config::Settings;
use crate::log::{DPU_IS_READY, Level, Log};
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, WaitStatus, wait};
use std::convert::Infallible;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The word by which this program becomes the runtime.
pub const RUNTIME: &str = "runtime";
/// The line with which the runtime says that it serves; its boot id and addresses follow.
pub const SERVES: &str = "serves";

/// The wait before the first new life, and the longest.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// A life of this length is not what failed at once.
const LONG_LIFE: Duration = Duration::from_secs(30);

/// The longest line of the runtime that is listened to, in bytes.
const LINE_MAX_BYTES: u64 = 4096;

/// How long to wait before the next life.
#[derive(Debug, Clone, Default)]
pub struct BackOff {
    last: Duration,
}

impl BackOff {
    /// Return the wait after a life of this length.
    pub fn after(&mut self, lived: Duration) -> Duration {
        let doubled = (self.last * 2).clamp(FIRST_WAIT, LONGEST_WAIT);
        self.last = if lived >= LONG_LIFE { FIRST_WAIT } else { doubled };
        self.last
    }
}

/// Keep a runtime with these settings running, life after life.
///
/// # Errors
/// Only where this program can't find itself, so that there is nothing to start.
pub fn supervise(log: &Log, settings: &Settings) -> io::Result<Infallible> {
    // By its path where it has one: the link would name a file that was replaced meanwhile.
    let program = std::env::current_exe()?;
    let (mut back_off, has_been_ready) = (BackOff::default(), Arc::new(AtomicBool::new(false)));
    loop {
        let start = Instant::now();
        let mut command = Command::new(&program);
        command.arg(RUNTIME).stdin(Stdio::piped()).stdout(Stdio::piped());
        let end = match command.spawn() {
            Ok(child) => attend(child, log, settings, &has_been_ready),
            Err(error) => format!("can't be started: {error}"),
        };
        let wait = back_off.after(start.elapsed());
        log.say(Level::Error, &format!("runtime {end}; starting it again in {} ms", wait.as_millis()));
        std::thread::sleep(wait);
    }
}

/// Listen to a runtime until it has ended; return how.
fn attend(mut child: Child, log: &Log, settings: &Settings, has_been_ready: &Arc<AtomicBool>) -> String {
    if let Some(mut stdin) = child.stdin.take() {
        // One that has ended already does not read it, and its end is noticed below.
        let _ = stdin.write_all(settings.to_lines().as_bytes());
    }
    let listener = child.stdout.take().map(|stdout| {
        let (log, has_been_ready) = (log.clone(), Arc::clone(has_been_ready));
        std::thread::spawn(move || listen(stdout, &log, &has_been_ready))
    });
    let end = reap_until(Pid::from_child(&child));
    if let Some(listener) = listener {
        // It ends with the pipe, so what was said last is told before the end.
        let _ = listener.join();
    }
    end
}

fn listen(from: impl io::Read, log: &Log, has_been_ready: &AtomicBool) {
    let mut from = BufReader::new(from);
    loop {
        let mut line = Vec::new();
        match io::Read::take(&mut from, LINE_MAX_BYTES).read_until(b'\n', &mut line) {
            Ok(len) if len > 0 => {}
            _ => return,
        }
        let line = String::from_utf8_lossy(&line);
        log.info(&format!("runtime {}", line.trim_end()));
        if line.starts_with(SERVES) && !has_been_ready.swap(true, Ordering::Relaxed) {
            log.info(DPU_IS_READY);
        }
    }
}

/// Reap every process that ends until `pid` has; return how it did.
fn reap_until(pid: Pid) -> String {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((ended, status))) if ended == pid => return describe(status),
            Ok(_) | Err(Errno::INTR) => {}
            // Somebody else has waited for it; it has ended all the same.
            Err(error) => return format!("is gone ({error})"),
        }
    }
}

fn describe(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("ended with status {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_lives_are_further_and_further_apart_and_a_long_one_begins_anew() {
        let mut back_off = BackOff::default();
        let waits: Vec<_> = (0..9).map(|_| back_off.after(Duration::from_millis(1)).as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        assert_eq!(back_off.after(LONG_LIFE), FIRST_WAIT);
        assert_eq!(back_off.after(Duration::ZERO), FIRST_WAIT * 2);
    }
}
