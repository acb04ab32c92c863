//! Started operations, schedules and messages beside each other when the device dies.

use crate::common::{Cluster, plain};
use crate::death::{Death, WAYS, soon};
use crate::work::{assert_sum, filled, in_small_chunks, value};
use sumac::{Algo, CallOptions, Communicator, Error, JoinConfig, ReduceOp};
use sumac_firmware::emulated::BusConfig;

const RANKS: u32 = 3;

/// Elements of an operation that is longer than a window: it does not end before somebody waits for it.
const LONG: usize = 200_000;

fn cluster() -> Cluster {
    Cluster::start_on(1, RANKS as usize, BusConfig::default(), in_small_chunks())
}

fn start(comm: &Communicator, op: u64, len: usize) -> sumac::Handle<Vec<i64>> {
    comm.start_all_reduce(filled(comm, op, len), ReduceOp::Sum).expect("started")
}

/// All have started an operation, which can't end; two ranks are in `between`, which the third comes to only when it has
/// waited for the operation and, with that, for their part in its repair.
fn repaired_within(between: impl Fn(&Communicator) + Sync) {
    for configure in WAYS {
        let mut cluster = cluster();
        let death = Death::of(&mut cluster, RANKS);
        cluster.run("within", RANKS, soon(configure), |comm| {
            let started = start(&comm, 0, LONG);
            death.strikes(comm.rank());
            let finish = |started: sumac::Handle<Vec<i64>>| {
                let (sum, outcome) = started.wait().expect("a sum");
                assert_sum(&sum, 0, RANKS, LONG);
                assert!(outcome.repaired);
            };
            if comm.rank() == RANKS - 1 {
                finish(started);
                between(&comm);
            } else {
                between(&comm);
                finish(started);
            }
            comm.barrier().expect("all are there");
            comm.leave();
        });
    }
}

#[test]
fn a_rank_that_is_within_a_schedule_takes_part() {
    repaired_within(|comm| {
        let input: Vec<u64> = (0..u64::from(RANKS)).map(|to| u64::from(comm.rank()) * 10 + to).collect();
        let mut output = vec![0; RANKS as usize];
        comm.all_to_all(&input, &mut output).expect("blocks");
        assert!((0..).zip(&output).all(|(from, &block)| block == from * 10 + u64::from(comm.rank())), "{output:?}");
    });
}

#[test]
fn a_rank_that_waits_for_a_message_takes_part() {
    repaired_within(|comm| {
        let last = RANKS - 1;
        if comm.rank() == last {
            (0..last).for_each(|to| comm.send(&[u64::from(to) + 7; 100], to, 1).expect("a receiver"));
        } else {
            let mut values = [0_u64; 100];
            comm.receive(&mut values, last, 1).expect("a message");
            assert_eq!(values, [u64::from(comm.rank()) + 7; 100]);
        }
    });
}

/// The same where the schedule was started, and ranks wait for the two in different orders.
#[test]
fn ranks_that_wait_in_different_orders_are_got_over() {
    for configure in WAYS {
        let mut cluster = cluster();
        let death = Death::of(&mut cluster, RANKS);
        cluster.run("orders", RANKS, soon(configure), |comm| {
            let ring = CallOptions { algo: Some(Algo::Ring), ..CallOptions::default() };
            let long = start(&comm, 0, LONG);
            let by_ring = comm.start_all_reduce_with(filled(&comm, 1, 999), ReduceOp::Sum, &ring).expect("started");
            let behind = start(&comm, 2, LONG);
            death.strikes(comm.rank());
            let finish = |handle: sumac::Handle<Vec<i64>>, op, len| {
                assert_sum(&handle.wait().expect("a sum").0, op, RANKS, len);
            };
            if comm.rank() == 0 {
                finish(behind, 2, LONG);
                finish(long, 0, LONG);
                finish(by_ring, 1, 999);
            } else {
                finish(by_ring, 1, 999);
                finish(long, 0, LONG);
                finish(behind, 2, LONG);
            }
        });
    }
}

/// Nothing is lost of what has ended, was only seen to have, and is waited for when its tree has gone.
#[test]
fn what_had_ended_before_keeps_its_buffer() {
    for configure in WAYS {
        let mut cluster = cluster();
        let death = Death::of(&mut cluster, RANKS);
        cluster.run("ended", RANKS, soon(configure), |comm| {
            let mut ended = start(&comm, 0, 1000);
            while !ended.test() {
                std::thread::yield_now();
            }
            let unseen = start(&comm, 1, 1000);
            let forgotten = start(&comm, 2, LONG);
            std::mem::forget(forgotten);
            death.strikes(comm.rank());
            let mut last = start(&comm, 3, LONG);
            while !last.test() {
                std::thread::yield_now();
            }
            for (handle, op, len) in [(ended, 0, 1000), (unseen, 1, 1000), (last, 3, LONG)] {
                let (sum, _) = handle.wait().expect("a sum");
                assert_sum(&sum, op, RANKS, len);
            }
        });
    }
}

/// The loss is known before the operation is started: memory that the device would have to map says so.
#[test]
fn an_operation_is_started_on_what_takes_the_place_of_a_lost_tree() {
    let mut cluster = cluster();
    let death = Death::of(&mut cluster, RANKS);
    cluster.run("start", RANKS, soon(plain), |comm| {
        comm.barrier().expect("all are there");
        death.strikes(comm.rank());
        let mut buffer = comm.alloc::<i64>(1000).expect("memory");
        let values: Vec<i64> = (0..1000).map(|i| value(5, comm.rank(), i)).collect();
        buffer.copy_from_slice(&values);
        let started = comm.start_all_reduce(buffer, ReduceOp::Sum).expect("started");
        let (sum, _) = started.wait().expect("a sum");
        assert_sum(&sum, 5, RANKS, 1000);
    });
}

/// Without repair the loss is the end at every rank, with its name, and at once.
#[test]
fn without_repair_the_loss_is_the_end() {
    for configure in WAYS {
        let mut cluster = cluster();
        let death = Death::of(&mut cluster, RANKS);
        let off = move |config: &mut JoinConfig| {
            soon(configure)(config);
            config.repair = false;
        };
        cluster.run("off", RANKS, off, |comm| {
            let started = start(&comm, 0, LONG);
            death.strikes(comm.rank());
            let error = started.wait().expect_err("no device");
            assert!(matches!(error, Error::PathLost | Error::DeviceLost { .. } | Error::GroupLost), "{error}");
            assert!(matches!(comm.barrier(), Err(Error::Ended(_))));
            death.meets();
        });
    }
}
