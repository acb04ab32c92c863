//! A rank's rail: the ranks with the same place on their servers, as a job of their own ([`super::hybrid`]).
//!
//! This is what the communicator's core holds of it; [`super::rails`] joins it.
//!
//! Invariant: the ranks of a rail are numbered by their servers.

use super::departure::Departure;
use super::error::{Error, OutputState};
use super::notices::Notices;
use super::options::{CallOptions, Outcome, Recoveries};
use super::shares::error_of_whole;
use crate::schedule::Place;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ids::Rank;
use sumac_hal::op::OpDesc;

/// A rail's communicator, behind a lock of its own.
pub(super) trait RailCore: Debug + Send + Sync {
    /// Reduce a block in place by the rail's tree or, if that is lost, between its ranks.
    ///
    /// # Errors
    /// The rail's.
    fn reduce(&self, part: OpDesc, block: &mut [u8], options: &CallOptions) -> Result<Outcome, Error>;

    /// End it with the error that ends the communicator.
    fn end(&self, error: &Error);

    /// Leave it.
    fn leave(&self, limit: Duration) -> Departure;

    /// Return its recoveries so far.
    fn recoveries(&self) -> Recoveries;
}

/// A rank's rail.
#[derive(Debug)]
pub(crate) struct Rail {
    core: Box<dyn RailCore>,
    notices: Arc<Notices>,
    /// The number of ranks on each server.
    each: u32,
}

impl Rail {
    /// Hold the rail of a rank on servers of `each` ranks.
    pub(super) const fn new(core: Box<dyn RailCore>, notices: Arc<Notices>, each: u32) -> Self {
        Self { core, notices, each }
    }

    /// Reduce a block of this rank in place.
    ///
    /// # Errors
    /// The rail's.
    pub(super) fn reduce(&self, part: OpDesc, block: &mut [u8], options: &CallOptions) -> Result<Outcome, Error> {
        self.core.reduce(part, block, options)
    }

    /// Return the notices of the rail.
    pub(crate) const fn notices(&self) -> &Arc<Notices> {
        &self.notices
    }

    /// The communicator's operation has failed: the rail's, which runs, need not wait.
    pub(super) fn interrupt(&self, error: &Error) {
        match error.abort_reason() {
            Some(reason) => self.notices().job_aborted(reason),
            None => self.notices().cancel(),
        }
    }

    /// End the rail with the error that ends the communicator.
    pub(super) fn end(&self, error: &Error) {
        self.interrupt(error);
        self.core.end(error);
    }

    /// Leave the rail; returns how.
    pub(super) fn leave(&self, limit: Duration) -> Departure {
        self.core.leave(limit)
    }

    /// Add the recoveries of the rail.
    pub(super) fn recoveries(&self, own: Recoveries) -> Recoveries {
        let of = self.core.recoveries();
        Recoveries { count: own.count + of.count, time: own.time + of.time, bytes: own.bytes + of.bytes }
    }

    /// Return the error of a block as one of the whole operation. Which call a lost rank fails, the communicator's
    /// ranks agree on: here is only a rank of theirs.
    pub(super) fn error_of_whole(&self, error: Error, descs: (&OpDesc, &OpDesc), place: Place) -> Error {
        let whole = |rank: Rank| Rank(rank.0 * self.each + place.rank().0 % self.each);
        match error.ending() {
            Error::Ended(error) => self.error_of_whole(*error, descs, place),
            Error::RanksFailed { ranks, .. } if !ranks.is_empty() => Error::RankLost { rank: whole(ranks[0]) },
            Error::RankLost { rank } => Error::RankLost { rank: whole(rank) },
            // It is out of reach for the communicator, too.
            Error::Partitioned { .. } => {
                let server = place.rank().0 / self.each;
                Error::RankLost { rank: whole(Rank(u32::from(server == 0))) }
            }
            error => error_of_whole(error, descs, |call| call).with_output(OutputState::Unspecified),
        }
    }
}
