//! Loss of a device during every collective of the tree, in place and out of place, with roots other than rank 0.

use crate::common::{Cluster, over_udp};
use crate::workload::{ATTEMPTS_PER_RUN, Kill, mixed, over_shm, prefer_tree, run_until_recovered, value};
use std::ops::Range;
use std::time::Duration;
use sumac::{Buffers, CallOptions, Communicator, JoinConfig, Outcome, ReduceOp};
use sumac_firmware::emulated::ZeroCopyConfig;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc};

const RANKS: u32 = 4;
/// Elements of an operation: several windows, and blocks of unequal lengths.
const LEN: usize = 20_003;
/// The number of collectives.
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

/// Return the block of a rank; lengths differ by one at most.
fn block(rank: u32) -> Range<usize> {
    let (ranks, rest) = (RANKS as usize, LEN % RANKS as usize);
    let start = |rank: usize| rank * (LEN / ranks) + rank * rest / ranks;
    start(rank as usize)..start(rank as usize + 1)
}

/// Return the ranges of elements in a rank's input and output.
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

/// Run operation `op` and check its result.
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
    let mut recovered = 0;
    for nth in 0..ATTEMPTS_PER_RUN * KINDS {
        if nth >= KINDS && recovered > 0 {
            break;
        }
        let mut config = prefer_tree();
        (config.chunk_max_bytes, config.zero_copy_chunk_max_bytes) = (2048, 2048);
        let mut cluster = Cluster::start_zero_copy(1, RANKS as usize, ZeroCopyConfig::default(), config);
        let kill =
            Kill { device: 0, after_operations: nth % KINDS + KINDS * (nth % 2), delay: Duration::from_micros(300) };
        let seen =
            run_until_recovered(&mut cluster, RANKS, kill, &configure, |comm, op| operation(comm, op, registered));
        recovered += seen.recovered.len();
    }
    assert!(recovered > 0, "no operation was recovered");
}

#[test]
fn packet_collectives_survive_device_loss() {
    all_collectives(over_udp, false);
}

#[test]
fn zero_copy_collectives_survive_device_loss() {
    all_collectives(over_shm, true);
}

#[test]
fn bounced_collectives_survive_device_loss() {
    all_collectives(over_shm, false);
}

#[test]
fn mixed_transport_collectives_survive_device_loss() {
    all_collectives(mixed, true);
}

/// Two levels: the root or a leaf is lost.
#[test]
fn two_level_collectives_survive_device_loss() {
    for configure in [over_shm as fn(&mut JoinConfig), mixed] {
        for device in 0..2 {
            let mut config = prefer_tree();
            (config.chunk_max_bytes, config.zero_copy_chunk_max_bytes) = (2048, 2048);
            let mut cluster = Cluster::start_zero_copy(2, 2, ZeroCopyConfig::default(), config);
            let kill = Kill { device, after_operations: 2 + KINDS, delay: Duration::from_micros(300) };
            run_until_recovered(&mut cluster, RANKS, kill, configure, |comm, op| operation(comm, op, true));
        }
    }
}
