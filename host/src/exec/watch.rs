//! The one `poll` over everything that can end or advance an operation.
//!
//! Watched are the listener, strangers, every connection and the caller's interrupt. Left out is only a connection
//! with a frame that must wait for its step: its peer is ahead, so nothing that this rank still needs stands behind
//! that frame; and a rank that does need the peer is told by it directly.

use super::error::ExecError;
use super::frame::FrameKind;
use super::greet::Greeted;
use super::link::State;
use super::message::Direction;
use super::run::{Failure, Run, is_next, open};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;

/// What a watched descriptor belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Watched {
    Listener,
    /// A stranger, by index.
    Pending(usize),
    Link(Rank),
    /// A lane with an open message.
    Lane(Rank, Direction),
    /// A courier, by index.
    Want(usize),
    Interrupt,
}

impl Run<'_> {
    /// Look at all sockets, or sleep until one of them, the interrupt or the deadline has something to say.
    pub(super) fn watch(&mut self, block: bool) -> Result<(), Failure> {
        let now = Instant::now();
        if now >= self.deadline {
            let (rank, op_index, peer) = (self.call.rank, self.call.op_index, self.awaited());
            if self.is_between {
                return Err(ExecError::MessageDeadline { rank, peer }.into());
            }
            return Err(ExecError::Deadline { op_index, rank, peer }.into());
        }
        self.drive_messages()?;
        let wake_at = self.interrupt.wake_at();
        if wake_at.is_some_and(|at| at <= now) {
            self.interrupt.check()?;
        }
        let until = wake_at.map_or(self.deadline, |at| at.min(self.deadline));
        let until = self.patience.ends(now).map_or(until, |at| at.min(until));
        self.mesh.redial(now)?;
        self.expire(now)?;
        let until = self.mesh.wake_at(now).map_or(until, |at| at.min(until));
        let timeout = if block { until.saturating_duration_since(now) } else { Duration::ZERO };
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        self.poll(&timeout)?;
        if block && self.mesh.watched.is_empty() && self.patience.ends(now).is_some_and(|at| at <= Instant::now()) {
            self.announce()?;
        }
        // From the back: a stranger that leaves the list moves those behind it.
        while let Some(watched) = self.mesh.watched.pop() {
            match watched {
                Watched::Interrupt => self.interrupt.check()?,
                Watched::Listener => self.accept(now)?,
                Watched::Pending(index) => self.welcome(index)?,
                Watched::Want(index) => self.send_want(index)?,
                Watched::Link(peer) => self.attend(peer)?,
                Watched::Lane(peer, Direction::Send) => self.open_lane(peer)?,
                // The next round moves what has come.
                Watched::Lane(_, Direction::Receive) => {}
            }
        }
        Ok(())
    }

    /// Poll, and leave in `mesh.watched` what is ready.
    fn poll(&mut self, timeout: &Timespec) -> Result<(), ExecError> {
        let mut fds = recycled(std::mem::take(&mut self.mesh.pollfds));
        let mut watched = std::mem::take(&mut self.mesh.watched);
        watched.clear();
        let mesh = &*self.mesh;
        let readable = PollFlags::IN;
        // It goes first, to be looked at last: whom it lets in changes the places of the others.
        if mesh.acceptor.resume_at(Instant::now()).is_none() {
            fds.push(PollFd::new(mesh.acceptor.listener(), readable));
            watched.push(Watched::Listener);
        }
        for (index, link) in mesh.links.iter().enumerate() {
            let peer = Rank(index as u32);
            let (Some(stream), interest) = (link.stream(), self.interest(peer)) else { continue };
            if !interest.is_empty() {
                fds.push(PollFd::new(stream, interest));
                watched.push(Watched::Link(peer));
            }
        }
        for (peer, direction, stream, interest) in mesh.messages.interests() {
            fds.push(PollFd::new(stream, interest));
            watched.push(Watched::Lane(peer, direction));
        }
        for (index, pending) in mesh.pending.iter().enumerate() {
            fds.push(PollFd::new(&pending.stream, readable));
            watched.push(Watched::Pending(index));
        }
        for (index, (_, courier)) in mesh.wants.iter().enumerate() {
            fds.push(PollFd::new(courier, PollFlags::OUT));
            watched.push(Watched::Want(index));
        }
        if let Some(fd) = self.interrupt.poll_fd() {
            fds.push(PollFd::from_borrowed_fd(fd, readable));
            watched.push(Watched::Interrupt);
        }
        let polled = poll(&mut fds, Some(timeout));
        let mut ready = fds.iter().map(|fd| polled.is_ok() && !fd.revents().is_empty());
        watched.retain(|_| ready.next().unwrap_or(false));
        self.mesh.pollfds = recycled(fds);
        self.mesh.watched = watched;
        match polled {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(ExecError::Io { rank: self.call.rank, what: format!("polling the sockets: {errno}") }),
        }
    }

    /// Hear out a stranger.
    pub(super) fn welcome(&mut self, index: usize) -> Result<(), Failure> {
        match self.mesh.greet(index) {
            Greeted::Told(error) => Err(Failure::Told(error)),
            // An operation that this rank is not yet in, or not any more, says nothing about this one.
            Greeted::Wanted(call) if !self.is_between && call.op_index == self.call.op_index => {
                Ok(self.compare(&call)?)
            }
            Greeted::Wanted(_) | Greeted::Joined | Greeted::Waiting | Greeted::Dropped => Ok(()),
        }
    }

    /// Return what to wait for at the connection to `peer`.
    fn interest(&self, peer: Rank) -> PollFlags {
        let link = &self.mesh.links[peer.0 as usize];
        match link.state {
            State::Idle | State::Ended => PollFlags::empty(),
            State::Connecting(_) => PollFlags::OUT,
            State::Greeting(_) => PollFlags::IN,
            State::Ready(_) => {
                let held = link.rx.frame.is_some_and(|header| header.kind != FrameKind::Abort);
                let mut interest = PollFlags::empty();
                interest.set(PollFlags::IN, !held || self.receives_from(peer));
                interest.set(PollFlags::OUT, open(self.step.sends, &self.mesh.sends).any(|send| send.peer == peer));
                interest
            }
        }
    }

    /// Serve a connection that is ready and that the step does not receive from.
    fn attend(&mut self, peer: Rank) -> Result<(), Failure> {
        let link = &self.mesh.links[peer.0 as usize];
        match (&link.state, link.rx.frame) {
            (State::Connecting(_) | State::Greeting(_), _) => self.mesh.advance(peer).map_err(Failure::Found),
            (State::Ready(_), Some(header)) if header.kind == FrameKind::Abort => self.receive_abort(peer),
            (State::Ready(_), None) if !self.receives_from(peer) => self.receive_header(peer).map(|_| ()),
            _ => Ok(()),
        }
    }

    /// Return whether the present step waits for `peer`.
    fn receives_from(&self, peer: Rank) -> bool {
        let (recvs, progress) = (self.step.recvs, &self.mesh.recvs);
        (0..recvs.len()).any(|slot| recvs[slot].peer == peer && is_next(recvs, progress, slot))
    }

    /// Return a rank that the present step waits for.
    fn awaited(&self) -> Rank {
        let recv = open(self.step.recvs, &self.mesh.recvs).next().map(|recv| recv.peer);
        let send = open(self.step.sends, &self.mesh.sends).next().map(|send| send.peer);
        recv.or(send).or(self.mesh.messages.awaited()).unwrap_or(self.call.rank)
    }
}

/// Empty the list and give its memory another lifetime: collecting in place keeps the allocation.
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
