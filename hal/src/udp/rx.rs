//! The receive side: batches of messages, handed out a packet at a time.
//!
//! With `UDP_GRO` one message holds a run of packets of one sender; it is cut here, where it lies, without a copy.
//!
//! Invariants:
//! - nothing here allocates after `new`;
//! - what is handed out is one whole packet; messages that can't be are dropped and counted.

use super::UdpStats;
use super::sys::RecvBatch;
use rustix::io::Errno;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// How many bytes of buffers one call may fill: what fits beside the working set in a second-level cache.
const BATCH_BYTES: usize = 512 << 10;

/// How many bytes one call is meant to bring: they are read twice right afterwards (checksum, then sum or copy), which
/// is fastest while they lie near the core, and small enough for the peers on other cores not to wait for the answer.
const CALL_BYTES: usize = 128 << 10;

/// The most messages of one call.
const MAX_MESSAGES: usize = 64;

/// How often one `fill` calls again because of an error or because all that came was useless: work per call is bounded.
const MAX_ATTEMPTS: usize = 8;

/// The bytes that the kernel coalesces at most.
const MAX_COALESCED_BYTES: usize = 65_535;

/// A message that is still to be handed out.
struct Pending {
    message: usize,
    from: SocketAddr,
    is_marked: bool,
    /// Where its first packet starts.
    start_bytes: usize,
    len_bytes: usize,
    segment_len_bytes: usize,
}

/// The next packet.
pub(super) struct Next {
    pub(super) from: SocketAddr,
    /// The network marked it (ECN-CE).
    pub(super) is_marked: bool,
    /// In which message it lies, and where.
    pub(super) message: usize,
    pub(super) range: Range<usize>,
}

/// Packets that have arrived.
pub(super) struct RxQueue {
    batch: RecvBatch,
    pending: Vec<Pending>,
    /// The next packet: in which pending message, and how many bytes behind that one's start.
    next: usize,
    offset: usize,
    max_packet_len_bytes: usize,
    /// The longest message of the last call: the next one's are taken to be as long.
    longest_bytes: usize,
}

impl RxQueue {
    /// Make a queue for packets of up to `max_packet_len_bytes`, coalesced ones if `gro`.
    pub(super) fn new(max_packet_len_bytes: usize, gro: bool) -> Self {
        // One byte more than a packet, so that a longer one is seen to be longer.
        let stride_bytes = if gro { MAX_COALESCED_BYTES } else { max_packet_len_bytes + 1 };
        let stride_bytes = stride_bytes.next_multiple_of(64);
        let messages = (BATCH_BYTES / stride_bytes).clamp(1, MAX_MESSAGES);
        Self {
            batch: RecvBatch::new(messages, stride_bytes),
            pending: Vec::with_capacity(messages),
            next: 0,
            offset: 0,
            max_packet_len_bytes,
            longest_bytes: 0,
        }
    }

    /// Whether a packet can be handed out without asking the kernel.
    pub(super) fn has_packet(&self) -> bool {
        self.next < self.pending.len()
    }

    /// Ask the kernel for packets if there are none left; return whether there are some now.
    pub(super) fn fill(&mut self, fd: BorrowedFd<'_>, stats: &mut UdpStats) -> bool {
        for _ in 0..MAX_ATTEMPTS {
            if self.has_packet() {
                return true;
            }
            stats.receive_calls += 1;
            match self.batch.recv(fd, (CALL_BYTES / self.longest_bytes.max(1)).max(1)) {
                Ok(count) => self.accept(count, stats),
                Err(Errno::AGAIN) => return false,
                Err(Errno::INTR) => {}
                Err(_) => stats.receive_errors += 1,
            }
        }
        self.has_packet()
    }

    /// Step over the next packet and return where it came from and lies.
    pub(super) fn advance(&mut self) -> Option<Next> {
        let pending = self.pending.get(self.next)?;
        let start = pending.start_bytes + self.offset;
        let end = (start + pending.segment_len_bytes).min(pending.len_bytes);
        let Pending { from, is_marked, message, .. } = *pending;
        let packet = Next { from, is_marked, message, range: start..end };
        if end == pending.len_bytes {
            self.next += 1;
            self.offset = 0;
        } else {
            self.offset += pending.segment_len_bytes;
        }
        Some(packet)
    }

    /// Return the bytes of a packet.
    pub(super) fn bytes(&self, message: usize, range: Range<usize>) -> &[u8] {
        &self.batch.buffer(message)[range]
    }

    /// Sort out the `count` messages that have just arrived.
    fn accept(&mut self, count: usize, stats: &mut UdpStats) {
        self.pending.clear();
        self.next = 0;
        self.offset = 0;
        self.longest_bytes = 0;
        for message in 0..count {
            let arrived = self.batch.arrived(message);
            let (len_bytes, segment_len_bytes) = (arrived.len_bytes, arrived.segment_len_bytes);
            self.longest_bytes = self.longest_bytes.max(len_bytes);
            let Some(from) = arrived.from.filter(|_| len_bytes > 0) else {
                stats.receive_errors += 1;
                continue;
            };
            // Behind a run of packets that are too long there may be a shorter one that is not.
            let too_long = arrived.truncated || segment_len_bytes > self.max_packet_len_bytes;
            let start_bytes = if too_long { len_bytes - len_bytes % segment_len_bytes } else { 0 };
            stats.receive_truncated += (start_bytes / segment_len_bytes) as u64;
            let rest_bytes = len_bytes - start_bytes;
            if rest_bytes.min(segment_len_bytes) > self.max_packet_len_bytes {
                stats.receive_truncated += 1;
            } else if rest_bytes > 0 {
                stats.received_packets += rest_bytes.div_ceil(segment_len_bytes) as u64;
                stats.received_bytes += rest_bytes as u64;
                self.pending.push(Pending {
                    message,
                    from,
                    is_marked: arrived.marked,
                    start_bytes,
                    len_bytes,
                    segment_len_bytes,
                });
            }
        }
    }
}
