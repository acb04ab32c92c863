//! The broker of an emulated board: it connects ranks of this machine to memory that they share with the board
//! (`sumac_hal::mmio::admission`).
//!
//! The memory consists of files of this process, which the emulator maps as BARs of `ivshmem-plain` functions: the
//! admission queue, the redo slots, and one file per rank slot. A rank can access its own rank slot, read the redo
//! slots, and nothing else.
//!
//! Invariants:
//! - The board decides which rank may attach, because it knows the keys. The broker only forwards requests and replies.
//! - A rank slot is reused only after the board has released it and its rank has closed the connection. Until then it
//!   may hold the buffers of the rank's program, even long after the board is gone.
//! - When the board starts another incarnation or ends, all connections are closed.
//! - A connection that sends nothing does not delay others.
//! - A rank that comes while slots of ranks that have gone are being released waits for one: a job that starts when
//!   another has just ended is not refused.
//!
//! Only ranks of the broker's user and of the superuser are admitted, also if the broker runs as the superuser. The
//! reason is that the redo slots of all groups are in one file, as they are in one BAR, so any rank can read those of
//! other groups. A rank that keeps writing to its rank slot after it closed the connection corrupts the values of the
//! next rank's program, as it could with a debugger, but nothing of the board.

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
use sumac_hal::ids::{BootId, ChildIndex, GroupId};
use sumac_hal::mmio::admission::{ARENA_OFFSET_BYTES, AdmissionReply, AdmissionRequest, AttachRefusal};
use sumac_hal::mmio::{Bar, COMPLETION_WORDS, SUBMISSION_WORDS};
use sumac_hal::ring::{Consumer, Producer, SharedRing};
use sumac_hal::shm::{
    BarMemory, Bell, Connection, DeviceUsers, Listener, Message, Pages, Received, Region, SocketError, machine,
};

/// The memory of the admission queue: more than its rings need, because BARs are powers of two.
const QUEUE_LEN_BYTES: usize = 64 << 10;

/// Memory of redo slots.
const REDO_LEN_BYTES: usize = 8 << 20;

/// How often the broker polls ranks and the board.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// How long a new connection may take to send its request.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a rank waits for a slot that is being released; less than it waits for its answer.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(3);

/// The maximum number of connections that have not been admitted; beyond it, the oldest one is closed.
const PENDING_MAX: usize = 64;

/// Replies of the board handled per turn.
const REPLIES_PER_TURN: usize = 64;

/// The first device number on the bus: 0 is its bridge.
const FIRST_DEVICE: usize = 1;

/// The memory of a board and the thread that connects ranks to it. Dropping it closes all connections.
#[derive(Debug)]
pub(super) struct Broker {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// The configuration of the emulator and of the board.
#[derive(Debug)]
pub(super) struct BoardSetup {
    /// Arguments for the emulator.
    pub(super) arguments: Vec<String>,
    /// Option lines for the board.
    pub(super) options: String,
}

impl Broker {
    /// Create the memory of so many rank slots, and listen.
    pub(super) fn start(slots: u16, slot_memory_len_bytes: usize) -> Result<(Self, BoardSetup)> {
        let machine = machine().context("/proc does not identify this machine, so ranks cannot share memory")?;
        let socket = format!("sumac-board-{}", std::process::id());
        let listener = Listener::bind(&socket)?;
        let queue_memory = BarMemory::create(QUEUE_LEN_BYTES)?;
        let redo = Region::create(REDO_LEN_BYTES, Pages::Normal)?;
        let slots = (0..slots).map(|_| BarMemory::create(slot_memory_len_bytes)).collect::<Result<Vec<_>, _>>()?;
        let mut setup = BoardSetup { arguments: Vec::new(), options: String::new() };
        setup.function(queue_memory.file().as_raw_fd(), QUEUE_LEN_BYTES);
        // The board writes it; ranks get it read-only. By then the board serves, so the emulator has mapped it.
        setup.function(redo.device_file().as_raw_fd(), REDO_LEN_BYTES);
        slots.iter().for_each(|slot| setup.function(slot.file().as_raw_fd(), slot_memory_len_bytes));
        // Writing to a string cannot fail.
        let user = DeviceUsers::own().own;
        let _ = writeln!(setup.options, "machine={machine}\nsocket={socket}\nuser={user}");
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let arena_len_bytes = (slot_memory_len_bytes - ARENA_OFFSET_BYTES) as u64;
        let slots = slots.into_iter().map(RankSlot::new).collect();
        let run = move || {
            let mut queue = AdmissionQueue::new(&queue_memory, redo, slots, arena_len_bytes);
            while !stopped.load(Ordering::Acquire) {
                queue.turn(&listener);
            }
        };
        let thread = thread::Builder::new().name("broker".into()).spawn(run).context("cannot start the broker")?;
        Ok((Self { stop, thread: Some(thread) }, setup))
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

impl BoardSetup {
    /// Let the emulator map an open file of this process as the memory of the next function.
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

/// A rank slot: its memory, its rank, and its state at the board.
struct RankSlot {
    memory: BarMemory,
    rank: Rank,
    board: BoardState,
}

/// The rank of a rank slot.
enum Rank {
    Vacant,
    Connected(Connection),
    /// The broker has closed the connection; the rank may still have buffers there.
    Closing(Connection),
}

/// The state of a rank slot at the board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BoardState {
    Free,
    /// The board has been asked to attach the rank.
    Requested,
    Attached,
    /// The board knows that the rank is gone and may still be using the memory.
    Draining,
}

impl RankSlot {
    const fn new(memory: BarMemory) -> Self {
        Self { memory, rank: Rank::Vacant, board: BoardState::Free }
    }

    const fn is_free(&self) -> bool {
        matches!((&self.rank, self.board), (Rank::Vacant, BoardState::Free))
    }

    /// Whether the board alone must act before the slot is free.
    const fn is_released_soon(&self) -> bool {
        matches!((&self.rank, self.board), (Rank::Vacant, BoardState::Attached | BoardState::Draining))
    }

    /// Close the rank's connection, if there is one.
    fn hang_up(&mut self) {
        self.rank = match std::mem::replace(&mut self.rank, Rank::Vacant) {
            Rank::Connected(connection) => {
                // It fails if the rank is gone already, which the next receive detects.
                let _ = connection.shutdown_write();
                Rank::Closing(connection)
            }
            other => other,
        };
    }

    /// Check whether the rank has closed its connection or violates the protocol.
    fn watch(&mut self) {
        let (Rank::Connected(connection) | Rank::Closing(connection)) = &self.rank else { return };
        match connection.receive(Duration::ZERO) {
            Err(SocketError::Timeout(_)) => {}
            // A system error means the same: the connection is unusable.
            Err(SocketError::Closed | SocketError::System { .. }) => self.rank = Rank::Vacant,
            _ => self.hang_up(),
        }
    }
}

/// One incarnation of the board, with its rings.
struct Incarnation<'a> {
    boot_id: BootId,
    requests: Producer<SharedRing<'a, SUBMISSION_WORDS>, SUBMISSION_WORDS>,
    replies: Consumer<SharedRing<'a, COMPLETION_WORDS>, COMPLETION_WORDS>,
}

/// A connection that has not been admitted yet.
struct Pending {
    connection: Connection,
    since: Instant,
    /// The group, child and key of its request, once it has come.
    request: Option<(GroupId, ChildIndex, u64)>,
}

struct AdmissionQueue<'a> {
    memory: &'a BarMemory,
    incarnation: Option<Incarnation<'a>>,
    redo: Region,
    slots: Vec<RankSlot>,
    arena_len_bytes: u64,
    pending: VecDeque<Pending>,
}

impl<'a> AdmissionQueue<'a> {
    const fn new(memory: &'a BarMemory, redo: Region, slots: Vec<RankSlot>, arena_len_bytes: u64) -> Self {
        Self { memory, incarnation: None, redo, slots, arena_len_bytes, pending: VecDeque::new() }
    }

    fn turn(&mut self, listener: &Listener) {
        match listener.accept(POLL_INTERVAL) {
            Ok(Some(connection)) => {
                if self.pending.len() == PENDING_MAX {
                    self.pending.pop_front();
                }
                self.pending.push_back(Pending { connection, since: Instant::now(), request: None });
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept the connection of a rank");
                // If descriptors have run out, the waiting connection makes the socket readable again at once.
                thread::sleep(POLL_INTERVAL);
            }
        }
        self.follow_incarnation();
        for _ in 0..REPLIES_PER_TURN {
            let Some(reply) = self.reply() else { break };
            self.handle_reply(reply);
        }
        // Before ranks are admitted: a job may start as soon as another's ranks have closed their connections.
        self.watch_slots();
        self.admit_pending();
    }

    /// Detach all ranks if the board has started another incarnation.
    fn follow_incarnation(&mut self) {
        let probed = Bar::probe(self.memory.words()).ok();
        let now = probed.as_ref().map(|(_, identity)| identity.boot_id);
        if self.incarnation.as_ref().map(|incarnation| incarnation.boot_id) == now {
            return;
        }
        if self.incarnation.take().is_some() {
            tracing::info!("the board's incarnation has ended: closing the connections of its ranks");
            for slot in &mut self.slots {
                match std::mem::replace(&mut slot.board, BoardState::Free) {
                    // The rank has received nothing yet.
                    BoardState::Requested => slot.rank = Rank::Vacant,
                    _ => slot.hang_up(),
                }
            }
        }
        self.incarnation = probed.and_then(|(bar, identity)| {
            let queue = bar.queue(0)?;
            let (requests, replies) = (Producer::new(queue.submissions), Consumer::new(queue.completions));
            Some(Incarnation { boot_id: identity.boot_id, requests, replies })
        });
    }

    /// Send a request to the board. Returns false if it cannot be sent now.
    fn ask(&mut self, request: AdmissionRequest) -> bool {
        // A ring index of an old incarnation would corrupt the rings of the next, which may have started since the last
        // poll.
        let now = Bar::probe(self.memory.words()).ok().map(|(_, identity)| identity.boot_id);
        let incarnation = self.incarnation.as_mut().filter(|incarnation| now == Some(incarnation.boot_id));
        incarnation.is_some_and(|incarnation| incarnation.requests.push(&request.emit()) == Ok(true))
    }

    fn reply(&mut self) -> Option<AdmissionReply> {
        let words = self.incarnation.as_mut()?.replies.pop().ok()??;
        let reply = AdmissionReply::parse(&words);
        if reply.is_none() {
            tracing::warn!("malformed reply of the board");
        }
        reply
    }

    /// Read the requests of pending connections and forward them to the board.
    fn admit_pending(&mut self) {
        for mut rank in std::mem::take(&mut self.pending) {
            match rank.connection.receive(Duration::ZERO) {
                Err(SocketError::Timeout(_)) => {}
                Ok(Received { message: Message::Attach { group, child, key }, .. }) if rank.request.is_none() => {
                    (rank.request, rank.since) = (Some((group, child, key)), Instant::now());
                }
                // It has closed the connection or violates the protocol.
                _ => continue,
            }
            match rank.request {
                Some(request) => self.admit(rank, request),
                None if rank.since.elapsed() < HELLO_TIMEOUT => self.pending.push_back(rank),
                None => {}
            }
        }
    }

    /// Forward a request to the board, with a free slot; if one is about to be free, try again later.
    fn admit(&mut self, rank: Pending, (group, child, key): (GroupId, ChildIndex, u64)) {
        let free = self.slots.iter().position(RankSlot::is_free);
        let asked = free.filter(|&at| self.ask(AdmissionRequest::Attach { rank_slot: at as u16, group, child, key }));
        if let Some(at) = asked {
            let slot = &mut self.slots[at];
            (slot.rank, slot.board) = (Rank::Connected(rank.connection), BoardState::Requested);
        } else if self.slots.iter().any(RankSlot::is_released_soon) && rank.since.elapsed() < RELEASE_TIMEOUT {
            self.pending.push_back(rank);
        } else {
            let (slots, ready) = (self.slots.len(), self.incarnation.is_some());
            tracing::warn!(slots, ready, "no free rank slot; `sumac image run --ranks-max` sets their number");
            refuse(&rank.connection, AttachRefusal::NoMemory);
        }
    }

    fn handle_reply(&mut self, reply: AdmissionReply) {
        let (AdmissionReply::Attached { rank_slot: slot, .. }
        | AdmissionReply::Refused { rank_slot: slot, .. }
        | AdmissionReply::Detached { rank_slot: slot }) = reply
        else {
            return;
        };
        let Some(slot) = self.slots.get_mut(usize::from(slot)) else { return };
        match reply {
            AdmissionReply::Attached { offset_bytes, slot_len_bytes, slots, .. }
                if slot.board == BoardState::Requested =>
            {
                slot.board = BoardState::Attached;
                let Rank::Connected(connection) = &slot.rank else { return };
                let redo = Message::Redo { offset_bytes, slot_len_bytes, slots };
                if let Err(error) = send_memory(connection, &slot.memory, &self.redo, redo, self.arena_len_bytes) {
                    tracing::warn!(%error, "a rank did not accept its memory");
                    slot.hang_up();
                }
            }
            AdmissionReply::Refused { reason, .. } if slot.board == BoardState::Requested => {
                if let Rank::Connected(connection) = std::mem::replace(&mut slot.rank, Rank::Vacant) {
                    refuse(&connection, reason);
                }
                slot.board = BoardState::Free;
            }
            AdmissionReply::Detached { .. } if matches!(slot.board, BoardState::Attached | BoardState::Draining) => {
                slot.board = BoardState::Free;
                slot.hang_up();
            }
            _ => tracing::warn!(?reply, "unexpected reply of the board"),
        }
    }

    /// Detach ranks whose connection is closed. A request that cannot be sent now is retried in the next turn.
    fn watch_slots(&mut self) {
        for at in 0..self.slots.len() {
            let slot = &mut self.slots[at];
            slot.watch();
            let is_abandoned = slot.board == BoardState::Attached && !matches!(slot.rank, Rank::Connected(_));
            if is_abandoned && self.ask(AdmissionRequest::Detach { rank_slot: at as u16 }) {
                self.slots[at].board = BoardState::Draining;
            }
        }
    }
}

fn refuse(connection: &Connection, reason: AttachRefusal) {
    // A rank that has closed its connection needs no reply.
    let _ = connection.send(&Message::Refused { reason }, None);
}

/// Send a rank the files that it needs, in the order of the protocol.
fn send_memory(
    connection: &Connection,
    slot: &BarMemory,
    redo: &Region,
    slots: Message,
    arena_len_bytes: u64,
) -> Result<()> {
    connection.send(&Message::Function, Some(slot.file()))?;
    for queue in 0..2 {
        // The board polls, so nobody waits for these bells.
        connection.send(&Message::Bell { queue }, Some(Bell::create()?.as_fd()))?;
    }
    connection.send(&slots, Some(redo.read_only_file()?.as_fd()))?;
    let arena = Message::Arena { offset_bytes: ARENA_OFFSET_BYTES as u64, len_bytes: arena_len_bytes };
    Ok(connection.send(&arena, Some(slot.file()))?)
}
