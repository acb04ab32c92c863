//! Progress: packets of the tree, and host collectives, which run in the order of posting.
//!
//! Callers make progress: `wait`, `test` and blocking calls drive the tree's endpoint. A host collective runs when it
//! is waited for; meanwhile it also drives the endpoint, and changes the view if the tree is lost.

pub(super) use super::core::Connections;
use super::core::Core;
use super::error::{Error, OutputState};
use super::extent::Extent;
use super::started::TreeBuffers;
use crate::exec::{Buffers, Context, ExecError, Interrupt, execute};
use crate::schedule::{ALGORITHMS, Place, Problem, Schedule, pairwise};
use crate::transport::memory::Transfer;
use crate::transport::packets::{self, Event, OpId};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, OpDesc, Path};
use sumac_hal::reduce::Kernel;
use sumac_hal::wire::StragglerLimit;

/// When a call must end, and how long it may take.
pub(super) type Deadline = (Instant, Duration);

/// The buffers that a blocking call borrows from its caller.
pub(super) struct BorrowedBuffers<'c, 'b> {
    pub(super) op: OpId,
    pub(super) extent: &'c Extent,
    pub(super) buffers: &'c mut Buffers<'b>,
}

/// The result of running a blocking call's operation in the tree.
pub(super) enum TreeRun {
    /// The result is in the call's buffers.
    Done(Option<OpId>, Transfer),
    /// The tree was lost before all ranks had entered the operation; start it again.
    Restart,
}

/// The buffers of all operations in the tree: of a blocking call, and of started operations.
pub(super) struct InFlight<'c, 'b> {
    pub(super) owned: &'c mut BTreeMap<OpId, TreeBuffers>,
    pub(super) borrowed: Option<BorrowedBuffers<'c, 'b>>,
}

impl packets::Buffers for InFlight<'_, '_> {
    fn input(&self, op: OpId) -> &[u8] {
        match &self.borrowed {
            Some(borrowed) if borrowed.op == op => borrowed.extent.input(borrowed.buffers),
            _ => self.owned.get(&op).map_or(&[], TreeBuffers::input),
        }
    }

    fn output(&mut self, op: OpId) -> &mut [u8] {
        match &mut self.borrowed {
            Some(borrowed) if borrowed.op == op => borrowed.extent.output(borrowed.buffers),
            _ => self.owned.get_mut(&op).map_or(&mut [], TreeBuffers::output),
        }
    }
}

impl Core {
    pub(super) fn run_in_tree(
        &mut self,
        (desc, limit): (OpDesc, Option<StragglerLimit>),
        extent: &Extent,
        buffers: &mut Buffers<'_>,
        deadline: Deadline,
    ) -> Result<TreeRun, Error> {
        let posted = match self.post(&desc, Path::Tree, limit, Some((extent, &mut *buffers))) {
            Err(error) if self.is_recoverable(&error) => {
                let changed = self.change_view(None, &error, deadline);
                changed.map_err(|error| error.with_output(OutputState::Elements(Vec::new())))?;
                return Ok(TreeRun::Restart);
            }
            posted => posted?,
        };
        let Some((op, transfer)) = posted else { return Ok(TreeRun::Restart) };
        while op.0 >= self.completed_below {
            let borrowed = BorrowedBuffers { op, extent, buffers: &mut *buffers };
            match self.step(Some(borrowed), deadline) {
                Err(error) if self.is_recoverable(&error) => {
                    let borrowed = BorrowedBuffers { op, extent, buffers: &mut *buffers };
                    return match self.change_view(Some(borrowed), &error, deadline) {
                        Ok(completed_below) if op < completed_below => Ok(TreeRun::Done(None, transfer)),
                        Ok(_) => Ok(TreeRun::Restart),
                        Err(error) if op.0 < self.completed_below => {
                            self.note_unreported_end(error);
                            Ok(TreeRun::Done(None, transfer))
                        }
                        Err(error) => Err(error.with_output(self.output_state(op))),
                    };
                }
                stepped => stepped?,
            }
        }
        Ok(TreeRun::Done(Some(op), transfer))
    }

    /// Drive the tree once, then block until the next packet.
    pub(super) fn step(&mut self, borrowed: Option<BorrowedBuffers<'_, '_>>, deadline: Deadline) -> Result<(), Error> {
        let wait = self.advance(borrowed, deadline)?;
        if let Some(tree) = self.tree.as_mut().filter(|_| !wait.is_zero()) {
            tree.wait(Some(wait));
        }
        Ok(())
    }

    /// Drive the tree once without blocking. Returns how long the caller may block, or why there is no point in
    /// waiting. [`Error::Deadline`] comes without the operation's name.
    pub(super) fn advance(
        &mut self,
        borrowed: Option<BorrowedBuffers<'_, '_>>,
        (at, limit): Deadline,
    ) -> Result<Duration, Error> {
        let completed = self.completed_below;
        let next = self.pump(borrowed);
        if let Some(error) = self.tree_error() {
            return Err(error);
        }
        if self.completed_below > completed {
            return Ok(Duration::ZERO);
        }
        if self.notices.is_cancelled() {
            return Err(Error::Cancelled);
        }
        if self.notices.first_usable_view() > self.job_view() {
            return Err(Error::PathLost);
        }
        let now = Instant::now();
        if now >= at {
            return Err(Error::Deadline { desc: OpDesc::barrier(), waited: limit });
        }
        match self.check_grace_period() {
            ControlFlow::Break(()) => Err(self.loss_error()),
            ControlFlow::Continue(poll) => Ok(next.into_iter().chain(poll).fold(at - now, Duration::min)),
        }
    }

    /// Return the error that ended the tree, if any.
    pub(super) fn tree_error(&self) -> Option<Error> {
        self.tree.as_ref().and_then(|tree| tree.error().map(|error| tree.to_error(error)))
    }

    /// Drive the tree without blocking. Returns when it must be driven again.
    pub(super) fn pump(&mut self, borrowed: Option<BorrowedBuffers<'_, '_>>) -> Option<Duration> {
        let waited_for = borrowed.as_ref().map(|borrowed| borrowed.op);
        self.reclaim_dropped();
        let mut buffers = InFlight { owned: &mut self.owned, borrowed };
        let next = self.tree.as_mut()?.pump(&mut buffers);
        let completed = self.completed_below;
        while let Some((event, completion)) =
            self.tree.as_mut().and_then(|tree| Some((tree.poll_event()?, tree.completion_info())))
        {
            if let Event::Completed(op) = event {
                self.completed_below = op.0 + 1;
                let is_wanted = waited_for == Some(op) || self.owned.contains_key(&op);
                if is_wanted && !self.reclaim_completed(op) {
                    self.keep_completion(op, completion);
                }
            }
        }
        if self.completed_below > completed {
            self.publish_watermark();
        }
        next
    }

    /// Post an operation in the tree: with buffers if it runs there, without to announce what runs elsewhere.
    pub(super) fn post(
        &mut self,
        desc: &OpDesc,
        path: Path,
        limit: Option<StragglerLimit>,
        buffers: Option<(&Extent, &mut Buffers<'_>)>,
    ) -> Result<Option<(OpId, Transfer)>, Error> {
        self.tree.as_mut().map(|tree| tree.post(desc, path, limit, buffers)).transpose()
    }

    /// Announce to the tree that this rank runs an operation as a host collective, so that ranks that call different
    /// operations find out. A lost tree takes no announcement, and a host collective does not need it.
    pub(super) fn announce_to_tree(
        &mut self,
        desc: &OpDesc,
        path: Path,
        limit: Option<StragglerLimit>,
    ) -> Result<Option<OpId>, Error> {
        match self.post(desc, path, limit, None) {
            Err(error) if error.is_loss_of_tree() => Ok(None),
            posted => Ok(posted?.map(|(op, _)| op)),
        }
    }

    /// Make the schedule for a path. A communicator of one rank takes any.
    pub(super) fn schedule(&self, desc: &OpDesc, path: Path, buffers: &Buffers<'_>) -> Result<Schedule, Error> {
        self.schedule_at(self.place, desc, path, buffers)
    }

    /// Make the schedule for another place than the communicator's.
    pub(super) fn schedule_at(
        &self,
        place: Place,
        desc: &OpDesc,
        path: Path,
        buffers: &Buffers<'_>,
    ) -> Result<Schedule, Error> {
        let count = usize::try_from(desc.count).map_err(|_| Error::Argument(format!("{} elements", desc.count)))?;
        if let (Collective::AllToAll, Buffers::InPlace(_)) = (desc.collective, buffers) {
            let ranks = place.ranks() as usize;
            if !count.is_multiple_of(ranks) {
                let what = format!(
                    "{count} elements in place are not {ranks} equal blocks; use separate input and output buffers"
                );
                return Err(Error::Argument(what));
            }
            return Ok(pairwise::all_to_all_in_place(place, count / ranks));
        }
        let of = ALGORITHMS.iter().filter(|algorithm| algorithm.pattern.collective() == desc.collective);
        let algorithm = of.into_iter().find(|algorithm| path == Path::Local || algorithm.path() == path);
        let no_schedule = || Error::Argument(format!("there is no {} schedule for {}", path.name(), desc.collective));
        let problem = Problem { place, count, root: desc.root, tree: self.selection.declared.tree() };
        let schedule = (algorithm.ok_or_else(no_schedule)?.schedule)(&problem);
        if matches!(buffers, Buffers::InPlace(_)) && schedule.layout().in_place_at.is_none() {
            return Err(Error::Argument(format!("{desc} by {} needs separate input and output buffers", path.name())));
        }
        Ok(schedule)
    }

    /// Run the schedule of a call.
    pub(super) fn run_schedule(
        &mut self,
        (desc, path): (&OpDesc, Path),
        schedule: &Schedule,
        buffers: Buffers<'_>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let kernel = kernel(desc);
        let table_version = self.selection.table.version;
        self.with_progress(deadline, |connections, progress| {
            let ctx = connections.next((desc, path), table_version, deadline);
            // Send the announcement to the tree before the schedule begins.
            progress.check()?;
            execute(&mut connections.mesh, schedule, kernel.as_ref(), buffers, &ctx, progress)
        })
    }

    /// Use the connections between ranks, and drive the tree meanwhile.
    pub(super) fn with_progress<R>(
        &mut self,
        deadline: Deadline,
        work: impl FnOnce(&mut Connections, &mut TreeProgress<'_>) -> Result<R, ExecError>,
    ) -> Result<R, Error> {
        self.reclaim_dropped();
        let Some(mut connections) = self.connections.take() else { return Err(connections_missing()) };
        self.sent_before_call_bytes = connections.mesh.sent_bytes();
        let mut progress = self.progress(deadline);
        let result = work(&mut connections, &mut progress);
        let ended = progress.ended.take();
        self.connections = Some(connections);
        match (result, ended) {
            (Err(_), Some(error)) => Err(error),
            (Err(_), None) if self.notices.is_cancelled() => Err(Error::Cancelled),
            (result, _) => Ok(result?),
        }
    }

    /// Return the error that all ranks get for a failed host collective. Neighbours that notice a mismatch word it
    /// differently; the tree's root reports the same error to all, so wait for it if the operation was announced.
    pub(super) fn wait_for_group_error(&mut self, announced: Option<OpId>, error: Error, (at, _): Deadline) -> Error {
        let Some(announced) = announced.filter(|_| matches!(error, Error::Mismatch { .. } | Error::Schedule(_))) else {
            return error;
        };
        let limit = Instant::now() + GROUP_ERROR_TIMEOUT;
        let deadline = (at.min(limit), GROUP_ERROR_TIMEOUT);
        while self.tree.is_some() && announced.0 >= self.completed_below {
            match self.step(None, deadline) {
                Ok(()) => {}
                Err(group_error) if group_error.is_group_error() => return group_error,
                Err(_) => return error,
            }
        }
        error
    }

    fn progress(&mut self, deadline: Deadline) -> TreeProgress<'_> {
        let checked = Instant::now();
        TreeProgress { core: self, deadline, wake_at: None, checked, is_loss_logged: false, ended: None }
    }
}

impl Connections {
    /// Begin the next operation.
    fn next(&mut self, (desc, path): (&OpDesc, Path), table_version: u32, (deadline, _): Deadline) -> Context {
        self.scheduled += 1;
        let signature = desc.signature(path, table_version);
        Context { op_index: self.scheduled - 1, signature, desc: *desc, path, deadline }
    }

    /// Run a schedule to completion.
    pub(super) fn run(
        &mut self,
        (desc, path): (&OpDesc, Path),
        table_version: u32,
        schedule: &Schedule,
        buffers: Buffers<'_>,
        (deadline, interrupt): (Deadline, &mut dyn Interrupt),
    ) -> Result<(), ExecError> {
        let ctx = self.next((desc, path), table_version, deadline);
        execute(&mut self.mesh, schedule, kernel(desc).as_ref(), buffers, &ctx, interrupt)
    }
}

fn kernel(desc: &OpDesc) -> Option<Kernel> {
    desc.dtype.zip(desc.op).and_then(|(dtype, op)| Kernel::new(dtype, op))
}

/// An earlier call panicked while it used the connections.
fn connections_missing() -> Error {
    Error::Schedule(ExecError::Invalid {
        what: "the connections to other ranks were lost when an earlier call panicked".into(),
    })
}

/// Drives the rank's end of the tree from within a host collective's poll loop, and changes the view if necessary,
/// because other ranks may have to recover before they come to the operation that this one waits for.
pub(super) struct TreeProgress<'c> {
    core: &'c mut Core,
    deadline: Deadline,
    wake_at: Option<Instant>,
    /// When the tree was last checked.
    checked: Instant,
    is_loss_logged: bool,
    /// The error that ended the tree or its recovery.
    ended: Option<Error>,
}

impl TreeProgress<'_> {
    /// Interrupt the host collective with an error.
    fn end(&mut self, error: Error) -> ExecError {
        let reason = error.to_string();
        self.ended = Some(error);
        ExecError::Interrupted { rank: Rank(self.core.config.rank), reason }
    }

    fn change_view(&mut self, cause: &Error) -> Result<(), ExecError> {
        self.core.change_view(None, cause, self.deadline).map(|_| ()).map_err(|error| self.end(error))
    }

    /// Handle an error of the tree.
    fn on_tree_error(&mut self, error: Error) -> Result<(), ExecError> {
        if error.is_group_error() {
            return Err(self.end(error));
        }
        if self.core.is_recoverable(&error) {
            return self.change_view(&error);
        }
        if !std::mem::replace(&mut self.is_loss_logged, true) {
            // The host collective does not need the tree; the next operation in the tree reports the loss.
            let (job, rank) = (&self.core.config.job, self.core.config.rank);
            tracing::warn!(job, rank, %error, "the tree was lost during a host collective");
        }
        Ok(())
    }
}

impl Interrupt for TreeProgress<'_> {
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        self.core.tree.as_ref().and_then(|tree| tree.poll_fd())
    }

    fn check(&mut self) -> Result<(), ExecError> {
        let rank = Rank(self.core.config.rank);
        if self.core.notices.is_cancelled() {
            // The error that the other ranks get.
            return Err(ExecError::RankLost { rank });
        }
        self.checked = Instant::now();
        let next = self.core.pump(None);
        let is_wanted = self.core.notices.first_usable_view() > self.core.job_view();
        let error = self.core.tree_error().or(is_wanted.then_some(Error::PathLost));
        if let Some(error) = error.filter(|_| self.core.tree.is_some()) {
            self.on_tree_error(error)?;
        }
        // The end of a connection that was never made cannot be detected, so rely on what the controller and other
        // ranks report.
        if self.core.check_grace_period().is_break() {
            let cause = self.core.loss_error();
            match cause {
                error if error.is_group_error() => return Err(self.end(error)),
                _ if self.core.channel.is_some() && self.core.ended.is_none() => self.change_view(&cause)?,
                Error::RankLost { rank } => return Err(ExecError::RankLost { rank }),
                _ => {}
            }
        }
        let next = self.core.tree.as_ref().and_then(|tree| tree.next_poll_after(next));
        self.wake_at = next.map(|next| Instant::now() + next);
        Ok(())
    }

    /// Cancellation and reports of lost ranks and trees wake the tree's port, which an executor does not wait on, so it
    /// checks regularly.
    fn wake_at(&self) -> Option<Instant> {
        let next_check = self.checked + CANCEL_POLL_INTERVAL;
        Some(self.wake_at.map_or(next_check, |at| at.min(next_check)))
    }
}

/// How long a failed host collective waits for the tree's root to report the error.
const GROUP_ERROR_TIMEOUT: Duration = Duration::from_millis(500);

/// How long a host collective may run on after cancellation.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(50);
