//! Point-to-point messages between two ranks, beside the schedules of the same mesh.
//!
//! Semantics:
//! - The n-th message from a to b matches the n-th receive at b from a, independently of other ranks and schedules. Tag
//!   and length must match the receive, or both ends get [`ExecError::Message`].
//! - A send is complete when the kernel has its last byte, or, in shared memory, the receiver has copied a long one.
//!   That may require the receiver's help: two ranks that send each other large messages do so in one [`Transfer`], or
//!   post them.
//! - Posted messages ([`Mesh::post`]) progress during any call of this rank on the mesh, schedules included, and are
//!   complete when [`take_complete`] returns them.
//! - An error ends the mesh for all its ranks, as for schedules.

mod buffer;

use super::auth::Purpose;
use super::error::{Call, ExecError};
use super::link::State;
use super::memory::Memory;
use super::mesh::Mesh;
use super::p2p::{P2pChannel, PostedMessage, Slot};
use super::poll_backoff::PollBackoff;
use super::run::{Failure, Interrupt, Run, Status};
use crate::schedule::{Layout, Schedule};
pub use buffer::{MessageBuffer, PostError};
use rustix::event::PollFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::TcpStream;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::{OpDesc, Path};

/// A message that a call waits for.
#[derive(Debug)]
pub enum Message<'a> {
    /// Send these bytes to a peer.
    Send {
        /// The receiver.
        peer: Rank,
        /// The tag, equal at both ends.
        tag: u32,
        /// The payload.
        bytes: &'a [u8],
    },
    /// Receive exactly this many bytes from a peer.
    Receive {
        /// The sender.
        peer: Rank,
        /// The tag, equal at both ends.
        tag: u32,
        /// Destination of the payload.
        bytes: &'a mut [u8],
    },
}

impl Message<'_> {
    const fn address(&self) -> (Rank, u32, Direction) {
        match *self {
            Self::Send { peer, tag, .. } => (peer, tag, Direction::Send),
            Self::Receive { peer, tag, .. } => (peer, tag, Direction::Receive),
        }
    }

    /// Reborrow the message for a shorter time.
    const fn reborrow(&mut self) -> Message<'_> {
        match self {
            Self::Send { peer, tag, bytes } => Message::Send { peer: *peer, tag: *tag, bytes },
            Self::Receive { peer, tag, bytes } => Message::Receive { peer: *peer, tag: *tag, bytes },
        }
    }

    pub(super) const fn bytes(&self) -> &[u8] {
        match self {
            Self::Send { bytes, .. } => bytes,
            Self::Receive { bytes, .. } => bytes,
        }
    }

    /// Return the destination of a payload; empty for a send.
    pub(super) const fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Send { .. } => &mut [],
            Self::Receive { bytes, .. } => bytes,
        }
    }
}

/// Direction of a posted message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// To the peer.
    Send,
    /// From the peer.
    Receive,
}

/// Identifies a posted message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// All messages of a mesh.
pub(super) struct Messages {
    /// To each rank.
    pub(super) out: Vec<P2pChannel>,
    /// From each rank.
    pub(super) from: Vec<P2pChannel>,
    next: u64,
    /// Number of incomplete messages.
    open: usize,
    /// Complete messages, until they are taken.
    done: BTreeMap<Ticket, Box<dyn MessageBuffer>>,
    /// Incomplete messages that nobody will take.
    abandoned: BTreeSet<Ticket>,
}

impl fmt::Debug for Messages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let done: Vec<_> = self.done.keys().collect();
        f.debug_struct("Messages").field("open", &self.open).field("done", &done).finish_non_exhaustive()
    }
}

impl Messages {
    pub(super) fn new(ranks: usize) -> Self {
        let channels = || (0..ranks).map(|_| P2pChannel::default()).collect();
        let (done, abandoned) = (BTreeMap::new(), BTreeSet::new());
        Self { out: channels(), from: channels(), next: 0, open: 0, done, abandoned }
    }

    pub(super) const fn is_idle(&self) -> bool {
        self.open == 0
    }

    /// Return whether a receive waits for a channel that `peer` has not opened.
    pub(super) fn awaits_channel(&self, peer: Rank) -> bool {
        let channel = &self.from[peer.0 as usize];
        !channel.posts.is_empty() && !matches!(channel.link.state, State::Ready(_))
    }

    /// Return the number of posted messages that own memory, and its length in bytes.
    fn owned(&self) -> (usize, usize) {
        let posts = self.out.iter().chain(&self.from).flat_map(|channel| &channel.posts);
        let open = posts.filter_map(|post| match &post.slot {
            Slot::Owned(buffer) => Some(buffer),
            Slot::Borrowed(_) => None,
        });
        open.chain(self.done.values()).fold((0, 0), |(count, len), buffer| (count + 1, len + buffer.bytes().len()))
    }

    /// Return a peer with an incomplete message.
    pub(super) fn awaited(&self) -> Option<Rank> {
        let is_open = |channels: &[P2pChannel]| channels.iter().position(|channel| !channel.posts.is_empty());
        is_open(&self.from).or_else(|| is_open(&self.out)).map(|peer| Rank(peer as u32))
    }

    /// Return the poll interests of open messages.
    pub(super) fn interests(&self) -> impl Iterator<Item = (Rank, Direction, &TcpStream, PollFlags)> {
        let both = [(Direction::Send, &self.out), (Direction::Receive, &self.from)];
        both.into_iter().flat_map(|(direction, channels)| {
            channels.iter().enumerate().filter_map(move |(peer, channel)| {
                let (stream, interest) = channel.interest(direction)?;
                Some((Rank(peer as u32), direction, stream, interest))
            })
        })
    }

    /// Remove an incomplete message that owns its memory. The stream may be in the middle of it.
    fn withdraw(&mut self, ticket: Ticket) -> Option<Box<dyn MessageBuffer>> {
        for channel in self.out.iter_mut().chain(&mut self.from) {
            let is_it = |post: &PostedMessage| post.ticket == ticket && matches!(post.slot, Slot::Owned(_));
            let found = channel.posts.iter().position(is_it);
            if let Some(post) = found.and_then(|index| channel.posts.remove(index)) {
                self.open -= 1;
                return match post.slot {
                    Slot::Owned(buffer) => Some(buffer),
                    Slot::Borrowed(_) => None,
                };
            }
        }
        None
    }

    fn push(&mut self, peer: Rank, direction: Direction, tag: u32, slot: Slot) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        self.open += 1;
        let channels = if direction == Direction::Send { &mut self.out } else { &mut self.from };
        channels[peer.0 as usize].posts.push_back(PostedMessage::new(ticket, tag, slot));
        ticket
    }
}

impl Mesh {
    /// Post a message. It progresses during any later call on the mesh, in posting order for each peer and direction.
    /// [`wait`] waits for it, [`poll`] drives it, [`take_complete`] returns the buffer.
    ///
    /// # Errors
    /// [`ExecError::Invalid`] if the peer is this rank or out of range, or if [`POSTS_MAX`] messages are open; the
    /// mesh's own error if it has ended; each with `buffer`.
    pub fn post(
        &mut self,
        peer: Rank,
        direction: Direction,
        tag: u32,
        buffer: Box<dyn MessageBuffer>,
    ) -> Result<Ticket, PostError> {
        match self.check_message(peer) {
            Ok(()) => Ok(self.messages.push(peer, direction, tag, Slot::Owned(buffer))),
            Err(error) => Err(PostError { error, buffer }),
        }
    }

    /// Return the buffer of a complete message; `None` while it is incomplete, and after it was taken.
    pub fn take(&mut self, ticket: Ticket) -> Option<Box<dyn MessageBuffer>> {
        self.messages.done.remove(&ticket)
    }

    /// Return the buffer of a posted message after the mesh has ended with an error; `None` before that, and after it
    /// was taken.
    pub fn take_back(&mut self, ticket: Ticket) -> Option<Box<dyn MessageBuffer>> {
        self.poisoned.as_ref()?;
        self.take(ticket).or_else(|| self.messages.withdraw(ticket))
    }

    /// Drop the buffer of a posted message as soon as it is complete. The message itself is still transferred, as the
    /// peer waits for it.
    pub fn abandon(&mut self, ticket: Ticket) {
        if self.messages.done.remove(&ticket).is_none() {
            self.messages.abandoned.insert(ticket);
        }
    }

    /// Return the number of posted messages that own memory, and its length in bytes.
    pub fn owned_by_messages(&self) -> (usize, usize) {
        self.messages.owned()
    }

    /// Return whether the limit of open messages is reached ([`make_room`]).
    pub fn is_full(&self) -> bool {
        self.messages.open >= POSTS_MAX
    }

    fn check_message(&self, peer: Rank) -> Result<(), ExecError> {
        let invalid = |what| Err(ExecError::Invalid { what });
        if let Some(error) = &self.poisoned {
            return Err(error.clone());
        }
        if peer == self.rank() || peer.0 >= self.place.ranks() {
            return invalid(format!("a message between {} and {peer} of {} ranks", self.rank(), self.place.ranks()));
        }
        if self.is_full() {
            return invalid(format!("{POSTS_MAX} messages are incomplete; wait for some before posting more"));
        }
        Ok(())
    }
}

/// Messages between the caller's buffers, from [`Transfer::new`] until all are complete.
#[derive(Debug)]
pub struct Transfer<'a, 'm> {
    mesh: &'a mut Mesh,
    messages: &'a mut [Message<'m>],
    first: Ticket,
    deadline: Instant,
}

impl<'a, 'm> Transfer<'a, 'm> {
    /// Post `messages`, to be complete by `deadline`, in any order.
    ///
    /// # Errors
    /// [`ExecError::Invalid`] if a peer is this rank or out of range: nothing has been sent. The mesh's own error if it
    /// has ended.
    pub fn new(mesh: &'a mut Mesh, messages: &'a mut [Message<'m>], deadline: Instant) -> Result<Self, ExecError> {
        for message in messages.iter() {
            mesh.check_message(message.address().0)?;
        }
        let first = Ticket(mesh.messages.next);
        for (index, message) in messages.iter().enumerate() {
            let (peer, tag, direction) = message.address();
            mesh.messages.push(peer, direction, tag, Slot::Borrowed(index));
        }
        Ok(Self { mesh, messages, first, deadline })
    }

    /// Drive the messages until all are complete, or they are paused.
    ///
    /// # Errors
    /// An error ends the mesh; the contents of receive buffers are then unspecified.
    pub fn drive(&mut self, interrupt: &mut dyn Interrupt) -> Result<Status, ExecError> {
        let first = self.first;
        // Messages posted earlier may stay open.
        let is_open = |channel: &P2pChannel| channel.posts.iter().any(|post| post.ticket >= first);
        let is_done = |mesh: &Mesh| !mesh.messages.out.iter().chain(&mesh.messages.from).any(is_open);
        let borrowed = self.messages.iter_mut().map(Message::reborrow).collect();
        drive_until(self.mesh, borrowed, Some(self.deadline), interrupt, &is_done)
    }

    /// End the messages of the mesh on all ranks, and the mesh, with an error of the caller's.
    pub fn cancel(&mut self, error: ExecError) {
        cancel(self.mesh, error);
    }
}

/// Drive a posted message until it is complete; [`take_complete`] returns its buffer.
///
/// # Errors
/// As for [`Transfer::drive`].
pub fn wait(
    mesh: &mut Mesh,
    ticket: Ticket,
    deadline: Instant,
    interrupt: &mut dyn Interrupt,
) -> Result<Status, ExecError> {
    let is_open = |channel: &P2pChannel| channel.posts.iter().any(|post| post.ticket == ticket);
    let is_done = |mesh: &Mesh| !mesh.messages.out.iter().chain(&mesh.messages.from).any(is_open);
    if is_done(mesh) {
        return Ok(Status::Done);
    }
    drive_until(mesh, Vec::new(), Some(deadline), interrupt, &is_done)
}

/// Return the buffer of a complete message.
///
/// # Errors
/// [`ExecError::Invalid`] if there is no such message, or it was taken.
pub fn take_complete(mesh: &mut Mesh, ticket: Ticket) -> Result<Box<dyn MessageBuffer>, ExecError> {
    let unknown =
        || ExecError::Invalid { what: format!("{ticket:?} is not a message of this mesh, or was already taken") };
    mesh.take(ticket).ok_or_else(unknown)
}

/// Drive posted messages as far as possible without waiting.
///
/// # Errors
/// As for [`Transfer::drive`].
pub fn poll(mesh: &mut Mesh, interrupt: &mut dyn Interrupt) -> Result<Status, ExecError> {
    drive_until(mesh, Vec::new(), None, interrupt, &|mesh| mesh.messages.is_idle())
}

/// Wait until there is room for another message, at most until `deadline`, which has no other effect.
///
/// # Errors
/// As for [`Transfer::drive`], except for the deadline.
pub fn make_room(mesh: &mut Mesh, deadline: Instant, interrupt: &mut dyn Interrupt) -> Result<Status, ExecError> {
    while mesh.is_full() {
        let now = Instant::now();
        if now >= deadline {
            break;
        }
        // Not with the mesh's own deadline, which would end it.
        if poll(mesh, interrupt)? == Status::Paused {
            return Ok(Status::Paused);
        }
        if mesh.is_full() {
            std::thread::park_timeout(ROOM_POLL_INTERVAL.min(deadline - now));
        }
    }
    Ok(Status::Done)
}

/// End all messages of the mesh on all ranks, and the mesh, with an error of the caller's.
pub fn cancel(mesh: &mut Mesh, error: ExecError) {
    let schedule = Schedule::moving(mesh.place, Layout::default());
    messages_run(mesh, &schedule, Instant::now(), Vec::new()).fail(&Failure::Local(error));
}

/// Make a run without a schedule.
fn messages_run<'a>(
    mesh: &'a mut Mesh,
    schedule: &'a Schedule,
    deadline: Instant,
    borrowed: Vec<Message<'a>>,
) -> Run<'a> {
    let call = Call::new(mesh.rank(), 0, 0, &OpDesc::barrier(), Path::Dissemination);
    Run::new(mesh, schedule, Memory::none(), (call, deadline), borrowed, true)
}

/// Drive messages until `is_done`; without a deadline, as far as possible without waiting.
fn drive_until(
    mesh: &mut Mesh,
    borrowed: Vec<Message<'_>>,
    deadline: Option<Instant>,
    interrupt: &mut dyn Interrupt,
    is_done: &dyn Fn(&Mesh) -> bool,
) -> Result<Status, ExecError> {
    if let Some(error) = &mesh.poisoned {
        return Err(error.clone());
    }
    let schedule = Schedule::moving(mesh.place, Layout::default());
    let until = deadline.unwrap_or_else(|| Instant::now() + POLL_DEADLINE);
    let mut run = messages_run(mesh, &schedule, until, borrowed);
    run.drive_until(deadline.is_some(), is_done, interrupt).map_err(|failure| run.fail(&failure))
}

impl Run<'_> {
    fn drive_until(
        &mut self,
        waits: bool,
        is_done: &dyn Fn(&Mesh) -> bool,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Status, Failure> {
        let mut polls = PollBackoff::new(self.mesh.waiting);
        if self.mesh.is_settling() && self.poll_sockets(false, interrupt)? == Status::Paused {
            return Ok(Status::Paused);
        }
        loop {
            let moved = self.drive_messages()?;
            if is_done(self.mesh) {
                return Ok(Status::Done);
            }
            let next = polls.after(moved);
            let status = if waits {
                self.wait(next, interrupt)?
            } else {
                let status = self.poll_sockets(false, interrupt)?;
                if !self.drive_messages()? {
                    return Ok(status);
                }
                status
            };
            if status == Status::Paused {
                return Ok(status);
            }
        }
    }

    /// Dial peers with messages to send, and move what can be moved; returns whether any byte was.
    pub(super) fn drive_messages(&mut self) -> Result<bool, Failure> {
        if self.mesh.messages.is_idle() {
            return Ok(false);
        }
        let now = Instant::now();
        for index in 0..self.mesh.links.len() {
            let peer = Rank(index as u32);
            let out = &self.mesh.messages.out[index];
            let is_due = matches!(out.link.state, State::Idle) && !out.link.redial.is_pausing(now);
            if !out.posts.is_empty() && is_due {
                let dialled = self.mesh.connecting(peer)?;
                self.mesh.messages.out[index].link.dialled(dialled);
            }
            // A peer that has sent the whole message has opened the channel and seen it accepted.
            let is_closed = matches!(self.mesh.links[index].state, State::Ended);
            if is_closed && self.mesh.messages.awaits_channel(peer) {
                return Err(ExecError::RankLost { rank: peer }.into());
            }
        }
        let own = self.mesh.rank();
        let Messages { out, from, open, done, abandoned, .. } = &mut self.mesh.messages;
        let mut complete = |post: PostedMessage| {
            *open -= 1;
            if let Slot::Owned(buffer) = post.slot
                && !abandoned.remove(&post.ticket)
            {
                done.insert(post.ticket, buffer);
            }
        };
        let mut moved = false;
        for (index, (out, from)) in out.iter_mut().zip(from).enumerate() {
            let peer = Rank(index as u32);
            if !from.posts.is_empty() {
                moved |= from.receive(peer, own, &mut self.borrowed, &mut complete)?;
            }
            if !out.posts.is_empty()
                && let Some(payload_bytes) = out.send(peer, &self.borrowed, &mut complete)?
            {
                self.mesh.sent_bytes += payload_bytes as u64;
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Advance the connection of a channel that is not ready.
    pub(super) fn advance_channel(&mut self, peer: Rank) -> Result<(), Failure> {
        let own = self.mesh.rank();
        let link = &mut self.mesh.messages.out[peer.0 as usize].link;
        link.check_socket(true);
        if super::mesh::advance(link, &self.mesh.secret, Purpose::PointToPoint, (own, peer))? {
            self.mesh.offer_memory(peer, Purpose::PointToPoint);
        }
        Ok(())
    }
}

/// The maximum number of incomplete messages of a mesh.
pub const POSTS_MAX: usize = 4096;
/// Interval at which a call that waits for room checks again.
const ROOM_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Longer than polling the sockets takes; nothing waits for it.
const POLL_DEADLINE: Duration = Duration::from_secs(60);
