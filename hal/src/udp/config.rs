//! What a UDP port is set up with, why it can't be, and what it counts.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;
use thiserror::Error;

/// The most payload bytes of one datagram over IPv4: 65535 less the IP and UDP headers (RFC 768, RFC 791).
pub const MAX_DATAGRAM_LEN_BYTES: usize = 65_535 - 20 - 8;

/// The payload of a datagram that fills a standard Ethernet frame (RFC 894) over IPv6; IPv4's is 1472.
const ETHERNET_DATAGRAM_LEN_BYTES: usize = 1500 - 40 - 8;

/// Whether to use an offload of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Offload {
    /// Where the kernel has it.
    #[default]
    Auto,
    /// Never: for comparison, and for networks that do not stand the bursts.
    Off,
}

/// How to set up a [`UdpPort`](super::UdpPort).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UdpConfig {
    /// The longest packet in bytes; `None`: what fits the link's MTU towards `peer`. More than that is cut into IP
    /// fragments by the kernel: it works, but one lost fragment loses the packet.
    pub max_packet_len_bytes: Option<usize>,
    /// A peer whose direction's MTU counts. `None`: loopback's for a loopback address, else Ethernet's.
    pub peer: Option<SocketAddr>,
    /// How many bytes of packets to hold for a receiver that is not looking. The kernel may give less
    /// (`net.core.rmem_max`, unless the process has `CAP_NET_ADMIN`): the capabilities say what it gave.
    pub receive_buffer_bytes: usize,
    /// How many bytes to queue below the socket.
    pub send_buffer_bytes: usize,
    /// Send runs of equal-size packets to one peer in one go (`UDP_SEGMENT`).
    pub gso: Offload,
    /// Receive such runs in one go (`UDP_GRO`).
    pub gro: Offload,
    /// How long `wait` looks for packets before it yields and then sleeps. A spinning thread keeps the core from
    /// the one it waits for when threads outnumber cores, so keep it well below a wake-up (about 20 us).
    pub spin: Duration,
    /// The address of an emulated machine's host, as the machine sees it: addresses of loopback (127.0.0.0/8) mean that
    /// host, so packets to them go there, and what comes from there comes from 127.0.0.1. Peers of such a port can't
    /// share an address with it. `None`: loopback is this machine.
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

/// Why a UDP port can't be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum UdpError {
    /// The address stands for all of the host's addresses, so peers could not know whom they talk to.
    #[error("can't bind a port to the unspecified address {addr}: name one of this host's addresses")]
    Unspecified {
        /// The address asked for.
        addr: SocketAddr,
    },
    /// No datagram is that long, or none at all fits.
    #[error("max_packet_len_bytes is {asked}: choose 1..={MAX_DATAGRAM_LEN_BYTES}")]
    PacketLength {
        /// The length asked for.
        asked: usize,
    },
    /// The kernel refused.
    #[error("can't {what} for {addr}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which address.
        addr: SocketAddr,
        /// What the kernel said.
        source: io::Error,
    },
}

/// What a port has counted since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct UdpStats {
    /// Packets that the kernel took.
    pub sent_packets: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// `sendmmsg` calls.
    pub send_calls: u64,
    /// Packets dropped here: unreachable or impossible destinations.
    pub send_dropped_packets: u64,
    /// Flushes that left packets queued because the kernel had no room.
    pub send_stalls: u64,
    /// Packets that arrived.
    pub received_packets: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// `recvmmsg` calls, empty ones included.
    pub receive_calls: u64,
    /// Packets dropped because they were longer than this port's.
    pub receive_truncated: u64,
    /// Messages dropped because they were empty or from no Internet address, and errors that the socket reported.
    pub receive_errors: u64,
}

impl UdpConfig {
    /// Return the address behind which the network has `addr`.
    pub fn outside(&self, addr: SocketAddr) -> SocketAddr {
        match (self.loopback_at, addr) {
            (Some(host), SocketAddr::V4(addr)) if addr.ip().is_loopback() => SocketAddr::from((host, addr.port())),
            _ => addr,
        }
    }

    /// Return the address by which peers know whoever the network has behind `addr`.
    pub(super) fn inside(&self, addr: SocketAddr) -> SocketAddr {
        match self.loopback_at {
            Some(host) if addr.ip() == IpAddr::V4(host) => SocketAddr::from((Ipv4Addr::LOCALHOST, addr.port())),
            _ => addr,
        }
    }

    /// Return the longest packet for a socket bound to `local`.
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
        if (1..=MAX_DATAGRAM_LEN_BYTES).contains(&len) { Ok(len) } else { Err(UdpError::PacketLength { asked: len }) }
    }
}

/// Return the payload of the longest datagram that goes from `local` to `peer` in one piece.
fn datagram_len_towards(local: SocketAddr, peer: SocketAddr) -> io::Result<usize> {
    let socket = UdpSocket::bind((local.ip(), 0))?;
    // Connecting a UDP socket sends nothing: it looks up the route.
    socket.connect((peer.ip(), peer.port().max(1)))?;
    let (mtu, headers) = match peer {
        SocketAddr::V4(_) => (rustix::net::sockopt::ip_mtu(&socket)?, 20 + 8),
        SocketAddr::V6(_) => (rustix::net::sockopt::ipv6_mtu(&socket)?, 40 + 8),
    };
    Ok((mtu as usize).saturating_sub(headers).min(MAX_DATAGRAM_LEN_BYTES))
}
