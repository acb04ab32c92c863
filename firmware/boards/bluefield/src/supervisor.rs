//! The supervisor: starts the runtime's process, reads its status, and restarts it when it has ended.
//!
//! A short run doubles the wait before the next one, up to a limit, so that a runtime that fails at once does not use
//! up the machine; a long run resets it.
//!
//! The host waits for one line of the boot log, [`DPU_IS_READY`], which is lost if the log is full when it is written.
//! It is therefore repeated, ever less often, while the runtime is serving.
//!
//! Orphaned processes become children of process 1, and are reaped here with all others.

use crate::config::Settings;
use crate::log::{DPU_IS_READY, Level, Log};
use crate::update::{CONFIRMS, RESTARTS};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, WaitStatus, pidfd_open, pidfd_send_signal, wait};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use sumac_firmware::slots::HealthEvent;

/// The argument that makes this program the runtime.
pub const RUNTIME: &str = "runtime";
/// The line with which the runtime reports that it is serving; its boot id and addresses follow.
pub const SERVES: &str = "serves";
/// The line with which it reports that it has joined its controller; the address follows.
pub const JOINED: &str = "has reached the controller";
/// The line with which it reports that it has passed its self-test.
pub const PASSES: &str = "has passed its self-test";

/// The first wait before a restart, and the longest.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// A run of this length resets the backoff.
const LONG_RUN: Duration = Duration::from_secs(30);

/// The first pause between two announcements that the card is ready; each next one is twice as long.
const FIRST_ANNOUNCEMENT: Duration = Duration::from_secs(5);
/// Announcements end after this time, which is the default time limit of `sumac flash`.
const ANNOUNCEMENT_LIMIT: Duration = Duration::from_secs(1800);

/// The maximum length of a status line of the runtime, in bytes.
const LINE_MAX_BYTES: u64 = 4096;

/// The exponential backoff between two runs.
#[derive(Debug, Clone, Default)]
pub struct Backoff {
    last: Duration,
}

impl Backoff {
    /// Return the wait after a run of this length.
    pub fn after(&mut self, run: Duration) -> Duration {
        let doubled = (self.last * 2).clamp(FIRST_WAIT, LONGEST_WAIT);
        self.last = if run >= LONG_RUN { FIRST_WAIT } else { doubled };
        self.last
    }
}

/// Ends the runtime so that the system can be restarted.
#[derive(Debug, Clone, Default)]
pub struct Restarts(Arc<RestartState>);

#[derive(Debug, Default)]
struct RestartState {
    is_requested: AtomicBool,
    /// The running runtime. The descriptor never means another process.
    runtime: Mutex<Option<OwnedFd>>,
}

impl Restarts {
    /// Request a restart: the runtime is killed, and [`supervise`] returns.
    pub fn request(&self) {
        self.0.is_requested.store(true, Ordering::Release);
        if let Some(runtime) = &*self.0.runtime.lock().unwrap_or_else(PoisonError::into_inner) {
            // It may have ended already.
            let _ = pidfd_send_signal(runtime, Signal::KILL);
        }
    }

    fn is_requested(&self) -> bool {
        self.0.is_requested.load(Ordering::Acquire)
    }

    /// Remember the runtime that runs. A restart that was requested before ends it.
    fn set_runtime(&self, pid: Option<Pid>) {
        let runtime = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        *self.0.runtime.lock().unwrap_or_else(PoisonError::into_inner) = runtime;
        if pid.is_some() && self.is_requested() {
            self.request();
        }
    }
}

/// Keep a runtime with these settings running, until a restart of the system is requested. A slot on trial gets the
/// signs of its health.
///
/// # Errors
/// Only if this program cannot find its own executable.
pub fn supervise(log: &Log, settings: &Settings, observers: &Observers) -> io::Result<()> {
    // By its path: the /proc link would name a file that may have been replaced meanwhile.
    let program = std::env::current_exe()?;
    let mut backoff = Backoff::default();
    loop {
        let start = Instant::now();
        let mut command = Command::new(&program);
        command.arg(RUNTIME).stdin(Stdio::piped()).stdout(Stdio::piped());
        let end = match command.spawn() {
            Ok(child) => watch(child, log, settings, observers),
            Err(error) => format!("could not be started: {error}"),
        };
        if observers.restarts.is_requested() {
            log.info(&format!("runtime {end}; restarting"));
            return Ok(());
        }
        let wait = backoff.after(start.elapsed());
        log.write(Level::Error, &format!("runtime {end}; starting it again in {} ms", wait.as_millis()));
        std::thread::sleep(wait);
    }
}

/// Serve a runtime until it has ended; return how.
fn watch(mut child: Child, log: &Log, settings: &Settings, observers: &Observers) -> String {
    observers.restarts.set_runtime(Some(Pid::from_child(&child)));
    if let Some(mut stdin) = child.stdin.take() {
        // If it has ended already, its end is noticed below.
        let _ = stdin.write_all(settings.to_secret_lines().as_bytes());
    }
    let reader = child.stdout.take().map(|stdout| {
        let (log, observers) = (log.clone(), observers.clone());
        std::thread::spawn(move || forward_status(stdout, &log, &observers))
    });
    let end = reap_until(Pid::from_child(&child));
    observers.restarts.set_runtime(None);
    if let Some(reader) = reader {
        // The reader ends with the pipe, so the last lines are logged before the end.
        let _ = reader.join();
    }
    observers.readiness.is_serving.store(false, Ordering::Relaxed);
    observers.report(HealthEvent::Ended);
    end
}

/// Who is told of the runtime's states.
#[derive(Debug, Clone, Default)]
pub struct Observers {
    /// The host.
    pub readiness: Arc<Readiness>,
    /// The trial of a version that runs from a slot.
    pub health: Option<Sender<HealthEvent>>,
    /// What ends the runtime for a restart of the system.
    pub restarts: Restarts,
}

impl Observers {
    fn report(&self, event: HealthEvent) {
        if let Some(health) = &self.health {
            // The trial may have ended.
            let _ = health.send(event);
        }
    }
}

/// Whether the runtime is serving, and whether the host has been told.
#[derive(Debug, Default)]
pub struct Readiness {
    /// The runtime is serving.
    pub is_serving: AtomicBool,
    /// The host is not to be told yet: the version is on trial, and may go.
    is_held: AtomicBool,
    /// Announcements have begun.
    has_been_announced: AtomicBool,
}

impl Readiness {
    /// Announce nothing until [`Readiness::release`].
    pub fn hold(&self, is_held: bool) {
        self.is_held.store(is_held, Ordering::Relaxed);
    }

    /// Announce what was held.
    pub fn release(self: &Arc<Self>, log: &Log) {
        self.hold(false);
        self.announce_once(log);
    }

    /// Begin to announce that the card is ready, unless that has begun or has to wait.
    fn announce_once(self: &Arc<Self>, log: &Log) {
        let may = self.is_serving.load(Ordering::Relaxed) && !self.is_held.load(Ordering::Relaxed);
        if may && !self.has_been_announced.swap(true, Ordering::Relaxed) {
            let (log, readiness) = (log.clone(), Arc::clone(self));
            // It ends with the last announcement, or with the process.
            std::thread::spawn(move || announce(&log, &readiness, announcement_pauses()));
        }
    }
}

/// Return the pauses between announcements that the card is ready.
pub fn announcement_pauses() -> impl Iterator<Item = Duration> + Send {
    let doubled = std::iter::successors(Some(FIRST_ANNOUNCEMENT), |pause| pause.checked_mul(2));
    doubled.scan(Duration::ZERO, |total, pause| {
        let is_within = *total < ANNOUNCEMENT_LIMIT;
        *total += pause;
        is_within.then_some(pause)
    })
}

/// Write to the boot log that the card is ready, and again after each pause while the runtime is serving.
pub fn announce(log: &Log, readiness: &Readiness, pauses: impl IntoIterator<Item = Duration>) {
    log.info(DPU_IS_READY);
    for pause in pauses {
        std::thread::sleep(pause);
        if readiness.is_serving.load(Ordering::Relaxed) {
            log.info(DPU_IS_READY);
        }
    }
}

fn forward_status(from: impl io::Read, log: &Log, observers: &Observers) {
    let mut from = BufReader::new(from);
    loop {
        let mut line = Vec::new();
        match io::Read::take(&mut from, LINE_MAX_BYTES).read_until(b'\n', &mut line) {
            Ok(len) if len > 0 => {}
            _ => return,
        }
        let line = String::from_utf8_lossy(&line);
        log.info(&format!("runtime {}", line.trim_end()));
        match line.trim_end() {
            RESTARTS => observers.restarts.request(),
            CONFIRMS => observers.report(HealthEvent::Confirmed),
            line if line.starts_with(SERVES) => {
                observers.readiness.is_serving.store(true, Ordering::Relaxed);
                observers.readiness.announce_once(log);
            }
            line if line.starts_with(PASSES) => observers.report(HealthEvent::SelfTestPassed),
            line if line.starts_with(JOINED) => observers.report(HealthEvent::Joined),
            _ => {}
        }
    }
}

/// Reap every process that ends until `pid` has ended; return how it ended.
fn reap_until(pid: Pid) -> String {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((ended, status))) if ended == pid => return describe(status),
            Ok(_) | Err(Errno::INTR) => {}
            // It was reaped elsewhere, and has ended anyway.
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
    use std::fs;

    #[test]
    fn announcements_cover_the_time_limit_of_flashing_and_do_not_fill_the_log() {
        let pauses: Vec<_> = announcement_pauses().collect();
        assert!(pauses.iter().sum::<Duration>() >= ANNOUNCEMENT_LIMIT, "{pauses:?}");
        // Each takes three of the log's 127 words, if nobody reads it.
        assert!((1 + pauses.len()) * 3 < 127 / 3, "{} announcements", pauses.len());
    }

    #[test]
    fn announcements_pause_while_the_runtime_does_not_serve() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("rsh_log");
        let (log, readiness) = (Log::new([path.clone()]), Readiness::default());
        let after = |is_serving: bool| {
            fs::write(&path, "").expect("written");
            readiness.is_serving.store(is_serving, Ordering::Relaxed);
            let emptied = std::iter::once_with(|| {
                fs::write(&path, "").expect("written");
                Duration::ZERO
            });
            announce(&log, &readiness, emptied);
            fs::read_to_string(&path).expect("readable")
        };
        assert_eq!(after(true), format!("INFO {DPU_IS_READY}"));
        assert_eq!(after(false), "");
    }

    #[test]
    fn version_on_trial_is_announced_once_it_is_confirmed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("rsh_log");
        fs::write(&path, "").expect("written");
        let (log, (health, events)) = (Log::new([path.clone()]), std::sync::mpsc::channel());
        let observers = Observers { health: Some(health), ..Observers::default() };
        observers.readiness.hold(true);
        let lines = format!("{PASSES}\n{SERVES} as d\n{JOINED} at x\n");
        forward_status(lines.as_bytes(), &log, &observers);
        assert_eq!(events.try_iter().collect::<Vec<_>>(), [HealthEvent::SelfTestPassed, HealthEvent::Joined]);
        assert!(!observers.readiness.has_been_announced.load(Ordering::Relaxed));
        observers.readiness.release(&log);
        assert!(observers.readiness.has_been_announced.load(Ordering::Relaxed));
    }

    #[test]
    fn short_runs_double_the_wait_and_a_long_run_resets_it() {
        let mut backoff = Backoff::default();
        let waits: Vec<_> = (0..9).map(|_| backoff.after(Duration::from_millis(1)).as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        assert_eq!(backoff.after(LONG_RUN), FIRST_WAIT);
        assert_eq!(backoff.after(Duration::ZERO), FIRST_WAIT * 2);
    }
}
