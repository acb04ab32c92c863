use super::update::{
    PIECE_MAX_BYTES, PieceBytes, SlotId, SlotImage, SlotTrust, SlotsStatus, Transfer, UpdateRequest, UpdateStatus,
};
use super::*;
use crate::ids::{BootId, ChildIndex, Epoch, GroupId, TreeId};
use crate::key::GroupSecret;
use crate::port::Addr;
use crate::uplink::HopTimers;
use core::num::NonZeroU32;
use proptest::prelude::*;

fn group() -> GroupConfig {
    let mut zero_copy = ChildMask::EMPTY;
    [0, 3, 64, 255].into_iter().for_each(|child| zero_copy.insert(ChildIndex(child)));
    GroupConfig {
        group: GroupId(0x1234),
        tree: TreeId(5),
        epoch: Epoch { term: 1, counter: 2 },
        order: Order::TreePairwise,
        secret: GroupSecret([9; 16]),
        parent_key: 0x1122_3344_5566_7788,
        shared: Some(Addr::Udp("239.255.1.2:20000".parse().unwrap())),
        parent_shared: Some(SharedLink { addr: Addr::Emu(8), key: 0x99aa }),
        window_max: 32,
        slots: 64,
        chunk_len_bytes: 1376,
        ranks: NonZeroU32::new(600).unwrap(),
        lease_ms: 30_000,
        timers: HopTimers::DEFAULT.into(),
        zero_copy,
    }
}

fn tree() -> TreeConfig {
    let addrs = [Addr::Udp("127.0.0.1:4791".parse().unwrap()), Addr::Emu(7)];
    let parent = NodeParent { data_addrs: addrs.into_iter().collect(), child: ChildIndex(3) };
    TreeConfig {
        tree: TreeId(5),
        parent: Some(parent),
        children: 200,
        ranks: [300, TreeConfig::NODE].into_iter().collect(),
    }
}

fn frame<M: Serialize>(message: &M) -> Vec<u8> {
    encode(message, &mut [0; 1024]).unwrap().to_vec()
}

/// Version 19, byte for byte. Any change requires a new version.
#[test]
fn version_19_encodes_to_golden_bytes() {
    let install = frame(&Envelope { id: 1, message: Request::InstallTree(tree()) });
    let create = frame(&Envelope { id: 2, message: Request::CreateGroup(group()) });
    let refused = frame(&Envelope { id: 2, message: Response::Refused(Refusal::NoSlots { need: 64 }) });
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let holder = Some(Addr::Udp("127.0.0.1:4791".parse().unwrap()));
    let rejection = Rejection::NameTaken { holder, is_alive: true };
    let rejected = frame(&Envelope { id: 3, message: Request::Rejected(rejection) });
    let ticket = frame(&JobTicket { job: "j".try_into().unwrap(), rank: 300, proof: [5; 32] });
    let found = [install, create, refused, rejected, ticket].map(|bytes| hex(&bytes));
    assert_eq!(found, [GOLDEN_INSTALL, GOLDEN_CREATE, GOLDEN_REFUSED, GOLDEN_REJECTED, GOLDEN_TICKET]);
    let probe = frame(&Envelope { id: 4, message: Request::ProbePath(GroupId(300)) });
    let path = frame(&Envelope { id: 4, message: Response::Path { max_packet_len_bytes: Some(1472) } });
    assert_eq!([probe, path].map(|bytes| hex(&bytes)), [GOLDEN_PROBE, GOLDEN_PATH]);
}

const GOLDEN_INSTALL: &str = "53631300180000004cee43d7010105010200007f000001b725010703c80102ac02ffff03";
const GOLDEN_CREATE: &str = "5363130050000000229bc1940203b424050102020909090909090909090909090909090988ef99abc5e88c9111010000efff0102a09c01010108aab3022040e00ad804b0ea01d00fa08d06c096b10209010080808080808080808001";
const GOLDEN_REFUSED: &str = "536313000400000098841ab202020740";
const GOLDEN_REJECTED: &str = "536313000d0000002325a6120308000100007f000001b72501";
const GOLDEN_PROBE: &str = "536313000400000080c667c5040aac02";
const GOLDEN_PATH: &str = "5363130005000000852d0437040401c00b";
const GOLDEN_TICKET: &str =
    "5363130024000000c22054a3016aac020505050505050505050505050505050505050505050505050505050505050505";

const GOLDEN_PIECE: &str = "53631300090000008bf83692050b02ac0203010203";
const GOLDEN_UPDATE: &str = "536313007a000000ea8b1af8050501010103312e30030707070707070707070707070707070707070707070707070707070707070707010108322e302d72632e31030707070707070707070707070707070707070707070707070707070707070707000203070707070707070707070707070707070707070707070707070707070707070701";

fn slots() -> SlotsStatus {
    let image =
        |version: &str, trust| SlotImage { version: version.try_into().unwrap(), epoch: 3, sha256: [7; 32], trust };
    let images =
        [Some(image("1.0", SlotTrust::Confirmed)), Some(image("2.0-rc.1", SlotTrust::Trial { tries_left: 2 }))];
    SlotsStatus { running: Some(SlotId::B), images }
}

#[test]
fn update_messages_encode_to_golden_bytes() {
    let bytes = PieceBytes::copy_of(&[1, 2, 3]).unwrap();
    let piece = Request::Update(UpdateRequest::Piece { offset: 300, bytes });
    let status = UpdateStatus { slots: slots(), transfer: Transfer::Ready { sha256: [7; 32], slot: SlotId::B } };
    let piece = frame(&Envelope { id: 5, message: piece });
    let answer = frame(&Envelope { id: 5, message: Response::Update(status.clone()) });
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    assert_eq!([piece, answer.clone()].map(|bytes| hex(&bytes)), [GOLDEN_PIECE, GOLDEN_UPDATE]);
    let (back, _) = decode::<Envelope<Response>>(&answer).unwrap().unwrap();
    assert_eq!(back.message, Response::Update(status));
}

/// A piece of the longest length, on a device with a heap.
#[cfg(feature = "std")]
#[test]
fn longest_piece_fits_one_frame_and_longer_ones_are_refused() {
    let bytes: Vec<u8> = (0..PIECE_MAX_BYTES).map(|at| (at / 200) as u8).collect();
    let piece = |bytes: &[u8]| {
        let bytes = PieceBytes::copy_of(bytes)?;
        Some(Envelope { id: u32::MAX, message: Request::Update(UpdateRequest::Piece { offset: u64::MAX, bytes }) })
    };
    let longest = piece(&bytes).unwrap();
    let mut buffer = std::vec![0; FRAME_HEADER_LEN + MAX_MESSAGE_LEN];
    let frame = encode(&longest, &mut buffer).unwrap();
    assert_eq!(frame_len(frame), Ok(Some(frame.len())));
    assert_eq!(decode::<Envelope<Request>>(frame), Ok(Some((longest, frame.len()))));
    assert_eq!(piece(&[&bytes[..], &[0]].concat()), None);
    // Another peer sends one byte more, and another one announces more than there is.
    let encoded = postcard::to_stdvec(&piece(&bytes).unwrap().message).unwrap();
    let len_at = encoded.len() - PIECE_MAX_BYTES - 3;
    assert_eq!(encoded[len_at..len_at + 3], [0x80, 0x80, 0x02], "the length");
    for (len, is_good) in [([0x80, 0x80, 0x02], true), ([0x81, 0x80, 0x02], false), ([0xff, 0xff, 0x7f], false)] {
        let mut bytes = [&encoded[..], &[0]].concat();
        bytes[len_at..len_at + 3].copy_from_slice(&len);
        assert_eq!(postcard::from_bytes::<Request>(&bytes).is_ok(), is_good, "{len:?}");
    }
}

#[test]
fn request_is_no_longer_in_memory_for_the_pieces() {
    assert!(size_of::<Request>() <= size_of::<TreeConfig>() + 64, "{} bytes", size_of::<Request>());
}

#[test]
fn announce_and_stats_round_trip() {
    let name: Name = "leaf-1".try_into().unwrap();
    let capabilities = DeviceCapabilities {
        max_packet_len_bytes: 65507,
        receive_buffer_bytes: 1 << 22,
        groups: 16,
        children: 256,
        slots: 1024,
        slot_memory_bytes: 1 << 26,
        dtypes: 0xffff,
        ops: 0x1a,
        collectives: 0x42,
    };
    let data_addrs = [Addr::Udp("[::1]:9".parse().unwrap())].into_iter().collect();
    let (machine, socket) = ("here".try_into().unwrap(), "leaf-1.7".try_into().unwrap());
    let user = DeviceUser { uid: 1000, serves_all: true };
    let attach = AttachPoint { machine, socket, user, redo_memory_bytes: 9, remote: Some("[::1]:8".parse().unwrap()) };
    let announce =
        Announce { name, boot_id: BootId(7), capabilities, data_addrs, attach: Some(attach), slots: Some(slots()) };
    let bytes = frame(&announce);
    assert_eq!(decode::<Announce>(&bytes).unwrap(), Some((announce, bytes.len())));

    let mut counters = Counters::default();
    counters.drop_packet(DropReason::QueueFull);
    let (slot_memory_used_bytes, stack) = (4, Some(StackUsage { used_bytes: 5, size_bytes: 6 }));
    let stats =
        Stats { boot_id: BootId(7), groups: 1, trees: 2, slots_used: 3, slot_memory_used_bytes, counters, stack };
    let bytes = frame(&Envelope { id: 9, message: Response::Stats(stats) });
    let (back, _) = decode::<Envelope<Response>>(&bytes).unwrap().unwrap();
    assert_eq!(back.message, Response::Stats(stats));
}

#[test]
fn partial_frame_waits_and_damaged_frame_fails() {
    let good = frame(&Envelope { id: 1, message: Request::Stats });
    for len in 0..good.len() {
        assert_eq!(decode::<Envelope<Request>>(&good[..len]), Ok(None), "{len} bytes");
    }
    for i in 0..good.len() {
        let mut bad = good.clone();
        bad[i] ^= 0x10;
        let error = decode::<Envelope<Request>>(&bad);
        // A larger length only waits for more bytes; everything else is an error at once.
        assert!(error.is_err() || (4..8).contains(&i) && error == Ok(None), "byte {i}: {error:?}");
    }
    assert_eq!(decode::<Envelope<Request>>(&[0; 12]), Err(FrameError::Magic(0)));
    assert!(matches!(encode(&tree(), &mut [0; 16]), Err(FrameError::Buffer { len: 16 })));
}

proptest! {
    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode::<Envelope<Request>>(&bytes);
        let mut framed = frame(&0_u8);
        framed.extend_from_slice(&bytes);
        let _ = decode::<Announce>(&framed);
    }
}
