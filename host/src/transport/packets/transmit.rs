//! What an endpoint sends next: requests and probes, contributions that the node lacks, and new ones within the window.

use super::{Buffers, Endpoint, Op};
use crate::transport::RecoverySource;
use sumac_hal::driver::Transmit;
use sumac_hal::ids::ChunkNo;
use sumac_hal::planted;
use sumac_hal::port::Addr;
use sumac_hal::shard::RUN;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Flags, Kind, Repr, payload_crc};

impl Endpoint {
    /// Return the next packet, whose payload is still in the caller's buffer; `None` if there is none to send now. It
    /// counts as sent.
    ///
    /// Call it after each input until it returns `None`, or until the port is full; then continue later.
    #[must_use]
    pub fn poll_transmit<'b>(&mut self, now: Instant, buffers: &'b impl Buffers) -> Option<Transmit<&'b [u8]>> {
        let out = self.next_packet(buffers, now)?;
        self.stats.packets_out += 1;
        self.stats.bytes_out += (out.header.len() + out.payload.len()) as u64;
        Some(out)
    }

    /// Return the destination of the next packet, if there is one, without sending it.
    #[must_use]
    pub fn poll_destination(&mut self) -> Option<Addr> {
        if self.failed.is_some() {
            return None;
        }
        if let Some((to, _)) = self.replies.front() {
            return Some(*to);
        }
        self.drop_answered();
        let seq = self.again.front().copied().or_else(|| self.next_in_window())?;
        Some(self.config.parents[self.shard_of(seq)])
    }

    fn next_packet<'b>(&mut self, buffers: &'b impl Buffers, now: Instant) -> Option<Transmit<&'b [u8]>> {
        if self.failed.is_some() {
            return None;
        }
        if let Some((to, repr)) = self.replies.pop_front() {
            return Some(transmit(to, &repr, &PADDING[..repr.payload_len_bytes.into()]));
        }
        self.drop_answered();
        if let Some(&seq) = self.again.front() {
            let (out, sent) = self.contribute(seq, seq + 1, buffers, now);
            if sent > 0 {
                self.again.pop_front();
                self.stats.retransmits += 1;
            }
            return Some(out);
        }
        let seq = self.next_in_window()?;
        let run_end = (seq / RUN + 1) * RUN;
        let end = run_end.min(self.end()).min(self.window_end());
        let (out, sent) = self.contribute(seq, end, buffers, now);
        self.next = self.next.max(seq + sent);
        Some(out)
    }

    /// Drop retransmissions that have been answered by now, or never will be.
    fn drop_answered(&mut self) {
        while let Some(&seq) = self.again.front() {
            let index = self.shard_of(seq);
            let local = self.shard(index).below(ChunkNo(seq));
            if seq < self.end() && !self.hops[index].is_answered(local) {
                return;
            }
            self.again.pop_front();
        }
    }

    /// Return the next sequence number to send for the first time, if the window allows it.
    pub(super) fn next_in_window(&self) -> Option<u64> {
        let limit = self.end().min(self.window_end());
        (self.next < limit).then_some(self.next)
    }

    /// Return the sequence number before which contributions may be sent.
    pub(super) fn window_end(&self) -> u64 {
        let have = self.have().0;
        if planted!(self, CountedWindow) {
            let answered = (have..self.next).filter(|&seq| RecoverySource::is_answered(self, seq)).count();
            return have + answered as u64 + u64::from(self.window());
        }
        have + u64::from(self.window())
    }

    /// Return the contribution to `seq`. An Empty also covers the following ones below `end`, as far as they are Empty
    /// of the same operation. Also returns how many seqs the packet covers: none if it only describes the operation,
    /// which has to come before.
    fn contribute<'b>(
        &mut self,
        seq: u64,
        end: u64,
        buffers: &'b impl Buffers,
        now: Instant,
    ) -> (Transmit<&'b [u8]>, u64) {
        let op = self.ops.of_seq(seq).expect("only posted seqs of unfinished operations are sent");
        let part = op.part(seq);
        let payload = part.input.map_or(&[][..], |range| &buffers.input(op.id)[range]);
        let kind = if payload.is_empty() { Kind::Empty } else { Kind::Data };
        let wants = part.landing.is_some();
        let mut repr = self.header(kind, ChunkNo(seq), self.config.salt);
        repr.set_op(&op.desc);
        repr.signature = op.signature;
        repr.slowest = Some(self.config.rank);
        if let Some(limit) = op.limit {
            // Operations with more chunks would not fit the element count of the header.
            repr.set_limit(limit, (seq - op.first()) as u32);
        }
        repr.flags.set(Flags::WANT, wants);
        repr.flags.set(Flags::CONGESTED, std::mem::take(&mut self.congested));
        repr.flags.set(Flags::SHARED, wants && self.shared_results.is_requested());
        repr.payload_len_bytes = payload.len() as u16;
        if kind == Kind::Empty {
            repr.count = empty_run(&op, seq, end, wants);
        }
        let index = self.shard_of(seq);
        let (local, to) = (self.shard(index).below(ChunkNo(seq)), self.config.parents[index]);
        let hop = &mut self.hops[index];
        let describe = !hop.is_described(op.signature);
        hop.set_described(op.signature);
        if kind == Kind::Data && !repr.choose_form(self.config.chunk_len_bytes, describe) {
            return (transmit(to, &repr.operation(), &[]), 0);
        }
        (0..u64::from(repr.count)).for_each(|next| hop.on_sent(local + next, now));
        (transmit(to, &repr, payload), repr.count.into())
    }
}

/// The payload of packets that are as long as the path is to carry.
static PADDING: [u8; 1 << 16] = [0; 1 << 16];

fn transmit<'b>(to: Addr, repr: &Repr, payload: &'b [u8]) -> Transmit<&'b [u8]> {
    Transmit { to, header: repr.header(payload_crc(payload)), payload }
}

/// Return how many sequence numbers from `seq` on, below `end`, are Empty contributions to `op` with the same `wants`.
fn empty_run(op: &Op, seq: u64, end: u64, wants: bool) -> u16 {
    let alike = |next: &u64| {
        let part = op.part(*next);
        part.input.is_none() && part.landing.is_some() == wants
    };
    1 + (seq + 1..end.min(op.end())).take_while(alike).count() as u16
}
