//! Lost packets between a node and its children: gaps, probes, and answers sent again (PROTOCOL 3).

use super::{Child, GroupCtx};
use crate::slot::State;
use crate::trace::Trace;
use sumac_hal::ctrl::DropReason;
use sumac_hal::ids::{ChildIndex, ChunkNo};
use sumac_hal::planted;
use sumac_hal::time::Instant;
use sumac_hal::uplink::REORDER_TOLERANCE;
use sumac_hal::wire::{BITMAP_SEQS, Kind, NakReason, Repr};

impl GroupCtx<'_> {
    /// Send a Nak for each contribution that three later ones have overtaken: once each, and again after a quarter of
    /// the group's window has arrived, since then the resent contribution was lost too.
    pub(super) fn request_gaps(&mut self, child: usize, now: Instant) {
        let lowest = self.children[child].next_missing;
        while self.children[child].next_missing < self.children[child].top
            && self.has_contributed(child, self.children[child].next_missing)
        {
            self.children[child].next_missing += 1;
        }
        let retry_distance = self.group.window_local / 4 + u64::from(REORDER_TOLERANCE);
        let Child { top, next_missing, asked_below, asked_at, token, addr, .. } = self.children[child];
        let is_again = next_missing < asked_below && lowest == next_missing && top >= asked_at + retry_distance;
        if lowest != next_missing {
            self.children[child].asked_at = top;
        }
        let mut later = 0;
        let from = if is_again { next_missing } else { next_missing.max(asked_below) };
        let mut gap_below = from;
        // Scan downwards: a missing contribution with three later ones above it is lost.
        for local in (from..top).rev() {
            if self.has_contributed(child, local) {
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
            if self.has_contributed(child, local) {
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

    /// Answer a probe: which contributions have been received, and which answers were sent. By that the child knows
    /// which were lost, and requests those by another probe; others may be in a queue, and the Status behind them.
    pub(super) fn on_probe(&mut self, child: usize, repr: &Repr, now: Instant) {
        self.common.counters.probes_in += 1;
        let Some(to) = self.children[child].addr else { return };
        if let Some(failure) = self.group.failed.filter(|failure| repr.seq >= failure.from) {
            return self.reply_failure(to, child, &failure, repr);
        }
        let from = self.shard().below(repr.seq);
        let count = repr.count.min(BITMAP_SEQS);
        self.children[child].credit = (self.children[child].credit + 1).min(Child::CREDIT_MAX);
        let (mut bits, mut sent) = (0, 0);
        for i in 0..u64::from(count) {
            let local = from.saturating_add(i);
            let index = self.slot_index(local);
            let stale = planted!(self.common, StaleProbeBits) && self.slots[index].bits.contains(child);
            if self.has_contributed(child, local) || stale {
                bits |= 1 << i;
            }
            if self.slots[index].holds(local) && self.slots[index].state == State::Answered {
                if repr.bits2 & (1 << i) != 0 {
                    self.resend_answer(child, index);
                }
                sent |= u64::from(!self.slots[index].pending.contains(child)) << i;
            }
        }
        self.note_overflow(child, from, count, bits);
        let status = self.down_header(Kind::Status, child, repr.seq, repr.token);
        self.common.reply(to, Repr { count, bits, bits2: sent, ..status });
        self.request_gaps(child, now);
    }

    /// A probe arrives after what it asks about, so what is missing by now is lost. If that is a quarter of it, a burst
    /// overran the receive buffer and nothing behind it revealed the gap: cut the window. Fewer losses are random, and
    /// are repaired without slowing anybody down.
    fn note_overflow(&mut self, child: usize, from: u64, count: u16, bits: u64) {
        let missing = u32::from(count) - bits.count_ones();
        let first = from.saturating_add(u64::from(bits.trailing_ones()));
        let overflow = missing > 1 && 4 * missing >= u32::from(count) && self.is_near(child, from);
        if overflow && self.group.window.cut(first, from.saturating_add(u64::from(count))) {
            self.common.counters.window_cuts += 1;
        }
    }

    /// The child reports a missing answer although it has that of a later chunk (`bits`). If the later one was answered
    /// first, this is no sign of a loss: the answer is still on its way.
    pub(super) fn on_result_missing(&mut self, child: usize, repr: &Repr) {
        let Some(local) = self.shard().local(repr.seq) else {
            return self.common.drop_packet(DropReason::BadShard);
        };
        let index = self.slot_index(local);
        let slot = &self.slots[index];
        let later = self.shard().below(ChunkNo(repr.bits)).saturating_sub(local);
        let was_overtaken = slot.overtaken >= REORDER_TOLERANCE as u16 && later <= u64::from(slot.overtaken);
        if slot.holds(local) && slot.state == State::Answered && !was_overtaken {
            self.resend_answer(child, index);
        } else {
            self.common.drop_packet(DropReason::Unexpected);
        }
    }

    /// Resend the answer of slot `index` to `child`, if the child has credit, does not have the answer, and is not
    /// about to get it anyway. The child may have reported since that it has the chunk; then the slot may be about to
    /// hold another one.
    fn resend_answer(&mut self, child: usize, index: usize) {
        let delivered = self.shard().below(self.children[child].have);
        let slot = &mut self.slots[index];
        if slot.pending.contains(child) || !slot.bits.contains(child) || slot.local < delivered {
            return;
        }
        let Some(left) = self.children[child].credit.checked_sub(1) else { return };
        self.children[child].credit = left;
        slot.pending.insert(child);
        self.group.down.insert(index);
        self.common.counters.answers_resent += 1;
    }
}
