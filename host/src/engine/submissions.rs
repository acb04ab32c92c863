//! What callers and the progress thread share: work that was submitted, and how it ended.
//!
//! Callers hold the lock of this queue, never that of the communicator, to submit work, to test and to wait. So none of
//! these waits for an operation but the one that it is for. Its invariants are those of [`super::queue`].

use super::error::{Error, StartError};
use super::options::Outstanding;
use super::queue::{self, Bell, Kind, Queue, Refusal};
use super::task::{Finished, Refused, Work};
use crate::exec::message::POSTS_MAX;
use crate::transport::packets::MAX_OPS;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

pub(crate) use queue::Callback;

/// The work of a communicator whose progress is a thread's.
pub(super) type Submissions = Queue<Work, Finished, Error, SocketBell>;

/// Work that was submitted and has not been begun.
pub(super) type Submission = queue::Submission<Work>;

/// A descriptor that is readable when there is news, for a thread that polls sockets.
pub(super) struct SocketBell(OwnedFd);

impl Bell for SocketBell {
    fn ring(&self) {
        // A bell that is full has been rung.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    fn clear(&self) {
        // Nothing to read is no error.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl Kind {
    const fn of(work: &Work) -> Self {
        match work {
            Work::Operation(_) => Self::Operation,
            Work::Message(_) => Self::Message,
        }
    }

    /// The number of submissions of this kind that may be open.
    const fn limit(self) -> usize {
        match self {
            Self::Operation => MAX_OPS,
            Self::Message => POSTS_MAX,
        }
    }
}

impl Submissions {
    /// # Errors
    /// The system's, if there is no descriptor.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self::with_bell(SocketBell(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?)))
    }

    /// Submit work, which must end within `limit`. At the limit of open submissions, wait for room until then.
    ///
    /// # Errors
    /// [`Error::TooManyInFlight`], or the error that the thread ended with; each with the work.
    pub(super) fn submit(&self, work: Work, limit: Duration) -> Result<u64, Refused> {
        let (kind, len_bytes) = (Kind::of(&work), work.len_bytes());
        self.push(kind, work, len_bytes, kind.limit(), limit).map_err(|(refusal, buffer)| {
            let error = match refusal {
                Refusal::Full => Error::TooManyInFlight { limit: kind.limit(), waited: limit },
                Refusal::Ended(Error::Left) => Error::Left,
                Refusal::Ended(ended) => Error::Ended(Box::new(ended)),
            };
            Box::new(StartError { error, buffer })
        })
    }

    /// Wait until a submission has ended, and return how.
    pub(super) fn wait(&self, id: u64) -> Finished {
        let again = || Finished::Operation(None, Err(Error::Argument("this was waited for before".into())));
        self.wait_for(id).unwrap_or_else(again)
    }

    /// Return what has not been waited for, or not ended.
    pub(super) fn outstanding(&self) -> Outstanding {
        let mut outstanding = Outstanding::default();
        for (kind, len_bytes) in self.held() {
            match kind {
                Kind::Operation => outstanding.operations += 1,
                Kind::Message => outstanding.messages += 1,
            }
            outstanding.bytes += len_bytes;
        }
        outstanding
    }

    /// Return the descriptor that is readable when there is news for the thread.
    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.0.as_fd()
    }

    /// The thread has ended, with everything that it had begun: what is left, and what comes, ends with `error`.
    pub(super) fn close(&self, error: &Error) {
        self.close_with(error, || Finished::Operation(None, Err(error.clone())));
    }
}
