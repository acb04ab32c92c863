//! Parts and retained bytes of operations.

use super::*;
use crate::schedule::Span;
use crate::transport::packets::op::Landing;
use proptest::prelude::*;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, ReduceOp};

const CHUNK_LEN: usize = 32;

/// All collectives with elements.
fn descs(root: u32, count: u64) -> [OpDesc; 5] {
    let (dtype, op) = (Dtype::F32, ReduceOp::Sum);
    [
        OpDesc::all_reduce(dtype, op, count),
        OpDesc::reduce(dtype, op, Rank(root), count),
        OpDesc::broadcast(dtype, Rank(root), count),
        OpDesc::reduce_scatter(dtype, op, count),
        OpDesc::all_gather(dtype, count),
    ]
}

/// For any sequence of operation sizes, retained bytes stay within the most that was retained at once, and no entry
/// is left behind.
#[test]
fn retained_bytes_stay_bounded() {
    const WINDOW: u64 = 64;
    let mut ops = Ops::new(CHUNK_LEN, RankInfo { rank: 0, ranks: 2 });
    let bytes = [7; CHUNK_LEN];
    for nth in 0..20_000_u64 {
        let chunks = if nth % 97 == 0 { WINDOW } else { 1 };
        ops.post(OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, chunks * 8), 0, true, None).expect("room");
        (ops.end() - chunks..ops.end()).for_each(|seq| ops.landed(seq));
        let stable = ops.end().saturating_sub(WINDOW);
        ops.forget_below(stable);
        ops.retain_new(stable, |_, _| false, |_, retention, to| to.extend(&bytes[..retention.len()]));
        assert!(ops.pop_completed().is_some());
        assert!(
            ops.retained_ops.len() <= WINDOW as usize && ops.retained_bytes.len() <= 2 * WINDOW as usize * CHUNK_LEN
        );
    }
    let capacity = ops.retained_bytes.capacity();
    assert!(capacity <= 4 * WINDOW as usize * CHUNK_LEN, "{capacity} bytes");
    ops.forget_below(ops.end());
    assert_eq!((ops.retained_ops.len(), ops.retained_bytes.len()), (0, 0));
}

proptest! {
    /// Over all ranks and chunks, the contributed and received bytes are those that the collective defines.
    #[test]
    fn parts_compose_the_collective(ranks in 1_u32..12, root in 0_u32..12, count in 0_u64..100, before in 0_u64..3) {
        let root = root % ranks;
        for desc in descs(root, count) {
            let mut ends = Vec::new();
            let mut given = vec![0_u32; count as usize * 4];
            for rank in 0..ranks {
                let mut ops = Ops::new(CHUNK_LEN, RankInfo { rank, ranks });
                (0..before).for_each(|_| { ops.post(OpDesc::barrier(), 0, true, None).unwrap(); });
                ops.post(desc, 0, true, None).unwrap();
                ends.push(ops.end());
                let own = Span::of_blocks(count as usize, ranks, rank, rank + 1);
                let reads = match desc.collective {
                    Collective::Broadcast if rank != root => 0..0,
                    Collective::AllGather => 0..own.len * 4,
                    _ => 0..count as usize * 4,
                };
                let writes = match desc.collective {
                    Collective::Reduce if rank != root => vec![],
                    Collective::Broadcast if rank == root => vec![],
                    Collective::ReduceScatter => (0..own.len * 4).collect(),
                    Collective::AllGather => (0..count as usize * 4).filter(|byte| !(own.start * 4..own.end() * 4).contains(byte)).collect(),
                    _ => (0..count as usize * 4).collect(),
                };
                let (mut read, mut written) = (Vec::new(), Vec::new());
                for seq in before..ops.end() {
                    let part = ops.of_seq(seq).unwrap().part(seq);
                    let input = part.input.clone().unwrap_or_default();
                    prop_assert!(input.len() <= CHUNK_LEN && input.len().is_multiple_of(4));
                    let base = if desc.collective == Collective::AllGather { own.start * 4 } else { 0 };
                    input.clone().for_each(|byte| given[base + byte] += 1);
                    read.extend(input);
                    if let Some(Landing { result_len, part, at }) = part.landing {
                        prop_assert!(part.end <= result_len && result_len <= CHUNK_LEN);
                        written.extend(at..at + part.len());
                    }
                }
                prop_assert_eq!(read, reads.collect::<Vec<_>>(), "{:?} rank {}", desc, rank);
                prop_assert_eq!(written, writes, "{:?} rank {}", desc, rank);
            }
            prop_assert!(ends.windows(2).all(|pair| pair[0] == pair[1]), "all ranks count the same seqs");
            let contributors = if desc.collective.reduces() { ranks } else { 1 };
            prop_assert!(given.iter().all(|&n| n == contributors), "{:?}: {:?}", desc, given);
        }
    }
}
