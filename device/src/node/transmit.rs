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
use sumac_hal::ids::ChildIndex;
use sumac_hal::planted;
use sumac_hal::port::Addr;
use sumac_hal::shard::RUN;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Flags, Header, Kind, RankMask, Repr, payload_crc};

/// Bytes that a group may send before the next group's turn.
const QUANTUM_BYTES: usize = 64 * 1024;

/// Where the payload of a node's packet is; see [`Node::payload`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Payload {
    /// At these offsets of the node's slot memory.
    Slots(Range<usize>),
    /// Here: a rank mask.
    Mask([u8; RankMask::LEN_BYTES]),
}

impl Payload {
    fn len(&self) -> usize {
        match self {
            Self::Slots(range) => range.len(),
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
        let (packets_max, before) = (packets_max.min(N), batch.len());
        while batch.len() < packets_max {
            if let Some(reply) = self.next_reply() {
                // The batch has room.
                let _ = batch.push(reply);
                continue;
            }
            let Some(mut ctx) = self.take_turn().and_then(|turn| self.group_ctx(turn)) else { break };
            if ctx.fill(now, &mut Filling { batch, packets_max }).is_none() {
                break;
            }
        }
        let sent = &batch[before..];
        self.common.counters.packets_out += sent.len() as u64;
        let lens = sent.iter().map(|out| out.header.len() + out.payload.len());
        self.common.counters.bytes_out += lens.sum::<usize>() as u64;
    }

    /// Return the payload of a packet that [`Node::poll_transmit`] has returned since the last `handle`,
    /// `handle_timeout` or `control`.
    pub fn payload<'t>(&'t self, transmit: &'t Transmit<Payload>) -> &'t [u8] {
        match &transmit.payload {
            Payload::Slots(range) => &self.storage.bytes[range.clone()],
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
        let groups = self.storage.groups.len();
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
        while self.group.deficit > 0
            && filling.has_room()
            && let Some(index) = self.group.down.first_from(oldest)
        {
            if let Some(link) = self.shared_link(index) {
                let out = self.transmit_shared(index, link);
                self.push(out, filling);
                continue;
            }
            let child = self.take_pending(index)?;
            let out = self.transmit_down(index, child)?;
            let slot = &self.slots[index];
            let crc = slot.value_crc.filter(|_| slot.state == State::Answered && slot.has_result_for(child));
            let (header, payload) = (out.header, out.payload.clone());
            self.push(out, filling);
            if let Some(crc) = crc {
                self.fill_results(index, (&header, crc), &payload, filling)?;
            }
        }
        Some(())
    }

    /// Add the Result of slot `index` for the next children, given that for the first one, until the turn ends.
    fn fill_results<const N: usize>(
        &mut self,
        index: usize,
        (header, payload_crc): (&Header, u32),
        payload: &Payload,
        filling: &mut Filling<'_, N>,
    ) -> Option<()> {
        while self.group.deficit > 0
            && filling.has_room()
            && let Some(child) = self.slots[index].pending.first()
            && self.slots[index].has_result_for(child)
        {
            self.take_pending(index);
            let Child { addr, key, .. } = &self.children[child];
            let header = header.to_child(ChildIndex(child as u16), *key, payload_crc)?;
            self.push(Transmit { to: (*addr)?, header, payload: payload.clone() }, filling);
        }
        Some(())
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
        self.group.deficit = self.group.deficit.saturating_sub(out.header.len() + out.payload.len());
        // Convert an offset in the group's bytes to one in the node's.
        if let Payload::Slots(range) = &mut out.payload {
            let start = self.group.bytes.start;
            *range = start + range.start..start + range.end;
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
        let kind = if slot.has_result_for(child) { Kind::Result } else { Kind::Done };
        let count = if kind == Kind::Done { self.run_down(index, child) } else { 1 };
        let header = Repr { count, ..self.down_header(kind, child, seq, token) };
        let repr = describe(&self.slots[index], header);
        Some(self.with_value(to, repr, index))
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
        let config = &self.group.config;
        let header = Repr {
            seq: self.shard().global(self.slots[index].local),
            count: 1,
            mark: self.group.stable(),
            window: self.group.granted(),
            view: self.group.view.number(),
            ..Repr::new(Kind::Result, config.group, config.epoch, ChildIndex::ALL, link.key)
        };
        let repr = describe(&self.slots[index], header);
        self.with_value(link.addr, repr, index)
    }

    /// Return a packet, with the value of slot `index` if it is Data or Result.
    fn with_value(&mut self, to: Addr, mut repr: Repr, index: usize) -> Transmit<Payload> {
        if !matches!(repr.kind, Kind::Data | Kind::Result) {
            return bare(to, &repr);
        }
        let payload = self.value(index);
        let crc = self.slots[index].value_crc.unwrap_or_else(|| payload_crc(&self.bytes[payload.clone()]));
        self.slots[index].value_crc = Some(crc);
        repr.payload_len_bytes = self.slots[index].value_len;
        Transmit { payload: Payload::Slots(payload), ..sealed(to, &repr, crc) }
    }
}

/// Write the slot's operation into the header of its answer.
fn describe(slot: &Slot, header: Repr) -> Repr {
    let mut repr = header;
    (repr.signature, repr.attempt) = (slot.signature, slot.attempt as u8);
    (repr.slowest, repr.late_us) = (slot.slowest, slot.late_us);
    if repr.kind == Kind::Result {
        // Whoever receives it knows what was asked for.
        repr.flags |= Flags::SHORT;
    } else {
        repr.set_op(&slot.op);
    }
    repr
}

/// Return a packet without payload.
fn bare(to: Addr, repr: &Repr) -> Transmit<Payload> {
    sealed(to, repr, 0)
}

fn sealed(to: Addr, repr: &Repr, payload_crc: u32) -> Transmit<Payload> {
    Transmit { to, header: repr.header(payload_crc), payload: Payload::Slots(0..0) }
}

/// Return a packet with a rank mask as payload.
fn masked(to: Addr, repr: Repr, mask: &RankMask) -> Transmit<Payload> {
    let bytes = mask.to_bytes();
    let repr = Repr { payload_len_bytes: bytes.len() as u16, ..repr };
    Transmit { payload: Payload::Mask(bytes), ..sealed(to, &repr, payload_crc(&bytes)) }
}
