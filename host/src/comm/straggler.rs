//! Ranks that come late to an operation: how long the others wait for them, and what then (PROTOCOL 10).
//!
//! The limit travels with the operation through its tree, whose root alone decides, once, before the first result. So it
//! is for trees of devices of one shard, and of 256 ranks at most, by packets, by reference or both. Elsewhere
//! [`Straggler::Partial`] is not possible, and says so; [`Straggler::Deadline`] is the deadline of the call there, which
//! names nobody.
//!
//! Invariants:
//! - An operation that does not ask for it never leaves out a rank; one that does says in its outcome whom.
//! - Who has been left out has left the communicator: its calls end with [`Error::Excluded`]. The others go on in the
//!   tree, over who is left; a call that needs who has left ends with [`Error::Stragglers`].
//! - Where ranks have left, a tree or a rank that is lost is not made good, as that takes all ranks: the communicator ends
//!   with the error of the loss. No rank then gets a result over other members than another.

use super::core::Core;
use super::error::Error;
use super::{CallOptions, Outcome};
use crate::select::{Algo, Explanation, RuledOut};
use crate::transport::packets::{OpId, Verdict};
use std::time::Duration;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, OpDesc, Path};
use sumac_hal::wire::{Limit, RankMask};

/// What becomes of an operation to which some ranks come late. The same at all ranks; ranks that differ get
/// [`Error::Mismatch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Straggler {
    /// It waits for them until its deadline.
    #[default]
    Wait,
    /// It fails for all, with [`Error::Stragglers`], this long after the first rank has come to it.
    Deadline(Duration),
    /// It is completed without them, this long after the first rank has come to it: [`Outcome::missing`] says who has no
    /// part in the result. They leave the communicator, with [`Error::Excluded`].
    ///
    /// Give calls a longer deadline than that. Who comes in time and is late in the middle of the operation is waited for.
    Partial(Duration),
}

/// Why an operation can't go on without ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WhyNot {
    Schedule,
    AllGather,
    Shards,
    Ranks,
}

impl WhyNot {
    const fn text(self) -> &'static str {
        match self {
            Self::Schedule => "only the root of a tree can decide who has a part in it",
            Self::AllGather => "nobody else has the block of a rank that is missing",
            Self::Shards => "the devices have more than one shard, which do not decide together",
            Self::Ranks => "sets of ranks are told of up to 256 ranks",
        }
    }
}

impl Core {
    fn policy(&self, options: &CallOptions) -> Straggler {
        options.straggler.unwrap_or(self.config.straggler)
    }

    /// Return why no tree can hold back ranks that are late, if it can't.
    fn why_not(&self) -> Option<WhyNot> {
        let shards = self.tree.as_ref().map_or(1, |tree| tree.shards());
        if shards > 1 {
            return Some(WhyNot::Shards);
        }
        (self.config.world as usize > RankMask::RANKS).then_some(WhyNot::Ranks)
    }

    /// Return what goes with an operation through the tree; `None` if it waits for everybody as long as it takes.
    pub(super) fn limit(&self, options: &CallOptions) -> Option<Limit> {
        let (after, cuts) = match self.policy(options) {
            Straggler::Wait => return None,
            Straggler::Deadline(after) => (after, false),
            Straggler::Partial(after) => (after, true),
        };
        let us = u32::try_from(after.as_micros()).unwrap_or(u32::MAX);
        self.why_not().is_none().then_some(Limit { us, cuts })
    }

    /// Return how long a call may take at most, where nobody but the caller looks at the time.
    pub(super) fn patience(&self, options: &CallOptions) -> Duration {
        let limit = options.deadline.unwrap_or(self.config.deadline);
        match self.policy(options) {
            Straggler::Deadline(after) if self.tree.is_none() || self.why_not().is_some() => limit.min(after),
            _ => limit,
        }
    }

    /// Return the algorithm to choose among for an operation: the tree, where it may have to go on without ranks.
    ///
    /// # Errors
    /// [`Error::NotPossible`] if it can't.
    pub(super) fn algo_for(&self, desc: &OpDesc, options: &CallOptions) -> Result<Algo, Error> {
        let algo = options.algo.unwrap_or(self.config.algo);
        if !matches!(self.policy(options), Straggler::Partial(_)) {
            return Ok(algo);
        }
        let why = match (algo, desc.collective) {
            (Algo::Auto | Algo::Tree, Collective::AllGather) => Some(WhyNot::AllGather),
            (Algo::Auto | Algo::Tree, _) => self.why_not(),
            _ => Some(WhyNot::Schedule),
        };
        let path = if matches!(algo, Algo::Auto) { Path::Tree.name() } else { algo.name() };
        match why {
            None => Ok(Algo::Tree),
            Some(why) => Err(Error::NotPossible(RuledOut::Partial { path, why: why.text() })),
        }
    }

    /// Judge the paths anew for an operation that may have to go on without ranks.
    pub(super) fn judge_stragglers(&self, desc: &OpDesc, options: &CallOptions, found: Explanation) -> Explanation {
        if !matches!(self.policy(options), Straggler::Partial(_)) || self.config.world == 1 {
            return found;
        }
        let of_tree = if desc.collective == Collective::AllGather { Some(WhyNot::AllGather) } else { self.why_not() };
        rule_out(found, of_tree)
    }

    /// Return the ranks that have left.
    pub(super) fn gone(&self) -> RankMask {
        self.tree.as_ref().map_or(RankMask::EMPTY, |tree| tree.gone())
    }

    /// Return a rank that is lost, if it is one that had not left.
    pub(super) fn lost_rank(&self) -> Option<Rank> {
        let gone = self.gone();
        self.lost.ranks().into_iter().find(|rank| !gone.contains(*rank))
    }

    /// Keep what is known of an operation that is complete in the tree.
    pub(super) fn keep_verdict(&mut self, op: OpId, verdict: Verdict) {
        // Numbers of a tree that is gone mean nothing any more.
        let view = self.view;
        self.verdicts.retain(|&(of, _), _| of == view);
        self.verdicts.insert((view, op), verdict);
    }

    /// Nobody asks for an operation any more.
    pub(super) fn forget_verdict(&mut self, op: OpId) {
        self.verdicts.remove(&(self.view, op));
    }

    /// Add to an outcome what is known of its operation in the tree.
    pub(super) fn with_verdict(&mut self, op: Option<OpId>, outcome: Outcome) -> Outcome {
        let verdict = op.and_then(|op| self.verdicts.remove(&(self.view, op))).unwrap_or_default();
        Outcome { slowest: verdict.slowest, missing: verdict.missing, ..outcome }
    }
}

/// Rule out what can't go on without ranks: every path but the tree, and the tree where there is a reason.
fn rule_out(mut found: Explanation, of_tree: Option<WhyNot>) -> Explanation {
    for candidate in &mut found.candidates {
        let why = if candidate.path == Path::Tree { of_tree } else { Some(WhyNot::Schedule) };
        if let (Some(why), true) = (why, candidate.cost_s.is_ok()) {
            candidate.cost_s = Err(RuledOut::Partial { path: candidate.path.name(), why: why.text() });
        }
    }
    let tree = found.candidates.iter().find(|candidate| candidate.path == Path::Tree && candidate.cost_s.is_ok());
    let wanted = matches!(found.requested, Algo::Auto | Algo::Tree);
    found.chosen = tree.filter(|_| wanted).map(|candidate| candidate.path);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::Candidate;

    fn found(requested: Algo) -> Explanation {
        let candidate = |path| Candidate { path, cost_s: Ok(1.0) };
        let candidates = [Path::Tree, Path::Ring].map(candidate).to_vec();
        Explanation { requested, candidates, chosen: Some(Path::Ring), overridden: None, attached: None }
    }

    #[test]
    fn only_a_tree_goes_on_without_ranks_and_the_others_say_why() {
        assert_eq!(rule_out(found(Algo::Auto), None).chosen, Some(Path::Tree), "not the cheapest");
        let ring = rule_out(found(Algo::Ring), None);
        assert!(
            ring.chosen.is_none() && ring.refusal().is_some_and(|why| why.to_string().contains("the root of a tree"))
        );
        let sharded = rule_out(found(Algo::Auto), Some(WhyNot::Shards));
        assert_eq!(sharded.chosen, None);
        assert!(sharded.to_string().contains("ruled out: tree can't go on without ranks"), "{sharded}");
    }
}
