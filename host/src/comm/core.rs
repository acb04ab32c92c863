//! What a communicator is made of, and the life of a blocking operation from call to outcome; `started` has the others,
//! `progress` moves both on.

use super::choices::Choices;
use super::element::Element;
use super::error::{Error, Fresh};
use super::extent::Extent;
use super::grace::Grace;
use super::join::JoinConfig;
use super::lost::Lost;
use super::parley::Parley;
use super::progress::{Deadline, InTheTree};
use super::started::{InTree, Started};
use super::tree::Tree;
use super::{CallOptions, Outcome};
use crate::controller::Session;
use crate::controller::proto::QueuePlace;
use crate::exec::{Buffers, ExecError, JobToken, Mesh};
use crate::recovery::Landed;
use crate::schedule::{Buffer, Place, Schedule, pairwise};
use crate::select::{Algo, Explanation, Situation, explain};
use crate::transport::memory::{Buffer as RegisteredBuffer, RegisterError, Transfer};
use crate::transport::packets::{MAX_OPS, OpId, Verdict};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;
use sumac_hal::wire::Limit;

/// What was counted when an operation began.
#[derive(Clone, Copy)]
pub(super) struct Mark {
    /// Repairs so far.
    view: u32,
    wire_bytes: u64,
    retransmits: u64,
    at: Instant,
}

/// Connections between ranks, and how many operations ran over them by schedules.
pub(super) struct Lines {
    pub(super) mesh: Mesh,
    pub(super) scheduled: u64,
}

impl Lines {
    pub(super) const fn new(mesh: Mesh) -> Self {
        Self { mesh, scheduled: 0 }
    }
}

/// What a communicator is made of.
pub(super) struct Core {
    pub(super) config: JoinConfig,
    pub(super) situation: Situation,
    pub(super) tree: Option<Tree>,
    pub(super) place: Place,
    /// How many ranks have this one's address.
    pub(super) ranks_here: usize,
    /// The ways between ranks for what the program calls; none while they are at work.
    pub(super) calls: Option<Lines>,
    /// What ranks say to each other about their view; `None` where losses are not repaired.
    pub(super) parley: Option<Parley>,
    /// The job's name on connections.
    pub(super) token: JobToken,
    /// How often the view has changed.
    pub(super) epoch: u64,
    /// What is left of the time that operations get since the view was called in question.
    pub(super) grace: Grace,
    /// The call that runs, by its number.
    pub(super) calling: Option<u64>,
    /// The started call whose schedule runs.
    pub(super) scheduling: Option<u64>,
    /// What the last change of the view has landed.
    pub(super) landed: Landed,
    /// What was sent between ranks to repair.
    pub(super) repaired_bytes: u64,
    /// How often that went well, and how long it took.
    pub(super) repaired: (u32, Duration),
    /// What had been sent over `calls` when they were put to work.
    pub(super) called_bytes: u64,
    pub(super) session: Option<Session>,
    pub(super) lost: std::sync::Arc<Lost>,
    /// Buffers of started operations that are in the tree.
    pub(super) owned: BTreeMap<OpId, InTree>,
    pub(super) started: BTreeMap<u64, Started>,
    /// Started schedules that have not run, in the order of posting.
    pub(super) schedules: VecDeque<u64>,
    pub(super) next_handle: u64,
    /// Operations below are complete in the tree.
    pub(super) completed_below: u64,
    /// How many trees this communicator has lost and got over, or moved to.
    pub(super) view: u32,
    /// The view of the job, as the controller counts; see [`Core::job_view`].
    pub(super) job_view: u32,
    /// What was counted at the trees before.
    pub(super) past_bytes: u64,
    pub(super) past_retransmits: u64,
    splits: u64,
    pub(super) ended: Option<Error>,
    /// It has ended outside of any call: the next one is the first to say why.
    pub(super) is_untold: bool,
    /// What is known of operations that are complete in the tree and whose callers have yet to hear of it, by view.
    pub(super) verdicts: BTreeMap<(u32, OpId), Verdict>,
    choices: Choices,
    /// The place in the queue that they were made in.
    queue_place: Option<QueuePlace>,
    fallback_told: bool,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").field("config", &self.config).field("situation", &self.situation).finish_non_exhaustive()
    }
}

impl Core {
    pub(super) fn new(
        (config, place, ranks_here): (JoinConfig, Place, usize),
        situation: Situation,
        tree: Option<Tree>,
        (calls, parley, token): (Lines, Option<Parley>, JobToken),
        session: Session,
        lost: std::sync::Arc<Lost>,
    ) -> Self {
        Self {
            config,
            situation,
            tree,
            place,
            ranks_here,
            calls: Some(calls),
            parley,
            token,
            epoch: 0,
            grace: Grace::default(),
            calling: None,
            scheduling: None,
            landed: Landed::default(),
            repaired_bytes: 0,
            repaired: (0, Duration::ZERO),
            called_bytes: 0,
            session: Some(session),
            lost,
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
            is_untold: false,
            verdicts: BTreeMap::new(),
            choices: Choices::default(),
            queue_place: None,
            fallback_told: false,
        }
    }

    /// Return memory for operations: registered with the leaf device if there is one that takes it. That a communicator is
    /// at its end is for its next call to say.
    pub(super) fn alloc<T: Element>(&mut self, len: usize) -> Result<RegisteredBuffer<T>, Error> {
        let goes_on = self.ended.is_none() && !self.lost.is_cancelled();
        let Some(Tree::Reference(driver)) = self.tree.as_mut().filter(|_| goes_on) else {
            return Ok(RegisteredBuffer::plain(len));
        };
        match driver.alloc(len) {
            // The next operation finds that too, and is repaired: without the device, memory is memory.
            Err(RegisterError::Gone) if self.config.repair => Ok(RegisteredBuffer::plain(len)),
            allocated => allocated.map_err(|reason| Error::Memory {
                device: driver.device().into(),
                len_bytes: len.saturating_mul(size_of::<T>()),
                reason,
            }),
        }
    }

    /// Return what a sub-communicator takes over, and the number of this split.
    pub(super) fn next_split(&mut self) -> (JoinConfig, u64) {
        self.splits += 1;
        (self.config.clone(), self.splits - 1)
    }

    pub(super) fn explain(&self, desc: &OpDesc, options: &CallOptions) -> Explanation {
        let found = self.judge(desc, options.algo.unwrap_or(self.config.algo));
        self.judge_stragglers(desc, options, found)
    }

    fn judge(&self, desc: &OpDesc, algo: Algo) -> Explanation {
        // Why there is no tree changes with the queue, and nothing else does.
        match (&self.situation.tree, self.lost.queue_place()) {
            (Err(why), Some(place)) => {
                let tree = Err(format!("{why}; {place}"));
                explain(&Situation { tree, ..self.situation.clone() }, desc, algo)
            }
            _ => explain(&self.situation, desc, algo),
        }
    }

    /// Run an operation to its end.
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
        self.usable()?;
        let extent = Extent::of(&desc, self.place)?;
        extent.check(&desc, buffers)?;
        let scaled = premultiply(&desc, &extent, buffers, options)?;
        let (deadline, before) = (self.deadline(options), self.mark());
        let ready = self.make_room(deadline).and_then(|()| self.begin_call(deadline));
        ready.map_err(|error| self.end(error, &desc, before))?;
        let begun = self.mark();
        let buffers = match (&scaled, buffers) {
            // A buffer for both gets nothing but results: the call may yet be refused, or say which of them are there.
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
            self.refuse(error)
        })
    }

    /// Run an operation that is counted; an error that is harmless has changed nothing.
    fn run_call(
        &mut self,
        (desc, options): (OpDesc, &CallOptions),
        extent: &Extent,
        mut buffers: Buffers<'_>,
        (deadline, begun): (Deadline, Mark),
    ) -> Result<Outcome, Error> {
        let limit = self.limit(options);
        loop {
            let (path, fallback) = self.choose(&desc, options)?;
            if path != Path::Tree {
                self.run_by_schedule((&desc, limit), path, buffers, deadline)?;
                return Ok(self.outcome((path, None), fallback, begun));
            }
            if let InTheTree::Done(op, transfer) = self.run_in_tree((desc, limit), extent, &mut buffers, deadline)? {
                extent.keep_own(&desc, &mut buffers);
                let outcome = self.outcome((path, Some(transfer)), fallback, begun);
                return Ok(self.with_verdict(op, outcome));
            }
        }
    }

    /// Take the number of the call back, if it was refused: ranks count what others hear of, so that their numbers are
    /// the same. A program that mends its call makes it as the call that it would have been.
    pub(super) fn refuse(&mut self, error: Error) -> Error {
        if error.is_harmless()
            && let Some(call) = self.calling.take()
        {
            self.uncount(call);
        }
        error
    }

    /// Take a call's number away; those behind it move up.
    pub(super) fn uncount(&mut self, call: u64) {
        self.lost.offers.uncount();
        let started = self.started.values_mut().map(|started| &mut started.call);
        let others = self.calling.iter_mut().chain(&mut self.scheduling);
        started.chain(others).filter(|number| **number > call).for_each(|number| *number -= 1);
    }

    /// Wait until another operation may be posted: an endpoint takes so many at a time, and so many schedules wait for
    /// their turn. Nothing has been sent for the call, or changed.
    ///
    /// A schedule that all ranks have started is run here: who waits for it may be who has to make room.
    ///
    /// # Errors
    /// [`Error::TooManyInFlight`] when the deadline passes; else what ends the communicator.
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
                stepped => self.get_over(stepped, deadline)?,
            }
        }
        Ok(())
    }

    fn has_room(&self) -> bool {
        self.tree.as_ref().is_none_or(Tree::has_room) && self.schedules.len() < MAX_OPS
    }

    /// Tell whether the oldest started schedule is one that all ranks have started, or has to run for room.
    fn is_schedule_due(&self) -> bool {
        let Some(oldest) = self.schedules.front() else { return false };
        let told = self.started.get(oldest).and_then(|started| started.tree_op);
        self.schedules.len() >= MAX_OPS || told.is_some_and(|op| op.0 < self.completed_below)
    }

    /// Schedules that were started before must run before: the other ranks wait for them in that order.
    fn run_by_schedule(
        &mut self,
        (desc, limit): (&OpDesc, Option<Limit>),
        path: Path,
        buffers: Buffers<'_>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let schedule = self.schedule(desc, path, &buffers)?;
        self.run_started(deadline)?;
        let told = self.tell_tree(desc, path, limit)?;
        self.run_told((desc, path), &schedule, buffers, told, deadline)
    }

    /// Run a schedule of which the tree was told.
    pub(super) fn run_told(
        &mut self,
        way: (&OpDesc, Path),
        schedule: &Schedule,
        buffers: Buffers<'_>,
        told: Option<OpId>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let view = self.view;
        // The others know of it: nothing that it meets is harmless.
        let result = self.run_schedule(way, schedule, buffers, deadline).map_err(Error::ending);
        // Another tree knows nothing of it.
        let told = told.filter(|_| self.view == view);
        result.map_err(|error| {
            let error = self.verdict(told, error, deadline);
            self.after_loss(error, deadline)
        })
    }

    /// Exchange blocks of any length. Counts differ from rank to rank, so that only the collective and the type are
    /// compared; lengths that do not match are the executor's to find.
    pub(super) fn all_to_all_v(
        &mut self,
        dtype: Dtype,
        buffers: Buffers<'_>,
        send_counts: &[usize],
        recv_counts: &[usize],
        options: &CallOptions,
    ) -> Result<Outcome, Error> {
        self.usable()?;
        let collective = Collective::AllToAllV;
        let desc = OpDesc { collective, dtype: Some(dtype), op: None, root: Rank(0), count: 0 };
        let schedule = pairwise::all_to_all_v(self.place, send_counts, recv_counts)
            .map_err(|error| Error::Argument(error.to_string()))?;
        check_uneven(&schedule, dtype, &buffers)?;
        self.algo_for(&desc, &CallOptions { algo: Some(Algo::Pairwise), ..*options })?;
        let limit = self.limit(options);
        let deadline = self.deadline(options);
        let begun = self.mark();
        let path = Path::Pairwise;
        let begins = self.make_room(deadline).and_then(|()| self.begin_call(deadline));
        let begins = begins.and_then(|()| self.run_started(deadline));
        let result = begins.and_then(|()| {
            let told = self.tell_tree(&desc, path, limit)?;
            self.run_told((&desc, path), &schedule, buffers, told, deadline)
        });
        let result = result.map_err(|error| {
            let error = self.end(error, &desc, begun);
            self.refuse(error)
        });
        self.calling = None;
        result?;
        Ok(self.outcome((path, None), None, begun))
    }

    pub(super) fn usable(&mut self) -> Result<(), Error> {
        match &self.ended {
            Some(error) if std::mem::take(&mut self.is_untold) => Err(error.clone()),
            // What a call that has not begun would write to is as it was.
            Some(error) => Err(Error::Ended(Box::new(error.clone().with_fresh(Fresh::Elements(Vec::new()))))),
            None if self.lost.is_cancelled() => {
                self.note_end(&Error::Cancelled);
                Err(Error::Cancelled)
            }
            None => Ok(()),
        }
    }

    /// Choose the path; what was left open and can't go through the tree is a fallback, which is logged.
    pub(super) fn choose(&mut self, desc: &OpDesc, options: &CallOptions) -> Result<(Path, Option<String>), Error> {
        if self.config.world == 1 {
            return Ok((Path::Local, None));
        }
        let algo = self.algo_for(desc, options)?;
        let queue_place = self.lost.queue_place();
        if std::mem::replace(&mut self.queue_place, queue_place) != queue_place {
            self.forget_choices();
        }
        if let Some(chosen) = self.choices.find(desc, algo) {
            return Ok(chosen);
        }
        let explanation = self.judge(desc, algo);
        let Some(path) = explanation.chosen else {
            let reason = explanation.refusal().cloned();
            return Err(reason.map_or_else(|| Error::Argument(format!("no path for {desc}")), Error::NotPossible));
        };
        let fallback = explanation.fallback().map(ToString::to_string);
        if let Some(why) = fallback.as_ref().filter(|_| !self.fallback_told) {
            let (job, rank) = (&self.config.job, self.config.rank);
            tracing::warn!(job, rank, path = path.name(), %why, "falls back from the tree (told once)");
            self.fallback_told = true;
        }
        let chosen = (path, fallback);
        self.choices.keep(*desc, algo, &chosen);
        Ok(chosen)
    }

    pub(super) fn deadline(&self, options: &CallOptions) -> Deadline {
        let limit = self.patience(options);
        (Instant::now() + limit, limit)
    }

    /// Return what was sent to other ranks past the tree.
    fn sent_bytes(&self) -> u64 {
        let calls = self.calls.as_ref().map_or(self.called_bytes, |lines| lines.mesh.sent_bytes());
        calls + self.repaired_bytes
    }

    pub(super) fn mark(&self) -> Mark {
        let stats = self.tree.as_ref().map(Tree::stats).unwrap_or_default();
        Mark {
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
        begun: Mark,
    ) -> Outcome {
        let now = self.mark();
        Outcome {
            path,
            transfer,
            fallback,
            wire_bytes: now.wire_bytes - begun.wire_bytes,
            retransmits: now.retransmits - begun.retransmits,
            repaired: now.view > begun.view,
            slowest: None,
            missing: self.gone(),
        }
    }

    /// What was possible is perhaps not any more.
    pub(super) fn forget_choices(&mut self) {
        self.choices = Choices::default();
        self.fallback_told = false;
    }

    /// The communicator ends, unless the error changed nothing.
    pub(super) fn end(&mut self, error: Error, desc: &OpDesc, begun: Mark) -> Error {
        let error = match error {
            Error::Schedule(ExecError::Deadline { .. }) => Error::Deadline { desc: *desc, waited: begun.at.elapsed() },
            Error::Deadline { waited, .. } => Error::Deadline { desc: *desc, waited },
            Error::TooManyInFlight { limit, .. } => Error::TooManyInFlight { limit, waited: begun.at.elapsed() },
            Error::OutcomeUnknown { waited, fresh, .. } => Error::OutcomeUnknown { desc: *desc, waited, fresh },
            other => other,
        };
        let had_ended = self.ended.is_some();
        self.note_end(&error);
        match &self.ended {
            Some(Error::OutcomeUnknown { fresh, .. }) if !had_ended && !error.says_fresh() && self.is_in_doubt() => {
                Error::OutcomeUnknown { desc: *desc, waited: begun.at.elapsed(), fresh: fresh.clone() }
            }
            _ => error,
        }
    }

    /// Remember the error that ends the communicator. Buffers go back to the caller, so nobody else may write there.
    pub(super) fn note_end(&mut self, error: &Error) {
        if !error.is_harmless() && self.ended.is_none() {
            let (job, rank) = (&self.config.job, self.config.rank);
            tracing::warn!(job, rank, %error, "the communicator ends");
            self.ended = Some(error.clone());
            if let (Some(session), Some(over)) = (&self.session, error.to_all()) {
                session.over(over);
            }
            self.tree.iter_mut().for_each(Tree::retire);
            self.parley.iter().for_each(Parley::end);
            if self.is_in_doubt() && !error.says_fresh() {
                let (desc, waited, fresh) = (OpDesc::barrier(), Duration::ZERO, Fresh::Unspecified);
                self.ended = Some(Error::OutcomeUnknown { desc, waited, fresh });
            }
            // Nothing writes there any more.
            self.reclaim_abandoned();
        }
        if matches!(error, Error::Cancelled) {
            // Without a word of leaving: the controller tells the others that this rank is lost.
            self.session = None;
        }
    }
}

/// Check the buffers of an exchange of uneven blocks before anything is told to anybody.
fn check_uneven(schedule: &Schedule, dtype: Dtype, buffers: &Buffers<'_>) -> Result<(), Error> {
    let Buffers::Separate { input, output } = buffers else { return Ok(()) };
    for (what, found, which) in [("an input", input.len(), Buffer::Input), ("an output", output.len(), Buffer::Output)]
    {
        let expected = schedule.layout().len(which) * dtype.size_bytes();
        if found != expected {
            return Err(Error::Argument(format!("{what} of {found} bytes, where the counts add up to {expected}")));
        }
    }
    Ok(())
}

/// Return a rank's own contribution to a premultiplied sum, multiplied by the scalar of the call; `None` for any other
/// operation. The caller's buffers stay as they are.
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
            return Err(Error::Argument(format!("{desc} with a scalar of {scalar}: only premul_sum takes one")));
        }
    };
    let Some(kernel) = desc.dtype.and_then(|dtype| Kernel::new(dtype, ReduceOp::PremulSum)) else { return Ok(None) };
    let mut scaled = vec![0; extent.input.len()];
    let input = extent.input(buffers);
    kernel.scale(&mut scaled, input, scalar).map_err(|error| Error::Argument(format!("{desc}: {error}")))?;
    Ok(Some(scaled))
}
