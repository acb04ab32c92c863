//! How long bytes take over the cables of a job, for the choice between its tree and host algorithms.

use super::cost::byte_s;
use super::index::FabricIndex;
use super::{Limits, Plan, evaluate, ring};
use crate::topo::Fabric;

/// Up to how many ranks the routes of all messages are followed. Beyond, only the cables of hosts count.
const ROUTED_MAX: usize = 64;

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
    let mut ranks_at = vec![0_u32; plan.ranks.len()];
    places.iter().for_each(|&place| ranks_at[place] += 1);
    let at = |(rank, ranks): (&super::PlanRank, &u32)| {
        let link = *rank.path.first()?;
        let messages = f64::from(ranks + limits.pricing.others(link));
        Some(messages * byte_s(fabric.link(link).rate, &limits.pricing.costs))
    };
    plan.ranks.iter().zip(&ranks_at).filter_map(at).fold(0.0, f64::max)
}
