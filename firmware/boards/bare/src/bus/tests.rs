//! The bus with a node of its own, and the test as its broker and its ranks.

use super::*;
use core::num::NonZeroU32;
use std::boxed::Box;
use std::vec;
use sumac_device::{Memory, NodeConfig, RedoSlot, Reference, References, Storage};
use sumac_hal::ctrl::{ChildMask, Order, Request, Response, TreeConfig};
use sumac_hal::ids::{Epoch, TreeId};
use sumac_hal::key::GroupSecret;
use sumac_hal::mmio::{AdminCommand, SubmissionEntry};
use sumac_hal::shard::Shard;
use sumac_hal::uplink::HopTimers;

const GROUP: GroupId = GroupId(3);
const EPOCH: Epoch = Epoch { term: 1, counter: 1 };
const SECRET: GroupSecret = GroupSecret([7; 16]);
const BOOT: BootId = BootId(9);
const ARENA_LEN_BYTES: u64 = 64 << 10;

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
    let (bar, identity) = Bar::probe(memory).expect("a function");
    assert_eq!(identity.boot_id, BOOT);
    let queue = bar.queue(0).expect("the first queue");
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
        let shared = BusMemory { desk, redo: memory::<8192>(), seats: seats.into_iter().collect() };
        let bus = Bus::open(Box::leak(Box::default()), shared, BOOT).expect("there is room");
        let shard = Shard::new(0, 1).expect("a shard");
        let config = NodeConfig { shard, boot_id: BOOT, max_packet_len_bytes: 1472, receive_buffer_bytes: 1 << 16 };
        let tables: &'static mut Memory<2, 8, 16, 0> = Box::leak(Box::default());
        let storage = Storage { bytes: Box::leak(vec![0; 1 << 16].into()), ..tables.storage() };
        let (memory, capabilities) = bus.redo_memory();
        let redo = Box::leak(vec![RedoSlot::EMPTY; 16].into());
        let references = Box::leak(vec![Reference::EMPTY; 64].into());
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
        matches!(self.seat(seat, child, key(child)), DeskAnswer::Seated { seat: given, slots: 8, .. } if given == seat)
    }

    fn register(&mut self, rank: &mut Host, handle: u64, len_bytes: u64) -> EntryStatus {
        let command = AdminCommand::Register { handle, offset_bytes: 0, len_bytes };
        let entry = SubmissionEntry::Admin { cookie: 5, command };
        assert_eq!(rank.submissions.push(&entry.emit()), Ok(true));
        self.turn();
        let words = rank.completions.pop().expect("an honest board").expect("an answer");
        match CompletionEntry::parse(&words) {
            Ok(CompletionEntry::Admin { status, cookie: 5, .. }) => status,
            other => panic!("{other:?}"),
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
        window_max: 4,
        slots: 8,
        chunk_len_bytes: 64,
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
