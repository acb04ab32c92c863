//! One connection to one peer: its state, and where its two streams stand.
//!
//! Invariant: bytes are read off the socket only up to the end of the frame that is being received, so that what
//! belongs to a later step or operation waits in the socket until it is wanted.

use super::acceptor::Redial;
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
    /// When to dial again, if a connection came to nothing.
    pub(super) redial: Redial,
    pub(super) rx: Rx,
    pub(super) tx: Tx,
}

/// How far the connection is.
#[derive(Debug, Default)]
pub(super) enum State {
    /// Not asked for yet, or, at the higher rank, not accepted yet.
    #[default]
    Idle,
    /// Dialled; the kernel has not answered.
    Connecting(TcpStream),
    /// Our hello is sent; theirs is awaited. No frame is sent before it, so that a refusal is never lost to a reset.
    Greeting(TcpStream),
    /// Frames flow.
    Ready(TcpStream),
    /// The peer has closed it.
    Ended,
}

/// The receiving side.
#[derive(Debug)]
pub(super) struct Rx {
    /// The header being received; during the greeting the hello.
    pub(super) bytes: [u8; HEADER_BYTES],
    pub(super) filled: usize,
    /// The frame whose payload is being received, or held back until its step.
    pub(super) frame: Option<Header>,
    /// What is left of its payload.
    pub(super) left_bytes: usize,
    /// The number of transfers received in this operation.
    pub(super) turn: u32,
    /// The head of an element whose tail has not come yet.
    pub(super) carry: [u8; 16],
    pub(super) carry_len: usize,
    /// The payload of an abort.
    pub(super) abort: Vec<u8>,
}

impl Default for Rx {
    fn default() -> Self {
        Self {
            bytes: [0; HEADER_BYTES],
            filled: 0,
            frame: None,
            left_bytes: 0,
            turn: 0,
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
    /// What is left to send of the frame's payload.
    pub(super) left_bytes: usize,
    /// The number of transfers sent in this operation.
    pub(super) turn: u32,
    /// Whether the peer can see from a frame which operation this rank is in.
    pub(super) announced: bool,
    /// Whether `header` is a want, to which no transfer belongs.
    is_want: bool,
}

impl Default for Tx {
    fn default() -> Self {
        Self { header: [0; HEADER_BYTES], header_left: 0, left_bytes: 0, turn: 0, announced: false, is_want: false }
    }
}

/// What one non-blocking system call came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moved {
    Bytes(usize),
    WouldBlock,
    /// End of stream, or the connection is broken.
    Ended,
}

impl Link {
    /// Return the socket, while there is one.
    pub(super) const fn stream(&self) -> Option<&TcpStream> {
        stream_of(&self.state)
    }

    /// Fill the first `len` bytes of the header buffer; `Bytes` means that they are complete.
    pub(super) fn fill_header(&mut self, len: usize) -> Moved {
        while self.rx.filled < len {
            let Some(stream) = stream_of(&self.state) else { return Moved::Ended };
            match read(stream, &mut self.rx.bytes[self.rx.filled..len]) {
                Moved::Bytes(n) => self.rx.filled += n,
                other => return other,
            }
        }
        self.rx.filled = 0;
        Moved::Bytes(len)
    }

    /// Receive payload of the present frame.
    pub(super) fn read_payload(&mut self, into: &mut [u8]) -> Moved {
        let Some(stream) = stream_of(&self.state) else { return Moved::Ended };
        let len = into.len().min(self.rx.left_bytes);
        let moved = read(stream, &mut into[..len]);
        if let Moved::Bytes(n) = moved {
            self.rx.left_bytes -= n;
        }
        moved
    }

    /// Send as much of a transfer, of which `sent` bytes are out, as the socket takes: payload bytes, `WouldBlock` or
    /// `Ended`. `Bytes(0)` means that only a header went out.
    pub(super) fn write_transfer(&mut self, call: &Call, transfer: &[u8], sent: usize) -> Moved {
        match self.flush_want() {
            Moved::Bytes(_) => {}
            other => return other,
        }
        let Some(stream) = stream_of(&self.state) else { return Moved::Ended };
        let (tx, rest) = (&mut self.tx, &transfer[sent..]);
        if tx.is_between_frames() {
            tx.left_bytes = rest.len().min(FRAME_MAX_BYTES);
            tx.begin(FrameKind::Data, call, transfer.len() as u64);
        }
        let header = &tx.header[HEADER_BYTES - tx.header_left..];
        match write(stream, header, &rest[..tx.left_bytes]) {
            Moved::Bytes(n) => {
                let payload = n.saturating_sub(tx.header_left);
                tx.header_left -= n - payload;
                tx.left_bytes -= payload;
                Moved::Bytes(payload)
            }
            other => other,
        }
    }

    /// Tell the peer in which operation this rank waits for it, unless a frame of the operation has.
    ///
    /// What the socket does not take goes out with the next call, or before the next frame.
    pub(super) fn write_want(&mut self, call: &Call) -> Moved {
        let moved = self.flush_want();
        if self.tx.announced || !matches!(moved, Moved::Bytes(_)) {
            return moved;
        }
        self.tx.begin(FrameKind::Want, call, 0);
        self.flush_want()
    }

    /// Send what is left of a want; `Bytes` means nothing.
    pub(super) fn flush_want(&mut self) -> Moved {
        while self.tx.is_want {
            let Some(stream) = stream_of(&self.state) else { return Moved::Ended };
            match write(stream, &self.tx.header[HEADER_BYTES - self.tx.header_left..], &[]) {
                Moved::Bytes(n) => self.tx.header_left -= n,
                other => return other,
            }
            self.tx.is_want = self.tx.header_left != 0;
        }
        Moved::Bytes(0)
    }

    /// Begin with a socket that was dialled, or, without one, later.
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

    /// Let frames flow, once both hellos are through.
    pub(super) fn make_ready(&mut self) {
        self.redial = Redial::default();
        self.state = match std::mem::take(&mut self.state) {
            State::Greeting(stream) => State::Ready(stream),
            other => other,
        };
    }

    /// Forget the counts of the last operation.
    pub(super) const fn begin_operation(&mut self) {
        self.rx.turn = 0;
        self.tx.turn = 0;
        self.tx.announced = false;
    }
}

impl Tx {
    /// Return whether the last frame is out, header and payload.
    pub(super) const fn is_between_frames(&self) -> bool {
        self.header_left == 0 && self.left_bytes == 0
    }

    fn begin(&mut self, kind: FrameKind, call: &Call, transfer_bytes: u64) {
        let len_bytes = self.left_bytes;
        self.header = Header { kind, call: *call, step: self.turn, len_bytes, transfer_bytes }.emit();
        self.header_left = HEADER_BYTES;
        self.is_want = kind == FrameKind::Want;
        self.announced = true;
    }
}

/// Borrow only the state, so that the rest of the link stays free.
const fn stream_of(state: &State) -> Option<&TcpStream> {
    match state {
        State::Connecting(stream) | State::Greeting(stream) | State::Ready(stream) => Some(stream),
        State::Idle | State::Ended => None,
    }
}

/// Read once, without blocking.
pub(super) fn read(mut stream: &TcpStream, into: &mut [u8]) -> Moved {
    loop {
        match stream.read(into) {
            Ok(0) => return Moved::Ended,
            Ok(n) => return Moved::Bytes(n),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Moved::WouldBlock,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return Moved::Ended,
        }
    }
}

/// Write once, without blocking, and without a signal where the peer is gone.
pub(super) fn write(stream: &TcpStream, head: &[u8], body: &[u8]) -> Moved {
    let pieces = [IoSlice::new(head), IoSlice::new(body)];
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    loop {
        match sendmsg(stream, &pieces, &mut SendAncillaryBuffer::default(), flags) {
            Ok(n) => return Moved::Bytes(n),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS) => return Moved::WouldBlock,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return Moved::Ended,
        }
    }
}
