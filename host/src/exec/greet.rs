//! Accepted connections, until they have said who they are.
//!
//! Invariants: nothing of a stranger gets past the hello; at most [`PENDING_MAX`] strangers wait at a time, each for
//! [`HELLO_LIMIT`] altogether, and the oldest makes room; what one has said is looked at before it loses its place, and
//! a peer that loses it all the same dials again; an answer is never longer than what was said.

use super::acceptor::Accepted;
use super::error::{Call, ExecError, Refusal};
use super::frame::{
    ABORT_MAX_BYTES, AbortFrame, FrameKind, HEADER_BYTES, HELLO_BYTES, Header, Hello, HelloKind, VERSION,
};
use super::link::{Moved, State, read, write};
use super::mesh::Mesh;
use super::run::{Failure, Run};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;

/// An accepted connection that has not finished its hello.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) stream: TcpStream,
    since: Instant,
    bytes: [u8; HELLO_BYTES + HEADER_BYTES + ABORT_MAX_BYTES],
    filled: usize,
}

/// What became of a pending connection.
#[derive(Debug)]
pub(super) enum Greeted {
    /// More bytes are needed.
    Waiting,
    /// It is among the links now.
    Joined,
    /// It was not a peer's.
    Dropped,
    /// A courier brought an error.
    Told(ExecError),
    /// A courier says in which operation its rank waits for this one.
    Wanted(Call),
}

impl Run<'_> {
    /// Accept a few connections; the oldest that has still not identified itself makes room for the newest.
    pub(super) fn accept(&mut self, now: Instant) -> Result<(), Failure> {
        for _ in 0..ACCEPTS_PER_ROUND {
            let Some(is_last) = self.mesh.accept(now) else { break };
            let accepted = self.mesh.pending.len();
            self.welcome(accepted - 1)?;
            let is_stranger = self.mesh.pending.len() == accepted;
            if is_last || is_stranger && accepted > PENDING_MAX {
                self.evict()?;
            }
        }
        Ok(())
    }

    /// Hang up on those who have not identified themselves in time.
    pub(super) fn expire(&mut self, now: Instant) -> Result<(), Failure> {
        while self.mesh.hello_limit().is_some_and(|limit| limit <= now) {
            self.evict()?;
        }
        Ok(())
    }

    /// Take the place of who has waited longest, unless it has said by now who it is.
    fn evict(&mut self) -> Result<(), Failure> {
        let pending = self.mesh.pending.len();
        if pending > 0 {
            self.welcome(0)?;
        }
        if pending > 0 && self.mesh.pending.len() == pending {
            self.mesh.pending.remove(0);
            self.mesh.foreign_dropped += 1;
        }
        Ok(())
    }
}

impl Mesh {
    /// Accept one connection, the last of those that wait; returns whether it took the last descriptor.
    pub(super) fn accept(&mut self, now: Instant) -> Option<bool> {
        let Accepted { stream, is_last } = self.acceptor.accept(now)?;
        let bytes = [0; HELLO_BYTES + HEADER_BYTES + ABORT_MAX_BYTES];
        self.pending.push(Pending { stream, since: now, bytes, filled: 0 });
        Some(is_last)
    }

    /// Return when the first of those who have not identified themselves has had its time.
    pub(super) fn hello_limit(&self) -> Option<Instant> {
        self.pending.first().map(|pending| pending.since + HELLO_LIMIT)
    }

    /// Take pending connection `index` as far as its bytes go; every outcome but `Waiting` removes it.
    pub(super) fn greet(&mut self, index: usize) -> Greeted {
        let outcome = match self.pending[index].hello() {
            Err(Moved::WouldBlock) => return Greeted::Waiting,
            Err(_) | Ok(None) => Greeted::Dropped,
            Ok(Some(hello)) => match self.judge(&hello) {
                Ok(HelloKind::Courier) => match self.pending[index].message(hello.from) {
                    Err(Moved::WouldBlock) => return Greeted::Waiting,
                    Err(_) => Greeted::Dropped,
                    Ok(message) => message,
                },
                Ok(kind) => return self.join(index, kind, hello.from),
                Err(reason) => {
                    let refusal = self.hello(HelloKind::Refusal(reason), hello.from);
                    // As far as it goes: a stranger that does not listen is dropped all the same.
                    let _ = write(&self.pending[index].stream, &refusal.emit(), &[]);
                    Greeted::Dropped
                }
            },
        };
        self.pending.remove(index);
        self.foreign_dropped += u64::from(matches!(outcome, Greeted::Dropped));
        outcome
    }

    /// Decide on a hello.
    fn judge(&self, hello: &Hello) -> Result<HelloKind, Refusal> {
        if hello.version != VERSION {
            return Err(Refusal::Version);
        }
        if hello.token != self.token {
            return Err(Refusal::Token);
        }
        let is_other = hello.from.0 < self.place.ranks() && hello.from != self.rank() && hello.to == self.rank();
        let is_idle = |rank: Rank| matches!(self.links[rank.0 as usize].state, State::Idle);
        let is_closed = |rank: Rank| matches!(self.messages.from[rank.0 as usize].link.state, State::Idle);
        match hello.kind {
            HelloKind::Courier if is_other => Ok(hello.kind),
            HelloKind::Lane if is_other && is_closed(hello.from) => Ok(hello.kind),
            HelloKind::Peer if is_other && hello.from < self.rank() && is_idle(hello.from) => Ok(hello.kind),
            _ => Err(Refusal::Rank),
        }
    }

    /// Answer a peer's hello and let its frames flow.
    fn join(&mut self, index: usize, kind: HelloKind, peer: Rank) -> Greeted {
        let stream = self.pending.remove(index).stream;
        let answer = self.hello(kind, peer).emit();
        let link = match kind {
            HelloKind::Lane => &mut self.messages.from[peer.0 as usize].link,
            _ => &mut self.links[peer.0 as usize],
        };
        if write(&stream, &answer, &[]) == Moved::Bytes(HELLO_BYTES) {
            link.state = State::Ready(stream);
        } else {
            link.state = State::Ended;
        }
        Greeted::Joined
    }
}

impl Pending {
    /// Return the hello once it is here, `None` if it is none.
    fn hello(&mut self) -> Result<Option<Hello>, Moved> {
        self.fill(HELLO_BYTES)?;
        Ok(Hello::parse(&std::array::from_fn(|index| self.bytes[index])))
    }

    /// Return what a courier brings, once it is here.
    fn message(&mut self, from: Rank) -> Result<Greeted, Moved> {
        const BODY: usize = HELLO_BYTES + HEADER_BYTES;
        self.fill(BODY)?;
        let bytes = std::array::from_fn(|index| self.bytes[HELLO_BYTES + index]);
        match Header::parse(from, &bytes) {
            Ok(Header { kind: FrameKind::Want, call, .. }) => Ok(Greeted::Wanted(call)),
            Ok(Header { kind: FrameKind::Abort, len_bytes, .. }) => {
                self.fill(BODY + len_bytes)?;
                Ok(Greeted::Told(AbortFrame::parse(from, &self.bytes[BODY..BODY + len_bytes])))
            }
            _ => Ok(Greeted::Dropped),
        }
    }

    /// Receive up to byte `end`, which is within the longest that a courier says.
    fn fill(&mut self, end: usize) -> Result<(), Moved> {
        while self.filled < end {
            match read(&self.stream, &mut self.bytes[self.filled..end]) {
                Moved::Bytes(n) => self.filled += n,
                other => return Err(other),
            }
        }
        Ok(())
    }
}

/// The most strangers that wait at a time.
const PENDING_MAX: usize = 64;
/// How long a connection may take to identify itself, altogether. A rank says who it is while it is in a call.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// Connections accepted before others are looked at.
pub(super) const ACCEPTS_PER_ROUND: usize = 64;
