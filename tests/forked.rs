//! Processes forked from a rank: nothing that they drop or call affects the parent.
//!
//! The only test of this program, because it forks while ranks, devices and the controller have threads that hold
//! locks.

mod common;

use common::{Cluster, over_udp};
use std::sync::Barrier;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};
use sumac::comm::{ControllerState, Handle, Prepared};
use sumac::controller::ControllerConfig;
use sumac::{Algo, Buffer, CallOptions, Communicator, Error, JoinConfig, OpDesc, ReduceOp, Transport};
use sumac_firmware::emulated::ZeroCopyConfig;
use sumac_hal::op::Dtype;

const RANKS: u32 = 3;
const LEN: usize = 50_000;
/// More time than a child that does not block needs.
const CHILD_LIMIT: Duration = Duration::from_secs(30);

/// The exit status of a child whose checks all passed.
const ALL_WELL: i32 = 0;
/// The exit status if the first check failed; the next check has the next number.
const CHECKS: i32 = 1;
const PANIC: i32 = 100;
/// Added to the number of the signal that ended the child; SIGKILL means that it hung.
const SIGNALS: i32 = 200;

/// Run `child` in a forked process and return its exit status. Kills it after `CHILD_LIMIT`.
///
/// Other threads may have held locks during the fork, so `child` must not take any lock of its parent.
fn forked(child: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the C library resets its own locks in the child, which ends without running code of its parent.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(PANIC);
        // SAFETY: `_exit` runs no code of the parent.
        unsafe { libc::_exit(code) };
    }
    assert!(pid > 0, "fork failed: {}", std::io::Error::last_os_error());
    let until = Instant::now() + CHILD_LIMIT;
    let mut is_killed = false;
    loop {
        let mut status = 0;
        // SAFETY: the pointer is to a valid status.
        match unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } {
            0 if Instant::now() < until || is_killed => thread::yield_now(),
            0 => {
                is_killed = true;
                // SAFETY: the process is a child that has not been waited for.
                unsafe { libc::kill(pid, libc::SIGKILL) };
            }
            _ if libc::WIFEXITED(status) => return libc::WEXITSTATUS(status),
            _ => return SIGNALS + libc::WTERMSIG(status),
        }
    }
}

/// A communicator and everything that was made from it.
struct All {
    split: Communicator,
    handle: Handle<Vec<u32>>,
    buffer: Buffer<u32>,
    /// It has been run, so that the next run looks at little.
    prepared: Prepared<Vec<u32>>,
    comm: Communicator,
}

/// Use and drop everything in a child; return the number of the first check that fails.
fn use_and_drop(all: All) -> i32 {
    let All { split, mut handle, mut buffer, mut prepared, comm } = all;
    let is_forked = |result: Result<(), Error>| result == Err(Error::Forked);
    let desc = OpDesc::all_reduce(Dtype::U32, ReduceOp::Sum, LEN as u64);
    let mut values = vec![1_u32; LEN];
    let checks = [
        buffer.iter().all(|&x| x == 7),
        is_forked(comm.all_reduce(&mut values, ReduceOp::Sum).map(drop)),
        is_forked(comm.all_reduce(&mut buffer, ReduceOp::Sum).map(drop)),
        is_forked(comm.run(&desc, bytemuck::cast_slice_mut(&mut values), &CallOptions::default()).map(drop)),
        is_forked(comm.start_all_reduce(vec![1_u32; LEN], ReduceOp::Sum).map(drop).map_err(Error::from)),
        is_forked(comm.send(&[1_u32], (comm.rank() + 1) % RANKS, 0)),
        is_forked(comm.start_receive::<u32>(1, (comm.rank() + 1) % RANKS, 0).map(drop)),
        is_forked(comm.alloc::<u32>(LEN).map(drop)),
        is_forked(split.barrier().map(drop)),
        is_forked(prepared.run().map(drop)),
        comm.split(Some(0), 0).is_err() && comm.shrink().is_err(),
        comm.explain(&desc, Algo::Auto).chosen.is_none(),
        matches!(comm.controller(), ControllerState::Refused { .. }) && comm.queue_position().is_none(),
        comm.recoveries() == sumac::comm::Recoveries::default()
            && comm.name() == "forked"
            && split.name() == "forked/0.0",
        values == [1; LEN] && buffer.iter().all(|&x| x == 7),
        handle.test(),
        is_forked(handle.wait().map(drop).map_err(Error::from)),
    ];
    comm.canceller().cancel();
    split.leave();
    drop(comm);
    drop(buffer);
    drop(prepared);
    checks.iter().position(|&holds| !holds).map_or(ALL_WELL, |check| CHECKS + check as i32)
}

fn over_shm(config: &mut JoinConfig) {
    config.transport = Transport::Shm;
}

fn sum(comm: &Communicator) {
    let mut values = vec![comm.rank() + 1; LEN];
    let outcome = comm.all_reduce(&mut values, ReduceOp::Sum).expect("no rank is lost");
    assert_eq!(values, [RANKS * (RANKS + 1) / 2; LEN]);
    assert!(!outcome.recovered && outcome.fallback.is_none(), "{outcome:?}");
}

/// Prepare a short sum, and run it until it is complete at once.
fn prepared_sum(comm: &Communicator) -> Prepared<Vec<u32>> {
    let options = CallOptions { algo: Some(Algo::OneShot), ..CallOptions::default() };
    let desc = OpDesc::all_reduce(Dtype::U32, ReduceOp::Sum, 2);
    let mut prepared = comm.prepare(&desc, vec![0; 2], None, &options).expect("possible");
    (0..200).for_each(|_| run(&mut prepared));
    prepared
}

fn run(prepared: &mut Prepared<Vec<u32>>) {
    prepared.buffer().expect("at rest").fill(1);
    prepared.run().expect("a sum");
    assert_eq!(prepared.buffer().expect("at rest"), &[RANKS; 2]);
}

/// Fork while all ranks have operations in flight and the forking rank is in a call.
fn children_of_ranks(cluster: &Cluster, configure: fn(&mut JoinConfig)) {
    let gate = Barrier::new(RANKS as usize);
    let configure = |config: &mut JoinConfig| {
        configure(config);
        config.deadline = Duration::from_secs(60);
    };
    let is_registered = {
        let mut config = JoinConfig::new(cluster.controller.local_addr(), "", 0, RANKS);
        configure(&mut config);
        config.transport == Transport::Shm
    };
    cluster.run("forked", RANKS, configure, |comm| {
        sum(&comm);
        let split = comm.split(Some(0), 0).expect("all are there").expect("a color");
        let mut prepared = prepared_sum(&comm);
        let mut buffer = comm.alloc::<u32>(LEN).expect("memory");
        buffer.fill(7);
        assert_eq!(buffer.is_registered(), is_registered);
        let handle = comm.start_all_reduce(vec![comm.rank() + 1; LEN], ReduceOp::Sum).expect("in flight");
        gate.wait();
        if comm.rank() != 0 {
            gate.wait();
            sum(&comm);
            return rest(comm, split, handle, &buffer, &mut prepared);
        }
        let all = All { split, handle, buffer, prepared, comm };
        // The child drops its copies; these belong to this process.
        let all = std::mem::ManuallyDrop::new(all);
        let mut code = None;
        thread::scope(|scope| {
            let (begun, begins) = channel();
            let comm = &all.comm;
            // Waits for the other ranks while it holds the communicator's lock.
            let call = scope.spawn(move || {
                begun.send(()).expect("the test listens");
                sum(comm);
            });
            begins.recv().expect("the call has started");
            // SAFETY: the child takes its own copy; the parent keeps its own.
            let child = || use_and_drop(unsafe { std::ptr::read(&raw const *all) });
            code = (0..10).map(|_| forked(child)).find(|&code| code != ALL_WELL);
            gate.wait();
            call.join().expect("no panic");
        });
        let All { split, handle, buffer, mut prepared, comm } = std::mem::ManuallyDrop::into_inner(all);
        rest(comm, split, handle, &buffer, &mut prepared);
        assert_eq!(code, None, "the number of the check that failed, and {CHECKS}");
    });
}

/// Check that operations in flight complete and later calls succeed.
fn rest(
    comm: Communicator,
    split: Communicator,
    handle: Handle<Vec<u32>>,
    buffer: &Buffer<u32>,
    prepared: &mut Prepared<Vec<u32>>,
) {
    let (values, outcome) = handle.wait().expect("no rank is lost");
    assert_eq!(values, [RANKS * (RANKS + 1) / 2; LEN]);
    assert!(!outcome.recovered);
    (0..20).for_each(|_| sum(&comm));
    sum(&split);
    run(prepared);
    assert!(buffer.iter().all(|&x| x == 7));
    assert_eq!(comm.recoveries(), sumac::comm::Recoveries::default());
    split.leave();
    comm.leave();
}

#[test]
fn forked_child_changes_nothing_for_its_parent() {
    for configure in [over_shm as fn(&mut JoinConfig), over_udp] {
        let cluster = Cluster::start_zero_copy(1, RANKS as usize, ZeroCopyConfig::default(), ControllerConfig::new());
        children_of_ranks(&cluster, configure);
        // Devices and the controller have threads, which a child does not.
        let cluster = std::mem::ManuallyDrop::new(cluster);
        let code = forked(|| {
            // SAFETY: the child takes its own copy; the parent keeps its own.
            drop(unsafe { std::ptr::read(&raw const *cluster) });
            ALL_WELL
        });
        assert_eq!(code, ALL_WELL);
        let cluster = std::mem::ManuallyDrop::into_inner(cluster);
        cluster.run("after", RANKS, configure, |comm| {
            sum(&comm);
            comm.leave();
        });
    }
}
