//! [`Tracer`]: a port that reports the packets that pass through another one.
//!
//! Invariant: the wrapped port sends and receives exactly what it would without the tracer.

#[cfg(test)]
mod tests;

use super::{Addr, Capabilities, Ecn, Gather, MulticastPort, Port, RxToken, Train, TxToken, WaitPort, Wake};
use crate::time::Instant;
use core::time::Duration;

/// The direction of a packet, as the port sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From a peer to this port.
    Received,
    /// From this port to a peer.
    Sent,
}

/// A packet that passed through a port. Its bytes are `header` followed by `payload`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TracedPacket<'a> {
    /// When it was received, or handed to the port.
    pub at: Instant,
    /// Its direction.
    pub direction: Direction,
    /// Its sender if it was received, otherwise its destination.
    pub peer: Addr,
    /// Its congestion mark if it was received.
    pub ecn: Ecn,
    /// The first part; the whole packet, unless it was sent in two parts.
    pub header: &'a [u8],
    /// The rest; may be empty.
    pub payload: &'a [u8],
}

/// Takes the packets of a [`Tracer`]: a closure, or a capture ([`Pcap`](super::pcap::Pcap)). `None` takes nothing.
pub trait TraceSink {
    /// Take a packet. A packet that the port then loses is reported as well.
    fn packet(&mut self, packet: &TracedPacket<'_>);

    /// The port is about to wait: pass on what is buffered.
    fn flush(&mut self) {}
}

impl<F: FnMut(&TracedPacket<'_>)> TraceSink for F {
    fn packet(&mut self, packet: &TracedPacket<'_>) {
        self(packet);
    }
}

impl<S: TraceSink> TraceSink for Option<S> {
    fn packet(&mut self, packet: &TracedPacket<'_>) {
        if let Some(sink) = self {
            sink.packet(packet);
        }
    }

    fn flush(&mut self) {
        if let Some(sink) = self {
            sink.flush();
        }
    }
}

/// A port that reports each packet in and out.
///
/// ```
/// # #[cfg(feature = "emu")]
/// # {
/// use sumac_hal::emu::{EmuNet, EmuPortConfig, Fabric, LinkConfig};
/// use sumac_hal::port::trace::{TracedPacket, Tracer};
/// use sumac_hal::port::{Addr, Port, TxToken};
/// use sumac_hal::time::Instant;
///
/// let mut lens = Vec::new();
/// let port = EmuNet::new(Fabric::new(1, LinkConfig::default())).port(1, EmuPortConfig::default());
/// let mut port = Tracer::new(port, |packet: &TracedPacket<'_>| lens.push((packet.peer, packet.header.len())));
/// let token = port.transmit(Instant::ZERO).unwrap();
/// token.consume(Addr::Emu(2), |buffer| (buffer[..9].fill(7), (9, ())).1);
/// port.flush(Instant::ZERO);
/// assert_eq!(lens, [(Addr::Emu(2), 9)]);
/// # }
/// ```
#[derive(Debug)]
pub struct Tracer<P, S> {
    inner: P,
    sink: S,
}

impl<P, S> Tracer<P, S> {
    /// Wrap a port.
    pub const fn new(inner: P, sink: S) -> Self {
        Self { inner, sink }
    }

    /// Return the wrapped port.
    pub const fn inner(&self) -> &P {
        &self.inner
    }

    /// Return the wrapped port. Packets that pass through it directly are not reported.
    pub const fn inner_mut(&mut self) -> &mut P {
        &mut self.inner
    }

    /// Return the sink.
    pub const fn sink_mut(&mut self) -> &mut S {
        &mut self.sink
    }

    /// Return the port and the sink.
    pub fn into_parts(self) -> (P, S) {
        (self.inner, self.sink)
    }
}

/// A received packet that is reported when it is consumed.
#[derive(Debug)]
pub struct TracedRx<'a, T, S> {
    token: T,
    sink: &'a mut S,
    at: Instant,
}

impl<T: RxToken, S: TraceSink> RxToken for TracedRx<'_, T, S> {
    fn ecn(&self) -> Ecn {
        self.token.ecn()
    }

    fn consume<R>(self, f: impl FnOnce(Addr, &[u8]) -> R) -> R {
        let Self { token, sink, at } = self;
        let ecn = token.ecn();
        token.consume(|peer, header| {
            sink.packet(&TracedPacket { at, direction: Direction::Received, peer, ecn, header, payload: &[] });
            f(peer, header)
        })
    }

    fn consume_train<R>(self, f: impl FnOnce(Addr, Train<'_>) -> R) -> R {
        let Self { token, sink, at } = self;
        let ecn = token.ecn();
        token.consume_train(|peer, train| {
            for header in train.packets() {
                sink.packet(&TracedPacket { at, direction: Direction::Received, peer, ecn, header, payload: &[] });
            }
            f(peer, train)
        })
    }
}

/// Permission to send one packet, which is reported when the token is consumed.
#[derive(Debug)]
pub struct TracedTx<'a, T, S> {
    token: T,
    sink: &'a mut S,
    at: Instant,
}

impl<T: TxToken, S: TraceSink> TxToken for TracedTx<'_, T, S> {
    fn consume<R>(self, to: Addr, f: impl FnOnce(&mut [u8]) -> (usize, R)) -> R {
        let Self { token, sink, at } = self;
        token.consume(to, |buffer| {
            let (len, result) = f(buffer);
            // The port panics if the length exceeds the buffer's.
            if let Some(header @ [_, ..]) = buffer.get(..len) {
                sink.packet(&sent(at, to, header, &[]));
            }
            (len, result)
        })
    }
}

/// Describe a sent packet.
const fn sent<'a>(at: Instant, peer: Addr, header: &'a [u8], payload: &'a [u8]) -> TracedPacket<'a> {
    TracedPacket { at, direction: Direction::Sent, peer, ecn: Ecn::Unmarked, header, payload }
}

impl<P: Port, S: TraceSink> Port for Tracer<P, S> {
    type Rx<'a>
        = TracedRx<'a, P::Rx<'a>, S>
    where
        Self: 'a;
    type Tx<'a>
        = TracedTx<'a, P::Tx<'a>, S>
    where
        Self: 'a;

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn receive(&mut self, now: Instant) -> Option<Self::Rx<'_>> {
        let Self { inner, sink } = self;
        Some(TracedRx { token: inner.receive(now)?, sink, at: now })
    }

    fn receive_train(&mut self, now: Instant, packets_max: usize) -> Option<Self::Rx<'_>> {
        let Self { inner, sink } = self;
        Some(TracedRx { token: inner.receive_train(now, packets_max)?, sink, at: now })
    }

    fn transmit(&mut self, now: Instant) -> Option<Self::Tx<'_>> {
        let Self { inner, sink } = self;
        Some(TracedTx { token: inner.transmit(now)?, sink, at: now })
    }

    fn flush(&mut self, now: Instant) {
        self.inner.flush(now);
    }

    fn room(&mut self, now: Instant) -> usize {
        self.inner.room(now)
    }

    fn transmit_gather<'a>(&mut self, packets: impl Iterator<Item = Gather<'a>>, now: Instant) {
        let Self { inner, sink } = self;
        let traced = packets.inspect(|packet| sink.packet(&sent(now, packet.to, packet.header, packet.payload)));
        inner.transmit_gather(traced, now);
    }
}

impl<P: MulticastPort, S: TraceSink> MulticastPort for Tracer<P, S> {
    fn join(&mut self, group: Addr) -> bool {
        self.inner.join(group)
    }

    fn leave(&mut self, group: Addr) {
        self.inner.leave(group);
    }
}

impl<P: WaitPort, S: TraceSink> WaitPort for Tracer<P, S> {
    fn wait(&mut self, timeout: Option<Duration>) -> Wake {
        self.sink.flush();
        self.inner.wait(timeout)
    }
}
