//! What comes up: contributions, probes and requests of a group's children (PROTOCOL 1 and 3).

use super::{Live, supported};
use crate::group::{Child, Failure};
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
use sumac_hal::uplink::{MAX_WINDOW, REORDER_TOLERANCE};
use sumac_hal::wire::{BITMAP_SEQS, Flags, Kind, NakReason, Repr, unpack_op};

impl Live<'_> {
    /// Take in a packet that claims to come from a child.
    pub(super) fn handle_child(&mut self, from: Addr, repr: &Repr, payload: &[u8], now: Instant) {
        let Some(child) = self.admit(from, repr, now) else { return };
        match repr.kind {
            Kind::Data | Kind::Empty => self.on_contributions(child, repr, payload, now),
            Kind::Nak if matches!(repr.reason, Some(NakReason::Mismatch | NakReason::Unsupported)) => {
                self.on_contributions(child, repr, payload, now);
            }
            Kind::Nak if repr.reason == Some(NakReason::Missing) => self.on_result_missing(child, repr),
            Kind::Probe => self.on_probe(child, repr, now),
            Kind::Late => self.on_late(child, repr, payload, now),
            _ => self.common.drop_packet(DropReason::BadKind),
        }
    }

    /// Check that the packet is a child's own, take its `have` and renew the lease; the child's index if so.
    fn admit(&mut self, from: Addr, repr: &Repr, now: Instant) -> Option<usize> {
        let index = usize::from(repr.child.0);
        let Some(child) = self.children.get_mut(index) else {
            self.common.drop_packet(DropReason::BadChild);
            return None;
        };
        if child.owner.is_some() {
            // By reference comes through the owner's ring only.
            self.common.drop_packet(DropReason::BadSource);
            return None;
        }
        if repr.key != child.key && !planted!(self.common, KeyUnchecked) {
            self.common.drop_packet(DropReason::BadKey);
            return None;
        }
        // `have` counts what was sent down from here: more than that nobody can have.
        if self.common.config.shard.below(repr.mark) > self.group.answered_below {
            self.common.drop_packet(DropReason::BadMark);
            return None;
        }
        match child.addr {
            Some(addr) if addr != from => {
                self.common.drop_packet(DropReason::BadSource);
                return None;
            }
            Some(_) => {}
            None => {
                child.addr = Some(from);
                let id = self.group.config.group;
                self.common.trace.record(now, Trace::ChildPinned(id, ChildIndex(index as u16)));
            }
        }
        if self.group.view.out.contains(index) {
            self.tell_excluded(index, repr);
            return None;
        }
        self.note_have(index, repr.mark);
        self.group.lease_until = now + self.group.lease();
        if repr.flags.contains(Flags::CONGESTED) {
            self.note_congestion(index, repr);
        }
        Some(index)
    }

    /// Take what a child says to have.
    pub(super) fn note_have(&mut self, child: usize, mark: ChunkNo) {
        let child = &mut self.children[child];
        let was_least = child.have == self.group.min_have;
        if mark > child.have {
            child.have = mark;
            if was_least {
                let out = &self.group.view.out;
                let here = self.children.iter().enumerate().filter(|(index, _)| !out.contains(*index));
                let haves = here.map(|(_, child)| child.have);
                let least = if planted!(self.common, MinHaveIsMax) { haves.max() } else { haves.min() };
                self.group.min_have = least.unwrap_or(self.group.min_have);
            }
        }
    }

    /// Tell whether a child may speak of chunk `local`: nothing beyond its window is there, and a number from far beyond
    /// would keep the window from ever being cut again.
    fn is_near(&self, child: usize, local: u64) -> bool {
        local < self.shard().below(self.children[child].have) + self.group.window_local
    }

    /// The way from or to a child is congested: a cut like that for a loss, once a window.
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

    /// Take in contributions: Data or the Nak of a subtree that has none to give to one chunk, Empty to a run of them.
    fn on_contributions(&mut self, child: usize, repr: &Repr, payload: &[u8], now: Instant) {
        let count = u64::from(repr.count);
        let is_run = repr.kind == Kind::Empty && (1..=RUN - repr.seq.0 % RUN).contains(&count);
        if count != 1 && !is_run {
            return self.common.drop_packet(DropReason::BadKind);
        }
        for next in 0..count {
            let seq = ChunkNo(repr.seq.0 + next);
            let bits2 = if repr.limit().is_some() { repr.bits2.wrapping_add(next) } else { repr.bits2 };
            self.on_contribution(child, &Repr { seq, count: 1, bits2, ..*repr }, payload, now);
        }
    }

    /// Take in the contribution to one chunk.
    fn on_contribution(&mut self, child: usize, repr: &Repr, payload: &[u8], now: Instant) {
        let Some(local) = self.shard().local(repr.seq) else {
            return self.common.drop_packet(DropReason::BadShard);
        };
        let Some(op) = repr.op_desc() else {
            return self.common.drop_packet(DropReason::BadKind);
        };
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
        if !slot.holds(local) && !same_lap {
            if slot.state != State::Free && slot.local > local {
                return self.common.drop_packet(DropReason::Stale);
            }
            if !self.is_reusable(index) {
                return self.common.drop_packet(DropReason::SlotBusy);
            }
            self.begin(index, local, op, repr.signature);
            self.note_limit(index, repr);
        }
        let known = self.slots[index].bits.contains(child) && !planted!(self.common, DoubleAdd);
        if known || self.slots[index].state != State::Filling {
            return self.common.drop_packet(DropReason::Duplicate);
        }
        self.judge(index, child, op, repr, payload, now);
    }

    /// Tell whether slot `index` may hold another chunk: everybody has what is in it, and no engine is at work on it.
    pub(super) fn is_reusable(&self, index: usize) -> bool {
        let slot = &self.slots[index];
        if slot.state != State::Answered {
            return slot.state == State::Free;
        }
        if planted!(self.common, RedoReusedEarly) {
            return true;
        }
        let all_have = self.common.config.shard.below(self.group.min_have) > slot.local;
        (all_have || planted!(self.common, SlotReusedEarly)) && slot.pending.is_empty() && self.is_quiet(index)
    }

    /// Start on chunk `local` in slot `index`.
    pub(super) fn begin(&mut self, index: usize, local: u64, op: OpDesc, signature: u32) {
        self.slots[index].begin(local, op, signature);
        self.begin_redo(index);
        self.leave_out(index);
    }

    /// Combine a contribution that belongs to slot `index` and is not in yet, or refuse the chunk.
    fn judge(&mut self, index: usize, child: usize, op: OpDesc, repr: &Repr, payload: &[u8], now: Instant) {
        let slot = &self.slots[index];
        let first = slot.op;
        let refusal = if repr.kind == Kind::Nak {
            // Ranks need two operations to name the error; one that this version does not know can't be passed on.
            let other = unpack_op(repr.bits2).unwrap_or(op);
            Some((repr.reason.unwrap_or(NakReason::Mismatch), Some((op, other))))
        } else if (repr.signature != slot.signature || !agree(&op, &first))
            && !planted!(self.common, SignatureUnchecked)
        {
            Some((NakReason::Mismatch, Some((first, op))))
        } else if (repr.kind == Kind::Data || repr.flags.contains(Flags::WANT)) && !supported(&op) {
            // What brings nothing and wants nothing runs by a schedule: it is compared here, not done.
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
                self.stir(index);
            } else if self.slots[index].bits.len() == self.children.len() {
                self.complete(index, now);
            }
        }
        self.ask_for_gaps(child, now);
    }

    /// Check a contribution's payload against the slot: whole elements, as many as the others', within a chunk; and no
    /// second one of what is only moved.
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

    /// Combine what `child` brings to slot `index`, if it brings anything.
    pub(super) fn combine_input(&mut self, index: usize, child: usize, input: Option<Input<'_>>) {
        let mut slot = self.slots[index];
        let mut stages = self.stages(index);
        let Some(kernel) = slot.kernel() else {
            // Moved as it is: the only contribution with data is the value.
            if let Some(Input { payload, .. }) = input {
                stages.value().copy_from_slice(payload);
            }
            return;
        };
        if self.refs.is_some() {
            return self.stage_inline(index, child, kernel, input);
        }
        let mut fold_next = slot.fold_next;
        let children = self.children.len();
        let declared = self.group.config.order;
        let order = if planted!(self.common, OrderOfArrival) { Order::Arrival } else { declared };
        if planted!(self.common, FirstNotCopied) {
            slot.data.insert(child ^ 1);
        }
        let arrived = Arrived { bits: &slot.bits, data: &slot.data, children, child };
        contribute(order, kernel, &mut self.stages(index), &arrived, input, &mut fold_next);
        self.slots[index].fold_next = fold_next;
    }

    /// All children are in: send the partial result up, or, at the root, round it and answer.
    pub(super) fn complete(&mut self, index: usize, now: Instant) {
        if self.fails_without(index, now) {
            return;
        }
        self.common.counters.completed += 1;
        self.group.window.grow();
        let slot = self.slots[index];
        let has_value = !slot.data.is_empty();
        let len = if has_value { self.stages(index).len } else { 0 };
        self.slots[index].value_len = len as u16;
        if self.group.parent.is_some() {
            self.slots[index].state = State::Up;
            self.group.up.insert(index);
            return;
        }
        if let Some(kernel) = slot.kernel().filter(|_| has_value) {
            let elements = slot.elements.unwrap_or(0) as usize;
            let ranks = self.members();
            let len = kernel.finish(self.stages(index).value(), elements, ranks);
            self.slots[index].value_len = len as u16;
        }
        self.answer(index);
    }

    /// The answer of slot `index` is in its stage 0: send it to every child.
    pub(super) fn answer(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        slot.state = State::Answered;
        slot.value_crc = None;
        slot.pending = slot.bits.without(&self.group.view.out);
        slot.overtaken = self.group.answered_top.saturating_sub(slot.local + 1) as u16;
        self.group.answered_top = self.group.answered_top.max(slot.local + 1);
        self.common.counters.answers += slot.pending.len() as u64;
        if self.refs.is_some() {
            self.answer_references(index);
        }
        if !self.slots[index].pending.is_empty() {
            self.group.down.insert(index);
        }
        loop {
            let below = self.group.answered_below;
            let slot = &self.slots[self.slot_index(below)];
            if !(slot.holds(below) && slot.state == State::Answered) {
                break;
            }
            self.group.answered_below = below + 1;
        }
    }

    /// The chunk can't have a result. Only the root says so to the ranks, so that all hear the same: this node
    /// sends its Nak up in place of a contribution, or, at the root, fails the group.
    pub(super) fn refuse(&mut self, index: usize, failure: Failure, now: Instant) {
        if self.group.parent.is_none() {
            return self.fail(failure, now);
        }
        let slot = &mut self.slots[index];
        slot.state = State::Refused;
        slot.value_len = 0;
        slot.value_crc = None;
        // The root's word is about the lowest chunk: what is told of a later one must not take its place.
        let latest = planted!(self.common, LaterRefusal);
        if self.group.refusal.is_none_or(|earlier| (failure.from < earlier.from) != latest) {
            self.group.refusal = Some(failure);
        }
        self.group.up.insert(index);
    }

    /// Keep track of what the child has sent, and let it earn an answer.
    fn note_arrival(&mut self, child: usize, repr: &Repr) {
        let shard = self.shard();
        let child = &mut self.children[child];
        child.token = repr.token;
        child.credit = (child.credit + 1).min(Child::CREDIT_MAX);
        child.top = child.top.max(shard.below(repr.seq) + 1);
    }

    /// Tell whether the child's contribution to `local` is in; what the slot has left behind was.
    fn is_in(&self, child: usize, local: u64) -> bool {
        let slot = &self.slots[self.slot_index(local)];
        slot.state != State::Free && (slot.local > local || (slot.local == local && slot.bits.contains(child)))
    }

    /// Ask the child for contributions that did not arrive while three later ones did: once each, and again if a quarter
    /// of the group's window has come meanwhile, as then what was sent again has got lost too.
    fn ask_for_gaps(&mut self, child: usize, now: Instant) {
        let lowest = self.children[child].next_missing;
        while self.children[child].next_missing < self.children[child].top
            && self.is_in(child, self.children[child].next_missing)
        {
            self.children[child].next_missing += 1;
        }
        let patience = self.group.window_local / 4 + u64::from(REORDER_TOLERANCE);
        let Child { top, next_missing, asked_below, asked_at, token, addr, .. } = self.children[child];
        let is_again = next_missing < asked_below && lowest == next_missing && top >= asked_at + patience;
        if lowest != next_missing {
            self.children[child].asked_at = top;
        }
        let mut later = 0;
        let from = if is_again { next_missing } else { next_missing.max(asked_below) };
        let mut gap_below = from;
        // From the top down: what has three later ones above it is lost.
        for local in (from..top).rev() {
            if self.is_in(child, local) {
                later += 1;
            } else if later >= REORDER_TOLERANCE {
                gap_below = gap_below.max(local + 1);
            }
        }
        let Some(to) = addr.filter(|_| gap_below > from) else { return };
        self.children[child].asked_below = asked_below.max(gap_below);
        if from == next_missing {
            self.children[child].asked_at = top;
        }
        for local in from..gap_below {
            if self.is_in(child, local) {
                continue;
            }
            let seq = self.shard().global(local);
            let nak = self.down_header(Kind::Nak, child, seq, token);
            self.common.reply(to, Repr { reason: Some(NakReason::Missing), ..nak });
            let id = self.group.config.group;
            self.common.trace.record(now, Trace::Lost(id, ChildIndex(child as u16), seq));
            if local >= asked_below && self.group.window.lost(local, top, self.children.len()) {
                self.common.counters.window_cuts += 1;
            }
        }
    }

    /// Answer a probe: which contributions are in, what is complete; and send again what the child lacks.
    fn on_probe(&mut self, child: usize, repr: &Repr, now: Instant) {
        self.common.counters.probes_in += 1;
        let Some(to) = self.children[child].addr else { return };
        if let Some(failure) = self.group.failed.filter(|failure| repr.seq >= failure.from) {
            return self.reply_failure(to, child, &failure, repr);
        }
        let from = self.shard().below(repr.seq);
        let count = repr.count.min(BITMAP_SEQS);
        self.children[child].credit = (self.children[child].credit + 1).min(Child::CREDIT_MAX);
        let (mut bits, mut complete) = (0, 0);
        for i in 0..u64::from(count) {
            let local = from.saturating_add(i);
            let index = self.slot_index(local);
            let stale = planted!(self.common, StaleProbeBits) && self.slots[index].bits.contains(child);
            if self.is_in(child, local) || stale {
                bits |= 1 << i;
            }
            if self.slots[index].holds(local) && self.slots[index].state == State::Answered {
                complete |= 1 << i;
                if repr.bits & (1 << i) == 0 {
                    self.answer_again(child, index);
                }
            }
        }
        self.note_overflow(child, from, count, bits);
        let status = self.down_header(Kind::Status, child, repr.seq, repr.token);
        self.common.reply(to, Repr { count, bits, bits2: complete, ..status });
        self.ask_for_gaps(child, now);
    }

    /// A probe comes behind what it asks about, so what is not in by now is lost. If that is a quarter of it, a
    /// burst was too much for the receive buffer, and nothing came behind it to show the gap: cut the window. Less
    /// is chance, and repaired without slowing anybody down.
    fn note_overflow(&mut self, child: usize, from: u64, count: u16, bits: u64) {
        let missing = u32::from(count) - bits.count_ones();
        let first = from.saturating_add(u64::from(bits.trailing_ones()));
        let overflow = missing > 1 && 4 * missing >= u32::from(count) && self.is_near(child, from);
        if overflow && self.group.window.cut(first, from.saturating_add(u64::from(count))) {
            self.common.counters.window_cuts += 1;
        }
    }

    /// The child says that an answer did not arrive, though one of a later chunk (`bits`) did. That is no sign of a loss
    /// if the later one was answered first: then the child has asked for what it is about to get.
    fn on_result_missing(&mut self, child: usize, repr: &Repr) {
        let Some(local) = self.shard().local(repr.seq) else {
            return self.common.drop_packet(DropReason::BadShard);
        };
        let index = self.slot_index(local);
        let slot = &self.slots[index];
        let later = self.shard().below(ChunkNo(repr.bits)).saturating_sub(local);
        let was_overtaken = slot.overtaken >= REORDER_TOLERANCE as u16 && later <= u64::from(slot.overtaken);
        if slot.holds(local) && slot.state == State::Answered && !was_overtaken {
            self.answer_again(child, index);
        } else {
            self.common.drop_packet(DropReason::Unexpected);
        }
    }

    /// Send the answer of slot `index` to `child` again, if it has the credit and neither has it nor is about to get it
    /// anyway. Whoever asks may have said since that it has the chunk: then the slot may be about to hold another one.
    fn answer_again(&mut self, child: usize, index: usize) {
        let landed = self.shard().below(self.children[child].have);
        let slot = &mut self.slots[index];
        if slot.pending.contains(child) || !slot.bits.contains(child) || slot.local < landed {
            return;
        }
        let Some(left) = self.children[child].credit.checked_sub(1) else { return };
        self.children[child].credit = left;
        slot.pending.insert(child);
        self.group.down.insert(index);
        self.common.counters.answers_resent += 1;
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

/// Tell whether two ranks call the same operation, as far as both say: a count of 0 stands for "not said", by a program
/// that leaves it to the signature.
pub(super) fn agree(a: &OpDesc, b: &OpDesc) -> bool {
    let said = a.count != 0 && b.count != 0;
    (a.collective, a.dtype, a.op) == (b.collective, b.dtype, b.op) && (!said || (a.root, a.count) == (b.root, b.count))
}
