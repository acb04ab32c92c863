//! Initial inputs of searches, written by production code.

use serde::Serialize;
use std::io::Cursor;
use sumac::controller::proto::{ClientReply, ClientRequest, UpdateCommand, UpdateDevice, UpdateRefusal};
use sumac_firmware::bfb::{Builder, ImageId, ImageName, Source};
use sumac_firmware::manifest::{MANIFEST_IMAGE, Manifest};
use sumac_hal::ctrl::update::{
    PieceBytes, SlotId, SlotImage, SlotTrust, SlotsStatus, Transfer, UpdateOffer, UpdateRequest, UpdateStatus,
};
use sumac_hal::ctrl::{Announce, Envelope, Hello, JobTicket, Name, Request, Response, encode};
use sumac_hal::dma::{Address, Coverage, Descriptor, RegionKey, Scope, Step, Tag};
use sumac_hal::ids::{ChildIndex, ChunkNo, Epoch, GroupId, Rank};
use sumac_hal::mmio::admission::{AdmissionReply, AdmissionRequest, AttachRefusal};
use sumac_hal::mmio::{AdminCommand, CompletionEntry, EntryStatus, SubmissionEntry};
use sumac_hal::op::{Collective, Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::wire::{Flags, Kind, NakReason, Packet, RankMask, Repr, StragglerLimit, payload_crc};

/// A target, a name, and bytes.
pub type Seed = (&'static str, String, Vec<u8>);

/// Return all initial inputs.
///
/// # Panics
/// If production code refuses the contents of a seed.
pub fn all() -> Vec<Seed> {
    [wire(), control(), admission(), rings(), fabrics(), arrays(), boot()].concat()
}

fn seed(target: &'static str, name: impl Into<String>, front: &[u8], bytes: &[u8]) -> Seed {
    (target, name.into(), [front, bytes].concat())
}

fn wire() -> Vec<Seed> {
    let kinds = [
        Kind::Data,
        Kind::Ref,
        Kind::Empty,
        Kind::Result,
        Kind::Done,
        Kind::Probe,
        Kind::Status,
        Kind::Nak,
        Kind::Late,
        Kind::Cut,
        Kind::Operation,
    ];
    let mask: RankMask = [Rank(0), Rank(3), Rank(200)].into_iter().collect();
    let packet = |kind: Kind, reason: Option<NakReason>, form: Flags| {
        let payload = match kind {
            Kind::Data | Kind::Result => vec![7; 64],
            Kind::Late | Kind::Cut => mask.to_bytes().to_vec(),
            _ if reason == Some(NakReason::Stragglers) => mask.to_bytes().to_vec(),
            _ => Vec::new(),
        };
        let mut repr = Repr::new(kind, GroupId(5), Epoch::from_bits(1), ChildIndex(2), 0x1234_5678);
        let desc = OpDesc {
            collective: Collective::AllReduce,
            dtype: Some(Dtype::F32),
            op: Some(ReduceOp::Sum),
            root: Rank(0),
            count: 4,
        };
        (repr.reason, repr.seq, repr.count) = (reason, ChunkNo(9), 1);
        repr.payload_len_bytes = payload.len() as u16;
        if matches!(kind, Kind::Data | Kind::Ref | Kind::Empty | Kind::Late | Kind::Operation) {
            repr.set_op(&desc);
            repr.set_limit(StragglerLimit { us: 1000, cuts: true }, 1);
            repr.signature = desc.signature(Path::Tree, 1);
        }
        repr.flags |= form;
        let mut bytes = vec![0; repr.header_len()];
        bytes.extend_from_slice(&payload);
        repr.emit(&mut Packet::new_unchecked(&mut bytes[..]), payload_crc(&payload));
        bytes
    };
    let full = Flags::empty();
    let plain =
        kinds.into_iter().filter(|kind| *kind != Kind::Nak).map(|kind| (format!("{kind:?}"), packet(kind, None, full)));
    let naks = (1..=10).filter_map(NakReason::from_wire);
    let naks = naks.map(|reason| (format!("Nak-{reason:?}"), packet(Kind::Nak, Some(reason), full)));
    let short = [Kind::Data, Kind::Result].map(|kind| (format!("Short-{kind:?}"), packet(kind, None, Flags::SHORT)));
    plain.chain(naks).chain(short).map(|(name, bytes)| seed("wire", name.to_lowercase(), &[1], &bytes)).collect()
}

fn message(name: &str, kind: u8, message: &impl Serialize) -> Seed {
    let mut buffer = vec![0; 70_000];
    let frame = encode(message, &mut buffer).expect("it fits");
    // An unmodified frame, read in pieces.
    seed("control", name, &[kind << 1 | 1, 20], frame)
}

fn control() -> Vec<Seed> {
    let request = |message| Envelope { id: 7, message };
    let ticket = JobTicket { job: Name::try_from("job").expect("short"), rank: 2, proof: [5; 32] };
    let mut seeds = vec![
        message("hello", 0, &request(Request::Identify)),
        message("renew", 0, &request(Request::RenewGroup(GroupId(3)))),
        message("done", 1, &Envelope { id: 7, message: Response::Done }),
        message("probe-path", 0, &request(Request::ProbePath(GroupId(3)))),
        message("path", 1, &Envelope { id: 7, message: Response::Path { max_packet_len_bytes: Some(1472) } }),
        message("hello-client", 2, &Hello::Client),
        message("announce", 3, &crate::admission::announce()),
        message("device", 2, &Hello::Device(crate::admission::announce())),
        message("host-device", 2, &Hello::HostDevice { announce: crate::admission::announce(), ticket }),
        message("join", 4, &ClientRequest::Join(crate::admission::joining())),
        message(
            "join-on",
            4,
            &ClientRequest::JoinOn { request: crate::admission::joining(), devices: vec!["d0".into()] },
        ),
        message("leave", 4, &ClientRequest::Leave),
        message("path-probed", 4, &ClientRequest::PathProbed { group: GroupId(3), max_packet_len_bytes: Some(1472) }),
        message("left", 5, &ClientReply::Left),
        message("lost", 5, &ClientReply::RankLost(Rank(3))),
    ];
    seeds.extend(updates());
    // Every message of the controller in the inputs of the target `admission`.
    for (number, (kind, bytes)) in crate::admission::controller_messages().into_iter().enumerate() {
        seeds.push(seed("control", format!("from-controller-{number}"), &[kind << 1 | 0x10, 255], &bytes));
    }
    seeds
}

/// Updates of devices over the network.
fn updates() -> Vec<Seed> {
    let mut seeds = Vec::new();
    for request in update_requests() {
        let name = format!("update-{}", short(&request));
        seeds.push(message(&name, 0, &Envelope { id: 7, message: Request::Update(request) }));
    }
    for transfer in transfers() {
        let (name, status) = (short(&transfer), UpdateStatus { slots: slots_status(), transfer });
        let response = Envelope { id: 7, message: Response::Update(status.clone()) };
        seeds.push(message(&format!("update-status-{name}"), 1, &response));
        seeds.push(message(&format!("updated-{name}"), 5, &ClientReply::Updated(Box::new(Ok(status)))));
    }
    let why = "no".try_into().expect("short");
    seeds.push(message("update-refused", 1, &Envelope { id: 7, message: Response::UpdateRefused(why) }));
    let announce = Announce { slots: Some(slots_status()), ..crate::admission::announce() };
    seeds.push(message("announce-slots", 3, &announce));
    for command in update_commands() {
        let (name, device, operator) = (short(&command), "leaf0".into(), "ann@ops, process 7".into());
        let update = UpdateDevice { device, operator, command };
        seeds.push(message(&format!("update-device-{name}"), 4, &ClientRequest::Update(Box::new(update))));
    }
    let busy = UpdateRefusal::Busy { device: "leaf0".into(), operator: "ann@ops, process 7".into(), for_s: 9 };
    seeds.push(message("update-busy", 5, &ClientReply::Updated(Box::new(Err(busy)))));
    seeds
}

/// The name of a variant, in lower case.
fn short(value: &impl std::fmt::Debug) -> String {
    let text = format!("{value:?}");
    text.split(|at: char| !at.is_alphanumeric()).next().unwrap_or_default().to_lowercase()
}

const OFFER: UpdateOffer = UpdateOffer { manifest_len_bytes: 700, len_bytes: 40 << 20, sha256: [3; 32] };

fn update_requests() -> [UpdateRequest; 7] {
    let bytes = PieceBytes::copy_of(&[9; 512]).expect("short");
    [
        UpdateRequest::Status,
        UpdateRequest::Begin(OFFER),
        UpdateRequest::Piece { offset: 700, bytes },
        UpdateRequest::Finish,
        UpdateRequest::Restart { sha256: OFFER.sha256 },
        UpdateRequest::RollBack,
        UpdateRequest::Confirm,
    ]
}

fn update_commands() -> [UpdateCommand; 7] {
    [
        UpdateCommand::Status,
        UpdateCommand::Begin(OFFER),
        UpdateCommand::Piece { offset: 700, bytes: vec![9; 600] },
        UpdateCommand::Finish,
        UpdateCommand::Restart(OFFER.sha256),
        UpdateCommand::RollBack,
        UpdateCommand::Confirm,
    ]
}

fn slots_status() -> SlotsStatus {
    let image = |version: &str, trust| {
        let version = version.try_into().expect("short");
        Some(SlotImage { version, epoch: 1, sha256: OFFER.sha256, trust })
    };
    let images = [image("1.0", SlotTrust::Confirmed), image("2.0", SlotTrust::Trial { tries_left: 2 })];
    SlotsStatus { running: Some(SlotId::A), images }
}

fn transfers() -> [Transfer; 6] {
    let sha256 = OFFER.sha256;
    [
        Transfer::None,
        Transfer::Receiving { sha256, received_bytes: 1212, written_bytes: 700 },
        Transfer::Checking { sha256 },
        Transfer::Ready { sha256, slot: SlotId::B },
        Transfer::Failed { sha256, why: "no".try_into().expect("short") },
        Transfer::Restarting,
    ]
}

fn admission() -> Vec<Seed> {
    crate::admission::inputs().into_iter().map(|(name, bytes)| seed("admission", name, &[], &bytes)).collect()
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn rings() -> Vec<Seed> {
    let region = |index| RegionKey { index, generation: 1 };
    let at = |index, offset_bytes| Address { region: region(index), offset_bytes };
    let (source, accumulator, op) = (Dtype::Bf16, Dtype::F32, ReduceOp::Sum);
    let steps = [
        Step::Publish { dst: at(0, 0), words: [0, 0], covers: Coverage::NONE },
        Step::Load { source, accumulator, src: at(1, 8), dst: at(0, 64), count: 8 },
        Step::Reduce { op, source, accumulator, src: at(1, 80), dst: at(0, 64), count: 8 },
        Step::Store { op, accumulator, output: source, src: at(0, 64), dst: at(0, 128), count: 8, ranks: 2 },
        Step::Publish {
            dst: at(0, 0),
            words: [1, 2],
            covers: Coverage { offset_bytes: Coverage::OFFSET_MIN_BYTES, len_bytes: 8 },
        },
        Step::Copy { src: at(0, 128), dst: at(1, 8), len_bytes: 16 },
    ];
    let mut chain = Vec::new();
    for (number, step) in steps.into_iter().enumerate() {
        let tag = Tag { seq: 1, slot: 2, attempt: 3 };
        let more = number + 1 < steps.len();
        let descriptor = Descriptor { tag, scope: Scope(0), scope_generation: 0, more, step };
        chain.extend(words(&descriptor.emit()));
    }
    let reset = SubmissionEntry::Admin {
        cookie: 4,
        command: AdminCommand::Fence { group: GroupId(1), epoch: Epoch::from_bits(1) },
    };
    let done = CompletionEntry::Admin { status: EntryStatus::Done, cookie: 4, value: 9 };
    let seat = AdmissionRequest::Attach { rank_slot: 1, group: GroupId(1), child: ChildIndex(2), key: 77 };
    let refused = AdmissionReply::Refused { rank_slot: 1, reason: AttachRefusal::NoMemory };
    // Offsets of a queue's first index and of its entries, in words.
    let spoil = |writes: &[(u16, u64)]| {
        let writes = writes.iter().flat_map(|(at, value)| [&at.to_le_bytes()[..], &value.to_le_bytes()[..]].concat());
        std::iter::once(writes_len(writes.clone().count())).chain(writes).collect::<Vec<u8>>()
    };
    let produced = spoil(&[(0x600, 1), (0x680, 1), (0x681, 5)]);
    vec![
        seed("rings", "fence", &[0], &words(&reset.emit())),
        seed("rings", "seat", &[0], &words(&seat.emit())),
        seed("rings", "admin", &[1], &words(&done.emit())),
        seed("rings", "refused", &[1], &words(&refused.emit())),
        seed("rings", "chain", &[2], &chain),
        seed("rings", "probe", &[3], &spoil(&[(4, 0x0000_0002_0000_0002)])),
        seed("rings", "device", &[4], &[&produced[..], &[0; 32], &produced[..]].concat()),
        seed("rings", "host", &[5], &[&produced[..], &[0; 64], &produced[..]].concat()),
    ]
}

fn writes_len(bytes: usize) -> u8 {
    (bytes / 10) as u8
}

fn fabrics() -> Vec<Seed> {
    const DUMP: &str = include_str!("../../../host/tests/fixtures/two-leaves.ibnetdiscover");
    const TOML: &str = r#"
[[switch]]
name = "leaf1"
aggregation = true
[[switch]]
name = "spine"
[[host]]
name = "n1"
guid = "0xe09d730300156ff6"
[[host]]
name = "n2"
[[link]]
ends = ["n1", "leaf1"]
rate_gbits = 400
[[link]]
ends = ["n2", "leaf1:7"]
[[link]]
ends = ["leaf1", "spine"]
count = 2
"#;
    const SLURM: &str = "SwitchName=top Switches=leaf[0-1]\nSwitchName=leaf0 Nodes=n[08-11,20]\n\
                         SwitchName=leaf1 \\\n Nodes=r[0-1]n[1-2]\n";
    const BLOCKS: &str = "BlockName=b0 Nodes=n[0-3]\nBlockName=b1 Nodes=n[4-7]\nBlockSizes=4\n";
    const NETQ: &str = r#"[{"links":[{"compounded_links":[
        {"interfaces":[{"node":"a","interface":"swp1"},{"node":"h","interface":"ens1"}]},
        {"interfaces":[{"node":"a","interface":"swp2"},{"node":"b","interface":"swp1"}]}]}],
        "nodes":[{"compounded_nodes":[{"id":"a","name":"leaf","device_type":"switch","tier":1}]}]}]"#;
    const NCCL: &str = r#"<system version="1"><cpu numaid="0"><pci busid="1" class="0x060400" link_speed="16 GT/s"
        link_width="16"><pci busid="2" class="0x030200" link_speed="16 GT/s" link_width="16"><gpu dev="0" sm="80">
        <nvlink target="3" count="12"/></gpu></pci><pci busid="4" class="0x020700"><nic><net name="mlx5_0"
        speed="200000" guid="0x1"/></nic></pci></pci></cpu></system>"#;
    [
        ("toml", 0, TOML),
        ("dump", 1, DUMP),
        ("text", 2, DUMP),
        ("slurm", 2, SLURM),
        ("blocks", 2, BLOCKS),
        ("netq", 2, NETQ),
        ("nccl", 3, NCCL),
    ]
    .map(|(name, kind, text)| seed("fabrics", name, &[kind], text.as_bytes()))
    .to_vec()
}

fn arrays() -> Vec<Seed> {
    let npy = |version: u8, text: &str, elements: usize| {
        let text = format!("{text}\n");
        let len = (text.len() as u32).to_le_bytes();
        let len = if version == 1 { &len[..2] } else { &len[..] };
        [b"\x93NUMPY", &[version, 0][..], len, text.as_bytes(), &vec![0; elements]].concat()
    };
    let tensors = |header: &str, elements: usize| {
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; elements]].concat()
    };
    let f32 = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
    let bytes = "{'descr': '|u1', 'fortran_order': True, 'shape': (5,), }";
    let scalar = "{'descr': '<i8', 'fortran_order': False, 'shape': (), }";
    let two = r#"{"__metadata__":{"by":"me"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]}}"#;
    let none = r#"{"a":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}"#;
    vec![
        seed("arrays", "npy-f32", &[0], &npy(1, f32, 24)),
        seed("arrays", "npy-u8", &[0], &npy(2, bytes, 5)),
        seed("arrays", "npy-scalar", &[0], &npy(3, scalar, 8)),
        seed("arrays", "safetensors-two", &[1], &tensors(two, 22)),
        seed("arrays", "safetensors-empty", &[1], &tensors(none, 0)),
    ]
}

fn boot() -> Vec<Seed> {
    let mut builder = Builder::new();
    for (id, version, len) in [(1, 0, 24), (1, 1, 9), (62, 0, 40)] {
        let source = Source::Bytes(vec![id; len]);
        builder.insert(ImageName::new(ImageId(id), version), source).expect("no other is there");
    }
    let write = |builder: &Builder| {
        let mut out = Cursor::new(Vec::new());
        builder.write_to(&mut out).expect("memory");
        out.into_inner()
    };
    let plain = write(&builder);
    let manifest = Manifest::of(&builder, "1.2.3", 4).expect("memory").seal(None).expect("short");
    builder.insert(MANIFEST_IMAGE, Source::Bytes(manifest)).expect("no other is there");
    let with_manifest = write(&builder);
    let mut partition = Vec::new();
    sumac_firmware::emmc::write(&plain[..], plain.len() as u64, u64::MAX, &mut partition).expect("memory");
    let misc = "BOOT_MODE       1\nBOOT_TIMEOUT    150\nDEV_NAME        pcie-0000:04:00.2\nDEV_INFO        BlueField-3(Rev 1)\n\
                UP_TIME         12(s)\nkernel/net/virtio_net.ko: kernel/drivers/a.ko\n";
    let options = "name=leaf0\ncontroller=127.0.0.1:7847\nip=10.0.2.15/24\ngateway=10.0.2.2\nlisten=7200\n\
                   data=127.0.0.1:7300\nmachine=m0\nsocket=s0\nwatchdog_ms=500\n";
    vec![
        seed("boot", "stream", &[1], &plain),
        seed("boot", "manifest", &[1], &with_manifest),
        seed("boot", "partition", &[2 << 1 | 1], &partition[8..]),
        seed("boot", "slots", &[3 << 1 | 1], &slots()),
        seed("boot", "texts", &[4 << 1], misc.as_bytes()),
        seed("boot", "options", &[5 << 1], options.as_bytes()),
    ]
}

/// Two slots of four blocks with payloads of one block: one record on trial, one confirmed.
fn slots() -> Vec<u8> {
    use sha2::{Digest, Sha256};
    let slot = |state: [u8; 2], sequence: u64| {
        let payload = [7; 128];
        let mut record = [0; 128];
        record[..8].copy_from_slice(b"SUMACSLT");
        record[8] = 1;
        record[12..14].copy_from_slice(&state);
        record[14..15].copy_from_slice(&[3]);
        for (at, number) in [(16, 1), (24, sequence), (32, 1), (40, payload.len() as u64)] {
            record[at..at + 8].copy_from_slice(&number.to_le_bytes());
        }
        record[48..80].copy_from_slice(&Sha256::digest(payload));
        record[80..83].copy_from_slice(b"1.0");
        (payload, record)
    };
    let (payload, trial) = slot([1, 2], 2);
    let (_, confirmed) = slot([2, 0], 1);
    let first = [&payload[..], &[0; 128], &trial[..], &[0; 128]].concat();
    let mut second = vec![0; 128 * 12];
    second[..128].copy_from_slice(&payload);
    let place = second.len() - 256;
    second[place..][..128].copy_from_slice(&confirmed);
    [&[4], &first[..], &second[..]].concat()
}
