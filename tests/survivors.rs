//! Failed ranks: the survivors agree on which ranks failed and which calls completed, and continue in a smaller
//! communicator.
//!
//! A rank fails here by dropping or cancelling its communicator, which closes its connections as the end of its process
//! would. `host/cli/tests` kills real processes.

mod common;

use common::{Cluster, over_udp, plain};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use sumac::comm::OutputState;
use sumac::{Algo, CallOptions, Communicator, Error, JoinConfig, Order, Path, ReduceOp, ShrinkError};
use sumac_hal::ids::Rank;

const LEN: usize = 50_000;

fn quick(configure: fn(&mut JoinConfig)) -> impl Fn(&mut JoinConfig) + Sync {
    move |config| {
        configure(config);
        config.join_timeout = Duration::from_secs(5);
    }
}

/// Sum the original rank numbers, plus one each.
fn sum(comm: &Communicator, own: u32) -> Result<u32, Error> {
    let mut buffer = vec![own + 1; LEN];
    comm.all_reduce(&mut buffer, ReduceOp::Sum)?;
    assert!(buffer.iter().all(|&x| x == buffer[0]));
    Ok(buffer[0])
}

fn named(error: &Error) -> Option<Rank> {
    match error {
        Error::RanksFailed { ranks, .. } => ranks.first().copied().filter(|_| ranks.len() == 1),
        _ => None,
    }
}

#[test]
fn shrink_keeps_the_order_of_surviving_ranks() {
    for (configure, order) in
        [(plain as fn(&mut JoinConfig), Order::Arrival), (over_udp, Order::TreePairwise), (plain, Order::TreeFold)]
    {
        let cluster = Cluster::start(2, 3);
        let configure = |config: &mut JoinConfig| {
            quick(configure)(config);
            config.order = order;
        };
        let paths = cluster.run("left", 5, configure, |comm| {
            let own = comm.rank();
            assert_eq!(sum(&comm, own).expect("all are there"), 15);
            if own == 1 {
                // Returns without leaving, which the others see as a failure.
                return None;
            }
            assert_eq!(named(&sum(&comm, own).expect_err("rank failed")), Some(Rank(1)));
            let smaller = comm.shrink().expect("four survivors");
            assert_eq!((smaller.rank(), smaller.size()), (own - u32::from(own > 1), 4));
            assert_eq!(smaller.name(), "left~0");
            drop(comm);
            let mut ranks = vec![0_u32; 4];
            smaller.all_gather(&[own], &mut ranks).expect("all four are there");
            assert_eq!(ranks, [0, 2, 3, 4]);
            assert_eq!(sum(&smaller, own).expect("all four are there"), 13);
            let options = CallOptions { algo: Some(Algo::Tree), ..CallOptions::default() };
            let path = smaller.all_reduce_with(&mut [0_u32; 4], ReduceOp::Sum, &options).expect("a sum").path;
            smaller.barrier().expect("all four are there");
            smaller.leave();
            Some(path)
        });
        assert!(paths.iter().flatten().all(|&path| path == Path::Tree), "{paths:?}");
    }
}

/// A rank fails after the first shrink; the survivors shrink again.
#[test]
fn rank_that_dies_during_shrink_is_excluded_by_the_next() {
    let cluster = Cluster::start(1, 4);
    let all_have_asked = Barrier::new(3);
    cluster.run("again", 4, quick(plain), |comm| {
        let own = comm.rank();
        sum(&comm, own).expect("all are there");
        if own == 3 {
            return;
        }
        assert_eq!(named(&sum(&comm, own).expect_err("rank failed")), Some(Rank(3)));
        let smaller = comm.shrink().expect("three survivors");
        all_have_asked.wait();
        if own == 0 {
            return;
        }
        assert_eq!(named(&sum(&smaller, own).expect_err("rank 0 failed")), Some(Rank(0)));
        // The controller knows the survivors of both communicators.
        let last = smaller.shrink().expect("two survivors");
        assert_eq!(sum(&last, own).expect("both are there"), 2 + 3);
        let again = comm.shrink().expect("two survivors");
        assert_eq!((again.name().as_str(), again.size()), ("again~1", 2));
        assert_eq!(sum(&again, own).expect("both are there"), 2 + 3);
    });
}

#[test]
fn shrink_called_by_one_rank_alone_fails() {
    let cluster = Cluster::start(1, 2);
    let asked = Barrier::new(2);
    cluster.run("alone", 2, quick(plain), |comm| {
        sum(&comm, comm.rank()).expect("both are there");
        if comm.rank() == 0 {
            let error = comm.shrink().expect_err("the other rank does not call shrink");
            assert!(matches!(error, ShrinkError::Survivors { .. }), "{error}");
            assert!(error.to_string().contains("not all of them asked before the deadline"), "{error}");
        }
        asked.wait();
        // The communicator still works.
        assert_eq!(sum(&comm, comm.rank()).expect("both are there"), 3);
        comm.leave();
    });
}

/// Longer than the detection of a silent device; fails a rank that would wait forever.
const DEADLINE: Duration = Duration::from_secs(25);

fn with_deadline(configure: fn(&mut JoinConfig)) -> impl Fn(&mut JoinConfig) + Sync {
    move |config| {
        configure(config);
        config.deadline = DEADLINE;
    }
}

fn ring_only(config: &mut JoinConfig) {
    config.algo = Algo::Ring;
}

/// Return element `i` of a rank's input to a call.
fn value(rank: u32, call: u64, i: usize) -> u64 {
    (u64::from(rank) + 1).wrapping_mul(1_000_003).wrapping_add(call * 7919 + i as u64 * 31)
}

/// Return element `i` of the sum over all ranks.
fn total(ranks: u32, call: u64, i: usize) -> u64 {
    (0..ranks).fold(0, |sum: u64, rank| sum.wrapping_add(value(rank, call, i)))
}

/// How a rank's calls ended.
#[derive(Debug)]
struct End {
    /// The number of calls that succeeded.
    good: u64,
    error: Error,
    /// Whether the last successful call used the tree.
    in_tree: bool,
}

/// All-reduce until a call fails; check that the buffer holds what the error reports.
fn add_until_it_fails(comm: &Communicator) -> End {
    let (mut good, mut in_tree) = (0, false);
    loop {
        let mut buffer: Vec<u64> = (0..LEN).map(|i| value(comm.rank(), good, i)).collect();
        let error = match comm.all_reduce(&mut buffer, ReduceOp::Sum) {
            Ok(outcome) => {
                assert!((0..LEN).all(|i| buffer[i] == total(comm.size(), good, i)), "call {good}");
                (good, in_tree) = (good + 1, outcome.path == Path::Tree);
                continue;
            }
            Err(error) => error,
        };
        let Error::RanksFailed { output, .. } = &error else {
            return End { good, error, in_tree };
        };
        if let OutputState::Elements(runs) = output {
            for (i, &found) in (0_u64..).zip(&buffer) {
                let is_new = runs.iter().any(|run| run.contains(&i));
                let expected =
                    if is_new { total(comm.size(), good, i as usize) } else { value(comm.rank(), good, i as usize) };
                assert_eq!(found, expected, "element {i} of call {good}; the error reports {runs:?} as new");
            }
        }
        return End { good, error, in_tree };
    }
}

/// Fail `moment` after the first call.
fn die_after(comm: Communicator, moment: Duration) {
    thread::scope(|scope| {
        let canceller = comm.canceller();
        scope.spawn(move || {
            // Spin: the moment of the failure matters.
            let at = Instant::now() + moment;
            while Instant::now() < at {
                thread::yield_now();
            }
            canceller.cancel();
        });
        let error = add_until_it_fails(&comm).error;
        let others_were_first = matches!(error, Error::RanksFailed { .. });
        assert!(error == Error::Cancelled || others_were_first, "{error}");
    });
}

/// Check that all survivors report the same failed ranks, a subset of `died`, and the same first failed call. Every
/// rank completed all calls before it and none after it; a rank whose last call was a host collective may have
/// completed it.
fn expect_agreement(ends: &[Option<End>], died: &[u32], context: &str) {
    let reported = |end: &End| match &end.error {
        Error::RanksFailed { ranks, operation, .. } => (ranks.clone(), *operation),
        error => panic!("{context}: {error}"),
    };
    let mut survivors = ends.iter().flatten();
    let (ranks, operation) = reported(survivors.next().expect("a survivor"));
    assert!(!ranks.is_empty() && ranks.iter().all(|rank| died.contains(&rank.0)), "{context}: {ranks:?}");
    for end in ends.iter().flatten() {
        assert_eq!(reported(end), (ranks.clone(), operation), "{context}: {ends:?}");
        assert!(end.good == operation || end.good == operation + 1 && !end.in_tree, "{context}: {ends:?}");
    }
}

/// A name for job names, and how ranks join.
type Setup = (&'static str, fn(&mut JoinConfig));

const SETUPS: [Setup; 3] = [("packets", over_udp), ("zero-copy", plain), ("ring", ring_only)];

/// Moments within the first few calls.
fn moments(count: u32) -> impl Iterator<Item = Duration> {
    (0..count).map(|nth| Duration::from_micros(300) * (nth * nth + nth))
}

#[test]
fn survivors_agree_when_any_rank_dies_in_a_call() {
    for (setup, configure) in SETUPS {
        let cluster = Cluster::start(2, 2);
        for (nth, moment) in (0..).zip(moments(6)) {
            let victim = nth % 4;
            let job = format!("{setup}-{nth}");
            let ends = cluster.run(&job, 4, with_deadline(configure), |comm| {
                if comm.rank() == victim {
                    die_after(comm, moment);
                    return None;
                }
                let end = add_until_it_fails(&comm);
                let smaller = comm.shrink().expect("three survivors");
                assert_eq!(sum(&smaller, comm.rank()).expect("all three are there"), 10 - (victim + 1));
                smaller.leave();
                Some(end)
            });
            expect_agreement(&ends, &[victim], &job);
        }
    }
}

#[test]
fn survivors_agree_when_two_ranks_die_together() {
    for (setup, configure) in SETUPS {
        let cluster = Cluster::start(1, 5);
        for (nth, moment) in (0..).zip(moments(5)) {
            let victims = [nth % 5, (nth + 1 + nth % 2) % 5];
            let job = format!("two-{setup}-{nth}");
            let ends = cluster.run(&job, 5, with_deadline(configure), |comm| {
                match victims.iter().position(|&victim| victim == comm.rank()) {
                    Some(place) => die_after(comm, moment + Duration::from_millis(2) * place as u32),
                    None => return Some(add_until_it_fails(&comm)),
                }
                None
            });
            expect_agreement(&ends, &victims, &job);
        }
    }
}

/// The failed rank may be rank 0, the coordinator of the recovery.
#[test]
fn survivors_agree_when_a_rank_dies_during_recovery() {
    for (setup, configure) in [SETUPS[0], SETUPS[1]] {
        for (nth, moment) in (0..).zip(moments(6)) {
            let mut cluster = Cluster::start(1, 3);
            let board = Mutex::new(cluster.boards.pop());
            let (victim, gate) = (nth % 2, Barrier::new(3));
            let job = format!("device-{setup}-{nth}");
            let ends = cluster.run(&job, 3, with_deadline(configure), |comm| {
                gate.wait();
                if comm.rank() == 2 {
                    drop(board.lock().expect("not poisoned").take());
                }
                if comm.rank() == victim {
                    die_after(comm, moment);
                    return None;
                }
                Some(add_until_it_fails(&comm))
            });
            expect_agreement(&ends, &[victim], &job);
        }
    }
}

/// A collective that needs nothing from the failed rank completes, though that rank never called it. A collective that
/// needs its contribution fails, and so do all later ones.
#[test]
fn calls_that_need_no_dead_rank_complete_on_all_survivors() {
    for (setup, configure) in [SETUPS[0], SETUPS[1]] {
        let cluster = Cluster::start(1, 3);
        let configure = |config: &mut JoinConfig| {
            with_deadline(configure)(config);
            config.algo = Algo::Tree;
        };
        let have_started = Barrier::new(3);
        cluster.run(setup, 3, configure, |comm| {
            let own = comm.rank();
            let sum = comm.start_all_reduce(vec![own + 1; LEN], ReduceOp::Sum).expect("started");
            if own == 1 {
                sum.wait().expect("all are there");
                have_started.wait();
                return;
            }
            let needless = comm.start_broadcast(vec![own; LEN], 2).expect("started");
            let lost = comm.start_all_reduce(vec![own + 1; LEN], ReduceOp::Sum).expect("started");
            let behind = comm.start_broadcast(vec![own; LEN], 2).expect("started");
            let (sum, outcome) = sum.wait().expect("all were there");
            assert!(sum.iter().all(|&x| x == 6) && outcome.path == Path::Tree, "{setup}");
            have_started.wait();
            let (values, outcome) = needless.wait().expect("its root is a survivor");
            assert!(values.iter().all(|&x| x == 2) && outcome.path == Path::Tree, "{setup}");
            let waited = [lost, behind].map(|handle| handle.wait().map(drop).map_err(Error::from));
            for error in waited.into_iter().chain([comm.barrier().map(drop)]).map(Result::err) {
                let error = error.expect("a rank is dead");
                let Error::RanksFailed { ranks, operation: 2, output: OutputState::Elements(runs) } = first(&error)
                else {
                    panic!("{setup}: {error}");
                };
                assert_eq!((&ranks[..], &runs[..]), (&[Rank(1)][..], &[][..]), "{setup}");
            }
            assert_eq!(comm.shrink().expect("two survivors").size(), 2);
        });
    }
}

/// Return the error that ended a communicator.
fn first(error: &Error) -> &Error {
    match error {
        Error::Ended(first) => first,
        error => error,
    }
}
