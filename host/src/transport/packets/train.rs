//! Trains: consecutive chunks of one operation, in the usual case.
//!
//! [`Endpoint::poll_transmit`] and [`Endpoint::handle`] make and take any packet. Most are contributions to an all-reduce,
//! in order, for the first time, and results to it, in order. What these have in common is found once for a train.
//!
//! Invariant: a train has the effect of its packets one by one. A packet that is not of the usual case is left to
//! `poll_transmit` and `handle`.

use super::{Buffers, Endpoint, OpId};
use sumac_hal::driver::{Batch, Transmit};
use sumac_hal::ids::ChunkNo;
use sumac_hal::op::Collective;
use sumac_hal::port::{Addr, Ecn};
use sumac_hal::time::Instant;
use sumac_hal::wire::{ChunkFields, Flags, HEADER_LEN, Kind, Lead, Repr, SHORT_HEADER_LEN, Template, payload_crc};

/// The results of a train that are of the usual case: those of one operation but its first chunk and its last, and but
/// the result that completes it.
struct Usual {
    op: OpId,
    /// Its first chunk.
    first: u64,
    /// Length of its chunks in bytes, but for the last.
    len: usize,
    /// The next chunk in order, and how many may still land.
    next: u64,
    left: u64,
}

impl Endpoint {
    /// Return whether nothing is amiss that packets of the usual case would have to regard. The leaf has one shard: the
    /// chunks of several do not follow each other.
    fn is_intact(&self) -> bool {
        #[cfg(feature = "planted")]
        if self.bug.is_some() {
            return false;
        }
        self.failed.is_none() && self.ending.is_none() && self.hops.len() == 1
    }

    /// Add the next packets to `batch`, as long as it is shorter than `packets_max`: the same that
    /// [`Endpoint::poll_transmit`] would return one by one.
    pub fn poll_batch<'b>(
        &mut self,
        now: Instant,
        buffers: &'b impl Buffers,
        packets_max: usize,
        batch: &mut Batch<&'b [u8]>,
    ) {
        let packets_max = packets_max.min(batch.capacity());
        while batch.len() < packets_max {
            self.fill(now, buffers, packets_max, batch);
            if batch.len() == packets_max {
                return;
            }
            let Some(out) = self.poll_transmit(now, buffers) else { return };
            // The batch has room.
            let _ = batch.push(out);
        }
    }

    /// Add the next contributions, as far as they are of the usual case.
    fn fill<'b>(&mut self, now: Instant, buffers: &'b impl Buffers, packets_max: usize, batch: &mut Batch<&'b [u8]>) {
        let is_plain = self.is_intact() && self.replies.is_empty() && self.again.is_empty() && !self.congested;
        let Some(op) = self.next_in_window().filter(|_| is_plain).and_then(|seq| self.ops.of_seq(seq)) else { return };
        let len = op.full_chunk_bytes();
        let is_usual = op.desc.collective == Collective::AllReduce
            && len >= HEADER_LEN - SHORT_HEADER_LEN
            && self.hops[0].is_described(op.signature);
        if !is_usual {
            return;
        }
        let shared = if self.shared_results.is_requested() { Flags::SHARED } else { Flags::empty() };
        let header = self.header(Kind::Data, ChunkNo(self.next), self.config.salt);
        let mark = header.mark;
        let flags = Flags::SHORT | Flags::WANT | shared;
        let Some(mut template) = Template::new(&Repr { flags, ..header }) else { return };
        let (signature, slowest, to) = (op.signature, Some(self.config.rank), self.config.parents[0]);
        let before = batch.len();
        let room = (packets_max - before) as u64;
        let end = self.window_end().min(op.end() - 1).min(self.next.saturating_add(room));
        let input = buffers.input(op.id).get((self.next - op.first()) as usize * len..).unwrap_or_default();
        for (seq, payload) in (self.next..end).zip(input.chunks_exact(len)) {
            let fields = ChunkFields { seq: ChunkNo(seq), mark, signature, attempt: 0, slowest, late_us: 0 };
            template.set_chunk(&fields);
            self.hops[0].on_sent(seq, now);
            // The batch has room.
            let _ = batch.push(Transmit { to, header: template.header(payload_crc(payload)), payload });
        }
        let sent = (batch.len() - before) as u64;
        self.next += sent;
        self.stats.packets_out += sent;
        self.stats.bytes_out += sent * (SHORT_HEADER_LEN + len) as u64;
    }

    /// Handle packets that arrived together from `from`, with the same mark, as if [`Endpoint::handle`] got each in
    /// turn. Consecutive results of one operation are admitted once: link, group and epoch are those of the first.
    pub fn handle_train<'p>(
        &mut self,
        now: Instant,
        from: Addr,
        ecn: Ecn,
        packets: impl IntoIterator<Item = &'p [u8]>,
        buffers: &mut impl Buffers,
    ) {
        let mut lead: Option<Lead> = None;
        let mut packets = packets.into_iter().peekable();
        while let Some(packet) = packets.next() {
            if self.failed.is_some() {
                return;
            }
            let taken = match lead.as_mut().filter(|lead| lead.leads(packet)).map(|lead| lead.parse(packet)) {
                Some(Ok((repr, payload, _))) => self.take(from, repr, payload, buffers, now),
                // Also a damaged packet, which is dropped there.
                _ => self.accept(from, packet, buffers, now, &mut lead),
            };
            self.note_packet(taken, ecn);
            let Some(lead) = lead.as_mut() else { continue };
            let Some(usual) = self.usual(from, ecn, lead.repr()) else { continue };
            self.take_usual(usual, lead, &mut packets, buffers, now);
        }
    }

    /// Return which results behind this one, which was admitted, are of the usual case; `None` if there are none.
    fn usual(&self, from: Addr, ecn: Ecn, repr: &Repr) -> Option<Usual> {
        let is_plain = !ecn.is_ce()
            && (repr.kind, repr.child) == (Kind::Result, self.config.child)
            && !self.shared_results.is_requested()
            && repr.view <= self.ops.exclusions.count()
            && self.config.parents[0] == from;
        if !is_plain || !self.is_intact() || !self.hops[0].is_in_order() {
            return None;
        }
        let next = self.hops[0].answered_below();
        let op = self.ops.of_seq(next).filter(|op| op.signature == repr.signature && next > op.first())?;
        let left = op.missing().checked_sub(1)?.min(op.end() - 1 - next);
        let is_usual = op.desc.collective == Collective::AllReduce && left > 0;
        let (len, first) = (op.full_chunk_bytes(), op.first());
        is_usual.then_some(Usual { op: op.id, first, len, next, left })
    }

    /// Take the next packets of a train, as far as they are of the usual case.
    fn take_usual<'p>(
        &mut self,
        mut usual: Usual,
        lead: &mut Lead,
        packets: &mut std::iter::Peekable<impl Iterator<Item = &'p [u8]>>,
        buffers: &mut impl Buffers,
        now: Instant,
    ) {
        let began = usual.next;
        let output = buffers.output(usual.op);
        while usual.left > 0
            && let Some(packet) =
                packets.next_if(|packet| lead.leads(packet) && lead.seq_of(packet) == Some(ChunkNo(usual.next)))
        {
            let at = (usual.next - usual.first) as usize * usual.len;
            let Ok((repr, payload, _)) = lead.parse(packet) else {
                // Damaged: as if it had not come, but counted.
                self.note_packet(None, Ecn::Unmarked);
                break;
            };
            if payload.len() != usual.len || !self.hops[0].take_in_order(usual.next) {
                self.note_packet(None, Ecn::Unmarked);
                break;
            }
            output[at..][..payload.len()].copy_from_slice(payload);
            self.stable = self.stable.max(repr.mark);
            if repr.window > 0 {
                self.window = repr.window;
            }
            (usual.next, usual.left) = (usual.next + 1, usual.left - 1);
        }
        let landed = usual.next - began;
        if landed > 0 {
            self.stats.packets_in += landed;
            self.hops[0].note_answers(now);
            self.ops.landed_in_order(began, landed);
            self.retain_completed(buffers);
        }
    }
}
