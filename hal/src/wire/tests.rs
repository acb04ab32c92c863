use super::*;
use crate::ids::{ChildIndex, ChunkNo, Epoch, GroupId, Rank};
use crate::op::{Collective, Dtype, OpDesc, ReduceOp};
use proptest::prelude::*;

fn sample() -> Repr {
    Repr {
        flags: Flags::PARTIAL | Flags::WANT,
        collective: Some(Collective::AllReduce),
        dtype: Some(Dtype::Bf16),
        op: Some(ReduceOp::Sum),
        count: 1,
        seq: ChunkNo(0x0102_0304_0506_0708),
        mark: ChunkNo(0x1112_1314_1516_1718),
        signature: 0x2122_2324,
        token: 0x3132_3334,
        window: 0x4142,
        payload_len_bytes: 4,
        attempt: 3,
        bits: 0x5152_5354_5556_5758,
        bits2: 0x6162_6364_6566_6768,
        root: Rank(0x9192_9394),
        view: 0xc1c2,
        slowest: Some(Rank(0xa1a1)),
        late_us: 0x00b1_a000,
        ..Repr::new(
            Kind::Data,
            GroupId(0x7172_7374),
            Epoch { term: 1, counter: 2 },
            ChildIndex(0x00fe),
            0x8182_8384_8586_8788,
        )
    }
}

/// A Data or Result in the short form, without what that has no room for.
fn short(kind: Kind) -> Repr {
    let sample = sample();
    let is_result = kind == Kind::Result;
    Repr {
        kind,
        flags: sample.flags | Flags::SHORT,
        collective: None,
        dtype: None,
        op: None,
        mark: ChunkNo(sample.seq.0 - 0x0c0d),
        token: if is_result { 0 } else { sample.token },
        window: if is_result { sample.window } else { 0 },
        view: if is_result { 0xc1 } else { 0 },
        bits: 0,
        bits2: 0,
        root: Rank(0),
        ..sample
    }
}

fn emit(repr: &Repr, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0xaa; repr.packet_len()];
    bytes[repr.header_len()..].copy_from_slice(payload);
    repr.emit(&mut Packet::new_unchecked(&mut bytes[..]), payload_crc(payload));
    assert_eq!([&repr.header(payload_crc(payload))[..], payload].concat(), bytes);
    bytes
}

fn parse(bytes: &[u8]) -> Repr {
    Repr::parse(&Packet::new_checked(bytes).expect("a packet")).expect("of this version")
}

/// Version 2, byte for byte. Any change requires a new version.
#[test]
fn version_2_encodes_to_golden_bytes() {
    #[rustfmt::skip]
    let full: [u8; 92] = [
        0xc5, 0x02, 0x01, 0x03, 0x74, 0x73, 0x72, 0x71, 0x02, 0x00, 0x01, 0x00, 0x24, 0x23, 0x22, 0x21,
        0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01, 0x88, 0x87, 0x86, 0x85, 0x84, 0x83, 0x82, 0x81,
        0xfe, 0x03, 0x00, 0x00, 0xa2, 0xa1, 0x8d, 0x6d, 0x34, 0x33, 0x32, 0x31, 0x01, 0x00, 0x42, 0x41,
        0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11, 0x58, 0x57, 0x56, 0x55, 0x54, 0x53, 0x52, 0x51,
        0x68, 0x67, 0x66, 0x65, 0x64, 0x63, 0x62, 0x61, 0x94, 0x93, 0x92, 0x91, 0x01, 0x0a, 0x01, 0x00,
        0xc2, 0xc1, 0x00, 0x00, 0x1b, 0x48, 0xc4, 0x13, 0xde, 0xad, 0xbe, 0xef,
    ];
    #[rustfmt::skip]
    let data: [u8; 52] = [
        0xc5, 0x02, 0x01, 0x83, 0x74, 0x73, 0x72, 0x71, 0x02, 0x00, 0x01, 0x00, 0x24, 0x23, 0x22, 0x21,
        0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01, 0x88, 0x87, 0x86, 0x85, 0x84, 0x83, 0x82, 0x81,
        0xfe, 0x03, 0x0d, 0x0c, 0xa2, 0xa1, 0x8d, 0x6d, 0x34, 0x33, 0x32, 0x31, 0x33, 0x78, 0x90, 0xcd,
        0xde, 0xad, 0xbe, 0xef,
    ];
    #[rustfmt::skip]
    let result: [u8; 52] = [
        0xc5, 0x02, 0x04, 0x83, 0x74, 0x73, 0x72, 0x71, 0x02, 0x00, 0x01, 0x00, 0x24, 0x23, 0x22, 0x21,
        0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01, 0x88, 0x87, 0x86, 0x85, 0x84, 0x83, 0x82, 0x81,
        0xfe, 0x03, 0x0d, 0x0c, 0xa2, 0xa1, 0x8d, 0x6d, 0x42, 0x41, 0xc1, 0x00, 0x25, 0xaa, 0x5c, 0x6c,
        0xde, 0xad, 0xbe, 0xef,
    ];
    let payload = [0xde, 0xad, 0xbe, 0xef];
    assert_eq!(emit(&sample(), &payload), full);
    assert_eq!(emit(&short(Kind::Data), &payload), data);
    assert_eq!(emit(&short(Kind::Result), &payload), result);
}

#[test]
fn crc32c_matches_check_value_and_portable_implementation() {
    // The check value of CRC-32/ISCSI: "123456789" -> 0xe3069283.
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    const PORTABLE: ::crc::Crc<u32> = ::crc::Crc::<u32>::new(&::crc::CRC_32_ISCSI);
    let bytes: Vec<u8> = (0..5000_u32).map(|i| (i * 7 + i / 256) as u8).collect();
    for len in [0, 1, 7, 44, 48, 84, 88, 1424, 4096, 5000] {
        assert_eq!(crc32c(&bytes[..len]), PORTABLE.checksum(&bytes[..len]));
    }
}

#[test]
fn damaged_packet_fails_the_matching_check() {
    let check = |bytes: &[u8]| Packet::new_checked(bytes.to_vec()).map(|_| ()).unwrap_err();
    for repr in [sample(), short(Kind::Data), short(Kind::Result)] {
        let good = emit(&repr, &[1, 2, 3, 4]);
        let header_len = repr.header_len();
        let len = header_len - 1;
        assert_eq!(check(&good[..len]), WireError::Truncated { len, header_len });
        assert_eq!(check(&good[..3]), WireError::Truncated { len: 3, header_len: SHORT_HEADER_LEN });
        assert!(matches!(check(&good[..header_len + 3]), WireError::Checksum { .. }));
        let mut bad = good.clone();
        bad[0] = 0;
        assert_eq!(check(&bad), WireError::Magic { found: 0 });
        for i in 2..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[i] ^= 1 << bit;
                let error = check(&bad);
                let is_form = (i, bit) == (3, 7) && matches!(error, WireError::Truncated { .. });
                assert!(is_form || matches!(error, WireError::Checksum { .. }), "byte {i} bit {bit}: {error}");
            }
        }
    }
}

#[test]
fn packet_of_another_version_is_named() {
    let check = |bytes: &[u8]| Packet::new_checked(bytes.to_vec()).map(|_| ()).unwrap_err();
    let mut newer = emit(&short(Kind::Data), &[1, 2, 3, 4]);
    newer[1] = 3;
    assert_eq!(check(&newer), WireError::Version { found: 3 });
    // A header of version 1 began with another magic, in four bytes.
    let mut older = [0; 100];
    older[..5].copy_from_slice(b"SUMC\x01");
    assert_eq!(check(&older), WireError::Version { found: 1 });
    let text = WireError::Version { found: 1 }.to_string();
    assert_eq!(text, "header version is 1; this build supports version 2: update the older one of both");
}

#[test]
fn unknown_number_is_refused_with_its_field() {
    let good = emit(&sample(), &[1, 2, 3, 4]);
    for (offset, field) in [(2, "kind"), (76, "collective"), (77, "dtype"), (78, "op")] {
        let mut bytes = good.clone();
        bytes[offset] = 0xee;
        let packet = Packet::new_unchecked(&bytes[..]);
        assert_eq!(Repr::parse(&packet), Err(WireError::UnknownNumber { field, number: 0xee }));
    }
    // Only Data and Result have a short form.
    let bytes = emit(&Repr { kind: Kind::Probe, ..short(Kind::Data) }, &[1, 2, 3, 4]);
    let packet = Packet::new_checked(&bytes[..]).expect("intact");
    assert_eq!(Repr::parse(&packet), Err(WireError::UnknownNumber { field: "flags", number: 0x83 }));
}

#[test]
fn short_form_round_trips_and_reports_no_mark_above_the_true_one() {
    for kind in [Kind::Data, Kind::Result] {
        let repr = short(kind);
        assert_eq!(parse(&emit(&repr, &[1, 2, 3, 4])), repr);
        for (seq, mark, seen) in [
            (7, 7, 7),
            (7, 0, 0),
            (100_000, 100_000 - 65_534, 100_000 - 65_534),
            (100_000, 100_000 - 65_535, 0),
            (1 << 40, 5, 0),
            (7, 9, 7),
        ] {
            let repr = Repr { seq: ChunkNo(seq), mark: ChunkNo(mark), ..repr };
            assert_eq!(parse(&emit(&repr, &[1, 2, 3, 4])).mark, ChunkNo(seen), "{mark} at {seq}");
        }
    }
}

#[test]
fn lateness_is_exact_for_two_milliseconds_and_then_to_a_thousandth() {
    for late_us in (0..2048).chain([1 << 20, 1 << 31, u32::MAX, 123_456_789, 4_099]) {
        let repr = Repr { late_us, ..sample() };
        let seen = parse(&emit(&repr, &[1, 2, 3, 4])).late_us;
        assert!(seen <= late_us && late_us - seen <= late_us / 1024, "{late_us} as {seen}");
        assert!(late_us >= 2048 || seen == late_us);
    }
    let unnamed = Repr { slowest: Some(Rank(0xffff)), ..sample() };
    assert_eq!(parse(&emit(&unnamed, &[1, 2, 3, 4])).slowest, None, "beyond the field");
}

#[test]
fn result_to_the_shared_address_is_for_all_children() {
    for flags in [Flags::empty(), Flags::SHORT] {
        let repr = Repr { flags, child: ChildIndex::ALL, ..short(Kind::Result) };
        let parsed = parse(&emit(&repr, &[1, 2, 3, 4]));
        assert_eq!((parsed.child, parsed.flags), (ChildIndex::ALL, flags | Flags::SHARED));
        // The last of 256 children is another.
        let repr = Repr { child: ChildIndex(255), ..repr };
        assert_eq!(parse(&emit(&repr, &[1, 2, 3, 4])).child, ChildIndex(255));
    }
}

#[test]
fn data_takes_the_full_form_where_it_costs_no_packet() {
    let form = |payload_len_bytes: u16, describe| {
        let mut repr = Repr { payload_len_bytes, ..sample() };
        let goes = repr.choose_form(1424, describe);
        (repr.flags.contains(Flags::SHORT), goes)
    };
    // Of a known operation: short, unless the Nak of an unknown one would be longer.
    assert_eq!((form(1424, false), form(40, false), form(39, false)), ((true, true), (true, true), (false, true)));
    // Of one to describe: with the description if both fit a packet, else behind it.
    assert_eq!((form(1384, true), form(1385, true), form(1424, true)), ((false, true), (true, false), (true, false)));
    let mut repr = Repr { flags: Flags::WANT | Flags::CONGESTED, ..sample() };
    repr.set_limit(StragglerLimit { us: 9, cuts: true }, 3);
    repr.choose_form(4, true);
    let described = parse(&emit(&repr.operation(), &[]));
    assert_eq!((described.op_desc(), described.limit()), (repr.op_desc(), repr.limit()));
    assert_eq!((described.kind, described.signature, described.seq), (Kind::Operation, repr.signature, repr.seq));
    assert_eq!(described.flags, Flags::CONGESTED | Flags::LIMITED | Flags::CUTS);
}

#[test]
fn packed_operation_round_trips_and_saturates() {
    let last = (Dtype::ALL[Dtype::ALL.len() - 1], ReduceOp::ALL[ReduceOp::ALL.len() - 1]);
    for desc in [
        OpDesc::barrier(),
        OpDesc::all_reduce(Dtype::I64, ReduceOp::Max, 123_456_789),
        OpDesc::reduce(last.0, last.1, Rank((1 << 14) - 1), (1 << 36) - 1),
        OpDesc::broadcast(Dtype::Bf16, Rank(7), 0),
    ] {
        assert_eq!(unpack_op(pack_op(&desc)), Some(desc));
    }
    let beyond = OpDesc::broadcast(Dtype::F32, Rank(1 << 20), 1 << 50);
    let most = OpDesc::broadcast(Dtype::F32, Rank((1 << 14) - 1), (1 << 36) - 1);
    assert_eq!(unpack_op(pack_op(&beyond)), Some(most));
    assert_eq!(unpack_op(0), None);
}

#[test]
fn straggler_limit_round_trips_and_changes_the_signature() {
    let limit = StragglerLimit { us: 0xffff_fffe, cuts: true };
    let mut repr = Repr { slowest: None, bits2: 0, ..sample() };
    assert_eq!(repr.limit(), None);
    repr.set_limit(limit, 77);
    let bytes = emit(&repr, &[1, 2, 3, 4]);
    let parsed = Repr::parse(&Packet::new_checked(&bytes[..]).expect("whole")).expect("known");
    assert_eq!((parsed.limit(), parsed.slowest), (Some((limit, 77)), None));
    let others =
        [StragglerLimit { us: 1, ..limit }, StragglerLimit { cuts: false, ..limit }].map(|other| other.sign(5));
    assert!(!others.contains(&limit.sign(5)) && others[0] != others[1] && limit.sign(5) != limit.sign(6));
}

#[test]
fn rank_mask_round_trips_as_little_endian_bits() {
    let mask: RankMask = [0, 9, 255, 256].map(Rank).into_iter().collect();
    let bytes = mask.to_bytes();
    assert_eq!((bytes[0], bytes[1], bytes[31], mask.len()), (1, 2, 0x80, 3));
    assert_eq!(RankMask::from_bytes(&bytes), Some(mask));
    assert_eq!((RankMask::from_bytes(&bytes[1..]), mask.to_string().as_str()), (None, "0, 9, 255"));
}

proptest! {
    #[test]
    fn header_and_payload_round_trip(seq: u64, mark: u64, key: u64, bits: u64, child: u8, window: u16, payload in prop::collection::vec(any::<u8>(), 0..300)) {
        let repr = Repr {
            seq: ChunkNo(seq), mark: ChunkNo(mark), key, bits, child: ChildIndex(child.into()), window,
            payload_len_bytes: payload.len() as u16,
            ..sample()
        };
        let bytes = emit(&repr, &payload);
        let packet = Packet::new_checked(&bytes[..]).unwrap();
        prop_assert_eq!(packet.payload(), &payload[..]);
        prop_assert_eq!(Repr::parse(&packet).unwrap(), repr);
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        if let Ok(packet) = Packet::new_checked(&bytes[..]) {
            let _ = Repr::parse(&packet);
        }
        let _ = Repr::parse(&Packet::new_unchecked(&bytes[..]));
        let mut bytes = bytes;
        if let [magic, version, ..] = &mut bytes[..] {
            (*magic, *version) = (MAGIC, VERSION);
            let _ = Repr::parse(&Packet::new_unchecked(&bytes[..]));
        }
    }
}
