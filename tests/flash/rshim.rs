//! A simulated card: a FUSE folder with `boot` and `misc` that behaves like Mellanox/rshim-user-space and follows a
//! script.
//!
//! - Opening `boot` resets the card and sets BOOT_MODE to 0, unless BOOT_RESET_SKIP is set; a second opening is refused
//!   (`EBUSY`); closing it sets BOOT_MODE to 1.
//! - Writes go to a FIFO that drains as scripted: slowly, partially, with an error, or never.
//! - The first read of `misc` after an open returns the whole text, the next one end of file. At display level 2 the
//!   text includes the boot log, which has 127 words: when it is full, the newest text is cut or dropped.
//! - A write to `misc` must be one `KEY value` at offset 0; anything else fails with `EINVAL`. FORCE_CMD is accepted in
//!   drop mode only.
//! - `rsh_log` is the card's side: what its Linux writes to the boot log (Linux, mlxbf-bootctl.c: `rsh_log_store`). A
//!   write fails while the host has locked the log.
//!
//! - The last line of the boot log comes again after a while, as the agent's does.
//!
//! The script triggers events by bytes written and by reads of `misc`, never by time.

mod filesystem;
mod script;
mod state;

pub(crate) use script::{Script, UpTime, When};
pub(crate) use state::Seen;

use filesystem::Card;
use fuser::{BackgroundSession, Config, Errno, MountOption};
use state::State;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The number of FUSE threads: calls that hang must not block others.
const THREADS: usize = 8;

/// A card; dropping it unmounts its folder.
pub(crate) struct SimulatedCard {
    shared: Arc<Shared>,
    folder: PathBuf,
    session: Option<BackgroundSession>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl SimulatedCard {
    /// Mount a card at the empty folder `folder`.
    pub(crate) fn mount(folder: &Path, script: Script) -> io::Result<Self> {
        let seen = Seen { boot_mode: script.boot_mode, ..Seen::default() };
        let mut state = State {
            pending: script.log.clone(),
            script,
            seen,
            readings_after: 0,
            log: Vec::new(),
            log_words: 0,
            read: Vec::new(),
            next_handle: 1,
            is_error_told: false,
            reset: None,
            is_over: false,
        };
        state.append_due_lines(When::Before);
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("rshim".into())];
        config.n_threads = Some(THREADS);
        let session = fuser::spawn_mount(Card { shared: shared.clone() }, folder, &config)?;
        Ok(Self { shared, folder: folder.into(), session: Some(session) })
    }

    /// Return the history so far.
    pub(crate) fn seen(&self) -> Seen {
        self.shared.lock().seen.clone()
    }

    /// Wait until the card's history satisfies a condition.
    pub(crate) fn wait(&self, what: &str, is_there: impl Fn(&Seen) -> bool) {
        let limit = Duration::from_secs(600);
        let state = self.shared.lock();
        let waited = self.shared.changed.wait_timeout_while(state, limit, |state| !is_there(&state.seen));
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        assert!(!timeout.timed_out(), "{what} has not come: {:?}", Seen { received: Vec::new(), ..state.seen.clone() });
    }

    /// Change the boot mode, as another program may.
    pub(crate) fn set_boot_mode(&self, mode: u32) {
        self.shared.lock().seen.boot_mode = mode;
    }

    /// Release hanging calls.
    pub(crate) fn release(&self) {
        self.shared.lock().is_over = true;
        self.shared.changed.notify_all();
    }
}

impl Drop for SimulatedCard {
    fn drop(&mut self) {
        self.release();
        // Detach immediately, even if an abandoned worker still has a file open; fuser unmounts the rest.
        let _ = rustix::mount::unmount(&self.folder, rustix::mount::UnmountFlags::DETACH);
        drop(self.session.take());
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Start a call into the driver, which hangs or fails if scripted.
    fn enter(&self) -> Result<MutexGuard<'_, State>, Errno> {
        let state = self.lock();
        let hangs = |state: &mut State| !state.is_over && state.script.hangs.is_some_and(|when| state.is_due(when));
        let state = self.changed.wait_while(state, hangs).unwrap_or_else(PoisonError::into_inner);
        match state.script.gone {
            Some((when, errno)) if state.is_due(when) => Err(errno),
            _ => Ok(state),
        }
    }

    /// Wait until the card takes more of the stream.
    fn while_held<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait_while(state, |state| state.is_held()).unwrap_or_else(PoisonError::into_inner)
    }

    /// Publish a change of the state.
    fn notify(&self, state: MutexGuard<'_, State>) {
        drop(state);
        self.changed.notify_all();
    }
}
