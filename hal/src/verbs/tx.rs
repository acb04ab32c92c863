//! Packets on their way out.
//!
//! The queue is a ring of places in registered memory, each with its work request, made once. A flush chains the requests
//! of what was written since the last one, asks for one completion, for the last of them, and posts the chain in one
//! call. Datagrams complete in order, so that completion frees all places before it.
//!
//! Invariants:
//! - `done <= posted <= written <= done + PACKETS`; the places from `done` on to `posted` are the device's.
//! - A post is a whole chain or an error that restarts the queue pair: no request is in flight without a completion to
//!   come, its own or a later one's.

use super::config::{VerbsError, VerbsStats};
use super::datagrams::{Datagrams, Q_KEY};
use super::memory::Registered;
use super::objects::{Completions, Domain};
use super::paths::Paths;
use crate::port::VerbsAddr;
use ibverbs_sys as ibv;
use std::ptr;
use std::sync::Arc;

/// Places.
pub(super) const PACKETS: usize = 256;

/// Completions taken in one look.
const BATCH: usize = 16;

/// Packets on their way out.
pub(super) struct TxQueue {
    memory: Registered,
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
    /// Something failed, so the queue pair takes nothing any more.
    has_failed: bool,
}

// SAFETY: the requests point to pieces and ways of this port, which moves as a whole.
unsafe impl Send for TxQueue {}

impl TxQueue {
    pub(super) fn new(
        domain: &Arc<Domain>,
        completions: &Arc<Completions>,
        max_packet_len_bytes: usize,
        max_inline_len_bytes: usize,
    ) -> Result<Self, VerbsError> {
        let stride_bytes = max_packet_len_bytes.next_multiple_of(64);
        let memory = Registered::new(domain, PACKETS * stride_bytes)?;
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

    /// Return how many packets of any length there is room for.
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
        let offset = place(self.written) * self.stride_bytes;
        // SAFETY: a place that is not the device's: it was freed by a completion, or never posted.
        Some(unsafe { self.memory.bytes_mut(offset, self.max_packet_len_bytes) })
    }

    /// Queue the first `len_bytes` of the buffer that `reserve` returned; false if no way leads there.
    pub(super) fn commit(&mut self, to: &VerbsAddr, len_bytes: usize, paths: &mut Paths) -> bool {
        let at = place(self.written);
        let Some(path) = paths.find(to, self.written, self.done) else { return false };
        // It is within the longest packet, and so within 4096.
        self.pieces[at].length = len_bytes as u32;
        let request = &mut self.requests[at];
        request.wr_id = self.written;
        request.wr.ud =
            ibv::ibv_send_wr__bindgen_ty_2__bindgen_ty_3 { ah: path.as_ptr(), remote_qpn: to.qpn, remote_qkey: Q_KEY };
        let is_inline = len_bytes <= self.max_inline_len_bytes;
        request.send_flags = if is_inline { ibv::ibv_send_flags::IBV_SEND_INLINE.0 } else { 0 };
        self.written += 1;
        true
    }

    /// Free the places of what has left, and post what was written. False: the queue pair takes nothing any more.
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
        let first = &raw mut self.requests[place(self.posted)];
        // SAFETY: the chain is of this queue's requests, which stay where they are, as their pieces do; their places are
        // not written until a completion frees them, and the ways stay until then.
        if unsafe { pair.pair.post_send(first) }.is_err() {
            self.has_failed = true;
            return false;
        }
        for nth in self.posted..self.written {
            stats.sent_packets += 1;
            stats.sent_bytes += u64::from(self.pieces[place(nth)].length);
            let flags = self.requests[place(nth)].send_flags;
            stats.sent_inline += u64::from(flags & ibv::ibv_send_flags::IBV_SEND_INLINE.0 != 0);
        }
        self.posted = self.written;
        true
    }

    /// Chain what was written, with one completion for all of it.
    fn chain(&mut self) {
        for nth in self.posted..self.written {
            let is_last = nth + 1 == self.written;
            let next: *mut _ = if is_last { ptr::null_mut() } else { &raw mut self.requests[place(nth + 1)] };
            let request = &mut self.requests[place(nth)];
            request.next = next;
            if is_last {
                request.send_flags |= ibv::ibv_send_flags::IBV_SEND_SIGNALED.0;
            }
        }
    }

    /// Take completions, and free the places before them.
    pub(super) fn take(&mut self, stats: &mut VerbsStats) {
        while self.done < self.posted {
            let count = self.completions.poll(&mut self.taken);
            for completion in &self.taken[..count] {
                stats.send_completions += 1;
                // Those of before a restart say nothing.
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

    /// Whether the device still has packets.
    pub(super) fn is_in_flight(&self) -> bool {
        self.done < self.posted
    }

    /// Drop what was written and not posted.
    pub(super) fn discard(&mut self, stats: &mut VerbsStats) {
        stats.send_dropped_packets += self.written - self.posted;
        self.written = self.posted;
    }

    /// Begin anew after the queue pair was stopped; what was there is lost.
    pub(super) fn restart(&mut self, stats: &mut VerbsStats) {
        stats.send_dropped_packets += self.len() as u64;
        (self.done, self.posted) = (self.written, self.written);
        self.has_failed = false;
    }
}

/// Return the place of a packet by its number.
fn place(nth: u64) -> usize {
    (nth % PACKETS as u64) as usize
}
