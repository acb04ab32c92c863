//! Trains: consecutive Data of one child, in the usual case.
//!
//! [`GroupCtx::on_contributions`] handles any contribution. Most are the next chunk of a child that has sent the one
//! before, belong to an operation that the node knows, and come to a group in which nothing is amiss. What that takes is
//! checked once for a train ([`GroupCtx::usual`]); what is left is checked of each packet ([`GroupCtx::take`]).
//!
//! Invariants:
//! - a packet that is not of the usual case has no effect here, and is handled as any other;
//! - a packet that is has the effect that `on_contributions` has, in the state and on the wire. `tests/train.rs` compares
//!   the two;
//! - no packet of the usual case ends the usual case of its group.

use super::context::stage_start;
use super::operation::SHORT_PAYLOAD_MIN_BYTES;
use super::{GroupCtx, supported};
use crate::node::group::Child;
use crate::order::Input;
use crate::slot::State;
use sumac_hal::ctrl::{DropReason, Order};
use sumac_hal::ids::ChunkNo;
use sumac_hal::op::OpDesc;
use sumac_hal::reduce::Kernel;
use sumac_hal::shard::RUN;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Flags, Kind, Lead, Repr};

/// What was found out of a child's Data, and holds for the packets that it leads.
pub(super) struct Admitted {
    /// The group's entry.
    pub(super) group: usize,
    pub(super) child: usize,
    pub(super) lead: Lead,
    pub(super) usual: Option<Usual>,
}

/// What packets of the usual case have in common, and where the next one belongs.
pub(super) struct Usual {
    op: OpDesc,
    kernel: Kernel,
    flags: Flags,
    payload_len: usize,
    elements: u32,
    /// Length of the accumulators in bytes.
    value_len: usize,
    lease_until: Instant,
    next: Position,
    /// The child's window ends before this local number.
    window_end: u64,
}

/// A chunk, and its place.
struct Position {
    seq: ChunkNo,
    local: u64,
    index: usize,
}

impl GroupCtx<'_> {
    /// Return what packets like this one, which was admitted, have in common with each other; `None` if they are not of
    /// the usual case.
    pub(super) fn usual(&self, child: usize, repr: &Repr, payload_len: usize, now: Instant) -> Option<Usual> {
        #[cfg(feature = "planted")]
        if self.common.bug.is_some() {
            return None;
        }
        let flags = repr.flags;
        let is_plain = repr.kind == Kind::Data && flags.contains(Flags::SHORT) && !flags.contains(Flags::CONGESTED);
        let is_intact = self.group.failed.is_none() && self.refs.is_none() && self.group.view.has_everybody();
        let Child { top, next_missing: local, .. } = self.children[child];
        if !is_plain || payload_len < SHORT_PAYLOAD_MIN_BYTES || !is_intact || local != top {
            return None;
        }
        let op = self.group.operations.find(repr.signature).filter(|known| known.limit.is_none())?.op;
        let kernel = Kernel::new(op.dtype?, op.op?).filter(|_| supported(&op))?;
        let elements = kernel.count(payload_len, flags.contains(Flags::PARTIAL))?;
        let value_len = elements * kernel.accumulator_bytes();
        (value_len <= usize::from(self.group.config.chunk_len_bytes)).then_some(Usual {
            op,
            kernel,
            flags,
            payload_len,
            elements: elements as u32,
            value_len,
            lease_until: now + self.group.lease(),
            next: Position { seq: self.shard().global(local), local, index: self.slot_index(local) },
            window_end: self.window_end(child),
        })
    }

    /// Return the local number before which the child's window ends.
    fn window_end(&self, child: usize) -> u64 {
        self.shard().below(self.children[child].have) + self.group.window_local
    }

    /// Handle the next Data of a train whose first one was admitted. The caller counts it.
    #[inline]
    pub(super) fn handle_next(&mut self, admitted: &mut Admitted, packet: &[u8], now: Instant) {
        let Admitted { child, lead, usual, .. } = admitted;
        let Ok((repr, payload, _)) = lead.parse(packet) else {
            return self.common.drop_packet(DropReason::Malformed);
        };
        if !self.admit_mark(repr) {
            return;
        }
        if let Some(usual) = usual {
            // What `take_report` does for a child that is not excluded, and without congestion.
            if repr.mark > self.children[*child].have {
                self.note_have(*child, repr.mark);
                usual.window_end = self.window_end(*child);
            }
            self.group.lease_until = usual.lease_until;
            if self.take(usual, *child, repr, payload, now) {
                return;
            }
            self.on_contributions(*child, repr, payload, now);
        } else if self.take_report(*child, repr, now) {
            self.on_contributions(*child, repr, payload, now);
        }
        *usual = self.usual(*child, repr, payload.len(), now);
        self.note_output();
    }

    /// Take a contribution, if it is of the usual case: returns false, and does nothing, if it is not. `admit_mark` and
    /// `take_report` have passed it.
    #[inline]
    pub(super) fn take(&mut self, usual: &mut Usual, child: usize, repr: &Repr, payload: &[u8], now: Instant) -> bool {
        let Position { seq, local, index } = usual.next;
        if repr.seq != seq || payload.len() != usual.payload_len || local >= usual.window_end {
            return false;
        }
        let slot = &self.slots[index];
        if slot.state == State::Filling && slot.local == local {
            let OpDesc { collective, dtype, op, .. } = usual.op;
            let is_alike = (slot.signature, slot.elements) == (repr.signature, Some(usual.elements))
                && (slot.op.collective, slot.op.dtype, slot.op.op) == (collective, dtype, op);
            if !is_alike || slot.bits.contains(child) {
                return false;
            }
        } else {
            if slot.state != State::Free && slot.local >= local || !self.is_reusable(index) {
                return false;
            }
            self.begin(index, local, usual.op, repr.signature);
            self.slots[index].elements = Some(usual.elements);
        }
        let slot = &mut self.slots[index];
        let has_value = !slot.data.is_empty();
        slot.note_time(repr.slowest, repr.late_us, now);
        slot.mark(child, true, usual.flags.contains(Flags::WANT));
        if usual.flags.contains(Flags::SHARED) {
            slot.shared.insert(child);
        }
        let is_complete = slot.bits.has_first(self.children.len());
        self.common.counters.contributions += 1;
        // What `note_arrival` does, and `request_gaps` for a chunk in order.
        let from = &mut self.children[child];
        from.token = repr.token;
        from.credit = (from.credit + 1).min(Child::CREDIT_MAX);
        (from.top, from.next_missing, from.asked_at) = (local + 1, local + 1, local + 1);
        let partial = usual.flags.contains(Flags::PARTIAL);
        let mut is_finished = false;
        if self.group.config.order == Order::Arrival {
            let value = &mut self.bytes[stage_start(self.group, index)..][..usual.value_len];
            // The root finishes the value, and in one pass if it can.
            is_finished = is_complete
                && has_value
                && self.group.parent.is_none()
                && usual.kernel.combine_last(value, payload, partial);
            match (is_finished, has_value) {
                (true, _) => {}
                (false, true) => usual.kernel.combine(value, payload, partial),
                (false, false) => usual.kernel.load(value, payload, partial),
            }
        } else {
            self.combine_input(index, child, Some(Input { payload, partial }));
        }
        self.step(&mut usual.next);
        if is_complete {
            self.finish(index, is_finished, now);
            self.note_output();
        }
        true
    }

    /// Move on to the chunk's successor in this shard.
    #[inline]
    fn step(&self, at: &mut Position) {
        at.local += 1;
        at.index = if at.index + 1 == self.slots.len() { 0 } else { at.index + 1 };
        at.seq.0 += 1;
        if at.seq.0.is_multiple_of(RUN) {
            at.seq = self.shard().global(at.local);
        }
    }
}
