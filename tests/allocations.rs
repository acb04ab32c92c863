//! Calls allocate no memory at ranks, the device, or its engine. All run in one process, so that one counting allocator
//! covers them.

mod common;

use common::{Cluster, over_udp, plain};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use sumac::controller::ControllerConfig;
use sumac::{Algo, CallOptions, Communicator, Dtype, OpDesc, ReduceOp, Transfer};

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Serialises the tests, because they count the allocations of all threads.
static ALONE: Mutex<()> = Mutex::new(());

/// The system allocator, with a counter.
struct Counting;

// SAFETY: all methods delegate to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
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
