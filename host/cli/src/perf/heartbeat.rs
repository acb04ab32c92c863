//! A line on stderr for rows that take long, where no one sees the progress bar: logs and pipes.
//!
//! Invariant: the thread ends when the heartbeat is dropped, and prints nothing between rows.

use indicatif::ProgressBar;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// When the first line is printed, from the start of the row on.
const FIRST: Duration = Duration::from_secs(3);

/// How often further lines are printed.
const PERIOD: Duration = Duration::from_secs(10);

/// A row in progress.
#[derive(Debug, Clone)]
struct Current {
    what: String,
    since: Instant,
    /// How many lines have been printed about it.
    printed: u32,
}

impl Current {
    /// Return when the next line is due.
    fn due(&self) -> Instant {
        self.since + FIRST + PERIOD * self.printed
    }

    /// Return the next line if it is due.
    fn beat(&mut self, now: Instant) -> Option<String> {
        if now < self.due() {
            return None;
        }
        self.printed += 1;
        Some(format!("# {} s in {}", (now - self.since).as_secs(), self.what))
    }
}

#[derive(Debug, Default)]
struct State {
    current: Option<Current>,
    has_ended: bool,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Print lines until the heartbeat is dropped. No line is printed under the lock.
    fn run(&self, bar: &ProgressBar) {
        let mut state = self.state();
        while !state.has_ended {
            let now = Instant::now();
            if let Some(line) = state.current.as_mut().and_then(|current| current.beat(now)) {
                drop(state);
                bar.suspend(|| message!("{line}"));
                state = self.state();
                continue;
            }
            let left = state.current.as_ref().map(|current| current.due().saturating_duration_since(now));
            state = match left {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) => self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }
}

/// Prints the lines from a thread of its own, because the main thread waits for the ranks.
#[derive(Debug)]
pub(super) struct Heartbeat {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeat {
    /// Start the thread.
    ///
    /// # Errors
    /// The system could not start it.
    pub(super) fn start(bar: &ProgressBar) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let (its, bar) = (Arc::clone(&shared), bar.clone());
        let thread = thread::Builder::new().name("heartbeat".into()).spawn(move || its.run(&bar))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Note that a row begins.
    pub(super) fn begin(&self, what: String) {
        self.shared.state().current = Some(Current { what, since: Instant::now(), printed: 0 });
        self.shared.changed.notify_one();
    }

    /// Note that the row has ended.
    pub(super) fn end(&self) {
        self.shared.state().current = None;
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.shared.state().has_ended = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // It panics nowhere, and there is nobody to report it to.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_line_comes_after_3_s_and_the_others_every_10_s() {
        let since = Instant::now();
        let mut current = Current { what: "all_reduce".into(), since, printed: 0 };
        let mut beat = |seconds: f64| current.beat(since + Duration::from_secs_f64(seconds));
        assert_eq!([beat(0.0), beat(2.9)], [None, None]);
        assert_eq!(beat(3.0).as_deref(), Some("# 3 s in all_reduce"));
        assert_eq!(beat(12.9), None);
        assert_eq!(beat(13.1).as_deref(), Some("# 13 s in all_reduce"));
        assert_eq!(beat(13.2), None);
    }
}
