//! Communicators: join, split, shrink, leave, abort.

use crate::config::{Config, clear, free, give, handle};
use crate::last_error::{Failure, c_string, guard, guard_value, write};
use crate::options::duration;
use crate::status::Status;
use std::ffi::{CString, c_char};
use std::time::Duration;
use sumac::comm::Departure;
use sumac::{Canceller, Communicator, Progress};

/// A rank's membership in a job. All ranks make the same calls on it in the same order. Any thread may use it, and
/// several at once; only sumac_comm_leave() and sumac_comm_free() must be the last. In a forked child every call
/// returns SUMAC_ERROR_FORKED.
#[derive(Debug)]
pub struct Comm {
    pub(crate) comm: Communicator,
    pub(crate) canceller: Canceller,
    name: CString,
    /// How long leaving may take if the caller does not say.
    deadline: Duration,
    /// Who drives what has been started.
    pub(crate) progress: Progress,
}

impl Comm {
    pub(crate) fn new(comm: Communicator, deadline: Duration, progress: Progress) -> Self {
        Self { canceller: comm.canceller(), name: c_string(comm.name()), comm, deadline, progress }
    }
}

/// Run a call on a communicator; a panic ends it.
///
/// # Safety
/// `comm` is NULL or a communicator.
pub(crate) unsafe fn with_comm(comm: *const Comm, body: impl FnOnce(&Comm) -> Result<(), Failure>) -> Status {
    // SAFETY: the caller's promise.
    match unsafe { comm.as_ref() } {
        Some(comm) => guard(Some(&comm.canceller), || body(comm)),
        None => guard(None, || Err(Failure::null("comm"))),
    }
}

/// Join a job, and wait until all its ranks have joined. NULL for `config` stands for sumac_config_from_env(). `comm`
/// receives the communicator, or NULL.
///
/// # Safety
/// `config` is NULL or a configuration; `comm` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_join(config: *const Config, comm: *mut *mut Comm) -> Status {
    guard(None, || {
        // SAFETY: the caller's promise.
        let config = unsafe {
            clear(comm, "comm")?;
            config.as_ref()
        };
        let Config(config) = config.map_or_else(Config::from_env, |config| Ok(Config(config.0.clone())))?;
        let (deadline, progress) = (config.deadline, config.progress.unwrap_or_default());
        // SAFETY: the caller's promise.
        unsafe { give(comm, Comm::new(Communicator::join(config)?, deadline, progress)) };
        Ok(())
    })
}

/// Return this rank's number in the communicator, from 0; 0 for NULL.
///
/// # Safety
/// `comm` is NULL or a communicator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_comm_rank(comm: *const Comm) -> u32 {
    // SAFETY: the caller's promise.
    guard_value(0, || Ok(unsafe { handle(comm, "comm")? }.comm.rank()))
}

/// Return the number of ranks of the communicator; 0 for NULL.
///
/// # Safety
/// `comm` is NULL or a communicator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_comm_size(comm: *const Comm) -> u32 {
    // SAFETY: the caller's promise.
    guard_value(0, || Ok(unsafe { handle(comm, "comm")? }.comm.size()))
}

/// Return the communicator's name: the job's, with a suffix for each split ("job/0.3") or shrink ("job~1"). Valid until
/// the communicator is freed; "" for NULL.
///
/// # Safety
/// `comm` is NULL or a communicator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_comm_name(comm: *const Comm) -> *const c_char {
    // SAFETY: the caller's promise.
    guard_value(c"".as_ptr(), || Ok(unsafe { handle(comm, "comm")? }.name.as_ptr()))
}

/// The color of sumac_comm_split() for ranks that get no communicator.
pub const SUMAC_NO_COLOR: i64 = -1;

/// Split a communicator, as MPI_Comm_split does: ranks with the same `color` (0 to 2^32 - 1) form a new one, ordered by
/// `key` and then by their rank. A rank with SUMAC_NO_COLOR gets none. This is a collective call. `split` receives the
/// new communicator, or NULL; the old one stays as it is.
///
/// # Safety
/// `comm` is a communicator; `split` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_comm_split(comm: *const Comm, color: i64, key: i64, split: *mut *mut Comm) -> Status {
    let body = |comm: &Comm| {
        // SAFETY: the caller's promise.
        unsafe { clear(split, "split")? };
        let color = match color {
            SUMAC_NO_COLOR => None,
            color => Some(u32::try_from(color).map_err(|_| {
                Failure::argument(format!("color {color} is neither from 0 to {} nor SUMAC_NO_COLOR", u32::MAX))
            })?),
        };
        if let Some(made) = comm.comm.split(color, key)? {
            // SAFETY: the caller's promise.
            unsafe { give(split, Comm::new(made, comm.deadline, comm.progress)) };
        }
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { with_comm(comm, body) }
}

/// Make a new communicator of the surviving ranks, in their present order, after SUMAC_ERROR_RANKS_FAILED or at any
/// other time. All survivors must call this. `shrunk` receives it, or NULL; the old one stays as it is, to be freed.
///
/// # Safety
/// `comm` is a communicator; `shrunk` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_comm_shrink(comm: *const Comm, shrunk: *mut *mut Comm) -> Status {
    let body = |comm: &Comm| {
        // SAFETY: the caller's promise.
        unsafe { clear(shrunk, "shrunk")? };
        let made = comm.comm.shrink()?;
        // SAFETY: the caller's promise.
        unsafe { give(shrunk, Comm::new(made, comm.deadline, comm.progress)) };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { with_comm(comm, body) }
}

/// Leave the job gracefully: complete all started operations, and wait for other ranks that may still need this one, at
/// most for `seconds`; a negative number stands for the communicator's deadline. Frees the communicator in any case and
/// sets `*comm` to NULL. No other call may use it meanwhile.
///
/// Returns SUMAC_ERROR_UNCONFIRMED if the time limit passed, or the error for which a started operation or an earlier
/// call failed. The rank has left all the same.
///
/// # Safety
/// `*comm` is a communicator, which is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_comm_leave(comm: *mut *mut Comm, seconds: f64) -> Status {
    let mut left = None;
    let taken = guard(None, || {
        if comm.is_null() {
            return Err(Failure::null("comm"));
        }
        // A limit that is no number leaves the communicator to the caller.
        let limit = if seconds < 0.0 { None } else { Some(duration(seconds, "the time limit")?) };
        // SAFETY: the caller's promise.
        let taken = unsafe { comm.replace(std::ptr::null_mut()) };
        if taken.is_null() {
            return Err(Failure::null("*comm"));
        }
        // SAFETY: it came from `give`, and the caller has it no more.
        left = Some((unsafe { Box::from_raw(taken) }, limit));
        Ok(())
    });
    let Some((owned, limit)) = left else { return taken };
    let Comm { comm, canceller, deadline, .. } = *owned;
    guard(Some(&canceller), || match comm.leave_within(limit.unwrap_or(deadline)) {
        Departure::Clean => Ok(()),
        Departure::Failed(error) => Err(error.into()),
        Departure::Unconfirmed { waited } => {
            let text = format!("left after {} ms, although other ranks may still need this one", waited.as_millis());
            Err(Failure::Other(Status::SUMAC_ERROR_UNCONFIRMED, text))
        }
        other => Err(Failure::Other(Status::SUMAC_ERROR_OTHER, format!("{other:?}"))),
    })
}

/// End the communicator, from any thread, also while a call on it blocks in another one. That call, or else the next
/// one, returns SUMAC_ERROR_CANCELLED, and every later one SUMAC_ERROR_ENDED. The other ranks are then told that this
/// rank is lost. Free the communicator afterwards. Not to be called from a signal handler.
///
/// # Safety
/// `comm` is a communicator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_comm_abort(comm: *const Comm) -> Status {
    let body = |comm: &Comm| {
        comm.canceller.cancel();
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { with_comm(comm, body) }
}

/// Free a communicator without leaving: to the other ranks this rank is lost, and operations that it has not completed
/// fail on all of them. For communicators that have ended, and for forked children, where it has no effect on the job.
/// NULL is allowed.
///
/// # Safety
/// `comm` is NULL or a communicator, which is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_comm_free(comm: *mut Comm) {
    // SAFETY: the caller's promise.
    unsafe { free(comm) };
}

/// Read the recoveries so far: their number, the time spent in them, and the bytes that this rank sent for them. Each
/// pointer may be NULL.
///
/// # Safety
/// `comm` is a communicator; the others are NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_comm_recoveries(
    comm: *const Comm,
    count: *mut u32,
    seconds: *mut f64,
    bytes: *mut u64,
) -> Status {
    let body = |comm: &Comm| {
        let recoveries = comm.comm.recoveries();
        // SAFETY: the caller's promise.
        unsafe {
            write(count, recoveries.count);
            write(seconds, recoveries.time.as_secs_f64());
            write(bytes, recoveries.bytes);
        }
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { with_comm(comm, body) }
}

/// Read what started operations and messages hold: their numbers, and the bytes of their buffers. Each pointer may be
/// NULL.
///
/// # Safety
/// `comm` is a communicator; the others are NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_comm_outstanding(
    comm: *const Comm,
    operations: *mut usize,
    messages: *mut usize,
    bytes: *mut usize,
) -> Status {
    let body = |comm: &Comm| {
        let outstanding = comm.comm.outstanding();
        // SAFETY: the caller's promise.
        unsafe {
            write(operations, outstanding.operations);
            write(messages, outstanding.messages);
            write(bytes, outstanding.bytes);
        }
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { with_comm(comm, body) }
}
