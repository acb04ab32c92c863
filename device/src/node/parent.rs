//! Packets from the parent, and requests to it (PROTOCOL 3). To its parent a node is a child like a rank, and runs the
//! same [`Uplink`](sumac_hal::uplink::Uplink).

use super::GroupCtx;
use crate::node::group::{Failure, Parent};
use crate::slot::State;
use sumac_hal::ctrl::DropReason;
use sumac_hal::ids::{ChildIndex, ChunkNo};
use sumac_hal::planted;
use sumac_hal::port::Addr;
use sumac_hal::shard::RUN;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Flags, Kind, NakReason, RankMask, Repr, unpack_op};

impl GroupCtx<'_> {
    /// Return whether a packet comes from the parent of this group, on this node's own link.
    pub(super) fn is_parent(&self, from: Addr, repr: &Repr) -> bool {
        self.group.parent.as_ref().is_some_and(|parent| {
            parent.addr == from && parent.child == repr.child && repr.key == self.group.config.parent_key
        })
    }

    /// Return whether a packet is a result that the parent sent to all its children at once.
    pub(super) fn is_shared(&self, from: Addr, repr: &Repr) -> bool {
        let link = self.group.config.parent_shared.filter(|_| repr.kind == Kind::Result);
        let parent = self.group.parent.as_ref().map(|parent| parent.addr);
        repr.child == ChildIndex::ALL && parent == Some(from) && link.is_some_and(|link| link.key == repr.key)
    }

    /// Handle a packet from the parent. `payload_crc` is the verified checksum of its payload.
    pub(super) fn handle_parent(&mut self, repr: &Repr, payload: &[u8], payload_crc: u32, now: Instant) {
        // An answer to the node's own probe says nothing about the ranks: two nodes whose ranks are gone would keep
        // each other's group alive. Zero-copy ranks send no packets, so the probes on their behalf do count.
        if repr.kind != Kind::Status || self.refs.is_some() {
            self.group.lease_until = now + self.group.lease();
        }
        self.group.congested |= repr.flags.contains(Flags::CONGESTED);
        if let Some(parent) = self.group.parent.as_mut() {
            parent.stable = parent.stable.max(repr.mark);
            if repr.window > 0 {
                parent.window = repr.window;
            }
            if repr.child == ChildIndex::ALL {
                parent.shared_results.on_shared();
            }
        }
        match (repr.kind, repr.reason) {
            (Kind::Result | Kind::Done, _) if self.is_behind(repr.view) => self.request_decision(),
            (Kind::Result | Kind::Done, _) => self.on_answers(repr, payload, payload_crc, now),
            (Kind::Late, _) => self.on_late_query(repr, now),
            (Kind::Cut, _) => self.on_cut(repr, payload, now),
            (Kind::Status, _) if repr.count == 0 => self.on_path_status(repr, now),
            (Kind::Status, _) => self.on_status(repr, now),
            (Kind::Nak, Some(reason)) => self.on_nak(reason, repr, payload, now),
            _ => self.common.drop_packet(DropReason::BadKind),
        }
    }

    /// Handle the answer to one chunk, or a Done that covers a run of them.
    fn on_answers(&mut self, repr: &Repr, payload: &[u8], payload_crc: u32, now: Instant) {
        let count = u64::from(repr.count);
        let is_run = repr.kind == Kind::Done && (1..=RUN - repr.seq.0 % RUN).contains(&count);
        if count != 1 && !is_run {
            return self.common.drop_packet(DropReason::BadKind);
        }
        for next in 0..count {
            self.on_answer(&Repr { seq: ChunkNo(repr.seq.0 + next), count: 1, ..*repr }, payload, payload_crc, now);
        }
    }

    fn on_answer(&mut self, repr: &Repr, payload: &[u8], payload_crc: u32, now: Instant) {
        let Some(local) = self.shard().local(repr.seq) else {
            return self.common.drop_packet(DropReason::BadShard);
        };
        let index = self.slot_index(local);
        let slot = &self.slots[index];
        if !slot.holds(local) {
            return self.common.drop_packet(DropReason::Stale);
        }
        if slot.state != State::Up {
            let duplicate = slot.state == State::Answered;
            let reason = if duplicate { DropReason::Duplicate } else { DropReason::Unexpected };
            return self.common.drop_packet(reason);
        }
        if repr.signature != slot.signature {
            return self.common.drop_packet(DropReason::Unexpected);
        }
        let size = slot.element_bytes(false).unwrap_or(0);
        let expected = slot.elements.map_or(payload.len(), |elements| elements as usize * size);
        let limit = usize::from(self.group.config.chunk_len_bytes);
        let fits = match repr.kind {
            Kind::Result => payload.len() == expected && (1..=limit).contains(&payload.len()),
            _ => payload.is_empty(),
        };
        if !fits {
            return self.common.drop_packet(DropReason::BadShape);
        }
        if let Some(Parent { hop, shared_results, .. }) = &mut self.group.parent {
            hop.on_answer(local, now);
            if repr.kind == Kind::Result && repr.child != ChildIndex::ALL {
                shared_results.on_unicast();
            }
        }
        let slot_len = limit * self.group.stages;
        self.bytes[index * slot_len..][..payload.len()].copy_from_slice(payload);
        let slot = &mut self.slots[index];
        slot.value_len = payload.len() as u16;
        (slot.slowest, slot.late_us) = (repr.slowest, repr.late_us);
        self.group.up.remove(index);
        self.answer(index);
        // The value is forwarded with the checksum that it came with, so that the checksum covers this node's memory
        // too.
        self.slots[index].value_crc = Some(payload_crc);
        self.request_parent_gaps();
    }

    fn request_parent_gaps(&mut self) {
        while let Some(Parent { hop, window, .. }) = &mut self.group.parent {
            let Some(local) = hop.next_gap(*window) else { return };
            let top = hop.top_answer();
            let (seq, bits) = (self.shard().global(local), self.shard().global(top).0);
            let token = self.group.token;
            self.send_up(Repr { reason: Some(NakReason::Missing), bits, ..self.up_header(Kind::Nak, seq, token) });
        }
    }

    fn on_status(&mut self, repr: &Repr, now: Instant) {
        let from = self.shard().below(repr.seq);
        let GroupCtx { group, slots, common, .. } = self;
        let Some(Parent { hop, .. }) = &mut group.parent else { return };
        let up = &mut group.up;
        let known = hop.on_status(repr.token, from, repr.bits, now, |local| {
            let index = (local % slots.len() as u64) as usize;
            if slots[index].holds(local) && matches!(slots[index].state, State::Up | State::Refused) {
                up.insert(index);
                common.counters.contributions_resent += 1;
            }
        });
        if !known {
            common.drop_packet(DropReason::Unexpected);
        }
    }

    fn on_nak(&mut self, reason: NakReason, repr: &Repr, payload: &[u8], now: Instant) {
        let Some(Parent { hop, .. }) = &mut self.group.parent else { return };
        // Only an echo of our own token concerns this incarnation of the group (PROTOCOL 4).
        if repr.token != self.group.token && !hop.is_probe_token(repr.token) {
            return self.common.drop_packet(DropReason::Unexpected);
        }
        hop.on_activity(now);
        match reason {
            NakReason::Missing | NakReason::Resend => self.resend_contribution(repr.seq),
            NakReason::UnknownOperation => {
                hop.forget_described();
                self.resend_contribution(repr.seq);
            }
            NakReason::WrongEpoch | NakReason::UnknownGroup => {
                self.fail(Failure { from: repr.seq, reason: NakReason::PathLost, ops: None }, now);
            }
            NakReason::Stragglers | NakReason::Excluded => self.on_stragglers_nak(reason, repr, payload, now),
            NakReason::Mismatch | NakReason::Unsupported | NakReason::PathLost => {
                let ops = repr.op_desc().zip(unpack_op(repr.bits2));
                self.fail(Failure { from: repr.seq, reason, ops }, now);
            }
            _ => self.common.drop_packet(DropReason::BadKind),
        }
    }

    fn resend_contribution(&mut self, seq: ChunkNo) {
        let Some(local) = self.shard().local(seq) else {
            return self.common.drop_packet(DropReason::BadShard);
        };
        let index = self.slot_index(local);
        let slot = &self.slots[index];
        if slot.holds(local) && matches!(slot.state, State::Up | State::Refused) {
            self.group.up.insert(index);
            self.common.counters.contributions_resent += 1;
        }
    }

    /// Probe the parent if a probe is due, or give it up as dead.
    pub(super) fn poll_parent(&mut self, now: Instant) {
        let shard = self.shard();
        if !self.group.waits_for_parent(shard) {
            return;
        }
        let Some(Parent { hop, path, .. }) = &mut self.group.parent else { return };
        if hop.is_dead(now) && !planted!(self.common, DeadHopUndetected) {
            let from = shard.global(hop.answered_below());
            return self.fail(Failure { from, reason: NakReason::PathLost, ops: None }, now);
        }
        let Some(probe) = hop.poll_probe(now) else { return };
        if let Some(path) = path.as_mut().filter(|_| hop.is_stalled()) {
            path.search_again(now);
        }
        let header = self.up_header(Kind::Probe, shard.global(probe.from), probe.token);
        self.common.counters.probes_out += 1;
        self.send_up(Repr { count: probe.count, bits: probe.held, ..header });
    }

    /// Return, once, the flag that reports congestion on the way down to the parent.
    pub(super) fn take_congestion_flag(&mut self) -> Flags {
        if core::mem::take(&mut self.group.congested) { Flags::CONGESTED } else { Flags::empty() }
    }

    /// Return the header of a packet up to the parent.
    pub(super) fn up_header(&self, kind: Kind, seq: ChunkNo, token: u32) -> Repr {
        let config = &self.group.config;
        let child = self.group.parent.as_ref().map(|parent| parent.child).unwrap_or_default();
        Repr {
            seq,
            count: 1,
            token,
            mark: self.group.min_have,
            ..Repr::new(kind, config.group, config.epoch, child, config.parent_key)
        }
    }

    pub(super) fn send_up(&mut self, repr: Repr) {
        self.send_up_with(repr, None);
    }

    pub(super) fn send_up_with(&mut self, mut repr: Repr, mask: Option<RankMask>) {
        repr.flags |= self.take_congestion_flag();
        if let Some(parent) = &self.group.parent {
            self.common.reply_with(parent.addr, repr, mask);
        }
    }
}
