//! Placement of a group's redo slots: in the memory that all groups share, or in memory of the group's own.
//!
//! Whoever can read redo memory can read results. A board that shares it with processes of several users gives each
//! group memory of its own; a board that can share only one memory puts all groups there.
//!
//! Invariant: a group's redo slots stay in place from its first submission to its end.

use super::{Node, ZeroCopyGroup, ZeroCopyStorage};
use crate::slot::State;
use sumac_hal::dma::{Address, RegionKey};
use sumac_hal::ids::GroupId;

impl ZeroCopyStorage<'_> {
    /// Return the address of a group's first redo slot.
    pub(super) fn slots_of(&self, group: &ZeroCopyGroup) -> Address {
        let shared = self.memory.address;
        let place = Address { offset_bytes: shared.offset_bytes + group.memory.start as u64, ..shared };
        group.own_memory.unwrap_or(place)
    }
}

impl Node<'_> {
    /// Place the redo slots of a freshly [attached](Node::attach) group in memory of its own, which the engine and the
    /// processor reach from `start` on for as many bytes as [`Node::redo_slots`] returns. Its share of
    /// [`ZeroCopyStorage::memory`] stays reserved.
    ///
    /// Returns false, and changes nothing, if there is no such group or it has started.
    pub fn place_redo_slots(&mut self, id: GroupId, start: Address) -> bool {
        let Some(index) = self.find(id) else { return false };
        let Some(group) = &mut self.storage.groups[index] else { return false };
        let slots = &self.storage.slots[group.slots.range()];
        let has_begun = slots.iter().any(|slot| slot.state != State::Free);
        let Some(zero_copy) = group.zero_copy.as_mut().filter(|_| !has_begun) else { return false };
        zero_copy.own_memory = Some(start);
        true
    }

    /// Return the offset of a group's first redo slot in its memory, in bytes, the length of each slot in bytes, and
    /// their number; `None` if the group has no zero-copy children.
    pub fn redo_slots(&self, id: GroupId) -> Option<(u64, usize, usize)> {
        let group = self.storage.groups[self.find(id)?].as_ref()?;
        let zero_copy = group.zero_copy.as_ref()?;
        let start = self.zero_copy.as_ref()?.slots_of(zero_copy).offset_bytes;
        Some((start, zero_copy.memory.len / group.slots.len, group.slots.len))
    }

    /// Return whether any group has its redo slots in a region, including ended groups with chains in flight. Otherwise
    /// the board may unmap the region.
    pub fn has_redo_slots_in(&self, region: RegionKey) -> bool {
        let groups = self.storage.groups[..self.groups_end].iter().flatten();
        let mut own = groups.filter_map(|group| group.zero_copy.as_ref()?.own_memory);
        own.any(|start| start.region == region)
    }
}
