//! The memory of redo slots: for each group a file of its own, which its ranks get to read.
//!
//! Invariants:
//! - what a rank can map holds redo slots of its own group only, and was zeroed by the system when the group was created;
//! - no memory is given to a second group. The board lets go of it when the node has no chain left that touches it. It is not
//!   cleared then: a rank that is about to end the group at its side still looks there for results (PROTOCOL 7), and has
//!   nothing else to tell published results from unpublished ones. The system clears it when the last rank has let go;
//! - what all groups have together is bounded: by the node, to which the budget is memory that it shares out.

use super::engine::BoardEngine;
use super::function::Redo;
use std::sync::Arc;
use sumac_device::Node;
use sumac_hal::ctrl::Refusal;
use sumac_hal::dma::{Address, RegionKey, RegionTable, Span};
use sumac_hal::ids::{FunctionId, GroupId};
use sumac_hal::shm::{Pages, Region};

/// Whom the table counts the regions to: they are the device's own.
const OWNER: FunctionId = FunctionId(0);

/// The memory of one group.
struct GroupMemory {
    group: GroupId,
    key: RegionKey,
    memory: Arc<Region>,
}

/// The memory of all groups.
pub(super) struct RedoMemories {
    /// The engine's index of the table's first region.
    first: u16,
    budget_bytes: usize,
    table: Box<RegionTable<{ Self::MAX }>>,
    groups: Vec<GroupMemory>,
    /// Of groups that have ended, with chains in flight perhaps.
    ended: Vec<GroupMemory>,
}

impl RedoMemories {
    /// Groups that have memory at a time: as many as have children by reference, which a node tells apart by a byte.
    pub(super) const MAX: usize = 1 << u8::BITS;

    /// Have so many bytes for all groups, as regions of the engine from index `first` on.
    pub(super) fn new(first: u16, budget_bytes: usize) -> Self {
        let table = Box::new(RegionTable::new(Self::MAX));
        Self { first, budget_bytes, table, groups: Vec::new(), ended: Vec::new() }
    }

    /// Return the budget as the node is to share it out: no region of the engine, so that slots that were given no memory
    /// of their own are nowhere.
    pub(super) fn budget(&self) -> Span {
        let address = Address { region: RegionKey { index: u16::MAX, generation: 0 }, offset_bytes: 0 };
        Span { address, len_bytes: self.budget_bytes as u64 }
    }

    /// Give a group that was just attached memory for its redo slots.
    pub(super) fn give(
        &mut self,
        node: &mut Node<'_>,
        group: GroupId,
        engine: &mut BoardEngine,
    ) -> Result<(), Refusal> {
        let Some((_, slot_len_bytes, slots)) = node.redo_slots(group) else { return Ok(()) };
        // One of this number may have ended, and has memory until its chains have: that is not this one's.
        self.ended.extend(self.groups.extract_if(.., |memory| memory.group == group));
        self.take_back_ended(node, engine);
        let len_bytes = slot_len_bytes * slots;
        let refused = |error: &dyn std::fmt::Display| {
            tracing::warn!(%group, len_bytes, %error, "no memory for redo slots");
            Refusal::NoRedoMemory { need: len_bytes as u64 }
        };
        let memory = Arc::new(Region::create(len_bytes, Pages::Normal).map_err(|error| refused(&error))?);
        let own = self.table.register(OWNER, len_bytes as u64).map_err(|error| refused(&error))?;
        let key = RegionKey { index: self.first + own.index, ..own };
        if let Err(error) = engine.map_own(key, Arc::clone(&memory)) {
            free(&mut self.table, self.first, key);
            return Err(refused(&error));
        }
        let is_placed = node.place_redo_slots(group, Address { region: key, offset_bytes: 0 });
        debug_assert!(is_placed, "it has just been attached");
        self.groups.push(GroupMemory { group, key, memory });
        Ok(())
    }

    /// Return a group's memory, and where the slots are in it.
    pub(super) fn slots(&self, node: &Node<'_>, group: GroupId) -> Option<Redo<'_>> {
        let slots = node.redo_slots(group)?;
        let found = self.groups.iter().find(|memory| memory.group == group)?;
        Some((&*found.memory, slots))
    }

    /// Take back the memory of groups that are gone.
    pub(super) fn take_back(&mut self, node: &Node<'_>, engine: &mut BoardEngine) {
        let is_gone = |memory: &mut GroupMemory| !node.has_group(memory.group) || !node.has_redo_slots_in(memory.key);
        self.ended.extend(self.groups.extract_if(.., is_gone));
        self.take_back_ended(node, engine);
    }

    /// Take back the memory of groups that have ended, as soon as no chain touches it.
    pub(super) fn take_back_ended(&mut self, node: &Node<'_>, engine: &mut BoardEngine) {
        let (table, first) = (&mut self.table, self.first);
        self.ended.retain(|memory| {
            let in_use = node.has_redo_slots_in(memory.key);
            if !in_use {
                engine.unmap(memory.key);
                free(table, first, memory.key);
            }
            in_use
        });
    }
}

/// Free the entry of a region that the engine no longer reaches.
fn free(table: &mut RegionTable<{ RedoMemories::MAX }>, first: u16, key: RegionKey) {
    let is_free = table.deregister(OWNER, RegionKey { index: key.index - first, ..key });
    debug_assert_eq!(is_free, Ok(true), "nobody holds it");
}
