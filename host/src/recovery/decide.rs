//! From what all that live have to what becomes of every operation, the same at all of them.

use super::ledger::Ledger;
use super::plan::{Ledgers, Plan, Unrepairable, plan};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use sumac_hal::ids::Rank;

/// What a rank promises with.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Account {
    /// What it has of the operations of the tree.
    pub(crate) ledger: Ledger,
    /// Of those that are in flight there: the seq behind the last, and the number of the call, counted alike at all ranks.
    pub(crate) calls: Vec<(u64, u64)>,
    /// The first call that is not complete here, those in the tree aside; the next one, if all are.
    pub(crate) open: u64,
    /// Where this rank takes connections for the pieces of this attempt's plan.
    pub(crate) address: SocketAddr,
    /// How many trees it has got over or moved from: what it has is of the one after.
    pub(crate) trees: u32,
    /// What it has promised a controller that has offered a tree.
    pub(crate) offered: Option<Offered>,
}

/// A rank waits from some call on for a controller's word where all move to a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Offered {
    /// The view that the tree is for, which tells offers apart.
    pub(crate) view: u32,
    /// That word, if it has come.
    pub(crate) call: Option<u64>,
    /// The controller was gone before.
    pub(crate) in_doubt: bool,
}

/// Return what becomes of an offer, the same at all ranks that have promised anything: where they move, if any of them was
/// told, or that nobody does. `None` if no rank doubts it.
pub(crate) fn settled(own: Offered, all: impl Iterator<Item = Offered> + Clone) -> Option<Option<u64>> {
    let mut same = all.filter(|other| other.view == own.view);
    same.clone().any(|other| other.in_doubt).then(|| same.find_map(|other| other.call))
}

/// Return what ranks have of the last tree that any of them has moved to. Who has not moved there yet has posted nothing in
/// it, and of the one before all have everything: they move when that is so, at a call that none has begun.
pub(crate) fn of_last_tree(accounts: &BTreeMap<Rank, Account>) -> (u32, BTreeMap<Rank, Account>) {
    let last = accounts.values().map(|account| account.trees).max().unwrap_or(0);
    let moved = |account: &Account| match account {
        account if account.trees == last => account.clone(),
        account => Account { ledger: Ledger::new(0), calls: Vec::new(), ..account.clone() },
    };
    (last, accounts.iter().map(|(&rank, account)| (rank, moved(account))).collect())
}

/// What becomes of the operations.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Decision {
    /// Operations of the tree that end here or below are complete.
    pub(crate) cut: u64,
    /// Where ranks are dead: the number of the first call that fails at all that live, unless it had returned there.
    pub(crate) operation: u64,
    /// Why nothing can be done.
    pub(crate) failure: Option<Unrepairable>,
}

/// Decide, of `ranks` ranks; those without an account are dead. Where nothing can be done, the plan is empty.
pub(crate) fn decide(accounts: &BTreeMap<Rank, Account>, ranks: u32) -> (Plan, Decision) {
    let ledgers: Ledgers = accounts.iter().map(|(&rank, account)| (rank, account.ledger.clone())).collect();
    let (plan, failure) = match plan(&ledgers, ranks) {
        Ok(plan) => (plan, None),
        Err(why) => (Plan { cut: 0, pieces: Vec::new() }, Some(why)),
    };
    let in_tree = accounts.values().flat_map(|account| &account.calls).filter(|(end, _)| *end > plan.cut);
    let open = in_tree.map(|(_, call)| *call).chain(accounts.values().map(|account| account.open)).min();
    let decision = Decision { cut: plan.cut, operation: open.unwrap_or(0), failure };
    (plan, decision)
}

#[cfg(test)]
mod tests {
    use super::super::ledger::{Class, OpEntry};
    use super::*;
    use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

    /// Two operations of the tree, of which the second is computed by all; it was call 5. Call 4 is a schedule.
    #[test]
    fn the_first_call_that_fails_is_the_same_to_all() {
        let account = |open| {
            let mut ledger = Ledger::new(0);
            for first in 0..2 {
                let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 1);
                let has = Class { needs: first == 1, holds: first == 0, gives: first == 1 };
                ledger.push(OpEntry { first, end: first + 1, desc, moves: true }, first, |_| has);
            }
            Account {
                ledger,
                calls: vec![(1, 3), (2, 5)],
                open,
                address: ([127, 0, 0, 1], 1).into(),
                trees: 0,
                offered: None,
            }
        };
        let of = |open: [u64; 2]| decide(&(0..).map(Rank).zip(open.map(account)).collect(), 3).1;
        assert_eq!(of([6, 6]), Decision { cut: 1, operation: 5, failure: None });
        assert_eq!(of([6, 4]), Decision { cut: 1, operation: 4, failure: None });
        let all_live = (0..).map(Rank).zip([6, 7, 6].map(account)).collect();
        assert_eq!(decide(&all_live, 3).1, Decision { cut: 2, operation: 6, failure: None });
    }

    /// Who has moved already has posted there what the others, who have lost the tree before, have not.
    #[test]
    fn what_is_left_of_a_tree_that_others_have_moved_from_is_nothing() {
        let account = |trees, posted| {
            let mut ledger = Ledger::new(0);
            let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, posted);
            let op = OpEntry { first: 0, end: posted, desc, moves: true };
            ledger.push(op, 0, |_| Class { needs: trees == 2, holds: trees == 1, gives: trees == 2 });
            Account {
                ledger,
                calls: vec![(posted, 7)],
                open: 7,
                address: ([127, 0, 0, 1], 1).into(),
                trees,
                offered: None,
            }
        };
        let accounts = BTreeMap::from([(Rank(0), account(1, 5)), (Rank(1), account(2, 1))]);
        let (last, of_last) = of_last_tree(&accounts);
        assert_eq!((last, &of_last[&Rank(1)]), (2, &accounts[&Rank(1)]));
        assert_eq!((&of_last[&Rank(0)].ledger, of_last[&Rank(0)].calls.len()), (&Ledger::new(0), 0));
        let (plan, decision) = decide(&of_last, 2);
        assert_eq!((plan.pieces.len(), decision.cut, decision.operation, decision.failure), (0, 0, 7, None));
    }

    /// Whoever was told the call tells all others; a doubt that nobody can settle so is one of an offer that nobody takes.
    #[test]
    fn one_that_was_told_settles_the_doubts_of_all() {
        let of = |view, call, in_doubt| Offered { view, call, in_doubt };
        let calm = [of(3, None, false), of(3, Some(9), false)];
        assert_eq!(settled(calm[0], calm.into_iter()), None);
        let told = [of(3, None, true), of(3, Some(9), false), of(4, None, false)];
        assert_eq!(settled(told[0], told.into_iter()), Some(Some(9)));
        assert_eq!(settled(told[2], told.into_iter()), None, "it is another offer");
        let untold = [of(3, None, true), of(3, None, false)];
        assert_eq!(untold.map(|own| settled(own, untold.into_iter())), [Some(None); 2]);
    }
}
