//! Point-to-point messages between two ranks, beside the schedules of the same mesh.
//!
//! Semantics:
//! - The n-th message from a to b matches the n-th receive at b from a, independently of other ranks and schedules. Tag
//!   and length must match the receive, or both ends get [`ExecError::Message`].
//! - A receive from any rank ([`Mesh::post_receive_any`]) takes the next message of whichever rank's comes first with
//!   its tag, unless an earlier receive takes that message. It then counts as a receive from that rank.
//! - A send is complete when the kernel has its last byte, or, in shared memory, the receiver has copied a long one.
//!   That may require the receiver's help: two ranks that send each other large messages do so in one [`Transfer`], or
//!   post them.
//! - Posted messages ([`Mesh::post`]) progress during any call of this rank on the mesh, schedules included, and are
//!   complete when [`take_complete`] returns them.
//! - An error ends the mesh for all its ranks, as for schedules.

mod buffer;
mod posts;
mod transfer;

use super::auth::Purpose;
use super::error::{Call, ExecError};
use super::link::State;
use super::memory::Memory;
use super::mesh::Mesh;
use super::p2p::{PostedMessage, Slot};
use super::poll_backoff::PollBackoff;
use super::run::{Failure, Interrupt, Run, Status};
use crate::schedule::{Layout, Schedule};
pub use buffer::{MessageBuffer, PostError};
pub(super) use posts::Messages;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::{OpDesc, Path};
pub use transfer::Transfer;

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
    /// Return the peer, the tag and the direction.
    pub const fn address(&self) -> (Rank, u32, Direction) {
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

    /// Post a receive from any other rank, as [`Mesh::post`] does.
    ///
    /// # Errors
    /// As for [`Mesh::post`]; [`ExecError::Invalid`] if there is no other rank.
    pub fn post_receive_any(&mut self, tag: u32, buffer: Box<dyn MessageBuffer>) -> Result<Ticket, PostError> {
        // Any other rank will do for the check.
        let other = Rank(u32::from(self.rank() == Rank(0)));
        if let Err(error) = self.check_message(other) {
            return Err(PostError { error, buffer });
        }
        let ticket = self.messages.next_ticket();
        self.messages.from_any.push_back(PostedMessage::new(ticket, tag, Slot::Owned(buffer)));
        Ok(ticket)
    }

    /// Return the peer and the buffer of a complete message; `None` while it is incomplete, and after it was taken.
    pub fn take(&mut self, ticket: Ticket) -> Option<(Rank, Box<dyn MessageBuffer>)> {
        self.messages.done.remove(&ticket)
    }

    /// Return the buffer of a posted message after the mesh has ended with an error; `None` before that, and after it
    /// was taken.
    pub fn take_back(&mut self, ticket: Ticket) -> Option<Box<dyn MessageBuffer>> {
        self.poisoned.as_ref()?;
        self.take(ticket).map(|(_, buffer)| buffer).or_else(|| self.messages.withdraw(ticket))
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

    /// Return whether a posted message is complete, or was taken.
    pub fn is_complete(&self, ticket: Ticket) -> bool {
        !self.messages.posts().any(|post| post.ticket == ticket)
    }

    /// Return the number of incomplete messages.
    pub const fn open_messages(&self) -> usize {
        self.messages.open
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
    let is_done = |mesh: &Mesh| mesh.is_complete(ticket);
    if is_done(mesh) {
        return Ok(Status::Done);
    }
    drive_until(mesh, Vec::new(), Some(deadline), interrupt, &is_done)
}

/// Drive posted messages until fewer than `open` are incomplete.
///
/// # Errors
/// As for [`Transfer::drive`].
pub fn wait_any(
    mesh: &mut Mesh,
    open: usize,
    deadline: Instant,
    interrupt: &mut dyn Interrupt,
) -> Result<Status, ExecError> {
    drive_until(mesh, Vec::new(), Some(deadline), interrupt, &|mesh| mesh.open_messages() < open)
}

/// Return the peer and the buffer of a complete message.
///
/// # Errors
/// [`ExecError::Invalid`] if there is no such message, or it was taken.
pub fn take_complete(mesh: &mut Mesh, ticket: Ticket) -> Result<(Rank, Box<dyn MessageBuffer>), ExecError> {
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
    messages_run(mesh, &schedule, Instant::now(), Vec::new()).fail(Failure::Local(error));
}

/// Work on a mesh without a schedule.
///
/// # Errors
/// The mesh's error if it has ended, or that of the work, which ends it.
pub(super) fn without_schedule(
    mesh: &mut Mesh,
    work: impl FnOnce(&mut Run<'_>) -> Result<(), Failure>,
) -> Result<(), ExecError> {
    if let Some(error) = &mesh.poisoned {
        return Err(error.clone());
    }
    let schedule = Schedule::moving(mesh.place, Layout::default());
    let mut run = messages_run(mesh, &schedule, Instant::now() + POLL_DEADLINE, Vec::new());
    work(&mut run).map_err(|failure| run.fail(failure))
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
    run.drive_until(deadline.is_some(), is_done, interrupt).map_err(|failure| run.fail(failure))
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
        let Messages { out, from, from_any, open, done, abandoned, .. } = &mut self.mesh.messages;
        let mut complete = |peer: Rank, post: PostedMessage| {
            *open -= 1;
            if let Slot::Owned(buffer) = post.slot
                && !abandoned.remove(&post.ticket)
            {
                done.insert(post.ticket, (peer, buffer));
            }
        };
        let mut moved = false;
        for (index, (out, from)) in out.iter_mut().zip(from).enumerate() {
            let peer = Rank(index as u32);
            let mut complete = |post| complete(peer, post);
            if !from.posts.is_empty() || !from_any.is_empty() {
                moved |= from.receive((peer, own), from_any, &mut self.borrowed, &mut complete)?;
            }
            if !out.posts.is_empty()
                && let Some(payload_bytes) = out.send(peer, &self.borrowed, &mut complete)?
            {
                self.mesh.sent_bytes += payload_bytes as u64;
                moved = true;
            }
        }
        if !moved && self.mesh.messages.awaits_nobody(own, &self.mesh.links) {
            return Err(ExecError::RankLost { rank: Rank(u32::from(own == Rank(0))) }.into());
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
