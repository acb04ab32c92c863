//! A connection to a peer: its state, and the positions of its two streams.
//!
//! Each direction begins on the socket, and may switch to shared memory between two frames ([`super::shared`]).
//!
//! Invariant: bytes are taken off a stream only up to the end of the current frame, so that data of a later step or
//! operation waits there until it is needed.

mod references;

use super::acceptor::Redial;
use super::auth::{ANSWER_BYTES, Dialler};
use super::error::Call;
use super::frame::{FRAME_MAX_BYTES, FrameKind, HEADER_BYTES, Header, REFERENCE_MAX_BYTES};
use super::shared::{SharedLink, Switch};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use std::io::{ErrorKind, IoSlice, Read};
use std::net::TcpStream;
use std::time::Instant;

pub(super) use references::{COPY_MAX_BYTES, PAGE_BYTES, Reference};

/// A peer and the connection to it.
#[derive(Debug, Default)]
pub(super) struct Link {
    pub(super) state: State,
    /// When to dial again after a failed attempt.
    pub(super) redial: Redial,
    pub(super) rx: Rx,
    pub(super) tx: Tx,
    /// The shared memory that has taken over, or is about to.
    pub(super) shared: Option<Box<SharedLink>>,
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
    /// Whether the peer has switched to shared memory.
    pub(super) is_shared: bool,
    /// Where the rest of the payload is in the peer's memory, if the frame is a reference.
    pub(super) reference: Option<Reference>,
}

impl Default for Rx {
    fn default() -> Self {
        Self {
            is_shared: false,
            reference: None,
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
    /// The kind of the frame in `header`, if it has no payload and belongs to no transfer.
    bare: Option<FrameKind>,
    /// The header of a message, or of a frame, after which this rank sends through shared memory.
    switch: Option<Switch>,
    /// Whether this rank has switched to shared memory.
    pub(super) is_shared: bool,
    /// The number of the reference that the peer is copying; `left_bytes` is its length.
    pub(super) reference: Option<u32>,
    /// Whether `header` is that of a reference.
    is_reference: bool,
    /// Whether frames say that this rank has the board.
    pub(super) has_board: bool,
    /// The number of the call that frames belong to.
    pub(super) number: u32,
}

impl Default for Tx {
    fn default() -> Self {
        Self {
            switch: None,
            is_shared: false,
            reference: None,
            is_reference: false,
            has_board: false,
            number: 0,
            header: [0; HEADER_BYTES],
            header_left: 0,
            left_bytes: 0,
            transfers: 0,
            announced: false,
            bare: None,
        }
    }
}

impl Rx {
    /// Return the header, once it is complete.
    pub(super) fn header(&self) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header.copy_from_slice(&self.bytes[..HEADER_BYTES]);
        header
    }

    /// Return whether the rest of the payload is in memory that this rank has mapped.
    pub(super) const fn is_mapped(&self) -> bool {
        matches!(self.reference, Some(Reference::Mapped(_)))
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

    /// Return whether no shared memory has been set up for a connection that could have some.
    pub(super) const fn is_unshared(&self) -> bool {
        self.shared.is_none() && matches!(self.state, State::Ready(_))
    }

    /// Let shared memory take over: this rank's direction switches after `switch`, between two frames.
    pub(super) fn share(&mut self, shared: Box<SharedLink>, switch: Switch) {
        self.shared = Some(shared);
        self.tx.switch = Some(switch);
    }

    /// Note that the peer has switched. Returns false if there is no shared memory.
    pub(super) const fn switch_rx(&mut self) -> bool {
        self.rx.is_shared = self.shared.is_some();
        self.rx.is_shared
    }

    /// Look whether the socket of a connection in shared memory has ended. `is_one_way`: the peer never sends over it.
    pub(super) fn check_socket(&mut self, is_one_way: bool) {
        let (Some(stream), Some(shared)) = (stream_of(&self.state), &mut self.shared) else { return };
        // After it has switched, a rank sends nothing here; whatever it sends instead is not looked at.
        if (self.rx.is_shared || is_one_way) && read(stream, &mut [0; 64]) == IoOutcome::Ended {
            shared.note_end();
        }
    }

    /// Return whether its socket has ended, though what came through shared memory may not be read yet.
    pub(super) fn has_socket_ended(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.is_ended())
    }

    /// Return whether a read from shared memory would return something other than `WouldBlock`.
    pub(super) fn is_shared_readable(&mut self) -> bool {
        matches!(self.state, State::Ready(_))
            && self.rx.is_shared
            // A reference can be copied at once.
            && (self.rx.reference.is_some() || self.shared.as_mut().is_some_and(|shared| shared.is_readable()))
    }

    /// Return whether a write to shared memory would return something other than `WouldBlock`.
    pub(super) fn is_shared_writable(&mut self) -> bool {
        let left_bytes = self.tx.left_bytes;
        let (true, Some(shared)) = (self.tx.is_shared, &mut self.shared) else { return false };
        match self.tx.reference {
            Some(number) => shared.reference_outcome(number, left_bytes) != IoOutcome::WouldBlock,
            None => shared.is_writable(),
        }
    }

    /// Read once, from where the peer sends.
    pub(super) fn read(&mut self, into: &mut [u8]) -> IoOutcome {
        match (&mut self.shared, stream_of(&self.state)) {
            (_, None) => IoOutcome::Ended,
            (Some(shared), Some(_)) if self.rx.is_shared => shared.read(into),
            (_, Some(stream)) => read(stream, into),
        }
    }

    /// Write once, to where this rank sends.
    pub(super) fn write(&mut self, head: &[u8], body: &[u8]) -> IoOutcome {
        match (&mut self.shared, stream_of(&self.state)) {
            (_, None) => IoOutcome::Ended,
            (Some(shared), Some(_)) if self.tx.is_shared => shared.write(head, body),
            (_, Some(stream)) => write(stream, head, body),
        }
    }

    /// Fill the first `len` bytes of the header buffer; `Bytes` means that they are complete.
    pub(super) fn fill_header(&mut self, len: usize) -> IoOutcome {
        let mut bytes = self.rx.bytes;
        while self.rx.filled < len {
            match self.read(&mut bytes[self.rx.filled..len]) {
                IoOutcome::Bytes(n) => self.rx.filled += n,
                other => {
                    self.rx.bytes = bytes;
                    return other;
                }
            }
        }
        (self.rx.bytes, self.rx.filled) = (bytes, 0);
        IoOutcome::Bytes(len)
    }

    /// Receive payload of the current frame.
    pub(super) fn read_payload(&mut self, into: &mut [u8]) -> IoOutcome {
        let len = into.len().min(self.rx.left_bytes);
        let moved = match self.rx.reference {
            Some(reference) => self.copy_reference(reference, &mut into[..len.min(COPY_MAX_BYTES)]),
            None => self.read(&mut into[..len]),
        };
        if let IoOutcome::Bytes(n) = moved {
            self.rx.left_bytes -= n;
        }
        moved
    }

    /// Send as much of a transfer, of which `sent` bytes are out, as the connection accepts. Returns payload bytes,
    /// `WouldBlock` or `Ended`; `Bytes(0)` means that only header bytes were sent.
    pub(super) fn write_transfer(&mut self, call: &Call, transfer: &[u8], sent: usize) -> IoOutcome {
        if let Some(number) = self.tx.reference {
            return self.finish_reference(number);
        }
        match self.flush_bare() {
            IoOutcome::Bytes(_) => {}
            other => return other,
        }
        let rest = &transfer[sent..];
        if self.tx.is_between_frames() {
            let max = rest.len().min(REFERENCE_MAX_BYTES);
            let shared = self.shared.as_mut().filter(|_| self.tx.is_shared);
            let place = shared.and_then(|shared| shared.place_of(&rest[..max]));
            let (kind, max, address) = match place {
                Some(place) => (FrameKind::MappedReference, max, place.to_wire()),
                // Only the peer uses it, through the kernel.
                None if self.sends_reference(rest.len()) => {
                    (FrameKind::Reference, max, rest.as_ptr().expose_provenance() as u64)
                }
                None => (FrameKind::Data, rest.len().min(FRAME_MAX_BYTES), 0),
            };
            self.tx.left_bytes = max;
            self.begin_frame(kind, call, (transfer.len() as u64, address));
        }
        let (header, is_reference) = (self.tx.header, self.tx.is_reference);
        let body = if is_reference { &[] } else { &rest[..self.tx.left_bytes] };
        match self.write(&header[HEADER_BYTES - self.tx.header_left..], body) {
            IoOutcome::Bytes(n) => {
                let payload = n.saturating_sub(self.tx.header_left);
                self.tx.header_left -= n - payload;
                self.tx.left_bytes -= payload;
                if is_reference && self.tx.header_left == 0 {
                    self.tx.reference = self.shared.as_mut().map(|shared| shared.number_reference());
                }
                IoOutcome::Bytes(payload)
            }
            other => other,
        }
    }

    /// Announce the operation in which this rank waits for the peer, unless a frame has done so.
    ///
    /// What the connection does not accept is sent by the next call, or before the next frame.
    pub(super) fn write_announce(&mut self, call: &Call) -> IoOutcome {
        let moved = self.flush_bare();
        if self.tx.announced || !matches!(moved, IoOutcome::Bytes(_)) {
            return moved;
        }
        self.begin_frame(FrameKind::Announce, call, (0, 0));
        self.flush_bare()
    }

    fn begin_frame(&mut self, kind: FrameKind, call: &Call, (transfer_bytes, address): (u64, u64)) {
        let shared = self.shared.as_mut().filter(|_| self.tx.is_shared);
        let has_news = shared.is_some_and(|shared| shared.take_news());
        self.tx.begin(kind, call, (transfer_bytes, address, has_news));
    }

    /// Send the rest of a frame without a payload, and switch to shared memory if that is due and no frame is under
    /// way; `Bytes` means that nothing is left.
    pub(super) fn flush_bare(&mut self) -> IoOutcome {
        loop {
            while let Some(kind) = self.tx.bare {
                let header = self.tx.header;
                match self.write(&header[HEADER_BYTES - self.tx.header_left..], &[]) {
                    IoOutcome::Bytes(n) => self.tx.header_left -= n,
                    other => return other,
                }
                if self.tx.header_left == 0 {
                    self.tx.bare = None;
                    self.tx.is_shared |= kind == FrameKind::Shared;
                }
            }
            match self.tx.switch {
                Some(switch) if self.tx.is_between_frames() => self.tx.begin_switch(&switch),
                _ => return IoOutcome::Bytes(0),
            }
        }
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
    pub(super) const fn begin_operation(&mut self, number: u32) {
        self.tx.number = number;
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

    fn begin(&mut self, kind: FrameKind, call: &Call, (transfer_bytes, address, has_news): (u64, u64, bool)) {
        let len_bytes = self.left_bytes;
        let (has_board, number) = (self.has_board, self.number);
        let bare = Header::bare(kind, *call, self.transfers);
        let header = Header { len_bytes, transfer_bytes, address, has_news, has_board, number, ..bare };
        self.header = header.emit();
        self.header_left = HEADER_BYTES;
        self.bare = (kind == FrameKind::Announce).then_some(kind);
        self.is_reference = matches!(kind, FrameKind::Reference | FrameKind::MappedReference);
        self.announced = true;
    }

    fn begin_switch(&mut self, switch: &Switch) {
        let len = switch.len_bytes;
        self.header[HEADER_BYTES - len..].copy_from_slice(&switch.bytes[..len]);
        self.header_left = len;
        (self.bare, self.switch) = (Some(FrameKind::Shared), None);
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
