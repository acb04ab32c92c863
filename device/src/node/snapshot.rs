//! Snapshots of a node, for exhaustive searches over the states of a group: many futures of one state can be tried.
//!
//! A snapshot leaves out what cannot affect later behaviour: counters, traces and events, which only record the past;
//! times, because only their order matters and a search tries all orders; and whose turn it is among groups that have
//! nothing to send.
//!
//! Snapshots come from nodes whose window and slots were checked when the group was created. [`Node::reshape`] alone
//! bypasses that check, to show what the rule is for.

use super::{Node, NodeConfig};
use crate::node::group::Window;
use crate::node::memory::Storage;
use crate::slot::{Slot, State};
use core::iter::repeat;
use sumac_hal::ids::GroupId;
use sumac_hal::uplink::Uplink;

/// The state of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Never used in this group.
    Free,
    /// Some children have contributed.
    Filling,
    /// All children have contributed; the partial result is on its way to the parent.
    Up,
    /// A refusal is on its way to the parent.
    Refused,
    /// The answer is in the slot.
    Answered,
}

/// A node without its storage, taken while it had nothing to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NodeSnapshot {
    config: NodeConfig,
    groups_end: usize,
}

impl NodeSnapshot {
    /// Restore the node over the storage that it left behind.
    pub fn restore(self, storage: Storage<'_>) -> Node<'_> {
        let mut node = Node::new(self.config, storage);
        node.groups_end = self.groups_end;
        // Harmless if there is no output: the first poll finds out.
        node.common.may_send = true;
        node
    }
}

impl Node<'_> {
    /// Turn the node into a snapshot; the rest of its state stays in the storage, with times reset to
    /// [`Uplink::RESUME_AT`]. Credit is capped at `credit_max`, as in a node that lets children save up less.
    ///
    /// # Panics
    /// If something waits to be sent, or the node has zero-copy tables.
    pub fn into_snapshot(mut self, credit_max: u16) -> NodeSnapshot {
        assert!(
            self.poll_destination().is_none() && self.zero_copy.is_none(),
            "something waits to be sent, or the node has zero-copy tables"
        );
        self.storage.hops.iter_mut().for_each(|hop| hop.link.forget_time());
        for group in self.storage.groups.iter_mut().flatten() {
            group.lease_until = Uplink::RESUME_AT + group.lease();
            group.deficit = 0;
        }
        self.storage.slots.iter_mut().for_each(Slot::forget_time);
        self.storage.children.iter_mut().for_each(|child| child.credit = child.credit.min(credit_max));
        NodeSnapshot { config: self.common.config, groups_end: self.groups_end }
    }

    /// Forget outstanding probes: see [`Uplink::forget_probe`].
    pub fn forget_probes(&mut self) {
        self.storage.hops.iter_mut().for_each(|hop| hop.link.forget_probe());
    }

    /// Return whether the uplink of some group has a timer armed.
    pub fn is_armed(&self) -> bool {
        let groups = self.storage.groups[..self.groups_end].iter().flatten();
        let mut hops = groups.flat_map(|group| self.storage.hops[group.hops().range()].iter().zip(repeat(group)));
        hops.any(|(hop, group)| group.waits_for(hop) && hop.link.timeout().is_some())
    }

    /// Return the chunk in each slot of a group, by local number.
    pub fn held(&self, group: GroupId) -> impl Iterator<Item = Option<u64>> {
        let group = self.find(group).and_then(|index| self.storage.groups[index].as_ref());
        let slots = group.map_or(&[][..], |group| &self.storage.slots[group.slots.range()]);
        slots.iter().map(|slot| (slot.state != State::Free).then_some(slot.local))
    }

    /// Return the chunk in each slot of a group, by local number, and the slot's state.
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

    /// Return the number of replies and of events that wait to be taken.
    pub fn queues(&self) -> [usize; 2] {
        [self.common.replies.len(), self.common.events.len()]
    }

    /// Return the local number below which all of a group's chunks are answered.
    pub fn answered_below(&self, group: GroupId) -> u64 {
        let group = self.find(group).and_then(|index| self.storage.groups[index].as_ref());
        group.map_or(0, |group| group.answered_below)
    }

    /// Assume that every child holds every answer sent so far, until one reports otherwise: a node that reused slots
    /// without waiting for `have` would behave like this.
    pub fn assume_delivered(&mut self, group: GroupId) {
        let Some(ctx) = self.find(group).and_then(|index| self.group_ctx(index)) else { return };
        ctx.group.min_have = ctx.shard().global(ctx.group.answered_below);
    }

    /// Give a group another window and fewer slots than it was created with, unchecked.
    ///
    /// # Panics
    /// If the group does not exist or has fewer slots.
    pub fn reshape(&mut self, group: GroupId, window: u16, slots: usize) {
        let index = self.find(group).expect("the group exists");
        let group = self.storage.groups[index].as_mut().expect("found");
        assert!((1..=group.slots.len).contains(&slots), "a group can only lose slots");
        group.config.window_max = window;
        group.window = Window::new(usize::from(window), window);
        group.window_local = self.common.config.shard.max_in_window(u64::from(window));
        group.slots.len = slots;
        let hops = group.hops();
        if let Some(parent) = &mut group.parent {
            parent.window = window;
        }
        self.storage.hops[hops.range()].iter_mut().for_each(|hop| hop.window = window);
    }
}
