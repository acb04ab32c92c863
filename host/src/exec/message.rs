//! Point to point: messages from one rank to another, beside the schedules of the same mesh.
//!
//! Semantics:
//! - the n-th message from a to b meets the n-th receive at b from a, whatever other ranks and schedules do; tag and
//!   length must be those of the receive, or both ends get [`ExecError::Message`];
//! - a send is through when the kernel has its last byte, which may need the receiver's help: two ranks that send each
//!   other large messages do so in one [`transfer`], or post them;
//! - what is posted ([`Mesh::post`]) goes on whenever this rank is in any call on the mesh, a schedule too, and is
//!   done when it can be taken ([`Mesh::take`]);
//! - an error ends the mesh for all its ranks, like a schedule's.

use super::announce::Patience;
use super::error::{Call, ExecError};
use super::frame::HelloKind;
use super::lane::{Lane, Post, Slot};
use super::link::State;
use super::memory::Memory;
use super::mesh::Mesh;
use super::polls::{Polling, Polls};
use super::run::{Failure, Interrupt, Run};
use crate::schedule::{Layout, Schedule, Step};
use rustix::event::PollFlags;
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::TcpStream;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::{OpDesc, Path};

/// A message that a call waits for.
#[derive(Debug)]
pub enum Message<'a> {
    /// These bytes go to a peer.
    Send {
        /// The receiver.
        peer: Rank,
        /// What both ends must say alike.
        tag: u32,
        /// The payload.
        bytes: &'a [u8],
    },
    /// As many bytes come from a peer.
    Receive {
        /// The sender.
        peer: Rank,
        /// What both ends must say alike.
        tag: u32,
        /// Where the payload goes.
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

    /// Lend the message for a shorter time.
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

    /// Return where a payload lands: nowhere for a send.
    pub(super) const fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Send { .. } => &mut [],
            Self::Receive { bytes, .. } => bytes,
        }
    }
}

/// Which way a posted message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// To the peer.
    Send,
    /// From the peer.
    Receive,
}

/// Memory that a posted message owns until it is through.
pub trait MessageBuffer: std::marker::Send {
    /// Return the payload.
    fn bytes(&self) -> &[u8];
    /// Return where the payload goes, as long as [`Self::bytes`].
    fn bytes_mut(&mut self) -> &mut [u8];
    /// Give the buffer back as what it was.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl MessageBuffer for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// A posted message's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// All messages of a mesh.
pub(super) struct Messages {
    /// To each rank.
    pub(super) out: Vec<Lane>,
    /// From each rank.
    pub(super) from: Vec<Lane>,
    next: u64,
    /// Those not through.
    open: usize,
    /// Those through, until they are taken.
    done: BTreeMap<Ticket, Box<dyn MessageBuffer>>,
    /// Those not through that nobody will take.
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
        let lanes = || (0..ranks).map(|_| Lane::default()).collect();
        let (done, abandoned) = (BTreeMap::new(), BTreeSet::new());
        Self { out: lanes(), from: lanes(), next: 0, open: 0, done, abandoned }
    }

    pub(super) const fn is_idle(&self) -> bool {
        self.open == 0
    }

    /// Return whether a receive waits for a lane that `peer` has not opened.
    pub(super) fn awaits_lane(&self, peer: Rank) -> bool {
        let lane = &self.from[peer.0 as usize];
        !lane.posts.is_empty() && !matches!(lane.link.state, State::Ready(_))
    }

    /// Return how many posted messages own memory, and how many bytes of it.
    fn owned(&self) -> (usize, usize) {
        let posts = self.out.iter().chain(&self.from).flat_map(|lane| &lane.posts);
        let open = posts.filter_map(|post| match &post.slot {
            Slot::Owned(buffer) => Some(buffer),
            Slot::Lent(_) => None,
        });
        open.chain(self.done.values()).fold((0, 0), |(count, len), buffer| (count + 1, len + buffer.bytes().len()))
    }

    /// Return a peer with a message that is not through.
    pub(super) fn awaited(&self) -> Option<Rank> {
        let is_open = |lanes: &[Lane]| lanes.iter().position(|lane| !lane.posts.is_empty());
        is_open(&self.from).or_else(|| is_open(&self.out)).map(|peer| Rank(peer as u32))
    }

    /// Return what to wait for: the connections of open messages.
    pub(super) fn interests(&self) -> impl Iterator<Item = (Rank, Direction, &TcpStream, PollFlags)> {
        let both = [(Direction::Send, &self.out), (Direction::Receive, &self.from)];
        both.into_iter().flat_map(|(direction, lanes)| {
            lanes.iter().enumerate().filter(|(_, lane)| !lane.posts.is_empty()).filter_map(move |(peer, lane)| {
                let interest = match (&lane.link.state, direction) {
                    (State::Connecting(_), _) | (State::Ready(_), Direction::Send) => PollFlags::OUT,
                    _ => PollFlags::IN,
                };
                lane.link.stream().map(|stream| (Rank(peer as u32), direction, stream, interest))
            })
        })
    }

    fn push(&mut self, peer: Rank, direction: Direction, tag: u32, slot: Slot) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        self.open += 1;
        let lanes = if direction == Direction::Send { &mut self.out } else { &mut self.from };
        lanes[peer.0 as usize].posts.push_back(Post::new(ticket, tag, slot));
        ticket
    }
}

impl Mesh {
    /// Post a message: it goes on during any later call on the mesh, in the order of posting for each peer and
    /// direction. [`wait`] waits for it, [`poll`] looks after it, [`Self::take`] gives the buffer back.
    ///
    /// # Errors
    /// [`ExecError::Invalid`] if the peer is this rank, or none, or if [`POSTS_MAX`] messages are open; the mesh's own
    /// error if it has ended.
    pub fn post(
        &mut self,
        peer: Rank,
        direction: Direction,
        tag: u32,
        buffer: Box<dyn MessageBuffer>,
    ) -> Result<Ticket, ExecError> {
        self.check_message(peer)?;
        Ok(self.messages.push(peer, direction, tag, Slot::Owned(buffer)))
    }

    /// Give back the buffer of a posted message that is through; `None` while it is not, and after it was taken.
    pub fn take(&mut self, ticket: Ticket) -> Option<Box<dyn MessageBuffer>> {
        self.messages.done.remove(&ticket)
    }

    /// Drop the buffer of a posted message: now if it is through, else as soon as it is. The message itself goes on, as
    /// the other end waits for it.
    pub fn abandon(&mut self, ticket: Ticket) {
        if self.messages.done.remove(&ticket).is_none() {
            self.messages.abandoned.insert(ticket);
        }
    }

    /// Return how many posted messages own memory, and how many bytes of it.
    pub fn owned_by_messages(&self) -> (usize, usize) {
        self.messages.owned()
    }

    /// Return whether as many messages are open as there may be.
    fn is_full(&self) -> bool {
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
            return invalid(format!("{POSTS_MAX} messages are not through yet; wait for some before posting more"));
        }
        Ok(())
    }
}

/// Send and receive: returns when all `messages` are through, in whatever order that happens.
///
/// # Errors
/// [`ExecError::Invalid`] if a peer is this rank, or none: nothing has been sent. Any other error is the mesh's end;
/// what is to be received is then unspecified.
pub fn transfer(
    mesh: &mut Mesh,
    messages: &mut [Message<'_>],
    deadline: Instant,
    interrupt: &mut dyn Interrupt,
) -> Result<(), ExecError> {
    for message in messages.iter() {
        mesh.check_message(message.address().0)?;
    }
    let first = Ticket(mesh.messages.next);
    for (index, message) in messages.iter().enumerate() {
        let (peer, tag, direction) = message.address();
        mesh.messages.push(peer, direction, tag, Slot::Lent(index));
    }
    // Messages that are posted earlier may stay open.
    let is_open = |lane: &Lane| lane.posts.iter().any(|post| post.ticket >= first);
    let is_done = |mesh: &Mesh| !mesh.messages.out.iter().chain(&mesh.messages.from).any(is_open);
    let lent = messages.iter_mut().map(Message::reborrow).collect();
    converse(mesh, lent, Some(deadline), interrupt, &is_done)
}

/// Wait for a posted message and give its buffer back.
///
/// # Errors
/// [`ExecError::Invalid`] if there is no such message, or it was taken; else as [`transfer`].
pub fn wait(
    mesh: &mut Mesh,
    ticket: Ticket,
    deadline: Instant,
    interrupt: &mut dyn Interrupt,
) -> Result<Box<dyn MessageBuffer>, ExecError> {
    let is_open = |lane: &Lane| lane.posts.iter().any(|post| post.ticket == ticket);
    let is_done = |mesh: &Mesh| !mesh.messages.out.iter().chain(&mesh.messages.from).any(is_open);
    if !is_done(mesh) {
        converse(mesh, Vec::new(), Some(deadline), interrupt, &is_done)?;
    }
    let unknown = || ExecError::Invalid { what: format!("{ticket:?} is no message of this mesh, or was taken") };
    mesh.take(ticket).ok_or_else(unknown)
}

/// Move posted messages on as far as they go without waiting.
///
/// # Errors
/// As [`transfer`].
pub fn poll(mesh: &mut Mesh, interrupt: &mut dyn Interrupt) -> Result<(), ExecError> {
    converse(mesh, Vec::new(), None, interrupt, &|mesh| mesh.messages.is_idle())
}

/// Wait until there is room for another message; false if there is none by the deadline, which changes nothing.
///
/// # Errors
/// As [`transfer`], but for the deadline.
pub fn make_room(mesh: &mut Mesh, deadline: Instant, interrupt: &mut dyn Interrupt) -> Result<bool, ExecError> {
    let has_room = |mesh: &Mesh| !mesh.is_full();
    while !has_room(mesh) {
        let now = Instant::now();
        if now >= deadline {
            return Ok(false);
        }
        // Not by the mesh's own deadline, which ends it.
        poll(mesh, interrupt)?;
        if !has_room(mesh) {
            std::thread::park_timeout(ROOM_POLL_INTERVAL.min(deadline - now));
        }
    }
    Ok(true)
}

/// Move messages on until `is_done`; without a deadline, as far as they go.
fn converse<'a>(
    mesh: &'a mut Mesh,
    lent: Vec<Message<'a>>,
    deadline: Option<Instant>,
    interrupt: &'a mut dyn Interrupt,
    is_done: &dyn Fn(&Mesh) -> bool,
) -> Result<(), ExecError> {
    if let Some(error) = &mesh.poisoned {
        return Err(error.clone());
    }
    let schedule = Schedule::moving(mesh.place, Layout::default());
    let call = Call::new(mesh.rank(), 0, 0, &OpDesc::barrier(), Path::Dissemination);
    let mut run = Run {
        mesh,
        schedule: &schedule,
        memory: Memory::none(),
        call,
        deadline: deadline.unwrap_or_else(|| Instant::now() + A_LOOK),
        interrupt,
        index: 0,
        step: Step::default(),
        patience: Patience::default(),
        lent,
        is_between: true,
    };
    let Err(failure) = run.converse(deadline.is_some(), is_done) else { return Ok(()) };
    run.abort(&failure);
    let (Failure::Found(error) | Failure::Told(error)) = failure;
    run.mesh.poisoned = Some(error.clone());
    Err(error)
}

impl Run<'_> {
    fn converse(&mut self, waits: bool, is_done: &dyn Fn(&Mesh) -> bool) -> Result<(), Failure> {
        let mut polls = Polls::default();
        loop {
            let moved = self.drive_messages()?;
            if is_done(self.mesh) {
                return Ok(());
            }
            match polls.after(moved) {
                _ if !waits => {
                    self.watch(false)?;
                    if !self.drive_messages()? {
                        return Ok(());
                    }
                }
                Polling::Not => {}
                Polling::Yield => std::thread::yield_now(),
                Polling::Look => self.watch(false)?,
                Polling::Block => self.watch(true)?,
            }
        }
    }

    /// Dial where there is something to send, and move what can be moved; return whether any byte was.
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
            // Who has sent the whole message has opened the lane, and heard that it was accepted.
            let is_gone = matches!(self.mesh.links[index].state, State::Ended);
            if is_gone && self.mesh.messages.awaits_lane(peer) {
                return Err(ExecError::RankLost { rank: peer }.into());
            }
        }
        let own = self.mesh.rank();
        let Messages { out, from, open, done, abandoned, .. } = &mut self.mesh.messages;
        let mut through = |post: Post| {
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
                moved |= from.receive(peer, own, &mut self.lent, &mut through)?;
            }
            if !out.posts.is_empty()
                && let Some(payload_bytes) = out.send(peer, &self.lent, &mut through)?
            {
                self.mesh.sent_bytes += payload_bytes as u64;
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Take a lane's connection further that is not ready yet.
    pub(super) fn open_lane(&mut self, peer: Rank) -> Result<(), Failure> {
        let hello = self.mesh.hello(HelloKind::Lane, peer);
        let link = &mut self.mesh.messages.out[peer.0 as usize].link;
        Ok(super::mesh::advance(link, &hello)?)
    }
}

/// The most messages of a mesh that are not through.
pub const POSTS_MAX: usize = 4096;
/// How often a call that waits for room looks whether there is some.
const ROOM_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// More than a look at the sockets takes; nothing waits for it.
const A_LOOK: Duration = Duration::from_secs(60);
