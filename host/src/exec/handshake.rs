//! Accepted connections that have not completed their handshake.
//!
//! Invariants: an unknown peer gets no further than the hello. At most [`PENDING_MAX`] such peers are pending at a
//! time, each for [`HELLO_LIMIT`] in total, and the oldest makes room. Bytes that have arrived are processed before a
//! peer is evicted; an evicted rank dials again. A reply is never longer than what was received.

use super::acceptor::Accepted;
use super::error::{Call, ExecError, Refusal};
use super::frame::{
    ABORT_MAX_BYTES, AbortFrame, FrameKind, HEADER_BYTES, HELLO_BYTES, Header, Hello, HelloKind, VERSION,
};
use super::link::{IoOutcome, State, read, write};
use super::mesh::Mesh;
use super::run::{Failure, Run};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;

/// An accepted connection that has not completed its hello.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) stream: TcpStream,
    since: Instant,
    bytes: [u8; HELLO_BYTES + HEADER_BYTES + ABORT_MAX_BYTES],
    filled: usize,
}

/// The state of a pending connection.
#[derive(Debug)]
pub(super) enum HandshakeOutcome {
    /// More bytes are needed.
    Incomplete,
    /// It is now one of the links.
    Joined,
    /// It did not come from a peer.
    Dropped,
    /// A one-shot connection delivered an error.
    Aborted(ExecError),
    /// A one-shot connection announced the operation in which its rank waits for this one.
    Announced(Call),
}

impl Run<'_> {
    /// Accept some connections; the oldest unidentified one makes room for the newest.
    pub(super) fn accept(&mut self, now: Instant) -> Result<(), Failure> {
        for _ in 0..ACCEPTS_PER_ROUND {
            let Some(is_last) = self.mesh.accept(now) else { break };
            let accepted = self.mesh.pending.len();
            self.process_pending(accepted - 1)?;
            let is_unknown = self.mesh.pending.len() == accepted;
            if is_last || is_unknown && accepted > PENDING_MAX {
                self.evict()?;
            }
        }
        Ok(())
    }

    /// Close connections that have not identified themselves in time.
    pub(super) fn expire(&mut self, now: Instant) -> Result<(), Failure> {
        while self.mesh.hello_limit().is_some_and(|limit| limit <= now) {
            self.evict()?;
        }
        Ok(())
    }

    /// Evict the oldest pending connection, unless it has identified itself by now.
    fn evict(&mut self) -> Result<(), Failure> {
        let pending = self.mesh.pending.len();
        if pending > 0 {
            self.process_pending(0)?;
        }
        if pending > 0 && self.mesh.pending.len() == pending {
            self.mesh.pending.remove(0);
            self.mesh.foreign_dropped += 1;
        }
        Ok(())
    }
}

impl Mesh {
    /// Accept one connection and append it to the pending ones; returns whether it took the last descriptor.
    pub(super) fn accept(&mut self, now: Instant) -> Option<bool> {
        let Accepted { stream, is_last } = self.acceptor.accept(now)?;
        let bytes = [0; HELLO_BYTES + HEADER_BYTES + ABORT_MAX_BYTES];
        self.pending.push(Pending { stream, since: now, bytes, filled: 0 });
        Some(is_last)
    }

    /// Return when the oldest pending connection times out.
    pub(super) fn hello_limit(&self) -> Option<Instant> {
        self.pending.first().map(|pending| pending.since + HELLO_LIMIT)
    }

    /// Advance pending connection `index` as far as its bytes allow; every outcome but `Incomplete` removes it.
    pub(super) fn advance_handshake(&mut self, index: usize) -> HandshakeOutcome {
        let outcome = match self.pending[index].hello() {
            Err(IoOutcome::WouldBlock) => return HandshakeOutcome::Incomplete,
            Err(_) | Ok(None) => HandshakeOutcome::Dropped,
            Ok(Some(hello)) => match self.validate(&hello) {
                Ok(HelloKind::OneShot) => match self.pending[index].message(hello.from) {
                    Err(IoOutcome::WouldBlock) => return HandshakeOutcome::Incomplete,
                    Err(_) => HandshakeOutcome::Dropped,
                    Ok(message) => message,
                },
                Ok(kind) => return self.accept_peer(index, kind, hello.from),
                Err(reason) => {
                    let refusal = self.hello(HelloKind::Refusal(reason), hello.from);
                    // Best effort: an unknown peer that does not read is dropped all the same.
                    let _ = write(&self.pending[index].stream, &refusal.emit(), &[]);
                    HandshakeOutcome::Dropped
                }
            },
        };
        self.pending.remove(index);
        self.foreign_dropped += u64::from(matches!(outcome, HandshakeOutcome::Dropped));
        outcome
    }

    /// Check a hello.
    fn validate(&self, hello: &Hello) -> Result<HelloKind, Refusal> {
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
            HelloKind::OneShot if is_other => Ok(hello.kind),
            HelloKind::PointToPoint if is_other && is_closed(hello.from) => Ok(hello.kind),
            HelloKind::Peer if is_other && hello.from < self.rank() && is_idle(hello.from) => Ok(hello.kind),
            _ => Err(Refusal::Rank),
        }
    }

    /// Answer a peer's hello, and make its connection a link.
    fn accept_peer(&mut self, index: usize, kind: HelloKind, peer: Rank) -> HandshakeOutcome {
        let stream = self.pending.remove(index).stream;
        let answer = self.hello(kind, peer).emit();
        let link = match kind {
            HelloKind::PointToPoint => &mut self.messages.from[peer.0 as usize].link,
            _ => &mut self.links[peer.0 as usize],
        };
        if write(&stream, &answer, &[]) == IoOutcome::Bytes(HELLO_BYTES) {
            link.state = State::Ready(stream);
        } else {
            link.state = State::Ended;
        }
        HandshakeOutcome::Joined
    }
}

impl Pending {
    /// Return the hello once complete; `None` if the bytes are not a hello.
    fn hello(&mut self) -> Result<Option<Hello>, IoOutcome> {
        self.fill(HELLO_BYTES)?;
        Ok(Hello::parse(&std::array::from_fn(|index| self.bytes[index])))
    }

    /// Return the frame of a one-shot connection once complete.
    fn message(&mut self, from: Rank) -> Result<HandshakeOutcome, IoOutcome> {
        const BODY: usize = HELLO_BYTES + HEADER_BYTES;
        self.fill(BODY)?;
        let bytes = std::array::from_fn(|index| self.bytes[HELLO_BYTES + index]);
        match Header::parse(from, &bytes) {
            Ok(Header { kind: FrameKind::Announce, call, .. }) => Ok(HandshakeOutcome::Announced(call)),
            Ok(Header { kind: FrameKind::Abort, len_bytes, .. }) => {
                self.fill(BODY + len_bytes)?;
                Ok(HandshakeOutcome::Aborted(AbortFrame::parse(from, &self.bytes[BODY..BODY + len_bytes])))
            }
            _ => Ok(HandshakeOutcome::Dropped),
        }
    }

    /// Receive up to byte `end`, which lies within the longest possible message.
    fn fill(&mut self, end: usize) -> Result<(), IoOutcome> {
        while self.filled < end {
            match read(&self.stream, &mut self.bytes[self.filled..end]) {
                IoOutcome::Bytes(n) => self.filled += n,
                other => return Err(other),
            }
        }
        Ok(())
    }
}

/// Maximum number of pending connections.
const PENDING_MAX: usize = 64;
/// Time limit for the whole handshake. Ranks complete it within a call.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// Connections accepted before other sockets are served.
pub(super) const ACCEPTS_PER_ROUND: usize = 64;
