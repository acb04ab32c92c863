//! Golden tests of registers and entries, and tests of each side against a hostile peer.

use super::*;
use crate::dma::{Address, Capabilities, Profile, RegionKey};
use crate::ids::{BootId, ChunkNo, Epoch, GroupId, Rank};
use crate::op::{Collective, Dtype, ReduceOp};
use crate::ring::{Consumer, Memory, Producer};
use crate::wire::{RankMask, StragglerLimit};
use core::sync::atomic::{AtomicU64, Ordering};
use proptest::prelude::*;

const QUEUES: u32 = 3;
const DEPTH: u32 = 4;

/// Zeroed memory with the alignment of a BAR.
struct Aligned {
    words: Vec<AtomicU64>,
    start: usize,
    len: usize,
}

impl Aligned {
    fn new(len_bytes: usize) -> Self {
        let len = len_bytes / 8;
        let words: Vec<_> = (0..len + BAR_ALIGNMENT_BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        let start = words.as_ptr().align_offset(BAR_ALIGNMENT_BYTES);
        Self { words, start, len }
    }

    fn words(&self) -> &[AtomicU64] {
        &self.words[self.start..][..self.len]
    }

    fn load(&self, offset: usize) -> u64 {
        u64::from_le(self.words()[offset / 8].load(Ordering::Relaxed))
    }

    fn store(&self, offset: usize, value: u64) {
        self.words()[offset / 8].store(value.to_le(), Ordering::Relaxed);
    }
}

fn config() -> FunctionConfig {
    FunctionConfig {
        boot_id: BootId(0x1122_3344_5566_7788),
        features: Features::ZERO_COPY | Features::FENCE,
        queues: QUEUES,
        depth: DEPTH,
        dma: Capabilities::new(Profile::InlineReduce, 8, 8).with_alignment(64).with_max_len(1 << 20),
    }
}

fn device() -> Aligned {
    let memory = Aligned::new(bar_len_bytes(QUEUES, DEPTH));
    Bar::create(memory.words(), &config()).expect("it fits");
    memory
}

#[test]
fn registers_are_at_their_golden_offsets() {
    let memory = device();
    let dma = config().dma;
    assert_eq!((Features::ARENA.bits(), Features::POLL_ONLY.bits()), (0x20, 0x40));
    let expected = [
        (0x00, 0x0002_0000_414d_5553),
        (0x08, 0x1122_3344_5566_7788),
        (0x10, 0x2000 + 3 * 0x1000),
        (0x18, 0x1_0000_0003),
        (0x20, 0x4_0000_0003),
        (0x28, 0x1000),
        (0x30, u64::from(dma.dtypes.bits()) << 32 | 2),
        (0x38, 64 << 32 | u64::from(dma.ops.bits())),
        (0x40, 1 << 20),
    ];
    for (offset, value) in expected {
        assert_eq!(memory.load(offset), value, "register {offset:#x}");
    }
    assert!((0x48..memory.len * 8).step_by(8).all(|offset| memory.load(offset) == 0), "all other words are 0");

    let (bar, _) = Bar::probe(memory.words()).expect("a device");
    bar.set_control(HostControl::ENABLE | HostControl::RESET);
    bar.set_heartbeat(7);
    assert_eq!((memory.load(0x1000), memory.load(0x28)), (3, 0x7_0000_1000));
    assert_eq!((bar.control(), bar.heartbeat()), (HostControl::ENABLE | HostControl::RESET, 7));
}

#[test]
fn probe_returns_what_create_wrote() {
    let memory = device();
    let (bar, identity) = Bar::probe(memory.words()).expect("a device");
    assert_eq!((bar.queues(), bar.depth()), (QUEUES, DEPTH));
    assert_eq!((identity.boot_id, identity.features), (config().boot_id, config().features));
    assert_eq!(
        (identity.dma.profile, identity.dma.dtypes, identity.dma.ops),
        (Profile::InlineReduce, config().dma.dtypes, config().dma.ops)
    );
    assert_eq!((identity.dma.alignment_bytes, identity.dma.max_len_bytes), (64, 1 << 20));
}

#[test]
fn queues_carry_entries_both_ways_and_do_not_overlap() {
    let memory = device();
    let (host, _) = Bar::probe(memory.words()).expect("a device");
    let device = Bar::create(memory.words(), &config()).expect("it fits");
    assert!(host.queue(QUEUES).is_none());
    for index in 0..QUEUES {
        let (host, device) = (host.queue(index).expect("a queue"), device.queue(index).expect("a queue"));
        let (mut submit, mut complete) = (Producer::new(host.submissions), Producer::new(device.completions));
        let mark = u64::from(index) + 1;
        assert_eq!(submit.push_batch(&[[mark; SUBMISSION_WORDS]; 9]), Ok(DEPTH as usize));
        assert_eq!(complete.push_batch(&[[mark; COMPLETION_WORDS]; 9]), Ok(2 * DEPTH as usize));
        host.host_bell.arm();
        device.device_bell.arm();
    }
    for index in 0..QUEUES {
        let queue = host.queue(index).expect("a queue");
        let mark = u64::from(index) + 1;
        let mut taken = [[0; SUBMISSION_WORDS]; DEPTH as usize];
        assert_eq!(Consumer::new(queue.submissions).pop_batch(&mut taken), Ok(DEPTH as usize));
        assert!(taken.iter().flatten().all(|&word| word == mark));
        let mut taken = [[0; COMPLETION_WORDS]; 2 * DEPTH as usize];
        assert_eq!(Consumer::new(queue.completions).pop_batch(&mut taken), Ok(2 * DEPTH as usize));
        assert!(taken.iter().flatten().all(|&word| word == mark));
        assert!(queue.host_bell.ring() && queue.device_bell.ring(), "each bell was armed once");
        assert!(!queue.host_bell.ring() && !queue.device_bell.ring());
    }
    // The entries of the last queue end where the layout says, and the registers are untouched.
    assert_ne!(memory.load(0x2000 + 2 * 0x1000 + 0x400 + 128 * 4 - 8), 0);
    assert_eq!(memory.load(0x2000 + 2 * 0x1000 + 0x400 + 128 * 4), 0);
    assert!(Bar::probe(memory.words()).is_ok());
}

#[test]
fn create_refuses_invalid_queues_and_memory() {
    let memory = Aligned::new(bar_len_bytes(QUEUES, DEPTH));
    let create = |queues, depth| Bar::create(memory.words(), &FunctionConfig { queues, depth, ..config() }).err();
    for (queues, depth) in [(1, 4), (QUEUES_MAX + 1, 4), (3, 1), (3, 6), (3, DEPTH_MAX * 2)] {
        assert_eq!(create(queues, depth), Some(BarError::Queues { queues, depth }));
    }
    let (needed, len_bytes) = (bar_len_bytes(4, 4), bar_len_bytes(3, 4));
    assert_eq!(create(4, 4), Some(BarError::TooShort { needed, len_bytes }));
    let misaligned = Bar::create(&memory.words()[1..], &FunctionConfig { queues: 2, ..config() });
    assert!(matches!(misaligned, Err(BarError::Unaligned { .. })));
}

#[test]
fn probe_reports_each_invalid_register() {
    let cases = [
        (0x00, 0x0002_0000_4141_5553, "not a Sumac device"),
        (0x00, 0x0001_0003_414d_5553, "version 1.3"),
        (0x10, 0x4000, "0x10"),
        (0x18, 0x0_0000_0003, "not ready"),
        (0x18, 0x5_0000_0003, "not ready"),
        (0x20, 0x4_0000_0001, "2 to 64 queues"),
        (0x20, 0x4_0000_0004, "needs"),
        (0x20, 0x3_0000_0003, "3 queues of depth 3"),
        (0x28, 0x2000, "0x28"),
        (0x30, 9, "0x30"),
        (0x38, 3 << 32, "0x3c"),
        (0x38, 8192 << 32, "an alignment of 8192 bytes; the maximum is 4096"),
        (0x38, 1 << 63, "an alignment of 2147483648 bytes"),
    ];
    for (offset, value, message) in cases {
        let memory = device();
        memory.store(offset, value);
        let error = Bar::probe(memory.words()).expect_err("a wrong register").to_string();
        assert!(error.contains(message), "register {offset:#x}: {error}");
    }
}

proptest! {
    #[test]
    fn hostile_device_cannot_make_the_host_leave_its_memory(
        garbage in prop::collection::vec((0..0x80_usize, any::<u64>(), any::<bool>()), 1..20),
    ) {
        let memory = device();
        for (word, value, small) in garbage {
            memory.store(word % 9 * 8, if small { value & 0x7_0000_0007 } else { value });
            if let Ok((bar, _)) = Bar::probe(memory.words()) {
                for index in 0..bar.queues() {
                    let queue = bar.queue(index).expect("as many as there are");
                    let _ = Producer::new(queue.submissions).push(&[1; SUBMISSION_WORDS]);
                    queue.completions.write(2 * bar.depth() - 1, &[1; COMPLETION_WORDS]);
                }
            }
        }
    }

    #[test]
    fn hostile_host_poisons_queues_without_panic(
        garbage in prop::collection::vec((0x1000..0x5000_usize, any::<u64>(), any::<bool>()), 1..200),
    ) {
        let memory = device();
        let bar = Bar::create(memory.words(), &config()).expect("it fits");
        let queue = bar.queue(1).expect("a queue");
        let mut submissions = Consumer::new(queue.submissions);
        let mut completions = Producer::new(queue.completions);
        let mut poisoned = false;
        for (offset, value, small) in garbage {
            memory.store(offset, if small { value & 7 } else { value });
            let popped = submissions.pop();
            if let Ok(Some(words)) = popped
                && let Ok(entry) = SubmissionEntry::parse(&words)
            {
                prop_assert_eq!(entry.emit(), words);
            }
            let pushed = completions.push(&[0; COMPLETION_WORDS]);
            prop_assert!(!poisoned || popped.is_err() || pushed.is_err(), "poison is permanent");
            poisoned |= popped.is_err() || pushed.is_err();
            let _ = (bar.control(), bar.status(), queue.device_bell.ring(), queue.host_bell.ring());
        }
    }
}

fn contribution() -> Contribution {
    Contribution {
        group: GroupId(0x1111),
        epoch: Epoch { term: 2, counter: 3 },
        seq: ChunkNo(0x4444_5555_6666_7777),
        count: 8,
        elements: 0x9999,
        lag: 0xaaaa,
        collective: Collective::AllReduce,
        dtype: Some(Dtype::F32),
        op: Some(ReduceOp::Sum),
        root: Rank(0x12),
        total: 0x34_5678_9abc,
        signature: 0xbbbb_cccc,
        src: Some(Address { region: RegionKey { index: 0xd, generation: 0xe }, offset_bytes: 0xf000 }),
        dst: Some(Address { region: RegionKey { index: 0xd0, generation: 0xe0 }, offset_bytes: 0xf0 }),
    }
}

#[test]
fn submissions_encode_to_golden_words() {
    let full = contribution();
    let (root, total) = (Rank(0), 0);
    let full_of_nothing = Contribution { src: None, dst: None, dtype: None, op: None, ..full };
    let empty = Contribution { collective: Collective::Barrier, root, total, ..full_of_nothing };
    let admin = |command| SubmissionEntry::Admin { cookie: 0xc, command };
    let group = GroupId(0x1111);
    let cases = [
        (
            SubmissionEntry::Contribution(full),
            [
                0x0008_3401_0b01_0101,
                0x2_0003_0000_1111,
                0x4444_5555_6666_7777,
                0x0012_aaaa_0000_9999,
                0x00d0_000d_bbbb_cccc,
                0xe0_0000_000e,
                0x9abc_0000_0000_f000,
                0x5678_0000_0000_00f0,
            ],
        ),
        (
            SubmissionEntry::Contribution(empty),
            [0x0008_0000_0006_0002, 0x2_0003_0000_1111, 0x4444_5555_6666_7777, 0xaaaa_0000_9999, 0xbbbb_cccc, 0, 0, 0],
        ),
        (admin(AdminCommand::Register { handle: 1, offset_bytes: 2, len_bytes: 3 }), [16, 0xc, 1, 2, 3, 0, 0, 0]),
        (
            admin(AdminCommand::Deregister { region: RegionKey { index: 4, generation: 5 } }),
            [17, 0xc, 0x5_0000_0004, 0, 0, 0, 0, 0],
        ),
        (
            SubmissionEntry::Limit(OperationLimit {
                group,
                epoch: full.epoch,
                seq: ChunkNo(0x44),
                chunks: 0x55,
                limit: StragglerLimit { us: 0x6666_7777, cuts: true },
            }),
            [0x103, 0x2_0003_0000_1111, 0x44, 0x55, 0x6666_7777, 0, 0, 0],
        ),
        (admin(AdminCommand::Fence { group, epoch: full.epoch }), [18, 0xc, 0x2_0003_0000_1111, 0, 0, 0, 0, 0]),
    ];
    for (entry, words) in cases {
        assert_eq!(entry.emit(), words, "{entry:x?}");
        assert_eq!(SubmissionEntry::parse(&words), Ok(entry));
    }
}

#[test]
fn root_total_and_offsets_saturate_in_entries() {
    let huge = Address { offset_bytes: u64::MAX, ..Address::default() };
    let full =
        Contribution { root: Rank(u32::MAX), total: u64::MAX, src: Some(huge), dst: Some(huge), ..contribution() };
    let Ok(SubmissionEntry::Contribution(got)) = SubmissionEntry::parse(&SubmissionEntry::Contribution(full).emit())
    else {
        panic!("an entry")
    };
    let most = Some(Address { offset_bytes: (1 << 48) - 1, ..Address::default() });
    assert_eq!((got.root, got.total, got.src, got.dst), (Rank(0xffff), (1 << 40) - 1, most, most));
}

#[test]
fn completions_encode_to_golden_words() {
    let (group, epoch) = (GroupId(0x1111), Epoch { term: 2, counter: 3 });
    let status = EntryStatus::Fenced;
    let answer = CompletionEntry::Answer {
        status: EntryStatus::Result,
        group,
        epoch,
        seq: ChunkNo(4),
        count: 5,
        window: 6,
        stable: ChunkNo(3),
        slowest: Some((Rank(0x0a0b), 0x0c0d_0e0f)),
    };
    let ranks: RankMask = [0, 127, 129].map(Rank).into_iter().collect();
    let [first, second] = CompletionEntry::missing(7, ChunkNo(4), &ranks);
    let cases = [
        (answer, [0x0a0c_0006_0005_0001, 0x2_0003_0000_1111, 4, 0x0c0d_0e0f_ffff_ffff]),
        (CompletionEntry::Admin { status, cookie: 8, value: 9 }, [0x1c10, 8, 9, 0]),
        (CompletionEntry::Operations { first: 10, other: 11 }, [2, 10, 11, 0]),
        (first, [0x7_0000_0003, 4, 1, 1 << 63]),
        (second, [0x7_0001_0003, 4, 2, 0]),
    ];
    let halves = [first, second].map(|half| {
        let CompletionEntry::Missing { ranks, .. } = half else { panic!("{half:?}") };
        ranks
    });
    assert_eq!(RankMask::from_halves(halves), ranks);
    for (entry, words) in cases {
        assert_eq!(entry.emit(), words, "{entry:x?}");
        assert_eq!(CompletionEntry::parse(&words), Ok(entry));
    }
    for status in EntryStatus::ALL {
        assert_eq!(EntryStatus::from_wire(status as u8), Some(status));
    }
}

#[test]
fn entries_with_reserved_or_unknown_bits_are_refused() {
    let words = SubmissionEntry::Contribution(contribution()).emit();
    let with = |word: usize, bits: u64| {
        let mut words = words;
        words[word] ^= bits;
        SubmissionEntry::parse(&words).err()
    };
    let field = |word: u8, bits: u64| Some(EntryError::Field { word, value: words[usize::from(word)] ^ bits });
    assert_eq!(with(0, 1 << 15), field(0, 1 << 15), "an unknown flag");
    assert_eq!(with(0, 0xf0 << 24), field(0, 0xf0 << 24), "an unknown type");
    assert_eq!(with(0, 8 << 48), field(0, 8 << 48), "no chunks");
    assert_eq!(with(0, WANT_BIT), field(4, 0), "a destination without the want flag");
    assert_eq!(with(0, 0xff), Some(EntryError::Opcode(0xfe)));
    assert_eq!(CompletionEntry::parse(&[0x0201, 0, 0, 0]), Err(EntryError::Field { word: 0, value: 0x0201 }));
    assert_eq!(CompletionEntry::parse(&[4, 0, 0, 0]), Err(EntryError::Opcode(4)));
    let late = 0x2_0003;
    assert_eq!(CompletionEntry::parse(&[late, 0, 0, 0]), Err(EntryError::Field { word: 0, value: late }));
    let operations = |word: usize, value: u64| {
        let mut words = [2, 10, 11, 0];
        words[word] = value;
        (CompletionEntry::parse(&words), Err(EntryError::Field { word: word as u8, value }))
    };
    for (word, value) in [(0, 0x1402), (0, 0x1_0002), (3, 1)] {
        let (found, expected) = operations(word, value);
        assert_eq!(found, expected, "operations have no status, no run and no fourth word");
    }
}

const WANT_BIT: u64 = 1 << 8;
