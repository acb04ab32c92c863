//! Recovery preserves results bit by bit, also if they depend on the order or have partial values wider than elements.

use crate::common::{Cluster, over_udp, plain};
use crate::loss::DeviceLoss;
use crate::workload::{ATTEMPTS_PER_RUN, prefer_tree};
use std::time::Duration;
use sumac::{Buffers, CallOptions, Communicator, JoinConfig, Order, Outcome, ReduceOp};
use sumac_firmware::emulated::ZeroCopyConfig;
use sumac_hal::op::{Dtype, OpDesc};
use sumac_tests::oracle::weight;

const RANKS: u32 = 4;
/// The number of elements: many chunks.
const LEN: usize = 30_000;

/// The operations, run in turn.
const KINDS: [(Dtype, ReduceOp); 7] = [
    (Dtype::F32, ReduceOp::Sum),
    (Dtype::F32, ReduceOp::Avg),
    (Dtype::F32, ReduceOp::PremulSum),
    (Dtype::Bf16, ReduceOp::Sum),
    (Dtype::E4m3, ReduceOp::Sum),
    (Dtype::F32, ReduceOp::MinLoc),
    (Dtype::F64, ReduceOp::Max),
];

/// Values of both signs and many magnitudes, so that sums of four depend on the order.
fn input(op: u64, rank: u32, desc: &OpDesc) -> Vec<u8> {
    let word = |i: usize| weight(&[op, rank.into(), i as u64]);
    let count = desc.count as usize;
    let float = |i| (word(i) as i32 as f32) * [1e-6, 1.0, 3e5][(word(i) >> 40) as usize % 3];
    match (desc.dtype.expect("numbers"), desc.op.expect("a reduction")) {
        // A value and its index.
        (Dtype::F32, ReduceOp::MinLoc) => {
            (0..count).flat_map(|i| [float(i).to_le_bytes(), (rank * 7 + i as u32).to_le_bytes()].concat()).collect()
        }
        (Dtype::F32, _) => (0..count).flat_map(|i| float(i).to_le_bytes()).collect(),
        (Dtype::F64, _) => (0..count).flat_map(|i| f64::from(float(i)).to_le_bytes()).collect(),
        // The upper half of a float.
        (Dtype::Bf16, _) => (0..count).flat_map(|i| [float(i).to_le_bytes()[2], float(i).to_le_bytes()[3]]).collect(),
        // No infinities and no NaN.
        _ => (0..count).map(|i| (word(i) as u8) & 0xbf).collect(),
    }
}

fn run(comm: &Communicator, op: u64) -> (Vec<u8>, Outcome) {
    let (dtype, reduce) = KINDS[op as usize % KINDS.len()];
    let desc = OpDesc::all_reduce(dtype, reduce, LEN as u64);
    let mut buffer = input(op, comm.rank(), &desc);
    let scalar = (reduce == ReduceOp::PremulSum).then_some(0.3);
    let options = CallOptions { scalar, ..CallOptions::default() };
    let outcome = comm.run(&desc, Buffers::InPlace(&mut buffer), &options).expect("a result");
    (buffer, outcome)
}

fn bits_are_the_same(order: Order, levels: usize, transport: fn(&mut JoinConfig)) {
    let configure = move |config: &mut JoinConfig| {
        transport(config);
        config.order = order;
        config.deadline = Duration::from_secs(20);
    };
    let mut config = prefer_tree();
    (config.chunk_max_bytes, config.zero_copy_chunk_max_bytes) = (2048, 2048);
    let hosts = RANKS as usize / levels;
    let kinds = KINDS.len() as u64;
    let mut cluster = Cluster::start_zero_copy(levels, hosts, ZeroCopyConfig::default(), config);
    let without: Vec<Vec<u8>> = cluster
        .run("without", RANKS, configure, |comm| {
            let results = (0..kinds).map(|op| run(&comm, op)).collect::<Vec<_>>();
            assert!(results.iter().all(|(_, outcome)| outcome.path == sumac::Path::Tree), "{results:?}");
            comm.leave();
            results.into_iter().map(|(result, _)| result).collect()
        })
        .remove(0);
    cluster.boards.clear();
    let mut recovered = 0;
    for op in 0..ATTEMPTS_PER_RUN * kinds {
        if op >= kinds && recovered > 0 {
            break;
        }
        let op = op % kinds;
        let mut config = prefer_tree();
        (config.chunk_max_bytes, config.zero_copy_chunk_max_bytes) = (2048, 2048);
        let mut cluster = Cluster::start_zero_copy(levels, hosts, ZeroCopyConfig::default(), config);
        let loss = DeviceLoss::of(&mut cluster, RANKS);
        let outcomes = cluster.run("with", RANKS, configure, |comm| {
            comm.barrier().expect("all are there");
            let (result, outcome) = loss.strike_during(comm.rank(), || run(&comm, op));
            assert!(result == without[op as usize], "{:?} after the loss: {outcome:?}", KINDS[op as usize]);
            comm.barrier().expect("all are still there");
            comm.leave();
            outcome
        });
        recovered += usize::from(outcomes.iter().any(|outcome| outcome.recovered));
    }
    assert!(recovered > 0, "no operation was recovered");
}

#[test]
fn recovered_fold_order_gives_the_same_bits() {
    bits_are_the_same(Order::TreeFold, 1, over_udp);
    bits_are_the_same(Order::TreeFold, 1, plain);
}

#[test]
fn recovered_pairwise_order_gives_the_same_bits() {
    bits_are_the_same(Order::TreePairwise, 1, over_udp);
    bits_are_the_same(Order::TreePairwise, 1, plain);
}

/// Partial values travel between devices in the accumulator type.
#[test]
fn recovered_two_level_order_gives_the_same_bits() {
    bits_are_the_same(Order::TreeFold, 2, plain);
}
