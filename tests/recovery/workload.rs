//! The workload of the ranks while a device is lost, and its expected results.

use crate::common::Cluster;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::proto::StatusReport;
use sumac::controller::{ControllerConfig, status};
use sumac::select::CostTable;
use sumac::{Communicator, JoinConfig, Outcome, Path, ReduceOp, Transport};
use sumac_firmware::emulated::Board;
use sumac_hal::uplink::HopTimers;
use sumac_tests::oracle::weight;

/// The limit of the time until the first recovery.
const RECOVERY_LIMIT: Duration = Duration::from_secs(180);

/// The limit of attempts, as a multiple of the usual number, until a device fails under an operation: the machine
/// decides whether it fails in time.
pub(crate) const ATTEMPTS_PER_RUN: u64 = 10;

/// How long a device may be silent; long enough for a busy machine.
const DEAD: Duration = Duration::from_millis(400);

/// Operations after all ranks have seen the recovery.
const OPERATIONS_AFTER: u64 = 3;

/// A controller configuration that selects the tree whenever there is one.
pub(crate) fn prefer_tree() -> ControllerConfig {
    let table = CostTable::emulated().with_overrides("[[override]]\npath = \"tree\"\n").expect("an override file");
    let timers = HopTimers { dead: DEAD, ..HopTimers::DEFAULT };
    ControllerConfig { table, timers, ..ControllerConfig::new() }
}

/// As [`prefer_tree`], with small chunks on every transport.
pub(crate) fn in_small_chunks() -> ControllerConfig {
    ControllerConfig { chunk_max_bytes: 4096, zero_copy_chunk_max_bytes: 4096, ..prefer_tree() }
}

/// Join over shared memory.
pub(crate) fn over_shm(config: &mut JoinConfig) {
    config.transport = Transport::Shm;
}

/// Join as a remote rank, over the emulated links `exchange`.
pub(crate) fn over_rdma(exchange: &str) -> impl Fn(&mut JoinConfig) + Sync {
    let exchange = exchange.to_owned();
    move |config| (config.transport, config.verbs) = (Transport::Rdma, Some(exchange.clone()))
}

/// Join over shared memory and, every other rank, over UDP.
pub(crate) fn mixed(config: &mut JoinConfig) {
    config.transport = if config.rank.is_multiple_of(2) { Transport::Shm } else { Transport::Udp };
}

/// Which device is lost, and when.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kill {
    /// The index in the devices of the job's tree, root first.
    pub(crate) device: usize,
    /// The number of operations that must have started.
    pub(crate) after_operations: u64,
    /// The time after that.
    pub(crate) delay: Duration,
}

/// Return element `i` of the input of rank `rank` to operation `op`.
pub(crate) fn value(op: u64, rank: u32, i: usize) -> i64 {
    weight(&[op, rank.into(), i as u64]) as i64
}

pub(crate) fn filled(comm: &Communicator, op: u64, len: usize) -> Vec<i64> {
    (0..len).map(|i| value(op, comm.rank(), i)).collect()
}

pub(crate) fn assert_sum(found: &[i64], op: u64, ranks: u32, len: usize) {
    assert_eq!(found.len(), len);
    for (i, &x) in found.iter().enumerate() {
        let sum = (0..ranks).fold(0_i64, |sum, rank| sum.wrapping_add(value(op, rank, i)));
        assert_eq!(x, sum, "element {i} of operation {op}");
    }
}

/// What the ranks observed.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Operations that reported a recovery at some rank.
    pub(crate) recovered: BTreeSet<u64>,
    /// The path of each rank's last operation.
    pub(crate) last: Vec<Path>,
}

/// State that the ranks share, so that all run the same operations.
#[derive(Default)]
struct Progress {
    /// The first operation that is not run; 0 until a rank has decided.
    end: AtomicU64,
    begun: AtomicU64,
    killed: AtomicBool,
    seen: Mutex<Seen>,
}

/// Run operations on `ranks` ranks until some after the loss of a device. `operation` runs one and checks its result.
pub(crate) fn run_until_recovered(
    cluster: &mut Cluster,
    ranks: u32,
    kill: Kill,
    configure: impl Fn(&mut JoinConfig) + Sync,
    operation: impl Fn(&Communicator, u64) -> Outcome + Sync,
) -> Seen {
    let (controller, boards) = (cluster.controller.local_addr(), Mutex::new(std::mem::take(&mut cluster.boards)));
    let progress = Progress::default();
    thread::scope(|scope| {
        let (progress, boards) = (&progress, &boards);
        scope.spawn(move || drop_board(boards, controller, kill, progress));
        cluster.run("recovery", ranks, configure, |comm| {
            work(&comm, progress, &operation);
            // Dropping it would make this rank look lost to ranks still in the last barrier.
            comm.leave();
        });
    });
    progress.seen.into_inner().expect("not poisoned")
}

fn drop_board(boards: &Mutex<Vec<Board>>, controller: SocketAddr, kill: Kill, progress: &Progress) {
    while progress.begun.load(Ordering::Relaxed) == 0 {
        thread::yield_now();
    }
    let mut boards = boards.lock().expect("not poisoned");
    let victim = board_of(&boards, &status(controller).expect("a report"), kill.device);
    let board = boards.remove(victim);
    while progress.begun.load(Ordering::Relaxed) < kill.after_operations {
        thread::yield_now();
    }
    // Spin: the moment of the loss matters.
    let at = Instant::now() + kill.delay;
    while Instant::now() < at {
        thread::yield_now();
    }
    progress.killed.store(true, Ordering::Relaxed);
    drop(board);
}

/// Return which board is the `nth` device of the only job's tree.
pub(crate) fn board_of(boards: &[Board], report: &StatusReport, nth: usize) -> usize {
    let tree = report.jobs[0].tree.as_ref().expect("a job that runs").as_ref().expect("a tree");
    let device = report.devices.iter().find(|device| device.name == tree.devices[nth]).expect("a device of the tree");
    let is_device = |board: &Board| board.data_addrs().eq(device.data_addrs.iter().copied());
    boards.iter().position(is_device).expect("a board of that device")
}

/// Run operations until some after the recovery. An all-reduce after each one agrees on the last.
fn work(comm: &Communicator, progress: &Progress, operation: &impl Fn(&Communicator, u64) -> Outcome) {
    let give_up = Instant::now() + RECOVERY_LIMIT;
    let (mut after, mut op, mut has_seen) = (0, 0, false);
    let last = loop {
        progress.begun.fetch_max(op, Ordering::Relaxed);
        let outcome = operation(comm, op);
        if outcome.recovered {
            progress.seen.lock().expect("not poisoned").recovered.insert(op);
        }
        has_seen |= outcome.recovered;
        // The maximum of all ranks: all stop after the same operation.
        let mut seen_by_any = [u32::from(has_seen)];
        has_seen |= comm.all_reduce(&mut seen_by_any, ReduceOp::Max).expect("the ranks are all there").recovered;
        after += u64::from(seen_by_any[0]);
        op += 1;
        if after > OPERATIONS_AFTER {
            break outcome.path;
        }
        assert!(
            Instant::now() < give_up,
            "no recovery within {RECOVERY_LIMIT:?}; device dropped: {}",
            progress.killed.load(Ordering::Relaxed)
        );
    };
    progress.end.fetch_max(op, Ordering::Relaxed);
    assert_eq!(progress.end.load(Ordering::Relaxed), op, "ranks ran different numbers of operations");
    progress.seen.lock().expect("not poisoned").last.push(last);
    comm.barrier().expect("all are still there");
}
