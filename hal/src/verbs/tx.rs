//! The transmit queue.
//!
//! The queue is a ring of slots in registered memory, each with a work request that was created once. A flush chains
//! the requests written since the last one, requests one completion, for the last of them, and posts the chain in one
//! call. Datagrams complete in order, so that completion frees all slots before it.
//!
//! Invariants:
//! - `done <= posted <= written <= done + PACKETS`; the device owns the slots from `done` to `posted`.
//! - A chain is posted as a whole, or the queue pair is restarted: every request in flight is covered by a completion
//!   to come, its own or a later one.

use super::address_cache::AddressCache;
use super::config::{VerbsError, VerbsStats};
use super::datagrams::{Datagrams, Q_KEY};
use super::ibv;
use super::memory::RegisteredBuffer;
use super::objects::{Completions, Domain};
use crate::port::VerbsAddr;
use std::ptr;
use std::sync::Arc;

/// The number of slots.
pub(super) const PACKETS: usize = 256;

/// Completions fetched in one call.
const BATCH: usize = 16;

/// The transmit queue.
pub(super) struct TxQueue {
    memory: RegisteredBuffer,
    stride_bytes: usize,
    max_packet_len_bytes: usize,
    max_inline_len_bytes: usize,
    requests: Box<[ibv::ibv_send_wr]>,
    pieces: Box<[ibv::ibv_sge]>,
    completions: Arc<Completions>,
    taken: [ibv::ibv_wc; BATCH],
    written: u64,
    posted: u64,
    done: u64,
    /// An operation failed, so the queue pair accepts nothing any more.
    has_failed: bool,
}

// SAFETY: the requests point to pieces and address handles of this port, in heap memory that moves with it.
unsafe impl Send for TxQueue {}

impl TxQueue {
    pub(super) fn new(
        domain: &Arc<Domain>,
        completions: &Arc<Completions>,
        max_packet_len_bytes: usize,
        max_inline_len_bytes: usize,
    ) -> Result<Self, VerbsError> {
        let stride_bytes = max_packet_len_bytes.next_multiple_of(64);
        let memory = RegisteredBuffer::new(domain, PACKETS * stride_bytes)?;
        let piece = |place| ibv::ibv_sge {
            addr: memory.device_addr(place * stride_bytes, max_packet_len_bytes),
            length: 0,
            lkey: memory.lkey(),
        };
        let mut pieces: Box<[_]> = (0..PACKETS).map(piece).collect();
        let request = |piece: &mut ibv::ibv_sge| {
            let mut request = ibv::ibv_send_wr {
                sg_list: piece,
                num_sge: 1,
                opcode: ibv::ibv_wr_opcode::IBV_WR_SEND,
                ..ibv::ibv_send_wr::default()
            };
            request.wr.ud =
                ibv::ibv_send_wr__bindgen_ty_2__bindgen_ty_3 { ah: ptr::null_mut(), remote_qpn: 0, remote_qkey: Q_KEY };
            request
        };
        let requests = pieces.iter_mut().map(request).collect();
        Ok(Self {
            memory,
            stride_bytes,
            max_packet_len_bytes,
            max_inline_len_bytes,
            requests,
            pieces,
            completions: Arc::clone(completions),
            taken: [ibv::ibv_wc::default(); BATCH],
            written: 0,
            posted: 0,
            done: 0,
            has_failed: false,
        })
    }

    /// Return how many more packets of any length fit.
    pub(super) fn room(&self) -> usize {
        PACKETS - self.len()
    }

    fn len(&self) -> usize {
        // At most PACKETS.
        (self.written - self.done) as usize
    }

    /// Return the buffer of the next packet, if there is room for one.
    pub(super) fn reserve(&mut self) -> Option<&mut [u8]> {
        if self.room() == 0 {
            return None;
        }
        let offset = ring_index(self.written) * self.stride_bytes;
        // SAFETY: the device does not own this slot: it was freed by a completion, or never posted.
        Some(unsafe { self.memory.bytes_mut(offset, self.max_packet_len_bytes) })
    }

    /// Queue the first `len_bytes` of the buffer that `reserve` returned; false if the host cannot be resolved.
    pub(super) fn commit(&mut self, to: &VerbsAddr, len_bytes: usize, addresses: &mut AddressCache) -> bool {
        let at = ring_index(self.written);
        let Some(handle) = addresses.find(to, self.written, self.done) else { return false };
        // At most 4096.
        self.pieces[at].length = len_bytes as u32;
        let request = &mut self.requests[at];
        request.wr_id = self.written;
        request.wr.ud = ibv::ibv_send_wr__bindgen_ty_2__bindgen_ty_3 {
            ah: handle.as_ptr(),
            remote_qpn: to.qpn,
            remote_qkey: Q_KEY,
        };
        let is_inline = len_bytes <= self.max_inline_len_bytes;
        request.send_flags = if is_inline { ibv::ibv_send_flags::IBV_SEND_INLINE.0 } else { 0 };
        self.written += 1;
        true
    }

    /// Free the slots of sent packets and post what was written. Returns false if the queue pair has failed.
    pub(super) fn flush(&mut self, pair: &mut Datagrams, stats: &mut VerbsStats) -> bool {
        self.take(stats);
        if self.has_failed {
            return false;
        }
        if self.posted == self.written {
            return true;
        }
        self.chain();
        stats.send_posts += 1;
        let first = &raw mut self.requests[ring_index(self.posted)];
        // SAFETY: the chain consists of this queue's requests, which stay in place with their pieces; their slots are
        // not written until a completion frees them, and their address handles exist until then.
        if unsafe { pair.pair.post_send(first) }.is_err() {
            self.has_failed = true;
            return false;
        }
        for nth in self.posted..self.written {
            stats.sent_packets += 1;
            stats.sent_bytes += u64::from(self.pieces[ring_index(nth)].length);
            let flags = self.requests[ring_index(nth)].send_flags;
            stats.sent_inline += u64::from(flags & ibv::ibv_send_flags::IBV_SEND_INLINE.0 != 0);
        }
        self.posted = self.written;
        true
    }

    /// Chain the requests written since the last flush, with one completion for all.
    fn chain(&mut self) {
        for nth in self.posted..self.written {
            let is_last = nth + 1 == self.written;
            let next: *mut _ = if is_last { ptr::null_mut() } else { &raw mut self.requests[ring_index(nth + 1)] };
            let request = &mut self.requests[ring_index(nth)];
            request.next = next;
            if is_last {
                request.send_flags |= ibv::ibv_send_flags::IBV_SEND_SIGNALED.0;
            }
        }
    }

    /// Poll for completions, and free the slots that they cover.
    pub(super) fn take(&mut self, stats: &mut VerbsStats) {
        while self.done < self.posted {
            let count = self.completions.poll(&mut self.taken);
            for completion in &self.taken[..count] {
                stats.send_completions += 1;
                // Completions from before a restart are ignored.
                if (self.done..self.posted).contains(&completion.wr_id()) {
                    self.done = completion.wr_id() + 1;
                    self.has_failed |= !completion.is_valid();
                }
            }
            if count < BATCH {
                return;
            }
        }
    }

    /// Return how many packets have completed, or were given up.
    pub(super) const fn completed(&self) -> u64 {
        self.done
    }

    /// Return whether packets are in flight.
    pub(super) fn is_in_flight(&self) -> bool {
        self.done < self.posted
    }

    /// Drop packets that were written but not posted.
    pub(super) fn discard(&mut self, stats: &mut VerbsStats) {
        stats.send_dropped_packets += self.written - self.posted;
        self.written = self.posted;
    }

    /// Start over after the queue pair was stopped; all queued packets are lost.
    pub(super) fn restart(&mut self, stats: &mut VerbsStats) {
        stats.send_dropped_packets += self.len() as u64;
        (self.done, self.posted) = (self.written, self.written);
        self.has_failed = false;
    }
}

/// Return the slot of packet number `nth`.
fn ring_index(nth: u64) -> usize {
    (nth % PACKETS as u64) as usize
}
