//! Overlapping operations, and registered memory that is allocated and dropped meanwhile.

use crate::common::Cluster;
use crate::membership::wait_until_idle;
use std::mem;
use sumac::controller::ControllerConfig;
use sumac::{Algo, Buffer, Communicator, Error, Handle, JoinConfig, ReduceOp, Transfer, Transport};
use sumac_firmware::emulated::ZeroCopyConfig;
use sumac_hal::ids::Rank;
use sumac_tests::oracle::weight;

const RANKS: u32 = 3;

/// The number of regions that a device has for each function, including its bounce buffer.
const REGIONS: usize = 256;

fn cluster() -> Cluster {
    let config = ControllerConfig { zero_copy_chunk_max_bytes: 1024, ..ControllerConfig::new() };
    Cluster::start_zero_copy(1, RANKS as usize, ZeroCopyConfig { strict: true, ..ZeroCopyConfig::default() }, config)
}

fn over_shm(config: &mut JoinConfig) {
    (config.algo, config.transport) = (Algo::Tree, Transport::Shm);
}

/// Return element `i` of the input of rank `rank` to operation `op`.
fn value(op: usize, rank: u32, i: usize) -> i64 {
    weight(&[op as u64, rank.into(), i as u64]) as i64
}

/// Return the length of operation `op`: from nothing to more than a window.
fn len(op: usize) -> usize {
    [700, 0, 1, 128, 129, 6000][op % 6]
}

fn filled(comm: &Communicator, op: usize) -> Buffer<i64> {
    let mut buffer = comm.alloc(len(op)).expect("memory");
    buffer.iter_mut().enumerate().for_each(|(i, x)| *x = value(op, comm.rank(), i));
    buffer
}

fn start(comm: &Communicator, op: usize) -> Handle<Buffer<i64>> {
    comm.start_all_reduce(filled(comm, op), ReduceOp::Sum).expect("started")
}

fn assert_sum(found: &[i64], op: usize) {
    let sum = |i| (0..RANKS).fold(0_i64, |sum, rank| sum.wrapping_add(value(op, rank, i)));
    assert!(found.len() == len(op) && found.iter().enumerate().all(|(i, &x)| x == sum(i)), "operation {op}");
}

fn wait(handle: Handle<Buffer<i64>>, op: usize) -> Buffer<i64> {
    let (buffer, outcome) = handle.wait().expect("a sum");
    assert_eq!(outcome.transfer, Some(Transfer::ZeroCopy));
    assert_sum(&buffer, op);
    buffer
}

fn assert_strict(cluster: &Cluster) {
    assert_eq!(cluster.boards[0].failed_chains(), 0, "a chain failed in strict mode");
}

#[test]
fn started_operations_complete_in_any_wait_order() {
    const OPS: usize = 24;
    let cluster = cluster();
    cluster.run("orders", RANKS, over_shm, |comm| {
        for round in 0..5 {
            let mut handles: Vec<_> = (0..OPS).map(|op| (op, start(&comm, op))).collect();
            // Each rank waits in a different order and computes in between.
            handles.sort_by_key(|(op, _)| weight(&[round, comm.rank().into(), *op as u64]));
            let mut computed = 0_i64;
            for (op, mut handle) in handles {
                computed = (0..2000).fold(computed, |sum, i| sum.wrapping_mul(31).wrapping_add(value(op, 0, i)));
                while round == 0 && !handle.test() {
                    std::thread::yield_now();
                }
                wait(handle, op);
            }
            assert_ne!(computed, 0);
        }
        comm.leave();
    });
    assert_strict(&cluster);
}

/// Handles are dropped or forgotten while the device uses their buffers, beside operations that complete normally.
#[test]
fn dropped_or_forgotten_handles_do_not_disturb_other_operations() {
    let cluster = cluster();
    for job in ["first", "second"] {
        cluster.run(job, RANKS, over_shm, |comm| {
            for op in 0..30 {
                let (idle, flying) = (filled(&comm, op + 2), start(&comm, op));
                drop(idle);
                let (forgotten, dropped) = (start(&comm, op + 1), start(&comm, op + 3));
                match comm.rank() as usize == op % RANKS as usize {
                    true => mem::forget(forgotten),
                    false => drop(wait(forgotten, op + 1)),
                }
                drop(dropped);
                // The allocator may reuse the memory of the dropped handle.
                let late = start(&comm, op + 4);
                drop(wait(flying, op));
                wait(late, op + 4);
            }
            comm.barrier().expect("all are there");
            comm.leave();
        });
    }
    // A forgotten handle keeps its communicator, but not the group.
    wait_until_idle(&cluster);
    assert_strict(&cluster);
}

/// A handle outlives its communicator, and its buffer outlives both.
#[test]
fn handle_completes_after_its_communicator_is_dropped() {
    let cluster = cluster();
    let buffers = cluster.run("outlives", RANKS, over_shm, |comm| {
        let handle = start(&comm, 5);
        comm.barrier().expect("all are there");
        comm.leave();
        wait(handle, 5)
    });
    buffers.iter().for_each(|buffer| assert_sum(buffer, 5));
}

/// Allocate many more buffers in turn than there are regions, with and without calls in between.
#[test]
fn dropped_registered_memory_can_be_allocated_again() {
    let cluster = cluster();
    cluster.run("again", RANKS, over_shm, |comm| {
        for round in 0..2 * REGIONS {
            let buffer: Buffer<u8> = comm.alloc(1 + round).expect("a free region");
            assert!(buffer.is_registered() && buffer.iter().all(|&byte| byte == 0));
        }
        for _ in 0..2 {
            let many: Vec<Buffer<i64>> = (0..REGIONS / 2).map(|_| comm.alloc(10).expect("memory")).collect();
            comm.barrier().expect("all are there");
            drop(many);
        }
        for op in 0..REGIONS {
            wait(start(&comm, op), op);
        }
        comm.leave();
    });
    assert_strict(&cluster);
}

#[test]
fn oversized_allocation_fails_and_changes_nothing() {
    let cluster = cluster();
    cluster.run("too much", RANKS, over_shm, |comm| {
        let flying = start(&comm, 5);
        let mut many: Vec<Buffer<u8>> = Vec::new();
        let error = loop {
            match comm.alloc(100) {
                // Without a tree, memory has no limit.
                Ok(buffer) if many.len() < REGIONS => many.push(buffer),
                Ok(_) => panic!("more than {REGIONS} regions"),
                Err(error) => break error,
            }
        };
        // The bounce buffer and the operation in flight hold a region each.
        assert_eq!(many.len(), REGIONS - 2);
        assert!(matches!(&error, Error::Memory { device, len_bytes: 100, .. } if device == "leaf0"), "{error:?}");
        let message = error.to_string();
        assert!(
            error.is_rejection() && message.contains("100 bytes for device leaf0") && message.contains("NoResources"),
            "{message}"
        );
        wait(flying, 5);
        let mut plain: Vec<i64> = (0..len(0)).map(|i| value(0, comm.rank(), i)).collect();
        let outcome = comm.all_reduce(&mut plain, ReduceOp::Sum).expect("other memory works too");
        assert_eq!(outcome.transfer, Some(Transfer::Bounced));
        assert_sum(&plain, 0);
        many.truncate(REGIONS - 10);
        wait(start(&comm, 3), 3);
        comm.leave();
    });
    assert_strict(&cluster);
}

#[test]
fn packet_transport_allocates_ordinary_memory() {
    let cluster = cluster();
    let configure = |config: &mut JoinConfig| (config.algo, config.transport) = (Algo::Tree, Transport::Udp);
    cluster.run("packets", RANKS, configure, |comm| {
        let all: Vec<Buffer<u8>> = (0..2 * REGIONS).map(|_| comm.alloc(100).expect("memory")).collect();
        assert!(all.iter().all(|buffer| !buffer.is_registered() && buffer.len() == 100));
        let handles: Vec<_> = (0..8).map(|op| start(&comm, op)).collect();
        for (op, handle) in handles.into_iter().enumerate() {
            let (buffer, outcome) = handle.wait().expect("a sum");
            assert_eq!(outcome.transfer, Some(Transfer::Packets));
            assert_sum(&buffer, op);
        }
        comm.leave();
    });
}

/// A rank that leaves in the middle of an operation first revokes the device's access to its memory. Each chunk of the
/// other ranks' buffers holds either the input or the result, and the device serves the next job.
#[test]
fn communicator_dropped_in_flight_leaves_others_unharmed() {
    const LEN: usize = 50_000;
    const CHUNK: usize = 1024 / size_of::<i64>();
    let cluster = cluster();
    for round in 0..6 {
        let ends = cluster.run(&format!("gone {round}"), RANKS, over_shm, |comm| {
            let mut buffer = comm.alloc::<i64>(LEN).expect("memory");
            buffer.iter_mut().enumerate().for_each(|(i, x)| *x = value(round, comm.rank(), i));
            comm.barrier().expect("all are there");
            if comm.rank() == 0 {
                // Through registered memory and, in every second round, also through the bounce buffer.
                drop(comm.start_all_reduce(buffer, ReduceOp::Sum));
                drop((round % 2 == 0).then(|| comm.start_all_reduce(vec![1_i64; LEN], ReduceOp::Sum)));
                return Ok(0);
            }
            let ended = comm.all_reduce(&mut buffer, ReduceOp::Sum);
            let sum = |i| (0..RANKS).fold(0_i64, |sum, rank| sum.wrapping_add(value(round, rank, i)));
            let mut landed = 0;
            for (at, chunk) in (0..).step_by(CHUNK).zip(buffer.chunks(CHUNK)) {
                let is = |value: &dyn Fn(usize) -> i64| chunk.iter().zip(at..).all(|(&x, i)| x == value(i));
                let new = is(&sum);
                assert!(new || is(&|i| value(round, comm.rank(), i)), "the chunk at {at} is torn");
                landed += usize::from(new);
            }
            assert!(ended.is_err() || landed == LEN.div_ceil(CHUNK), "success with an incomplete sum");
            ended.map(|_| landed)
        });
        // Either all remaining ranks have the sum, or none.
        let reports_rank_0 =
            |end: &Result<usize, Error>| matches!(end, Err(Error::RanksFailed { ranks, .. }) if ranks[..] == [Rank(0)]);
        let remaining = &ends[1..];
        assert!(remaining.iter().all(Result::is_ok) || remaining.iter().all(reports_rank_0), "{ends:?}");
    }
    wait_until_idle(&cluster);
    cluster.run("after", RANKS, over_shm, |comm| {
        (0..12).for_each(|op| drop(wait(start(&comm, op), op)));
        comm.leave();
    });
    assert_strict(&cluster);
}
