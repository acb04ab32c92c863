//! The connections of one rank: dialled or accepted when first needed, checked by a hello, and kept.
//!
//! For schedules the lower rank dials and the higher accepts; for messages the sender dials ([`super::lane`]). Whoever connects must say the job's token, its rank and the rank it
//! wants; what does not fit is dropped and counted, and never gets an answer longer than what it sent.

use super::error::{ExecError, MeshError};
use super::frame::{HELLO_BYTES, Hello, HelloKind, VERSION};
use super::greet::Pending;
use super::link::{Link, Moved, State, write};
use super::message::Messages;
use super::run::Progress;
use super::watch::Watched;
use crate::coll::Place;
use rustix::event::PollFd;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
use std::net::{SocketAddr, TcpListener, TcpStream};
use sumac_hal::ids::Rank;

/// A job's name on its connections: ranks of different jobs refuse each other.
///
/// It guards against mix-ups and strangers, not against someone who reads the traffic.
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
    pub(super) listener: TcpListener,
    /// One for each rank; this rank's own stays idle.
    pub(super) links: Vec<Link>,
    /// Accepted, and not yet known.
    pub(super) pending: Vec<Pending>,
    /// Couriers on their way to lower ranks that have not dialled.
    pub(super) wants: Vec<(Rank, TcpStream)>,
    /// Messages between two ranks, beside the schedules.
    pub(super) messages: Messages,
    pub(super) poisoned: Option<ExecError>,
    pub(super) foreign_dropped: u64,
    pub(super) sent_bytes: u64,
    /// Where received partial elements lie until they are combined: small enough to stay in L2.
    pub(super) scratch: Vec<u8>,
    /// Where accumulators lie until they are rounded, if they don't fit their result's place.
    pub(super) spare: Vec<u8>,
    /// Partial values, where they don't lie in the caller's buffer.
    pub(super) work: Vec<u8>,
    pub(super) sends: Vec<Progress>,
    pub(super) recvs: Vec<Progress>,
    pub(super) pollfds: Vec<PollFd<'static>>,
    pub(super) watched: Vec<Watched>,
}

impl Mesh {
    /// Set up the mesh of `place`. Connections are made when operations need them.
    ///
    /// `addresses` holds every rank's listener in rank order; it must be complete only now, so bind the listener
    /// first, publish its address, and then collect those of the others.
    ///
    /// # Errors
    /// [`MeshError`] if the address book does not fit the communicator, or the listener can't be used.
    pub fn new(
        place: Place,
        token: JobToken,
        listener: TcpListener,
        addresses: Vec<SocketAddr>,
    ) -> Result<Self, MeshError> {
        if addresses.len() != place.ranks() as usize {
            return Err(MeshError::Addresses { addresses: addresses.len(), ranks: place.ranks() });
        }
        listener.set_nonblocking(true).map_err(MeshError::Listener)?;
        Ok(Self {
            place,
            token,
            listener,
            messages: Messages::new(addresses.len()),
            links: addresses.iter().map(|_| Link::default()).collect(),
            addresses,
            pending: Vec::new(),
            wants: Vec::new(),
            poisoned: None,
            foreign_dropped: 0,
            sent_bytes: 0,
            scratch: vec![0; SCRATCH_BYTES],
            spare: vec![0; SCRATCH_BYTES],
            work: Vec::new(),
            sends: Vec::new(),
            recvs: Vec::new(),
            pollfds: Vec::new(),
            watched: Vec::new(),
        })
    }

    /// Return whose mesh this is.
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

    /// Begin to connect to `peer`.
    pub(super) fn dial(&mut self, peer: Rank) -> Result<(), ExecError> {
        let stream = self.connecting(peer)?;
        self.links[peer.0 as usize].state = State::Connecting(stream);
        Ok(())
    }

    /// Return a socket on its way to `peer`.
    pub(super) fn connecting(&self, peer: Rank) -> Result<TcpStream, ExecError> {
        let address = self.addresses[peer.0 as usize];
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let io = |error: std::io::Error| ExecError::Io {
            rank: self.rank(),
            what: format!("connecting to {peer} at {address}: {error}"),
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(family, SocketType::STREAM, flags, None).map_err(|errno| io(errno.into()))?;
        let stream = TcpStream::from(socket);
        stream.set_nodelay(true).map_err(io)?;
        match connect(&stream, &address) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(stream),
            Err(rustix::io::Errno::CONNREFUSED) => Err(ExecError::RankLost { rank: peer }),
            Err(errno) => Err(io(errno.into())),
        }
    }

    /// Take a dialled connection one step further.
    pub(super) fn advance(&mut self, peer: Rank) -> Result<(), ExecError> {
        let hello = self.hello(HelloKind::Peer, peer);
        advance(&mut self.links[peer.0 as usize], &hello)
    }
}

/// Take a dialled connection one step further: send our hello, or check theirs.
pub(super) fn advance(link: &mut Link, ours: &Hello) -> Result<(), ExecError> {
    let (own, peer) = (ours.from, ours.to);
    let lost = Err(ExecError::RankLost { rank: peer });
    match std::mem::take(&mut link.state) {
        State::Connecting(stream) => {
            // A fresh socket's buffer holds a hello; one that does not is broken.
            let sound = matches!(stream.take_error(), Ok(None));
            if !sound || write(&stream, &ours.emit(), &[]) != Moved::Bytes(HELLO_BYTES) {
                return lost;
            }
            link.state = State::Greeting(stream);
            Ok(())
        }
        State::Greeting(stream) => {
            link.state = State::Greeting(stream);
            match link.fill_header(HELLO_BYTES) {
                Moved::WouldBlock => return Ok(()),
                Moved::Ended => return lost,
                Moved::Bytes(_) => {}
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
                _ => Err(ExecError::protocol(peer, "a hello that does not fit the address book")),
            }
        }
        other => {
            link.state = other;
            Ok(())
        }
    }
}

const SCRATCH_BYTES: usize = 128 << 10;
