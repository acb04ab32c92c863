//! Groups that share a device, calls that differ, and devices without room for redo slots.

use crate::common::Cluster;
use crate::seats::{memberships, wait_until_idle};
use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;
use sumac::controller::{ControllerConfig, status};
use sumac::{
    Algo, Attach, CallOptions, Communicator, Error, JoinConfig, OpDesc, Order, Outcome, Path, ReduceOp, Transfer,
};
use sumac_device::Node;
use sumac_firmware::emulated::BusConfig;
use sumac_hal::ids::Rank;
use sumac_hal::op::Dtype;
use sumac_hal::shard::Shard;
use sumac_tests::oracle::weight;

const CHUNK_LEN_BYTES: u16 = 1024;

/// Ranks of jobs that call different things.
const RANKS: u32 = 3;

fn cluster(hosts: usize, redo_memory_bytes: usize) -> Cluster {
    let config = ControllerConfig { reference_chunk_max_bytes: CHUNK_LEN_BYTES, ..ControllerConfig::new() };
    Cluster::start_on(1, hosts, BusConfig { strict: true, redo_memory_bytes, ..BusConfig::default() }, config)
}

fn by_reference(config: &mut JoinConfig) {
    (config.algo, config.attach) = (Algo::Tree, Attach::Shm);
}

fn value(seed: u64, rank: u32, i: usize) -> i64 {
    weight(&[seed, rank.into(), i as u64]) as i64
}

/// All-reduce `len` values of registered memory, and check the sum.
fn sum(comm: &Communicator, seed: u64, len: usize) -> Outcome {
    let mut buffer = comm.alloc::<i64>(len).expect("memory");
    buffer.iter_mut().enumerate().for_each(|(i, x)| *x = value(seed, comm.rank(), i));
    let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
    let sum = |i| (0..comm.size()).fold(0_i64, |sum, rank| sum.wrapping_add(value(seed, rank, i)));
    assert!(buffer.iter().enumerate().all(|(i, &x)| x == sum(i)), "{} of {}", comm.name(), comm.size());
    outcome
}

/// What one rank calls, and what the others do.
fn mixes() -> Vec<[OpDesc; 2]> {
    let (f32, sum) = (Dtype::F32, ReduceOp::Sum);
    let base = OpDesc::all_reduce(f32, sum, 1000);
    vec![
        [OpDesc { count: 1001, ..base }, base],
        // Another number of chunks, and of runs; the first ones look alike.
        [OpDesc { count: 100_000, ..base }, base],
        [OpDesc { op: Some(ReduceOp::Max), ..base }, base],
        [OpDesc { dtype: Some(Dtype::I32), ..base }, base],
        [OpDesc::reduce(f32, sum, Rank(1), 1000), OpDesc::reduce(f32, sum, Rank(2), 1000)],
        [OpDesc::broadcast(f32, Rank(0), 1000), OpDesc::broadcast(f32, Rank(1), 1000)],
        [OpDesc::reduce_scatter(f32, sum, 1000), base],
        [OpDesc::all_gather(f32, 999), OpDesc::all_gather(f32, 1002)],
        [OpDesc::barrier(), base],
        [OpDesc::all_reduce(f32, sum, 0), base],
    ]
}

/// One rank, `odd`, calls another operation than the others, after one that is right, in registered memory or not;
/// returns what each is told.
fn differ(
    cluster: &Cluster,
    job: &str,
    (odd, ops): (u32, [OpDesc; 2]),
    (registered, attach): (bool, fn(u32) -> Attach),
) -> Vec<Error> {
    let configure = |config: &mut JoinConfig| (config.algo, config.attach) = (Algo::Tree, attach(config.rank));
    cluster.run(job, RANKS, configure, |comm| {
        sum(&comm, 1, 500);
        let desc = ops[usize::from(comm.rank() != odd)];
        let len = desc.count as usize * desc.element_bytes();
        let mut plain = vec![7; len];
        let mut buffer = comm.alloc::<u8>(len).expect("memory");
        buffer.fill(7);
        let memory = if registered { &mut buffer[..] } else { &mut plain[..] };
        let options = CallOptions { deadline: Some(Duration::from_secs(20)), ..CallOptions::default() };
        let error = comm.run(&desc, &mut *memory, &options).expect_err("a mismatch");
        assert!(memory.iter().all(|&byte| byte == 7), "{desc}: the buffer is as it was");
        assert!(matches!(comm.barrier(), Err(Error::Ended(_))));
        error
    })
}

/// All ranks hear of both operations, count and root included, whichever way they contribute.
#[test]
fn operations_that_differ_are_named_at_all_ranks() {
    let cluster = cluster(RANKS as usize, 8 << 20);
    let mixed: fn(u32) -> Attach = |rank| if rank == 1 { Attach::Udp } else { Attach::Shm };
    for (way, (registered, attach)) in
        [(true, mixed), (true, |_| Attach::Shm), (false, |_| Attach::Shm)].into_iter().enumerate()
    {
        for (number, ops) in mixes().into_iter().enumerate() {
            let odd = (number + way) as u32 % RANKS;
            let errors = differ(&cluster, &format!("differ {way} {number}"), (odd, ops), (registered, attach));
            for error in &errors {
                let Error::Mismatch { first, other } = error else { panic!("{ops:?}: {error}") };
                let named: BTreeSet<String> = [first, other].map(ToString::to_string).into();
                assert_eq!(named, ops.map(|desc| desc.to_string()).into(), "registered: {registered}");
            }
            assert!(errors.windows(2).all(|pair| pair[0] == pair[1]), "{errors:?}");
        }
    }
    assert_eq!(cluster.boards[0].failed_chains(), 0, "strict mode has tripped");
}

/// Each sub-communicator is a group of its own, and each of its ranks a function of its own.
#[test]
fn sub_communicators_share_a_device_by_reference() {
    let cluster = cluster(6, 32 << 20);
    cluster.run("world", 6, by_reference, |comm| {
        let row = comm.split(Some(comm.rank() / 3), 0).expect("a split").expect("a color");
        let column = comm.split_with(Some(comm.rank() % 3), 0, |config| config.order = Order::TreePairwise);
        let column = column.expect("a split").expect("a color");
        assert_eq!((row.size(), column.size()), (3, 2));
        // Operations of all three in flight together, each in its own memory.
        for round in 0..10 {
            let groups = [&comm, &row, &column];
            let started = groups.map(|group| {
                let mut buffer = group.alloc::<i64>(3000).expect("memory");
                buffer.iter_mut().enumerate().for_each(|(i, x)| *x = value(round, group.rank(), i));
                group.start_all_reduce(buffer, ReduceOp::Sum).expect("started")
            });
            for (group, handle) in groups.into_iter().zip(started).rev() {
                let (buffer, outcome) = handle.wait().expect("a sum");
                assert_eq!((outcome.path, outcome.transfer), (Path::Tree, Some(Transfer::Registered)));
                let sum = |i| (0..group.size()).fold(0_i64, |sum, rank| sum.wrapping_add(value(round, rank, i)));
                assert!(buffer.iter().enumerate().all(|(i, &x)| x == sum(i)), "round {round}, {}", group.name());
            }
        }
        // Memory is registered with one group's function: to another's it is like any other.
        let mut foreign = row.alloc::<i64>(100).expect("memory");
        foreign.fill(1);
        let outcome = column.all_reduce(&mut foreign, ReduceOp::Sum).expect("a sum");
        assert_eq!(outcome.transfer, Some(Transfer::Bounced));
        assert!(foreign.iter().all(|&x| x == 2));
        for group in [column, row, comm] {
            group.barrier().expect("all are there");
            group.leave();
        }
    });
    assert_eq!(cluster.boards[0].failed_chains(), 0, "strict mode has tripped");
}

#[test]
fn jobs_share_a_device_by_reference() {
    let cluster = cluster(4, 32 << 20);
    thread::scope(|scope| {
        for (seed, job) in (0..).zip(["a", "b"]) {
            let cluster = &cluster;
            scope.spawn(move || {
                cluster.run(job, 4, by_reference, |comm| {
                    for op in 0..60 {
                        let outcome = sum(&comm, seed * 1000 + op, [1, 500, 20_000][op as usize % 3]);
                        assert_eq!(outcome.transfer, Some(Transfer::Registered));
                    }
                    comm.leave();
                });
            });
        }
    });
    assert_eq!(cluster.boards[0].failed_chains(), 0, "strict mode has tripped");
}

/// How a job of two ranks goes on a device whose redo memory another job may have.
fn transfer_and_reason(cluster: &Cluster, job: &str, attach: Attach) -> (Option<Transfer>, Option<String>) {
    let configure = |config: &mut JoinConfig| config.attach = attach;
    let outcomes = cluster.run(job, 2, configure, |comm| {
        // The sum alone may find a schedule cheaper.
        let forced = CallOptions { algo: Some(Algo::Tree), ..CallOptions::default() };
        let by_tree = comm.barrier_with(&forced).map(|outcome| outcome.transfer);
        let outcome = sum(&comm, 1, 300);
        comm.leave();
        (by_tree.unwrap_or(None), outcome.fallback)
    });
    assert_eq!(outcomes[0], outcomes[1]);
    outcomes.into_iter().next().expect("two ranks")
}

/// A device without redo memory takes packets from who lets it choose; who insists on shared memory hears why not.
#[test]
fn without_redo_memory_ranks_contribute_by_packets_or_hear_why() {
    // What a window of one chunk needs, less a byte.
    let need = 2 * Node::redo_slot_len_bytes(Order::Arrival, 2, CHUNK_LEN_BYTES);
    let cluster = cluster(2, need - 1);
    assert_eq!(transfer_and_reason(&cluster, "auto", Attach::Auto), (Some(Transfer::Packets), None));
    let (transfer, reason) = transfer_and_reason(&cluster, "shm", Attach::Shm);
    let reason = reason.expect("a fallback is told");
    for part in ["asks for shared memory", "leaf0", "memory for redo slots", "`auto` or `udp`"] {
        assert!(transfer.is_none() && reason.contains(part), "{reason:?} does not say {part:?}");
    }
}

/// While one job has the redo memory, the next one goes by packets; when it has left, the next one by reference.
#[test]
fn redo_memory_is_to_be_had_again_when_a_job_has_left() {
    let need = 2 * Node::redo_slot_len_bytes(Order::Arrival, 2, CHUNK_LEN_BYTES);
    let cluster = cluster(2, need);
    cluster.run("first", 2, by_reference, |comm| {
        sum(&comm, 1, 5000);
        if comm.rank() == 0 {
            assert_eq!(transfer_and_reason(&cluster, "second", Attach::Auto), (Some(Transfer::Packets), None));
            let (_, reason) = transfer_and_reason(&cluster, "third", Attach::Shm);
            assert!(
                reason.as_ref().is_some_and(|why| why.contains("0 bytes of memory for redo slots free")),
                "{reason:?}"
            );
            let report = status(cluster.controller.local_addr()).expect("a report");
            let job = report.jobs.iter().find(|job| job.name == "first").expect("it runs");
            assert!(matches!(&job.tree, Some(Ok(tree)) if tree.by_reference == 2));
        }
        assert_eq!(sum(&comm, 2, 5000).transfer, Some(Transfer::Registered));
        comm.leave();
    });
    wait_until_idle(&cluster);
    assert_eq!(transfer_and_reason(&cluster, "fourth", Attach::Shm), (Some(Transfer::Registered), None));
}

/// The controller reserves what the device takes: with exactly the memory that the device's own formula asks for, a group
/// gets its whole window, and with one byte less, half of it.
#[test]
fn controller_and_device_agree_on_the_length_of_redo_slots() {
    const WINDOW: u16 = 8;
    let slots = 2 * Shard::new(0, 1).expect("one shard").most_within(WINDOW.into()) as usize;
    let mut compared = 0;
    for order in [Order::Arrival, Order::TreeFold, Order::TreePairwise] {
        for children in [1_u16, 2, 3, 4, 5, 8, 9] {
            let slot_len_bytes = Node::redo_slot_len_bytes(order, children, CHUNK_LEN_BYTES);
            for (missing_bytes, window) in [(0, WINDOW), (1, WINDOW / 2)] {
                let config = ControllerConfig {
                    reference_chunk_max_bytes: CHUNK_LEN_BYTES,
                    reference_window_chunks: WINDOW,
                    ..ControllerConfig::new()
                };
                let redo_memory_bytes = slots * slot_len_bytes - missing_bytes;
                let bus = BusConfig { redo_memory_bytes, ..BusConfig::default() };
                let cluster = Cluster::start_on(1, children.into(), bus, config);
                for membership in memberships(&cluster, "slots", children.into(), (order, Attach::Shm)) {
                    let tree = membership.tree.unwrap_or_else(|why| panic!("{order:?}, {children} children: {why}"));
                    assert_eq!((tree.window_max, tree.chunk_len_bytes), (window, CHUNK_LEN_BYTES));
                    assert!(tree.bus.is_some(), "{order:?}, {children} children: by packets");
                }
                compared += 1;
            }
        }
    }
    println!("{compared} groups admitted with the memory that they need");
}
