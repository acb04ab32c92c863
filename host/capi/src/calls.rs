//! Blocking collectives.
//!
//! Counts are NCCL's: of elements, and of one rank's block where ranks have blocks.

use crate::buffers::{
    Call, Numbers, collective as known_collective, dtype as known_dtype, in_place, op as known_op, separate,
};
use crate::comm::{Comm, with_comm};
use crate::last_error::Failure;
use crate::options::{Options, options_or_default};
use crate::outcome::{Outcome, clear_outcome, give_outcome};
use crate::status::Status;
use std::ffi::c_void;
use sumac::{Collective, OpDesc, Rank};

/// Run a call that `describe` makes.
///
/// # Safety
/// `comm` and `options` are NULL or what they claim to be; `outcome` is NULL or can be written to; the memory of the
/// call is as [`RawBuffers::buffers`](sumac::RawBuffers::buffers) demands.
pub(crate) unsafe fn run(
    comm: *const Comm,
    options: *const Options,
    outcome: *mut *mut Outcome,
    describe: impl FnOnce(&Comm) -> Result<Call, Failure>,
) -> Status {
    let body = |comm: &Comm| {
        // SAFETY: the caller's promise.
        let options = unsafe {
            clear_outcome(outcome);
            options_or_default(options)
        };
        let Call { desc, memory, counts } = describe(comm)?;
        // SAFETY: the caller's promise.
        let buffers = unsafe { memory.buffers()? };
        let done = match counts {
            Some(counts) => comm.comm.run_v(&desc, &counts, buffers, &options)?,
            None => comm.comm.run(&desc, buffers, &options)?,
        };
        // SAFETY: the caller's promise.
        unsafe { give_outcome(outcome, Some(done)) };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { with_comm(comm, body) }
}

/// All-reduce: combine `count` elements of all ranks; every rank gets the result. In place if `input` is `output`.
/// With SUMAC_MIN_LOC and SUMAC_MAX_LOC, an element is a pair of a value and an unsigned index of the same size.
///
/// `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
///
/// # Safety
/// `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `input` and
/// `output` have the lengths above, and nobody else writes to either or reads the output meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_all_reduce(
    comm: *const Comm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: i32,
    op: i32,
    options: *const Options,
    outcome: *mut *mut Outcome,
) -> Status {
    let numbers = Numbers { collective: Collective::AllReduce, count, dtype, op, root: 0 };
    // SAFETY: the caller's promise.
    unsafe { run(comm, options, outcome, |comm| Call::new(&comm.comm, numbers, input.cast(), output.cast())) }
}

/// Reduce: combine `count` elements of all ranks; `root` gets the result. `output` is not used by other ranks, and may
/// be NULL there. In place if `input` is `output`.
///
/// `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
///
/// # Safety
/// `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `input` and
/// `output` have the lengths above, and nobody else writes to either or reads the output meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_reduce(
    comm: *const Comm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: i32,
    op: i32,
    root: u32,
    options: *const Options,
    outcome: *mut *mut Outcome,
) -> Status {
    let numbers = Numbers { collective: Collective::Reduce, count, dtype, op, root };
    // SAFETY: the caller's promise.
    unsafe { run(comm, options, outcome, |comm| Call::new(&comm.comm, numbers, input.cast(), output.cast())) }
}

/// Broadcast the `count` elements of `root`'s `buffer` to all ranks.
///
/// `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
///
/// # Safety
/// `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `buffer` has
/// `count` elements, and nobody else uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_broadcast(
    comm: *const Comm,
    buffer: *mut c_void,
    count: u64,
    dtype: i32,
    root: u32,
    options: *const Options,
    outcome: *mut *mut Outcome,
) -> Status {
    let numbers = Numbers { collective: Collective::Broadcast, count, dtype, op: 0, root };
    // SAFETY: the caller's promise.
    unsafe {
        run(comm, options, outcome, |comm| Call::new(&comm.comm, numbers, buffer.cast_const().cast(), buffer.cast()))
    }
}

/// Reduce-scatter: combine all ranks' `input` of one block of `count` elements for each rank; rank r gets block r of
/// the result. In place if `output` is this rank's block in `input`: `input` may then be written to, and the contents
/// of its other blocks are unspecified afterwards.
///
/// `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
///
/// # Safety
/// `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `input` and
/// `output` have the lengths above, and nobody else writes to either or reads the output meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_reduce_scatter(
    comm: *const Comm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: i32,
    op: i32,
    options: *const Options,
    outcome: *mut *mut Outcome,
) -> Status {
    let numbers = Numbers { collective: Collective::ReduceScatter, count, dtype, op, root: 0 };
    // SAFETY: the caller's promise.
    unsafe { run(comm, options, outcome, |comm| Call::new(&comm.comm, numbers, input.cast(), output.cast())) }
}

/// All-gather: every rank gets the `count` elements of each rank in `output`, in rank order. In place if `input` is
/// this rank's block in `output`.
///
/// `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
///
/// # Safety
/// `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `input` and
/// `output` have the lengths above, and nobody else writes to either or reads the output meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_all_gather(
    comm: *const Comm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: i32,
    options: *const Options,
    outcome: *mut *mut Outcome,
) -> Status {
    let numbers = Numbers { collective: Collective::AllGather, count, dtype, op: 0, root: 0 };
    // SAFETY: the caller's promise.
    unsafe { run(comm, options, outcome, |comm| Call::new(&comm.comm, numbers, input.cast(), output.cast())) }
}

/// Gather: `root` gets the `count` elements of each rank in `output`, in rank order. `output` is not used by other
/// ranks, and may be NULL there. In place if `input` is the root's block in its `output`.
///
/// `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
///
/// # Safety
/// `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `input` and
/// `output` have the lengths above, and nobody else writes to either or reads the output meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_gather(
    comm: *const Comm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: i32,
    root: u32,
    options: *const Options,
    outcome: *mut *mut Outcome,
) -> Status {
    let numbers = Numbers { collective: Collective::Gather, count, dtype, op: 0, root };
    // SAFETY: the caller's promise.
    unsafe { run(comm, options, outcome, |comm| Call::new(&comm.comm, numbers, input.cast(), output.cast())) }
}

/// Scatter: rank r gets block r, of `count` elements, of `root`'s `input`, which is not used by other ranks, and may be
/// NULL there. In place if `output` is the root's block in its `input`.
///
/// `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
///
/// # Safety
/// `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `input` and
/// `output` have the lengths above, and nobody else writes to either or reads the output meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_scatter(
    comm: *const Comm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: i32,
    root: u32,
    options: *const Options,
    outcome: *mut *mut Outcome,
) -> Status {
    let numbers = Numbers { collective: Collective::Scatter, count, dtype, op: 0, root };
    // SAFETY: the caller's promise.
    unsafe { run(comm, options, outcome, |comm| Call::new(&comm.comm, numbers, input.cast(), output.cast())) }
}

/// All-to-all: rank r gets block r, of `count` elements, of every rank's `input`, in rank order. In place if `input` is
/// `output`.
///
/// `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
///
/// # Safety
/// `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `input` and
/// `output` have the lengths above, and nobody else writes to either or reads the output meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_all_to_all(
    comm: *const Comm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: i32,
    options: *const Options,
    outcome: *mut *mut Outcome,
) -> Status {
    let numbers = Numbers { collective: Collective::AllToAll, count, dtype, op: 0, root: 0 };
    // SAFETY: the caller's promise.
    unsafe { run(comm, options, outcome, |comm| Call::new(&comm.comm, numbers, input.cast(), output.cast())) }
}

/// Barrier: wait until every rank has called this.
///
/// `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
///
/// # Safety
/// `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_barrier(
    comm: *const Comm,
    options: *const Options,
    outcome: *mut *mut Outcome,
) -> Status {
    // SAFETY: the caller's promise; there is no memory.
    unsafe { run(comm, options, outcome, |_| Ok(barrier())) }
}

/// Run any collective but SUMAC_ALL_TO_ALL_V, with any count: the numbers are a sumac_collective, a sumac_dtype and a
/// sumac_op (0 where there is none), and `count` is of the whole operation, so that the blocks of ranks may differ by
/// one element. `input_len` and `output_len` are in bytes, as the guide's table demands. In place if `input` is
/// `output` and the lengths are equal: the buffer then has the longer of both lengths.
///
/// `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
///
/// # Safety
/// `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `input` and
/// `output` have these lengths, and nobody else writes to either or reads the output meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_run(
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
    outcome: *mut *mut Outcome,
) -> Status {
    let describe = |_: &Comm| described((collective, dtype, op, root, count), (input, input_len), (output, output_len));
    // SAFETY: the caller's promise.
    unsafe { run(comm, options, outcome, describe) }
}

/// Describe an operation by all its numbers.
pub(crate) fn described_operation(
    (collective, dtype, op, root, count): (i32, i32, i32, u32, u64),
) -> Result<OpDesc, Failure> {
    let collective = known_collective(collective)?;
    if collective == Collective::AllToAllV {
        return Err(Failure::argument("SUMAC_ALL_TO_ALL_V has counts for each rank: use sumac_all_to_all_v()"));
    }
    let root = Rank(if collective.is_rooted() { root } else { 0 });
    Ok(OpDesc { collective, dtype: known_dtype(dtype)?, op: known_op(op)?, root, count })
}

/// Describe a call by all its numbers.
pub(crate) fn described(
    numbers: (i32, i32, i32, u32, u64),
    (input, input_len): (*const c_void, usize),
    (output, output_len): (*mut c_void, usize),
) -> Result<Call, Failure> {
    let desc = described_operation(numbers)?;
    let is_in_place = std::ptr::addr_eq(input, output) && input_len == output_len;
    let memory = if is_in_place {
        in_place(output.cast(), output_len)
    } else {
        separate((input.cast(), input_len), (output.cast(), output_len))
    };
    Ok(Call { desc, memory, counts: None })
}

/// Describe a barrier.
pub(crate) fn barrier() -> Call {
    Call { desc: OpDesc::barrier(), memory: in_place(std::ptr::null_mut(), 0), counts: None }
}
