//! How many bytes move where: each of a rank's once, and between levels once for each leaf.

use crate::calls::{Arena, Call, Way, check_by_reference, leaf};
use crate::common::{Cluster, job_name};
use crate::seats::shape;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::{ControllerConfig, status};
use sumac::{Algo, Attach, Collective, JoinConfig, OpDesc, Order, ReduceOp};
use sumac_firmware::emulated::BusConfig;
use sumac_hal::ctrl::Counters;
use sumac_hal::ids::Rank;
use sumac_hal::op::Dtype;
use sumac_hal::uplink::HopTimers;
use sumac_hal::wire::HEADER_LEN;
use sumac_tests::oracle::Shape;

const CHUNK_LEN_BYTES: u16 = 4096;

fn by_reference(config: &mut JoinConfig) {
    (config.algo, config.attach) = (Algo::Tree, Attach::Shm);
}

/// The counters of all devices, by name.
fn counters(cluster: &Cluster) -> Vec<(String, Counters)> {
    let report = status(cluster.controller.local_addr()).expect("a report");
    let counters = |device: sumac::controller::proto::DeviceStatus| {
        (device.name, device.stats.expect("a device that answers").counters)
    };
    report.devices.into_iter().map(counters).collect()
}

/// The devices of a job's tree, root first.
fn devices(cluster: &Cluster, job: &str) -> Vec<String> {
    let report = status(cluster.controller.local_addr()).expect("a report");
    let job = report.jobs.into_iter().find(|other| other.name == job_name(job)).expect("it runs");
    let tree = job.tree.expect("complete").expect("a tree");
    assert_eq!((tree.by_reference, tree.levels), (job.world, 2));
    tree.devices
}

/// Ranks contribute to their leaves by reference, and leaves to the root in packets: P bytes in partials for each leaf,
/// however many ranks it has.
#[test]
fn between_levels_each_leaf_sends_its_sum_once() {
    const LEAVES: usize = 3;
    const RANKS: usize = 9;
    const ELEMENTS: u64 = 15_000;
    let config = ControllerConfig { chunk_max_bytes: CHUNK_LEN_BYTES, ..ControllerConfig::new() };
    let cluster = Cluster::start_on(LEAVES, RANKS / LEAVES, BusConfig { strict: true, ..BusConfig::default() }, config);
    let shape = shape(&cluster, RANKS as u32, Order::Arrival);
    assert_ne!(shape, leaf(0..RANKS), "one level");
    for (dtype, partial_bytes) in [(Dtype::F32, 4), (Dtype::Bf16, 4), (Dtype::I16, 2), (Dtype::F64, 8)] {
        let desc = OpDesc::all_reduce(dtype, ReduceOp::Sum, ELEMENTS);
        let call = Call::new(desc, (&shape, RANKS, Order::Arrival), 0x1e7e1);
        let job = dtype.name();
        let seen = cluster.run(job, RANKS as u32, by_reference, |comm| {
            let (rank, mut arena) = (comm.rank() as usize, Arena::new(&comm));
            let look = || {
                // Barriers have no payload.
                comm.barrier().expect("all are there");
                let seen = (rank == 0).then(|| (counters(&cluster), devices(&cluster, job)));
                comm.barrier().expect("all are there");
                seen
            };
            let before = look();
            for registered in [true, false] {
                let way = Way::of(registered, true);
                let outcome = arena.call(&comm, &call, way).expect("a sum");
                check_by_reference(&call, way, rank, &outcome).expect("by reference");
            }
            let after = look();
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
            let headers = (after.packets_out - before.packets_out) * HEADER_LEN as u64;
            let payload = after.bytes_out - before.bytes_out - headers;
            println!("{job}: {name} sent {payload} bytes up, of {} ranks' {sum_bytes}", RANKS / LEAVES);
            let most = sum_bytes + again * u64::from(CHUNK_LEN_BYTES);
            assert!((sum_bytes..=most).contains(&payload), "{payload} bytes, {again} contributions sent again");
        }
    }
    assert!(cluster.boards.iter().all(|board| board.failed_chains() == 0), "strict mode has tripped");
}

/// Where the last child brings nothing that an engine has to move, no ring, chain or answer tells the leaf that its own
/// contribution is ready: it leaves all the same, and not when somebody asks after it.
#[test]
fn what_a_packet_makes_ready_at_a_leaf_is_sent_at_once() {
    let asks_after = Duration::from_secs(10);
    let timers = HopTimers { probe_min: asks_after, probe_max: asks_after, dead: 10 * asks_after };
    let cluster = Cluster::start_with(2, 2, 1, ControllerConfig { timers, ..ControllerConfig::new() });
    let node = |children: &[Shape]| Shape::Node(children.to_vec());
    let [zero, one, two, three] = [0, 1, 2, 3].map(Shape::Rank);
    assert_eq!(shape(&cluster, 4, Order::Arrival), node(&[zero, one, node(&[two, three])]));
    // At each leaf one rank by reference, which comes first, and one by packets.
    let is_first = |rank: u32| rank.is_multiple_of(2);
    let attach = |config: &mut JoinConfig| {
        (config.algo, config.attach) = (Algo::Tree, if is_first(config.rank) { Attach::Shm } else { Attach::Udp });
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
            // Of four ranks and a leaf in each round before, and of the two that are first.
            while taken() < begin + 5 * round + 2 {
                thread::yield_now();
            }
            all.wait();
            let begun = Instant::now();
            let (told, _) = started.unwrap_or_else(start).wait().expect("what rank 1 says");
            assert_eq!(told, [1; 4]);
            begun.elapsed()
        });
        times.max()
    });
    assert!(slowest.iter().all(|&slowest| slowest < Some(asks_after / 2)), "{slowest:?}");
}

/// All-reduce moves each byte of a rank once, not twice or 2 (N - 1) / N times; what a rank contributes to is all that
/// leaves it. Exactly: by reference there are no headers.
#[test]
fn a_rank_gives_each_byte_once() {
    const RANKS: usize = 4;
    const ELEMENTS: u64 = 15_000;
    let config = ControllerConfig { reference_chunk_max_bytes: CHUNK_LEN_BYTES, ..ControllerConfig::new() };
    let cluster = Cluster::start_on(1, RANKS, BusConfig { strict: true, ..BusConfig::default() }, config);
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
    let sent = cluster.run("bytes", RANKS as u32, by_reference, |comm| {
        let mut arena = Arena::new(&comm);
        let mut sent = |call: &Call, way| arena.call(&comm, call, way).expect("a result").wire_bytes;
        let ways = [(true, true), (true, false), (false, true), (false, false)];
        let sent: Vec<_> =
            calls.iter().map(|call| ways.map(|(registered, place)| sent(call, Way::of(registered, place)))).collect();
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
