//! The connections of one rank: dialled or accepted when first needed, checked by a handshake, and kept.
//!
//! For schedules the lower rank dials and the higher accepts; for messages the sender dials ([`super::p2p`]). Both
//! sides prove that they know the job's secret ([`super::auth`]). Anything else is dropped and counted, and never
//! receives more bytes than it sent.

use super::acceptor::Acceptor;
use super::auth::{
    ANSWER_BYTES, AnswerError, Dialler, HELLO_BYTES, Hello, PROOF_BYTES, Purpose, RefusalCount, VERDICT_BYTES,
    check_head, one_shot,
};
use super::board::Boards;
use super::error::{Call, ExecError, MeshError};
use super::handshake::Pending;
use super::link::{IoOutcome, Link, PAGE_BYTES, State, write};
use super::message::Messages;
use super::poll::PollTarget;
use super::run::Progress;
use super::sharing::Sharing;
use crate::region_exports::RegionExports;
use crate::schedule::{Place, StepBuffer};
use crate::secret::JobSecret;
use crate::wait_policy::{CoreWatch, RankHere, WaitPolicy};
use rustix::event::PollFd;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;
use sumac_hal::ids::Rank;
use sumac_hal::ring::SpinPolicy;

/// Whether ranks of one machine use shared memory between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SharedMemory {
    /// They do, where the kernel permits it and both want to.
    Use,
    /// They use TCP, as between machines.
    Avoid,
}

/// One rank's connections to the others.
#[derive(Debug)]
pub struct Mesh {
    pub(super) place: Place,
    pub(super) secret: JobSecret,
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) acceptor: Acceptor,
    /// One for each rank; this rank's own stays idle.
    pub(super) links: Vec<Link>,
    /// Accepted, and not yet identified.
    pub(super) pending: Vec<Pending>,
    /// One-shot announcements to lower ranks that have not dialled.
    pub(super) announcements: Vec<(Rank, TcpStream)>,
    /// Calls that other ranks have announced while this one was in none, with their numbers; at most one for each rank.
    pub(super) announced: Vec<(u32, Call)>,
    /// Point-to-point messages.
    pub(super) messages: Messages,
    /// How memory is shared with other ranks, or why it is not.
    pub(super) sharing: Result<Sharing, String>,
    /// Registered memory that ranks of this machine may map.
    pub(super) exports: Arc<RegionExports>,
    /// [`RegionExports::removals`] when freed memory was last withdrawn.
    removals_seen: u32,
    /// The boards of short collectives.
    pub(super) boards: Boards,
    /// All operations below this index are complete.
    pub(super) next_op: u64,
    /// This rank among those of this machine.
    here: RankHere,
    /// How this rank waits.
    pub(super) waiting: SpinPolicy,
    /// Whether other ranks run on this one's core.
    core: CoreWatch,
    pub(super) poisoned: Option<ExecError>,
    /// The number of the call in which another rank has ended the mesh, which may be an earlier one than this rank's; 0
    /// if it is not that of a call.
    pub(super) aborted: Option<u32>,
    pub(super) refusals: RefusalCount,
    /// The number of one-shot connections that this rank has made.
    one_shots: u64,
    /// For each rank, the number of its last one-shot connection.
    pub(super) one_shots_seen: Vec<u64>,
    pub(super) sent_bytes: u64,
    /// Received partial elements until they are combined: small enough to stay in L2.
    pub(super) scratch: Vec<u8>,
    /// Accumulators until they are rounded, if they do not fit the place of their result.
    pub(super) spare: Vec<u8>,
    /// Partial values, where they do not lie in the caller's buffer.
    pub(super) work: Vec<u8>,
    /// Room for the current step, and for a look at later ones.
    pub(super) step: StepBuffer,
    pub(super) later_step: StepBuffer,
    pub(super) sends: Vec<Progress>,
    pub(super) recvs: Vec<Progress>,
    pub(super) pollfds: Vec<PollFd<'static>>,
    pub(super) ready: Vec<PollTarget>,
}

impl Mesh {
    /// Yield the core to whoever else is to run there.
    pub(super) fn yield_core(&mut self) {
        self.core.yield_core(self.waiting, self.place.rank().0, self.here);
    }

    /// Set up the mesh of `place`. Connections are made when operations need them.
    ///
    /// `addresses` holds each rank's listener, in rank order. It must be complete only now: bind the listener first,
    /// publish its address, then collect the others'. All ranks have the same `secret`, and no other mesh has it.
    /// `memory` says whether connections between ranks of one machine go through shared memory.
    ///
    /// # Errors
    /// [`MeshError`] if there is not one address for each rank, or the listener is unusable.
    pub fn new(
        place: Place,
        secret: JobSecret,
        listener: TcpListener,
        addresses: Vec<SocketAddr>,
        memory: SharedMemory,
    ) -> Result<Self, MeshError> {
        if addresses.len() != place.ranks() as usize {
            return Err(MeshError::Addresses { addresses: addresses.len(), ranks: place.ranks() });
        }
        let acceptor = Acceptor::new(listener).map_err(MeshError::Listener)?;
        let sharing = match memory {
            SharedMemory::Use => Sharing::new(&secret, place.rank(), &addresses),
            SharedMemory::Avoid => Err("it was not asked for".into()),
        };
        if let (SharedMemory::Use, Err(why)) = (memory, &sharing) {
            crate::log::info!(rank = %place.rank(), %why, "no memory shared with ranks of this machine: TCP");
        }
        let own = addresses[place.rank().0 as usize].ip();
        let is_here = |address: &&SocketAddr| address.ip() == own;
        let index = addresses[..place.rank().0 as usize].iter().filter(is_here).count();
        let here = RankHere { index, ranks: addresses.iter().filter(is_here).count() };
        Ok(Self {
            sharing,
            exports: Arc::default(),
            removals_seen: 0,
            boards: Boards::new(place),
            next_op: 0,
            waiting: WaitPolicy::default().for_threads(here.ranks),
            core: CoreWatch::default(),
            here,
            place,
            secret,
            acceptor,
            messages: Messages::new(addresses.len()),
            links: addresses.iter().map(|_| Link::default()).collect(),
            addresses,
            pending: Vec::new(),
            announcements: Vec::new(),
            announced: Vec::new(),
            poisoned: None,
            aborted: None,
            refusals: RefusalCount::default(),
            one_shots: 0,
            one_shots_seen: vec![0; place.ranks() as usize],
            sent_bytes: 0,
            scratch: vec![0; SCRATCH_BYTES + PAGE_BYTES],
            spare: vec![0; SCRATCH_BYTES],
            work: Vec::new(),
            step: StepBuffer::default(),
            later_step: StepBuffer::default(),
            sends: Vec::new(),
            recvs: Vec::new(),
            pollfds: Vec::new(),
            ready: Vec::new(),
        })
    }

    /// Wait for ranks of this machine by another policy than [`WaitPolicy::Auto`].
    #[must_use]
    pub fn with_wait_policy(mut self, policy: WaitPolicy) -> Self {
        self.waiting = policy.for_threads(self.here.ranks);
        self
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
        self.refusals.count()
    }

    /// Return the error that ended the mesh, if one did.
    pub const fn error(&self) -> Option<&ExecError> {
        self.poisoned.as_ref()
    }

    /// Return the number of the call in which another rank has ended the mesh ([`super::Context::number`]).
    pub fn aborted_call(&self) -> Option<u32> {
        self.aborted.filter(|number| *number != 0)
    }

    pub(super) const fn rank(&self) -> Rank {
        self.place.rank()
    }

    /// Return the bytes of a one-shot connection to `to`.
    pub(super) fn one_shot(&mut self, to: Rank, frame: &[u8]) -> Result<Vec<u8>, ExecError> {
        self.one_shots += 1;
        let hello = Hello::new(Purpose::OneShot, self.rank(), to, self.one_shots);
        Ok(one_shot(&self.secret, &hello.map_err(|error| no_randomness(self.rank(), &error))?, frame))
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
        let arrivals = self.sharing.as_ref().ok().and_then(|sharing| sharing.wake_at(now));
        dials.chain(self.acceptor.resume_at(now)).chain(self.hello_limit()).chain(arrivals).min()
    }

    /// Return a connecting socket; `None` for a transient shortage that warrants a retry.
    pub(super) fn connecting(&self, peer: Rank) -> Result<Option<TcpStream>, ExecError> {
        let address = self.addresses[peer.0 as usize];
        self.acceptor.dial(address).map_err(|error| match error.kind() {
            ErrorKind::ConnectionRefused => ExecError::RankLost { rank: peer },
            _ => ExecError::Io { rank: self.rank(), what: format!("connecting to {peer} at {address}: {error}") },
        })
    }

    /// Advance a dialled connection.
    pub(super) fn advance(&mut self, peer: Rank) -> Result<(), ExecError> {
        let own = self.rank();
        if advance(&mut self.links[peer.0 as usize], &self.secret, Purpose::Peer, (own, peer))? {
            self.offer_memory(peer, Purpose::Peer);
        }
        Ok(())
    }

    /// Withdraw what peers have not copied yet, before it goes back to the caller.
    pub(super) fn withdraw_references(&mut self) {
        self.links.iter_mut().for_each(Link::withdraw_reference);
    }

    /// Return the registered memory that ranks of this machine may map.
    pub(crate) const fn exports(&self) -> &Arc<RegionExports> {
        &self.exports
    }

    /// Return the number of regions that this rank has mapped of others.
    #[cfg(test)]
    pub(crate) fn mapped_regions(&self) -> usize {
        let regions = self.links.iter().filter_map(|link| link.shared.as_ref()?.regions.as_ref());
        regions.map(|regions| regions.counts().1).sum()
    }

    /// Withdraw what was freed of it since the last operation.
    #[inline]
    pub(super) fn withdraw_freed(&mut self) {
        let removals = self.exports.removals();
        if std::mem::replace(&mut self.removals_seen, removals) != removals {
            self.links.iter_mut().filter_map(|link| link.shared.as_mut()).for_each(|shared| shared.withdraw_freed());
        }
    }
}

/// Advance a dialled connection: send our hello, check the peer's answer and prove who we are, or take the verdict.
/// Returns whether it is ready now.
///
/// A connection that ends without a verdict may have been crowded out by unknown peers, so it is dialled again: if the
/// peer is gone, that is refused.
pub(super) fn advance(
    link: &mut Link,
    secret: &JobSecret,
    purpose: Purpose,
    (own, peer): (Rank, Rank),
) -> Result<bool, ExecError> {
    match &link.state {
        State::Connecting(_) => greet(link, purpose, (own, peer)).map(|()| false),
        State::AwaitingAnswer(..) => {
            let Some(answer) = receive::<ANSWER_BYTES>(link) else { return Ok(false) };
            let State::AwaitingAnswer(stream, dialler) = std::mem::take(&mut link.state) else { return Ok(false) };
            let proof = dialler.prove(secret, &answer).map_err(|error| refused(error, (own, peer)))?;
            if write(&stream, &proof, &[]) == IoOutcome::Bytes(PROOF_BYTES) {
                link.state = State::AwaitingVerdict(stream);
            } else {
                link.dialled(None);
            }
            Ok(false)
        }
        State::AwaitingVerdict(_) => {
            let Some(verdict) = receive::<VERDICT_BYTES>(link) else { return Ok(false) };
            check_head(&verdict).map_err(|error| refused(error, (own, peer)))?;
            link.make_ready();
            Ok(true)
        }
        State::Idle | State::Ready(_) | State::Ended => Ok(false),
    }
}

/// Send our hello on a dialled connection, once it is made.
fn greet(link: &mut Link, purpose: Purpose, (own, peer): (Rank, Rank)) -> Result<(), ExecError> {
    let State::Connecting(stream) = std::mem::take(&mut link.state) else { return Ok(()) };
    match stream.take_error() {
        Ok(None) => {
            let dialler = Dialler::new(purpose, own, peer).map_err(|error| no_randomness(own, &error))?;
            // A new socket's buffer holds a hello; one that does not is broken.
            if write(&stream, dialler.hello(), &[]) == IoOutcome::Bytes(HELLO_BYTES) {
                link.state = State::AwaitingAnswer(stream, Box::new(dialler));
            } else {
                link.dialled(None);
            }
        }
        Ok(Some(error)) if error.kind() != ErrorKind::ConnectionReset => {
            return Err(ExecError::RankLost { rank: peer });
        }
        _ => link.dialled(None),
    }
    Ok(())
}

/// Receive the next message of a handshake, if it is complete; dial again if the connection has ended.
fn receive<const N: usize>(link: &mut Link) -> Option<[u8; N]> {
    match link.fill_header(N) {
        IoOutcome::WouldBlock => None,
        IoOutcome::Ended => {
            link.dialled(None);
            None
        }
        IoOutcome::Bytes(_) => Some(std::array::from_fn(|index| link.rx.bytes[index])),
    }
}

fn refused(error: AnswerError, (rank, peer): (Rank, Rank)) -> ExecError {
    match error {
        AnswerError::Unproven => ExecError::Unproven { rank, peer },
        AnswerError::Refused(reason) => ExecError::Refused { rank, by: peer, reason },
    }
}

fn no_randomness(rank: Rank, error: &std::io::Error) -> ExecError {
    ExecError::Io { rank, what: format!("drawing random bytes: {error}") }
}

const SCRATCH_BYTES: usize = 128 << 10;
