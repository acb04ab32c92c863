//! ARP, IP, UDP and TCP of one network interface, and the [`Port`] that it is.
//!
//! Invariants:
//! - packets to the host's loopback addresses go to the gateway, and what comes from the gateway comes from 127.0.0.1
//!   ([`BoardOptions`]): a node compares addresses, so both directions are translated;
//! - a packet that is handed out by `receive` is gone from the socket; one that does not fit the transmit queue is not
//!   taken, and [`Port::room`] promises no more than there is.

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

/// Packets that wait to be taken in.
pub const RX_PACKETS: usize = 256;

/// Packets that wait to be sent.
pub const TX_PACKETS: usize = 64;

/// What the receive queue surely holds of each packet's place: places are as long as the longest packet, and packets of
/// this length and more take one each.
const PROMISED_LEN_BYTES: usize = 1024;

/// Frames taken in at most before `receive` says that there is no packet: those that are not for the port.
const FRAMES_PER_LOOK: usize = 32;

/// A segment of the control connection in bytes.
const CONTROL_BUFFER_BYTES: usize = 4096;

/// What a stack keeps packets in: put it in a `static` cell.
#[derive(Debug)]
pub struct Buffers {
    rx: [udp::PacketMetadata; RX_PACKETS],
    rx_bytes: [[u8; MAX_PACKET_LEN_BYTES]; RX_PACKETS],
    tx: [udp::PacketMetadata; TX_PACKETS],
    tx_bytes: [[u8; MAX_PACKET_LEN_BYTES]; TX_PACKETS],
    control_rx: [u8; CONTROL_BUFFER_BYTES],
    control_tx: [u8; CONTROL_BUFFER_BYTES],
    sockets: [SocketStorage<'static>; 2],
}

impl Buffers {
    /// Return empty buffers.
    pub const fn new() -> Self {
        Self {
            rx: [udp::PacketMetadata::EMPTY; RX_PACKETS],
            rx_bytes: [[0; MAX_PACKET_LEN_BYTES]; RX_PACKETS],
            tx: [udp::PacketMetadata::EMPTY; TX_PACKETS],
            tx_bytes: [[0; MAX_PACKET_LEN_BYTES]; TX_PACKETS],
            control_rx: [0; CONTROL_BUFFER_BYTES],
            control_tx: [0; CONTROL_BUFFER_BYTES],
            sockets: [SocketStorage::EMPTY; 2],
        }
    }
}

impl Default for Buffers {
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
    /// Packets queued since the transmit queue was last seen empty: where smoltcp begins at the start of its ring again,
    /// so that this many places are surely left in one piece.
    queued: usize,
}

impl<D: Device> core::fmt::Debug for Stack<D> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Stack").field("advertised", &self.advertised).finish_non_exhaustive()
    }
}

/// The time as smoltcp counts it.
pub(crate) fn smoltcp_time(now: Instant) -> smoltcp::time::Instant {
    smoltcp::time::Instant::from_micros(i64::try_from(now.as_nanos() / 1_000).unwrap_or(i64::MAX))
}

impl<D: Device> Stack<D> {
    /// Set up the interface of `device`, whose hardware address is `mac`; `seed` makes sequence numbers hard to guess.
    pub fn new(
        mut device: D,
        mac: [u8; 6],
        options: &BoardOptions,
        buffers: &'static mut Buffers,
        seed: u64,
        now: Instant,
    ) -> Self {
        let mut config = Config::new(HardwareAddress::Ethernet(EthernetAddress(mac)));
        config.random_seed = seed;
        let mut interface = Interface::new(config, &mut device, smoltcp_time(now));
        interface.update_ip_addrs(|addrs| {
            // The table is empty, and has room for two.
            let _ = addrs.push(IpCidr::Ipv4(options.ip));
        });
        // The same of routes.
        let _ = interface.routes_mut().add_default_ipv4_route(options.gateway);
        let Buffers { rx, rx_bytes, tx, tx_bytes, control_rx, control_tx, sockets } = buffers;
        let mut data = udp::Socket::new(
            PacketBuffer::new(&mut rx[..], rx_bytes.as_flattened_mut()),
            PacketBuffer::new(&mut tx[..], tx_bytes.as_flattened_mut()),
        );
        // Fails for port 0, which options do not have, and for a socket that is open.
        let _ = data.bind(options.listen);
        let control =
            tcp::Socket::new(tcp::SocketBuffer::new(&mut control_rx[..]), tcp::SocketBuffer::new(&mut control_tx[..]));
        let mut sockets = SocketSet::new(&mut sockets[..]);
        let (data, control) = (sockets.add(data), sockets.add(control));
        let (gateway, advertised) = (options.gateway, options.data);
        Self { interface, device, sockets, data, control, gateway, advertised, queued: 0 }
    }

    /// Return the NIC.
    pub const fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Return the control connection's socket, with what it needs to connect.
    pub(crate) fn control(&mut self) -> (&mut tcp::Socket<'static>, &mut smoltcp::iface::Context) {
        (self.sockets.get_mut(self.control), self.interface.context())
    }

    /// Return the address behind which the network has `addr`.
    pub(crate) fn outside(&self, addr: SocketAddrV4) -> IpEndpoint {
        let ip = if addr.ip().is_loopback() { self.gateway } else { *addr.ip() };
        IpEndpoint::new(IpAddress::Ipv4(ip), addr.port())
    }

    /// Take in and send what there is; a bounded part of it.
    pub(crate) fn poll(&mut self, now: Instant) {
        for _ in 0..FRAMES_PER_LOOK {
            if !self.take_frame(now) {
                break;
            }
        }
        self.send_queued(now);
    }

    /// Return when there is something to do if nothing arrives.
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
        // A packet of each socket at a time.
        for _ in 0..TX_PACKETS {
            if self.interface.poll_egress(smoltcp_time(now), &mut self.device, &mut self.sockets) == PollResult::None {
                break;
            }
        }
        if self.sockets.get_mut::<udp::Socket<'_>>(self.data).send_queue() == 0 {
            self.queued = 0;
        }
    }

    /// Queue a packet of `len_bytes` that `fill` writes; nothing happens if the peer is no IPv4 address.
    fn queue(&mut self, to: Addr, len_bytes: usize, fill: impl FnOnce(&mut [u8])) {
        let Addr::Udp(SocketAddr::V4(to)) = to else { return };
        let to = self.outside(to);
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
        Capabilities::new(MAX_PACKET_LEN_BYTES, RX_PACKETS * PROMISED_LEN_BYTES, TX_PACKETS)
    }

    fn local_addr(&self) -> Addr {
        Addr::Udp(SocketAddr::V4(self.advertised))
    }

    fn receive(&mut self, now: Instant) -> Option<RxPacket<'_>> {
        if self.queued > 0 {
            // Something waits for the next hop's answer, which may have come.
            self.send_queued(now);
        }
        for _ in 0..FRAMES_PER_LOOK {
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

    fn transmit(&mut self, to: Addr, _now: Instant) -> Option<Room<'_, D>> {
        (self.room() > 0).then_some(Room { stack: self, to })
    }

    fn room(&self) -> usize {
        TX_PACKETS.saturating_sub(self.queued)
    }

    fn transmit_gather<'a>(&mut self, packets: impl Iterator<Item = Gather<'a>>, now: Instant) {
        for Gather { to, header, payload } in packets.take(self.room()) {
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
            // What keeps packets may be a question to the next hop, whose answer is here.
            self.poll(now);
        }
    }
}

/// A packet that has arrived.
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
    to: Addr,
}

impl<D: Device> TxToken for Room<'_, D> {
    fn consume<R>(self, f: impl FnOnce(&mut [u8]) -> (usize, R)) -> R {
        let Self { stack, to } = self;
        // A token may turn out to be of no use, which smoltcp's queue can't take back: so the packet is made beside it.
        // What sends much, gathers.
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
    /// Have another address, as the host behind a gateway has.
    pub(crate) fn answer_as(&mut self, ip: Ipv4Addr) {
        self.interface.update_ip_addrs(|addrs| addrs[0] = IpCidr::new(IpAddress::Ipv4(ip), 24));
    }
}
