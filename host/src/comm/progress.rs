//! How operations come on: packets of the tree, and schedules that run in the order of posting.
//!
//! Progress is made by whoever calls: `wait`, `test` and blocking calls drive the tree's endpoint; a schedule runs
//! when it is waited for, and drives the endpoint meanwhile, and repairs it if it is lost.

use super::core::Core;
pub(super) use super::core::Lines;
use super::error::{Error, Fresh};
use super::extent::Extent;
use super::started::InTree;
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
use sumac_hal::wire::Limit;

/// When a call has to end, and how long it was given.
pub(super) type Deadline = (Instant, Duration);

/// The buffers of the operation that a blocking call lends.
pub(super) struct Lent<'c, 'b> {
    pub(super) op: OpId,
    pub(super) extent: &'c Extent,
    pub(super) buffers: &'c mut Buffers<'b>,
}

/// What became of a blocking call's operation in the tree.
pub(super) enum InTheTree {
    /// The result is in its buffers.
    Done(Option<OpId>, Transfer),
    /// The tree was lost before all ranks had entered the operation.
    BeginsAgain,
}

/// The buffers of all operations in the tree: the one lent by a blocking call, and the started ones.
pub(super) struct InFlight<'c, 'b> {
    pub(super) owned: &'c mut BTreeMap<OpId, InTree>,
    pub(super) lent: Option<Lent<'c, 'b>>,
}

impl packets::Buffers for InFlight<'_, '_> {
    fn input(&self, op: OpId) -> &[u8] {
        match &self.lent {
            Some(lent) if lent.op == op => lent.extent.input(lent.buffers),
            _ => self.owned.get(&op).map_or(&[], InTree::input),
        }
    }

    fn output(&mut self, op: OpId) -> &mut [u8] {
        match &mut self.lent {
            Some(lent) if lent.op == op => lent.extent.output(lent.buffers),
            _ => self.owned.get_mut(&op).map_or(&mut [], InTree::output),
        }
    }
}

impl Core {
    pub(super) fn run_in_tree(
        &mut self,
        (desc, limit): (OpDesc, Option<Limit>),
        extent: &Extent,
        buffers: &mut Buffers<'_>,
        deadline: Deadline,
    ) -> Result<InTheTree, Error> {
        let posted = match self.post(&desc, Path::Tree, limit, Some((extent, &mut *buffers))) {
            Err(error) if self.is_repairable(&error) => {
                let changed = self.change_view(None, &error, deadline);
                changed.map_err(|error| error.with_fresh(Fresh::Elements(Vec::new())))?;
                return Ok(InTheTree::BeginsAgain);
            }
            posted => posted?,
        };
        let Some((op, transfer)) = posted else { return Ok(InTheTree::BeginsAgain) };
        while op.0 >= self.completed_below {
            let lent = Lent { op, extent, buffers: &mut *buffers };
            match self.step(Some(lent), deadline) {
                Err(error) if self.is_repairable(&error) => {
                    let lent = Lent { op, extent, buffers: &mut *buffers };
                    return match self.change_view(Some(lent), &error, deadline) {
                        Ok(completed_below) if op < completed_below => Ok(InTheTree::Done(None, transfer)),
                        Ok(_) => Ok(InTheTree::BeginsAgain),
                        Err(error) if op.0 < self.completed_below => {
                            self.note_untold_end(error);
                            Ok(InTheTree::Done(None, transfer))
                        }
                        Err(error) => Err(error.with_fresh(self.fresh(op))),
                    };
                }
                stepped => stepped?,
            }
        }
        Ok(InTheTree::Done(Some(op), transfer))
    }

    /// Drive the tree once and wait for the next packet.
    pub(super) fn step(&mut self, lent: Option<Lent<'_, '_>>, deadline: Deadline) -> Result<(), Error> {
        let wait = self.advance(lent, deadline)?;
        if let Some(tree) = self.tree.as_mut().filter(|_| !wait.is_zero()) {
            tree.wait(Some(wait));
        }
        Ok(())
    }

    /// Drive the tree once without waiting; returns how long there is nothing more to do, or why it is of no use to
    /// wait any longer. A deadline is one of an operation that is still to be named.
    pub(super) fn advance(&mut self, lent: Option<Lent<'_, '_>>, (at, limit): Deadline) -> Result<Duration, Error> {
        let completed = self.completed_below;
        let next = self.pump(lent);
        if let Some(error) = self.tree_error() {
            return Err(error);
        }
        if self.completed_below > completed {
            return Ok(Duration::ZERO);
        }
        if self.lost.is_cancelled() {
            return Err(Error::Cancelled);
        }
        if self.lost.repair_wanted() > self.job_view() {
            return Err(Error::PathLost);
        }
        let now = Instant::now();
        if now >= at {
            return Err(Error::Deadline { desc: OpDesc::barrier(), waited: limit });
        }
        match self.look_in_grace() {
            ControlFlow::Break(()) => Err(self.loss()),
            ControlFlow::Continue(look) => Ok(next.into_iter().chain(look).fold(at - now, Duration::min)),
        }
    }

    /// Return why the tree is at its end, if it is.
    pub(super) fn tree_error(&self) -> Option<Error> {
        self.tree.as_ref().and_then(|tree| tree.error().map(|error| tree.named(error)))
    }

    /// Drive the tree without waiting; returns when it wants to be driven again.
    pub(super) fn pump(&mut self, lent: Option<Lent<'_, '_>>) -> Option<Duration> {
        let waited_for = lent.as_ref().map(|lent| lent.op);
        self.reclaim_dropped();
        let mut buffers = InFlight { owned: &mut self.owned, lent };
        let next = self.tree.as_mut()?.pump(&mut buffers);
        let completed = self.completed_below;
        while let Some((event, verdict)) =
            self.tree.as_mut().and_then(|tree| Some((tree.poll_event()?, tree.verdict())))
        {
            if let Event::Completed(op) = event {
                self.completed_below = op.0 + 1;
                let is_wanted = waited_for == Some(op) || self.owned.contains_key(&op);
                if is_wanted && !self.reclaim_completed(op) {
                    self.keep_verdict(op, verdict);
                }
            }
        }
        if self.completed_below > completed {
            self.publish_landed();
        }
        next
    }

    /// Post an operation in the tree: with its buffers if it runs there, else the tree is told what runs elsewhere.
    pub(super) fn post(
        &mut self,
        desc: &OpDesc,
        path: Path,
        limit: Option<Limit>,
        buffers: Option<(&Extent, &mut Buffers<'_>)>,
    ) -> Result<Option<(OpId, Transfer)>, Error> {
        self.tree.as_mut().map(|tree| tree.post(desc, path, limit, buffers)).transpose()
    }

    /// Tell the tree what this rank calls by a schedule, so that ranks which call different things find out. A tree
    /// that is lost can't be told, and a schedule does not need it.
    pub(super) fn tell_tree(&mut self, desc: &OpDesc, path: Path, limit: Option<Limit>) -> Result<Option<OpId>, Error> {
        match self.post(desc, path, limit, None) {
            Err(error) if error.is_loss_of_tree() => Ok(None),
            posted => Ok(posted?.map(|(op, _)| op)),
        }
    }

    /// Make the schedule of a path; of any path, for a communicator of one rank.
    pub(super) fn schedule(&self, desc: &OpDesc, path: Path, buffers: &Buffers<'_>) -> Result<Schedule, Error> {
        self.schedule_at(self.place, desc, path, buffers)
    }

    /// The same for another place than the communicator's.
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
                let what =
                    format!("{count} elements in place are not {ranks} equal blocks; use an input and an output");
                return Err(Error::Argument(what));
            }
            return Ok(pairwise::all_to_all_in_place(place, count / ranks));
        }
        let of = ALGORITHMS.iter().filter(|algorithm| algorithm.pattern.collective() == desc.collective);
        let algorithm = of.into_iter().find(|algorithm| path == Path::Local || algorithm.path() == path);
        let no_schedule = || Error::Argument(format!("{} is no schedule for {}", path.name(), desc.collective));
        let problem = Problem { place, count, root: desc.root, tree: self.situation.declared.tree() };
        let schedule = (algorithm.ok_or_else(no_schedule)?.schedule)(&problem);
        if matches!(buffers, Buffers::InPlace(_)) && schedule.layout().in_place_at.is_none() {
            return Err(Error::Argument(format!("{desc} by {} needs an input and an output apart", path.name())));
        }
        Ok(schedule)
    }

    /// Run a schedule of what the program calls.
    pub(super) fn run_schedule(
        &mut self,
        (desc, path): (&OpDesc, Path),
        schedule: &Schedule,
        buffers: Buffers<'_>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let kernel = kernel(desc);
        let table_version = self.situation.table.version;
        self.beside(deadline, |lines, along| {
            let ctx = lines.next((desc, path), table_version, deadline);
            // What is told to the tree leaves before the schedule begins.
            along.check()?;
            execute(&mut lines.mesh, schedule, kernel.as_ref(), buffers, &ctx, along)
        })
    }

    /// Put the ways between ranks to work, with the tree beside them.
    pub(super) fn beside<R>(
        &mut self,
        deadline: Deadline,
        work: impl FnOnce(&mut Lines, &mut Along<'_>) -> Result<R, ExecError>,
    ) -> Result<R, Error> {
        self.reclaim_dropped();
        let Some(mut lines) = self.calls.take() else { return Err(at_work()) };
        self.called_bytes = lines.mesh.sent_bytes();
        let mut along = self.along(deadline);
        let result = work(&mut lines, &mut along);
        let ended = along.ended.take();
        self.calls = Some(lines);
        match (result, ended) {
            (Err(_), Some(error)) => Err(error),
            (Err(_), None) if self.lost.is_cancelled() => Err(Error::Cancelled),
            (result, _) => Ok(result?),
        }
    }

    /// Return what a failed schedule's error is to all ranks. Neighbours that notice a mismatch tell the others in their
    /// own words; the tree's root tells all the same, so its word is waited for if there is a tree that was told.
    pub(super) fn verdict(&mut self, told: Option<OpId>, error: Error, (at, _): Deadline) -> Error {
        let Some(told) = told.filter(|_| matches!(error, Error::Mismatch { .. } | Error::Schedule(_))) else {
            return error;
        };
        let limit = Instant::now() + VERDICT;
        let deadline = (at.min(limit), VERDICT);
        while self.tree.is_some() && told.0 >= self.completed_below {
            match self.step(None, deadline) {
                Ok(()) => {}
                Err(word) if word.is_word_of_tree() => return word,
                Err(_) => return error,
            }
        }
        error
    }

    fn along(&mut self, deadline: Deadline) -> Along<'_> {
        let checked = Instant::now();
        Along { core: self, deadline, wake_at: None, checked, is_loss_told: false, ended: None }
    }
}

impl Lines {
    /// Begin the next operation.
    fn next(&mut self, (desc, path): (&OpDesc, Path), table_version: u32, (deadline, _): Deadline) -> Context {
        self.scheduled += 1;
        let signature = desc.signature(path, table_version);
        Context { op_index: self.scheduled - 1, signature, desc: *desc, path, deadline }
    }

    /// Run a schedule to its end.
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

/// A call has panicked in the middle of its work.
fn at_work() -> Error {
    Error::Schedule(ExecError::Invalid { what: "the connections to other ranks went with an earlier call".into() })
}

/// The rank's end of the tree, driven from within a schedule's poll loop; and repaired, as other ranks may have to
/// repair before they come to what this one waits for.
pub(super) struct Along<'c> {
    core: &'c mut Core,
    deadline: Deadline,
    wake_at: Option<Instant>,
    /// When it was last looked at.
    checked: Instant,
    is_loss_told: bool,
    /// What the tree or its repair ended with.
    ended: Option<Error>,
}

impl Along<'_> {
    /// End what runs beside with an error.
    fn end(&mut self, error: Error) -> ExecError {
        let reason = error.to_string();
        self.ended = Some(error);
        ExecError::Interrupted { rank: Rank(self.core.config.rank), reason }
    }

    fn change_view(&mut self, cause: &Error) -> Result<(), ExecError> {
        self.core.change_view(None, cause, self.deadline).map(|_| ()).map_err(|error| self.end(error))
    }

    /// Deal with the end of the tree.
    fn on_tree_error(&mut self, error: Error) -> Result<(), ExecError> {
        if error.is_word_of_tree() {
            return Err(self.end(error));
        }
        if self.core.is_repairable(&error) {
            return self.change_view(&error);
        }
        if !std::mem::replace(&mut self.is_loss_told, true) {
            // The schedule does not need the tree; whoever uses it next hears of its loss.
            let (job, rank) = (&self.core.config.job, self.core.config.rank);
            tracing::warn!(job, rank, %error, "the tree is lost during a schedule");
        }
        Ok(())
    }
}

impl Interrupt for Along<'_> {
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        self.core.tree.as_ref().and_then(|tree| tree.poll_fd())
    }

    fn check(&mut self) -> Result<(), ExecError> {
        let rank = Rank(self.core.config.rank);
        if self.core.lost.is_cancelled() {
            // What it is to the others.
            return Err(ExecError::RankLost { rank });
        }
        self.checked = Instant::now();
        let next = self.core.pump(None);
        let is_wanted = self.core.lost.repair_wanted() > self.core.job_view();
        let error = self.core.tree_error().or(is_wanted.then_some(Error::PathLost));
        if let Some(error) = error.filter(|_| self.core.tree.is_some()) {
            self.on_tree_error(error)?;
        }
        // A rank that has no connection yet can't be missed by its end: what is said is all there is.
        if self.core.look_in_grace().is_break() {
            let cause = self.core.loss();
            match cause {
                word if word.is_word_of_tree() => return Err(self.end(word)),
                _ if self.core.parley.is_some() && self.core.ended.is_none() => self.change_view(&cause)?,
                Error::RankLost { rank } => return Err(ExecError::RankLost { rank }),
                _ => {}
            }
        }
        let next = self.core.tree.as_ref().and_then(|tree| tree.look_after(next));
        self.wake_at = next.map(|next| Instant::now() + next);
        Ok(())
    }

    /// A wish to cancel, the word that a rank is lost and the word that a tree is, wake the tree's port, which an executor
    /// does not wait for: it has a look now and then.
    fn wake_at(&self) -> Option<Instant> {
        let look = self.checked + CANCEL_LATENCY;
        Some(self.wake_at.map_or(look, |at| at.min(look)))
    }
}

/// How long a failed schedule waits for what the tree says of it.
const VERDICT: Duration = Duration::from_millis(500);

/// How long a schedule may go on after it was cancelled.
const CANCEL_LATENCY: Duration = Duration::from_millis(50);
