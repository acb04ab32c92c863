//! Communicators on several trees: large operations are spread over them, and a device's death is repaired in its share
//! alone.

mod common;

use common::{Cluster, over_udp, prefer_tree};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::proto::{JobStatus, StripeStatus};
use sumac::controller::{ControllerConfig, Quota, Quotas, status};
use sumac::{Communicator, JoinConfig, Path, ReduceOp};
use sumac_hal::uplink::HopTimers;

/// Longer than any step takes.
const LIMIT: Duration = Duration::from_secs(60);

/// Elements of an operation that is large enough for eight trees.
const LARGE: usize = 8 * (64 << 10) / 4;

fn by_tree() -> ControllerConfig {
    let timers = HopTimers { dead: Duration::from_millis(700), ..HopTimers::DEFAULT };
    ControllerConfig { timers, ..prefer_tree() }
}

fn over_trees(trees: u8) -> impl Fn(&mut JoinConfig) + Sync {
    move |config| {
        over_udp(config);
        config.trees = trees;
    }
}

/// All-reduce values that depend on the rank, the element and `call`, and check every one.
fn checked_sum(comm: &Communicator, len: usize, call: u32) -> sumac::Outcome {
    let value = |rank: u32, at: usize| (rank + 1).wrapping_mul(at as u32 ^ call.wrapping_mul(0x9e37_79b9));
    let mut buffer: Vec<u32> = (0..len).map(|at| value(comm.rank(), at)).collect();
    let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
    let sum = |at| (0..comm.size()).fold(0_u32, |sum, rank| sum.wrapping_add(value(rank, at)));
    let wrong = buffer.iter().enumerate().filter(|&(at, &found)| found != sum(at)).count();
    assert_eq!(wrong, 0, "call {call} of {len} elements");
    outcome
}

/// The trees of the only communicator, by the first device of each: views, and groups.
fn trees(cluster: &Cluster) -> BTreeMap<String, (u32, u32)> {
    let report = status(cluster.controller.local_addr()).expect("a report");
    let jobs = report.jobs.into_iter().flat_map(|job| std::iter::once(own_tree(&job)).chain(further_trees(&job)));
    jobs.flatten().collect()
}

fn own_tree(job: &JobStatus) -> Option<(String, (u32, u32))> {
    let tree = job.tree.as_ref()?.as_ref().ok()?;
    Some((tree.devices[0].clone(), (job.view, tree.group.0)))
}

fn further_trees(job: &JobStatus) -> Vec<Option<(String, (u32, u32))>> {
    let tree = |stripe: &StripeStatus| {
        let tree = stripe.tree.as_ref().ok()?;
        Some((tree.devices[0].clone(), (stripe.view, tree.group.0)))
    };
    job.stripes.iter().map(tree).collect()
}

/// Wait until `is_done`.
fn wait_until(what: &str, is_done: impl Fn() -> bool) {
    let give_up = Instant::now() + LIMIT;
    while !is_done() {
        assert!(Instant::now() < give_up, "{what}: not within {LIMIT:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn large_operation_is_spread_over_all_devices_and_a_small_one_is_not() {
    for devices in [2_u8, 4, 8] {
        let cluster = Cluster::spare(devices.into(), by_tree());
        let spread = cluster.run("spread", 3, over_trees(devices), |comm| {
            assert_eq!(comm.trees().shares, vec![1; devices.into()], "{:?}", comm.trees());
            for call in 0..3 {
                assert_eq!(checked_sum(&comm, LARGE + 7, call).trees, u32::from(devices));
                assert_eq!(checked_sum(&comm, 100, call).trees, 1);
                let odd = checked_sum(&comm, LARGE / 3 + 1, call);
                assert_eq!((odd.path, odd.trees), (Path::Tree, u32::from(devices.min(2))));
            }
            let mut moved: Vec<f64> = (0..LARGE).map(|at| f64::from(comm.rank() * 3) + at as f64).collect();
            let outcome = comm.broadcast(&mut moved, 1).expect("a broadcast");
            assert!(moved.iter().enumerate().all(|(at, &found)| found == 3.0 + at as f64));
            let own = moved.clone();
            comm.reduce(&mut moved, ReduceOp::Max, 2).expect("a reduction");
            assert_eq!(moved, own);
            comm.barrier().expect("all are there");
            comm.leave();
            outcome.trees
        });
        assert_eq!(spread, [u32::from(devices); 3]);
    }
}

/// A device is killed while operations are spread over it and seven others. All results are right, the stripe or the
/// communicator whose tree it was recovers, and no other tree changes.
#[test]
fn death_of_a_device_is_repaired_in_its_share_alone() {
    for victim in [0, 3] {
        let mut cluster = Cluster::spare(8, by_tree());
        let names: Vec<String> = (0..8).map(|nth| format!("spare{nth}")).collect();
        let board = std::sync::Mutex::new(Some(cluster.boards.remove(victim)));
        let (calls, is_over) = (AtomicU32::new(0), AtomicBool::new(false));
        let before = std::sync::Mutex::new(BTreeMap::new());
        thread::scope(|scope| {
            scope.spawn(|| {
                wait_until("calls", || calls.load(Ordering::Relaxed) >= 3);
                *before.lock().expect("not poisoned") = trees(&cluster);
                let begun = calls.load(Ordering::Relaxed);
                wait_until("another call", || calls.load(Ordering::Relaxed) > begun);
                drop(board.lock().expect("not poisoned").take());
            });
            cluster.run("killed", 3, over_trees(8), |comm| {
                let (mut call, mut after) = (0, 0);
                while after < 4 {
                    let outcome = checked_sum(&comm, LARGE, call);
                    call += 1;
                    if comm.rank() == 0 {
                        calls.store(call, Ordering::Relaxed);
                    }
                    // All ranks stop at the same call.
                    let mut lost = [u32::from(outcome.trees < 8)];
                    comm.all_reduce(&mut lost, ReduceOp::Max).expect("a maximum");
                    after += lost[0];
                    assert!(outcome.trees >= 7, "{outcome:?}");
                }
                assert_eq!(comm.recoveries().count, 1);
                if comm.rank() == 0 {
                    let (before, after) = (before.lock().expect("not poisoned").clone(), trees(&cluster));
                    assert_eq!(before.keys().cloned().collect::<Vec<_>>(), names);
                    let mut untouched = before;
                    untouched.remove(&names[victim]);
                    assert_eq!(after, untouched);
                    is_over.store(true, Ordering::Relaxed);
                }
                comm.barrier().expect("all are there");
                comm.leave();
            });
        });
        assert!(is_over.load(Ordering::Relaxed));
    }
}

/// The trees of a communicator are one group of its tenant's quota. Slots count as they are: where there are none left,
/// there are fewer trees, and the reason is told.
#[test]
fn trees_are_one_group_of_the_quota_and_fewer_where_slots_are_refused() {
    let quota = Quota { groups: Some(1), ..Quota::default() };
    let quotas = Quotas { other: quota, ..Quotas::default() };
    let cluster = Cluster::spare(3, ControllerConfig { quotas, ..by_tree() });
    cluster.run("quota", 2, over_trees(4), |comm| {
        let found = comm.trees();
        assert_eq!(found.shares, [1, 1, 1]);
        let why = found.reason.expect("three devices");
        assert!(why.starts_with("3 of 4 trees: "), "{why}");
        assert_eq!(checked_sum(&comm, LARGE, 0).trees, 3);
        if comm.rank() == 0 {
            let report = status(cluster.controller.local_addr()).expect("a report");
            assert_eq!(report.tenants[0].groups, 1);
        }
        comm.barrier().expect("all are there");
        comm.leave();
    });
    let report = status(cluster.controller.local_addr()).expect("a report");
    assert!(report.tenants.iter().all(|tenant| (tenant.groups, tenant.slots) == (0, 0)), "{:?}", report.tenants);
}

/// A rank that makes a small call while others make a large one: no share of the large one waits for its deadline.
#[test]
fn small_call_beside_large_ones_fails_on_all_ranks_at_once() {
    let cluster = Cluster::spare(4, by_tree());
    let began = Instant::now();
    let errors = cluster.run("sizes", 3, over_trees(4), |comm| {
        let mut buffer = vec![0_u32; if comm.rank() == 1 { 10 } else { LARGE }];
        comm.all_reduce(&mut buffer, ReduceOp::Sum).expect_err("different sizes").to_string()
    });
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    assert!(began.elapsed() < LIMIT, "the deadline of calls is longer");
}

/// Mismatched calls fail on all ranks, whichever share notices first, and end the communicator.
#[test]
fn mismatched_large_calls_fail_on_all_ranks() {
    let cluster = Cluster::spare(4, by_tree());
    let errors = cluster.run("mismatch", 2, over_trees(4), |comm| {
        let mut buffer = vec![0_u32; LARGE];
        let op = if comm.rank() == 0 { ReduceOp::Sum } else { ReduceOp::Max };
        let error = comm.all_reduce(&mut buffer, op).expect_err("different operators");
        let next = comm.all_reduce(&mut [0_u32], ReduceOp::Sum).expect_err("the communicator has ended");
        assert!(matches!(next, sumac::Error::Ended(_)), "{next}");
        error.to_string()
    });
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].contains("different operations"), "{}", errors[0]);
}

/// The bits do not depend on the number of trees under a declared order.
#[test]
fn declared_order_gives_the_same_bits_on_any_number_of_trees() {
    let cluster = Cluster::spare(4, by_tree());
    let mut first: Option<Vec<u32>> = None;
    for devices in [0, 2, 4] {
        let ordered = |config: &mut JoinConfig| {
            over_trees(devices)(config);
            config.order = sumac::Order::TreeFold;
        };
        let bits = cluster.run(&format!("order{devices}"), 5, ordered, |comm| {
            let value = |at: usize| (at as f32 + 0.1).powf(comm.rank() as f32 * 0.7 - 1.3);
            let mut buffer: Vec<f32> = (0..LARGE).map(value).collect();
            let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
            assert_eq!(outcome.trees, u32::from(devices.max(1)));
            comm.leave();
            buffer.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
        });
        assert!(bits.iter().all(|of| *of == bits[0]));
        assert_eq!(first.get_or_insert_with(|| bits[0].clone()), &bits[0], "{devices} trees");
    }
}

/// Ranks that share memory with their device, and those that combine on their host, take one tree and say so.
#[test]
fn zero_copy_ranks_take_one_tree_and_tell_why() {
    let cluster = Cluster::spare(2, by_tree());
    cluster.run(
        "shm",
        2,
        |config| config.trees = 2,
        |comm| {
            let trees = comm.trees();
            assert_eq!(trees.shares.len(), 1);
            assert!(trees.reason.is_some_and(|why| why.contains("zero-copy")));
            assert_eq!(checked_sum(&comm, LARGE, 0).trees, 1);
            comm.leave();
        },
    );
}

/// Eight hosts and eight devices below one leaf, each behind a port of the hosts' rate. Each device takes in eight
/// contributions, so eight trees have eight times the rate of one, and the controller plans them unasked.
#[test]
fn devices_behind_ports_of_their_own_get_a_tree_each_unasked() {
    let star = sumac::topo::generate::star(8, sumac::topo::Rate::from_gbits(100.0)).expect("a star");
    let places = star.read_devices("[[device]]\nswitch = \"*\"\nport_gbits = 100\ncount = 8\n").expect("places");
    let cluster = Cluster::on(star.with_devices(&places).expect("a fabric"), by_tree());
    cluster.run("unasked", 8, over_udp, |comm| {
        let trees = comm.trees();
        assert_eq!(trees.shares, [125; 8], "{trees:?}");
        assert_eq!(checked_sum(&comm, LARGE, 0).trees, 8);
        comm.leave();
    });
    // Four of them, as requested; the plan says so.
    cluster.run("asked", 8, over_trees(4), |comm| {
        assert_eq!(checked_sum(&comm, LARGE, 0).trees, 4);
        comm.leave();
    });
}

/// Where one tree has the rate of the hosts' cables, there is one, whatever is requested, with the reason.
#[test]
fn further_trees_that_are_not_faster_are_not_planned() {
    let cluster = Cluster::start(2, 2);
    cluster.run("enough", 4, over_trees(3), |comm| {
        let trees = comm.trees();
        assert_eq!(trees.shares.len(), 1);
        let why = trees.reason.expect("fewer than requested");
        assert_eq!(why, "1 of 3 trees: these have the rate of the hosts' cables");
        comm.leave();
    });
}
