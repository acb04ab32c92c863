//! Captures for Wireshark: the packets of a port, in pcapng.
//!
//! [`PcapWriter`] is a port that writes what passes through another one. Each packet gets the IP and UDP headers that
//! it has, or would have, on the wire, so that every tool which reads captures shows it (link type RAW), and
//! `wireshark/sumac.lua` dissects it like one that was captured on a network interface. RDMA and emulated ports have no
//! UDP ports: queue pairs appear as the low 16 bits of their number at the GID, and port `n` of an emulated fabric as
//! `fd53:756d:6163::n`.
//!
//! A capture contains the keys of children (PROTOCOL 10) and all data: whoever reads it can send as them.
//!
//! Format: draft-ietf-opsawg-pcapng, sections 4.1 to 4.3; one section, one interface for each port, timestamps in
//! nanoseconds.
//!
//! Invariants:
//! - a block reaches the sink in one call, so several ports can share a capture;
//! - nothing is allocated, and no packet is held back.

#[cfg(feature = "std")]
mod file;
#[cfg(test)]
mod tests;

#[cfg(feature = "std")]
pub use file::IoSink;

use super::trace::{Direction, TraceSink, TracedPacket, Tracer};
use super::{Addr, Ecn};
use core::net::{IpAddr, Ipv6Addr};
use heapless::Vec;

/// A port that writes its packets to a capture.
pub type PcapWriter<P, W> = Tracer<P, Pcap<W>>;

/// Takes the bytes of a capture.
pub trait PcapSink {
    /// Append `parts`, one after the other. No other bytes may come between them.
    fn write(&mut self, parts: &[&[u8]]);

    /// Pass on what is buffered.
    fn flush(&mut self) {}
}

/// Writes the packets of one port to a capture.
#[derive(Debug)]
pub struct Pcap<W> {
    sink: W,
    /// The interface's number in the capture.
    interface: u32,
    local_addr: Addr,
    /// The Unix time of [`Instant::ZERO`](crate::time::Instant::ZERO), in nanoseconds.
    epoch_ns: u64,
}

/// The section header block's type.
const SECTION_HEADER: u32 = 0x0a0d_0d0a;

/// The interface description block's type.
const INTERFACE_DESCRIPTION: u32 = 1;

/// The enhanced packet block's type.
const ENHANCED_PACKET: u32 = 6;

/// The link type of packets that begin with an IPv4 or IPv6 header (LINKTYPE_RAW).
const LINK_TYPE: u16 = 101;

/// UDP's number as a protocol of IP.
const UDP: u8 = 17;

/// The lengths of IP's and UDP's headers in bytes.
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
const UDP_LEN: usize = 8;

impl<W: PcapSink> Pcap<W> {
    /// Begin a capture, and add `local_addr` to it as interface 0. `epoch_ns` is the Unix time of
    /// [`Instant::ZERO`](crate::time::Instant::ZERO), in nanoseconds.
    pub fn new(mut sink: W, local_addr: Addr, epoch_ns: u64) -> Self {
        begin(&mut sink);
        Self::add(sink, 0, "", local_addr, epoch_ns)
    }

    /// Add a port to a capture that [`begin`] has begun. Interfaces are numbered in the order in which they are added;
    /// `interface` is this one's number, and `name` its name.
    pub fn add(mut sink: W, interface: u32, name: &str, local_addr: Addr, epoch_ns: u64) -> Self {
        // The length of an option has 16 bits; no name of an interface is that long.
        let name = &name.as_bytes()[..name.len().min(256)];
        let pad = &[0; 3][..name.len().next_multiple_of(4) - name.len()];
        let total_len_bytes = 32 + 4 + name.len() + pad.len();
        let mut head: Vec<u8, 32> = Vec::new();
        put(&mut head, &INTERFACE_DESCRIPTION.to_le_bytes());
        put(&mut head, &(total_len_bytes as u32).to_le_bytes());
        put(&mut head, &LINK_TYPE.to_le_bytes());
        // Reserved, and no limit for the length of packets.
        put(&mut head, &[0; 6]);
        // Option if_tsresol: units of 10^-9 seconds.
        put(&mut head, &[9, 0, 1, 0, 9, 0, 0, 0]);
        // Option if_name, then the end of options, which has no content.
        put(&mut head, &[2, 0]);
        put(&mut head, &(name.len() as u16).to_le_bytes());
        let mut tail: Vec<u8, 8> = Vec::new();
        put(&mut tail, &[0; 4]);
        put(&mut tail, &(total_len_bytes as u32).to_le_bytes());
        sink.write(&[&head, name, pad, &tail]);
        Self { sink, interface, local_addr, epoch_ns }
    }

    /// Return the sink.
    pub fn into_inner(self) -> W {
        self.sink
    }
}

/// Begin a capture: write its section header.
pub fn begin<W: PcapSink>(sink: &mut W) {
    let mut block: Vec<u8, 28> = Vec::new();
    put(&mut block, &SECTION_HEADER.to_le_bytes());
    put(&mut block, &28_u32.to_le_bytes());
    // The byte order, version 1.0, and an unknown length.
    put(&mut block, &0x1a2b_3c4d_u32.to_le_bytes());
    put(&mut block, &[1, 0, 0, 0]);
    put(&mut block, &u64::MAX.to_le_bytes());
    put(&mut block, &28_u32.to_le_bytes());
    sink.write(&[&block]);
}

impl<W: PcapSink> TraceSink for Pcap<W> {
    fn packet(&mut self, packet: &TracedPacket<'_>) {
        let headers = ip_headers(self.local_addr, packet);
        let len_bytes = headers.len() + packet.header.len() + packet.payload.len();
        let pad = &[0; 3][..len_bytes.next_multiple_of(4) - len_bytes];
        let total_len_bytes = (28 + len_bytes + pad.len() + 16) as u32;
        let at_ns = self.epoch_ns.saturating_add(packet.at.as_nanos());
        let mut head: Vec<u8, 28> = Vec::new();
        put(&mut head, &ENHANCED_PACKET.to_le_bytes());
        put(&mut head, &total_len_bytes.to_le_bytes());
        put(&mut head, &self.interface.to_le_bytes());
        put(&mut head, &((at_ns >> 32) as u32).to_le_bytes());
        put(&mut head, &(at_ns as u32).to_le_bytes());
        // The captured and the original length.
        put(&mut head, &(len_bytes as u32).to_le_bytes());
        put(&mut head, &(len_bytes as u32).to_le_bytes());
        // Option epb_flags: inbound or outbound. Then the end of options.
        let direction = match packet.direction {
            Direction::Received => 1,
            Direction::Sent => 2,
        };
        let mut tail: Vec<u8, 16> = Vec::new();
        put(&mut tail, &[2, 0, 4, 0, direction, 0, 0, 0, 0, 0, 0, 0]);
        put(&mut tail, &total_len_bytes.to_le_bytes());
        self.sink.write(&[&head, &headers, packet.header, packet.payload, pad, &tail]);
    }

    fn flush(&mut self) {
        self.sink.flush();
    }
}

/// Append bytes that fit: callers size their buffers for what they write.
fn put<const N: usize>(buffer: &mut Vec<u8, N>, bytes: &[u8]) {
    let fits = buffer.extend_from_slice(bytes);
    debug_assert!(fits.is_ok(), "a block's part exceeds its buffer");
}

/// Return the headers of IP and UDP for a packet.
fn ip_headers(local_addr: Addr, packet: &TracedPacket<'_>) -> Vec<u8, { IPV6_LEN + UDP_LEN }> {
    let (from, to) = match packet.direction {
        Direction::Received => (packet.peer, local_addr),
        Direction::Sent => (local_addr, packet.peer),
    };
    let ((from_ip, from_port), (to_ip, to_port)) = (socket_addr(from), socket_addr(to));
    // A packet that exceeds what a length field holds was none of UDP's; the field then has its highest value.
    let field = |len_bytes: usize| u16::try_from(len_bytes).unwrap_or(u16::MAX);
    let udp_len_bytes = UDP_LEN + packet.header.len() + packet.payload.len();
    // Hosted ports send packets as ECN-capable: ECT(0).
    let class: u8 = if packet.ecn == Ecn::Ce { 0b11 } else { 0b10 };
    let mut udp: Vec<u8, UDP_LEN> = Vec::new();
    put(&mut udp, &from_port.to_be_bytes());
    put(&mut udp, &to_port.to_be_bytes());
    put(&mut udp, &field(udp_len_bytes).to_be_bytes());
    put(&mut udp, &[0; 2]);
    let mut headers = Vec::new();
    if let (IpAddr::V4(from), IpAddr::V4(to)) = (from_ip, to_ip) {
        let mut ip: Vec<u8, IPV4_LEN> = Vec::new();
        put(&mut ip, &[0x45, class]);
        put(&mut ip, &field(IPV4_LEN + udp_len_bytes).to_be_bytes());
        // No identification, "don't fragment", 64 hops; the checksum follows.
        put(&mut ip, &[0, 0, 0x40, 0, 64, UDP, 0, 0]);
        put(&mut ip, &from.octets());
        put(&mut ip, &to.octets());
        let sum = Checksum::default().add(&ip).finish();
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        put(&mut headers, &ip);
        // Over IPv4, UDP's checksum is optional.
    } else {
        let (from, to) = (ipv6(from_ip), ipv6(to_ip));
        put(&mut headers, &[0x60, class << 4, 0, 0]);
        put(&mut headers, &field(udp_len_bytes).to_be_bytes());
        put(&mut headers, &[UDP, 64]);
        put(&mut headers, &from.octets());
        put(&mut headers, &to.octets());
        let pseudo = Checksum::default().add(&from.octets()).add(&to.octets());
        let pseudo = pseudo.add(&(udp_len_bytes as u32).to_be_bytes()).add(&[0, 0, 0, UDP]);
        let sum = pseudo.add(&udp).add(packet.header).add(packet.payload).finish();
        // 0 would mean that there is none (RFC 768).
        udp[6..8].copy_from_slice(&if sum == 0 { u16::MAX } else { sum }.to_be_bytes());
    }
    put(&mut headers, &udp);
    headers
}

/// Return the IP address and UDP port by which a capture shows a port.
fn socket_addr(addr: Addr) -> (IpAddr, u16) {
    match addr {
        Addr::Udp(addr) => (addr.ip(), addr.port()),
        Addr::Verbs(addr) => (Ipv6Addr::from(addr.gid).to_canonical(), addr.qpn as u16),
        Addr::Emu(node) => {
            let (high, low) = ((node >> 16) as u16, node as u16);
            (Ipv6Addr::new(0xfd53, 0x756d, 0x6163, 0, 0, 0, high, low).into(), 1)
        }
    }
}

/// Return an address as one of IPv6, for a packet whose other address is.
const fn ipv6(addr: IpAddr) -> Ipv6Addr {
    match addr {
        IpAddr::V4(addr) => addr.to_ipv6_mapped(),
        IpAddr::V6(addr) => addr,
    }
}

/// The checksum of IP and UDP (RFC 1071).
#[derive(Clone, Copy, Default)]
struct Checksum {
    sum: u64,
    /// An odd number of bytes came before.
    is_odd: bool,
}

impl Checksum {
    fn add(mut self, bytes: &[u8]) -> Self {
        for &byte in bytes {
            self.sum += u64::from(byte) << if self.is_odd { 0 } else { 8 };
            self.is_odd = !self.is_odd;
        }
        self
    }

    fn finish(self) -> u16 {
        let mut sum = self.sum;
        while sum > 0xffff {
            sum = (sum >> 16) + (sum & 0xffff);
        }
        !(sum as u16)
    }
}
