//! Calls allocate no memory at ranks, the device, or its engine, and schedules take none for their steps. All run in
//! one process, so that one counting allocator covers them.

mod common;

use common::{Cluster, over_udp, plain};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use sumac::controller::ControllerConfig;
use sumac::schedule::tree::Tree;
use sumac::schedule::{ALGORITHMS, Place, Problem, Schedule, Shape, StepBuffer};
use sumac::{Algo, CallOptions, Communicator, Dtype, OpDesc, ReduceOp, Transfer};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;
use sumac_hal::op::Path;

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The bytes that are allocated now, modulo the size of an address.
static HELD_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Serialises the tests, because they count the allocations of all threads.
static ALONE: Mutex<()> = Mutex::new(());

/// The system allocator, with counters.
struct Counting;

fn count(old_bytes: usize, new_bytes: usize) {
    COUNT.fetch_add(usize::from(new_bytes > 0), Ordering::Relaxed);
    HELD_BYTES.fetch_add(new_bytes.wrapping_sub(old_bytes), Ordering::Relaxed);
}

// SAFETY: all methods delegate to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(0, layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(layout.size(), 0);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(0, layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(layout.size(), new_size);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const RANKS: u32 = 3;

/// Elements of the operations: one that the device's own thread reduces, and one of many chunks.
const SIZES: [usize; 2] = [100, 500_000];

/// The number of measurements, of which one must have no allocation. Renewals of leases, which are not part of the data
/// path, may allocate during the others.
const WINDOWS: usize = 5;

#[test]
fn zero_copy_call_allocates_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cluster = Cluster::start(1, RANKS as usize);
    let edge = Barrier::new(RANKS as usize);
    let counted = cluster.run("allocations", RANKS, plain, |comm| {
        let mut least = Vec::new();
        for size in SIZES {
            let mut registered = comm.alloc::<f32>(size).expect("memory");
            let mut own = vec![0_f32; size];
            for (values, transfer) in [(&mut registered[..], Transfer::ZeroCopy), (&mut own[..], Transfer::Bounced)] {
                operations(&comm, values, transfer);
                let windows = (0..WINDOWS).map(|_| counted(&edge, || operations(&comm, values, transfer)));
                let fewest = windows.min();
                least.push((size, transfer, fewest));
            }
        }
        comm.leave();
        least
    });
    assert!(COUNT.load(Ordering::Relaxed) > 0, "the allocator must count");
    for (size, transfer, fewest) in counted.into_iter().flatten() {
        assert_eq!(fewest, Some(0), "{size} elements, {transfer:?}");
    }
}

/// Recovery from packet loss may allocate, and a busy machine may lose packets; hence more measurements.
#[test]
fn packet_call_allocates_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cluster = Cluster::start(1, RANKS as usize);
    let edge = Barrier::new(RANKS as usize);
    let counted = cluster.run("packets", RANKS, over_udp, |comm| {
        let mut least = Vec::new();
        for size in [100, 50_000] {
            let mut values = vec![0_f32; size];
            operations(&comm, &mut values, Transfer::Packets);
            let windows =
                (0..2 * WINDOWS).map(|_| counted(&edge, || operations(&comm, &mut values, Transfer::Packets)));
            least.push((size, windows.min()));
        }
        comm.leave();
        least
    });
    for (size, fewest) in counted.into_iter().flatten() {
        assert_eq!(fewest, Some(0), "{size} elements");
    }
}

/// Also without a tree, when each outcome has a reason; called, and prepared.
#[test]
fn host_collective_allocates_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for devices in [0, 1] {
        let cluster = Cluster::spare(devices, ControllerConfig::new());
        let edge = Barrier::new(RANKS as usize);
        let counted = cluster.run("schedules", RANKS, plain, |comm| {
            let mut least = Vec::new();
            for algo in [Algo::OneShot, Algo::Ring, Algo::Binomial] {
                let options = CallOptions { algo: Some(algo), ..CallOptions::default() };
                let mut values = vec![0_f32; 100];
                let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Max, 100);
                let mut prepared = comm.prepare(&desc, values.clone(), None, &options).expect("possible");
                let mut work = || {
                    for _ in 0..20 {
                        let called = comm.all_reduce_with(&mut values, ReduceOp::Max, &options).expect("all-reduce");
                        let again = prepared.run().expect("all-reduce");
                        assert_eq!((&again.fallback, again.path), (&called.fallback, called.path));
                    }
                };
                work();
                let windows = (0..WINDOWS).map(|_| counted(&edge, &mut work));
                least.push((algo, windows.min()));
            }
            comm.leave();
            least
        });
        for (algo, fewest) in counted.into_iter().flatten() {
            assert_eq!(fewest, Some(0), "{algo}, {devices} devices");
        }
    }
}

/// The ranks of the largest job whose schedules are made here: a torus of 128 by 128.
const SCHEDULED_RANKS: u32 = 16_384;

/// A ring of 16,384 ranks has 537 million steps, which would take 69 GB.
#[test]
fn schedules_of_16384_ranks_hold_no_steps() {
    // A pairwise all-reduce ends with the 14 steps of Bruck's all-gather.
    const SCHEDULE_BYTES_MAX: usize = 4096;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (ranks, count) = (SCHEDULED_RANKS, 8 * SCHEDULED_RANKS as usize);
    let tree = Tree::flat(ranks, Order::TreePairwise).expect("a tree");
    let shape = Shape::grid(&[128, 128]).expect("a grid");
    let mut checked = 0;
    for algorithm in ALGORITHMS {
        // Those of logarithmic steps store them; a rank of the tree stores its children's.
        let cost = algorithm.cost(ranks, shape, count);
        if cost.steps < 100.0 || algorithm.path() == Path::HostTree {
            continue;
        }
        let problem = |place| Problem { place, count, root: Rank(ranks / 3), tree: &tree, shape };
        let before = HELD_BYTES.load(Ordering::Relaxed);
        let schedules: Vec<Schedule> = Place::all(ranks).map(|place| (algorithm.schedule)(&problem(place))).collect();
        let held_bytes = HELD_BYTES.load(Ordering::Relaxed).wrapping_sub(before);
        assert!(held_bytes < SCHEDULE_BYTES_MAX * ranks as usize, "{algorithm:?}: {held_bytes} bytes");
        checked += 1;
        if algorithm.name != "ring::all_reduce" {
            continue;
        }
        for schedule in [&schedules[0], &schedules[ranks as usize / 3], &schedules[ranks as usize - 1]] {
            let (mut room, mut sent) = (StepBuffer::default(), 0);
            assert!(schedule.read(0, &mut room));
            let before = COUNT.load(Ordering::Relaxed);
            for index in 0..schedule.len() {
                let step = schedule.step(index, &mut room).expect("a step");
                sent += step.sends.iter().map(|send| send.from.span.len).sum::<usize>();
                assert!(step.sends.len() + step.recvs.len() == 2 && step.locals.is_empty(), "{index}");
            }
            assert_eq!(COUNT.load(Ordering::Relaxed) - before, 0, "one step has room for the next");
            assert_eq!((schedule.len(), sent), (2 * (ranks as usize - 1), 2 * (count - 8)));
        }
        let before = HELD_BYTES.load(Ordering::Relaxed);
        let stored = schedules[0].clone().stored();
        let stored_bytes = HELD_BYTES.load(Ordering::Relaxed).wrapping_sub(before) as u64;
        assert!(stored == schedules[0]);
        assert!(stored_bytes * u64::from(ranks) > 60_000_000_000, "{stored_bytes} bytes for each rank");
    }
    assert!(checked >= 20, "{checked}");
}

/// Count the allocations of all threads while all ranks run `work`.
fn counted(edge: &Barrier, work: impl FnOnce()) -> usize {
    edge.wait();
    let before = COUNT.load(Ordering::Relaxed);
    // No rank starts before all have read the counter.
    edge.wait();
    work();
    edge.wait();
    COUNT.load(Ordering::Relaxed) - before
}

fn operations(comm: &Communicator, values: &mut [f32], transfer: Transfer) {
    let options = CallOptions { algo: Some(Algo::Tree), ..CallOptions::default() };
    for _ in 0..20 {
        let outcome = comm.all_reduce_with(values, ReduceOp::Max, &options).expect("all-reduce");
        assert_eq!(outcome.transfer, Some(transfer));
    }
}
