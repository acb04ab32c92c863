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
        slowest: Some(Rank(0xa1a2_a3a3)),
        late_us: 0xb1b2_b3b4,
        ..Repr::new(
            Kind::Data,
            GroupId(0x7172_7374),
            Epoch { term: 1, counter: 2 },
            ChildIndex(0x00ff),
            0x8182_8384_8586_8788,
        )
    }
}

fn emit(repr: &Repr, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0xaa; repr.packet_len()];
    let mut packet = Packet::new_unchecked(&mut bytes[..]);
    packet.payload_mut().copy_from_slice(payload);
    repr.emit(&mut packet, payload_crc(payload));
    bytes
}

/// Version 1, byte for byte. Any change requires a new version.
#[test]
fn version_1_encodes_to_golden_bytes() {
    #[rustfmt::skip]
    let golden: [u8; 100] = [
        0x53, 0x55, 0x4d, 0x43, 0x01, 0x01, 0x03, 0x00, 0x01, 0x0a, 0x01, 0x00, 0x74, 0x73, 0x72, 0x71,
        0x02, 0x00, 0x01, 0x00, 0xff, 0x00, 0x01, 0x00, 0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01,
        0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11, 0x88, 0x87, 0x86, 0x85, 0x84, 0x83, 0x82, 0x81,
        0x24, 0x23, 0x22, 0x21, 0x34, 0x33, 0x32, 0x31, 0x42, 0x41, 0x04, 0x00, 0x03, 0x00, 0xc2, 0xc1,
        0x58, 0x57, 0x56, 0x55, 0x54, 0x53, 0x52, 0x51, 0x68, 0x67, 0x66, 0x65, 0x64, 0x63, 0x62, 0x61,
        0x94, 0x93, 0x92, 0x91, 0xa4, 0xa3, 0xa2, 0xa1, 0xb4, 0xb3, 0xb2, 0xb1, 0xf4, 0x65, 0xfa, 0x6e,
        0xde, 0xad, 0xbe, 0xef,
    ];
    assert_eq!(emit(&sample(), &[0xde, 0xad, 0xbe, 0xef]), golden);
}

#[test]
fn crc32c_matches_check_value_and_portable_implementation() {
    // The check value of CRC-32/ISCSI: "123456789" -> 0xe3069283.
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    const PORTABLE: ::crc::Crc<u32> = ::crc::Crc::<u32>::new(&::crc::CRC_32_ISCSI);
    let bytes: Vec<u8> = (0..5000_u32).map(|i| (i * 7 + i / 256) as u8).collect();
    for len in [0, 1, 7, 92, 96, 1376, 4096, 5000] {
        assert_eq!(crc32c(&bytes[..len]), PORTABLE.checksum(&bytes[..len]));
    }
}

#[test]
fn damaged_packet_fails_the_matching_check() {
    let good = emit(&sample(), &[1, 2, 3, 4]);
    let check = |bytes: &[u8]| Packet::new_checked(bytes.to_vec()).map(|_| ()).unwrap_err();
    assert_eq!(check(&good[..95]), WireError::Truncated { len: 95 });
    assert_eq!(check(&good[..99]), WireError::Length { declared: 4, actual: 3 });
    let mut bad = good.clone();
    bad[0] = 0;
    assert!(matches!(check(&bad), WireError::Magic { .. }));
    let mut bad = good.clone();
    bad[4] = 2;
    assert_eq!(check(&bad), WireError::Version { found: 2 });
    for i in 5..good.len() {
        for bit in 0..8 {
            let mut bad = good.clone();
            bad[i] ^= 1 << bit;
            assert!(matches!(check(&bad), WireError::Checksum { .. } | WireError::Length { .. }), "byte {i} bit {bit}");
        }
    }
}

#[test]
fn unknown_number_is_refused_with_its_field() {
    for (offset, field) in [(5, "kind"), (8, "collective"), (9, "dtype"), (10, "op")] {
        let mut bytes = emit(&sample(), &[1, 2, 3, 4]);
        bytes[offset] = 0xee;
        let packet = Packet::new_unchecked(&bytes[..]);
        assert_eq!(Repr::parse(&packet), Err(WireError::UnknownNumber { field, number: 0xee }));
    }
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
    fn header_and_payload_round_trip(seq: u64, mark: u64, key: u64, bits: u64, child: u16, window: u16, payload in prop::collection::vec(any::<u8>(), 0..300)) {
        let repr = Repr {
            seq: ChunkNo(seq), mark: ChunkNo(mark), key, bits, child: ChildIndex(child), window,
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
        if bytes.len() >= HEADER_LEN {
            let _ = Repr::parse(&Packet::new_unchecked(&bytes[..]));
        }
    }
}
