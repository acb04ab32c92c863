//! All-reduces by `rab`: the ranks of a server reduce to their leader, the leaders all-reduce in a tree of their own,
//! and broadcast inside.

mod by_rails;
mod common;

use by_rails::{
    EACH, LARGE, LONG, check, checked_sum, controller, differ_between_servers, options, rails, reason,
    start_and_prepare, wait_until,
};
use common::{Cluster, over_udp};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::status;
use sumac::{Algo, CallOptions, Communicator, Error, JoinConfig, JoinError, Path, ReduceOp};
use sumac_hal::ids::Rank;

/// The algorithm, and its path.
const BY: (Algo, Path) = (Algo::Rab, Path::Rab);

/// Ranks on servers of `EACH`, whose leaders join a tree.
fn with_leaders(config: &mut JoinConfig) {
    on_servers_of(config, EACH);
}

fn on_servers_of(config: &mut JoinConfig, each: u32) {
    over_udp(config);
    (config.deadline, config.rab) = (LONG, true);
    config.set("shape", &format!("servers:{each}")).expect("a shape");
}

/// The same, where each names its adapter in a fabric of rails.
fn on_rails(config: &mut JoinConfig) {
    with_leaders(config);
    config.host = Some(format!("n{} rail{}", config.rank / EACH, config.rank % EACH));
}

fn is_leader(comm: &Communicator, each: u32) -> bool {
    comm.rank().is_multiple_of(each)
}

#[test]
fn every_element_is_right_on_servers_of_any_number_of_ranks() {
    for (servers, each) in [(2, 2), (2, 3), (3, 4)] {
        let cluster = Cluster::spare(1, controller());
        let configure = |config: &mut JoinConfig| on_servers_of(config, each);
        cluster.run("counts", servers * each, configure, |comm| {
            let ranks = comm.size();
            let all = |of: &dyn Fn(u32) -> f64| (0..ranks).map(of).sum::<f64>();
            for is_in_place in [true, false] {
                for count in [0, 1, 7, 4096, LARGE] {
                    let value = |rank: u32, at: usize| ((rank + 1) as usize * (at % 1000)) as f32;
                    let sum = |at: usize| all(&|rank| f64::from(value(rank, at))) as f32;
                    let outcome = check(&comm, BY, (ReduceOp::Sum, count), value, sum, is_in_place);
                    let trees = u32::from(is_leader(&comm, each));
                    assert_eq!((outcome.trees, outcome.fallback.as_deref()), (trees, None));
                    let value = |rank: u32, at: usize| (rank as u8) ^ (at as u8);
                    let greatest = |at: usize| (0..ranks).map(|rank| value(rank, at)).max().expect("ranks");
                    check(&comm, BY, (ReduceOp::Max, count), value, greatest, is_in_place);
                    let value = |rank: u32, at: usize| f64::from(rank) * 4.0 + at as f64;
                    let average = |at: usize| all(&|rank| value(rank, at)) / f64::from(ranks);
                    check(&comm, BY, (ReduceOp::Avg, count), value, average, is_in_place);
                    let value = |rank: u32, at: usize| i16::from((rank as usize + at).is_multiple_of(3));
                    let any = |at: usize| (0..ranks).map(|rank| value(rank, at)).max().expect("ranks");
                    check(&comm, BY, (ReduceOp::Lor, count), value, any, is_in_place);
                }
            }
            let mut scaled = vec![f32::from(comm.rank() as u8 + 1); 1001];
            let options = CallOptions { scalar: Some(0.5), ..options(BY) };
            comm.all_reduce_with(&mut scaled, ReduceOp::PremulSum, &options).expect("a sum");
            let sum = (1..=ranks).sum::<u32>() as f32 / 2.0;
            assert!(scaled.iter().all(|&value| value == sum), "{:?}: each is scaled once", &scaled[..4]);
            comm.leave();
        });
    }
}

#[test]
fn leaders_alone_send_into_the_network_by_one_tree() {
    let cluster = rails(2);
    cluster.run("shares", 2 * EACH, on_rails, |comm| {
        let (outcome, bytes) = (checked_sum(&comm, BY, LARGE, 0), 4 * LARGE as u64);
        // Inside, a leader sends everything once and gets everything once; so does the other rank.
        let in_network = outcome.wire_bytes - bytes;
        let expected = if is_leader(&comm, EACH) { bytes..bytes + bytes / 10 } else { 0..1 };
        assert!(expected.contains(&in_network), "{in_network} of {bytes}");
        if comm.rank() == 0 {
            let report = status(cluster.controller.local_addr()).expect("a report");
            let jobs: Vec<_> = report.jobs.iter().map(|job| (job.name.as_str(), job.world)).collect();
            assert_eq!(jobs.len(), 2, "{jobs:?}");
            assert!(jobs.contains(&("shares/rail0", 2)), "{jobs:?}");
        }
        comm.barrier().expect("all are there");
        comm.leave();
    });
    wait_until("all jobs have ended", || status(cluster.controller.local_addr()).expect("a report").jobs.is_empty());
}

/// The first rail of `hybrid` is that of the leaders.
#[test]
fn ranks_with_all_rails_take_rab_too() {
    let cluster = rails(2);
    let configure = |config: &mut JoinConfig| {
        on_rails(config);
        config.hybrid = true;
    };
    cluster.run("both", 2 * EACH, configure, |comm| {
        for call in 0..3 {
            checked_sum(&comm, BY, 5000, call);
            let mut values = vec![1_u32; 5000];
            let options = CallOptions { algo: Some(Algo::Hybrid), ..CallOptions::default() };
            let outcome = comm.all_reduce_with(&mut values, ReduceOp::Sum, &options).expect("a sum");
            assert_eq!((outcome.path, values), (Path::Hybrid, vec![2 * EACH; 5000]));
        }
        comm.leave();
    });
}

/// Ranks of a server meet on its board, and a leader waits for the others with and without a thread: whoever is late,
/// results are right.
#[test]
fn short_operations_are_right_whichever_ranks_are_late() {
    let cluster = Cluster::spare(1, controller());
    cluster.run("late", 3 * EACH, with_leaders, |comm| {
        for call in 0..300 {
            if call % 10 == 7 && call / 10 % comm.size() == comm.rank() {
                // Longer than a leader waits before it leaves its block to a thread.
                thread::park_timeout(Duration::from_millis(3));
            }
            let outcome = checked_sum(&comm, BY, [1, 100, 2048, 2049, 20_000][call as usize % 5], call);
            assert_eq!((outcome.trees, outcome.fallback), (u32::from(is_leader(&comm, EACH)), None));
        }
        comm.leave();
    });
}

/// The leaders' device dies while operations run. All results are right, and the leaders have recovered.
#[test]
fn death_of_the_leaders_device_is_repaired_among_the_leaders() {
    for count in [8, LARGE] {
        device_of_leaders_dies(count);
    }
}

fn device_of_leaders_dies(count: usize) {
    let mut cluster = rails(2);
    let board = Mutex::new(Some(cluster.boards.remove(0)));
    let calls = AtomicU32::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            wait_until("calls", || calls.load(Ordering::Relaxed) >= 3);
            drop(board.lock().expect("not poisoned").take());
        });
        cluster.run("killed", 2 * EACH, on_rails, |comm| {
            let mut call = 0;
            loop {
                checked_sum(&comm, BY, count, call);
                call += 1;
                calls.fetch_max(call, Ordering::Relaxed);
                // All ranks stop at the same call.
                let mut recovered = [comm.recoveries().count];
                comm.all_reduce(&mut recovered, ReduceOp::Max).expect("a maximum");
                if recovered != [0] {
                    break;
                }
            }
            assert_eq!(comm.recoveries().count, u32::from(is_leader(&comm, EACH)));
            // Later operations take a host collective of the leaders.
            let outcome = checked_sum(&comm, BY, count, call);
            assert_eq!(outcome.trees, 0, "{outcome:?}");
            let why = outcome.fallback.map(|why| why.to_string()).unwrap_or_default();
            assert_eq!(why.starts_with("this rank's rail: "), is_leader(&comm, EACH), "{why}");
            comm.barrier().expect("all are there");
            comm.leave();
        });
    });
}

/// A rank inside a server, and a leader: the survivors of all servers agree on the rank and on the call.
#[test]
fn lost_rank_or_leader_is_named_the_same_on_all_ranks() {
    let cases = [(2, false), (2, true), (3, false), (3, true)];
    // The short ones are on the boards of servers by then.
    for ((victim, has_tree), (calls, count)) in
        cases.into_iter().flat_map(|case| [(3, LARGE), (100, 8)].map(|of| (case, of)))
    {
        let (cluster, configure): (_, fn(&mut JoinConfig)) = match has_tree {
            true => (Cluster::spare(1, controller()), with_leaders),
            false => (rails(2), on_rails),
        };
        let all_are_through = Barrier::new(2 * EACH as usize);
        let errors = cluster.run("lost", 2 * EACH, configure, |comm| {
            for call in 0..calls {
                checked_sum(&comm, BY, count.min(4096), call);
            }
            // Host collectives retain no results: a rank that is gone takes those along that others have yet to get.
            all_are_through.wait();
            if comm.rank() == victim {
                return None;
            }
            let mut buffer = vec![0_u32; count];
            Some(comm.all_reduce_with(&mut buffer, ReduceOp::Sum, &options(BY)).expect_err("a rank is lost"))
        });
        // The two agreements on the leaders' tree come first. What a buffer holds, each rank knows of its own.
        for error in errors.into_iter().flatten() {
            let Error::RanksFailed { ranks, operation, .. } = error else { panic!("{victim}: {error:?}") };
            assert_eq!((ranks, operation), (vec![Rank(victim)], 2 + u64::from(calls)));
        }
    }
}

/// The tree that compares all calls tells all ranks the same, whichever ranks differ; it does so at once.
#[test]
fn call_by_rab_that_differs_fails_with_the_same_error_on_all_ranks() {
    let cases = [(3, false), (2, false), (0, true)];
    // The short ones are on the boards of servers by then.
    for ((who, is_of_server), (calls, count)) in
        cases.into_iter().flat_map(|case| [(0, 4096), (100, 8)].map(|of| (case, of)))
    {
        let cluster = Cluster::spare(2, controller());
        let began = Instant::now();
        let are_through = Barrier::new(2 * EACH as usize);
        let errors = cluster.run("differs", 2 * EACH, with_leaders, |comm| {
            let differs = comm.rank() == who || is_of_server && comm.rank() / EACH == who / EACH;
            (0..calls).for_each(|call| _ = checked_sum(&comm, BY, count, call));
            // Whoever is in the middle of the last of them would fail there.
            are_through.wait();
            let mut buffer = vec![0_u32; if differs { count + 1 } else { count }];
            comm.all_reduce_with(&mut buffer, ReduceOp::Sum, &options(BY)).expect_err("sizes differ")
        });
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
        assert!(
            matches!(&errors[0], Error::Mismatch { first, other } if first.count + other.count == 2 * count as u64 + 1)
        );
        assert!(began.elapsed() < LONG, "the deadline of calls is as long");
    }
}

/// Without a tree of all ranks, the leaders find out, and tell the ranks of their servers.
#[test]
fn call_that_differs_between_servers_fails_on_all_ranks_without_a_tree_of_all() {
    differ_between_servers(BY, on_rails);
}

#[test]
fn started_and_prepared_operations_take_rab_with_and_without_a_thread() {
    start_and_prepare(BY, 1, with_leaders, |comm| u32::from(is_leader(comm, EACH)));
}

#[test]
fn ranks_without_servers_leaders_or_their_tree_refuse_rab_with_the_reason() {
    let cluster = Cluster::spare(1, controller());
    let line = |config: &mut JoinConfig| {
        with_leaders(config);
        config.set("shape", "line").expect("a shape");
    };
    let not_asked = |config: &mut JoinConfig| {
        with_leaders(config);
        config.rab = false;
    };
    let ordered = |config: &mut JoinConfig| {
        with_leaders(config);
        config.order = sumac::Order::TreeFold;
    };
    type Configure<'c> = &'c (dyn Fn(&mut JoinConfig) + Sync);
    let cases: [(&str, Configure<'_>, &str); 3] = [
        ("line", &line, "rab needs at least two dimensions"),
        ("unasked", &not_asked, "set SUMAC_RAB=1"),
        ("ordered", &ordered, "rab cannot preserve the declared order"),
    ];
    for (name, configure, expected) in cases {
        let found = cluster.run(name, 2 * EACH, configure, |comm| {
            let why = reason(&comm, BY);
            comm.leave();
            why
        });
        assert!(found.iter().all(|why| why.contains(expected)), "{found:?}");
    }
    // The leaders have no device.
    let mut cluster = rails(2);
    drop(cluster.boards.remove(0));
    wait_until("the device is gone", || {
        status(cluster.controller.local_addr()).expect("a report").devices.iter().filter(|of| of.stats.is_ok()).count()
            == 1
    });
    let found = cluster.run("no-tree", 2 * EACH, on_rails, |comm| {
        let why = reason(&comm, BY);
        comm.leave();
        why
    });
    let of_leader = found.iter().map(|why| why.contains("rail 0: ")).collect::<Vec<_>>();
    assert_eq!(of_leader, [true, false, true, false], "{found:?}");
    assert!(found[1].contains("another rail has no tree"), "{found:?}");
}

#[test]
fn rank_that_joins_other_rails_is_refused_by_name() {
    let cluster = Cluster::spare(1, controller());
    let addr = cluster.controller.local_addr();
    let join = |rank: u32, rab: bool| {
        let mut config = JoinConfig::new(addr, "apart", rank, 4);
        with_leaders(&mut config);
        (config.rab, config.hybrid, config.join_timeout) = (rab, !rab, LONG);
        Communicator::join(config)
    };
    thread::scope(|scope| {
        for rank in [0, 1, 2] {
            let join = &join;
            scope.spawn(move || join(rank, true).expect("joined").leave());
        }
        wait_until("ranks have joined", || {
            let report = status(addr).expect("a report");
            report.jobs.iter().any(|job| job.name == "apart" && job.joined == 3)
        });
        let refused = join(3, false).expect_err("it differs");
        assert!(matches!(&refused, JoinError::Controller(_)), "{refused}");
        assert!(refused.to_string().contains("SUMAC_RAB"), "{refused}");
        join(3, true).expect("joined").leave();
    });
}
