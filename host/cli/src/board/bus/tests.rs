//! Tests of the broker, which act as its board and its ranks.

use super::*;
use std::collections::VecDeque;
use std::sync::atomic::AtomicU32;
use sumac_hal::dma::{Capabilities, Profile};
use sumac_hal::ids::{ChildIndex, GroupId};
use sumac_hal::mmio::admission::ADMISSION_DEPTH;
use sumac_hal::mmio::{DeviceStatus, Features, FunctionConfig};

const LONG: Duration = Duration::from_secs(20);
const ATTACH: Message = Message::Attach { group: GroupId(7), child: ChildIndex(1), key: 9 };
const SLOT_LEN_BYTES: usize = 1 << 20;

/// The board's side of the admission queue, in one incarnation.
struct Board<'a> {
    bar: Bar<'a>,
    requests: Consumer<SharedRing<'a, SUBMISSION_WORDS>, SUBMISSION_WORDS>,
    replies: Producer<SharedRing<'a, COMPLETION_WORDS>, COMPLETION_WORDS>,
}

impl<'a> Board<'a> {
    fn begin(memory: &'a BarMemory, incarnation: u64) -> Self {
        memory.words().iter().for_each(|word| word.store(0, Ordering::Relaxed));
        let dma = Capabilities::new(Profile::Full, 64, 64);
        let (boot_id, features) = (BootId(incarnation), Features::all());
        let config = FunctionConfig { boot_id, features, queues: 2, depth: ADMISSION_DEPTH, dma };
        let bar = Bar::create(memory.words(), &config).expect("it fits");
        let queue = bar.queue(0).expect("the first queue");
        Self { bar, requests: Consumer::new(queue.submissions), replies: Producer::new(queue.completions) }
    }

    fn next_request(&mut self) -> Option<AdmissionRequest> {
        let words = self.requests.pop().expect("an honest broker")?;
        Some(AdmissionRequest::parse(&words).expect("a request"))
    }

    fn reply(&mut self, reply: AdmissionReply) {
        assert_eq!(self.replies.push(&reply.emit()), Ok(true));
    }

    fn attach(&mut self, slot: u16) {
        self.reply(AdmissionReply::Attached { rank_slot: slot, offset_bytes: 0, slot_len_bytes: 4096, slots: 2 });
    }
}

/// A broker with two rank slots.
struct Rig<'a> {
    queue: AdmissionQueue<'a>,
    listener: Listener,
    name: String,
}

impl<'a> Rig<'a> {
    fn new(memory: &'a BarMemory) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("sumac-broker-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let listener = Listener::bind(&name).expect("a free name");
        let redo = Region::create(1 << 16, Pages::Normal).expect("memory");
        let slots = [(); 2].map(|()| RankSlot::new(BarMemory::create(SLOT_LEN_BYTES).expect("memory")));
        Self { queue: AdmissionQueue::new(memory, redo, slots.into(), 4096), listener, name }
    }

    fn turn(&mut self) {
        self.queue.turn(&self.listener);
    }

    /// Connect, send a message and let the broker handle it.
    fn connect(&mut self, message: &Message) -> Connection {
        let rank = Connection::open(&self.name, LONG).expect("it listens");
        rank.send(message, None).expect("it is open");
        self.turn();
        rank
    }

    /// Connect and attach; the board admits the rank.
    fn attach_rank(&mut self, board: &mut Board<'_>, slot: u16) -> Connection {
        let rank = self.connect(&ATTACH);
        let next_request =
            AdmissionRequest::Attach { rank_slot: slot, group: GroupId(7), child: ChildIndex(1), key: 9 };
        assert_eq!(board.next_request(), Some(next_request));
        board.attach(slot);
        self.turn();
        for _ in 0..5 {
            assert!(rank.receive(LONG).expect("what a rank needs").file.is_some());
        }
        rank
    }
}

fn queue_memory() -> BarMemory {
    BarMemory::create(QUEUE_LEN_BYTES).expect("memory")
}

fn refusal(rank: &Connection) -> AttachRefusal {
    match rank.receive(LONG).expect("an reply").message {
        Message::Refused { reason } => reason,
        other => panic!("{other:?}"),
    }
}

fn is_closed(rank: &Connection) -> bool {
    matches!(rank.receive(Duration::ZERO), Err(SocketError::Closed))
}

#[test]
fn slots_of_an_ended_incarnation_are_reused_after_their_ranks_close() {
    let memory = queue_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    let ranks = [0, 1].map(|slot| rig.attach_rank(&mut board, slot));
    let mut board = Board::begin(&memory, 2);
    rig.turn();
    assert!(ranks.iter().all(is_closed), "their connections are closed");
    // Their programs may still be filling buffers there.
    assert_eq!(refusal(&rig.connect(&ATTACH)), AttachRefusal::NoMemory);
    assert_eq!(board.next_request(), None);
    drop(ranks);
    rig.turn();
    rig.attach_rank(&mut board, 0);
}

#[test]
fn slot_released_by_the_board_is_reused_after_its_rank_closes() {
    let memory = queue_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    let [first, _second] = [0, 1].map(|slot| rig.attach_rank(&mut board, slot));
    board.reply(AdmissionReply::Detached { rank_slot: 0 });
    rig.turn();
    assert!(is_closed(&first));
    assert_eq!(refusal(&rig.connect(&ATTACH)), AttachRefusal::NoMemory);
    drop(first);
    rig.turn();
    assert_eq!(board.next_request(), None, "the board released it before");
    rig.attach_rank(&mut board, 0);
}

#[test]
fn slot_released_by_its_rank_is_reused_after_the_board_detaches() {
    let memory = queue_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    let [first, _second] = [0, 1].map(|slot| rig.attach_rank(&mut board, slot));
    drop(first);
    rig.turn();
    assert_eq!(board.next_request(), Some(AdmissionRequest::Detach { rank_slot: 0 }));
    let next = rig.connect(&ATTACH);
    assert_eq!(board.next_request(), None, "it waits");
    board.reply(AdmissionReply::Detached { rank_slot: 0 });
    rig.turn();
    assert!(matches!(board.next_request(), Some(AdmissionRequest::Attach { rank_slot: 0, .. })));
    board.attach(0);
    rig.turn();
    assert!(next.receive(LONG).expect("what a rank needs").file.is_some());
}

#[test]
fn rank_is_not_refused_for_slots_of_ranks_that_have_just_closed() {
    let memory = queue_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    let ranks = [0, 1].map(|slot| rig.attach_rank(&mut board, slot));
    // The broker has not noticed when the next rank asks.
    drop(ranks);
    let next = rig.connect(&ATTACH);
    for slot in [0, 1] {
        assert_eq!(board.next_request(), Some(AdmissionRequest::Detach { rank_slot: slot }));
    }
    board.reply(AdmissionReply::Detached { rank_slot: 1 });
    rig.turn();
    assert!(matches!(board.next_request(), Some(AdmissionRequest::Attach { rank_slot: 1, .. })));
    // One that waits too long is refused.
    let last = rig.connect(&ATTACH);
    assert_eq!(rig.queue.pending.len(), 1);
    rig.queue.pending[0].since -= RELEASE_TIMEOUT;
    rig.turn();
    assert_eq!(refusal(&last), AttachRefusal::NoMemory);
    // One that goes while it waits is forgotten.
    drop((rig.connect(&ATTACH), next));
    rig.turn();
    assert!(rig.queue.pending.is_empty());
}

#[test]
fn rank_that_closes_before_the_reply_frees_its_slot() {
    let memory = queue_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    drop(rig.connect(&ATTACH));
    assert!(matches!(board.next_request(), Some(AdmissionRequest::Attach { rank_slot: 0, .. })));
    board.attach(0);
    rig.turn();
    assert_eq!(board.next_request(), Some(AdmissionRequest::Detach { rank_slot: 0 }));
    board.reply(AdmissionReply::Detached { rank_slot: 0 });
    rig.turn();
    // So does a rank that is refused, and one without a reply when the incarnation ends.
    let rank = rig.connect(&ATTACH);
    assert!(matches!(board.next_request(), Some(AdmissionRequest::Attach { rank_slot: 0, .. })));
    board.reply(AdmissionReply::Refused { rank_slot: 0, reason: AttachRefusal::UnknownChild });
    rig.turn();
    assert_eq!(refusal(&rank), AttachRefusal::UnknownChild);
    let rank = rig.connect(&ATTACH);
    let mut board = Board::begin(&memory, 2);
    rig.turn();
    assert!(is_closed(&rank));
    rig.attach_rank(&mut board, 0);
}

#[test]
fn detach_is_retried_until_the_request_ring_has_room() {
    let memory = queue_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    let rank = rig.attach_rank(&mut board, 0);
    // The board does not poll for a while.
    let some = AdmissionRequest::Detach { rank_slot: 1 };
    while rig.queue.ask(some) {}
    drop(rank);
    rig.turn();
    (0..ADMISSION_DEPTH).for_each(|_| assert_eq!(board.next_request(), Some(some)));
    rig.turn();
    assert_eq!(board.next_request(), Some(AdmissionRequest::Detach { rank_slot: 0 }));
}

#[test]
fn protocol_violations_close_the_connection_without_a_request() {
    let memory = queue_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    let region = Region::create(4096, Pages::Normal).expect("memory");
    let rude = Connection::open(&rig.name, LONG).expect("it listens");
    rude.send(&Message::Memory { handle: 1 }, Some(region.file())).expect("it is open");
    rig.turn();
    assert!(is_closed(&rude));
    // A rank that violates the protocol loses its slot.
    let rank = rig.attach_rank(&mut board, 0);
    rank.send(&ATTACH, None).expect("it is open");
    rig.turn();
    assert!(is_closed(&rank));
    assert_eq!(board.next_request(), Some(AdmissionRequest::Detach { rank_slot: 0 }));
    board.reply(AdmissionReply::Detached { rank_slot: 0 });
    rig.turn();
    // Further messages of a closed connection do not free its slot.
    rank.send(&ATTACH, None).expect("its own direction is open");
    rig.turn();
    assert!(!rig.queue.slots[0].is_free());
    // Unexpected replies of the board change nothing.
    board.attach(1);
    board.reply(AdmissionReply::Detached { rank_slot: 1 });
    board.reply(AdmissionReply::Refused { rank_slot: 9, reason: AttachRefusal::NoMemory });
    rig.turn();
    rig.attach_rank(&mut board, 1);
}

#[test]
fn silent_connections_do_not_delay_others() {
    let memory = queue_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    let silent: VecDeque<_> = (0..=PENDING_MAX)
        .map(|_| {
            let connection = Connection::open(&rig.name, LONG).expect("it listens");
            rig.turn();
            connection
        })
        .collect();
    assert_eq!(rig.queue.pending.len(), PENDING_MAX);
    assert!(is_closed(&silent[0]) && !is_closed(&silent[1]));
    rig.attach_rank(&mut board, 0);
}

#[test]
fn board_that_is_not_ready_gets_no_requests() {
    let memory = queue_memory();
    let mut rig = Rig::new(&memory);
    assert_eq!(refusal(&rig.connect(&ATTACH)), AttachRefusal::NoMemory, "it has not booted");
    let mut board = Board::begin(&memory, 1);
    let rank = rig.attach_rank(&mut board, 0);
    board.bar.set_status(DeviceStatus::FAILED);
    rig.turn();
    assert!(is_closed(&rank));
    assert_eq!(refusal(&rig.connect(&ATTACH)), AttachRefusal::NoMemory);
}

#[test]
fn request_before_a_new_incarnation_is_noticed_is_not_written() {
    let memory = queue_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    let _first = rig.attach_rank(&mut board, 0);
    let mut board = Board::begin(&memory, 2);
    // Before the broker polls.
    assert!(!rig.queue.ask(AdmissionRequest::Detach { rank_slot: 0 }));
    assert_eq!(board.next_request(), None);
    rig.turn();
    rig.attach_rank(&mut board, 1);
}
