//! Communicators with a tree for each rail.
//!
//! Rail j of a communicator is the ranks with place j on their servers. Each is a job of its own, with its group, its
//! epochs and its recovery, like a [stripe](super::stripes). Its name follows from the job's ([`rail_name`]).

use crate::controller::limits::derived_name;
use serde::{Deserialize, Serialize};

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
