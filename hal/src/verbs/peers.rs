//! A copy-only DMA engine over one-sided connections: it pulls from peers' memory (RDMA READ) into this side's, and writes
//! back (RDMA WRITE). With it a device reduces by reference what ranks of other hosts have.
//!
//! A batch may be for several peers; it has ended when it has at each. One connection completes in order, and asks for one
//! completion a batch.
//!
//! Invariants:
//! - Submitting and polling allocate nothing, once the peers are connected.
//! - What is posted is of memory that the engine keeps registered until its batch has ended.
//! - A connection that has ended takes the chains that were at its peer along, each once, and nobody else's.

use super::config::VerbsError;
use super::copying::{CHAINS, Copier, Copy, Copying, Ended, MapMemoryError, NotPosted};
use super::memory::Lent;
use super::objects::Domain;
use super::one_sided::{LinkError, MESSAGE_MAX_BYTES, OneSided};
use super::region::{RemoteRegion, VerbsDomain};
use crate::dma::{
    Capabilities, Chain, Completion, DmaMemory, Engine, LocalMemory, RegionKey, Scope, Span, Status, SubmitError,
};
use ibverbs_sys::ibv_wr_opcode;
use std::collections::VecDeque;
use std::sync::Arc;

/// An engine that reaches the memory of peers.
pub struct PeerEngine {
    engine: Copying<Peers>,
}

impl PeerEngine {
    /// Make an engine in this domain, for `regions` regions of its own and of peers.
    pub fn new(domain: &VerbsDomain, regions: usize) -> Self {
        let peers = Peers {
            links: Vec::new(),
            batches: [Batch::default(); CHAINS],
            ended: VecDeque::with_capacity(CHAINS),
            domain: Arc::clone(&domain.domain),
        };
        Self { engine: Copying::new(peers, MESSAGE_MAX_BYTES, regions) }
    }

    /// Take a connection of the engine's domain; returns the peer's number.
    pub fn attach(&mut self, connection: OneSided) -> u16 {
        self.engine.copier_mut().attach(connection)
    }

    /// End a peer's connection: afterwards nothing that was posted to it takes effect, and its chains end as
    /// [`Status::Hardware`].
    ///
    /// # Errors
    /// [`VerbsError`]
    pub fn detach(&mut self, peer: u16) -> Result<(), VerbsError> {
        self.engine.copier_mut().detach(peer)
    }

    /// Return what has ended a peer's connection, if it has.
    pub fn error(&self, peer: u16) -> Option<LinkError> {
        self.engine.copier().links.get(usize::from(peer)).map_or(Some(LinkError::Fenced), Link::error)
    }

    /// Let chains reach this side's own memory under `key`, and its processor as well.
    ///
    /// # Errors
    /// [`MapMemoryError`]
    pub fn map_local_memory(&mut self, key: RegionKey, memory: Arc<dyn DmaMemory>) -> Result<(), MapMemoryError> {
        self.engine.map(key, memory, true)
    }

    /// Let chains reach memory of a peer under `key`, as the peer has told of it.
    ///
    /// # Errors
    /// [`MapMemoryError`]
    pub fn map_remote(&mut self, key: RegionKey, peer: u16, region: RemoteRegion) -> Result<(), MapMemoryError> {
        self.engine.map_remote(key, peer, region)
    }

    /// Take memory away; when this returns, nothing touches it. False if it is not there.
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

/// A peer's connection; `None` once it was detached.
struct Link {
    connection: Option<OneSided>,
    /// Batches that it has part in: the operation behind each one's last, and the batch.
    marks: VecDeque<(u64, u64)>,
    /// Operations of the batch that is being posted.
    wanted: usize,
}

impl Link {
    fn error(&self) -> Option<LinkError> {
        self.connection.as_ref().map_or(Some(LinkError::Fenced), OneSided::error)
    }
}

/// A batch that has not ended.
#[derive(Debug, Clone, Copy, Default)]
struct Batch {
    /// Connections that it waits for.
    open: u16,
    is_lost: bool,
}

/// All connections.
struct Peers {
    // Before the domain; and the engine lets go of its memory after them.
    links: Vec<Link>,
    /// By their numbers.
    batches: [Batch; CHAINS],
    ended: VecDeque<Ended>,
    domain: Arc<Domain>,
}

impl Peers {
    fn attach(&mut self, connection: OneSided) -> u16 {
        let link = Link { connection: Some(connection), marks: VecDeque::with_capacity(CHAINS), wanted: 0 };
        // A number whose connection has ended, and that no batch waits for, is free.
        let free = self.links.iter().position(|link| link.connection.is_none() && link.marks.is_empty());
        let at = free.unwrap_or(self.links.len());
        if at == self.links.len() {
            self.links.push(link);
        } else {
            self.links[at] = link;
        }
        // As many as a device has children, which have numbers of 16 bits.
        at as u16
    }

    fn detach(&mut self, peer: u16) -> Result<(), VerbsError> {
        let Some(link) = self.links.get_mut(usize::from(peer)) else { return Ok(()) };
        if let Some(connection) = &mut link.connection {
            connection.fence([])?;
        }
        link.connection = None;
        self.look();
        Ok(())
    }

    /// Take what connections have completed, or have taken along.
    fn look(&mut self) {
        let Self { links, batches, ended, .. } = self;
        for link in links {
            // What is not waited for is not looked at.
            if link.marks.is_empty() {
                continue;
            }
            let progress = link.connection.as_mut().map(OneSided::poll);
            let done = progress.map_or(0, |progress| progress.done);
            let is_over = progress.is_none_or(|progress| progress.error.is_some());
            // Whatever ended it, nothing of it is to come any more; one that can't be stopped is given back.
            link.connection.take_if(|connection| is_over && connection.fence([]).is_err());
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
                    ended.push_back(if batch.is_lost { Ended::Lost(number) } else { Ended::Done(number) });
                }
            }
        }
    }

    /// Count what a batch wants of each connection; how many are over, and whether all others have room.
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
    type Registration = Lent;

    fn register(&mut self, memory: &Arc<dyn DmaMemory>) -> Result<(Lent, u32), VerbsError> {
        let lent = Lent::new(&self.domain, memory)?;
        let lkey = lent.lkey();
        Ok((lent, lkey))
    }

    fn post(&mut self, copies: &[Copy], number: u64) -> Result<(), NotPosted> {
        let (is_over, has_room) = self.has_room(copies);
        if is_over {
            self.ended.push_back(Ended::Lost(number));
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
                (None, Some(peer)) => (ibv_wr_opcode::IBV_WR_RDMA_WRITE, peer, src, dst),
                (None, None) => {
                    let at = |addr: u64| std::ptr::with_exposed_provenance_mut::<u8>(addr as usize);
                    // SAFETY: the engine has found both ranges in memory of this process that is mapped, and that they do not
                    // overlap; it is memory of devices, to which nobody has references.
                    unsafe { at(dst.addr).copy_from_nonoverlapping(at(src.addr), len_bytes as usize) };
                    continue;
                }
            };
            let link = &mut self.links[usize::from(peer)];
            let queued = link.connection.as_mut().map(|connection| {
                connection.queue_checked(opcode, (here.addr, here.key), (there.addr, there.key), len_bytes)
            });
            let Some(Ok(nth)) = queued else {
                // There was room, and no error; whatever it is, the chain is told.
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
            self.ended.push_back(if is_lost { Ended::Lost(number) } else { Ended::Done(number) });
        }
        Ok(())
    }

    fn poll(&mut self) -> Option<Ended> {
        if self.ended.is_empty() {
            self.look();
        }
        self.ended.pop_front()
    }

    fn stop(&mut self) {
        // Dropped, a connection's queue pair is gone, and all that was posted with it.
        self.links.clear();
    }
}
