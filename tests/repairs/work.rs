//! What ranks do while a device dies, and what must come of it.

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
use sumac::{Attach, Communicator, JoinConfig, Outcome, Path, ReduceOp};
use sumac_firmware::emulated::Board;
use sumac_hal::uplink::HopTimers;
use sumac_tests::oracle::weight;

/// How long operations go on without a repair before a test gives up on one.
const REPAIR_LIMIT: Duration = Duration::from_secs(60);

/// How long a device may be silent: enough for a busy machine.
const DEAD: Duration = Duration::from_millis(400);

/// Operations that ranks still do when all have seen the repair.
const OPERATIONS_AFTER: u64 = 3;

/// A controller that has everything go through the tree as long as there is one.
pub(crate) fn by_tree() -> ControllerConfig {
    let table = CostTable::EMULATED.with_overrides("[[override]]\npath = \"tree\"\n").expect("an override file");
    let timers = HopTimers { dead: DEAD, ..HopTimers::DEFAULT };
    ControllerConfig { table, timers, ..ControllerConfig::new() }
}

/// The same, in chunks so small that an operation has many, whichever way they go.
pub(crate) fn in_small_chunks() -> ControllerConfig {
    ControllerConfig { chunk_max_bytes: 4096, reference_chunk_max_bytes: 4096, ..by_tree() }
}

/// Over shared memory.
pub(crate) fn by_reference(config: &mut JoinConfig) {
    config.attach = Attach::Shm;
}

/// From other hosts, over the double of links of this name.
pub(crate) fn from_afar(exchange: &str) -> impl Fn(&mut JoinConfig) + Sync {
    let exchange = exchange.to_owned();
    move |config| (config.attach, config.verbs) = (Attach::Rdma, Some(exchange.clone()))
}

/// Every other rank by packets.
pub(crate) fn by_both(config: &mut JoinConfig) {
    config.attach = if config.rank.is_multiple_of(2) { Attach::Shm } else { Attach::Udp };
}

/// A device that is to die.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kill {
    /// Which of its job's tree, the root first.
    pub(crate) device: usize,
    /// When so many operations have begun,
    pub(crate) after_operations: u64,
    /// and so much time has passed.
    pub(crate) delay: Duration,
}

/// What rank `rank` has as element `i` of operation `op`.
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

/// What ranks saw.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Operations that were repaired at some rank.
    pub(crate) repaired: BTreeSet<u64>,
    /// The path of each rank's last operation.
    pub(crate) last: Vec<Path>,
}

/// What ranks know of each other, so that all do the same operations.
#[derive(Default)]
struct Pace {
    /// The first operation that is not done, once somebody has seen enough; 0: nobody has.
    end: AtomicU64,
    begun: AtomicU64,
    killed: AtomicBool,
    seen: Mutex<Seen>,
}

/// Let `ranks` ranks do one operation after the other, and a device die meanwhile. `operation` runs one and checks it.
pub(crate) fn until_repaired(
    cluster: &mut Cluster,
    ranks: u32,
    kill: Kill,
    configure: impl Fn(&mut JoinConfig) + Sync,
    operation: impl Fn(&Communicator, u64) -> Outcome + Sync,
) -> Seen {
    let (controller, boards) = (cluster.controller.local_addr(), Mutex::new(std::mem::take(&mut cluster.boards)));
    let pace = Pace::default();
    thread::scope(|scope| {
        let (pace, boards) = (&pace, &boards);
        scope.spawn(move || end(boards, controller, kill, pace));
        cluster.run("repairs", ranks, configure, |comm| {
            work(&comm, pace, &operation);
            // Who is dropped is dead to those that still wait for the last barrier.
            comm.leave();
        });
    });
    pace.seen.into_inner().expect("nobody panicked")
}

fn end(boards: &Mutex<Vec<Board>>, controller: SocketAddr, kill: Kill, pace: &Pace) {
    while pace.begun.load(Ordering::Relaxed) == 0 {
        thread::yield_now();
    }
    let mut boards = boards.lock().expect("nobody panicked");
    let victim = board_of(&boards, &status(controller).expect("a report"), kill.device);
    let board = boards.remove(victim);
    while pace.begun.load(Ordering::Relaxed) < kill.after_operations {
        thread::yield_now();
    }
    // The moment is what is tested.
    let at = Instant::now() + kill.delay;
    while Instant::now() < at {
        thread::yield_now();
    }
    pace.killed.store(true, Ordering::Relaxed);
    drop(board);
}

/// Return which board is the `nth` device of the only job's tree.
fn board_of(boards: &[Board], report: &StatusReport, nth: usize) -> usize {
    let tree = report.jobs[0].tree.as_ref().expect("a job that runs").as_ref().expect("a tree");
    let device = report.devices.iter().find(|device| device.name == tree.devices[nth]).expect("a device of the tree");
    let is_it = |board: &Board| board.data_addrs().eq(device.data_addrs.iter().copied());
    boards.iter().position(is_it).expect("a board of that device")
}

/// Do operations until some after the repair. Ranks agree on the last one by what every one of them hears of it.
fn work(comm: &Communicator, pace: &Pace, operation: &impl Fn(&Communicator, u64) -> Outcome) {
    let give_up = Instant::now() + REPAIR_LIMIT;
    let (mut after, mut op, mut has_seen) = (0, 0, false);
    let last = loop {
        pace.begun.fetch_max(op, Ordering::Relaxed);
        let outcome = operation(comm, op);
        if outcome.repaired {
            pace.seen.lock().expect("nobody panicked").repaired.insert(op);
        }
        has_seen |= outcome.repaired;
        // The greatest of what ranks say: all stop after the same operation.
        let mut word = [u32::from(has_seen)];
        has_seen |= comm.all_reduce(&mut word, ReduceOp::Max).expect("the ranks are all there").repaired;
        after += u64::from(word[0]);
        op += 1;
        if after > OPERATIONS_AFTER {
            break outcome.path;
        }
        assert!(Instant::now() < give_up, "no repair; killed: {}", pace.killed.load(Ordering::Relaxed));
    };
    pace.end.fetch_max(op, Ordering::Relaxed);
    assert_eq!(pace.end.load(Ordering::Relaxed), op, "all ranks do the same operations");
    pace.seen.lock().expect("nobody panicked").last.push(last);
    comm.barrier().expect("all are still there");
}
