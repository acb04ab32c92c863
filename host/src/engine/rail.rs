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

    /// Start to reduce a short block by the rail's tree, if that waits for nothing. `None`: it has not begun.
    fn start_at_once(&self, part: OpDesc, block: &[u8], options: &CallOptions) -> Option<u64>;

    /// Drive a block that was started at once for a short time. Returns whether it has ended.
    fn drive_briefly(&self, handle: u64, options: &CallOptions) -> bool;

    /// Wait for a block that was started at once, and copy its result.
    ///
    /// # Errors
    /// The rail's.
    fn finish_block(&self, handle: u64, block: &mut [u8], options: &CallOptions) -> Result<Outcome, Error>;

    /// End it with the error that ends the communicator.
    fn end(&self, error: &Error);

    /// Leave it.
    fn leave(&self, limit: Duration) -> Departure;

    /// Return its recoveries so far.
    fn recoveries(&self) -> Recoveries;
}

/// The length up to which a block is short: below, its copies cost less than a thread.
const SHORT_MAX_BYTES: usize = 64 << 10;

/// A short block that has begun, and takes long.
#[derive(Debug, Clone, Copy)]
pub(super) struct Begun {
    handle: u64,
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

    /// Reduce a short block of this rank in place, if that takes a short time. `Err`: it does not, and is to be
    /// continued by [`Self::finish`] if it has begun, as what it has begun says.
    pub(super) fn reduce_briefly(
        &self,
        part: OpDesc,
        block: &mut [u8],
        options: &CallOptions,
    ) -> Result<Result<Outcome, Error>, Option<Begun>> {
        if block.len() > SHORT_MAX_BYTES {
            return Err(None);
        }
        let handle = self.core.start_at_once(part, block, options).ok_or(None)?;
        match self.core.drive_briefly(handle, options) {
            true => Ok(self.core.finish_block(handle, block, options)),
            false => Err(Some(Begun { handle })),
        }
    }

    /// Reduce a block of this rank in place, of which this much has begun.
    ///
    /// # Errors
    /// The rail's.
    pub(super) fn finish(
        &self,
        begun: Option<Begun>,
        part: OpDesc,
        block: &mut [u8],
        options: &CallOptions,
    ) -> Result<Outcome, Error> {
        match begun {
            Some(Begun { handle }) => self.core.finish_block(handle, block, options),
            None => self.core.reduce(part, block, options),
        }
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
