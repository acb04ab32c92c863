//! Collectives with blocks of any length.

use crate::buffers::{Call, dtype as known_dtype, op as known_op, separate};
use crate::calls::run;
use crate::comm::Comm;
use crate::last_error::Failure;
use crate::options::Options;
use crate::outcome::Outcome;
use crate::request::Request;
use crate::started::start;
use crate::status::Status;
use std::ffi::c_void;
use sumac::{Collective, Counts, Dtype, OpDesc, Rank};

/// All-to-all with blocks of any length: send `send_counts[r]` elements of `input` to each rank r, and receive
/// `recv_counts[r]` elements from it in `output`. Both arrays have an element for each rank, and blocks lie behind each
/// other in rank order. What a rank sends must be as long as what its peer receives.
///
/// `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
///
/// # Safety
/// `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. The counts have
/// an element for each rank, and `input` and `output` as many elements as follow from them. Nobody else writes to
/// either or reads the output meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_all_to_all_v(
    comm: *const Comm,
    input: *const c_void,
    send_counts: *const usize,
    output: *mut c_void,
    recv_counts: *const usize,
    dtype: i32,
    options: *const Options,
    outcome: *mut *mut Outcome,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { run(comm, options, outcome, |comm| exchange(comm, (input, send_counts), (output, recv_counts), dtype)) }
}

/// All-gather with blocks of any length: every rank r contributes `counts[r]` elements, and all get all blocks behind
/// each other, in rank order. The counts have an element for each rank, and are the same on all ranks.
///
/// `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
///
/// # Safety
/// `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. The counts have
/// an element for each rank, and `input` and `output` as many elements as follow from them. Nobody else writes to
/// either or reads the output meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_all_gather_v(
    comm: *const Comm,
    input: *const c_void,
    output: *mut c_void,
    counts: *const usize,
    dtype: i32,
    options: *const Options,
    outcome: *mut *mut Outcome,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { run(comm, options, outcome, |comm| gather(comm, input, (output, counts), dtype)) }
}

/// Reduce-scatter with blocks of any length: combine `input` of all ranks; rank r gets `counts[r]` elements of the
/// result, behind those of the ranks before it. The counts have an element for each rank, and are the same on all
/// ranks.
///
/// `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
///
/// # Safety
/// `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. The counts have
/// an element for each rank, and `input` and `output` as many elements as follow from them. Nobody else writes to
/// either or reads the output meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_reduce_scatter_v(
    comm: *const Comm,
    input: *const c_void,
    counts: *const usize,
    output: *mut c_void,
    dtype: i32,
    op: i32,
    options: *const Options,
    outcome: *mut *mut Outcome,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { run(comm, options, outcome, |comm| reduce(comm, (input, counts), output, (dtype, op))) }
}

/// Start what sumac_all_to_all_v() does. `options` may be NULL. `request` receives the request, or NULL.
///
/// # Safety
/// As for sumac_all_to_all_v(), and the memory stays as it is until the request has been waited for, or its memory
/// released; not the counts, which are copied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_start_all_to_all_v(
    comm: *const Comm,
    input: *const c_void,
    send_counts: *const usize,
    output: *mut c_void,
    recv_counts: *const usize,
    dtype: i32,
    options: *const Options,
    request: *mut *mut Request,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { start(comm, options, request, |comm| exchange(comm, (input, send_counts), (output, recv_counts), dtype)) }
}

/// Start what sumac_all_gather_v() does. `options` may be NULL. `request` receives the request, or NULL.
///
/// # Safety
/// As for sumac_all_gather_v(), and the memory stays as it is until the request has been waited for, or its memory
/// released; not the counts, which are copied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_start_all_gather_v(
    comm: *const Comm,
    input: *const c_void,
    output: *mut c_void,
    counts: *const usize,
    dtype: i32,
    options: *const Options,
    request: *mut *mut Request,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { start(comm, options, request, |comm| gather(comm, input, (output, counts), dtype)) }
}

/// Start what sumac_reduce_scatter_v() does. `options` may be NULL. `request` receives the request, or NULL.
///
/// # Safety
/// As for sumac_reduce_scatter_v(), and the memory stays as it is until the request has been waited for, or its memory
/// released; not the counts, which are copied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_start_reduce_scatter_v(
    comm: *const Comm,
    input: *const c_void,
    counts: *const usize,
    output: *mut c_void,
    dtype: i32,
    op: i32,
    options: *const Options,
    request: *mut *mut Request,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { start(comm, options, request, |comm| reduce(comm, (input, counts), output, (dtype, op))) }
}

/// Describe an exchange.
///
/// # Safety
/// Both counts are NULL or have an element for each rank.
unsafe fn exchange(
    comm: &Comm,
    (input, send_counts): (*const c_void, *const usize),
    (output, recv_counts): (*mut c_void, *const usize),
    dtype: i32,
) -> Result<Call, Failure> {
    let desc = described(Collective::AllToAllV, (dtype, 0))?;
    // SAFETY: the caller's promise.
    let (send, recv) =
        unsafe { (counts_of(comm, send_counts, "send_counts")?, counts_of(comm, recv_counts, "recv_counts")?) };
    let memory = separate((input.cast(), len_of(&send, &desc)?), (output.cast(), len_of(&recv, &desc)?));
    Ok(Call { desc, memory, counts: Some(Counts::Exchange { send, recv }) })
}

/// Describe an all-gather.
///
/// # Safety
/// The counts are NULL or have an element for each rank.
unsafe fn gather(
    comm: &Comm,
    input: *const c_void,
    (output, counts): (*mut c_void, *const usize),
    dtype: i32,
) -> Result<Call, Failure> {
    let desc = described(Collective::AllGather, (dtype, 0))?;
    // SAFETY: the caller's promise.
    let counts = unsafe { counts_of(comm, counts, "counts")? };
    let own = len_of(&counts[comm.comm.rank() as usize..][..1], &desc)?;
    let memory = separate((input.cast(), own), (output.cast(), len_of(&counts, &desc)?));
    Ok(Call { desc, memory, counts: Some(Counts::Blocks(counts)) })
}

/// Describe a reduce-scatter.
///
/// # Safety
/// The counts are NULL or have an element for each rank.
unsafe fn reduce(
    comm: &Comm,
    (input, counts): (*const c_void, *const usize),
    output: *mut c_void,
    numbers: (i32, i32),
) -> Result<Call, Failure> {
    let desc = described(Collective::ReduceScatter, numbers)?;
    // SAFETY: the caller's promise.
    let counts = unsafe { counts_of(comm, counts, "counts")? };
    let own = len_of(&counts[comm.comm.rank() as usize..][..1], &desc)?;
    let memory = separate((input.cast(), len_of(&counts, &desc)?), (output.cast(), own));
    Ok(Call { desc, memory, counts: Some(Counts::Blocks(counts)) })
}

fn described(collective: Collective, (dtype, op): (i32, i32)) -> Result<OpDesc, Failure> {
    let dtype: Option<Dtype> = known_dtype(dtype)?;
    Ok(OpDesc { collective, dtype, op: known_op(op)?, root: Rank(0), count: 0 })
}

/// Return how many bytes the blocks of these counts have.
fn len_of(counts: &[usize], desc: &OpDesc) -> Result<usize, Failure> {
    let sum = counts.iter().try_fold(0_usize, |sum, &count| sum.checked_add(count));
    let len = sum.and_then(|sum| sum.checked_mul(desc.element_bytes()));
    len.ok_or_else(|| Failure::argument("the counts exceed the address space"))
}

/// Copy an array with an element for each rank.
///
/// # Safety
/// `counts` is NULL or such an array.
unsafe fn counts_of(comm: &Comm, counts: *const usize, name: &str) -> Result<Vec<usize>, Failure> {
    if counts.is_null() {
        return Err(Failure::null(name));
    }
    if !counts.is_aligned() {
        return Err(Failure::argument(format!("{name} is not aligned to {} bytes", align_of::<usize>())));
    }
    // SAFETY: the caller's promise; it is aligned, and not NULL.
    Ok(unsafe { std::slice::from_raw_parts(counts, comm.comm.size() as usize) }.to_vec())
}
