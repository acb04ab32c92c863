//! What a mesh knows of its boards: that of all ranks, and that of this rank's server.

use super::super::error::Call;
use super::super::frame::Header;
use super::super::link::Link;
use crate::schedule::Place;
use std::ops::Range;
use sumac_hal::ids::Rank;
use sumac_hal::shm::Board;

/// Which ranks an operation's board is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::exec) enum BoardScope {
    /// All ranks.
    #[default]
    All,
    /// Those of this rank's server.
    Server,
}

/// The boards of a mesh.
#[derive(Debug)]
pub(in crate::exec) struct Boards {
    pub(in crate::exec) all: BoardState,
    /// Its ranks are known once an operation had a part inside servers, or its leader has handed it over.
    pub(in crate::exec) server: BoardState,
}

impl Boards {
    pub(in crate::exec) fn new(place: Place) -> Self {
        Self { all: BoardState::of(0..place.ranks()), server: BoardState::default() }
    }

    #[inline]
    pub(in crate::exec) const fn get(&self, scope: BoardScope) -> &BoardState {
        match scope {
            BoardScope::All => &self.all,
            BoardScope::Server => &self.server,
        }
    }

    #[inline]
    pub(in crate::exec) const fn get_mut(&mut self, scope: BoardScope) -> &mut BoardState {
        match scope {
            BoardScope::All => &mut self.all,
            BoardScope::Server => &mut self.server,
        }
    }
}

/// What a mesh knows of a board.
#[derive(Debug, Default)]
pub(in crate::exec) struct BoardState {
    /// Its ranks. The first one creates it.
    pub(super) ranks: Range<u32>,
    /// The board, once the first rank has handed it over.
    pub(in crate::exec) board: Option<Board>,
    /// The first rank has tried to create it.
    pub(super) is_tried: bool,
    /// The leader of a server knows that all its ranks have it, and has to tell them.
    pub(super) is_complete: bool,
    /// All ranks have it, and know that.
    pub(super) is_agreed: bool,
    /// This rank's calls on the board.
    pub(super) history: History,
}

/// The calls of a rank on the board, each once for each of its rounds.
#[derive(Debug, Default)]
pub(super) struct History {
    /// A hash of all of them: FNV-1a, word by word.
    hash: u64,
    /// How many rounds there were.
    rounds: u64,
    /// The last ones, each at its round modulo their number.
    recent: [Option<Call>; Board::ROUNDS_AHEAD as usize],
}

impl History {
    pub(super) fn push(&mut self, call: &Call, op_index: u64) {
        self.hash = (self.hash ^ u64::from(call.signature) ^ op_index << 32).wrapping_mul(FNV_PRIME);
        self.recent[(self.rounds % Board::ROUNDS_AHEAD) as usize] = Some(Call { op_index, ..*call });
        self.rounds += 1;
    }

    /// Return the call of the round so many before the last one.
    pub(super) fn recent(&self, before: u64) -> Option<Call> {
        let index = self.rounds.checked_sub(before + 1)?;
        self.recent[(index % Board::ROUNDS_AHEAD) as usize]
    }
}

/// What a rank has posted in the present round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::exec) enum Posted {
    Nothing,
    /// A post after the calls that this rank has made.
    Same,
    /// One after other calls.
    Other,
}

impl BoardState {
    fn of(ranks: Range<u32>) -> Self {
        Self { ranks, ..Self::default() }
    }

    /// Return the number of its ranks.
    pub(super) fn len(&self) -> u32 {
        self.ranks.end - self.ranks.start
    }

    /// Return whether this is the board of these ranks. From now on it is, if it had none.
    pub(super) fn is_of(&mut self, ranks: Range<u32>) -> bool {
        if self.ranks.is_empty() {
            self.ranks = ranks.clone();
        }
        self.ranks == ranks
    }

    /// Return the number of one of its ranks among them.
    #[inline]
    pub(super) fn member(&self, rank: Rank) -> u32 {
        rank.0.wrapping_sub(self.ranks.start)
    }

    /// Return whether one of its ranks has posted in the present round: after the calls that this rank has made, or
    /// after others.
    #[inline]
    pub(in crate::exec) fn posted(&self, rank: Rank) -> Posted {
        match self.board.as_ref().and_then(|board| board.tag_of(self.member(rank))) {
            None => Posted::Nothing,
            Some(tag) if tag == self.history.hash => Posted::Same,
            Some(_) => Posted::Other,
        }
    }

    /// Read what a rank has posted in the present round.
    #[inline]
    pub(in crate::exec) fn read(&self, rank: Rank, start_bytes: usize, bytes: &mut [u8]) {
        self.board.iter().for_each(|board| board.read(self.member(rank), start_bytes, bytes));
    }

    /// Return the headers of what other ranks than `own` have posted in the round that comes next here.
    pub(super) fn headers(&self, own: Rank) -> impl Iterator<Item = Header> {
        let board = self.board.as_ref().filter(|_| self.is_agreed);
        let others = self.ranks.clone().map(Rank).filter(move |peer| *peer != own);
        board.into_iter().flat_map(move |board| {
            let posts = others.clone().filter_map(|peer| Some((peer, board.description_of(self.member(peer), 0)?)));
            posts.filter_map(|(peer, description)| Header::parse(peer, &description).ok())
        })
    }

    /// Return the board, and the tag of all of this rank's calls so far.
    pub(in crate::exec) fn with_tag(&mut self) -> Option<(&mut Board, u64)> {
        Some((self.board.as_mut()?, self.history.hash))
    }

    /// End the present round, in which the posts of so many ranks were read.
    #[inline]
    pub(in crate::exec) fn finish_round(&mut self, read: usize) {
        let all_posted = read as u32 == self.len() - 1;
        self.board.iter_mut().for_each(|board| board.finish_round(all_posted));
    }

    /// Return those of the links to all ranks that lead to its ranks.
    #[inline]
    pub(in crate::exec) fn links<'l>(&self, links: &'l [Link]) -> &'l [Link] {
        &links[self.ranks.start as usize..self.ranks.end as usize]
    }

    /// Return how many rounds this rank has begun.
    #[cfg(test)]
    pub(in crate::exec) const fn rounds(&self) -> u64 {
        self.history.rounds
    }

    /// Return whether a rank has posted in the round that is so many after the present one.
    pub(in crate::exec) fn has_posted(&self, rank: Rank, rounds: u64) -> bool {
        let board = self.board.as_ref().filter(|_| self.ranks.contains(&rank.0));
        board.is_some_and(|board| board.has_posted(self.member(rank), rounds))
    }

    /// Count a round of a call of this index: what is posted and read from here on is of it.
    #[inline]
    pub(in crate::exec) fn push(&mut self, call: &Call, op_index: u64) {
        self.history.push(call, op_index);
    }
}

/// Of FNV-1a for 64 bits (Fowler, Noll and Vo, "The FNV non-cryptographic hash algorithm", IETF draft).
const FNV_PRIME: u64 = 0x100_0000_01b3;
