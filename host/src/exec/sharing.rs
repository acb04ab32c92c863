//! Hands shared memory over between the ranks of one machine, for connections that they have ([`super::shared`]).
//!
//! Each mesh listens on a Unix socket in the abstract namespace, under a name that only the ranks of its job can
//! compute. The rank that has dialled a connection creates the memory, and sends it together with the eventfd that
//! wakes it; the other one answers with its own. Until then, and where it fails, the connection's socket carries
//! everything.
//!
//! ```text
//!   dialling rank                                        accepting rank
//!        attach: rank, purpose, key    ------------>
//!        memory, bell                  ------------>      maps it, and switches
//!        bell                          <------------
//!   switches
//! ```
//!
//! Invariants:
//! - Memory is shared only with processes of this user and of root that know the job's secret. It is sealed against
//!   resizing.
//! - A stranger holds at most [`ARRIVALS_MAX`] connections, each for [`ARRIVAL_LIMIT`]; nothing waits for it.

use super::auth::{Purpose, shared_key, shared_name};
use super::board::open_board;
use super::error::Call;
use super::frame::{FrameKind, Header};
use super::link::{Link, State};
use super::mesh::Mesh;
use super::shared::{SharedLink, Switch};
use crate::region_exports::RegionExports;
use crate::schedule::Place;
use crate::secret::JobSecret;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::secure;
use sumac_hal::ids::{ChildIndex, GroupId, Rank};
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::shm::{Bell, Board, Connection, Duplex, DuplexError, Listener, Message, Received, SocketError};

/// What a mesh needs to share memory with others.
#[derive(Debug)]
pub(super) struct Sharing {
    pub(super) listener: Listener,
    /// Wakes this rank.
    pub(super) bell: Bell,
    /// Memory that this rank has offered, and that is not accepted yet.
    pub(super) offers: Vec<Offer>,
    /// Ranks, or strangers, that are about to hand over memory, the oldest first.
    pub(super) arrivals: Vec<Arrival>,
    /// The number of calls that look at the sockets before they begin: since a connection became ready, memory for it
    /// may be on its way, and calls that never wait would not notice.
    settling_calls: u32,
    /// No connection is accepted before: there was no descriptor for one.
    resume_at: Option<Instant>,
    capacity_bytes: u32,
}

/// Memory on offer.
#[derive(Debug)]
pub(super) struct Offer {
    peer: Rank,
    purpose: Purpose,
    duplex: Duplex,
    pub(super) connection: Connection,
}

/// A connection over which memory arrives.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) connection: Connection,
    since: Instant,
    /// The connection between ranks that it is for, once the key is checked.
    place: Option<(Purpose, Rank)>,
    memory: Option<OwnedFd>,
}

/// Where an arrival stands.
enum Step {
    /// More messages are needed.
    Incomplete,
    /// It has handed over everything.
    Arrived(Rank, Purpose, Duplex, Bell),
    /// It has handed over the board of these ranks.
    Board(Range<u32>, Board),
    /// It is not a rank's, or has failed.
    Dropped(&'static str),
}

impl Sharing {
    /// Listen for the ranks of this machine.
    ///
    /// # Errors
    /// Why this rank can share no memory.
    pub(super) fn new(secret: &JobSecret, rank: Rank, addresses: &[SocketAddr]) -> Result<Self, String> {
        let name = shared_name(secret, rank, addresses[rank.0 as usize]);
        let listener = Listener::bind(&name).map_err(|error| error.to_string())?;
        let bell = Bell::create().map_err(|errno| format!("eventfd: {errno}"))?;
        // All streams of a rank together stay within a few MiB.
        let capacity_bytes = if addresses.len() <= MANY_RANKS { CAPACITY_BYTES } else { CAPACITY_BYTES / 4 };
        Ok(Self {
            listener,
            bell,
            offers: Vec::new(),
            arrivals: Vec::new(),
            settling_calls: 0,
            resume_at: None,
            capacity_bytes,
        })
    }

    /// Return whether connections are accepted now.
    pub(super) fn accepts(&self, now: Instant) -> bool {
        self.resume_at.is_none_or(|at| at <= now)
    }

    /// Return when the oldest arrival has had its time, or connections are accepted again.
    pub(super) fn wake_at(&self, now: Instant) -> Option<Instant> {
        let limit = self.arrivals.first().map(|arrival| arrival.since + ARRIVAL_LIMIT);
        limit.into_iter().chain(self.resume_at.filter(|at| *at > now)).min()
    }
}

impl Mesh {
    /// Note that a connection is ready, for which memory may be shared.
    pub(super) fn expect_memory(&mut self) {
        self.sharing.iter_mut().for_each(|sharing| sharing.settling_calls = SETTLING_CALLS);
    }

    /// Return whether a call looks at the sockets before it begins.
    pub(super) fn is_settling(&mut self) -> bool {
        let Ok(sharing) = &mut self.sharing else { return false };
        let is_settling = sharing.settling_calls > 0;
        sharing.settling_calls = sharing.settling_calls.saturating_sub(1);
        is_settling
    }

    /// Offer shared memory for a connection that this rank has dialled.
    pub(super) fn offer_memory(&mut self, peer: Rank, purpose: Purpose) {
        self.expect_memory();
        let Ok(sharing) = &mut self.sharing else { return };
        let peers_name = shared_name(&self.secret, peer, self.addresses[peer.0 as usize]);
        match offer(sharing, &peers_name, (&self.secret, self.place.rank()), (peer, purpose)) {
            Ok(offer) => sharing.offers.push(offer),
            Err(error) if self.is_here(peer) => {
                crate::log::info!(%peer, %error, "no shared memory with a rank of this machine: TCP");
            }
            // Another machine, or another network namespace of this one.
            Err(error) => crate::log::debug!(%peer, %error, "no shared memory with a rank: TCP"),
        }
    }

    /// Return whether a rank is at this rank's address.
    fn is_here(&self, peer: Rank) -> bool {
        self.addresses[peer.0 as usize].ip() == self.addresses[self.place.rank().0 as usize].ip()
    }

    /// Take the answer to an offer, if it has arrived. The offer ends with it.
    pub(super) fn advance_offer(&mut self, index: usize) {
        let Ok(sharing) = &mut self.sharing else { return };
        // A frame of the same peer may have come first, and taken it.
        let Some(offer) = sharing.offers.get(index) else { return };
        let answer = offer.connection.receive(Duration::ZERO);
        if matches!(answer, Err(SocketError::Timeout(_))) {
            return;
        }
        let Offer { peer, purpose, duplex, connection } = sharing.offers.swap_remove(index);
        let file = answer.ok().and_then(|answer| match answer.message {
            Message::Bell { .. } => answer.file,
            _ => None,
        });
        match file {
            Some(file) => {
                let end = LinkEnd { peer, purpose, has_dialled: true };
                let exports = self.exports_for(purpose);
                self.share(end, SharedLink::new(duplex, Bell::open(file), connection, exports));
            }
            None => crate::log::info!(%peer, "a rank of this machine takes no shared memory: TCP"),
        }
    }

    /// Take the answer to the offer for a connection, which the peer has sent: it has switched.
    pub(super) fn finish_offer(&mut self, peer: Rank, purpose: Purpose) {
        let Ok(sharing) = &self.sharing else { return };
        let found = sharing.offers.iter().position(|offer| (offer.peer, offer.purpose) == (peer, purpose));
        if let Some(index) = found {
            self.advance_offer(index);
        }
    }

    /// Accept connections over which memory is to arrive.
    pub(super) fn accept_memory(&mut self, now: Instant) {
        for _ in 0..ARRIVALS_MAX {
            let Ok(sharing) = &mut self.sharing else { return };
            match sharing.listener.accept(Duration::ZERO) {
                Ok(Some(connection)) => {
                    if sharing.arrivals.len() == ARRIVALS_MAX {
                        sharing.arrivals.remove(0);
                    }
                    sharing.arrivals.push(Arrival { connection, since: now, place: None, memory: None });
                    // It has sent everything already, if it is a rank's.
                    let last = sharing.arrivals.len() - 1;
                    self.advance_arrival(last);
                }
                Ok(None) => break,
                // Out of descriptors: the socket stays readable, and the peer stays with TCP meanwhile.
                Err(SocketError::System { .. }) => {
                    sharing.resume_at = Some(now + ACCEPT_PAUSE);
                    break;
                }
                // One that has gone, or belongs to another user.
                Err(_) => self.refusals.note(self.place.rank(), "they belong to another user, or have gone"),
            }
        }
    }

    /// Advance an arrival as far as its messages allow; every outcome but incompleteness removes it.
    pub(super) fn advance_arrival(&mut self, index: usize) {
        let Ok(sharing) = &mut self.sharing else { return };
        let Some(arrival) = sharing.arrivals.get_mut(index) else { return };
        let step = advance(arrival, (&self.secret, self.place));
        match step {
            Step::Incomplete => {}
            Step::Dropped(why) => {
                drop(sharing.arrivals.remove(index));
                self.refusals.note(self.place.rank(), why);
            }
            Step::Board(ranks, board) => {
                drop(sharing.arrivals.remove(index));
                self.take_board(ranks, board);
            }
            Step::Arrived(peer, purpose, duplex, bell) => {
                let connection = sharing.arrivals.remove(index).connection;
                let end = LinkEnd { peer, purpose, has_dialled: false };
                if !link_of(self, end).is_unshared() {
                    return;
                }
                // Whoever has withdrawn the offer has closed the connection.
                let Ok(sharing) = &self.sharing else { return };
                if connection.send(&Message::Bell { queue: 0 }, Some(sharing.bell.as_fd())).is_ok() {
                    let exports = self.exports_for(purpose);
                    self.share(end, SharedLink::new(duplex, bell, connection, exports));
                }
            }
        }
    }

    /// Return this rank's ends of all connections in shared memory.
    pub(super) fn shared_ends(&self) -> impl Iterator<Item = &SharedLink> {
        let channels = self.messages.out.iter().chain(&self.messages.from).map(|channel| &channel.link);
        self.links.iter().chain(channels).filter_map(|link| link.shared.as_deref())
    }

    /// Forget that peers have rung.
    pub(super) fn clear_bell(&self) {
        if let Ok(sharing) = &self.sharing {
            sharing.bell.clear();
        }
    }

    /// Drop arrivals that have had their time.
    pub(super) fn expire_arrivals(&mut self, now: Instant) {
        let Ok(sharing) = &mut self.sharing else { return };
        sharing.arrivals.retain(|arrival| now < arrival.since + ARRIVAL_LIMIT);
    }

    /// Return the memory that the peer of a connection may map: messages do without.
    fn exports_for(&self, purpose: Purpose) -> Option<Arc<RegionExports>> {
        (purpose == Purpose::Peer).then(|| Arc::clone(&self.exports))
    }

    /// Let shared memory take over a connection.
    fn share(&mut self, end: LinkEnd, shared: SharedLink) {
        let switch = match end.purpose {
            Purpose::PointToPoint => Switch::after(&super::p2p::SWITCH),
            _ => {
                let call = Call::new(self.rank(), 0, 0, &OpDesc::barrier(), Path::Dissemination);
                Switch::after(&Header::bare(FrameKind::Shared, call, 0).emit())
            }
        };
        let link = link_of(self, end);
        if link.is_unshared() {
            link.share(Box::new(shared), switch);
        }
    }

    /// Return the number of connections for schedules that send through shared memory, and that of all.
    pub fn shared_links(&self) -> (usize, usize) {
        let ready = || self.links.iter().filter(|link| matches!(link.state, State::Ready(_)));
        (ready().filter(|link| link.tx.is_shared).count(), ready().count())
    }
}

/// One rank's end of a connection.
#[derive(Clone, Copy)]
struct LinkEnd {
    peer: Rank,
    purpose: Purpose,
    /// Messages have a connection for each direction: this rank sends over the one that it has dialled.
    has_dialled: bool,
}

fn link_of(mesh: &mut Mesh, end: LinkEnd) -> &mut Link {
    let index = end.peer.0 as usize;
    match (end.purpose, end.has_dialled) {
        (Purpose::PointToPoint, true) => &mut mesh.messages.out[index].link,
        (Purpose::PointToPoint, false) => &mut mesh.messages.from[index].link,
        _ => &mut mesh.links[index],
    }
}

/// Offer memory to a rank; fails unless it listens on this machine.
fn offer(
    sharing: &Sharing,
    name: &str,
    (secret, own): (&JobSecret, Rank),
    (peer, purpose): (Rank, Purpose),
) -> Result<Offer, OfferError> {
    let connection = Connection::open(name, OFFER_LIMIT)?;
    let duplex = Duplex::create(sharing.capacity_bytes, u64::from_le_bytes(secure::random()?))?;
    let key = shared_key(secret, purpose, own, peer);
    connection.send(&Message::Attach { group: GroupId(own.0), child: ChildIndex(purpose.to_wire()), key }, None)?;
    connection.send(&Message::Memory { handle: 0 }, Some(duplex.file()))?;
    connection.send(&Message::Bell { queue: 0 }, Some(sharing.bell.as_fd()))?;
    Ok(Offer { peer, purpose, duplex, connection })
}

/// Why memory could not be offered.
#[derive(Debug, thiserror::Error)]
enum OfferError {
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Memory(#[from] DuplexError),
    #[error("drawing random bytes: {0}")]
    Random(#[from] std::io::Error),
}

/// Take the messages of an arrival that are there.
fn advance(arrival: &mut Arrival, (secret, place): (&JobSecret, Place)) -> Step {
    loop {
        let Received { message, file } = match arrival.connection.receive(Duration::ZERO) {
            Ok(received) => received,
            Err(SocketError::Timeout(_)) => return Step::Incomplete,
            Err(_) => return Step::Dropped("they handed over no memory"),
        };
        match (message, file, arrival.place, arrival.memory.take()) {
            (Message::Attach { group, child, key }, None, None, None) => {
                let purposes = [Purpose::Peer, Purpose::PointToPoint, Purpose::Board];
                let purpose = purposes.into_iter().find(|of| of.to_wire() == child.0);
                let (Some(purpose), peer) = (purpose, Rank(group.0)) else {
                    return Step::Dropped("their memory has no purpose");
                };
                let is_other = peer.0 < place.ranks() && peer != place.rank();
                if !is_other || key != shared_key(secret, purpose, peer, place.rank()) {
                    return Step::Dropped("they do not know the job's secret");
                }
                arrival.place = Some((purpose, peer));
            }
            (Message::Memory { handle: members }, Some(memory), Some((Purpose::Board, first)), None) => {
                return match open_board((memory, members), first, place) {
                    Some((ranks, board)) => Step::Board(ranks, board),
                    None => Step::Dropped("their board is not usable"),
                };
            }
            (Message::Memory { .. }, Some(memory), Some(_), None) => arrival.memory = Some(memory),
            (Message::Bell { .. }, Some(bell), Some((purpose, peer)), Some(memory)) => {
                let Ok(probe) = secure::random() else { return Step::Dropped("this rank could draw no random bytes") };
                return match Duplex::open(memory, u64::from_le_bytes(probe)) {
                    Ok(duplex) => Step::Arrived(peer, purpose, duplex, Bell::open(bell)),
                    Err(_) => Step::Dropped("their memory is not usable"),
                };
            }
            _ => return Step::Dropped("they handed over no memory"),
        }
    }
}

/// Calls that look at the sockets before they begin. Handing memory over takes a few.
const SETTLING_CALLS: u32 = 64;
/// The maximum number of connections over which memory is to arrive.
const ARRIVALS_MAX: usize = 64;
/// Time limit of an arrival. Ranks send everything at once.
const ARRIVAL_LIMIT: Duration = Duration::from_secs(1);
/// Pause when no descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// How long the kernel may take for an offer; none of its calls waits for the other rank.
const OFFER_LIMIT: Duration = Duration::from_millis(100);
/// The capacity of a stream: twice the longest payload that goes through it where references are possible, and small
/// enough for a core's cache.
const CAPACITY_BYTES: u32 = 64 << 10;
/// With more ranks, streams are smaller.
const MANY_RANKS: usize = 32;
