//! The loop that moves packets between a sans-I/O core and a port: a device's node and a rank's endpoint share it.
//!
//! A [`PacketCore`] takes packets and the time, and hands out packets and its next deadline. It sends through a
//! [`PacketSource`], which it lends for the time of a transmission: packets of one batch may borrow from it.
//!
//! Invariants:
//! - nothing blocks: a port without room ends the pass, and its refused packets leave before any others;
//! - a pass is bounded in packets, so control requests and other cores get their turn under a flood.

use crate::port::{Addr, Ecn, Gather, Port, RxToken, Train};
use crate::time::Instant;
use crate::wire::Header;
use heapless::Vec;

/// The number of packets handed to a port at a time. A port sends those of a batch that go to one peer together, and an
/// operating system's stack takes about as long for such a train as for a single packet: a hosted batch is long enough
/// for trains of 32 to each of four children. Boards have small stacks, and ports without such offloads.
pub const BATCH_PACKETS: usize = if cfg!(feature = "std") { 128 } else { 32 };

/// Packets that are handed to a port together.
pub type Batch<P> = Vec<Transmit<P>, BATCH_PACKETS>;

/// A packet to send. Its payload stays where it is; `P` is what the sender finds it by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transmit<P> {
    /// The destination.
    pub to: Addr,
    /// The packet's header.
    pub header: Header,
    /// The payload, behind the header.
    pub payload: P,
}

impl<P> Transmit<P> {
    /// Return the packet in two parts, given its payload.
    pub fn gather<'t>(&'t self, payload: &'t [u8]) -> Gather<'t> {
        Gather { to: self.to, header: &self.header, payload }
    }

    /// Write the packet with its payload to the start of `buffer`, and return it.
    ///
    /// # Panics
    /// If `buffer` is shorter than the packet.
    pub fn write<'b>(&self, payload: &[u8], buffer: &'b mut [u8]) -> &'b [u8] {
        let len = self.gather(payload).write(buffer);
        &buffer[..len]
    }
}

/// A sans-I/O state machine that exchanges packets with peers.
pub trait PacketCore {
    /// What it sends from.
    type Source<'s>: PacketSource
    where
        Self: 's;

    /// Handle the packets of a train that arrived at `now`, in order.
    fn handle(&mut self, now: Instant, from: Addr, ecn: Ecn, train: Train<'_>);

    /// Handle the timers that have expired at `now`.
    fn handle_timeout(&mut self, now: Instant);

    /// Return when [`PacketCore::handle_timeout`] is due; `None` if no timer is armed.
    #[must_use]
    fn poll_timeout(&self) -> Option<Instant>;

    /// Lend what it sends from.
    fn source(&mut self) -> Self::Source<'_>;
}

/// Hands out the packets that a [`PacketCore`] sends.
pub trait PacketSource {
    /// What it finds a packet's payload by.
    type Payload;

    /// Return the next packet to send; `None` if there is none at `now`.
    #[must_use]
    fn poll_transmit(&mut self, now: Instant) -> Option<Transmit<Self::Payload>>;

    /// Locate a packet's payload.
    fn payload<'t>(&'t self, transmit: &'t Transmit<Self::Payload>) -> &'t [u8];

    /// Add the next packets to `batch`, as long as it is shorter than `packets_max` and there are any: the same that
    /// [`PacketSource::poll_transmit`] would return one by one. A source that can prepare several at once for less
    /// overrides it.
    fn poll_batch(&mut self, now: Instant, packets_max: usize, batch: &mut Batch<Self::Payload>) {
        while batch.len() < packets_max {
            let Some(transmit) = self.poll_transmit(now) else { return };
            if batch.push(transmit).is_err() {
                return;
            }
        }
    }
}

/// Do everything that can be done at `now` without waiting: receive bursts of packets, at most `rounds` of them, handle
/// expired timers, send. Returns when to poll again if no packet arrives before then: `Some(now)` if there is more to
/// do at once, `None` if no timer is armed.
#[must_use]
pub fn poll<C: PacketCore, P: Port>(core: &mut C, port: &mut P, now: Instant, rounds: usize) -> Option<Instant> {
    let burst = port.capabilities().burst_packets.max(1);
    let mut is_busy = false;
    for _ in 0..rounds {
        let received = receive(core, port, now, burst);
        if core.poll_timeout().is_some_and(|at| at <= now) {
            core.handle_timeout(now);
        }
        // Packets that the port refused earlier go first.
        port.flush(now);
        let is_blocked = !transmit(&mut core.source(), port, now);
        is_busy = is_blocked || received == burst;
        if received < burst {
            break;
        }
    }
    if is_busy { Some(now) } else { core.poll_timeout() }
}

/// Receive at most `burst` packets; returns how many there were.
fn receive<C: PacketCore, P: Port>(core: &mut C, port: &mut P, now: Instant, burst: usize) -> usize {
    let mut received = 0;
    while received < burst {
        let Some(token) = port.receive_train(now, burst - received) else { break };
        let ecn = token.ecn();
        received += token.consume_train(|from, train| {
            core.handle(now, from, ecn, train);
            train.packets_len()
        });
    }
    received
}

/// Send what there is, payloads in place; returns false if the port could not take all of it.
fn transmit<S: PacketSource, P: Port>(source: &mut S, port: &mut P, now: Instant) -> bool {
    loop {
        let room = port.room(now).min(BATCH_PACKETS);
        if room == 0 {
            return false;
        }
        let mut batch = Batch::new();
        source.poll_batch(now, room, &mut batch);
        if batch.is_empty() {
            return true;
        }
        let source = &*source;
        port.transmit_gather(batch.iter().map(|transmit| transmit.gather(source.payload(transmit))), now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{ChildIndex, Epoch, GroupId};
    use crate::port::{Capabilities, TxToken};
    use crate::wire::{Flags, Kind, Packet, Repr};
    use std::collections::VecDeque;
    use std::vec::Vec as Queue;

    const PEER: Addr = Addr::Emu(1);

    /// A core that returns each packet to its sender, and has one timer.
    #[derive(Default)]
    struct Echo {
        replies: VecDeque<(Addr, Queue<u8>, Ecn)>,
        timer: Option<Instant>,
    }

    struct Replies<'e>(&'e mut Echo);

    impl PacketCore for Echo {
        type Source<'s> = Replies<'s>;

        fn handle(&mut self, _now: Instant, from: Addr, ecn: Ecn, train: Train<'_>) {
            self.replies.extend(train.packets().map(|packet| (from, packet.to_vec(), ecn)));
        }

        fn handle_timeout(&mut self, _now: Instant) {
            self.timer = None;
        }

        fn poll_timeout(&self) -> Option<Instant> {
            self.timer
        }

        fn source(&mut self) -> Replies<'_> {
            Replies(self)
        }
    }

    impl PacketSource for Replies<'_> {
        type Payload = Queue<u8>;

        fn poll_transmit(&mut self, _now: Instant) -> Option<Transmit<Queue<u8>>> {
            let (to, payload, ecn) = self.0.replies.pop_front()?;
            let flags = if ecn.is_ce() { Flags::CONGESTED } else { Flags::empty() };
            let repr = Repr::new(Kind::Probe, GroupId(1), Epoch::default(), ChildIndex(0), 0);
            Some(Transmit { to, header: Repr { flags, ..repr }.header(0), payload })
        }

        fn payload<'t>(&'t self, transmit: &'t Transmit<Queue<u8>>) -> &'t [u8] {
            &transmit.payload
        }
    }

    /// A port of 100-byte packets, in bursts of 4, that holds as many packets as its peer has room for.
    #[derive(Default)]
    struct Pipe {
        arrived: VecDeque<(Queue<u8>, bool)>,
        queued: Queue<Queue<u8>>,
        room: usize,
        flushes: usize,
    }

    struct Arrived((Queue<u8>, bool));

    struct Room<'p>(&'p mut Pipe);

    impl RxToken for Arrived {
        fn ecn(&self) -> Ecn {
            Ecn::from_mark(self.0.1)
        }

        fn consume<R>(self, f: impl FnOnce(Addr, &[u8]) -> R) -> R {
            f(PEER, &self.0.0)
        }
    }

    impl TxToken for Room<'_> {
        fn consume<R>(self, _to: Addr, f: impl FnOnce(&mut [u8]) -> (usize, R)) -> R {
            let mut buffer = [0; 100];
            let (len, result) = f(&mut buffer);
            self.0.queued.push(buffer[..len].to_vec());
            self.0.room -= 1;
            result
        }
    }

    impl Port for Pipe {
        type Rx<'a> = Arrived;
        type Tx<'a> = Room<'a>;

        fn capabilities(&self) -> Capabilities {
            Capabilities::new(100, 1024, 4)
        }

        fn receive(&mut self, _now: Instant) -> Option<Arrived> {
            self.arrived.pop_front().map(Arrived)
        }

        fn transmit(&mut self, _now: Instant) -> Option<Room<'_>> {
            (self.room > 0).then_some(Room(self))
        }

        fn room(&mut self, _now: Instant) -> usize {
            self.room
        }

        fn flush(&mut self, _now: Instant) {
            self.flushes += 1;
        }
    }

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    fn pipe(packets: usize, room: usize) -> Pipe {
        let arrived = (0..packets).map(|n| (std::vec![n as u8], n == 1)).collect();
        Pipe { arrived, room, ..Pipe::default() }
    }

    #[test]
    fn poll_returns_every_packet_with_its_mark_and_the_next_deadline() {
        let (mut core, mut port) = (Echo { timer: Some(at(9)), ..Echo::default() }, pipe(3, 100));
        assert_eq!(poll(&mut core, &mut port, at(1), 4), Some(at(9)));
        let sent: Queue<(bool, u8)> = port
            .queued
            .iter()
            .map(|bytes| {
                let packet = Packet::new_unchecked(&bytes[..]);
                let repr = Repr::parse(&packet).expect("as it was written");
                (repr.flags.contains(Flags::CONGESTED), packet.payload()[0])
            })
            .collect();
        assert_eq!(sent, [(false, 0), (true, 1), (false, 2)], "the mark and the number of each packet");
    }

    #[test]
    fn poll_handles_an_expired_timer_once() {
        let (mut core, mut port) = (Echo { timer: Some(at(9)), ..Echo::default() }, pipe(0, 100));
        assert_eq!(poll(&mut core, &mut port, at(9), 4), None);
        assert!(core.timer.is_none() && port.flushes > 0);
    }

    #[test]
    fn poll_stops_after_its_rounds_and_asks_to_be_called_again() {
        let (mut core, mut port) = (Echo::default(), pipe(20, 100));
        assert_eq!(poll(&mut core, &mut port, at(1), 2), Some(at(1)));
        assert_eq!((port.queued.len(), port.arrived.len()), (8, 12));
    }

    #[test]
    fn poll_keeps_packets_for_which_the_port_has_no_room() {
        let (mut core, mut port) = (Echo::default(), pipe(3, 2));
        assert_eq!(poll(&mut core, &mut port, at(1), 1), Some(at(1)));
        assert_eq!((port.queued.len(), core.replies.len()), (2, 1));
        port.room = 5;
        assert_eq!(poll(&mut core, &mut port, at(2), 1), None);
        assert_eq!(port.queued.last().and_then(|packet| packet.last()), Some(&2));
    }
}
