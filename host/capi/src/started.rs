//! Started collectives.
//!
//! Each function takes what the blocking one takes, and gives a request in place of an outcome.

use crate::buffers::{Call, Numbers};
use crate::calls::{barrier, described};
use crate::comm::{Comm, with_comm};
use crate::config::{clear, give};
use crate::last_error::Failure;
use crate::options::{Options, options_or_default};
use crate::request::Request;
use crate::status::Status;
use std::ffi::c_void;
use sumac::Collective;

/// Start a call that `describe` makes.
///
/// # Safety
/// `comm` and `options` are NULL or what they claim to be; `request` is NULL or can be written to; until the request
/// has ended, the memory of the call is as `RawBuffers::buffers` demands.
pub(crate) unsafe fn start(
    comm: *const Comm,
    options: *const Options,
    request: *mut *mut Request,
    describe: impl FnOnce(&Comm) -> Result<Call, Failure>,
) -> Status {
    let body = |comm: &Comm| {
        // SAFETY: the caller's promise.
        let options = unsafe {
            clear(request, "request")?;
            options_or_default(options)
        };
        let Call { desc, memory, counts } = describe(comm)?;
        // SAFETY: the caller's promise.
        let started = Request::start(comm, |keep| unsafe {
            match counts {
                Some(counts) => comm.comm.start_raw_v(&desc, counts, memory, keep, &options),
                None => comm.comm.start_raw(&desc, memory, keep, &options),
            }
        })?;
        // SAFETY: the caller's promise.
        unsafe { give(request, started) };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { with_comm(comm, body) }
}

/// Start what sumac_all_reduce() does. `options` may be NULL. `request` receives the request, or NULL.
///
/// # Safety
/// As for sumac_all_reduce(), and the memory stays as it is until the request has been waited for, or its memory
/// released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_start_all_reduce(
    comm: *const Comm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: i32,
    op: i32,
    options: *const Options,
    request: *mut *mut Request,
) -> Status {
    let numbers = Numbers { collective: Collective::AllReduce, count, dtype, op, root: 0 };
    // SAFETY: the caller's promise.
    unsafe { start(comm, options, request, |comm| Call::new(&comm.comm, numbers, input.cast(), output.cast())) }
}

/// Start what sumac_reduce() does. `options` may be NULL. `request` receives the request, or NULL.
///
/// # Safety
/// As for sumac_reduce(), and the memory stays as it is until the request has been waited for, or its memory
/// released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_start_reduce(
    comm: *const Comm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: i32,
    op: i32,
    root: u32,
    options: *const Options,
    request: *mut *mut Request,
) -> Status {
    let numbers = Numbers { collective: Collective::Reduce, count, dtype, op, root };
    // SAFETY: the caller's promise.
    unsafe { start(comm, options, request, |comm| Call::new(&comm.comm, numbers, input.cast(), output.cast())) }
}

/// Start what sumac_broadcast() does. `options` may be NULL. `request` receives the request, or NULL.
///
/// # Safety
/// As for sumac_broadcast(), and the memory stays as it is until the request has been waited for, or its memory
/// released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_start_broadcast(
    comm: *const Comm,
    buffer: *mut c_void,
    count: u64,
    dtype: i32,
    root: u32,
    options: *const Options,
    request: *mut *mut Request,
) -> Status {
    let numbers = Numbers { collective: Collective::Broadcast, count, dtype, op: 0, root };
    // SAFETY: the caller's promise.
    unsafe {
        start(comm, options, request, |comm| Call::new(&comm.comm, numbers, buffer.cast_const().cast(), buffer.cast()))
    }
}

/// Start what sumac_reduce_scatter() does. `options` may be NULL. `request` receives the request, or NULL.
///
/// # Safety
/// As for sumac_reduce_scatter(), and the memory stays as it is until the request has been waited for, or its memory
/// released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_start_reduce_scatter(
    comm: *const Comm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: i32,
    op: i32,
    options: *const Options,
    request: *mut *mut Request,
) -> Status {
    let numbers = Numbers { collective: Collective::ReduceScatter, count, dtype, op, root: 0 };
    // SAFETY: the caller's promise.
    unsafe { start(comm, options, request, |comm| Call::new(&comm.comm, numbers, input.cast(), output.cast())) }
}

/// Start what sumac_all_gather() does. `options` may be NULL. `request` receives the request, or NULL.
///
/// # Safety
/// As for sumac_all_gather(), and the memory stays as it is until the request has been waited for, or its memory
/// released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_start_all_gather(
    comm: *const Comm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: i32,
    options: *const Options,
    request: *mut *mut Request,
) -> Status {
    let numbers = Numbers { collective: Collective::AllGather, count, dtype, op: 0, root: 0 };
    // SAFETY: the caller's promise.
    unsafe { start(comm, options, request, |comm| Call::new(&comm.comm, numbers, input.cast(), output.cast())) }
}

/// Start what sumac_gather() does. `options` may be NULL. `request` receives the request, or NULL.
///
/// # Safety
/// As for sumac_gather(), and the memory stays as it is until the request has been waited for, or its memory
/// released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_start_gather(
    comm: *const Comm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: i32,
    root: u32,
    options: *const Options,
    request: *mut *mut Request,
) -> Status {
    let numbers = Numbers { collective: Collective::Gather, count, dtype, op: 0, root };
    // SAFETY: the caller's promise.
    unsafe { start(comm, options, request, |comm| Call::new(&comm.comm, numbers, input.cast(), output.cast())) }
}

/// Start what sumac_scatter() does. `options` may be NULL. `request` receives the request, or NULL.
///
/// # Safety
/// As for sumac_scatter(), and the memory stays as it is until the request has been waited for, or its memory
/// released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_start_scatter(
    comm: *const Comm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: i32,
    root: u32,
    options: *const Options,
    request: *mut *mut Request,
) -> Status {
    let numbers = Numbers { collective: Collective::Scatter, count, dtype, op: 0, root };
    // SAFETY: the caller's promise.
    unsafe { start(comm, options, request, |comm| Call::new(&comm.comm, numbers, input.cast(), output.cast())) }
}

/// Start what sumac_all_to_all() does. `options` may be NULL. `request` receives the request, or NULL.
///
/// # Safety
/// As for sumac_all_to_all(), and the memory stays as it is until the request has been waited for, or its memory
/// released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_start_all_to_all(
    comm: *const Comm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: i32,
    options: *const Options,
    request: *mut *mut Request,
) -> Status {
    let numbers = Numbers { collective: Collective::AllToAll, count, dtype, op: 0, root: 0 };
    // SAFETY: the caller's promise.
    unsafe { start(comm, options, request, |comm| Call::new(&comm.comm, numbers, input.cast(), output.cast())) }
}

/// Start a barrier: it completes when every rank has called one. `options` may be NULL. `request` receives the request,
/// or NULL.
///
/// # Safety
/// As for sumac_barrier(); `request` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_start_barrier(
    comm: *const Comm,
    options: *const Options,
    request: *mut *mut Request,
) -> Status {
    // SAFETY: the caller's promise; there is no memory.
    unsafe { start(comm, options, request, |_| Ok(barrier())) }
}

/// Start what sumac_run() does. `options` may be NULL. `request` receives the request, or NULL.
///
/// # Safety
/// As for sumac_run(), and the memory stays as it is until the request has been waited for, or its memory
/// released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_start_run(
    comm: *const Comm,
    collective: i32,
    dtype: i32,
    op: i32,
    root: u32,
    count: u64,
    input: *const c_void,
    input_len: usize,
    output: *mut c_void,
    output_len: usize,
    options: *const Options,
    request: *mut *mut Request,
) -> Status {
    let describe = |_: &Comm| described((collective, dtype, op, root, count), (input, input_len), (output, output_len));
    // SAFETY: the caller's promise.
    unsafe { start(comm, options, request, describe) }
}
