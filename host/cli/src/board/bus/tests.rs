//! The broker, with the test as its board and its ranks.

use super::*;
use std::collections::VecDeque;
use std::sync::atomic::AtomicU32;
use sumac_hal::dma::{Capabilities, Profile};
use sumac_hal::ids::{ChildIndex, GroupId};
use sumac_hal::mmio::desk::DESK_DEPTH;
use sumac_hal::mmio::{DeviceStatus, Features, FunctionConfig};

const LONG: Duration = Duration::from_secs(20);
const ATTACH: Message = Message::Attach { group: GroupId(7), child: ChildIndex(1), key: 9 };
const SEAT_LEN_BYTES: usize = 1 << 20;

/// The board's side of the desk, in one life.
struct Board<'a> {
    bar: Bar<'a>,
    requests: Consumer<SharedRing<'a, SUBMISSION_WORDS>, SUBMISSION_WORDS>,
    answers: Producer<SharedRing<'a, COMPLETION_WORDS>, COMPLETION_WORDS>,
}

impl<'a> Board<'a> {
    fn begin(memory: &'a BarMemory, life: u64) -> Self {
        memory.words().iter().for_each(|word| word.store(0, Ordering::Relaxed));
        let dma = Capabilities::new(Profile::Full, 64, 64);
        let (boot_id, features) = (BootId(life), Features::all());
        let config = FunctionConfig { boot_id, features, queues: 2, depth: DESK_DEPTH, dma };
        let bar = Bar::create(memory.words(), &config).expect("it fits");
        let queue = bar.queue(0).expect("the first queue");
        Self { bar, requests: Consumer::new(queue.submissions), answers: Producer::new(queue.completions) }
    }

    fn asked(&mut self) -> Option<DeskRequest> {
        let words = self.requests.pop().expect("an honest broker")?;
        Some(DeskRequest::parse(&words).expect("a request"))
    }

    fn answer(&mut self, answer: DeskAnswer) {
        assert_eq!(self.answers.push(&answer.emit()), Ok(true));
    }

    fn give(&mut self, seat: u16) {
        self.answer(DeskAnswer::Seated { seat, offset_bytes: 0, slot_len_bytes: 4096, slots: 2 });
    }
}

/// A broker of two seats.
struct Rig<'a> {
    desk: Desk<'a>,
    listener: Listener,
    name: String,
}

impl<'a> Rig<'a> {
    fn new(memory: &'a BarMemory) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("sumac-broker-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let listener = Listener::bind(&name).expect("a free name");
        let redo = Region::create(1 << 16, Pages::Normal).expect("memory");
        let seats = [(); 2].map(|()| Seat::new(BarMemory::create(SEAT_LEN_BYTES).expect("memory")));
        Self { desk: Desk::new(memory, redo, seats.into(), 4096), listener, name }
    }

    fn turn(&mut self) {
        self.desk.turn(&self.listener);
    }

    /// Dial, and be heard, as far as a message goes.
    fn dial(&mut self, message: &Message) -> Connection {
        let rank = Connection::open(&self.name, LONG).expect("it listens");
        rank.send(message, None).expect("it is open");
        self.turn();
        rank
    }

    /// Dial and be seated; the board gives what it is asked for.
    fn sit(&mut self, board: &mut Board<'_>, seat: u16) -> Connection {
        let rank = self.dial(&ATTACH);
        let asked = DeskRequest::Seat { seat, group: GroupId(7), child: ChildIndex(1), key: 9 };
        assert_eq!(board.asked(), Some(asked));
        board.give(seat);
        self.turn();
        for _ in 0..5 {
            assert!(rank.receive(LONG).expect("what a rank needs").file.is_some());
        }
        rank
    }
}

fn desk_memory() -> BarMemory {
    BarMemory::create(DESK_LEN_BYTES).expect("memory")
}

fn refusal(rank: &Connection) -> AttachRefusal {
    match rank.receive(LONG).expect("an answer").message {
        Message::Refused { reason } => reason,
        other => panic!("{other:?}"),
    }
}

fn is_hung_up_on(rank: &Connection) -> bool {
    matches!(rank.receive(Duration::ZERO), Err(SocketError::Closed))
}

#[test]
fn the_seats_of_a_life_that_is_over_wait_for_the_ranks_that_had_them() {
    let memory = desk_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    let ranks = [0, 1].map(|seat| rig.sit(&mut board, seat));
    let mut board = Board::begin(&memory, 2);
    rig.turn();
    assert!(ranks.iter().all(is_hung_up_on), "they are told");
    // Their programs may be in the middle of filling buffers there.
    assert_eq!(refusal(&rig.dial(&ATTACH)), AttachRefusal::NoRoom);
    assert_eq!(board.asked(), None);
    drop(ranks);
    rig.turn();
    rig.sit(&mut board, 0);
}

#[test]
fn a_seat_that_the_board_gives_up_waits_for_its_rank() {
    let memory = desk_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    let [first, _second] = [0, 1].map(|seat| rig.sit(&mut board, seat));
    board.answer(DeskAnswer::Left { seat: 0 });
    rig.turn();
    assert!(is_hung_up_on(&first));
    assert_eq!(refusal(&rig.dial(&ATTACH)), AttachRefusal::NoRoom);
    drop(first);
    rig.turn();
    assert_eq!(board.asked(), None, "it has let go of it before");
    rig.sit(&mut board, 0);
}

#[test]
fn a_seat_that_a_rank_gives_up_waits_for_the_board() {
    let memory = desk_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    let [first, _second] = [0, 1].map(|seat| rig.sit(&mut board, seat));
    drop(first);
    rig.turn();
    assert_eq!(board.asked(), Some(DeskRequest::Leave { seat: 0 }));
    assert_eq!(refusal(&rig.dial(&ATTACH)), AttachRefusal::NoRoom);
    board.answer(DeskAnswer::Left { seat: 0 });
    rig.turn();
    rig.sit(&mut board, 0);
}

#[test]
fn who_goes_before_the_board_has_answered_gives_the_seat_back() {
    let memory = desk_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    drop(rig.dial(&ATTACH));
    assert!(matches!(board.asked(), Some(DeskRequest::Seat { seat: 0, .. })));
    board.give(0);
    rig.turn();
    assert_eq!(board.asked(), Some(DeskRequest::Leave { seat: 0 }));
    board.answer(DeskAnswer::Left { seat: 0 });
    rig.turn();
    // So does who is refused, and who was not answered before the life ended.
    let rank = rig.dial(&ATTACH);
    assert!(matches!(board.asked(), Some(DeskRequest::Seat { seat: 0, .. })));
    board.answer(DeskAnswer::Refused { seat: 0, reason: AttachRefusal::Stranger });
    rig.turn();
    assert_eq!(refusal(&rank), AttachRefusal::Stranger);
    let rank = rig.dial(&ATTACH);
    let mut board = Board::begin(&memory, 2);
    rig.turn();
    assert!(is_hung_up_on(&rank));
    rig.sit(&mut board, 0);
}

#[test]
fn the_board_hears_of_a_rank_that_is_gone_when_it_has_room_to() {
    let memory = desk_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    let rank = rig.sit(&mut board, 0);
    // It does not come round for a while.
    let some = DeskRequest::Leave { seat: 1 };
    while rig.desk.ask(some) {}
    drop(rank);
    rig.turn();
    (0..DESK_DEPTH).for_each(|_| assert_eq!(board.asked(), Some(some)));
    rig.turn();
    assert_eq!(board.asked(), Some(DeskRequest::Leave { seat: 0 }));
}

#[test]
fn nonsense_is_hung_up_on_and_asked_of_nobody() {
    let memory = desk_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    let region = Region::create(4096, Pages::Normal).expect("memory");
    let rude = Connection::open(&rig.name, LONG).expect("it listens");
    rude.send(&Message::Memory { handle: 1 }, Some(region.file())).expect("it is open");
    rig.turn();
    assert!(is_hung_up_on(&rude));
    // Said by somebody who has a seat, it costs that.
    let rank = rig.sit(&mut board, 0);
    rank.send(&ATTACH, None).expect("it is open");
    rig.turn();
    assert!(is_hung_up_on(&rank));
    assert_eq!(board.asked(), Some(DeskRequest::Leave { seat: 0 }));
    board.answer(DeskAnswer::Left { seat: 0 });
    rig.turn();
    // Who is hung up on and talks on has hung up no more than before.
    rank.send(&ATTACH, None).expect("its own direction is open");
    rig.turn();
    assert!(!rig.desk.seats[0].is_free());
    // A board that answers what nobody has asked changes nothing.
    board.give(1);
    board.answer(DeskAnswer::Left { seat: 1 });
    board.answer(DeskAnswer::Refused { seat: 9, reason: AttachRefusal::NoRoom });
    rig.turn();
    rig.sit(&mut board, 1);
}

#[test]
fn silence_keeps_nobody_waiting() {
    let memory = desk_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    let silent: VecDeque<_> = (0..=DIALLED_MAX)
        .map(|_| {
            let connection = Connection::open(&rig.name, LONG).expect("it listens");
            rig.turn();
            connection
        })
        .collect();
    assert_eq!(rig.desk.dialled.len(), DIALLED_MAX);
    assert!(is_hung_up_on(&silent[0]) && !is_hung_up_on(&silent[1]));
    rig.sit(&mut board, 0);
}

#[test]
fn a_board_without_a_desk_is_asked_nothing() {
    let memory = desk_memory();
    let mut rig = Rig::new(&memory);
    assert_eq!(refusal(&rig.dial(&ATTACH)), AttachRefusal::NoRoom, "it has not booted");
    let mut board = Board::begin(&memory, 1);
    let rank = rig.sit(&mut board, 0);
    board.bar.set_status(DeviceStatus::FAILED);
    rig.turn();
    assert!(is_hung_up_on(&rank));
    assert_eq!(refusal(&rig.dial(&ATTACH)), AttachRefusal::NoRoom);
}

#[test]
fn the_rings_of_a_new_life_are_not_written_to_as_if_they_were_the_old_ones() {
    let memory = desk_memory();
    let mut rig = Rig::new(&memory);
    let mut board = Board::begin(&memory, 1);
    let _first = rig.sit(&mut board, 0);
    let mut board = Board::begin(&memory, 2);
    // Before the broker has looked.
    assert!(!rig.desk.ask(DeskRequest::Leave { seat: 0 }));
    assert_eq!(board.asked(), None);
    rig.turn();
    rig.sit(&mut board, 1);
}
