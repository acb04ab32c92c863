//! The receive queue: messages arrive in batches and are handed out packet by packet.
//!
//! With `UDP_GRO` one message holds a run of packets from one sender, which is split in place, without a copy.
//!
//! Invariants:
//! - nothing here allocates after `new`;
//! - only whole packets are handed out; other messages are dropped and counted.

use super::UdpStats;
use super::sys::RecvBatch;
use rustix::io::Errno;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// Buffer bytes that one call may fill: they fit a second-level cache beside the working set.
const BATCH_BYTES: usize = 512 << 10;

/// Bytes that one call is meant to fetch. Each is read twice soon afterwards (checksum, then sum or copy), which is
/// fastest while it is cached, and a short call does not delay the answers to peers on other cores.
const CALL_BYTES: usize = 128 << 10;

/// The maximum number of messages in one call.
const MAX_MESSAGES: usize = 64;

/// How often one `fill` repeats the call after an error or useless messages, to bound its work.
const MAX_ATTEMPTS: usize = 8;

/// The maximum length of a coalesced message in bytes.
const MAX_COALESCED_BYTES: usize = 65_535;

/// A message whose packets are not all handed out.
struct Pending {
    message: usize,
    from: SocketAddr,
    is_marked: bool,
    /// The offset of its first packet.
    start_bytes: usize,
    len_bytes: usize,
    segment_len_bytes: usize,
}

/// The next packets.
pub(super) struct Next {
    pub(super) from: SocketAddr,
    /// The network marked one of them (ECN-CE).
    pub(super) is_marked: bool,
    /// Their message, and their range there.
    pub(super) message: usize,
    pub(super) range: Range<usize>,
    /// The length of each but the last, which may be shorter.
    pub(super) segment_len_bytes: usize,
}

/// Received packets.
pub(super) struct RxQueue {
    batch: RecvBatch,
    pending: Vec<Pending>,
    /// The next packet: its pending message, and its offset in that message.
    next: usize,
    offset: usize,
    max_packet_len_bytes: usize,
    /// The longest message of the last call, used as the estimate for the next call.
    longest_bytes: usize,
}

impl RxQueue {
    /// Create a queue for packets of up to `max_packet_len_bytes`, with coalescing if `gro`.
    pub(super) fn new(max_packet_len_bytes: usize, gro: bool) -> Self {
        // One byte more than a packet, so that an overlong packet is detected.
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

    /// Return whether a packet can be handed out without a system call.
    pub(super) fn has_packet(&self) -> bool {
        self.next < self.pending.len()
    }

    /// Fetch packets from the kernel if the batch is used up; return whether there are any.
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

    /// Return the next packets of one message, at most `packets_max` but at least one, and advance past them.
    pub(super) fn advance(&mut self, packets_max: usize) -> Option<Next> {
        let pending = self.pending.get(self.next)?;
        let start = pending.start_bytes + self.offset;
        let len_bytes = pending.segment_len_bytes.saturating_mul(packets_max.max(1));
        let end = start.saturating_add(len_bytes).min(pending.len_bytes);
        let Pending { from, is_marked, message, segment_len_bytes, .. } = *pending;
        if end == pending.len_bytes {
            self.next += 1;
            self.offset = 0;
        } else {
            self.offset += len_bytes;
        }
        Some(Next { from, is_marked, message, range: start..end, segment_len_bytes })
    }

    /// Return the bytes of packets.
    pub(super) fn bytes(&self, message: usize, range: Range<usize>) -> &[u8] {
        &self.batch.buffer(message)[range]
    }

    /// Validate the `count` messages that were just received.
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
            // The last packet of an overlong run may be short enough.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn train_ends_with_its_message_and_at_the_number_of_packets_wanted() {
        let mut rx = RxQueue::new(1472, true);
        let from = SocketAddr::from((Ipv4Addr::LOCALHOST, 9));
        for (message, len_bytes) in [(0, 4300), (1, 1000)] {
            let (start_bytes, segment_len_bytes) = (0, 1000);
            rx.pending.push(Pending { message, from, is_marked: false, start_bytes, len_bytes, segment_len_bytes });
        }
        let taken = [2, 9, 9, 9].map(|packets_max| rx.advance(packets_max).map(|next| (next.message, next.range)));
        assert_eq!(taken, [Some((0, 0..2000)), Some((0, 2000..4300)), Some((1, 0..1000)), None]);
    }
}
