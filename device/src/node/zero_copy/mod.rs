//! Zero-copy contributions: a child submits the address of its data, and a DMA engine fetches, reduces and delivers it
//! (PROTOCOL 5 to 7).
//!
//! ```text
//! submission ring -> submit        chain  -> engine  -> handle_completion
//!                      |             ^                        |
//!                      v             |                        v
//!                  Absent ------> Pulling --(its tag)-------> In
//!                                    ^----- poisoned ---------'
//!                                                all In: publish, write back -> poll_answer -> completion ring
//! ```
//!
//! A slot with zero-copy children has its accumulators in a *redo slot*, in device memory that the engine reaches and
//! that outlives the node:
//!
//! | bytes | content |
//! |---|---|
//! | 0..8 | record: epoch (bits 32..64); CRC-32C of group, epoch, seq and a byte, 1 if the result is in the bounce |
//! | 8..16 | record: seq; if these two words differ from what is expected, nothing is published |
//! | 16..24 | record: CRC-32C (bits 0..32) and length (bits 32..64) of the result ([`Coverage`]) |
//! | 64.. | bounce buffer: one chunk, for results rounded to another size and for engines that cannot combine |
//! | 64 + chunk.. | accumulators, one chunk each; the first becomes the value |
//!
//! This file has the tables and their lifetime. Elsewhere: `submit.rs` (submissions and answers), `chain.rs` and
//! `draft.rs` (the steps of a chain and their order), `placement.rs` and `redo.rs` (memory layout), `gather.rs` (from
//! the first pull to the last write), `failure.rs` (failed chains).
//!
//! Invariants:
//! - A slot has at most one chain in flight. Meanwhile its redo slot and the memory of the children in that chain
//!   belong to the engine: the slot is not reused, their answers wait, and their regions stay held.
//! - An input is overwritten only by a result that was published in the redo slot before, in the same chain or an
//!   earlier one.
//! - After a chain failed half-way the record decides. Published: the result is written again. Unpublished: every input
//!   is intact, and all are pulled again as a new attempt. Inline contributions are still in the node's own memory, so
//!   nobody resends them.
//! - Every submission is answered exactly once, and holds its regions until then.
//! - An answer is visible to its rank before its slot is reused: between [`Node::poll_answer`] and the ring there is no
//!   [`Node::poll_dma`]. A rank that has to take its memory away checks the record first, then the answer.
//!
//! Beyond PROTOCOL 1, a zero-copy child need not report what it has: the engine has delivered its result when the
//! answer is given, so `have` moves with the answer. A rank can submit a whole operation and sleep.
//!
//! [`Coverage`]: sumac_hal::dma::Coverage

mod chain;
mod draft;
mod failure;
mod gather;
mod placement;
mod redo;
mod submit;
#[cfg(test)]
mod tests;

pub use submit::Answer;

use super::{GroupCtx, Node, NodeConfig};
use crate::node::memory::{Span as Run, Storage, first_fit};
use crate::sets::{ChildSet, SlotSet};
use crate::slot::State;
use sumac_hal::ctrl::Order;
use sumac_hal::dma::{Address, Capabilities, Span, Tag};
use sumac_hal::ids::{ChildIndex, Epoch, FunctionId, GroupId};
use sumac_hal::mmio::EntryStatus;
use sumac_hal::planted;

/// Bytes before a redo slot's bounce buffer: the record, padded to a cache line.
const HEAD_BYTES: usize = 64;

/// Tables and memory for zero-copy contributions, supplied by the board. One node has one, for all its groups.
#[derive(Debug)]
pub struct ZeroCopyStorage<'m> {
    /// One entry for each of [`Storage::slots`].
    pub redo: &'m mut [RedoSlot],
    /// Entries for slots x children of each group, inline children included.
    pub buffers: &'m mut [BufferRef],
    /// Memory for the redo slots of all groups, reached by both the engine and the processor. See
    /// [`Node::redo_slot_len_bytes`]. If every group gets memory of its own ([`Node::place_redo_slots`]), only the
    /// length matters: the total that all groups may use.
    pub memory: Span,
    /// The engine's capabilities.
    pub capabilities: Capabilities,
}

/// The source and destination that one child submitted for one chunk.
#[derive(Debug, Clone, Copy)]
pub struct BufferRef {
    src: Option<Address>,
    dst: Option<Address>,
}

impl BufferRef {
    /// An unused entry.
    pub const EMPTY: Self = Self { src: None, dst: None };
}

/// The effect of a chain on its slot once it succeeds.
#[derive(Debug, Clone, Copy)]
struct Plan {
    /// Children whose contributions it combines.
    pulls: ChildSet,
    /// The child whose data it fetches into the bounce buffer, for the processor to combine.
    bounces: Option<u16>,
    /// It publishes the result.
    publishes: bool,
    /// The result is in the bounce buffer, not in the first accumulator.
    rounds: bool,
    /// Children that it writes the result to.
    writes: ChildSet,
}

impl Plan {
    const NOTHING: Self =
        Self { pulls: ChildSet::EMPTY, bounces: None, publishes: false, rounds: false, writes: ChildSet::EMPTY };
}

/// The zero-copy part of a slot. The board allocates the entries; the node owns their content.
#[derive(Debug, Clone, Copy)]
pub struct RedoSlot {
    /// The chain in flight.
    in_flight: Option<Tag>,
    /// Chains submitted for this slot so far. Each gets a distinct tag, so that a stale completion is never taken for a
    /// new one.
    chains: u32,
    plan: Plan,
    /// The chain of `plan` failed: inspect the record.
    needs_inspection: bool,
    /// The child whose contribution is in the bounce buffer. It is combined next, whoever arrives meanwhile.
    bounced: Option<u16>,
    /// Consecutive failed chains without progress beyond `reached`.
    failures: u16,
    /// The most contributions combined before a chain failed.
    reached: u16,
    /// Zero-copy children with an unanswered submission.
    present: ChildSet,
    /// Zero-copy children that submitted data; kept after they are answered.
    pub(super) data: ChildSet,
    /// Children whose contributions are in the accumulators, or were empty: zero-copy and inline.
    pulled: ChildSet,
    /// The accumulators hold finished results.
    finished: bool,
    published: bool,
    /// The result is in the bounce buffer.
    rounded: bool,
    /// Children that the result has yet to be written to.
    to_write: ChildSet,
    /// Children that the result was written to.
    written: ChildSet,
    /// Children whose memory cannot be written.
    unwritable: ChildSet,
    /// Children to answer.
    to_answer: ChildSet,
}

impl RedoSlot {
    /// An unused slot.
    pub const EMPTY: Self = Self {
        in_flight: None,
        chains: 0,
        plan: Plan::NOTHING,
        needs_inspection: false,
        bounced: None,
        failures: 0,
        reached: 0,
        present: ChildSet::EMPTY,
        data: ChildSet::EMPTY,
        pulled: ChildSet::EMPTY,
        finished: false,
        published: false,
        rounded: false,
        to_write: ChildSet::EMPTY,
        written: ChildSet::EMPTY,
        unwritable: ChildSet::EMPTY,
        to_answer: ChildSet::EMPTY,
    };

    fn is_quiet(&self) -> bool {
        self.in_flight.is_none() && self.present.is_empty()
    }
}

/// Zero-copy state of a group.
#[derive(Debug)]
#[cfg_attr(feature = "snapshot", derive(Clone, PartialEq, Eq, Hash))]
pub(crate) struct ZeroCopyGroup {
    /// The zero-copy children.
    children: ChildSet,
    buffers: Run,
    /// Its share of the node's redo memory; also its place there, unless `own_memory` is set.
    memory: Run,
    /// Start of its redo slots, if it has memory of its own.
    own_memory: Option<Address>,
    /// The scope under which its chains are aborted.
    scope: u8,
    aborted: bool,
    /// Slots that may be able to make progress.
    work: SlotSet,
    /// Slots with children to answer.
    to_answer: SlotSet,
    /// Children that have withdrawn.
    withdrawn: ChildSet,
    /// Children that an exclusion decision has yet to be sent to, excluded ones included.
    pub(super) to_notify: ChildSet,
    /// Set once the group has ended but still has submissions: the status that these are answered with.
    closing: Option<EntryStatus>,
}

impl ZeroCopyGroup {
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.is_some()
    }
}

/// One group's entries of the zero-copy tables.
#[derive(Debug)]
pub(super) struct Refs<'a> {
    pub(super) redo: &'a mut [RedoSlot],
    buffers: &'a mut [BufferRef],
    /// Start of the group's redo slots.
    memory: Address,
    capabilities: &'a Capabilities,
}

impl ZeroCopyStorage<'_> {
    pub(super) fn of(&mut self, slots: Run, group: &ZeroCopyGroup) -> Refs<'_> {
        let memory = self.slots_of(group);
        Refs {
            redo: &mut self.redo[slots.range()],
            buffers: &mut self.buffers[group.buffers.range()],
            memory,
            capabilities: &self.capabilities,
        }
    }
}

/// Why children cannot be attached for zero-copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The board gave the node no zero-copy tables.
    #[error("this node has no zero-copy tables: create it with Node::with_zero_copy")]
    NoZeroCopy,
    /// No such group.
    #[error("{0} does not exist on this device: create it first")]
    NoGroup(GroupId),
    /// The group has zero-copy children or contributions already.
    #[error("{0} has already started: attach all zero-copy children at once, before the first contribution")]
    Started(GroupId),
    /// The child is not in this group, or it or its owner is listed twice.
    #[error("child {0:?} is not in this group, or it or its owner is listed twice")]
    Child(ChildIndex),
    /// The engine's chains are too short.
    #[error("the engine's chains have at most {steps} steps; zero-copy needs {min}")]
    Steps {
        /// The engine's limit.
        steps: u32,
        /// The minimum needed.
        min: u32,
    },
    /// The engine does not support the group's chunk size.
    #[error(
        "chunks of {chunk_len_bytes} bytes do not suit the engine: it takes at most {max_len_bytes} bytes, aligned to \
         {alignment_bytes}"
    )]
    Chunk {
        /// The group's chunk size, in bytes.
        chunk_len_bytes: u16,
        /// The engine's longest step, in bytes.
        max_len_bytes: u32,
        /// The engine's address alignment, in bytes.
        alignment_bytes: u32,
    },
    /// A table is full.
    #[error(
        "no {buffers} contiguous buffer entries and {memory_bytes} contiguous bytes of redo memory are free, or all of \
         the first 256 groups are in use: release a group"
    )]
    NoRoom {
        /// The amount needed.
        buffers: usize,
        /// The amount needed.
        memory_bytes: usize,
    },
}

impl<'m> Node<'m> {
    /// Return a node without groups that supports zero-copy children.
    ///
    /// # Panics
    /// If `tables.redo` is shorter than `storage.slots`, which is a bug of the board.
    pub fn with_zero_copy(config: NodeConfig, storage: Storage<'m>, tables: ZeroCopyStorage<'m>) -> Self {
        assert!(tables.redo.len() >= storage.slots.len(), "every slot needs a redo slot");
        Self { zero_copy: Some(tables), ..Self::new(config, storage) }
    }

    /// Return the redo memory that one slot takes, in bytes.
    pub const fn redo_slot_len_bytes(order: Order, children: u16, chunk_len_bytes: u16) -> usize {
        HEAD_BYTES + (1 + chain::accumulators(order, children as usize)) * chunk_len_bytes as usize
    }

    /// Attach children of a fresh group for zero-copy: each contributes through the ring of its owner. Packets that
    /// claim to come from them are dropped from now on.
    ///
    /// # Errors
    /// [`AttachError`]; nothing has changed then.
    pub fn attach(&mut self, id: GroupId, owners: &[(ChildIndex, FunctionId)]) -> Result<(), AttachError> {
        let tables = self.zero_copy.as_mut().ok_or(AttachError::NoZeroCopy)?;
        let steps = tables.capabilities.max_steps;
        if steps < chain::STEPS_MIN {
            return Err(AttachError::Steps { steps, min: chain::STEPS_MIN });
        }
        let index = self
            .storage
            .groups
            .iter()
            .position(|group| group.as_ref().is_some_and(|group| group.config.group == id && !group.is_closing()));
        let index = index.ok_or(AttachError::NoGroup(id))?;
        let group = self.storage.groups[index].as_ref().ok_or(AttachError::NoGroup(id))?;
        let slots = &self.storage.slots[group.slots.range()];
        if group.zero_copy.is_some() || slots.iter().any(|slot| slot.state != State::Free) {
            return Err(AttachError::Started(id));
        }
        let mut children = ChildSet::EMPTY;
        for (at, &(child, owner)) in owners.iter().enumerate() {
            let twice = owners[..at].iter().any(|&(other, rank)| other == child || rank == owner);
            if twice || usize::from(child.0) >= group.children.len {
                return Err(AttachError::Child(child));
            }
            children.insert(usize::from(child.0));
        }
        let config = &group.config;
        let Capabilities { alignment_bytes, max_len_bytes, .. } = tables.capabilities;
        let chunk = u32::from(config.chunk_len_bytes);
        // The bounce buffer and accumulators follow the head, one chunk apart.
        let aligned = (chunk | HEAD_BYTES as u32) & (alignment_bytes - 1) == 0;
        if chunk > max_len_bytes || !aligned {
            return Err(AttachError::Chunk { chunk_len_bytes: config.chunk_len_bytes, max_len_bytes, alignment_bytes });
        }
        let slot = Self::redo_slot_len_bytes(config.order, group.children.len as u16, config.chunk_len_bytes);
        let need = (group.slots.len * group.children.len, group.slots.len * slot);
        let used = self.storage.groups.iter().flatten().filter_map(|group| group.zero_copy.as_ref());
        let entries = first_fit(used.clone().map(|by| by.buffers), need.0, tables.buffers.len());
        let capacity = usize::try_from(tables.memory.len_bytes).unwrap_or(usize::MAX);
        let memory = first_fit(used.map(|by| by.memory), need.1, capacity);
        let (Some(entries), Some(memory), Ok(scope)) = (entries, memory, u8::try_from(index)) else {
            return Err(AttachError::NoRoom { buffers: need.0, memory_bytes: need.1 });
        };

        // Everything fits: nothing fails from here on.
        for redo in &mut tables.redo[group.slots.range()] {
            *redo = RedoSlot { chains: redo.chains, ..RedoSlot::EMPTY };
        }
        tables.buffers[entries.range()].fill(BufferRef::EMPTY);
        for &(child, owner) in owners {
            self.storage.children[group.children.range()][usize::from(child.0)].owner = Some(owner);
        }
        if let Some(group) = &mut self.storage.groups[index] {
            group.zero_copy = Some(ZeroCopyGroup {
                children,
                buffers: entries,
                memory,
                own_memory: None,
                scope,
                aborted: false,
                work: SlotSet::EMPTY,
                to_answer: SlotSet::EMPTY,
                withdrawn: ChildSet::EMPTY,
                to_notify: ChildSet::EMPTY,
                closing: None,
            });
        }
        Ok(())
    }

    /// Return whether all children of all groups here are zero-copy, and no group has a parent. Packets can be polled
    /// less often then.
    pub fn is_all_zero_copy(&self) -> bool {
        self.storage.groups[..self.groups_end].iter().flatten().all(|group| {
            let zero_copy = group.zero_copy.as_ref().map_or(0, |zero_copy| zero_copy.children.len());
            group.parent.is_none() && zero_copy == group.children.len
        })
    }

    /// Release a function's memory in a group (PROTOCOL 6): nothing of it is pulled or written from now on, and what a
    /// chain in flight touches is answered when that chain has ended. [`Node::has_unanswered`] tells whether any answer
    /// is left. Earlier contributions may still be part of results; the group continues for the others until they miss
    /// this one.
    ///
    /// Returns false if there is no such group, its epoch differs, or the function does not contribute to it.
    pub fn withdraw(&mut self, id: GroupId, epoch: Epoch, function: FunctionId) -> bool {
        let Some(mut ctx) = self.find(id).and_then(|index| self.group_ctx(index)) else { return false };
        let child = ctx.children.iter().position(|child| child.owner == Some(function));
        let Some(child) = child.filter(|_| ctx.group.config.epoch == epoch) else { return false };
        ctx.withdraw(child);
        true
    }

    /// Return whether a function has unanswered submissions in a group, including one that has ended.
    pub fn has_unanswered(&mut self, id: GroupId, function: FunctionId) -> bool {
        (0..self.groups_end).any(|index| {
            let Some(ctx) = self.group_ctx(index).filter(|ctx| ctx.group.config.group == id) else { return false };
            let child = ctx.children.iter().position(|child| child.owner == Some(function));
            child.zip(ctx.refs).is_some_and(|(child, refs)| refs.redo.iter().any(|redo| redo.present.contains(child)))
        })
    }

    /// End a group: at once if it has no zero-copy submissions; otherwise the next [`Node::poll_dma`] aborts their
    /// chains, they are answered, and then its entries are freed.
    pub(super) fn close_group(&mut self, index: usize) {
        let Some(mut ctx) = self.group_ctx(index) else { return };
        for slot in 0..ctx.slots.len() {
            ctx.mark_all_to_answer(slot);
        }
        // No more packets.
        ctx.group.up = SlotSet::EMPTY;
        ctx.group.down = SlotSet::EMPTY;
        if let Some(zero_copy) = &mut ctx.group.zero_copy {
            zero_copy.closing.get_or_insert(EntryStatus::Fenced);
        }
        self.free_if_quiet(index);
    }

    /// Free the entries of a group that has ended, once no submission of it is in use.
    fn free_if_quiet(&mut self, index: usize) {
        let Some(ctx) = self.group_ctx(index) else { return };
        let quiet = (0..ctx.slots.len()).all(|slot| ctx.is_quiet(slot));
        if quiet && ctx.group.zero_copy.as_ref().is_none_or(ZeroCopyGroup::is_closing) {
            self.storage.groups[index] = None;
            let used = self.storage.groups[..self.groups_end].iter().rposition(Option::is_some);
            self.groups_end = used.map_or(0, |last| last + 1);
        }
    }
}

impl GroupCtx<'_> {
    /// Return whether slot `index` has no zero-copy submission or chain in progress.
    pub(super) fn is_quiet(&self, index: usize) -> bool {
        self.refs.as_ref().is_none_or(|refs| refs.redo[index].is_quiet())
    }

    /// Reset the redo slot of slot `index`, which is quiet.
    pub(super) fn begin_redo(&mut self, index: usize) {
        let children = self.children.len();
        let Some(refs) = &mut self.refs else { return };
        let redo = &mut refs.redo[index];
        debug_assert!(redo.is_quiet() || planted!(self.common, RedoReusedEarly));
        *redo = RedoSlot { chains: redo.chains, ..RedoSlot::EMPTY };
        refs.buffers[index * children..][..children].fill(BufferRef::EMPTY);
    }

    /// Mark slot `index` as possibly able to make progress.
    pub(super) fn mark_runnable(&mut self, index: usize) {
        if let Some(zero_copy) = &mut self.group.zero_copy {
            zero_copy.work.insert(index);
        }
    }

    /// Answer every zero-copy submission of slot `index`: the chunk gets no result here.
    pub(super) fn mark_all_to_answer(&mut self, index: usize) {
        let (Some(refs), Some(zero_copy)) = (&mut self.refs, &mut self.group.zero_copy) else { return };
        let redo = &mut refs.redo[index];
        self.slots[index].pending = self.slots[index].pending.difference(&zero_copy.children);
        redo.to_answer = redo.present;
        redo.to_write = ChildSet::EMPTY;
        if !redo.to_answer.is_empty() {
            zero_copy.to_answer.insert(index);
        }
    }

    /// Answer all submissions of a child, as soon as no chain touches its memory.
    pub(super) fn withdraw(&mut self, child: usize) {
        let (Some(refs), Some(zero_copy)) = (&mut self.refs, &mut self.group.zero_copy) else { return };
        zero_copy.withdrawn.insert(child);
        zero_copy.to_notify.remove(child);
        for (index, redo) in refs.redo.iter_mut().enumerate() {
            redo.to_write.remove(child);
            if redo.present.contains(child) {
                redo.to_answer.insert(child);
                zero_copy.to_answer.insert(index);
            }
        }
    }

    /// The answer of slot `index` is known: determine which zero-copy children it is written to first.
    pub(super) fn answer_zero_copy(&mut self, index: usize) {
        let (Some(refs), Some(zero_copy)) = (&mut self.refs, &mut self.group.zero_copy) else { return };
        let (redo, slot) = (&mut refs.redo[index], &mut self.slots[index]);
        slot.pending = slot.pending.difference(&zero_copy.children);
        let wants = if slot.value_len > 0 { slot.want.intersection(&zero_copy.children) } else { ChildSet::EMPTY };
        redo.to_write = wants.difference(&redo.written).difference(&zero_copy.withdrawn);
        redo.to_answer = redo.present.difference(&redo.to_write);
        if !redo.to_answer.is_empty() {
            zero_copy.to_answer.insert(index);
        }
        if !redo.to_write.is_empty() {
            zero_copy.work.insert(index);
        }
    }
}
