//! Operations that have been started: test, wait, and how their completion wakes a thread, a poll or a callback.
//!
//! Invariants:
//! - The library keeps [`Keep`] until nobody writes to the operation's memory any more, no device either.
//! - The callback and the file descriptor are told once, under no lock.

use crate::comm::Comm;
use crate::config::handle;
use crate::last_error::{Failure, guard, write};
use crate::options::duration;
use crate::outcome::{Outcome, clear_outcome, give_outcome};
use crate::status::Status;
use rustix::event::{EventfdFlags, eventfd};
use std::any::Any;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};
use sumac::{Canceller, Progress};

/// An operation or a message that has been started. It goes on by itself; sumac_wait() returns its result and frees the
/// request. Its memory stays the caller's, who must neither change the input nor touch the output until then.
#[derive(Debug)]
pub struct Request {
    request: Mutex<sumac::Request>,
    completion: Arc<Completion>,
    released: Arc<Released>,
    canceller: Canceller,
    /// Whether only calls drive it.
    is_polled: bool,
}

/// A function that the library calls, from a thread of its own. Everything waits for it: it must return soon, must not
/// call this library, and must not throw an exception.
pub type Callback = Option<unsafe extern "C" fn(context: *mut c_void)>;

/// A callback with its context.
#[derive(Debug)]
struct Notify {
    function: unsafe extern "C" fn(*mut c_void),
    context: *mut c_void,
}

// SAFETY: the caller promises that the function may be called from any thread with this context.
unsafe impl Send for Notify {}

impl Notify {
    fn new(function: Callback, context: *mut c_void) -> Option<Self> {
        function.map(|function| Self { function, context })
    }

    fn call(self) {
        // SAFETY: the caller's promise, where it was passed.
        unsafe { (self.function)(self.context) };
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds one of these locks can leave a half-changed state behind.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether an operation is complete, and who wants to know.
#[derive(Debug, Default)]
struct Completion(Mutex<Listeners>);

#[derive(Debug, Default)]
struct Listeners {
    is_complete: bool,
    fd: Option<OwnedFd>,
    callback: Option<Notify>,
    waiters: Vec<Weak<Waiter>>,
}

impl Completion {
    fn complete(&self) {
        let (callback, waiters) = {
            let mut listeners = lock(&self.0);
            listeners.is_complete = true;
            listeners.fd.iter().for_each(signal);
            (listeners.callback.take(), std::mem::take(&mut listeners.waiters))
        };
        waiters.iter().filter_map(Weak::upgrade).for_each(|waiter| waiter.wake());
        if let Some(callback) = callback {
            callback.call();
        }
    }

    fn is_complete(&self) -> bool {
        lock(&self.0).is_complete
    }

    /// Wake `waiter` on completion, also if it is complete already.
    fn wake(&self, waiter: &Arc<Waiter>) {
        let mut listeners = lock(&self.0);
        if listeners.is_complete {
            drop(listeners);
            waiter.wake();
        } else {
            listeners.waiters.retain(|waiter| waiter.strong_count() > 0);
            listeners.waiters.push(Arc::downgrade(waiter));
        }
    }
}

/// Make a file descriptor readable.
fn signal(fd: &OwnedFd) {
    // The counter is 0 before, so this cannot fail: it neither blocks nor overflows.
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

/// A thread in sumac_wait_any().
#[derive(Debug, Default)]
struct Waiter {
    is_woken: Mutex<bool>,
    woken: Condvar,
}

impl Waiter {
    fn wake(&self) {
        *lock(&self.is_woken) = true;
        self.woken.notify_one();
    }

    /// Wait until `until`, or for ever. Returns whether it was woken.
    fn wait(&self, until: Option<Instant>) -> bool {
        let is_woken = lock(&self.is_woken);
        let Some(until) = until else {
            let waited = self.woken.wait_while(is_woken, |is_woken| !*is_woken);
            return *waited.unwrap_or_else(PoisonError::into_inner);
        };
        let left = until.saturating_duration_since(Instant::now());
        let waited = self.woken.wait_timeout_while(is_woken, left, |is_woken| !*is_woken);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Whether the library has let go of an operation's memory, and whom to tell.
#[derive(Debug, Default)]
struct Released(Mutex<(bool, Option<Notify>)>);

impl Released {
    fn release(&self) {
        let notify = {
            let mut state = lock(&self.0);
            state.0 = true;
            state.1.take()
        };
        if let Some(notify) = notify {
            notify.call();
        }
    }

    /// Call `notify` when the memory is released, or now if it is.
    fn then(&self, notify: Notify) {
        let mut state = lock(&self.0);
        if state.0 {
            drop(state);
            notify.call();
        } else {
            state.1 = Some(notify);
        }
    }
}

/// What the library holds until nobody uses the operation's memory any more.
struct Keep(Arc<Released>);

impl Drop for Keep {
    fn drop(&mut self) {
        self.0.release();
    }
}

impl Request {
    /// Start what `start` does with the object to keep.
    pub(crate) fn start(
        comm: &Comm,
        start: impl FnOnce(Box<dyn Any + Send>) -> Result<sumac::Request, sumac::Error>,
    ) -> Result<Self, Failure> {
        let released = Arc::new(Released::default());
        let mut request = start(Box::new(Keep(Arc::clone(&released))))?;
        let completion = Arc::new(Completion::default());
        let told = Arc::clone(&completion);
        request.on_completion(move || told.complete());
        let is_polled = comm.progress == Progress::Caller;
        Ok(Self { request: Mutex::new(request), completion, released, canceller: comm.canceller.clone(), is_polled })
    }

    fn test(&self) -> bool {
        if self.completion.is_complete() {
            return true;
        }
        match self.request.try_lock() {
            Ok(mut request) => request.test(),
            Err(TryLockError::Poisoned(request)) => request.into_inner().test(),
            // Another thread is at it.
            Err(TryLockError::WouldBlock) => false,
        }
    }

    /// Return the outcome of an operation, or the rank at the other end of a message.
    fn finish(self) -> Result<(Option<sumac::Outcome>, Option<u32>), Failure> {
        let mut request = self.request.into_inner().unwrap_or_else(PoisonError::into_inner);
        let outcome = request.wait()?;
        Ok((outcome, request.source()))
    }
}

/// Take a request from the caller, and set its pointer to NULL.
///
/// # Safety
/// `request` is NULL, or `*request` is NULL or a request that nobody else uses.
unsafe fn take(request: *mut *mut Request) -> Result<Box<Request>, Failure> {
    if request.is_null() {
        return Err(Failure::null("request"));
    }
    // SAFETY: the caller's promise.
    let taken = unsafe { request.replace(std::ptr::null_mut()) };
    if taken.is_null() {
        return Err(Failure::null("*request"));
    }
    // SAFETY: it came from `give`, and the caller has it no more.
    Ok(unsafe { Box::from_raw(taken) })
}

/// Find out whether an operation has completed or failed, so that sumac_wait() returns at once. Never waits, unless the
/// library has no thread (sumac_config_set_progress_thread()): then it may run a whole host collective.
///
/// # Safety
/// `request` is a request; `is_complete` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_test(request: *const Request, is_complete: *mut bool) -> Status {
    guard(None, || {
        // SAFETY: the caller's promise.
        unsafe {
            let request = handle(request, "request")?;
            if is_complete.is_null() {
                return Err(Failure::null("is_complete"));
            }
            write(is_complete, request.test());
        }
        Ok(())
    })
}

/// Wait for an operation within the communicator's deadline, return its result, free the request and set `*request` to
/// NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL for a message.
///
/// # Safety
/// `*request` is a request that no other thread uses; `outcome` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_wait(request: *mut *mut Request, outcome: *mut *mut Outcome) -> Status {
    // SAFETY: the caller's promise.
    unsafe {
        clear_outcome(outcome);
        wait(request, |done, _| give_outcome(outcome, done))
    }
}

/// Wait for a message as sumac_wait() does. `source` may be NULL; otherwise it receives the rank at the other end.
///
/// # Safety
/// `*request` is a request that no other thread uses; `source` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_wait_message(request: *mut *mut Request, source: *mut u32) -> Status {
    // SAFETY: the caller's promise.
    unsafe { wait(request, |_, peer| peer.into_iter().for_each(|peer| write(source, peer))) }
}

/// Wait for an operation or a message, and tell `give` its outcome or its peer.
///
/// # Safety
/// `request` is NULL, or `*request` is NULL or a request that no other thread uses.
unsafe fn wait(request: *mut *mut Request, give: impl FnOnce(Option<sumac::Outcome>, Option<u32>)) -> Status {
    let mut taken = None;
    let status = guard(None, || {
        // SAFETY: the caller's promise.
        taken = Some(unsafe { take(request)? });
        Ok(())
    });
    let Some(request) = taken else { return status };
    let canceller = request.canceller.clone();
    guard(Some(&canceller), || {
        let (outcome, peer) = request.finish()?;
        give(outcome, peer);
        Ok(())
    })
}

/// Wait until any of `count` requests has completed, at most for `seconds`; a negative number stands for no limit.
/// Then do what sumac_wait() does with it, and write its place in the array to `index`. NULL requests are left out; if
/// all are NULL, that is SUMAC_ERROR_ARGUMENT. If the time limit passes, that is SUMAC_ERROR_TIMEOUT: nothing is freed,
/// and all operations go on.
///
/// # Safety
/// `requests` has `count` elements, each NULL or a request that no other thread uses; `index` can be written to;
/// `outcome` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_wait_any(
    requests: *mut *mut Request,
    count: usize,
    seconds: f64,
    index: *mut usize,
    outcome: *mut *mut Outcome,
) -> Status {
    let mut found = None;
    let status = guard(None, || {
        // SAFETY: the caller's promise.
        unsafe { clear_outcome(outcome) };
        if requests.is_null() || index.is_null() {
            return Err(Failure::null(if index.is_null() { "index" } else { "requests" }));
        }
        if !requests.is_aligned() {
            return Err(Failure::argument("requests is not aligned"));
        }
        let limit = if seconds < 0.0 { None } else { Some(duration(seconds, "the time limit")?) };
        // SAFETY: the caller's promise; it is aligned, and not NULL.
        let all = unsafe { std::slice::from_raw_parts(requests, count) };
        // SAFETY: the caller's promise.
        let complete = unsafe { first_complete(all, limit)? };
        // SAFETY: the caller's promise.
        unsafe { index.write(complete) };
        found = Some(complete);
        Ok(())
    });
    match found {
        // SAFETY: the index is within the array; otherwise the caller's promise.
        Some(complete) => unsafe { sumac_wait(requests.add(complete), outcome) },
        None => status,
    }
}

/// Wait for the first request that completes, and return its index.
///
/// # Safety
/// Each request is NULL or a request.
unsafe fn first_complete(all: &[*mut Request], limit: Option<Duration>) -> Result<usize, Failure> {
    // A limit beyond what the clock can count is none.
    let until = limit.and_then(|limit| Instant::now().checked_add(limit));
    // SAFETY: the caller's promise.
    let requests =
        || all.iter().enumerate().filter_map(|(index, &request)| Some((index, unsafe { request.as_ref()? })));
    if requests().next().is_none() {
        return Err(Failure::argument("there is no request to wait for"));
    }
    let waiter = Arc::new(Waiter::default());
    requests().for_each(|(_, request)| request.completion.wake(&waiter));
    let complete = || requests().find(|(_, request)| request.test()).map(|(index, _)| index);
    if let Some(index) = complete() {
        return Ok(index);
    }
    if requests().any(|(_, request)| request.is_polled) {
        // Only these tests drive them.
        while until.is_none_or(|until| Instant::now() < until) {
            if let Some(index) = complete() {
                return Ok(index);
            }
            std::thread::yield_now();
        }
    } else {
        waiter.wait(until);
    }
    complete().ok_or_else(|| {
        let text = format!("no operation completed within {} ms", limit.unwrap_or_default().as_millis());
        Failure::Other(Status::SUMAC_ERROR_TIMEOUT, text)
    })
}

/// Get a file descriptor that becomes readable when the operation has completed or failed, for poll, epoll or an event
/// loop. It belongs to the request, and is closed with it: do not close it, and stop watching it before sumac_wait().
///
/// # Safety
/// `request` is a request; `fd` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_request_fd(request: *const Request, fd: *mut i32) -> Status {
    guard(None, || {
        // SAFETY: the caller's promise.
        let request = unsafe { handle(request, "request")? };
        if fd.is_null() {
            return Err(Failure::null("fd"));
        }
        let mut listeners = lock(&request.completion.0);
        let is_complete = listeners.is_complete;
        let own = match &mut listeners.fd {
            Some(own) => own,
            none => {
                let made = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| {
                    Failure::Other(Status::SUMAC_ERROR_SYSTEM, format!("cannot make an eventfd: {error}"))
                })?;
                if is_complete {
                    signal(&made);
                }
                none.insert(made)
            }
        };
        // SAFETY: the caller's promise.
        unsafe { write(fd, own.as_raw_fd()) };
        Ok(())
    })
}

/// Call `callback` with `context` when the operation has completed or failed: once, from a thread of the library, or
/// at once if it has. A second callback takes the place of the first. NULL takes it back, if it was not called yet.
///
/// # Safety
/// `request` is a request; the callback may be called from any thread with this context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_request_on_completion(
    request: *const Request,
    callback: Callback,
    context: *mut c_void,
) -> Status {
    guard(None, || {
        // SAFETY: the caller's promise.
        let request = unsafe { handle(request, "request")? };
        let notify = Notify::new(callback, context);
        let mut listeners = lock(&request.completion.0);
        if !listeners.is_complete {
            listeners.callback = notify;
        } else if let Some(notify) = notify {
            drop(listeners);
            notify.call();
        }
        Ok(())
    })
}

/// Give a request up: the operation goes on, because the other ranks need it. Frees the request and sets `*request` to
/// NULL. The memory must stay as it is until the operation has ended: then `released` is called with `context`, once,
/// from any thread, or at once. `released` may be NULL for memory that stays until the communicator is gone.
///
/// # Safety
/// `*request` is a request that no other thread uses; the function may be called from any thread with this context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_request_detach(
    request: *mut *mut Request,
    released: Callback,
    context: *mut c_void,
) -> Status {
    guard(None, || {
        // SAFETY: the caller's promise.
        let request = unsafe { take(request)? };
        if let Some(notify) = Notify::new(released, context) {
            request.released.then(notify);
        }
        Ok(())
    })
}
