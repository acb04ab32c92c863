//! Progress without a caller: a thread begins what was submitted, drives it to its end and reports that, so operations
//! go on while the program computes.
//!
//! The thread works in passes. Each begins what was submitted, drives one thing, and reports what has ended: the oldest
//! host collective if there is one, else the tree or messages. A pass holds the communicator's lock. It ends early if a
//! caller waits for the lock, unless a host collective runs, which only messages interrupt: its peers may wait for them
//! before they enter the collective.

use super::connections::{Posted, PostedUntil};
use super::core::{Core, lock};
use super::data_path::{DataPath, Deadline};
use super::error::{Error, OutputState, StartError};
use super::operations::{Awaited, CounterSnapshot, NextStep, Operations};
use super::options::CallOptions;
use super::submissions::{Submission, Submissions};
use super::task::{Finished, Post, Refused, Task, Work};
use super::thread_progress::ThreadProgress;
use crate::exec::message::{self, PostError};
use crate::exec::{ExecError, Mesh};
use crate::transport::packets::MAX_OPS;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use sumac_hal::ids::Rank;
use sumac_hal::op::OpDesc;

impl DataPath {
    /// Report the operations that have ended. Returns whether one has failed.
    pub(super) fn report_operations(&mut self) -> bool {
        let Some(progress) = &mut self.progress else { return false };
        let mut has_failed = false;
        let submissions = Arc::clone(&progress.submissions);
        let mut begun = std::mem::take(&mut progress.begun);
        begun.retain(|&(id, task)| {
            let Task::Operation(handle) = task else { return true };
            self.try_finish(handle);
            if self.operations.unfinished(handle).is_some() || self.operations.is_running(handle) {
                return true;
            }
            let ended = self.ended.clone().unwrap_or(Error::PathLost);
            let (owned, result) = self.take_started(handle).unwrap_or((None, Err(ended)));
            has_failed |= result.is_err();
            if result.is_err() {
                self.refuse_submissions();
            }
            submissions.end(id, Finished::Operation(owned, result));
            false
        });
        // What an end calls may have submitted more, but the communicator's lock is held, so nothing was begun.
        self.progress.iter_mut().for_each(|progress| progress.begun.append(&mut begun));
        has_failed
    }

    /// Refuse what comes if the communicator has ended: before a call returns the error, so that the next one finds it.
    fn refuse_submissions(&self) {
        if let (Some(ended), Some(progress)) = (&self.ended, &self.progress) {
            progress.submissions.refuse(&ended.clone().with_output(OutputState::Elements(Vec::new())));
        }
    }

    /// Report the messages that have ended; those that fail do so with `error`.
    fn report_messages(&mut self, mesh: &mut Mesh, error: &Error) {
        let Some(progress) = &mut self.progress else { return };
        let submissions = Arc::clone(&progress.submissions);
        progress.begun.retain(|&(id, task)| {
            let Task::Message(ticket) = task else { return true };
            let finished = match mesh.take(ticket) {
                Some((peer, buffer)) => Finished::Message(Some(buffer), Ok(peer)),
                None => match mesh.take_back(ticket) {
                    Some(buffer) => Finished::Message(Some(buffer), Err(error.clone())),
                    None => return true,
                },
            };
            submissions.end(id, finished);
            false
        });
    }

    /// Post the messages that were submitted, and report those that have ended, beside work that has the connections.
    pub(super) fn serve_messages(&mut self, mesh: &mut Mesh) {
        let Some(progress) = &mut self.progress else { return };
        while let Some(Submission { id, work }) = progress.submissions.next(false) {
            let Work::Message(post) = work else { continue };
            match post.post_on(mesh) {
                Ok(ticket) => progress.begun.push((id, Task::Message(ticket))),
                Err(PostError { error, buffer }) => {
                    progress.submissions.end(id, Finished::Message(Some(buffer), Err(error.into())));
                }
            }
        }
        self.report_messages(mesh, &Error::PathLost);
    }

    /// Return whether there is something that host work must be interrupted for, which gives way to everything
    /// (`yields`) or to messages only.
    pub(super) fn interrupts_host_work(&mut self, yields: bool) -> bool {
        self.report_operations();
        let Some(progress) = &self.progress else { return false };
        let submissions = &progress.submissions;
        submissions.clear_bell();
        let completed_below = self.tree.completed_below();
        let is_schedule_ready =
            || self.operations.has_schedules() && self.operations.blocked_schedule(completed_below).is_none();
        let is_due = || progress.overdue().is_some();
        let is_wanted = || submissions.has_work() || submissions.has_callers() || submissions.is_over();
        submissions.has_messages() || yields && (is_wanted() || is_schedule_ready() || is_due())
    }
}

impl Core {
    /// Begin work.
    ///
    /// # Errors
    /// The reason, and the work.
    pub(super) fn begin(&mut self, work: Work) -> Result<Task, Refused> {
        match work {
            Work::Operation(operation) => self.start(operation).map(Task::Operation),
            Work::Message(Post { peer, direction, tag, buffer }) => {
                let posted = self.post_message(Post { peer, direction, tag, buffer }).map(Task::Message);
                posted.map_err(|StartError { error, buffer }| {
                    let work = Work::Message(Post { peer, direction, tag, buffer });
                    Box::new(StartError { error, buffer: work })
                })
            }
        }
    }

    /// Begin what was submitted, as far as there is room.
    pub(crate) fn serve_submissions(&mut self) {
        let Some(submissions) = self.data.progress.as_ref().map(|progress| Arc::clone(&progress.submissions)) else {
            return;
        };
        while let Some(Submission { id, work }) = submissions.next(self.data.has_room()) {
            match self.begin(work) {
                Ok(task) => self.data.progress.iter_mut().for_each(|progress| progress.begun.push((id, task))),
                Err(refused) => {
                    let StartError { error, buffer: work } = *refused;
                    // It was submitted before the end.
                    let error = if let Error::Ended(ended) = error { *ended } else { error };
                    self.data.refuse_submissions();
                    let finished = match work {
                        Work::Operation(operation) => Finished::Operation(Some(operation.into_owned()), Err(error)),
                        Work::Message(post) => Finished::Message(Some(post.buffer), Err(error)),
                    };
                    submissions.end(id, finished);
                }
            }
        }
    }

    /// Do one pass. Returns how long there is nothing to do unless work comes; `None` if the next pass follows.
    fn progress(&mut self) -> Option<Idle> {
        self.data.reclaim_dropped();
        self.serve_submissions();
        if self.end_overdue() {
            self.report_ended();
            return None;
        }
        let deadline = self.earliest(Submissions::first_deadline);
        let messages = self.messages_in_flight();
        let mut idle = None;
        match self.data.next_step(Awaited::All) {
            // An error has ended the communicator, and all its operations.
            NextStep::RunSchedule if !self.is_schedule_blocked() => _ = self.run_next_schedule(deadline),
            NextStep::RunSchedule | NextStep::DriveTree if messages == 0 => self.drive_tree(deadline),
            _ if messages > 0 => self.drive_messages(messages),
            _ => idle = Some(Idle(self.data.pump(None))),
        }
        self.report_ended();
        idle
    }

    /// Report everything that has ended.
    pub(super) fn report_ended(&mut self) {
        if self.data.report_operations() {
            self.set_end_reported();
        }
        let ended = self.data.ended.clone();
        // An end that no call has reported is the error of the next one.
        if !self.is_end_unreported() {
            self.data.refuse_submissions();
        }
        if self.messages_in_flight() == 0 {
            return;
        }
        if let Some(ended) = &ended {
            let (rank, reason) = (Rank(self.data.config.rank), ended.to_string());
            let cancelled = self.with_connections(|_, connections| {
                message::cancel(&mut connections.mesh, ExecError::Interrupted { rank, reason });
                Ok(())
            });
            // Lost connections have ended.
            drop(cancelled);
        }
        self.report_all_messages(ended.as_ref().unwrap_or(&Error::PathLost));
    }

    /// Return the earliest of the deadlines that `deadline` looks at, or that of a call that begins now.
    fn earliest(&self, deadline: impl Fn(&Submissions) -> Option<Deadline>) -> Deadline {
        let earliest = self.data.progress.as_ref().and_then(|progress| deadline(&progress.submissions));
        earliest.unwrap_or_else(|| self.deadline(&CallOptions::default()))
    }

    fn messages_in_flight(&self) -> usize {
        self.data.progress.as_ref().map_or(0, ThreadProgress::messages)
    }

    fn is_schedule_blocked(&self) -> bool {
        self.data.operations.blocked_schedule(self.data.tree.completed_below()).is_some()
    }

    /// End the communicator if an operation is overdue that was begun, because other ranks may have its result. One
    /// that was not begun is refused. Messages have the deadline of their connections. Returns whether any has ended.
    fn end_overdue(&mut self) -> bool {
        let Some(progress) = &self.data.progress else { return false };
        match progress.overdue() {
            Some((_, waited, Some(Task::Operation(handle)))) => {
                let Some(started) = self.data.operations.unfinished(handle) else { return false };
                let (desc, begun) = (started.desc, started.begun);
                self.end_operations(Error::Deadline { desc, waited }, &desc, begun);
                true
            }
            Some((id, waited, None)) => {
                let Some(Work::Operation(operation)) = progress.submissions.take_back(id) else { return false };
                let error = Error::TooManyInFlight { limit: MAX_OPS, waited };
                progress.submissions.end(id, Finished::Operation(Some(operation.into_owned()), Err(error)));
                true
            }
            Some((_, _, Some(_))) | None => false,
        }
    }

    /// Drive the tree until something happens.
    fn drive_tree(&mut self, deadline: Deadline) {
        let stepped = self.data.step(None, deadline);
        match (self.resume(stepped, deadline), self.data.operations.oldest()) {
            // The next pass ends the operation that is overdue.
            (Ok(_) | Err(Error::Deadline { .. }), _) | (Err(_), None) => {}
            (Err(error), Some((desc, begun))) => self.end_operations(error, &desc, begun),
        }
    }

    /// End the communicator, and find out which operations fail with it.
    fn end_operations(&mut self, error: Error, desc: &OpDesc, begun: CounterSnapshot) {
        self.end(error, desc, begun);
        let handles = self.data.operations.handles();
        handles.iter().for_each(|&handle| self.data.try_finish(handle));
        if !self.data.operations.has_failed() {
            // All were complete, so none returns the error.
            self.set_end_unreported();
        }
    }

    /// Drive messages, of which this many have not been reported, and the tree beside them, until something happens.
    fn drive_messages(&mut self, messages: usize) {
        // An operation that is overdue interrupts this, and is not the messages' error.
        let deadline = self.earliest(Submissions::message_deadline);
        let driven = self.with_connections(|core, connections| {
            let until = PostedUntil::AnyComplete(messages, deadline.0);
            core.drive_host(&mut Posted { mesh: &mut connections.mesh, until }, deadline)
        });
        if let Err(error) = self.message_result(driven, deadline) {
            self.report_all_messages(&error);
        }
    }

    /// Report the messages that have ended; those that fail, because the connections have ended, do so with `error`.
    fn report_all_messages(&mut self, error: &Error) {
        let reported = self.with_connections(|core, connections| {
            core.data.report_messages(&mut connections.mesh, error);
            Ok(())
        });
        if let (Err(error), Some(progress)) = (reported, &mut self.data.progress) {
            // The connections are lost, and all messages with them.
            for (id, _) in progress.begun.extract_if(.., |(_, task)| matches!(task, Task::Message(_))) {
                progress.submissions.end(id, Finished::Message(None, Err(error.clone())));
            }
        }
    }

    /// End everything without touching it again: the state may be inconsistent.
    fn abandon_all(&mut self, error: &Error) {
        self.note_end(error);
        self.data.operations = Operations::new(MAX_OPS);
        self.data.host.lose();
    }
}

/// There is nothing to do for this long; `None`: until work comes.
struct Idle(Option<Duration>);

/// Start the progress thread of a communicator.
///
/// # Errors
/// The system's.
pub(super) fn start(core: Weak<Mutex<Core>>, submissions: Arc<Submissions>) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name("progress".into()).spawn(move || {
        let error = run(&core, &submissions);
        submissions.close(&error);
    })
}

/// Work until the communicator is gone. Returns what later submissions end with.
fn run(core: &Weak<Mutex<Core>>, submissions: &Submissions) -> Error {
    while !submissions.is_over() {
        // The communicator is freed by whoever drops its last share, which waits for this thread.
        let Some(core) = core.upgrade() else { break };
        let mut core = lock(&core);
        let idle = loop {
            match catch_unwind(AssertUnwindSafe(|| core.progress())) {
                Ok(None) if submissions.has_callers() || submissions.is_over() => break None,
                Ok(None) => {}
                Ok(Some(idle)) => break Some(idle),
                Err(_) => {
                    let what = "the progress thread panicked; its report is in the log".into();
                    let error = Error::Schedule(ExecError::Invalid { what });
                    core.abandon_all(&error);
                    return error;
                }
            }
        };
        drop(core);
        submissions.let_callers_pass();
        if let Some(Idle(timeout)) = idle {
            submissions.wait_for_work(timeout);
        }
    }
    Error::Cancelled
}
