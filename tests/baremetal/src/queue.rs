//! A port without hardware: pushed packets are received, and sent packets can be popped.
//!
//! It uses fixed arrays only. A driver of a real board would have the same form, with descriptor rings instead of the
//! queues.

use heapless::Deque;
use sumac_hal::port::{Addr, Capabilities, Port, RxToken, TxToken};
use sumac_hal::time::Instant;

/// The longest packet in bytes.
pub(crate) const MAX_PACKET_LEN_BYTES: usize = 512;

/// The capacity of each direction in packets.
pub(crate) const DEPTH: usize = 8;

/// A packet and its peer.
#[derive(Debug, Clone)]
pub(crate) struct Frame {
    pub(crate) peer: Addr,
    len_bytes: usize,
    bytes: [u8; MAX_PACKET_LEN_BYTES],
}

impl Frame {
    fn empty(peer: Addr) -> Self {
        Self { peer, len_bytes: 0, bytes: [0; MAX_PACKET_LEN_BYTES] }
    }

    /// Return the packet.
    pub(crate) fn packet(&self) -> &[u8] {
        &self.bytes[..self.len_bytes]
    }
}

/// The port.
#[derive(Debug)]
pub(crate) struct QueuePort {
    arrived: Deque<Frame, DEPTH>,
    sent: Deque<Frame, DEPTH>,
}

impl QueuePort {
    /// Return a port with empty queues.
    pub(crate) const fn new() -> Self {
        Self { arrived: Deque::new(), sent: Deque::new() }
    }

    /// Deliver a packet of `len_bytes` bytes, written by `fill`, from `peer`; false if the queue is full.
    pub(crate) fn push(&mut self, peer: Addr, len_bytes: usize, fill: impl FnOnce(&mut [u8])) -> bool {
        let mut frame = Frame::empty(peer);
        frame.len_bytes = len_bytes;
        fill(&mut frame.bytes[..len_bytes]);
        self.arrived.push_back(frame).is_ok()
    }

    /// Take the oldest packet that was sent.
    pub(crate) fn pop(&mut self) -> Option<Frame> {
        self.sent.pop_front()
    }
}

impl Port for QueuePort {
    type Rx<'a> = Frame;
    type Tx<'a> = Room<'a>;

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(MAX_PACKET_LEN_BYTES, DEPTH * MAX_PACKET_LEN_BYTES, DEPTH)
    }

    fn receive(&mut self, _now: Instant) -> Option<Frame> {
        self.arrived.pop_front()
    }

    fn transmit(&mut self, _now: Instant) -> Option<Room<'_>> {
        let full = self.sent.is_full();
        (!full).then_some(Room { queue: &mut self.sent })
    }

    fn room(&mut self, _now: Instant) -> usize {
        self.sent.capacity() - self.sent.len()
    }
}

impl RxToken for Frame {
    fn consume<R>(self, f: impl FnOnce(Addr, &[u8]) -> R) -> R {
        f(self.peer, self.packet())
    }
}

/// A reserved place for one packet: `transmit` returns it only if the queue is not full.
#[derive(Debug)]
pub(crate) struct Room<'a> {
    queue: &'a mut Deque<Frame, DEPTH>,
}

impl TxToken for Room<'_> {
    fn consume<R>(self, to: Addr, f: impl FnOnce(&mut [u8]) -> (usize, R)) -> R {
        let mut frame = Frame::empty(to);
        let (len_bytes, result) = f(&mut frame.bytes);
        assert!(len_bytes <= frame.bytes.len(), "{len_bytes} bytes do not fit a packet of {MAX_PACKET_LEN_BYTES}");
        frame.len_bytes = len_bytes;
        if len_bytes > 0 {
            // The place is still free, as `self` borrows the queue.
            let _ = self.queue.push_back(frame);
        }
        result
    }
}
