//! Groups that share a device, mismatched calls, and devices without enough redo memory.

use crate::common::Cluster;
use crate::membership::{memberships, wait_until_idle};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use sumac::controller::{ControllerConfig, status};
use sumac::{
    Algo, CallOptions, Communicator, Error, JoinConfig, OpDesc, Order, Outcome, Path, ReduceOp, Transfer, Transport,
};
use sumac_device::Node;
use sumac_firmware::emulated::ZeroCopyConfig;
use sumac_hal::ids::Rank;
use sumac_hal::op::Dtype;
use sumac_hal::shard::Shard;
use sumac_tests::oracle::weight;

const CHUNK_LEN_BYTES: u16 = 1024;

/// The number of ranks in jobs with mismatched calls.
const RANKS: u32 = 3;

fn cluster(hosts: usize, redo_memory_bytes: usize) -> Cluster {
    let config = ControllerConfig { zero_copy_chunk_max_bytes: CHUNK_LEN_BYTES, ..ControllerConfig::new() };
    Cluster::start_zero_copy(
        1,
        hosts,
        ZeroCopyConfig { strict: true, redo_memory_bytes, ..ZeroCopyConfig::default() },
        config,
    )
}

fn over_shm(config: &mut JoinConfig) {
    (config.algo, config.transport) = (Algo::Tree, Transport::Shm);
}

fn value(seed: u64, rank: u32, i: usize) -> i64 {
    weight(&[seed, rank.into(), i as u64]) as i64
}

/// All-reduce `len` values in registered memory, and check the sum.
fn sum(comm: &Communicator, seed: u64, len: usize) -> Outcome {
    let mut buffer = comm.alloc::<i64>(len).expect("memory");
    buffer.iter_mut().enumerate().for_each(|(i, x)| *x = value(seed, comm.rank(), i));
    let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
    let sum = |i| (0..comm.size()).fold(0_i64, |sum, rank| sum.wrapping_add(value(seed, rank, i)));
    assert!(buffer.iter().enumerate().all(|(i, &x)| x == sum(i)), "{} of {}", comm.name(), comm.size());
    outcome
}

/// Pairs of operations: that of one rank, and that of all others.
fn mixes() -> Vec<[OpDesc; 2]> {
    let (f32, sum) = (Dtype::F32, ReduceOp::Sum);
    let base = OpDesc::all_reduce(f32, sum, 1000);
    vec![
        [OpDesc { count: 1001, ..base }, base],
        // Another number of chunks; the first chunks look the same.
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

/// After a matching operation, rank `odd` calls a different one than the others. Returns each rank's error.
fn differ(
    cluster: &Cluster,
    job: &str,
    (odd, ops): (u32, [OpDesc; 2]),
    (registered, transport): (bool, fn(u32) -> Transport),
) -> Vec<Error> {
    let configure = |config: &mut JoinConfig| (config.algo, config.transport) = (Algo::Tree, transport(config.rank));
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
        assert!(memory.iter().all(|&byte| byte == 7), "{desc}: the buffer has changed");
        assert!(matches!(comm.barrier(), Err(Error::Ended(_))));
        error
    })
}

/// All ranks get both operations, with count and root, over every transport.
#[test]
fn mismatched_zero_copy_calls_are_the_same_error_on_every_rank() {
    let cluster = cluster(RANKS as usize, 8 << 20);
    let mixed: fn(u32) -> Transport = |rank| if rank == 1 { Transport::Udp } else { Transport::Shm };
    for (setup, (registered, transport)) in
        [(true, mixed), (true, |_| Transport::Shm), (false, |_| Transport::Shm)].into_iter().enumerate()
    {
        for (number, ops) in mixes().into_iter().enumerate() {
            let odd = (number + setup) as u32 % RANKS;
            let errors = differ(&cluster, &format!("differ {setup} {number}"), (odd, ops), (registered, transport));
            for error in &errors {
                let Error::Mismatch { first, other } = error else { panic!("{ops:?}: {error}") };
                let named: BTreeSet<String> = [first, other].map(ToString::to_string).into();
                assert_eq!(named, ops.map(|desc| desc.to_string()).into(), "registered: {registered}");
            }
            assert!(errors.windows(2).all(|pair| pair[0] == pair[1]), "{errors:?}");
        }
    }
    assert_eq!(cluster.boards[0].failed_chains(), 0, "a chain failed in strict mode");
}

/// Each sub-communicator has a group of its own, and each of its ranks a function of its own.
#[test]
fn sub_communicators_share_a_zero_copy_device() {
    let cluster = cluster(6, 32 << 20);
    cluster.run("world", 6, over_shm, |comm| {
        let row = comm.split(Some(comm.rank() / 3), 0).expect("a split").expect("a color");
        let column = comm.split_with(Some(comm.rank() % 3), 0, |config| config.order = Order::TreePairwise);
        let column = column.expect("a split").expect("a color");
        assert_eq!((row.size(), column.size()), (3, 2));
        // Operations of all three communicators overlap.
        for round in 0..10 {
            let groups = [&comm, &row, &column];
            let started = groups.map(|group| {
                let mut buffer = group.alloc::<i64>(3000).expect("memory");
                buffer.iter_mut().enumerate().for_each(|(i, x)| *x = value(round, group.rank(), i));
                group.start_all_reduce(buffer, ReduceOp::Sum).expect("started")
            });
            for (group, handle) in groups.into_iter().zip(started).rev() {
                let (buffer, outcome) = handle.wait().expect("a sum");
                assert_eq!((outcome.path, outcome.transfer), (Path::Tree, Some(Transfer::ZeroCopy)));
                let sum = |i| (0..group.size()).fold(0_i64, |sum, rank| sum.wrapping_add(value(round, rank, i)));
                assert!(buffer.iter().enumerate().all(|(i, &x)| x == sum(i)), "round {round}, {}", group.name());
            }
        }
        // Memory is registered with the function of one group; for any other group it is plain memory.
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
    assert_eq!(cluster.boards[0].failed_chains(), 0, "a chain failed in strict mode");
}

#[test]
fn jobs_share_a_zero_copy_device() {
    let cluster = cluster(4, 32 << 20);
    thread::scope(|scope| {
        for (seed, job) in (0..).zip(["a", "b"]) {
            let cluster = &cluster;
            scope.spawn(move || {
                cluster.run(job, 4, over_shm, |comm| {
                    for op in 0..60 {
                        let outcome = sum(&comm, seed * 1000 + op, [1, 500, 20_000][op as usize % 3]);
                        assert_eq!(outcome.transfer, Some(Transfer::ZeroCopy));
                    }
                    comm.leave();
                });
            });
        }
    });
    assert_eq!(cluster.boards[0].failed_chains(), 0, "a chain failed in strict mode");
}

/// Run a job of two ranks; return the transfer that the tree used, and the reason of a fallback.
fn transfer_and_reason(cluster: &Cluster, job: &str, transport: Transport) -> (Option<Transfer>, Option<Arc<str>>) {
    let configure = |config: &mut JoinConfig| config.transport = transport;
    let outcomes = cluster.run(job, 2, configure, |comm| {
        // Without forcing the tree, a host collective may be cheaper.
        let forced = CallOptions { algo: Some(Algo::Tree), ..CallOptions::default() };
        let in_tree = comm.barrier_with(&forced).map(|outcome| outcome.transfer);
        let outcome = sum(&comm, 1, 300);
        comm.leave();
        (in_tree.unwrap_or(None), outcome.fallback)
    });
    assert_eq!(outcomes[0], outcomes[1]);
    outcomes.into_iter().next().expect("two ranks")
}

/// Without enough redo memory, transport `auto` falls back to packets, and transport `shm` reports the reason.
#[test]
fn missing_redo_memory_falls_back_to_packets_or_reports_why() {
    // One byte less than a window of one chunk needs.
    let need = 2 * Node::redo_slot_len_bytes(Order::Arrival, 2, CHUNK_LEN_BYTES);
    let cluster = cluster(2, need - 1);
    assert_eq!(transfer_and_reason(&cluster, "auto", Transport::Auto), (Some(Transfer::Packets), None));
    let (transfer, reason) = transfer_and_reason(&cluster, "shm", Transport::Shm);
    let reason = reason.expect("a reason for the fallback");
    for part in ["requires shared memory", "leaf0", "redo memory free", "`auto` or `udp`"] {
        assert!(transfer.is_none() && reason.contains(part), "{reason:?} does not contain {part:?}");
    }
}

/// While one job holds the redo memory, the next one uses packets; after it has left, the next one uses zero-copy.
#[test]
fn redo_memory_is_reused_after_a_job_leaves() {
    let need = 2 * Node::redo_slot_len_bytes(Order::Arrival, 2, CHUNK_LEN_BYTES);
    let cluster = cluster(2, need);
    cluster.run("first", 2, over_shm, |comm| {
        sum(&comm, 1, 5000);
        if comm.rank() == 0 {
            assert_eq!(transfer_and_reason(&cluster, "second", Transport::Auto), (Some(Transfer::Packets), None));
            let (_, reason) = transfer_and_reason(&cluster, "third", Transport::Shm);
            assert!(reason.as_ref().is_some_and(|why| why.contains("0 bytes of redo memory free")), "{reason:?}");
            let report = status(cluster.controller.local_addr()).expect("a report");
            let job = report.jobs.iter().find(|job| job.name == "first").expect("it runs");
            assert!(matches!(&job.tree, Some(Ok(tree)) if tree.zero_copy_ranks == 2));
        }
        assert_eq!(sum(&comm, 2, 5000).transfer, Some(Transfer::ZeroCopy));
        comm.leave();
    });
    wait_until_idle(&cluster);
    assert_eq!(transfer_and_reason(&cluster, "fourth", Transport::Shm), (Some(Transfer::ZeroCopy), None));
}

/// The controller reserves what the device allocates: with exactly the memory of the device's own formula a group gets
/// its whole window, and with one byte less, half of it.
#[test]
fn redo_slot_length_is_the_same_at_controller_and_device() {
    const WINDOW: u16 = 8;
    let slots = 2 * Shard::new(0, 1).expect("one shard").max_in_window(WINDOW.into()) as usize;
    let mut compared = 0;
    for order in [Order::Arrival, Order::TreeFold, Order::TreePairwise] {
        for children in [1_u16, 2, 3, 4, 5, 8, 9] {
            let slot_len_bytes = Node::redo_slot_len_bytes(order, children, CHUNK_LEN_BYTES);
            for (missing_bytes, window) in [(0, WINDOW), (1, WINDOW / 2)] {
                let config = ControllerConfig {
                    zero_copy_chunk_max_bytes: CHUNK_LEN_BYTES,
                    zero_copy_window_chunks: WINDOW,
                    ..ControllerConfig::new()
                };
                let redo_memory_bytes = slots * slot_len_bytes - missing_bytes;
                let bus = ZeroCopyConfig { redo_memory_bytes, ..ZeroCopyConfig::default() };
                let cluster = Cluster::start_zero_copy(1, children.into(), bus, config);
                for membership in memberships(&cluster, "slots", children.into(), (order, Transport::Shm)) {
                    let tree = membership.tree.unwrap_or_else(|why| panic!("{order:?}, {children} children: {why}"));
                    assert_eq!((tree.window_max, tree.chunk_len_bytes), (window, CHUNK_LEN_BYTES));
                    assert!(tree.attach.is_some(), "{order:?}, {children} children: not zero-copy");
                }
                compared += 1;
            }
        }
    }
    println!("{compared} groups admitted with exactly the memory that they need");
}
