//! Which memory a group's redo slots are in: a part of the one that all groups share, or memory of the group's own.
//!
//! Whoever can read redo memory reads results. A board that hands it to processes of several users gives each group memory
//! of its own; one that can share a single memory only keeps all groups in that.
//!
//! Invariant: a group's redo slots stay where they are from its first submission to its end.

use super::{ByReference, Node, References};
use crate::slot::State;
use sumac_hal::dma::{Address, RegionKey};
use sumac_hal::ids::GroupId;

impl References<'_> {
    /// Return where a group's redo slots begin.
    pub(super) fn slots_of(&self, group: &ByReference) -> Address {
        let shared = self.memory.address;
        let place = Address { offset_bytes: shared.offset_bytes + group.memory.start as u64, ..shared };
        group.own_memory.unwrap_or(place)
    }
}

impl Node<'_> {
    /// Put the redo slots of a group that has just been [attached](Node::attach) into memory of its own, which the engine
    /// and its processor reach from `start` on, for as many bytes as [`Node::redo_slots`] tells. Its share of
    /// [`References::memory`] stays reserved.
    ///
    /// False, and nothing has changed, if there is no such group, or it has begun.
    pub fn place_redo_slots(&mut self, id: GroupId, start: Address) -> bool {
        let Some(index) = self.find(id) else { return false };
        let Some(group) = &mut self.storage.groups[index] else { return false };
        let slots = &self.storage.slots[group.slots.range()];
        let has_begun = slots.iter().any(|slot| slot.state != State::Free);
        let Some(by_reference) = group.by_reference.as_mut().filter(|_| !has_begun) else { return false };
        by_reference.own_memory = Some(start);
        true
    }

    /// Return where a group's redo slots begin in the memory that they are in, how long each is, and how many there are;
    /// `None` if none of its children contributes by reference.
    pub fn redo_slots(&self, id: GroupId) -> Option<(u64, usize, usize)> {
        let group = self.storage.groups[self.find(id)?].as_ref()?;
        let by_reference = group.by_reference.as_ref()?;
        let start = self.references.as_ref()?.slots_of(by_reference).offset_bytes;
        Some((start, by_reference.memory.len / group.slots.len, group.slots.len))
    }

    /// Tell whether a group's redo slots are in a region, also one that has ended and has chains in flight. Where none are,
    /// the board may take the region away.
    pub fn has_redo_slots_in(&self, region: RegionKey) -> bool {
        let groups = self.storage.groups[..self.groups_end].iter().flatten();
        let mut own = groups.filter_map(|group| group.by_reference.as_ref()?.own_memory);
        own.any(|start| start.region == region)
    }
}
