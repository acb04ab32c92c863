//! Operations in flight, and registered memory that comes and goes meanwhile.

use crate::common::Cluster;
use crate::seats::wait_until_idle;
use std::mem;
use sumac::controller::ControllerConfig;
use sumac::{Algo, Attach, Buffer, Communicator, Error, Handle, JoinConfig, ReduceOp, Transfer};
use sumac_firmware::emulated::BusConfig;
use sumac_hal::ids::Rank;
use sumac_tests::oracle::weight;

const RANKS: u32 = 3;

/// Regions that a device has for each function; its bounce buffer is one of them.
const REGIONS: usize = 256;

fn cluster() -> Cluster {
    let config = ControllerConfig { reference_chunk_max_bytes: 1024, ..ControllerConfig::new() };
    Cluster::start_on(1, RANKS as usize, BusConfig { strict: true, ..BusConfig::default() }, config)
}

fn by_reference(config: &mut JoinConfig) {
    (config.algo, config.attach) = (Algo::Tree, Attach::Shm);
}

/// What rank `rank` has as element `i` of operation `op`.
fn value(op: usize, rank: u32, i: usize) -> i64 {
    weight(&[op as u64, rank.into(), i as u64]) as i64
}

/// Lengths that differ: none, parts of a chunk, and more than a window.
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
    assert_eq!(outcome.transfer, Some(Transfer::Registered));
    assert_sum(&buffer, op);
    buffer
}

fn assert_strict(cluster: &Cluster) {
    assert_eq!(cluster.boards[0].failed_chains(), 0, "strict mode has tripped");
}

#[test]
fn started_operations_end_right_in_whatever_order_they_are_waited_for() {
    const OPS: usize = 24;
    let cluster = cluster();
    cluster.run("orders", RANKS, by_reference, |comm| {
        for round in 0..5 {
            let mut handles: Vec<_> = (0..OPS).map(|op| (op, start(&comm, op))).collect();
            // Each rank in an order of its own, with work in between.
            handles.sort_by_key(|(op, _)| weight(&[round, comm.rank().into(), *op as u64]));
            let mut own = 0_i64;
            for (op, mut handle) in handles {
                own = (0..2000).fold(own, |own, i| own.wrapping_mul(31).wrapping_add(value(op, 0, i)));
                while round == 0 && !handle.test() {
                    std::thread::yield_now();
                }
                wait(handle, op);
            }
            assert_ne!(own, 0);
        }
        comm.leave();
    });
    assert_strict(&cluster);
}

/// Handles and buffers that are dropped or forgotten while the device uses them, and others.
#[test]
fn what_is_dropped_or_forgotten_disturbs_nobody() {
    let cluster = cluster();
    for job in ["first", "second"] {
        cluster.run(job, RANKS, by_reference, |comm| {
            for op in 0..30 {
                let (idle, flying) = (filled(&comm, op + 2), start(&comm, op));
                drop(idle);
                let (forgotten, dropped) = (start(&comm, op + 1), start(&comm, op + 3));
                match comm.rank() as usize == op % RANKS as usize {
                    true => mem::forget(forgotten),
                    false => drop(wait(forgotten, op + 1)),
                }
                drop(dropped);
                // Memory that comes while others' is in flight may lie where the dropped was.
                let late = start(&comm, op + 4);
                drop(wait(flying, op));
                wait(late, op + 4);
            }
            comm.barrier().expect("all are there");
            comm.leave();
        });
    }
    // The forgotten handles keep their communicators, but no group.
    wait_until_idle(&cluster);
    assert_strict(&cluster);
}

/// A handle that outlives its communicator, and a buffer that outlives both.
#[test]
fn a_handle_outlives_its_communicator() {
    let cluster = cluster();
    let buffers = cluster.run("outlives", RANKS, by_reference, |comm| {
        let handle = start(&comm, 5);
        comm.barrier().expect("all are there");
        comm.leave();
        wait(handle, 5)
    });
    buffers.iter().for_each(|buffer| assert_sum(buffer, 5));
}

/// One after the other, many more than there are regions, with and without calls in between.
#[test]
fn memory_that_was_dropped_is_to_be_had_again() {
    let cluster = cluster();
    cluster.run("again", RANKS, by_reference, |comm| {
        for round in 0..2 * REGIONS {
            let buffer: Buffer<u8> = comm.alloc(1 + round).expect("as often as you like");
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
fn too_much_memory_is_a_named_error_that_changes_nothing() {
    let cluster = cluster();
    cluster.run("too much", RANKS, by_reference, |comm| {
        let flying = start(&comm, 5);
        let mut many: Vec<Buffer<u8>> = Vec::new();
        let error = loop {
            match comm.alloc(100) {
                Ok(buffer) => many.push(buffer),
                Err(error) => break error,
            }
        };
        // Another is the bounce buffer, another is in flight.
        assert_eq!(many.len(), REGIONS - 2);
        assert!(matches!(&error, Error::Memory { device, len_bytes: 100, .. } if device == "leaf0"), "{error:?}");
        let told = error.to_string();
        assert!(
            error.is_harmless() && told.contains("100 bytes for device leaf0") && told.contains("NoRoom"),
            "{told}"
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
fn by_packets_the_same_program_has_ordinary_memory() {
    let cluster = cluster();
    let configure = |config: &mut JoinConfig| (config.algo, config.attach) = (Algo::Tree, Attach::Udp);
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

/// A rank that goes in the middle of an operation takes its memory out of the device's hands first; the others' chunks
/// are old or new, and the next job finds the device as it was.
#[test]
fn a_communicator_that_is_dropped_in_flight_harms_nobody() {
    const LEN: usize = 50_000;
    const CHUNK: usize = 1024 / size_of::<i64>();
    let cluster = cluster();
    for round in 0..6 {
        let ends = cluster.run(&format!("gone {round}"), RANKS, by_reference, |comm| {
            let mut buffer = comm.alloc::<i64>(LEN).expect("memory");
            buffer.iter_mut().enumerate().for_each(|(i, x)| *x = value(round, comm.rank(), i));
            comm.barrier().expect("all are there");
            if comm.rank() == 0 {
                // Some of it goes into registered memory, and, every other time, some through the bounce buffer.
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
            assert!(ended.is_err() || landed == LEN.div_ceil(CHUNK), "a sum in part");
            ended.map(|_| landed)
        });
        // All that are left have the sum, or none has.
        let is_told =
            |end: &Result<usize, Error>| matches!(end, Err(Error::RanksFailed { ranks, .. }) if ranks[..] == [Rank(0)]);
        let left = &ends[1..];
        assert!(left.iter().all(Result::is_ok) || left.iter().all(is_told), "{ends:?}");
    }
    wait_until_idle(&cluster);
    cluster.run("after", RANKS, by_reference, |comm| {
        (0..12).for_each(|op| drop(wait(start(&comm, op), op)));
        comm.leave();
    });
    assert_strict(&cluster);
}
