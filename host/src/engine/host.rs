//! Work on the connections between ranks: host collectives, which run in the order of posting, and what other ranks
//! report when one fails.
//!
//! Invariant: when a host collective begins, all operations that were started before it are complete, those of the tree
//! included. So if the tree is lost, no rank finds that an earlier operation must run between the ranks while others
//! are in a later one.
//!
//! The work pauses when the view is in question, because other ranks may have to recover before they come to it.

use super::connections::{Collective, Connections, HostWork, interrupted, kernel};
use super::core::Core;
use super::data_path::{Beside, DataPath, Deadline, Stop};
use super::decided::Chosen;
use super::error::Error;
use super::operations::{Awaited, NextStep};
use super::options::CallOptions;
use crate::exec::{Buffers, ExecError, Execution, Interrupt, Status};
use crate::schedule::Schedule;
use crate::select::{is_by_rails, part_of};
use crate::transport::packets::OpId;
use std::ops::ControlFlow;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::{OpDesc, Path};

/// Drives the data path beside host work, and pauses the work if the path stops.
struct DriveBeside<'d> {
    data: &'d mut DataPath,
    beside: &'d mut Beside,
    stop: Option<Stop>,
    /// The work gives way to other work.
    yields: bool,
}

impl DriveBeside<'_> {
    /// Return whether something that was submitted must have ended, while this work does not give way to it.
    fn is_overdue(&self) -> bool {
        !self.yields && self.data.progress.as_ref().is_some_and(|progress| progress.overdue().is_some())
    }
}

impl Interrupt for DriveBeside<'_> {
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        self.data.tree.poll_fd()
    }

    fn check(&mut self) -> Result<ControlFlow<()>, ExecError> {
        let rank = Rank(self.data.config.rank);
        if self.data.watch.notices.is_cancelled() {
            // The error that the other ranks get.
            return Err(ExecError::RankLost { rank });
        }
        match self.data.advance_beside(self.beside) {
            Ok(()) if self.is_overdue() => {
                // Completed by whoever knows the operation.
                let error = Error::Deadline { desc: OpDesc::barrier(), waited: Duration::ZERO };
                let interrupted = interrupted(rank, &error);
                self.stop = Some(Stop::Failed(error));
                Err(interrupted)
            }
            Ok(()) if self.data.interrupts_host_work(self.yields) => Ok(ControlFlow::Break(())),
            Ok(()) => Ok(ControlFlow::Continue(())),
            Err(Stop::Failed(Error::RankLost { rank })) => Err(ExecError::RankLost { rank }),
            Err(Stop::Failed(error)) => {
                let interrupted = interrupted(rank, &error);
                self.stop = Some(Stop::Failed(error));
                Err(interrupted)
            }
            Err(stop) => {
                self.stop = Some(stop);
                Ok(ControlFlow::Break(()))
            }
        }
    }

    fn wake_at(&self) -> Option<Instant> {
        Some(self.beside.wake_at())
    }

    fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.data.progress.as_ref().map(|progress| progress.submissions.bell())
    }

    fn message_completed(&mut self) -> ControlFlow<()> {
        if self.data.progress.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

impl Core {
    /// Lend the connections to `work`.
    pub(super) fn with_connections<R>(
        &mut self,
        work: impl FnOnce(&mut Self, &mut Connections) -> Result<R, Error>,
    ) -> Result<R, Error> {
        self.data.reclaim_dropped();
        let mut connections = self.data.host.take()?;
        let result = work(self, &mut connections);
        self.data.host.give_back(connections);
        result
    }

    /// Drive host work to its end, and the tree meanwhile. If the view is in question, the work is paused and the view
    /// changed. Beside the progress thread's work, messages are posted; work that yields then ends early.
    pub(super) fn drive_host(&mut self, work: &mut dyn HostWork, deadline: Deadline) -> Result<(), Error> {
        let (mut beside, yields) = (Beside::new(), work.yields());
        loop {
            let mut drive = DriveBeside { data: &mut self.data, beside: &mut beside, stop: None, yields };
            let result = work.drive(&mut drive);
            match (result, drive.stop) {
                (Ok(Status::Done), _) => return Ok(()),
                (Ok(Status::Paused), Some(Stop::ViewInQuestion(cause))) => {
                    if let Err(error) = self.change_view(None, &cause, deadline) {
                        work.cancel(interrupted(Rank(self.data.config.rank), &error));
                        return Err(error);
                    }
                    beside.view_changed();
                }
                (Ok(Status::Paused), _) if yields => return Ok(()),
                (Ok(Status::Paused), _) => self.data.serve_messages(work.mesh()),
                (Err(_), Some(Stop::Failed(error))) => return Err(error),
                (Err(_), _) if self.notices().is_cancelled() => return Err(Error::Cancelled),
                (Err(error), _) => return Err(error.into()),
            }
        }
    }

    /// Run the schedule of call `number` ([`crate::exec::Context::number`]).
    pub(super) fn run_schedule(
        &mut self,
        (desc, path, number): (&OpDesc, Path, u32),
        schedule: &Schedule,
        buffers: Buffers<'_>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        // The parts of one by the rails do not finish it.
        let kernel = if is_by_rails(path) { kernel(&part_of(desc)) } else { kernel(desc) };
        let table_version = self.data.selection.context().table.version;
        self.with_connections(|core, connections| {
            let ctx = connections.next((desc, path, number), table_version, deadline.0);
            let execution = Execution::new(&mut connections.mesh, schedule, kernel.as_ref(), buffers, &ctx)?;
            core.drive_host(&mut Collective::new(execution), deadline)
        })
    }

    /// Run a host collective. Earlier started ones run first, because the other ranks wait for them in that order.
    pub(super) fn run_by_schedule(
        &mut self,
        (desc, options): (&OpDesc, &CallOptions),
        (chosen, schedule): (&Chosen, Option<Arc<Schedule>>),
        buffers: Buffers<'_>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let path = chosen.path;
        let is_in_place = matches!(buffers, Buffers::InPlace(_));
        let schedule = schedule.map_or_else(|| self.data.schedule(desc, path, is_in_place), Ok)?;
        let announced = self.announce_call((desc, options), chosen, deadline)?;
        self.run_announced((desc, path), &schedule, buffers, announced, deadline)
    }

    /// Run what was started before a host collective, and announce it to the tree.
    pub(super) fn announce_call(
        &mut self,
        (desc, options): (&OpDesc, &CallOptions),
        chosen: &Chosen,
        deadline: Deadline,
    ) -> Result<Option<OpId>, Error> {
        let view = self.data.watch.epoch();
        self.finish_started(deadline)?;
        let limit = self.data.policy(options).limit();
        if self.data.watch.epoch() == view {
            return self.data.announce(desc, chosen, limit);
        }
        // The path is the same in the new view, but it may not be announced.
        let chosen = self.data.choose(desc, options)?;
        self.data.announce(desc, &chosen, limit)
    }

    /// Run a host collective that was announced to the tree.
    pub(super) fn run_announced(
        &mut self,
        (desc, path): (&OpDesc, Path),
        schedule: &Schedule,
        buffers: Buffers<'_>,
        announced: Option<OpId>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let view = self.data.tree.view();
        // Other ranks know of it, so no error is a rejection.
        let operation = (desc, path, self.data.operations.scheduled_number());
        let result = self.run_schedule(operation, schedule, buffers, deadline).map_err(Error::ending);
        // A new tree does not know the announcement.
        let announced = announced.filter(|_| self.data.tree.view() == view);
        result.map_err(|error| {
            let error = self.wait_for_group_error(announced, error, deadline);
            self.agreed_loss_error(error, deadline)
        })
    }

    /// Return the error that all ranks get for a failed host collective. Neighbours that notice a mismatch word it
    /// differently; the tree's root reports the same error to all, so wait for it if the operation was announced.
    pub(super) fn wait_for_group_error(&mut self, announced: Option<OpId>, error: Error, (at, _): Deadline) -> Error {
        let Some(announced) = announced.filter(|_| matches!(error, Error::Mismatch { .. } | Error::Schedule(_))) else {
            return error;
        };
        let limit = Instant::now() + GROUP_ERROR_TIMEOUT;
        let deadline = (at.min(limit), GROUP_ERROR_TIMEOUT);
        while self.data.tree.is_there() && !self.data.tree.is_complete(announced) {
            match self.data.step(None, deadline) {
                Ok(()) => {}
                Err(Stop::Failed(group_error)) if group_error.is_group_error() => return group_error,
                Err(_) => return error,
            }
        }
        error
    }

    /// Complete all started operations: run host collectives in the order of posting, and wait for the tree.
    pub(super) fn finish_started(&mut self, deadline: Deadline) -> Result<(), Error> {
        loop {
            match self.data.next_step(Awaited::All) {
                NextStep::Return => return self.data.ended.clone().map_or(Ok(()), Err),
                NextStep::RunSchedule => self.run_next_schedule(deadline)?,
                NextStep::DriveTree => {
                    let stepped = self.data.step(None, deadline);
                    self.resume(stepped, deadline)?;
                }
            }
        }
    }

    /// Run the oldest started host collective, once the operations of the tree that were started before it are
    /// complete: if the tree is lost, these may become host collectives, which must then run before it. Returns early
    /// if the view has changed.
    pub(super) fn run_next_schedule(&mut self, deadline: Deadline) -> Result<(), Error> {
        while let Some((desc, begun)) = self.data.operations.blocked_schedule(self.data.tree.completed_below()) {
            let stepped = self.data.step(None, deadline);
            let resumed = self.resume(stepped, deadline).map_err(|error| self.end(error, &desc, begun))?;
            if resumed.is_none() {
                return Ok(());
            }
        }
        let Some((handle, mut started)) = self.data.operations.begin_schedule() else { return Ok(()) };
        let (desc, path) = (started.desc, started.chosen.path);
        // The tree of this number may be gone when the schedule has run.
        let announced = started.tree_op.take();
        let result = started.buffers.as_mut().map_or(Ok(None), |owned| {
            if is_by_rails(path) {
                return self.run_parts((&desc, path), owned.borrow_buffers(), announced, deadline);
            }
            let none = || Error::Argument(format!("{desc} was started without a schedule")).ending();
            let schedule = started.schedule.as_deref().ok_or_else(none)?;
            let buffers = owned.borrow_buffers();
            let ran = match &started.counts {
                Some(counts) => self.run_by_counts((&desc, path, counts), schedule, buffers, announced, deadline),
                None => self.run_announced((&desc, path), schedule, buffers, announced, deadline),
            };
            ran.map(|()| None)
        });
        let result = result.map_err(|error| self.end(error, &desc, started.begun));
        let outcome = self.data.outcome(&started.chosen, None, started.begun);
        let ended = result.clone().map(|block| outcome.with_block(block));
        self.data.operations.end_schedule(handle, started, ended);
        result.map(|_| ())
    }
}

/// How long a failed host collective waits for the tree's root to report the error.
const GROUP_ERROR_TIMEOUT: Duration = Duration::from_millis(500);
