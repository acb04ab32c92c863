//! Signals that end flashing in order, of one card or of many at once.

use crate::exit::Failure;
use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use sumac_firmware::flash::Interrupter;

/// Watches for signals until it is dropped.
#[derive(Debug)]
pub(super) struct Interrupts {
    shared: Arc<Mutex<Shared>>,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    /// The first signal.
    signal: Option<i32>,
    /// Those to be told, whether or not they have ended.
    running: Vec<Interrupter>,
}

impl Interrupts {
    /// Handle signals from here on.
    pub(super) fn watch() -> Result<Self, Failure> {
        let mut signals =
            Signals::new([SIGHUP, SIGINT, SIGTERM]).context("cannot install signal handlers").map_err(Failure::Run)?;
        let (handle, shared) = (signals.handle(), Arc::new(Mutex::new(Shared::default())));
        let told = Arc::clone(&shared);
        let watching = thread::spawn(move || {
            for signal in signals.forever() {
                let mut shared = lock(&told);
                shared.signal.get_or_insert(signal);
                let running = shared.running.clone();
                drop(shared);
                running.iter().for_each(|interrupter| interrupter.interrupt(signal));
            }
        });
        Ok(Self { shared, handle, thread: Some(watching) })
    }

    /// Return the first signal, if there was one.
    pub(super) fn signal(&self) -> Option<i32> {
        lock(&self.shared).signal
    }

    /// Tell this one of signals, also of one that has come already.
    pub(super) fn tell(&self, interrupter: Interrupter) {
        let mut shared = lock(&self.shared);
        let signal = shared.signal;
        shared.running.push(interrupter.clone());
        drop(shared);
        signal.into_iter().for_each(|signal| interrupter.interrupt(signal));
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        self.handle.close();
        // The thread ends at once, because its signals are closed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
