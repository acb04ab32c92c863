//! Signals that end flashing in order, of one card or of many at once.

use crate::exit::Failure;
use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use std::fmt;
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

/// Called with a signal, on the thread that watches for them.
type Listener = Arc<dyn Fn(i32) + Send + Sync>;

#[derive(Default)]
struct Shared {
    /// The first signal.
    signal: Option<i32>,
    /// Those to be told, whether or not they have ended.
    listeners: Vec<Listener>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("signal", &self.signal).finish_non_exhaustive()
    }
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
                let listeners = shared.listeners.clone();
                drop(shared);
                listeners.iter().for_each(|listener| listener(signal));
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
        self.listen(move |signal| interrupter.interrupt(signal));
    }

    /// Call this function with each signal, also with one that has come already. It must not block.
    pub(super) fn listen(&self, listener: impl Fn(i32) + Send + Sync + 'static) {
        let listener: Listener = Arc::new(listener);
        let mut shared = lock(&self.shared);
        let signal = shared.signal;
        shared.listeners.push(Arc::clone(&listener));
        drop(shared);
        signal.into_iter().for_each(|signal| listener(signal));
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
