//! How callers begin work, test it and wait for it: on the communicator itself, or through its progress thread.

use super::counts::Counts;
use super::error::{Error, StartError};
use super::foreign::{ForeignMemory, RawBuffers};
use super::options::{CallOptions, Outcome, Outstanding};
use super::shared::SharedCore;
use super::submissions::Callback;
use super::task::{Finished, Operation, Post, Refused, Task, Work};
use crate::exec::Buffers;
use crate::exec::message::Message;
use std::time::Instant;
use sumac_hal::op::OpDesc;

impl SharedCore {
    /// Begin work.
    ///
    /// # Errors
    /// The reason, and the work, whose memory is unchanged. With a progress thread, most reasons come at its end.
    pub(crate) fn begin(&self, work: Work) -> Result<Task, Refused> {
        if self.is_forked() {
            return Err(Box::new(StartError { error: Error::Forked, buffer: work }));
        }
        let Some(submissions) = self.submissions() else {
            return match self.lock() {
                Ok(mut core) => core.begin(work),
                Err(error) => Err(Box::new(StartError { error, buffer: work })),
            };
        };
        if let Err(error) = work.check(self.shares().place) {
            return Err(Box::new(StartError { error, buffer: work }));
        }
        let deadline = match &work {
            Work::Operation(operation) => operation.options.deadline,
            Work::Message(_) => None,
        };
        let id = submissions.submit(work, deadline.unwrap_or(self.shares().deadline))?;
        self.notices().wake();
        Ok(Task::Submitted(id))
    }

    /// Return whether a task has ended. With a progress thread this does not wait. Without one it drives the task, and
    /// runs a host collective to its end.
    pub(crate) fn has_ended(&self, task: Task) -> bool {
        if self.is_forked() {
            return true;
        }
        match (task, self.submissions()) {
            (Task::Submitted(id), Some(submissions)) => submissions.has_ended(id),
            (Task::Submitted(_), None) => true,
            (Task::Operation(handle), _) => {
                self.lock().map_or(true, |mut core| core.test(handle, &CallOptions::default()))
            }
            (Task::Message(ticket), _) => self.lock().map_or(true, |mut core| core.test_message(ticket)),
        }
    }

    /// Wait for a task, and return how it ended. A second wait finds nothing.
    pub(crate) fn finish(&self, task: Task, options: &CallOptions) -> Finished {
        let failed = |error| Finished::Operation(None, Err(error));
        if self.is_forked() {
            return failed(Error::Forked);
        }
        match (task, self.submissions()) {
            (Task::Submitted(id), Some(submissions)) => {
                if let Some(limit) = options.deadline {
                    submissions.limit(id, limit);
                    // The thread may sleep until a later deadline.
                    self.notices().wake();
                }
                submissions.wait(id)
            }
            (Task::Submitted(_), None) => failed(Error::Argument("this belongs to another communicator".into())),
            (Task::Operation(handle), _) => match self.lock() {
                Ok(mut core) => {
                    let (owned, result) = core.finish(handle, options);
                    Finished::Operation(owned, result)
                }
                Err(error) => failed(error),
            },
            (Task::Message(ticket), _) => match self.lock().map(|mut core| core.wait_message(ticket, options)) {
                Ok(Ok((peer, buffer))) => Finished::Message(Some(buffer), Ok(peer)),
                Ok(Err(failed)) => Finished::Message(failed.buffer, Err(failed.error)),
                Err(error) => Finished::Message(None, Err(error)),
            },
        }
    }

    /// Nobody will wait for a task: it goes on, because the other ranks need it, and its memory is freed at its end.
    pub(crate) fn detach(&self, task: Task) {
        if self.is_forked() {
            return;
        }
        match (task, self.submissions()) {
            (Task::Submitted(id), Some(submissions)) => submissions.detach(id),
            (Task::Submitted(_), None) => {}
            (Task::Operation(handle), _) => self.reclaim(|dropped| dropped.push(handle)),
            (Task::Message(ticket), _) => self.reclaim(|dropped| dropped.push_message(ticket)),
        }
    }

    /// Call `callback` when a task has ended, at once if it has. Returns it if nobody will: callers make progress.
    pub(crate) fn on_end(&self, task: Task, callback: Callback) -> Option<Callback> {
        match (task, self.submissions()) {
            (Task::Submitted(id), Some(submissions)) if !self.is_forked() => {
                submissions.on_end(id, callback);
                None
            }
            _ => Some(callback),
        }
    }

    /// Return whether the progress thread runs all calls.
    pub(crate) fn has_progress_thread(&self) -> bool {
        self.submissions().is_some()
    }

    /// Run an operation to its end by the progress thread.
    pub(crate) fn run_by_thread(
        &self,
        desc: &OpDesc,
        counts: Option<Counts>,
        buffers: &mut Buffers<'_>,
        options: &CallOptions,
    ) -> Result<Outcome, Error> {
        // SAFETY: the buffers are borrowed until this returns, which it does when the operation has ended and the
        // thread has returned or dropped its memory: `finish` waits without a limit of its own.
        let (memory, output) = unsafe { RawBuffers::from(buffers).into_memory(None) };
        let output = output.map(|output| Box::new(output) as Box<_>);
        let operation = Operation { desc: *desc, counts, memory: Box::new(memory), output, options: *options };
        let task = self.begin(Work::Operation(operation)).map_err(|refused| refused.error)?;
        self.finish(task, &CallOptions::default()).into_operation().1
    }

    /// Transfer messages between the caller's buffers.
    pub(crate) fn transfer(&self, messages: &mut [Message<'_>]) -> Result<(), Error> {
        let options = CallOptions::default();
        if !self.has_progress_thread() {
            return self.lock()?.transfer(messages, &options);
        }
        let post = |message: &mut Message<'_>| {
            let (peer, tag, direction) = message.address();
            let (bytes, len) = match message {
                Message::Send { bytes, .. } => (bytes.as_ptr().cast_mut(), bytes.len()),
                Message::Receive { bytes, .. } => (bytes.as_mut_ptr(), bytes.len()),
            };
            // SAFETY: the buffers are borrowed until this returns, which it does when all messages have ended and the
            // thread has returned or dropped their memory. What is sent is not written to.
            let memory = unsafe { ForeignMemory::new(bytes, len, None) };
            let post = Post { peer: Some(peer), direction, tag, buffer: Box::new(memory) };
            self.begin(Work::Message(post)).map_err(|refused| refused.error)
        };
        // All are waited for, also if one is refused or fails.
        let posted: Vec<_> = messages.iter_mut().map(post).collect();
        let ended: Vec<_> = posted.into_iter().map(|task| self.finish(task?, &options).into_result()).collect();
        ended.into_iter().try_for_each(|result| result.map(|_| ()))
    }

    /// Wait until the progress thread has ended everything that was submitted, at most until `until`.
    pub(crate) fn drain(&self, until: Instant) {
        if let Some(submissions) = self.submissions().filter(|_| !self.is_forked()) {
            submissions.drain(until);
        }
    }

    /// Return the started operations and messages that the communicator holds.
    pub(crate) fn outstanding(&self) -> Outstanding {
        match self.submissions() {
            _ if self.is_forked() => Outstanding::default(),
            Some(submissions) => submissions.outstanding(),
            None => self.lock().map_or_else(|_| Outstanding::default(), |mut core| core.outstanding()),
        }
    }
}
