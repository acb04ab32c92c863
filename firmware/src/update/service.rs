//! Runs a session beside a board: requests are answered at once, and a thread works on the storage.

use super::card::{Card, Supervisor, status};
use super::session::{Done, Session};
use crate::emulated::Maintenance;
use crate::slots::{BootLoader, Slot, Slots};
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant as Clock;
use sumac_hal::ctrl::update::{SlotsStatus, UpdateRequest, UpdateStatus};
use sumac_hal::flash::BlockDevice;
use sumac_hal::time::Instant;

/// A session, and the thread that does its work. The thread ends with the service.
pub struct Service<D> {
    shared: Arc<Shared>,
    records: Mutex<Records<D>>,
    running: Option<Slot>,
}

/// The slots' records.
struct Records<D> {
    /// Of the same slots as the card's, to read records while the card writes.
    slots: Slots<D>,
    /// As they were read last.
    known: SlotsStatus,
}

#[derive(Debug)]
struct Shared {
    began: Clock,
    state: Mutex<State>,
    /// There is work, or the service ends.
    wake: Condvar,
}

#[derive(Debug, Default)]
struct State {
    session: Session,
    has_ended: bool,
}

impl Shared {
    fn now(&self) -> Instant {
        Instant::ZERO + self.began.elapsed()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change of a session is a whole one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D> fmt::Debug for Service<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("running", &self.running).finish_non_exhaustive()
    }
}

impl<D: BlockDevice + Send + 'static> Service<D> {
    /// Start a service on a card that was started from slot `running`, or in another way. `slots` are a second handle
    /// of the card's.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start<B, S>(card: Card<D, B, S>, slots: Slots<D>, running: Option<Slot>) -> io::Result<Self>
    where
        B: BootLoader<Error: fmt::Display> + Send + 'static,
        S: Supervisor + Send + 'static,
    {
        let shared = Arc::new(Shared { began: Clock::now(), state: Mutex::default(), wake: Condvar::new() });
        let of_thread = Arc::clone(&shared);
        std::thread::Builder::new().name("update".into()).spawn(move || run(card, &of_thread))?;
        let records = Records { slots, known: SlotsStatus { running: None, images: [None, None] } };
        Ok(Self { shared, records: Mutex::new(records), running })
    }

    /// Return the slots, as their records are now if `is_fresh`.
    fn slots(&self, is_fresh: bool) -> SlotsStatus {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        if is_fresh {
            match status(&mut records.slots, self.running) {
                Ok(slots) => records.known = slots,
                Err(error) => tracing::error!(%error, "cannot read the slots' records"),
            }
        }
        records.known.clone()
    }
}

impl<D> Drop for Service<D> {
    fn drop(&mut self) {
        self.shared.lock().has_ended = true;
        self.shared.wake.notify_all();
    }
}

/// Do a session's work until the service ends.
fn run<D, B, S>(mut card: Card<D, B, S>, shared: &Shared)
where
    D: BlockDevice,
    B: BootLoader<Error: fmt::Display>,
    S: Supervisor,
{
    let mut state = shared.lock();
    while !state.has_ended {
        state.session.handle_timeout(shared.now());
        let Some((transfer, work)) = state.session.poll_work() else {
            state = match state.session.poll_timeout().map(|at| at.saturating_since(shared.now())) {
                Some(wait) => shared.wake.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0,
                None => shared.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
            continue;
        };
        drop(state);
        let done = card.run(work);
        if let Done::Failed(why) = &done {
            tracing::warn!(why, "update failed; the running slot is unchanged");
        }
        state = shared.lock();
        state.session.handle_done(transfer, done, shared.now());
    }
}

impl<D: BlockDevice + Send + 'static> Maintenance for Service<D> {
    fn slots(&self) -> SlotsStatus {
        self.slots(true)
    }

    fn handle(&self, request: UpdateRequest) -> Result<UpdateStatus, String> {
        // Pieces are many, and change no record.
        let slots = self.slots(!matches!(request, UpdateRequest::Piece { .. }));
        let status = self.shared.lock().session.handle(request, &slots, self.shared.now());
        self.shared.wake.notify_all();
        status
    }

    fn handle_sent(&self) {
        self.shared.lock().session.handle_sent();
        self.shared.wake.notify_all();
    }
}
