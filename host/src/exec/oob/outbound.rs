//! Connections to ranks: dialled when there is something to send, checked, and dialled again if they were not accepted.

use super::worker::Worker;
use super::{OobEvent, SILENCE_LIMIT};
use crate::exec::acceptor::Redial;
use crate::exec::auth::{
    ANSWER_BYTES, AnswerError, Dialler, HELLO_BYTES, PROOF_BYTES, Purpose, VERDICT_BYTES, check_head,
};
use crate::secret::JobSecret;
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
    AwaitingAnswer,
    /// Our proof is sent, the verdict awaited.
    AwaitingVerdict,
    /// Messages may be sent.
    Ready,
}

/// Why a connection to a rank ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loss {
    /// The rank does not listen there.
    Refused,
    /// It was not accepted; the rank may still be there.
    NotAccepted,
    /// It broke after it was accepted.
    Broken,
}

/// The connection to a rank.
#[derive(Debug)]
pub(super) struct Outbound {
    pub(super) stream: Option<TcpStream>,
    pub(super) stage: Stage,
    /// The handshake in progress, and what has arrived of the peer's next message.
    dialler: Option<Dialler>,
    answer: [u8; ANSWER_BYTES],
    filled: usize,
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

impl Default for Outbound {
    fn default() -> Self {
        Self {
            stream: None,
            stage: Stage::default(),
            dialler: None,
            answer: [0; ANSWER_BYTES],
            filled: 0,
            bytes: VecDeque::new(),
            redial: Redial::default(),
            failing_since: None,
            pinged_at: None,
            alive_at: None,
        }
    }
}

impl Outbound {
    /// Advance the handshake as far as possible; returns whether messages may be sent.
    fn shake_hands(&mut self, (own, peer): (Rank, Rank), secret: &JobSecret) -> Result<bool, Loss> {
        if self.stage == Stage::Connecting {
            let Some(stream) = &mut self.stream else { return Ok(false) };
            match stream.take_error() {
                Ok(None) => {}
                Ok(Some(error)) if error.kind() == ErrorKind::ConnectionRefused => return Err(Loss::Refused),
                _ => return Err(Loss::NotAccepted),
            }
            let dialler = Dialler::new(Purpose::OutOfBand, own, peer).map_err(|error| {
                crate::log::error!(rank = %own, %error, "cannot draw random bytes");
                Loss::NotAccepted
            })?;
            // A new socket's buffer holds a hello.
            if !matches!(stream.write(dialler.hello()), Ok(HELLO_BYTES)) {
                return Err(Loss::NotAccepted);
            }
            (self.stage, self.filled, self.dialler) = (Stage::AwaitingAnswer, 0, Some(dialler));
        }
        if self.stage == Stage::AwaitingAnswer {
            if !self.fill(ANSWER_BYTES)? {
                return Ok(false);
            }
            let (Some(dialler), Some(stream)) = (self.dialler.take(), &mut self.stream) else { return Ok(false) };
            let proof = dialler.prove(secret, &self.answer).map_err(|error| loss(error, (own, peer)))?;
            if !matches!(stream.write(&proof), Ok(PROOF_BYTES)) {
                return Err(Loss::NotAccepted);
            }
            (self.stage, self.filled) = (Stage::AwaitingVerdict, 0);
        }
        if self.stage == Stage::AwaitingVerdict {
            if !self.fill(VERDICT_BYTES)? {
                return Ok(false);
            }
            let verdict = std::array::from_fn(|index| self.answer[index]);
            check_head(&verdict).map_err(|error| loss(error, (own, peer)))?;
            (self.stage, self.redial, self.failing_since) = (Stage::Ready, Redial::default(), None);
            self.alive_at = Some(Instant::now());
        }
        Ok(self.stream.is_some())
    }

    /// Receive up to byte `end` of the peer's next message; returns whether it is there.
    fn fill(&mut self, end: usize) -> Result<bool, Loss> {
        let Some(stream) = &mut self.stream else { return Ok(false) };
        while self.filled < end {
            match stream.read(&mut self.answer[self.filled..end]) {
                Ok(n @ 1..) => self.filled += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => return Err(Loss::NotAccepted),
            }
        }
        Ok(true)
    }
}

/// Return what a failed handshake says about the rank.
fn loss(error: AnswerError, (own, peer): (Rank, Rank)) -> Loss {
    match error {
        AnswerError::Unproven => {
            crate::log::warn!(rank = %own, %peer, "found another process at a rank's address: it does not know the secret");
            Loss::Refused
        }
        AnswerError::Refused(reason) => {
            crate::log::warn!(rank = %own, %peer, %reason, "a rank refused a connection");
            Loss::NotAccepted
        }
    }
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
            match self.acceptor.dial(self.addresses[index]) {
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
        match out.shake_hands((self.own, rank), &self.secret) {
            Ok(true) => {}
            Ok(false) => return,
            Err(loss) => return self.handle_loss(rank, loss),
        }
        let Some(stream) = &mut out.stream else { return };
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
