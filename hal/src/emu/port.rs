//! A minimal [`Port`] on an emulated fabric, for tests of code that uses ports.
//!
//! Invariants: transmit queue and inbox are bounded by the capabilities; time advances only by the `now` of each call.

use super::{Delivery, Fabric};
use crate::port::{Addr, Capabilities, Ecn, Port, RxToken, TxToken};
use crate::time::Instant;
use std::cell::{RefCell, RefMut};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// The parameters of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmuPortConfig {
    /// The longest packet, in bytes.
    pub max_packet_len_bytes: usize,
    /// The capacity of the receive buffer, in bytes. Packets that do not fit are lost.
    pub receive_buffer_bytes: usize,
    /// The capacity of the transmit queue, in packets.
    pub queue_packets: usize,
}

impl Default for EmuPortConfig {
    fn default() -> Self {
        Self { max_packet_len_bytes: 1472, receive_buffer_bytes: 1 << 20, queue_packets: 64 }
    }
}

/// A fabric that ports share. Clones refer to the same fabric.
#[derive(Debug, Clone)]
pub struct EmuNet {
    shared: Rc<RefCell<Shared>>,
}

#[derive(Debug)]
struct Shared {
    fabric: Fabric,
    inboxes: BTreeMap<Addr, Inbox>,
}

#[derive(Debug, Default)]
struct Inbox {
    packets: VecDeque<Delivery>,
    bytes: usize,
    limit_bytes: usize,
    overflows: u64,
}

impl EmuNet {
    /// Wrap `fabric` for sharing.
    pub fn new(fabric: Fabric) -> Self {
        Self { shared: Rc::new(RefCell::new(Shared { fabric, inboxes: BTreeMap::new() })) }
    }

    /// Return the port with address `node`. A second port with the same address replaces the inbox of the first.
    pub fn port(&self, node: u32, config: EmuPortConfig) -> EmuPort {
        let addr = Addr::Emu(node);
        let inbox = Inbox { limit_bytes: config.receive_buffer_bytes, ..Inbox::default() };
        self.shared.borrow_mut().inboxes.insert(addr, inbox);
        EmuPort {
            net: self.clone(),
            addr,
            config,
            queue: VecDeque::new(),
            buffer: vec![0; config.max_packet_len_bytes],
        }
    }

    /// Borrow the fabric, to set links and rules or to read counters.
    ///
    /// # Panics
    /// If it is already borrowed.
    pub fn fabric(&self) -> RefMut<'_, Fabric> {
        RefMut::map(self.shared.borrow_mut(), |shared| &mut shared.fabric)
    }
}

impl Shared {
    /// Move what has arrived by `now` into the inboxes.
    fn deliver(&mut self, now: Instant) {
        while let Some(delivery) = self.fabric.poll_delivery(now) {
            // No port has this address: the packet is lost.
            let Some(inbox) = self.inboxes.get_mut(&delivery.to) else { continue };
            if inbox.bytes + delivery.bytes.len() > inbox.limit_bytes {
                inbox.overflows += 1;
            } else {
                inbox.bytes += delivery.bytes.len();
                inbox.packets.push_back(delivery);
            }
        }
    }
}

/// A port on an emulated fabric.
#[derive(Debug)]
pub struct EmuPort {
    net: EmuNet,
    addr: Addr,
    config: EmuPortConfig,
    queue: VecDeque<(Addr, Vec<u8>)>,
    buffer: Vec<u8>,
}

impl EmuPort {
    /// Return the port's address.
    pub const fn local_addr(&self) -> Addr {
        self.addr
    }

    /// Return how many packets were lost because the receive buffer was full.
    pub fn overflows(&self) -> u64 {
        self.net.shared.borrow().inboxes.get(&self.addr).map_or(0, |inbox| inbox.overflows)
    }
}

/// A received packet.
#[derive(Debug)]
pub struct EmuRx {
    delivery: Delivery,
}

impl RxToken for EmuRx {
    fn ecn(&self) -> Ecn {
        self.delivery.ecn
    }

    fn consume<R>(self, f: impl FnOnce(Addr, &[u8]) -> R) -> R {
        f(self.delivery.from, &self.delivery.bytes)
    }
}

/// Permission to send one packet.
#[derive(Debug)]
pub struct EmuTx<'a> {
    port: &'a mut EmuPort,
}

impl TxToken for EmuTx<'_> {
    fn consume<R>(self, to: Addr, f: impl FnOnce(&mut [u8]) -> (usize, R)) -> R {
        let (len_bytes, result) = f(&mut self.port.buffer);
        let bytes = self.port.buffer[..len_bytes].to_vec();
        if len_bytes > 0 {
            self.port.queue.push_back((to, bytes));
        }
        result
    }
}

impl Port for EmuPort {
    type Rx<'a> = EmuRx;
    type Tx<'a> = EmuTx<'a>;

    fn capabilities(&self) -> Capabilities {
        let EmuPortConfig { max_packet_len_bytes, receive_buffer_bytes, queue_packets } = self.config;
        Capabilities::new(max_packet_len_bytes, receive_buffer_bytes, queue_packets)
    }

    fn receive(&mut self, now: Instant) -> Option<EmuRx> {
        let mut shared = self.net.shared.borrow_mut();
        shared.deliver(now);
        let inbox = shared.inboxes.get_mut(&self.addr)?;
        let delivery = inbox.packets.pop_front()?;
        inbox.bytes -= delivery.bytes.len();
        Some(EmuRx { delivery })
    }

    fn transmit(&mut self, _now: Instant) -> Option<EmuTx<'_>> {
        if self.queue.len() >= self.config.queue_packets { None } else { Some(EmuTx { port: self }) }
    }

    fn room(&mut self, _now: Instant) -> usize {
        self.config.queue_packets.saturating_sub(self.queue.len())
    }

    fn flush(&mut self, now: Instant) {
        let mut shared = self.net.shared.borrow_mut();
        for (to, bytes) in self.queue.drain(..) {
            shared.fabric.send(now, self.addr, to, &bytes);
        }
    }
}
