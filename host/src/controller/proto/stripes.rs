//! Communicators on several trees.
//!
//! Each further tree of a job is a job of its own, a **stripe**: it has its group, its epochs and its recovery, so that
//! nothing that happens to one tree touches another. Its name follows from the job's ([`stripe_name`]). The controller
//! plans all trees when the job starts and says in each rank's [`Membership`](super::Membership) how many there are;
//! then the ranks join the stripes.

use crate::controller::limits::derived_name;
use serde::{Deserialize, Serialize};

/// The job and the place of a stripe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripeOf {
    /// The job whose operations it takes a share of.
    pub job: String,
    /// The tree's number. The job's own tree has 0.
    pub index: u8,
}

/// How a job's operations may be spread over trees.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Striping {
    /// The relative rate of each tree, the job's own first. With fewer than two, there are no stripes.
    pub shares: Vec<u16>,
    /// Why there are no more trees, if more were requested.
    pub reason: Option<String>,
    /// Where this rank enters each tree, the job's own first. Empty if it enters all of them at its host.
    pub rails: Vec<RailGrant>,
}

/// The adapter through which a rank enters a tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RailGrant {
    /// Its name in the fabric.
    pub adapter: String,
    /// Its place among the adapters of the server, in the fabric's order.
    pub index: u16,
}

/// Return the name of a job's stripe.
pub fn stripe_name(job: &str, index: u8) -> String {
    derived_name(job, &format!("/tree{index}"))
}
