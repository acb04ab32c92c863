//! The bus with a node of its own, and the test as its broker and its ranks.

use super::*;
use core::num::NonZeroU32;
use std::boxed::Box;
use std::vec;
use sumac_device::{Memory, NodeConfig, RedoSlot, Reference, References, Storage};
use sumac_hal::ctrl::{ChildMask, Order, Request, Response, TreeConfig};
use sumac_hal::ids::{ChunkNo, Epoch, Rank, TreeId};
use sumac_hal::key::GroupSecret;
use sumac_hal::mmio::{AdminCommand, Contribution, SubmissionEntry};
use sumac_hal::op::{Collective, Dtype, ReduceOp};
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

/// As a BAR lies.
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

/// Run a test where tables that are meant for a `static` fit on the stack a few times.
fn roomy(test: fn(Rig)) {
    let run = std::thread::Builder::new().stack_size(32 << 20).spawn(move || test(Rig::new()));
    run.expect("a thread").join().expect("what it says above");
}

struct Rig {
    bus: Bus,
    node: Node<'static>,
    desk: Host,
    seats: [&'static [AtomicU64]; 2],
}

impl Rig {
    /// A group of two children by reference, and two seats.
    fn new() -> Self {
        const SEAT_WORDS: usize = (ARENA_OFFSET_BYTES + ARENA_LEN_BYTES as usize) / 8;
        let seats = [memory::<SEAT_WORDS>(), memory::<SEAT_WORDS>()];
        let desk = memory::<2048>();
        let shared = BusMemory { desk, redo: memory::<16_384>(), seats: seats.into_iter().collect() };
        let bus = Bus::open(Box::leak(Box::default()), shared, BOOT).expect("there is room");
        let shard = Shard::new(0, 1).expect("a shard");
        let config = NodeConfig { shard, boot_id: BOOT, max_packet_len_bytes: 1472, receive_buffer_bytes: 1 << 16 };
        let tables: &'static mut Memory<2, 8, SLOTS, 0> = Box::leak(Box::default());
        let storage = Storage { bytes: Box::leak(vec![0; 1 << 18].into()), ..tables.storage() };
        let (memory, capabilities) = bus.redo_memory();
        let redo = Box::leak(vec![RedoSlot::EMPTY; SLOTS].into());
        let references = Box::leak(vec![Reference::EMPTY; 2 * SLOTS].into());
        let mut node = Node::with_references(config, storage, References { redo, references, memory, capabilities });
        let tree = TreeConfig { tree: TreeId(1), parent: None, children: 2, ranks: Vec::new() };
        assert_eq!(node.control(&Request::InstallTree(tree), Instant::ZERO), Response::Done);
        let mut bus = bus;
        let config = group();
        assert_eq!(node.control(&Request::CreateGroup(config), Instant::ZERO), Response::Done);
        bus.expect(&mut node, &config).expect("room");
        Self { bus, node, desk: host(desk), seats }
    }

    fn turn(&mut self) {
        self.bus.take(&mut self.node, Instant::ZERO);
        self.bus.serve(&mut self.node, Instant::ZERO);
    }

    fn ask(&mut self, request: DeskRequest) -> Option<DeskAnswer> {
        assert_eq!(self.desk.submissions.push(&request.emit()), Ok(true));
        self.turn();
        let words = self.desk.completions.pop().expect("an honest board")?;
        Some(DeskAnswer::parse(&words).expect("an answer"))
    }

    fn seat(&mut self, seat: u16, child: u16, key: u64) -> DeskAnswer {
        let request = DeskRequest::Seat { seat, group: GROUP, child: ChildIndex(child), key };
        self.ask(request).expect("an answer at once")
    }

    fn is_seated(&mut self, seat: u16, child: u16) -> bool {
        matches!(self.seat(seat, child, key(child)), DeskAnswer::Seated { seat: given, slots, .. } if given == seat && slots == SLOTS as u32)
    }

    fn register(&mut self, rank: &mut Host, handle: u64, len_bytes: u64) -> EntryStatus {
        rank.ask_to_register(handle, len_bytes);
        self.turn();
        rank.registered().0
    }
}

impl Host {
    fn ask_to_register(&mut self, handle: u64, len_bytes: u64) {
        let command = AdminCommand::Register { handle, offset_bytes: 0, len_bytes };
        let entry = SubmissionEntry::Admin { cookie: 5, command };
        assert_eq!(self.submissions.push(&entry.emit()), Ok(true));
    }

    fn registered(&mut self) -> (EntryStatus, Option<RegionKey>) {
        match self.told() {
            Some(CompletionEntry::Admin { status, cookie: 5, value }) => (status, RegionKey::from_bits(value)),
            other => panic!("{other:?}"),
        }
    }

    /// Return what the board has told this rank next.
    fn told(&mut self) -> Option<CompletionEntry> {
        let words = self.completions.pop().expect("an honest board")?;
        Some(CompletionEntry::parse(&words).expect("an entry"))
    }

    /// Submit `chunks` chunks from the first one on, which lie at the beginning of a region one after the other.
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
    let mut by_reference = ChildMask::EMPTY;
    [0, 1].into_iter().for_each(|child| by_reference.insert(ChildIndex(child)));
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
        by_reference,
    }
}

fn key(child: u16) -> u64 {
    SECRET.child_key(GROUP, EPOCH, ChildIndex(child))
}

#[test]
fn only_who_has_the_key_gets_a_seat_and_one() {
    roomy(|mut rig| {
        let refused = |seat, reason| DeskAnswer::Refused { seat, reason };
        assert_eq!(rig.seat(0, 0, key(0) ^ 1), refused(0, AttachRefusal::Stranger));
        assert_eq!(rig.seat(0, 0, key(1)), refused(0, AttachRefusal::Stranger));
        assert_eq!(rig.seat(2, 0, key(0)), refused(2, AttachRefusal::NoRoom));
        assert!(rig.is_seated(0, 0));
        assert_eq!(rig.seat(1, 0, key(0)), refused(1, AttachRefusal::Attached));
        assert_eq!(rig.seat(0, 1, key(1)), refused(0, AttachRefusal::NoRoom), "the seat is taken");
        assert!(rig.is_seated(1, 1));
    });
}

#[test]
fn redo_slots_are_zeroed_for_the_group_that_gets_them() {
    roomy(|rig| {
        let (start, slot_len_bytes, slots) = rig.node.redo_slots(GROUP).expect("children by reference");
        let (given, rest) = rig.bus.memory.redo.split_at(start as usize / 8 + slot_len_bytes * slots / 8);
        let is = |word: &AtomicU64, value: u64| word.load(Ordering::Relaxed) == value;
        assert!(
            !given.is_empty() && given[start as usize / 8..].iter().all(|word| is(word, 0)),
            "a group before is there"
        );
        assert!(!rest.is_empty() && rest.iter().all(|word| is(word, u64::MAX)), "what is of no group is untouched");
    });
}

#[test]
fn a_rank_registers_what_is_in_its_arena_and_nothing_else() {
    roomy(|mut rig| {
        assert!(rig.is_seated(0, 0));
        let mut rank = host(rig.seats[0]);
        let mut status = |handle, len_bytes| rig.register(&mut rank, handle, len_bytes);
        assert_eq!(status(0, ARENA_LEN_BYTES), EntryStatus::Result);
        assert_eq!(status(ARENA_LEN_BYTES - 8, 8), EntryStatus::Result);
        assert_eq!(status(8, ARENA_LEN_BYTES), EntryStatus::OutOfBounds);
        assert_eq!(status(8, u64::MAX), EntryStatus::OutOfBounds);
        assert_eq!(status(ARENA_LEN_BYTES, 8), EntryStatus::BadRegion);
        assert_eq!(status(4, 8), EntryStatus::BadRegion, "words lie in words");
        assert_eq!(status(0, 0), EntryStatus::OutOfBounds);
    });
}

#[test]
fn a_seat_is_free_when_its_rank_is_gone() {
    roomy(|mut rig| {
        assert!(rig.is_seated(0, 0));
        let mut rank = host(rig.seats[0]);
        assert_eq!(rig.register(&mut rank, 0, 8), EntryStatus::Result);
        assert_eq!(rig.ask(DeskRequest::Leave { seat: 0 }), Some(DeskAnswer::Left { seat: 0 }));
        assert_eq!(rig.ask(DeskRequest::Leave { seat: 0 }), None, "there is nobody");
        assert!(rig.is_seated(0, 1));
        let mut next = host(rig.seats[0]);
        assert_eq!(rig.register(&mut next, 0, 8), EntryStatus::Result, "the place of the region is free, too");
    });
}

#[test]
fn who_breaks_a_ring_loses_the_seat() {
    roomy(|mut rig| {
        assert!(rig.is_seated(0, 0) && rig.is_seated(1, 1));
        let mut rank = host(rig.seats[0]);
        assert_eq!(rank.submissions.push(&[u64::MAX; SUBMISSION_WORDS]), Ok(true));
        rig.turn();
        let words = rig.desk.completions.pop().expect("an honest board").expect("it is told");
        assert_eq!(DeskAnswer::parse(&words), Some(DeskAnswer::Left { seat: 0 }));
        assert!(matches!(Bar::probe(rig.seats[0]), Err(sumac_hal::mmio::ProbeError::Status(_))));
        let mut other = host(rig.seats[1]);
        assert_eq!(rig.register(&mut other, 0, 8), EntryStatus::Result, "nobody else notices");
    });
}

#[test]
fn a_desk_that_breaks_its_ring_seats_nobody_more_and_ranks_are_served_on() {
    roomy(|mut rig| {
        assert!(rig.is_seated(0, 0));
        assert_eq!(rig.ask(DeskRequest::Leave { seat: 7 }), None);
        assert_eq!(rig.desk.submissions.push(&[5; SUBMISSION_WORDS]), Ok(true));
        rig.turn();
        let request = DeskRequest::Seat { seat: 1, group: GROUP, child: ChildIndex(1), key: key(1) };
        assert_eq!(rig.ask(request), None);
        let mut rank = host(rig.seats[0]);
        assert_eq!(rig.register(&mut rank, 0, 8), EntryStatus::Result);
    });
}

#[test]
fn the_place_of_a_region_is_free_with_its_last_use_also_when_its_rank_is_gone() {
    roomy(|mut rig| {
        assert!(rig.is_seated(0, 0) && rig.is_seated(1, 1));
        let [mut admins, mut datas] = [0, 1].map(|queue| rig.seats.map(|seat| ends(seat, queue)));
        let keys = [0, 1].map(|rank| {
            admins[rank].ask_to_register(0, CHUNK as u64);
            rig.turn();
            admins[rank].registered().1.expect("a key")
        });
        datas[0].contribute(keys[0], 1, 1);
        rig.turn();
        assert_eq!(rig.ask(DeskRequest::Leave { seat: 0 }), None, "what it has contributed is still to be pulled");
        // The other's contribution completes the chunk; what it asks for meanwhile is heard in the same step, behind that.
        datas[1].contribute(keys[1], 1, 1);
        rig.bus.take(&mut rig.node, Instant::ZERO);
        admins[1].ask_to_register(0, CHUNK as u64);
        rig.bus.serve(&mut rig.node, Instant::ZERO);
        let (status, key) = admins[1].registered();
        assert_eq!((status, key.map(|key| key.index)), (EntryStatus::Result, Some(keys[0].index)));
        let words = rig.desk.completions.pop().expect("an honest board").expect("it is told");
        assert_eq!(DeskAnswer::parse(&words), Some(DeskAnswer::Left { seat: 0 }));
    });
}

/// Three entries a chunk that was in flight would be more than there are places: a rank would lose its seat for calling
/// what others did not.
#[test]
fn what_a_whole_window_of_answers_speaks_of_is_told_once() {
    roomy(|mut rig| {
        assert!(rig.is_seated(0, 0) && rig.is_seated(1, 1));
        let [mut admins, mut datas] = [0, 1].map(|queue| rig.seats.map(|seat| ends(seat, queue)));
        for (rank, chunks) in [(0, u64::from(WINDOW)), (1, 1)] {
            admins[rank].ask_to_register(0, ARENA_LEN_BYTES);
            rig.turn();
            let key = admins[rank].registered().1.expect("a key");
            datas[rank].contribute(key, chunks, rank as u32);
            rig.turn();
        }
        for (rank, chunks) in [(0, WINDOW), (1, 1)] {
            assert!(matches!(datas[rank].told(), Some(CompletionEntry::Operations { .. })), "rank {rank}");
            match datas[rank].told() {
                Some(CompletionEntry::Answer { status: EntryStatus::Mismatch, seq: ChunkNo(0), count, .. }) => {
                    assert_eq!(count, chunks);
                }
                other => panic!("rank {rank}: {other:?}"),
            }
            assert_eq!(datas[rank].told(), None);
        }
    });
}

#[test]
fn a_turn_hears_so_many_requests_and_no_more() {
    roomy(|mut rig| {
        let all = rig.desk.submissions.capacity();
        (0..all).for_each(|_| {
            // Nobody has it, so nothing holds these up.
            let request = DeskRequest::Leave { seat: 0 };
            assert_eq!(rig.desk.submissions.push(&request.emit()), Ok(true));
        });
        rig.turn();
        assert_eq!(rig.desk.submissions.room(), Ok(REQUESTS_PER_TURN as u32));
    });
}

#[test]
fn a_group_of_the_same_number_has_links_of_its_own_alone() {
    roomy(|mut rig| {
        // The controller releases and creates before the bus looks again.
        for counter in 2..100 {
            assert_eq!(rig.node.control(&Request::ReleaseGroup(GROUP), Instant::ZERO), Response::Done);
            let config = GroupConfig { epoch: Epoch { counter, ..EPOCH }, ..group() };
            assert_eq!(rig.node.control(&Request::CreateGroup(config), Instant::ZERO), Response::Done);
            rig.bus.expect(&mut rig.node, &config).expect("room");
        }
        assert_eq!(rig.bus.links.len(), 2);
        assert_eq!(rig.seat(0, 0, key(0)), DeskAnswer::Refused { seat: 0, reason: AttachRefusal::Stranger });
    });
}

#[test]
fn the_longer_nothing_comes_the_later_is_the_next_look() {
    roomy(|mut rig| {
        let at = |millis| Instant::ZERO + Duration::from_millis(millis);
        assert_eq!(rig.bus.come_again(at(5)), at(15), "nobody is there");
        assert!(rig.is_seated(0, 0));
        let soon = |rig: &Rig, now| rig.bus.come_again(now) - now;
        assert_eq!(soon(&rig, at(0)), LOOK);
        assert_eq!(soon(&rig, at(16)), Duration::from_millis(1));
        assert_eq!(soon(&rig, at(60_000)), DESK_LOOK);
        let mut rank = host(rig.seats[0]);
        rank.ask_to_register(0, 8);
        rig.bus.take(&mut rig.node, at(60_000));
        rig.bus.serve(&mut rig.node, at(60_000));
        assert_eq!(soon(&rig, at(60_000)), LOOK);
    });
}
