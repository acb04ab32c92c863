//! Connections to ranks: dialled when there is something to send, checked, and dialled again if they were not accepted.

use super::worker::Worker;
use super::{ACCEPTED, HELLO_BYTES, OobEvent, SILENCE_LIMIT, hello};
use crate::exec::acceptor::{Redial, dial};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Instant;
use sumac_hal::ids::Rank;

/// State of the connection to a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Stage {
    /// Dialled, if there is a socket.
    #[default]
    Connecting,
    /// Our hello is sent, the answer awaited.
    Handshake,
    /// Messages may be sent.
    Ready,
}

/// Why a connection to a rank ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loss {
    /// Nobody listens there.
    Refused,
    /// It was not accepted; the rank may still be there.
    NotAccepted,
    /// It broke after it was accepted.
    Broken,
}

/// The connection to a rank.
#[derive(Debug, Default)]
pub(super) struct Outbound {
    pub(super) stream: Option<TcpStream>,
    pub(super) stage: Stage,
    /// Bytes to send.
    pub(super) bytes: VecDeque<u8>,
    /// When it may be dialled again.
    pub(super) redial: Redial,
    /// Since when no connection was accepted.
    pub(super) failing_since: Option<Instant>,
    pub(super) pinged_at: Option<Instant>,
    /// When the rank last proved to be there.
    pub(super) alive_at: Option<Instant>,
}

impl Worker {
    /// Dial ranks with queued messages.
    pub(super) fn dial_all(&mut self, now: Instant) {
        for index in 0..self.outbound.len() {
            let out = &self.outbound[index];
            if out.stream.is_some() || out.bytes.is_empty() || out.redial.is_pausing(now) {
                continue;
            }
            let rank = Rank(index as u32);
            match dial(self.addresses[index]) {
                Ok(Some(stream)) => {
                    (self.outbound[index].stream, self.outbound[index].stage) = (Some(stream), Stage::Connecting)
                }
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => self.handle_loss(rank, Loss::Refused),
                Ok(None) | Err(_) => self.handle_loss(rank, Loss::NotAccepted),
            }
        }
    }

    /// Handle the loss of a connection. Its queued messages are lost too, unless it was not even accepted.
    fn handle_loss(&mut self, rank: Rank, loss: Loss) {
        let now = Instant::now();
        let out = &mut self.outbound[rank.0 as usize];
        out.stream = None;
        if loss == Loss::Broken {
            out.redial = Redial::default();
        } else {
            out.redial.fail(now);
        }
        let failing_since = *out.failing_since.get_or_insert(now);
        if loss == Loss::NotAccepted && now.saturating_duration_since(failing_since) < SILENCE_LIMIT {
            return;
        }
        out.failing_since = None;
        out.bytes.clear();
        // Ranks that are not watched may have left in good order.
        if !self.watched.contains(&rank) {
            return;
        }
        match loss {
            Loss::Refused => self.deliver(OobEvent::Gone(rank)),
            Loss::Broken => {
                // Is the rank gone? If it listens, it answers a ping.
                self.outbound[rank.0 as usize].pinged_at = Some(now);
                self.enqueue(rank, &[]);
            }
            Loss::NotAccepted => {}
        }
    }

    /// Send what the socket accepts. A dialled connection is first checked and its handshake completed.
    pub(super) fn send(&mut self, rank: Rank) {
        let out = &mut self.outbound[rank.0 as usize];
        let Some(stream) = &mut out.stream else { return };
        if out.stage == Stage::Connecting {
            match stream.take_error() {
                // A new socket's buffer holds a hello.
                Ok(None) if matches!(stream.write(&hello(self.own.1, self.own.0, rank)), Ok(HELLO_BYTES)) => {
                    out.stage = Stage::Handshake;
                    return;
                }
                Ok(Some(error)) if error.kind() == ErrorKind::ConnectionRefused => {
                    return self.handle_loss(rank, Loss::Refused);
                }
                _ => return self.handle_loss(rank, Loss::NotAccepted),
            }
        }
        if out.stage == Stage::Handshake {
            let mut answer = [0];
            match stream.read(&mut answer) {
                Ok(1) if answer == [ACCEPTED] => {
                    (out.stage, out.redial, out.failing_since) = (Stage::Ready, Redial::default(), None);
                    out.alive_at = Some(Instant::now());
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return,
                _ => return self.handle_loss(rank, Loss::NotAccepted),
            }
        }
        // The peer sends nothing more on this connection: readable means closed.
        let lost = match stream.read(&mut [0; 16]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            Err(error) => error.kind() != ErrorKind::Interrupted,
            Ok(_) => true,
        };
        if lost {
            return self.handle_loss(rank, Loss::Broken);
        }
        while !out.bytes.is_empty() {
            match stream.write(out.bytes.as_slices().0) {
                Ok(n) => drop(out.bytes.drain(..n)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return self.handle_loss(rank, Loss::Broken),
            }
        }
    }
}
