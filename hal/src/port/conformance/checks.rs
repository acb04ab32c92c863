//! The rules of a [`Port`], one function each, with its own ports.

use super::{Expectations, TIMEOUT_STEPS, Testbed, Violation, content, pair, put};
use crate::port::{Gather, Port, RxToken, TxToken};

/// A queue that accepts this many packets of one byte counts as unbounded.
const QUEUE_LIMIT_PACKETS: usize = 1 << 20;

/// The shortest packets with which the receive buffer is tested. For shorter ones the kernel's overhead exceeds the
/// packet.
const FAIR_LEN_BYTES: usize = 1024;

/// How many steps an idle receiver waits.
const IDLE_STEPS: usize = 200;

/// `receive` returns at once if there is no packet.
pub(super) fn empty_queue_receives_nothing<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let (mut a, _b) = pair(bed);
    Expectations::new("empty queue").receive_exactly(bed, &mut a)
}

/// Packets of lengths from 1 byte to the maximum arrive unchanged.
pub(super) fn every_length_arrives<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut expected = Expectations::new("every length");
    let (mut a, mut b) = pair(bed);
    let max = a.capabilities().max_packet_len_bytes;
    let to = bed.addr_of(&b);
    let room = a.transmit(bed.now()).map(|token| token.consume(to, |buffer| (0, buffer.len())));
    if room != Some(max) {
        let found = room.unwrap_or(0);
        return Err(Violation::Capability {
            check: expected.check,
            name: "max_packet_len_bytes",
            declared: max,
            found,
        });
    }
    let powers = (0..usize::BITS - 1).map(|bit| 1_usize << bit).flat_map(|power| [power - 1, power, power + 1]);
    let lengths = (1..=300).chain(powers).chain([max / 3, max / 2, max - 1, max]).filter(|len| (1..=max).contains(len));
    for (i, len_bytes) in lengths.enumerate() {
        expected.send(bed, &mut a, to, &content(i as u64, len_bytes))?;
        if i % 7 == 0 || len_bytes > max / 2 {
            a.flush(bed.now());
            expected.receive_all(bed, &mut b)?;
        }
    }
    a.flush(bed.now());
    expected.receive_exactly(bed, &mut b)
}

/// A token that is consumed with no bytes sends nothing.
pub(super) fn empty_token_sends_nothing<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut expected = Expectations::new("no bytes");
    let (mut a, mut b) = pair(bed);
    let to = bed.addr_of(&b);
    for i in 0..3 {
        if let Some(token) = a.transmit(bed.now()) {
            token.consume(to, |buffer| {
                buffer.fill(0xee);
                (0, ())
            });
        }
        expected.send(bed, &mut a, to, &content(i, 50))?;
    }
    a.flush(bed.now());
    expected.receive_exactly(bed, &mut b)
}

/// A dropped token sends nothing, takes no room, and does not affect other packets.
pub(super) fn dropped_token_sends_nothing<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut expected = Expectations::new("abandoned token");
    let (mut a, mut b) = pair(bed);
    let to = bed.addr_of(&b);
    let burst = a.capabilities().burst_packets as u64;
    for i in 0..burst {
        for _ in 0..3 {
            drop(a.transmit(bed.now()));
        }
        expected.send(bed, &mut a, to, &content(i, 40))?;
    }
    a.flush(bed.now());
    expected.receive_exactly(bed, &mut b)
}

/// The receiver always sees the sender's address, and a reply to it arrives.
pub(super) fn replies_reach_the_sender<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut expected = Expectations::new("replies");
    let mut ports = bed.ports(3);
    let Some(mut server) = ports.pop() else { return Ok(()) };
    let to = bed.addr_of(&server);
    for round in 0..20_u64 {
        for (i, client) in ports.iter_mut().enumerate() {
            let request = content(round * 2 + i as u64, 64 + i);
            expected.send(bed, client, to, &request)?;
            client.flush(bed.now());
            let seen = first_sender(bed, &mut server, &mut expected)?;
            let addr = bed.addr_of(client);
            if seen != addr {
                return Err(Violation::Address { check: expected.check, expected: addr, seen });
            }
            expected.send(bed, &mut server, seen, &content(1000 + round, 32))?;
            server.flush(bed.now());
            expected.receive_all(bed, client)?;
        }
    }
    expected.receive_exactly(bed, &mut server)
}

/// Packets of equal length to one destination, which segmentation offloads coalesce, arrive separately.
pub(super) fn equal_packets_are_not_merged<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut expected = Expectations::new("equal runs");
    let mut ports = bed.ports(3);
    let (receivers, senders) = ports.split_at_mut(2);
    let max = senders[0].capabilities().max_packet_len_bytes;
    let buffer_bytes = receivers[0].capabilities().receive_buffer_bytes;
    for len_bytes in [1, 96, 1000, 1472, 9000].map(|len: usize| len.min(max)) {
        // As many for both receivers as their buffers hold.
        for i in 0..200.min(2 * buffer_bytes / len_bytes) {
            let to = bed.addr_of(&receivers[i % 2]);
            expected.send(bed, &mut senders[0], to, &content(i as u64 % 90, len_bytes))?;
        }
        senders[0].flush(bed.now());
        for receiver in &mut *receivers {
            expected.receive_all(bed, receiver)?;
        }
    }
    receivers.iter_mut().try_for_each(|receiver| expected.receive_exactly(bed, receiver))
}

/// Packets of different lengths to several destinations arrive unchanged.
pub(super) fn mixed_lengths_are_not_merged<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut expected = Expectations::new("mixed lengths");
    let mut ports = bed.ports(4);
    let (receivers, senders) = ports.split_at_mut(3);
    let max = senders[0].capabilities().max_packet_len_bytes;
    for i in 0..600_usize {
        // Runs of equal length, each ended by a shorter or longer packet, which ends a segmented message.
        let len_bytes = [700, 700, 700, 300, 700, 1400, 1, max.min(20_000), 700][i / 3 % 9].min(max);
        let to = bed.addr_of(&receivers[(i + i / 7) % 3]);
        expected.send(bed, &mut senders[0], to, &content(i as u64, len_bytes))?;
        if i % 50 == 49 {
            senders[0].flush(bed.now());
            for receiver in &mut *receivers {
                expected.receive_all(bed, receiver)?;
            }
        }
    }
    receivers.iter_mut().try_for_each(|receiver| expected.receive_exactly(bed, receiver))
}

/// A full queue refuses packets, loses none, and has room again after a flush.
pub(super) fn full_queue_recovers<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut expected = Expectations::new("full queue");
    let (mut a, mut b) = pair(bed);
    let (to, max) = (bed.addr_of(&b), a.capabilities().max_packet_len_bytes);
    for len_bytes in [1, max] {
        let mut packets = 0;
        while let Some(token) = a.transmit(bed.now()) {
            let bytes = content(packets as u64, len_bytes);
            token.consume(to, |buffer| (put(buffer, &bytes), ()));
            expected.expect(to, &bytes);
            packets += 1;
            if packets == QUEUE_LIMIT_PACKETS {
                return Err(Violation::NeverFull { check: expected.check, packets });
            }
        }
        let burst = a.capabilities().burst_packets;
        if packets < burst {
            let name = "burst_packets";
            return Err(Violation::Capability { check: expected.check, name, declared: burst, found: packets });
        }
        expected.send(bed, &mut a, to, &content(u64::MAX, len_bytes))?;
        a.flush(bed.now());
        expected.receive_exactly(bed, &mut b)?;
    }
    Ok(())
}

/// More packets than the port moves at once all arrive if the receiver keeps receiving.
pub(super) fn long_bursts_arrive<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut expected = Expectations::new("long bursts");
    let (mut a, mut b) = pair(bed);
    let to = bed.addr_of(&b);
    let capabilities = a.capabilities();
    let len_bytes = capabilities.max_packet_len_bytes.min(1472);
    for i in 0..capabilities.burst_packets * 10 + 1 {
        expected.send(bed, &mut a, to, &content(i as u64, len_bytes))?;
        if i % 16 == 0 {
            a.flush(bed.now());
            bed.advance();
            expected.drain(bed, &mut b)?;
        }
    }
    a.flush(bed.now());
    expected.receive_exactly(bed, &mut b)
}

/// Gathered packets arrive whole, up to `room` at a time, mixed with queued ones. The sender may overwrite the payloads
/// afterwards.
pub(super) fn gathered_packets_arrive<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut expected = Expectations::new("gathered packets");
    let (mut a, mut b) = pair(bed);
    let to = bed.addr_of(&b);
    let max = a.capabilities().max_packet_len_bytes;
    let lengths = [max, 1, max / 2, 7, 97, 1400, 1400, 1400, max / 3];
    for round in 0..40_usize {
        expected.send(bed, &mut a, to, &content(round as u64, 33))?;
        let mut room = a.room(bed.now());
        for _ in 0..TIMEOUT_STEPS {
            if room > 0 {
                break;
            }
            a.flush(bed.now());
            bed.advance();
            room = a.room(bed.now());
        }
        if room == 0 {
            return Err(Violation::StuckFull { check: expected.check, flushes: TIMEOUT_STEPS });
        }
        let lengths = (0..room.min(32)).map(|i| lengths[(round + i) % lengths.len()].clamp(1, max));
        let mut packets: Vec<Vec<u8>> =
            lengths.enumerate().map(|(i, len)| content((round * 100 + i) as u64, len)).collect();
        packets.iter().for_each(|packet| expected.expect(to, packet));
        let gathered = packets.iter().enumerate().map(|(i, packet)| {
            let (header, payload) = packet.split_at(packet.len().min(i % 3 * 48));
            Gather { to, header, payload }
        });
        a.transmit_gather(gathered, bed.now());
        // The sender reuses its buffers at once.
        packets.iter_mut().for_each(|packet| packet.fill(0xdd));
        expected.receive_all(bed, &mut b)?;
    }
    expected.receive_exactly(bed, &mut b)
}

/// Eight ports send to each other, and each receives its own packets.
pub(super) fn many_peers_exchange_packets<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut expected = Expectations::new("many peers");
    let mut ports = bed.ports(8);
    let addrs: Vec<_> = ports.iter().map(|port| bed.addr_of(port)).collect();
    for round in 0..5 {
        for (i, port) in ports.iter_mut().enumerate() {
            for (j, &to) in addrs.iter().enumerate() {
                expected.send(bed, port, to, &content((round * 64 + i * 8 + j) as u64, 90 + i))?;
            }
            port.flush(bed.now());
        }
        for port in &mut ports {
            expected.receive_all(bed, port)?;
        }
    }
    ports.iter_mut().try_for_each(|port| expected.receive_exactly(bed, port))
}

/// The declared receive buffer holds as many bytes while the receiver is idle, in packets of different lengths.
pub(super) fn receive_buffer_holds_its_capacity<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let check = "receive buffer";
    let (a, _b) = pair(bed);
    let capabilities = a.capabilities();
    let (max, declared) = (capabilities.max_packet_len_bytes, capabilities.receive_buffer_bytes);
    for (name, declared) in [("receive_buffer_bytes", declared / max), ("burst_packets", capabilities.burst_packets)] {
        if declared == 0 {
            return Err(Violation::Capability { check, name, declared, found: 0 });
        }
    }
    // Lengths just above powers of two, where allocators waste most, and the longest.
    let lengths = [1100, 1472, 2200, 4300, 8500, 16_500, 33_000, max / 2, max];
    for len_bytes in lengths.into_iter().filter(|&len| len == max || (FAIR_LEN_BYTES..max).contains(&len)) {
        let mut expected = Expectations::new(check);
        let (mut a, mut b) = pair(bed);
        let to = bed.addr_of(&b);
        for i in 0..declared / len_bytes {
            expected.send(bed, &mut a, to, &content(i as u64, len_bytes))?;
        }
        a.flush(bed.now());
        // Wait until everything has arrived before receiving.
        for _ in 0..IDLE_STEPS {
            bed.advance();
        }
        expected.receive_exactly(bed, &mut b)?;
    }
    Ok(())
}

/// Packets to an unused address are lost, and no others are.
pub(super) fn unreachable_peer_does_not_affect_others<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    let mut expected = Expectations::new("unreachable peer");
    let (mut a, mut b) = pair(bed);
    let (to, nowhere) = (bed.addr_of(&b), bed.unused_addr());
    for i in 0..200 {
        let to = if i % 2 == 0 { nowhere } else { to };
        expected.send(bed, &mut a, to, &content(i, 500))?;
        if i % 9 == 0 {
            a.flush(bed.now());
            bed.advance();
            expected.drain(bed, &mut b)?;
        }
    }
    a.flush(bed.now());
    expected.receive_exactly(bed, &mut b)
}

/// Wait for one packet, check it off, and return its sender.
fn first_sender<B: Testbed>(
    bed: &mut B,
    port: &mut B::Port,
    expected: &mut Expectations,
) -> Result<crate::port::Addr, Violation> {
    let at = bed.addr_of(port);
    for _ in 0..TIMEOUT_STEPS {
        if let Some(token) = port.receive(bed.now()) {
            return token.consume(|from, bytes| expected.check_off(at, bytes).map(|()| from));
        }
        bed.advance();
    }
    Err(Violation::Missing { check: expected.check, sent: expected.sent, missing: 1, len_bytes: 0 })
}
