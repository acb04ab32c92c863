//! Processing of packets from the leaf node.

use super::{Buffers, Endpoint, EndpointConfig, EndpointError, Slowest};
use sumac_hal::ids::{ChildIndex, ChunkNo};
use sumac_hal::op::OpDesc;
use sumac_hal::planted;
use sumac_hal::port::{Addr, Ecn};
use sumac_hal::shard::RUN;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Kind, Lead, NakReason, Packet, RankMask, Repr, WireError, packet_len_max, unpack_op};

impl Endpoint {
    /// Handle a packet that arrived at `now` from `from`; results go to `buffers`. If it has a congestion mark, the
    /// next contribution reports that to the node, which reduces the window (PROTOCOL 3).
    pub fn handle(&mut self, now: Instant, from: Addr, ecn: Ecn, packet: &[u8], buffers: &mut impl Buffers) {
        if self.failed.is_some() {
            return;
        }
        let mut lead = None;
        let taken = self.accept(from, packet, buffers, now, &mut lead);
        self.note_packet(taken, ecn);
    }

    /// Record what became of a packet.
    pub(super) fn note_packet(&mut self, taken: Option<()>, ecn: Ecn) {
        self.stats.packets_in += 1;
        self.stats.marked += u64::from(ecn.is_ce());
        match taken {
            Some(()) => self.congested |= ecn.is_ce(),
            // It may be anybody's, and so may its mark.
            None => self.stats.dropped += 1,
        }
    }

    /// Returns `None` if the packet is to be dropped. Sets `lead` to a Result that belongs to this rank's link.
    pub(super) fn accept(
        &mut self,
        from: Addr,
        bytes: &[u8],
        buffers: &mut impl Buffers,
        now: Instant,
        lead: &mut Option<Lead>,
    ) -> Option<()> {
        let packet = match Packet::new_checked(bytes) {
            Err(WireError::Checksum { .. }) if planted!(self, ChecksumUnchecked) => Packet::new_unchecked(bytes),
            checked => checked.ok()?,
        };
        let repr = Repr::parse(&packet).ok()?;
        let config = &self.config;
        let link = (repr.child, repr.key);
        // Only results are sent to all children; everything else goes to one.
        let all = config.shared_key.filter(|_| repr.kind == Kind::Result).map(|key| (ChildIndex::ALL, key));
        let mine = repr.group == config.group
            && (repr.epoch == config.epoch || planted!(self, EpochUnchecked))
            && (link == (config.child, config.key) || Some(link) == all);
        if !mine {
            return None;
        }
        if repr.kind == Kind::Result {
            *lead = Lead::new(bytes, &repr);
        }
        self.take(from, &repr, packet.payload(), buffers, now)
    }

    /// Take a packet of this rank's link; `None` if it is to be dropped.
    #[inline]
    pub(super) fn take(
        &mut self,
        from: Addr,
        repr: &Repr,
        payload: &[u8],
        buffers: &mut impl Buffers,
        now: Instant,
    ) -> Option<()> {
        let index = self.shard_of(repr.seq.0);
        // A Status may refer to the shard's next sequence numbers, and a Nak to the group as a whole; both name one of
        // that shard.
        if self.config.parents[index] != from {
            return None;
        }
        if repr.child == ChildIndex::ALL {
            self.shared_results.on_shared();
        }
        let taken = match (repr.kind, repr.reason) {
            (Kind::Result | Kind::Done, _) if repr.view > self.ops.exclusions.count() => self.ask_view(index, repr),
            (Kind::Result | Kind::Done, _) => self.on_answers(index, repr, payload, buffers, now),
            (Kind::Status, _) => self.on_status(index, repr, now),
            (Kind::Nak, Some(reason)) => self.on_nak(index, reason, (repr, payload), now),
            (Kind::Cut, _) => self.on_cut(index, repr, payload),
            _ => None,
        };
        taken?;
        self.stable = self.stable.max(repr.mark);
        if repr.window > 0 {
            self.window = repr.window;
        }
        self.retain_completed(buffers);
        Some(())
    }

    /// Retain what other ranks may still lack of completed operations (PROTOCOL 5), since their buffers return to the
    /// caller.
    pub(super) fn retain_completed(&mut self, buffers: &mut impl Buffers) {
        let stable = self.stable.0;
        if planted!(self, NoRetention) {
            return;
        }
        if !planted!(self, UnboundedQueue) {
            self.ops.forget_below(stable);
        }
        self.ops.retain_new(stable, |_, _| false, |op, retention, to| retention.append_to(op.id, buffers, to));
    }

    /// Process the answer to one chunk, or the Done of a run; `None` if none of it is new.
    fn on_answers(
        &mut self,
        index: usize,
        repr: &Repr,
        payload: &[u8],
        buffers: &mut impl Buffers,
        now: Instant,
    ) -> Option<()> {
        let count = u64::from(repr.count);
        let is_run = repr.kind == Kind::Done && (1..=RUN - repr.seq.0 % RUN).contains(&count);
        if count != 1 && !is_run {
            return None;
        }
        let mut taken = None;
        if count == 1 {
            taken = self.on_answer(index, repr, payload, buffers, now);
        } else {
            for next in 0..count {
                let repr = Repr { seq: ChunkNo(repr.seq.0 + next), ..*repr };
                taken = taken.or(self.on_answer(index, &repr, payload, buffers, now));
            }
        }
        self.ask_for_gaps(index);
        self.settle();
        taken
    }

    fn on_answer(
        &mut self,
        index: usize,
        repr: &Repr,
        payload: &[u8],
        buffers: &mut impl Buffers,
        now: Instant,
    ) -> Option<()> {
        let seq = repr.seq.0;
        let op = self.ops.of_seq(seq).filter(|op| seq < self.next && op.signature == repr.signature)?;
        let local = self.shard(index).below(repr.seq);
        let again = self.hops[index].is_answered(local);
        if again && !planted!(self, DuplicateCounted) {
            return None;
        }
        match (op.part(seq).landing, repr.kind) {
            (Some(landing), Kind::Result) if landing.result_len == payload.len() => {
                let part = &payload[landing.part];
                buffers.output(op.id)[landing.at..][..part.len()].copy_from_slice(part);
                self.note_delivery(repr.child == ChildIndex::ALL);
            }
            (None, Kind::Done) if payload.is_empty() => {}
            (Some(_), Kind::Done) if planted!(self, DoneForResult) => {}
            _ => return None,
        }
        self.ops.note_slowest(seq, repr.slowest.map(|rank| Slowest { rank, late_us: repr.late_us }));
        // The result has landed: only now may `have` pass the chunk.
        assert!(self.hops[index].on_answer(local, now) || again, "a chunk lands once");
        self.ops.landed(seq);
        Some(())
    }

    /// Record whether a result came through the shared address.
    fn note_delivery(&mut self, shared: bool) {
        self.stats.shared_results += u64::from(shared);
        if !shared && self.shared_results.on_unicast() {
            let EndpointConfig { group, child, .. } = self.config;
            crate::log::info!(%group, %child, "no shared results arrive; requesting unicast results from now on");
        }
    }

    fn ask_for_gaps(&mut self, index: usize) {
        let window = self.window();
        while let Some(local) = self.hops[index].next_gap(window) {
            let seq = self.shard(index).global(local);
            // An earlier Nak for it may still be queued.
            if self.replies.iter().any(|(_, waiting)| (waiting.kind, waiting.seq) == (Kind::Nak, seq)) {
                continue;
            }
            let nak = self.header(Kind::Nak, seq, self.config.salt);
            let bits = self.shard(index).global(self.hops[index].top_answer()).0;
            let nak = Repr { reason: Some(NakReason::Missing), bits, ..nak };
            self.replies.push_back((self.config.parents[index], nak));
        }
    }

    fn on_status(&mut self, index: usize, repr: &Repr, now: Instant) -> Option<()> {
        if repr.count == 0 {
            let longest = packet_len_max(self.config.chunk_len_bytes);
            let len = if planted!(self, ShortAnswerAccepted) { longest } else { repr.packet_len() };
            let is_of_path = self.paths[index].as_mut()?.on_reply(repr.token, len, now);
            return is_of_path.then_some(());
        }
        let shard = self.shard(index);
        if planted!(self, AcceptedIsAnswered) {
            let first = shard.below(repr.seq);
            let accepted = (0..64).filter(|i| repr.bits & (1 << i) != 0);
            accepted.for_each(|i| _ = self.hops[index].on_answer(first + i, now));
        }
        let again = &mut self.again;
        let first = shard.below(repr.seq) + u64::from(planted!(self, OffByOneSeq));
        let known = self.hops[index].on_status(repr.token, first, (repr.bits, repr.bits2), now, |local| {
            let seq = shard.global(local).0;
            if !again.contains(&seq) {
                again.push_back(seq);
            }
        });
        known.then_some(())
    }

    /// An answer belongs to a view that this rank does not know yet. Drop it, which has it sent again, and request the
    /// decision.
    fn ask_view(&mut self, index: usize, repr: &Repr) -> Option<()> {
        if self.replies.iter().all(|(_, waiting)| waiting.kind != Kind::Late) {
            let view = self.ops.exclusions.count() + 1;
            let ask = Repr { view, ..self.header(Kind::Late, repr.seq, self.config.salt) };
            self.replies.push_back((self.config.parents[index], ask));
        }
        None
    }

    /// Process the root's decision to exclude ranks.
    fn on_cut(&mut self, index: usize, repr: &Repr, payload: &[u8]) -> Option<()> {
        let ranks = RankMask::from_bytes(payload)?;
        match repr.view.checked_sub(self.ops.exclusions.count()) {
            Some(1) => self.ops.exclusions.push(repr.seq.0, &ranks),
            Some(2..) => return self.ask_view(index, repr),
            _ => return None,
        }
        if ranks.contains(self.config.rank) {
            self.fail(EndpointError::Excluded);
        }
        Some(())
    }

    fn on_nak(&mut self, index: usize, reason: NakReason, (repr, payload): (&Repr, &[u8]), now: Instant) -> Option<()> {
        // Only Naks that echo one of our tokens concern this incarnation (PROTOCOL 4).
        if repr.token != self.config.salt && !self.hops[index].is_probe_token(repr.token) {
            return None;
        }
        self.hops[index].on_activity(now);
        if reason == NakReason::UnknownOperation {
            self.hops[index].forget_described();
        }
        if matches!(reason, NakReason::Missing | NakReason::Resend | NakReason::UnknownOperation) {
            let in_flight = (self.have()..ChunkNo(self.next.min(self.end()))).contains(&repr.seq);
            let local = self.shard(index).local(repr.seq)?;
            if in_flight && !self.hops[index].is_answered(local) && !self.again.contains(&repr.seq.0) {
                self.again.push_back(repr.seq.0);
            }
            return Some(());
        }
        let ops = repr.op_desc().zip(unpack_op(repr.bits2));
        match terminal(reason, ops, payload)? {
            // A node that does not know the group has nothing more to send.
            error @ (EndpointError::GroupLost | EndpointError::Excluded) => self.fail(error),
            error if planted!(self, ErrorNotDeferred) => self.fail(error),
            // A chunk that was never sent cannot have been refused: clamp the number to the next one.
            error => self.end_at(repr.seq.0.min(self.next), error),
        }
        Some(())
    }

    /// The tree has no answer to `seq` and all later chunks.
    fn end_at(&mut self, seq: u64, error: EndpointError) {
        if self.ending.is_none_or(|(earlier, _)| seq < earlier) {
            self.ending = Some((seq, error));
        }
        self.settle();
    }

    /// Fail with the pending error once every chunk below has landed.
    fn settle(&mut self) {
        if let Some((at, error)) = self.ending
            && self.have().0 >= at
        {
            self.fail(error);
        }
    }
}

/// Return the error that a Nak from the node means, if it ends the group.
fn terminal(reason: NakReason, ops: Option<(OpDesc, OpDesc)>, payload: &[u8]) -> Option<EndpointError> {
    Some(match (reason, ops) {
        (NakReason::Mismatch, Some((first, other))) => EndpointError::Mismatch { first, other },
        (NakReason::Unsupported, Some((op, _))) => EndpointError::Unsupported(op),
        (NakReason::WrongEpoch | NakReason::UnknownGroup, _) => EndpointError::GroupLost,
        (NakReason::PathLost, _) => EndpointError::PathLost,
        (NakReason::Stragglers, _) => EndpointError::Stragglers { missing: RankMask::from_bytes(payload)? },
        (NakReason::Excluded, _) => EndpointError::Excluded,
        _ => return None,
    })
}
