//! What leaves a node, and in which order: replies first (they are small and somebody waits for them), then the
//! groups in turn, by bytes (deficit round robin, Shreedhar and Varghese 1995), each its contributions up before
//! its answers down, lowest chunk first.

use super::{Live, Node, Transmit};
use crate::group::Parent;
use crate::slot::State;
use sumac_hal::port::Addr;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Flags, HEADER_LEN, Kind, Packet, Repr, pack_op, payload_crc};

/// What a group may send in its turn before the next one's, in bytes.
const QUANTUM_BYTES: usize = 64 * 1024;

impl Node<'_> {
    /// Write the oldest reply.
    pub(super) fn next_reply(&mut self, buffer: &mut [u8]) -> Option<Transmit> {
        let reply = self.common.replies.pop_front()?;
        let mut packet = Packet::new_unchecked(&mut buffer[..HEADER_LEN]);
        reply.repr.emit(&mut packet, 0);
        Some(Transmit { to: reply.to, len_bytes: HEADER_LEN })
    }

    /// Write the next packet of the group whose turn it is.
    pub(super) fn next_in_turn(&mut self, buffer: &mut [u8], now: Instant) -> Option<Transmit> {
        let turn = self.take_turn()?;
        let sent = self.live(turn)?.transmit(buffer, now)?;
        if let Some(group) = &mut self.storage.groups[turn] {
            group.deficit = group.deficit.saturating_sub(sent.len_bytes);
        }
        Some(sent)
    }

    /// Return the group whose turn it is to send, `None` if no group has anything to send.
    pub(super) fn take_turn(&mut self) -> Option<usize> {
        let groups = self.storage.groups.len();
        // Each group is looked at twice at most: once to end its turn, once to begin its next.
        for _ in 0..2 * groups {
            let turn = self.turn;
            if let Some(group) = &mut self.storage.groups[turn] {
                if group.has_output() && group.deficit > 0 {
                    return Some(turn);
                }
                group.deficit = QUANTUM_BYTES;
            }
            self.turn = (turn + 1) % groups;
        }
        None
    }
}

impl Live<'_> {
    /// The slot to start looking from: that of the oldest chunk that some child may still lack.
    fn oldest(&self) -> usize {
        self.slot_index(self.shard().below(self.group.min_have))
    }

    /// Return where this group's next packet goes.
    pub(super) fn destination(&self) -> Option<Addr> {
        let oldest = self.oldest();
        if self.group.up.first_from(oldest).is_some() {
            return self.group.parent.as_ref().map(|parent| parent.addr);
        }
        let index = self.group.down.first_from(oldest)?;
        self.children[self.slots[index].pending.first()?].addr
    }

    /// Write this group's next packet.
    fn transmit(&mut self, buffer: &mut [u8], now: Instant) -> Option<Transmit> {
        let oldest = self.oldest();
        if let Some(index) = self.group.up.first_from(oldest) {
            self.group.up.remove(index);
            return self.transmit_up(index, buffer, now);
        }
        let index = self.group.down.first_from(oldest)?;
        let slot = &mut self.slots[index];
        let child = slot.pending.first()?;
        slot.pending.remove(child);
        if slot.pending.is_empty() {
            self.group.down.remove(index);
        }
        self.transmit_down(index, child, buffer)
    }

    fn transmit_up(&mut self, index: usize, buffer: &mut [u8], now: Instant) -> Option<Transmit> {
        let slot = self.slots[index];
        let seq = self.shard().global(slot.local);
        let mut repr = self.up_header(Kind::Empty, seq, self.group.token);
        if slot.state == State::Refused {
            let failure = self.group.refusal?;
            repr.kind = Kind::Nak;
            repr.reason = Some(failure.reason);
            super::put_ops(&mut repr, failure.ops.or(Some((slot.op, slot.op))));
        } else {
            repr.collective = Some(slot.op.collective);
            repr.dtype = slot.op.dtype;
            repr.op = slot.op.op;
            repr.bits = slot.op.count;
            if slot.value_len > 0 {
                repr.kind = Kind::Data;
                repr.flags |= Flags::PARTIAL;
            }
        }
        repr.signature = slot.signature;
        repr.attempt = slot.attempt;
        repr.flags.set(Flags::WANT, !slot.want.is_empty());
        let Some(Parent { addr, hop, .. }) = &mut self.group.parent else { return None };
        hop.on_sent(slot.local, now);
        let to = *addr;
        Some(Transmit { to, len_bytes: self.emit(repr, index, buffer) })
    }

    fn transmit_down(&mut self, index: usize, child: usize, buffer: &mut [u8]) -> Option<Transmit> {
        let slot = &self.slots[index];
        let to = self.children[child].addr?;
        let seq = self.shard().global(slot.local);
        let token = self.children[child].token;
        if slot.state != State::Answered {
            let failure = self.group.failed?;
            let nak = self.failure_nak(&failure, child, seq, token);
            self.common.counters.naks += 1;
            nak.emit(&mut Packet::new_unchecked(&mut buffer[..HEADER_LEN]), 0);
            return Some(Transmit { to, len_bytes: HEADER_LEN });
        }
        let with_result = slot.value_len > 0 && slot.want.contains(child);
        let kind = if with_result { Kind::Result } else { Kind::Done };
        let repr = Repr {
            collective: Some(slot.op.collective),
            dtype: slot.op.dtype,
            op: slot.op.op,
            signature: slot.signature,
            attempt: slot.attempt,
            bits: slot.op.count,
            bits2: pack_op(&slot.op),
            ..self.down_header(kind, child, seq, token)
        };
        Some(Transmit { to, len_bytes: self.emit(repr, index, buffer) })
    }

    /// Write a header and, for Data and Result, the value of slot `index`; return the packet's length.
    fn emit(&mut self, mut repr: Repr, index: usize, buffer: &mut [u8]) -> usize {
        let with_value = matches!(repr.kind, Kind::Data | Kind::Result);
        let crc = if with_value {
            let crc = self.slots[index].value_crc.unwrap_or_else(|| payload_crc(self.value(index)));
            self.slots[index].value_crc = Some(crc);
            repr.payload_len_bytes = self.slots[index].value_len;
            crc
        } else {
            0
        };
        let mut packet = Packet::new_unchecked(&mut buffer[..repr.packet_len()]);
        if with_value {
            packet.payload_mut().copy_from_slice(self.value(index));
        }
        repr.emit(&mut packet, crc);
        repr.packet_len()
    }
}
