//! The emulated port passes the suite, and broken ports fail it.

#![cfg(feature = "emu")]

use super::*;
use crate::emu::{EmuNet, EmuPort, EmuPortConfig, EmuRx, Fabric, LinkConfig};
use crate::port::Capabilities;

struct EmuBed {
    net: EmuNet,
    nodes: u32,
    now: Instant,
    config: EmuPortConfig,
}

impl EmuBed {
    fn new() -> Self {
        let config = EmuPortConfig { max_packet_len_bytes: 3000, receive_buffer_bytes: 1 << 19, queue_packets: 64 };
        let net = EmuNet::new(Fabric::new(1, LinkConfig::default()));
        Self { net, nodes: 0, now: Instant::ZERO, config }
    }

    fn make(&mut self) -> EmuPort {
        self.nodes += 1;
        self.net.port(self.nodes, self.config)
    }
}

impl Testbed for EmuBed {
    type Port = EmuPort;

    fn ports(&mut self, n: usize) -> Vec<EmuPort> {
        (0..n).map(|_| self.make()).collect()
    }

    fn addr_of(&self, port: &EmuPort) -> Addr {
        port.local_addr()
    }

    fn unused_addr(&mut self) -> Addr {
        Addr::Emu(u32::MAX)
    }

    fn now(&self) -> Instant {
        self.now
    }

    fn advance(&mut self) {
        self.now = self.now + core::time::Duration::from_micros(1);
    }
}

#[test]
fn emulated_port_passes_the_suite() {
    assert_eq!(run(&mut EmuBed::new()), Ok(()));
}

/// A fault of a broken port.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    /// Merges packets of equal destination and length.
    Merge,
    /// Splits packets over 1000 bytes.
    Split,
    /// Truncates packets over 1000 bytes.
    Truncate,
    /// Flips a bit in every 50th packet.
    Flip,
    /// Duplicates every 50th packet.
    Double,
    /// Loses every 50th packet.
    Lose,
    /// Sends a packet for a dropped token.
    SendAbandoned,
    /// Sends a packet for a token that was consumed with no bytes.
    SendEmpty,
    /// Declares longer packets than fit.
    ClaimLength,
    /// Declares a larger receive buffer than there is.
    ClaimBuffer,
    /// Declares a longer burst than the queue holds.
    ClaimBurst,
    /// Stays full once the queue was full.
    StayFull,
    /// Accepts any number of packets.
    NeverFull,
    /// Reports a wrong sender.
    Sender,
    /// Sends nothing after a packet to an unused address.
    StopSending,
    /// Delays a flushed packet until the next flush.
    DelayFlush,
}

struct Broken {
    inner: EmuPort,
    fault: Fault,
    held: Vec<(Addr, Vec<u8>)>,
    packets: u64,
    stuck: bool,
    /// Where the last packet went.
    last_peer: Option<Addr>,
}

struct BrokenTx<'a> {
    port: &'a mut Broken,
    consumed: bool,
}

impl Drop for BrokenTx<'_> {
    fn drop(&mut self) {
        if !self.consumed && self.port.fault == Fault::SendAbandoned {
            let to = self.port.last_peer;
            self.port.held.extend(to.map(|to| (to, vec![0; 9])));
        }
    }
}

impl TxToken for BrokenTx<'_> {
    fn consume<R>(mut self, to: Addr, f: impl FnOnce(&mut [u8]) -> (usize, R)) -> R {
        self.consumed = true;
        let mut buffer = vec![0; self.port.inner.capabilities().max_packet_len_bytes];
        let (len, result) = f(&mut buffer);
        buffer.truncate(len);
        if len > 0 || self.port.fault == Fault::SendEmpty {
            self.port.queue(to, buffer);
        }
        result
    }
}

impl Broken {
    fn queue(&mut self, to: Addr, mut bytes: Vec<u8>) {
        self.packets += 1;
        self.last_peer = Some(to);
        let unlucky = self.packets.is_multiple_of(50);
        match self.fault {
            Fault::Merge => {
                let last = self.held.last_mut().filter(|(other, held)| *other == to && held.len() == bytes.len());
                if let Some((_, held)) = last
                    && held.len() < 100
                {
                    held.append(&mut bytes);
                    return;
                }
            }
            Fault::Split if bytes.len() > 1000 => {
                let rest = bytes.split_off(1000);
                self.held.push((to, rest));
            }
            Fault::Truncate => bytes.truncate(1000),
            Fault::Flip if unlucky => bytes[0] ^= 4,
            Fault::Double if unlucky => self.held.push((to, bytes.clone())),
            Fault::Lose if unlucky => return,
            Fault::StopSending if to == Addr::Emu(u32::MAX) => self.stuck = true,
            Fault::SendEmpty if bytes.is_empty() => bytes.push(0),
            _ => {}
        }
        if !(self.stuck && self.fault == Fault::StopSending) {
            self.held.push((to, bytes));
        }
    }
}

struct BrokenRx {
    inner: EmuRx,
    fault: Fault,
}

impl RxToken for BrokenRx {
    fn consume<R>(self, f: impl FnOnce(Addr, &[u8]) -> R) -> R {
        let fault = self.fault;
        self.inner.consume(|from, bytes| f(if fault == Fault::Sender { Addr::Emu(77) } else { from }, bytes))
    }
}

impl Port for Broken {
    type Rx<'a> = BrokenRx;
    type Tx<'a> = BrokenTx<'a>;

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.inner.capabilities();
        match self.fault {
            Fault::ClaimLength => capabilities.max_packet_len_bytes += 1,
            Fault::ClaimBuffer => capabilities.receive_buffer_bytes += 20_000,
            Fault::ClaimBurst => capabilities.burst_packets += 1,
            _ => {}
        }
        capabilities
    }

    fn receive(&mut self, now: Instant) -> Option<BrokenRx> {
        let fault = self.fault;
        self.inner.receive(now).map(|inner| BrokenRx { inner, fault })
    }

    fn transmit(&mut self, _now: Instant) -> Option<BrokenTx<'_>> {
        let full = self.held.len() >= 64 && self.fault != Fault::NeverFull;
        self.stuck |= full && self.fault == Fault::StayFull;
        let refuse = full || self.stuck && self.fault == Fault::StayFull;
        (!refuse).then(|| BrokenTx { port: self, consumed: false })
    }

    fn room(&mut self, _now: Instant) -> usize {
        64_usize.saturating_sub(self.held.len())
    }

    fn flush(&mut self, now: Instant) {
        let delayed = if self.fault == Fault::DelayFlush { self.held.pop() } else { None };
        for (to, bytes) in self.held.drain(..) {
            if self.inner.transmit(now).is_none() {
                self.inner.flush(now);
            }
            if let Some(token) = self.inner.transmit(now) {
                token.consume(to, |buffer| (put(buffer, &bytes), ()));
            }
        }
        self.held.extend(delayed);
        self.inner.flush(now);
    }
}

struct BrokenBed {
    bed: EmuBed,
    fault: Fault,
}

impl Testbed for BrokenBed {
    type Port = Broken;

    fn ports(&mut self, n: usize) -> Vec<Broken> {
        let fault = self.fault;
        let make = |inner| Broken { inner, fault, held: Vec::new(), packets: 0, stuck: false, last_peer: None };
        self.bed.ports(n).into_iter().map(make).collect()
    }

    fn addr_of(&self, port: &Broken) -> Addr {
        port.inner.local_addr()
    }

    fn unused_addr(&mut self) -> Addr {
        self.bed.unused_addr()
    }

    fn now(&self) -> Instant {
        self.bed.now()
    }

    fn advance(&mut self) {
        self.bed.advance();
    }
}

#[test]
fn suite_detects_every_fault() {
    use Fault::*;
    for fault in [Merge, Split, Truncate, Flip, Double, Lose, SendAbandoned, SendEmpty] {
        let found = run(&mut BrokenBed { bed: EmuBed::new(), fault });
        assert!(matches!(found, Err(Violation::Unexpected { .. } | Violation::Missing { .. })), "{fault:?}: {found:?}");
    }
    for (fault, name) in [(ClaimLength, "max_packet_len_bytes"), (ClaimBurst, "burst_packets")] {
        let found = run(&mut BrokenBed { bed: EmuBed::new(), fault });
        assert!(
            matches!(found, Err(Violation::Capability { name: other, .. }) if other == name),
            "{fault:?}: {found:?}"
        );
    }
    let find = |fault| run(&mut BrokenBed { bed: EmuBed::new(), fault }).unwrap_err();
    assert!(matches!(find(ClaimBuffer), Violation::Missing { check: "receive buffer", .. }));
    assert!(matches!(find(StayFull), Violation::StuckFull { .. }));
    assert!(matches!(find(NeverFull), Violation::NeverFull { .. }));
    assert!(matches!(find(Sender), Violation::Address { .. }));
    assert!(matches!(find(StopSending), Violation::Missing { check: "unreachable peer", .. }));
    assert!(matches!(find(DelayFlush), Violation::Missing { .. }));
}
