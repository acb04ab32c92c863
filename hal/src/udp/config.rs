//! Configuration, errors and counters of a UDP port.

use crate::port::Addr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;
use thiserror::Error;

/// The maximum payload of a datagram over IPv4, in bytes: 65535 less the IP and UDP headers (RFC 768, RFC 791).
pub const MAX_DATAGRAM_LEN_BYTES: usize = 65_535 - 20 - 8;

/// The payload of a datagram that fills a standard Ethernet frame (RFC 894) over IPv6; IPv4's is 1472.
const ETHERNET_DATAGRAM_LEN_BYTES: usize = 1500 - 40 - 8;

/// Whether to use a kernel offload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Offload {
    /// If the kernel supports it.
    #[default]
    Auto,
    /// Never: for comparison, and for networks that cannot absorb bursts.
    Off,
}

/// Configuration of a [`UdpPort`](super::UdpPort).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UdpConfig {
    /// The longest packet in bytes; `None`: what fits the MTU towards `peer`. The kernel fragments longer packets,
    /// which works, but the loss of one fragment loses the packet.
    pub max_packet_len_bytes: Option<usize>,
    /// A peer that determines the route whose MTU is used. `None`: loopback's MTU for a loopback address, else
    /// Ethernet's.
    pub peer: Option<SocketAddr>,
    /// How many bytes of packets the kernel buffers until they are received. The kernel may grant less
    /// (`net.core.rmem_max`, unless the process has `CAP_NET_ADMIN`): the capabilities report what it granted.
    pub receive_buffer_bytes: usize,
    /// The size of the socket's send buffer in bytes.
    pub send_buffer_bytes: usize,
    /// Send runs of equal-size packets to one peer in one message (`UDP_SEGMENT`).
    pub gso: Offload,
    /// Receive such runs in one message (`UDP_GRO`).
    pub gro: Offload,
    /// How long `wait` spins before it yields and then sleeps. If threads outnumber cores, a spinning thread occupies
    /// the core of the one it waits for, so keep this well below the cost of a wake-up (about 20 us).
    pub spin: Duration,
    /// The address of an emulated machine's host, as the machine sees it. Loopback addresses (127.0.0.0/8) then denote
    /// that host: packets to them go to it, and packets from it appear to come from 127.0.0.1. Peers of such a port
    /// cannot share an address with it. `None`: loopback is this machine.
    pub loopback_at: Option<Ipv4Addr>,
}

impl Default for UdpConfig {
    fn default() -> Self {
        Self {
            max_packet_len_bytes: None,
            peer: None,
            receive_buffer_bytes: 4 << 20,
            send_buffer_bytes: 1 << 20,
            gso: Offload::Auto,
            gro: Offload::Auto,
            spin: Duration::ZERO,
            loopback_at: None,
        }
    }
}

/// Why a UDP port could not be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum UdpError {
    /// The address is the wildcard address, which does not identify this port to its peers.
    #[error("cannot bind a port to the unspecified address {addr}: give one of this host's addresses")]
    Unspecified {
        /// The requested address.
        addr: SocketAddr,
    },
    /// The packet length is out of range.
    #[error("max_packet_len_bytes is {requested}, but must be 1 to {MAX_DATAGRAM_LEN_BYTES}")]
    PacketLength {
        /// The requested length.
        requested: usize,
    },
    /// A system call failed.
    #[error("cannot {what} for {addr}: {source}")]
    Io {
        /// The operation.
        what: &'static str,
        /// The address concerned.
        addr: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
}

/// Counters of a port since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct UdpStats {
    /// Packets that the kernel accepted.
    pub sent_packets: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// `sendmmsg` calls.
    pub send_calls: u64,
    /// Packets dropped before sending: unreachable or invalid destinations.
    pub send_dropped_packets: u64,
    /// Flushes that left packets queued because the kernel had no room for them.
    pub send_stalls: u64,
    /// Packets received.
    pub received_packets: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// `recvmmsg` calls, empty ones included.
    pub receive_calls: u64,
    /// Packets dropped because they exceeded this port's maximum length.
    pub receive_truncated: u64,
    /// Messages dropped because they were empty or not from an IP address, and errors reported by the socket.
    pub receive_errors: u64,
}

impl UdpConfig {
    /// Translate a peer's address to its address on the network; see [`UdpConfig::loopback_at`].
    pub fn to_network_addr(&self, addr: SocketAddr) -> SocketAddr {
        match (self.loopback_at, addr) {
            (Some(host), SocketAddr::V4(addr)) if addr.ip().is_loopback() => SocketAddr::from((host, addr.port())),
            _ => addr,
        }
    }

    /// Return the destination on the network, if a socket at `local_addr` can send there.
    pub(super) fn reachable(&self, local_addr: SocketAddr, to: Addr) -> Option<SocketAddr> {
        match to {
            Addr::Udp(to) if to.is_ipv4() == local_addr.is_ipv4() && to.port() != 0 => Some(self.to_network_addr(to)),
            _ => None,
        }
    }

    /// Translate an address on the network to the address that its peers use for it.
    pub(super) fn peer_addr_of(&self, addr: SocketAddr) -> SocketAddr {
        match self.loopback_at {
            Some(host) if addr.ip() == IpAddr::V4(host) => SocketAddr::from((Ipv4Addr::LOCALHOST, addr.port())),
            _ => addr,
        }
    }

    /// Return the maximum packet length for a socket bound to `local`.
    pub(super) fn packet_len(&self, local: SocketAddr) -> Result<usize, UdpError> {
        let len = match (self.max_packet_len_bytes, self.peer) {
            (Some(len), _) => len,
            (None, Some(peer)) => datagram_len_towards(local, peer).map_err(|source| UdpError::Io {
                what: "find the MTU towards a peer",
                addr: peer,
                source,
            })?,
            (None, None) if local.ip().is_loopback() => datagram_len_towards(local, local).map_err(|source| {
                UdpError::Io { what: "find the MTU of the loopback interface", addr: local, source }
            })?,
            (None, None) => ETHERNET_DATAGRAM_LEN_BYTES,
        };
        if (1..=MAX_DATAGRAM_LEN_BYTES).contains(&len) {
            Ok(len)
        } else {
            Err(UdpError::PacketLength { requested: len })
        }
    }
}

/// Return the maximum payload of a datagram from `local` to `peer` that needs no fragmentation.
fn datagram_len_towards(local: SocketAddr, peer: SocketAddr) -> io::Result<usize> {
    let socket = UdpSocket::bind((local.ip(), 0))?;
    // Connecting a UDP socket only looks up the route.
    socket.connect((peer.ip(), peer.port().max(1)))?;
    let (mtu, headers) = match peer {
        SocketAddr::V4(_) => (rustix::net::sockopt::ip_mtu(&socket)?, 20 + 8),
        SocketAddr::V6(_) => (rustix::net::sockopt::ipv6_mtu(&socket)?, 40 + 8),
    };
    Ok((mtu as usize).saturating_sub(headers).min(MAX_DATAGRAM_LEN_BYTES))
}
