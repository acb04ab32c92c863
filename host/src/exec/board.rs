//! The board of the ranks of one machine: short collectives in one step, where each rank posts once for all others
//! ([`sumac_hal::shm::Board`]).
//!
//! Where all ranks are on one machine, rank 0 creates a board and hands it to the others over their Unix sockets
//! ([`super::sharing`]). A rank that has it says so in its frames. An operation in which every rank hears of every
//! other settles it for all alike: if all frames of one said so, the operations after it use the board.
//!
//! On the board, a rank posts what the schedule's only step sends, once for all, and reads what it receives. The
//! operation is checked as in frames: a post that belongs to another one is a mismatch, and its description says to
//! which. Everything else stays with the connections: announcements, aborts, the end of a rank, and the doorbells of
//! those that sleep.
//!
//! Invariants:
//! - All ranks use the board for the same operations: what decides is their calls, and frames that all have received.
//! - Each of these operations is one round of the board, in which every rank reads every other's post.

use super::auth::{Purpose, shared_key, shared_name};
use super::error::{Call, ExecError};
use super::frame::{FrameKind, HEADER_BYTES, Header};
use super::mesh::Mesh;
use super::run::{Failure, Run, open};
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

impl Mesh {
    /// Return whether short operations use the board.
    pub const fn uses_board(&self) -> bool {
        self.board.is_agreed
    }

    /// Take the board that rank 0 has handed over.
    pub(super) fn take_board(&mut self, board: Board) {
        self.board.board.get_or_insert(board);
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

/// Return whether an operation by an algorithm runs on the board of a machine's ranks, so many.
pub(crate) fn is_for_board(desc: &OpDesc, path: Path, ranks: u32) -> bool {
    let len_bytes = desc.count.saturating_mul(desc.element_bytes() as u64);
    let is_short = len_bytes <= Board::CAPACITY_BYTES as u64;
    is_from_all(desc.collective, path) && is_short && (2..=Board::MEMBERS_MAX).contains(&ranks)
}

/// Return whether every rank sends the same to all, and hears of every other: a call that differs is always noticed.
/// The roots of two different broadcasts would read nothing of each other.
const fn is_from_all(collective: Collective, path: Path) -> bool {
    matches!(path, Path::OneShot)
        && matches!(collective, Collective::AllReduce | Collective::AllGather | Collective::Barrier)
}

/// What a rank posts with: its operation, so that another one is noticed.
const fn tag_of(call: &Call) -> u64 {
    call.signature as u64 | call.op_index << 32
}

impl Run<'_> {
    /// Decide what the operation does with the board.
    pub(super) fn begin_on_board(&mut self) {
        let mesh = &mut *self.mesh;
        self.board_use = BoardUse::None;
        if mesh.board.is_agreed {
            if is_for_board(&self.call.desc(), self.call.path, mesh.place.ranks()) {
                self.board_use = BoardUse::Runs;
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
        let is_over = !(self.step.sends.is_empty() && self.step.recvs.is_empty()) && self.is_step_done();
        if is_over {
            let all_posted = self.step.recvs.len() as u32 == self.mesh.place.ranks() - 1;
            self.mesh.board.board.iter_mut().for_each(|board| board.finish_round(all_posted));
        }
        if posted || is_over {
            self.mesh.shared_ends().for_each(|shared| shared.ring());
        }
        Ok(moved)
    }

    fn post(&mut self) -> bool {
        let Some(send) = open(self.step.sends, &self.mesh.sends).next() else { return false };
        let bytes = self.memory.outgoing(send.from);
        let Some(board) = &mut self.mesh.board.board else { return false };
        let header = Header { len_bytes: bytes.len(), ..Header::bare(FrameKind::Data, self.call, 0) };
        if !board.post(tag_of(&self.call), &header.emit(), bytes) {
            return false;
        }
        self.mesh.sent_bytes += (bytes.len() * self.step.sends.len()) as u64;
        self.mesh.sends.iter_mut().for_each(|progress| progress.done = true);
        true
    }

    /// Read what the sender of a transfer has posted, if it has; returns whether it has.
    fn read_post(&mut self, slot: usize) -> Result<bool, Failure> {
        let recv = self.step.recvs[slot];
        let Some(board) = &self.mesh.board.board else { return Ok(false) };
        match board.tag_of(recv.peer.0) {
            None => return Ok(false),
            Some(tag) if tag == tag_of(&self.call) => {}
            Some(_) => return Err(self.other_post(recv.peer, &board.description_of(recv.peer.0)).into()),
        }
        let len_bytes = self.memory.len_bytes(&recv);
        if let Some(place) = self.memory.direct(&recv) {
            board.read(recv.peer.0, place);
        } else {
            let bytes = &mut self.mesh.scratch[..len_bytes];
            board.read(recv.peer.0, bytes);
            self.memory.land(recv.sent_from, &recv.landing, 0, bytes, &mut self.mesh.spare);
        }
        self.mesh.recvs[slot].done = true;
        Ok(true)
    }

    /// Return the error for a post of another operation.
    fn other_post(&self, peer: Rank, description: &[u8; HEADER_BYTES]) -> ExecError {
        match Header::parse(peer, description) {
            Ok(theirs) => ExecError::mismatch(self.call, theirs.call),
            Err(error) => error,
        }
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
        let is_readable = open(self.step.recvs, &self.mesh.recvs).any(|recv| self.has_posted(recv.peer));
        let sends = open(self.step.sends, &self.mesh.sends).next().is_some();
        is_readable || sends && self.mesh.board.board.as_mut().is_some_and(|board| board.can_post())
    }
}

/// How long the kernel may take for handing the board to a rank; none of its calls waits for that rank.
const HAND_OVER_LIMIT: Duration = Duration::from_millis(100);
