//! A connection to a peer: its state, and the positions of its two streams.
//!
//! Invariant: bytes are read off the socket only up to the end of the current frame, so that data of a later step or
//! operation waits in the socket until it is needed.

use super::acceptor::Redial;
use super::auth::{ANSWER_BYTES, Dialler};
use super::error::Call;
use super::frame::{FRAME_MAX_BYTES, FrameKind, HEADER_BYTES, Header};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use std::io::{ErrorKind, IoSlice, Read};
use std::net::TcpStream;
use std::time::Instant;

/// A peer and the connection to it.
#[derive(Debug, Default)]
pub(super) struct Link {
    pub(super) state: State,
    /// When to dial again after a failed attempt.
    pub(super) redial: Redial,
    pub(super) rx: Rx,
    pub(super) tx: Tx,
}

/// State of a connection.
#[derive(Debug, Default)]
pub(super) enum State {
    /// Not needed yet, or, at the higher rank, not accepted yet.
    #[default]
    Idle,
    /// Dialled; the kernel has not reported the outcome.
    Connecting(TcpStream),
    /// Our hello is sent, the peer's answer awaited.
    AwaitingAnswer(TcpStream, Box<Dialler>),
    /// Our proof is sent, the verdict awaited. No frame is sent before it, so that a refusal is never lost to a reset.
    AwaitingVerdict(TcpStream),
    /// Frames may be exchanged.
    Ready(TcpStream),
    /// The peer has closed it.
    Ended,
}

/// The receiving side.
#[derive(Debug)]
pub(super) struct Rx {
    /// The header being received; during the handshake, the answer or the verdict.
    pub(super) bytes: [u8; RX_BYTES],
    pub(super) filled: usize,
    /// The frame whose payload is being received, or held until its step.
    pub(super) frame: Option<Header>,
    /// Bytes left of its payload.
    pub(super) left_bytes: usize,
    /// The number of transfers received in this operation.
    pub(super) transfers: u32,
    /// The first bytes of an element whose rest has not arrived.
    pub(super) carry: [u8; 16],
    pub(super) carry_len: usize,
    /// The payload of an abort frame.
    pub(super) abort: Vec<u8>,
}

impl Default for Rx {
    fn default() -> Self {
        Self {
            bytes: [0; RX_BYTES],
            filled: 0,
            frame: None,
            left_bytes: 0,
            transfers: 0,
            carry: [0; 16],
            carry_len: 0,
            abort: Vec::new(),
        }
    }
}

/// The sending side.
#[derive(Debug)]
pub(super) struct Tx {
    header: [u8; HEADER_BYTES],
    header_left: usize,
    /// Bytes left to send of the frame's payload.
    pub(super) left_bytes: usize,
    /// The number of transfers sent in this operation.
    pub(super) transfers: u32,
    /// Whether a frame has told the peer which operation this rank is in.
    pub(super) announced: bool,
    /// Whether `header` is an announce frame, which belongs to no transfer.
    is_announce: bool,
}

impl Default for Tx {
    fn default() -> Self {
        Self {
            header: [0; HEADER_BYTES],
            header_left: 0,
            left_bytes: 0,
            transfers: 0,
            announced: false,
            is_announce: false,
        }
    }
}

impl Rx {
    /// Return the header, once it is complete.
    pub(super) fn header(&self) -> [u8; HEADER_BYTES] {
        std::array::from_fn(|index| self.bytes[index])
    }
}

/// What a connection receives before a payload: at most an answer.
const RX_BYTES: usize = ANSWER_BYTES;
const _: () = assert!(HEADER_BYTES <= RX_BYTES);

/// Outcome of one non-blocking system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IoOutcome {
    Bytes(usize),
    WouldBlock,
    /// End of stream, or a broken connection.
    Ended,
}

impl Link {
    /// Return the socket, if there is one.
    pub(super) const fn stream(&self) -> Option<&TcpStream> {
        stream_of(&self.state)
    }

    /// Fill the first `len` bytes of the header buffer; `Bytes` means that they are complete.
    pub(super) fn fill_header(&mut self, len: usize) -> IoOutcome {
        while self.rx.filled < len {
            let Some(stream) = stream_of(&self.state) else { return IoOutcome::Ended };
            match read(stream, &mut self.rx.bytes[self.rx.filled..len]) {
                IoOutcome::Bytes(n) => self.rx.filled += n,
                other => return other,
            }
        }
        self.rx.filled = 0;
        IoOutcome::Bytes(len)
    }

    /// Receive payload of the current frame.
    pub(super) fn read_payload(&mut self, into: &mut [u8]) -> IoOutcome {
        let Some(stream) = stream_of(&self.state) else { return IoOutcome::Ended };
        let len = into.len().min(self.rx.left_bytes);
        let moved = read(stream, &mut into[..len]);
        if let IoOutcome::Bytes(n) = moved {
            self.rx.left_bytes -= n;
        }
        moved
    }

    /// Send as much of a transfer, of which `sent` bytes are out, as the socket accepts. Returns payload bytes,
    /// `WouldBlock` or `Ended`; `Bytes(0)` means that only header bytes were sent.
    pub(super) fn write_transfer(&mut self, call: &Call, transfer: &[u8], sent: usize) -> IoOutcome {
        match self.flush_announce() {
            IoOutcome::Bytes(_) => {}
            other => return other,
        }
        let Some(stream) = stream_of(&self.state) else { return IoOutcome::Ended };
        let (tx, rest) = (&mut self.tx, &transfer[sent..]);
        if tx.is_between_frames() {
            tx.left_bytes = rest.len().min(FRAME_MAX_BYTES);
            tx.begin(FrameKind::Data, call, transfer.len() as u64);
        }
        let header = &tx.header[HEADER_BYTES - tx.header_left..];
        match write(stream, header, &rest[..tx.left_bytes]) {
            IoOutcome::Bytes(n) => {
                let payload = n.saturating_sub(tx.header_left);
                tx.header_left -= n - payload;
                tx.left_bytes -= payload;
                IoOutcome::Bytes(payload)
            }
            other => other,
        }
    }

    /// Announce the operation in which this rank waits for the peer, unless a frame has done so.
    ///
    /// What the socket does not accept is sent by the next call, or before the next frame.
    pub(super) fn write_announce(&mut self, call: &Call) -> IoOutcome {
        let moved = self.flush_announce();
        if self.tx.announced || !matches!(moved, IoOutcome::Bytes(_)) {
            return moved;
        }
        self.tx.begin(FrameKind::Announce, call, 0);
        self.flush_announce()
    }

    /// Send the rest of an announce frame; `Bytes` means that nothing is left.
    pub(super) fn flush_announce(&mut self) -> IoOutcome {
        while self.tx.is_announce {
            let Some(stream) = stream_of(&self.state) else { return IoOutcome::Ended };
            match write(stream, &self.tx.header[HEADER_BYTES - self.tx.header_left..], &[]) {
                IoOutcome::Bytes(n) => self.tx.header_left -= n,
                other => return other,
            }
            self.tx.is_announce = self.tx.header_left != 0;
        }
        IoOutcome::Bytes(0)
    }

    /// Take over a dialled socket; without one, retry later.
    pub(super) fn dialled(&mut self, stream: Option<TcpStream>) {
        self.rx.filled = 0;
        self.state = match stream {
            Some(stream) => State::Connecting(stream),
            None => {
                self.redial.fail(Instant::now());
                State::Idle
            }
        };
    }

    /// Enter `Ready` once the peer has accepted the connection.
    pub(super) fn make_ready(&mut self) {
        self.redial = Redial::default();
        self.state = match std::mem::take(&mut self.state) {
            State::AwaitingVerdict(stream) => State::Ready(stream),
            other => other,
        };
    }

    /// Reset the counts of the last operation.
    pub(super) const fn begin_operation(&mut self) {
        self.rx.transfers = 0;
        self.tx.transfers = 0;
        self.tx.announced = false;
    }
}

impl Tx {
    /// Return whether the last frame is fully sent, header and payload.
    pub(super) const fn is_between_frames(&self) -> bool {
        self.header_left == 0 && self.left_bytes == 0
    }

    fn begin(&mut self, kind: FrameKind, call: &Call, transfer_bytes: u64) {
        let len_bytes = self.left_bytes;
        self.header = Header { kind, call: *call, step: self.transfers, len_bytes, transfer_bytes }.emit();
        self.header_left = HEADER_BYTES;
        self.is_announce = kind == FrameKind::Announce;
        self.announced = true;
    }
}

/// Borrow only the state, so that the rest of the link stays free.
const fn stream_of(state: &State) -> Option<&TcpStream> {
    match state {
        State::Connecting(stream)
        | State::AwaitingAnswer(stream, _)
        | State::AwaitingVerdict(stream)
        | State::Ready(stream) => Some(stream),
        State::Idle | State::Ended => None,
    }
}

/// Read once, without blocking.
pub(super) fn read(mut stream: &TcpStream, into: &mut [u8]) -> IoOutcome {
    loop {
        match stream.read(into) {
            Ok(0) => return IoOutcome::Ended,
            Ok(n) => return IoOutcome::Bytes(n),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return IoOutcome::WouldBlock,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return IoOutcome::Ended,
        }
    }
}

/// Write once, without blocking, and without SIGPIPE if the peer is gone.
pub(super) fn write(stream: &TcpStream, head: &[u8], body: &[u8]) -> IoOutcome {
    let pieces = [IoSlice::new(head), IoSlice::new(body)];
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    loop {
        match sendmsg(stream, &pieces, &mut SendAncillaryBuffer::default(), flags) {
            Ok(n) => return IoOutcome::Bytes(n),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS) => return IoOutcome::WouldBlock,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return IoOutcome::Ended,
        }
    }
}
