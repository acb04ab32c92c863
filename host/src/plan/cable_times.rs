//! How long bytes take over the cables of a job, for the choice between its tree and host algorithms.

use super::cost::byte_s;
use super::index::FabricIndex;
use super::{Limits, Plan, counted, evaluate, ring};
use crate::schedule::Shape;
use crate::topo::{Fabric, LinkId};
use std::collections::BTreeMap;
use sumac_hal::op::Path;

/// Up to how many ranks times switches the routes of all messages are followed: 16 ranks on a fabric of 100,000 hosts,
/// and 256 on one of 10,000. Beyond, only the cables of hosts count: 64 ranks below different leaves took 0.3 s on
/// 100,000.
const ROUTED_MAX: usize = 1 << 17;
/// Up to how many messages an algorithm's routes are followed: halving-doubling of 256 ranks has 4096.
const MESSAGES_MAX: f64 = 4096.0;

/// Seconds per byte over the busiest cable of each algorithm. See [`LinkFacts`](crate::select::LinkFacts).
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CableTimes {
    pub(crate) tree_s: f64,
    /// Of a byte that a rank sends.
    pub(crate) schedules_s: Vec<(Path, f64)>,
    /// The same by an algorithm that is not listed.
    pub(crate) others_s: f64,
}

impl CableTimes {
    pub(super) fn new(
        fabric: &Fabric,
        index: &FabricIndex,
        (plan, places, shape): (&Plan, &[usize], Shape),
        limits: &Limits,
    ) -> Option<Self> {
        if index.unrated > 0 {
            return None;
        }
        let tree_s = evaluate::Evaluation::new(fabric, plan, limits).busiest_byte_s();
        if places.len() * fabric.switches().len() > ROUTED_MAX {
            let others_s = own_cables_s(fabric, (plan, places), limits);
            return Some(Self { tree_s, schedules_s: Vec::new(), others_s });
        }
        let mut job = ring::Job::new(fabric, index, (plan, places), &limits.pricing);
        let mut all = ring::algorithms(&mut job)?;
        all.extend(counted::counted(&mut job, shape, &all, MESSAGES_MAX)?);
        let schedules_s: Vec<_> = all.iter().map(|algorithm| (algorithm.path, algorithm.byte_s())).collect();
        let doubling = schedules_s.iter().find(|(path, _)| *path == Path::RecursiveDoubling).map(|(_, byte_s)| *byte_s);
        // Of many ranks, partners that change are not followed.
        let others_s = doubling.unwrap_or_else(|| own_cables_s(fabric, (plan, places), limits));
        Some(Self { tree_s, schedules_s, others_s })
    }

    /// Seconds of a byte that a rank sends by an algorithm.
    #[cfg(test)]
    pub(super) fn schedule_s(&self, path: Path) -> f64 {
        self.schedules_s.iter().find(|(known, _)| *known == path).map_or(self.others_s, |(_, byte_s)| *byte_s)
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
