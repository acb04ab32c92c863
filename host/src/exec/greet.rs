//! Accepted connections, until they have said who they are.
//!
//! Invariants: nothing of a stranger gets past the hello; at most [`PENDING_MAX`] strangers wait at a time, the
//! oldest makes room; an answer is never longer than what was said.

use super::error::{Call, ExecError, Refusal};
use super::frame::{
    ABORT_MAX_BYTES, AbortFrame, FrameKind, HEADER_BYTES, HELLO_BYTES, Header, Hello, HelloKind, VERSION,
};
use super::link::{Moved, State, read, write};
use super::mesh::Mesh;
use std::io::ErrorKind;
use std::net::TcpStream;
use sumac_hal::ids::Rank;

/// An accepted connection that has not finished its hello.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) stream: TcpStream,
    bytes: [u8; HELLO_BYTES + HEADER_BYTES + ABORT_MAX_BYTES],
    filled: usize,
}

/// What became of a pending connection.
#[derive(Debug)]
pub(super) enum Greeted {
    /// More bytes are needed.
    Waiting,
    /// It is among the links now.
    Joined,
    /// It was not a peer's.
    Dropped,
    /// A courier brought an error.
    Told(ExecError),
    /// A courier says in which operation its rank waits for this one.
    Wanted(Call),
}

impl Mesh {
    /// Accept what waits at the listener, at most [`PENDING_MAX`] connections at a time.
    pub(super) fn accept(&mut self) -> Result<(), ExecError> {
        for _ in 0..PENDING_MAX {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => break,
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted => continue,
                    _ => {
                        let what = format!("accepting a connection: {error}");
                        return Err(ExecError::Io { rank: self.rank(), what });
                    }
                },
            };
            if self.pending.len() == PENDING_MAX {
                self.pending.remove(0);
                self.foreign_dropped += 1;
            }
            if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_ok() {
                let bytes = [0; HELLO_BYTES + HEADER_BYTES + ABORT_MAX_BYTES];
                self.pending.push(Pending { stream, bytes, filled: 0 });
            }
        }
        Ok(())
    }

    /// Take pending connection `index` as far as its bytes go; every outcome but `Waiting` removes it.
    pub(super) fn greet(&mut self, index: usize) -> Greeted {
        let outcome = match self.pending[index].hello() {
            Err(Moved::WouldBlock) => return Greeted::Waiting,
            Err(_) | Ok(None) => Greeted::Dropped,
            Ok(Some(hello)) => match self.judge(&hello) {
                Ok(HelloKind::Courier) => match self.pending[index].message(hello.from) {
                    Err(Moved::WouldBlock) => return Greeted::Waiting,
                    Err(_) => Greeted::Dropped,
                    Ok(message) => message,
                },
                Ok(kind) => return self.join(index, kind, hello.from),
                Err(reason) => {
                    let refusal = self.hello(HelloKind::Refusal(reason), hello.from);
                    // As far as it goes: a stranger that does not listen is dropped all the same.
                    let _ = write(&self.pending[index].stream, &refusal.emit(), &[]);
                    Greeted::Dropped
                }
            },
        };
        self.pending.remove(index);
        self.foreign_dropped += u64::from(matches!(outcome, Greeted::Dropped));
        outcome
    }

    /// Decide on a hello.
    fn judge(&self, hello: &Hello) -> Result<HelloKind, Refusal> {
        if hello.version != VERSION {
            return Err(Refusal::Version);
        }
        if hello.token != self.token {
            return Err(Refusal::Token);
        }
        let is_other = hello.from.0 < self.place.ranks() && hello.from != self.rank() && hello.to == self.rank();
        let is_idle = |rank: Rank| matches!(self.links[rank.0 as usize].state, State::Idle);
        let is_closed = |rank: Rank| matches!(self.messages.from[rank.0 as usize].link.state, State::Idle);
        match hello.kind {
            HelloKind::Courier if is_other => Ok(hello.kind),
            HelloKind::Lane if is_other && is_closed(hello.from) => Ok(hello.kind),
            HelloKind::Peer if is_other && hello.from < self.rank() && is_idle(hello.from) => Ok(hello.kind),
            _ => Err(Refusal::Rank),
        }
    }

    /// Answer a peer's hello and let its frames flow.
    fn join(&mut self, index: usize, kind: HelloKind, peer: Rank) -> Greeted {
        let stream = self.pending.remove(index).stream;
        let answer = self.hello(kind, peer).emit();
        let link = match kind {
            HelloKind::Lane => &mut self.messages.from[peer.0 as usize].link,
            _ => &mut self.links[peer.0 as usize],
        };
        if write(&stream, &answer, &[]) == Moved::Bytes(HELLO_BYTES) {
            link.state = State::Ready(stream);
        } else {
            link.state = State::Ended;
        }
        Greeted::Joined
    }
}

impl Pending {
    /// Return the hello once it is here, `None` if it is none.
    fn hello(&mut self) -> Result<Option<Hello>, Moved> {
        self.fill(HELLO_BYTES)?;
        Ok(Hello::parse(&std::array::from_fn(|index| self.bytes[index])))
    }

    /// Return what a courier brings, once it is here.
    fn message(&mut self, from: Rank) -> Result<Greeted, Moved> {
        const BODY: usize = HELLO_BYTES + HEADER_BYTES;
        self.fill(BODY)?;
        let bytes = std::array::from_fn(|index| self.bytes[HELLO_BYTES + index]);
        match Header::parse(from, &bytes) {
            Ok(Header { kind: FrameKind::Want, call, .. }) => Ok(Greeted::Wanted(call)),
            Ok(Header { kind: FrameKind::Abort, len_bytes, .. }) => {
                self.fill(BODY + len_bytes)?;
                Ok(Greeted::Told(AbortFrame::parse(from, &self.bytes[BODY..BODY + len_bytes])))
            }
            _ => Ok(Greeted::Dropped),
        }
    }

    /// Receive up to byte `end`, which is within the longest that a courier says.
    fn fill(&mut self, end: usize) -> Result<(), Moved> {
        while self.filled < end {
            match read(&self.stream, &mut self.bytes[self.filled..end]) {
                Moved::Bytes(n) => self.filled += n,
                other => return Err(other),
            }
        }
        Ok(())
    }
}

/// The most strangers that wait at a time.
const PENDING_MAX: usize = 64;
