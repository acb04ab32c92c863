//! The data path allocates nothing once it is warm.

use super::device::{Behaviour, attach, start};
use super::driver::{BorrowedBuffers, all_reduce, drive, post};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

/// The system's, which counts what each thread allocates.
struct Counting;

fn count() {
    // A thread that ends has no counter any more.
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: everything is the system's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn operations_allocate_nothing() {
    const LEN: usize = 1000;
    let (name, _device) = start(1, Behaviour::Honest);
    let mut driver = attach(&name, 0, 1);
    let mut registered = driver.alloc::<f32>(LEN).expect("memory");
    let mut plain = vec![1_f32; LEN];
    assert!(COUNT.get() > 0, "the counter counts");
    for round in 0..6 {
        let before = COUNT.get();
        let values = if round % 2 == 0 { &mut registered[..] } else { &mut plain[..] };
        let mut buffers = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(values));
        let (op, _) = post(&mut driver, all_reduce(LEN), &mut buffers);
        assert_eq!(drive(&mut driver, op, &mut buffers), Ok(()));
        assert_eq!(COUNT.get() - before, 0, "round {round}");
    }
}
