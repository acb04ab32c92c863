//! Why a controller does not take a rank in.

use super::BadTenant;
use crate::controller::limits::BadName;
use serde::{Deserialize, Serialize};
use sumac_hal::ids::Rank;
use thiserror::Error;

/// Why a rank can't join.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum JoinRefusal {
    /// Not a rank of the world.
    #[error("{rank} of {world}: ranks are numbered from 0, and there is at least one")]
    Rank {
        /// The rank.
        rank: Rank,
        /// The world's size.
        world: u32,
    },
    /// The rank is there already.
    #[error("{rank} of job {job:?} is there already")]
    Taken {
        /// The rank.
        rank: Rank,
        /// The job.
        job: String,
    },
    /// Ranks disagree on what the job is.
    #[error("ranks of job {job:?} disagree on {what}: {first} here, {other} at {rank}")]
    Disagree {
        /// The job.
        job: String,
        /// What they disagree on.
        what: String,
        /// The first rank's.
        first: String,
        /// The other's.
        other: String,
        /// The other.
        rank: Rank,
    },
    /// The tenant has no proper name.
    #[error(transparent)]
    Tenant(#[from] BadTenant),
    /// A job of that name runs.
    #[error("job {job:?} is running; take another name")]
    Running {
        /// The job.
        job: String,
    },
    /// A rank died before the job was complete.
    #[error("{rank} of job {job:?} is gone before the job was complete")]
    Gone {
        /// The rank.
        rank: Rank,
        /// The job.
        job: String,
    },
    /// A rank of a job from before came back when the others had gone on without it.
    #[error("{rank} came back to job {job:?} too late: the job goes on, and counts it as lost")]
    TooLate {
        /// The rank.
        rank: Rank,
        /// The job.
        job: String,
    },
    /// Too few ranks of a job from before have come back.
    #[error(
        "{came} of the {world} ranks of job {job:?} have come back to the controller within {waited_s} s; it goes on with \
         more than half of them"
    )]
    Minority {
        /// The job.
        job: String,
        /// How many came, those that then left included.
        came: u32,
        /// How many it has.
        world: u32,
        /// How long the first of them waited, in seconds.
        waited_s: u64,
    },
    /// A rank of a job from before counts further than any job comes.
    #[error("job {job:?} is said to be at {what} {found}; a controller takes over up to {max}: begin it anew")]
    Count {
        /// The job.
        job: String,
        /// What is counted.
        what: String,
        /// How far it is said to be.
        found: u32,
        /// The limit.
        max: u32,
    },
    /// What the rank says that its declared order means is no expression over its ranks.
    #[error("the expression of job {job:?} makes no sense: {reason}")]
    Expression {
        /// The job.
        job: String,
        /// Why.
        reason: String,
    },
    /// Something has no proper name.
    #[error(transparent)]
    Name(#[from] BadName),
    /// More ranks than a job may have.
    #[error("{world} ranks; a job has at most {limit}")]
    Ranks {
        /// Asked for.
        world: u32,
        /// The most.
        limit: u32,
    },
    /// The connection stands for another rank already.
    #[error("this connection stands for {rank} of job {job:?}; join on a connection of its own")]
    Member {
        /// The rank.
        rank: Rank,
        /// The job.
        job: String,
    },
    /// The controller has as many as it takes.
    #[error("the controller takes at most {limit} {what}; start it with a higher limit, or come back later")]
    Limit {
        /// Of what.
        what: String,
        /// The most.
        limit: u64,
    },
}
