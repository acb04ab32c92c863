//! Operations in flight: which calls they are, and the buffers that the communicator owns for them.
//!
//! Invariants:
//! - every buffer in the tree belongs to a started operation;
//! - host collectives that have not run are in the order of posting, which is the order in which they run;
//! - calls are numbered alike on all ranks: a rejected call gives its number to the next.

use super::element::ErasedBuffer;
use super::error::Error;
use super::extent::Extent;
use super::options::Outcome;
use super::selection::Chosen;
use crate::exec::Buffers;
use crate::schedule::Schedule;
use crate::select::Algo;
use crate::transport::memory::Transfer;
use crate::transport::packets::{self, MAX_OPS, OpId};
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::wire::StragglerLimit;

/// Counters at the beginning of an operation.
#[derive(Clone, Copy)]
pub(super) struct CounterSnapshot {
    /// Recoveries so far.
    pub(super) view: u32,
    pub(super) wire_bytes: u64,
    pub(super) retransmits: u64,
    pub(super) at: Instant,
}

/// Buffers that the communicator owns while their operation is in flight.
pub(crate) struct Owned {
    /// The input, and also the output unless that is separate.
    pub(super) memory: Box<dyn ErasedBuffer>,
    pub(super) output: Option<Box<dyn ErasedBuffer>>,
    /// The scaled input, which is contributed instead.
    pub(super) scaled: Option<Vec<u8>>,
    pub(super) extent: Extent,
}

impl Owned {
    pub(super) fn borrow_buffers(&mut self) -> Buffers<'_> {
        match (&self.scaled, &mut self.output) {
            (Some(input), Some(output)) => Buffers::Separate { input, output: output.bytes_mut() },
            (Some(input), None) => {
                Buffers::Separate { input, output: &mut self.memory.bytes_mut()[self.extent.output.clone()] }
            }
            (None, Some(output)) => Buffers::Separate { input: self.memory.bytes(), output: output.bytes_mut() },
            (None, None) => Buffers::InPlace(self.memory.bytes_mut()),
        }
    }

    fn len_bytes(&self) -> usize {
        let output = self.output.as_ref().map_or(0, |output| output.bytes().len());
        self.memory.bytes().len() + output + self.scaled.as_ref().map_or(0, Vec::len)
    }

    /// Return the buffer that holds the result.
    pub(crate) fn into_result(self) -> Box<dyn ErasedBuffer> {
        self.output.unwrap_or(self.memory)
    }

    /// Return the buffer that the caller passed.
    pub(crate) fn into_memory(self) -> Box<dyn ErasedBuffer> {
        self.memory
    }
}

/// The buffers of a started operation in the tree.
pub(super) struct TreeBuffers {
    handle: u64,
    buffers: Owned,
}

impl TreeBuffers {
    pub(super) fn input(&self) -> &[u8] {
        let Owned { memory, output, scaled, extent } = &self.buffers;
        match (scaled, output) {
            (Some(scaled), _) => scaled,
            (None, Some(_)) => memory.bytes(),
            (None, None) => &memory.bytes()[extent.input.clone()],
        }
    }

    pub(super) fn output(&mut self) -> &mut [u8] {
        let Owned { memory, output, extent, .. } = &mut self.buffers;
        match output {
            Some(output) => output.bytes_mut(),
            None => &mut memory.bytes_mut()[extent.output.clone()],
        }
    }
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
    pub(super) schedule: Option<Schedule>,
    pub(super) finished: Option<Result<Outcome, Error>>,
    /// Its handle was dropped: free its buffers when it has ended.
    pub(super) is_detached: bool,
}

/// The buffers that a blocking call borrows from its caller.
pub(super) struct BorrowedBuffers<'c, 'b> {
    pub(super) op: OpId,
    pub(super) extent: &'c Extent,
    pub(super) buffers: &'c mut Buffers<'b>,
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

/// The operations of a communicator in flight.
#[derive(Default)]
pub(super) struct Operations {
    /// Buffers of started operations in the tree.
    owned: BTreeMap<OpId, TreeBuffers>,
    started: BTreeMap<u64, Started>,
    /// Started host collectives that have not run, in the order of posting.
    schedules: VecDeque<u64>,
    next_handle: u64,
    /// The number of the call that is running.
    pub(super) calling: Option<u64>,
    /// The number of the started call whose schedule is running.
    pub(super) scheduling: Option<u64>,
}

impl Operations {
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

    pub(super) fn is_owned(&self, op: OpId) -> bool {
        self.owned.contains_key(&op)
    }

    /// Return whether an operation in the tree is not complete.
    pub(super) fn is_any_in_tree(&self, completed_below: OpId) -> bool {
        self.owned.range(completed_below..).next().is_some()
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

    /// Take the oldest host collective to run it.
    pub(super) fn next_schedule(&mut self) -> Option<(u64, Started)> {
        let handle = self.schedules.pop_front()?;
        Some((handle, self.started.remove(&handle)?))
    }

    /// Return the oldest host collective, if the tree has an incomplete operation that was started before it.
    pub(super) fn blocked_schedule(&self, completed_below: OpId) -> Option<(OpDesc, CounterSnapshot)> {
        let oldest = self.schedules.front()?;
        // Operations are posted in the order of their handles.
        let is_blocked = self.owned.range(completed_below..).next().is_some_and(|(_, first)| first.handle < *oldest);
        let started = self.started.get(oldest).filter(|_| is_blocked)?;
        Some((started.desc, started.begun))
    }

    pub(super) fn has_schedules(&self) -> bool {
        !self.schedules.is_empty()
    }

    pub(super) fn is_scheduled(&self, handle: u64) -> bool {
        self.schedules.contains(&handle)
    }

    /// Return whether another host collective can be started.
    pub(super) fn has_room(&self) -> bool {
        self.schedules.len() < MAX_OPS
    }

    /// Return whether the oldest started host collective must run: all ranks have started it, or there is no room.
    pub(super) fn is_schedule_due(&self, completed_below: OpId) -> bool {
        let Some(oldest) = self.schedules.front() else { return false };
        let announced = self.started.get(oldest).and_then(|started| started.tree_op);
        self.schedules.len() >= MAX_OPS || announced.is_some_and(|op| op < completed_below)
    }

    /// Take a call's number back; later calls move up.
    pub(super) fn uncount_call(&mut self, call: u64) {
        let started = self.started.values_mut().map(|started| &mut started.call);
        let others = self.calling.iter_mut().chain(&mut self.scheduling);
        started.chain(others).filter(|number| **number > call).for_each(|number| *number -= 1);
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
        let open = elsewhere.chain(pending).chain(self.scheduling).chain([next]).min();
        (calls, open.unwrap_or(0))
    }

    /// Free an operation. Returns the one in the tree, whose details nobody wants.
    pub(super) fn reclaim(&mut self, handle: u64) -> Option<OpId> {
        let started = self.started.remove(&handle)?;
        let op = started.tree_op.filter(|_| started.chosen.path == Path::Tree)?;
        self.owned.remove(&op);
        Some(op)
    }

    /// Return the handle of a completed operation in the tree if it is detached.
    pub(super) fn detached_in_tree(&self, op: OpId) -> Option<u64> {
        let handle = self.owned.get(&op)?.handle;
        self.started.get(&handle).is_some_and(|started| started.is_detached).then_some(handle)
    }

    /// Return the detached operations that have ended; all detached ones if the communicator `is_over`.
    pub(super) fn ended_detached(&self, is_over: bool) -> Vec<u64> {
        let over = |started: &Started| started.is_detached && (is_over || started.finished.is_some());
        self.started.iter().filter(|(_, started)| over(started)).map(|(&of, _)| of).collect()
    }

    /// Drop what belonged to operations that are gone.
    pub(super) fn drop_orphans(&mut self) {
        self.schedules.retain(|handle| self.started.contains_key(handle));
        self.owned.retain(|_, in_tree| self.started.contains_key(&in_tree.handle));
    }

    /// Return the number of started operations, and the size of their buffers in bytes.
    pub(super) fn outstanding(&self) -> (usize, usize) {
        let in_tree = self.owned.values().map(|in_tree| &in_tree.buffers);
        let elsewhere = self.started.values().filter_map(|started| started.buffers.as_ref());
        (self.started.len(), in_tree.chain(elsewhere).map(Owned::len_bytes).sum())
    }
}
