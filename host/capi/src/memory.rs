//! Registered memory.

use crate::comm::{Comm, with_comm};
use crate::config::{clear, free, give, handle};
use crate::last_error::{Failure, guard_value};
use crate::status::Status;
use std::ffi::c_void;
use sumac::Buffer;

/// Registered memory: where this rank shares memory with its leaf device, operations on it are zero-copy. Elsewhere it
/// is ordinary memory, so programs need no special case. It may outlive its communicator.
#[derive(Debug)]
pub struct Memory {
    // Words, so that it is aligned for every element type. Nobody touches it but through `start`.
    buffer: Buffer<u64>,
    start: *mut u64,
}

/// Allocate `len` bytes of zeroed, registered memory, aligned to 8 bytes at least. `memory` receives the object that
/// owns it, or NULL. A call may use any part of it.
///
/// # Safety
/// `comm` is a communicator; `memory` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_memory_alloc(comm: *const Comm, len: usize, memory: *mut *mut Memory) -> Status {
    let body = |comm: &Comm| {
        // SAFETY: the caller's promise.
        unsafe { clear(memory, "memory")? };
        if isize::try_from(len).is_err() {
            return Err(Failure::argument(format!("{len} bytes exceed the address space")));
        }
        let mut buffer = comm.comm.alloc::<u64>(len.div_ceil(size_of::<u64>()))?;
        let start = buffer.as_mut_ptr();
        // SAFETY: the caller's promise.
        unsafe { give(memory, Memory { buffer, start }) };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { with_comm(comm, body) }
}

/// Return the first byte; NULL for NULL. Valid until the memory is freed.
///
/// # Safety
/// `memory` is NULL or memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_memory_data(memory: *const Memory) -> *mut c_void {
    // SAFETY: the caller's promise.
    guard_value(std::ptr::null_mut(), || Ok(unsafe { handle(memory, "memory")? }.start.cast()))
}

/// Return whether a device can reach the memory.
///
/// # Safety
/// `memory` is NULL or memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_memory_is_registered(memory: *const Memory) -> bool {
    // SAFETY: the caller's promise.
    guard_value(false, || Ok(unsafe { handle(memory, "memory")? }.buffer.is_registered()))
}

/// Free memory. NULL is allowed. No operation that has been started on it may be in flight.
///
/// # Safety
/// `memory` is NULL or memory, which is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_memory_free(memory: *mut Memory) {
    // SAFETY: the caller's promise.
    unsafe { free(memory) };
}
