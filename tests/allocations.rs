//! Nothing is allocated from call to result: at the ranks, at the device, in its engine. All of them are threads here,
//! so that one counter sees them all. By packets that is so of what a rank keeps for others, too.

mod common;

use common::{Cluster, by_packets, plain};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use sumac::{Algo, CallOptions, Communicator, ReduceOp, Transfer};

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Tests count what all threads of the process allocate, so they run one after the other.
static ALONE: Mutex<()> = Mutex::new(());

/// The system's, which counts.
struct Counting;

// SAFETY: everything is the system's.
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

/// Elements of the operations: one that the device's own thread does, and one of many chunks.
const SIZES: [usize; 2] = [100, 500_000];

/// Windows in which nothing may be allocated: the controller renews leases now and then, which is not the data path, so
/// that one window may see something, but not all.
const WINDOWS: usize = 5;

#[test]
fn nothing_is_allocated_from_call_to_result() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cluster = Cluster::start(1, RANKS as usize);
    let edge = Barrier::new(RANKS as usize);
    let counted = cluster.run("allocations", RANKS, plain, |comm| {
        let mut least = Vec::new();
        for size in SIZES {
            let mut registered = comm.alloc::<f32>(size).expect("memory");
            let mut own = vec![0_f32; size];
            for (values, transfer) in [(&mut registered[..], Transfer::Registered), (&mut own[..], Transfer::Bounced)] {
                operations(&comm, values, transfer);
                let windows = (0..WINDOWS).map(|_| counted(&edge, || operations(&comm, values, transfer)));
                let fewest = windows.min();
                least.push((size, transfer, fewest));
            }
        }
        comm.leave();
        least
    });
    assert!(COUNT.load(Ordering::Relaxed) > 0, "the counter counts");
    for (size, transfer, fewest) in counted.into_iter().flatten() {
        assert_eq!(fewest, Some(0), "{size} elements, {transfer:?}");
    }
}

/// A loss is made good by what allocates, and a busy machine may lose packets; so more is tried than by reference.
#[test]
fn nothing_is_allocated_by_packets() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cluster = Cluster::start(1, RANKS as usize);
    let edge = Barrier::new(RANKS as usize);
    let counted = cluster.run("packets", RANKS, by_packets, |comm| {
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

/// Count what is allocated anywhere while all ranks are in `work`.
fn counted(edge: &Barrier, work: impl FnOnce()) -> usize {
    edge.wait();
    let before = COUNT.load(Ordering::Relaxed);
    // Nobody begins before all have looked.
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
