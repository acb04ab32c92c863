//! From all ranks' ledgers to what is done, the same at every rank.

use super::ledger::{Ledger, OpEntry};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use sumac_hal::ids::{ChunkNo, Rank};
use sumac_hal::op::OpDesc;
use thiserror::Error;

/// Where the results of a piece come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// A rank that has them.
    Held(Rank),
    /// All ranks' contributions.
    Recompute,
}

/// Chunks of one operation that are treated alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The operation.
    pub(crate) op: OpEntry,
    /// The first of the chunks.
    pub(crate) first: u64,
    /// The seq after the last.
    pub(crate) end: u64,
    /// Where the results come from.
    pub(crate) source: Source,
}

/// What is done about a lost tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Operations that end here or below are complete afterwards; those behind begin again.
    pub(crate) cut: u64,
    /// What is to be moved or computed, in the order of seqs.
    pub(crate) pieces: Vec<Piece>,
}

/// Why nothing can be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub(crate) enum Unrepairable {
    /// Ranks called different things.
    #[error("ranks called different operations: one {first}, another {other}")]
    Mismatch {
        /// One of them.
        first: OpDesc,
        /// Another.
        other: OpDesc,
    },
    /// A result is nowhere, and a contribution to it is gone.
    #[error("{chunk} is lost: nobody has its result, and {rank} no longer has its contribution")]
    Forgotten {
        /// The chunk.
        chunk: ChunkNo,
        /// Who can't contribute any more.
        rank: Rank,
    },
}

/// The ledgers of those that live.
pub(crate) type Ledgers = BTreeMap<Rank, Ledger>;

/// Work out what is to be done, of `ranks` ranks; those without a ledger are dead.
///
/// Where ranks are dead, the plan ends before the first operation of which somebody lacks a chunk that no survivor has:
/// that one and all later ones fail. Whoever moves its own elements, as the root of a broadcast does, has the result of
/// their chunks; so what nobody has takes a contribution of every rank, the dead included, and can't be computed again.
/// An operation that moves nothing, as a barrier, fails likewise if no survivor has heard that all had entered it.
///
/// # Errors
/// [`Unrepairable`], the same at all ranks.
pub(crate) fn plan(ledgers: &Ledgers, ranks: u32) -> Result<Plan, Unrepairable> {
    let mut cut = ledgers.values().map(Ledger::posted).min().unwrap_or(0);
    let ops = agreed(ledgers, cut)?;
    let all_live = ledgers.len() == ranks as usize;
    let mut pieces: Vec<Piece> = Vec::new();
    'ops: for op in ops {
        if !op.moves {
            if !all_live && ledgers.values().all(|ledger| ledger.class(op.first).0.needs) {
                cut = op.first;
                break;
            }
            continue;
        }
        let (whole, mut seq) = (pieces.len(), op.first);
        while seq < op.end {
            let first = seq;
            let classes = || ledgers.iter().map(|(&rank, ledger)| (rank, ledger.class(first)));
            let end = classes().map(|(_, (_, end))| end).min().unwrap_or(op.end).min(op.end);
            seq = end;
            if !classes().any(|(_, (class, _))| class.needs) {
                continue;
            }
            let source = match classes().find(|(_, (class, _))| class.holds) {
                Some((holder, _)) => Source::Held(holder),
                None if !all_live => {
                    pieces.truncate(whole);
                    cut = op.first;
                    break 'ops;
                }
                None => match classes().find(|(_, (class, _))| !class.gives) {
                    Some((rank, _)) => return Err(Unrepairable::Forgotten { chunk: ChunkNo(first), rank }),
                    None => Source::Recompute,
                },
            };
            match pieces.last_mut() {
                Some(last) if (last.op, last.end, last.source) == (op, first, source) => last.end = end,
                _ => pieces.push(Piece { op, first, end, source }),
            }
        }
    }
    Ok(Plan { cut, pieces })
}

/// Return the operations below the cut, once each, if all ranks mean the same by them.
fn agreed(ledgers: &Ledgers, cut: u64) -> Result<Vec<OpEntry>, Unrepairable> {
    let mut ops: Vec<OpEntry> =
        ledgers.values().flat_map(|ledger| &ledger.ops).filter(|op| op.first < cut).copied().collect();
    ops.sort_by_key(|op| op.first);
    ops.dedup();
    if let Some(pair) = ops.windows(2).find(|pair| pair[1].first < pair[0].end) {
        return Err(Unrepairable::Mismatch { first: pair[0].desc, other: pair[1].desc });
    }
    // Nobody posts half an operation.
    match ops.last().filter(|op| op.end > cut) {
        Some(op) => Err(Unrepairable::Mismatch { first: op.desc, other: op.desc }),
        None => Ok(ops),
    }
}

#[cfg(test)]
mod tests {
    use super::super::ledger::Class;
    use super::*;
    use proptest::prelude::*;
    use sumac_hal::op::{Dtype, ReduceOp};

    fn op(first: u64, end: u64) -> OpEntry {
        let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, end - first);
        OpEntry { first, end, desc, moves: true }
    }

    /// A ledger of one all-reduce: `o` has the result, `-` needs it.
    fn ledger(first: u64, chunks: &str) -> Ledger {
        let bytes = chunks.as_bytes();
        let mut ledger = Ledger::new(first);
        ledger.push(op(first, first + bytes.len() as u64), first, |seq| {
            let holds = bytes[(seq - first) as usize] == b'o';
            Class { needs: !holds, holds, gives: !holds }
        });
        ledger
    }

    /// All ranks live.
    fn plan(ledgers: &[Ledger]) -> Result<Plan, Unrepairable> {
        super::plan(&(0..).map(Rank).zip(ledgers.iter().cloned()).collect(), ledgers.len() as u32)
    }

    fn pieces(ledgers: &[Ledger]) -> Vec<(u64, u64, Source)> {
        let plan = plan(ledgers).expect("a plan");
        plan.pieces.iter().map(|piece| (piece.first, piece.end, piece.source)).collect()
    }

    #[test]
    fn who_has_a_result_gives_it_and_what_nobody_has_is_computed_again() {
        let ledgers = [ledger(10, "oo----"), ledger(10, "o-oo--"), ledger(10, "oooo--")];
        let (from, again) = (|rank| Source::Held(Rank(rank)), Source::Recompute);
        assert_eq!(pieces(&ledgers), [(11, 12, from(0)), (12, 14, from(1)), (14, 16, again)]);
        assert_eq!(plan(&ledgers).expect("a plan").cut, 16);
    }

    #[test]
    fn what_not_all_have_entered_begins_again() {
        let mut ahead = ledger(0, "oo");
        ahead.push(op(2, 5), 2, |_| Class { needs: true, ..Class::default() });
        let plan = plan(&[ahead, ledger(0, "oo")]).expect("a plan");
        assert_eq!((plan.cut, plan.pieces.len()), (2, 0));
    }

    #[test]
    fn different_operations_are_named() {
        let (a, b) = (ledger(0, "---"), ledger(0, "----"));
        assert!(matches!(plan(&[a, b]), Err(Unrepairable::Mismatch { .. })));
    }

    #[test]
    fn a_contribution_that_is_gone_is_named() {
        let gone = Ledger::new(4);
        let error = plan(&[ledger(0, "----"), gone.clone()]).expect_err("nothing to be had");
        assert_eq!(error, Unrepairable::Forgotten { chunk: ChunkNo(0), rank: Rank(1) });
        // Not if somebody has it.
        assert_eq!(pieces(&[ledger(0, "----"), ledger(0, "oooo"), gone]), [(0, 4, Source::Held(Rank(1)))]);
    }

    /// Of three operations the second lacks a chunk that the dead rank alone may have had.
    #[test]
    fn what_no_survivor_has_fails_with_all_behind_it() {
        let ledger = |chunks: [&str; 3]| {
            let mut ledger = ledger(0, chunks[0]);
            for chunks in &chunks[1..] {
                let first = ledger.posted();
                let more = self::ledger(first, chunks);
                ledger.push(more.ops[0], first, |seq| more.class(seq).0);
            }
            ledger
        };
        let survivors = [ledger(["oo-", "oo-", "oo"]), ledger(["--o", "-o-", "oo"])];
        let ledgers: Ledgers = [Rank(0), Rank(2)].into_iter().zip(survivors).collect();
        let plan = super::plan(&ledgers, 3).expect("a plan");
        let pieces: Vec<_> = plan.pieces.iter().map(|piece| (piece.first, piece.end, piece.source)).collect();
        assert_eq!((plan.cut, pieces), (3, vec![(0, 2, Source::Held(Rank(0))), (2, 3, Source::Held(Rank(2)))]));
        // With the third rank alive, it would be computed again.
        let ledgers = [(Rank(1), ledger(["---", "---", "--"]))].into_iter().chain(ledgers).collect();
        assert_eq!(super::plan(&ledgers, 3).expect("a plan").cut, 8);
    }

    /// A broadcast's root has what all the others lack.
    #[test]
    fn what_needs_no_dead_rank_completes_without_it() {
        let broadcast = OpDesc::broadcast(Dtype::F32, Rank(2), 1);
        let ledger = |is_root: bool| {
            let mut ledger = Ledger::new(0);
            let has = Class { needs: !is_root, holds: is_root, gives: true };
            ledger.push(OpEntry { first: 0, end: 1, desc: broadcast, moves: true }, 0, |_| has);
            ledger
        };
        let live: Ledgers = [(Rank(1), ledger(false)), (Rank(2), ledger(true))].into();
        let plan = super::plan(&live, 3).expect("a plan");
        assert_eq!((plan.cut, plan.pieces.len(), plan.pieces[0].source), (1, 1, Source::Held(Rank(2))));
        // Its root is dead.
        let live: Ledgers = [(Rank(0), ledger(false)), (Rank(1), ledger(false))].into();
        assert_eq!(super::plan(&live, 3).expect("a plan").cut, 0);
    }

    /// Nobody passes a barrier that a dead rank may not have come to.
    #[test]
    fn a_barrier_is_passed_if_somebody_knows_that_all_had_come() {
        let ledger = |knows: bool| {
            let mut ledger = Ledger::new(0);
            let has = Class { needs: !knows, holds: knows, gives: !knows };
            ledger.push(OpEntry { first: 0, end: 1, desc: OpDesc::barrier(), moves: false }, 0, |_| has);
            ledger
        };
        let mut returned = Ledger::new(1);
        returned.skip_to(1);
        let cut = |ledgers: [Ledger; 2], ranks| {
            let plan = super::plan(&(0..).map(Rank).zip(ledgers).collect(), ranks).expect("a plan");
            assert!(plan.pieces.is_empty());
            plan.cut
        };
        assert_eq!(cut([ledger(false), ledger(false)], 3), 0);
        assert_eq!(cut([ledger(false), ledger(true)], 3), 1);
        assert_eq!(cut([returned, ledger(false)], 3), 1);
        // All live, so all have come.
        assert_eq!(cut([ledger(false), ledger(false)], 2), 1);
    }

    #[test]
    fn nonsense_of_a_peer_is_found() {
        // One element a chunk.
        let is_sound = |ledger: &Ledger| ledger.is_sound(2, |desc| desc.count.max(1));
        assert!(is_sound(&ledger(0, "o-")) && is_sound(&Ledger::new(u64::MAX)));
        let mut late = ledger(7, "o-");
        late.from = u64::MAX;
        assert!(!is_sound(&late));
        let mut behind = ledger(0, "o-");
        behind.ops[0].end = 3;
        assert!(!is_sound(&behind));
        // What would have chunks that its elements do not fill.
        let mut longer = ledger(0, "o-");
        longer.ops[0].desc.count = 1;
        assert!(!is_sound(&longer));
        let mut rootless = ledger(0, "o-");
        rootless.ops[0].desc.root = Rank(2);
        assert!(!is_sound(&rootless));
    }

    /// The others have forgotten what was there, so that nothing of theirs contradicts it.
    #[test]
    fn an_operation_that_goes_on_behind_what_all_have_posted_is_refused() {
        let mut forgotten = Ledger::new(0);
        forgotten.skip_to(2);
        assert!(matches!(plan(&[forgotten, ledger(0, "oooooo")]), Err(Unrepairable::Mismatch { .. })));
    }

    proptest! {
        /// Every chunk that somebody needs is in one piece, from somebody who has it if there is one.
        #[test]
        fn every_need_is_met_once(chunks in proptest::collection::vec("[o-]{24}", 1..5)) {
            let ledgers: Vec<_> = chunks.iter().map(|chunks| ledger(100, chunks)).collect();
            let plan = plan(&ledgers).expect("a plan");
            prop_assert!(plan.pieces.windows(2).all(|pair| pair[0].end <= pair[1].first));
            for seq in 100..124 {
                let has = |rank: usize| chunks[rank].as_bytes()[seq as usize - 100] == b'o';
                let piece = plan.pieces.iter().find(|piece| (piece.first..piece.end).contains(&seq));
                let all = (0..chunks.len()).all(has);
                prop_assert_eq!(piece.is_some(), !all);
                match piece.map(|piece| piece.source) {
                    Some(Source::Held(rank)) => prop_assert!(has(rank.0 as usize)),
                    Some(Source::Recompute) => prop_assert!(!(0..chunks.len()).any(has)),
                    None => {}
                }
            }
        }
    }
}
