//! Configuration, errors and counters of a UDP port.

use super::sys;
use crate::port::Addr;
use crate::traffic_class::TrafficClass;
use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
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
    /// The longest packet in bytes; `None`: what fits the MTU of the interface towards `peer`. Packets are never
    /// fragmented: those that the interface or a link on their way does not carry are lost.
    pub max_packet_len_bytes: Option<usize>,
    /// A peer that determines the interface whose MTU is used. `None`: the interface that has the port's address.
    /// Ethernet's MTU if the system does not tell.
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
    /// The traffic class of the packets, beside which IPv4's declare ECN capability.
    pub traffic_class: TrafficClass,
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
            traffic_class: TrafficClass::default(),
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
            (None, None) => interface_datagram_len(local.ip()).unwrap_or(ETHERNET_DATAGRAM_LEN_BYTES),
        };
        if (1..=MAX_DATAGRAM_LEN_BYTES).contains(&len) {
            Ok(len)
        } else {
            Err(UdpError::PacketLength { requested: len })
        }
    }
}

/// Return the maximum payload of a datagram that the interface towards `peer` sends without fragmentation. What ICMP
/// messages say about the route does not matter: they can be forged.
fn datagram_len_towards(local: SocketAddr, peer: SocketAddr) -> io::Result<usize> {
    let socket = UdpSocket::bind((local.ip(), 0))?;
    // Connecting a UDP socket only looks up the route.
    socket.connect((peer.ip(), peer.port().max(1)))?;
    if let Some(len) = interface_datagram_len(socket.local_addr()?.ip()) {
        return Ok(len);
    }
    // No interface has the address, as in most of 127.0.0.0/8.
    let mtu = match peer {
        SocketAddr::V4(_) => rustix::net::sockopt::ip_mtu(&socket)?,
        SocketAddr::V6(_) => rustix::net::sockopt::ipv6_mtu(&socket)?,
    };
    Ok(datagram_len(mtu as usize, peer.ip()))
}

/// Return the maximum payload of a datagram that the interface with this address sends without fragmentation; `None`
/// if the system does not tell, or if the MTU is less than every IP link has.
fn interface_datagram_len(local: IpAddr) -> Option<usize> {
    let mut interfaces = getifaddrs().ok()?;
    let interface = interfaces.find(|interface| ip_of(interface) == Some(local))?;
    let any = if local.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    let mtu = sys::interface_mtu(socket.as_fd(), &interface.interface_name).ok()?;
    (mtu >= MTU_MIN_BYTES).then(|| datagram_len(mtu, local))
}

fn ip_of(interface: &InterfaceAddress) -> Option<IpAddr> {
    let addr = interface.address.as_ref()?;
    match (addr.as_sockaddr_in(), addr.as_sockaddr_in6()) {
        (Some(v4), _) => Some(v4.ip().into()),
        (None, Some(v6)) => Some(v6.ip().into()),
        (None, None) => None,
    }
}

/// Return the maximum payload of a datagram of the address's family in a packet of `mtu` bytes.
fn datagram_len(mtu: usize, ip: IpAddr) -> usize {
    let headers = if ip.is_ipv4() { 20 + 8 } else { 40 + 8 };
    mtu.saturating_sub(headers).min(MAX_DATAGRAM_LEN_BYTES)
}

/// The least MTU that is believed: every host accepts an IPv4 packet of this length (RFC 791).
const MTU_MIN_BYTES: usize = 576;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_fill_the_mtu_of_the_interface_with_the_address() {
        let mut count = 0;
        for interface in getifaddrs().expect("interfaces") {
            let Some(ip) = ip_of(&interface) else { continue };
            let text = std::fs::read_to_string(format!("/sys/class/net/{}/mtu", interface.interface_name));
            let Ok(mtu) = text.map(|text| text.trim().parse::<usize>().expect("a number")) else { continue };
            let headers = if ip.is_ipv4() { 28 } else { 48 };
            let expected = Some((mtu - headers).min(MAX_DATAGRAM_LEN_BYTES));
            assert_eq!(interface_datagram_len(ip), expected, "{}", interface.interface_name);
            count += 1;
        }
        assert!(count > 0, "loopback, at least");
        // Documentation's (RFC 5737): no interface has it.
        assert_eq!(interface_datagram_len(Ipv4Addr::new(198, 51, 100, 1).into()), None);
    }
}
