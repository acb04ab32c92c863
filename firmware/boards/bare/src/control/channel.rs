//! What the bytes of a control connection travel in: the secure channel ([`sumac_hal::ctrl::secure`]), or nothing.
//!
//! Invariants:
//! - with a key, nothing but the handshake travels in clear, and a message only after the controller has proved that it
//!   has the key;
//! - what is received is buffered only up to the end of a handshake message or a record.

use super::ControlError;
use core::fmt;
use core::mem;
use core::ops::Range;
use smoltcp::socket::tcp::Socket;
use sumac_hal::ctrl::secure::{
    AwaitingReply, CHALLENGE_LEN, Initiator, Key, Opener, RECORD_LEN_MAX, REPLY_LEN, Sealer, record_len,
};

/// The maximum length of a message in either direction, in bytes: a tree whose parent has the maximum number of shards.
/// It fits a record.
pub(super) const MESSAGE_BYTES: usize = 4096;

const _: () = assert!(MESSAGE_BYTES <= sumac_hal::ctrl::secure::RECORD_PLAINTEXT_MAX);

#[expect(clippy::large_enum_variant, reason = "there is no heap that a handshake could be on")]
enum State {
    /// There is no connection, or it has failed.
    Closed,
    /// Without a key.
    Plain,
    /// The hello was queued.
    AwaitingChallenge(Initiator),
    /// The message was queued.
    AwaitingReply(AwaitingReply),
    /// The controller has proved that it has the key.
    Secure(Sealer, Opener),
}

/// The bytes of a connection.
pub(super) struct Channel {
    state: State,
    /// Part of a handshake message or of a record, or an opened record.
    received: [u8; RECORD_LEN_MAX],
    filled: usize,
    /// The part of an opened record that was not read.
    plaintext: Range<usize>,
    /// What is being sent.
    outgoing: [u8; RECORD_LEN_MAX],
    sent: usize,
    len: usize,
}

impl Channel {
    pub(super) const fn new() -> Self {
        Self {
            state: State::Closed,
            received: [0; RECORD_LEN_MAX],
            filled: 0,
            plaintext: 0..0,
            outgoing: [0; RECORD_LEN_MAX],
            sent: 0,
            len: 0,
        }
    }

    /// Forget the connection, and its keys.
    pub(super) fn close(&mut self) {
        self.state = State::Closed;
        (self.filled, self.plaintext, self.sent, self.len) = (0, 0..0, 0, 0);
    }

    /// Begin a connection: with a key, and 32 random bytes that are used for nothing else, by a handshake.
    pub(super) fn open(&mut self, handshake: Option<(&Key, [u8; 32])>) {
        self.close();
        self.state = match handshake {
            None => State::Plain,
            Some((key, ephemeral)) => {
                let (initiator, hello) = Initiator::new(key, ephemeral);
                self.queue(&hello);
                State::AwaitingChallenge(initiator)
            }
        };
    }

    /// Send what is queued; false if some is left.
    pub(super) fn flush(&mut self, socket: &mut Socket<'_>) -> Result<bool, ControlError> {
        if self.sent < self.len {
            let rest = &self.outgoing[self.sent..self.len];
            self.sent += socket.send_slice(rest).map_err(|_| ControlError::Closed)?;
        }
        Ok(self.sent == self.len)
    }

    /// Go on with the handshake; false while it is incomplete.
    pub(super) fn shake_hands(&mut self, socket: &mut Socket<'_>) -> Result<bool, ControlError> {
        loop {
            if !self.flush(socket)? {
                return Ok(false);
            }
            let wanted = match self.state {
                State::Closed => return Err(ControlError::Closed),
                State::Plain | State::Secure(..) => return Ok(true),
                State::AwaitingChallenge(_) => CHALLENGE_LEN,
                State::AwaitingReply(_) => REPLY_LEN,
            };
            if !self.fill(socket, wanted)? {
                return Ok(false);
            }
            self.filled = 0;
            self.state = match mem::replace(&mut self.state, State::Closed) {
                State::AwaitingChallenge(initiator) => {
                    let challenge = self.received.first_chunk().ok_or(ControlError::Closed)?;
                    let (awaiting, message) = initiator.handle_challenge(challenge)?;
                    self.queue(&message);
                    State::AwaitingReply(awaiting)
                }
                State::AwaitingReply(awaiting) => {
                    let reply = self.received.first_chunk().ok_or(ControlError::Closed)?;
                    let (sealer, opener) = awaiting.handle_reply(reply)?;
                    State::Secure(sealer, opener)
                }
                other => other,
            };
        }
    }

    /// Queue a message, of at most [`MESSAGE_BYTES`]; the previous one has been sent, and the handshake is complete.
    pub(super) fn send(&mut self, message: &[u8]) -> Result<(), ControlError> {
        match &mut self.state {
            State::Plain => self.queue(message),
            State::Secure(sealer, _) => {
                (self.sent, self.len) = (0, sealer.seal(message, &mut self.outgoing)?);
            }
            // Nothing is ever sent in clear for want of a handshake.
            State::Closed | State::AwaitingChallenge(_) | State::AwaitingReply(_) => return Err(ControlError::Closed),
        }
        Ok(())
    }

    /// Receive bytes of messages; return their number, which is 0 if there are none or no room.
    pub(super) fn receive(&mut self, socket: &mut Socket<'_>, into: &mut [u8]) -> Result<usize, ControlError> {
        if let State::Plain = self.state {
            return socket.recv_slice(into).map_err(|_| ControlError::Closed);
        }
        if self.plaintext.is_empty() && !self.open_record(socket)? {
            return Ok(0);
        }
        let plaintext = &self.received[self.plaintext.clone()];
        let len = plaintext.len().min(into.len());
        into[..len].copy_from_slice(&plaintext[..len]);
        self.plaintext.start += len;
        Ok(len)
    }

    /// Receive the rest of a record, and open it; false while it is incomplete.
    fn open_record(&mut self, socket: &mut Socket<'_>) -> Result<bool, ControlError> {
        if !self.fill(socket, HEADER_LEN)? {
            return Ok(false);
        }
        let len = record_len(&self.received[..self.filled])?.unwrap_or(HEADER_LEN);
        if !self.fill(socket, len)? {
            return Ok(false);
        }
        self.filled = 0;
        let State::Secure(_, opener) = &mut self.state else { return Err(ControlError::Closed) };
        let plaintext_len = opener.open(&mut self.received[..len])?.len();
        self.plaintext = HEADER_LEN..HEADER_LEN + plaintext_len;
        Ok(true)
    }

    /// Receive up to `wanted` bytes, at most what fits a record; false while some are missing.
    fn fill(&mut self, socket: &mut Socket<'_>, wanted: usize) -> Result<bool, ControlError> {
        if self.filled < wanted {
            let room = &mut self.received[self.filled..wanted];
            self.filled += socket.recv_slice(room).map_err(|_| ControlError::Closed)?;
        }
        Ok(self.filled >= wanted)
    }

    fn queue(&mut self, bytes: &[u8]) {
        self.outgoing[..bytes.len()].copy_from_slice(bytes);
        (self.sent, self.len) = (0, bytes.len());
    }
}

/// The length of a record's length field.
const HEADER_LEN: usize = 2;

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Closed => "closed",
            State::Plain => "plain",
            State::AwaitingChallenge(_) => "awaiting the challenge",
            State::AwaitingReply(_) => "awaiting the reply",
            State::Secure(..) => "secure",
        };
        f.debug_struct("Channel").field("state", &state).finish_non_exhaustive()
    }
}
