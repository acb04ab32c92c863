//! The single `poll` over everything that can end or advance an operation.
//!
//! It covers the listener, pending connections, every link and the caller's interrupt. It omits only a link with a
//! frame that must wait for its step: its peer is ahead, so nothing that this rank still needs follows that frame, and
//! a rank that does need the peer is notified by it directly.
//!
//! What arrives through shared memory makes no descriptor readable. A rank that is about to sleep arms the doorbells of
//! its connections, looks once more, and then polls the eventfd that its peers ring too.

use super::board::BoardUse;
use super::error::ExecError;
use super::frame::FrameKind;
use super::handshake::HandshakeOutcome;
use super::link::State;
use super::message::Direction;
use super::run::{Failure, Interrupt, Run, Status, is_next, open};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;

/// The owner of a ready descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PollTarget {
    Listener,
    /// The socket over which shared memory is handed over.
    SharedListener,
    /// An offer of shared memory, by index.
    Offer(usize),
    /// Memory that is arriving, by index.
    Arrival(usize),
    /// The eventfd that peers ring through shared memory.
    Bell,
    /// A pending connection, by index.
    Pending(usize),
    Link(Rank),
    /// A channel with an open message.
    Channel(Rank, Direction),
    /// A one-shot announcement, by index.
    Announcement(usize),
    Interrupt,
}

impl Run<'_> {
    /// Poll all sockets; if `block`, sleep until one of them, the interrupt or a timer is ready. Returns whether the
    /// interrupt pauses the operation.
    pub(super) fn poll_sockets(&mut self, block: bool, interrupt: &mut dyn Interrupt) -> Result<Status, Failure> {
        let now = Instant::now();
        if now >= self.deadline {
            let (rank, op_index, peer) = (self.call.rank, self.call.op_index, self.awaited());
            if self.messages_only {
                return Err(ExecError::MessageDeadline { rank, peer }.into());
            }
            return Err(ExecError::Deadline { op_index, rank, peer }.into());
        }
        let open = self.mesh.open_messages();
        self.drive_messages()?;
        if self.mesh.open_messages() < open && !self.messages_only && interrupt.message_completed().is_break() {
            return Ok(Status::Paused);
        }
        let wake_at = interrupt.wake_at();
        if wake_at.is_some_and(|at| at <= now) && interrupt.check()?.is_break() {
            return Ok(Status::Paused);
        }
        let until = wake_at.map_or(self.deadline, |at| at.min(self.deadline));
        let until = self.announce_timer.expires_at(now).map_or(until, |at| at.min(until));
        self.mesh.redial(now)?;
        self.expire(now)?;
        self.mesh.expire_arrivals(now);
        let until = self.mesh.wake_at(now).map_or(until, |at| at.min(until));
        let sleeps = block && self.arm_bells();
        let timeout = if sleeps { until.saturating_duration_since(now) } else { Duration::ZERO };
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        self.collect_ready(&timeout, interrupt)?;
        if block {
            self.mesh.shared_ends().for_each(|shared| shared.disarm());
        }
        self.collect_shared();
        if block
            && self.mesh.ready.is_empty()
            && self.announce_timer.expires_at(now).is_some_and(|at| at <= Instant::now())
        {
            self.announce()?;
        }
        let mut status = Status::Done;
        // From the back: a pending connection that leaves the list moves those behind it.
        while let Some(ready) = self.mesh.ready.pop() {
            match ready {
                PollTarget::Interrupt if interrupt.check()?.is_break() => status = Status::Paused,
                PollTarget::Interrupt => {}
                PollTarget::Listener => self.accept(now)?,
                PollTarget::SharedListener => self.mesh.accept_memory(now),
                PollTarget::Offer(index) => self.mesh.advance_offer(index),
                PollTarget::Arrival(index) => self.mesh.advance_arrival(index),
                PollTarget::Bell => self.mesh.clear_bell(),
                PollTarget::Pending(index) => self.process_pending(index)?,
                PollTarget::Announcement(index) => self.send_announce(index)?,
                PollTarget::Link(peer) => self.serve_link(peer)?,
                PollTarget::Channel(peer, Direction::Send) => self.advance_channel(peer)?,
                // The next round moves the bytes.
                PollTarget::Channel(peer, Direction::Receive) => {
                    self.mesh.messages.from[peer.0 as usize].link.check_socket(false);
                }
            }
        }
        Ok(status)
    }

    /// Poll, and store the ready targets in `mesh.ready`.
    fn collect_ready(&mut self, timeout: &Timespec, interrupt: &dyn Interrupt) -> Result<(), ExecError> {
        let mut fds = recycled(std::mem::take(&mut self.mesh.pollfds));
        let mut ready = std::mem::take(&mut self.mesh.ready);
        ready.clear();
        let mesh = &*self.mesh;
        let readable = PollFlags::IN;
        // Pushed first, to be served last: newly accepted peers change the indices of the others.
        if mesh.acceptor.resume_at(Instant::now()).is_none() {
            fds.push(PollFd::new(mesh.acceptor.listener(), readable));
            ready.push(PollTarget::Listener);
        }
        if let Ok(sharing) = &mesh.sharing {
            if sharing.accepts(Instant::now()) {
                fds.push(PollFd::new(&sharing.listener, readable));
                ready.push(PollTarget::SharedListener);
            }
            fds.push(PollFd::new(&sharing.bell, readable));
            ready.push(PollTarget::Bell);
            for (index, offer) in sharing.offers.iter().enumerate() {
                fds.push(PollFd::new(&offer.connection, readable));
                ready.push(PollTarget::Offer(index));
            }
            for (index, arrival) in sharing.arrivals.iter().enumerate() {
                fds.push(PollFd::new(&arrival.connection, readable));
                ready.push(PollTarget::Arrival(index));
            }
        }
        for (index, link) in mesh.links.iter().enumerate() {
            let peer = Rank(index as u32);
            let (Some(stream), interest) = (link.stream(), self.interest(peer)) else { continue };
            if !interest.is_empty() {
                fds.push(PollFd::new(stream, interest));
                ready.push(PollTarget::Link(peer));
            }
        }
        for (peer, direction, stream, interest) in mesh.messages.interests() {
            fds.push(PollFd::new(stream, interest));
            ready.push(PollTarget::Channel(peer, direction));
        }
        for (index, pending) in mesh.pending.iter().enumerate() {
            fds.push(PollFd::new(&pending.stream, readable));
            ready.push(PollTarget::Pending(index));
        }
        for (index, (_, one_shot)) in mesh.announcements.iter().enumerate() {
            fds.push(PollFd::new(one_shot, PollFlags::OUT));
            ready.push(PollTarget::Announcement(index));
        }
        for fd in [interrupt.poll_fd(), interrupt.bell()].into_iter().flatten() {
            fds.push(PollFd::from_borrowed_fd(fd, readable));
            ready.push(PollTarget::Interrupt);
        }
        let polled = poll(&mut fds, Some(timeout));
        let mut is_ready = fds.iter().map(|fd| polled.is_ok() && !fd.revents().is_empty());
        ready.retain(|_| is_ready.next().unwrap_or(false));
        self.mesh.pollfds = recycled(fds);
        self.mesh.ready = ready;
        match polled {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(ExecError::Io { rank: self.call.rank, what: format!("polling the sockets: {errno}") }),
        }
    }

    /// Arm the doorbells of all connections in shared memory. Returns false if one of them has something to do.
    fn arm_bells(&mut self) -> bool {
        self.mesh.shared_ends().for_each(|shared| shared.arm());
        let is_link_due = (0..self.mesh.links.len()).any(|index| self.is_link_due(Rank(index as u32)));
        !is_link_due && !self.mesh.messages.is_due() && !self.is_board_due()
    }

    /// Add the links whose peers have sent something through shared memory that the step does not receive.
    fn collect_shared(&mut self) {
        for index in 0..self.mesh.links.len() {
            let peer = Rank(index as u32);
            if self.is_link_readable(peer) && !self.mesh.ready.contains(&PollTarget::Link(peer)) {
                self.mesh.ready.push(PollTarget::Link(peer));
            }
        }
    }

    /// Return whether a link in shared memory has something to read or room to write that the operation needs.
    fn is_link_due(&mut self, peer: Rank) -> bool {
        let sends = open(&self.step.sends, &self.mesh.sends).any(|send| send.peer == peer);
        self.is_link_readable(peer) || sends && self.mesh.links[peer.0 as usize].is_shared_writable()
    }

    fn is_link_readable(&mut self, peer: Rank) -> bool {
        let held = self.mesh.links[peer.0 as usize].rx.frame.is_some_and(|header| header.kind != FrameKind::Abort);
        let wanted = !held || self.receives_from(peer);
        wanted && self.mesh.links[peer.0 as usize].is_shared_readable()
    }

    /// Process a pending connection.
    pub(super) fn process_pending(&mut self, index: usize) -> Result<(), Failure> {
        match self.mesh.advance_handshake(index) {
            HandshakeOutcome::Aborted(error) => Err(Failure::Remote(error)),
            // An operation that this rank has not entered yet, or has left, says nothing about this one.
            HandshakeOutcome::Announced(call, number) if self.messages_only => {
                self.mesh.announced.retain(|(_, other)| other.rank != call.rank);
                self.mesh.announced.push((number, call));
                Ok(())
            }
            HandshakeOutcome::Announced(call, _) if call.op_index == self.call.op_index => {
                Ok(self.check_same_operation(&call)?)
            }
            HandshakeOutcome::Announced(..)
            | HandshakeOutcome::Joined
            | HandshakeOutcome::Incomplete
            | HandshakeOutcome::Dropped => Ok(()),
        }
    }

    /// Return the poll interest of the link to `peer`.
    fn interest(&self, peer: Rank) -> PollFlags {
        let link = &self.mesh.links[peer.0 as usize];
        match link.state {
            State::Idle | State::Ended => PollFlags::empty(),
            State::Connecting(_) => PollFlags::OUT,
            State::AwaitingAnswer(..) | State::AwaitingVerdict(_) => PollFlags::IN,
            State::Ready(_) if link.rx.is_shared => {
                // Readable at its end, which may come before what is left in shared memory is read.
                let mut interest = PollFlags::empty();
                interest.set(PollFlags::IN, !link.has_socket_ended());
                let sends = open(&self.step.sends, &self.mesh.sends).any(|send| send.peer == peer);
                interest.set(PollFlags::OUT, sends && !link.tx.is_shared);
                interest
            }
            State::Ready(_) => {
                let held = link.rx.frame.is_some_and(|header| header.kind != FrameKind::Abort);
                let mut interest = PollFlags::empty();
                interest.set(PollFlags::IN, !held || self.receives_from(peer));
                let sends = open(&self.step.sends, &self.mesh.sends).any(|send| send.peer == peer);
                interest.set(PollFlags::OUT, sends && !link.tx.is_shared);
                interest
            }
        }
    }

    /// Serve a ready link that the step does not receive from.
    fn serve_link(&mut self, peer: Rank) -> Result<(), Failure> {
        self.mesh.links[peer.0 as usize].check_socket(false);
        let link = &self.mesh.links[peer.0 as usize];
        match (&link.state, link.rx.frame) {
            (State::Connecting(_) | State::AwaitingAnswer(..) | State::AwaitingVerdict(_), _) => {
                self.mesh.advance(peer).map_err(Failure::Local)
            }
            (State::Ready(_), Some(header)) if header.kind == FrameKind::Abort => self.receive_abort(peer),
            (State::Ready(_), None) if !self.receives_from(peer) => self.receive_header(peer).map(|_| ()),
            _ => Ok(()),
        }
    }

    /// Return whether the current step waits for `peer`.
    fn receives_from(&self, peer: Rank) -> bool {
        if self.board_use == BoardUse::Runs {
            return false;
        }
        let (recvs, progress) = (&self.step.recvs, &self.mesh.recvs);
        (0..recvs.len()).any(|slot| recvs[slot].peer == peer && is_next(recvs, progress, slot))
    }

    /// Return a rank that the current step waits for.
    fn awaited(&self) -> Rank {
        let recv = open(&self.step.recvs, &self.mesh.recvs).next().map(|recv| recv.peer);
        let send = open(&self.step.sends, &self.mesh.sends).next().map(|send| send.peer);
        recv.or(send).or(self.mesh.messages.awaited(self.call.rank)).unwrap_or(self.call.rank)
    }
}

/// Clear the list and change its lifetime: collecting in place keeps the allocation.
fn recycled<'to>(mut fds: Vec<PollFd<'_>>) -> Vec<PollFd<'to>> {
    fds.clear();
    fds.into_iter().map_while(|_| None).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recycling_keeps_the_allocation() {
        let fds: Vec<PollFd<'_>> = Vec::with_capacity(100);
        let before = fds.as_ptr().addr();
        let fds = recycled(fds);
        assert_eq!((fds.capacity(), fds.as_ptr().addr()), (100, before));
    }
}
