//! Accepted connections that have not completed their handshake.
//!
//! Invariants: an unknown peer gets no further than the proof. At most [`PENDING_MAX`] such peers are pending at a
//! time, each for [`HELLO_LIMIT`] in total, and the oldest makes room. Bytes that have arrived are processed before a
//! peer is evicted; an evicted rank dials again. A reply is never longer than what was received.

use super::acceptor::Accepted;
use super::auth::{
    ANSWER_BYTES, Answer, HELLO_BYTES, Hello, PROOF_BYTES, Purpose, VERSION, is_one_shot_proven, verdict,
};
use super::error::{Call, ExecError, Refusal};
use super::frame::{ABORT_MAX_BYTES, AbortFrame, FrameKind, HEADER_BYTES, Header};
use super::link::{IoOutcome, State, read, write};
use super::mesh::Mesh;
use super::run::{Failure, Run};
use crate::secret::JobSecret;
use std::net::TcpStream;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;

/// An accepted connection that has not completed its handshake.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) stream: TcpStream,
    since: Instant,
    /// Our answer to its hello.
    answer: Option<Answer>,
    bytes: [u8; PENDING_BYTES],
    filled: usize,
}

/// Why a pending connection does not become a link now.
enum Stop {
    /// More bytes are needed.
    Incomplete,
    /// It did not come from a peer.
    Refused(&'static str),
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
    /// A one-shot connection announced the operation in which its rank waits for this one, and the call's number.
    Announced(Call, u32),
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
            self.mesh.refusals.note(self.mesh.place.rank(), "they took too long");
        }
        Ok(())
    }
}

impl Mesh {
    /// Accept one connection and append it to the pending ones; returns whether it took the last descriptor.
    pub(super) fn accept(&mut self, now: Instant) -> Option<bool> {
        let Accepted { stream, is_last } = self.acceptor.accept(now)?;
        self.pending.push(Pending { stream, since: now, answer: None, bytes: [0; PENDING_BYTES], filled: 0 });
        Some(is_last)
    }

    /// Return when the oldest pending connection times out.
    pub(super) fn hello_limit(&self) -> Option<Instant> {
        self.pending.first().map(|pending| pending.since + HELLO_LIMIT)
    }

    /// Advance pending connection `index` as far as its bytes allow; every outcome but `Incomplete` removes it.
    pub(super) fn advance_handshake(&mut self, index: usize) -> HandshakeOutcome {
        let outcome = match self.identify(index) {
            Ok((Purpose::OneShot, peer)) => self.take_one_shot(index, peer),
            Ok((purpose, peer)) => return self.accept_peer(index, purpose, peer),
            Err(stop) => Err(stop),
        };
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(Stop::Incomplete) => return HandshakeOutcome::Incomplete,
            Err(Stop::Refused(why)) => {
                self.refusals.note(self.rank(), why);
                HandshakeOutcome::Dropped
            }
        };
        self.pending.remove(index);
        outcome
    }

    /// Return the ranks that pending connections claim to come from.
    pub(super) fn claimed(&mut self) -> Vec<Rank> {
        self.pending.iter_mut().filter_map(|pending| pending.hello().ok()).map(|hello| hello.from).collect()
    }

    /// Check the hello of a pending connection, and, unless it is a one-shot's, answer it and check the proof.
    fn identify(&mut self, index: usize) -> Result<(Purpose, Rank), Stop> {
        let hello = self.pending[index].hello()?;
        let refusal = self.validate(&hello).err();
        if hello.purpose == Purpose::OneShot {
            return refusal.map_or(Ok((hello.purpose, hello.from)), |reason| Err(reason.into()));
        }
        let pending = &mut self.pending[index];
        if pending.answer.is_none() {
            pending.answer((self.place.rank(), &self.secret), refusal)?;
        }
        pending.fill(PROVEN)?;
        let proof = std::array::from_fn(|byte| pending.bytes[HELLO_BYTES + byte]);
        let is_proven = pending.answer.as_ref().is_some_and(|answer| answer.is_proven(&self.secret, &proof));
        // Another connection may have been accepted since the hello.
        if let Some(reason) = refusal.filter(|_| is_proven).or((!is_proven).then_some(Refusal::Secret)) {
            let _ = write(&pending.stream, &verdict(Some(reason)), &[]);
            return Err(reason.into());
        }
        Ok((hello.purpose, hello.from))
    }

    /// Check a hello.
    fn validate(&self, hello: &Hello) -> Result<(), Refusal> {
        if hello.version != VERSION {
            return Err(Refusal::Version);
        }
        let is_other = hello.from.0 < self.place.ranks() && hello.from != self.rank() && hello.to == self.rank();
        let is_idle = |rank: Rank| matches!(self.links[rank.0 as usize].state, State::Idle);
        let is_closed = |rank: Rank| matches!(self.messages.from[rank.0 as usize].link.state, State::Idle);
        match hello.purpose {
            Purpose::OneShot if is_other => Ok(()),
            Purpose::PointToPoint if is_other && is_closed(hello.from) => Ok(()),
            Purpose::Peer if is_other && hello.from < self.rank() && is_idle(hello.from) => Ok(()),
            _ => Err(Refusal::Rank),
        }
    }

    /// Return the frame of a one-shot connection from `peer` once complete.
    fn take_one_shot(&mut self, index: usize, peer: Rank) -> Result<HandshakeOutcome, Stop> {
        let pending = &mut self.pending[index];
        pending.fill(ONE_SHOT_BODY)?;
        let header = std::array::from_fn(|byte| pending.bytes[HELLO_BYTES + byte]);
        let no_frame = Stop::Refused("they sent no valid frame");
        let Ok(Header { kind: kind @ (FrameKind::Announce | FrameKind::Abort), call, len_bytes, number, .. }) =
            Header::parse(peer, &header)
        else {
            return Err(no_frame);
        };
        let end = ONE_SHOT_BODY + len_bytes;
        pending.fill(end + PROOF_BYTES)?;
        let mac = std::array::from_fn(|byte| pending.bytes[end + byte]);
        let one_shot = pending.hello()?.number;
        if !is_one_shot_proven(&self.secret, &pending.bytes[..end], &mac) {
            return Err(Refusal::Secret.into());
        }
        let seen = &mut self.one_shots_seen[peer.0 as usize];
        if one_shot <= *seen {
            return Err(Stop::Refused("they repeated a one-shot connection"));
        }
        *seen = one_shot;
        Ok(match kind {
            FrameKind::Abort => {
                self.aborted = Some(number);
                HandshakeOutcome::Aborted(AbortFrame::parse(peer, &pending.bytes[ONE_SHOT_BODY..end]))
            }
            _ => HandshakeOutcome::Announced(call, number),
        })
    }

    /// Accept a peer's connection, and make it a link.
    fn accept_peer(&mut self, index: usize, purpose: Purpose, peer: Rank) -> HandshakeOutcome {
        let stream = self.pending.remove(index).stream;
        let accepted = verdict(None);
        self.expect_memory();
        let link = match purpose {
            Purpose::PointToPoint => &mut self.messages.from[peer.0 as usize].link,
            _ => &mut self.links[peer.0 as usize],
        };
        if write(&stream, &accepted, &[]) == IoOutcome::Bytes(accepted.len()) {
            link.state = State::Ready(stream);
        } else {
            link.state = State::Ended;
        }
        HandshakeOutcome::Joined
    }
}

impl Pending {
    /// Return the hello once complete.
    fn hello(&mut self) -> Result<Hello, Stop> {
        self.fill(HELLO_BYTES)?;
        let hello = Hello::parse(&std::array::from_fn(|index| self.bytes[index]));
        hello.ok_or(Stop::Refused("they sent no hello"))
    }

    /// Answer the hello.
    fn answer(&mut self, (own, secret): (Rank, &JobSecret), refusal: Option<Refusal>) -> Result<(), Stop> {
        let hello = std::array::from_fn(|index| self.bytes[index]);
        let answer = Answer::new(secret, own, &hello, refusal);
        let answer = answer.map_err(|_| Stop::Refused("this rank could not draw random bytes"))?;
        let sent = write(&self.stream, answer.bytes(), &[]);
        if let Some(reason) = refusal {
            return Err(reason.into());
        }
        if sent != IoOutcome::Bytes(ANSWER_BYTES) {
            return Err(Stop::Refused("they took no answer"));
        }
        self.answer = Some(answer);
        Ok(())
    }

    /// Receive up to byte `end`, which lies within the longest possible message.
    fn fill(&mut self, end: usize) -> Result<(), Stop> {
        while self.filled < end {
            match read(&self.stream, &mut self.bytes[self.filled..end]) {
                IoOutcome::Bytes(n) => self.filled += n,
                IoOutcome::WouldBlock => return Err(Stop::Incomplete),
                IoOutcome::Ended => return Err(Stop::Refused("they ended before they had proved it")),
            }
        }
        Ok(())
    }
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal.of_unknown_peers())
    }
}

/// Hello and proof of a peer.
const PROVEN: usize = HELLO_BYTES + PROOF_BYTES;
/// A one-shot connection up to the payload of its frame.
const ONE_SHOT_BODY: usize = HELLO_BYTES + HEADER_BYTES;
/// The longest message, an abort on a one-shot connection.
const PENDING_BYTES: usize = ONE_SHOT_BODY + ABORT_MAX_BYTES + PROOF_BYTES;
#[cfg(test)]
mod tests;

/// Maximum number of pending connections.
const PENDING_MAX: usize = 64;
/// Time limit for the whole handshake. Ranks complete it within a call.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// Connections accepted before other sockets are served.
pub(super) const ACCEPTS_PER_ROUND: usize = 64;
