//! A harness for started operations, for simulators that have a tree and connections of their own: the production
//! bookkeeping, one step at a time.
//!
//! The caller posts operations in an endpoint, whose buffers are [`Operations::buffers`], reports what completes there,
//! and runs host collectives when it is told to.

use super::decided::Chosen;
use super::dropped::Dropped;
use super::error::Error;
use super::extent::Extent;
use super::in_flight::{InFlight, TreeBuffers};
use super::operations::{self, AfterLoss, CounterSnapshot, Ending, Started};
pub use super::operations::{Awaited, NextStep};
use super::options::Outcome;
use super::owned::Owned;
use crate::schedule::Place;
use crate::select::Algo;
use crate::transport::packets::{Buffers, OpId};
use std::collections::BTreeMap;
use std::time::Instant;
use sumac_hal::op::{OpDesc, Path};
#[cfg(feature = "planted")]
use sumac_hal::planted::Bug;
use sumac_hal::wire::RankMask;

/// Where an operation was launched, and its number in the tree: of itself, or of the announcement of a host collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launched {
    /// The path.
    pub path: Path,
    /// Its number in the tree, if it was posted there.
    pub op: Option<OpId>,
}

/// The buffers of a started operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartedBuffers {
    /// The input, and also the output unless that is separate.
    pub memory: Vec<u8>,
    /// A separate output.
    pub output: Option<Vec<u8>>,
}

/// A rank's started operations.
pub struct Operations {
    place: Place,
    capacity: usize,
    operations: operations::Operations,
    dropped: Dropped,
    /// Operations of the present tree are complete below this number.
    completed_below: OpId,
    /// The buffers that were in a lost tree, until its recovery has ended.
    in_lost_tree: Option<BTreeMap<OpId, TreeBuffers>>,
    /// The host collective that is running.
    running: Option<(u64, Started)>,
    ended: Option<Error>,
}

/// The buffers of operations in the tree.
pub struct InTree<'c>(InFlight<'c, 'static>);

impl InTree<'_> {
    /// Return whether an operation has buffers.
    pub fn has(&self, op: OpId) -> bool {
        self.0.owned.contains_key(&op)
    }
}

impl Buffers for InTree<'_> {
    fn input(&self, op: OpId) -> &[u8] {
        self.0.input(op)
    }

    fn output(&mut self, op: OpId) -> &mut [u8] {
        self.0.output(op)
    }
}

impl Operations {
    /// Make a rank that has started nothing, with room for this many operations in the tree, and as many host
    /// collectives.
    pub fn new(place: Place, capacity: usize) -> Self {
        Self {
            place,
            capacity,
            operations: operations::Operations::new(capacity),
            dropped: Dropped::default(),
            completed_below: OpId(0),
            in_lost_tree: None,
            running: None,
            ended: None,
        }
    }

    /// Plant a bug.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, bug: Bug) {
        self.operations.bug = Some(bug);
    }

    /// Start an operation, which is this call of the rank. Returns its handle.
    ///
    /// # Panics
    /// If no operation is described so.
    pub fn start(&mut self, desc: OpDesc, call: u64, launched: Launched, buffers: StartedBuffers) -> u64 {
        let mut started = Started::new((desc, call), (Algo::Auto, chosen(Path::Tree)), None, counters());
        let extent = Extent::of(&desc, self.place).expect("an operation");
        let output = buffers.output.map(|output| Box::new(output) as Box<dyn super::ErasedBuffer>);
        let owned = Owned { memory: Box::new(buffers.memory), output, scaled: None, extent };
        self.launch(self.operations.next_handle(), &mut started, launched, owned);
        self.operations.start(started)
    }

    fn launch(&mut self, handle: u64, started: &mut Started, launched: Launched, owned: Owned) {
        (started.chosen, started.tree_op) = (chosen(launched.path), launched.op);
        match launched {
            Launched { path: Path::Tree, op: Some(op) } => self.operations.own(op, handle, owned),
            _ => {
                started.buffers = Some(owned);
                self.operations.queue_schedule(handle);
            }
        }
    }

    /// Queue a dropped handle. [`Operations::reclaim_dropped`] processes the queue.
    pub fn drop_handle(&self, handle: u64) {
        self.dropped.push(handle);
    }

    /// Process dropped handles, as a call does whenever it drives the tree.
    pub fn reclaim_dropped(&mut self) {
        for handle in self.dropped.take().0 {
            self.try_finish(handle);
            self.operations.detach(handle);
        }
    }

    /// Return the buffers of operations in the tree.
    pub fn buffers(&mut self) -> InTree<'_> {
        match &mut self.in_lost_tree {
            Some(owned) => InTree(InFlight { owned, borrowed: None }),
            None => InTree(self.operations.in_flight(None)),
        }
    }

    /// An operation has completed in the tree.
    pub fn complete(&mut self, op: OpId) {
        self.completed_below = OpId(op.0 + 1);
        self.operations.complete(op);
    }

    /// Return whether another operation can be started.
    pub fn has_room(&self) -> bool {
        let in_tree = self.operations.in_tree(self.completed_below);
        self.operations.has_room() && in_tree < self.capacity
    }

    /// Return what a rank does next that waits.
    pub fn next_step(&mut self, awaited: Awaited) -> NextStep {
        if let Awaited::Operation(handle) = awaited {
            self.try_finish(handle);
        }
        self.operations.next_step(awaited, self.completed_below, self.ended.is_some())
    }

    fn try_finish(&mut self, handle: u64) {
        let ending = self.operations.ending(handle, self.completed_below, self.ended.is_some());
        let finished = match (ending, &self.ended) {
            (None, _) => return,
            (Some(Ending::Cut(_)), Some(error)) => Err(error.clone()),
            (Some(Ending::Complete(_) | Ending::Cut(_)), _) => Ok(outcome(Path::Tree)),
        };
        if let Some(started) = self.operations.get_mut(handle) {
            started.finished = Some(finished);
        }
    }

    /// Begin the oldest host collective. Returns its handle; `None` if the tree must be driven first.
    pub fn begin_schedule(&mut self) -> Option<u64> {
        if self.operations.blocked_schedule(self.completed_below).is_some() {
            return None;
        }
        let (handle, mut started) = self.operations.begin_schedule()?;
        started.tree_op = None;
        self.running = Some((handle, started));
        Some(handle)
    }

    /// Return the handle of the host collective that is running.
    pub fn running(&self) -> Option<u64> {
        self.running.as_ref().map(|(handle, _)| *handle)
    }

    /// The host collective that was running has left these buffers, or has failed.
    pub fn end_schedule(&mut self, result: Result<StartedBuffers, Error>) {
        let Some((handle, mut started)) = self.running.take() else { return };
        let result = result.map(|found| {
            let owned = started.buffers.as_mut().expect("of a host collective");
            owned.memory.bytes_mut().copy_from_slice(&found.memory);
            if let Some((output, found)) = owned.output.as_mut().zip(found.output) {
                output.bytes_mut().copy_from_slice(&found);
            }
            outcome(started.chosen.path)
        });
        self.operations.end_schedule(handle, started, result);
    }

    /// Wait no longer for an operation that has ended, or whose communicator has. Returns its buffers, and how it
    /// ended.
    pub fn finish(&mut self, handle: u64) -> Option<(StartedBuffers, Result<(), Error>)> {
        let started = self.operations.take(handle)?;
        let in_tree = started.tree_op.and_then(|op| self.operations.disown(op));
        let owned = started.buffers.or(in_tree)?;
        let ended = self.ended.clone().unwrap_or(Error::PathLost);
        let (memory, output) = (owned.memory.bytes().to_vec(), owned.output.map(|output| output.bytes().to_vec()));
        let result = started.finished.unwrap_or(Err(ended)).map(|_| ());
        Some((StartedBuffers { memory, output }, result))
    }

    /// The tree is lost: take its buffers out, and return the call numbers of its operations and of the first
    /// incomplete call that is not there, where `begun` calls have begun.
    pub fn freeze(&mut self, begun: u64) -> (BTreeMap<OpId, u64>, u64) {
        let pending = self.operations.pending_calls(None, begun);
        self.in_lost_tree = Some(self.operations.take_owned());
        pending
    }

    /// The recovery has ended: put the buffers of the lost tree back.
    pub fn restore(&mut self) {
        if let Some(owned) = self.in_lost_tree.take() {
            self.operations.restore(owned);
        }
    }

    /// Continue after a tree, where operations are complete below a number: `launch` the others again, in the order of
    /// their calls.
    pub fn relaunch(&mut self, completed_below: OpId, mut launch: impl FnMut(&OpDesc, u64) -> Launched) {
        self.completed_below = OpId(0);
        for handle in self.operations.handles() {
            let Some(mut started) = self.operations.take(handle) else { continue };
            match self.operations.leave_tree(&mut started, completed_below) {
                AfterLoss::Unaffected => {}
                AfterLoss::Complete => _ = started.finished.get_or_insert(Ok(outcome(Path::Tree))),
                AfterLoss::Pending(buffers) => {
                    let launched = launch(&started.desc, started.call);
                    self.launch(handle, &mut started, launched, buffers);
                }
            }
            self.operations.put_back(handle, started);
        }
        self.operations.reclaim_ended(self.ended.is_some());
    }

    /// The communicator ends.
    pub fn end(&mut self, error: Error) {
        self.restore();
        self.ended = Some(error.clone());
        self.end_schedule(Err(error));
        self.operations.reclaim_ended(self.ended.is_some());
    }

    /// Return the number of operations that the communicator holds, and the size of their buffers in bytes.
    pub fn outstanding(&self) -> (usize, usize) {
        self.operations.outstanding()
    }
}

fn chosen(path: Path) -> Chosen {
    Chosen { path, fallback: None, is_announced: true }
}

/// Nothing was counted.
fn counters() -> CounterSnapshot {
    CounterSnapshot { view: 0, wire_bytes: 0, retransmits: 0, at: Instant::now() }
}

fn outcome(path: Path) -> Outcome {
    Outcome {
        trees: u32::from(path == Path::Tree),
        path,
        transfer: None,
        fallback: None,
        wire_bytes: 0,
        retransmits: 0,
        recovered: false,
        slowest: None,
        missing: RankMask::EMPTY,
    }
}
