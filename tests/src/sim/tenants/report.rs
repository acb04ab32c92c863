//! What worlds of tenants did.

use super::draw::Tenancy;
use super::job::End;
use crate::oracle::weight;
use crate::sim::coverage::Seen;
use crate::sim::report::Extents;
use std::time::Duration;

/// What a run did; of several, added up.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TenantReport {
    /// Hash over the links' packets, how many letters there were, and what the controller said of itself.
    pub log_hash: u64,
    /// Virtual time.
    pub took: Duration,
    /// The most letters on their way at once.
    pub letters_most: u64,
    /// Ranks with all results.
    pub completed: u64,
    /// Ranks whose job has lost one of them.
    pub ranks_failed: u64,
    /// Ranks that were killed.
    pub killed: u64,
    /// Ranks that could not join.
    pub not_joined: u64,
    /// Places in trees that ranks were told.
    pub placed: u64,
    /// Reasons for there being none.
    pub unplaced: u64,
    /// Operations by schedules, counted once a rank.
    pub by_schedules: u64,
    /// Trees lost, counted once a rank.
    pub repairs: u64,
    /// What was met.
    pub seen: Seen,
    /// How large worlds were.
    pub extents: Extents,
}

impl TenantReport {
    pub(super) fn of(plan: &Tenancy) -> Self {
        let ranks = plan.jobs.iter().map(|job| job.world as u64).sum();
        let tenants = plan.quotas.len() as u64;
        let extents = Extents::of(plan.rooms.len() as u64, [u64::MAX, 0], ranks, tenants);
        Self { extents, ..Self::default() }
    }

    /// Note how deep a tree was.
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

    /// Add another run's.
    pub fn merge(&mut self, other: &Self) {
        self.log_hash = weight(&[self.log_hash, other.log_hash]);
        self.took += other.took;
        self.letters_most = self.letters_most.max(other.letters_most);
        for (sum, n) in self.counts().into_iter().zip(other.clone().counts()) {
            *sum.1 += *n.1;
        }
        self.seen.merge(&other.seen);
        self.extents.merge(&other.extents);
    }

    /// Return what was counted, by name.
    pub fn counts(&mut self) -> [(&'static str, &mut u64); 8] {
        [
            ("ends: complete", &mut self.completed),
            ("ends: ranks failed", &mut self.ranks_failed),
            ("ends: killed", &mut self.killed),
            ("ends: not joined", &mut self.not_joined),
            ("places in trees", &mut self.placed),
            ("reasons for none", &mut self.unplaced),
            ("by schedules", &mut self.by_schedules),
            ("trees lost", &mut self.repairs),
        ]
    }
}
