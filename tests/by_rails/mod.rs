//! What tests of operations by rails share: a fabric of rails, and operations of which every element is checked.

use crate::common::{Cluster, prefer_tree};
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::ControllerConfig;
use sumac::topo::generate;
use sumac::{Algo, Buffers, CallOptions, Communicator, Element, OpDesc, Outcome, Path, ReduceOp};
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
    let options = CallOptions { algo: Some(algo), ..CallOptions::default() };
    let outcome = comm.run(&desc, buffers, &options).expect("a result");
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
