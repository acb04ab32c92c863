//! From the inventories of all ranks to a recovery plan, the same on every rank.

use super::inventory::{ChunkInventory, OpEntry};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use sumac_hal::ids::{ChunkNo, Rank};
use sumac_hal::op::OpDesc;
use thiserror::Error;

/// Where the results of a piece come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// This rank has them.
    Held(Rank),
    /// They are recomputed from all ranks' contributions.
    Recompute,
}

/// Chunks of one operation with the same source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The operation.
    pub(crate) op: OpEntry,
    /// The first chunk.
    pub(crate) first: u64,
    /// The sequence number after the last chunk.
    pub(crate) end: u64,
    /// Where the results come from.
    pub(crate) source: Source,
}

/// A plan to recover from the loss of a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Operations that end here or below are complete afterwards; later ones start again.
    pub(crate) cut: u64,
    /// What to move or recompute, in order of sequence numbers.
    pub(crate) pieces: Vec<Piece>,
}

/// Why recovery is not possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub(crate) enum Unrecoverable {
    /// Ranks called different operations.
    #[error("ranks called different operations: one {first}, another {other}")]
    Mismatch {
        /// One of the operations.
        first: OpDesc,
        /// Another one.
        other: OpDesc,
    },
    /// No rank has a chunk's result, and a contribution to it is gone.
    #[error("{chunk} is lost: no rank has its result, and {rank} no longer has its contribution")]
    ChunkLost {
        /// The chunk.
        chunk: ChunkNo,
        /// The rank that no longer has its contribution.
        rank: Rank,
    },
}

/// The inventories of the surviving ranks.
pub(crate) type Inventories = BTreeMap<Rank, ChunkInventory>;

/// Compute the plan for `ranks` ranks; ranks without an inventory are dead.
///
/// If ranks are dead, the plan ends before the first operation in which some rank lacks a chunk that no survivor has;
/// that operation and all later ones fail. A rank that only moves its own elements, such as the root of a broadcast,
/// has the result of their chunks. So a chunk that no survivor has takes a contribution of every rank, including the
/// dead, and cannot be recomputed. An operation that moves nothing, such as a barrier, fails likewise if no survivor
/// knows that all ranks had entered it.
///
/// # Errors
/// [`Unrecoverable`], the same on all ranks.
pub(crate) fn plan(inventories: &Inventories, ranks: u32) -> Result<Plan, Unrecoverable> {
    let mut cut = inventories.values().map(ChunkInventory::posted).min().unwrap_or(0);
    let ops = agreed(inventories, cut)?;
    let all_live = inventories.len() == ranks as usize;
    let mut pieces: Vec<Piece> = Vec::new();
    'ops: for op in ops {
        if !op.moves {
            if !all_live && inventories.values().all(|inventory| inventory.state(op.first).0.needs) {
                cut = op.first;
                break;
            }
            continue;
        }
        let (whole, mut seq) = (pieces.len(), op.first);
        while seq < op.end {
            let first = seq;
            let states = || inventories.iter().map(|(&rank, inventory)| (rank, inventory.state(first)));
            let end = states().map(|(_, (_, end))| end).min().unwrap_or(op.end).min(op.end);
            seq = end;
            if !states().any(|(_, (state, _))| state.needs) {
                continue;
            }
            let source = match states().find(|(_, (state, _))| state.holds) {
                Some((holder, _)) => Source::Held(holder),
                None if !all_live => {
                    pieces.truncate(whole);
                    cut = op.first;
                    break 'ops;
                }
                None => match states().find(|(_, (state, _))| !state.gives) {
                    Some((rank, _)) => return Err(Unrecoverable::ChunkLost { chunk: ChunkNo(first), rank }),
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

/// Return the operations below the cut, once each, if all ranks agree on them.
fn agreed(inventories: &Inventories, cut: u64) -> Result<Vec<OpEntry>, Unrecoverable> {
    let mut ops: Vec<OpEntry> =
        inventories.values().flat_map(|inventory| &inventory.ops).filter(|op| op.first < cut).copied().collect();
    ops.sort_by_key(|op| op.first);
    ops.dedup();
    if let Some(pair) = ops.windows(2).find(|pair| pair[1].first < pair[0].end) {
        return Err(Unrecoverable::Mismatch { first: pair[0].desc, other: pair[1].desc });
    }
    // No rank posts half an operation.
    match ops.last().filter(|op| op.end > cut) {
        Some(op) => Err(Unrecoverable::Mismatch { first: op.desc, other: op.desc }),
        None => Ok(ops),
    }
}

#[cfg(test)]
mod tests {
    use super::super::inventory::ChunkState;
    use super::*;
    use proptest::prelude::*;
    use sumac_hal::op::{Dtype, ReduceOp};

    fn op(first: u64, end: u64) -> OpEntry {
        let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, end - first);
        OpEntry { first, end, desc, moves: true }
    }

    /// An inventory of one all-reduce: `o` has the result, `-` needs it.
    fn inventory(first: u64, chunks: &str) -> ChunkInventory {
        let bytes = chunks.as_bytes();
        let mut inventory = ChunkInventory::new(first);
        inventory.push(op(first, first + bytes.len() as u64), first, |seq| {
            let holds = bytes[(seq - first) as usize] == b'o';
            ChunkState { needs: !holds, holds, gives: !holds }
        });
        inventory
    }

    /// All ranks are alive.
    fn plan(inventories: &[ChunkInventory]) -> Result<Plan, Unrecoverable> {
        super::plan(&(0..).map(Rank).zip(inventories.iter().cloned()).collect(), inventories.len() as u32)
    }

    fn pieces(inventories: &[ChunkInventory]) -> Vec<(u64, u64, Source)> {
        let plan = plan(inventories).expect("a plan");
        plan.pieces.iter().map(|piece| (piece.first, piece.end, piece.source)).collect()
    }

    #[test]
    fn results_come_from_their_lowest_holder_or_are_recomputed() {
        let inventories = [inventory(10, "oo----"), inventory(10, "o-oo--"), inventory(10, "oooo--")];
        let (from, again) = (|rank| Source::Held(Rank(rank)), Source::Recompute);
        assert_eq!(pieces(&inventories), [(11, 12, from(0)), (12, 14, from(1)), (14, 16, again)]);
        assert_eq!(plan(&inventories).expect("a plan").cut, 16);
    }

    #[test]
    fn operation_not_entered_by_all_ranks_is_cut_off() {
        let mut ahead = inventory(0, "oo");
        ahead.push(op(2, 5), 2, |_| ChunkState { needs: true, ..ChunkState::default() });
        let plan = plan(&[ahead, inventory(0, "oo")]).expect("a plan");
        assert_eq!((plan.cut, plan.pieces.len()), (2, 0));
    }

    #[test]
    fn different_operations_are_a_mismatch() {
        let (a, b) = (inventory(0, "---"), inventory(0, "----"));
        assert!(matches!(plan(&[a, b]), Err(Unrecoverable::Mismatch { .. })));
    }

    #[test]
    fn missing_contribution_is_an_error_unless_a_rank_holds_the_result() {
        let gone = ChunkInventory::new(4);
        let error = plan(&[inventory(0, "----"), gone.clone()]).expect_err("nothing to be had");
        assert_eq!(error, Unrecoverable::ChunkLost { chunk: ChunkNo(0), rank: Rank(1) });
        // Not if some rank has the result.
        assert_eq!(pieces(&[inventory(0, "----"), inventory(0, "oooo"), gone]), [(0, 4, Source::Held(Rank(1)))]);
    }

    /// Of three operations, the second lacks a chunk that only the dead rank may have had.
    #[test]
    fn chunk_held_by_no_survivor_cuts_off_its_operation_and_later_ones() {
        let inventory = |chunks: [&str; 3]| {
            let mut inventory = inventory(0, chunks[0]);
            for chunks in &chunks[1..] {
                let first = inventory.posted();
                let more = self::inventory(first, chunks);
                inventory.push(more.ops[0], first, |seq| more.state(seq).0);
            }
            inventory
        };
        let survivors = [inventory(["oo-", "oo-", "oo"]), inventory(["--o", "-o-", "oo"])];
        let inventories: Inventories = [Rank(0), Rank(2)].into_iter().zip(survivors).collect();
        let plan = super::plan(&inventories, 3).expect("a plan");
        let pieces: Vec<_> = plan.pieces.iter().map(|piece| (piece.first, piece.end, piece.source)).collect();
        assert_eq!((plan.cut, pieces), (3, vec![(0, 2, Source::Held(Rank(0))), (2, 3, Source::Held(Rank(2)))]));
        // With the third rank alive, it would be recomputed.
        let inventories = [(Rank(1), inventory(["---", "---", "--"]))].into_iter().chain(inventories).collect();
        assert_eq!(super::plan(&inventories, 3).expect("a plan").cut, 8);
    }

    /// The root of a broadcast has what all others lack.
    #[test]
    fn broadcast_from_a_survivor_completes_and_from_a_dead_root_fails() {
        let broadcast = OpDesc::broadcast(Dtype::F32, Rank(2), 1);
        let inventory = |is_root: bool| {
            let mut inventory = ChunkInventory::new(0);
            let has = ChunkState { needs: !is_root, holds: is_root, gives: true };
            inventory.push(OpEntry { first: 0, end: 1, desc: broadcast, moves: true }, 0, |_| has);
            inventory
        };
        let live: Inventories = [(Rank(1), inventory(false)), (Rank(2), inventory(true))].into();
        let plan = super::plan(&live, 3).expect("a plan");
        assert_eq!((plan.cut, plan.pieces.len(), plan.pieces[0].source), (1, 1, Source::Held(Rank(2))));
        // Its root is dead.
        let live: Inventories = [(Rank(0), inventory(false)), (Rank(1), inventory(false))].into();
        assert_eq!(super::plan(&live, 3).expect("a plan").cut, 0);
    }

    /// No rank passes a barrier that a dead rank may not have entered.
    #[test]
    fn barrier_completes_if_a_survivor_knows_that_all_had_entered() {
        let inventory = |knows: bool| {
            let mut inventory = ChunkInventory::new(0);
            let has = ChunkState { needs: !knows, holds: knows, gives: !knows };
            inventory.push(OpEntry { first: 0, end: 1, desc: OpDesc::barrier(), moves: false }, 0, |_| has);
            inventory
        };
        let mut returned = ChunkInventory::new(1);
        returned.skip_to(1);
        let cut = |inventories: [ChunkInventory; 2], ranks| {
            let plan = super::plan(&(0..).map(Rank).zip(inventories).collect(), ranks).expect("a plan");
            assert!(plan.pieces.is_empty());
            plan.cut
        };
        assert_eq!(cut([inventory(false), inventory(false)], 3), 0);
        assert_eq!(cut([inventory(false), inventory(true)], 3), 1);
        assert_eq!(cut([returned, inventory(false)], 3), 1);
        // All are alive, so all have entered.
        assert_eq!(cut([inventory(false), inventory(false)], 2), 1);
    }

    #[test]
    fn invalid_inventory_is_detected() {
        // One element per chunk.
        let is_valid = |inventory: &ChunkInventory| inventory.is_valid(2, |desc| desc.count.max(1));
        assert!(is_valid(&inventory(0, "o-")) && is_valid(&ChunkInventory::new(u64::MAX)));
        let mut late = inventory(7, "o-");
        late.from = u64::MAX;
        assert!(!is_valid(&late));
        let mut behind = inventory(0, "o-");
        behind.ops[0].end = 3;
        assert!(!is_valid(&behind));
        // More chunks than its elements fill.
        let mut longer = inventory(0, "o-");
        longer.ops[0].desc.count = 1;
        assert!(!is_valid(&longer));
        let mut rootless = inventory(0, "o-");
        rootless.ops[0].desc.root = Rank(2);
        assert!(!is_valid(&rootless));
    }

    /// The other ranks have nothing that contradicts it.
    #[test]
    fn operation_that_one_rank_has_not_posted_is_a_mismatch() {
        let mut forgotten = ChunkInventory::new(0);
        forgotten.skip_to(2);
        assert!(matches!(plan(&[forgotten, inventory(0, "oooooo")]), Err(Unrecoverable::Mismatch { .. })));
    }

    proptest! {
        /// Every needed chunk is in exactly one piece, from a rank that has it if there is one.
        #[test]
        fn every_needed_chunk_is_in_one_piece(chunks in proptest::collection::vec("[o-]{24}", 1..5)) {
            let inventories: Vec<_> = chunks.iter().map(|chunks| inventory(100, chunks)).collect();
            let plan = plan(&inventories).expect("a plan");
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
