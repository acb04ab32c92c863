//! Communicators with a tree for each rail.
//!
//! Rail j of a communicator is the ranks with place j on their servers. Each is a job of its own, with its group, its
//! epochs and its recovery, like a [stripe](super::stripes). Its name follows from the job's ([`rail_name`]).

use crate::controller::limits::derived_name;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The job and the number of a rail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RailOf {
    /// The job whose ranks these are.
    pub job: String,
    /// The place of these ranks on their servers.
    pub index: u32,
}

/// Return the name of a job's rail.
pub fn rail_name(job: &str, index: u32) -> String {
    derived_name(job, &format!("/rail{index}"))
}

/// Which rails of a job its ranks also join.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum RailJobs {
    /// None.
    #[default]
    None,
    /// Each rank that of its place on its server, for `hybrid`.
    All,
    /// The first rank of each server that of all of them, for `rab`.
    Leaders,
}

impl fmt::Display for RailJobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::None => "none",
            Self::All => "all",
            Self::Leaders => "that of the leaders",
        })
    }
}
