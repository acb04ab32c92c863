//! A rank's vote on an offered tree, at the call where all ranks migrate: whether it asks for the tree, and what the
//! votes of all ranks mean. Either all ranks migrate, or none does.
//!
//! The view may change while ranks vote, because some wait here for others that are still in earlier calls. Then all
//! have the result of that change, and the vote decides nothing.
#![cfg_attr(not(feature = "snapshot"), expect(unreachable_pub, reason = "simulators of other crates name it"))]

#[cfg(feature = "planted")]
use sumac_hal::planted::Bug;

/// What a rank does after the vote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Continue on the new tree.
    Migrate,
    /// Continue as before.
    Stay,
    /// The view has changed meanwhile: continue with its result.
    Superseded,
}

/// A rank's vote, from the agreed call to the verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigrationVote {
    asks: bool,
    /// The number of trees that this rank had recovered or migrated from.
    trees: u32,
    /// Its vote, and its view of the job then.
    own: (u64, u32),
    #[cfg(feature = "planted")]
    bug: Option<Bug>,
}

impl MigrationVote {
    /// Vote on a tree that is `offered` with a view, at a rank that knows this view of the job and has recovered or
    /// migrated from this many trees. The controller that offered it may have disconnected.
    pub(crate) const fn new(offered: u32, job_view: u32, trees: u32, is_cut_off: bool) -> Self {
        Self {
            asks: job_view <= offered && !is_cut_off,
            trees,
            own: (0, job_view),
            #[cfg(feature = "planted")]
            bug: None,
        }
    }

    /// Plant a bug.
    #[cfg(feature = "planted")]
    pub(crate) const fn plant(&mut self, bug: Option<Bug>) {
        self.bug = bug;
    }

    /// Return whether to ask the controller for the tree: the offer is that of the present controller.
    pub const fn asks(&self) -> bool {
        self.asks
    }

    /// Cast the vote: the number of the group that this rank has found plus one, or 0. Its view of the job is now
    /// `job_view`.
    pub const fn cast(&mut self, group: u64, job_view: u32) {
        self.own = (group, job_view);
    }

    /// Return what this rank tells the others.
    pub const fn own(&self) -> u64 {
        self.own.0
    }

    /// Return what the votes of all ranks, by rank, mean at a rank that has now recovered or migrated from this many
    /// trees.
    pub fn verdict(&self, votes: &[u64], trees: u32) -> Verdict {
        if trees != self.trees {
            Verdict::Superseded
        } else if self.is_agreed(votes) {
            Verdict::Migrate
        } else {
            Verdict::Stay
        }
    }

    /// Return why this rank declines the tree that it has found, if it does. Its view of the job is now `job_view`: a
    /// later one has another tree, or none.
    pub fn declines(&self, votes: &[u64], job_view: u32) -> Option<String> {
        if self.own.0 == 0 || self.own.1 != job_view || self.is_agreed(votes) {
            return None;
        }
        let without = votes.iter().position(|&group| group == 0);
        Some(
            without
                .map_or_else(|| "ranks were given different trees".into(), |rank| format!("rank {rank} is not in it")),
        )
    }

    fn is_agreed(&self, votes: &[u64]) -> bool {
        let is_own = |&group: &u64| group != 0 && group == self.own.0;
        self.own.0 != 0 && (sumac_hal::planted!(self, LoneMigration) || votes.iter().all(is_own))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vote(group: u64) -> MigrationVote {
        let mut vote = MigrationVote::new(3, 2, 1, false);
        vote.cast(group, 4);
        vote
    }

    #[test]
    fn tree_is_asked_for_only_from_the_controller_that_offered_it() {
        assert!(MigrationVote::new(3, 3, 0, false).asks());
        assert!(!MigrationVote::new(3, 4, 0, false).asks());
        assert!(!MigrationVote::new(3, 3, 0, true).asks());
    }

    #[test]
    fn ranks_migrate_only_if_all_were_given_the_same_tree() {
        assert_eq!(vote(7).verdict(&[7, 7, 7], 1), Verdict::Migrate);
        assert_eq!(vote(7).verdict(&[7, 0, 7], 1), Verdict::Stay);
        assert_eq!(vote(7).verdict(&[7, 8, 7], 1), Verdict::Stay);
        assert_eq!(vote(0).verdict(&[0, 0, 0], 1), Verdict::Stay);
    }

    #[test]
    fn view_change_during_the_vote_supersedes_it() {
        assert_eq!(vote(7).verdict(&[7, 7], 2), Verdict::Superseded);
    }

    #[test]
    fn found_tree_is_declined_with_the_reason_that_others_lack_it() {
        assert_eq!(vote(7).declines(&[7, 7], 4), None);
        assert_eq!(vote(7).declines(&[7, 0], 4).as_deref(), Some("rank 1 is not in it"));
        assert_eq!(vote(7).declines(&[7, 8], 4).as_deref(), Some("ranks were given different trees"));
        assert_eq!(vote(7).declines(&[7, 0], 5), None, "it is of an earlier view");
        assert_eq!(vote(0).declines(&[7, 0], 4), None, "it has found none");
    }
}
