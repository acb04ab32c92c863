//! Ranks that die, and those that are left: they agree on who it was and on what completes, and go on without.
//!
//! A rank dies here by its own program's wish, which ends its connections as the end of its process would; processes that
//! are really killed are `host/cli/tests/repaired.rs`' part.

mod common;

use common::{Cluster, by_packets, plain};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use sumac::comm::Fresh;
use sumac::{Algo, Communicator, Error, JoinConfig, Order, Path, ReduceOp, ShrinkError};
use sumac_hal::ids::Rank;

const LEN: usize = 50_000;

fn quick(configure: fn(&mut JoinConfig)) -> impl Fn(&mut JoinConfig) + Sync {
    move |config| {
        configure(config);
        config.join_timeout = Duration::from_secs(5);
    }
}

/// Add up what each rank was at first.
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
fn who_is_left_goes_on_in_the_order_of_ranks() {
    for (configure, order) in
        [(plain as fn(&mut JoinConfig), Order::Arrival), (by_packets, Order::TreePairwise), (plain, Order::TreeFold)]
    {
        let cluster = Cluster::start(2, 3);
        let configure = |config: &mut JoinConfig| {
            quick(configure)(config);
            config.order = order;
        };
        let left = cluster.run("left", 5, configure, |comm| {
            let own = comm.rank();
            assert_eq!(sum(&comm, own).expect("all are there"), 15);
            if own == 1 {
                // Without leaving: a death, as the others see it.
                return None;
            }
            assert_eq!(named(&sum(&comm, own).expect_err("one is dead")), Some(Rank(1)));
            let smaller = comm.shrink().expect("four are left");
            assert_eq!((smaller.rank(), smaller.size()), (own - u32::from(own > 1), 4));
            assert_eq!(smaller.name(), "left~0");
            drop(comm);
            let mut ranks = vec![0_u32; 4];
            smaller.all_gather(&[own], &mut ranks).expect("all four are there");
            assert_eq!(ranks, [0, 2, 3, 4]);
            assert_eq!(sum(&smaller, own).expect("all four are there"), 13);
            let path = smaller.all_reduce(&mut [0_u32; 4], ReduceOp::Sum).expect("a sum").path;
            smaller.barrier().expect("all four are there");
            smaller.leave();
            Some(path)
        });
        assert!(left.iter().flatten().all(|&path| path == Path::Tree), "{left:?}");
    }
}

/// The first answer names a rank that then dies; who is left asks again.
#[test]
fn a_rank_that_dies_while_the_others_shrink_is_left_out_the_next_time() {
    let cluster = Cluster::start(1, 4);
    let all_have_asked = Barrier::new(3);
    cluster.run("again", 4, quick(plain), |comm| {
        let own = comm.rank();
        sum(&comm, own).expect("all are there");
        if own == 3 {
            return;
        }
        assert_eq!(named(&sum(&comm, own).expect_err("one is dead")), Some(Rank(3)));
        let smaller = comm.shrink().expect("three are left");
        all_have_asked.wait();
        if own == 0 {
            return;
        }
        assert_eq!(named(&sum(&smaller, own).expect_err("another is dead")), Some(Rank(0)));
        // The controller knows of both communicators who is left.
        let last = smaller.shrink().expect("two are left");
        assert_eq!(sum(&last, own).expect("both are there"), 2 + 3);
        let again = comm.shrink().expect("two are left");
        assert_eq!((again.name().as_str(), again.size()), ("again~1", 2));
        assert_eq!(sum(&again, own).expect("both are there"), 2 + 3);
    });
}

#[test]
fn who_asks_alone_is_told_so() {
    let cluster = Cluster::start(1, 2);
    let asked = Barrier::new(2);
    cluster.run("alone", 2, quick(plain), |comm| {
        sum(&comm, comm.rank()).expect("both are there");
        if comm.rank() == 0 {
            let error = comm.shrink().expect_err("the other does not ask");
            assert!(matches!(error, ShrinkError::Survivors { .. }), "{error}");
            assert!(error.to_string().contains("not all of them have asked"), "{error}");
        }
        asked.wait();
        // Nobody was harmed.
        assert_eq!(sum(&comm, comm.rank()).expect("both are there"), 3);
        comm.leave();
    });
}

/// Long enough for a device that is silent to be given up; a rank that waits for ever runs into it.
const DEADLINE: Duration = Duration::from_secs(25);

fn within_reason(configure: fn(&mut JoinConfig)) -> impl Fn(&mut JoinConfig) + Sync {
    move |config| {
        configure(config);
        config.deadline = DEADLINE;
    }
}

fn by_ring(config: &mut JoinConfig) {
    config.algo = Algo::Ring;
}

/// What a rank was given in a call, and what all get.
fn value(rank: u32, call: u64, i: usize) -> u64 {
    (u64::from(rank) + 1).wrapping_mul(1_000_003).wrapping_add(call * 7919 + i as u64 * 31)
}

fn total(ranks: u32, call: u64, i: usize) -> u64 {
    (0..ranks).fold(0, |sum: u64, rank| sum.wrapping_add(value(rank, call, i)))
}

/// How a rank's calls ended.
#[derive(Debug)]
struct End {
    /// Calls that went well.
    good: u64,
    error: Error,
    /// Whether the last call that went well took the tree.
    by_tree: bool,
}

/// Add up until that fails; then see that the buffer holds what the error says.
fn add_until_it_fails(comm: &Communicator) -> End {
    let (mut good, mut by_tree) = (0, false);
    loop {
        let mut buffer: Vec<u64> = (0..LEN).map(|i| value(comm.rank(), good, i)).collect();
        let error = match comm.all_reduce(&mut buffer, ReduceOp::Sum) {
            Ok(outcome) => {
                assert!((0..LEN).all(|i| buffer[i] == total(comm.size(), good, i)), "call {good}");
                (good, by_tree) = (good + 1, outcome.path == Path::Tree);
                continue;
            }
            Err(error) => error,
        };
        let Error::RanksFailed { fresh, .. } = &error else {
            return End { good, error, by_tree };
        };
        if let Fresh::Elements(runs) = fresh {
            for (i, &found) in (0_u64..).zip(&buffer) {
                let is_new = runs.iter().any(|run| run.contains(&i));
                let expected =
                    if is_new { total(comm.size(), good, i as usize) } else { value(comm.rank(), good, i as usize) };
                assert_eq!(found, expected, "element {i} of call {good}, where {runs:?} are new");
            }
        }
        return End { good, error, by_tree };
    }
}

/// Die in the middle of adding up, so much later.
fn die_after(comm: Communicator, moment: Duration) {
    thread::scope(|scope| {
        let canceller = comm.canceller();
        scope.spawn(move || {
            // The moment is what is tested.
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

/// See that all that are left name the same ranks, some of those that died, and the same call. All that came before it
/// went well at each, and nothing behind it; who got there by a schedule may have its own result of it.
fn expect_agreement(ends: &[Option<End>], died: &[u32], context: &str) {
    let told = |end: &End| match &end.error {
        Error::RanksFailed { ranks, operation, .. } => (ranks.clone(), *operation),
        error => panic!("{context}: {error}"),
    };
    let mut left = ends.iter().flatten();
    let (ranks, operation) = told(left.next().expect("somebody is left"));
    assert!(!ranks.is_empty() && ranks.iter().all(|rank| died.contains(&rank.0)), "{context}: {ranks:?}");
    for end in ends.iter().flatten() {
        assert_eq!(told(end), (ranks.clone(), operation), "{context}: {ends:?}");
        assert!(end.good == operation || end.good == operation + 1 && !end.by_tree, "{context}: {ends:?}");
    }
}

/// How a rank joins, and what that is called.
type Way = (&'static str, fn(&mut JoinConfig));

const WAYS: [Way; 3] = [("packets", by_packets), ("reference", plain), ("schedule", by_ring)];

/// Moments of the first few calls.
fn moments(count: u32) -> impl Iterator<Item = Duration> {
    (0..count).map(|nth| Duration::from_micros(300) * (nth * nth + nth))
}

#[test]
fn whoever_dies_in_the_middle_of_a_call_the_others_agree() {
    for (way, configure) in WAYS {
        let cluster = Cluster::start(2, 2);
        for (nth, moment) in (0..).zip(moments(6)) {
            let victim = nth % 4;
            let job = format!("{way}-{nth}");
            let ends = cluster.run(&job, 4, within_reason(configure), |comm| {
                if comm.rank() == victim {
                    die_after(comm, moment);
                    return None;
                }
                let end = add_until_it_fails(&comm);
                let smaller = comm.shrink().expect("three are left");
                assert_eq!(sum(&smaller, comm.rank()).expect("all three are there"), 10 - (victim + 1));
                smaller.leave();
                Some(end)
            });
            expect_agreement(&ends, &[victim], &job);
        }
    }
}

#[test]
fn two_that_die_at_about_the_same_time_are_agreed_on_as_well() {
    for (way, configure) in WAYS {
        let cluster = Cluster::start(1, 5);
        for (nth, moment) in (0..).zip(moments(5)) {
            let victims = [nth % 5, (nth + 1 + nth % 2) % 5];
            let job = format!("two-{way}-{nth}");
            let ends = cluster.run(&job, 5, within_reason(configure), |comm| {
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

/// Rank 0 would have led the repair.
#[test]
fn whoever_dies_while_a_lost_device_is_repaired_the_others_agree() {
    for (way, configure) in [WAYS[0], WAYS[1]] {
        for (nth, moment) in (0..).zip(moments(6)) {
            let mut cluster = Cluster::start(1, 3);
            let board = Mutex::new(cluster.boards.pop());
            let (victim, gate) = (nth % 2, Barrier::new(3));
            let job = format!("device-{way}-{nth}");
            let ends = cluster.run(&job, 3, within_reason(configure), |comm| {
                gate.wait();
                if comm.rank() == 2 {
                    drop(board.lock().expect("nobody panicked").take());
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

/// What the dead rank had no part in completes, though it never entered it; what it had to add to fails, with all behind.
#[test]
fn calls_that_need_no_dead_rank_complete_at_all_that_are_left() {
    for (way, configure) in [WAYS[0], WAYS[1]] {
        let cluster = Cluster::start(1, 3);
        let configure = |config: &mut JoinConfig| {
            within_reason(configure)(config);
            config.algo = Algo::Tree;
        };
        let have_started = Barrier::new(3);
        cluster.run(way, 3, configure, |comm| {
            let own = comm.rank();
            let sum = comm.start_all_reduce(vec![own + 1; LEN], ReduceOp::Sum).expect("started");
            if own == 1 {
                sum.wait().expect("all are there");
                have_started.wait();
                return;
            }
            let told = comm.start_broadcast(vec![own; LEN], 2).expect("started");
            let lost = comm.start_all_reduce(vec![own + 1; LEN], ReduceOp::Sum).expect("started");
            let behind = comm.start_broadcast(vec![own; LEN], 2).expect("started");
            let (sum, outcome) = sum.wait().expect("all were there");
            assert!(sum.iter().all(|&x| x == 6) && outcome.path == Path::Tree, "{way}");
            have_started.wait();
            let (told, outcome) = told.wait().expect("its root is alive");
            assert!(told.iter().all(|&x| x == 2) && outcome.path == Path::Tree, "{way}");
            for error in [lost.wait().err(), behind.wait().err(), comm.barrier().err()] {
                let error = error.expect("a rank is dead");
                let Error::RanksFailed { ranks, operation: 2, fresh: Fresh::Elements(runs) } = first(&error) else {
                    panic!("{way}: {error}");
                };
                assert_eq!((&ranks[..], &runs[..]), (&[Rank(1)][..], &[][..]), "{way}");
            }
            assert_eq!(comm.shrink().expect("two are left").size(), 2);
        });
    }
}

/// Return what had ended a communicator.
fn first(error: &Error) -> &Error {
    match error {
        Error::Ended(first) => first,
        error => error,
    }
}
