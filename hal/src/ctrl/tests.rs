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

/// Version 17, byte for byte. Any change requires a new version.
#[test]
fn version_17_encodes_to_golden_bytes() {
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

const GOLDEN_INSTALL: &str = "5363110018000000f76f0344010105010200007f000001b725010703c80102ac02ffff03";
const GOLDEN_CREATE: &str = "5363110050000000991a81070203b424050102020909090909090909090909090909090988ef99abc5e88c9111010000efff0102a09c01010108aab3022040e00ad804b0ea01d00fa08d06c096b10209010080808080808080808001";
const GOLDEN_REFUSED: &str = "536311000400000023055a2102020740";
const GOLDEN_REJECTED: &str = "536311000d00000098a4e6810308000100007f000001b72501";
const GOLDEN_PROBE: &str = "53631100040000003b472756040aac02";
const GOLDEN_PATH: &str = "53631100050000003eac44a4040401c00b";
const GOLDEN_TICKET: &str =
    "536311002400000079a11430016aac020505050505050505050505050505050505050505050505050505050505050505";

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
    let announce = Announce { name, boot_id: BootId(7), capabilities, data_addrs, attach: Some(attach) };
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
