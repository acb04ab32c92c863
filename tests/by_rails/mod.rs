//! What tests of operations by rails share: a fabric of rails, and operations of which every element is checked.

use crate::common::{Cluster, prefer_tree};
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::ControllerConfig;
use sumac::topo::generate;
use sumac::{
    Algo, Buffers, CallOptions, Communicator, Dtype, Element, Error, JoinConfig, OpDesc, Outcome, Path, Progress,
    ReduceOp,
};
use sumac_hal::uplink::HopTimers;

/// A passing test never reaches it.
pub(crate) const LONG: Duration = Duration::from_secs(30);

/// Ranks on each server, and so rails.
pub(crate) const EACH: u32 = 2;

/// The number of elements of the largest operation.
pub(crate) const LARGE: usize = 1 << 18;

pub(crate) fn controller() -> ControllerConfig {
    let timers = HopTimers { dead: Duration::from_millis(700), ..HopTimers::DEFAULT };
    ControllerConfig { timers, ..prefer_tree() }
}

/// A fabric of rails, which no cable joins: only the ranks of a rail have a tree together.
pub(crate) fn rails(servers: u32) -> Cluster {
    let servers = servers as usize;
    let rails = EACH as usize;
    let shape = generate::Rails { servers, rails, servers_per_leaf: servers, spines: 0, rate: None };
    Cluster::on(generate::rails(shape).expect("a possible shape"), controller())
}

/// Calls by an algorithm.
pub(crate) fn options((algo, _): (Algo, Path)) -> CallOptions {
    CallOptions { algo: Some(algo), ..CallOptions::default() }
}

/// All-reduce values of a type in place or apart, and check every element.
pub(crate) fn check<T: Element + PartialEq + std::fmt::Debug>(
    comm: &Communicator,
    (algo, path): (Algo, Path),
    (op, count): (ReduceOp, usize),
    value: impl Fn(u32, usize) -> T,
    result: impl Fn(usize) -> T,
    is_in_place: bool,
) -> Outcome {
    let mut input: Vec<T> = (0..count).map(|at| value(comm.rank(), at)).collect();
    let elements = if op.is_located() { count / 2 } else { count };
    let desc = OpDesc::all_reduce(T::DTYPE, op, elements as u64);
    let mut output: Vec<T> = (0..count).map(|_| value(7, 0)).collect();
    let buffers = match is_in_place {
        true => Buffers::InPlace(bytemuck::cast_slice_mut(&mut input)),
        false => {
            Buffers::Separate { input: bytemuck::cast_slice(&input), output: bytemuck::cast_slice_mut(&mut output) }
        }
    };
    let outcome = comm.run(&desc, buffers, &options((algo, path))).expect("a result");
    let found = if is_in_place { &input } else { &output };
    let wrong = (0..count).find(|&at| found[at] != result(at));
    assert_eq!(wrong.map(|at| (at, found[at])), None, "{desc}, in place: {is_in_place}");
    assert!(is_in_place || input.iter().enumerate().all(|(at, &own)| own == value(comm.rank(), at)), "{desc}");
    assert_eq!(outcome.path, path);
    outcome
}

/// All-reduce values that depend on the rank, the element and `call`, and check every one.
pub(crate) fn checked_sum(comm: &Communicator, by: (Algo, Path), count: usize, call: u32) -> Outcome {
    let value = |rank: u32, at: usize| (rank + 1).wrapping_mul(at as u32 ^ call.wrapping_mul(0x9e37_79b9));
    let sum = |at: usize| (0..comm.size()).fold(0_u32, |sum, rank| sum.wrapping_add(value(rank, at)));
    check(comm, by, (ReduceOp::Sum, count), value, sum, true)
}

/// Wait until `is_done`.
pub(crate) fn wait_until(what: &str, is_done: impl Fn() -> bool) {
    let give_up = Instant::now() + LONG;
    while !is_done() {
        assert!(Instant::now() < give_up, "{what}: not within {LONG:?}");
        thread::yield_now();
    }
}

/// Start operations, prepare one and call one, with and without a progress thread, on a cluster of so many devices.
/// Outcomes have so many trees.
pub(crate) fn start_and_prepare(
    by: (Algo, Path),
    devices: usize,
    configure: impl Fn(&mut JoinConfig) + Sync,
    trees: impl Fn(&Communicator) -> u32 + Sync,
) {
    for progress in [Progress::Caller, Progress::Thread] {
        let cluster = Cluster::spare(devices, controller());
        let configure = |config: &mut JoinConfig| {
            configure(config);
            config.progress = Some(progress);
        };
        cluster.run("started", 2 * EACH, configure, |comm| {
            let values = |call: u32| vec![comm.rank() + call; 5000];
            let sum = |call: u32| (0..comm.size()).map(|rank| rank + call).sum::<u32>();
            let is_right = |values: &[u32], call| values.iter().all(|&value| value == sum(call));
            let start = |call| comm.start_all_reduce_with(values(call), ReduceOp::Sum, &options(by)).expect("started");
            let handles: Vec<_> = (0..3).map(start).collect();
            for (call, handle) in (0..).zip(handles) {
                let (values, outcome) = handle.wait().expect("a sum");
                assert!(is_right(&values, call));
                assert_eq!((outcome.path, outcome.trees), (by.1, trees(&comm)));
            }
            let desc = OpDesc::all_reduce(Dtype::U32, ReduceOp::Sum, 5000);
            let mut prepared = comm.prepare(&desc, values(9), None, &options(by)).expect("prepared");
            assert_eq!(prepared.run().expect("a sum").path, by.1);
            assert!(is_right(prepared.buffer().expect("not started"), 9));
            checked_sum(&comm, by, 777, 1);
            comm.leave();
        });
    }
}

/// Call with another length on one of three servers, where no tree joins all ranks: all of them get the error.
pub(crate) fn differ_between_servers(by: (Algo, Path), configure: impl Fn(&mut JoinConfig) + Sync) {
    let cluster = rails(3);
    let began = Instant::now();
    let errors = cluster.run("servers", 3 * EACH, configure, |comm| {
        let mut buffer = vec![0_u32; if comm.rank() / EACH == 1 { 100 } else { 4096 }];
        comm.all_reduce_with(&mut buffer, ReduceOp::Sum, &options(by)).expect_err("sizes differ")
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Mismatch { .. })), "{errors:?}");
    assert!(began.elapsed() < LONG, "the deadline of calls is as long");
}

/// `explain` and a call by name give the same reason why the ranks cannot take an algorithm.
pub(crate) fn reason(comm: &Communicator, by: (Algo, Path)) -> String {
    let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 4096);
    let explained = comm.explain(&desc, by.0);
    let why = explained.refusal().expect("not possible").to_string();
    assert!(explained.to_string().contains(&why));
    let refused = comm.all_reduce_with(&mut [0_f32; 4096], ReduceOp::Sum, &options(by)).expect_err("not possible");
    assert_eq!(refused.to_string(), format!("not possible: {why}"));
    let outcome = comm.all_reduce(&mut [1_f32; 4096], ReduceOp::Sum).expect("by another path");
    assert_ne!(outcome.path, by.1);
    why
}
