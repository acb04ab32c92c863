//! How long bytes take over the cables of a job, for the choice between its tree and host algorithms.

use super::cost::byte_s;
use super::index::FabricIndex;
use super::{Limits, Plan, evaluate, ring};
use crate::topo::{Fabric, LinkId};
use std::collections::BTreeMap;

/// Up to how many ranks the routes of all messages are followed. Beyond, only the cables of hosts count: on a fabric of
/// 100,000 hosts, 64 ranks below different leaves took 0.3 s.
const ROUTED_MAX: usize = 16;

/// Seconds per byte over the busiest cable of each algorithm. See [`LinkFacts`](crate::select::LinkFacts).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CableTimes {
    pub(crate) tree_s: f64,
    pub(crate) ring_s: f64,
    pub(crate) halving_doubling_s: f64,
    pub(crate) doubling_s: f64,
}

impl CableTimes {
    pub(super) fn new(
        fabric: &Fabric,
        index: &FabricIndex,
        (plan, places): (&Plan, &[usize]),
        limits: &Limits,
    ) -> Option<Self> {
        if index.unrated > 0 {
            return None;
        }
        let tree_s = evaluate::Evaluation::new(fabric, plan, limits).busiest_byte_s();
        if places.len() > ROUTED_MAX {
            let own = own_cables_s(fabric, (plan, places), limits);
            return Some(Self { tree_s, ring_s: own, halving_doubling_s: own, doubling_s: own });
        }
        let all = ring::algorithms_at(fabric, index, (plan, places), &limits.pricing)?;
        let of = |name| all.iter().find(|one| one.name == name).map_or(0.0, ring::HostAlgorithm::byte_s);
        let [ring_s, halving_doubling_s, doubling_s] = ["ring", "halving-doubling", "recursive doubling"].map(of);
        Some(Self { tree_s, ring_s, halving_doubling_s, doubling_s })
    }
}

/// The seconds per byte of the busiest cable of a host, if each rank sends to another host.
fn own_cables_s(fabric: &Fabric, (plan, places): (&Plan, &[usize]), limits: &Limits) -> f64 {
    let mut messages: BTreeMap<LinkId, u32> = BTreeMap::new();
    for link in places.iter().filter_map(|&place| plan.ranks[place].path.first()) {
        *messages.entry(*link).or_default() += 1;
    }
    let time = |(link, messages): (LinkId, u32)| {
        f64::from(messages + limits.pricing.others(link)) * byte_s(fabric.link(link).rate, &limits.pricing.costs)
    };
    messages.into_iter().map(time).fold(0.0, f64::max)
}
