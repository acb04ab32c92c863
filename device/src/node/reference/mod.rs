//! Contributions by reference: a child says where its data is, and a DMA engine fetches, reduces and delivers it
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
//! A slot with such children has its accumulators in a *redo slot*, in memory of the device that its engine reaches and
//! that outlives the node:
//!
//! | bytes | what |
//! |---|---|
//! | 0..24 | the record: in the first word epoch (bits 32..64) and CRC-32C of (group, epoch, seq, and a byte that is 1 if the result is in the bounce), in the second seq; anything else says that nothing is published; in the third CRC-32C (bits 0..32) and length (bits 32..64) of the result's bytes ([`Covers`](sumac_hal::dma::Covers)) |
//! | 64.. | bounce: one chunk, for what is rounded to another size, and for engines that can't combine |
//! | 64 + chunk.. | accumulators, one chunk each; the first one becomes the value |
//!
//! Where the rules are: here the tables and their life, `submit.rs` (rings: what comes in, what is answered),
//! `chain.rs` and `draft.rs` (which steps, in which order), `placement.rs` and `redo.rs` (where things lie), `gather.rs` (from the first pull
//! to the last write), `failure.rs` (chains that failed).
//!
//! Invariants:
//! - A slot has one chain in flight at most. While it has, its redo slot and the memory of the children in that chain
//!   are the engine's: the slot is not re-used, their answers wait, and their regions stay held.
//! - An input is overwritten only by a result that the redo slot published before, in the same chain or an earlier one.
//! - Where a chain failed half-way, the record decides: published, the result is written again; unpublished, every
//!   input is as it was, and all of them are pulled again as a new attempt. What came inline is still in the node's own
//!   memory, so nobody has to send it again.
//! - Every submission is answered once, and its regions are held exactly until then.
//! - An answer is where its rank sees it before its slot is used again: between [`Node::poll_answer`] and the ring there
//!   is no [`Node::poll_dma`]. A rank that has to take its memory away looks first for the record, then for the answer.
//!
//! Beyond PROTOCOL 1, a child by reference need not come back to say what it has: the engine has landed its result when
//! the answer is given, so `have` moves with the answer. A rank can submit a whole operation and sleep.

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

use super::{Live, Node, NodeConfig};
use crate::memory::{Span as Run, Storage, first_fit};
use crate::sets::{ChildSet, SlotSet};
use crate::slot::State;
use sumac_hal::ctrl::Order;
use sumac_hal::dma::{Address, Capabilities, Span, Tag};
use sumac_hal::ids::{ChildIndex, Epoch, FunctionId, GroupId};
use sumac_hal::mmio::EntryStatus;
use sumac_hal::planted;

/// Bytes before a redo slot's bounce: its record, and what keeps the rest on a cache line of its own.
const HEAD_BYTES: usize = 64;

/// What contributions by reference need, supplied by the board. One node has one, for all its groups.
#[derive(Debug)]
pub struct References<'m> {
    /// One entry for each of [`Storage::slots`].
    pub redo: &'m mut [RedoSlot],
    /// For each group its slots x children, those that contribute inline too.
    pub references: &'m mut [Reference],
    /// Redo slots of all groups: memory of the device that its engine and its processor reach. See
    /// [`Node::redo_slot_len_bytes`]. Where each group gets memory of its own ([`Node::place_redo_slots`]), only the length
    /// counts: it is what all groups may have together.
    pub memory: Span,
    /// What the engine can do.
    pub capabilities: Capabilities,
}

/// What one child said about one chunk.
#[derive(Debug, Clone, Copy)]
pub struct Reference {
    src: Option<Address>,
    dst: Option<Address>,
}

impl Reference {
    /// An entry that nobody uses.
    pub const EMPTY: Self = Self { src: None, dst: None };
}

/// What a chain in flight does to its slot once it is done.
#[derive(Debug, Clone, Copy)]
struct Plan {
    /// Children whose contributions it combines.
    pulls: ChildSet,
    /// The child that it fetches into the bounce, for the processor to combine.
    bounces: Option<u16>,
    /// It publishes the result.
    publishes: bool,
    /// It leaves the result in the bounce, not in the first accumulator.
    rounds: bool,
    /// Children that it writes the result to.
    writes: ChildSet,
}

impl Plan {
    const NOTHING: Self =
        Self { pulls: ChildSet::EMPTY, bounces: None, publishes: false, rounds: false, writes: ChildSet::EMPTY };
}

/// The part of a slot that only contributions by reference need. Boards allocate these; their content is the node's.
#[derive(Debug, Clone, Copy)]
pub struct RedoSlot {
    /// The chain in flight.
    in_flight: Option<Tag>,
    /// Chains submitted in the life of this slot: each has a tag of its own, so no old completion passes for a new one.
    chains: u32,
    plan: Plan,
    /// The chain of `plan` has failed; the record has to be looked at.
    judging: bool,
    /// The child whose contribution is in the bounce: it is next, whoever has come meanwhile.
    bounced: Option<u16>,
    /// Failed chains since the slot came further than it ever had.
    failures: u16,
    /// How many contributions were combined when a chain failed, at most.
    reached: u16,
    /// By reference: who has submitted, and was not answered yet.
    present: ChildSet,
    /// Who of them brings data; kept when they are answered.
    pub(super) data: ChildSet,
    /// Whose contributions are in the accumulators (or were found empty): by reference and inline.
    pulled: ChildSet,
    /// The accumulators are results now.
    finished: bool,
    published: bool,
    /// The result is in the bounce.
    rounded: bool,
    /// Who is still to be written to.
    to_write: ChildSet,
    /// Who was written to.
    written: ChildSet,
    /// Who can't be written to.
    broken: ChildSet,
    /// Who is to be answered.
    owed: ChildSet,
}

impl RedoSlot {
    /// A slot that was never used.
    pub const EMPTY: Self = Self {
        in_flight: None,
        chains: 0,
        plan: Plan::NOTHING,
        judging: false,
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
        broken: ChildSet::EMPTY,
        owed: ChildSet::EMPTY,
    };

    fn is_quiet(&self) -> bool {
        self.in_flight.is_none() && self.present.is_empty()
    }
}

/// What a group with children by reference has besides.
#[derive(Debug)]
#[cfg_attr(feature = "snapshot", derive(Clone, PartialEq, Eq, Hash))]
pub(crate) struct ByReference {
    /// Who contributes by reference.
    children: ChildSet,
    references: Run,
    /// In the node's redo memory: its place there, or its share of that.
    memory: Run,
    /// Where its redo slots begin instead, if it has memory of its own.
    own_memory: Option<Address>,
    /// What aborts its chains.
    scope: u8,
    aborted: bool,
    /// Slots that may go on.
    work: SlotSet,
    /// Slots with children to be answered.
    owed: SlotSet,
    /// Who has let go.
    withdrawn: ChildSet,
    /// Who has yet to be told of a decision to go on without some, itself perhaps.
    pub(super) untold: ChildSet,
    /// The group is gone, but for its references: this is what they are told.
    closing: Option<EntryStatus>,
}

impl ByReference {
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.is_some()
    }
}

/// One group's entries of the tables.
#[derive(Debug)]
pub(super) struct Refs<'a> {
    pub(super) redo: &'a mut [RedoSlot],
    references: &'a mut [Reference],
    /// Where the group's redo slots begin.
    memory: Address,
    capabilities: &'a Capabilities,
}

impl References<'_> {
    pub(super) fn of(&mut self, slots: Run, group: &ByReference) -> Refs<'_> {
        let memory = self.slots_of(group);
        Refs {
            redo: &mut self.redo[slots.range()],
            references: &mut self.references[group.references.range()],
            memory,
            capabilities: &self.capabilities,
        }
    }
}

/// Why children can't contribute by reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The board gave the node nothing to do it with.
    #[error("this node has no memory for contributions by reference: make it with Node::with_references")]
    NoReferences,
    /// No such group.
    #[error("{0} does not exist here: create it first")]
    NoGroup(GroupId),
    /// The group has begun.
    #[error("{0} has children by reference, or contributions, already: attach all of them once, at its beginning")]
    Begun(GroupId),
    /// The group does not have the child, or it is named twice.
    #[error("child {0:?} is not below this group, or is named twice with its owner")]
    Child(ChildIndex),
    /// The engine's chains are too short to be of use.
    #[error("the engine's chains have {steps} steps; {least} are needed")]
    Steps {
        /// What it has.
        steps: u32,
        /// What is needed.
        least: u32,
    },
    /// The engine does not take the group's chunks.
    #[error(
        "chunks of {chunk_len_bytes} bytes don't suit the engine, which takes up to {max_len_bytes} bytes aligned to \
         {alignment_bytes}"
    )]
    Chunk {
        /// The group's.
        chunk_len_bytes: u16,
        /// The engine's longest step.
        max_len_bytes: u32,
        /// What its addresses have to be a multiple of.
        alignment_bytes: u32,
    },
    /// A table is full.
    #[error(
        "{references} references and {memory_bytes} bytes of redo memory are needed in one run each, in the first 256 \
         groups, which the device does not have free: release a group"
    )]
    NoRoom {
        /// Asked for.
        references: usize,
        /// Asked for.
        memory_bytes: usize,
    },
}

impl<'m> Node<'m> {
    /// Return a node without groups that can have children by reference.
    ///
    /// # Panics
    /// If `references.redo` is shorter than `storage.slots`: that is a bug of the board.
    pub fn with_references(config: NodeConfig, storage: Storage<'m>, references: References<'m>) -> Self {
        assert!(references.redo.len() >= storage.slots.len(), "every slot needs a redo slot");
        Self { references: Some(references), ..Self::new(config, storage) }
    }

    /// Return how much redo memory one slot takes.
    pub const fn redo_slot_len_bytes(order: Order, children: u16, chunk_len_bytes: u16) -> usize {
        HEAD_BYTES + (1 + chain::accumulators(order, children as usize)) * chunk_len_bytes as usize
    }

    /// Let children of a fresh group contribute by reference, each through the ring of its owner. Nothing that comes
    /// in a packet is taken for theirs any more.
    ///
    /// # Errors
    /// [`AttachError`], and then nothing has changed.
    pub fn attach(&mut self, id: GroupId, owners: &[(ChildIndex, FunctionId)]) -> Result<(), AttachError> {
        let references = self.references.as_mut().ok_or(AttachError::NoReferences)?;
        let steps = references.capabilities.max_steps;
        if steps < chain::STEPS_MIN {
            return Err(AttachError::Steps { steps, least: chain::STEPS_MIN });
        }
        let index = self
            .storage
            .groups
            .iter()
            .position(|group| group.as_ref().is_some_and(|group| group.config.group == id && !group.is_closing()));
        let index = index.ok_or(AttachError::NoGroup(id))?;
        let group = self.storage.groups[index].as_ref().ok_or(AttachError::NoGroup(id))?;
        let slots = &self.storage.slots[group.slots.range()];
        if group.by_reference.is_some() || slots.iter().any(|slot| slot.state != State::Free) {
            return Err(AttachError::Begun(id));
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
        let Capabilities { alignment_bytes, max_len_bytes, .. } = references.capabilities;
        let chunk = u32::from(config.chunk_len_bytes);
        // Bounce and accumulators lie behind the head, one chunk apart.
        let aligned = (chunk | HEAD_BYTES as u32) & (alignment_bytes - 1) == 0;
        if chunk > max_len_bytes || !aligned {
            return Err(AttachError::Chunk { chunk_len_bytes: config.chunk_len_bytes, max_len_bytes, alignment_bytes });
        }
        let slot = Self::redo_slot_len_bytes(config.order, group.children.len as u16, config.chunk_len_bytes);
        let need = (group.slots.len * group.children.len, group.slots.len * slot);
        let used = self.storage.groups.iter().flatten().filter_map(|group| group.by_reference.as_ref());
        let entries = first_fit(used.clone().map(|by| by.references), need.0, references.references.len());
        let capacity = usize::try_from(references.memory.len_bytes).unwrap_or(usize::MAX);
        let memory = first_fit(used.map(|by| by.memory), need.1, capacity);
        let (Some(entries), Some(memory), Ok(scope)) = (entries, memory, u8::try_from(index)) else {
            return Err(AttachError::NoRoom { references: need.0, memory_bytes: need.1 });
        };

        // Everything fits: from here on nothing fails.
        for redo in &mut references.redo[group.slots.range()] {
            *redo = RedoSlot { chains: redo.chains, ..RedoSlot::EMPTY };
        }
        references.references[entries.range()].fill(Reference::EMPTY);
        for &(child, owner) in owners {
            self.storage.children[group.children.range()][usize::from(child.0)].owner = Some(owner);
        }
        if let Some(group) = &mut self.storage.groups[index] {
            group.by_reference = Some(ByReference {
                children,
                references: entries,
                memory,
                own_memory: None,
                scope,
                aborted: false,
                work: SlotSet::EMPTY,
                owed: SlotSet::EMPTY,
                withdrawn: ChildSet::EMPTY,
                untold: ChildSet::EMPTY,
                closing: None,
            });
        }
        Ok(())
    }

    /// Tell whether no group here has anything to do with packets: nothing is lost by looking for them less often.
    pub fn is_all_by_reference(&self) -> bool {
        self.storage.groups[..self.groups_end].iter().flatten().all(|group| {
            let by_reference = group.by_reference.as_ref().map_or(0, |by_reference| by_reference.children.len());
            group.parent.is_none() && by_reference == group.children.len
        })
    }

    /// Let go of a function's memory in a group (PROTOCOL 6): nothing of it is pulled or written to from now on, and
    /// what a chain in flight touches is answered when that has ended. [`Node::holds`] tells when all is. What it has
    /// contributed so far may still be part of results; the group goes on for the others, until they miss it.
    ///
    /// False if there is no such group, it is of another epoch, or the function does not contribute to it.
    pub fn withdraw(&mut self, id: GroupId, epoch: Epoch, function: FunctionId) -> bool {
        let Some(mut live) = self.find(id).and_then(|index| self.live(index)) else { return false };
        let child = live.children.iter().position(|child| child.owner == Some(function));
        let Some(child) = child.filter(|_| live.group.config.epoch == epoch) else { return false };
        live.withdraw(child);
        true
    }

    /// Tell whether a function has submissions in a group that have no answer yet, also in one that has ended.
    pub fn holds(&mut self, id: GroupId, function: FunctionId) -> bool {
        (0..self.groups_end).any(|index| {
            let Some(live) = self.live(index).filter(|live| live.group.config.group == id) else { return false };
            let child = live.children.iter().position(|child| child.owner == Some(function));
            child.zip(live.refs).is_some_and(|(child, refs)| refs.redo.iter().any(|redo| redo.present.contains(child)))
        })
    }

    /// End a group: at once if nothing of it is by reference; else for everybody but its references, whose chains are
    /// aborted by the next [`Node::poll_dma`] and who get their answers. Then its entries are free.
    pub(super) fn close_group(&mut self, index: usize) {
        let Some(mut live) = self.live(index) else { return };
        for slot in 0..live.slots.len() {
            live.owe_all(slot);
        }
        // Nothing goes on as packets.
        live.group.up = SlotSet::EMPTY;
        live.group.down = SlotSet::EMPTY;
        if let Some(by_reference) = &mut live.group.by_reference {
            by_reference.closing.get_or_insert(EntryStatus::Fenced);
        }
        self.free_if_quiet(index);
    }

    /// Free the entries of a group that has ended, once no reference of it is in use.
    fn free_if_quiet(&mut self, index: usize) {
        let Some(live) = self.live(index) else { return };
        let quiet = (0..live.slots.len()).all(|slot| live.is_quiet(slot));
        if quiet && live.group.by_reference.as_ref().is_none_or(ByReference::is_closing) {
            self.storage.groups[index] = None;
            let used = self.storage.groups[..self.groups_end].iter().rposition(Option::is_some);
            self.groups_end = used.map_or(0, |last| last + 1);
        }
    }
}

impl Live<'_> {
    /// Tell whether no reference of slot `index` is in use.
    pub(super) fn is_quiet(&self, index: usize) -> bool {
        self.refs.as_ref().is_none_or(|refs| refs.redo[index].is_quiet())
    }

    /// Begin the redo side of slot `index`, which is quiet.
    pub(super) fn begin_redo(&mut self, index: usize) {
        let children = self.children.len();
        let Some(refs) = &mut self.refs else { return };
        let redo = &mut refs.redo[index];
        debug_assert!(redo.is_quiet() || planted!(self.common, RedoReusedEarly));
        *redo = RedoSlot { chains: redo.chains, ..RedoSlot::EMPTY };
        refs.references[index * children..][..children].fill(Reference::EMPTY);
    }

    /// Note that slot `index` may be able to go on.
    pub(super) fn stir(&mut self, index: usize) {
        if let Some(by_reference) = &mut self.group.by_reference {
            by_reference.work.insert(index);
        }
    }

    /// The chunk in slot `index` gets no result here: everybody who contributed by reference is told.
    pub(super) fn owe_all(&mut self, index: usize) {
        let (Some(refs), Some(by_reference)) = (&mut self.refs, &mut self.group.by_reference) else { return };
        let redo = &mut refs.redo[index];
        self.slots[index].pending = self.slots[index].pending.without(&by_reference.children);
        redo.owed = redo.present;
        redo.to_write = ChildSet::EMPTY;
        if !redo.owed.is_empty() {
            by_reference.owed.insert(index);
        }
    }

    /// Answer all that a child has submitted, as soon as no chain touches it.
    pub(super) fn withdraw(&mut self, child: usize) {
        let (Some(refs), Some(by_reference)) = (&mut self.refs, &mut self.group.by_reference) else { return };
        by_reference.withdrawn.insert(child);
        by_reference.untold.remove(child);
        for (index, redo) in refs.redo.iter_mut().enumerate() {
            redo.to_write.remove(child);
            if redo.present.contains(child) {
                redo.owed.insert(child);
                by_reference.owed.insert(index);
            }
        }
    }

    /// The answer of slot `index` is there: decide who by reference is written to first.
    pub(super) fn answer_references(&mut self, index: usize) {
        let (Some(refs), Some(by_reference)) = (&mut self.refs, &mut self.group.by_reference) else { return };
        let (redo, slot) = (&mut refs.redo[index], &mut self.slots[index]);
        slot.pending = slot.pending.without(&by_reference.children);
        let wants = if slot.value_len > 0 { slot.want.both(&by_reference.children) } else { ChildSet::EMPTY };
        redo.to_write = wants.without(&redo.written).without(&by_reference.withdrawn);
        redo.owed = redo.present.without(&redo.to_write);
        if !redo.owed.is_empty() {
            by_reference.owed.insert(index);
        }
        if !redo.to_write.is_empty() {
            by_reference.work.insert(index);
        }
    }
}
