//! A traced port is a port like the one that it wraps, and reports each packet once.

#![cfg(feature = "emu")]

use super::*;
use crate::emu::{EmuNet, EmuPort, EmuPortConfig, Fabric, LinkConfig};
use crate::port::conformance::{Testbed, run};
use std::cell::RefCell;
use std::rc::Rc;
use std::vec::Vec;

type Log = Rc<RefCell<Vec<(Direction, Addr, Vec<u8>)>>>;

/// Appends packets to a log that ports share.
struct Logger(Log);

impl TraceSink for Logger {
    fn packet(&mut self, packet: &TracedPacket<'_>) {
        let bytes = [packet.header, packet.payload].concat();
        self.0.borrow_mut().push((packet.direction, packet.peer, bytes));
    }
}

struct Bed {
    net: EmuNet,
    log: Log,
    nodes: u32,
    now: Instant,
}

impl Bed {
    fn new() -> Self {
        let net = EmuNet::new(Fabric::new(1, LinkConfig::default()));
        Self { net, log: Log::default(), nodes: 0, now: Instant::ZERO }
    }
}

impl Testbed for Bed {
    type Port = Tracer<EmuPort, Logger>;

    fn ports(&mut self, n: usize) -> Vec<Self::Port> {
        let first = self.nodes;
        self.nodes += n as u32;
        let config = EmuPortConfig::default();
        (first..self.nodes).map(|node| Tracer::new(self.net.port(node, config), Logger(self.log.clone()))).collect()
    }

    fn addr_of(&self, port: &Self::Port) -> Addr {
        port.inner().local_addr()
    }

    fn unused_addr(&mut self) -> Addr {
        Addr::Emu(u32::MAX)
    }

    fn now(&self) -> Instant {
        self.now
    }

    fn advance(&mut self) {
        self.now = self.now + Duration::from_micros(1);
    }
}

#[test]
fn traced_port_passes_the_suite() {
    assert_eq!(run(&mut Bed::new()), Ok(()));
}

#[test]
fn tracer_reports_each_packet_once_in_each_direction() {
    let mut bed = Bed::new();
    let [mut a, mut b] = bed.ports(2).try_into().unwrap_or_else(|_| panic!("two ports"));
    let (from, to) = (a.inner().local_addr(), b.inner().local_addr());
    a.transmit(bed.now).unwrap().consume(to, |buffer| (buffer[..3].copy_from_slice(b"one"), (3, ())).1);
    let _ = a.transmit(bed.now);
    a.transmit(bed.now).unwrap().consume(to, |_| (0, ()));
    a.transmit_gather([Gather { to, header: b"t", payload: b"wo" }].into_iter(), bed.now);
    bed.advance();
    while let Some(token) = b.receive(bed.now) {
        token.consume(|_, _| ());
    }
    let packet = |direction, peer, bytes: &[u8]| (direction, peer, bytes.to_vec());
    assert_eq!(
        *bed.log.borrow(),
        [
            packet(Direction::Sent, to, b"one"),
            packet(Direction::Sent, to, b"two"),
            packet(Direction::Received, from, b"one"),
            packet(Direction::Received, from, b"two"),
        ]
    );
}
