//! Ports: network interfaces that send and receive packets.
//!
//! I/O happens when a *token* is consumed, as in smoltcp's `phy`. The receiver reads a packet where the port holds it,
//! and the sender writes it where the port needs it, without allocation. A port moves bytes and does not interpret
//! them.
//!
//! Every implementation must follow these rules, which the conformance suite checks (`port::conformance`, for tests):
//! - a packet arrives with the bytes and the length it was sent with, or not at all;
//! - packets may be lost, duplicated and reordered, but never merged or split;
//! - the receiver sees the sender's address, which is the same for all its packets and can be replied to;
//! - `receive` and `transmit` never block; a full queue returns `None`, and has room again some time after
//!   [`Port::flush`];
//! - a packet leaves at the next `flush` at the latest;
//! - a packet to a shared address arrives at every port that has joined it, with the sender's own address.

#[cfg(any(test, feature = "conformance"))]
pub mod conformance;

use crate::time::Instant;
use core::fmt;
use core::net::{Ipv6Addr, SocketAddr};
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// The address of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Addr {
    /// A UDP socket.
    Udp(SocketAddr),
    /// A port of an emulated fabric.
    Emu(u32),
    /// A queue pair of an RDMA port.
    Verbs(VerbsAddr),
}

/// The address of an unreliable-datagram queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct VerbsAddr {
    /// The port's global identifier (GID); on RoCE an IP address, with IPv4 mapped into IPv6.
    pub gid: [u8; 16],
    /// The port's local identifier (LID); 0 on RoCE.
    pub lid: u16,
    /// The queue pair number (QPN), 24 bits.
    pub qpn: u32,
}

impl fmt::Display for VerbsAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gid, lid, qpn } = *self;
        write!(f, "verbs:[{}]:{qpn}", Ipv6Addr::from(gid))?;
        if lid != 0 { write!(f, "@{lid}") } else { Ok(()) }
    }
}

impl Addr {
    /// Return the address `n` after this one: that of shard `n` if `self` is the first shard's. `None` on overflow, and
    /// for queue pairs if `n` is not 0, because the hardware chooses their numbers.
    pub fn offset_by(self, n: u16) -> Option<Self> {
        match self {
            Self::Udp(addr) => Some(Self::Udp(SocketAddr::new(addr.ip(), addr.port().checked_add(n)?))),
            Self::Emu(node) => Some(Self::Emu(node.checked_add(u32::from(n))?)),
            Self::Verbs(_) => (n == 0).then_some(self),
        }
    }
}

impl fmt::Display for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Udp(addr) => addr.fmt(f),
            Self::Emu(node) => write!(f, "emu:{node}"),
            Self::Verbs(addr) => addr.fmt(f),
        }
    }
}

/// The capabilities of a port. They never change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The longest packet in bytes, header and payload.
    pub max_packet_len_bytes: usize,
    /// How many received bytes the port buffers until they are taken; further packets are dropped.
    pub receive_buffer_bytes: usize,
    /// The number of packets that the port moves at once: a good number to handle between flushes.
    pub burst_packets: usize,
}

impl Capabilities {
    /// Return capabilities with these values.
    pub const fn new(max_packet_len_bytes: usize, receive_buffer_bytes: usize, burst_packets: usize) -> Self {
        Self { max_packet_len_bytes, receive_buffer_bytes, burst_packets }
    }
}

/// A packet to send whose header and payload are in separate buffers.
#[derive(Debug, Clone, Copy)]
pub struct Gather<'a> {
    /// The destination.
    pub to: Addr,
    /// The first part of the packet.
    pub header: &'a [u8],
    /// The rest of the packet; may be empty.
    pub payload: &'a [u8],
}

/// A received packet.
pub trait RxToken {
    /// Return whether the network has marked the packet for congestion (ECN-CE, RFC 3168). False if the port cannot
    /// tell.
    fn is_marked(&self) -> bool {
        false
    }

    /// Call `f` with the sender's address and the packet.
    fn consume<R>(self, f: impl FnOnce(Addr, &[u8]) -> R) -> R;
}

/// Permission to send one packet: room in the transmit queue.
pub trait TxToken {
    /// Call `f` with a buffer of the port's `max_packet_len_bytes`. `f` returns the number of bytes to send and a
    /// result, which is returned. If that number is 0, nothing is sent.
    ///
    /// # Panics
    /// If the number exceeds the buffer's length.
    fn consume<R>(self, f: impl FnOnce(&mut [u8]) -> (usize, R)) -> R;
}

/// A network interface that sends and receives packets; see [the module](self) for its rules.
pub trait Port {
    /// A received packet.
    type Rx<'a>: RxToken
    where
        Self: 'a;
    /// Permission to send one packet.
    type Tx<'a>: TxToken
    where
        Self: 'a;

    /// Return the port's capabilities.
    fn capabilities(&self) -> Capabilities;

    /// Return the address that peers send to.
    fn local_addr(&self) -> Addr;

    /// Return the next packet that has arrived by `now`, if any.
    fn receive(&mut self, now: Instant) -> Option<Self::Rx<'_>>;

    /// Return a token to send one packet to `to`, or `None` if the queue is full.
    fn transmit(&mut self, to: Addr, now: Instant) -> Option<Self::Tx<'_>>;

    /// Return how many packets of any length [`Port::transmit`] would accept now.
    fn room(&self) -> usize;

    /// Send packets with separate headers and payloads, and flush. A port with scatter-gather support overrides this to
    /// avoid copying payloads. Packets beyond [`Port::room`] are lost.
    fn transmit_gather<'a>(&mut self, packets: impl Iterator<Item = Gather<'a>>, now: Instant) {
        for Gather { to, header, payload } in packets {
            let Some(token) = self.transmit(to, now) else { break };
            token.consume(|buffer| {
                buffer[..header.len()].copy_from_slice(header);
                buffer[header.len()..][..payload.len()].copy_from_slice(payload);
                (header.len() + payload.len(), ())
            });
        }
        self.flush(now);
    }

    /// Join a shared address: packets to it arrive here too from now on. Returns false, and does nothing, if the port
    /// does not support it or has already joined.
    fn join(&mut self, _group: Addr) -> bool {
        false
    }

    /// Leave a shared address. Does nothing if the port has not joined it.
    fn leave(&mut self, _group: Addr) {}

    /// Send all queued packets. Packets to an unreachable peer are lost.
    fn flush(&mut self, now: Instant);
}

/// Why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// A packet may have arrived.
    Packet,
    /// The port's waker was used.
    Woken,
    /// The timeout expired.
    Timeout,
}

/// A port on which a thread can wait.
pub trait WaitPort: Port {
    /// Block until a packet arrives, the port is woken, or `timeout` expires. `None` means no timeout.
    fn wait(&mut self, timeout: Option<Duration>) -> Wake;
}
