//! What a communicator is made of, and how an operation runs to its end.
//!
//! Progress is made by whoever calls: `wait`, `test` and blocking calls drive the tree's endpoint; a schedule runs
//! when it is waited for, in the order of posting, and drives the endpoint meanwhile.

use super::element::OwnedBuffer;
use super::error::Error;
use super::join::JoinConfig;
use super::{CallOptions, Outcome};
use crate::choice::{Explanation, Situation, explain};
use crate::coll::{Schedule, dissemination, halving_doubling, ring};
use crate::controller::Session;
use crate::endpoint::{Buffers, EndpointError, Event, OpId};
use crate::exec::{Context, ExecError, Interrupt, Mesh, TreeDriver, execute};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, OpDesc, Path};
use sumac_hal::reduce::Kernel;
use sumac_hal::udp::{UdpPort, Waker};

/// The first rank that the controller said is lost.
#[derive(Debug)]
pub(super) struct Lost {
    is_set: AtomicBool,
    rank: Mutex<Option<Rank>>,
    waker: Waker,
}

impl Lost {
    pub(super) const fn new(waker: Waker) -> Self {
        Self { is_set: AtomicBool::new(false), rank: Mutex::new(None), waker }
    }

    pub(super) fn set(&self, rank: Rank) {
        if let Ok(mut first) = self.rank.lock() {
            first.get_or_insert(rank);
        }
        self.is_set.store(true, Ordering::Release);
        self.waker.wake();
    }

    fn rank(&self) -> Option<Rank> {
        if !self.is_set.load(Ordering::Acquire) {
            return None;
        }
        self.rank.lock().ok().and_then(|rank| *rank)
    }
}

/// An operation that was started and not yet waited for.
struct Started {
    desc: OpDesc,
    path: Path,
    fallback: Option<String>,
    /// In the tree's endpoint: the operation itself, or, for a schedule, what tells the tree of it.
    tree_op: Option<OpId>,
    begun: Mark,
    /// A schedule's buffer, until it has run; `None` for the tree's, whose buffer the endpoint works on.
    buffer: Option<Box<dyn OwnedBuffer>>,
    finished: Option<Result<Outcome, Error>>,
}

/// What was counted when an operation began.
#[derive(Clone, Copy)]
struct Mark {
    wire_bytes: u64,
    retransmits: u64,
    at: Instant,
}

/// What a communicator is made of.
pub(super) struct Core {
    pub(super) config: JoinConfig,
    situation: Situation,
    tree: Option<TreeDriver<UdpPort>>,
    mesh: Mesh,
    session: Option<Session>,
    lost: std::sync::Arc<Lost>,
    /// Buffers of started operations that are in the tree.
    owned: BTreeMap<OpId, Box<dyn OwnedBuffer>>,
    started: BTreeMap<u64, Started>,
    /// Started schedules that have not run, in the order of posting.
    schedules: VecDeque<u64>,
    next_handle: u64,
    /// Operations below are complete in the tree.
    completed_below: u64,
    /// Operations that ran by a schedule.
    scheduled: u64,
    ended: Option<Error>,
    fallback_told: bool,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").field("config", &self.config).field("situation", &self.situation).finish_non_exhaustive()
    }
}

/// The buffers of all operations in the tree: the one lent by a blocking call, and the started ones.
struct Lent<'c, 'b> {
    owned: &'c mut BTreeMap<OpId, Box<dyn OwnedBuffer>>,
    lent: Option<(OpId, &'b mut [u8])>,
}

impl Buffers for Lent<'_, '_> {
    fn input(&self, op: OpId) -> &[u8] {
        match &self.lent {
            Some((id, bytes)) if *id == op => bytes,
            _ => self.owned.get(&op).map_or(&[], |buffer| buffer.bytes()),
        }
    }

    fn output(&mut self, op: OpId) -> &mut [u8] {
        match &mut self.lent {
            Some((id, bytes)) if *id == op => bytes,
            _ => self.owned.get_mut(&op).map_or(&mut [], |buffer| buffer.bytes_mut()),
        }
    }
}

impl Core {
    pub(super) fn new(
        config: JoinConfig,
        situation: Situation,
        tree: Option<TreeDriver<UdpPort>>,
        mesh: Mesh,
        session: Session,
        lost: std::sync::Arc<Lost>,
    ) -> Self {
        Self {
            config,
            situation,
            tree,
            mesh,
            session: Some(session),
            lost,
            owned: BTreeMap::new(),
            started: BTreeMap::new(),
            schedules: VecDeque::new(),
            next_handle: 0,
            completed_below: 0,
            scheduled: 0,
            ended: None,
            fallback_told: false,
        }
    }

    pub(super) fn explain(&self, desc: &OpDesc, options: &CallOptions) -> Explanation {
        explain(&self.situation, desc, options.algo.unwrap_or(self.config.algo))
    }

    /// Run an operation in `buffer` to its end.
    pub(super) fn run(&mut self, desc: OpDesc, buffer: &mut [u8], options: &CallOptions) -> Result<Outcome, Error> {
        self.usable()?;
        let (path, fallback) = self.choose(&desc, options)?;
        let deadline = self.deadline(options);
        let begun = self.mark();
        let result = match path {
            Path::Local => run_alone(&desc, buffer),
            // Schedules that were started before must run before: the other ranks wait for them in that order.
            Path::Tree => self.run_in_tree(desc, buffer, deadline),
            _ => self.run_started(deadline).and_then(|()| {
                let op = self.tell_tree(&desc, path);
                op.and_then(|_| self.run_schedule(desc, path, buffer, deadline))
            }),
        };
        result.map_err(|error| self.end(error, &desc, begun))?;
        Ok(self.outcome(path, fallback, begun))
    }

    /// Start an operation in a buffer that the communicator owns until it is waited for.
    pub(super) fn start(
        &mut self,
        desc: OpDesc,
        mut buffer: Box<dyn OwnedBuffer>,
        options: &CallOptions,
    ) -> Result<u64, Error> {
        self.usable()?;
        let (path, fallback) = self.choose(&desc, options)?;
        let begun = self.mark();
        let handle = self.next_handle;
        let mut started = Started { desc, path, fallback, tree_op: None, begun, buffer: None, finished: None };
        match path {
            Path::Local => {
                run_alone(&desc, buffer.bytes_mut())?;
                started.finished = Some(Ok(self.outcome(path, None, begun)));
                started.buffer = Some(buffer);
            }
            Path::Tree => {
                let op = self.post(&desc, path)?;
                started.tree_op = op;
                if let Some(op) = op {
                    self.owned.insert(op, buffer);
                }
            }
            _ => {
                started.tree_op = self.post(&desc, path)?;
                started.buffer = Some(buffer);
                self.schedules.push_back(handle);
            }
        }
        self.next_handle += 1;
        self.started.insert(handle, started);
        self.pump(None);
        Ok(handle)
    }

    /// Tell whether a started operation has ended; drives what can be driven without waiting. A schedule is run,
    /// which takes as long as it takes.
    pub(super) fn test(&mut self, handle: u64, options: &CallOptions) -> bool {
        let deadline = self.deadline(options);
        if self.schedules.contains(&handle) {
            self.wait_for(handle, deadline);
            return true;
        }
        self.pump(None);
        self.settle(handle);
        self.started.get(&handle).is_none_or(|started| started.finished.is_some())
    }

    /// Wait for a started operation, and give its buffer back.
    pub(super) fn finish(
        &mut self,
        handle: u64,
        options: &CallOptions,
    ) -> (Option<Box<dyn OwnedBuffer>>, Result<Outcome, Error>) {
        let deadline = self.deadline(options);
        self.wait_for(handle, deadline);
        let Some(started) = self.started.remove(&handle) else {
            return (None, Err(Error::Argument("the handle is not of this communicator".into())));
        };
        let in_tree = started.tree_op.and_then(|op| self.owned.remove(&op));
        let ended = self.ended.clone().unwrap_or(Error::PathLost);
        (started.buffer.or(in_tree), started.finished.unwrap_or(Err(ended)))
    }

    fn wait_for(&mut self, handle: u64, deadline: (Instant, Duration)) {
        while let Some(position) = self.schedules.iter().position(|&other| other == handle) {
            debug_assert!(position < self.schedules.len());
            if self.run_next_schedule(deadline).is_err() {
                break;
            }
        }
        loop {
            self.settle(handle);
            let Some(started) = self.started.get(&handle).filter(|started| started.finished.is_none()) else { return };
            let (desc, begun) = (started.desc, started.begun);
            if let Err(error) = self.step(None, deadline) {
                let error = self.end(error, &desc, begun);
                if let Some(started) = self.started.get_mut(&handle) {
                    started.finished = Some(Err(error));
                }
            }
        }
    }

    /// Note the end of a started operation in the tree, if it has come.
    fn settle(&mut self, handle: u64) {
        let Some(started) = self.started.get(&handle).filter(|started| started.finished.is_none()) else { return };
        if started.path == Path::Tree && started.tree_op.is_none_or(|op| op.0 < self.completed_below) {
            let (path, fallback, begun) = (started.path, started.fallback.clone(), started.begun);
            let outcome = self.outcome(path, fallback, begun);
            if let Some(started) = self.started.get_mut(&handle) {
                started.finished = Some(Ok(outcome));
            }
        } else if let Some(error) = &self.ended {
            let error = error.clone();
            if let Some(started) = self.started.get_mut(&handle) {
                started.finished = Some(Err(error));
            }
        }
    }

    /// Run all started schedules, in the order of posting.
    fn run_started(&mut self, deadline: (Instant, Duration)) -> Result<(), Error> {
        while !self.schedules.is_empty() {
            self.run_next_schedule(deadline)?;
        }
        Ok(())
    }

    fn run_next_schedule(&mut self, deadline: (Instant, Duration)) -> Result<(), Error> {
        let Some(handle) = self.schedules.pop_front() else { return Ok(()) };
        let Some(mut started) = self.started.remove(&handle) else { return Ok(()) };
        let mut buffer = started.buffer.take();
        let bytes = buffer.as_mut().map_or(&mut [][..], |buffer| buffer.bytes_mut());
        let result = self.run_schedule(started.desc, started.path, bytes, deadline);
        let result = result.map_err(|error| self.end(error, &started.desc, started.begun));
        started.buffer = buffer;
        let outcome = self.outcome(started.path, started.fallback.clone(), started.begun);
        started.finished = Some(result.clone().map(|()| outcome));
        self.started.insert(handle, started);
        result
    }

    fn usable(&self) -> Result<(), Error> {
        match &self.ended {
            Some(error) => Err(Error::Ended(Box::new(error.clone()))),
            None => Ok(()),
        }
    }

    /// Choose the path; what was left open and can't go through the tree is a fallback, which is logged.
    fn choose(&mut self, desc: &OpDesc, options: &CallOptions) -> Result<(Path, Option<String>), Error> {
        if self.config.world == 1 {
            return Ok((Path::Local, None));
        }
        let explanation = self.explain(desc, options);
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
        Ok((path, fallback))
    }

    fn deadline(&self, options: &CallOptions) -> (Instant, Duration) {
        let limit = options.deadline.unwrap_or(self.config.deadline);
        (Instant::now() + limit, limit)
    }

    fn mark(&self) -> Mark {
        let stats = self.tree.as_ref().map(|tree| *tree.endpoint().stats()).unwrap_or_default();
        Mark {
            wire_bytes: stats.bytes_out + self.mesh.sent_bytes(),
            retransmits: stats.retransmits,
            at: Instant::now(),
        }
    }

    fn outcome(&self, path: Path, fallback: Option<String>, begun: Mark) -> Outcome {
        let now = self.mark();
        Outcome {
            path,
            fallback,
            wire_bytes: now.wire_bytes - begun.wire_bytes,
            retransmits: now.retransmits - begun.retransmits,
            repaired: false,
        }
    }

    /// The communicator ends, unless the error changed nothing.
    fn end(&mut self, error: Error, desc: &OpDesc, begun: Mark) -> Error {
        let error = match error {
            Error::Schedule(ExecError::Deadline { .. }) => Error::Deadline { desc: *desc, waited: begun.at.elapsed() },
            other => other,
        };
        if !error.is_harmless() && self.ended.is_none() {
            let (job, rank) = (&self.config.job, self.config.rank);
            tracing::debug!(job, rank, %desc, %error, "communicator ends");
            self.ended = Some(error.clone());
        }
        error
    }

    fn post(&mut self, desc: &OpDesc, path: Path) -> Result<Option<OpId>, Error> {
        let Some(tree) = &mut self.tree else { return Ok(None) };
        Ok(Some(tree.endpoint_mut().post(*desc, path)?))
    }

    /// Tell the tree what this rank calls by a schedule, so that ranks which call different things find out. A tree
    /// that is lost can't be told, and a schedule does not need it.
    fn tell_tree(&mut self, desc: &OpDesc, path: Path) -> Result<Option<OpId>, Error> {
        match self.post(desc, path) {
            Err(Error::PathLost | Error::GroupLost) => Ok(None),
            other => other,
        }
    }

    fn run_in_tree(&mut self, desc: OpDesc, buffer: &mut [u8], deadline: (Instant, Duration)) -> Result<(), Error> {
        let Some(op) = self.post(&desc, Path::Tree)? else { return Ok(()) };
        while op.0 >= self.completed_below {
            self.step(Some((op, &mut *buffer)), deadline).map_err(|error| match error {
                Error::Deadline { waited, .. } => Error::Deadline { desc, waited },
                other => other,
            })?;
        }
        Ok(())
    }

    /// Drive the tree once and wait for the next packet.
    fn step(&mut self, lent: Option<(OpId, &mut [u8])>, (at, limit): (Instant, Duration)) -> Result<(), Error> {
        let completed = self.completed_below;
        let next = self.pump(lent);
        if let Some(error) = self.tree_error() {
            return Err(error);
        }
        if self.completed_below > completed {
            return Ok(());
        }
        let now = Instant::now();
        if now >= at {
            return Err(Error::Deadline { desc: OpDesc::barrier(), waited: limit });
        }
        let mut wait = at - now;
        if let Some(next) = next {
            wait = wait.min(next);
        }
        if let Some(rank) = self.lost.rank() {
            // What it had contributed may still complete: that is on its way already, or never comes.
            if now >= at.checked_sub(limit).unwrap_or(now) + GRACE {
                return Err(Error::RankLost { rank });
            }
            wait = wait.min(GRACE / 4);
        }
        if let Some(tree) = self.tree.as_mut().filter(|_| !wait.is_zero()) {
            tree.wait(Some(wait));
        }
        Ok(())
    }

    fn tree_error(&self) -> Option<Error> {
        self.tree.as_ref().and_then(|tree| tree.endpoint().error()).map(Error::from)
    }

    /// Drive the tree without waiting; returns when it wants to be driven again.
    fn pump(&mut self, lent: Option<(OpId, &mut [u8])>) -> Option<Duration> {
        let tree = self.tree.as_mut()?;
        let mut buffers = Lent { owned: &mut self.owned, lent };
        let next = tree.pump(&mut buffers);
        while let Some(event) = tree.endpoint_mut().poll_event() {
            if let Event::Completed(op) = event {
                self.completed_below = op.0 + 1;
            }
        }
        next
    }

    fn run_schedule(
        &mut self,
        desc: OpDesc,
        path: Path,
        buffer: &mut [u8],
        deadline: (Instant, Duration),
    ) -> Result<(), Error> {
        let kernel = desc.dtype.zip(desc.op).and_then(|(dtype, op)| Kernel::new(dtype, op));
        let schedule = schedule(&desc, path, &self.mesh)?;
        let ctx = Context {
            op_index: self.scheduled,
            signature: desc.signature(path, self.situation.table.version),
            desc,
            path,
            deadline: deadline.0,
        };
        self.scheduled += 1;
        let mut along = Along {
            tree: self.tree.as_mut(),
            owned: &mut self.owned,
            completed_below: &mut self.completed_below,
            rank: Rank(self.config.rank),
            wake_at: None,
            mismatch: None,
        };
        // What is told to the tree leaves before the schedule begins.
        along.check()?;
        let result = execute(&mut self.mesh, &schedule, kernel.as_ref(), buffer, &ctx, &mut along);
        match (result, along.mismatch) {
            (Err(_), Some(error)) => Err(error.into()),
            (result, _) => Ok(result?),
        }
    }

    /// Leave the job: the controller frees the group when all ranks have.
    pub(super) fn leave(&mut self) {
        if let Some(session) = self.session.take() {
            session.leave();
        }
    }
}

/// The tree's endpoint, driven from within a schedule's poll loop.
struct Along<'c> {
    tree: Option<&'c mut TreeDriver<UdpPort>>,
    owned: &'c mut BTreeMap<OpId, Box<dyn OwnedBuffer>>,
    completed_below: &'c mut u64,
    rank: Rank,
    wake_at: Option<Instant>,
    mismatch: Option<EndpointError>,
}

impl Interrupt for Along<'_> {
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        self.tree.as_ref().map(|tree| tree.port().poll_fd())
    }

    fn check(&mut self) -> Result<(), ExecError> {
        let Some(tree) = &mut self.tree else { return Ok(()) };
        let next = tree.pump(&mut Lent { owned: &mut *self.owned, lent: None });
        self.wake_at = next.map(|next| Instant::now() + next);
        while let Some(event) = tree.endpoint_mut().poll_event() {
            match event {
                Event::Completed(op) => *self.completed_below = op.0 + 1,
                Event::Failed(error @ EndpointError::Mismatch { .. }) => {
                    self.mismatch = Some(error);
                    return Err(ExecError::Interrupted { rank: self.rank, reason: error.to_string() });
                }
                // The schedule does not need the tree; whoever uses it next hears of its loss.
                Event::Failed(error) => tracing::warn!(%error, "the tree is lost during a schedule"),
            }
        }
        Ok(())
    }

    fn wake_at(&self) -> Option<Instant> {
        self.wake_at
    }
}

/// Make the schedule of a path.
fn schedule(desc: &OpDesc, path: Path, mesh: &Mesh) -> Result<Schedule, Error> {
    let count = usize::try_from(desc.count).map_err(|_| Error::Argument(format!("{} elements", desc.count)))?;
    match (desc.collective, path) {
        (Collective::AllReduce, Path::Ring) => Ok(ring::all_reduce(mesh.place(), count)),
        (Collective::AllReduce, Path::HalvingDoubling) => Ok(halving_doubling::all_reduce(mesh.place(), count)),
        (Collective::Barrier, Path::Dissemination) => Ok(dissemination::barrier(mesh.place())),
        (collective, path) => Err(Error::Argument(format!("{} is no schedule for {collective}", path.name()))),
    }
}

/// A communicator of one rank: the result is the input, rounded as a result is (NaNs become canonical).
fn run_alone(desc: &OpDesc, buffer: &mut [u8]) -> Result<(), Error> {
    let Some(kernel) = desc.dtype.zip(desc.op).and_then(|(dtype, op)| Kernel::new(dtype, op)) else { return Ok(()) };
    let mut acc = [0; 4096];
    let per_block = acc.len() / kernel.accumulator_bytes();
    for block in buffer.chunks_mut(per_block * kernel.element_bytes()) {
        let elements = block.len() / kernel.element_bytes();
        let acc = &mut acc[..elements * kernel.accumulator_bytes()];
        kernel.load(acc, block, false);
        kernel.store(block, acc, 1);
    }
    Ok(())
}

/// How long an operation goes on after a rank was lost.
const GRACE: Duration = Duration::from_millis(250);
