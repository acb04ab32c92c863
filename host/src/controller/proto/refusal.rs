//! Why a controller refuses a rank.

use super::InvalidTenant;
use crate::controller::limits::InvalidName;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use sumac_hal::ids::Rank;
use thiserror::Error;

/// Why a rank cannot join or resume a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum JoinRefusal {
    /// The rank is out of range.
    #[error("{rank} is out of range for a job of {world} ranks; ranks are numbered from 0")]
    InvalidRank {
        /// The rank.
        rank: Rank,
        /// The number of ranks in the job.
        world: u32,
    },
    /// The rank has already joined.
    #[error("{rank} of job {job:?} has already joined")]
    RankTaken {
        /// The rank.
        rank: Rank,
        /// The job.
        job: String,
    },
    /// Ranks of the job disagree on one of its parameters.
    #[error("ranks of job {job:?} disagree on {what}: {first} here, {other} at {rank}")]
    Mismatch {
        /// The job.
        job: String,
        /// The parameter.
        what: String,
        /// The value of the refused rank.
        first: String,
        /// The value of `rank`.
        other: String,
        /// A rank that joined before.
        rank: Rank,
    },
    /// The tenant's name is invalid.
    #[error(transparent)]
    Tenant(#[from] InvalidTenant),
    /// A job of that name is running.
    #[error("job {job:?} is already running; use another name")]
    Running {
        /// The job.
        job: String,
    },
    /// A rank disconnected before all ranks had joined.
    #[error("{rank} of job {job:?} disconnected before all ranks had joined")]
    RankLost {
        /// The rank.
        rank: Rank,
        /// The job.
        job: String,
    },
    /// A rank came back to a restarted controller after the job had resumed without it.
    #[error("{rank} came back too late: job {job:?} has resumed without it and counts it as lost")]
    TooLate {
        /// The rank.
        rank: Rank,
        /// The job.
        job: String,
    },
    /// Too few ranks came back to a restarted controller.
    #[error(
        "only {came} of the {world} ranks of job {job:?} came back to the controller within {waited_s} s; a job \
         resumes with more than half of its ranks"
    )]
    TooFewRanks {
        /// The job.
        job: String,
        /// How many came back, including those that then left.
        came: u32,
        /// The number of ranks in the job.
        world: u32,
        /// How long the first of them waited, in seconds.
        waited_s: u64,
    },
    /// A resuming rank reports a counter beyond what any job reaches.
    #[error("job {job:?} reports {what} {found}; a controller resumes jobs up to {what} {max}: restart the job")]
    CounterTooLarge {
        /// The job.
        job: String,
        /// The counter's name.
        what: String,
        /// The reported value.
        found: u32,
        /// The limit.
        max: u32,
    },
    /// The declared expression of a resuming rank is invalid.
    #[error("the declared expression of job {job:?} is invalid: {reason}")]
    Expression {
        /// The job.
        job: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A name is invalid.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// The job has too many ranks.
    #[error("{world} ranks requested; a job has at most {limit}")]
    TooManyRanks {
        /// The requested number.
        world: u32,
        /// The maximum.
        limit: u32,
    },
    /// The connection has already joined a job.
    #[error("this connection has already joined as {rank} of job {job:?}; open another connection to join again")]
    AlreadyJoined {
        /// The rank.
        rank: Rank,
        /// The job.
        job: String,
    },
    /// A limit of the controller is reached.
    #[error("the controller accepts at most {limit} {what}; start it with a higher limit, or retry later")]
    Limit {
        /// What is limited.
        what: String,
        /// The maximum.
        limit: u64,
    },
    /// The controller uses keys, and the client has none.
    #[error("the controller accepts clients with keys only; name a file with the key in SUMAC_KEY_FILE or --key-file")]
    KeyRequired,
    /// The client's key is not good for its request.
    #[error("a key of {principal} is not good for {request}")]
    KeyScope {
        /// Whom the key stands for.
        principal: String,
        /// What was requested.
        request: String,
    },
    /// The controller is the standby of a pair.
    #[error("the controller is the standby of a pair, {}; give ranks both addresses: SUMAC_CONTROLLER=A,B", match active {
        Some(addr) => format!("whose active controller is {addr}"),
        None => "which has no active controller yet".to_owned(),
    })]
    Standby {
        /// The active controller, if the standby knows of one.
        active: Option<SocketAddr>,
    },
    /// A controller reports to one that has no pair.
    #[error("the controller has no pair; start the first one with --peer and the second one with --standby")]
    NoPair,
    /// Two controllers of a pair are on the same side.
    #[error("two {side} controllers in one pair; start one of them with --peer and the other one with --standby")]
    SameSide {
        /// The side of both: "first" or "second".
        side: String,
    },
    /// A further tree of a job cannot be joined.
    #[error("{job:?} cannot be joined as a tree of another job: {why}")]
    Stripe {
        /// The name of the tree.
        job: String,
        /// The reason.
        why: String,
    },
    /// A rail of a job cannot be joined.
    #[error("{job:?} cannot be joined as a rail of another job: {why}")]
    Rail {
        /// The name of the rail.
        job: String,
        /// The reason.
        why: String,
    },
    /// The shape that the job asks for is not one of its ranks.
    #[error("the shape of job {job:?}: {why}; set SUMAC_SHAPE alike on all ranks, or on none")]
    Shape {
        /// The job.
        job: String,
        /// The reason.
        why: String,
    },
}
