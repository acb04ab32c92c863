//! The straggler policy: how long an operation waits for late ranks, and what happens then (PROTOCOL 10).
//!
//! The time limit travels with the operation through its tree. The root alone decides, once, before the first result.
//! This works in trees of devices with one shard and at most 256 ranks, over packets, zero-copy or both. Elsewhere
//! [`Straggler::Partial`] is rejected, and [`Straggler::Deadline`] becomes the call's deadline, which does not name the
//! stragglers.
//!
//! Invariants:
//! - An operation excludes ranks only if it asked for that, and its outcome names them.
//! - An excluded rank is removed from the communicator: its calls end with [`Error::Excluded`]. The others continue in
//!   the tree, which `auto` takes from then on. A call that needs an excluded rank ends with [`Error::Stragglers`].
//! - Once ranks are excluded, the loss of a tree or a rank is not recovered, because recovery needs all ranks: the
//!   communicator ends with the error of the loss. So no two ranks get results over different members.

use super::config::JoinConfig;
use super::error::Error;
use super::options::{CallOptions, Straggler};
use super::tree_end::TreeEnd;
use crate::select::{Algo, Explanation, RuledOut};
use std::time::Duration;
use sumac_hal::op::{Collective, OpDesc, Path};
use sumac_hal::wire::{RankMask, StragglerLimit};

/// Why an operation does not support [`Straggler::Partial`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unsupported {
    Schedule,
    AllGather,
    Shards,
    Ranks,
}

impl Unsupported {
    const fn text(self) -> &'static str {
        match self {
            Self::Schedule => "only the root of a tree can decide which ranks take part",
            Self::AllGather => "no other rank has the block of a missing rank",
            Self::Shards => "the devices have several shards, which do not decide together",
            Self::Ranks => "rank masks hold at most 256 ranks",
        }
    }
}

/// The policies of one call: those of its options, else of the configuration.
pub(super) struct Policy<'c> {
    straggler: Straggler,
    options: &'c CallOptions,
    config: &'c JoinConfig,
    tree: &'c TreeEnd,
    /// The maximum number of shards of the tree's devices.
    shards: u16,
}

impl<'c> Policy<'c> {
    pub(super) fn new(options: &'c CallOptions, config: &'c JoinConfig, (tree, shards): (&'c TreeEnd, u16)) -> Self {
        Self { straggler: options.straggler.unwrap_or(config.straggler), options, config, tree, shards }
    }

    /// Return why the tree does not support a straggler limit, if it does not.
    fn partial_unsupported(&self) -> Option<Unsupported> {
        if self.shards > 1 {
            return Some(Unsupported::Shards);
        }
        (self.config.world as usize > RankMask::RANKS).then_some(Unsupported::Ranks)
    }

    /// Return the straggler limit that travels with an operation through the tree; `None` if it waits until the
    /// deadline.
    pub(super) fn limit(&self) -> Option<StragglerLimit> {
        let (after, cuts) = match self.straggler {
            Straggler::Wait => return None,
            Straggler::Deadline(after) => (after, false),
            Straggler::Partial(after) => (after, true),
        };
        let us = u32::try_from(after.as_micros()).unwrap_or(u32::MAX);
        self.partial_unsupported().is_none().then_some(StragglerLimit { us, cuts })
    }

    /// Return the timeout of a call. It includes the straggler limit where no tree enforces that.
    pub(super) fn timeout(&self) -> Duration {
        let limit = self.options.deadline.unwrap_or(self.config.deadline);
        match self.straggler {
            Straggler::Deadline(after) if !self.tree.is_there() || self.partial_unsupported().is_some() => {
                limit.min(after)
            }
            _ => limit,
        }
    }

    /// Return the algorithms to select among for an operation: only the tree if the policy is [`Straggler::Partial`],
    /// or if ranks are excluded and the algorithm is left open.
    ///
    /// # Errors
    /// [`Error::NotPossible`] if the policy is not supported.
    pub(super) fn algo(&self, desc: &OpDesc) -> Result<Algo, Error> {
        let algo = self.options.algo.unwrap_or(self.config.algo);
        if !matches!(self.straggler, Straggler::Partial(_)) {
            return Ok(if self.is_without_excluded(algo, desc) { Algo::Tree } else { algo });
        }
        let why = match (algo, desc.collective) {
            (Algo::Auto | Algo::Tree, Collective::AllGather) => Some(Unsupported::AllGather),
            (Algo::Auto | Algo::Tree, _) => self.partial_unsupported(),
            _ => Some(Unsupported::Schedule),
        };
        let path = if matches!(algo, Algo::Auto) { Path::Tree.name() } else { algo.name() };
        match why {
            None => Ok(Algo::Tree),
            Some(why) => Err(Error::NotPossible(RuledOut::Partial { path, why: why.text() })),
        }
    }

    /// Return whether an operation of which the algorithm is left open goes on without excluded ranks, which only the
    /// tree can do.
    fn is_without_excluded(&self, algo: Algo, desc: &OpDesc) -> bool {
        algo == Algo::Auto && desc.collective.is_offloadable() && !self.tree.excluded_ranks().is_empty()
    }

    /// Rule out the candidates that do not support the straggler policy.
    pub(super) fn apply(&self, desc: &OpDesc, found: Explanation) -> Explanation {
        if self.is_without_excluded(found.requested, desc) {
            return rule_out(found, None);
        }
        if !matches!(self.straggler, Straggler::Partial(_)) || self.config.world == 1 {
            return found;
        }
        let of_tree = if desc.collective == Collective::AllGather {
            Some(Unsupported::AllGather)
        } else {
            self.partial_unsupported()
        };
        rule_out(found, of_tree)
    }
}

/// Rule out every path that does not support [`Straggler::Partial`]: host collectives, and the tree if there is a
/// reason.
fn rule_out(mut found: Explanation, of_tree: Option<Unsupported>) -> Explanation {
    for candidate in &mut found.candidates {
        let why = if candidate.path == Path::Tree { of_tree } else { Some(Unsupported::Schedule) };
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
    use crate::select::{Candidate, Origin};

    fn found(requested: Algo) -> Explanation {
        let candidate = |path| Candidate { path, cost_s: Ok(1.0) };
        let candidates = [Path::Tree, Path::Ring].map(candidate).to_vec();
        let origin = Origin::Emulator;
        Explanation { requested, candidates, chosen: Some(Path::Ring), overridden: None, transport: None, origin }
    }

    #[test]
    fn partial_policy_selects_the_tree_and_names_why_others_are_ruled_out() {
        assert_eq!(rule_out(found(Algo::Auto), None).chosen, Some(Path::Tree), "not the cheapest");
        let ring = rule_out(found(Algo::Ring), None);
        assert!(
            ring.chosen.is_none() && ring.refusal().is_some_and(|why| why.to_string().contains("the root of a tree"))
        );
        let sharded = rule_out(found(Algo::Auto), Some(Unsupported::Shards));
        assert_eq!(sharded.chosen, None);
        assert!(sharded.to_string().contains("ruled out: tree cannot complete without late ranks"), "{sharded}");
    }
}
