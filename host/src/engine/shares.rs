//! How an operation is divided among trees: contiguous shares of its elements, in proportion to the trees' rates.
//!
//! Invariants:
//! - the shares cover all elements once, in order;
//! - every share but the last consists of whole chunks of its tree, so no tree sends a short packet but at the end;
//! - the division depends only on the operation and on what all ranks know, so that it is the same on all ranks.

use super::error::{Error, OutputState};
use crate::exec::Buffers;
use std::ops::Range;
use sumac_hal::op::{Collective, OpDesc};

/// The minimum size of a share in bytes. An operation that is too small for two of them takes one tree: its latency
/// matters more than the rate, and each further tree costs a thread's wake-up.
pub(super) const SHARE_BYTES_MIN: u64 = 64 << 10;

/// What the division depends on of one tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ShareWeight {
    /// Its relative rate.
    pub(super) weight: u32,
    /// The maximum payload of its chunks, in bytes.
    pub(super) chunk_len_bytes: u32,
}

/// A tree's share of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Share {
    /// The tree's number.
    pub(super) tree: usize,
    /// Its elements.
    pub(super) elements: Range<u64>,
}

/// Whether shares of an operation are operations of the same kind: every rank contributes, or receives, the same
/// elements.
pub(super) const fn is_divisible(collective: Collective) -> bool {
    matches!(collective, Collective::AllReduce | Collective::Reduce | Collective::Broadcast)
}

/// Divide an operation among trees. A tree of weight 0 gets one chunk if it is the first, and nothing otherwise. Empty
/// if the operation is not to be divided.
pub(super) fn divide(desc: &OpDesc, trees: &[ShareWeight]) -> Vec<Share> {
    let each = desc.element_bytes().max(1) as u64;
    let most = (desc.count.saturating_mul(each) / SHARE_BYTES_MIN).min(trees.len() as u64) as usize;
    let weighty: Vec<usize> = (0..trees.len()).filter(|&tree| trees[tree].weight > 0).take(most).collect();
    if !is_divisible(desc.collective) || most < 2 || weighty.is_empty() || weighty == [0] {
        return Vec::new();
    }
    let unit = |tree: usize| u64::from(trees[tree].chunk_len_bytes) / desc.partial_bytes().max(1) as u64;
    let mut shares = Vec::with_capacity(weighty.len() + 1);
    let mut next = 0;
    if weighty[0] != 0 {
        next = unit(0).clamp(1, desc.count);
        shares.push(Share { tree: 0, elements: 0..next });
    }
    let (first, total) = (next, weighty.iter().map(|&tree| u64::from(trees[tree].weight)).sum::<u64>());
    let mut weight = 0;
    for (nth, &tree) in weighty.iter().enumerate() {
        weight += u64::from(trees[tree].weight);
        let target = first + (u128::from(desc.count - first) * u128::from(weight) / u128::from(total)) as u64;
        let unit = unit(tree).max(1);
        let end = match nth + 1 == weighty.len() {
            true => desc.count,
            false => next + target.saturating_sub(next) / unit * unit,
        };
        if end > next {
            shares.push(Share { tree, elements: next..end });
        }
        next = end;
    }
    shares
}

/// Divide the buffers of an operation into those of its shares.
pub(super) fn divide_buffers<'b>(desc: &OpDesc, shares: &[Share], buffers: &'b mut Buffers<'_>) -> Vec<Buffers<'b>> {
    let each = desc.element_bytes();
    let lens = shares.iter().map(|share| (share.elements.end - share.elements.start) as usize * each);
    match buffers {
        Buffers::InPlace(all) => {
            let mut rest: &mut [u8] = all;
            lens.map(|len| Buffers::InPlace(take_mut(&mut rest, len))).collect()
        }
        Buffers::Separate { input, output } => {
            let (mut inputs, mut outputs): (&[u8], &mut [u8]) = (input, output);
            // A rank that does not contribute, or receives nothing, has an empty buffer there.
            let part = |len: usize| {
                let (input, rest) = inputs.split_at(len.min(inputs.len()));
                inputs = rest;
                Buffers::Separate { input, output: take_mut(&mut outputs, len) }
            };
            lens.map(part).collect()
        }
    }
}

/// Take the first `len` bytes off a slice, or all that there are.
fn take_mut<'b>(rest: &mut &'b mut [u8], len: usize) -> &'b mut [u8] {
    let all = std::mem::take(rest);
    let (taken, left) = all.split_at_mut(len.min(all.len()));
    *rest = left;
    taken
}

/// Combine what is known of the output of each share.
pub(super) fn combine_outputs<'s>(parts: impl Iterator<Item = (&'s Share, Option<OutputState>)>) -> OutputState {
    let mut elements: Vec<Range<u64>> = Vec::new();
    for (share, state) in parts {
        let runs = match state {
            None => vec![share.elements.clone()],
            Some(OutputState::Elements(runs)) => {
                let first = share.elements.start;
                runs.into_iter().map(|run| first + run.start..first + run.end).collect()
            }
            Some(OutputState::Unspecified) => return OutputState::Unspecified,
        };
        for run in runs {
            match elements.last_mut() {
                Some(last) if last.end == run.start => last.end = run.end,
                _ => elements.push(run),
            }
        }
    }
    OutputState::Elements(elements)
}

/// Return the error of a share as one of the whole operation, which is call number `call`.
pub(super) fn error_of_whole(mut error: Error, (part, whole): (&OpDesc, &OpDesc), call: impl Fn(u64) -> u64) -> Error {
    let widen = |desc: &mut OpDesc| {
        if desc == part {
            *desc = *whole;
        }
    };
    match &mut error {
        // A mismatch must be the same on all ranks, which know no more of the other call than the share.
        Error::Deadline { desc, .. } | Error::OutcomeUnknown { desc, .. } | Error::Unsupported(desc) => widen(desc),
        Error::RanksFailed { operation, .. } => *operation = call(*operation),
        _ => {}
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sumac_hal::ids::Rank;
    use sumac_hal::op::{Dtype, ReduceOp};

    fn trees(weights: &[u32]) -> Vec<ShareWeight> {
        weights.iter().map(|&weight| ShareWeight { weight, chunk_len_bytes: 1024 }).collect()
    }

    fn sum(count: u64) -> OpDesc {
        OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, count)
    }

    #[test]
    fn shares_are_in_proportion_to_rates_and_of_whole_chunks() {
        let found = divide(&sum(1 << 20), &trees(&[2, 1, 1]));
        let half = 1 << 19;
        let expected = [(0, 0..half), (1, half..half + half / 2), (2, half + half / 2..1 << 20)];
        assert_eq!(found.into_iter().map(|share| (share.tree, share.elements)).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn small_operation_takes_fewer_trees() {
        let trees = trees(&[1; 8]);
        let elements = |bytes: u64| divide(&sum(bytes / 4), &trees).len();
        assert_eq!(elements(SHARE_BYTES_MIN), 0);
        assert_eq!(elements(2 * SHARE_BYTES_MIN - 4), 0);
        assert_eq!((elements(2 * SHARE_BYTES_MIN), elements(7 * SHARE_BYTES_MIN), elements(1 << 30)), (2, 7, 8));
    }

    #[test]
    fn blocks_of_ranks_and_single_trees_are_not_divided() {
        let of = |desc: OpDesc, weights: &[u32]| divide(&desc, &trees(weights)).len();
        assert_eq!(of(OpDesc::reduce_scatter(Dtype::F32, ReduceOp::Sum, 1 << 20), &[1, 1]), 0);
        assert_eq!(of(OpDesc::all_gather(Dtype::F32, 1 << 20), &[1, 1]), 0);
        assert_eq!(of(OpDesc::barrier(), &[1, 1]), 0);
        assert_eq!((of(sum(1 << 20), &[1]), of(sum(1 << 20), &[1, 0]), of(sum(1 << 20), &[])), (0, 0, 0));
        assert_eq!(of(OpDesc::broadcast(Dtype::F32, Rank(1), 1 << 20), &[1, 1]), 2);
        assert_eq!(of(OpDesc::reduce(Dtype::F32, ReduceOp::Sum, Rank(1), 1 << 20), &[1, 1]), 2);
    }

    /// The first tree always takes part, so that its calls are numbered like the communicator's.
    #[test]
    fn first_tree_without_weight_gets_one_chunk() {
        let found = divide(&sum(1 << 20), &trees(&[0, 1, 1]));
        assert_eq!(found[0], Share { tree: 0, elements: 0..256 });
        assert_eq!(found.iter().map(|share| share.tree).collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn output_states_are_combined_in_elements_of_the_whole() {
        let shares = [Share { tree: 0, elements: 0..10 }, Share { tree: 3, elements: 10..30 }];
        let combine = |second| combine_outputs(shares.iter().zip([None, second]));
        let some = |runs: &[Range<u64>]| Some(OutputState::Elements(runs.to_vec()));
        assert_eq!(Some(combine(None)), some(std::slice::from_ref(&(0..30))));
        assert_eq!(Some(combine(some(&[2..4, 6..20]))), some(&[0..10, 12..14, 16..30]));
        assert_eq!(combine(Some(OutputState::Unspecified)), OutputState::Unspecified);
    }

    proptest! {
        #[test]
        fn shares_cover_all_elements_once_and_fit_buffers(
            count in 0..4_000_000_u64,
            shape in prop::collection::vec((0..9_u32, 64..9000_u32), 1..16),
            dtype in prop::sample::select(vec![Dtype::I8, Dtype::Bf16, Dtype::F32, Dtype::F64]),
        ) {
            let desc = OpDesc::all_reduce(dtype, ReduceOp::Sum, count);
            let trees: Vec<_> = shape.iter().map(|&(weight, chunk_len_bytes)| ShareWeight { weight, chunk_len_bytes }).collect();
            let shares = divide(&desc, &trees);
            if shares.is_empty() {
                return Ok(());
            }
            let (mut next, total) = (0, trees.iter().map(|tree| u64::from(tree.weight)).sum::<u64>().max(1));
            for (nth, share) in shares.iter().enumerate() {
                prop_assert_eq!(share.elements.start, next);
                prop_assert!(share.elements.end > next);
                next = share.elements.end;
                let unit = (u64::from(trees[share.tree].chunk_len_bytes) / desc.partial_bytes() as u64).max(1);
                let len = share.elements.end - share.elements.start;
                prop_assert!(nth + 1 == shares.len() || len % unit == 0 || share.tree == 0, "{:?}", share);
                if shares.len() == trees.len() && nth + 1 < shares.len() && trees[0].weight > 0 {
                    let fair = count * u64::from(trees[share.tree].weight) / total;
                    prop_assert!(len <= fair + 2 * 9000 && len + 2 * 9000 >= fair, "{} of {}", len, fair);
                }
            }
            prop_assert_eq!(next, count);
            prop_assert!(shares.windows(2).all(|pair| pair[0].tree < pair[1].tree));
            let mut bytes = vec![0; count as usize * desc.element_bytes()];
            let mut buffers = Buffers::InPlace(&mut bytes);
            for (nth, part) in divide_buffers(&desc, &shares, &mut buffers).into_iter().enumerate() {
                let Buffers::InPlace(part) = part else { panic!("in place") };
                prop_assert_eq!(part.len() as u64, (shares[nth].elements.end - shares[nth].elements.start) * desc.element_bytes() as u64);
            }
        }
    }
}
