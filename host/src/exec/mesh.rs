//! The connections of one rank: dialled or accepted when first needed, checked by a handshake, and kept.
//!
//! For schedules the lower rank dials and the higher accepts; for messages the sender dials ([`super::p2p`]). The
//! dialling side must present the job token, its rank and the rank that it wants. Anything else is dropped and counted,
//! and never receives more bytes than it sent.

use super::acceptor::{Acceptor, dial};
use super::error::{ExecError, MeshError};
use super::frame::{HELLO_BYTES, Hello, HelloKind, VERSION};
use super::handshake::Pending;
use super::link::{IoOutcome, Link, State, write};
use super::message::Messages;
use super::poll::PollTarget;
use super::run::Progress;
use crate::schedule::Place;
use rustix::event::PollFd;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Instant;
use sumac_hal::ids::Rank;

/// Identifies a job on its connections: ranks of different jobs refuse each other.
///
/// It guards against mix-ups and unknown peers, not against someone who reads the traffic.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct JobToken(pub u64);

impl std::fmt::Debug for JobToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JobToken(..)")
    }
}

/// One rank's connections to the others.
#[derive(Debug)]
pub struct Mesh {
    pub(super) place: Place,
    pub(super) token: JobToken,
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) acceptor: Acceptor,
    /// One for each rank; this rank's own stays idle.
    pub(super) links: Vec<Link>,
    /// Accepted, and not yet identified.
    pub(super) pending: Vec<Pending>,
    /// One-shot announcements to lower ranks that have not dialled.
    pub(super) announcements: Vec<(Rank, TcpStream)>,
    /// Point-to-point messages.
    pub(super) messages: Messages,
    pub(super) poisoned: Option<ExecError>,
    pub(super) foreign_dropped: u64,
    pub(super) sent_bytes: u64,
    /// Received partial elements until they are combined: small enough to stay in L2.
    pub(super) scratch: Vec<u8>,
    /// Accumulators until they are rounded, if they do not fit the place of their result.
    pub(super) spare: Vec<u8>,
    /// Partial values, where they do not lie in the caller's buffer.
    pub(super) work: Vec<u8>,
    pub(super) sends: Vec<Progress>,
    pub(super) recvs: Vec<Progress>,
    pub(super) pollfds: Vec<PollFd<'static>>,
    pub(super) ready: Vec<PollTarget>,
}

impl Mesh {
    /// Set up the mesh of `place`. Connections are made when operations need them.
    ///
    /// `addresses` holds each rank's listener, in rank order. It must be complete only now: bind the listener first,
    /// publish its address, then collect the others'.
    ///
    /// # Errors
    /// [`MeshError`] if there is not one address for each rank, or the listener is unusable.
    pub fn new(
        place: Place,
        token: JobToken,
        listener: TcpListener,
        addresses: Vec<SocketAddr>,
    ) -> Result<Self, MeshError> {
        if addresses.len() != place.ranks() as usize {
            return Err(MeshError::Addresses { addresses: addresses.len(), ranks: place.ranks() });
        }
        let acceptor = Acceptor::new(listener).map_err(MeshError::Listener)?;
        Ok(Self {
            place,
            token,
            acceptor,
            messages: Messages::new(addresses.len()),
            links: addresses.iter().map(|_| Link::default()).collect(),
            addresses,
            pending: Vec::new(),
            announcements: Vec::new(),
            poisoned: None,
            foreign_dropped: 0,
            sent_bytes: 0,
            scratch: vec![0; SCRATCH_BYTES],
            spare: vec![0; SCRATCH_BYTES],
            work: Vec::new(),
            sends: Vec::new(),
            recvs: Vec::new(),
            pollfds: Vec::new(),
            ready: Vec::new(),
        })
    }

    /// Return the rank, and the size of its communicator.
    pub const fn place(&self) -> Place {
        self.place
    }

    /// Return the payload bytes sent since the mesh was set up, without frame headers.
    pub const fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Return the number of connections dropped because they were not a peer's.
    pub const fn foreign_dropped(&self) -> u64 {
        self.foreign_dropped
    }

    /// Return the error that ended the mesh, if one did.
    pub const fn error(&self) -> Option<&ExecError> {
        self.poisoned.as_ref()
    }

    pub(super) const fn rank(&self) -> Rank {
        self.place.rank()
    }

    pub(super) const fn hello(&self, kind: HelloKind, to: Rank) -> Hello {
        Hello { version: VERSION, kind, token: self.token, from: self.place.rank(), to }
    }

    /// Start connecting to `peer`.
    pub(super) fn dial(&mut self, peer: Rank) -> Result<(), ExecError> {
        let dialled = self.connecting(peer)?;
        self.links[peer.0 as usize].dialled(dialled);
        Ok(())
    }

    /// Redial peers that have not accepted, once their pause is over.
    pub(super) fn redial(&mut self, now: Instant) -> Result<(), ExecError> {
        for index in 0..self.links.len() {
            let link = &self.links[index];
            if link.redial.at().is_some_and(|at| at <= now) && matches!(link.state, State::Idle) {
                self.dial(Rank(index as u32))?;
            }
        }
        Ok(())
    }

    /// Return when the next timer is due: to dial, to accept or to close a pending connection.
    pub(super) fn wake_at(&self, now: Instant) -> Option<Instant> {
        let waits = |link: &&Link| matches!(link.state, State::Idle);
        let channels =
            self.messages.out.iter().filter(|channel| !channel.posts.is_empty()).map(|channel| &channel.link);
        let dials = self.links.iter().chain(channels).filter(waits).filter_map(|link| link.redial.at());
        dials.chain(self.acceptor.resume_at(now)).chain(self.hello_limit()).min()
    }

    /// Return a connecting socket; `None` for a transient shortage that warrants a retry.
    pub(super) fn connecting(&self, peer: Rank) -> Result<Option<TcpStream>, ExecError> {
        let address = self.addresses[peer.0 as usize];
        dial(address).map_err(|error| match error.kind() {
            ErrorKind::ConnectionRefused => ExecError::RankLost { rank: peer },
            _ => ExecError::Io { rank: self.rank(), what: format!("connecting to {peer} at {address}: {error}") },
        })
    }

    /// Advance a dialled connection.
    pub(super) fn advance(&mut self, peer: Rank) -> Result<(), ExecError> {
        let hello = self.hello(HelloKind::Peer, peer);
        advance(&mut self.links[peer.0 as usize], &hello)
    }
}

/// Advance a dialled connection: send our hello, or check the peer's.
///
/// A connection that ends without an answer may have been crowded out by unknown peers, so it is dialled again: if the
/// peer is gone, that is refused.
pub(super) fn advance(link: &mut Link, ours: &Hello) -> Result<(), ExecError> {
    let (own, peer) = (ours.from, ours.to);
    let lost = Err(ExecError::RankLost { rank: peer });
    match std::mem::take(&mut link.state) {
        State::Connecting(stream) => {
            // A new socket's buffer holds a hello; one that does not is broken.
            match stream.take_error() {
                Ok(None) if write(&stream, &ours.emit(), &[]) == IoOutcome::Bytes(HELLO_BYTES) => {
                    link.state = State::Handshake(stream);
                }
                Ok(Some(error)) if error.kind() != ErrorKind::ConnectionReset => return lost,
                _ => link.dialled(None),
            }
            Ok(())
        }
        State::Handshake(stream) => {
            link.state = State::Handshake(stream);
            match link.fill_header(HELLO_BYTES) {
                IoOutcome::WouldBlock => return Ok(()),
                IoOutcome::Ended => {
                    link.dialled(None);
                    return Ok(());
                }
                IoOutcome::Bytes(_) => {}
            }
            let bytes = std::array::from_fn(|index| link.rx.bytes[index]);
            match Hello::parse(&bytes) {
                Some(Hello { kind: HelloKind::Refusal(reason), .. }) => {
                    Err(ExecError::Refused { rank: own, by: peer, reason })
                }
                Some(answer) if answer == (Hello { from: peer, to: own, ..*ours }) => {
                    link.make_ready();
                    Ok(())
                }
                _ => Err(ExecError::protocol(peer, "a hello that does not match the address list")),
            }
        }
        other => {
            link.state = other;
            Ok(())
        }
    }
}

const SCRATCH_BYTES: usize = 128 << 10;
