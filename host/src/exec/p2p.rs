//! Point-to-point channels: one connection for each direction between two ranks, for messages from one to the other.
//!
//! Messages use connections of their own because a stream is ordered. A frame of a schedule that its receiver has not
//! entered waits in its stream; a message behind it, which the receiver waits for before it enters the schedule, would
//! never arrive. On a channel, messages wait only for messages.
//!
//! The sender dials when it first has something to send. Each message is a header and its payload: magic `SMCM`, tag
//! (u32), number on this channel (u64), length in bytes (u64), and the address of the payload in the sender's memory
//! (u64), all little-endian. A payload with an address does not follow; the receiver copies it ([`super::shared`]). A
//! header of zeros with magic `SMCS` says that what follows comes through shared memory.
//!
//! Invariant: the n-th message sent from a to b is the n-th received at b from a. Bytes are read off a channel only
//! into a posted receive; until then they wait in the socket, and hold back the sender. Only a header is read before,
//! where a receive from any rank is posted: its tag says whether that takes the message.

use super::error::ExecError;
use super::link::{IoOutcome, Link, Reference, State};
use super::message::{Direction, Message, MessageBuffer, Ticket};
use rustix::event::PollFlags;
use std::collections::VecDeque;
use std::fmt;
use std::net::TcpStream;
use sumac_hal::ids::Rank;

/// Where the payload of a message is.
pub(super) enum Slot {
    /// Owned by the channel until the message is complete.
    Owned(Box<dyn MessageBuffer>),
    /// Borrowed from the call that waits for it: the index among its messages.
    Borrowed(usize),
}

/// A posted message that is not complete.
pub(super) struct PostedMessage {
    pub(super) ticket: Ticket,
    pub(super) tag: u32,
    pub(super) slot: Slot,
    /// Bytes moved, header included.
    moved_bytes: usize,
}

impl PostedMessage {
    pub(super) const fn new(ticket: Ticket, tag: u32, slot: Slot) -> Self {
        Self { ticket, tag, slot, moved_bytes: 0 }
    }

    fn bytes<'a>(&'a self, borrowed: &'a [Message<'_>]) -> &'a [u8] {
        match &self.slot {
            Slot::Owned(buffer) => buffer.bytes(),
            Slot::Borrowed(index) => borrowed[*index].bytes(),
        }
    }

    fn bytes_mut<'a>(&'a mut self, borrowed: &'a mut [Message<'_>]) -> &'a mut [u8] {
        match &mut self.slot {
            Slot::Owned(buffer) => buffer.bytes_mut(),
            Slot::Borrowed(index) => borrowed[*index].bytes_mut(),
        }
    }
}

/// One direction between this rank and a peer.
#[derive(Default)]
pub(super) struct P2pChannel {
    pub(super) link: Link,
    pub(super) posts: VecDeque<PostedMessage>,
    /// The number of complete messages.
    number: u64,
    /// The header of a message that no receive has taken.
    header: Option<Header>,
    /// The address of the payload that is being sent, if it does not follow its header.
    reference: Option<u64>,
}

impl fmt::Debug for P2pChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let open = self.posts.len();
        f.debug_struct("P2pChannel").field("state", &self.link.state).field("open", &open).finish_non_exhaustive()
    }
}

/// A message's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    tag: u32,
    number: u64,
    len_bytes: u64,
    /// Where the payload is in the sender's memory; 0 if it follows.
    address: u64,
}

impl Header {
    fn emit(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&self.tag.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.number.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.len_bytes.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.address.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let tag = u32::from_le_bytes(std::array::from_fn(|index| bytes[4 + index]));
        (bytes[0..4] == MAGIC).then(|| Self { tag, number: long(8), len_bytes: long(16), address: long(24) })
    }
}

impl P2pChannel {
    /// Return whether a message goes on as soon as the peer does; `from_any`: receives from any rank are posted.
    fn is_awaiting(&self, from_any: bool) -> bool {
        !self.posts.is_empty() || from_any && self.header.is_none()
    }

    /// Return whether a message waits that no receive takes.
    pub(super) const fn holds_message(&self) -> bool {
        self.header.is_some()
    }

    /// Return the stream to poll for an open message, and the poll interest; `from_any` as in [`Self::is_due`].
    pub(super) fn interest(&self, direction: Direction, from_any: bool) -> Option<(&TcpStream, PollFlags)> {
        let interest = match (&self.link.state, direction) {
            // What is left of it is in shared memory.
            _ if !self.is_awaiting(from_any) || self.link.has_socket_ended() => return None,
            (State::Connecting(_), _) => PollFlags::OUT,
            (State::Ready(_), Direction::Send) if !self.link.tx.is_shared => PollFlags::OUT,
            _ => PollFlags::IN,
        };
        self.link.stream().map(|stream| (stream, interest))
    }

    /// Return whether an open message can go on in shared memory; `from_any`: receives from any rank are posted, and
    /// this is a channel from a peer.
    pub(super) fn is_due(&mut self, from_any: bool) -> bool {
        self.is_awaiting(from_any) && (self.link.is_shared_readable() || self.link.is_shared_writable())
    }

    /// Send what the connection accepts. Complete messages go to `done`; returns the number of payload bytes moved, if
    /// any byte was.
    pub(super) fn send(
        &mut self,
        to: Rank,
        borrowed: &[Message<'_>],
        done: &mut impl FnMut(PostedMessage),
    ) -> Result<Option<usize>, ExecError> {
        let (mut payload, mut any) = (0, false);
        for _ in 0..CALLS_PER_TURN {
            let (Some(post), State::Ready(_)) = (self.posts.front(), &self.link.state) else { break };
            let bytes = post.bytes(borrowed);
            let (at, len) = (post.moved_bytes, bytes.len());
            let n = match send_some(&mut self.link, &mut self.reference, (post.tag, self.number), bytes, at) {
                IoOutcome::WouldBlock => break,
                IoOutcome::Ended => return Err(ExecError::RankLost { rank: to }),
                IoOutcome::Bytes(n) => n,
            };
            any = true;
            payload += (at + n).saturating_sub(HEADER_BYTES) - at.saturating_sub(HEADER_BYTES);
            if self.advance(n, HEADER_BYTES + len) {
                self.posts.pop_front().into_iter().for_each(&mut *done);
            }
        }
        Ok(any.then_some(payload))
    }

    /// Receive into the posted receives, and those `from_any` rank; returns whether any byte was moved.
    pub(super) fn receive(
        &mut self,
        (from, to): (Rank, Rank),
        from_any: &mut VecDeque<PostedMessage>,
        borrowed: &mut [Message<'_>],
        done: &mut impl FnMut(PostedMessage),
    ) -> Result<bool, ExecError> {
        let mut any = false;
        if matches!(self.link.state, State::Ended) && !self.posts.is_empty() {
            return Err(ExecError::RankLost { rank: from });
        }
        for _ in 0..CALLS_PER_TURN {
            let is_ready = matches!(self.link.state, State::Ready(_));
            if !is_ready || self.posts.is_empty() && from_any.is_empty() {
                break;
            }
            let moved = match self.posts.front_mut().filter(|post| post.moved_bytes >= HEADER_BYTES) {
                Some(post) => {
                    let at = post.moved_bytes - HEADER_BYTES;
                    self.link.read_payload(&mut post.bytes_mut(borrowed)[at..])
                }
                None => match self.receive_header(from)? {
                    IoOutcome::Bytes(_) if self.header.is_none() => {
                        any = true;
                        continue;
                    }
                    IoOutcome::Bytes(_) if self.match_receive((from, to), from_any, borrowed)? => {
                        IoOutcome::Bytes(HEADER_BYTES)
                    }
                    // No receive takes this message yet.
                    IoOutcome::Bytes(_) => break,
                    other => other,
                },
            };
            match moved {
                IoOutcome::WouldBlock => break,
                IoOutcome::Ended => {
                    self.link.state = State::Ended;
                    if self.posts.is_empty() {
                        break;
                    }
                    return Err(ExecError::RankLost { rank: from });
                }
                IoOutcome::Bytes(n) => {
                    any = true;
                    let len = self.posts.front().map_or(0, |post| post.bytes(borrowed).len());
                    if self.advance(n, HEADER_BYTES + len) {
                        self.posts.pop_front().into_iter().for_each(&mut *done);
                    }
                }
            }
        }
        Ok(any)
    }

    /// Receive the header of the next message, unless that was done. [`Self::header`] has it; it has none if this was
    /// the switch to shared memory.
    fn receive_header(&mut self, from: Rank) -> Result<IoOutcome, ExecError> {
        if self.header.is_some() {
            return Ok(IoOutcome::Bytes(0));
        }
        let received = self.link.fill_header(HEADER_BYTES);
        if !matches!(received, IoOutcome::Bytes(_)) {
            return Ok(received);
        }
        if self.link.rx.bytes[..HEADER_BYTES] == SWITCH {
            if !self.link.switch_rx() {
                return Err(ExecError::protocol(from, "a switch to shared memory that is not shared"));
            }
            return Ok(received);
        }
        let header = Header::parse(&std::array::from_fn(|index| self.link.rx.bytes[index]));
        let header = header.ok_or_else(|| ExecError::protocol(from, "a message without a valid header"))?;
        if header.number != self.number {
            return Err(ExecError::protocol(from, "a message out of order"));
        }
        self.header = Some(header);
        Ok(received)
    }

    /// Find the receive that takes the message of the header: the first one from this peer, or one from any rank with
    /// its tag, whichever was posted first. It is then the first of this channel. Returns false if there is none.
    fn match_receive(
        &mut self,
        (from, to): (Rank, Rank),
        from_any: &mut VecDeque<PostedMessage>,
        borrowed: &[Message<'_>],
    ) -> Result<bool, ExecError> {
        let Some(header) = self.header else { return Ok(false) };
        let first = self.posts.front().map(|post| post.ticket);
        let is_earlier = |post: &PostedMessage| first.is_none_or(|first| post.ticket < first);
        let found = from_any.iter().position(|post| post.tag == header.tag && is_earlier(post));
        if let Some(post) = found.and_then(|index| from_any.remove(index)) {
            self.posts.push_front(post);
        }
        let Some(post) = self.posts.front() else { return Ok(false) };
        let expected = post.bytes(borrowed).len();
        if (header.tag, header.len_bytes) != (post.tag, expected as u64) {
            return Err(ExecError::Message {
                from,
                to,
                number: self.number,
                sent: (header.tag, header.len_bytes),
                expected: (post.tag, expected as u64),
            });
        }
        self.header = None;
        self.link.rx.left_bytes = expected;
        let reference = Reference::Address(header.address);
        self.link.rx.reference = (header.address != 0 && expected != 0).then_some(reference);
        Ok(true)
    }

    /// Record that `n` bytes of the first message have moved; returns whether it is complete.
    fn advance(&mut self, n: usize, total: usize) -> bool {
        let Some(post) = self.posts.front_mut() else { return false };
        post.moved_bytes += n;
        let is_complete = post.moved_bytes == total;
        self.number += u64::from(is_complete);
        is_complete
    }
}

/// Send the header or the payload of a message, of which `at` bytes are out, or see whether it was copied.
fn send_some(
    link: &mut Link,
    reference: &mut Option<u64>,
    (tag, number): (u32, u64),
    bytes: &[u8],
    at: usize,
) -> IoOutcome {
    if let Some(number) = link.tx.reference {
        return link.finish_reference(number);
    }
    if at == 0 {
        match link.flush_bare() {
            IoOutcome::Bytes(_) => {}
            other => return other,
        }
        *reference = link.sends_reference(bytes.len()).then(|| bytes.as_ptr().expose_provenance() as u64);
    }
    let header = Header { tag, number, len_bytes: bytes.len() as u64, address: reference.unwrap_or(0) }.emit();
    let body = if reference.is_some() { &[] } else { &bytes[at.saturating_sub(HEADER_BYTES)..] };
    let sent = link.write(&header[at.min(HEADER_BYTES)..], body);
    if reference.is_some() && matches!(sent, IoOutcome::Bytes(n) if at + n == HEADER_BYTES) {
        link.begin_reference(bytes.len());
    }
    sent
}

const MAGIC: [u8; 4] = *b"SMCM";
const HEADER_BYTES: usize = 32;
/// The header after which a channel goes through shared memory.
pub(super) const SWITCH: [u8; HEADER_BYTES] = *b"SMCS\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
/// System calls on one channel before the others get their turn.
const CALLS_PER_TURN: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_has_golden_bytes() {
        let header = Header { tag: 0x0102_0304, number: 0x1112, len_bytes: 0x2122_2324_2526, address: 0x3132 };
        let golden = *b"SMCM\x04\x03\x02\x01\x12\x11\0\0\0\0\0\0\x26\x25\x24\x23\x22\x21\0\0\
                        \x32\x31\0\0\0\0\0\0";
        assert_eq!(header.emit(), golden);
        assert_eq!(Header::parse(&golden), Some(header));
        assert_eq!(Header::parse(&[0; HEADER_BYTES]), None);
    }
}
