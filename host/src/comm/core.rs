//! The state of a communicator, and how a blocking operation runs from call to outcome. [`super::started`] has
//! asynchronous operations, and [`super::progress`] advances both.

use super::element::Element;
use super::error::{Error, OutputState};
use super::extent::Extent;
use super::grace_period::GracePeriod;
use super::join::JoinConfig;
use super::membership::MembershipChannel;
use super::notices::Notices;
use super::progress::{Deadline, TreeRun};
use super::selection_cache::SelectionCache;
use super::started::{Started, TreeBuffers};
use super::tree::Tree;
use super::{CallOptions, Outcome};
use crate::controller::Session;
use crate::controller::proto::QueuePosition;
use crate::exec::{Buffers, ExecError, JobToken, Mesh};
use crate::recovery::Landed;
use crate::schedule::{Buffer, Place, Schedule, pairwise};
use crate::select::{Algo, Explanation, SelectionContext, explain};
use crate::transport::memory::{Buffer as RegisteredBuffer, RegisterError, Transfer};
use crate::transport::packets::{CompletionInfo, MAX_OPS, OpId};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;
use sumac_hal::wire::StragglerLimit;

/// Counters at the beginning of an operation.
#[derive(Clone, Copy)]
pub(super) struct CounterSnapshot {
    /// Recoveries so far.
    view: u32,
    wire_bytes: u64,
    retransmits: u64,
    at: Instant,
}

/// Connections between ranks, and the number of host collectives that have run over them.
pub(super) struct Connections {
    pub(super) mesh: Mesh,
    pub(super) scheduled: u64,
}

impl Connections {
    pub(super) const fn new(mesh: Mesh) -> Self {
        Self { mesh, scheduled: 0 }
    }
}

/// The state of a communicator.
pub(super) struct Core {
    pub(super) config: JoinConfig,
    pub(super) selection: SelectionContext,
    pub(super) tree: Option<Tree>,
    pub(super) place: Place,
    /// The number of ranks with this one's IP address.
    pub(super) ranks_here: usize,
    /// Connections for the program's host collectives and messages; `None` while in use.
    pub(super) connections: Option<Connections>,
    /// The membership channel; `None` without recovery.
    pub(super) channel: Option<MembershipChannel>,
    /// The token that identifies the job on connections.
    pub(super) token: JobToken,
    /// Number of view changes so far.
    pub(super) epoch: u64,
    /// The grace period of operations since the view was called into question.
    pub(super) grace: GracePeriod,
    /// The number of the call that is running.
    pub(super) calling: Option<u64>,
    /// The number of the started call whose schedule is running.
    pub(super) scheduling: Option<u64>,
    /// The chunks that the last view change recovered here.
    pub(super) landed: Landed,
    /// Bytes sent to other ranks for recovery.
    pub(super) recovery_bytes: u64,
    /// The number of successful recoveries, and their total time.
    pub(super) recoveries: (u32, Duration),
    /// Bytes that had been sent over `connections` when they were taken into use.
    pub(super) sent_before_call_bytes: u64,
    pub(super) session: Option<Session>,
    pub(super) notices: std::sync::Arc<Notices>,
    /// Buffers of started operations in the tree.
    pub(super) owned: BTreeMap<OpId, TreeBuffers>,
    pub(super) started: BTreeMap<u64, Started>,
    /// Started host collectives that have not run, in the order of posting.
    pub(super) schedules: VecDeque<u64>,
    pub(super) next_handle: u64,
    /// Operations with lower numbers are complete in the tree.
    pub(super) completed_below: u64,
    /// The number of trees that this communicator has recovered or migrated from.
    pub(super) view: u32,
    /// The job's view, as the controller counts; see [`Core::job_view`].
    pub(super) job_view: u32,
    /// Counters of earlier trees.
    pub(super) past_bytes: u64,
    pub(super) past_retransmits: u64,
    splits: u64,
    pub(super) ended: Option<Error>,
    /// The communicator ended outside of a call, so the next one reports the error.
    pub(super) is_end_unreported: bool,
    /// Details of completed operations in the tree that are not yet reported to their callers, by view.
    pub(super) completions: BTreeMap<(u32, OpId), CompletionInfo>,
    selection_cache: SelectionCache,
    /// The queue position that the cached selections depend on.
    queue_position: Option<QueuePosition>,
    fallback_logged: bool,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").field("config", &self.config).field("selection", &self.selection).finish_non_exhaustive()
    }
}

impl Core {
    pub(super) fn new(
        (config, place, ranks_here): (JoinConfig, Place, usize),
        selection: SelectionContext,
        tree: Option<Tree>,
        (connections, channel, token): (Connections, Option<MembershipChannel>, JobToken),
        session: Session,
        notices: std::sync::Arc<Notices>,
    ) -> Self {
        Self {
            config,
            selection,
            tree,
            place,
            ranks_here,
            connections: Some(connections),
            channel,
            token,
            epoch: 0,
            grace: GracePeriod::default(),
            calling: None,
            scheduling: None,
            landed: Landed::default(),
            recovery_bytes: 0,
            recoveries: (0, Duration::ZERO),
            sent_before_call_bytes: 0,
            session: Some(session),
            notices,
            owned: BTreeMap::new(),
            started: BTreeMap::new(),
            schedules: VecDeque::new(),
            next_handle: 0,
            completed_below: 0,
            view: 0,
            job_view: 0,
            past_bytes: 0,
            past_retransmits: 0,
            splits: 0,
            ended: None,
            is_end_unreported: false,
            completions: BTreeMap::new(),
            selection_cache: SelectionCache::default(),
            queue_position: None,
            fallback_logged: false,
        }
    }

    /// Allocate memory for operations, registered with the leaf device if there is one. If the communicator has ended,
    /// its next call reports that.
    pub(super) fn alloc<T: Element>(&mut self, len: usize) -> Result<RegisteredBuffer<T>, Error> {
        let is_active = self.ended.is_none() && !self.notices.is_cancelled();
        let Some(Tree::ZeroCopy(driver)) = self.tree.as_mut().filter(|_| is_active) else {
            return Ok(RegisteredBuffer::plain(len));
        };
        match driver.alloc(len) {
            // The next operation notices this too, and recovers. Without the device, ordinary memory will do.
            Err(RegisterError::DeviceLost) if self.config.recover => Ok(RegisteredBuffer::plain(len)),
            allocated => allocated.map_err(|reason| Error::Memory {
                device: driver.device().into(),
                len_bytes: len.saturating_mul(size_of::<T>()),
                reason,
            }),
        }
    }

    /// Return the configuration that a sub-communicator inherits, and the number of this split.
    pub(super) fn next_split(&mut self) -> (JoinConfig, u64) {
        self.splits += 1;
        (self.config.clone(), self.splits - 1)
    }

    pub(super) fn explain(&self, desc: &OpDesc, options: &CallOptions) -> Explanation {
        let found = self.evaluate(desc, options.algo.unwrap_or(self.config.algo));
        self.apply_straggler_policy(desc, options, found)
    }

    fn evaluate(&self, desc: &OpDesc, algo: Algo) -> Explanation {
        // Only the reason why there is no tree depends on the queue.
        match (&self.selection.tree, self.notices.queue_position()) {
            (Err(why), Some(place)) => {
                let tree = Err(format!("{why}; {place}"));
                explain(&SelectionContext { tree, ..self.selection.clone() }, desc, algo)
            }
            _ => explain(&self.selection, desc, algo),
        }
    }

    /// Run an operation to completion.
    pub(super) fn run(
        &mut self,
        desc: OpDesc,
        buffers: &mut Buffers<'_>,
        options: &CallOptions,
    ) -> Result<Outcome, Error> {
        let result = self.run_to_end(desc, buffers, options);
        self.calling = None;
        result
    }

    fn run_to_end(&mut self, desc: OpDesc, buffers: &mut Buffers<'_>, options: &CallOptions) -> Result<Outcome, Error> {
        self.check_usable()?;
        let extent = Extent::of(&desc, self.place)?;
        extent.check(&desc, buffers)?;
        let scaled = premultiply(&desc, &extent, buffers, options)?;
        let (deadline, before) = (self.deadline(options), self.snapshot());
        let ready = self.make_room(deadline).and_then(|()| self.begin_call(deadline));
        ready.map_err(|error| self.end(error, &desc, before))?;
        let begun = self.snapshot();
        let buffers = match (&scaled, buffers) {
            // Scale into a separate input, so that the caller's buffer receives only results: the call may still be
            // rejected, or report which elements are results.
            (Some(input), Buffers::InPlace(buffer)) => {
                Buffers::Separate { input, output: &mut buffer[extent.output.clone()] }
            }
            (Some(input), Buffers::Separate { output, .. }) => Buffers::Separate { input, output },
            (None, Buffers::InPlace(buffer)) => Buffers::InPlace(buffer),
            (None, Buffers::Separate { input, output }) => Buffers::Separate { input, output },
        };
        let result = self.run_call((desc, options), &extent, buffers, (deadline, begun));
        result.map_err(|error| {
            let error = self.end(error, &desc, begun);
            self.release_rejected_call(error)
        })
    }

    /// Run a counted operation. A rejection has had no effect.
    fn run_call(
        &mut self,
        (desc, options): (OpDesc, &CallOptions),
        extent: &Extent,
        mut buffers: Buffers<'_>,
        (deadline, begun): (Deadline, CounterSnapshot),
    ) -> Result<Outcome, Error> {
        let limit = self.limit(options);
        loop {
            let (path, fallback) = self.choose(&desc, options)?;
            if path != Path::Tree {
                self.run_by_schedule((&desc, limit), path, buffers, deadline)?;
                return Ok(self.outcome((path, None), fallback, begun));
            }
            if let TreeRun::Done(op, transfer) = self.run_in_tree((desc, limit), extent, &mut buffers, deadline)? {
                extent.copy_own(&desc, &mut buffers);
                let outcome = self.outcome((path, Some(transfer)), fallback, begun);
                return Ok(self.with_completion(op, outcome));
            }
        }
    }

    /// If the call was rejected, take its number back: other ranks do not know of it, and numbers must agree. The
    /// corrected call gets the same number.
    pub(super) fn release_rejected_call(&mut self, error: Error) -> Error {
        if error.is_rejection()
            && let Some(call) = self.calling.take()
        {
            self.uncount_call(call);
        }
        error
    }

    /// Take a call's number back; later calls move up.
    pub(super) fn uncount_call(&mut self, call: u64) {
        self.notices.migration.uncount_call();
        let started = self.started.values_mut().map(|started| &mut started.call);
        let others = self.calling.iter_mut().chain(&mut self.scheduling);
        started.chain(others).filter(|number| **number > call).for_each(|number| *number -= 1);
    }

    /// Wait until another operation may be posted: the number of operations in an endpoint and of started host
    /// collectives is bounded. Nothing has been sent for the call.
    ///
    /// Runs a started host collective if all ranks have started it, because a rank that waits for it may be the one
    /// that must make room.
    ///
    /// # Errors
    /// [`Error::TooManyInFlight`] if the deadline passes, or an error that ends the communicator.
    pub(super) fn make_room(&mut self, deadline: Deadline) -> Result<(), Error> {
        self.reclaim_dropped();
        while !self.has_room() {
            if self.is_schedule_due() {
                self.run_next_schedule(deadline)?;
                continue;
            }
            match self.step(None, deadline) {
                Err(Error::Deadline { waited, .. }) if !self.has_room() => {
                    return Err(Error::TooManyInFlight { limit: MAX_OPS, waited });
                }
                Err(Error::Deadline { .. }) => {}
                stepped => self.recover_from(stepped, deadline)?,
            }
        }
        Ok(())
    }

    fn has_room(&self) -> bool {
        self.tree.as_ref().is_none_or(Tree::has_room) && self.schedules.len() < MAX_OPS
    }

    /// Return whether the oldest started host collective must run: all ranks have started it, or there is no room.
    fn is_schedule_due(&self) -> bool {
        let Some(oldest) = self.schedules.front() else { return false };
        let announced = self.started.get(oldest).and_then(|started| started.tree_op);
        self.schedules.len() >= MAX_OPS || announced.is_some_and(|op| op.0 < self.completed_below)
    }

    /// Run a host collective. Earlier started ones run first, because the other ranks wait for them in that order.
    fn run_by_schedule(
        &mut self,
        (desc, limit): (&OpDesc, Option<StragglerLimit>),
        path: Path,
        buffers: Buffers<'_>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let schedule = self.schedule(desc, path, &buffers)?;
        self.run_started(deadline)?;
        let announced = self.announce_to_tree(desc, path, limit)?;
        self.run_announced((desc, path), &schedule, buffers, announced, deadline)
    }

    /// Run a host collective that was announced to the tree.
    pub(super) fn run_announced(
        &mut self,
        operation: (&OpDesc, Path),
        schedule: &Schedule,
        buffers: Buffers<'_>,
        announced: Option<OpId>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let view = self.view;
        // Other ranks know of it, so no error is a rejection.
        let result = self.run_schedule(operation, schedule, buffers, deadline).map_err(Error::ending);
        // A new tree does not know the announcement.
        let announced = announced.filter(|_| self.view == view);
        result.map_err(|error| {
            let error = self.wait_for_group_error(announced, error, deadline);
            self.agreed_loss_error(error, deadline)
        })
    }

    /// Exchange blocks of any length. Counts differ between ranks, so only collective and type are compared; the
    /// executor detects lengths that do not match.
    pub(super) fn all_to_all_v(
        &mut self,
        dtype: Dtype,
        buffers: Buffers<'_>,
        send_counts: &[usize],
        recv_counts: &[usize],
        options: &CallOptions,
    ) -> Result<Outcome, Error> {
        self.check_usable()?;
        let collective = Collective::AllToAllV;
        let desc = OpDesc { collective, dtype: Some(dtype), op: None, root: Rank(0), count: 0 };
        let schedule = pairwise::all_to_all_v(self.place, send_counts, recv_counts)
            .map_err(|error| Error::Argument(error.to_string()))?;
        check_uneven(&schedule, dtype, &buffers)?;
        self.algo_for(&desc, &CallOptions { algo: Some(Algo::Pairwise), ..*options })?;
        let limit = self.limit(options);
        let deadline = self.deadline(options);
        let begun = self.snapshot();
        let path = Path::Pairwise;
        let begins = self.make_room(deadline).and_then(|()| self.begin_call(deadline));
        let begins = begins.and_then(|()| self.run_started(deadline));
        let result = begins.and_then(|()| {
            let announced = self.announce_to_tree(&desc, path, limit)?;
            self.run_announced((&desc, path), &schedule, buffers, announced, deadline)
        });
        let result = result.map_err(|error| {
            let error = self.end(error, &desc, begun);
            self.release_rejected_call(error)
        });
        self.calling = None;
        result?;
        Ok(self.outcome((path, None), None, begun))
    }

    pub(super) fn check_usable(&mut self) -> Result<(), Error> {
        match &self.ended {
            Some(error) if std::mem::take(&mut self.is_end_unreported) => Err(error.clone()),
            // The call has not begun, so its output is unchanged.
            Some(error) => Err(Error::Ended(Box::new(error.clone().with_output(OutputState::Elements(Vec::new()))))),
            None if self.notices.is_cancelled() => {
                self.note_end(&Error::Cancelled);
                Err(Error::Cancelled)
            }
            None => Ok(()),
        }
    }

    /// Select the path. If the algorithm was left open and the tree is unavailable, that is a fallback, which is logged
    /// once.
    pub(super) fn choose(&mut self, desc: &OpDesc, options: &CallOptions) -> Result<(Path, Option<String>), Error> {
        if self.config.world == 1 {
            return Ok((Path::Local, None));
        }
        let algo = self.algo_for(desc, options)?;
        let queue_position = self.notices.queue_position();
        if std::mem::replace(&mut self.queue_position, queue_position) != queue_position {
            self.clear_selection_cache();
        }
        if let Some(chosen) = self.selection_cache.find(desc, algo) {
            return Ok(chosen);
        }
        let explanation = self.evaluate(desc, algo);
        let Some(path) = explanation.chosen else {
            let reason = explanation.refusal().cloned();
            return Err(reason.map_or_else(|| Error::Argument(format!("no path for {desc}")), Error::NotPossible));
        };
        let fallback = explanation.fallback().map(ToString::to_string);
        if let Some(why) = fallback.as_ref().filter(|_| !self.fallback_logged) {
            let (job, rank) = (&self.config.job, self.config.rank);
            tracing::warn!(job, rank, path = path.name(), %why, "falling back from the tree (logged once)");
            self.fallback_logged = true;
        }
        let chosen = (path, fallback);
        self.selection_cache.keep(*desc, algo, &chosen);
        Ok(chosen)
    }

    pub(super) fn deadline(&self, options: &CallOptions) -> Deadline {
        let limit = self.call_timeout(options);
        (Instant::now() + limit, limit)
    }

    /// Return the bytes sent directly to other ranks.
    fn sent_bytes(&self) -> u64 {
        let calls =
            self.connections.as_ref().map_or(self.sent_before_call_bytes, |connections| connections.mesh.sent_bytes());
        calls + self.recovery_bytes
    }

    pub(super) fn snapshot(&self) -> CounterSnapshot {
        let stats = self.tree.as_ref().map(Tree::stats).unwrap_or_default();
        CounterSnapshot {
            view: self.view,
            wire_bytes: self.past_bytes + stats.bytes_out + self.sent_bytes(),
            retransmits: self.past_retransmits + stats.retransmits,
            at: Instant::now(),
        }
    }

    pub(super) fn outcome(
        &self,
        (path, transfer): (Path, Option<Transfer>),
        fallback: Option<String>,
        begun: CounterSnapshot,
    ) -> Outcome {
        let now = self.snapshot();
        Outcome {
            path,
            transfer,
            fallback,
            wire_bytes: now.wire_bytes - begun.wire_bytes,
            retransmits: now.retransmits - begun.retransmits,
            recovered: now.view > begun.view,
            slowest: None,
            missing: self.excluded_ranks(),
        }
    }

    /// Invalidate cached selections: available paths have changed.
    pub(super) fn clear_selection_cache(&mut self) {
        self.selection_cache = SelectionCache::default();
        self.fallback_logged = false;
    }

    /// End the communicator, unless the error is a rejection. Completes the error with what the call knows.
    pub(super) fn end(&mut self, error: Error, desc: &OpDesc, begun: CounterSnapshot) -> Error {
        let error = match error {
            Error::Schedule(ExecError::Deadline { .. }) => Error::Deadline { desc: *desc, waited: begun.at.elapsed() },
            Error::Deadline { waited, .. } => Error::Deadline { desc: *desc, waited },
            Error::TooManyInFlight { limit, .. } => Error::TooManyInFlight { limit, waited: begun.at.elapsed() },
            Error::OutcomeUnknown { waited, output, .. } => Error::OutcomeUnknown { desc: *desc, waited, output },
            other => other,
        };
        let had_ended = self.ended.is_some();
        self.note_end(&error);
        match &self.ended {
            Some(Error::OutcomeUnknown { output, .. })
                if !had_ended && !error.describes_output() && self.is_output_unknown() =>
            {
                Error::OutcomeUnknown { desc: *desc, waited: begun.at.elapsed(), output: output.clone() }
            }
            _ => error,
        }
    }

    /// Record the error that ends the communicator, and stop all access to buffers, which go back to the caller.
    pub(super) fn note_end(&mut self, error: &Error) {
        if !error.is_rejection() && self.ended.is_none() {
            let (job, rank) = (&self.config.job, self.config.rank);
            tracing::warn!(job, rank, %error, "the communicator has ended");
            self.ended = Some(error.clone());
            if let (Some(session), Some(reason)) = (&self.session, error.abort_reason()) {
                session.abort(reason);
            }
            self.tree.iter_mut().for_each(Tree::retire);
            self.channel.iter().for_each(MembershipChannel::end);
            if self.is_output_unknown() && !error.describes_output() {
                let (desc, waited, output) = (OpDesc::barrier(), Duration::ZERO, OutputState::Unspecified);
                self.ended = Some(Error::OutcomeUnknown { desc, waited, output });
            }
            // Nothing writes to their buffers any more.
            self.reclaim_detached();
        }
        if matches!(error, Error::Cancelled) {
            // Drop the session without leaving, so that the controller reports this rank as lost.
            self.session = None;
        }
    }
}

/// Check the buffers of an exchange of uneven blocks, before anything is announced.
fn check_uneven(schedule: &Schedule, dtype: Dtype, buffers: &Buffers<'_>) -> Result<(), Error> {
    let Buffers::Separate { input, output } = buffers else { return Ok(()) };
    for (what, found, which) in [("an input", input.len(), Buffer::Input), ("an output", output.len(), Buffer::Output)]
    {
        let expected = schedule.layout().len(which) * dtype.size_bytes();
        if found != expected {
            return Err(Error::Argument(format!("{what} of {found} bytes, but the counts add up to {expected}")));
        }
    }
    Ok(())
}

/// Return a rank's scaled contribution to a premultiplied sum; `None` for any other operation. The caller's buffers are
/// not changed.
pub(super) fn premultiply(
    desc: &OpDesc,
    extent: &Extent,
    buffers: &Buffers<'_>,
    options: &CallOptions,
) -> Result<Option<Vec<u8>>, Error> {
    let scalar = match (desc.op, options.scalar) {
        (Some(ReduceOp::PremulSum), scalar) => scalar.unwrap_or(1.0),
        (_, None) => return Ok(None),
        (_, Some(scalar)) => {
            return Err(Error::Argument(format!("{desc} with a scalar of {scalar}: only premul_sum takes a scalar")));
        }
    };
    let Some(kernel) = desc.dtype.and_then(|dtype| Kernel::new(dtype, ReduceOp::PremulSum)) else { return Ok(None) };
    let mut scaled = vec![0; extent.input.len()];
    let input = extent.input(buffers);
    kernel.scale(&mut scaled, input, scalar).map_err(|error| Error::Argument(format!("{desc}: {error}")))?;
    Ok(Some(scaled))
}
