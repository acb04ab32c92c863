//! The receive queue.
//!
//! The device owns all buffers except those of the batch that was polled last; these are posted again in one call when
//! the batch is used up.
//!
//! Invariants:
//! - The device does not own a buffer of the batch until the batch is used up.
//! - Completions of buffers posted before a restart are ignored.

use super::config::{VerbsError, VerbsStats};
use super::datagrams::Datagrams;
use super::grh::{GRH_LEN_BYTES, Origin, origin};
use super::ibv;
use super::memory::RegisteredBuffer;
use super::objects::{Completions, Domain};
use crate::port::VerbsAddr;
use std::ptr;
use std::sync::Arc;

/// Packets polled, and buffers posted, in one call.
pub(super) const BATCH: usize = 64;

/// The queue pair has to be restarted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Failed;

/// The maximum MTU of InfiniBand. Buffers are that long whatever this port's MTU is, because a packet too long for its
/// buffer can stop a queue pair.
pub(super) const LONGEST_LEN_BYTES: usize = 4096;

/// The length of a buffer.
pub(super) const STRIDE_LEN_BYTES: usize = (GRH_LEN_BYTES + LONGEST_LEN_BYTES).next_multiple_of(64);

/// A packet of the batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Next {
    pub(super) from: VerbsAddr,
    pub(super) is_marked: bool,
    buffer: usize,
    len_bytes: usize,
}

/// The receive queue: buffers, and the batch that was polled last.
pub(super) struct RxQueue {
    memory: RegisteredBuffer,
    stride_bytes: usize,
    max_packet_len_bytes: usize,
    buffers: usize,
    requests: Box<[ibv::ibv_recv_wr]>,
    /// The scatter entries that the requests point to.
    _pieces: Box<[ibv::ibv_sge]>,
    completions: Arc<Completions>,
    is_ethernet: bool,
    taken: Box<[ibv::ibv_wc]>,
    /// Packets of the batch.
    count: usize,
    /// The index of the next packet.
    cursor: usize,
    /// The number of restarts.
    incarnation: u32,
    /// Buffers owned by the device.
    posted: usize,
}

// SAFETY: the requests point to pieces of this queue, in heap memory that moves with it.
unsafe impl Send for RxQueue {}

impl RxQueue {
    pub(super) fn new(
        domain: &Arc<Domain>,
        completions: &Arc<Completions>,
        (buffers, max_packet_len_bytes): (usize, usize),
        is_ethernet: bool,
    ) -> Result<Self, VerbsError> {
        let stride_bytes = STRIDE_LEN_BYTES;
        let memory = RegisteredBuffer::new(domain, buffers * stride_bytes)?;
        let piece = |buffer| ibv::ibv_sge {
            addr: memory.device_addr(buffer * stride_bytes, stride_bytes),
            // At most a few thousand bytes.
            length: stride_bytes as u32,
            lkey: memory.lkey(),
        };
        let mut pieces: Box<[_]> = (0..buffers).map(piece).collect();
        let request =
            |piece: &mut ibv::ibv_sge| ibv::ibv_recv_wr { wr_id: 0, next: ptr::null_mut(), sg_list: piece, num_sge: 1 };
        let requests = pieces.iter_mut().map(request).collect();
        let taken = vec![ibv::ibv_wc::default(); BATCH].into_boxed_slice();
        let completions = Arc::clone(completions);
        Ok(Self {
            memory,
            stride_bytes,
            max_packet_len_bytes,
            buffers,
            requests,
            _pieces: pieces,
            completions,
            is_ethernet,
            taken,
            count: 0,
            cursor: 0,
            incarnation: 0,
            posted: 0,
        })
    }

    /// Post all buffers, after a start or restart of the queue pair.
    pub(super) fn start(&mut self, pair: &mut Datagrams, stats: &mut VerbsStats) -> Result<(), Failed> {
        self.incarnation = self.incarnation.wrapping_add(1);
        (self.count, self.cursor, self.posted) = (0, 0, 0);
        let mut first = 0;
        while first < self.buffers {
            let count = BATCH.min(self.buffers - first);
            self.post_buffers(pair, (first..first + count).map(|buffer| buffer as u64), stats)?;
            first += count;
        }
        Ok(())
    }

    /// Post buffers.
    fn post_buffers(
        &mut self,
        pair: &mut Datagrams,
        buffers: impl Iterator<Item = u64>,
        stats: &mut VerbsStats,
    ) -> Result<(), Failed> {
        let mut chain: heapless::Vec<usize, BATCH> = heapless::Vec::new();
        // Callers pass at most a batch.
        buffers.for_each(|buffer| chain.push(buffer as usize).unwrap_or_default());
        let mut next: *mut ibv::ibv_recv_wr = ptr::null_mut();
        for &buffer in chain.iter().rev() {
            let request = &mut self.requests[buffer];
            request.wr_id = u64::from(self.incarnation) << 32 | buffer as u64;
            request.next = next;
            next = request;
        }
        if next.is_null() {
            return Ok(());
        }
        stats.receive_posts += 1;
        // SAFETY: the chain consists of this queue's requests; their buffers are read only after their completion.
        unsafe { pair.pair.post_receive(next) }.map_err(|_| Failed)?;
        self.posted += chain.len();
        Ok(())
    }

    /// Fetch packets if the batch is used up; return whether there are any, or that the queue pair has failed.
    pub(super) fn fill(&mut self, pair: &mut Datagrams, stats: &mut VerbsStats) -> Result<bool, Failed> {
        while self.cursor == self.count {
            if self.count > 0 {
                let used = std::mem::take(&mut self.count);
                self.cursor = 0;
                let mut batch = [0; BATCH];
                let mut own = 0;
                for completion in &self.taken[..used] {
                    if completion.wr_id() >> 32 == u64::from(self.incarnation) {
                        batch[own] = completion.wr_id() & 0xffff_ffff;
                        own += 1;
                    }
                }
                self.post_buffers(pair, batch.into_iter().take(own), stats)?;
            }
            stats.receive_polls += 1;
            self.count = self.completions.poll(&mut self.taken);
            if self.count == 0 {
                return Ok(false);
            }
            let mut failed = 0;
            for completion in &self.taken[..self.count] {
                if completion.wr_id() >> 32 == u64::from(self.incarnation) {
                    self.posted -= 1;
                    failed += u64::from(!completion.is_valid());
                }
            }
            if failed > 0 {
                // A buffer posted to a queue pair in this state would complete with an error at once.
                stats.receive_errors += failed;
                return Err(Failed);
            }
        }
        Ok(true)
    }

    /// Return the next packet of the batch; invalid ones are skipped, so that the batch may then be empty.
    pub(super) fn advance(&mut self, stats: &mut VerbsStats) -> Option<Next> {
        while self.cursor < self.count {
            let completion = self.taken[self.cursor];
            self.cursor += 1;
            if completion.wr_id() >> 32 != u64::from(self.incarnation) {
                continue;
            }
            match self.next(&completion) {
                Some(next) => {
                    stats.received_packets += 1;
                    stats.received_bytes += next.len_bytes as u64;
                    return Some(next);
                }
                None => stats.receive_errors += 1,
            }
        }
        None
    }

    fn next(&self, completion: &ibv::ibv_wc) -> Option<Next> {
        let has_header = completion.wc_flags.0 & ibv::ibv_wc_flags::IBV_WC_GRH.0 != 0;
        let len_bytes = completion.len().checked_sub(GRH_LEN_BYTES)?;
        if !has_header || len_bytes == 0 || len_bytes > self.max_packet_len_bytes {
            return None;
        }
        let buffer = (completion.wr_id() & 0xffff_ffff) as usize;
        // SAFETY: a buffer of the batch, which the device does not own.
        let header = unsafe { self.memory.bytes(buffer * self.stride_bytes, GRH_LEN_BYTES) };
        let Origin { gid, is_marked } = origin(header.first_chunk()?)?;
        let lid = if self.is_ethernet { 0 } else { completion.slid };
        Some(Next { from: VerbsAddr { gid, lid, qpn: completion.src_qp }, is_marked, buffer, len_bytes })
    }

    /// Return the bytes of a packet of the batch.
    pub(super) fn bytes(&self, next: &Next) -> &[u8] {
        let offset = next.buffer * self.stride_bytes + GRH_LEN_BYTES;
        // SAFETY: a buffer of the batch, which the device does not own until `fill`, which borrows this queue mutably,
        // has used the batch up.
        unsafe { self.memory.bytes(offset, next.len_bytes) }
    }

    /// Request an event for the next packet.
    pub(super) fn arm(&self) {
        self.completions.arm();
    }

    /// Discard the completions of a stopped queue pair; true if all buffers were returned.
    pub(super) fn drain(&mut self) -> bool {
        (self.count, self.cursor) = (0, 0);
        loop {
            let count = self.completions.poll(&mut self.taken);
            let own = self.taken[..count].iter().filter(|taken| taken.wr_id() >> 32 == u64::from(self.incarnation));
            self.posted -= own.count();
            if count < BATCH {
                return self.posted == 0;
            }
        }
    }
}
