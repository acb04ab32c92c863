//! The board of the ranks of one machine: short collectives in one step, where each rank posts once for all others
//! ([`sumac_hal::shm::Board`]).
//!
//! Where all ranks are on one machine, rank 0 creates a board and hands it to the others over their Unix sockets
//! ([`super::sharing`]). A rank that has it says so in its frames. An operation in which every rank hears of every
//! other settles it for all alike: if all frames of one said so, the operations after it use the board.
//!
//! On the board, a rank posts what the schedule's only step sends, once for all, and reads what it receives. The
//! operation is checked as in frames: a post that belongs to another one is a mismatch, and its description says to
//! which. In a rooted operation not every rank reads every other's post, so two ranks that call broadcasts from
//! different roots do not hear of each other. A post therefore stands for all calls so far: its tag is a hash of them,
//! and the next one that is read tells. Everything else stays with the connections: announcements, aborts, the end of
//! a rank, and the doorbells of those that sleep.
//!
//! Invariants:
//! - All ranks use the board for the same operations: what decides is their calls, and frames that all have received.
//! - Each of these operations is one round of the board, for ranks that post nothing too.

use super::auth::{Purpose, shared_key, shared_name};
use super::error::{Call, ExecError};
use super::frame::{FrameKind, HEADER_BYTES, Header};
use super::link::State;
use super::mesh::Mesh;
use super::run::{Failure, HasPeer, Run, open};
use crate::schedule::{Place, Recv, Region, Send, Span};
use std::time::Duration;
use sumac_hal::ids::{ChildIndex, GroupId, Rank};
use sumac_hal::op::{Collective, OpDesc, Path};
use sumac_hal::shm::{Board, Connection, Message, SocketError};

/// What a mesh knows of its board.
#[derive(Debug, Default)]
pub(super) struct BoardState {
    /// The board, once rank 0 has handed it over.
    pub(super) board: Option<Board>,
    /// Rank 0 has tried to create it.
    is_tried: bool,
    /// All ranks have it, and know that.
    is_agreed: bool,
    /// This rank's calls on the board.
    history: History,
}

/// The calls of a rank on the board.
#[derive(Debug, Default)]
struct History {
    /// A hash of all of them: FNV-1a, word by word.
    hash: u64,
    /// How many there were.
    rounds: u64,
    /// The last ones, each at its round modulo their number.
    recent: [Option<Call>; Board::ROUNDS_AHEAD as usize],
}

impl History {
    fn push(&mut self, call: &Call, op_index: u64) {
        self.hash = (self.hash ^ u64::from(call.signature) ^ op_index << 32).wrapping_mul(FNV_PRIME);
        self.recent[(self.rounds % Board::ROUNDS_AHEAD) as usize] = Some(Call { op_index, ..*call });
        self.rounds += 1;
    }

    /// Return the call so many before the last one.
    fn recent(&self, before: u64) -> Option<Call> {
        let index = self.rounds.checked_sub(before + 1)?;
        self.recent[(index % Board::ROUNDS_AHEAD) as usize]
    }
}

/// What an operation does with the board.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum BoardUse {
    /// It runs over the connections.
    #[default]
    None,
    /// The same, and its frames settle whether later ones use the board: so many that said yes have been received.
    Agreeing { yes: u32 },
    /// It runs on the board.
    Runs,
}

impl BoardState {
    /// Return the board, and the tag of all of this rank's calls so far.
    pub(super) fn with_tag(&mut self) -> Option<(&mut Board, u64)> {
        Some((self.board.as_mut()?, self.history.hash))
    }

    /// Count a call of this index: what is posted and read from here on is of it.
    #[inline]
    pub(super) fn push(&mut self, call: &Call, op_index: u64) {
        self.history.push(call, op_index);
    }
}

impl Mesh {
    /// Return whether short operations use the board.
    pub const fn uses_board(&self) -> bool {
        self.board.is_agreed
    }

    /// Take the board that rank 0 has handed over.
    pub(super) fn take_board(&mut self, board: Board) {
        self.board.board.get_or_insert(board);
    }

    /// Return the headers of what other ranks have posted in the round that comes next here.
    pub(super) fn posted_calls(&self) -> impl Iterator<Item = Header> {
        let board = self.board.board.as_ref().filter(|_| self.board.is_agreed);
        let others = (0..self.place.ranks()).map(Rank).filter(|peer| *peer != self.rank());
        board.into_iter().flat_map(move |board| {
            let posts = others.clone().filter_map(|peer| Some((peer, board.description_of(peer.0, 0)?)));
            posts.filter_map(|(peer, description)| Header::parse(peer, &description).ok())
        })
    }

    /// Create the board and hand it to all others, as rank 0; once.
    fn create_board(&mut self) {
        if self.rank() != Rank(0) || std::mem::replace(&mut self.board.is_tried, true) {
            return;
        }
        match self.try_create_board() {
            Ok(board) => self.board.board = Some(board),
            Err(why) => crate::log::info!(%why, "no board for short collectives of this machine's ranks"),
        }
    }

    fn try_create_board(&self) -> Result<Board, String> {
        let board = Board::create(self.place.ranks()).map_err(|error| error.to_string())?;
        for peer in (1..self.place.ranks()).map(Rank) {
            let hand_over = || -> Result<(), SocketError> {
                let name = shared_name(&self.secret, peer, self.addresses[peer.0 as usize]);
                let connection = Connection::open(&name, HAND_OVER_LIMIT)?;
                let key = shared_key(&self.secret, Purpose::Board, Rank(0), peer);
                let child = ChildIndex(Purpose::Board.to_wire());
                connection.send(&Message::Attach { group: GroupId(0), child, key }, None)?;
                connection.send(&Message::Memory { handle: 0 }, Some(board.file()))
            };
            hand_over().map_err(|error| format!("{peer}: {error}"))?;
        }
        Ok(board)
    }

    /// Return whether all connections are in shared memory, in both directions.
    fn is_all_shared(&self) -> bool {
        let others = || self.links.iter().enumerate().filter(|(index, _)| *index != self.rank().0 as usize);
        others().all(|(_, link)| link.tx.is_shared && link.rx.is_shared)
    }
}

/// Return whether an operation by an algorithm runs on the board of a machine's ranks, so many: its schedule has one
/// step.
pub(crate) fn is_for_board(desc: &OpDesc, path: Path, ranks: u32) -> bool {
    let len_bytes = desc.count.saturating_mul(desc.element_bytes() as u64);
    let is_short = len_bytes <= Board::CAPACITY_BYTES as u64;
    path == Path::OneShot && is_short && (2..=Board::MEMBERS_MAX).contains(&ranks)
}

/// Return whether in an operation on the connections every rank receives a frame of every other.
const fn is_from_all(collective: Collective, path: Path) -> bool {
    matches!(path, Path::OneShot)
        && matches!(collective, Collective::AllReduce | Collective::AllGather | Collective::Barrier)
}

impl Run<'_> {
    /// Decide what the operation does with the board.
    pub(super) fn begin_on_board(&mut self) {
        let mesh = &mut *self.mesh;
        if self.attempted.is_some() {
            self.board_use = BoardUse::Runs;
            return;
        }
        self.board_use = BoardUse::None;
        if mesh.board.is_agreed {
            if is_for_board(&self.call.desc(), self.call.path, mesh.place.ranks()) {
                self.board_use = BoardUse::Runs;
                mesh.board.history.push(&self.call, self.call.op_index);
            }
            return;
        }
        if !is_from_all(self.call.collective, self.call.path)
            || mesh.sharing.is_err()
            || mesh.place.ranks() > Board::MEMBERS_MAX
        {
            return;
        }
        let is_all_shared = mesh.is_all_shared();
        if is_all_shared {
            mesh.create_board();
        }
        let has_board = is_all_shared && mesh.board.board.is_some();
        mesh.links.iter_mut().for_each(|link| link.tx.has_board = has_board);
        if has_board {
            self.board_use = BoardUse::Agreeing { yes: 0 };
        }
    }

    /// Count a transfer whose sender has the board.
    pub(super) const fn note_board(&mut self, header: &Header) {
        if let BoardUse::Agreeing { yes } = &mut self.board_use
            && header.has_board
        {
            *yes += 1;
        }
    }

    /// Note that the operation is complete.
    pub(super) fn end_on_board(&mut self) {
        if let BoardUse::Agreeing { yes } = self.board_use {
            self.mesh.board.is_agreed = yes == self.mesh.place.ranks() - 1;
        }
    }

    /// Post what the step sends, and read what others have posted; returns whether anything was done.
    pub(super) fn move_on_board(&mut self) -> Result<bool, Failure> {
        let posted = self.post();
        let mut moved = posted;
        for slot in 0..self.step.recvs.len() {
            moved |= !self.mesh.recvs[slot].done && self.read_post(slot)?;
        }
        if !moved {
            self.check_ended()?;
        }
        let is_over = self.step.step().has_messages() && self.is_step_done();
        if is_over {
            self.mesh.finish_round(self.step.recvs.len());
        } else if posted {
            self.mesh.ring_all();
        }
        Ok(moved)
    }

    /// Fail if a rank that the step needs was gone before: its connection, which an earlier operation has found closed,
    /// tells nothing again. Whatever it posted was on the board by then.
    fn check_ended(&self) -> Result<(), ExecError> {
        let has_ended = |peer: &Rank| matches!(self.mesh.links[peer.0 as usize].state, State::Ended);
        let senders = open(&self.step.recvs, &self.mesh.recvs).map(Recv::peer);
        let mut ended = senders.chain(open(&self.step.sends, &self.mesh.sends).map(Send::peer)).filter(has_ended);
        ended.next().map_or(Ok(()), |rank| Err(ExecError::RankLost { rank }))
    }

    fn post(&mut self) -> bool {
        if open(&self.step.sends, &self.mesh.sends).next().is_none() {
            return false;
        }
        let bytes = self.memory.outgoing(region_to_post(self.call.collective, &self.step.sends));
        let posted = self.mesh.post_for_all(&post_header(self.call, self.number, bytes.len()), bytes);
        if posted {
            self.note_posted();
        }
        posted
    }

    /// Note that what the step sends is posted.
    fn note_posted(&mut self) {
        let lens = self.step.sends.iter().map(|send| self.memory.outgoing(send.from).len() as u64);
        self.mesh.sent_bytes += lens.sum::<u64>();
        self.mesh.sends.iter_mut().for_each(|progress| progress.done = true);
    }

    /// Go on where an attempt has left the operation, if one has begun it.
    pub(super) fn continue_attempt(&mut self) {
        if self.attempted == Some(true) {
            self.note_posted();
        }
    }

    /// Read what the sender of a transfer has posted, if it has; returns whether it has.
    fn read_post(&mut self, slot: usize) -> Result<bool, Failure> {
        let recv = self.step.recvs[slot];
        let Some((board, own_tag)) = self.mesh.board.with_tag() else { return Ok(false) };
        match board.tag_of(recv.peer.0) {
            None => return Ok(false),
            Some(tag) if tag == own_tag => {}
            Some(_) => return Err(self.other_post(recv.peer).into()),
        }
        let start = start_in_post(&self.call.desc(), self.mesh.place) * self.memory.bytes_each(recv.sent_from);
        self.mesh.read_post(&recv, start, &mut self.memory);
        self.mesh.recvs[slot].done = true;
        Ok(true)
    }

    /// Return the error for a post of other calls: names the first that differs, while both ranks know it.
    fn other_post(&self, peer: Rank) -> ExecError {
        let BoardState { board: Some(board), history, .. } = &self.mesh.board else {
            return ExecError::protocol(peer, "a post without a board");
        };
        for before in (0..Board::ROUNDS_AHEAD).rev() {
            let Some((ours, theirs)) = history.recent(before).zip(board.description_of(peer.0, before)) else {
                continue;
            };
            match Header::parse(peer, &theirs) {
                Ok(theirs) if is_same(&ours, &theirs.call) => {}
                Ok(theirs) => return ExecError::mismatch(ours, theirs.call),
                Err(error) => return error,
            }
        }
        let what = format!("calls that differ from this rank's more than {} operations ago", Board::ROUNDS_AHEAD);
        ExecError::protocol(peer, what)
    }

    /// Return whether a rank has posted in this operation: it may already be in a later one, or have left.
    pub(super) fn has_posted(&self, peer: Rank) -> bool {
        self.board_use == BoardUse::Runs
            && self.mesh.board.board.as_ref().is_some_and(|board| board.tag_of(peer.0).is_some())
    }

    /// Return whether something can be posted or read.
    pub(super) fn is_board_due(&mut self) -> bool {
        if self.board_use != BoardUse::Runs {
            return false;
        }
        let is_readable = open(&self.step.recvs, &self.mesh.recvs).any(|recv| self.has_posted(recv.peer));
        let sends = open(&self.step.sends, &self.mesh.sends).next().is_some();
        is_readable || sends && self.mesh.board.board.as_mut().is_some_and(|board| board.can_post())
    }
}

/// Return the header of what a call posts.
pub(super) fn post_header(call: Call, number: u32, len_bytes: usize) -> [u8; HEADER_BYTES] {
    Header { len_bytes, number, ..Header::bare(FrameKind::Data, call, 0) }.emit()
}

/// Return what a step posts: the same to all or, in a reduce-scatter, all blocks to the end of the last one. It sends
/// something.
pub(super) fn region_to_post(collective: Collective, sends: &[Send]) -> Region {
    let from = sends[0].from;
    if collective != Collective::ReduceScatter {
        return from;
    }
    let end = sends.iter().map(|send| send.from.span.end()).max().unwrap_or(0);
    from.buffer.at(Span::first(end))
}

/// Return where in each post the elements for the rank at this place begin, in elements.
pub(super) fn start_in_post(desc: &OpDesc, place: Place) -> usize {
    match desc.collective {
        Collective::ReduceScatter => Span::of_block(desc.count as usize, place.ranks(), place.rank().0).start,
        _ => 0,
    }
}

const fn is_same(ours: &Call, theirs: &Call) -> bool {
    ours.op_index == theirs.op_index && ours.signature == theirs.signature
}

/// Of FNV-1a for 64 bits (Fowler, Noll and Vo, "The FNV non-cryptographic hash algorithm", IETF draft).
const FNV_PRIME: u64 = 0x100_0000_01b3;

/// How long the kernel may take for handing the board to a rank; none of its calls waits for that rank.
const HAND_OVER_LIMIT: Duration = Duration::from_millis(100);
