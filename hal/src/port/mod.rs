//! Ports: network interfaces that send and receive packets.
//!
//! I/O happens when a *token* is consumed, as in smoltcp's `phy`. The receiver reads a packet where the port holds it,
//! and the sender writes it where the port needs it, without allocation. A port moves bytes and does not interpret
//! them.
//!
//! | trait | for |
//! |---|---|
//! | [`Port`] | every port: three required methods |
//! | [`MulticastPort`] | ports that can listen to shared addresses |
//! | [`WaitPort`] | ports on which a thread can sleep |
//!
//! [`trace::Tracer`] wraps a port and reports its packets; [`pcap::PcapWriter`] writes them to a capture for Wireshark.
//!
//! Every implementation must follow these rules, which the conformance suite checks (`port::conformance`, for tests):
//! - a packet arrives with the bytes and the length it was sent with, or not at all;
//! - packets may be lost, duplicated and reordered, but never merged or split;
//! - the receiver sees the sender's address, which is the same for all its packets and can be replied to;
//! - `receive` and `transmit` never block; a full queue returns `None`, and has room again some time after
//!   [`Port::flush`];
//! - a packet leaves at the next `flush` at the latest.
//!
//! # Example
//!
//! A whole port, over a UDP socket of the standard library. Its queue holds one packet. It passes the conformance
//! suite.
//!
//! ```
//! use std::{io::ErrorKind::WouldBlock, net::{SocketAddr, UdpSocket}};
//! use sumac_hal::port::{Addr, Capabilities, Port, RxToken, TxToken};
//! use sumac_hal::time::Instant;
//!
//! struct SocketPort {
//!     socket: UdpSocket, // non-blocking
//!     received: [u8; 1472],
//!     queued: [u8; 1472],
//!     pending: Option<(SocketAddr, usize)>,
//! }
//!
//! struct Received<'a>(SocketAddr, &'a [u8]);
//! struct Room<'a>(&'a mut SocketPort);
//!
//! impl Port for SocketPort {
//!     type Rx<'a> = Received<'a>;
//!     type Tx<'a> = Room<'a>;
//!
//!     fn capabilities(&self) -> Capabilities {
//!         Capabilities::new(1472, 1 << 16, 1) // packet length, receive buffer, packets at once
//!     }
//!
//!     fn receive(&mut self, _now: Instant) -> Option<Received<'_>> {
//!         let (len, from) = self.socket.recv_from(&mut self.received).ok()?;
//!         Some(Received(from, &self.received[..len]))
//!     }
//!
//!     fn transmit(&mut self, _now: Instant) -> Option<Room<'_>> {
//!         self.pending.is_none().then_some(Room(self))
//!     }
//!
//!     fn flush(&mut self, _now: Instant) {
//!         let Some((to, len)) = self.pending else { return };
//!         match self.socket.send_to(&self.queued[..len], to) {
//!             Err(error) if error.kind() == WouldBlock => {}
//!             _ => self.pending = None, // sent, or lost
//!         }
//!     }
//! }
//!
//! impl RxToken for Received<'_> {
//!     fn consume<R>(self, f: impl FnOnce(Addr, &[u8]) -> R) -> R {
//!         f(Addr::Udp(self.0), self.1)
//!     }
//! }
//!
//! impl TxToken for Room<'_> {
//!     fn consume<R>(self, to: Addr, f: impl FnOnce(&mut [u8]) -> (usize, R)) -> R {
//!         let (len, result) = f(&mut self.0.queued);
//!         if let (Addr::Udp(to), 1..) = (to, len) {
//!             self.0.pending = Some((to, len));
//!         }
//!         result
//!     }
//! }
//! # #[cfg(feature = "conformance")]
//! # {
//! #     use sumac_hal::port::conformance::{Testbed, run};
//! #     struct Bed;
//! #     impl Testbed for Bed {
//! #         type Port = SocketPort;
//! #         fn ports(&mut self, n: usize) -> Vec<SocketPort> {
//! #             let bind = |_| {
//! #                 let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
//! #                 socket.set_nonblocking(true).unwrap();
//! #                 SocketPort { socket, received: [0; 1472], queued: [0; 1472], pending: None }
//! #             };
//! #             (0..n).map(bind).collect()
//! #         }
//! #         fn addr_of(&self, port: &SocketPort) -> Addr { Addr::Udp(port.socket.local_addr().unwrap()) }
//! #         fn unused_addr(&mut self) -> Addr { let port = self.ports(1); self.addr_of(&port[0]) }
//! #         fn now(&self) -> Instant { Instant::ZERO }
//! #         fn advance(&mut self) { std::thread::yield_now() }
//! #     }
//! #     run(&mut Bed).unwrap();
//! # }
//! ```
//!
//! [`Port::receive_train`], [`Port::room`], [`Port::flush`] and [`Port::transmit_gather`] have defaults; a port that
//! moves many packets at once overrides them (`udp::UdpPort`).

#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub mod pcap;
pub mod trace;
mod train;

pub use train::Train;

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

impl Gather<'_> {
    /// Write the packet to the start of `buffer`, and return its length in bytes.
    ///
    /// # Panics
    /// If `buffer` is shorter than the packet.
    pub fn write(&self, buffer: &mut [u8]) -> usize {
        let Self { header, payload, .. } = self;
        buffer[..header.len()].copy_from_slice(header);
        buffer[header.len()..][..payload.len()].copy_from_slice(payload);
        header.len() + payload.len()
    }
}

/// The congestion mark of a received packet (explicit congestion notification, RFC 3168).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Ecn {
    /// The network has not marked the packet.
    #[default]
    Unmarked,
    /// The packet met congestion (ECN-CE).
    Ce,
}

impl Ecn {
    /// Return the mark of a packet that was marked or not.
    pub const fn from_mark(is_marked: bool) -> Self {
        if is_marked { Self::Ce } else { Self::Unmarked }
    }

    /// Return whether the packet met congestion.
    pub const fn is_ce(self) -> bool {
        matches!(self, Self::Ce)
    }
}

/// A received packet.
pub trait RxToken {
    /// Return the packet's congestion mark; [`Ecn::Unmarked`] if the port cannot tell.
    fn ecn(&self) -> Ecn {
        Ecn::Unmarked
    }

    /// Call `f` with the sender's address and the packet; of a train, with the first packet.
    fn consume<R>(self, f: impl FnOnce(Addr, &[u8]) -> R) -> R;

    /// Call `f` with the sender's address and the packets: one, unless [`Port::receive_train`] returned this token and
    /// the port returns trains.
    fn consume_train<R>(self, f: impl FnOnce(Addr, Train<'_>) -> R) -> R
    where
        Self: Sized,
    {
        self.consume(|from, packet| f(from, Train::of_one(packet)))
    }
}

/// Permission to send one packet: room in the transmit queue.
pub trait TxToken {
    /// Call `f` with a buffer of the port's `max_packet_len_bytes`, and queue what it wrote for `to`. `f` returns the
    /// number of bytes to send and a result, which is returned. If that number is 0, nothing is sent. A packet to an
    /// address that the port cannot reach is lost.
    ///
    /// # Panics
    /// If the number exceeds the buffer's length.
    fn consume<R>(self, to: Addr, f: impl FnOnce(&mut [u8]) -> (usize, R)) -> R;
}

/// A network interface that sends and receives packets; see [the module](self) for its rules and an example.
///
/// Three methods are required. The provided ones suit a port that sends a packet as soon as its token is consumed.
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

    /// Return the next packet that has arrived by `now`, if any.
    fn receive(&mut self, now: Instant) -> Option<Self::Rx<'_>>;

    /// Return the packets that have arrived by `now` and that the port holds as one train, at most `packets_max`, if
    /// any. Consume the token with [`RxToken::consume_train`].
    ///
    /// By default this is the next packet. Override it if the port receives coalesced packets.
    fn receive_train(&mut self, now: Instant, packets_max: usize) -> Option<Self::Rx<'_>> {
        let _ = packets_max;
        self.receive(now)
    }

    /// Return a token to send one packet, or `None` if the queue is full. A dropped token sends nothing.
    fn transmit(&mut self, now: Instant) -> Option<Self::Tx<'_>>;

    /// Send all queued packets. Packets to an unreachable peer are lost.
    ///
    /// By default this does nothing: override it if packets wait in a queue.
    fn flush(&mut self, _now: Instant) {}

    /// Return how many packets of any length [`Port::transmit`] would accept now, or fewer; 0 only if it accepts none.
    ///
    /// By default this is 1 or 0. Override it if the port sends several packets at once: callers hand over at most this
    /// many in one call.
    fn room(&mut self, now: Instant) -> usize {
        usize::from(self.transmit(now).is_some())
    }

    /// Send packets with separate headers and payloads, and flush. Packets beyond [`Port::room`] are lost.
    ///
    /// By default both parts are copied. Override it if the port has scatter-gather support.
    fn transmit_gather<'a>(&mut self, packets: impl Iterator<Item = Gather<'a>>, now: Instant) {
        for packet in packets {
            let Some(token) = self.transmit(now) else { break };
            token.consume(packet.to, |buffer| (packet.write(buffer), ()));
        }
        self.flush(now);
    }
}

/// A port that can listen to shared addresses, such as IP multicast groups.
///
/// A packet to a shared address arrives at every port that has joined it, with the sender's own address.
pub trait MulticastPort: Port {
    /// Join a shared address: packets to it arrive here too from now on. Returns false, and does nothing, if the
    /// network does not support it or the port has already joined.
    #[must_use = "a port that has not joined receives nothing from the shared address"]
    fn join(&mut self, group: Addr) -> bool;

    /// Leave a shared address. Does nothing if the port has not joined it.
    fn leave(&mut self, group: Addr);
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
