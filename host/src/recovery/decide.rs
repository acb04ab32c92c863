//! From the reports of all surviving ranks to the decision about every operation, the same on all of them.

use super::inventory::ChunkInventory;
use super::plan::{Inventories, Plan, Unrecoverable, plan};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use sumac_hal::ids::Rank;

/// A rank's report, part of its promise.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct RankReport {
    /// What it has of the operations in the tree.
    pub(crate) inventory: ChunkInventory,
    /// For each operation in flight there: the sequence number after its last chunk, and its call number, counted alike
    /// on all ranks.
    pub(crate) calls: Vec<(u64, u64)>,
    /// The first incomplete call that is not in the tree; the next call if all are complete.
    pub(crate) open: u64,
    /// The number of calls that it has begun.
    pub(crate) begun: u64,
    /// Where this rank accepts connections for this attempt.
    pub(crate) address: SocketAddr,
    /// The number of trees that it has recovered or migrated from: the report is about the tree after them.
    pub(crate) trees: u32,
    /// What it has promised a controller that offered a tree.
    pub(crate) offered: Option<MigrationPromise>,
}

/// A rank's promise to hold its calls until the controller decides where all ranks migrate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct MigrationPromise {
    /// The view that the tree is for, which identifies the offer.
    pub(crate) view: u32,
    /// The call to migrate at, if the controller has decided.
    pub(crate) call: Option<u64>,
    /// The controller disconnected before it decided.
    pub(crate) in_doubt: bool,
}

/// Return what becomes of an offer, the same on all ranks that have promised anything: the call where they migrate, if
/// any of them was told, or that none does. `None` if the controller of no rank disconnected.
pub(crate) fn agreed_migration(
    own: MigrationPromise,
    all: impl Iterator<Item = MigrationPromise> + Clone,
) -> Option<Option<u64>> {
    let mut same = all.filter(|other| other.view == own.view);
    same.clone().any(|other| other.in_doubt).then(|| same.find_map(|other| other.call))
}

/// Reduce reports to the latest tree that any rank has migrated to. A rank that has not migrated yet has posted nothing
/// in it, and all ranks have everything of the tree before: they migrate once that is so, at a call that none has
/// begun.
pub(crate) fn in_latest_tree(reports: &BTreeMap<Rank, RankReport>) -> (u32, BTreeMap<Rank, RankReport>) {
    let last = reports.values().map(|report| report.trees).max().unwrap_or(0);
    let moved = |report: &RankReport| match report {
        report if report.trees == last => report.clone(),
        report => RankReport { inventory: ChunkInventory::new(0), calls: Vec::new(), ..report.clone() },
    };
    (last, reports.iter().map(|(&rank, report)| (rank, moved(report))).collect())
}

/// What becomes of the operations.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Decision {
    /// Operations in the tree that end here or below are complete.
    pub(crate) cut: u64,
    /// If ranks are dead: the number of the first call that fails on all survivors that had not returned from it.
    pub(crate) operation: u64,
    /// The number of calls that any rank had begun.
    pub(crate) begun: u64,
    /// Why recovery is not possible.
    pub(crate) failure: Option<Unrecoverable>,
}

/// Decide from the reports of `ranks` ranks; ranks without a report are dead. If recovery is not possible, the plan is
/// empty.
pub(crate) fn decide(reports: &BTreeMap<Rank, RankReport>, ranks: u32) -> (Plan, Decision) {
    let inventories: Inventories = reports.iter().map(|(&rank, report)| (rank, report.inventory.clone())).collect();
    let (plan, failure) = match plan(&inventories, ranks) {
        Ok(plan) => (plan, None),
        Err(why) => (Plan { cut: 0, pieces: Vec::new() }, Some(why)),
    };
    let in_tree = reports.values().flat_map(|report| &report.calls).filter(|(end, _)| *end > plan.cut);
    let open = in_tree.map(|(_, call)| *call).chain(reports.values().map(|report| report.open)).min();
    let begun = reports.values().map(|report| report.begun).max().unwrap_or(0);
    let decision = Decision { cut: plan.cut, operation: open.unwrap_or(0), begun, failure };
    (plan, decision)
}

#[cfg(test)]
mod tests {
    use super::super::inventory::{ChunkState, OpEntry};
    use super::*;
    use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

    /// Two operations in the tree, of which the second is recomputed by all; it was call 5. Call 4 is a host
    /// collective.
    #[test]
    fn first_failed_call_is_the_earliest_incomplete_one_of_any_rank() {
        let report = |open| {
            let mut inventory = ChunkInventory::new(0);
            for first in 0..2 {
                let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 1);
                let has = ChunkState { needs: first == 1, holds: first == 0, gives: first == 1 };
                inventory.push(OpEntry { first, end: first + 1, desc, moves: true }, first, |_| has);
            }
            RankReport {
                inventory,
                calls: vec![(1, 3), (2, 5)],
                open,
                begun: open + 1,
                address: ([127, 0, 0, 1], 1).into(),
                trees: 0,
                offered: None,
            }
        };
        let of = |open: [u64; 2]| decide(&(0..).map(Rank).zip(open.map(report)).collect(), 3).1;
        assert_eq!(of([6, 6]), Decision { cut: 1, operation: 5, begun: 7, failure: None });
        assert_eq!(of([6, 4]), Decision { cut: 1, operation: 4, begun: 7, failure: None });
        let all_live = (0..).map(Rank).zip([6, 7, 6].map(report)).collect();
        assert_eq!(decide(&all_live, 3).1, Decision { cut: 2, operation: 6, begun: 8, failure: None });
    }

    /// Ranks that have migrated have posted operations that the others, who lost the earlier tree, have not.
    #[test]
    fn report_of_a_rank_that_has_not_migrated_is_emptied() {
        let report = |trees, posted| {
            let mut inventory = ChunkInventory::new(0);
            let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, posted);
            let op = OpEntry { first: 0, end: posted, desc, moves: true };
            inventory.push(op, 0, |_| ChunkState { needs: trees == 2, holds: trees == 1, gives: trees == 2 });
            RankReport {
                inventory,
                calls: vec![(posted, 7)],
                open: 7,
                begun: 8,
                address: ([127, 0, 0, 1], 1).into(),
                trees,
                offered: None,
            }
        };
        let reports = BTreeMap::from([(Rank(0), report(1, 5)), (Rank(1), report(2, 1))]);
        let (last, of_last) = in_latest_tree(&reports);
        assert_eq!((last, &of_last[&Rank(1)]), (2, &reports[&Rank(1)]));
        assert_eq!((&of_last[&Rank(0)].inventory, of_last[&Rank(0)].calls.len()), (&ChunkInventory::new(0), 0));
        let (plan, decision) = decide(&of_last, 2);
        assert_eq!((plan.pieces.len(), decision.cut, decision.operation, decision.failure), (0, 0, 7, None));
    }

    /// A rank that was told the call informs all others. If none was, nobody takes the offer.
    #[test]
    fn migration_call_known_to_one_rank_is_agreed_by_all() {
        let of = |view, call, in_doubt| MigrationPromise { view, call, in_doubt };
        let calm = [of(3, None, false), of(3, Some(9), false)];
        assert_eq!(agreed_migration(calm[0], calm.into_iter()), None);
        let told = [of(3, None, true), of(3, Some(9), false), of(4, None, false)];
        assert_eq!(agreed_migration(told[0], told.into_iter()), Some(Some(9)));
        assert_eq!(agreed_migration(told[2], told.into_iter()), None, "it is another offer");
        let untold = [of(3, None, true), of(3, None, false)];
        assert_eq!(untold.map(|own| agreed_migration(own, untold.into_iter())), [Some(None); 2]);
    }
}
