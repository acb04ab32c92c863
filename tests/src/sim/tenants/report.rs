//! Reports of tenants runs.

use super::draw::Tenancy;
use super::job::End;
use crate::oracle::weight;
use crate::sim::coverage::Coverage;
use crate::sim::report::Extents;
use std::time::Duration;

/// Counts of one run, or the sum of several.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TenantReport {
    /// Hash over the links' packets, the number of messages, and the controller's status.
    pub log_hash: u64,
    /// Virtual time.
    pub took: Duration,
    /// Maximum number of messages in flight.
    pub messages_max: u64,
    /// Ranks with all results.
    pub completed: u64,
    /// Ranks whose job has lost one of them.
    pub ranks_failed: u64,
    /// Ranks that were killed.
    pub killed: u64,
    /// Ranks that could not join.
    pub not_joined: u64,
    /// Trees assigned to ranks.
    pub placed: u64,
    /// Joins without a tree, each with a reason.
    pub unplaced: u64,
    /// Operations run as host collectives, counted once per rank.
    pub by_host_collectives: u64,
    /// Calls that were refused, and made again.
    pub refused: u64,
    /// Handles of started operations that were dropped.
    pub dropped: u64,
    /// Lost trees, counted once per rank.
    pub recoveries: u64,
    /// Covered marks.
    pub seen: Coverage,
    /// Sizes of the runs.
    pub extents: Extents,
}

impl TenantReport {
    pub(super) fn of(plan: &Tenancy) -> Self {
        let ranks = plan.jobs.iter().map(|job| job.world as u64).sum();
        let tenants = plan.quotas.len() as u64;
        let extents = Extents::of(plan.capacities.len() as u64, [u64::MAX, 0], ranks, tenants);
        Self { extents, ..Self::default() }
    }

    /// Record the depth of a tree.
    pub(super) fn deepest(&mut self, levels: u32) {
        self.extents.note_levels(levels.into());
    }

    pub(super) fn count_end(&mut self, end: End) {
        *match end {
            End::Done => &mut self.completed,
            End::RanksFailed => &mut self.ranks_failed,
            End::Killed => &mut self.killed,
            End::NotJoined => &mut self.not_joined,
        } += 1;
    }

    /// Add another run's counts.
    pub fn merge(&mut self, other: &Self) {
        self.log_hash = weight(&[self.log_hash, other.log_hash]);
        self.took += other.took;
        self.messages_max = self.messages_max.max(other.messages_max);
        for (sum, n) in self.counts().into_iter().zip(other.clone().counts()) {
            *sum.1 += *n.1;
        }
        self.seen.merge(&other.seen);
        self.extents.merge(&other.extents);
    }

    /// Return all counts, by name.
    pub fn counts(&mut self) -> [(&'static str, &mut u64); 10] {
        [
            ("ends: complete", &mut self.completed),
            ("ends: ranks failed", &mut self.ranks_failed),
            ("ends: killed", &mut self.killed),
            ("ends: not joined", &mut self.not_joined),
            ("places in trees", &mut self.placed),
            ("reasons for none", &mut self.unplaced),
            ("host collectives", &mut self.by_host_collectives),
            ("calls refused", &mut self.refused),
            ("handles dropped", &mut self.dropped),
            ("trees lost", &mut self.recoveries),
        ]
    }
}
