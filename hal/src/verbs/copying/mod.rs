//! A copy-only DMA engine over hardware that copies one range at a time: the chains, apart from who copies.
//!
//! A chain's copies that have nothing to do with each other are posted together, with one signalled completion; what
//! needs the outcome of an earlier step waits for it. Publications are written by the processor, in between: two words of
//! memory that is mapped here anyway, and no hardware promises the order that they need.
//!
//! Invariants:
//! - Submitting and polling allocate nothing.
//! - Of a chain at most one batch is posted; a chain that has ended has none, so that its memory is quiet.
//! - A step is checked against the regions when it is posted. A region goes when no posted batch touches it.
//! - Hardware that fails ends the engine: its queue is given up, and with it all that was posted, before any chain is told of
//!   it. A peer that is gone ends only the chains that were at its memory.

mod regions;
#[cfg(test)]
mod tests;

pub use regions::MapMemoryError;

use super::config::VerbsError;
use crate::dma::shared::covers_word;
use crate::dma::{
    Address, Backing, Capabilities, Chain, Completion, Covers, DmaMemory, Engine, LocalMemory, Profile, RegionKey,
    Scope, Span, Status, Step, SubmitError,
};
use crate::remote::RemoteRegion;
use regions::{Found, LANDING_MAX_BYTES, Mapped, Regions};
use std::collections::VecDeque;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Steps of a chain: a contribution of each of so many children, and what goes with them.
const STEPS: u32 = 128;

/// Chains in flight.
pub(super) const CHAINS: usize = 64;

/// Descriptors in flight: what the hardware's queue has to hold.
pub(super) const DEPTH: u32 = 512;

/// How often hardware that has a copy is asked for it before it is given up.
const LOOKS: u32 = 10_000_000;

/// Consecutive bytes as the hardware knows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) addr: u64,
    pub(super) key: u32,
    /// Whose memory it is; `None`: of this process.
    pub(super) peer: Option<u16>,
    /// What the peer is told when all of it is written, if it is.
    pub(super) word: Option<u32>,
    /// What it is a part of, if it is this process's: by its address alone, memory that is mapped twice would be two.
    pub(super) backing: Option<Backing>,
}

/// A copy for the hardware.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Copy {
    pub(super) src: Place,
    pub(super) dst: Place,
    pub(super) len_bytes: u32,
}

/// What became of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// All of it has taken effect.
    Done(u64),
    /// A peer is gone: some of it has taken effect, and the rest never will.
    Lost(u64),
    /// The hardware is of no use any more.
    Failed,
}

/// Why a batch was not posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotPosted {
    /// There is room again when something has ended.
    Busy,
    /// The hardware is of no use any more.
    Failed,
}

/// Who copies.
pub(super) trait Copier {
    /// What keeps memory registered; dropped, the hardware no longer reaches it.
    type Registration;

    /// Let the hardware reach memory; returns with it the key.
    fn register(&mut self, memory: &Arc<dyn DmaMemory>) -> Result<(Self::Registration, u32), VerbsError>;

    /// Post a batch of copies, which has nothing to do with each other.
    fn post(&mut self, copies: &[Copy], number: u64) -> Result<(), NotPosted>;

    /// Take the end of a batch, if there is one.
    fn poll(&mut self) -> Option<Ended>;

    /// Give the queue up: afterwards nothing that was posted takes effect.
    fn stop(&mut self);
}

/// A chain that is in flight, or a free place for one.
struct Flight {
    tag: crate::dma::Tag,
    scope: Scope,
    steps: Vec<Step>,
    /// Steps before this one have taken effect.
    done: usize,
    /// Steps before this one are posted.
    posted: usize,
    is_aborted: bool,
    is_busy: bool,
    /// There was no room for its next batch.
    is_waiting: bool,
}

/// The engine over some hardware.
pub(super) struct Copying<C: Copier> {
    // Before the regions: what it has posted is gone before they are.
    copier: C,
    capabilities: Capabilities,
    regions: Regions<C::Registration>,
    flights: Box<[Flight]>,
    free: Vec<usize>,
    ended: VecDeque<Completion>,
    batch: Vec<Copy>,
    descriptors: u32,
    /// Chains that wait for room.
    waiting: usize,
    is_stopped: bool,
}

impl<C: Copier> Copying<C> {
    /// Make an engine of hardware that copies up to `max_len_bytes` at a time, for `regions` regions.
    pub(super) fn new(copier: C, max_len_bytes: u32, regions: usize) -> Self {
        let flight = |_| Flight {
            tag: crate::dma::Tag::default(),
            scope: Scope::default(),
            steps: Vec::with_capacity(STEPS as usize),
            done: 0,
            posted: 0,
            is_aborted: false,
            is_busy: false,
            is_waiting: false,
        };
        Self {
            copier,
            capabilities: Capabilities::new(Profile::CopyOnly, STEPS, DEPTH).with_max_len(max_len_bytes),
            regions: Regions::new(regions),
            flights: (0..CHAINS).map(flight).collect(),
            free: (0..CHAINS).rev().collect(),
            ended: VecDeque::with_capacity(CHAINS),
            batch: Vec::with_capacity(STEPS as usize),
            descriptors: 0,
            waiting: 0,
            is_stopped: false,
        }
    }

    pub(super) const fn copier(&self) -> &C {
        &self.copier
    }

    pub(super) const fn copier_mut(&mut self) -> &mut C {
        &mut self.copier
    }

    /// Let chains reach memory under `key`; memory that is the device's own also its processor, see [`LocalMemory`].
    pub(super) fn map(
        &mut self,
        key: RegionKey,
        memory: Arc<dyn DmaMemory>,
        is_local: bool,
    ) -> Result<(), MapMemoryError> {
        self.regions.check_free(key)?;
        let (registration, lkey) = self.copier.register(&memory)?;
        self.regions.put(key, Mapped::Here { registration, memory, lkey, is_local });
        Ok(())
    }

    /// Let chains reach a peer's memory under `key`; if results land there, the peer is told of each.
    pub(super) fn map_remote(
        &mut self,
        key: RegionKey,
        (peer, region): (u16, RemoteRegion),
        lands: bool,
    ) -> Result<(), MapMemoryError> {
        self.regions.check_free(key)?;
        if lands && region.len_bytes > LANDING_MAX_BYTES {
            return Err(MapMemoryError::TooLong { len_bytes: region.len_bytes });
        }
        self.regions.put(key, Mapped::There { peer, region, lands });
        Ok(())
    }

    /// Take memory away; when this returns, the hardware does not touch it. False if it is not there.
    pub(super) fn unmap(&mut self, key: RegionKey) -> bool {
        // From here on no step finds it.
        let Some(mapped) = self.regions.take(key) else { return false };
        let mut looks = 0;
        while self.flights.iter().any(|flight| flight.has_posted(key)) {
            self.look();
            looks += 1;
            if looks == LOOKS {
                self.fail();
            }
        }
        if let Mapped::Here { registration, memory, .. } = mapped {
            drop(registration);
            drop(memory);
        }
        true
    }

    fn copy_of(&self, step: &Step) -> Result<Copy, Status> {
        self.capabilities.check(step)?;
        let Step::Copy { src, dst, len_bytes } = *step else { return Err(Status::Unsupported) };
        let src = self.regions.find(src, u64::from(len_bytes))?.place;
        let dst = self.regions.find(dst, u64::from(len_bytes))?.place;
        if src.peer.is_some() && dst.peer.is_some() {
            return Err(Status::Unsupported);
        }
        if src.meets(u64::from(len_bytes), dst, u64::from(len_bytes)) {
            return Err(Status::Overlap);
        }
        Ok(Copy { src, dst, len_bytes })
    }

    /// Write two words: the second, then the first, after all before and before all behind; and before them what they
    /// cover.
    fn publish(&self, step: &Step, (words, covers): ([u64; 2], Covers)) -> Result<(), Status> {
        self.capabilities.check(step)?;
        let base = self.regions.find(step.dst(), step.dst_len_bytes())?.here.ok_or(Status::Unsupported)?;
        if !base.addr().is_multiple_of(8) {
            return Err(Status::Misaligned);
        }
        if !covers.is_nothing() {
            let (at, len) = (covers.at(step.dst()).ok_or(Status::OutOfBounds)?, covers.len_bytes);
            let covered = self.regions.find(at, len.into())?.here.ok_or(Status::Unsupported)?;
            // SAFETY: as many bytes of mapped memory. Who writes there meanwhile, against the rules, gets a checksum that
            // does not fit.
            let third = unsafe { covers_word(covered, len as usize) };
            // SAFETY: a publication that covers bytes has 24 of mapped memory, 8-byte aligned.
            let to_third = unsafe { AtomicU64::from_ptr(base.wrapping_add(16).cast()) };
            to_third.store(third.to_le(), Ordering::Release);
        }
        // SAFETY: 16 bytes of mapped memory, 8-byte aligned.
        let (first, second) =
            unsafe { (AtomicU64::from_ptr(base.cast()), AtomicU64::from_ptr(base.wrapping_add(8).cast())) };
        second.store(words[1].to_le(), Ordering::Release);
        first.store(words[0].to_le(), Ordering::Release);
        fence(Ordering::SeqCst);
        Ok(())
    }

    /// Go on with a chain of which nothing is posted, until something is, or it has ended.
    fn advance(&mut self, at: usize) {
        loop {
            let flight = &self.flights[at];
            if flight.is_aborted && flight.done < flight.steps.len() {
                return self.end(at, Status::Aborted);
            }
            match flight.steps.get(flight.done).copied() {
                None => return self.end(at, Status::Done),
                Some(step @ Step::Publish { words, covers, .. }) => match self.publish(&step, (words, covers)) {
                    Ok(()) => {
                        let flight = &mut self.flights[at];
                        flight.done += 1;
                        flight.posted = flight.done;
                    }
                    Err(status) => return self.end(at, status),
                },
                Some(_) => {
                    return match self.collect(at).map(|()| self.copier.post(&self.batch, at as u64)) {
                        Err(status) => self.end(at, status),
                        Ok(Ok(())) => {
                            let flight = &mut self.flights[at];
                            flight.posted = flight.done + self.batch.len();
                        }
                        Ok(Err(NotPosted::Busy)) => {
                            self.flights[at].is_waiting = true;
                            self.waiting += 1;
                        }
                        Ok(Err(NotPosted::Failed)) => self.fail(),
                    };
                }
            }
        }
    }

    /// Gather the next copies of a chain that have nothing to do with each other; one that can't be is an error only as
    /// the first, as those before it are to take effect.
    fn collect(&mut self, at: usize) -> Result<(), Status> {
        self.batch.clear();
        let Flight { steps, done, .. } = &self.flights[at];
        for step in &steps[*done..] {
            let copy = match self.copy_of(step) {
                Ok(copy) => copy,
                Err(status) if self.batch.is_empty() => return Err(status),
                Err(_) => break,
            };
            if self.batch.iter().any(|earlier| is_tied(earlier, &copy)) {
                break;
            }
            self.batch.push(copy);
        }
        Ok(())
    }

    fn end(&mut self, at: usize, status: Status) {
        let flight = &mut self.flights[at];
        // A chain has at most `STEPS`.
        let step = flight.done as u16;
        self.ended.push_back(Completion { tag: flight.tag, status, step });
        self.descriptors -= flight.steps.len() as u32;
        flight.steps.clear();
        flight.is_busy = false;
        self.waiting -= usize::from(std::mem::take(&mut flight.is_waiting));
        (flight.done, flight.posted) = (0, 0);
        self.free.push(at);
    }

    /// The hardware is of no use any more.
    fn fail(&mut self) {
        self.is_stopped = true;
        self.copier.stop();
        for at in 0..self.flights.len() {
            if self.flights[at].is_busy {
                self.end(at, Status::Hardware);
            }
        }
    }

    /// Take what the hardware has completed, and go on with those chains.
    fn look(&mut self) {
        while !self.is_stopped {
            match self.copier.poll() {
                None => break,
                Some(Ended::Failed) => self.fail(),
                // As it was posted: a place's number.
                Some(Ended::Lost(number)) => self.end(number as usize, Status::Hardware),
                Some(Ended::Done(number)) => {
                    let at = number as usize;
                    self.flights[at].done = self.flights[at].posted;
                    self.advance(at);
                }
            }
        }
        if self.waiting > 0 && !self.is_stopped {
            for at in 0..self.flights.len() {
                if std::mem::take(&mut self.flights[at].is_waiting) {
                    self.waiting -= 1;
                    self.advance(at);
                }
            }
        }
    }
}

impl Place {
    fn meets(self, len_bytes: u64, other: Self, other_len_bytes: u64) -> bool {
        if let (Some(own), Some(other)) = (self.backing, other.backing) {
            return own.overlaps(len_bytes as usize, &other, other_len_bytes as usize);
        }
        self.peer == other.peer
            && self.addr < other.addr.saturating_add(other_len_bytes)
            && other.addr < self.addr.saturating_add(len_bytes)
    }
}

impl Flight {
    fn has_posted(&self, key: RegionKey) -> bool {
        let posted = &self.steps[self.done..self.posted];
        posted.iter().any(|step| step.dst().region == key || step.src().is_some_and(|src| src.region == key))
    }

    /// Tell whether what is left of it writes these bytes, or, if asked, reads them.
    fn touches(&self, span: &Span, reads_as_well: bool) -> bool {
        let meets = |at: Address, len_bytes: u64| {
            let starts_before = |a: u64, b: u64, len: u64| a < b.saturating_add(len);
            at.region == span.address.region
                && starts_before(at.offset_bytes, span.address.offset_bytes, span.len_bytes)
                && starts_before(span.address.offset_bytes, at.offset_bytes, len_bytes)
        };
        self.steps[self.done..].iter().any(|step| {
            meets(step.dst(), step.dst_len_bytes())
                || reads_as_well && step.src().is_some_and(|src| meets(src, step.src_len_bytes()))
        })
    }
}

/// Tell whether two copies give something else in the other order, or at once.
fn is_tied(a: &Copy, b: &Copy) -> bool {
    let meet = |x: Place, y: Place| x.meets(u64::from(a.len_bytes), y, u64::from(b.len_bytes));
    meet(a.dst, b.src) || meet(a.dst, b.dst) || meet(a.src, b.dst)
}

impl<C: Copier> Engine for Copying<C> {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn submit(&mut self, chain: Chain<'_>) -> Result<(), SubmitError> {
        if self.is_stopped {
            return Err(SubmitError::Stopped);
        }
        let steps = chain.steps.len();
        if steps == 0 || steps > STEPS as usize {
            return Err(SubmitError::Length { steps, max: STEPS });
        }
        let full = SubmitError::Full { depth: DEPTH };
        // Completions that nobody has taken keep their place.
        if self.ended.len() + (CHAINS - self.free.len()) == CHAINS || self.descriptors + steps as u32 > DEPTH {
            return Err(full);
        }
        let at = self.free.pop().ok_or(full)?;
        let flight = &mut self.flights[at];
        (flight.tag, flight.scope) = (chain.tag, chain.scope);
        flight.steps.extend_from_slice(chain.steps);
        (flight.is_aborted, flight.is_busy) = (false, true);
        self.descriptors += steps as u32;
        self.advance(at);
        Ok(())
    }

    fn poll(&mut self, completions: &mut [Completion]) -> usize {
        self.look();
        let count = completions.len().min(self.ended.len());
        for (completion, ended) in completions.iter_mut().zip(self.ended.drain(..count)) {
            *completion = ended;
        }
        count
    }

    fn abort(&mut self, scope: Scope) {
        for flight in self.flights.iter_mut().filter(|flight| flight.is_busy && flight.scope == scope) {
            flight.is_aborted = true;
        }
    }
}

impl<C: Copier> LocalMemory for Copying<C> {
    fn with_local<R>(&mut self, dst: Span, src: Span, work: impl FnOnce(&mut [u8], &[u8]) -> R) -> Result<R, Status> {
        let here = |span: &Span| match self.regions.find(span.address, span.len_bytes)? {
            Found { here: Some(base), is_local: true, .. } => Ok(base),
            Found { .. } => Err(Status::BadRegion),
        };
        let (to, from) = (here(&dst)?, here(&src)?);
        let (dst_len, src_len) = (dst.len_bytes as usize, src.len_bytes as usize);
        let overlaps = from.addr() < to.addr() + dst_len && to.addr() < from.addr() + src_len;
        let in_use = |flight: &Flight| flight.is_busy && (flight.touches(&dst, true) || flight.touches(&src, false));
        if overlaps || self.flights.iter().any(in_use) {
            return Err(Status::Overlap);
        }
        // SAFETY: both are inside mapped memory that is the device's own, they are disjoint, and no chain in flight writes
        // either or reads `dst`. Peers can't write it either, however they misbehave: it is registered for this device's
        // own access only, so that the hardware refuses a peer's (`Copier::register`), and processes that map it have it
        // for reading (`map_local_memory`).
        let (to, from) = unsafe { (slice::from_raw_parts_mut(to, dst_len), slice::from_raw_parts(from, src_len)) };
        Ok(work(to, from))
    }
}
