//! What a node sends next: first replies, which are small and awaited, then groups in turn by bytes (deficit round
//! robin, Shreedhar and Varghese 1995). A group sends contributions before answers, lowest chunk first.
//!
//! A result that every child wants, and listens for at the group's shared address, is sent there once instead of to
//! each (as SHARP multicasts its results over UD: JSFI 4(4), 2017, doi 10.14529/jsfi170401). Only the first
//! transmission is shared: a child that missed it asks, and gets a copy of its own.

use super::{GroupCtx, Node};
use crate::node::group::{Child, Hop};
use crate::sets::ChildSet;
use crate::slot::{Slot, State};
use core::ops::Range;
use heapless::Vec;
use sumac_hal::ctrl::SharedLink;
use sumac_hal::driver::Transmit;
use sumac_hal::ids::{ChildIndex, ChunkNo};
use sumac_hal::planted;
use sumac_hal::port::Addr;
use sumac_hal::shard::RUN;
use sumac_hal::time::Instant;
use sumac_hal::wire::{ChunkFields, Flags, Kind, RankMask, Repr, SHORT_HEADER_LEN, Template, payload_crc};

/// Bytes that a group may send before the next group's turn.
const QUANTUM_BYTES: usize = 64 * 1024;

/// Where the payload of a node's packet is; see [`Node::payload`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload {
    /// In the node's slot memory.
    Slots {
        /// The offset of its first byte.
        start: usize,
        /// Its length in bytes.
        len: usize,
    },
    /// Here: a rank mask.
    Mask([u8; RankMask::LEN_BYTES]),
}

impl Payload {
    #[inline]
    fn len(&self) -> usize {
        match self {
            Self::Slots { len, .. } => *len,
            Self::Mask(mask) => mask.len(),
        }
    }
}

impl Node<'_> {
    /// Return the destination of the next packet, for ports that need it before the packet is written. Sends nothing:
    /// the next [`Node::poll_transmit`] writes that packet, unless something was handled in between.
    #[must_use]
    pub fn poll_destination(&mut self) -> Option<Addr> {
        if let Some(reply) = self.common.replies.front() {
            return Some(reply.to);
        }
        let turn = self.take_turn()?;
        self.group_ctx(turn)?.destination()
    }

    /// Return the next packet; `None` if there is none. It counts as sent. [`Node::payload`] returns its payload.
    ///
    /// Call it after each input until it returns `None`, or until the port is full; then continue later.
    #[must_use]
    pub fn poll_transmit(&mut self, now: Instant) -> Option<Transmit<Payload>> {
        let mut one = Vec::<_, 1>::new();
        self.poll_batch(now, 1, &mut one);
        one.pop()
    }

    /// Add the next packets to `batch`, as long as it is shorter than `packets_max`: the same that
    /// [`Node::poll_transmit`] would return one by one, but what holds for a group's turn or a chunk's answer is found
    /// once.
    pub fn poll_batch<const N: usize>(
        &mut self,
        now: Instant,
        packets_max: usize,
        batch: &mut Vec<Transmit<Payload>, N>,
    ) {
        let packets_max = packets_max.min(N);
        while batch.len() < packets_max {
            if let Some(reply) = self.next_reply() {
                self.common.note_sent(1, reply.header.len() + reply.payload.len());
                // The batch has room.
                let _ = batch.push(reply);
                continue;
            }
            let Some(mut ctx) = self.take_turn().and_then(|turn| self.group_ctx(turn)) else { break };
            if ctx.fill(now, &mut Filling { batch, packets_max }).is_none() {
                break;
            }
        }
    }

    /// Return the payload of a packet that [`Node::poll_transmit`] has returned since the last `handle`,
    /// `handle_timeout` or `control`.
    #[inline]
    pub fn payload<'t>(&'t self, transmit: &'t Transmit<Payload>) -> &'t [u8] {
        match &transmit.payload {
            Payload::Slots { start, len } => &self.storage.bytes[*start..][..*len],
            Payload::Mask(mask) => mask,
        }
    }

    /// Return the oldest reply.
    pub(super) fn next_reply(&mut self) -> Option<Transmit<Payload>> {
        let reply = self.common.replies.pop_front()?;
        Some(match reply.mask {
            Some(mask) => masked(reply.to, reply.repr, &mask),
            None => self.padded(reply.to, reply.repr),
        })
    }

    /// Return the group whose turn it is to send; `None` if no group has anything to send. After `None` the table is
    /// not scanned again until something was handled that may have produced output.
    pub(super) fn take_turn(&mut self) -> Option<usize> {
        if !self.common.may_send {
            return None;
        }
        match self.storage.groups.get(self.turn) {
            Some(Some(group)) if group.deficit > 0 && group.has_output() => Some(self.turn),
            _ => self.next_turn(),
        }
    }

    /// Find the next group with output, in round-robin order.
    fn next_turn(&mut self) -> Option<usize> {
        let groups = self.groups_end;
        if self.turn >= groups {
            self.turn = 0;
        }
        let mut waiting = false;
        // Each group is visited at most twice: once to end its turn, once to begin its next.
        for looked in 0..2 * groups {
            if looked == groups && !waiting {
                break;
            }
            let turn = self.turn;
            if let Some(group) = &mut self.storage.groups[turn] {
                if group.has_output() {
                    if group.deficit > 0 {
                        return Some(turn);
                    }
                    waiting = true;
                }
                group.deficit = QUANTUM_BYTES;
            }
            self.turn = if turn + 1 == groups { 0 } else { turn + 1 };
        }
        self.common.may_send = false;
        None
    }
}

/// A batch that is being filled.
struct Filling<'b, const N: usize> {
    batch: &'b mut Vec<Transmit<Payload>, N>,
    packets_max: usize,
}

impl<const N: usize> Filling<'_, N> {
    fn has_room(&self) -> bool {
        self.batch.len() < self.packets_max
    }
}

impl GroupCtx<'_> {
    /// Return the slot to scan from: that of the oldest chunk that some child may still lack.
    fn oldest(&self) -> usize {
        self.slot_index(self.shard().below(self.group.min_have))
    }

    /// Return the destination of this group's next packet.
    pub(super) fn destination(&self) -> Option<Addr> {
        let oldest = self.oldest();
        if let Some(index) = self.group.up.first_from(oldest) {
            let hop = self.hop_of(self.shard().global(self.slots[index].local));
            return Some(self.hops.get(hop)?.addr);
        }
        if let Some(child) = self.group.view.to_notify.first() {
            return self.children[child].addr;
        }
        let index = self.group.down.first_from(oldest)?;
        if let Some(link) = self.shared_link(index) {
            return Some(link.addr);
        }
        self.children[self.slots[index].pending.first()?].addr
    }

    /// Add this group's packets, until its turn ends. Returns `None` if one of them could not be made.
    fn fill<const N: usize>(&mut self, now: Instant, filling: &mut Filling<'_, N>) -> Option<()> {
        let oldest = self.oldest();
        while self.group.deficit > 0 && filling.has_room() {
            let out = if let Some(index) = self.group.up.first_from(oldest) {
                self.group.up.remove(index);
                self.transmit_up(index, now)?
            } else if let Some(child) = self.group.view.to_notify.first() {
                self.group.view.to_notify.remove(child);
                let (repr, mask) = self.decision_header(child, self.group.view.number(), self.children[child].token)?;
                masked(self.children[child].addr?, repr, &mask)
            } else {
                return self.fill_down(oldest, filling);
            };
            self.push(out, filling);
        }
        Some(())
    }

    /// Add answers, until the turn ends.
    fn fill_down<const N: usize>(&mut self, oldest: usize, filling: &mut Filling<'_, N>) -> Option<()> {
        let mut template = None;
        while self.group.deficit > 0
            && filling.has_room()
            && let Some(index) = self.group.down.first_from(oldest)
        {
            if let Some(link) = self.shared_link(index) {
                let out = self.transmit_shared(index, link);
                self.push(out, filling);
                continue;
            }
            let slot = &self.slots[index];
            let child = slot.pending.first()?;
            if slot.state == State::Answered && slot.has_result_for(child) {
                if template.is_none() {
                    template = Template::new(&self.result_header());
                }
                self.fill_results(index, template.as_mut()?, filling);
            } else {
                self.take_pending(index);
                let out = self.transmit_down(index, child)?;
                self.push(out, filling);
            }
        }
        Some(())
    }

    /// Return what the headers of this group's Results have in common.
    fn result_header(&self) -> Repr {
        Repr { flags: Flags::SHORT, ..self.down_header(Kind::Result, 0, ChunkNo(0), 0) }
    }

    /// Add the Result of slot `index` for the first children that it is due for, until the turn ends.
    fn fill_results<const N: usize>(&mut self, index: usize, template: &mut Template, filling: &mut Filling<'_, N>) {
        let (value, payload_crc) = self.sealed_value(index);
        let (start, shard, stable) = (self.group.bytes.start, self.shard(), self.group.stable());
        let slot = &mut self.slots[index];
        template.set_chunk(&ChunkFields {
            seq: shard.global(slot.local),
            mark: stable,
            signature: slot.signature,
            attempt: slot.attempt as u8,
            slowest: slot.slowest,
            late_us: slot.late_us,
        });
        let payload = Payload::Slots { start: start + value.start, len: value.len() };
        let len = SHORT_HEADER_LEN + value.len();
        let sent_max = self.group.deficit.div_ceil(len).min(filling.packets_max - filling.batch.len());
        let mut sent = 0;
        while sent < sent_max
            && let Some(child) = slot.pending.first()
            && slot.want.contains(child)
        {
            slot.pending.remove(child);
            let Child { addr, key, .. } = &self.children[child];
            // A child that has contributed has an address.
            let Some(to) = *addr else { continue };
            template.set_child(ChildIndex(child as u16), *key);
            // The batch has room.
            let _ = filling.batch.push(Transmit { to, header: template.header(payload_crc), payload });
            sent += 1;
        }
        self.group.deficit = self.group.deficit.saturating_sub(sent * len);
        self.common.note_sent(sent, sent * len);
        if slot.pending.is_empty() {
            self.group.down.remove(index);
        }
    }

    /// Take the next child that slot `index` is to answer.
    fn take_pending(&mut self, index: usize) -> Option<usize> {
        let slot = &mut self.slots[index];
        let child = slot.pending.first()?;
        slot.pending.remove(child);
        if slot.pending.is_empty() {
            self.group.down.remove(index);
        }
        Some(child)
    }

    /// Add a packet, and subtract it from what the group may send in its turn. Its payload is a range of the group's
    /// bytes.
    fn push<const N: usize>(&mut self, mut out: Transmit<Payload>, filling: &mut Filling<'_, N>) {
        let len = out.header.len() + out.payload.len();
        self.group.deficit = self.group.deficit.saturating_sub(len);
        self.common.note_sent(1, len);
        // Convert an offset in the group's bytes to one in the node's.
        if let Payload::Slots { start, .. } = &mut out.payload {
            *start += self.group.bytes.start;
        }
        // The batch has room.
        let _ = filling.batch.push(out);
    }

    fn transmit_up(&mut self, index: usize, now: Instant) -> Option<Transmit<Payload>> {
        let slot = self.slots[index];
        let seq = self.shard().global(slot.local);
        let mut repr = self.up_header(Kind::Empty, seq, self.group.token);
        if slot.state == State::Refused {
            let failure = self.group.refusal?;
            repr.kind = Kind::Nak;
            repr.reason = Some(failure.reason);
            super::put_ops(&mut repr, failure.ops.or(Some((slot.op, slot.op))));
        } else {
            repr.set_op(&slot.op);
            if let Some(limit) = slot.limit {
                repr.set_limit(limit, (seq.0 - slot.op_first) as u32);
            }
            if slot.value_len > 0 {
                repr.kind = Kind::Data;
                repr.flags |= Flags::PARTIAL;
            }
        }
        repr.signature = slot.signature;
        repr.attempt = slot.attempt as u8;
        (repr.slowest, repr.late_us) = (slot.slowest, slot.late_us);
        repr.flags |= self.take_congestion_flag();
        repr.flags.set(Flags::WANT, !slot.want.is_empty());
        if repr.kind == Kind::Empty {
            repr.count = self.run_up(index);
        }
        let chunk_len_bytes = self.group.config.chunk_len_bytes;
        let hop = self.hop_of(seq);
        let Hop { addr, shard, link, .. } = self.hops.get_mut(hop)?;
        let to = *addr;
        if repr.kind == Kind::Data {
            repr.payload_len_bytes = slot.value_len;
            if !repr.choose_form(chunk_len_bytes, !link.is_described(slot.signature)) {
                link.set_described(slot.signature);
                self.group.up.insert(index);
                return Some(bare(to, &repr.operation()));
            }
        }
        if repr.kind != Kind::Nak {
            link.set_described(slot.signature);
        }
        // A run does not cross a shard.
        let first = shard.below(seq);
        (0..u64::from(repr.count)).for_each(|next| link.on_sent(first + next, now));
        let asks = self.group.parent.as_ref().is_some_and(|parent| parent.shared_results.is_requested());
        repr.flags.set(Flags::SHARED, repr.flags.contains(Flags::WANT) && asks);
        Some(self.with_value(to, repr, index))
    }

    /// Extend the Empty of slot `index` over the following chunks that are also Empty, belong to the same operation and
    /// the same run of the shard, and are due now (PROTOCOL 1). Returns the number of chunks covered.
    fn run_up(&mut self, index: usize) -> u16 {
        let first = self.slots[index];
        let mut count = 1;
        while !(first.local + count).is_multiple_of(RUN) {
            let next = self.slot_index(first.local + count);
            let slot = &self.slots[next];
            let alike = slot.holds(first.local + count)
                && slot.state == State::Up
                && slot.value_len == 0
                && slot.signature == first.signature
                && slot.want.is_empty() == first.want.is_empty();
            if !(alike && self.group.up.contains(next)) {
                break;
            }
            self.group.up.remove(next);
            count += 1;
        }
        count as u16
    }

    /// Extend the Done of slot `index` to `child` over the following chunks, under the same conditions.
    fn run_down(&mut self, index: usize, child: usize) -> u16 {
        let first = self.slots[index];
        let mut count = 1;
        while !(first.local + count).is_multiple_of(RUN) {
            let next = self.slot_index(first.local + count);
            let slot = &mut self.slots[next];
            let alike = slot.holds(first.local + count)
                && slot.state == State::Answered
                && slot.signature == first.signature
                && (!slot.has_result_for(child) || planted!(self.common, DoneForResult));
            if !(alike && slot.pending.contains(child)) {
                break;
            }
            slot.pending.remove(child);
            if slot.pending.is_empty() {
                self.group.down.remove(next);
            }
            count += 1;
        }
        count as u16
    }

    /// Return the answer of slot `index` to a child that gets no Result: a Done, or a Nak.
    fn transmit_down(&mut self, index: usize, child: usize) -> Option<Transmit<Payload>> {
        let slot = &self.slots[index];
        let to = self.children[child].addr?;
        let seq = self.shard().global(slot.local);
        let token = self.children[child].token;
        if slot.state != State::Answered {
            let failure = self.group.failed?;
            let nak = self.failure_nak(&failure, child, seq, token);
            self.common.counters.naks += 1;
            return Some(match self.missing_in(&failure) {
                Some(mask) => masked(to, nak, &mask),
                None => bare(to, &nak),
            });
        }
        let count = self.run_down(index, child);
        let mut repr = Repr { count, ..self.down_header(Kind::Done, child, seq, token) };
        describe(&self.slots[index], &mut repr);
        repr.set_op(&self.slots[index].op);
        Some(bare(to, &repr))
    }

    /// Return the shared address if the answer of slot `index` can go there instead of to each child.
    fn shared_link(&self, index: usize) -> Option<SharedLink> {
        let link = self.group.shared?;
        let slot = &self.slots[index];
        let here = slot.bits.difference(&self.group.view.excluded);
        let everybody = slot.bits.has_first(self.children.len()) && here.len() > 1;
        let sets = [&slot.pending, &slot.want, &slot.shared];
        let all = slot.state == State::Answered && everybody && sets.iter().all(|&set| *set == here);
        (all && slot.value_len > 0).then_some(link)
    }

    /// Send the answer of slot `index` to all children at once.
    fn transmit_shared(&mut self, index: usize, link: SharedLink) -> Transmit<Payload> {
        let slot = &mut self.slots[index];
        slot.pending = ChildSet::EMPTY;
        // If it is lost, every child asks, and those requests must not be answered by the same route.
        slot.shared = ChildSet::EMPTY;
        self.group.down.remove(index);
        self.common.counters.answers_shared += 1;
        let mut repr = Repr {
            seq: self.shard().global(self.slots[index].local),
            child: ChildIndex::ALL,
            key: link.key,
            ..self.result_header()
        };
        describe(&self.slots[index], &mut repr);
        self.with_value(link.addr, repr, index)
    }

    /// Return a packet, with the value of slot `index` if it is Data or Result.
    fn with_value(&mut self, to: Addr, mut repr: Repr, index: usize) -> Transmit<Payload> {
        if !matches!(repr.kind, Kind::Data | Kind::Result) {
            return bare(to, &repr);
        }
        let (value, crc) = self.sealed_value(index);
        repr.payload_len_bytes = value.len() as u16;
        let payload = Payload::Slots { start: value.start, len: value.len() };
        Transmit { payload, ..sealed(to, &repr, crc) }
    }

    /// Return where the value of slot `index` is in the group's bytes, and its checksum, which is computed once.
    #[inline]
    fn sealed_value(&mut self, index: usize) -> (Range<usize>, u32) {
        let value = self.value(index);
        let crc = &mut self.slots[index].value_crc;
        (value.clone(), *crc.get_or_insert_with(|| payload_crc(&self.bytes[value])))
    }
}

/// Write what the slot knows of the operation into the header of its answer.
fn describe(slot: &Slot, repr: &mut Repr) {
    (repr.signature, repr.attempt) = (slot.signature, slot.attempt as u8);
    (repr.slowest, repr.late_us) = (slot.slowest, slot.late_us);
}

/// Return a packet without payload.
fn bare(to: Addr, repr: &Repr) -> Transmit<Payload> {
    sealed(to, repr, 0)
}

fn sealed(to: Addr, repr: &Repr, payload_crc: u32) -> Transmit<Payload> {
    Transmit { to, header: repr.header(payload_crc), payload: Payload::Slots { start: 0, len: 0 } }
}

/// Return a packet with a rank mask as payload.
fn masked(to: Addr, repr: Repr, mask: &RankMask) -> Transmit<Payload> {
    let bytes = mask.to_bytes();
    let repr = Repr { payload_len_bytes: bytes.len() as u16, ..repr };
    Transmit { payload: Payload::Mask(bytes), ..sealed(to, &repr, payload_crc(&bytes)) }
}
