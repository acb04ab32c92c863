//! The transmit queue: an arena that tokens write into, with packets sorted by destination.
//!
//! A device answers child 0, 1, 2, 3 and then child 0 again, so neighbours in the queue seldom share a destination.
//! Packets are therefore chained per destination (a *bin*), and a flush sends each bin's runs of equal length as one
//! segmented message, for which the kernel traverses its stack once. Packets to one destination keep their order.
//!
//! Invariants:
//! - nothing here allocates after `new`;
//! - the arena fills from its start and is reset only when every packet was sent or dropped, so queued bytes never
//!   move;
//! - a packet is counted once: sent, dropped, or still queued.

use super::UdpStats;
use super::config::MAX_DATAGRAM_LEN_BYTES;
use super::sys::{Message, Part, SendBatch, SockName};
use rustix::io::Errno;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

/// The maximum number of segments of one message (`UDP_MAX_SEGMENTS` before Linux 6.9; 128 since).
const MAX_SEGMENTS: usize = 64;

/// The maximum number of messages in one call.
const MAX_MESSAGES: usize = 64;

/// Packets are aligned to cache lines, for vector loads and stores.
const ALIGN_BYTES: usize = 64;

/// No packet: the end of a chain.
const NONE: u32 = u32::MAX;

/// A queued packet: a head in the arena, and possibly a payload elsewhere.
struct Entry {
    /// The head's offset in the arena.
    start: usize,
    head_len_bytes: usize,
    payload: Payload,
    /// The length of head and payload.
    len_bytes: usize,
    /// The next packet of the same bin.
    next: u32,
}

/// The location of a packet's payload.
#[derive(Clone, Copy)]
enum Payload {
    /// In the arena, contiguous with the head.
    Joined,
    /// In the slices borrowed for the current flush, by index.
    Borrowed(usize),
    /// In the arena, copied by the flush because the kernel did not accept the packet.
    Copied(usize),
}

/// The packets to one destination.
struct Bin {
    to: SocketAddr,
    /// The first packet not yet sent.
    head: u32,
    tail: u32,
}

/// A message of the batch being sent, and how to remove its packets once the kernel has accepted it.
struct Planned {
    bin: usize,
    /// The first packet after it.
    rest: u32,
    packets: usize,
}

/// Packets queued for sending.
pub(super) struct TxQueue {
    arena: Box<[u8]>,
    used_bytes: usize,
    max_packet_len_bytes: usize,
    entries: Vec<Entry>,
    /// Bins in order of first use. Those before `first_bin` are empty.
    bins: Vec<Bin>,
    first_bin: usize,
    /// Open-addressed: hash of a destination -> bin + 1, 0 for free.
    table: Box<[u16]>,
    gso: bool,
    /// The kernel has refused a run: send single packets, to find out whether segmentation or the destination is the
    /// cause.
    doubt_gso: bool,
    batch: SendBatch,
    messages: Vec<Message>,
    parts: Vec<Part>,
    planned: Vec<Planned>,
}

impl TxQueue {
    /// Create a queue for `packets` packets (at most 32768) in an arena of `arena_len_bytes`.
    pub(super) fn new(packets: usize, arena_len_bytes: usize, max_packet_len_bytes: usize, gso: bool) -> Self {
        Self {
            arena: vec![0; arena_len_bytes].into_boxed_slice(),
            used_bytes: 0,
            max_packet_len_bytes,
            entries: Vec::with_capacity(packets),
            bins: Vec::with_capacity(packets),
            first_bin: 0,
            // Twice the maximum number of bins, so that probe sequences stay short.
            table: vec![0; (2 * packets).next_power_of_two()].into_boxed_slice(),
            gso,
            doubt_gso: false,
            batch: SendBatch::new(MAX_MESSAGES, 2 * packets),
            messages: Vec::with_capacity(MAX_MESSAGES),
            parts: Vec::with_capacity(2 * packets),
            planned: Vec::with_capacity(MAX_MESSAGES),
        }
    }

    /// Return whether runs of packets are sent as segmented messages.
    pub(super) fn gso(&self) -> bool {
        self.gso
    }

    /// Return whether the queue is empty.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Return the buffer of the next packet, if there is room for one.
    pub(super) fn reserve(&mut self) -> Option<&mut [u8]> {
        if self.entries.len() == self.entries.capacity() {
            return None;
        }
        self.arena.get_mut(self.used_bytes..self.used_bytes + self.max_packet_len_bytes)
    }

    /// Queue the first `len_bytes` of the buffer that `reserve` returned.
    pub(super) fn commit(&mut self, to: SocketAddr, len_bytes: usize) {
        assert!(len_bytes <= self.max_packet_len_bytes, "packet of {len_bytes} bytes in a smaller buffer");
        self.push(to, len_bytes, Payload::Joined, len_bytes);
    }

    /// Return how many packets of any length there is room for.
    pub(super) fn room(&self) -> usize {
        let arena = (self.arena.len() - self.used_bytes) / self.max_packet_len_bytes.next_multiple_of(ALIGN_BYTES);
        arena.min(self.entries.capacity() - self.entries.len())
    }

    /// Queue a packet of `header` and the payload that [`TxQueue::flush_borrowed`] gets at `index`. The caller has
    /// checked that there is room, and flushes before any other call.
    pub(super) fn queue_borrowed(&mut self, to: SocketAddr, header: &[u8], index: usize, payload_len_bytes: usize) {
        let len_bytes = header.len() + payload_len_bytes;
        assert!(len_bytes <= self.max_packet_len_bytes, "packet of {len_bytes} bytes is over the port's limit");
        self.arena[self.used_bytes..][..header.len()].copy_from_slice(header);
        let payload = if payload_len_bytes > 0 { Payload::Borrowed(index) } else { Payload::Joined };
        self.push(to, header.len(), payload, len_bytes);
    }

    fn push(&mut self, to: SocketAddr, head_len_bytes: usize, payload: Payload, len_bytes: usize) {
        let index = self.entries.len() as u32;
        self.entries.push(Entry { start: self.used_bytes, head_len_bytes, payload, len_bytes, next: NONE });
        self.used_bytes += head_len_bytes.next_multiple_of(ALIGN_BYTES);
        let bin = self.bin_of(to);
        let bin = &mut self.bins[bin];
        if bin.head == NONE {
            bin.head = index;
        } else {
            self.entries[bin.tail as usize].next = index;
        }
        bin.tail = index;
    }

    /// Send what the kernel accepts; keep the rest in order.
    pub(super) fn flush(&mut self, fd: BorrowedFd<'_>, stats: &mut UdpStats) {
        self.flush_borrowed(fd, &[], stats);
    }

    /// As [`TxQueue::flush`], with the payloads borrowed since the last flush. Payloads that the kernel does not accept
    /// are copied, so that nothing refers to them afterwards.
    pub(super) fn flush_borrowed(&mut self, fd: BorrowedFd<'_>, borrowed: &[&[u8]], stats: &mut UdpStats) {
        self.send(fd, borrowed, stats);
        if !self.is_empty() {
            self.copy_borrowed(borrowed);
        }
    }

    /// Copy the borrowed payloads of packets that stay queued.
    fn copy_borrowed(&mut self, borrowed: &[&[u8]]) {
        for entry in &mut self.entries {
            let Payload::Borrowed(index) = entry.payload else { continue };
            // Packets already sent are copied too, which keeps this loop simple; there was room for all of them.
            let payload = borrowed[index];
            self.arena[self.used_bytes..][..payload.len()].copy_from_slice(payload);
            entry.payload = Payload::Copied(self.used_bytes);
            self.used_bytes += payload.len().next_multiple_of(ALIGN_BYTES);
        }
    }

    fn send(&mut self, fd: BorrowedFd<'_>, borrowed: &[&[u8]], stats: &mut UdpStats) {
        while !self.is_empty() {
            self.plan();
            if self.messages.is_empty() {
                self.reset();
                return;
            }
            stats.send_calls += 1;
            match self.batch.send(fd, &self.arena, borrowed, &self.messages, &self.parts) {
                Ok(taken) => {
                    // The kernel accepts the packets one by one but not as a run: the route or interface cannot
                    // segment.
                    self.gso &= !mem::take(&mut self.doubt_gso);
                    for planned in &self.planned[..taken] {
                        self.bins[planned.bin].head = planned.rest;
                        stats.sent_packets += planned.packets as u64;
                    }
                    let parts = self.messages[..taken].last().map_or(0, |message| message.parts.1);
                    stats.sent_bytes += self.parts[..parts].iter().map(|part| part.len(borrowed) as u64).sum::<u64>();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::NOBUFS) => {
                    stats.send_stalls += 1;
                    return;
                }
                Err(_) if self.planned[0].packets > 1 => self.doubt_gso = true,
                Err(_) => {
                    self.doubt_gso = false;
                    let planned = &self.planned[0];
                    self.bins[planned.bin].head = planned.rest;
                    stats.send_dropped_packets += planned.packets as u64;
                }
            }
        }
    }

    /// Gather the next messages: the runs of the first bins, as many as fit one call.
    fn plan(&mut self) {
        self.messages.clear();
        self.parts.clear();
        self.planned.clear();
        while self.bins.get(self.first_bin).is_some_and(|bin| bin.head == NONE) {
            self.first_bin += 1;
        }
        for (index, bin) in self.bins.iter().enumerate().skip(self.first_bin) {
            let mut head = bin.head;
            if head == NONE {
                continue;
            }
            let to = SockName::from(bin.to);
            while head != NONE {
                if self.messages.len() == MAX_MESSAGES {
                    return;
                }
                let first_part = self.parts.len();
                let segment_len = self.entries[head as usize].len_bytes;
                let gso = self.gso && !self.doubt_gso;
                let packets;
                (head, packets) = take_run(&self.entries, head, gso, &mut self.parts);
                // At most MAX_DATAGRAM_LEN_BYTES, so it fits.
                let segment_len_bytes = if packets > 1 { segment_len as u16 } else { 0 };
                self.messages.push(Message { to, parts: (first_part, self.parts.len()), segment_len_bytes });
                self.planned.push(Planned { bin: index, rest: head, packets });
            }
        }
    }

    /// Find or create the bin of a destination.
    fn bin_of(&mut self, to: SocketAddr) -> usize {
        let mask = self.table.len() - 1;
        let mut cell = hash(to) & mask;
        while self.table[cell] != 0 {
            let bin = usize::from(self.table[cell]) - 1;
            if self.bins[bin].to == to {
                return bin;
            }
            cell = (cell + 1) & mask;
        }
        self.bins.push(Bin { to, head: NONE, tail: NONE });
        self.table[cell] = self.bins.len() as u16;
        self.bins.len() - 1
    }

    fn reset(&mut self) {
        self.entries.clear();
        self.bins.clear();
        self.first_bin = 0;
        self.used_bytes = 0;
        self.table.fill(0);
    }
}

/// Hash a destination (Fibonacci hashing: Knuth, TAOCP 3, 6.4). This host chooses its destinations, so no one else can
/// provoke collisions.
fn hash(to: SocketAddr) -> usize {
    let ip = match to {
        SocketAddr::V4(to) => u64::from(u32::from(*to.ip())),
        SocketAddr::V6(to) => {
            let bits = u128::from(*to.ip());
            (bits as u64) ^ (bits >> 64) as u64
        }
    };
    let mixed = (ip ^ u64::from(to.port()) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 40) as usize
}

/// Append the run that starts at `head` to `parts`; return the packet after it and its length in packets. The packets
/// of a run are equally long, except that the last may be shorter, and fit one message.
fn take_run(entries: &[Entry], mut head: u32, gso: bool, parts: &mut Vec<Part>) -> (u32, usize) {
    let segment_len = entries[head as usize].len_bytes;
    let limit = if gso { MAX_SEGMENTS } else { 1 };
    let (mut packets, mut total) = (0, 0);
    while head != NONE && packets < limit {
        let entry = &entries[head as usize];
        if entry.len_bytes > segment_len || total + entry.len_bytes > MAX_DATAGRAM_LEN_BYTES {
            break;
        }
        parts.push(Part::Arena(entry.start, entry.head_len_bytes));
        match entry.payload {
            Payload::Joined => {}
            Payload::Borrowed(index) => parts.push(Part::Borrowed(index)),
            Payload::Copied(start) => parts.push(Part::Arena(start, entry.len_bytes - entry.head_len_bytes)),
        }
        packets += 1;
        total += entry.len_bytes;
        head = entry.next;
        if entry.len_bytes < segment_len {
            break;
        }
    }
    (head, packets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn queue(lens: &[(u16, usize)]) -> TxQueue {
        let mut tx = TxQueue::new(256, 1 << 20, 2000, true);
        for &(port, len) in lens {
            assert!(tx.reserve().is_some());
            tx.commit(SocketAddr::from(([127, 0, 0, 1], port)), len);
        }
        tx
    }

    fn runs(tx: &mut TxQueue) -> Vec<(usize, usize, u16)> {
        tx.plan();
        tx.messages
            .iter()
            .zip(&tx.planned)
            .map(|(message, planned)| (planned.bin, planned.packets, message.segment_len_bytes))
            .collect()
    }

    #[test]
    fn interleaved_destinations_leave_as_one_run_each() {
        let lens: Vec<(u16, usize)> = (0..40).map(|i| (i % 4, 1000)).collect();
        assert_eq!(runs(&mut queue(&lens)), [(0, 10, 1000), (1, 10, 1000), (2, 10, 1000), (3, 10, 1000)]);
    }

    #[test]
    fn run_ends_after_a_shorter_and_before_a_longer_packet() {
        let lens = [(1, 500), (1, 500), (1, 400), (1, 500), (1, 600), (1, 600)];
        assert_eq!(runs(&mut queue(&lens)), [(0, 3, 500), (0, 1, 0), (0, 2, 600)]);
    }

    #[test]
    fn run_stays_within_the_segment_and_datagram_limits() {
        assert_eq!(runs(&mut queue(&[(1, 8); 100])), [(0, 64, 8), (0, 36, 8)]);
        // 65507 / 2000 = 32.75
        assert_eq!(runs(&mut queue(&[(1, 2000); 50])), [(0, 32, 2000), (0, 18, 2000)]);
    }

    #[test]
    fn borrowed_payload_that_stays_queued_is_copied() {
        let to = SocketAddr::from(([127, 0, 0, 1], 9));
        let mut tx = TxQueue::new(8, 1 << 12, 200, true);
        let room = tx.room();
        let payload = [3; 150];
        tx.queue_borrowed(to, &[1; 10], 0, payload.len());
        tx.queue_borrowed(to, &[2; 20], 1, 0);
        tx.copy_borrowed(&[&payload, &[]]);
        assert!(tx.room() < room, "copies take room");
        tx.plan();
        let bytes = |part: &Part| match *part {
            Part::Arena(start, len) => &tx.arena[start..][..len],
            Part::Borrowed(_) => panic!("a payload is still borrowed"),
        };
        assert_eq!(tx.parts.iter().map(bytes).collect::<Vec<_>>(), [&[1; 10][..], &payload, &[2; 20]]);
    }

    #[test]
    fn full_queue_reserves_nothing() {
        let mut tx = TxQueue::new(4, 1 << 20, 100, true);
        for _ in 0..4 {
            assert!(tx.reserve().is_some());
            tx.commit(SocketAddr::from(([127, 0, 0, 1], 9)), 1);
        }
        assert!(tx.reserve().is_none());
        let mut tx = TxQueue::new(100, 250, 100, true);
        tx.commit(SocketAddr::from(([127, 0, 0, 1], 9)), 100);
        tx.commit(SocketAddr::from(([127, 0, 0, 1], 9)), 1);
        assert!(tx.reserve().is_none(), "58 bytes are left, 100 needed");
    }

    proptest! {
        #[test]
        fn packets_are_planned_once_and_in_order_per_destination(lens in prop::collection::vec((0_u16..5, 1_usize..4), 1..200)) {
            let mut tx = queue(&lens.iter().map(|&(port, len)| (port, len * 100)).collect::<Vec<_>>());
            let mut seen: Vec<Vec<usize>> = vec![Vec::new(); 5];
            loop {
                tx.plan();
                if tx.messages.is_empty() { break; }
                for i in 0..tx.messages.len() {
                    let (from, to) = tx.messages[i].parts;
                    let bin = tx.planned[i].bin;
                    let port = tx.bins[bin].to.port();
                    seen[usize::from(port)].extend(tx.parts[from..to].iter().map(|part| match part {
                            Part::Arena(start, _) => *start,
                            Part::Borrowed(_) => panic!("nothing is borrowed here"),
                        }));
                    tx.bins[bin].head = tx.planned[i].rest;
                }
            }
            let mut expected: Vec<Vec<usize>> = vec![Vec::new(); 5];
            for (entry, &(port, _)) in tx.entries.iter().zip(&lens) {
                expected[usize::from(port)].push(entry.start);
            }
            prop_assert_eq!(seen, expected);
        }
    }
}
