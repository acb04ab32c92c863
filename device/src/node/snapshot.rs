//! A node taken apart, so that many futures of one moment can be tried: for searches over all states of a group.
//!
//! What is left out behaves alike in every future: counters, traces and events (they say what was, not what comes),
//! moments (only their order matters, and who tries all orders needs no more), and whose turn it is among groups that
//! have nothing to send.
//!
//! The states are those of a node whose window and slots were checked when its group was created; [`Node::reshape`] is
//! the one way past that check, to see what the rule is for.

use super::{Node, NodeConfig};
use crate::group::Window;
use crate::memory::Storage;
use crate::slot::{Slot, State};
use sumac_hal::ids::GroupId;
use sumac_hal::time::Instant;
use sumac_hal::uplink::Uplink;

/// Where a slot is in its chunk's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Never used in this group.
    Free,
    /// Some children are in.
    Filling,
    /// All children are in, the contribution is on its way up.
    Up,
    /// A refusal is on its way up.
    Refused,
    /// The answer is here.
    Answered,
}

/// A node at rest without its storage: nothing waits to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rest {
    config: NodeConfig,
    groups_end: usize,
}

impl Rest {
    /// Put the node together again over storage that holds what it left behind.
    pub fn wake(self, storage: Storage<'_>) -> Node<'_> {
        let mut node = Node::new(self.config, storage);
        node.groups_end = self.groups_end;
        // Whoever is asked for output finds that there is none.
        node.common.may_send = true;
        node
    }
}

impl Node<'_> {
    /// Leave the storage with all that matters in it, as at the moment [`Uplink::AFTERWARDS`]. A child's credit is kept
    /// up to `credit_max` only: a node that lets children save up less.
    ///
    /// # Panics
    /// If something waits to be sent, or the node serves children by reference.
    pub fn rest(mut self, credit_max: u16) -> Rest {
        assert!(self.poll_destination().is_none() && self.references.is_none(), "not at rest");
        for group in self.storage.groups.iter_mut().flatten() {
            if let Some(parent) = &mut group.parent {
                parent.hop.forget_time();
            }
            group.lease_until = Uplink::AFTERWARDS + group.lease();
            group.deficit = 0;
        }
        self.storage.slots.iter_mut().for_each(Slot::forget_time);
        self.storage.children.iter_mut().for_each(|child| child.credit = child.credit.min(credit_max));
        Rest { config: self.common.config, groups_end: self.groups_end }
    }

    /// Forget the probes that are out: see [`Uplink::forget_probe`].
    pub fn forget_probes(&mut self) {
        let parents = self.storage.groups.iter_mut().flatten().filter_map(|group| group.parent.as_mut());
        parents.for_each(|parent| parent.hop.forget_probe());
    }

    /// Tell whether the way up of some group has a timer armed.
    pub fn is_armed(&self) -> bool {
        let groups = self.storage.groups[..self.groups_end].iter().flatten();
        let armed = |at: Option<Instant>| at.is_some();
        groups
            .filter(|group| group.waits_for_parent(self.common.config.shard))
            .filter_map(|group| group.parent.as_ref())
            .any(|parent| armed(parent.hop.timeout()))
    }

    /// Return which chunk each slot of a group holds, by local number.
    pub fn held(&self, group: GroupId) -> impl Iterator<Item = Option<u64>> {
        let group = self.find(group).and_then(|index| self.storage.groups[index].as_ref());
        let slots = group.map_or(&[][..], |group| &self.storage.slots[group.slots.range()]);
        slots.iter().map(|slot| (slot.state != State::Free).then_some(slot.local))
    }

    /// Return what each slot of a group holds, by local number, and where it is in that chunk's life.
    pub fn phases(&self, group: GroupId) -> impl Iterator<Item = (u64, Phase)> {
        let group = self.find(group).and_then(|index| self.storage.groups[index].as_ref());
        let slots = group.map_or(&[][..], |group| &self.storage.slots[group.slots.range()]);
        slots.iter().map(|slot| {
            let phase = match slot.state {
                State::Free => Phase::Free,
                State::Filling => Phase::Filling,
                State::Up => Phase::Up,
                State::Refused => Phase::Refused,
                State::Answered => Phase::Answered,
            };
            (slot.local, phase)
        })
    }

    /// Return how many headers, and how many events, wait to be taken.
    pub fn queues(&self) -> [usize; 2] {
        [self.common.replies.len(), self.common.events.len()]
    }

    /// Return the local number below which a group's chunks are answered here.
    pub fn answered_below(&self, group: GroupId) -> u64 {
        let group = self.find(group).and_then(|index| self.storage.groups[index].as_ref());
        group.map_or(0, |group| group.answered_below)
    }

    /// Let the group take for granted that every child has what was answered here, until one says something new: what a
    /// node would use its slots by that did not wait for `have`.
    pub fn assume_landed(&mut self, group: GroupId) {
        let Some(live) = self.find(group).and_then(|index| self.live(index)) else { return };
        live.group.min_have = live.shard().global(live.group.answered_below);
    }

    /// Give a group another window and fewer slots than it was created with, unchecked.
    ///
    /// # Panics
    /// If there is no such group, or it has not as many slots.
    pub fn reshape(&mut self, group: GroupId, window: u16, slots: usize) {
        let index = self.find(group).expect("the group exists");
        let group = self.storage.groups[index].as_mut().expect("found");
        assert!((1..=group.slots.len).contains(&slots), "a group can only lose slots");
        group.config.window_max = window;
        group.window = Window::new(usize::from(window), window);
        group.window_local = self.common.config.shard.most_within(u64::from(window));
        group.slots.len = slots;
        if let Some(parent) = &mut group.parent {
            parent.window = window;
        }
    }
}
