//! Every collective that goes through the tree, in place and out of place, with roots other than rank 0, while the device
//! dies.

use crate::common::{Cluster, by_packets};
use crate::work::{Kill, by_both, by_reference, by_tree, until_repaired, value};
use std::ops::Range;
use std::time::Duration;
use sumac::{Buffers, CallOptions, Communicator, JoinConfig, Outcome, ReduceOp};
use sumac_firmware::emulated::BusConfig;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc};

const RANKS: u32 = 4;
/// Elements of an operation: several windows, and blocks that are not equal.
const LEN: usize = 20_003;
/// Rounds of all collectives that have begun when the device dies.
const KINDS: u64 = 6;

fn desc(nth: u64, root: u32) -> OpDesc {
    let (dtype, op, count) = (Dtype::I64, ReduceOp::Sum, LEN as u64);
    match nth % KINDS {
        0 => OpDesc::all_reduce(dtype, op, count),
        1 => OpDesc::reduce(dtype, op, Rank(root), count),
        2 => OpDesc::broadcast(dtype, Rank(root), count),
        3 => OpDesc::reduce_scatter(dtype, op, count),
        4 => OpDesc::all_gather(dtype, count),
        _ => OpDesc::barrier(),
    }
}

/// The block of a rank; lengths differ by one at most.
fn block(rank: u32) -> Range<usize> {
    let (ranks, rest) = (RANKS as usize, LEN % RANKS as usize);
    let start = |rank: usize| rank * (LEN / ranks) + rank * rest / ranks;
    start(rank as usize)..start(rank as usize + 1)
}

/// What is in and out of an operation at a rank: elements of all, or none.
fn spans(desc: &OpDesc, rank: u32) -> (Range<usize>, Range<usize>) {
    let all = 0..desc.count as usize;
    let at_root = if desc.root.0 == rank { all.clone() } else { 0..0 };
    match desc.collective {
        Collective::Reduce => (all, at_root),
        Collective::Broadcast => (at_root, all),
        Collective::ReduceScatter => (all, block(rank)),
        Collective::AllGather => (block(rank), all),
        _ => (all.clone(), all),
    }
}

fn expected(desc: &OpDesc, op: u64, i: usize) -> i64 {
    let owner = |i| (0..RANKS).find(|&rank| block(rank).contains(&i)).expect("an owner");
    match desc.collective {
        Collective::Broadcast => value(op, desc.root.0, i),
        Collective::AllGather => value(op, owner(i), i),
        _ => (0..RANKS).fold(0_i64, |sum, rank| sum.wrapping_add(value(op, rank, i))),
    }
}

/// Run operation `op` and check what came of it.
fn operation(comm: &Communicator, op: u64, registered: bool) -> Outcome {
    let root = 1 + (op / KINDS % u64::from(RANKS - 1)) as u32;
    let desc = desc(op, root);
    let (given, taken) = spans(&desc, comm.rank());
    let in_place = (op / KINDS).is_multiple_of(2);
    let whole = given.end.max(taken.end);
    let lens = if in_place { (whole, 0) } else { (given.len(), taken.len()) };
    let mut memory = (comm.alloc::<i64>(lens.0).expect("memory"), comm.alloc::<i64>(lens.1).expect("memory"));
    let mut own = (vec![0; lens.0], vec![0; lens.1]);
    let (first, second): (&mut [i64], &mut [i64]) =
        if registered { (&mut memory.0, &mut memory.1) } else { (&mut own.0, &mut own.1) };
    let at = if in_place { given.start } else { 0 };
    (0..given.len()).for_each(|i| first[at + i] = value(op, comm.rank(), given.start + i));
    let buffers = match in_place {
        true => Buffers::InPlace(bytemuck::cast_slice_mut(first)),
        false => Buffers::Separate { input: bytemuck::cast_slice(first), output: bytemuck::cast_slice_mut(second) },
    };
    let outcome = comm.run(&desc, buffers, &CallOptions::default()).expect("a result");
    let found = if in_place { &first[taken.clone()] } else { &second[..] };
    for (i, &x) in (taken.start..).zip(found) {
        assert_eq!(x, expected(&desc, op, i), "element {i} of {desc}, operation {op}, in place: {in_place}");
    }
    outcome
}

fn all_collectives(configure: impl Fn(&mut JoinConfig) + Sync, registered: bool) {
    let mut repaired = 0;
    for nth in 0..KINDS {
        let mut config = by_tree();
        (config.chunk_max_bytes, config.reference_chunk_max_bytes) = (2048, 2048);
        let mut cluster = Cluster::start_on(1, RANKS as usize, BusConfig::default(), config);
        let kill = Kill { device: 0, after_operations: nth + KINDS * (nth % 2), delay: Duration::from_micros(300) };
        let seen = until_repaired(&mut cluster, RANKS, kill, &configure, |comm, op| operation(comm, op, registered));
        repaired += seen.repaired.len();
    }
    assert!(repaired > 0, "no device has died under one of the operations");
}

#[test]
fn by_packets_all_are_got_over() {
    all_collectives(by_packets, false);
}

#[test]
fn by_reference_all_are_got_over() {
    all_collectives(by_reference, true);
}

#[test]
fn bounced_all_are_got_over() {
    all_collectives(by_reference, false);
}

#[test]
fn by_both_ways_all_are_got_over() {
    all_collectives(by_both, true);
}

/// Below two devices, of which the one at the top dies: results and contributions are at the leaves, or at no device.
#[test]
fn of_two_levels_all_are_got_over() {
    for configure in [by_reference as fn(&mut JoinConfig), by_both] {
        for device in 0..2 {
            let mut config = by_tree();
            (config.chunk_max_bytes, config.reference_chunk_max_bytes) = (2048, 2048);
            let mut cluster = Cluster::start_on(2, 2, BusConfig::default(), config);
            let kill = Kill { device, after_operations: 2 + KINDS, delay: Duration::from_micros(300) };
            until_repaired(&mut cluster, RANKS, kill, configure, |comm, op| operation(comm, op, true));
        }
    }
}
