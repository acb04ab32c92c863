//! One group with its entries of all tables: what the rules of contributions, answers and stragglers share.

use super::group::Failure;
use super::zero_copy::Refs;
use super::{Child, Common, Event, Group, Hop};
use crate::order::Stages;
use crate::sets::MAX_SLOTS;
use crate::slot::{Slot, State};
use crate::trace::Trace;
use core::ops::Range;
use sumac_hal::ids::{ChildIndex, ChunkNo};
use sumac_hal::op::OpDesc;
use sumac_hal::planted;
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Kind, Repr, pack_op};

/// One group with its entries of all tables. Most rules are methods of this.
pub(super) struct GroupCtx<'a> {
    pub(super) group: &'a mut Group,
    pub(super) children: &'a mut [Child],
    /// The hops to the parent; none at the root.
    pub(super) hops: &'a mut [Hop],
    pub(super) slots: &'a mut [Slot],
    pub(super) bytes: &'a mut [u8],
    /// Zero-copy tables of the group, if it has zero-copy children.
    pub(super) refs: Option<Refs<'a>>,
    pub(super) common: &'a mut Common,
}

impl GroupCtx<'_> {
    pub(super) fn shard(&self) -> Shard {
        self.common.config.shard
    }

    /// Record that this group may have something to send. Call it after anything that may have produced output.
    pub(super) fn note_output(&mut self) {
        if !self.common.may_send {
            self.common.may_send = self.group.has_output();
        }
    }

    /// Return the hop to the parent that chunk `seq` takes.
    pub(super) fn hop_of(&self, seq: ChunkNo) -> usize {
        if planted!(self.common, FirstShardOnly) {
            return 0;
        }
        usize::from(Shard::of(seq, self.hops.len().max(1) as u16))
    }

    pub(super) fn slot_index(&self, local: u64) -> usize {
        debug_assert!(self.slots.len() <= MAX_SLOTS);
        (local % self.slots.len() as u64) as usize
    }

    /// Return the chunk buffers of slot `index`.
    pub(super) fn stages(&mut self, index: usize) -> Stages<'_> {
        stages_of(self.group, &self.slots[index], index, self.bytes)
    }

    /// Return where the value of slot `index` is in the group's bytes: at the start of its stages.
    pub(super) fn value(&self, index: usize) -> Range<usize> {
        let start = stage_start(self.group, index);
        start..start + usize::from(self.slots[index].value_len)
    }

    /// Fail the group at `failure.from` and send a Nak to every child that waits for this or a later chunk. Later
    /// contributions are answered with the same Nak.
    pub(super) fn fail(&mut self, failure: Failure, now: Instant) {
        if self.group.failed.is_some_and(|earlier| earlier.from <= failure.from) {
            return;
        }
        self.group.failed = Some(failure);
        let id = self.group.config.group;
        self.common.trace.record(now, Trace::Failed(id, failure.from, failure.reason));
        self.common.event(Event::GroupFailed { group: id, from: failure.from, reason: failure.reason });
        let from = self.shard().below(failure.from);
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            if slot.local >= from && matches!(slot.state, State::Filling | State::Up | State::Refused) {
                slot.pending = slot.bits.difference(&self.group.view.excluded);
                self.group.up.remove(index);
                self.mark_all_to_answer(index);
                if !self.slots[index].pending.is_empty() {
                    self.group.down.insert(index);
                }
            }
        }
    }

    /// Return the Nak that reports `failure` to a child.
    pub(super) fn failure_nak(&self, failure: &Failure, child: usize, seq: ChunkNo, token: u32) -> Repr {
        let config = &self.group.config;
        let mut nak = Repr {
            reason: Some(failure.reason),
            seq,
            count: 1,
            token,
            mark: self.group.stable(),
            ..Repr::new(Kind::Nak, config.group, config.epoch, ChildIndex(child as u16), self.children[child].key)
        };
        put_ops(&mut nak, failure.ops);
        nak
    }
}

/// Return where the stages of slot `index` begin in the group's bytes.
pub(super) fn stage_start(group: &Group, index: usize) -> usize {
    index * usize::from(group.config.chunk_len_bytes) * group.stages
}

/// Return the chunk buffers of `slot`, which has this index, in the group's bytes.
pub(super) fn stages_of<'b>(group: &Group, slot: &Slot, index: usize, bytes: &'b mut [u8]) -> Stages<'b> {
    let len = slot.value_bytes();
    let stride = usize::from(group.config.chunk_len_bytes);
    let slot_len = stride * group.stages;
    Stages { bytes: &mut bytes[stage_start(group, index)..][..slot_len], stride, len }
}

/// Write the two operations of a mismatch into a Nak: the first into the header's fields, the other packed.
pub(super) fn put_ops(nak: &mut Repr, ops: Option<(OpDesc, OpDesc)>) {
    let Some((first, other)) = ops else { return };
    nak.set_op(&first);
    nak.bits2 = pack_op(&other);
}
