//! A device's DMA engine in virtual time. The emulated engine executes the steps; this one determines when, in which
//! order among chains, how far a failing chain gets, and at which step the device dies.
//!
//! Invariants, checked: chains in flight conflict neither with each other nor with the processor; no more descriptors
//! are queued than the queue holds.

use super::draw::{CrashPoint, Setup};
use crate::oracle::weight;
use crate::sim::options::Draw;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::dma::{
    Address, Capabilities, Chain, Completion, Engine, LocalMemory, RegionKey, Scope, Span, Status, Step, SubmitError,
    Tag,
};
use sumac_hal::emu::dma::{DmaConfig, EmuEngine, HeapMemory, Strictness};
use sumac_hal::ring::SpinPolicy;
use sumac_hal::time::Instant;

/// Regions of all functions of a device.
pub(super) const REGIONS: usize = 128;

/// Index of the redo memory among the engine's regions, after those of the table.
pub(super) const REDO: RegionKey = RegionKey { index: REGIONS as u16, generation: 1 };

/// Maximum number of random failures per chunk: a device gives up after one more.
const FAILURES_MAX: u32 = 3;

/// A chain in flight.
struct Flight {
    tag: Tag,
    scope: Scope,
    steps: Vec<Step>,
    at: usize,
    /// When its next step completes.
    due: Instant,
    /// It fails after this many steps and a half.
    fails: Option<usize>,
    is_aborted: bool,
}

/// An effect of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// Fetched a contribution.
    Pulled,
    /// Published a result.
    Published,
    /// Written to a rank's memory: address and length actually written.
    Wrote { to: Address, len_bytes: u64 },
    /// A pulling chain failed before publication.
    Poisoned,
    /// A writing chain failed after publication.
    WriteFailed,
    /// The device died: no effects follow.
    Died,
}

/// A simulated engine.
pub(super) struct SimEngine {
    inner: EmuEngine,
    capabilities: Capabilities,
    flights: Vec<Flight>,
    ended: VecDeque<Completion>,
    /// Chains taken.
    chains: u64,
    /// Failing chains, with the steps before the failure.
    failing: BTreeMap<u64, usize>,
    /// Failures of the chunk in each slot.
    failures: BTreeMap<u32, (u64, u32)>,
    draw: Draw,
    step: Duration,
    pub(super) now: Instant,
    /// A misuse found by the engine.
    pub(super) conflict: Option<String>,
    pub(super) hash: u64,
    /// How often it was full.
    pub(super) refused: u64,
    /// Chains that refer to memory that is gone.
    pub(super) stale: u64,
}

impl SimEngine {
    /// Start an engine with redo memory `redo`; `failing` lists the failing chains and the steps before the failure.
    pub(super) fn new(setup: &Setup, seed: u64, redo: Arc<HeapMemory>, failing: BTreeMap<u64, usize>) -> Self {
        let config = DmaConfig {
            queue_depth: setup.max_steps.next_power_of_two(),
            max_steps: setup.max_steps,
            regions: REGIONS + 1,
            alignment_bytes: setup.alignment_bytes,
            strictness: Strictness::Strict,
            spin: SpinPolicy::NONE,
            // Steps run synchronously.
            inline_len_bytes: u64::MAX,
            shares_work: true,
            ..DmaConfig::new(setup.profile, 0)
        };
        let mut inner = EmuEngine::start(config).expect("no threads are asked for");
        inner.map_local_memory(REDO, redo).expect("the first one there");
        let capabilities = Capabilities::new(setup.profile, setup.max_steps, setup.depth);
        Self {
            inner,
            capabilities: capabilities.with_alignment(setup.alignment_bytes),
            flights: Vec::new(),
            ended: VecDeque::new(),
            chains: 0,
            failing,
            failures: BTreeMap::new(),
            draw: Draw::new(seed),
            step: setup.step,
            now: Instant::ZERO,
            conflict: None,
            hash: seed,
            refused: 0,
            stale: 0,
        }
    }

    /// Map memory.
    pub(super) fn map(&mut self, key: RegionKey, memory: Arc<HeapMemory>) {
        self.inner.map(key, memory).expect("the table gives a key out once");
    }

    /// Unmap memory.
    pub(super) fn unmap(&mut self, key: RegionKey) -> bool {
        self.inner.unmap(key)
    }

    /// Return when the next step completes.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.flights.iter().map(|flight| flight.due).min()
    }

    pub(super) fn has_completions(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Return how many chains are in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Execute the step that is due first; `dies` decides at each point whether the device dies there.
    pub(super) fn advance(&mut self, now: Instant, dies: &mut impl FnMut(CrashPoint) -> bool) -> Vec<Effect> {
        self.now = now;
        let due = self.flights.iter().enumerate().filter(|(_, flight)| flight.due <= now);
        let Some((index, _)) = due.min_by_key(|(_, flight)| flight.due) else { return Vec::new() };
        let flight = &self.flights[index];
        let (tag, at) = (flight.tag, flight.at);
        self.hash = weight(&[self.hash, now.as_nanos(), tag.seq, u64::from(tag.attempt), at as u64]);
        if flight.is_aborted {
            return self.end(index, Status::Aborted);
        }
        let Some(&step) = flight.steps.get(at).filter(|_| flight.fails.is_none_or(|fails| at < fails)) else {
            let has_failed = flight.fails.is_some();
            let mut effects = flight.steps.get(at).copied().map_or_else(Vec::new, |step| self.run_half(&step));
            effects.extend(self.end(index, if has_failed { Status::Hardware } else { Status::Done }));
            return effects;
        };
        let rest: Vec<Step> = flight.steps[at + 1..].to_vec();
        let is_stored = flight.steps[..at].iter().any(|step| matches!(step, Step::Store { .. }));
        let is_published = matches!(step, Step::Publish { words, .. } if words[0] != 0);
        let has_reduced = matches!(step, Step::Store { .. }) || is_published && !is_stored;
        if has_reduced && dies(CrashPoint::Reduced) {
            return vec![Effect::Died];
        }
        if writes(&step) && dies(CrashPoint::Writing) {
            let mut effects = self.run_half(&step);
            effects.push(Effect::Died);
            return effects;
        }
        let status = self.run(&step);
        if status != Status::Done {
            self.stale += u64::from(matches!(status, Status::StaleRegion | Status::BadRegion));
            return self.end(index, status);
        }
        let (effect, point) = if writes(&step) {
            let is_last = !rest.iter().any(writes);
            let wrote = Effect::Wrote { to: step.dst(), len_bytes: step.dst_len_bytes() };
            (Some(wrote), is_last.then_some(CrashPoint::Written))
        } else if is_published {
            // Without writes there is no point between publication and writes.
            (Some(Effect::Published), rest.first().is_some_and(writes).then_some(CrashPoint::Published))
        } else if step.src().is_some_and(|src| src.region != REDO) {
            (Some(Effect::Pulled), Some(CrashPoint::Pulled))
        } else {
            (None, None)
        };
        let mut effects: Vec<Effect> = effect.into_iter().collect();
        if point.is_some_and(dies) {
            effects.push(Effect::Died);
            return effects;
        }
        let due = self.later();
        let flight = &mut self.flights[index];
        (flight.at, flight.due) = (at + 1, due);
        effects
    }

    /// Draw a time after now.
    fn later(&mut self) -> Instant {
        let quarters = if self.draw.chance(50) { 200 } else { 1 + self.draw.below(8) };
        self.now + self.step / 4 * quarters as u32
    }

    fn end(&mut self, index: usize, status: Status) -> Vec<Effect> {
        let flight = self.flights.remove(index);
        // A chain with an injected fault does not report the step.
        let step = if status == Status::Hardware { 0 } else { flight.at as u16 };
        self.ended.push_back(Completion { tag: flight.tag, status, step });
        let is_published = |step: &Step| matches!(step, Step::Publish { words, .. } if words[0] != 0);
        let has_published = flight.steps[..flight.at.min(flight.steps.len())].iter().any(is_published);
        let publishes = flight.steps.iter().any(is_published);
        let has_writes = flight.steps.iter().any(writes);
        match status {
            Status::Done | Status::Aborted => Vec::new(),
            _ if has_writes && (has_published || !publishes) => vec![Effect::WriteFailed],
            _ => vec![Effect::Poisoned],
        }
    }

    fn run(&mut self, step: &Step) -> Status {
        let chain = Chain { tag: Tag::default(), scope: Scope(0), steps: std::slice::from_ref(step) };
        self.inner.submit(chain).expect("it has nothing else to do");
        let mut completion = [Completion { tag: Tag::default(), status: Status::Hardware, step: 0 }];
        assert_eq!(self.inner.poll(&mut completion), 1, "a short chain is done at once");
        completion[0].status
    }

    /// Execute the first half of a step; a publication is atomic and does not start.
    fn run_half(&mut self, step: &Step) -> Vec<Effect> {
        let mut half = *step;
        match &mut half {
            Step::Copy { len_bytes, .. } => *len_bytes /= 2,
            Step::Load { count, .. } | Step::Reduce { count, .. } | Step::Store { count, .. } => *count /= 2,
            _ => return Vec::new(),
        }
        let mask = self.capabilities.alignment_bytes - 1;
        if half.dst_len_bytes() == 0 || half.dst_len_bytes() as u32 & mask != 0 || self.run(&half) != Status::Done {
            return Vec::new();
        }
        let wrote = Effect::Wrote { to: half.dst(), len_bytes: half.dst_len_bytes() };
        writes(&half).then_some(wrote).into_iter().collect()
    }
}

/// Return whether a step writes to a rank's memory.
fn writes(step: &Step) -> bool {
    step.dst().region != REDO
}

/// The spans that a step accesses: address, length, and whether it writes.
fn touches(step: &Step) -> impl Iterator<Item = (Address, u64, bool)> {
    let written = (step.dst(), step.dst_len_bytes(), true);
    [Some(written), step.src().map(|src| (src, step.src_len_bytes(), false))].into_iter().flatten()
}

fn conflict(a: (Address, u64, bool), b: (Address, u64, bool)) -> bool {
    let before = |a: (Address, u64, bool), b: (Address, u64, bool)| a.0.offset_bytes < b.0.offset_bytes + b.1;
    (a.2 || b.2) && a.0.region == b.0.region && before(a, b) && before(b, a)
}

impl Engine for SimEngine {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn submit(&mut self, chain: Chain<'_>) -> Result<(), SubmitError> {
        let (steps, max) = (chain.steps.len(), self.capabilities.max_steps);
        if steps == 0 || steps > max as usize {
            return Err(SubmitError::Length { steps, max });
        }
        let waiting: usize = self.flights.iter().map(|flight| flight.steps.len()).sum();
        if waiting + steps > self.capabilities.queue_depth as usize {
            self.refused += 1;
            return Err(SubmitError::Full { depth: self.capabilities.queue_depth });
        }
        for flight in &self.flights {
            let mut here = flight.steps.iter().flat_map(touches);
            if flight.tag == chain.tag || here.any(|a| chain.steps.iter().flat_map(touches).any(|b| conflict(a, b))) {
                self.conflict = Some(format!("{:?} conflicts with {:?}", chain.tag, flight.tag));
            }
        }
        let (seq, failures) = self.failures.entry(chain.tag.slot).or_default();
        if *seq != chain.tag.seq {
            (*seq, *failures) = (chain.tag.seq, 0);
        }
        let fails = self.failing.get(&self.chains).filter(|_| *failures < FAILURES_MAX);
        let fails = fails.map(|fails| fails % (steps + 1));
        *failures += u32::from(fails.is_some());
        self.chains += 1;
        let due = self.later();
        let steps = chain.steps.to_vec();
        self.flights.push(Flight { tag: chain.tag, scope: chain.scope, steps, at: 0, due, fails, is_aborted: false });
        Ok(())
    }

    fn poll(&mut self, completions: &mut [Completion]) -> usize {
        let count = completions.len().min(self.ended.len());
        completions.iter_mut().zip(self.ended.drain(..count)).for_each(|(to, completion)| *to = completion);
        count
    }

    fn abort(&mut self, scope: Scope) {
        self.flights.iter_mut().filter(|flight| flight.scope == scope).for_each(|flight| flight.is_aborted = true);
    }
}

impl LocalMemory for SimEngine {
    fn with_local<R>(&mut self, dst: Span, src: Span, work: impl FnOnce(&mut [u8], &[u8]) -> R) -> Result<R, Status> {
        for (span, is_written) in [(dst, true), (src, false)].into_iter().filter(|(span, _)| span.len_bytes > 0) {
            let own = (span.address, span.len_bytes, is_written);
            let busy =
                self.flights.iter().find(|flight| flight.steps.iter().flat_map(touches).any(|a| conflict(a, own)));
            if let Some(flight) = busy {
                self.conflict = Some(format!("the processor conflicts with {:?}", flight.tag));
            }
        }
        self.inner.with_local(dst, src, work)
    }
}
