//! A port over a real UDP socket (Linux).
//!
//! Many packets move per system call: `recvmmsg` and `sendmmsg`, and, where the kernel has them, segmentation
//! offloads (`UDP_SEGMENT`, `UDP_GRO`), with which a run of packets to one peer crosses the kernel's stack once.
//! On loopback, where a small datagram costs microseconds, that is a factor of ten and more (`benches/udp.rs`).
//!
//! Invariants:
//! - sending and receiving take no lock and allocate nothing: [`UdpPort::bind`] creates all buffers;
//! - no call but [`WaitPort::wait`] blocks;
//! - everything is sent from one socket, so that peers see one address; each shared (multicast) address has a socket of
//!   its own to receive on;
//! - packets are never fragmented, here or on their way: those that a link does not carry are lost, and what ICMP
//!   messages say is ignored ([`path_mtu`](crate::path_mtu) finds the length that arrives);
//! - packets that the kernel has no room for stay queued, in order; packets that cannot be sent are dropped and
//!   counted.
//!
//! A port ignores the `now` that it is given: the kernel's clock drives the network.

mod config;
mod multicast;
mod rx;
mod sys;
#[cfg(test)]
mod tests;
mod tx;
pub(crate) mod wait;

pub use config::{MAX_DATAGRAM_LEN_BYTES, Offload, UdpConfig, UdpError, UdpStats};
pub use wait::Waker;

use crate::port::{Addr, Capabilities, Ecn, Gather, MulticastPort, Port, RxToken, Train, TxToken, WaitPort, Wake};
use crate::time::Instant;
use crate::traffic_class::TrafficClass;
use multicast::MulticastGroups;
use rustix::net::sockopt;
use rx::{Next, RxQueue};
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;
use tx::TxQueue;

/// The maximum number of packets in the transmit queue.
const TX_PACKETS: usize = 256;

/// The target size of the transmit arena: it fits a second-level cache.
const TX_ARENA_BYTES: usize = 512 << 10;

/// The minimum number of packets that the arena holds, however long they are.
const TX_MIN_PACKETS: usize = 32;

/// The maximum number of packets in one gathered send.
const GATHER_PACKETS_MAX: usize = 128;

/// A kernel buffer of `n` bytes holds at least `n * 2 / 5` bytes of packets of 1 KiB and more: the kernel counts
/// allocated memory (`truesize`), which is rounded up to powers of two and includes about 600 bytes of overhead a
/// packet.
const TRUESIZE_RATIO: (usize, usize) = (2, 5);

/// A port over a UDP socket.
pub struct UdpPort {
    socket: UdpSocket,
    local_addr: SocketAddr,
    config: UdpConfig,
    capabilities: Capabilities,
    groups: MulticastGroups,
    rx: RxQueue,
    tx: TxQueue,
    gro: bool,
    waker: Waker,
    /// Another descriptor that ends a wait.
    watched: Option<OwnedFd>,
    stats: UdpStats,
}

impl UdpPort {
    /// Open a port on `addr`, one of this host's addresses; UDP port 0 lets the kernel choose.
    ///
    /// # Errors
    /// See [`UdpError`].
    pub fn bind(addr: SocketAddr, config: &UdpConfig) -> Result<Self, UdpError> {
        if addr.ip().is_unspecified() {
            return Err(UdpError::Unspecified { addr });
        }
        let max_packet_len_bytes = config.packet_len(addr)?;
        let open = || -> io::Result<(UdpSocket, SocketAddr, usize, Waker)> {
            let socket = UdpSocket::bind(addr)?;
            socket.set_nonblocking(true)?;
            let receive_buffer_bytes = set_buffers(&socket, config)?;
            let local_addr = socket.local_addr()?;
            multicast::prepare(&socket, local_addr);
            mark_packets(&socket, local_addr, config.traffic_class)?;
            sys::forbid_fragments(socket.as_fd(), local_addr.is_ipv4())?;
            Ok((socket, local_addr, receive_buffer_bytes, Waker::new()?))
        };
        let (socket, local_addr, receive_buffer_bytes, waker) =
            open().map_err(|source| UdpError::Io { what: "open a UDP socket", addr, source })?;
        let gso = config.gso == Offload::Auto && sys::has_gso(socket.as_fd());
        let gro = config.gro == Offload::Auto && sys::enable_gro(socket.as_fd());
        let arena_len_bytes = TX_ARENA_BYTES.max(TX_MIN_PACKETS * max_packet_len_bytes.next_multiple_of(64));
        let burst_packets = (arena_len_bytes / max_packet_len_bytes.next_multiple_of(64)).min(TX_PACKETS);
        Ok(Self {
            local_addr,
            config: *config,
            groups: MulticastGroups::new(),
            capabilities: Capabilities::new(max_packet_len_bytes, receive_buffer_bytes, burst_packets),
            rx: RxQueue::new(max_packet_len_bytes, gro),
            tx: TxQueue::new(TX_PACKETS, arena_len_bytes, max_packet_len_bytes, gso),
            gro,
            waker,
            watched: None,
            stats: UdpStats::default(),
            socket,
        })
    }

    /// Return the address that peers send to.
    pub const fn local_addr(&self) -> Addr {
        Addr::Udp(self.local_addr)
    }

    /// Return the port's counters.
    pub fn stats(&self) -> UdpStats {
        self.stats
    }

    /// Return whether runs of packets leave segmented by the kernel, and arrive coalesced.
    pub fn offloads(&self) -> (bool, bool) {
        (self.tx.gso(), self.gro)
    }

    /// Return a handle that wakes this port's waiting thread from any other.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Let waits also end with [`Wake::Woken`] whenever `file` is readable (level-triggered).
    pub fn watch(&mut self, file: OwnedFd) {
        self.watched = Some(file);
    }

    /// Return the descriptor that becomes readable when packets arrive, for an event loop. Receive until there are no
    /// packets before waiting on it: packets already fetched in a batch do not make it readable.
    /// [`MulticastPort::join`] may change the descriptor.
    pub fn poll_fd(&self) -> BorrowedFd<'_> {
        self.groups.poll_fd().unwrap_or(self.socket.as_fd())
    }

    /// Fetch packets from the kernel if the batch is used up; return whether there are any.
    fn fill(&mut self) -> bool {
        if self.groups.is_empty() {
            return self.rx.fill(self.socket.as_fd(), &mut self.stats);
        }
        if self.rx.has_packet() {
            return true;
        }
        let Self { groups, rx, stats, socket, .. } = self;
        groups.fill_in_turn(socket.as_fd(), |fd| rx.fill(fd, stats))
    }
}

impl std::fmt::Debug for UdpPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UdpPort")
            .field("local_addr", &self.local_addr)
            .field("capabilities", &self.capabilities)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

/// Set the traffic class, declare this end ECN-capable and ask for marks on received packets. Where the kernel does not
/// support ECN (and over IPv6, for now), only losses signal congestion.
fn mark_packets(socket: &UdpSocket, local_addr: SocketAddr, class: TrafficClass) -> io::Result<()> {
    /// ECN-capable transport, ECT(0) (RFC 3168, section 5).
    const ECT_0: u8 = 0b10;
    let is_default = class == TrafficClass::default();
    if local_addr.is_ipv4() {
        let enabled = sockopt::set_ip_recvtos(socket, true);
        let ecn = if enabled.is_ok() { ECT_0 } else { 0 };
        match sockopt::set_ip_tos(socket, class.bits() | ecn) {
            Err(error) if !is_default => return Err(error.into()),
            // Optional: without marks, losses signal congestion.
            Ok(()) | Err(_) => {}
        }
    } else if !is_default {
        sockopt::set_ipv6_tclass(socket, class.bits().into())?;
    }
    Ok(())
}

/// Packets in the receive batch.
#[derive(Debug)]
pub struct UdpRx<'a> {
    from: SocketAddr,
    packets: Train<'a>,
    is_marked: bool,
}

impl RxToken for UdpRx<'_> {
    fn ecn(&self) -> Ecn {
        Ecn::from_mark(self.is_marked)
    }

    fn consume<R>(self, f: impl FnOnce(Addr, &[u8]) -> R) -> R {
        f(Addr::Udp(self.from), self.packets.first())
    }

    fn consume_train<R>(self, f: impl FnOnce(Addr, Train<'_>) -> R) -> R {
        f(Addr::Udp(self.from), self.packets)
    }
}

/// A buffer in the transmit arena.
pub struct UdpTx<'a> {
    tx: &'a mut TxQueue,
    local_addr: SocketAddr,
    config: &'a UdpConfig,
    stats: &'a mut UdpStats,
}

impl std::fmt::Debug for UdpTx<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UdpTx").field("local_addr", &self.local_addr).finish_non_exhaustive()
    }
}

impl TxToken for UdpTx<'_> {
    fn consume<R>(self, to: Addr, f: impl FnOnce(&mut [u8]) -> (usize, R)) -> R {
        // `transmit` checked that there is room, and has borrowed the queue since.
        let buffer = self.tx.reserve().unwrap_or_default();
        let room = buffer.len();
        let (len_bytes, result) = f(buffer);
        assert!(len_bytes <= room, "a packet of {len_bytes} bytes was claimed in a buffer of {room}");
        // A packet to an address that the socket cannot reach is dropped and counted.
        match self.config.reachable(self.local_addr, to) {
            Some(to) if len_bytes > 0 => self.tx.commit(to, len_bytes),
            None if len_bytes > 0 => self.stats.send_dropped_packets += 1,
            _ => {}
        }
        result
    }
}

impl Port for UdpPort {
    type Rx<'a> = UdpRx<'a>;
    type Tx<'a> = UdpTx<'a>;

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn receive(&mut self, now: Instant) -> Option<UdpRx<'_>> {
        self.receive_train(now, 1)
    }

    fn receive_train(&mut self, _now: Instant, packets_max: usize) -> Option<UdpRx<'_>> {
        if !self.fill() {
            return None;
        }
        let Next { from, is_marked, message, range, segment_len_bytes } = self.rx.advance(packets_max)?;
        let from = self.config.peer_addr_of(from);
        Some(UdpRx { from, is_marked, packets: Train::new(self.rx.bytes(message, range), segment_len_bytes) })
    }

    fn transmit(&mut self, _now: Instant) -> Option<UdpTx<'_>> {
        let Self { tx, local_addr, config, stats, .. } = self;
        tx.reserve()?;
        Some(UdpTx { tx, local_addr: *local_addr, config, stats })
    }

    fn room(&mut self, _now: Instant) -> usize {
        self.tx.room().min(GATHER_PACKETS_MAX)
    }

    fn transmit_gather<'a>(&mut self, packets: impl Iterator<Item = Gather<'a>>, _now: Instant) {
        // Room refers to the arena, where packets go that the kernel does not take at once.
        let mut room = self.tx.room().min(GATHER_PACKETS_MAX);
        let mut borrowed: heapless::Vec<&'a [u8], GATHER_PACKETS_MAX> = heapless::Vec::new();
        for Gather { to, header, payload } in packets {
            let Some(to) = self.config.reachable(self.local_addr, to).filter(|_| room > 0) else {
                self.stats.send_dropped_packets += 1;
                continue;
            };
            room -= 1;
            // Cannot fail: the array holds `GATHER_PACKETS_MAX`, the bound of `room`.
            let index = borrowed.len();
            if borrowed.push(payload).is_ok() {
                self.tx.queue_borrowed(to, header, index, payload.len());
            }
        }
        self.tx.flush_borrowed(self.socket.as_fd(), &borrowed, &mut self.stats);
    }

    fn flush(&mut self, _now: Instant) {
        self.tx.flush(self.socket.as_fd(), &mut self.stats);
    }
}

impl MulticastPort for UdpPort {
    fn join(&mut self, group: Addr) -> bool {
        // Multicast does not cross an emulated machine's network in either direction.
        self.config.loopback_at.is_none()
            && self.groups.join(group, self.socket.as_fd(), self.local_addr, &self.config, self.gro).is_ok()
    }

    fn leave(&mut self, group: Addr) {
        self.groups.leave(group);
    }
}

impl WaitPort for UdpPort {
    fn wait(&mut self, timeout: Option<Duration>) -> Wake {
        wait::wait_on(self, timeout)
    }
}

/// Size the socket's buffers; return how many bytes of packets the receive buffer holds.
fn set_buffers(socket: &UdpSocket, config: &UdpConfig) -> io::Result<usize> {
    // The kernel doubles the requested size to account for its overhead (socket(7)); both figures include it.
    let (part, whole) = TRUESIZE_RATIO;
    let requested = config.receive_buffer_bytes.saturating_mul(whole).div_ceil(2 * part).min(i32::MAX as usize / 2);
    // With CAP_NET_ADMIN this exceeds the system's limit; otherwise the limit applies.
    if sockopt::set_socket_recv_buffer_size_force(socket, requested).is_err() {
        sockopt::set_socket_recv_buffer_size(socket, requested)?;
    }
    let send = config.send_buffer_bytes.min(i32::MAX as usize / 2);
    if sockopt::set_socket_send_buffer_size_force(socket, send).is_err() {
        sockopt::set_socket_send_buffer_size(socket, send)?;
    }
    Ok(sockopt::socket_recv_buffer_size(socket)? / whole * part)
}
