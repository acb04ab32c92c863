//! Connections from ranks: accepted, identified by their hello, and parsed into messages.

use super::worker::Worker;
use super::{ALIVE, HELLO_LIMIT, OobEvent};
use crate::exec::acceptor::Accepted;
use crate::exec::auth::{
    ANSWER_BYTES, Answer, HELLO_BYTES, Hello, PROOF_BYTES, Purpose, VERDICT_BYTES, VERSION, verdict,
};
use crate::exec::error::Refusal;
use crate::secret::JobSecret;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Instant;
use sumac_hal::ids::Rank;

/// A connection from a rank.
#[derive(Debug)]
pub(super) struct Inbound {
    pub(super) stream: TcpStream,
    pub(super) from: Rank,
    pub(super) bytes: Vec<u8>,
}

/// A connection that has not identified itself.
#[derive(Debug)]
pub(super) struct UnknownPeer {
    pub(super) stream: TcpStream,
    pub(super) since: Instant,
    /// Hello and proof.
    pub(super) bytes: [u8; HELLO_BYTES + PROOF_BYTES],
    pub(super) filled: usize,
    /// Our answer to its hello.
    pub(super) answer: Option<Answer>,
}

impl Worker {
    /// Accept some connections; the oldest unidentified one makes room for the newest.
    pub(super) fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTS_PER_ROUND {
            let Some(Accepted { stream, is_last }) = self.acceptor.accept(now) else { return };
            let bytes = [0; HELLO_BYTES + PROOF_BYTES];
            self.unknown_peers.push_back(UnknownPeer { stream, since: now, bytes, filled: 0, answer: None });
            let is_unknown = !self.identify(self.unknown_peers.len() - 1);
            if is_last || is_unknown && self.unknown_peers.len() > UNKNOWN_PEERS_MAX {
                self.evict();
            }
        }
    }

    /// Close connections that have not identified themselves in time.
    pub(super) fn expire(&mut self, now: Instant) {
        while self.unknown_peers.front().is_some_and(|peer| peer.since + HELLO_LIMIT <= now) {
            self.evict();
        }
    }

    /// Evict the oldest unidentified connection, unless it turns out to be a rank's, which has a place of its own.
    fn evict(&mut self) {
        if !self.unknown_peers.is_empty() && !self.identify(0) {
            self.unknown_peers.pop_front();
            self.refusals.note(self.own, "they took too long");
        }
    }

    /// Process the bytes of an unidentified connection; returns whether it has left the list, as a rank's or closed.
    pub(super) fn identify(&mut self, index: usize) -> bool {
        let from = match self.unknown_peers[index].advance(self.own, self.addresses.len(), &self.secret) {
            Ok(None) => return false,
            Ok(Some(from)) => Ok(from),
            Err(why) => Err(why),
        };
        let Some(UnknownPeer { mut stream, .. }) = self.unknown_peers.remove(index) else { return true };
        match from {
            // A new socket's buffer holds a verdict.
            Ok(from) if matches!(stream.write(&verdict(None)), Ok(VERDICT_BYTES)) => {
                self.outbound[from.0 as usize].alive_at = Some(Instant::now());
                self.inbound.push(Inbound { stream, from, bytes: Vec::new() });
            }
            Ok(_) => {}
            Err(why) => self.refusals.note(self.own, why),
        }
        true
    }

    /// Read from a rank.
    pub(super) fn receive(&mut self, index: usize) {
        let mut buffer = [0; 16 << 10];
        let ended = loop {
            let from = &mut self.inbound[index];
            match from.stream.read(&mut buffer) {
                Ok(0) => break true,
                Ok(n) => from.bytes.extend_from_slice(&buffer[..n]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break true,
            }
            if !self.parse(index) {
                break true;
            }
        };
        if ended {
            self.inbound.swap_remove(index);
        }
    }

    /// Extract complete messages from the bytes read; returns false if one is too long.
    fn parse(&mut self, index: usize) -> bool {
        let Inbound { from: rank, .. } = self.inbound[index];
        let from = &mut self.inbound[index];
        let mut at = 0;
        self.outbound[rank.0 as usize].alive_at = Some(Instant::now());
        let mut messages = Vec::new();
        while let Some(len) = from.bytes[at..].first_chunk::<4>() {
            let len = u32::from_le_bytes(*len) as usize;
            if len > self.max_len_bytes {
                return false;
            }
            let Some(message) = from.bytes[at + 4..].get(..len) else { break };
            messages.push(message.to_vec());
            at += 4 + len;
        }
        from.bytes.drain(..at);
        for message in messages {
            match &message[..] {
                [] => self.enqueue(rank, &ALIVE),
                message if message == ALIVE => {}
                _ => self.deliver(OobEvent::Message(rank, message)),
            }
        }
        true
    }
}

impl UnknownPeer {
    /// Process the bytes that have arrived: answer the hello, and check the proof. Returns the rank, once it is proven.
    ///
    /// # Errors
    /// Why it is no rank's.
    fn advance(&mut self, own: Rank, ranks: usize, secret: &JobSecret) -> Result<Option<Rank>, &'static str> {
        if !self.fill(HELLO_BYTES)? {
            return Ok(None);
        }
        let bytes: [u8; HELLO_BYTES] = std::array::from_fn(|index| self.bytes[index]);
        let hello = Hello::parse(&bytes).ok_or("they sent no hello")?;
        let is_valid = (hello.from.0 as usize) < ranks && hello.from != own && hello.to == own;
        if self.answer.is_none() {
            let refusal = if hello.version != VERSION {
                Some(Refusal::Version)
            } else {
                (!is_valid || hello.purpose != Purpose::OutOfBand).then_some(Refusal::Rank)
            };
            let answer = Answer::new(secret, own, &bytes, refusal);
            let answer = answer.map_err(|_| "this rank could not draw random bytes")?;
            let sent = self.stream.write(answer.bytes());
            if let Some(refusal) = refusal {
                return Err(refusal.of_unknown_peers());
            }
            if !matches!(sent, Ok(ANSWER_BYTES)) {
                return Err("they took no answer");
            }
            self.answer = Some(answer);
        }
        if !self.fill(HELLO_BYTES + PROOF_BYTES)? {
            return Ok(None);
        }
        let proof = std::array::from_fn(|index| self.bytes[HELLO_BYTES + index]);
        if self.answer.as_ref().is_some_and(|answer| answer.is_proven(secret, &proof)) {
            return Ok(Some(hello.from));
        }
        // Best effort.
        let _ = self.stream.write(&verdict(Some(Refusal::Secret)));
        Err(Refusal::Secret.of_unknown_peers())
    }

    /// Receive up to byte `end`; returns whether it is there.
    fn fill(&mut self, end: usize) -> Result<bool, &'static str> {
        while self.filled < end {
            match self.stream.read(&mut self.bytes[self.filled..end]) {
                Ok(n @ 1..) => self.filled += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => return Err("they ended before they had proved it"),
            }
        }
        Ok(true)
    }
}

/// Maximum number of unidentified connections.
pub(super) const UNKNOWN_PEERS_MAX: usize = 64;

/// Connections accepted before others are served.
const ACCEPTS_PER_ROUND: usize = 64;
