//! Connections from ranks: accepted, identified by their hello, and parsed into messages.

use super::worker::Worker;
use super::{ACCEPTED, ALIVE, HELLO_BYTES, HELLO_LIMIT, OobEvent, hello};
use crate::exec::acceptor::Accepted;
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
    pub(super) hello: [u8; HELLO_BYTES],
    pub(super) filled: usize,
}

impl Worker {
    /// Accept some connections; the oldest unidentified one makes room for the newest.
    pub(super) fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTS_PER_ROUND {
            let Some(Accepted { stream, is_last }) = self.acceptor.accept(now) else { return };
            self.unknown_peers.push_back(UnknownPeer { stream, since: now, hello: [0; HELLO_BYTES], filled: 0 });
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
        }
    }

    /// Process the bytes of an unidentified connection; returns whether it has left the list, as a rank's or closed.
    pub(super) fn identify(&mut self, index: usize) -> bool {
        let (own, token) = self.own;
        let peer = &mut self.unknown_peers[index];
        let rank = loop {
            match peer.stream.read(&mut peer.hello[peer.filled..]) {
                Ok(n @ 1..) => peer.filled += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Ok(0) | Err(_) => break None,
            }
            if peer.filled == HELLO_BYTES {
                let rank = Rank(u32::from_le_bytes(std::array::from_fn(|byte| peer.hello[16 + byte])));
                let is_other = (rank.0 as usize) < self.addresses.len() && rank != own;
                break Some(rank).filter(|_| is_other && peer.hello == hello(token, rank, own));
            }
        };
        let Some(UnknownPeer { mut stream, .. }) = self.unknown_peers.remove(index) else { return true };
        // A new socket's buffer holds a byte.
        if let Some(from) = rank
            && matches!(stream.write(&[ACCEPTED]), Ok(1))
        {
            self.outbound[from.0 as usize].alive_at = Some(Instant::now());
            self.inbound.push(Inbound { stream, from, bytes: Vec::new() });
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

/// Maximum number of unidentified connections.
pub(super) const UNKNOWN_PEERS_MAX: usize = 64;

/// Connections accepted before others are served.
const ACCEPTS_PER_ROUND: usize = 64;
