//! Packets from children: contributions, probes and requests (PROTOCOL 1 and 3).

use super::context::{stage_start, stages_of};
use super::operation::{SHORT_PAYLOAD_MIN_BYTES, is_short};
use super::train::Usual;
use super::{GroupCtx, supported};
use crate::node::group::{Child, Failure};
use crate::order::{Arrived, Input, contribute};
use crate::slot::State;
use crate::trace::Trace;
use sumac_hal::ctrl::{DropReason, Order};
use sumac_hal::ids::{ChildIndex, ChunkNo};
use sumac_hal::op::OpDesc;
use sumac_hal::planted;
use sumac_hal::port::Addr;
use sumac_hal::shard::RUN;
use sumac_hal::time::Instant;
use sumac_hal::uplink::MAX_WINDOW;
use sumac_hal::wire::{Flags, Kind, NakReason, Repr, unpack_op};

impl GroupCtx<'_> {
    /// Handle a packet that claims to come from a child. Returns the child's index if it does, and, in a train, what
    /// the packet has in common with those behind it if it was of the usual case.
    pub(super) fn handle_child(
        &mut self,
        from: Addr,
        repr: &Repr,
        payload: &[u8],
        now: Instant,
        in_train: bool,
    ) -> Option<(usize, Option<Usual>)> {
        let child = self.admit(from, repr, now)?;
        let usual = if in_train { self.usual(child, repr, payload.len(), now) } else { None };
        if let Some(mut usual) = usual
            && self.take(&mut usual, child, repr, payload, now)
        {
            return Some((child, Some(usual)));
        }
        match repr.kind {
            Kind::Data | Kind::Empty => self.on_contributions(child, repr, payload, now),
            Kind::Nak if matches!(repr.reason, Some(NakReason::Mismatch | NakReason::Unsupported)) => {
                self.on_contributions(child, repr, payload, now);
            }
            Kind::Nak if repr.reason == Some(NakReason::Missing) => self.on_result_missing(child, repr),
            Kind::Probe if repr.count == 0 => self.on_path_probe(child, repr),
            Kind::Probe => self.on_probe(child, repr, now),
            Kind::Late => self.on_late(child, repr, payload, now),
            Kind::Operation => self.on_operation(child, repr),
            _ => self.common.drop_packet(DropReason::BadKind),
        }
        Some((child, None))
    }

    /// Authenticate the packet, take its `have` and renew the lease. Returns the child's index, or `None` if the packet
    /// was dropped.
    fn admit(&mut self, from: Addr, repr: &Repr, now: Instant) -> Option<usize> {
        let index = usize::from(repr.child.0);
        let Some(child) = self.children.get(index) else {
            self.common.drop_packet(DropReason::BadChild);
            return None;
        };
        if child.owner.is_some() {
            // A zero-copy child contributes only through its owner's ring.
            self.common.drop_packet(DropReason::BadSource);
            return None;
        }
        if repr.key != child.key && !planted!(self.common, KeyUnchecked) {
            self.common.drop_packet(DropReason::BadKey);
            return None;
        }
        if !self.admit_mark(repr) {
            return None;
        }
        match self.children[index].addr {
            Some(addr) if addr != from => {
                self.common.drop_packet(DropReason::BadSource);
                return None;
            }
            Some(_) => {}
            None => {
                self.children[index].addr = Some(from);
                let id = self.group.config.group;
                self.common.trace.record(now, Trace::ChildPinned(id, ChildIndex(index as u16)));
            }
        }
        self.take_report(index, repr, now).then_some(index)
    }

    /// Return whether a packet's `have` is possible; otherwise the packet was dropped.
    #[inline]
    pub(super) fn admit_mark(&mut self, repr: &Repr) -> bool {
        // `have` counts answers sent from here: no child can have more.
        let is_possible = self.common.config.shard.below(repr.mark) <= self.group.answered_below;
        if !is_possible {
            self.common.drop_packet(DropReason::BadMark);
        }
        is_possible
    }

    /// Take what a child's packet reports beside its subject: `have`, life and congestion. Returns false if the child
    /// is excluded, and was told so.
    pub(super) fn take_report(&mut self, child: usize, repr: &Repr, now: Instant) -> bool {
        if self.group.view.excluded.contains(child) {
            self.nak_excluded(child, repr);
            return false;
        }
        self.note_have(child, repr.mark);
        self.group.lease_until = now + self.group.lease();
        if repr.flags.contains(Flags::CONGESTED) {
            self.note_congestion(child, repr);
        }
        true
    }

    /// Advance a child's `have` to what it reports.
    pub(super) fn note_have(&mut self, child: usize, mark: ChunkNo) {
        let child = &mut self.children[child];
        let was_least = child.have == self.group.min_have;
        if mark > child.have {
            child.have = mark;
            if was_least {
                let excluded = &self.group.view.excluded;
                let remaining = self.children.iter().enumerate().filter(|(index, _)| !excluded.contains(*index));
                let haves = remaining.map(|(_, child)| child.have);
                let least = if planted!(self.common, MaximumHaveUsed) { haves.max() } else { haves.min() };
                self.group.min_have = least.unwrap_or(self.group.min_have);
            }
        }
    }

    /// Return whether chunk `local` is within the child's window. A number far beyond it would keep the window from
    /// ever being cut again.
    pub(super) fn is_near(&self, child: usize, local: u64) -> bool {
        local < self.shard().below(self.children[child].have) + self.group.window_local
    }

    /// The link to or from a child is congested: cut the window as for a loss, once per window.
    fn note_congestion(&mut self, child: usize, repr: &Repr) {
        let local = self.shard().below(repr.seq);
        if !self.is_near(child, local) {
            return;
        }
        let top = self.children[child].top.max(local.saturating_add(1));
        if self.group.window.cut(local, top) {
            self.common.counters.window_cuts += 1;
        }
    }

    /// Handle contributions: Data, or a subtree's Nak in its place, to one chunk; Empty to a run of chunks.
    pub(super) fn on_contributions(&mut self, child: usize, repr: &Repr, payload: &[u8], now: Instant) {
        let count = u64::from(repr.count);
        let is_run = repr.kind == Kind::Empty && (1..=RUN - repr.seq.0 % RUN).contains(&count);
        if count != 1 && !is_run {
            return self.common.drop_packet(DropReason::BadKind);
        }
        if is_short(repr) && payload.len() < SHORT_PAYLOAD_MIN_BYTES {
            return self.common.drop_packet(DropReason::BadShape);
        }
        if count == 1 {
            return self.on_contribution(child, repr, payload, now);
        }
        for next in 0..count {
            let seq = ChunkNo(repr.seq.0 + next);
            let bits2 = if repr.limit().is_some() { repr.bits2.wrapping_add(next) } else { repr.bits2 };
            self.on_contribution(child, &Repr { seq, count: 1, bits2, ..*repr }, payload, now);
        }
    }

    /// Handle the contribution to one chunk.
    fn on_contribution(&mut self, child: usize, repr: &Repr, payload: &[u8], now: Instant) {
        let Some(local) = self.shard().local(repr.seq) else {
            return self.common.drop_packet(DropReason::BadShard);
        };
        if repr.op_desc().is_none() && !is_short(repr) {
            return self.common.drop_packet(DropReason::BadKind);
        }
        if let Some(failure) = self.group.failed.filter(|failure| repr.seq >= failure.from) {
            let Some(to) = self.children[child].addr else { return };
            return self.reply_failure(to, child, &failure, repr);
        }
        if self.is_held_back(child, repr.seq.0) {
            return self.common.drop_packet(DropReason::Late);
        }
        let have = self.shard().below(self.children[child].have);
        if local >= have + self.group.window_local {
            return self.common.drop_packet(DropReason::OverWindow);
        }
        let index = self.slot_index(local);
        let slot = &self.slots[index];
        let same_lap = planted!(self.common, VersionBit)
            && slot.state != State::Free
            && local.abs_diff(slot.local).is_multiple_of(2 * self.slots.len() as u64);
        let is_held = slot.holds(local) || same_lap;
        if !is_held {
            if slot.state != State::Free && slot.local > local {
                return self.common.drop_packet(DropReason::Stale);
            }
            if !self.is_reusable(index) {
                return self.common.drop_packet(DropReason::SlotBusy);
            }
        }
        // Checked before anything is learnt from it: a late copy has no effect.
        let known = self.slots[index].bits.contains(child) && !planted!(self.common, DoubleAdd);
        if is_held && (known || self.slots[index].state != State::Filling) {
            return self.common.drop_packet(DropReason::Duplicate);
        }
        let Some(operation) = self.operation_of(index, local, repr) else {
            return self.request_operation(child, repr);
        };
        let op = operation.op;
        if !is_held {
            self.begin(index, local, op, repr.signature);
            if let Some((limit, first)) = operation.limit {
                (self.slots[index].limit, self.slots[index].op_first) = (Some(limit), first);
            }
        }
        self.accept(index, child, op, repr, payload, now);
    }

    /// Return whether slot `index` can take another chunk: every child has its answer, and no DMA chain uses it. A copy
    /// still queued for a child that has reported the answer since is not worth waiting for: [`Self::begin`] drops it.
    pub(super) fn is_reusable(&self, index: usize) -> bool {
        let slot = &self.slots[index];
        if slot.state != State::Answered {
            return slot.state == State::Free;
        }
        if planted!(self.common, RedoReusedEarly) {
            return true;
        }
        let all_have = self.common.config.shard.below(self.group.min_have) > slot.local;
        let may_reuse = all_have || (planted!(self.common, SlotReusedEarly) && slot.pending.is_empty());
        may_reuse && self.is_quiet(index)
    }

    /// Start chunk `local` in slot `index`.
    pub(super) fn begin(&mut self, index: usize, local: u64, op: OpDesc, signature: u32) {
        self.slots[index].begin(local, op, signature);
        self.group.down.remove(index);
        self.begin_redo(index);
        if !self.group.view.excluded.is_empty() {
            self.mark_excluded(index);
        }
    }

    /// Validate a contribution that belongs to slot `index` and is not in yet, and combine it, or refuse the chunk.
    fn accept(&mut self, index: usize, child: usize, op: OpDesc, repr: &Repr, payload: &[u8], now: Instant) {
        let slot = &self.slots[index];
        let first = slot.op;
        let refusal = if repr.kind == Kind::Nak {
            // Ranks need two operations to report the error. One that this version does not know cannot be passed on.
            let other = unpack_op(repr.bits2).unwrap_or(op);
            Some((repr.reason.unwrap_or(NakReason::Mismatch), Some((op, other))))
        } else if (repr.signature != slot.signature || !same_operation(&op, &first))
            && !planted!(self.common, SignatureUnchecked)
        {
            Some((NakReason::Mismatch, Some((first, op))))
        } else if (repr.kind == Kind::Data || repr.flags.contains(Flags::WANT)) && !supported(&op) {
            // A contribution without data that wants no result belongs to a host collective: it is only compared here.
            Some((NakReason::Unsupported, Some((op, op))))
        } else {
            None
        };
        if refusal.is_none() && !self.shape_fits(index, repr, payload) {
            return self.common.drop_packet(DropReason::BadShape);
        }
        self.note_arrival(child, repr);
        let slot = &mut self.slots[index];
        slot.note_time(repr.slowest, repr.late_us, now);
        let with_data = repr.kind == Kind::Data;
        if !(planted!(self.common, DoubleAdd) && slot.bits.contains(child)) {
            slot.mark(child, with_data && refusal.is_none(), repr.flags.contains(Flags::WANT));
        }
        if repr.flags.contains(Flags::SHARED) {
            slot.shared.insert(child);
        }
        self.common.counters.contributions += 1;
        if let Some((reason, ops)) = refusal {
            self.refuse(index, Failure { from: repr.seq, reason, ops }, now);
        } else {
            if first.count == 0 {
                self.slots[index].op = op;
            }
            self.combine(index, child, repr, payload);
            if self.refs.is_some() {
                self.mark_runnable(index);
            } else if self.slots[index].bits.has_first(self.children.len()) {
                self.complete(index, now);
            }
        }
        self.request_gaps(child, now);
    }

    /// Return whether a contribution's payload fits the slot: whole elements, as many as the others sent, within a
    /// chunk, and at most one source of data that is only moved.
    fn shape_fits(&mut self, index: usize, repr: &Repr, payload: &[u8]) -> bool {
        if repr.kind == Kind::Empty {
            return payload.is_empty();
        }
        let slot = &mut self.slots[index];
        let sizes = (slot.element_bytes(repr.flags.contains(Flags::PARTIAL)), slot.element_bytes(true));
        let (Some(size), Some(partial_size)) = sizes else { return false };
        let taken = self.refs.as_ref().is_some_and(|refs| !refs.redo[index].data.is_empty());
        if slot.kernel().is_none() && (taken || !slot.data.is_empty()) {
            return false;
        }
        let elements = payload.len() / size;
        let limit = usize::from(self.group.config.chunk_len_bytes) / partial_size;
        let fits = payload.len().is_multiple_of(size) && (1..=limit).contains(&elements);
        fits && usize::try_from(*slot.elements.get_or_insert(elements as u32)) == Ok(elements)
    }

    fn combine(&mut self, index: usize, child: usize, repr: &Repr, payload: &[u8]) {
        let partial = repr.flags.contains(Flags::PARTIAL);
        let input = (repr.kind == Kind::Data).then_some(Input { payload, partial });
        self.combine_input(index, child, input);
    }

    /// Combine what `child` contributes to slot `index`, if it has data.
    pub(super) fn combine_input(&mut self, index: usize, child: usize, input: Option<Input<'_>>) {
        let Some(kernel) = self.slots[index].kernel() else {
            // Moved unchanged: the only contribution with data is the value.
            if let Some(Input { payload, .. }) = input {
                self.stages(index).value().copy_from_slice(payload);
            }
            return;
        };
        if self.refs.is_some() {
            return self.stage_inline(index, child, kernel, input);
        }
        let Self { group, slots, bytes, .. } = self;
        let slot = &mut slots[index];
        let declared = group.config.order;
        let order = if planted!(self.common, ArrivalOrder) { Order::Arrival } else { declared };
        let mut data = slot.data;
        if planted!(self.common, FirstNotCopied) {
            data.insert(child ^ 1);
        }
        let mut stages = stages_of(group, slot, index, bytes);
        let arrived = Arrived { bits: &slot.bits, data: &data, children: self.children.len(), child };
        contribute(order, kernel, &mut stages, &arrived, input, &mut slot.fold_next);
    }

    /// All children have contributed: send the partial result to the parent, or, at the root, finish it and answer.
    pub(super) fn complete(&mut self, index: usize, now: Instant) {
        self.finish(index, false, now);
    }

    /// The same, with a value that may be finished (`is_finished`): then this is the root, and no child is excluded.
    pub(super) fn finish(&mut self, index: usize, is_finished: bool, now: Instant) {
        if self.fail_if_excluded_needed(index, now) {
            return;
        }
        self.common.counters.completed += 1;
        self.group.window.grow();
        let ranks = self.active_ranks();
        let slot = &mut self.slots[index];
        slot.settle_time();
        let (has_value, elements) = (!slot.data.is_empty(), slot.elements.unwrap_or(0) as usize);
        let mut len = if has_value { slot.value_bytes() } else { 0 };
        if self.group.parent.is_some() {
            (slot.value_len, slot.state) = (len as u16, State::Up);
            self.group.up.insert(index);
            return;
        }
        if !is_finished && let Some(kernel) = slot.kernel().filter(|_| has_value) {
            let value = &mut self.bytes[stage_start(self.group, index)..][..len];
            len = kernel.finish(value, elements, ranks);
        }
        slot.value_len = len as u16;
        self.answer(index);
    }

    /// The answer of slot `index` is in its stage 0: send it to every child.
    pub(super) fn answer(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        slot.state = State::Answered;
        slot.value_crc = None;
        slot.pending = slot.bits.difference(&self.group.view.excluded);
        let local = slot.local;
        slot.overtaken = self.group.answered_top.saturating_sub(local + 1) as u16;
        self.group.answered_top = self.group.answered_top.max(local + 1);
        self.common.counters.answers += slot.pending.len() as u64;
        if self.refs.is_some() {
            self.answer_zero_copy(index);
        }
        if !self.slots[index].pending.is_empty() {
            self.group.down.insert(index);
        }
        if local != self.group.answered_below {
            return;
        }
        let (mut below, mut next) = (local, index);
        while self.slots[next].holds(below) && self.slots[next].state == State::Answered {
            below += 1;
            next = if next + 1 == self.slots.len() { 0 } else { next + 1 };
        }
        self.group.answered_below = below;
    }

    /// Refuse a chunk that cannot have a result. Only the root reports this to ranks, so that all of them see the same
    /// error: this node sends a Nak to its parent in place of a contribution, or, at the root, fails the group.
    pub(super) fn refuse(&mut self, index: usize, failure: Failure, now: Instant) {
        if self.group.parent.is_none() {
            return self.fail(failure, now);
        }
        let slot = &mut self.slots[index];
        slot.settle_time();
        slot.state = State::Refused;
        slot.value_len = 0;
        slot.value_crc = None;
        // The root reports the lowest refused chunk: a later refusal must not replace an earlier one.
        let latest = planted!(self.common, LaterErrorWins);
        if self.group.refusal.is_none_or(|earlier| (failure.from < earlier.from) != latest) {
            self.group.refusal = Some(failure);
        }
        self.group.up.insert(index);
    }

    /// Record what the child has sent, and let it earn an answer.
    fn note_arrival(&mut self, child: usize, repr: &Repr) {
        let shard = self.shard();
        let child = &mut self.children[child];
        child.token = repr.token;
        child.credit = (child.credit + 1).min(Child::CREDIT_MAX);
        child.top = child.top.max(shard.below(repr.seq) + 1);
    }

    /// Return whether the child has contributed to `local`. Chunks that the slot has moved past count as contributed.
    pub(super) fn has_contributed(&self, child: usize, local: u64) -> bool {
        let slot = &self.slots[self.slot_index(local)];
        slot.state != State::Free && (slot.local > local || (slot.local == local && slot.bits.contains(child)))
    }

    /// Return the header of a packet down to `child`.
    pub(super) fn down_header(&self, kind: Kind, child: usize, seq: ChunkNo, token: u32) -> Repr {
        let config = &self.group.config;
        Repr {
            seq,
            count: 1,
            token,
            mark: self.group.stable(),
            view: self.group.view.number(),
            window: if planted!(self.common, WindowUnclamped) { MAX_WINDOW as u16 / 2 } else { self.group.granted() },
            ..Repr::new(kind, config.group, config.epoch, ChildIndex(child as u16), self.children[child].key)
        }
    }
}

/// Return whether two calls match, as far as both specify them: a count of 0 means "unspecified", for programs that
/// leave it to the signature.
pub(super) fn same_operation(a: &OpDesc, b: &OpDesc) -> bool {
    let both_set = a.count != 0 && b.count != 0;
    (a.collective, a.dtype, a.op) == (b.collective, b.dtype, b.op)
        && (!both_set || (a.root, a.count) == (b.root, b.count))
}
