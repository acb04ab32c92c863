//! The rules of a [`Port`], one function each. Each makes ports of its own, so that none sees another's packets.

use super::{Ledger, PATIENCE_PASSES, Testbed, Violation, content, pair, put};
use crate::port::{Gather, Port, RxToken, TxToken};

/// How many packets of one byte a bounded queue can at most be thought to hold.
const ENDLESS_PACKETS: usize = 1 << 20;

/// The shortest packets that the receive buffer's promise is held against: below, what a kernel spends on a packet
/// exceeds the packet.
const PROMISED_LEN_BYTES: usize = 1024;

/// How long an idle receiver stays idle.
const SETTLED_PASSES: usize = 200;

/// `receive` returns at once when there is nothing.
pub(super) fn empty_queue_receives_nothing<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let (mut a, _b) = pair(bed);
    Ledger::new("empty queue").settle(bed, &mut a)
}

/// A packet of each length from 1 byte to the longest arrives as it was.
pub(super) fn every_length_arrives<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut ledger = Ledger::new("every length");
    let (mut a, mut b) = pair(bed);
    let max = a.capabilities().max_packet_len_bytes;
    let room = a.transmit(b.local_addr(), bed.now()).map(|token| token.consume(|buffer| (0, buffer.len())));
    if room != Some(max) {
        let found = room.unwrap_or(0);
        return Err(Violation::Capability { check: ledger.check, name: "max_packet_len_bytes", promised: max, found });
    }
    let powers = (0..usize::BITS - 1).map(|bit| 1_usize << bit).flat_map(|power| [power - 1, power, power + 1]);
    let lengths = (1..=300).chain(powers).chain([max / 3, max / 2, max - 1, max]).filter(|len| (1..=max).contains(len));
    for (i, len_bytes) in lengths.enumerate() {
        ledger.send(bed, &mut a, b.local_addr(), &content(i as u64, len_bytes))?;
        if i % 7 == 0 || len_bytes > max / 2 {
            a.flush(bed.now());
            ledger.settle_soon(bed, &mut b)?;
        }
    }
    a.flush(bed.now());
    ledger.settle(bed, &mut b)
}

/// A token that is consumed with no bytes queues nothing.
pub(super) fn no_bytes_are_no_packet<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut ledger = Ledger::new("no bytes");
    let (mut a, mut b) = pair(bed);
    for i in 0..3 {
        if let Some(token) = a.transmit(b.local_addr(), bed.now()) {
            token.consume(|buffer| {
                buffer.fill(0xee);
                (0, ())
            });
        }
        ledger.send(bed, &mut a, b.local_addr(), &content(i, 50))?;
    }
    a.flush(bed.now());
    ledger.settle(bed, &mut b)
}

/// A token that is dropped queues nothing, takes no room, and disturbs no neighbour.
pub(super) fn an_abandoned_token_leaves_nothing<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut ledger = Ledger::new("abandoned token");
    let (mut a, mut b) = pair(bed);
    let burst = a.capabilities().burst_packets as u64;
    for i in 0..burst {
        for _ in 0..3 {
            drop(a.transmit(b.local_addr(), bed.now()));
        }
        ledger.send(bed, &mut a, b.local_addr(), &content(i, 40))?;
    }
    a.flush(bed.now());
    ledger.settle(bed, &mut b)
}

/// The receiver sees the sender's address, always the same, and an answer to it arrives.
pub(super) fn replies_reach_the_sender<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut ledger = Ledger::new("replies");
    let mut ports = bed.ports(3);
    let Some(mut server) = ports.pop() else { return Ok(()) };
    for round in 0..20_u64 {
        for (i, client) in ports.iter_mut().enumerate() {
            let request = content(round * 2 + i as u64, 64 + i);
            ledger.send(bed, client, server.local_addr(), &request)?;
            client.flush(bed.now());
            let seen = first_sender(bed, &mut server, &mut ledger)?;
            let expected = client.local_addr();
            if seen != expected {
                return Err(Violation::Address { check: ledger.check, expected, seen });
            }
            ledger.send(bed, &mut server, seen, &content(1000 + round, 32))?;
            server.flush(bed.now());
            ledger.settle_soon(bed, client)?;
        }
    }
    ledger.settle(bed, &mut server)
}

/// Packets of one length and one destination, which offloads coalesce, arrive one by one.
pub(super) fn equal_runs_stay_apart<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut ledger = Ledger::new("equal runs");
    let mut ports = bed.ports(3);
    let (receivers, senders) = ports.split_at_mut(2);
    let max = senders[0].capabilities().max_packet_len_bytes;
    for len_bytes in [1, 96, 1000, 1472, 9000].map(|len: usize| len.min(max)) {
        for i in 0..200 {
            let to = receivers[i % 2].local_addr();
            ledger.send(bed, &mut senders[0], to, &content(i as u64 % 90, len_bytes))?;
        }
        senders[0].flush(bed.now());
        for receiver in &mut *receivers {
            ledger.settle_soon(bed, receiver)?;
        }
    }
    receivers.iter_mut().try_for_each(|receiver| ledger.settle(bed, receiver))
}

/// Packets of many lengths to many destinations arrive as they were.
pub(super) fn mixed_lengths_stay_apart<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut ledger = Ledger::new("mixed lengths");
    let mut ports = bed.ports(4);
    let (receivers, senders) = ports.split_at_mut(3);
    let max = senders[0].capabilities().max_packet_len_bytes;
    for i in 0..600_usize {
        // Runs of one length, then a shorter or a longer packet: what ends a segmented message.
        let len_bytes = [700, 700, 700, 300, 700, 1400, 1, max.min(20_000), 700][i / 3 % 9].min(max);
        let to = receivers[(i + i / 7) % 3].local_addr();
        ledger.send(bed, &mut senders[0], to, &content(i as u64, len_bytes))?;
        if i % 50 == 49 {
            senders[0].flush(bed.now());
            for receiver in &mut *receivers {
                ledger.settle_soon(bed, receiver)?;
            }
        }
    }
    receivers.iter_mut().try_for_each(|receiver| ledger.settle(bed, receiver))
}

/// A full queue says so, loses nothing, and has room again after a flush.
pub(super) fn a_full_queue_recovers<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut ledger = Ledger::new("full queue");
    let (mut a, mut b) = pair(bed);
    let (to, max) = (b.local_addr(), a.capabilities().max_packet_len_bytes);
    for len_bytes in [1, max] {
        let mut packets = 0;
        while let Some(token) = a.transmit(to, bed.now()) {
            let bytes = content(packets as u64, len_bytes);
            token.consume(|buffer| (put(buffer, &bytes), ()));
            ledger.expect(to, &bytes);
            packets += 1;
            if packets == ENDLESS_PACKETS {
                return Err(Violation::NeverFull { check: ledger.check, packets });
            }
        }
        let burst = a.capabilities().burst_packets;
        if packets < burst {
            let name = "burst_packets";
            return Err(Violation::Capability { check: ledger.check, name, promised: burst, found: packets });
        }
        ledger.send(bed, &mut a, to, &content(u64::MAX, len_bytes))?;
        a.flush(bed.now());
        ledger.settle(bed, &mut b)?;
    }
    Ok(())
}

/// More packets than the port moves in one go arrive, when the receiver keeps looking.
pub(super) fn long_bursts_arrive<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut ledger = Ledger::new("long bursts");
    let (mut a, mut b) = pair(bed);
    let capabilities = a.capabilities();
    let len_bytes = capabilities.max_packet_len_bytes.min(1472);
    for i in 0..capabilities.burst_packets * 10 + 1 {
        ledger.send(bed, &mut a, b.local_addr(), &content(i as u64, len_bytes))?;
        if i % 16 == 0 {
            a.flush(bed.now());
            bed.pass();
            ledger.drain(bed, &mut b)?;
        }
    }
    a.flush(bed.now());
    ledger.settle(bed, &mut b)
}

/// Packets gathered from headers and payloads arrive as wholes, `room` of them at a time, mixed with queued ones and
/// whatever becomes of the payloads afterwards.
pub(super) fn gathered_packets_arrive<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut ledger = Ledger::new("gathered packets");
    let (mut a, mut b) = pair(bed);
    let to = b.local_addr();
    let max = a.capabilities().max_packet_len_bytes;
    let lengths = [max, 1, max / 2, 7, 97, 1400, 1400, 1400, max / 3];
    for round in 0..40_usize {
        ledger.send(bed, &mut a, to, &content(round as u64, 33))?;
        let mut room = a.room();
        for _ in 0..PATIENCE_PASSES {
            if room > 0 {
                break;
            }
            a.flush(bed.now());
            bed.pass();
            room = a.room();
        }
        if room == 0 {
            return Err(Violation::StuckFull { check: ledger.check, flushes: PATIENCE_PASSES });
        }
        let lengths = (0..room.min(32)).map(|i| lengths[(round + i) % lengths.len()].clamp(1, max));
        let mut packets: Vec<Vec<u8>> =
            lengths.enumerate().map(|(i, len)| content((round * 100 + i) as u64, len)).collect();
        packets.iter().for_each(|packet| ledger.expect(to, packet));
        let gathered = packets.iter().enumerate().map(|(i, packet)| {
            let (header, payload) = packet.split_at(packet.len().min(i % 3 * 48));
            Gather { to, header, payload }
        });
        a.transmit_gather(gathered, bed.now());
        // The sender goes on using its buffers at once.
        packets.iter_mut().for_each(|packet| packet.fill(0xdd));
        ledger.settle_soon(bed, &mut b)?;
    }
    ledger.settle(bed, &mut b)
}

/// Eight ports send to each other, and each gets its own.
pub(super) fn many_peers<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut ledger = Ledger::new("many peers");
    let mut ports = bed.ports(8);
    let addrs: Vec<_> = ports.iter().map(Port::local_addr).collect();
    for round in 0..5 {
        for (i, port) in ports.iter_mut().enumerate() {
            for (j, &to) in addrs.iter().enumerate() {
                ledger.send(bed, port, to, &content((round * 64 + i * 8 + j) as u64, 90 + i))?;
            }
            port.flush(bed.now());
        }
        for port in &mut ports {
            ledger.settle_soon(bed, port)?;
        }
    }
    ports.iter_mut().try_for_each(|port| ledger.settle(bed, port))
}

/// As many bytes as the capabilities promise wait for a receiver that is not looking, in packets of any fair length.
pub(super) fn capabilities_hold<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let check = "receive buffer";
    let (a, _b) = pair(bed);
    let capabilities = a.capabilities();
    let (max, promised) = (capabilities.max_packet_len_bytes, capabilities.receive_buffer_bytes);
    for (name, promised) in [("receive_buffer_bytes", promised / max), ("burst_packets", capabilities.burst_packets)] {
        if promised == 0 {
            return Err(Violation::Capability { check, name, promised, found: 0 });
        }
    }
    // Just past powers of two, where allocators waste most; and the longest.
    let lengths = [1100, 1472, 2200, 4300, 8500, 16_500, 33_000, max / 2, max];
    for len_bytes in lengths.into_iter().filter(|&len| len == max || (PROMISED_LEN_BYTES..max).contains(&len)) {
        let mut ledger = Ledger::new(check);
        let (mut a, mut b) = pair(bed);
        for i in 0..promised / len_bytes {
            ledger.send(bed, &mut a, b.local_addr(), &content(i as u64, len_bytes))?;
        }
        a.flush(bed.now());
        // Idle long enough for all of it to arrive before the receiver looks.
        for _ in 0..SETTLED_PASSES {
            bed.pass();
        }
        ledger.settle(bed, &mut b)?;
    }
    Ok(())
}

/// Packets to nobody are lost, and nothing else is; the queue goes on.
pub(super) fn an_unreachable_peer_harms_nobody<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut ledger = Ledger::new("unreachable peer");
    let (mut a, mut b) = pair(bed);
    let nowhere = bed.nowhere();
    for i in 0..200 {
        let to = if i % 2 == 0 { nowhere } else { b.local_addr() };
        ledger.send(bed, &mut a, to, &content(i, 500))?;
        if i % 9 == 0 {
            a.flush(bed.now());
            bed.pass();
            ledger.drain(bed, &mut b)?;
        }
    }
    a.flush(bed.now());
    ledger.settle(bed, &mut b)
}

/// Wait for one packet, strike it off and return its sender.
fn first_sender<B: Testbed>(
    bed: &mut B,
    port: &mut B::Port,
    ledger: &mut Ledger,
) -> Result<crate::port::Addr, Violation> {
    let at = port.local_addr();
    for _ in 0..PATIENCE_PASSES {
        if let Some(token) = port.receive(bed.now()) {
            return token.consume(|from, bytes| ledger.strike(at, bytes).map(|()| from));
        }
        bed.pass();
    }
    Err(Violation::Missing { check: ledger.check, sent: ledger.sent, missing: 1, len_bytes: 0 })
}
