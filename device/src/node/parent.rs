//! Packets from the parent, and requests to it (PROTOCOL 3). To its parent a node is a child like a rank, and runs the
//! same [`Uplink`](sumac_hal::uplink::Uplink) on each hop: to the parent's shard that corresponds to this node or, if
//! this node is undivided, to each of them (PROTOCOL 1).

use super::GroupCtx;
use crate::node::group::{Failure, Hop};
use crate::slot::State;
use sumac_hal::ctrl::DropReason;
use sumac_hal::ids::{ChildIndex, ChunkNo};
use sumac_hal::planted;
use sumac_hal::port::Addr;
use sumac_hal::shard::RUN;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Flags, Kind, NakReason, RankMask, Repr, unpack_op};

impl GroupCtx<'_> {
    /// Return the hop on which a packet comes from the parent of this group: on this node's own link, or sent to all of
    /// the parent's children at once. `None` if it does not come from there.
    pub(super) fn hop_from(&self, from: Addr, repr: &Repr) -> Option<usize> {
        let parent = self.group.parent.as_ref()?;
        let is_own = parent.child == repr.child && repr.key == self.group.config.parent_key;
        if !is_own && !self.is_shared(repr) {
            return None;
        }
        self.hops.iter().position(|hop| hop.addr == from)
    }

    fn is_shared(&self, repr: &Repr) -> bool {
        let link = self.group.config.parent_shared.filter(|_| repr.kind == Kind::Result);
        repr.child == ChildIndex::ALL && link.is_some_and(|link| link.key == repr.key)
    }

    /// Handle a packet from the parent on a hop. `payload_crc` is the verified checksum of its payload.
    pub(super) fn handle_parent(&mut self, hop: usize, repr: &Repr, payload: &[u8], payload_crc: u32, now: Instant) {
        // An answer to the node's own probe says nothing about the ranks: two nodes whose ranks are gone would keep
        // each other's group alive. Zero-copy ranks send no packets, so the probes on their behalf do count.
        if repr.kind != Kind::Status || self.refs.is_some() {
            self.group.lease_until = now + self.group.lease();
        }
        self.group.congested |= repr.flags.contains(Flags::CONGESTED);
        if let Some(parent) = self.group.parent.as_mut() {
            parent.stable = parent.stable.max(repr.mark);
            if repr.window > 0 {
                self.hops[hop].window = repr.window;
                parent.window = self.hops.iter().map(|hop| hop.window).min().unwrap_or(repr.window);
            }
            if repr.child == ChildIndex::ALL {
                parent.shared_results.on_shared();
            }
        }
        match (repr.kind, repr.reason) {
            (Kind::Result | Kind::Done, _) if self.is_behind(repr.view) => self.request_decision(),
            (Kind::Result | Kind::Done, _) => self.on_answers(hop, repr, payload, payload_crc, now),
            (Kind::Late, _) => self.on_late_query(repr, now),
            (Kind::Cut, _) => self.on_cut(repr, payload, now),
            (Kind::Status, _) if repr.count == 0 => self.on_path_status(hop, repr, now),
            (Kind::Status, _) => self.on_status(hop, repr, now),
            (Kind::Nak, Some(reason)) => self.on_nak(hop, reason, repr, payload, now),
            _ => self.common.drop_packet(DropReason::BadKind),
        }
    }

    /// Handle the answer to one chunk, or a Done that covers a run of them.
    fn on_answers(&mut self, hop: usize, repr: &Repr, payload: &[u8], payload_crc: u32, now: Instant) {
        let count = u64::from(repr.count);
        let is_run = repr.kind == Kind::Done && (1..=RUN - repr.seq.0 % RUN).contains(&count);
        if count != 1 && !is_run {
            return self.common.drop_packet(DropReason::BadKind);
        }
        for next in 0..count {
            let seq = ChunkNo(repr.seq.0 + next);
            self.on_answer(hop, &Repr { seq, count: 1, ..*repr }, payload, payload_crc, now);
        }
    }

    fn on_answer(&mut self, hop: usize, repr: &Repr, payload: &[u8], payload_crc: u32, now: Instant) {
        let (own, above) = (self.shard().local(repr.seq), self.hops[hop].shard.local(repr.seq));
        let Some((local, above)) = own.zip(above) else {
            return self.common.drop_packet(DropReason::BadShard);
        };
        if self.group.failed.is_some_and(|failure| repr.seq >= failure.from) {
            // The chunk was answered by a Nak.
            return self.common.drop_packet(DropReason::Unexpected);
        }
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
        self.hops[hop].link.on_answer(above, now);
        if let Some(parent) = &mut self.group.parent
            && repr.kind == Kind::Result
            && repr.child != ChildIndex::ALL
        {
            parent.shared_results.on_unicast();
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
        self.request_parent_gaps(hop);
    }

    fn request_parent_gaps(&mut self, hop: usize) {
        while let Hop { link, shard, window, .. } = &mut self.hops[hop]
            && let Some(local) = link.next_gap(*window)
        {
            let (seq, bits) = (shard.global(local), shard.global(link.top_answer()).0);
            let token = self.group.token;
            self.send_up(hop, Repr { reason: Some(NakReason::Missing), bits, ..self.up_header(Kind::Nak, seq, token) });
        }
    }

    fn on_status(&mut self, hop: usize, repr: &Repr, now: Instant) {
        let own = self.shard();
        let GroupCtx { group, slots, common, hops, .. } = self;
        let Hop { link, shard, .. } = &mut hops[hop];
        let up = &mut group.up;
        let known = link.on_status(repr.token, shard.below(repr.seq), (repr.bits, repr.bits2), now, |above| {
            let local = if planted!(common, LocalNumbersMixed) { above } else { own.below(shard.global(above)) };
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

    fn on_nak(&mut self, hop: usize, reason: NakReason, repr: &Repr, payload: &[u8], now: Instant) {
        let link = &mut self.hops[hop].link;
        // Only an echo of our own token concerns this incarnation of the group (PROTOCOL 4).
        if repr.token != self.group.token && !link.is_probe_token(repr.token) {
            return self.common.drop_packet(DropReason::Unexpected);
        }
        link.on_activity(now);
        match reason {
            NakReason::Missing | NakReason::Resend => self.resend_contribution(repr.seq),
            NakReason::UnknownOperation => {
                link.forget_described();
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

    /// Handle expired timers of the hops to the parent, and of the searches of their paths.
    pub(super) fn poll_hops(&mut self, now: Instant) {
        for hop in 0..self.hops.len() {
            self.poll_hop(hop, now);
            self.poll_path(hop, now);
        }
    }

    /// Probe a shard of the parent if a probe is due, or give it up as dead.
    fn poll_hop(&mut self, hop: usize, now: Instant) {
        if !self.group.waits_for(&self.hops[hop]) {
            return;
        }
        let Hop { link, shard, path, .. } = &mut self.hops[hop];
        if link.is_dead(now) && !planted!(self.common, DeadHopUndetected) {
            let from = shard.global(link.answered_below());
            return self.fail(Failure { from, reason: NakReason::PathLost, ops: None }, now);
        }
        let Some(probe) = link.poll_probe(now) else { return };
        if let Some(path) = path.as_mut().filter(|_| link.is_stalled()) {
            path.search_again(now);
        }
        let from = shard.global(probe.from);
        let header = self.up_header(Kind::Probe, from, probe.token);
        self.common.counters.probes_out += 1;
        self.send_up(hop, Repr { count: probe.count, bits: probe.held, bits2: probe.lost, ..header });
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

    pub(super) fn send_up(&mut self, hop: usize, repr: Repr) {
        self.send_up_with(hop, repr, None);
    }

    pub(super) fn send_up_with(&mut self, hop: usize, mut repr: Repr, mask: Option<RankMask>) {
        repr.flags |= self.take_congestion_flag();
        if let Some(hop) = self.hops.get(hop) {
            self.common.reply_with(hop.addr, repr, mask);
        }
    }
}
