//! The number of bytes sent: each byte of a rank once, and between levels one partial result per leaf.

use crate::call::{Arena, Call, Placement, check_zero_copy, leaf};
use crate::common::{Cluster, job_name};
use crate::membership::shape;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::{ControllerConfig, status};
use sumac::{Algo, Collective, JoinConfig, OpDesc, Order, ReduceOp, Transport};
use sumac_firmware::emulated::ZeroCopyConfig;
use sumac_hal::ctrl::Counters;
use sumac_hal::ids::Rank;
use sumac_hal::op::Dtype;
use sumac_hal::uplink::HopTimers;
use sumac_hal::wire::{HEADER_LEN, SHORT_HEADER_LEN};
use sumac_tests::oracle::Shape;

const CHUNK_LEN_BYTES: u16 = 4096;

fn over_shm(config: &mut JoinConfig) {
    (config.algo, config.transport) = (Algo::Tree, Transport::Shm);
}

/// Return the counters of all devices, by name.
fn counters(cluster: &Cluster) -> Vec<(String, Counters)> {
    let report = status(cluster.controller.local_addr()).expect("a report");
    let counters = |device: sumac::controller::proto::DeviceStatus| {
        (device.name, device.stats.expect("a device that answers").counters)
    };
    report.devices.into_iter().map(counters).collect()
}

/// Return the devices of a job's tree, root first.
fn devices(cluster: &Cluster, job: &str) -> Vec<String> {
    let report = status(cluster.controller.local_addr()).expect("a report");
    let job = report.jobs.into_iter().find(|other| other.name == job_name(job)).expect("it runs");
    let tree = job.tree.expect("complete").expect("a tree");
    assert_eq!((tree.zero_copy_ranks, tree.levels), (job.world, 2));
    tree.devices
}

/// Ranks contribute zero-copy, and leaves send packets to the root: one partial result per leaf, regardless of its
/// number of ranks.
#[test]
fn leaf_sends_one_partial_sum_to_its_parent() {
    const LEAVES: usize = 3;
    const RANKS: usize = 9;
    const ELEMENTS: u64 = 15_000;
    let config = ControllerConfig { chunk_max_bytes: CHUNK_LEN_BYTES, ..ControllerConfig::new() };
    let cluster = Cluster::start_zero_copy(
        LEAVES,
        RANKS / LEAVES,
        ZeroCopyConfig { strict: true, ..ZeroCopyConfig::default() },
        config,
    );
    let shape = shape(&cluster, RANKS as u32, Order::Arrival);
    assert_ne!(shape, leaf(0..RANKS), "one level");
    for (dtype, partial_bytes) in [(Dtype::F32, 4), (Dtype::Bf16, 4), (Dtype::I16, 2), (Dtype::F64, 8)] {
        let desc = OpDesc::all_reduce(dtype, ReduceOp::Sum, ELEMENTS);
        let call = Call::new(desc, (&shape, RANKS, Order::Arrival), 0x1e7e1);
        let job = dtype.name();
        let seen = cluster.run(job, RANKS as u32, over_shm, |comm| {
            let (rank, mut arena) = (comm.rank() as usize, Arena::new(&comm));
            let snapshot = || {
                // Barriers carry no payload, so they do not change the counters.
                comm.barrier().expect("all are there");
                let counters = (rank == 0).then(|| (counters(&cluster), devices(&cluster, job)));
                comm.barrier().expect("all are there");
                counters
            };
            let before = snapshot();
            for registered in [true, false] {
                let placement = Placement::of(registered, true);
                let outcome = arena.call(&comm, &call, placement).expect("a sum");
                check_zero_copy(&call, placement, rank, &outcome).expect("zero-copy");
            }
            let after = snapshot();
            comm.leave();
            before.zip(after)
        });
        let ((before, devices), (after, _)) = seen.into_iter().flatten().next().expect("rank 0 has looked");
        let of = |counters: &[(String, Counters)], name: &str| {
            counters.iter().find(|(other, _)| other == name).expect("it is connected").1
        };
        // Two operations.
        let sum_bytes = 2 * ELEMENTS * partial_bytes;
        for name in &devices[1..] {
            let (before, after) = (of(&before, name), of(&after, name));
            let again = after.contributions_resent - before.contributions_resent;
            let (bytes, packets) = (after.bytes_out - before.bytes_out, after.packets_out - before.packets_out);
            // Headers are short or full.
            let [most_payload, least_payload] = [SHORT_HEADER_LEN, HEADER_LEN].map(|len| bytes - packets * len as u64);
            println!("{job}: {name} sent {least_payload} bytes up, of {} ranks' {sum_bytes}", RANKS / LEAVES);
            let most = sum_bytes + again * u64::from(CHUNK_LEN_BYTES);
            let is_sum = most_payload >= sum_bytes && least_payload <= most;
            assert!(is_sum, "{bytes} bytes in {packets} packets, {again} contributions sent again");
        }
    }
    assert!(cluster.boards.iter().all(|board| board.failed_chains() == 0), "a chain failed in strict mode");
}

/// When the last contribution of a chunk arrives in a packet, no engine completion triggers the leaf. It must still
/// send its partial result at once, not when its probe timer fires.
#[test]
fn leaf_forwards_completed_sum_without_waiting_for_its_timer() {
    let probe_interval = Duration::from_secs(10);
    let timers = HopTimers { probe_min: probe_interval, probe_max: probe_interval, dead: 10 * probe_interval };
    let cluster = Cluster::start_with(2, 2, 1, ControllerConfig { timers, ..ControllerConfig::new() });
    let node = |children: &[Shape]| Shape::Node(children.to_vec());
    let [zero, one, two, three] = [0, 1, 2, 3].map(Shape::Rank);
    assert_eq!(shape(&cluster, 4, Order::Arrival), node(&[node(&[zero, one]), node(&[two, three])]));
    // Each leaf has one zero-copy rank, which contributes first, and one that sends packets.
    let is_first = |rank: u32| rank.is_multiple_of(2);
    let attach = |config: &mut JoinConfig| {
        (config.algo, config.transport) =
            (Algo::Tree, if is_first(config.rank) { Transport::Shm } else { Transport::Udp });
    };
    let taken = || counters(&cluster).iter().map(|(_, counters)| counters.contributions).sum::<u64>();
    let all = Barrier::new(4);
    let slowest = cluster.run("ready", 4, attach, |comm| {
        comm.barrier().expect("all are there");
        let begin = taken();
        all.wait();
        let times = (0..5).map(|round| {
            let start = || comm.start_broadcast(vec![comm.rank(); 4], 1).expect("started");
            let started = is_first(comm.rank()).then(start);
            // Each previous round had six contributions (four ranks, two leaves); this one has those of two ranks so
            // far.
            while taken() < begin + 6 * round + 2 {
                thread::yield_now();
            }
            all.wait();
            let begun = Instant::now();
            let (values, _) = started.unwrap_or_else(start).wait().expect("the values of rank 1");
            assert_eq!(values, [1; 4]);
            begun.elapsed()
        });
        times.max()
    });
    assert!(slowest.iter().all(|&slowest| slowest < Some(probe_interval / 2)), "{slowest:?}");
}

/// An all-reduce through the tree sends each byte of a rank once; a ring sends 2 (N - 1) / N as much. The count is
/// exact, because zero-copy has no headers.
#[test]
fn zero_copy_rank_sends_each_byte_once() {
    const RANKS: usize = 4;
    const ELEMENTS: u64 = 15_000;
    let config = ControllerConfig { zero_copy_chunk_max_bytes: CHUNK_LEN_BYTES, ..ControllerConfig::new() };
    let cluster =
        Cluster::start_zero_copy(1, RANKS, ZeroCopyConfig { strict: true, ..ZeroCopyConfig::default() }, config);
    let root = Rank(2);
    let (dtype, op, count) = (Dtype::I32, ReduceOp::Sum, ELEMENTS);
    let descs = [
        OpDesc::all_reduce(dtype, op, count),
        OpDesc::reduce(dtype, op, root, count),
        OpDesc::broadcast(dtype, root, count),
        OpDesc::reduce_scatter(dtype, op, count),
        OpDesc::all_gather(dtype, count),
        OpDesc::barrier(),
    ];
    let calls = descs.map(|desc| Call::new(desc, (&leaf(0..RANKS), RANKS, Order::Arrival), 0xb17e5));
    let sent = cluster.run("bytes", RANKS as u32, over_shm, |comm| {
        let mut arena = Arena::new(&comm);
        let mut sent = |call: &Call, placement| arena.call(&comm, call, placement).expect("a result").wire_bytes;
        let placements = [(true, true), (true, false), (false, true), (false, false)];
        let sent: Vec<_> = calls
            .iter()
            .map(|call| placements.map(|(registered, place)| sent(call, Placement::of(registered, place))))
            .collect();
        comm.leave();
        sent
    });
    for (rank, sent) in sent.iter().enumerate() {
        for (call, sent) in calls.iter().zip(sent) {
            let all = ELEMENTS * 4;
            let expected = match call.desc.collective {
                Collective::Broadcast if rank != root.0 as usize => 0,
                Collective::AllGather => all / RANKS as u64,
                Collective::Barrier => 0,
                _ => all,
            };
            assert_eq!(*sent, [expected; 4], "{} at rank {rank}", call.desc);
        }
    }
}
