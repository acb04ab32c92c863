//! All-reduces by `hybrid`: ranks on servers reduce-scatter inside, each rail reduces its block in a tree of its own,
//! and the servers all-gather.

mod by_rails;
mod common;

use by_rails::{
    EACH, LARGE, LONG, check, checked_sum, controller, differ_between_servers, options, rails, reason,
    start_and_prepare, wait_until,
};
use common::{Cluster, over_udp};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::Instant;
use sumac::controller::{ControllerConfig, Quota, Quotas, status};
use sumac::{Algo, CallOptions, Communicator, Error, JoinConfig, JoinError, Path, ReduceOp, Straggler};

/// The algorithm, and its path.
const BY: (Algo, Path) = (Algo::Hybrid, Path::Hybrid);

/// Ranks that join rails, on servers of [`EACH`].
fn with_rails(config: &mut JoinConfig) {
    over_udp(config);
    (config.deadline, config.hybrid) = (LONG, true);
    config.set("shape", &format!("servers:{EACH}")).expect("a shape");
}

/// The same, where each names its adapter in a fabric of rails.
fn on_rails(config: &mut JoinConfig) {
    with_rails(config);
    config.host = Some(format!("n{} rail{}", config.rank / EACH, config.rank % EACH));
}

#[test]
fn every_element_is_right_for_all_counts_types_and_operators() {
    for servers in [2, 3] {
        let cluster = rails(servers);
        cluster.run("counts", servers * EACH, on_rails, |comm| {
            let ranks = comm.size();
            let all = |each: &dyn Fn(u32) -> f64| (0..ranks).map(each).sum::<f64>();
            for is_in_place in [true, false] {
                for count in [0, 1, 7, 4096, LARGE] {
                    let value = |rank: u32, at: usize| ((rank + 1) as usize * (at % 1000)) as f32;
                    let sum = |at: usize| all(&|rank| f64::from(value(rank, at))) as f32;
                    let outcome = check(&comm, BY, (ReduceOp::Sum, count), value, sum, is_in_place);
                    assert_eq!((outcome.trees, outcome.fallback.as_deref()), (1, None));
                    let value = |rank: u32, at: usize| (rank as u8) ^ (at as u8);
                    let greatest = |at: usize| (0..ranks).map(|rank| value(rank, at)).max().expect("ranks");
                    check(&comm, BY, (ReduceOp::Max, count), value, greatest, is_in_place);
                    let value = |rank: u32, at: usize| f64::from(rank) * 4.0 + at as f64;
                    let average = |at: usize| all(&|rank| value(rank, at)) / f64::from(ranks);
                    check(&comm, BY, (ReduceOp::Avg, count), value, average, is_in_place);
                    let value = |rank: u32, at: usize| i16::from((rank as usize + at).is_multiple_of(3));
                    let any = |at: usize| (0..ranks).map(|rank| value(rank, at)).max().expect("ranks");
                    check(&comm, BY, (ReduceOp::Lor, count), value, any, is_in_place);
                    // Pairs of a value and an index.
                    let value = |rank: u32, at: usize| {
                        let (pair, is_index) = (at / 2, at % 2 == 1);
                        if is_index { u64::from(rank) } else { (u64::from(rank) + pair as u64) % u64::from(ranks) }
                    };
                    let least = |at: usize| {
                        let pair = at / 2;
                        let best = (0..ranks).min_by_key(|&rank| value(rank, 2 * pair)).expect("ranks");
                        value(best, at)
                    };
                    check(&comm, BY, (ReduceOp::MinLoc, count / 2 * 2), value, least, is_in_place);
                }
            }
            comm.leave();
        });
    }
}

/// Contributions to a premultiplied sum are scaled once.
#[test]
fn premultiplied_sum_is_scaled_once() {
    let cluster = rails(2);
    cluster.run("scaled", 2 * EACH, on_rails, |comm| {
        let mut values = vec![f32::from(comm.rank() as u8 + 1); 1001];
        let options = CallOptions { scalar: Some(0.5), ..options(BY) };
        comm.all_reduce_with(&mut values, ReduceOp::PremulSum, &options).expect("a sum");
        assert!(values.iter().all(|&value| value == 5.0), "{:?}", &values[..4]);
        comm.leave();
    });
}

#[test]
fn each_rail_has_a_tree_of_its_own_that_carries_its_block() {
    let cluster = rails(2);
    cluster.run("shares", 2 * EACH, on_rails, |comm| {
        let (outcome, bytes) = (checked_sum(&comm, BY, LARGE, 0), 4 * LARGE as u64);
        // Inside, each rank sends one half twice; its rail gets the other half.
        let in_rail = outcome.wire_bytes - bytes;
        assert!((bytes / 2..bytes / 2 + bytes / 10).contains(&in_rail), "{in_rail} of {bytes}");
        if comm.rank() == 0 {
            let report = status(cluster.controller.local_addr()).expect("a report");
            let tree_of = |name: &str| {
                let job = report.jobs.iter().find(|job| job.name == name).expect(name);
                (job.world, job.tree.clone().expect("placed").map(|tree| tree.devices))
            };
            for rail in 0..EACH {
                assert_eq!(tree_of(&format!("shares/rail{rail}")), (2, Ok(vec![format!("leaf{rail}-0")])));
            }
            assert!(tree_of("shares").1.is_err(), "no cable joins the rails");
        }
        comm.barrier().expect("all are there");
        comm.leave();
    });
    wait_until("all jobs have ended", || status(cluster.controller.local_addr()).expect("a report").jobs.is_empty());
}

/// Without a fabric, rails take different devices where there are enough. All are one group of the quota.
#[test]
fn rails_take_different_devices_within_a_quota_of_one_group() {
    let quota = Quota { groups: Some(1), ..Quota::default() };
    let quotas = Quotas { other: quota, ..Quotas::default() };
    let cluster = Cluster::spare(2, ControllerConfig { quotas, ..controller() });
    cluster.run("quota", 2 * EACH, with_rails, |comm| {
        assert_eq!(checked_sum(&comm, BY, 4096, 0).trees, 1);
        if comm.rank() == 0 {
            let report = status(cluster.controller.local_addr()).expect("a report");
            assert_eq!(report.tenants[0].groups, 1);
            let rails = report.jobs.iter().filter(|job| job.name.contains("/rail"));
            let devices = rails.map(|job| job.tree.clone().expect("placed").expect("a tree").devices[0].clone());
            assert_eq!(devices.collect::<BTreeSet<_>>().len(), 2);
        }
        comm.barrier().expect("all are there");
        comm.leave();
    });
}

/// A rail's device dies while operations run. All results are right, the rail recovers, and the other one does not.
#[test]
fn death_of_a_rail_is_repaired_in_its_block_alone() {
    for victim in [0, 1] {
        let mut cluster = rails(2);
        let board = Mutex::new(Some(cluster.boards.remove(victim)));
        let calls = AtomicU32::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                wait_until("calls", || calls.load(Ordering::Relaxed) >= 3);
                drop(board.lock().expect("not poisoned").take());
            });
            cluster.run("killed", 2 * EACH, on_rails, |comm| {
                let (mut call, mut recovered) = (0, false);
                loop {
                    let outcome = checked_sum(&comm, BY, LARGE, call);
                    recovered |= outcome.recovered;
                    call += 1;
                    calls.fetch_max(call, Ordering::Relaxed);
                    // All ranks stop at the same call.
                    let mut rails_recovered = [comm.recoveries().count];
                    comm.all_reduce(&mut rails_recovered, ReduceOp::Max).expect("a maximum");
                    if rails_recovered != [0] {
                        break;
                    }
                }
                let is_of_victim = comm.rank() % EACH == victim as u32;
                assert_eq!(comm.recoveries().count, u32::from(is_of_victim));
                assert!(is_of_victim || !recovered);
                let outcome = checked_sum(&comm, BY, LARGE, call);
                assert_eq!(outcome.trees, u32::from(!is_of_victim), "{outcome:?}");
                let why = outcome.fallback.map(|why| why.to_string()).unwrap_or_default();
                assert_eq!(why.starts_with("this rank's rail: "), is_of_victim, "{why}");
                comm.barrier().expect("all are there");
                comm.leave();
            });
        });
    }
}

/// The tree that compares all calls tells all ranks the same, whichever ranks differ; it does so at once.
#[test]
fn call_that_differs_fails_with_the_same_error_on_all_ranks() {
    for (who, is_of_server) in [(3, false), (0, true)] {
        let cluster = Cluster::spare(3, controller());
        let began = Instant::now();
        let errors = cluster.run("differs", 2 * EACH, with_rails, |comm| {
            let differs = comm.rank() == who || is_of_server && comm.rank() / EACH == who / EACH;
            let mut buffer = vec![0_u32; if differs { 4097 } else { 4096 }];
            let error = comm.all_reduce_with(&mut buffer, ReduceOp::Sum, &options(BY)).expect_err("sizes differ");
            let next = comm.barrier().expect_err("the communicator has ended");
            assert!(matches!(next, Error::Ended(_)), "{next}");
            error
        });
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
        assert!(matches!(&errors[0], Error::Mismatch { first, other } if first.count + other.count == 8193));
        assert!(began.elapsed() < LONG, "the deadline of calls is as long");
    }
}

/// Without a tree of all ranks, those that meet the other call find out, and tell the rest.
#[test]
fn call_that_differs_between_servers_fails_on_all_ranks_without_a_tree_of_all() {
    differ_between_servers(BY, on_rails);
}

/// The survivors of all rails agree on the rank, by its number in the communicator, and on the call.
#[test]
fn lost_rank_is_named_by_its_number_in_the_communicator() {
    let configure: [fn(&mut JoinConfig); 2] = [on_rails, with_rails];
    for (cluster, configure) in [rails(2), Cluster::spare(2, controller())].into_iter().zip(configure) {
        let all_are_through = Barrier::new(2 * EACH as usize);
        let errors = cluster.run("lost", 2 * EACH, configure, |comm| {
            for call in 0..3 {
                checked_sum(&comm, BY, 4096, call);
            }
            // Host collectives retain no results: a rank that is gone takes those along that others have yet to get.
            all_are_through.wait();
            if comm.rank() == 3 {
                return None;
            }
            let mut buffer = vec![0_u32; LARGE];
            Some(comm.all_reduce_with(&mut buffer, ReduceOp::Sum, &options(BY)).expect_err("a rank is lost"))
        });
        // The two agreements on the rails come first. What a buffer holds, each rank knows of its own.
        for error in errors.into_iter().flatten() {
            let Error::RanksFailed { ranks, operation, .. } = error else { panic!("{error:?}") };
            assert_eq!((ranks, operation), (vec![sumac_hal::ids::Rank(3)], 2 + 3));
        }
    }
}

#[test]
fn cancelled_call_ends_at_once() {
    let cluster = rails(2);
    // Whoever is in the middle of the first operation when another is cancelled fails there.
    let is_connected = Barrier::new(2 * EACH as usize);
    cluster.run("cancelled", 2 * EACH, on_rails, |comm| {
        checked_sum(&comm, BY, 4096, 0);
        is_connected.wait();
        let canceller = comm.canceller();
        if comm.rank() == 0 {
            // The others wait for this rank.
            thread::scope(|scope| {
                scope.spawn(|| canceller.cancel());
                let mut buffer = vec![0_u32; 4096];
                while comm.all_reduce_with(&mut buffer, ReduceOp::Sum, &options(BY)).is_ok() {}
            });
            assert!(matches!(comm.barrier(), Err(Error::Ended(_) | Error::Cancelled)));
            return;
        }
        let mut buffer = vec![0_u32; 4096];
        let error = loop {
            if let Err(error) = comm.all_reduce_with(&mut buffer, ReduceOp::Sum, &options(BY)) {
                break error;
            }
        };
        assert!(matches!(&error, Error::RanksFailed { ranks, .. } if ranks[0].0 == 0), "{error:?}");
    });
}

#[test]
fn started_and_prepared_operations_take_hybrid_with_and_without_a_thread() {
    start_and_prepare(BY, 2, with_rails, |_| 1);
}

#[test]
fn ranks_without_servers_rails_or_trees_refuse_hybrid_with_the_reason() {
    let cluster = Cluster::spare(1, controller());
    let line = |config: &mut JoinConfig| {
        with_rails(config);
        config.set("shape", "line").expect("a shape");
    };
    let not_asked = |config: &mut JoinConfig| {
        with_rails(config);
        config.hybrid = false;
    };
    type Configure<'c> = &'c (dyn Fn(&mut JoinConfig) + Sync);
    let cases: [(&str, Configure<'_>, &str); 2] =
        [("line", &line, "hybrid needs at least two dimensions"), ("unasked", &not_asked, "set SUMAC_HYBRID=1")];
    for (name, configure, expected) in cases {
        let found = cluster.run(name, 2 * EACH, configure, |comm| {
            let why = reason(&comm, BY);
            comm.leave();
            why
        });
        assert!(found.iter().all(|why| why.contains(expected)), "{found:?}");
    }
    // One of the rails has no device.
    let mut cluster = rails(2);
    drop(cluster.boards.remove(1));
    wait_until("the device is gone", || {
        status(cluster.controller.local_addr()).expect("a report").devices.iter().filter(|of| of.stats.is_ok()).count()
            == 1
    });
    let found = cluster.run("one-rail", 2 * EACH, on_rails, |comm| {
        let why = reason(&comm, BY);
        comm.leave();
        (comm_rail(&why), why)
    });
    assert_eq!(found.iter().map(|(of_own, _)| *of_own).collect::<Vec<_>>(), [false, true, false, true], "{found:?}");
}

/// Whether a reason is that of the second rail.
fn comm_rail(why: &str) -> bool {
    assert!(why.contains("rail 1: ") || why.contains("another rail has no tree"), "{why}");
    why.contains("rail 1: ")
}

#[test]
fn operation_whose_bits_depend_on_a_declared_order_is_refused() {
    let cluster = Cluster::spare(2, controller());
    let ordered = |config: &mut JoinConfig| {
        with_rails(config);
        config.order = sumac::Order::TreeFold;
    };
    cluster.run("ordered", 2 * EACH, ordered, |comm| {
        assert!(reason(&comm, BY).contains("cannot preserve the declared order"));
        checked_sum(&comm, BY, 4096, 0);
        let late = CallOptions { straggler: Some(Straggler::Partial(LONG)), ..options(BY) };
        let error = comm.all_reduce_with(&mut [0_u32; 4096], ReduceOp::Sum, &late).expect_err("not by hybrid");
        assert!(error.to_string().contains("hybrid cannot complete without late ranks"), "{error}");
        comm.leave();
    });
}

#[test]
fn rank_that_does_not_join_rails_is_refused_by_name() {
    let cluster = Cluster::spare(1, controller());
    let addr = cluster.controller.local_addr();
    let join = |rank: u32, hybrid: bool| {
        let mut config = JoinConfig::new(addr, "apart", rank, 4);
        with_rails(&mut config);
        (config.hybrid, config.join_timeout) = (hybrid, LONG);
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
        assert!(refused.to_string().contains("SUMAC_HYBRID"), "{refused}");
        join(3, true).expect("joined").leave();
    });
}
