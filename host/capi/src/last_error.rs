//! The last error of each thread, as text and as data, and the border that every exported function crosses.
//!
//! Invariant: no panic leaves a function. [`guard`] turns one into SUMAC_ERROR_PANIC and ends the communicator of the
//! call, because the state that the panic left behind is unknown to the caller.

use crate::status::Status;
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use sumac::comm::environment::SettingError;
use sumac::comm::{JoinError, OutputState as LibraryOutputState};
use sumac::{Canceller, Error, OpDesc, Rank, ShrinkError, SplitError};

/// Why a function failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A call on a communicator.
    Call(Error),
    /// Anything without data.
    Other(Status, String),
}

impl Failure {
    /// An argument is invalid.
    pub(crate) fn argument(what: impl Into<String>) -> Self {
        Self::Call(Error::Argument(what.into()))
    }

    /// An argument that must not be NULL is.
    pub(crate) fn null(name: &str) -> Self {
        Self::argument(format!("{name} is NULL"))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Call(error)
    }
}

impl From<SettingError> for Failure {
    fn from(error: SettingError) -> Self {
        Self::Other(Status::SUMAC_ERROR_SETTING, error.to_string())
    }
}

impl From<JoinError> for Failure {
    fn from(error: JoinError) -> Self {
        Self::Other(Status::of_join(&error), format!("{error:?}"))
    }
}

impl From<ShrinkError> for Failure {
    fn from(error: ShrinkError) -> Self {
        Self::Other(Status::of_shrink(&error), format!("{error:?}"))
    }
}

impl From<SplitError> for Failure {
    fn from(error: SplitError) -> Self {
        match error {
            // With its data.
            SplitError::Exchange { source, .. } => Self::Call(source),
            error => Self::Other(Status::of_split(&error), format!("{error:?}")),
        }
    }
}

struct LastError {
    status: Status,
    text: CString,
    error: Option<Error>,
}

impl LastError {
    /// Return the error that ended the communicator, or else the error itself.
    fn cause(&self) -> Option<&Error> {
        let mut error = self.error.as_ref()?;
        while let Error::Ended(cause) = error {
            error = cause;
        }
        Some(error)
    }
}

thread_local! {
    static LAST: RefCell<Option<LastError>> = const { RefCell::new(None) };
}

/// Return text for C. Bytes of value 0 inside are left out.
pub(crate) fn c_string(text: impl Into<Vec<u8>>) -> CString {
    CString::new(text).unwrap_or_else(|error| {
        let mut bytes = error.into_vec();
        bytes.retain(|&byte| byte != 0);
        CString::new(bytes).unwrap_or_default()
    })
}

/// Remember why this thread's call failed.
fn remember(failure: Failure) -> Status {
    let last = match failure {
        // As programs in Rust print it: with its causes.
        Failure::Call(error) => {
            LastError { status: Status::of(&error), text: c_string(format!("{error:?}")), error: Some(error) }
        }
        Failure::Other(status, text) => LastError { status, text: c_string(text), error: None },
    };
    let status = last.status;
    // A thread that ends has no place to remember it any more, and nobody who could ask.
    let _ = LAST.try_with(|slot| slot.replace(Some(last)));
    status
}

/// Run the body of an exported function. A panic becomes an error, and ends `comm`.
pub(crate) fn guard(comm: Option<&Canceller>, body: impl FnOnce() -> Result<(), Failure>) -> Status {
    // What a panic leaves behind is behind locks of the library, or dropped here.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => Status::SUMAC_OK,
        Ok(Err(failure)) => remember(failure),
        Err(panic) => {
            if let Some(canceller) = comm {
                canceller.cancel();
            }
            remember(Failure::Other(Status::SUMAC_ERROR_PANIC, describe_panic(&*panic)))
        }
    }
}

/// Run the body of an exported function that returns a value; `absent` if it failed.
pub(crate) fn guard_value<T>(absent: T, body: impl FnOnce() -> Result<T, Failure>) -> T {
    let mut value = absent;
    guard(None, || {
        value = body()?;
        Ok(())
    });
    value
}

fn describe_panic(panic: &(dyn Any + Send)) -> String {
    let message = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("sumac panicked, which is a bug: {}; the communicator has ended", message.unwrap_or("no message"))
}

/// Read the last error of this thread, without replacing it.
fn with_last<T>(absent: T, read: impl FnOnce(&LastError) -> T) -> T {
    LAST.try_with(|slot| slot.try_borrow().ok().and_then(|last| last.as_ref().map(read)))
        .ok()
        .flatten()
        .unwrap_or(absent)
}

/// Copy ranks to the caller's array, as many as fit, and return how many there are.
///
/// # Safety
/// `ranks` is NULL, or `capacity` elements can be written to it.
pub(crate) unsafe fn copy_ranks(all: impl Iterator<Item = Rank>, ranks: *mut u32, capacity: usize) -> usize {
    let mut count = 0;
    for rank in all {
        if !ranks.is_null() && count < capacity {
            // SAFETY: there are more than `count` elements.
            unsafe { ranks.add(count).write(rank.0) };
        }
        count += 1;
    }
    count
}

/// Return the text of the last error of this thread, as Rust prints it: what happened, and what to do. "" if no call
/// of this thread has failed. It is valid until the next call of this thread fails.
#[unsafe(no_mangle)]
pub extern "C" fn sumac_last_error() -> *const c_char {
    with_last(c"".as_ptr(), |last| last.text.as_ptr())
}

/// Return the code of the last error of this thread; SUMAC_OK if no call of this thread has failed. Calls that succeed
/// do not reset it.
#[unsafe(no_mangle)]
pub extern "C" fn sumac_last_error_status() -> Status {
    with_last(Status::SUMAC_OK, |last| last.status)
}

/// Return the code of the error that ended the communicator, if the last error of this thread is SUMAC_ERROR_ENDED;
/// otherwise the code of the last error. The functions below describe this error.
#[unsafe(no_mangle)]
pub extern "C" fn sumac_last_error_cause() -> Status {
    with_last(Status::SUMAC_OK, |last| last.cause().map_or(last.status, Status::of))
}

/// Copy the ranks that the last error of this thread names, in ascending order: those that failed
/// (SUMAC_ERROR_RANKS_FAILED, SUMAC_ERROR_RANK_LOST) or were late (SUMAC_ERROR_STRAGGLERS). At most `capacity` are
/// copied; `ranks` may be NULL. Returns how many there are, 0 for all other errors.
///
/// # Safety
/// `ranks` is NULL, or `capacity` elements can be written to it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_last_error_ranks(ranks: *mut u32, capacity: usize) -> usize {
    with_last(0, |last| {
        let named: Vec<Rank> = match last.cause() {
            Some(Error::RanksFailed { ranks, .. }) => ranks.clone(),
            Some(Error::RankLost { rank }) => vec![*rank],
            Some(Error::Stragglers { missing }) => missing.iter().collect(),
            _ => Vec::new(),
        };
        // SAFETY: the caller's promise.
        unsafe { copy_ranks(named.into_iter(), ranks, capacity) }
    })
}

/// Read one of the two calls of a SUMAC_ERROR_MISMATCH: `which` is 0 or 1, and the same at all ranks. For
/// SUMAC_ERROR_DEADLINE, SUMAC_ERROR_OUTCOME_UNKNOWN and SUMAC_ERROR_UNSUPPORTED, 0 is the failed call. `dtype` and
/// `op` are 0 where a call has none. Each pointer may be NULL. Returns false, and writes nothing, if there is no such
/// call.
///
/// # Safety
/// Each pointer is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_last_error_call(
    which: usize,
    collective: *mut i32,
    dtype: *mut i32,
    op: *mut i32,
    root: *mut u32,
    count: *mut u64,
) -> bool {
    let desc = with_last(None, |last| last.cause().and_then(|error| call_of(error, which)));
    let Some(desc) = desc else { return false };
    // SAFETY: the caller's promise.
    unsafe {
        write(collective, i32::from(desc.collective.to_wire()));
        write(dtype, desc.dtype.map_or(0, |dtype| i32::from(dtype.to_wire())));
        write(op, desc.op.map_or(0, |op| i32::from(op.to_wire())));
        write(root, desc.root.0);
        write(count, desc.count);
    }
    true
}

fn call_of(error: &Error, which: usize) -> Option<OpDesc> {
    match (error, which) {
        (Error::Mismatch { first, .. }, 0) => Some(*first),
        (Error::Mismatch { other, .. }, 1) => Some(*other),
        (Error::Deadline { desc, .. } | Error::OutcomeUnknown { desc, .. } | Error::Unsupported(desc), 0) => {
            Some(*desc)
        }
        _ => None,
    }
}

/// Write to a pointer that may be NULL.
///
/// # Safety
/// The pointer is NULL or can be written to.
pub(crate) unsafe fn write<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: the caller's promise.
        unsafe { to.write(value) };
    }
}

/// Read the number of the first collective that failed (SUMAC_ERROR_RANKS_FAILED): collectives on a communicator count
/// from 0. Returns false, and writes nothing, for all other errors.
///
/// # Safety
/// `number` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_last_error_operation(number: *mut u64) -> bool {
    let operation = with_last(None, |last| match last.cause() {
        Some(Error::RanksFailed { operation, .. }) => Some(*operation),
        _ => None,
    });
    let Some(operation) = operation else { return false };
    // SAFETY: the caller's promise.
    unsafe { write(number, operation) };
    true
}

/// What the output of a failed call holds.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "names of C")]
pub enum OutputState {
    /// The error does not tell. If it is no rejection, the output is a mixture of old and new chunks, or unspecified
    /// after a host collective.
    SUMAC_OUTPUT_UNKNOWN = 0,
    /// Some elements hold results, and all others are unchanged.
    SUMAC_OUTPUT_ELEMENTS = 1,
    /// The contents are unspecified.
    SUMAC_OUTPUT_UNSPECIFIED = 2,
}

/// Return what the output of the failed call holds. For SUMAC_OUTPUT_ELEMENTS, `begins` and `ends` receive the ranges
/// of elements that hold results, at most `capacity` of each, in ascending order; the end is the element behind a
/// range. `count` receives how many ranges there are. Each pointer may be NULL.
///
/// # Safety
/// `begins` and `ends` are NULL, or `capacity` elements can be written to each; `count` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_last_error_output(
    begins: *mut u64,
    ends: *mut u64,
    capacity: usize,
    count: *mut usize,
) -> OutputState {
    let output = with_last(None, |last| match last.error.as_ref() {
        Some(
            Error::RanksFailed { output, .. }
            | Error::Partitioned { output, .. }
            | Error::OutcomeUnknown { output, .. },
        ) => Some(output.clone()),
        Some(Error::Left | Error::Ended(_)) => Some(LibraryOutputState::Elements(Vec::new())),
        Some(error) if error.is_rejection() => Some(LibraryOutputState::Elements(Vec::new())),
        _ => None,
    });
    let (state, ranges) = match output {
        Some(LibraryOutputState::Elements(ranges)) => (OutputState::SUMAC_OUTPUT_ELEMENTS, ranges),
        Some(_) => (OutputState::SUMAC_OUTPUT_UNSPECIFIED, Vec::new()),
        None => (OutputState::SUMAC_OUTPUT_UNKNOWN, Vec::new()),
    };
    for (index, range) in ranges.iter().enumerate().take(capacity) {
        for (array, value) in [(begins, range.start), (ends, range.end)] {
            if !array.is_null() {
                // SAFETY: the array has more than `index` elements.
                unsafe { array.add(index).write(value) };
            }
        }
    }
    // SAFETY: the caller's promise.
    unsafe { write(count, ranges.len()) };
    state
}

/// Return the name of a status code, such as "SUMAC_ERROR_MISMATCH"; "unknown" for other numbers. Never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn sumac_status_name(status: i32) -> *const c_char {
    find(status).map_or(c"unknown", |(_, name)| *name).as_ptr()
}

/// Return whether a call that returned this status had no effect at all: nothing was sent, buffers are unchanged, and
/// the call does not count in the common order of calls. Correct it and make it again. Any other error of a call ends
/// the communicator.
#[unsafe(no_mangle)]
pub extern "C" fn sumac_status_is_rejection(status: i32) -> bool {
    find(status).is_some_and(|(status, _)| status.is_rejection())
}

fn find(status: i32) -> Option<&'static (Status, &'static CStr)> {
    Status::ALL.iter().find(|(known, _)| *known as i32 == status)
}
