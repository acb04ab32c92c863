//! The data path of a communicator: the tree's end, the connections, and the operations in flight on both.
//!
//! It makes progress, and recovers nothing: what it cannot handle it returns as a [`Stop`], a value that the driver
//! ([`super::core`]) takes up. All waiting is in [`DataPath::step`], and in host work, which pauses instead
//! ([`super::connections`]).

use super::compare::{Comparison, is_left_to_ranks};
use super::config::JoinConfig;
use super::connections::HostPath;
use super::decided::Chosen;
use super::error::{Error, OutputState};
use super::extent::Extent;
use super::in_flight::BorrowedBuffers;
use super::membership::Inbox;
use super::operations::{Awaited, Completed, CounterSnapshot, Ending, NextStep, Operations, Started};
use super::options::{CallOptions, Outcome, Outstanding};
use super::owned::Owned;
use super::selection::Selection;
use super::straggler::Policy;
use super::thread_progress::ThreadProgress;
use super::tree_end::TreeEnd;
use super::watch::Watch;
use crate::exec::Buffers;
use crate::recovery::Watermark;
use crate::schedule::{ALGORITHMS, Place, Problem, Schedule, Shape, hierarchical_pairwise};
use crate::select::{Algo, is_by_rails};
use crate::transport::memory::Transfer;
use crate::transport::packets::OpId;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::op::{Collective, OpDesc, Path};
use sumac_hal::wire::{RankMask, StragglerLimit};

/// When a call must end, and how long it may take.
pub(super) type Deadline = (Instant, Duration);

/// Why the data path does not go on.
#[derive(Debug)]
pub(super) enum Stop {
    /// The view is in question: the tree or ranks are lost, or other ranks change the view. Recover, and go on.
    ViewInQuestion(Error),
    /// The call fails.
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// What host work knows of the tree beside it.
pub(super) struct Beside {
    /// When the tree was last checked, and when it must be.
    checked: Instant,
    wake_at: Option<Instant>,
    is_loss_logged: bool,
}

impl Beside {
    pub(super) fn new() -> Self {
        Self { checked: Instant::now(), wake_at: None, is_loss_logged: false }
    }

    /// The view has changed: check the tree at once.
    pub(super) fn view_changed(&mut self) {
        self.wake_at = Some(Instant::now());
    }

    /// Return when the tree must be checked. Cancellation and reports of lost ranks and trees wake the tree's port,
    /// which an executor does not wait on, so it checks regularly.
    pub(super) fn wake_at(&self) -> Instant {
        let next_check = self.checked + CANCEL_POLL_INTERVAL;
        self.wake_at.map_or(next_check, |at| at.min(next_check))
    }
}

/// A communicator's data path.
pub(super) struct DataPath {
    pub(super) config: JoinConfig,
    pub(super) place: Place,
    pub(super) tree: TreeEnd,
    pub(super) host: HostPath,
    pub(super) comparison: Comparison,
    pub(super) operations: Operations,
    pub(super) selection: Selection,
    pub(super) watch: Watch,
    /// Where other ranks ask for this rank's results; `None` without recovery.
    pub(super) inbox: Option<Arc<Inbox>>,
    /// What the progress thread works on; `None` if callers make progress.
    pub(super) progress: Option<ThreadProgress>,
    /// The error that ended the communicator.
    pub(super) ended: Option<Error>,
}

impl DataPath {
    /// Tell an error that recovery may handle from one that fails the call.
    fn stop(&self, error: Error) -> Stop {
        let is_loss = self.tree.is_there() && error.is_loss_of_tree() || matches!(error, Error::RankLost { .. });
        if self.may_recover() && is_loss { Stop::ViewInQuestion(error) } else { Stop::Failed(error) }
    }

    /// Return whether the view can change.
    pub(super) const fn may_recover(&self) -> bool {
        self.inbox.is_some() && self.ended.is_none()
    }

    /// Return whether a view change may recover from an error, or make it the same on all ranks.
    pub(super) fn is_recoverable(&self, error: &Error) -> bool {
        matches!(self.stop(error.clone()), Stop::ViewInQuestion(_))
    }

    pub(super) fn needs_view_change(&self) -> bool {
        self.watch.needs_view_change(self.tree.excluded_ranks())
    }

    /// Return why the view must change, as reported by the controller.
    pub(super) fn loss_error(&self) -> Error {
        self.watch.loss_error(self.tree.excluded_ranks())
    }

    /// Return the error that ends this communicator on all ranks, if it has arrived. The rank that reported it may be
    /// gone.
    pub(super) fn group_error(&mut self) -> Option<Error> {
        self.pump(None);
        self.tree.error().filter(Error::is_group_error).or_else(|| self.watch.notices.job_error())
    }

    /// Drive the tree once, then block until the next packet.
    pub(super) fn step(&mut self, borrowed: Option<BorrowedBuffers<'_, '_>>, deadline: Deadline) -> Result<(), Stop> {
        let wait = self.advance(borrowed, deadline)?;
        if !wait.is_zero() {
            self.tree.wait(wait);
        }
        Ok(())
    }

    /// Drive the tree once without blocking. Returns how long the caller may block, or why there is no point in
    /// waiting. [`Error::Deadline`] comes without the operation's name.
    pub(super) fn advance(
        &mut self,
        borrowed: Option<BorrowedBuffers<'_, '_>>,
        (at, limit): Deadline,
    ) -> Result<Duration, Stop> {
        let completed = self.tree.completed_below();
        let next = self.pump(borrowed);
        if let Some(error) = self.tree.error() {
            return Err(self.stop(error));
        }
        if self.tree.completed_below() > completed {
            self.comparison.put_off();
            return Ok(Duration::ZERO);
        }
        if self.watch.notices.is_cancelled() {
            return Err(Error::Cancelled.into());
        }
        if self.watch.is_tree_lost() {
            return Err(self.stop(Error::PathLost));
        }
        let now = Instant::now();
        if now >= at {
            return Err(Error::Deadline { desc: OpDesc::barrier(), waited: limit }.into());
        }
        let next = next.into_iter().chain(self.compare_calls(now)?);
        match self.watch.check_grace_period(self.tree.excluded_ranks()) {
            ControlFlow::Break(()) => Err(self.stop(self.loss_error())),
            ControlFlow::Continue(poll) => Ok(next.chain(poll).fold(at - now, Duration::min)),
        }
    }

    /// Look at the calls of other ranks, if it is time; returns when to look next.
    fn compare_calls(&mut self, now: Instant) -> Result<Option<Duration>, Error> {
        let in_tree = (&self.operations, self.tree.completed_below());
        let table_version = self.selection.context().table.version;
        let one_machine = self.selection.is_on_one_machine().then_some(table_version);
        self.comparison.compare(now, &mut self.host, in_tree, one_machine)
    }

    /// Drive the tree beside host work, which goes on unless the view is in question or all ranks have failed.
    pub(super) fn advance_beside(&mut self, beside: &mut Beside) -> Result<(), Stop> {
        beside.checked = Instant::now();
        let next = self.pump(None);
        let error = self.tree.error().or_else(|| self.watch.is_tree_lost().then_some(Error::PathLost));
        match error.filter(|_| self.tree.is_there()).map(|error| self.stop(error)) {
            Some(Stop::Failed(error)) if error.is_group_error() => return Err(Stop::Failed(error)),
            Some(Stop::Failed(error)) if !std::mem::replace(&mut beside.is_loss_logged, true) => {
                // Host work does not need the tree; the next operation in the tree reports the loss.
                let (job, rank) = (&self.config.job, self.config.rank);
                crate::log::info!(job, rank, %error, "the tree was lost during a host collective");
            }
            Some(stop @ Stop::ViewInQuestion(_)) => return Err(stop),
            Some(Stop::Failed(_)) | None => {}
        }
        // The end of a connection that was never made cannot be detected, so rely on what the controller and other
        // ranks report.
        if self.watch.check_grace_period(self.tree.excluded_ranks()).is_break() {
            match self.loss_error() {
                error if error.is_group_error() => return Err(Stop::Failed(error)),
                cause if self.may_recover() => return Err(Stop::ViewInQuestion(cause)),
                error @ Error::RankLost { .. } => return Err(Stop::Failed(error)),
                _ => {}
            }
        }
        beside.wake_at = self.tree.next_poll_after(next).map(|next| Instant::now() + next);
        Ok(())
    }

    /// Drive the tree without blocking. Returns when it must be driven again.
    pub(super) fn pump(&mut self, borrowed: Option<BorrowedBuffers<'_, '_>>) -> Option<Duration> {
        let waited_for = borrowed.as_ref().map(|borrowed| borrowed.op);
        self.reclaim_dropped();
        let next = self.tree.pump(&mut self.operations.in_flight(borrowed));
        let mut has_completed = false;
        while let Some((op, completion)) = self.tree.poll_completed() {
            has_completed = true;
            let completed = self.operations.complete(op);
            if completed == Completed::Started || waited_for == Some(op) {
                self.tree.keep_completion(op, completion);
            }
        }
        if has_completed {
            self.publish_watermark();
        }
        next
    }

    /// Return the watermarks of the results that this rank has, and of what it has posted.
    pub(super) fn watermarks(&self) -> (Watermark, Watermark) {
        let (have, posted) = self.tree.chunks();
        (Watermark::new(self.tree.view(), have), Watermark::new(self.tree.view(), posted))
    }

    /// Publish which results this rank has, for other ranks that ask.
    pub(super) fn publish_watermark(&self) {
        self.inbox.iter().for_each(|inbox| inbox.publish(self.watermarks().0));
    }

    /// Post an operation in the tree; `None` if there is none.
    pub(super) fn post(
        &mut self,
        desc: &OpDesc,
        limit: Option<StragglerLimit>,
        buffers: (&Extent, &mut Buffers<'_>),
    ) -> Result<Option<(OpId, Transfer)>, Stop> {
        self.tree.post(desc, Path::Tree, limit, Some(buffers)).map_err(|error| self.stop(error))
    }

    /// Announce to the tree that this rank runs an operation as a host collective, so that ranks that call different
    /// operations find out. A lost tree takes no announcement, and a host collective does not need it; nor is one
    /// announced that other ranks may have begun before there was this tree, or that ranks compare by themselves
    /// ([`super::compare`]).
    pub(super) fn announce(
        &mut self,
        desc: &OpDesc,
        chosen: &Chosen,
        limit: Option<StragglerLimit>,
    ) -> Result<Option<OpId>, Error> {
        if !chosen.is_announced
            || self.selection.is_on_one_machine() && is_left_to_ranks(desc, chosen.path, limit, self.place.ranks())
        {
            return Ok(None);
        }
        let posted = self.tree.post(desc, chosen.path, limit, None);
        if matches!(&posted, Err(error) if error.is_loss_of_tree()) { Ok(None) } else { Ok(posted?.map(|(op, _)| op)) }
    }

    /// Launch a started operation.
    ///
    /// # Errors
    /// The reason, and the operation's buffers, which are unchanged; nothing was posted.
    pub(super) fn launch(
        &mut self,
        handle: u64,
        started: &mut Started,
        mut owned: Owned,
    ) -> Result<(), Box<(Stop, Owned)>> {
        let (desc, limit) = (started.desc, started.limit);
        if started.chosen.path == Path::Tree {
            let extent = owned.extent.clone();
            match self.post(&desc, limit, (&extent, &mut owned.borrow_buffers())) {
                Ok(Some((op, transfer))) => {
                    (started.tree_op, started.transfer) = (Some(op), Some(transfer));
                    self.operations.own(op, handle, owned);
                    return Ok(());
                }
                // The tree was lost since it was selected.
                Ok(None) => return Err(Box::new((self.stop(Error::PathLost), owned))),
                Err(stop) => return Err(Box::new((stop, owned))),
            }
        }
        let schedule = match (started.schedule.take(), started.chosen.path) {
            (None, path) if !is_by_rails(path) => self.schedule(&desc, path, owned.is_in_place()).map(Some),
            (schedule, _) => Ok(schedule),
        };
        let announced = schedule.and_then(|schedule| Ok((self.announce(&desc, &started.chosen, limit)?, schedule)));
        let (announced, schedule) = match announced {
            Ok(announced) => announced,
            Err(error) => return Err(Box::new((self.stop(error), owned))),
        };
        (started.tree_op, started.transfer, started.schedule) = (announced, None, schedule);
        started.buffers = Some(owned);
        self.operations.queue_schedule(handle);
        Ok(())
    }

    /// Return the schedule for a path. A communicator of one rank takes any.
    pub(super) fn schedule(&mut self, desc: &OpDesc, path: Path, is_in_place: bool) -> Result<Arc<Schedule>, Error> {
        let place = self.place;
        let make = |selection: &Selection| make_schedule(selection, place, (desc, path), is_in_place);
        self.selection.schedule((desc, path, is_in_place), make)
    }

    /// Make the schedule for another place than the communicator's.
    pub(super) fn schedule_at(
        &self,
        place: Place,
        desc: &OpDesc,
        path: Path,
        buffers: &Buffers<'_>,
    ) -> Result<Schedule, Error> {
        make_schedule(&self.selection, place, (desc, path), matches!(buffers, Buffers::InPlace(_)))
    }

    /// Return what applies to a call, beside its operation.
    pub(super) fn policy<'c>(&'c self, options: &'c CallOptions) -> Policy<'c> {
        let shards = self.selection.context().tree.as_ref().map_or(1, |facts| facts.shards);
        Policy::new(options, &self.config, (&self.tree, shards))
    }

    /// Return the algorithms that the path of a call is selected among.
    pub(super) fn algo(&self, desc: &OpDesc, options: &CallOptions) -> Result<Algo, Error> {
        match self.config.world {
            // It takes the only path there is.
            1 => Ok(Algo::Auto),
            _ => self.policy(options).algo(desc),
        }
    }

    /// Return a number that changes whenever calls may be selected in another way, and the excluded ranks.
    #[inline]
    pub(super) fn generation(&mut self) -> (u64, RankMask) {
        let (position, excluded) = (self.watch.notices.queue_position(), self.tree.excluded_ranks());
        (self.selection.generation(position, excluded), excluded)
    }

    /// Select the path of the call that is running.
    pub(super) fn choose(&mut self, desc: &OpDesc, options: &CallOptions) -> Result<Chosen, Error> {
        let (call, algo) = (self.operations.calling.unwrap_or_default(), self.algo(desc, options)?);
        self.choose_by((call, *desc, algo))
    }

    /// Select the path of a call.
    pub(super) fn choose_by(&mut self, (call, desc, algo): (u64, OpDesc, Algo)) -> Result<Chosen, Error> {
        if self.config.world == 1 {
            return Ok(Chosen { path: Path::Local, fallback: None, is_announced: true });
        }
        self.selection.choose((call, &desc, algo), (&self.config, &self.watch.notices))
    }

    /// Return the bytes sent and the contributions retransmitted so far.
    fn counters(&self) -> (u64, u64) {
        let (bytes, retransmits) = self.tree.counters();
        (bytes + self.host.sent_bytes(), retransmits)
    }

    pub(super) fn snapshot(&self, at: Instant) -> CounterSnapshot {
        let (wire_bytes, retransmits) = self.counters();
        CounterSnapshot { view: self.tree.view(), wire_bytes, retransmits, at }
    }

    pub(super) fn outcome(&self, chosen: &Chosen, transfer: Option<Transfer>, begun: CounterSnapshot) -> Outcome {
        let (wire_bytes, retransmits) = self.counters();
        Outcome {
            path: chosen.path,
            trees: u32::from(chosen.path == Path::Tree),
            transfer,
            fallback: chosen.fallback.clone(),
            wire_bytes: wire_bytes - begun.wire_bytes,
            retransmits: retransmits - begun.retransmits,
            recovered: self.tree.view() > begun.view,
            slowest: None,
            missing: self.tree.excluded_ranks(),
        }
    }

    pub(super) fn has_room(&self) -> bool {
        self.tree.has_room() && self.operations.has_room()
    }

    /// Return what a caller that waits does next.
    pub(super) fn next_step(&self, awaited: Awaited) -> NextStep {
        self.operations.next_step(awaited, self.tree.completed_below(), self.ended.is_some())
    }

    /// Record the end of a started operation in the tree, if it has ended.
    pub(super) fn try_finish(&mut self, handle: u64) {
        let ending = self.operations.ending(handle, self.tree.completed_below(), self.ended.is_some());
        let Some((ending, started)) = ending.zip(self.operations.get(handle)) else { return };
        let finished = match (ending, &self.ended) {
            (Ending::Cut(op), Some(error)) => {
                let output = op.map_or(OutputState::Elements(Vec::new()), |op| self.tree.output_state(op));
                Err(error.clone().with_output(output))
            }
            (Ending::Complete(op) | Ending::Cut(op), _) => {
                let outcome = self.outcome(&started.chosen, started.transfer, started.begun);
                Ok(self.tree.with_completion(op, outcome))
            }
        };
        if let Some(started) = self.operations.get_mut(handle) {
            started.finished = Some(finished);
        }
    }

    /// Take a started operation that has ended: its buffers and its result.
    pub(super) fn take_started(&mut self, handle: u64) -> Option<(Option<Owned>, Result<Outcome, Error>)> {
        let started = self.operations.take(handle)?;
        let in_tree = started.tree_op.and_then(|op| self.operations.disown(op));
        let ended = self.ended.clone().unwrap_or(Error::PathLost);
        let (mut buffers, result) = (started.buffers.or(in_tree), started.finished.unwrap_or(Err(ended)));
        if let (Some(owned), Ok(_), Path::Tree) = (&mut buffers, &result, started.chosen.path) {
            let extent = owned.extent.clone();
            extent.copy_own(&started.desc, &mut owned.borrow_buffers());
        }
        Some((buffers, result))
    }

    /// The handle of an operation was dropped.
    fn detach(&mut self, handle: u64) {
        self.try_finish(handle);
        if let Some(op) = self.operations.detach(handle) {
            self.tree.forget_completion(op);
        }
    }

    /// Free the buffers of detached operations that have ended; of all detached ones if the communicator has.
    pub(super) fn reclaim_detached(&mut self) {
        let freed = self.operations.reclaim_ended(self.ended.is_some());
        freed.into_iter().for_each(|op| self.tree.forget_completion(op));
    }

    /// Process dropped handles.
    pub(super) fn reclaim_dropped(&mut self) {
        if !self.watch.notices.dropped.is_any() {
            return;
        }
        let (handles, tickets) = self.watch.notices.dropped.take();
        handles.into_iter().for_each(|handle| self.detach(handle));
        for ticket in tickets {
            // While the connections are lent, the next call processes it.
            if !self.host.abandon(ticket) {
                self.watch.notices.dropped.push_message(ticket);
            }
        }
    }

    /// Return the started operations and messages that the communicator holds.
    pub(super) fn outstanding(&mut self) -> Outstanding {
        self.reclaim_dropped();
        let ((operations, bytes), (messages, message_bytes)) =
            (self.operations.outstanding(), self.host.owned_by_messages());
        Outstanding { operations, messages, bytes: bytes + message_bytes }
    }
}

/// Make the schedule of an operation at a place.
fn make_schedule(
    selection: &Selection,
    place: Place,
    (desc, path): (&OpDesc, Path),
    is_in_place: bool,
) -> Result<Schedule, Error> {
    let count = usize::try_from(desc.count).map_err(|_| Error::Argument(format!("{} elements", desc.count)))?;
    let context = selection.context();
    if desc.collective == Collective::AllToAll && is_in_place {
        let ranks = place.ranks() as usize;
        if !count.is_multiple_of(ranks) {
            let what = format!(
                "{count} elements in place are not {ranks} equal blocks; use separate input and output buffers"
            );
            return Err(Error::Argument(what));
        }
        let shape = if path == Path::HierarchicalPairwise { context.shape_of(place.ranks()) } else { Shape::Line };
        return Ok(hierarchical_pairwise::all_to_all_in_place(place, count / ranks, shape));
    }
    let of = ALGORITHMS.iter().filter(|algorithm| algorithm.pattern.collective() == desc.collective);
    let algorithm = of.into_iter().find(|algorithm| path == Path::Local || algorithm.path() == path);
    let no_schedule = || Error::Argument(format!("there is no {} schedule for {}", path.name(), desc.collective));
    let (tree, shape) = (context.declared.tree(), context.shape_of(place.ranks()));
    let problem = Problem { place, count, root: desc.root, tree, shape };
    let schedule = algorithm.ok_or_else(no_schedule)?.schedule_for(&problem, is_in_place);
    if is_in_place && schedule.layout().in_place_at.is_none() {
        return Err(Error::Argument(format!("{desc} by {} needs separate input and output buffers", path.name())));
    }
    Ok(schedule)
}

/// How long host work may go on after cancellation.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(50);
