//! The posted messages of a mesh.

use super::{Direction, MessageBuffer, Ticket};
use crate::exec::link::{Link, State};
use crate::exec::p2p::{P2pChannel, PostedMessage, Slot};
use rustix::event::PollFlags;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::net::TcpStream;
use sumac_hal::ids::Rank;

/// All messages of a mesh.
pub(in crate::exec) struct Messages {
    /// To each rank.
    pub(in crate::exec) out: Vec<P2pChannel>,
    /// From each rank.
    pub(in crate::exec) from: Vec<P2pChannel>,
    /// Receives from any rank that no message has come for.
    pub(super) from_any: VecDeque<PostedMessage>,
    pub(super) next: u64,
    /// Number of incomplete messages.
    pub(super) open: usize,
    /// Complete messages with their peers, until they are taken.
    pub(super) done: BTreeMap<Ticket, (Rank, Box<dyn MessageBuffer>)>,
    /// Incomplete messages that nobody will take.
    pub(super) abandoned: BTreeSet<Ticket>,
}

impl fmt::Debug for Messages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let done: Vec<_> = self.done.keys().collect();
        f.debug_struct("Messages").field("open", &self.open).field("done", &done).finish_non_exhaustive()
    }
}

impl Messages {
    pub(in crate::exec) fn new(ranks: usize) -> Self {
        let channels = || (0..ranks).map(|_| P2pChannel::default()).collect();
        let (done, abandoned) = (BTreeMap::new(), BTreeSet::new());
        let from_any = VecDeque::new();
        Self { out: channels(), from: channels(), from_any, next: 0, open: 0, done, abandoned }
    }

    pub(in crate::exec) const fn is_idle(&self) -> bool {
        self.open == 0
    }

    /// Return whether a receive waits for a channel that `peer` has not opened.
    pub(in crate::exec) fn awaits_channel(&self, peer: Rank) -> bool {
        let channel = &self.from[peer.0 as usize];
        !channel.posts.is_empty() && !matches!(channel.link.state, State::Ready(_))
    }

    /// Return whether a receive waits for any rank, and none of the others can send any more. What they sent before has
    /// been received as far as possible.
    pub(super) fn awaits_nobody(&self, own: Rank, links: &[Link]) -> bool {
        let has_ended = |index: usize| matches!(links[index].state, State::Ended);
        let is_closed = |index: usize| match self.from[index].link.state {
            State::Ended => true,
            // The rest of what was sent may still come, but not past a message that no receive takes.
            State::Ready(_) => has_ended(index) && self.from[index].holds_message(),
            _ => has_ended(index),
        };
        !self.from_any.is_empty() && (0..links.len()).all(|index| index == own.0 as usize || is_closed(index))
    }

    /// Return the incomplete messages.
    pub(super) fn posts(&self) -> impl Iterator<Item = &PostedMessage> {
        self.out.iter().chain(&self.from).flat_map(|channel| &channel.posts).chain(&self.from_any)
    }

    /// Return the number of posted messages that own memory, and its length in bytes.
    pub(super) fn owned(&self) -> (usize, usize) {
        let open = self.posts().filter_map(|post| match &post.slot {
            Slot::Owned(buffer) => Some(buffer),
            Slot::Borrowed(_) => None,
        });
        open.chain(self.done.values().map(|(_, buffer)| buffer))
            .fold((0, 0), |(count, len), buffer| (count + 1, len + buffer.bytes().len()))
    }

    /// Return a peer with an incomplete message, or one that could send to a receive from any rank.
    pub(in crate::exec) fn awaited(&self, own: Rank) -> Option<Rank> {
        let is_open = |channels: &[P2pChannel]| channels.iter().position(|channel| !channel.posts.is_empty());
        let can_send = |(index, channel): (usize, &P2pChannel)| {
            index != own.0 as usize && !matches!(channel.link.state, State::Ended)
        };
        let any = || if self.from_any.is_empty() { None } else { self.from.iter().enumerate().position(can_send) };
        is_open(&self.from).or_else(|| is_open(&self.out)).or_else(any).map(|peer| Rank(peer as u32))
    }

    /// Return the poll interests of open messages.
    pub(in crate::exec) fn interests(&self) -> impl Iterator<Item = (Rank, Direction, &TcpStream, PollFlags)> {
        let both = [(Direction::Send, &self.out), (Direction::Receive, &self.from)];
        both.into_iter().flat_map(move |(direction, channels)| {
            let from_any = direction == Direction::Receive && !self.from_any.is_empty();
            channels.iter().enumerate().filter_map(move |(peer, channel)| {
                let (stream, interest) = channel.interest(direction, from_any)?;
                Some((Rank(peer as u32), direction, stream, interest))
            })
        })
    }

    /// Remove an incomplete message that owns its memory. The stream may be in the middle of it.
    pub(super) fn withdraw(&mut self, ticket: Ticket) -> Option<Box<dyn MessageBuffer>> {
        let channels = self.out.iter_mut().chain(&mut self.from).map(|channel| &mut channel.posts);
        for posts in channels.chain([&mut self.from_any]) {
            let is_it = |post: &PostedMessage| post.ticket == ticket && matches!(post.slot, Slot::Owned(_));
            let found = posts.iter().position(is_it);
            if let Some(post) = found.and_then(|index| posts.remove(index)) {
                self.open -= 1;
                return match post.slot {
                    Slot::Owned(buffer) => Some(buffer),
                    Slot::Borrowed(_) => None,
                };
            }
        }
        None
    }

    /// Return whether something can go on in shared memory.
    pub(in crate::exec) fn is_due(&mut self) -> bool {
        let from_any = !self.from_any.is_empty();
        self.out.iter_mut().any(|channel| channel.is_due(false))
            || self.from.iter_mut().any(|channel| channel.is_due(from_any))
    }

    pub(super) fn push(&mut self, peer: Rank, direction: Direction, tag: u32, slot: Slot) -> Ticket {
        let ticket = self.next_ticket();
        let channels = if direction == Direction::Send { &mut self.out } else { &mut self.from };
        channels[peer.0 as usize].posts.push_back(PostedMessage::new(ticket, tag, slot));
        ticket
    }

    pub(super) const fn next_ticket(&mut self) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        self.open += 1;
        ticket
    }
}
