//! How a rank left its job.

use super::error::Error;
use std::time::Duration;

/// How a rank left its job ([`Communicator::leave_within`](crate::Communicator::leave_within)).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Departure {
    /// All ranks have the results of all operations in the tree that this rank took part in, and what it sent to them.
    Clean,
    /// It is unknown whether all ranks have them: the time limit passed. Other ranks may lose an operation that
    /// completed here, if a device of the tree dies now or if they have yet to receive what this rank sent to them;
    /// they get an error ([`Error::RanksFailed`], or the loss of the tree).
    Unconfirmed {
        /// How long this rank waited.
        waited: Duration,
    },
    /// The communicator had ended before, or a started operation failed.
    Failed(Error),
}
