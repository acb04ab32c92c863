//! Tests of the zero-copy server with a node; the test acts as broker and ranks.

use super::*;
use core::num::NonZeroU32;
use std::boxed::Box;
use std::vec;
use sumac_device::{BufferRef, Memory, NodeConfig, RedoSlot, Storage, ZeroCopyStorage};
use sumac_hal::ctrl::{ChildMask, Order, Request, Response, TreeConfig};
use sumac_hal::ids::{ChunkNo, Epoch, Rank, TreeId};
use sumac_hal::key::GroupSecret;
use sumac_hal::mmio::{AdminCommand, Contribution, SubmissionEntry};
use sumac_hal::op::{Collective, Dtype, ReduceOp};
use sumac_hal::ring::{Consumer, Producer};
use sumac_hal::shard::{RUN, Shard};
use sumac_hal::uplink::HopTimers;

const GROUP: GroupId = GroupId(3);
const EPOCH: Epoch = Epoch { term: 1, counter: 1 };
const SECRET: GroupSecret = GroupSecret([7; 16]);
const BOOT: BootId = BootId(9);
const ARENA_LEN_BYTES: u64 = 64 << 10;
/// The largest window that a group can have.
const WINDOW: u16 = 256;
const SLOTS: usize = 2 * WINDOW as usize;
const CHUNK: usize = 64;

/// Aligned like a BAR.
#[repr(align(4096))]
struct Aligned<const WORDS: usize>([AtomicU64; WORDS]);

fn memory<const WORDS: usize>() -> &'static [AtomicU64] {
    &Box::leak(Box::new(Aligned([const { AtomicU64::new(u64::MAX) }; WORDS]))).0
}

/// The host's ends of a queue.
struct Host {
    submissions: Producer<Ring<SUBMISSION_WORDS>, SUBMISSION_WORDS>,
    completions: Consumer<Ring<COMPLETION_WORDS>, COMPLETION_WORDS>,
}

fn host(memory: &'static [AtomicU64]) -> Host {
    ends(memory, 0)
}

fn ends(memory: &'static [AtomicU64], queue: u32) -> Host {
    let (bar, identity) = Bar::probe(memory).expect("a function");
    assert_eq!(identity.boot_id, BOOT);
    let queue = bar.queue(queue).expect("a queue");
    Host { submissions: Producer::new(queue.submissions), completions: Consumer::new(queue.completions) }
}

/// Run a test on a thread with a large stack, since the tables are meant for a `static` and are copied a few times.
fn with_large_stack(test: fn(Rig)) {
    let run = std::thread::Builder::new().stack_size(32 << 20).spawn(move || test(Rig::new()));
    run.expect("a thread").join().expect("the test failed, see above");
}

struct Rig {
    bus: ZeroCopyServer,
    node: Node<'static>,
    admission: Host,
    rank_slots: [&'static [AtomicU64]; 2],
}

impl Rig {
    /// A group with two zero-copy children, and two rank slots.
    fn new() -> Self {
        const RANK_SLOT_WORDS: usize = (ARENA_OFFSET_BYTES + ARENA_LEN_BYTES as usize) / 8;
        let rank_slots = [memory::<RANK_SLOT_WORDS>(), memory::<RANK_SLOT_WORDS>()];
        let admission = memory::<2048>();
        let shared =
            ZeroCopyMemory { admission, redo: memory::<16_384>(), rank_slots: rank_slots.into_iter().collect() };
        let bus = ZeroCopyServer::open(Box::leak(Box::default()), shared, BOOT).expect("there is room");
        let shard = Shard::new(0, 1).expect("a shard");
        let config = NodeConfig { shard, boot_id: BOOT, max_packet_len_bytes: 1472, receive_buffer_bytes: 1 << 16 };
        let tables: &'static mut Memory<2, 8, SLOTS, 0> = Box::leak(Box::default());
        let storage = Storage { bytes: Box::leak(vec![0; 1 << 18].into()), ..tables.storage() };
        let (memory, capabilities) = bus.redo_memory();
        let redo = Box::leak(vec![RedoSlot::EMPTY; SLOTS].into());
        let references = Box::leak(vec![BufferRef::EMPTY; 2 * SLOTS].into());
        let mut node =
            Node::with_zero_copy(config, storage, ZeroCopyStorage { redo, buffers: references, memory, capabilities });
        let tree = TreeConfig { tree: TreeId(1), parent: None, children: 2, ranks: Vec::new() };
        assert_eq!(node.control(&Request::InstallTree(tree), Instant::ZERO), Response::Done);
        let mut bus = bus;
        let config = group();
        assert_eq!(node.control(&Request::CreateGroup(config), Instant::ZERO), Response::Done);
        bus.reserve(&mut node, &config).expect("room");
        Self { bus, node, admission: host(admission), rank_slots }
    }

    fn turn(&mut self) {
        self.bus.poll_requests(&mut self.node, Instant::ZERO);
        self.bus.serve(&mut self.node, Instant::ZERO);
    }

    fn request(&mut self, request: AdmissionRequest) -> Option<AdmissionReply> {
        assert_eq!(self.admission.submissions.push(&request.emit()), Ok(true));
        self.turn();
        let words = self.admission.completions.pop().expect("valid ring indices")?;
        Some(AdmissionReply::parse(&words).expect("an answer"))
    }

    fn attach(&mut self, rank_slot: u16, child: u16, key: u64) -> AdmissionReply {
        let request = AdmissionRequest::Attach { rank_slot, group: GROUP, child: ChildIndex(child), key };
        self.request(request).expect("an answer at once")
    }

    fn attaches(&mut self, rank_slot: u16, child: u16) -> bool {
        let AdmissionReply::Attached { rank_slot: given, slots, .. } = self.attach(rank_slot, child, key(child)) else {
            return false;
        };
        given == rank_slot && slots == SLOTS as u32
    }

    fn register(&mut self, rank: &mut Host, handle: u64, len_bytes: u64) -> EntryStatus {
        rank.submit_register(handle, len_bytes);
        self.turn();
        rank.registered().0
    }
}

impl Host {
    fn submit_register(&mut self, handle: u64, len_bytes: u64) {
        let command = AdminCommand::Register { handle, offset_bytes: 0, len_bytes };
        let entry = SubmissionEntry::Admin { cookie: 5, command };
        assert_eq!(self.submissions.push(&entry.emit()), Ok(true));
    }

    fn registered(&mut self) -> (EntryStatus, Option<RegionKey>) {
        match self.next_entry() {
            Some(CompletionEntry::Admin { status, cookie: 5, value }) => (status, RegionKey::from_bits(value)),
            other => panic!("{other:?}"),
        }
    }

    /// Return the next completion from the board.
    fn next_entry(&mut self) -> Option<CompletionEntry> {
        let words = self.completions.pop().expect("valid ring indices")?;
        Some(CompletionEntry::parse(&words).expect("an entry"))
    }

    /// Contribute the first `chunks` chunks, which lie consecutively at the start of a region.
    fn contribute(&mut self, region: RegionKey, chunks: u64, signature: u32) {
        for seq in (0..chunks).step_by(RUN as usize) {
            let count = RUN.min(chunks - seq);
            let at = Some(Address { region, offset_bytes: seq * CHUNK as u64 });
            let entry = Contribution {
                group: GROUP,
                epoch: EPOCH,
                seq: ChunkNo(seq),
                count: count as u16,
                elements: count as u32 * CHUNK as u32 / 4,
                lag: seq as u16,
                collective: Collective::AllReduce,
                dtype: Some(Dtype::F32),
                op: Some(ReduceOp::Sum),
                root: Rank(0),
                total: 1 << 20,
                signature,
                src: at,
                dst: at,
            };
            assert_eq!(self.submissions.push(&SubmissionEntry::Contribution(entry).emit()), Ok(true));
        }
    }
}

fn group() -> GroupConfig {
    let mut zero_copy = ChildMask::EMPTY;
    [0, 1].into_iter().for_each(|child| zero_copy.insert(ChildIndex(child)));
    GroupConfig {
        group: GROUP,
        tree: TreeId(1),
        epoch: EPOCH,
        order: Order::Arrival,
        secret: SECRET,
        parent_key: 0,
        shared: None,
        parent_shared: None,
        window_max: WINDOW,
        slots: SLOTS as u16,
        chunk_len_bytes: CHUNK as u16,
        ranks: NonZeroU32::MIN,
        lease_ms: 60_000,
        timers: HopTimers::DEFAULT.into(),
        zero_copy,
    }
}

fn key(child: u16) -> u64 {
    SECRET.child_key(GROUP, EPOCH, ChildIndex(child))
}

#[test]
fn attach_with_the_right_key_gets_one_rank_slot() {
    with_large_stack(|mut rig| {
        let refused = |rank_slot, reason| AdmissionReply::Refused { rank_slot, reason };
        assert_eq!(rig.attach(0, 0, key(0) ^ 1), refused(0, AttachRefusal::UnknownChild));
        assert_eq!(rig.attach(0, 0, key(1)), refused(0, AttachRefusal::UnknownChild));
        assert_eq!(rig.attach(2, 0, key(0)), refused(2, AttachRefusal::NoMemory));
        assert!(rig.attaches(0, 0));
        assert_eq!(rig.attach(1, 0, key(0)), refused(1, AttachRefusal::AlreadyAttached));
        assert_eq!(rig.attach(0, 1, key(1)), refused(0, AttachRefusal::NoMemory), "the rank slot is taken");
        assert!(rig.attaches(1, 1));
    });
}

#[test]
fn redo_slots_are_zeroed_when_assigned() {
    with_large_stack(|rig| {
        let (start, slot_len_bytes, slots) = rig.node.redo_slots(GROUP).expect("zero-copy children");
        let (given, rest) = rig.bus.memory.redo.split_at(start as usize / 8 + slot_len_bytes * slots / 8);
        let is = |word: &AtomicU64, value: u64| word.load(Ordering::Relaxed) == value;
        assert!(
            !given.is_empty() && given[start as usize / 8..].iter().all(|word| is(word, 0)),
            "records of an earlier group remain"
        );
        assert!(!rest.is_empty() && rest.iter().all(|word| is(word, u64::MAX)), "unassigned slots are untouched");
    });
}

#[test]
fn register_outside_the_arena_is_refused() {
    with_large_stack(|mut rig| {
        assert!(rig.attaches(0, 0));
        let mut rank = host(rig.rank_slots[0]);
        let mut status = |handle, len_bytes| rig.register(&mut rank, handle, len_bytes);
        assert_eq!(status(0, ARENA_LEN_BYTES), EntryStatus::Result);
        assert_eq!(status(ARENA_LEN_BYTES - 8, 8), EntryStatus::Result);
        assert_eq!(status(8, ARENA_LEN_BYTES), EntryStatus::OutOfBounds);
        assert_eq!(status(8, u64::MAX), EntryStatus::OutOfBounds);
        assert_eq!(status(ARENA_LEN_BYTES, 8), EntryStatus::BadRegion);
        assert_eq!(status(4, 8), EntryStatus::BadRegion, "not aligned to words");
        assert_eq!(status(0, 0), EntryStatus::OutOfBounds);
    });
}

#[test]
fn detached_rank_frees_its_slot_and_regions() {
    with_large_stack(|mut rig| {
        assert!(rig.attaches(0, 0));
        let mut rank = host(rig.rank_slots[0]);
        assert_eq!(rig.register(&mut rank, 0, 8), EntryStatus::Result);
        assert_eq!(
            rig.request(AdmissionRequest::Detach { rank_slot: 0 }),
            Some(AdmissionReply::Detached { rank_slot: 0 })
        );
        assert_eq!(rig.request(AdmissionRequest::Detach { rank_slot: 0 }), None, "no rank is attached");
        assert!(rig.attaches(0, 1));
        let mut next = host(rig.rank_slots[0]);
        assert_eq!(rig.register(&mut next, 0, 8), EntryStatus::Result, "the region's index is free, too");
    });
}

#[test]
fn malformed_submission_detaches_only_that_rank() {
    with_large_stack(|mut rig| {
        assert!(rig.attaches(0, 0) && rig.attaches(1, 1));
        let mut rank = host(rig.rank_slots[0]);
        assert_eq!(rank.submissions.push(&[u64::MAX; SUBMISSION_WORDS]), Ok(true));
        rig.turn();
        let words = rig.admission.completions.pop().expect("valid ring indices").expect("a reply");
        assert_eq!(AdmissionReply::parse(&words), Some(AdmissionReply::Detached { rank_slot: 0 }));
        assert!(matches!(Bar::probe(rig.rank_slots[0]), Err(sumac_hal::mmio::ProbeError::Status(_))));
        let mut other = host(rig.rank_slots[1]);
        assert_eq!(rig.register(&mut other, 0, 8), EntryStatus::Result, "other ranks are not affected");
    });
}

#[test]
fn malformed_admission_request_ends_attaching_but_ranks_are_still_served() {
    with_large_stack(|mut rig| {
        assert!(rig.attaches(0, 0));
        assert_eq!(rig.request(AdmissionRequest::Detach { rank_slot: 7 }), None);
        assert_eq!(rig.admission.submissions.push(&[5; SUBMISSION_WORDS]), Ok(true));
        rig.turn();
        let request = AdmissionRequest::Attach { rank_slot: 1, group: GROUP, child: ChildIndex(1), key: key(1) };
        assert_eq!(rig.request(request), None);
        let mut rank = host(rig.rank_slots[0]);
        assert_eq!(rig.register(&mut rank, 0, 8), EntryStatus::Result);
    });
}

#[test]
fn region_of_a_detached_rank_is_reusable_after_its_last_use() {
    with_large_stack(|mut rig| {
        assert!(rig.attaches(0, 0) && rig.attaches(1, 1));
        let [mut admins, mut datas] = [0, 1].map(|queue| rig.rank_slots.map(|rank_slot| ends(rank_slot, queue)));
        let keys = [0, 1].map(|rank| {
            admins[rank].submit_register(0, CHUNK as u64);
            rig.turn();
            admins[rank].registered().1.expect("a key")
        });
        datas[0].contribute(keys[0], 1, 1);
        rig.turn();
        assert_eq!(rig.request(AdmissionRequest::Detach { rank_slot: 0 }), None, "its contribution was not pulled yet");
        // The other rank's contribution completes the chunk; its registration is processed in the same step, after
        // that.
        datas[1].contribute(keys[1], 1, 1);
        rig.bus.poll_requests(&mut rig.node, Instant::ZERO);
        admins[1].submit_register(0, CHUNK as u64);
        rig.bus.serve(&mut rig.node, Instant::ZERO);
        let (status, key) = admins[1].registered();
        assert_eq!((status, key.map(|key| key.index)), (EntryStatus::Result, Some(keys[0].index)));
        let words = rig.admission.completions.pop().expect("valid ring indices").expect("a reply");
        assert_eq!(AdmissionReply::parse(&words), Some(AdmissionReply::Detached { rank_slot: 0 }));
    });
}

/// Three entries for each chunk in flight would exceed the room, and a rank would be detached for calling what others
/// did not.
#[test]
fn mismatch_of_a_whole_window_is_answered_with_one_entry() {
    with_large_stack(|mut rig| {
        assert!(rig.attaches(0, 0) && rig.attaches(1, 1));
        let [mut admins, mut datas] = [0, 1].map(|queue| rig.rank_slots.map(|rank_slot| ends(rank_slot, queue)));
        for (rank, chunks) in [(0, u64::from(WINDOW)), (1, 1)] {
            admins[rank].submit_register(0, ARENA_LEN_BYTES);
            rig.turn();
            let key = admins[rank].registered().1.expect("a key");
            datas[rank].contribute(key, chunks, rank as u32);
            rig.turn();
        }
        for (rank, chunks) in [(0, WINDOW), (1, 1)] {
            assert!(matches!(datas[rank].next_entry(), Some(CompletionEntry::Operations { .. })), "rank {rank}");
            match datas[rank].next_entry() {
                Some(CompletionEntry::Answer { status: EntryStatus::Mismatch, seq: ChunkNo(0), count, .. }) => {
                    assert_eq!(count, chunks);
                }
                other => panic!("rank {rank}: {other:?}"),
            }
            assert_eq!(datas[rank].next_entry(), None);
        }
    });
}

#[test]
fn step_processes_a_bounded_number_of_admission_requests() {
    with_large_stack(|mut rig| {
        let all = rig.admission.submissions.capacity();
        (0..all).for_each(|_| {
            // The rank slot is free, so these need no reply.
            let request = AdmissionRequest::Detach { rank_slot: 0 };
            assert_eq!(rig.admission.submissions.push(&request.emit()), Ok(true));
        });
        rig.turn();
        assert_eq!(rig.admission.submissions.room(), Ok(REQUESTS_PER_TURN as u32));
    });
}

#[test]
fn recreated_group_drops_the_links_of_the_old_one() {
    with_large_stack(|mut rig| {
        // The controller releases and creates the group between two steps.
        for counter in 2..100 {
            assert_eq!(rig.node.control(&Request::ReleaseGroup(GROUP), Instant::ZERO), Response::Done);
            let config = GroupConfig { epoch: Epoch { counter, ..EPOCH }, ..group() };
            assert_eq!(rig.node.control(&Request::CreateGroup(config), Instant::ZERO), Response::Done);
            rig.bus.reserve(&mut rig.node, &config).expect("room");
        }
        assert_eq!(rig.bus.links.len(), 2);
        assert_eq!(
            rig.attach(0, 0, key(0)),
            AdmissionReply::Refused { rank_slot: 0, reason: AttachRefusal::UnknownChild }
        );
    });
}

#[test]
fn poll_interval_grows_with_idle_time() {
    with_large_stack(|mut rig| {
        let at = |millis| Instant::ZERO + Duration::from_millis(millis);
        assert_eq!(rig.bus.poll_at(at(5)), at(15), "no rank is attached");
        assert!(rig.attaches(0, 0));
        let soon = |rig: &Rig, now| rig.bus.poll_at(now) - now;
        assert_eq!(soon(&rig, at(0)), POLL_INTERVAL);
        assert_eq!(soon(&rig, at(16)), Duration::from_millis(1));
        assert_eq!(soon(&rig, at(60_000)), IDLE_POLL_INTERVAL);
        let mut rank = host(rig.rank_slots[0]);
        rank.submit_register(0, 8);
        rig.bus.poll_requests(&mut rig.node, at(60_000));
        rig.bus.serve(&mut rig.node, at(60_000));
        assert_eq!(soon(&rig, at(60_000)), POLL_INTERVAL);
    });
}
