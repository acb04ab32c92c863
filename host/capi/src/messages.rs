//! Messages from one rank to another.

use crate::buffers::{in_place, separate};
use crate::comm::{Comm, with_comm};
use crate::config::{clear, give};
use crate::last_error::{Failure, write};
use crate::request::Request;
use crate::status::Status;
use std::any::Any;
use std::ffi::c_void;
use std::ptr::null_mut;
use sumac::{Buffers, RawBuffers};

/// Send `len` bytes to rank `to`, which receives them with the same tag and length. May block until the receiver is
/// ready. The n-th message from one rank to another meets the n-th receive.
///
/// # Safety
/// `comm` is a communicator; `bytes` has `len` bytes, and nobody writes to them meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_send(comm: *const Comm, bytes: *const c_void, len: usize, to: u32, tag: u32) -> Status {
    let body = |comm: &Comm| {
        // SAFETY: the caller's promise.
        let (bytes, _) = unsafe { both(separate((bytes.cast(), len), (null_mut(), 0)))? };
        Ok(comm.comm.send(bytes, to, tag)?)
    };
    // SAFETY: the caller's promise.
    unsafe { with_comm(comm, body) }
}

/// Receive exactly `len` bytes from rank `from`, which sends them with the same tag.
///
/// # Safety
/// `comm` is a communicator; `bytes` has `len` bytes, and nobody else uses them meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_receive(
    comm: *const Comm,
    bytes: *mut c_void,
    len: usize,
    from: u32,
    tag: u32,
) -> Status {
    let body = |comm: &Comm| {
        // SAFETY: the caller's promise.
        let (_, bytes) = unsafe { both(in_place(bytes.cast(), len))? };
        Ok(comm.comm.receive(bytes, from, tag)?)
    };
    // SAFETY: the caller's promise.
    unsafe { with_comm(comm, body) }
}

/// Receive exactly `len` bytes from any other rank: the next message with this tag, from whichever rank's comes first,
/// unless a receive that was started before takes it. `source` may be NULL; otherwise it receives the sender's rank.
///
/// # Safety
/// As for sumac_receive(); `source` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_receive_any(
    comm: *const Comm,
    bytes: *mut c_void,
    len: usize,
    tag: u32,
    source: *mut u32,
) -> Status {
    let body = |comm: &Comm| {
        // SAFETY: the caller's promise.
        let (_, bytes) = unsafe { both(in_place(bytes.cast(), len))? };
        let sender = comm.comm.receive_any(bytes, tag)?;
        // SAFETY: the caller's promise.
        unsafe { write(source, sender) };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { with_comm(comm, body) }
}

/// Send `sent_len` bytes to rank `to` and receive `received_len` bytes from rank `from` at the same time, without
/// deadlock, for neighbours in a ring or a grid. The memory must not overlap.
///
/// # Safety
/// `comm` is a communicator; both pointers have as many bytes, nobody writes to either and nobody reads what is
/// received meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_send_receive(
    comm: *const Comm,
    sent: *const c_void,
    sent_len: usize,
    to: u32,
    received: *mut c_void,
    received_len: usize,
    from: u32,
    tag: u32,
) -> Status {
    let body = |comm: &Comm| {
        // SAFETY: the caller's promise.
        let (input, output) = unsafe { both(separate((sent.cast(), sent_len), (received.cast(), received_len)))? };
        Ok(comm.comm.send_receive((input, to), (output, from), tag)?)
    };
    // SAFETY: the caller's promise.
    unsafe { with_comm(comm, body) }
}

/// Start what sumac_send() does. `request` receives the request, or NULL.
///
/// # Safety
/// As for sumac_send(), and the memory stays as it is until the request has been waited for, or its memory
/// released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_start_send(
    comm: *const Comm,
    bytes: *const c_void,
    len: usize,
    to: u32,
    tag: u32,
    request: *mut *mut Request,
) -> Status {
    // SAFETY: the caller's promise.
    let begin = |comm: &Comm, keep| unsafe { comm.comm.start_send_raw(to, tag, (bytes.cast(), len), keep) };
    // SAFETY: the caller's promise.
    unsafe { start(comm, request, begin) }
}

/// Start what sumac_receive() does. `request` receives the request, or NULL.
///
/// # Safety
/// As for sumac_receive(), and the memory stays as it is until the request has been waited for, or its memory
/// released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_start_receive(
    comm: *const Comm,
    bytes: *mut c_void,
    len: usize,
    from: u32,
    tag: u32,
    request: *mut *mut Request,
) -> Status {
    // SAFETY: the caller's promise.
    let begin = |comm: &Comm, keep| unsafe { comm.comm.start_receive_raw(from, tag, (bytes.cast(), len), keep) };
    // SAFETY: the caller's promise.
    unsafe { start(comm, request, begin) }
}

/// Start what sumac_receive_any() does. `request` receives the request, or NULL; sumac_wait_message() says who sent.
///
/// # Safety
/// As for sumac_start_receive().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_start_receive_any(
    comm: *const Comm,
    bytes: *mut c_void,
    len: usize,
    tag: u32,
    request: *mut *mut Request,
) -> Status {
    // SAFETY: the caller's promise.
    let begin = |comm: &Comm, keep| unsafe { comm.comm.start_receive_any_raw(tag, (bytes.cast(), len), keep) };
    // SAFETY: the caller's promise.
    unsafe { start(comm, request, begin) }
}

/// Start a message.
///
/// # Safety
/// `comm` is NULL or a communicator; `request` is NULL or can be written to; the memory is as `begin` demands.
unsafe fn start(
    comm: *const Comm,
    request: *mut *mut Request,
    begin: impl FnOnce(&Comm, Box<dyn Any + Send>) -> Result<sumac::Request, sumac::Error>,
) -> Status {
    let body = |comm: &Comm| {
        // SAFETY: the caller's promise.
        unsafe { clear(request, "request")? };
        let started = Request::start(comm, |keep| begin(comm, keep))?;
        // SAFETY: the caller's promise.
        unsafe { give(request, started) };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { with_comm(comm, body) }
}

/// Borrow what is sent, and what is received.
///
/// # Safety
/// As for [`RawBuffers::buffers`].
unsafe fn both<'b>(memory: RawBuffers) -> Result<(&'b [u8], &'b mut [u8]), Failure> {
    // SAFETY: the caller's promise.
    Ok(match unsafe { memory.buffers()? } {
        Buffers::InPlace(output) => (&[], output),
        Buffers::Separate { input, output } => (input, output),
    })
}
