//! Operations in flight: which calls they are, and the buffers that the communicator owns for them.
//!
//! Invariants:
//! - every buffer in the tree belongs to a started operation;
//! - host collectives that have not run are in the order of posting, which is the order in which they run;
//! - a caller first runs the host collectives that were started before what it waits for: its peers may wait in them;
//! - an operation whose handle was dropped keeps its buffers until it has ended;
//! - once the communicator has ended, no host collective begins;
//! - calls are numbered alike on all ranks: a rejected call gives its number to the next.

use super::counts::Counts;
use super::decided::Chosen;
use super::error::Error;
use super::in_flight::{BorrowedBuffers, InFlight, TreeBuffers};
use super::options::Outcome;
use super::owned::Owned;
use crate::schedule::Schedule;
use crate::select::Algo;
use crate::transport::memory::Transfer;
use crate::transport::packets::OpId;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::planted;
#[cfg(feature = "planted")]
use sumac_hal::planted::Bug;
use sumac_hal::wire::StragglerLimit;

/// What a caller waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(feature = "snapshot"), expect(unreachable_pub, reason = "simulators of other crates name it"))]
pub enum Awaited {
    /// The end of the operation with this handle.
    Operation(u64),
    /// The end of all started operations.
    All,
    /// Room for another operation, which there is not.
    Room,
}

/// What a caller that waits does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(feature = "snapshot"), expect(unreachable_pub, reason = "simulators of other crates name it"))]
pub enum NextStep {
    /// Return: what it waits for has happened.
    Return,
    /// Run the oldest host collective.
    RunSchedule,
    /// Drive the tree.
    DriveTree,
}

/// How an operation ends. In the tree it has the given number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// It is complete.
    Complete(Option<OpId>),
    /// The communicator has ended before it was complete.
    Cut(Option<OpId>),
}

/// What the loss of a tree means for an operation.
pub(super) enum AfterLoss {
    /// Nothing: it is a host collective.
    Unaffected,
    /// It is complete.
    Complete,
    /// It must be launched again, on these buffers.
    Pending(Owned),
}

/// What the completion of an operation in the tree means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Completed {
    /// Its handle had been dropped, and it is freed.
    Freed,
    /// A started operation: its handle will be waited for.
    Started,
    /// Nothing to a started operation.
    Other,
}

/// A host collective that is running.
struct Scheduling {
    handle: u64,
    call: u64,
    /// Its handle was dropped meanwhile.
    is_detached: bool,
}

/// Return the number of a call as other ranks are told it: from 1, modulo 2^32.
pub(super) const fn number_of(call: u64) -> u32 {
    (call as u32).wrapping_add(1)
}

/// Counters at the beginning of an operation.
#[derive(Clone, Copy)]
pub(super) struct CounterSnapshot {
    /// Recoveries so far.
    pub(super) view: u32,
    pub(super) wire_bytes: u64,
    pub(super) retransmits: u64,
    pub(super) at: Instant,
}

/// An operation that has been started, and not waited for.
pub(super) struct Started {
    pub(super) desc: OpDesc,
    /// Its number among all calls.
    pub(super) call: u64,
    /// The algorithms that its path is selected among.
    pub(super) algo: Algo,
    pub(super) chosen: Chosen,
    /// The operation in the tree's endpoint, or the announcement of a host collective.
    pub(super) tree_op: Option<OpId>,
    /// Its straggler limit.
    pub(super) limit: Option<StragglerLimit>,
    pub(super) transfer: Option<Transfer>,
    pub(super) begun: CounterSnapshot,
    /// When it was first tested. A caller that only tests has waited since then.
    pub(super) tested: Option<Instant>,
    /// The buffers of a host collective; `None` in the tree, where [`TreeBuffers`] has them.
    pub(super) buffers: Option<Owned>,
    /// The schedule of a host collective. It is made at the start, so that nothing is rejected later.
    pub(super) schedule: Option<Arc<Schedule>>,
    /// Those of one on uneven blocks.
    pub(super) counts: Option<Counts>,
    pub(super) finished: Option<Result<Outcome, Error>>,
    /// Its handle was dropped: free its buffers when it has ended.
    pub(super) is_detached: bool,
}

impl Started {
    /// Make one that waits for nothing yet: of this call, decided so, with the counts at its start.
    pub(super) fn new(
        (desc, call): (OpDesc, u64),
        (algo, chosen): (Algo, Chosen),
        limit: Option<StragglerLimit>,
        begun: CounterSnapshot,
    ) -> Self {
        Self {
            desc,
            call,
            algo,
            chosen,
            tree_op: None,
            limit,
            transfer: None,
            begun,
            tested: None,
            buffers: None,
            schedule: None,
            counts: None,
            finished: None,
            is_detached: false,
        }
    }
}

/// The operations of a communicator in flight.
pub(super) struct Operations {
    /// The maximum number of started host collectives that have not run.
    capacity: usize,
    /// Buffers of started operations in the tree.
    owned: BTreeMap<OpId, TreeBuffers>,
    started: BTreeMap<u64, Started>,
    /// Started host collectives that have not run, in the order of posting.
    schedules: VecDeque<u64>,
    next_handle: u64,
    /// The number of the call that is running.
    pub(super) calling: Option<u64>,
    /// The operation of the call that is running, while it waits in the tree.
    pub(super) calling_in_tree: Option<OpDesc>,
    /// The started call whose schedule is running.
    scheduling: Option<Scheduling>,
    #[cfg(feature = "planted")]
    pub(super) bug: Option<Bug>,
}

impl Operations {
    /// Make a communicator's, with room for this many started host collectives.
    pub(super) const fn new(capacity: usize) -> Self {
        Self {
            capacity,
            owned: BTreeMap::new(),
            started: BTreeMap::new(),
            schedules: VecDeque::new(),
            next_handle: 0,
            calling: None,
            calling_in_tree: None,
            scheduling: None,
            #[cfg(feature = "planted")]
            bug: None,
        }
    }

    /// Return the handle of the next operation to be started.
    pub(super) const fn next_handle(&self) -> u64 {
        self.next_handle
    }

    /// Add an operation under the next handle.
    pub(super) fn start(&mut self, started: Started) -> u64 {
        let handle = self.next_handle;
        self.next_handle += 1;
        self.started.insert(handle, started);
        handle
    }

    pub(super) fn get(&self, handle: u64) -> Option<&Started> {
        self.started.get(&handle)
    }

    /// Return an operation that has not ended.
    pub(super) fn unfinished(&self, handle: u64) -> Option<&Started> {
        self.started.get(&handle).filter(|started| started.finished.is_none())
    }

    pub(super) fn get_mut(&mut self, handle: u64) -> Option<&mut Started> {
        self.started.get_mut(&handle)
    }

    pub(super) fn take(&mut self, handle: u64) -> Option<Started> {
        self.started.remove(&handle)
    }

    pub(super) fn put_back(&mut self, handle: u64, started: Started) {
        self.started.insert(handle, started);
    }

    pub(super) fn handles(&self) -> Vec<u64> {
        self.started.keys().copied().collect()
    }

    /// Hand the buffers of an operation over to the tree.
    pub(super) fn own(&mut self, op: OpId, handle: u64, buffers: Owned) {
        self.owned.insert(op, TreeBuffers { handle, buffers });
    }

    /// Take the buffers of an operation back from the tree.
    pub(super) fn disown(&mut self, op: OpId) -> Option<Owned> {
        self.owned.remove(&op).map(|in_tree| in_tree.buffers)
    }

    /// Return whether an operation in the tree is not complete.
    pub(super) fn is_any_in_tree(&self, completed_below: OpId) -> bool {
        self.owned.range(completed_below..).next().is_some()
    }

    /// Return the number of operations in the tree that are not complete.
    #[cfg(feature = "snapshot")]
    pub(super) fn in_tree(&self, completed_below: OpId) -> usize {
        self.owned.range(completed_below..).count()
    }

    /// Return all buffers in the tree, with those that a blocking call borrows.
    pub(super) const fn in_flight<'c, 'b>(&'c mut self, borrowed: Option<BorrowedBuffers<'c, 'b>>) -> InFlight<'c, 'b> {
        InFlight { owned: &mut self.owned, borrowed }
    }

    /// Take out the buffers in the tree, which is lost; [`Operations::restore`] puts them back.
    pub(super) fn take_owned(&mut self) -> BTreeMap<OpId, TreeBuffers> {
        std::mem::take(&mut self.owned)
    }

    pub(super) fn restore(&mut self, owned: BTreeMap<OpId, TreeBuffers>) {
        self.owned = owned;
    }

    /// Queue a host collective. Keeps the order of posting, also for an operation that has lost its tree.
    pub(super) fn queue_schedule(&mut self, handle: u64) {
        let at = self.schedules.partition_point(|&other| other < handle);
        self.schedules.insert(at, handle);
    }

    /// Take the oldest host collective to run it. [`Operations::end_schedule`] takes it back.
    pub(super) fn begin_schedule(&mut self) -> Option<(u64, Started)> {
        let handle = self.schedules.pop_front()?;
        let started = self.started.remove(&handle)?;
        self.scheduling = Some(Scheduling { handle, call: started.call, is_detached: started.is_detached });
        Some((handle, started))
    }

    /// A host collective has run. It is freed if its handle was dropped, which may have happened meanwhile.
    pub(super) fn end_schedule(&mut self, handle: u64, mut started: Started, result: Result<Outcome, Error>) {
        let scheduling = self.scheduling.take();
        started.finished = Some(result);
        started.schedule = None;
        if !scheduling.is_some_and(|scheduling| scheduling.is_detached) {
            self.started.insert(handle, started);
        }
    }

    /// Return what a caller does next that waits; operations in the tree are complete below a number.
    pub(super) fn next_step(&self, awaited: Awaited, completed_below: OpId, has_ended: bool) -> NextStep {
        let is_before = |handle: &u64| match awaited {
            Awaited::Operation(last) if planted!(self, EarlierScheduleSkipped) => *handle == last,
            Awaited::Operation(last) => *handle <= last,
            Awaited::All => true,
            Awaited::Room => self.is_schedule_due(completed_below),
        };
        let is_over = match awaited {
            Awaited::Operation(handle) => self.unfinished(handle).is_none(),
            Awaited::All => self.schedules.is_empty() && !self.is_any_in_tree(completed_below),
            Awaited::Room => false,
        };
        let is_next = self.schedules.front().is_some_and(is_before);
        match is_over || has_ended {
            _ if is_next && has_ended && planted!(self, EndedScheduleRun) => NextStep::RunSchedule,
            true => NextStep::Return,
            false if is_next => NextStep::RunSchedule,
            false => NextStep::DriveTree,
        }
    }

    /// Return the oldest host collective, if the tree has an incomplete operation that was started before it.
    pub(super) fn blocked_schedule(&self, completed_below: OpId) -> Option<(OpDesc, CounterSnapshot)> {
        let oldest = self.schedules.front()?;
        // Operations are posted in the order of their handles.
        let is_blocked = self.owned.range(completed_below..).next().is_some_and(|(_, first)| first.handle < *oldest);
        let started = self.started.get(oldest).filter(|_| is_blocked)?;
        Some((started.desc, started.begun))
    }

    /// Return whether this host collective is running.
    pub(super) fn is_running(&self, handle: u64) -> bool {
        self.scheduling.as_ref().is_some_and(|scheduling| scheduling.handle == handle)
    }

    /// Return whether an operation has failed that was not waited for.
    pub(super) fn has_failed(&self) -> bool {
        self.started.values().any(|started| matches!(started.finished, Some(Err(_))))
    }

    /// Return the oldest operation that has not ended.
    pub(super) fn oldest(&self) -> Option<(OpDesc, CounterSnapshot)> {
        let oldest = self.started.values().find(|started| started.finished.is_none())?;
        Some((oldest.desc, oldest.begun))
    }

    /// Return whether none is started or running.
    pub(super) fn is_idle(&self) -> bool {
        self.schedules.is_empty() && self.owned.is_empty() && self.scheduling.is_none()
    }

    pub(super) fn has_schedules(&self) -> bool {
        !self.schedules.is_empty()
    }

    /// Return whether another host collective can be started.
    pub(super) fn has_room(&self) -> bool {
        self.schedules.len() < self.capacity
    }

    /// Return whether the oldest started host collective must run: all ranks have started it, or there is no room, or
    /// the tree does not know it, so that nobody can tell.
    pub(super) fn is_schedule_due(&self, completed_below: OpId) -> bool {
        let Some(oldest) = self.schedules.front() else { return false };
        let announced = self.started.get(oldest).and_then(|started| started.tree_op);
        self.schedules.len() >= self.capacity || announced.is_none_or(|op| op < completed_below)
    }

    /// Take a call's number back; later calls move up.
    pub(super) fn uncount_call(&mut self, call: u64) {
        let started = self.started.values_mut().map(|started| &mut started.call);
        let scheduling = self.scheduling.as_mut().map(|scheduling| &mut scheduling.call);
        let others = self.calling.iter_mut().chain(scheduling);
        started.chain(others).filter(|number| **number > call).for_each(|number| *number -= 1);
    }

    /// Return the number of the call whose schedule is running, as other ranks are told it.
    pub(super) fn scheduled_number(&self) -> u32 {
        let scheduling = self.scheduling.as_ref().map(|scheduling| scheduling.call);
        scheduling.or(self.calling).map_or(0, number_of)
    }

    /// Return whether any operation waits in the tree.
    pub(super) fn waits_in_tree(&self, completed_below: OpId) -> bool {
        self.calling_in_tree.is_some() || self.is_any_in_tree(completed_below)
    }

    /// Return the number of the first call that waits in the tree.
    pub(super) fn first_in_tree(&self, completed_below: OpId) -> Option<u32> {
        let calling = self.calling.filter(|_| self.calling_in_tree.is_some());
        let in_tree = |(_, in_tree): (_, &TreeBuffers)| self.started.get(&in_tree.handle).map(|started| started.call);
        calling.into_iter().chain(self.owned.range(completed_below..).filter_map(in_tree)).min().map(number_of)
    }

    /// Return the operation of the call with this number, if it waits in the tree.
    pub(super) fn in_tree_by_number(&self, number: u32, completed_below: OpId) -> Option<OpDesc> {
        let calling = self.calling.zip(self.calling_in_tree);
        let in_tree = |(_, in_tree): (_, &TreeBuffers)| self.started.get(&in_tree.handle);
        let started = self.owned.range(completed_below..).filter_map(in_tree).map(|of| (of.call, of.desc));
        calling.into_iter().chain(started).find(|(call, _)| number_of(*call) == number).map(|(_, desc)| desc)
    }

    /// Return the call numbers of operations in the tree, and the first incomplete call that is not there; `next` is
    /// the next call.
    pub(super) fn pending_calls(&self, borrowed: Option<OpId>, next: u64) -> (BTreeMap<OpId, u64>, u64) {
        let unfinished = || self.started.values().filter(|started| started.finished.is_none());
        let in_tree = |started: &Started| started.tree_op.filter(|op| self.owned.contains_key(op));
        let mut calls: BTreeMap<OpId, u64> =
            unfinished().filter_map(|started| Some((in_tree(started)?, started.call))).collect();
        calls.extend(borrowed.zip(self.calling));
        let pending = self.calling.filter(|_| borrowed.is_none());
        let elsewhere = unfinished().filter(|started| in_tree(started).is_none()).map(|started| started.call);
        let scheduling = self.scheduling.as_ref().map(|scheduling| scheduling.call);
        let open = elsewhere.chain(pending).chain(scheduling).chain([next]).min();
        (calls, open.unwrap_or(0))
    }

    /// Return how an operation has ended, unless it was recorded or it has not.
    pub(super) fn ending(&self, handle: u64, completed_below: OpId, has_ended: bool) -> Option<Ending> {
        let started = self.unfinished(handle)?;
        let is_in_tree = started.chosen.path == Path::Tree;
        if is_in_tree && started.tree_op.is_none_or(|op| op < completed_below) {
            return Some(Ending::Complete(started.tree_op));
        }
        has_ended.then_some(Ending::Cut(started.tree_op.filter(|_| is_in_tree)))
    }

    /// The handle of an operation was dropped, whose end is recorded if it has ended. It continues, because other ranks
    /// need it, and is freed when it has ended. Returns the operation in the tree whose details nobody wants.
    pub(super) fn detach(&mut self, handle: u64) -> Option<OpId> {
        let (is_missed, is_free) = (planted!(self, RunningDropMissed), planted!(self, DroppedOperationFreed));
        if let Some(scheduling) = self.scheduling.as_mut().filter(|running| running.handle == handle && !is_missed) {
            scheduling.is_detached = true;
        }
        let started = self.started.get_mut(&handle)?;
        started.is_detached = true;
        if started.finished.is_some() || is_free { self.reclaim(handle) } else { None }
    }

    /// An operation in the tree is complete.
    pub(super) fn complete(&mut self, op: OpId) -> Completed {
        match self.detached_in_tree(op) {
            Some(handle) => {
                self.reclaim(handle);
                Completed::Freed
            }
            None if self.owned.contains_key(&op) => Completed::Started,
            None => Completed::Other,
        }
    }

    /// The tree is lost, where operations are complete below a number. Operation numbers are void, so no buffer stays
    /// under one.
    pub(super) fn leave_tree(&mut self, started: &mut Started, completed_below: OpId) -> AfterLoss {
        let Some(op) = started.tree_op.take().filter(|_| started.chosen.path == Path::Tree) else {
            return AfterLoss::Unaffected;
        };
        let buffers = self.disown(op);
        if started.finished.is_some() || op < completed_below {
            started.buffers = buffers;
            return AfterLoss::Complete;
        }
        buffers.map_or(AfterLoss::Unaffected, AfterLoss::Pending)
    }

    /// Free an operation. Returns the one in the tree, whose details nobody wants.
    fn reclaim(&mut self, handle: u64) -> Option<OpId> {
        let started = self.started.remove(&handle)?;
        let op = started.tree_op.filter(|_| started.chosen.path == Path::Tree)?;
        self.owned.remove(&op);
        Some(op)
    }

    /// Return the handle of a completed operation in the tree if it is detached.
    fn detached_in_tree(&self, op: OpId) -> Option<u64> {
        let handle = self.owned.get(&op)?.handle;
        self.started.get(&handle).is_some_and(|started| started.is_detached).then_some(handle)
    }

    /// Free the detached operations that have ended; all detached ones if the communicator `is_over`. Returns those in
    /// the tree, whose details nobody wants.
    pub(super) fn reclaim_ended(&mut self, is_over: bool) -> Vec<OpId> {
        let over = |started: &Started| started.is_detached && (is_over || started.finished.is_some());
        let ended: Vec<u64> = self.started.iter().filter(|(_, started)| over(started)).map(|(&of, _)| of).collect();
        let freed = ended.into_iter().filter_map(|handle| self.reclaim(handle)).collect();
        // Drop what belonged to operations that are gone.
        self.schedules.retain(|handle| self.started.contains_key(handle));
        self.owned.retain(|_, in_tree| self.started.contains_key(&in_tree.handle));
        freed
    }

    /// Return the number of started operations, and the size of their buffers in bytes.
    pub(super) fn outstanding(&self) -> (usize, usize) {
        let in_tree = self.owned.values().map(|in_tree| &in_tree.buffers);
        let elsewhere = self.started.values().filter_map(|started| started.buffers.as_ref());
        (self.started.len(), in_tree.chain(elsewhere).map(Owned::len_bytes).sum())
    }
}
