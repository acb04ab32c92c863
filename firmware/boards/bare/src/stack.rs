//! The network stack of one interface (ARP, IP, UDP, TCP), as a [`Port`].
//!
//! Invariants:
//! - packets to loopback addresses go to the gateway, and packets from the gateway appear to come from 127.0.0.1
//!   ([`BoardOptions`]): a node compares addresses, so both directions are translated;
//! - a packet that `receive` hands out is removed from the socket; a packet that does not fit the transmit queue is not
//!   accepted, and [`Port::room`] never overstates the room.

use crate::options::BoardOptions;
use core::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use smoltcp::iface::{Config, Interface, PollIngressSingleResult, PollResult, SocketHandle, SocketSet, SocketStorage};
use smoltcp::phy::Device;
use smoltcp::socket::{tcp, udp};
use smoltcp::storage::PacketBuffer;
use smoltcp::wire::{EthernetAddress, HardwareAddress, IpAddress, IpCidr, IpEndpoint};
use sumac_hal::port::{Addr, Capabilities, Gather, Port, RxToken, TxToken};
use sumac_hal::time::Instant;

/// The longest packet in bytes: an Ethernet frame of 1,500 bytes without IP's and UDP's headers.
pub const MAX_PACKET_LEN_BYTES: usize = 1500 - 20 - 8;

/// The capacity of the receive queue in packets, unless the buffers have another one.
pub const RX_PACKETS: usize = 256;

/// The capacity of the transmit queue in packets, unless the buffers have another one.
pub const TX_PACKETS: usize = 64;

/// The bytes that each entry of the receive queue is guaranteed to hold: entries are as long as the longest packet, and
/// packets of this length and more take one each.
pub const PACKET_GUARANTEED_LEN_BYTES: usize = 1024;

/// Frames processed at most before `receive` reports that there is no packet, if they are not for the port.
const FRAMES_PER_POLL: usize = 32;

/// The buffers of the control connection, in bytes.
const CONTROL_BUFFER_BYTES: usize = 4096;

/// The buffers of a stack, for `RX` received packets and `TX` to be sent: put them in a `static` cell. They take 1.5
/// KiB for each packet, and 8 KiB for the control connection.
#[derive(Debug)]
pub struct Buffers<const RX: usize = RX_PACKETS, const TX: usize = TX_PACKETS> {
    rx: [udp::PacketMetadata; RX],
    rx_bytes: [[u8; MAX_PACKET_LEN_BYTES]; RX],
    tx: [udp::PacketMetadata; TX],
    tx_bytes: [[u8; MAX_PACKET_LEN_BYTES]; TX],
    control_rx: [u8; CONTROL_BUFFER_BYTES],
    control_tx: [u8; CONTROL_BUFFER_BYTES],
    sockets: [SocketStorage<'static>; 2],
}

impl<const RX: usize, const TX: usize> Buffers<RX, TX> {
    /// Return empty buffers.
    pub const fn new() -> Self {
        const { assert!(RX > 0 && TX > 0, "a stack without room moves no packets") };
        Self {
            rx: [udp::PacketMetadata::EMPTY; RX],
            rx_bytes: [[0; MAX_PACKET_LEN_BYTES]; RX],
            tx: [udp::PacketMetadata::EMPTY; TX],
            tx_bytes: [[0; MAX_PACKET_LEN_BYTES]; TX],
            control_rx: [0; CONTROL_BUFFER_BYTES],
            control_tx: [0; CONTROL_BUFFER_BYTES],
            sockets: [SocketStorage::EMPTY; 2],
        }
    }
}

impl<const RX: usize, const TX: usize> Default for Buffers<RX, TX> {
    fn default() -> Self {
        Self::new()
    }
}

/// One network interface with a UDP socket for packets and a TCP socket for control.
pub struct Stack<D: Device> {
    interface: Interface,
    device: D,
    sockets: SocketSet<'static>,
    data: SocketHandle,
    control: SocketHandle,
    gateway: Ipv4Addr,
    advertised: SocketAddrV4,
    /// The capacities of the queues in packets.
    rx_packets: usize,
    tx_packets: usize,
    /// Packets queued since the transmit queue was last empty. smoltcp then restarts at the beginning of its ring, so
    /// the remaining entries are contiguous.
    queued: usize,
}

impl<D: Device> core::fmt::Debug for Stack<D> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Stack").field("advertised", &self.advertised).finish_non_exhaustive()
    }
}

/// Convert to smoltcp's time.
pub(crate) fn smoltcp_time(now: Instant) -> smoltcp::time::Instant {
    smoltcp::time::Instant::from_micros(i64::try_from(now.as_nanos() / 1_000).unwrap_or(i64::MAX))
}

impl<D: Device> Stack<D> {
    /// Set up the interface of `device` with the MAC address `mac`; `seed` makes sequence numbers hard to predict.
    pub fn new<const RX: usize, const TX: usize>(
        mut device: D,
        mac: [u8; 6],
        options: &BoardOptions,
        buffers: &'static mut Buffers<RX, TX>,
        seed: u64,
        now: Instant,
    ) -> Self {
        let mut config = Config::new(HardwareAddress::Ethernet(EthernetAddress(mac)));
        config.random_seed = seed;
        let mut interface = Interface::new(config, &mut device, smoltcp_time(now));
        interface.update_ip_addrs(|addrs| {
            // The table is empty and has room for two.
            let _ = addrs.push(IpCidr::Ipv4(options.ip));
        });
        // So is the routing table.
        let _ = interface.routes_mut().add_default_ipv4_route(options.gateway);
        let Buffers { rx, rx_bytes, tx, tx_bytes, control_rx, control_tx, sockets } = buffers;
        let mut data = udp::Socket::new(
            PacketBuffer::new(&mut rx[..], rx_bytes.as_flattened_mut()),
            PacketBuffer::new(&mut tx[..], tx_bytes.as_flattened_mut()),
        );
        // Fails only for port 0, which options exclude, and for an open socket.
        let _ = data.bind(options.listen);
        let control =
            tcp::Socket::new(tcp::SocketBuffer::new(&mut control_rx[..]), tcp::SocketBuffer::new(&mut control_tx[..]));
        let mut sockets = SocketSet::new(&mut sockets[..]);
        let (data, control) = (sockets.add(data), sockets.add(control));
        let (gateway, advertised) = (options.gateway, options.data);
        let (rx_packets, tx_packets) = (RX, TX);
        Self { interface, device, sockets, data, control, gateway, advertised, rx_packets, tx_packets, queued: 0 }
    }

    /// Return the address that peers send to.
    pub const fn local_addr(&self) -> Addr {
        Addr::Udp(SocketAddr::V4(self.advertised))
    }

    /// Return the NIC.
    pub const fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Return the control connection's socket, and the context for `connect`.
    pub(crate) fn control(&mut self) -> (&mut tcp::Socket<'static>, &mut smoltcp::iface::Context) {
        (self.sockets.get_mut(self.control), self.interface.context())
    }

    /// Translate a peer's address to its address on the network.
    pub(crate) fn to_network_addr(&self, addr: SocketAddrV4) -> IpEndpoint {
        let ip = if addr.ip().is_loopback() { self.gateway } else { *addr.ip() };
        IpEndpoint::new(IpAddress::Ipv4(ip), addr.port())
    }

    /// Process received frames and send queued ones, a bounded number.
    pub(crate) fn poll(&mut self, now: Instant) {
        for _ in 0..FRAMES_PER_POLL {
            if !self.take_frame(now) {
                break;
            }
        }
        self.send_queued(now);
    }

    /// Return when to poll again if nothing arrives.
    pub(crate) fn poll_at(&mut self, now: Instant) -> Option<Instant> {
        let at = self.interface.poll_at(smoltcp_time(now), &self.sockets)?;
        let micros = u64::try_from(at.total_micros()).unwrap_or(0);
        Some(Instant::from_nanos(micros.saturating_mul(1_000)).max(now))
    }

    fn take_frame(&mut self, now: Instant) -> bool {
        let taken = self.interface.poll_ingress_single(smoltcp_time(now), &mut self.device, &mut self.sockets);
        !matches!(taken, PollIngressSingleResult::None)
    }

    fn send_queued(&mut self, now: Instant) {
        // Each call sends one packet of each socket.
        for _ in 0..self.tx_packets {
            if self.interface.poll_egress(smoltcp_time(now), &mut self.device, &mut self.sockets) == PollResult::None {
                break;
            }
        }
        if self.sockets.get_mut::<udp::Socket<'_>>(self.data).send_queue() == 0 {
            self.queued = 0;
        }
    }

    /// Queue a packet of `len_bytes` that `fill` writes; ignored if the peer is not an IPv4 address.
    fn queue(&mut self, to: Addr, len_bytes: usize, fill: impl FnOnce(&mut [u8])) {
        let Addr::Udp(SocketAddr::V4(to)) = to else { return };
        let to = self.to_network_addr(to);
        if let Ok(buffer) = self.sockets.get_mut::<udp::Socket<'_>>(self.data).send(len_bytes, to) {
            fill(buffer);
            self.queued += 1;
        }
    }
}

impl<D: Device> Port for Stack<D> {
    type Rx<'a>
        = RxPacket<'a>
    where
        Self: 'a;
    type Tx<'a>
        = Room<'a, D>
    where
        Self: 'a;

    fn capabilities(&self) -> Capabilities {
        let buffered = self.rx_packets * PACKET_GUARANTEED_LEN_BYTES;
        Capabilities::new(MAX_PACKET_LEN_BYTES, buffered, self.tx_packets)
    }

    fn receive(&mut self, now: Instant) -> Option<RxPacket<'_>> {
        if self.queued > 0 {
            // A packet may have waited for an ARP reply that has arrived.
            self.send_queued(now);
        }
        for _ in 0..FRAMES_PER_POLL {
            if self.sockets.get_mut::<udp::Socket<'_>>(self.data).can_recv() {
                break;
            }
            if !self.take_frame(now) {
                return None;
            }
        }
        let gateway = self.gateway;
        let (bytes, meta) = self.sockets.get_mut::<udp::Socket<'_>>(self.data).recv().ok()?;
        let IpAddress::Ipv4(ip) = meta.endpoint.addr;
        let ip = if ip == gateway { Ipv4Addr::LOCALHOST } else { ip };
        let from = Addr::Udp(SocketAddr::new(IpAddr::V4(ip), meta.endpoint.port));
        Some(RxPacket { from, bytes })
    }

    fn transmit(&mut self, now: Instant) -> Option<Room<'_, D>> {
        (self.room(now) > 0).then_some(Room { stack: self })
    }

    fn room(&mut self, _now: Instant) -> usize {
        self.tx_packets.saturating_sub(self.queued)
    }

    fn transmit_gather<'a>(&mut self, packets: impl Iterator<Item = Gather<'a>>, now: Instant) {
        for Gather { to, header, payload } in packets.take(self.room(now)) {
            self.queue(to, header.len() + payload.len(), |buffer| {
                let (head, rest) = buffer.split_at_mut(header.len());
                head.copy_from_slice(header);
                rest.copy_from_slice(payload);
            });
        }
        self.flush(now);
    }

    fn flush(&mut self, now: Instant) {
        self.send_queued(now);
        if self.queued > 0 {
            // The packets may wait for an ARP reply: process received frames.
            self.poll(now);
        }
    }
}

/// A received packet.
#[derive(Debug)]
pub struct RxPacket<'a> {
    from: Addr,
    bytes: &'a [u8],
}

impl RxToken for RxPacket<'_> {
    fn consume<R>(self, f: impl FnOnce(Addr, &[u8]) -> R) -> R {
        f(self.from, self.bytes)
    }
}

/// Room for one packet.
#[derive(Debug)]
pub struct Room<'a, D: Device> {
    stack: &'a mut Stack<D>,
}

impl<D: Device> TxToken for Room<'_, D> {
    fn consume<R>(self, to: Addr, f: impl FnOnce(&mut [u8]) -> (usize, R)) -> R {
        let Self { stack } = self;
        // An unused token cannot be taken back from smoltcp's queue, so the packet is built on the stack and copied.
        // `transmit_gather` is the fast path.
        let mut bytes = [0; MAX_PACKET_LEN_BYTES];
        let (len_bytes, result) = f(&mut bytes);
        assert!(len_bytes <= bytes.len(), "{len_bytes} bytes do not fit a packet of {MAX_PACKET_LEN_BYTES}");
        if len_bytes > 0 {
            stack.queue(to, len_bytes, |buffer| buffer.copy_from_slice(&bytes[..len_bytes]));
        }
        result
    }
}

#[cfg(test)]
impl<D: Device> Stack<D> {
    /// Use another address, as the host behind a gateway does.
    pub(crate) fn answer_as(&mut self, ip: Ipv4Addr) {
        self.interface.update_ip_addrs(|addrs| addrs[0] = IpCidr::new(IpAddress::Ipv4(ip), 24));
    }
}
