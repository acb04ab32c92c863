//! Operations and messages on memory that stays the caller's, for programs in other languages and for memory of other
//! libraries: any collective, described at run time.
//!
//! The Rust API is safe because started operations own their buffers. Here the caller promises instead that the memory
//! stays valid ([`Communicator::start_raw`]).

use super::calls::check;
use super::{CallOptions, Communicator, Counts, Error, Outcome, RawBuffers};
use crate::engine::{ForeignMemory, Keep, Operation, Post, SharedCore, Task, Work};
use crate::exec::message::Direction;
use std::any::Any;
use std::fmt;
use std::time::Duration;
use sumac_hal::ids::Rank;
use sumac_hal::op::OpDesc;

impl Communicator {
    /// Start an operation on memory that stays the caller's: any collective, in place or from an input to an output.
    /// [`crate::comm`] has a table of the buffer lengths. `keep` is dropped once the operation has ended and was waited
    /// for, or the request was dropped. The progress thread may drop it, which holds up all operations meanwhile: that
    /// must not wait for anything, nor call anything of the communicator.
    ///
    /// With [`Progress::Thread`](super::Progress::Thread), some errors come with [`Request::wait`].
    ///
    /// # Safety
    /// Until `keep` is dropped, the memory is valid for reads from any thread, and its output for writes; nobody else
    /// writes to the memory, nor reads its output.
    ///
    /// # Errors
    /// [`Error::Argument`] if type and operator do not go together, a buffer has the wrong length or buffers overlap;
    /// otherwise any [`Error`] if the operation cannot be started. Then `keep` has been dropped.
    pub unsafe fn start_raw(
        &self,
        desc: &OpDesc,
        buffers: RawBuffers,
        keep: Box<dyn Any + Send>,
        options: &CallOptions,
    ) -> Result<Request, Error> {
        check(desc)?;
        // SAFETY: the caller's promise.
        let task = unsafe { self.begin_raw(desc, None, buffers, keep, options) }?;
        Ok(Request::new(&self.core, task))
    }

    /// Start an operation on blocks of any length on memory that stays the caller's, as [`Communicator::run_v`] does.
    /// Input and output are separate.
    ///
    /// # Safety
    /// As for [`Communicator::start_raw`].
    ///
    /// # Errors
    /// As for [`Communicator::start_raw`].
    pub unsafe fn start_raw_v(
        &self,
        desc: &OpDesc,
        counts: Counts,
        buffers: RawBuffers,
        keep: Box<dyn Any + Send>,
        options: &CallOptions,
    ) -> Result<Request, Error> {
        let desc = counts.describe(desc)?;
        check(&desc)?;
        // SAFETY: the caller's promise.
        let task = unsafe { self.begin_raw(&desc, Some(counts), buffers, keep, options) }?;
        Ok(Request::new(&self.core, task))
    }

    /// Start to send `len` bytes at `bytes` to rank `to`, which receives them with the same tag.
    ///
    /// # Safety
    /// Until `keep` is dropped, the memory is valid for reads from any thread, and nobody writes to it.
    ///
    /// # Errors
    /// [`Error`] if the message cannot be posted. Then `keep` has been dropped.
    pub unsafe fn start_send_raw(
        &self,
        to: u32,
        tag: u32,
        (bytes, len): (*const u8, usize),
        keep: Box<dyn Any + Send>,
    ) -> Result<Request, Error> {
        // SAFETY: the caller's promise; what is sent is only read.
        unsafe { self.post_raw(Some(to), tag, Direction::Send, (bytes.cast_mut(), len), keep) }
    }

    /// Start to receive `len` bytes to `bytes` from rank `from`, which sends them with the same tag.
    ///
    /// # Safety
    /// Until `keep` is dropped, the memory is valid for writes from any thread, and nobody else reads or writes it.
    ///
    /// # Errors
    /// [`Error`] if the message cannot be posted. Then `keep` has been dropped.
    pub unsafe fn start_receive_raw(
        &self,
        from: u32,
        tag: u32,
        (bytes, len): (*mut u8, usize),
        keep: Box<dyn Any + Send>,
    ) -> Result<Request, Error> {
        // SAFETY: the caller's promise.
        unsafe { self.post_raw(Some(from), tag, Direction::Receive, (bytes, len), keep) }
    }

    /// Start to receive `len` bytes to `bytes` from any other rank ([`Communicator::receive_any`]), as
    /// [`Communicator::start_receive_raw`] does. [`Request::source`] says from which.
    ///
    /// # Safety
    /// As for [`Communicator::start_receive_raw`].
    ///
    /// # Errors
    /// As for [`Communicator::start_receive_raw`].
    pub unsafe fn start_receive_any_raw(
        &self,
        tag: u32,
        (bytes, len): (*mut u8, usize),
        keep: Box<dyn Any + Send>,
    ) -> Result<Request, Error> {
        // SAFETY: the caller's promise.
        unsafe { self.post_raw(None, tag, Direction::Receive, (bytes, len), keep) }
    }

    unsafe fn begin_raw(
        &self,
        desc: &OpDesc,
        counts: Option<Counts>,
        buffers: RawBuffers,
        keep: Keep,
        options: &CallOptions,
    ) -> Result<Task, Error> {
        buffers.check()?;
        // SAFETY: the caller's promise.
        let (memory, output) = unsafe { buffers.into_memory(Some(keep)) };
        let output = output.map(|output| Box::new(output) as Box<_>);
        let operation = Operation { desc: *desc, counts, memory: Box::new(memory), output, options: *options };
        self.core.begin(Work::Operation(operation)).map_err(|refused| refused.error)
    }

    unsafe fn post_raw(
        &self,
        peer: Option<u32>,
        tag: u32,
        direction: Direction,
        (bytes, len): (*mut u8, usize),
        keep: Keep,
    ) -> Result<Request, Error> {
        RawBuffers::InPlace { bytes, len }.check()?;
        // SAFETY: the caller's promise; what is sent is only read.
        let memory = unsafe { ForeignMemory::new(bytes, len, Some(keep)) };
        let post = Post { peer: peer.map(Rank), direction, tag, buffer: Box::new(memory) };
        let task = self.core.begin(Work::Message(post)).map_err(|refused| refused.error)?;
        Ok(Request::new(&self.core, task))
    }
}

/// An operation or a message on memory that stays the caller's.
///
/// Dropping the request detaches it: the operation continues, because the other ranks need it, and its memory must stay
/// valid until `keep` is dropped.
#[must_use = "`wait` returns the result"]
pub struct Request {
    core: SharedCore,
    /// `None` once it was waited for.
    task: Option<Task>,
    source: Option<u32>,
    /// What is called at the end, if callers make progress.
    on_completion: Option<Box<dyn FnOnce() + Send>>,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").field("task", &self.task).finish_non_exhaustive()
    }
}

impl Request {
    fn new(core: &SharedCore, task: Task) -> Self {
        Self { core: core.clone(), task: Some(task), source: None, on_completion: None }
    }

    /// Return whether it has completed or failed, so that [`Request::wait`] returns at once. With
    /// [`Progress::Thread`](super::Progress::Thread) this does not wait; otherwise a host collective runs here.
    pub fn test(&mut self) -> bool {
        let has_ended = self.task.is_none_or(|task| self.core.has_ended(task));
        if has_ended {
            self.complete();
        }
        has_ended
    }

    /// Wait until it has ended, within the deadline of its options. Returns the outcome of an operation, `None` for a
    /// message.
    ///
    /// # Errors
    /// [`Error`] if it failed. [`Error::Argument`] if it was waited for before.
    pub fn wait(&mut self) -> Result<Option<Outcome>, Error> {
        self.finish(None)
    }

    /// Wait as [`Request::wait`] does, for at most `limit`. If that passes, the communicator ends, because other ranks
    /// may have the result already.
    ///
    /// # Errors
    /// As for [`Request::wait`].
    pub fn wait_for(&mut self, limit: Duration) -> Result<Option<Outcome>, Error> {
        self.finish(Some(limit))
    }

    fn finish(&mut self, deadline: Option<Duration>) -> Result<Option<Outcome>, Error> {
        let again = || Error::Argument("this request was waited for before".into());
        let task = self.task.take().ok_or_else(again)?;
        let finished = self.core.finish(task, &CallOptions { deadline, ..CallOptions::default() });
        self.complete();
        self.source = finished.peer().map(|peer| peer.0);
        finished.into_result()
    }

    /// Return the rank at the other end of a message that has completed and was waited for.
    pub const fn source(&self) -> Option<u32> {
        self.source
    }

    /// Call `f` once it has ended; at once if it has. With [`Progress::Thread`](super::Progress::Thread) the thread
    /// calls it, which holds up all operations meanwhile: it must not wait for anything, nor call anything of the
    /// communicator but to start operations. Otherwise the test or the wait that sees the end calls it. A second one
    /// replaces the first.
    pub fn on_completion(&mut self, f: impl FnOnce() + Send + 'static) {
        match self.task {
            Some(task) => self.on_completion = self.core.on_end(task, Box::new(f)),
            None => f(),
        }
    }

    fn complete(&mut self) {
        if let Some(on_completion) = self.on_completion.take() {
            on_completion();
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(task) = self.task {
            self.core.detach(task);
        }
    }
}
