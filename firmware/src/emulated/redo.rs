//! The memory of redo slots: a file for each group, which its ranks map read-only.
//!
//! Invariants:
//! - a rank can map only the redo slots of its own group, which were zeroed by the kernel when the group was created;
//! - memory is never reused for another group. The board drops it when the node has no chain left that accesses it, and
//!   does not clear it: a rank that is about to end the group on its side still reads results there (PROTOCOL 7), and
//!   has no other means to distinguish published results from unpublished ones. The kernel frees it when the last rank
//!   has unmapped it;
//! - the total is bounded by the node, which divides the budget among the groups.

use super::engine::BoardEngine;
use super::function::Redo;
use std::sync::Arc;
use sumac_device::Node;
use sumac_hal::ctrl::Refusal;
use sumac_hal::dma::{Address, RegionKey, RegionTable, Span};
use sumac_hal::ids::{FunctionId, GroupId};
use sumac_hal::shm::{Pages, Region};

/// The owner of the regions: the device itself.
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
    /// Memory of released groups, possibly with chains in flight.
    ended: Vec<GroupMemory>,
}

impl RedoMemories {
    /// The maximum number of groups with memory: as many zero-copy groups as a node distinguishes, by a byte.
    pub(super) const MAX: usize = 1 << u8::BITS;

    /// Create the table with a budget for all groups; its regions have the engine's indices from `first` on.
    pub(super) fn new(first: u16, budget_bytes: usize) -> Self {
        let table = Box::new(RegionTable::new(Self::MAX));
        Self { first, budget_bytes, table, groups: Vec::new(), ended: Vec::new() }
    }

    /// Return the budget for the node to divide. It is not a region of the engine, so slots that were not placed in
    /// memory are invalid.
    pub(super) fn budget(&self) -> Span {
        let address = Address { region: RegionKey { index: u16::MAX, generation: 0 }, offset_bytes: 0 };
        Span { address, len_bytes: self.budget_bytes as u64 }
    }

    /// Allocate redo memory for a newly attached group.
    pub(super) fn allocate(
        &mut self,
        node: &mut Node<'_>,
        group: GroupId,
        engine: &mut BoardEngine,
    ) -> Result<(), Refusal> {
        let Some((_, slot_len_bytes, slots)) = node.redo_slots(group) else { return Ok(()) };
        // A released group of the same number may still have memory, until its chains end; it is not reused.
        self.ended.extend(self.groups.extract_if(.., |memory| memory.group == group));
        self.release_ended(node, engine);
        let len_bytes = slot_len_bytes * slots;
        let refused = |error: &dyn std::fmt::Display| {
            tracing::warn!(%group, len_bytes, %error, "could not allocate redo slots");
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

    /// Return a group's memory, and its slots in it.
    pub(super) fn slots(&self, node: &Node<'_>, group: GroupId) -> Option<Redo<'_>> {
        let slots = node.redo_slots(group)?;
        let found = self.groups.iter().find(|memory| memory.group == group)?;
        Some((&*found.memory, slots))
    }

    /// Release the memory of released groups.
    pub(super) fn release_gone(&mut self, node: &Node<'_>, engine: &mut BoardEngine) {
        let is_gone = |memory: &mut GroupMemory| !node.has_group(memory.group) || !node.has_redo_slots_in(memory.key);
        self.ended.extend(self.groups.extract_if(.., is_gone));
        self.release_ended(node, engine);
    }

    /// Free the memory of released groups that no chain accesses any more.
    pub(super) fn release_ended(&mut self, node: &Node<'_>, engine: &mut BoardEngine) {
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

/// Free the table entry of an unmapped region.
fn free(table: &mut RegionTable<{ RedoMemories::MAX }>, first: u16, key: RegionKey) {
    let is_free = table.deregister(OWNER, RegionKey { index: key.index - first, ..key });
    debug_assert_eq!(is_free, Ok(true), "no group holds it");
}
