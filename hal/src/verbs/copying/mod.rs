//! A copy-only DMA engine on top of hardware that copies one range at a time: scheduling of chains, independent of what
//! copies.
//!
//! Independent copies of a chain are posted together, with one signalled completion; a step that depends on an earlier
//! one waits for it. Publications are written by the processor in between: they are two words of memory that is mapped
//! here anyway, in an order that no hardware guarantees.
//!
//! Invariants:
//! - Submitting and polling allocate nothing.
//! - At most one batch of a chain is posted; a chain that has ended has none, so nothing accesses its memory.
//! - A step is checked against the regions when it is posted. A region is unmapped when no posted batch accesses it.
//! - A hardware failure stops the engine: its queue is destroyed, and with it all that was posted, before any chain is
//!   completed. A dead peer ends only the chains that access its memory.

mod regions;
#[cfg(test)]
pub(super) mod tests;

pub use regions::MapMemoryError;

use super::alias::{AliasError, MemoryGrant};
use super::config::VerbsError;
use crate::dma::shared::covers_word;
use crate::dma::{
    Address, Backing, Capabilities, Chain, Completion, Coverage, DmaMemory, Engine, LocalMemory, Profile, RegionKey,
    Scope, Span, Status, Step, SubmitError,
};
use crate::remote::RemoteRegion;
use regions::{Found, LANDING_MAX_BYTES, Mapped, Regions};
use std::collections::VecDeque;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The maximum number of steps of a chain: one for each child's contribution, and the accompanying ones.
const STEPS: u32 = 128;

/// The maximum number of chains in flight.
pub(super) const CHAINS: usize = 64;

/// The maximum number of descriptors in flight, which the hardware's queue has to hold.
pub(super) const DEPTH: u32 = 512;

/// How often the hardware is polled for a pending copy before the engine gives it up.
const UNMAP_POLLS_MAX: u32 = 10_000_000;

/// A range of memory, as the hardware addresses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryRange {
    pub(super) addr: u64,
    pub(super) key: u32,
    /// The memory is another function's: its addresses mean something only together with the key.
    pub(super) is_alias: bool,
    /// The peer that owns it; `None`: this process.
    pub(super) peer: Option<u16>,
    /// Immediate data for the peer once all of it is written, if any.
    pub(super) word: Option<u32>,
    /// The backing of local memory. Addresses alone would make memory that is mapped twice look like two ranges.
    pub(super) backing: Option<Backing>,
}

/// A copy for the hardware.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Copy {
    pub(super) src: MemoryRange,
    pub(super) dst: MemoryRange,
    pub(super) len_bytes: u32,
}

/// The outcome of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BatchOutcome {
    /// It completed.
    Done(u64),
    /// A peer has gone: part of the batch took effect, and the rest never will.
    Lost(u64),
    /// Stop the engine after a hardware failure.
    Failed,
}

/// Why a batch was not posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotPosted {
    /// There is no room until a batch ends.
    Busy,
    /// Stop the engine after a hardware failure.
    Failed,
}

/// Hardware that copies.
pub(super) trait Copier {
    /// Keeps memory registered; dropping it deregisters the memory.
    type Registration;

    /// Register memory with the hardware; returns also its key.
    fn register(&mut self, memory: &Arc<dyn DmaMemory>) -> Result<(Self::Registration, u32), VerbsError>;

    /// Post a batch of independent copies.
    fn post(&mut self, copies: &[Copy], number: u64) -> Result<(), NotPosted>;

    /// Return the next outcome of a batch, if any.
    fn poll(&mut self) -> Option<BatchOutcome>;

    /// Destroy the queue: afterwards nothing that was posted takes effect.
    fn stop(&mut self);
}

/// A chain in flight, or a free entry.
struct ChainEntry {
    tag: crate::dma::Tag,
    scope: Scope,
    steps: Vec<Step>,
    /// The number of steps that have taken effect.
    done: usize,
    /// The number of steps that are posted.
    posted: usize,
    is_aborted: bool,
    is_busy: bool,
    /// Its next batch waits for room.
    is_waiting: bool,
}

/// The engine on top of a `Copier`.
pub(super) struct CopyEngine<C: Copier> {
    // Declared before the regions, so that everything posted has ended before they are dropped.
    copier: C,
    capabilities: Capabilities,
    regions: Regions<C::Registration>,
    entries: Box<[ChainEntry]>,
    free: Vec<usize>,
    ended: VecDeque<Completion>,
    batch: Vec<Copy>,
    descriptors: u32,
    /// Chains that wait for room in the send queue.
    waiting: usize,
    is_stopped: bool,
}

impl<C: Copier> CopyEngine<C> {
    /// Create an engine for hardware that copies up to `max_len_bytes` at a time, with `regions` regions.
    pub(super) fn new(copier: C, max_len_bytes: u32, regions: usize) -> Self {
        let entry = |_| ChainEntry {
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
            entries: (0..CHAINS).map(entry).collect(),
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

    /// Map memory for chains under `key`; if `is_local`, for the processor as well, see [`LocalMemory`].
    pub(super) fn map(
        &mut self,
        key: RegionKey,
        memory: Arc<dyn DmaMemory>,
        is_local: bool,
    ) -> Result<(), MapMemoryError> {
        self.regions.check_free(key)?;
        let (registration, lkey) = self.copier.register(&memory)?;
        self.regions.put(key, Mapped::ThisProcess { registration, memory, lkey, is_local });
        Ok(())
    }

    /// Map a peer's memory for chains under `key`; if `lands`, the peer is notified of each result.
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
        self.regions.put(key, Mapped::Peer { peer, region, lands });
        Ok(())
    }

    /// Map another function's memory, which `attach` makes accessible under a local key. Memory that is mapped twice
    /// looks like two ranges: copies to it by two keys are not ordered.
    pub(super) fn map_alias(
        &mut self,
        key: RegionKey,
        grant: &MemoryGrant,
        attach: impl FnOnce(&mut C) -> Result<(C::Registration, u32), AliasError>,
    ) -> Result<(), MapMemoryError> {
        self.regions.check_free(key)?;
        let (alias, lkey) = attach(&mut self.copier)?;
        let region = RemoteRegion { addr: grant.addr, len_bytes: grant.len_bytes, rkey: lkey, generation: 0 };
        self.regions.put(key, Mapped::Alias { _alias: alias, region });
        Ok(())
    }

    /// Unmap memory; afterwards the hardware does not access it. False if it was not mapped.
    pub(super) fn unmap(&mut self, key: RegionKey) -> bool {
        // From here on no step can use it.
        let Some(mapped) = self.regions.take(key) else { return false };
        let mut polls = 0;
        while self.entries.iter().any(|entry| entry.has_posted(key)) {
            self.poll_batches();
            polls += 1;
            if polls == UNMAP_POLLS_MAX {
                self.fail();
            }
        }
        if let Mapped::ThisProcess { registration, memory, .. } = mapped {
            drop(registration);
            drop(memory);
        }
        true
    }

    fn copy_of(&self, step: &Step) -> Result<Copy, Status> {
        self.capabilities.check(step)?;
        let Step::Copy { src, dst, len_bytes } = *step else { return Err(Status::Unsupported) };
        let src = self.regions.find(src, u64::from(len_bytes))?.range;
        let dst = self.regions.find(dst, u64::from(len_bytes))?.range;
        if src.peer.is_some() && dst.peer.is_some() {
            return Err(Status::Unsupported);
        }
        if src.overlaps(u64::from(len_bytes), dst, u64::from(len_bytes)) {
            return Err(Status::Overlap);
        }
        Ok(Copy { src, dst, len_bytes })
    }

    /// Write two words, the second before the first, after all earlier steps and before all later ones; before them,
    /// the checksum of the covered bytes, if any.
    fn publish(&self, step: &Step, (words, covers): ([u64; 2], Coverage)) -> Result<(), Status> {
        self.capabilities.check(step)?;
        let base = self.regions.find(step.dst(), step.dst_len_bytes())?.local_ptr.ok_or(Status::Unsupported)?;
        if !base.addr().is_multiple_of(8) {
            return Err(Status::Misaligned);
        }
        if !covers.is_empty() {
            let (at, len) = (covers.at(step.dst()).ok_or(Status::OutOfBounds)?, covers.len_bytes);
            let covered = self.regions.find(at, len.into())?.local_ptr.ok_or(Status::Unsupported)?;
            // SAFETY: as many bytes of mapped memory. A concurrent write, which breaks the rules, yields a checksum
            // that does not match.
            let third = unsafe { covers_word(covered, len as usize) };
            // SAFETY: a publication that covers bytes spans 24 bytes of mapped memory, 8-byte aligned.
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

    /// Advance a chain of which nothing is posted, until a batch is posted or it has ended.
    fn advance(&mut self, at: usize) {
        loop {
            let entry = &self.entries[at];
            if entry.is_aborted && entry.done < entry.steps.len() {
                return self.end(at, Status::Aborted);
            }
            match entry.steps.get(entry.done).copied() {
                None => return self.end(at, Status::Done),
                Some(step @ Step::Publish { words, covers, .. }) => match self.publish(&step, (words, covers)) {
                    Ok(()) => {
                        let entry = &mut self.entries[at];
                        entry.done += 1;
                        entry.posted = entry.done;
                    }
                    Err(status) => return self.end(at, status),
                },
                Some(_) => {
                    return match self.collect(at).map(|()| self.copier.post(&self.batch, at as u64)) {
                        Err(status) => self.end(at, status),
                        Ok(Ok(())) => {
                            let entry = &mut self.entries[at];
                            entry.posted = entry.done + self.batch.len();
                        }
                        Ok(Err(NotPosted::Busy)) => {
                            self.entries[at].is_waiting = true;
                            self.waiting += 1;
                        }
                        Ok(Err(NotPosted::Failed)) => self.fail(),
                    };
                }
            }
        }
    }

    /// Gather the next independent copies of a chain. An invalid step is an error only if it is the first, because the
    /// steps before it have to take effect.
    fn collect(&mut self, at: usize) -> Result<(), Status> {
        self.batch.clear();
        let ChainEntry { steps, done, .. } = &self.entries[at];
        for step in &steps[*done..] {
            let copy = match self.copy_of(step) {
                Ok(copy) => copy,
                Err(status) if self.batch.is_empty() => return Err(status),
                Err(_) => break,
            };
            if self.batch.iter().any(|earlier| depends(earlier, &copy)) {
                break;
            }
            self.batch.push(copy);
        }
        Ok(())
    }

    fn end(&mut self, at: usize, status: Status) {
        let entry = &mut self.entries[at];
        // A chain has at most `STEPS`.
        let step = entry.done as u16;
        self.ended.push_back(Completion { tag: entry.tag, status, step });
        self.descriptors -= entry.steps.len() as u32;
        entry.steps.clear();
        entry.is_busy = false;
        self.waiting -= usize::from(std::mem::take(&mut entry.is_waiting));
        (entry.done, entry.posted) = (0, 0);
        self.free.push(at);
    }

    /// Stop the engine after a hardware failure.
    fn fail(&mut self) {
        self.is_stopped = true;
        self.copier.stop();
        for at in 0..self.entries.len() {
            if self.entries[at].is_busy {
                self.end(at, Status::Hardware);
            }
        }
    }

    /// Process completed batches and advance their chains.
    fn poll_batches(&mut self) {
        while !self.is_stopped {
            match self.copier.poll() {
                None => break,
                Some(BatchOutcome::Failed) => self.fail(),
                // The number is the index of the chain, as posted.
                Some(BatchOutcome::Lost(number)) => self.end(number as usize, Status::Hardware),
                Some(BatchOutcome::Done(number)) => {
                    let at = number as usize;
                    self.entries[at].done = self.entries[at].posted;
                    self.advance(at);
                }
            }
        }
        if self.waiting > 0 && !self.is_stopped {
            for at in 0..self.entries.len() {
                if std::mem::take(&mut self.entries[at].is_waiting) {
                    self.waiting -= 1;
                    self.advance(at);
                }
            }
        }
    }
}

impl MemoryRange {
    fn overlaps(self, len_bytes: u64, other: Self, other_len_bytes: u64) -> bool {
        if let (Some(own), Some(other)) = (self.backing, other.backing) {
            return own.overlaps(len_bytes as usize, &other, other_len_bytes as usize);
        }
        let is_one_space =
            if self.is_alias || other.is_alias { self.key == other.key } else { self.peer == other.peer };
        is_one_space
            && self.addr < other.addr.saturating_add(other_len_bytes)
            && other.addr < self.addr.saturating_add(len_bytes)
    }
}

impl ChainEntry {
    fn has_posted(&self, key: RegionKey) -> bool {
        let posted = &self.steps[self.done..self.posted];
        posted.iter().any(|step| step.dst().region == key || step.src().is_some_and(|src| src.region == key))
    }

    /// Return whether its remaining steps write these bytes or, if `reads_as_well`, read them.
    fn touches(&self, span: &Span, reads_as_well: bool) -> bool {
        let overlaps = |at: Address, len_bytes: u64| {
            let starts_before = |a: u64, b: u64, len: u64| a < b.saturating_add(len);
            at.region == span.address.region
                && starts_before(at.offset_bytes, span.address.offset_bytes, span.len_bytes)
                && starts_before(span.address.offset_bytes, at.offset_bytes, len_bytes)
        };
        self.steps[self.done..].iter().any(|step| {
            overlaps(step.dst(), step.dst_len_bytes())
                || reads_as_well && step.src().is_some_and(|src| overlaps(src, step.src_len_bytes()))
        })
    }
}

/// Return whether two copies depend on each other's order.
fn depends(a: &Copy, b: &Copy) -> bool {
    let meet = |x: MemoryRange, y: MemoryRange| x.overlaps(u64::from(a.len_bytes), y, u64::from(b.len_bytes));
    meet(a.dst, b.src) || meet(a.dst, b.dst) || meet(a.src, b.dst)
}

impl<C: Copier> Engine for CopyEngine<C> {
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
        // Completions not yet polled occupy an entry.
        if self.ended.len() + (CHAINS - self.free.len()) == CHAINS || self.descriptors + steps as u32 > DEPTH {
            return Err(full);
        }
        let at = self.free.pop().ok_or(full)?;
        let entry = &mut self.entries[at];
        (entry.tag, entry.scope) = (chain.tag, chain.scope);
        entry.steps.extend_from_slice(chain.steps);
        (entry.is_aborted, entry.is_busy) = (false, true);
        self.descriptors += steps as u32;
        self.advance(at);
        Ok(())
    }

    fn poll(&mut self, completions: &mut [Completion]) -> usize {
        self.poll_batches();
        let count = completions.len().min(self.ended.len());
        for (completion, ended) in completions.iter_mut().zip(self.ended.drain(..count)) {
            *completion = ended;
        }
        count
    }

    fn abort(&mut self, scope: Scope) {
        for entry in self.entries.iter_mut().filter(|entry| entry.is_busy && entry.scope == scope) {
            entry.is_aborted = true;
        }
    }
}

impl<C: Copier> LocalMemory for CopyEngine<C> {
    fn with_local<R>(&mut self, dst: Span, src: Span, work: impl FnOnce(&mut [u8], &[u8]) -> R) -> Result<R, Status> {
        let local_ptr = |span: &Span| match self.regions.find(span.address, span.len_bytes)? {
            Found { local_ptr: Some(base), is_local: true, .. } => Ok(base),
            Found { .. } => Err(Status::BadRegion),
        };
        let (to, from) = (local_ptr(&dst)?, local_ptr(&src)?);
        let (dst_len, src_len) = (dst.len_bytes as usize, src.len_bytes as usize);
        let overlaps = from.addr() < to.addr() + dst_len && to.addr() < from.addr() + src_len;
        let in_use = |entry: &ChainEntry| entry.is_busy && (entry.touches(&dst, true) || entry.touches(&src, false));
        if overlaps || self.entries.iter().any(in_use) {
            return Err(Status::Overlap);
        }
        // SAFETY: both are inside mapped memory that is the device's own, they are disjoint, and no chain in flight
        // writes either or reads `dst`. Peers cannot write it either: it is registered for this device's own access
        // only, so the hardware refuses a peer's (`Copier::register`), and processes that map it have it read-only
        // (`map_local_memory`).
        let (to, from) = unsafe { (slice::from_raw_parts_mut(to, dst_len), slice::from_raw_parts(from, src_len)) };
        Ok(work(to, from))
    }
}
