//! The device's side of an in-process link: an emulated engine that accesses the memory of ranks on other hosts.

use super::super::{Link, LinkEnd, LinkFailure, RankLink, RemoteRegion};
use super::{End, Exchange, ExchangeLink, Parcel};
use crate::dma::{
    Capabilities, Chain, Completion, Engine, LocalMemory, RegionKey, Scope, Span, Status, Step, SubmitError, Tag,
};
use crate::emu::dma::{EmuEngine, MapError};
use rustix::event::{EventfdFlags, eventfd};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A step of a chain that accesses a peer's memory, and the offset that it announces.
#[derive(Debug, Clone, Copy)]
struct Touched {
    step: u16,
    peer: u16,
    landed: Option<u32>,
}

/// An emulated engine that accesses the memory of ranks and announces the results that it writes there.
pub struct ExchangeDevice {
    engine: EmuEngine,
    exchange: Exchange,
    event: Arc<OwnedFd>,
    peers: Vec<Option<ExchangeLink>>,
    /// Mapped memory of ranks: key, peer, and whether it is a landing area.
    remote: Vec<(RegionKey, u16, bool)>,
    /// Chains in flight, and their steps that access peers' memory.
    chains: Vec<(Tag, Vec<Touched>)>,
}

impl fmt::Debug for ExchangeDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExchangeDevice").field("peers", &self.peers).finish_non_exhaustive()
    }
}

impl ExchangeDevice {
    /// Connect an engine to the ranks of this exchange.
    ///
    /// # Errors
    /// [`LinkFailure`] if the system has no eventfd left.
    pub fn new(engine: EmuEngine, exchange: Exchange) -> Result<Self, LinkFailure> {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        let event = Arc::new(event.map_err(|errno| LinkFailure(format!("an event: {errno}")))?);
        Ok(Self { engine, exchange, event, peers: Vec::new(), remote: Vec::new(), chains: Vec::new() })
    }

    /// Return the engine.
    pub const fn engine(&mut self) -> &mut EmuEngine {
        &mut self.engine
    }

    /// Connect to a rank's end; returns the peer's number and the address of the device's end.
    ///
    /// # Errors
    /// [`LinkFailure`]
    pub fn connect(&mut self, rank: &LinkEnd) -> Result<(u16, LinkEnd), LinkFailure> {
        let mut link = self.exchange.rank_link()?;
        // An arrival from any rank wakes the device.
        self.exchange.lock().ends[link.number].event = Arc::clone(&self.event);
        link.connect(rank)?;
        let end = link.end();
        self.peers.push(Some(link));
        Ok((self.peers.len() as u16 - 1, end))
    }

    /// Return a rank's link, if it has not been closed.
    pub fn link(&mut self, peer: u16) -> Option<&mut dyn Link> {
        self.peers.get_mut(usize::from(peer))?.as_mut().map(|link| link as &mut dyn Link)
    }

    /// End a rank's connection.
    pub fn close(&mut self, peer: u16) {
        if let Some(place) = self.peers.get_mut(usize::from(peer)) {
            *place = None;
        }
    }

    /// Map a rank's memory for chains under `key`.
    ///
    /// # Errors
    /// [`MapError`], or `None` if there is no such memory.
    pub fn map_remote(
        &mut self,
        key: RegionKey,
        (peer, region): (u16, &RemoteRegion),
        lands: bool,
    ) -> Result<(), Option<MapError>> {
        let memory = self.exchange.lock().memory.get(&region.rkey).cloned();
        self.engine.map(key, memory.ok_or(None)?).map_err(Some)?;
        self.remote.push((key, peer, lands));
        Ok(())
    }

    /// Unmap memory; false if it was not mapped.
    pub fn unmap(&mut self, key: RegionKey) -> bool {
        self.remote.retain(|(known, ..)| *known != key);
        self.engine.unmap(key)
    }

    /// Return the descriptor that becomes readable on an arrival.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Reset the descriptor: later arrivals make it readable again.
    pub fn arm(&mut self) {
        let _ = rustix::io::read(&*self.event, &mut [0; 8]);
    }

    /// Return whether an arrival waits.
    pub fn has_work(&self) -> bool {
        let state = self.exchange.lock();
        let waits = |link: &ExchangeLink| !state.ends[link.number].inbox.is_empty();
        self.peers.iter().flatten().any(waits)
    }

    /// Return the steps of a chain that access peers' memory.
    fn touched(&self, steps: &[Step]) -> Vec<Touched> {
        let of = |key: RegionKey| self.remote.iter().find(|(known, ..)| *known == key).copied();
        let mut touched = Vec::new();
        for (step, at) in (0..).zip(steps) {
            let read = at.src().and_then(|src| of(src.region));
            touched.extend(read.map(|(_, peer, _)| Touched { step, peer, landed: None }));
            let written = of(at.dst().region);
            touched.extend(written.map(|(_, peer, lands)| {
                let landed = lands.then_some(at.dst().offset_bytes as u32);
                Touched { step, peer, landed }
            }));
        }
        touched
    }

    /// A step accessed memory that is not mapped: the peer's hardware refuses, which ends its connection.
    fn refuse(&mut self, step: u16, touched: &[Touched]) {
        let mut state = self.exchange.lock();
        for peer in touched.iter().filter(|touched| touched.step == step).map(|touched| touched.peer) {
            if let Some(Some(link)) = self.peers.get(usize::from(peer)) {
                state.ends[link.number].is_open = false;
            }
        }
    }

    /// Announce the results that a chain has written; false if a peer that it accessed has gone.
    fn announce(&self, touched: &[Touched]) -> bool {
        let mut state = self.exchange.lock();
        touched.iter().all(|Touched { peer, landed, .. }| {
            let Some(Some(link)) = self.peers.get(usize::from(*peer)) else { return false };
            let End { peer, is_open, .. } = &state.ends[link.number];
            let is_there = *is_open && peer.is_some_and(|peer| state.ends[peer].is_open);
            is_there && landed.is_none_or(|offset| state.put(link.number, Parcel::Landed(offset)) == Ok(true))
        })
    }
}

impl Engine for ExchangeDevice {
    fn capabilities(&self) -> &Capabilities {
        self.engine.capabilities()
    }

    fn submit(&mut self, chain: Chain<'_>) -> Result<(), SubmitError> {
        let touched = self.touched(chain.steps);
        let tag = chain.tag;
        self.engine.submit(chain)?;
        if !touched.is_empty() {
            self.chains.push((tag, touched));
        }
        Ok(())
    }

    fn poll(&mut self, completions: &mut [Completion]) -> usize {
        let count = self.engine.poll(completions);
        for completion in &mut completions[..count] {
            let Some(at) = self.chains.iter().position(|(tag, _)| *tag == completion.tag) else { continue };
            let (_, touched) = self.chains.swap_remove(at);
            match completion.status {
                Status::Done if self.announce(&touched) => {}
                Status::OutOfBounds => {
                    self.refuse(completion.step, &touched);
                    completion.status = Status::Hardware;
                }
                Status::Done => (completion.status, completion.step) = (Status::Hardware, 0),
                _ => {}
            }
        }
        count
    }

    fn abort(&mut self, scope: Scope) {
        self.engine.abort(scope);
    }
}

impl LocalMemory for ExchangeDevice {
    fn with_local<R>(&mut self, dst: Span, src: Span, work: impl FnOnce(&mut [u8], &[u8]) -> R) -> Result<R, Status> {
        self.engine.with_local(dst, src, work)
    }
}
