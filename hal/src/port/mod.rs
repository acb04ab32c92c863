//! A port: a queue of packets in and a queue of packets out.
//!
//! I/O happens when a *token* is consumed (as in smoltcp's `phy`): the receiver sees the packet where the
//! port has it, the sender writes it where the port wants it, and neither allocates. A port moves bytes; it
//! does not understand them.
//!
//! The contract, checked for every implementation by the conformance suite (`port::conformance`, test-only):
//! - a packet arrives whole or not at all, with the bytes and the length it was sent with;
//! - packets may be lost, doubled and reordered, never merged or split;
//! - the sender's address as the receiver sees it can be replied to, and is the same for all its packets;
//! - `receive` and `transmit` never block; a full queue says so (`None`) and takes packets again after
//!   [`Port::flush`], sooner or later;
//! - nothing leaves later than the next `flush`; what has left may have left earlier;
//! - a packet sent to a shared address arrives, as its sender's, at each port that has joined it.

#[cfg(any(test, feature = "conformance"))]
pub mod conformance;

use crate::time::Instant;
use core::fmt;
use core::net::{Ipv6Addr, SocketAddr};
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Where a packet comes from or goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Addr {
    /// A UDP socket.
    Udp(SocketAddr),
    /// A node of an emulated fabric.
    Emu(u32),
    /// A queue pair of an RDMA port.
    Verbs(VerbsAddr),
}

/// An unreliable-datagram queue pair, as others reach it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct VerbsAddr {
    /// The port's global identifier; on RoCE an IP address, one of IPv4 mapped into IPv6.
    pub gid: [u8; 16],
    /// The port's local identifier; 0 on RoCE.
    pub lid: u16,
    /// The queue pair's number, of 24 bits.
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
    /// Return the address `n` places behind this one: a shard's, where `self` is the first shard's. `None` behind the
    /// last, and behind a queue pair: their numbers are the hardware's choice.
    pub fn behind(self, n: u16) -> Option<Self> {
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

/// What a port can do; fixed for its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The longest packet that it carries, in bytes, header and payload.
    pub max_packet_len_bytes: usize,
    /// The bytes that it can hold for a receiver that is not looking; the rest is dropped.
    pub receive_buffer_bytes: usize,
    /// The most packets that it moves in one go: a good number to handle between two flushes.
    pub burst_packets: usize,
}

impl Capabilities {
    /// Describe a port that carries packets up to `max_packet_len_bytes` and buffers `receive_buffer_bytes`.
    pub const fn new(max_packet_len_bytes: usize, receive_buffer_bytes: usize, burst_packets: usize) -> Self {
        Self { max_packet_len_bytes, receive_buffer_bytes, burst_packets }
    }
}

/// A packet to send whose header and payload lie apart.
#[derive(Debug, Clone, Copy)]
pub struct Gather<'a> {
    /// To whom.
    pub to: Addr,
    /// The first bytes of the packet.
    pub header: &'a [u8],
    /// The rest; may be empty.
    pub payload: &'a [u8],
}

/// A packet that has arrived.
pub trait RxToken {
    /// Tell whether the network says that the packet met congestion on its way (ECN-CE, RFC 3168). A port that can't
    /// know says no.
    fn is_marked(&self) -> bool {
        false
    }

    /// Hand the packet and its sender's address to `f`.
    fn consume<R>(self, f: impl FnOnce(Addr, &[u8]) -> R) -> R;
}

/// Room for one packet in the transmit queue.
pub trait TxToken {
    /// Let `f` fill a buffer of the port's `max_packet_len_bytes`, and queue its first `n` bytes, where `n` is
    /// the first half of what `f` returns. `n == 0` queues nothing.
    ///
    /// # Panics
    /// If `n` is more than the buffer's length: that is a bug of the caller.
    fn consume<R>(self, f: impl FnOnce(&mut [u8]) -> (usize, R)) -> R;
}

/// A queue of packets in and a queue of packets out.
pub trait Port {
    /// A packet that has arrived.
    type Rx<'a>: RxToken
    where
        Self: 'a;
    /// Room for one packet.
    type Tx<'a>: TxToken
    where
        Self: 'a;

    /// Return what this port can do.
    fn capabilities(&self) -> Capabilities;

    /// Return the address that peers send to.
    fn local_addr(&self) -> Addr;

    /// Take the next packet that has arrived by `now`.
    fn receive(&mut self, now: Instant) -> Option<Self::Rx<'_>>;

    /// Reserve room for one packet to `to`; `None` if the queue is full.
    fn transmit(&mut self, to: Addr, now: Instant) -> Option<Self::Tx<'_>>;

    /// Return how many packets [`Port::transmit`] would take now, whatever their length.
    fn room(&self) -> usize;

    /// Send packets whose headers and payloads lie apart, and flush: what a port that can gather does without
    /// copying payloads. Those beyond [`Port::room`] are lost.
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

    /// Listen to a shared address: what anybody sends there arrives here too from now on. False if this port can't, or
    /// does already: then nothing has changed.
    fn join(&mut self, _group: Addr) -> bool {
        false
    }

    /// Stop listening to a shared address. Nothing happens if the port does not.
    fn leave(&mut self, _group: Addr) {}

    /// Put everything queued on the wire. Packets to a peer that cannot be reached are lost, as on a wire.
    fn flush(&mut self, now: Instant);
}

/// Why a waiting port came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// A packet is there, or may be.
    Packet,
    /// Somebody used the port's waker.
    Woken,
    /// The time is up.
    Timeout,
}

/// A port whose thread can sleep until there is something to do.
pub trait WaitPort: Port {
    /// Sleep until a packet arrives, the port is woken or `timeout` has passed (`None`: no limit).
    fn wait(&mut self, timeout: Option<Duration>) -> Wake;
}
