//! A capture is read back by a reader of its own and by tshark with the dissector, and the dissector's tables are
//! compared with the wire format.

use super::*;
use crate::ids::{ChildIndex, ChunkNo, Epoch, GroupId, Rank};
use crate::op::{Collective, Dtype, ReduceOp};
use crate::port::VerbsAddr;
use crate::time::Instant;
use crate::wire::{Flags, HEADER_LEN, Kind, NakReason, Packet, Repr, SHORT_HEADER_LEN, payload_crc};
use std::fmt::Write as _;
use std::net::{Ipv6Addr as Ip6, SocketAddr};
use std::process::Command;
use std::vec::Vec as Bytes;

const LOCAL: Addr = Addr::Udp(SocketAddr::V4(std::net::SocketAddrV4::new(std::net::Ipv4Addr::new(10, 0, 0, 2), 7000)));
const EPOCH_NS: u64 = 1_700_000_000_123_456_789;

#[derive(Default)]
struct Buffer {
    bytes: Bytes<u8>,
    writes: usize,
}

impl PcapSink for Buffer {
    fn write(&mut self, parts: &[&[u8]]) {
        self.writes += 1;
        parts.iter().for_each(|part| self.bytes.extend_from_slice(part));
    }
}

/// Return a packet of each kind, and a Nak of each reason, with a different value in each field.
fn every_kind() -> Bytes<Bytes<u8>> {
    let mut kinds: Bytes<(Kind, Option<NakReason>)> =
        (1..=u8::MAX).filter_map(Kind::from_wire).filter(|&kind| kind != Kind::Nak).map(|kind| (kind, None)).collect();
    kinds.extend((1..=u8::MAX).filter_map(NakReason::from_wire).map(|reason| (Kind::Nak, Some(reason))));
    let all = kinds.into_iter().map(|(kind, reason)| (kind, reason, Flags::empty()));
    let short = [Kind::Data, Kind::Result].map(|kind| (kind, None, Flags::SHORT));
    all.chain(short).enumerate().map(|(n, (kind, reason, form))| packet(n as u8, kind, reason, form)).collect()
}

fn packet(n: u8, kind: Kind, reason: Option<NakReason>, form: Flags) -> Bytes<u8> {
    let wide = |salt: u64| (u64::from(n) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ salt << 7);
    let narrow = |salt: u64| wide(salt) as u16;
    let payload = vec![n; usize::from(n) * 5];
    let repr = Repr {
        flags: Flags::from_bits_truncate(1 << (n % 6)) | form,
        collective: Collective::from_wire(n % 11),
        dtype: Dtype::from_wire(n % 15),
        op: ReduceOp::from_wire(n % 14 + 1),
        reason,
        count: narrow(1),
        seq: ChunkNo(wide(2)),
        mark: ChunkNo(wide(3)),
        signature: wide(4) as u32,
        token: wide(5) as u32,
        window: narrow(6),
        payload_len_bytes: payload.len() as u16,
        attempt: narrow(7) as u8,
        view: narrow(8),
        bits: wide(9),
        bits2: wide(10),
        root: Rank(wide(11) as u32),
        slowest: Some(Rank(u32::from(narrow(12) >> 1))),
        late_us: wide(13) as u32,
        ..Repr::new(kind, GroupId(wide(14) as u32), Epoch::from_bits(wide(17) as u32), ChildIndex(narrow(15)), wide(16))
    };
    let mut bytes = vec![0; repr.packet_len()];
    bytes[repr.header_len()..].copy_from_slice(&payload);
    repr.emit(&mut Packet::new_unchecked(&mut bytes[..]), payload_crc(&payload));
    bytes
}

fn traced(n: usize, peer: Addr, direction: Direction, packet: &[u8]) -> TracedPacket<'_> {
    // Sent packets in two parts, of odd lengths too.
    let (header, payload) = packet.split_at(if direction == Direction::Sent { 47 } else { packet.len() });
    let ecn = Ecn::from_mark(direction == Direction::Received && n % 4 == 3);
    TracedPacket { at: Instant::from_nanos(n as u64 * 1_000_001), direction, peer, ecn, header, payload }
}

/// Return a capture of `packets`, received and sent in turn, with peers of every kind.
fn capture(packets: &[Bytes<u8>]) -> Bytes<u8> {
    let mut pcap = Pcap::new(Buffer::default(), LOCAL, EPOCH_NS);
    for (n, packet) in packets.iter().enumerate() {
        let direction = if n % 2 == 0 { Direction::Sent } else { Direction::Received };
        pcap.packet(&traced(n, peer(n), direction, packet));
    }
    let Buffer { bytes, writes } = pcap.into_inner();
    assert_eq!(writes, packets.len() + 2, "one call for each block");
    bytes
}

fn peer(n: usize) -> Addr {
    match n % 5 {
        0 | 1 => Addr::Udp(SocketAddr::from(([10, 0, 0, 3], 8000))),
        2 => Addr::Udp(SocketAddr::from((Ip6::LOCALHOST, 8000))),
        3 => Addr::Verbs(VerbsAddr { gid: Ip6::new(0xfe80, 0, 0, 0, 0, 0, 0, 9).octets(), lid: 3, qpn: 0x12_3456 }),
        _ => Addr::Emu(70_000),
    }
}

/// Split a capture into blocks of type and content, checking what every reader relies on.
fn blocks(capture: &[u8]) -> Bytes<(u32, &[u8])> {
    let word = |at: usize| u32::from_le_bytes(capture[at..at + 4].try_into().expect("four bytes"));
    let (mut at, mut blocks) = (0, Bytes::new());
    while at < capture.len() {
        let len = word(at + 4) as usize;
        assert!(len.is_multiple_of(4) && word(at + len - 4) as usize == len, "a block of {len} bytes at {at}");
        blocks.push((word(at), &capture[at + 8..at + len - 4]));
        at += len;
    }
    blocks
}

#[test]
fn capture_holds_every_packet_in_a_block_with_its_time_and_addresses() {
    let packets = every_kind();
    let capture = capture(&packets);
    let blocks = blocks(&capture);
    assert_eq!((blocks[0].0, blocks[1].0, blocks.len()), (SECTION_HEADER, INTERFACE_DESCRIPTION, packets.len() + 2));
    for (n, (packet, (kind, block))) in packets.iter().zip(&blocks[2..]).enumerate() {
        let word = |at: usize| u32::from_le_bytes(block[at..at + 4].try_into().expect("four bytes"));
        let at_ns = u64::from(word(4)) << 32 | u64::from(word(8));
        assert_eq!((*kind, word(0), at_ns), (ENHANCED_PACKET, 0, EPOCH_NS + n as u64 * 1_000_001));
        let data = &block[20..][..word(12) as usize];
        assert!(data.ends_with(packet), "packet {n}");
        let is_v4 = matches!(peer(n), Addr::Udp(SocketAddr::V4(_)));
        assert_eq!(data.len() - packet.len(), if is_v4 { 28 } else { 48 });
    }
}

#[test]
fn capture_shows_directions_addresses_and_marks() {
    let v4 = ip_headers(LOCAL, &traced(3, peer(0), Direction::Received, &[7; 100]));
    assert_eq!(v4[1], 0b11, "the packet was marked");
    assert_eq!((&v4[12..16], &v4[16..20]), (&[10, 0, 0, 3][..], &[10, 0, 0, 2][..]));
    assert_eq!(v4[20..26], [8000_u16, 7000, 108].map(u16::to_be_bytes).concat());
    assert_eq!(Checksum::default().add(&v4[..20]).finish(), 0, "the header's checksum holds");
    let packet = traced(2, peer(3), Direction::Sent, &[7; 101]);
    let v6 = ip_headers(LOCAL, &packet);
    assert_eq!(v6[24..40], Ip6::new(0xfe80, 0, 0, 0, 0, 0, 0, 9).octets());
    assert_eq!(v6[42..44], 0x3456_u16.to_be_bytes());
    let sum = Checksum::default().add(&v6[8..40]).add(&109_u32.to_be_bytes()).add(&[0, 0, 0, UDP]);
    assert_eq!(sum.add(&v6[40..]).add(packet.header).add(packet.payload).finish(), 0, "UDP's checksum holds");
}

#[test]
fn interface_names_of_any_length_keep_blocks_aligned() {
    for name in ["", "a", "abc", "shard-0", &"x".repeat(999)] {
        let capture = Pcap::add(Buffer::default(), 4, name, LOCAL, 0).into_inner().bytes;
        let [(INTERFACE_DESCRIPTION, block)] = blocks(&capture)[..] else { panic!("one block for {name:?}") };
        assert_eq!(&block[20..][..name.len().min(256)], &name.as_bytes()[..name.len().min(256)]);
    }
}

#[test]
#[cfg(feature = "std")]
fn io_sink_stops_at_the_first_error() {
    let mut space = [0_u8; 30];
    let mut sink = IoSink::new(&mut space[..]);
    begin(&mut sink);
    assert!(sink.error().is_none());
    begin(&mut sink);
    assert_eq!(sink.finish().unwrap_err().kind(), std::io::ErrorKind::WriteZero);
}

const DISSECTOR: &str = include_str!("../../../wireshark/sumac.lua");

/// Return the lines of a table of the dissector.
fn table(name: &str) -> impl Iterator<Item = &'static str> {
    let begin = format!("local {name} = {{\n");
    let (_, rest) = DISSECTOR.split_once(&begin).expect("the table begins");
    rest.split_once("\n}").expect("the table ends").0.lines()
}

#[test]
fn dissector_names_each_field_at_its_offset() {
    let lists = crate::wire::field_ranges();
    for (name, fields) in ["FIELDS", "DATA_FIELDS", "RESULT_FIELDS", "FULL_FIELDS"].into_iter().zip(&lists) {
        let listed: Bytes<(&str, usize, usize)> = table(name)
            .map(|line| {
                let mut words = line.trim().trim_start_matches("{ ").split(", ");
                let mut next = || words.next().expect("name, offset, length");
                (next().trim_matches('"'), next().parse().expect("an offset"), next().parse().expect("a length"))
            })
            .collect();
        assert_eq!(listed, *fields, "{name}");
    }
    let len = |fields: &[(&str, usize, usize)]| fields.iter().map(|(_, _, len)| len).sum::<usize>();
    let [both, data, result, full] = lists.each_ref().map(|fields| len(fields));
    assert_eq!([both + data, both + result], [SHORT_HEADER_LEN; 2], "no byte without a name");
    assert_eq!(both + full, HEADER_LEN, "no byte without a name");
}

#[test]
fn dissector_names_each_number() {
    fn debug(value: impl std::fmt::Debug) -> String {
        format!("{value:?}")
    }
    let names = |name: &str, known: &dyn Fn(u8) -> Option<String>| {
        let mut expected = String::new();
        for number in 1..=u8::MAX {
            if let Some(value) = known(number) {
                write!(expected, "[{number}] = \"{value}\", ").expect("a string takes it");
            }
        }
        let found: Bytes<&str> = table(name).map(str::trim).collect();
        assert_eq!(found.join(" "), expected.trim_end(), "{name}");
    };
    names("KINDS", &|n| Kind::from_wire(n).map(debug));
    names("REASONS", &|n| NakReason::from_wire(n).map(debug));
    names("COLLECTIVES", &|n| Collective::from_wire(n).map(|value| value.name().into()));
    names("DTYPES", &|n| Dtype::from_wire(n).map(|value| value.name().into()));
    names("OPS", &|n| ReduceOp::from_wire(n).map(|value| value.name().into()));
    names("FLAGS", &|n| {
        let flag = Flags::from_bits(n).filter(|_| n.is_power_of_two())?;
        flag.iter_names().next().map(|(name, _)| name.into())
    });
}

#[test]
fn tshark_shows_every_field_as_it_was_written() {
    if Command::new("tshark").arg("--version").output().is_err() {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "no tshark: apt-get install tshark");
        eprintln!("skipped: no tshark (Debian: apt-get install tshark)");
        return;
    }
    let packets = every_kind();
    let path = std::env::temp_dir().join(format!("sumac-dissector-{}.pcapng", std::process::id()));
    std::fs::write(&path, capture(&packets)).expect("a temporary file");
    let mut command = Command::new("tshark");
    let script = concat!("lua_script:", env!("CARGO_MANIFEST_DIR"), "/wireshark/sumac.lua");
    command.args(["-X", script, "-o", "udp.check_checksum:TRUE", "-T", "fields", "-r"]).arg(&path);
    let [both, data, result, full] = crate::wire::field_ranges();
    let names: Bytes<&str> = both.iter().chain(&full).map(|(name, ..)| *name).collect();
    for name in &names {
        command.args(["-e", &format!("sumac.{name}")]);
    }
    command.args(["-e", "_ws.col.Info", "-e", "sumac.payload", "-e", "udp.checksum.status", "-e", "frame.time_epoch"]);
    let output = command.output().expect("tshark ran once");
    // The path is this process's own.
    let _ = std::fs::remove_file(&path);
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(text.lines().count(), packets.len(), "{text}");
    for (n, (line, packet)) in text.lines().zip(&packets).enumerate() {
        let columns: Bytes<&str> = line.split('\t').collect();
        let repr = Repr::parse(&Packet::new_checked(&packet[..]).expect("intact")).expect("of this version");
        let form = match (repr.flags.contains(Flags::SHORT), repr.kind) {
            (false, _) => &full,
            (true, Kind::Result) => &result,
            (true, _) => &data,
        };
        for (name, shown) in names.iter().zip(&columns).take(both.len() + full.len()) {
            let Some((_, start, len)) = both.iter().chain(form).find(|field| field.0 == *name) else {
                assert_eq!(*shown, "", "{name} of packet {n}: {line}");
                continue;
            };
            let mut bytes = [0; 8];
            bytes[..*len].copy_from_slice(&packet[*start..][..*len]);
            assert_eq!(number(shown), u64::from_le_bytes(bytes), "{name} of packet {n} as {shown}: {line}");
        }
        let [info, payload, checksum, time] = columns[both.len() + full.len()..] else {
            panic!("four more columns: {line}")
        };
        let kind = repr.kind;
        assert!(info.starts_with(&format!("{kind:?}")) && info.contains("seq="), "{info}");
        let hex = packet[repr.header_len()..].iter().fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"));
        assert_eq!(payload, hex);
        // 1: good; 3: not present, which IPv4 permits.
        assert!(matches!(checksum, "1" | "3"), "UDP's checksum has status {checksum}: {line}");
        let at_ns = EPOCH_NS + n as u64 * 1_000_001;
        assert_eq!(time, format!("{}.{:09}", at_ns / 1_000_000_000, at_ns % 1_000_000_000));
    }
}

/// Parse a number as tshark prints it.
fn number(shown: &str) -> u64 {
    let parsed = shown.strip_prefix("0x").map_or_else(|| shown.parse(), |hex| u64::from_str_radix(hex, 16));
    parsed.unwrap_or_else(|_| panic!("{shown:?} is no number"))
}
