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
            Account { ledger, calls: vec![(1, 3), (2, 5)], open, address: ([127, 0, 0, 1], 1).into() }
        };
        let of = |open: [u64; 2]| decide(&(0..).map(Rank).zip(open.map(account)).collect(), 3).1;
        assert_eq!(of([6, 6]), Decision { cut: 1, operation: 5, failure: None });
        assert_eq!(of([6, 4]), Decision { cut: 1, operation: 4, failure: None });
        let all_live = (0..).map(Rank).zip([6, 7, 6].map(account)).collect();
        assert_eq!(decide(&all_live, 3).1, Decision { cut: 2, operation: 6, failure: None });
    }
}
