//! A communicator's end of its present tree, over the trees that it has had.
//!
//! Invariants:
//! - operation numbers belong to the present tree: those below `completed_below` are complete there, and no detail of
//!   an operation outlives its tree;
//! - counters never decrease: what a lost tree has counted is kept.

use super::error::{Error, OutputState};
use super::extent::Extent;
use super::options::Outcome;
use super::tree::Tree;
use crate::exec::Buffers;
use crate::recovery::{self, Landed};
use crate::transport::memory::Transfer;
use crate::transport::packets::{self, CompletionInfo, Event, OpId};
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::time::Duration;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::wire::{RankMask, StragglerLimit};

/// A communicator's end of its present tree, if it has one.
pub(super) struct TreeEnd {
    tree: Option<Tree>,
    /// Operations with lower numbers are complete in the tree.
    completed_below: u64,
    /// The number of trees that this communicator has recovered or migrated from.
    view: u32,
    /// The chunks that the last view change recovered here.
    landed: Landed,
    /// Details of completed operations that are not yet reported to their callers, by view.
    completions: BTreeMap<(u32, OpId), CompletionInfo>,
    /// Counters of earlier trees.
    past_bytes: u64,
    past_retransmits: u64,
}

impl TreeEnd {
    pub(super) fn new(tree: Option<Tree>) -> Self {
        Self {
            tree,
            completed_below: 0,
            view: 0,
            landed: Landed::default(),
            completions: BTreeMap::new(),
            past_bytes: 0,
            past_retransmits: 0,
        }
    }

    pub(super) const fn is_there(&self) -> bool {
        self.tree.is_some()
    }

    pub(super) const fn get(&self) -> Option<&Tree> {
        self.tree.as_ref()
    }

    pub(super) const fn get_mut(&mut self) -> Option<&mut Tree> {
        self.tree.as_mut()
    }

    /// Return the number of trees that this communicator has recovered or migrated from.
    pub(super) const fn view(&self) -> u32 {
        self.view
    }

    pub(super) const fn is_complete(&self, op: OpId) -> bool {
        op.0 < self.completed_below
    }

    /// Return the number below which operations are complete.
    pub(super) const fn completed_below(&self) -> OpId {
        OpId(self.completed_below)
    }

    /// Post an operation: with buffers if it runs in the tree, without to announce what runs elsewhere. `None` without
    /// a tree.
    pub(super) fn post(
        &mut self,
        desc: &OpDesc,
        path: Path,
        limit: Option<StragglerLimit>,
        buffers: Option<(&Extent, &mut Buffers<'_>)>,
    ) -> Result<Option<(OpId, Transfer)>, Error> {
        self.tree.as_mut().map(|tree| tree.post(desc, path, limit, buffers)).transpose()
    }

    /// Drive the tree without blocking. Returns when it must be driven again. [`TreeEnd::poll_completed`] returns what
    /// has completed.
    pub(super) fn pump(&mut self, buffers: &mut impl packets::Buffers) -> Option<Duration> {
        self.tree.as_mut()?.pump(buffers)
    }

    /// Return the next operation that has completed, with its details.
    pub(super) fn poll_completed(&mut self) -> Option<(OpId, CompletionInfo)> {
        loop {
            let tree = self.tree.as_mut()?;
            if let Event::Completed(op) = tree.poll_event()? {
                self.completed_below = op.0 + 1;
                return Some((op, tree.completion_info()));
            }
        }
    }

    /// Record the details of a completed operation.
    pub(super) fn keep_completion(&mut self, op: OpId, completion: CompletionInfo) {
        // Operation numbers of earlier trees are void.
        let view = self.view;
        self.completions.retain(|&(of, _), _| of == view);
        self.completions.insert((view, op), completion);
    }

    /// Drop the details of an operation that nobody waits for.
    pub(super) fn forget_completion(&mut self, op: OpId) {
        self.completions.remove(&(self.view, op));
    }

    /// Add the details of an operation to its outcome.
    pub(super) fn with_completion(&mut self, op: Option<OpId>, outcome: Outcome) -> Outcome {
        let completion = op.and_then(|op| self.completions.remove(&(self.view, op))).unwrap_or_default();
        Outcome { slowest: completion.slowest, missing: completion.missing, ..outcome }
    }

    /// Block until there is something to do or `timeout` has passed. May return earlier.
    pub(super) fn wait(&mut self, timeout: Duration) {
        if let Some(tree) = &mut self.tree {
            tree.wait(Some(timeout));
        }
    }

    /// Return the error that ended the tree, if any.
    pub(super) fn error(&self) -> Option<Error> {
        self.tree.as_ref().and_then(|tree| tree.error().map(|error| tree.to_error(error)))
    }

    /// Return the ranks that were excluded as stragglers.
    pub(super) fn excluded_ranks(&self) -> RankMask {
        self.tree.as_ref().map_or(RankMask::EMPTY, Tree::excluded_ranks)
    }

    /// Return whether another operation can be posted.
    pub(super) fn has_room(&self) -> bool {
        self.tree.as_ref().is_none_or(Tree::has_room)
    }

    /// Return the first chunk whose result this rank does not have, and the one behind the last that it has posted.
    pub(super) fn chunks(&self) -> (u64, u64) {
        self.tree.as_ref().map_or((0, 0), |tree| (tree.have().0, tree.end().0))
    }

    pub(super) fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        self.tree.as_ref().and_then(Tree::poll_fd)
    }

    /// Return when a host collective must poll the tree again, where `next` is the result of [`TreeEnd::pump`].
    pub(super) fn next_poll_after(&self, next: Option<Duration>) -> Option<Duration> {
        self.tree.as_ref().and_then(|tree| tree.next_poll_after(next))
    }

    /// Return the bytes sent and the contributions retransmitted, in all trees.
    pub(super) fn counters(&self) -> (u64, u64) {
        let stats = self.tree.as_ref().map(Tree::stats).unwrap_or_default();
        (self.past_bytes + stats.bytes_out, self.past_retransmits + stats.retransmits)
    }

    /// Return which elements of an operation's output hold results.
    pub(super) fn output_state(&self, op: OpId) -> OutputState {
        let Some(source) = self.tree.as_ref().map(Tree::recovery_source) else { return OutputState::Unspecified };
        let pending = self.landed.over(source);
        if recovery::is_unknown(&pending, op) {
            OutputState::Unspecified
        } else {
            OutputState::Elements(recovery::completed_elements(&pending, op))
        }
    }

    /// Return whether a device kept writing while memory was taken from it, so that the contents of a caller's buffer
    /// are unknown.
    pub(super) fn is_output_unknown(&self) -> bool {
        let Some(source) = self.tree.as_ref().map(Tree::recovery_source) else { return false };
        let pending = self.landed.over(source);
        source.ops().in_flight().any(|op| recovery::is_unknown(&pending, op.id))
    }

    /// End the group: from now on, nothing touches the buffers of operations in flight.
    pub(super) fn retire(&mut self) {
        self.tree.iter_mut().for_each(Tree::retire);
    }

    /// Take the tree out, to recover its operations. What it has counted stays.
    pub(super) const fn take(&mut self) -> Option<Tree> {
        self.tree.take()
    }

    /// A view change has ended for the tree that was taken out.
    pub(super) fn recovered(&mut self, lost: Option<&Tree>, landed: Landed) {
        self.landed = landed;
        if let Some(stats) = lost.map(Tree::stats) {
            self.past_bytes += stats.bytes_out;
            self.past_retransmits += stats.retransmits;
        }
    }

    /// All ranks have had this many trees. Returns whether this rank had fewer.
    pub(super) const fn catch_up(&mut self, trees: u32) -> bool {
        let is_behind = self.view < trees;
        self.view = trees;
        is_behind
    }

    /// The lost tree stays, because the communicator cannot continue: its operations are complete below this one.
    pub(super) fn keep_lost(&mut self, lost: Option<Tree>, completed_below: OpId) {
        self.completed_below = self.completed_below.max(completed_below.0);
        self.tree = lost;
    }

    /// Leave the tree. Its group expires, because nobody renews it.
    pub(super) fn leave(&mut self) -> bool {
        let Some(mut tree) = self.tree.take() else { return false };
        tree.retire();
        let stats = tree.stats();
        self.past_bytes += stats.bytes_out;
        self.past_retransmits += stats.retransmits;
        true
    }

    /// Continue with another tree, or without one.
    pub(super) fn install(&mut self, tree: Option<Tree>) {
        self.view += 1;
        self.completed_below = 0;
        if tree.is_some() {
            self.tree = tree;
        }
    }
}
