//! The broker of an emulated board: ranks of this machine dial it, and it seats them in memory that they share with the
//! board (`sumac_hal::mmio::desk`).
//!
//! The memory is files of this process, which the emulator maps as BARs of `ivshmem-plain` functions: the desk, redo slots,
//! and the seats, each a file of its own, so that a rank reaches its own seat, and the redo slots to read, and nothing else.
//!
//! Invariants:
//! - the board decides who may attach, as it knows the keys; the broker only passes on what it says;
//! - a seat is given to another rank only when the board has done with it, and when the rank that had it has hung up: its
//!   program's buffers are there until then, also when the board has gone long before;
//! - when the board begins another life, or ends, everybody is hung up on;
//! - who has dialled and says nothing keeps nobody waiting.
//!
//! Ranks are processes of one user, the broker's, and of the superuser: also where the broker is the superuser's, others are
//! refused. For the redo slots of all groups are in one file, as a BAR is, and ranks that have it can read those of other
//! groups. One that hangs up and goes on writing to the seat that it had spoils the values of the
//! next one's program, as it could by a debugger, and nothing of the board's.

#[cfg(test)]
mod tests;

use anyhow::{Context, Result};
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use sumac_hal::ids::BootId;
use sumac_hal::mmio::desk::{ARENA_OFFSET_BYTES, AttachRefusal, DeskAnswer, DeskRequest};
use sumac_hal::mmio::{Bar, COMPLETION_WORDS, SUBMISSION_WORDS};
use sumac_hal::ring::{Consumer, Producer, SharedRing};
use sumac_hal::shm::{
    BarMemory, Bell, Connection, DeviceUsers, Listener, Message, Pages, Received, Region, SocketError, machine,
};

/// The desk's memory: more than its rings take. BARs are powers of two.
const DESK_LEN_BYTES: usize = 64 << 10;

/// Memory of redo slots.
const REDO_LEN_BYTES: usize = 8 << 20;

/// How soon the broker looks again whether a rank or the board has something.
const LOOK: Duration = Duration::from_millis(5);

/// How long a rank may take to say which one it is.
const SAY_LIMIT: Duration = Duration::from_secs(5);

/// How many may be about to say it; one more, and the one that has had most time is hung up on.
const DIALLED_MAX: usize = 64;

/// Answers taken from the board at a time.
const ANSWERS_PER_TURN: usize = 64;

/// The first device number on the bus: 0 is its bridge.
const FIRST_DEVICE: usize = 1;

/// The memory of a board, and the thread that seats ranks. Dropping it hangs up on all.
#[derive(Debug)]
pub(super) struct Broker {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// What the emulator and the board are to be told.
#[derive(Debug)]
pub(super) struct Told {
    /// Arguments of the emulator.
    pub(super) arguments: Vec<String>,
    /// Lines of the board's options.
    pub(super) options: String,
}

impl Broker {
    /// Make the memory of so many seats, and listen.
    pub(super) fn start(seats: u16, seat_len_bytes: usize) -> Result<(Self, Told)> {
        let machine = machine().context("the system tells no name of this machine, so ranks can't share memory")?;
        let socket = format!("sumac-board-{}", std::process::id());
        let listener = Listener::bind(&socket)?;
        let desk = BarMemory::create(DESK_LEN_BYTES)?;
        let redo = Region::create(REDO_LEN_BYTES, Pages::Normal)?;
        let seats = (0..seats).map(|_| BarMemory::create(seat_len_bytes)).collect::<Result<Vec<_>, _>>()?;
        let mut told = Told { arguments: Vec::new(), options: String::new() };
        told.function(desk.file().as_raw_fd(), DESK_LEN_BYTES);
        // The board writes it, and ranks get it to read: by then the board serves, so the emulator has mapped it.
        told.function(redo.device_file().as_raw_fd(), REDO_LEN_BYTES);
        seats.iter().for_each(|seat| told.function(seat.file().as_raw_fd(), seat_len_bytes));
        // Writing to a string can't fail.
        let user = DeviceUsers::own().own;
        let _ = writeln!(told.options, "machine={machine}\nsocket={socket}\nuser={user}");
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let arena_len_bytes = (seat_len_bytes - ARENA_OFFSET_BYTES) as u64;
        let seats = seats.into_iter().map(Seat::new).collect();
        let run = move || {
            let mut desk = Desk::new(&desk, redo, seats, arena_len_bytes);
            while !stopped.load(Ordering::Acquire) {
                desk.turn(&listener);
            }
        };
        let thread = thread::Builder::new().name("broker".into()).spawn(run).context("can't start the broker")?;
        Ok((Self { stop, thread: Some(thread) }, told))
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Told {
    /// Have the emulator map an open file of this process as the next function's memory.
    fn function(&mut self, file: i32, len_bytes: usize) {
        let device = FIRST_DEVICE + self.arguments.len() / 4;
        let path = format!("/proc/{}/fd/{file}", std::process::id());
        self.arguments.extend([
            "-object".into(),
            format!("memory-backend-file,id=bar{device},mem-path={path},size={len_bytes},share=on"),
            "-device".into(),
            format!("ivshmem-plain,memdev=bar{device},addr={device:#x}"),
        ]);
    }
}

/// A seat, who has it, and what the board has of it.
struct Seat {
    memory: BarMemory,
    rank: Rank,
    board: Has,
}

/// Who has a seat.
enum Rank {
    Nobody,
    There(Connection),
    /// It was hung up on, and may still have buffers there.
    HungUpOn(Connection),
}

/// What the board has of a seat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Has {
    Nothing,
    /// It is asked whether the rank may have it.
    Request,
    Rank,
    /// It knows that the rank is gone, and may still have use for the memory.
    Remains,
}

impl Seat {
    const fn new(memory: BarMemory) -> Self {
        Self { memory, rank: Rank::Nobody, board: Has::Nothing }
    }

    const fn is_free(&self) -> bool {
        matches!((&self.rank, self.board), (Rank::Nobody, Has::Nothing))
    }

    /// Hang up on the rank, if there is one.
    fn hang_up(&mut self) {
        self.rank = match std::mem::replace(&mut self.rank, Rank::Nobody) {
            Rank::There(connection) => {
                // It fails where the rank is gone already, which is heard next.
                let _ = connection.hang_up();
                Rank::HungUpOn(connection)
            }
            other => other,
        };
    }

    /// See whether the rank has hung up, or says what it should not.
    fn watch(&mut self) {
        let (Rank::There(connection) | Rank::HungUpOn(connection)) = &self.rank else { return };
        match connection.receive(Duration::ZERO) {
            Err(SocketError::Timeout(_)) => {}
            // The system has no other way to tell either.
            Err(SocketError::Closed | SocketError::System { .. }) => self.rank = Rank::Nobody,
            _ => self.hang_up(),
        }
    }
}

/// One life of the board, with the rings that it has made.
struct Life<'a> {
    boot_id: BootId,
    requests: Producer<SharedRing<'a, SUBMISSION_WORDS>, SUBMISSION_WORDS>,
    answers: Consumer<SharedRing<'a, COMPLETION_WORDS>, COMPLETION_WORDS>,
}

struct Desk<'a> {
    memory: &'a BarMemory,
    life: Option<Life<'a>>,
    redo: Region,
    seats: Vec<Seat>,
    arena_len_bytes: u64,
    /// Ranks that have not said which ones they are, and since when.
    dialled: VecDeque<(Connection, Instant)>,
}

impl<'a> Desk<'a> {
    const fn new(memory: &'a BarMemory, redo: Region, seats: Vec<Seat>, arena_len_bytes: u64) -> Self {
        Self { memory, life: None, redo, seats, arena_len_bytes, dialled: VecDeque::new() }
    }

    fn turn(&mut self, listener: &Listener) {
        match listener.accept(LOOK) {
            Ok(Some(connection)) => {
                if self.dialled.len() == DIALLED_MAX {
                    self.dialled.pop_front();
                }
                self.dialled.push_back((connection, Instant::now()));
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, "a rank can't attach");
                // Where this process has no room, whoever waits makes the socket readable at once again.
                thread::sleep(LOOK);
            }
        }
        self.follow_life();
        self.hear_dialled();
        for _ in 0..ANSWERS_PER_TURN {
            let Some(answer) = self.answer() else { break };
            self.take_in(answer);
        }
        self.watch_seats();
    }

    /// See whether the board is in another life: then nobody is seated any more.
    fn follow_life(&mut self) {
        let probed = Bar::probe(self.memory.words()).ok();
        let now = probed.as_ref().map(|(_, identity)| identity.boot_id);
        if self.life.as_ref().map(|life| life.boot_id) == now {
            return;
        }
        if self.life.take().is_some() {
            tracing::info!("the board has ended a life: hanging up on its ranks");
            for seat in &mut self.seats {
                match std::mem::replace(&mut seat.board, Has::Nothing) {
                    // It has been given nothing.
                    Has::Request => seat.rank = Rank::Nobody,
                    _ => seat.hang_up(),
                }
            }
        }
        self.life = probed.and_then(|(bar, identity)| {
            let queue = bar.queue(0)?;
            let (requests, answers) = (Producer::new(queue.submissions), Consumer::new(queue.completions));
            Some(Life { boot_id: identity.boot_id, requests, answers })
        });
    }

    /// Ask the board; false if it can't be asked.
    fn ask(&mut self, request: DeskRequest) -> bool {
        // An index of a life that is over would break the rings of the next, which may have begun since the last look.
        let now = Bar::probe(self.memory.words()).ok().map(|(_, identity)| identity.boot_id);
        let life = self.life.as_mut().filter(|life| now == Some(life.boot_id));
        life.is_some_and(|life| life.requests.push(&request.emit()) == Ok(true))
    }

    fn answer(&mut self) -> Option<DeskAnswer> {
        let words = self.life.as_mut()?.answers.pop().ok()??;
        let answer = DeskAnswer::parse(&words);
        if answer.is_none() {
            tracing::warn!("the board answers what no board of this version does");
        }
        answer
    }

    /// Hear who has dialled, and ask the board for each.
    fn hear_dialled(&mut self) {
        for (connection, since) in std::mem::take(&mut self.dialled) {
            match connection.receive(Duration::ZERO) {
                Err(SocketError::Timeout(_)) if since.elapsed() < SAY_LIMIT => {
                    self.dialled.push_back((connection, since));
                }
                Ok(Received { message: Message::Attach { group, child, key }, .. }) => {
                    let free = self.seats.iter().position(Seat::is_free);
                    let asked = free.filter(|&at| self.ask(DeskRequest::Seat { seat: at as u16, group, child, key }));
                    match asked {
                        Some(at) => {
                            let seat = &mut self.seats[at];
                            (seat.rank, seat.board) = (Rank::There(connection), Has::Request);
                        }
                        None => {
                            let (seats, ready) = (self.seats.len(), self.life.is_some());
                            tracing::warn!(seats, ready, "no seat for a rank; `sumac image run --seats` says how many");
                            refuse(&connection, AttachRefusal::NoRoom);
                        }
                    }
                }
                // It has hung up, or says what it should not.
                _ => {}
            }
        }
    }

    fn take_in(&mut self, answer: DeskAnswer) {
        let (DeskAnswer::Seated { seat, .. } | DeskAnswer::Refused { seat, .. } | DeskAnswer::Left { seat }) = answer
        else {
            return;
        };
        let Some(seat) = self.seats.get_mut(usize::from(seat)) else { return };
        match answer {
            DeskAnswer::Seated { offset_bytes, slot_len_bytes, slots, .. } if seat.board == Has::Request => {
                seat.board = Has::Rank;
                let Rank::There(connection) = &seat.rank else { return };
                let redo = Message::Redo { offset_bytes, slot_len_bytes, slots };
                if let Err(error) = hand_over(connection, &seat.memory, &self.redo, redo, self.arena_len_bytes) {
                    tracing::warn!(%error, "a rank did not take its seat");
                    seat.hang_up();
                }
            }
            DeskAnswer::Refused { reason, .. } if seat.board == Has::Request => {
                if let Rank::There(connection) = std::mem::replace(&mut seat.rank, Rank::Nobody) {
                    refuse(&connection, reason);
                }
                seat.board = Has::Nothing;
            }
            DeskAnswer::Left { .. } if matches!(seat.board, Has::Rank | Has::Remains) => {
                seat.board = Has::Nothing;
                seat.hang_up();
            }
            _ => tracing::warn!(?answer, "the board answers what it was not asked"),
        }
    }

    /// See who has hung up, and tell the board; where it can't be told now, the next turn tries again.
    fn watch_seats(&mut self) {
        for at in 0..self.seats.len() {
            let seat = &mut self.seats[at];
            seat.watch();
            let is_left = seat.board == Has::Rank && !matches!(seat.rank, Rank::There(_));
            if is_left && self.ask(DeskRequest::Leave { seat: at as u16 }) {
                self.seats[at].board = Has::Remains;
            }
        }
    }
}

fn refuse(connection: &Connection, reason: AttachRefusal) {
    // Who has hung up needs no answer.
    let _ = connection.send(&Message::Refused { reason }, None);
}

/// Give a rank what it needs, in the order in which it expects it.
fn hand_over(
    connection: &Connection,
    seat: &BarMemory,
    redo: &Region,
    slots: Message,
    arena_len_bytes: u64,
) -> Result<()> {
    connection.send(&Message::Function, Some(seat.file()))?;
    for queue in 0..2 {
        // The board looks by itself, so nobody listens.
        connection.send(&Message::Bell { queue }, Some(Bell::create()?.as_fd()))?;
    }
    connection.send(&slots, Some(redo.read_only_file()?.as_fd()))?;
    let arena = Message::Arena { offset_bytes: ARENA_OFFSET_BYTES as u64, len_bytes: arena_len_bytes };
    Ok(connection.send(&arena, Some(seat.file()))?)
}
