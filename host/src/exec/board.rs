//! Boards of the ranks of one machine: short collectives in which each rank posts once a step for all others
//! ([`sumac_hal::shm::Board`]).
//!
//! Where all ranks are on one machine, rank 0 creates a board and hands it to the others over their Unix sockets
//! ([`super::sharing`]). A rank that has it says so in its frames. An operation in which every rank hears of every
//! other settles it for all alike: if all frames of one said so, the operations after it use the board.
//!
//! Where operations have parts inside servers ([`ServerStep`]), the first rank of each server, its leader, creates
//! another board, of that server's ranks. Parts in which all of them hear of each other settle it as above. Others go
//! by the leader: it counts who has the board where it receives from all, and says in its next broadcast whether all
//! have it.
//!
//! On the board, a rank posts what a step of the schedule sends, once for all, and reads what it receives. The
//! operation is checked as in frames: a post that belongs to another one is a mismatch, and its description says to
//! which. In a rooted operation not every rank reads every other's post, so two ranks that call broadcasts from
//! different roots do not hear of each other. A post therefore stands for all calls so far: its tag is a hash of them,
//! round by round, and the next one that is read tells. Everything else stays with the connections: announcements,
//! aborts, the end of a rank, and the doorbells of those that sleep.
//!
//! Invariants:
//! - All ranks of a board use it for the same operations: what decides is their calls, and frames that all of them have
//!   received.
//! - Each of these operations is one round of the board for each step with messages, and has as many at all ranks, for
//!   those that post nothing too ([`is_for_board`]).
//! - All ranks of a board are connected in shared memory with each other, which wakes those that sleep.

mod state;

use super::auth::{Purpose, shared_key, shared_name};
use super::error::{Call, ExecError};
use super::frame::{FrameKind, HEADER_BYTES, Header};
use super::link::State;
use super::mesh::Mesh;
use super::run::{Failure, HasPeer, Run, open};
use crate::schedule::server_step::ServerStep;
use crate::schedule::{Place, Recv, Region, Send, Span};
use state::BoardState;
pub(super) use state::{BoardScope, Boards, Posted};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::Duration;
use sumac_hal::ids::{ChildIndex, GroupId, Rank};
use sumac_hal::op::{Collective, OpDesc, Path};
use sumac_hal::shm::{Board, Connection, Message, SocketError};

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
    /// Return whether short operations use the board of all ranks.
    pub const fn uses_board(&self) -> bool {
        self.boards.all.is_agreed
    }

    /// Return whether short parts of operations inside servers use the board of this rank's server.
    pub const fn uses_server_board(&self) -> bool {
        self.boards.server.is_agreed
    }

    /// Take the board of these ranks that the first of them has handed over.
    pub(super) fn take_board(&mut self, ranks: Range<u32>, board: Board) {
        let state = if ranks == self.boards.all.ranks { &mut self.boards.all } else { &mut self.boards.server };
        if state.is_of(ranks) {
            state.board.get_or_insert(board);
        }
    }

    /// Return the headers of what other ranks have posted in the rounds that come next here.
    pub(super) fn posted_calls(&self) -> impl Iterator<Item = Header> {
        self.boards.all.headers(self.rank()).chain(self.boards.server.headers(self.rank()))
    }

    /// Create a board and hand it to its other ranks, as the first of them; once.
    fn create_board(&mut self, scope: BoardScope) {
        let own = self.rank();
        let state = self.boards.get_mut(scope);
        if own.0 != state.ranks.start || std::mem::replace(&mut state.is_tried, true) {
            return;
        }
        let ranks = state.ranks.clone();
        match self.try_create_board(ranks) {
            Ok(board) => self.boards.get_mut(scope).board = Some(board),
            Err(why) => crate::log::info!(%why, ?scope, "no board for short collectives of this machine's ranks"),
        }
    }

    fn try_create_board(&self, ranks: Range<u32>) -> Result<Board, String> {
        let (own, members) = (self.rank(), ranks.end - ranks.start);
        let board = Board::create(members).map_err(|error| error.to_string())?;
        for peer in ranks.skip(1).map(Rank) {
            let hand_over = || -> Result<(), SocketError> {
                let name = shared_name(&self.secret, peer, self.addresses[peer.0 as usize]);
                let connection = Connection::open(&name, HAND_OVER_LIMIT)?;
                let key = shared_key(&self.secret, Purpose::Board, own, peer);
                let child = ChildIndex(Purpose::Board.to_wire());
                connection.send(&Message::Attach { group: GroupId(own.0), child, key }, None)?;
                connection.send(&Message::Memory { handle: members.into() }, Some(board.file()))
            };
            hand_over().map_err(|error| format!("{peer}: {error}"))?;
        }
        Ok(board)
    }

    /// Let the frames of the operation say whether this rank has the board.
    fn say_board(&mut self, has_board: bool) {
        self.links.iter_mut().for_each(|link| link.tx.has_board = has_board);
    }

    /// Return whether all connections to the other ones of these ranks are in shared memory, in both directions.
    fn is_all_shared(&self, ranks: Range<u32>) -> bool {
        let mut others = ranks.filter(|rank| *rank != self.rank().0).map(|rank| &self.links[rank as usize]);
        others.all(|link| link.tx.is_shared && link.rx.is_shared)
    }
}

/// Open the board of so many ranks that `first` has handed to the rank at this place. Returns its ranks, too.
pub(super) fn open_board((memory, members): (OwnedFd, u64), first: Rank, place: Place) -> Option<(Range<u32>, Board)> {
    let members = u32::try_from(members).ok().filter(|members| (2..=Board::MEMBERS_MAX).contains(members))?;
    let end = first.0.checked_add(members).filter(|end| *end <= place.ranks())?;
    let own = place.rank().0.checked_sub(first.0).filter(|own| *own < members)?;
    Some((first.0..end, Board::open(memory, members, own).ok()?))
}

/// Return whether an operation by an algorithm runs on the board of a machine's ranks, so many.
///
/// Its schedule has one step with messages, or every rank sends and receives one message in each of its steps, that of
/// the same step at the other end.
pub(crate) fn is_for_board(desc: &OpDesc, path: Path, ranks: u32) -> bool {
    let posted_bytes = match path {
        Path::OneShot => desc.element_bytes(),
        _ if is_in_lockstep(desc.collective, path, ranks) => desc.partial_bytes().max(desc.element_bytes()),
        _ => return false,
    };
    let is_short = desc.count.saturating_mul(posted_bytes as u64) <= Board::CAPACITY_BYTES as u64;
    is_short && (2..=Board::MEMBERS_MAX).contains(&ranks)
}

/// Return whether in each step of an algorithm every rank exchanges one message: ranks that fold into others first, as
/// they do where there is no power of two of them, take other steps than these.
const fn is_in_lockstep(collective: Collective, path: Path, ranks: u32) -> bool {
    matches!(collective, Collective::AllReduce)
        && match path {
            Path::Ring => true,
            Path::HalvingDoubling | Path::RecursiveDoubling => ranks.is_power_of_two(),
            _ => false,
        }
}

/// Return whether in an operation on the connections every rank receives a frame of every other.
const fn is_from_all(collective: Collective, path: Path) -> bool {
    matches!(path, Path::OneShot)
        && matches!(collective, Collective::AllReduce | Collective::AllGather | Collective::Barrier)
}

impl Run<'_> {
    /// Decide what the operation does with the board.
    pub(super) fn begin_on_board(&mut self) -> Result<(), ExecError> {
        if self.attempted.is_some() {
            self.board_use = BoardUse::Runs;
            return Ok(());
        }
        self.board_use = BoardUse::None;
        let step = self.schedule.server_step();
        if let Some(step) = step {
            let leader = step.leader_of(self.mesh.rank()).0;
            // A server that is not whole has no such steps.
            let ranks = leader..leader.saturating_add(step.each).min(self.mesh.place.ranks());
            if !self.mesh.boards.server.is_of(ranks) {
                self.mesh.say_board(false);
                return Ok(());
            }
        }
        let (scope, path) = step.map_or((BoardScope::All, self.call.path), |_| (BoardScope::Server, Path::OneShot));
        self.scope = scope;
        let state = self.mesh.boards.get_mut(scope);
        if state.is_agreed {
            if is_for_board(&self.call.desc(), path, state.len()) {
                self.board_use = BoardUse::Runs;
                state.history.push(&self.call, self.call.op_index);
            }
            return Ok(());
        }
        let (ranks, is_complete) = (state.ranks.clone(), state.is_complete);
        let settles = step.is_some() || is_from_all(self.call.collective, self.call.path);
        if !settles || self.mesh.sharing.is_err() || state.len() > Board::MEMBERS_MAX {
            return Ok(());
        }
        if step.is_some() {
            self.connect_server(ranks.clone())?;
        }
        let mesh = &mut *self.mesh;
        let is_all_shared = mesh.is_all_shared(ranks);
        if is_all_shared {
            mesh.create_board(scope);
        }
        let has_board = is_all_shared && mesh.boards.get(scope).board.is_some();
        let is_broadcast = step.is_some_and(|step| step.collective == Collective::Broadcast);
        let says_yes = has_board && (is_complete || !is_broadcast);
        mesh.say_board(says_yes);
        if has_board {
            self.board_use = BoardUse::Agreeing { yes: 0 };
        }
        Ok(())
    }

    /// Connect with the other ranks of the server, and switch to shared memory where that is due: steps from and to the
    /// leader send nothing between the others.
    fn connect_server(&mut self, ranks: Range<u32>) -> Result<(), ExecError> {
        let above = self.mesh.rank().0 + 1;
        (above..ranks.end).try_for_each(|peer| self.dial_idle(Rank(peer)))?;
        for link in &mut self.mesh.links[ranks.start as usize..ranks.end as usize] {
            if matches!(link.state, State::Ready(_)) {
                // Whoever needs a connection finds that it has ended.
                let _ = link.flush_bare();
            }
        }
        Ok(())
    }

    /// Return what the operation is among the ranks of its board.
    fn collective_on_board(&self) -> Collective {
        self.schedule.server_step().map_or(self.call.collective, |step| step.collective)
    }

    /// Return where in each post the elements for this rank begin, in elements.
    fn start_in_post(&self) -> usize {
        match self.schedule.server_step() {
            Some(ServerStep { collective: Collective::ReduceScatter, each }) => {
                Span::of_block(self.call.count as usize, each, self.call.rank.0 % each).start
            }
            Some(_) => 0,
            None => start_in_post(&self.call.desc(), self.mesh.place),
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
        let BoardUse::Agreeing { yes } = self.board_use else { return };
        let step = self.schedule.server_step();
        let state = self.mesh.boards.get_mut(self.scope);
        let (is_leader, all_have) = (self.call.rank.0 == state.ranks.start, yes == state.len() - 1);
        match step.map(|step| step.collective) {
            Some(Collective::Reduce) => state.is_complete = is_leader && all_have,
            Some(Collective::Broadcast) => state.is_agreed = if is_leader { state.is_complete } else { yes == 1 },
            _ => state.is_agreed = all_have,
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
            self.mesh.finish_round(self.scope, self.step.recvs.len());
        } else if posted {
            self.mesh.ring_all(self.scope);
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
        let bytes = self.memory.outgoing(region_to_post(self.collective_on_board(), &self.step.sends));
        let header = post_header(self.call, self.number, bytes.len());
        let posted = self.mesh.post_for_all(self.scope, &header, bytes);
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
        let mut room = std::mem::take(&mut self.mesh.later_step);
        for index in 0..self.index {
            self.schedule.read(index, &mut room);
            let lens = room.sends.iter().map(|send| self.memory.outgoing(send.from).len() as u64);
            self.mesh.sent_bytes += lens.sum::<u64>();
        }
        self.mesh.later_step = room;
    }

    /// Read what the sender of a transfer has posted, if it has; returns whether it has.
    fn read_post(&mut self, slot: usize) -> Result<bool, Failure> {
        let recv = self.step.recvs[slot];
        match self.mesh.boards.get(self.scope).posted(recv.peer) {
            Posted::Nothing => return Ok(false),
            Posted::Same => {}
            Posted::Other => return Err(self.other_post(recv.peer).into()),
        }
        let start = self.start_in_post() * self.memory.bytes_each(recv.sent_from);
        self.mesh.read_post(self.scope, &recv, start, &mut self.memory);
        self.mesh.recvs[slot].done = true;
        Ok(true)
    }

    /// Return the error for a post of other calls: names the first that differs, while both ranks know it.
    fn other_post(&self, peer: Rank) -> ExecError {
        let state = self.mesh.boards.get(self.scope);
        let BoardState { board: Some(board), history, .. } = state else {
            return ExecError::protocol(peer, "a post without a board");
        };
        for before in (0..Board::ROUNDS_AHEAD).rev() {
            let posted = board.description_of(state.member(peer), before);
            let Some((ours, theirs)) = history.recent(before).zip(posted) else {
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

    /// Count the round of a step that begins after the operation's first one.
    pub(super) fn begin_later_round(&mut self) {
        if self.board_use == BoardUse::Runs && self.step.step().has_messages() && self.index < self.schedule.len() {
            self.mesh.boards.get_mut(self.scope).push(&self.call, self.call.op_index);
        }
    }

    /// Return whether a rank has posted in the current step: it may already be in a later operation, or have left.
    pub(super) fn has_posted(&self, peer: Rank) -> bool {
        self.has_posted_ahead(peer, 0)
    }

    /// Return whether a rank has posted in the step with messages that is so many after the one whose round is not
    /// over.
    pub(super) fn has_posted_ahead(&self, peer: Rank, steps: u64) -> bool {
        self.board_use == BoardUse::Runs && self.mesh.boards.get(self.scope).has_posted(peer, steps)
    }

    /// Return whether something can be posted or read.
    pub(super) fn is_board_due(&mut self) -> bool {
        if self.board_use != BoardUse::Runs {
            return false;
        }
        let is_readable = open(&self.step.recvs, &self.mesh.recvs).any(|recv| self.has_posted(recv.peer));
        let sends = open(&self.step.sends, &self.mesh.sends).next().is_some();
        is_readable || sends && self.mesh.boards.get_mut(self.scope).board.as_mut().is_some_and(Board::can_post)
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

/// How long the kernel may take for handing the board to a rank; none of its calls waits for that rank.
const HAND_OVER_LIMIT: Duration = Duration::from_millis(100);
