//! A copy-only DMA engine over one-sided connections: it pulls from peers' memory (RDMA READ) into local memory and
//! writes back (RDMA WRITE). A device uses it for zero-copy contributions of ranks on other hosts.
//!
//! A batch may involve several peers, and ends when it has ended at each. A connection completes in order, so one
//! completion is requested per batch.
//!
//! Invariants:
//! - Submitting and polling allocate nothing once the peers are connected.
//! - A posted operation refers only to memory that the engine keeps registered until its batch has ended.
//! - When a connection ends, every chain that accesses its peer fails, once, and no other chain does.

use super::config::VerbsError;
use super::copying::{BatchOutcome, CHAINS, Copier, Copy, CopyEngine, MapMemoryError, NotPosted};
use super::ibv::ibv_wr_opcode;
use super::memory::Registration;
use super::objects::Domain;
use super::one_sided::{LinkStats, MESSAGE_MAX_BYTES, OneSided};
use super::region::VerbsDomain;
use super::shared_receives::{ReceiveStats, Received, SharedReceives};
use crate::dma::{
    Capabilities, Chain, Completion, DmaMemory, Engine, LocalMemory, RegionKey, Scope, Span, Status, SubmitError,
};
use crate::remote::{Arrived, BUFFERS, Link as MessageLink, LinkError, MESSAGE_LEN_BYTES, RemoteRegion};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// A DMA engine that accesses the memory of peers.
pub struct PeerEngine {
    engine: CopyEngine<Peers>,
}

impl PeerEngine {
    /// Create an engine in this domain, for `regions` regions, local and remote.
    pub fn new(domain: &VerbsDomain, regions: usize) -> Self {
        Self::with_receives(domain, regions, None)
    }

    /// As [`PeerEngine::new`], for peers that also send messages, which arrive in a queue of the domain.
    pub fn with_receives(domain: &VerbsDomain, regions: usize, receives: impl Into<Option<SharedReceives>>) -> Self {
        let peers = Peers {
            links: Vec::new(),
            batches: [Batch::default(); CHAINS],
            ended: VecDeque::with_capacity(CHAINS),
            receives: receives.into(),
            domain: Arc::clone(&domain.domain),
        };
        Self { engine: CopyEngine::new(peers, MESSAGE_MAX_BYTES, regions) }
    }

    /// Add a connection of the engine's domain; returns the peer's number.
    pub fn attach(&mut self, connection: OneSided) -> u16 {
        self.engine.copier_mut().attach(connection)
    }

    /// End a peer's connection. Afterwards no operation posted to it takes effect, and its chains end with
    /// [`Status::Hardware`].
    ///
    /// # Errors
    /// [`VerbsError`]: the connection could not be stopped first, and was destroyed; receive buffers in use at that
    /// moment may be lost.
    pub fn detach(&mut self, peer: u16) -> Result<(), VerbsError> {
        self.engine.copier_mut().detach(peer)
    }

    /// Create an end in `domain`, the engine's own, for a peer that sends messages, to be passed to
    /// [`PeerEngine::attach`]; `None` if the engine has no queue for messages.
    ///
    /// # Errors
    /// [`VerbsError`]
    pub fn messaging(&self, domain: &VerbsDomain) -> Result<Option<OneSided>, VerbsError> {
        self.engine.copier().receives.as_ref().map(|receives| domain.messaging(receives)).transpose()
    }

    /// Return a peer's message link; `None` if it has none.
    pub fn link(&mut self, peer: u16) -> Option<PeerLink<'_>> {
        let peers = self.engine.copier_mut();
        let is_there = peers.links.get(usize::from(peer)).is_some_and(|link| link.connection.is_some());
        (is_there && peers.receives.is_some()).then_some(PeerLink { peers, peer: peer.into() })
    }

    /// Return how many peers are connected.
    pub fn peers(&self) -> usize {
        self.engine.copier().links.iter().filter(|link| link.connection.is_some()).count()
    }

    /// Return whether a peer's message, or the end of a chain, can be taken now.
    pub fn has_work(&mut self) -> bool {
        let peers = self.engine.copier_mut();
        peers.poll_connections();
        peers.receive();
        !peers.ended.is_empty() || peers.links.iter().any(|link| !link.inbox.is_empty())
    }

    /// Let [`PeerEngine::file`] become readable on the next arrival or completion. Poll once more after this call.
    pub fn arm(&mut self) {
        let Peers { links, receives, domain, .. } = self.engine.copier_mut();
        domain.context.poll_events();
        receives.iter().for_each(SharedReceives::arm);
        links.iter().filter_map(|link| link.connection.as_ref()).for_each(OneSided::arm);
    }

    /// Return the descriptor that becomes readable; `None` if the engine has no queue for messages.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.engine.copier().receives.as_ref().map(|receives| receives.channel.fd())
    }

    /// Return whether the device has failed: nothing on it makes progress any more, and every connection has ended.
    pub fn has_failed(&self) -> bool {
        self.engine.copier().domain.context.events.has_failed()
    }

    /// Return the counters of a peer's connection, and those of all receptions.
    pub fn stats(&self, peer: u16) -> (LinkStats, ReceiveStats) {
        let Peers { links, receives, .. } = self.engine.copier();
        let connection = links.get(usize::from(peer)).and_then(|link| link.connection.as_ref());
        (
            connection.map(OneSided::stats).unwrap_or_default(),
            receives.as_ref().map(SharedReceives::stats).unwrap_or_default(),
        )
    }

    /// Return the error that ended a peer's connection, if any.
    pub fn error(&self, peer: u16) -> Option<LinkError> {
        self.engine.copier().links.get(usize::from(peer)).map_or(Some(LinkError::Fenced), Link::error)
    }

    /// Map local memory for chains under `key`, which the processor accesses as well.
    ///
    /// # Errors
    /// [`MapMemoryError`]
    pub fn map_local_memory(&mut self, key: RegionKey, memory: Arc<dyn DmaMemory>) -> Result<(), MapMemoryError> {
        self.engine.map(key, memory, true)
    }

    /// Map memory of another process on this machine for chains under `key`.
    ///
    /// # Errors
    /// [`MapMemoryError`]
    pub fn map_memory(&mut self, key: RegionKey, memory: Arc<dyn DmaMemory>) -> Result<(), MapMemoryError> {
        self.engine.map(key, memory, false)
    }

    /// Map a peer's memory for chains under `key`.
    ///
    /// # Errors
    /// [`MapMemoryError`]
    pub fn map_remote(&mut self, key: RegionKey, peer: u16, region: RemoteRegion) -> Result<(), MapMemoryError> {
        self.engine.map_remote(key, (peer, region), false)
    }

    /// Map a peer's landing area: the peer is notified of each complete result, by its offset.
    ///
    /// # Errors
    /// [`MapMemoryError`]
    pub fn map_landing(&mut self, key: RegionKey, peer: u16, region: RemoteRegion) -> Result<(), MapMemoryError> {
        self.engine.map_remote(key, (peer, region), true)
    }

    /// Unmap memory; afterwards nothing accesses it. False if it was not mapped.
    pub fn unmap(&mut self, key: RegionKey) -> bool {
        self.engine.unmap(key)
    }
}

impl Engine for PeerEngine {
    fn capabilities(&self) -> &Capabilities {
        self.engine.capabilities()
    }

    fn submit(&mut self, chain: Chain<'_>) -> Result<(), SubmitError> {
        self.engine.submit(chain)
    }

    fn poll(&mut self, completions: &mut [Completion]) -> usize {
        self.engine.poll(completions)
    }

    fn abort(&mut self, scope: Scope) {
        self.engine.abort(scope);
    }
}

impl LocalMemory for PeerEngine {
    fn with_local<R>(&mut self, dst: Span, src: Span, work: impl FnOnce(&mut [u8], &[u8]) -> R) -> Result<R, Status> {
        self.engine.with_local(dst, src, work)
    }
}

impl std::fmt::Debug for PeerEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PeerEngine").field("capabilities", self.engine.capabilities()).finish_non_exhaustive()
    }
}

/// A peer: its connection, `None` once detached.
struct Link {
    connection: Option<OneSided>,
    /// Batches in flight at this peer: the number after each one's last operation, and the batch.
    marks: VecDeque<(u64, u64)>,
    /// Operations that the batch being posted needs.
    wanted: usize,
    /// It could not be stopped.
    is_unstoppable: bool,
    /// The number of its queue pair.
    qpn: u32,
    /// Arrivals that were not taken.
    inbox: VecDeque<Received>,
}

/// A peer's message link.
pub struct PeerLink<'a> {
    peers: &'a mut Peers,
    peer: usize,
}

impl std::fmt::Debug for PeerLink<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PeerLink").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl MessageLink for PeerLink<'_> {
    fn send(&mut self, message: &[u8]) -> Result<bool, LinkError> {
        let link = &mut self.peers.links[self.peer];
        let connection = link.connection.as_mut().ok_or(LinkError::Fenced)?;
        connection.send(message)
    }

    fn receive(&mut self, into: &mut [u8; MESSAGE_LEN_BYTES]) -> Result<Option<Arrived>, LinkError> {
        if self.peers.links[self.peer].inbox.is_empty() {
            self.peers.receive();
        }
        let link = &mut self.peers.links[self.peer];
        match link.inbox.pop_front() {
            Some(received) => Ok(self.peers.receives.as_mut().map(|receives| receives.take(received, into))),
            // Without arrivals, poll for the completion of sent messages: that is how a dead peer is noticed.
            None => match &mut link.connection {
                Some(connection) if !connection.is_idle() => connection.poll().error.map_or(Ok(None), Err),
                Some(connection) => {
                    connection.check_device(false);
                    connection.error().map_or(Ok(None), Err)
                }
                None => Err(LinkError::Fenced),
            },
        }
    }
}

impl Link {
    fn error(&self) -> Option<LinkError> {
        self.connection.as_ref().map_or(Some(LinkError::Fenced), OneSided::error)
    }
}

/// A batch that has not ended.
#[derive(Debug, Clone, Copy, Default)]
struct Batch {
    /// Connections at which it has not ended.
    open: u16,
    is_lost: bool,
}

/// All connections.
struct Peers {
    // Declared before the domain; the engine deregisters its memory after this.
    links: Vec<Link>,
    /// Indexed by batch number.
    batches: [Batch; CHAINS],
    ended: VecDeque<BatchOutcome>,
    receives: Option<SharedReceives>,
    domain: Arc<Domain>,
}

impl Peers {
    fn attach(&mut self, connection: OneSided) -> u16 {
        let (marks, inbox) = (VecDeque::with_capacity(CHAINS), VecDeque::with_capacity(BUFFERS));
        let qpn = connection.end().qpn;
        let link = Link { connection: Some(connection), marks, wanted: 0, is_unstoppable: false, qpn, inbox };
        // Reuse the number of a peer whose connection has ended and that no batch waits for.
        let free = self.links.iter().position(|link| link.connection.is_none() && link.marks.is_empty());
        let at = free.unwrap_or(self.links.len());
        if at == self.links.len() {
            self.links.push(link);
        } else {
            self.links[at] = link;
        }
        // A device's children have 16-bit numbers.
        at as u16
    }

    fn detach(&mut self, peer: u16) -> Result<(), VerbsError> {
        let Some(link) = self.links.get_mut(usize::from(peer)) else { return Ok(()) };
        // Whether everything has taken effect or not: the connection is destroyed.
        let stopped = link.connection.as_mut().map_or(Ok(true), OneSided::stop);
        self.destroy(peer.into());
        let link = &mut self.links[usize::from(peer)];
        link.connection = None;
        let inbox = std::mem::take(&mut link.inbox);
        self.receives.iter_mut().for_each(|receives| inbox.iter().for_each(|&received| receives.discard(received)));
        self.poll_connections();
        stopped.map(|_| ())
    }

    /// Destroy the queue pair of a connection that was stopped, if that was possible. Drivers discard the completions
    /// of a destroyed queue pair and with them the numbers of its buffers, so all of them are read before.
    fn destroy(&mut self, peer: usize) {
        self.receive();
        self.links[peer].connection.iter_mut().for_each(OneSided::destroy);
    }

    /// Take arrivals of all peers. Those of unknown queue pairs are discarded.
    fn receive(&mut self) {
        let Self { links, receives, .. } = self;
        let Some(receives) = receives else { return };
        receives.poll(|qpn, received| {
            let link = links.iter_mut().find(|link| link.qpn == qpn && link.connection.is_some());
            link.map(|link| link.inbox.push_back(received)).is_some()
        });
    }

    /// Take completed batches, and those that failed with their connection.
    fn poll_connections(&mut self) {
        let Self { links, batches, ended, .. } = self;
        let mut has_unstoppable = false;
        for link in links {
            // No batch waits for this connection.
            if link.marks.is_empty() {
                continue;
            }
            let progress = link.connection.as_mut().map(OneSided::poll);
            let done = progress.map_or(0, |progress| progress.done);
            let is_over = progress.is_none_or(|progress| progress.error.is_some());
            // Whatever ended it, no operation may take effect any more; a connection that does not stop is destroyed.
            let connection = link.connection.as_mut().filter(|_| is_over);
            link.is_unstoppable = connection.is_some_and(|connection| !connection.stop().unwrap_or(false));
            has_unstoppable |= link.is_unstoppable;
            while let Some(&(end, number)) = link.marks.front() {
                let is_done = end <= done;
                if !is_done && !is_over {
                    break;
                }
                link.marks.pop_front();
                let batch = &mut batches[number as usize];
                batch.open -= 1;
                batch.is_lost |= !is_done;
                if batch.open == 0 {
                    ended.push_back(if batch.is_lost {
                        BatchOutcome::Lost(number)
                    } else {
                        BatchOutcome::Done(number)
                    });
                }
            }
        }
        if has_unstoppable {
            for at in 0..self.links.len() {
                if std::mem::take(&mut self.links[at].is_unstoppable) {
                    self.destroy(at);
                }
            }
        }
    }

    /// Count the operations that a batch needs at each connection; return whether any has ended, and whether all others
    /// have room.
    fn has_room(&mut self, copies: &[Copy]) -> (bool, bool) {
        self.links.iter_mut().for_each(|link| link.wanted = 0);
        let (mut is_over, mut has_room) = (false, true);
        for copy in copies {
            let Some(peer) = copy.src.peer.or(copy.dst.peer) else { continue };
            match self.links.get_mut(usize::from(peer)) {
                Some(link) if link.error().is_none() => link.wanted += 1,
                _ => is_over = true,
            }
        }
        for link in &self.links {
            has_room &= link.wanted <= link.connection.as_ref().map_or(0, OneSided::room);
        }
        (is_over, has_room)
    }
}

impl Copier for Peers {
    type Registration = Registration;

    fn register(&mut self, memory: &Arc<dyn DmaMemory>) -> Result<(Registration, u32), VerbsError> {
        let registration = Registration::new(&self.domain, memory)?;
        let lkey = registration.lkey();
        Ok((registration, lkey))
    }

    fn post(&mut self, copies: &[Copy], number: u64) -> Result<(), NotPosted> {
        let (is_over, has_room) = self.has_room(copies);
        if is_over {
            self.ended.push_back(BatchOutcome::Lost(number));
            return Ok(());
        }
        if !has_room {
            return Err(NotPosted::Busy);
        }
        let batch = &mut self.batches[number as usize];
        *batch = Batch::default();
        for copy in copies {
            let Copy { src, dst, len_bytes } = *copy;
            let (opcode, peer, here, there) = match (src.peer, dst.peer) {
                (Some(peer), _) => (ibv_wr_opcode::IBV_WR_RDMA_READ, peer, dst, src),
                (None, Some(peer)) if dst.word.is_some() => (ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM, peer, src, dst),
                (None, Some(peer)) => (ibv_wr_opcode::IBV_WR_RDMA_WRITE, peer, src, dst),
                (None, None) => {
                    let at = |addr: u64| std::ptr::with_exposed_provenance_mut::<u8>(addr as usize);
                    // SAFETY: the engine found both ranges in mapped memory of this process, disjoint; it is memory of
                    // devices, to which no references exist.
                    unsafe { at(dst.addr).copy_from_nonoverlapping(at(src.addr), len_bytes as usize) };
                    continue;
                }
            };
            let link = &mut self.links[usize::from(peer)];
            let queued = link.connection.as_mut().map(|connection| {
                let remote = (there.addr, there.key);
                connection.queue_checked((opcode, there.word), (here.addr, here.key), remote, len_bytes)
            });
            let Some(Ok(nth)) = queued else {
                // Unexpected, as there was room and no error; the chain fails.
                batch.is_lost = true;
                continue;
            };
            match link.marks.back_mut() {
                Some((end, last)) if *last == number => *end = nth + 1,
                _ => {
                    link.marks.push_back((nth + 1, number));
                    batch.open += 1;
                }
            }
        }
        self.links.iter_mut().filter(|link| link.wanted > 0).for_each(|link| {
            link.connection.as_mut().into_iter().for_each(OneSided::flush);
        });
        let Batch { open, is_lost } = self.batches[number as usize];
        if open == 0 {
            self.ended.push_back(if is_lost { BatchOutcome::Lost(number) } else { BatchOutcome::Done(number) });
        }
        Ok(())
    }

    fn poll(&mut self) -> Option<BatchOutcome> {
        if self.ended.is_empty() {
            self.poll_connections();
        }
        self.ended.pop_front()
    }

    fn stop(&mut self) {
        // Dropping a connection destroys its queue pair, which ends everything that was posted.
        self.links.clear();
    }
}
