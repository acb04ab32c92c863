//! Chains that run on the submitting thread: short ones at once, and with `shares_work` a share of the others.
//!
//! On a machine with fewer cores than threads, a thread that only submits has to take a core from an engine's thread
//! whenever it submits or polls. A thread that also runs chains between polls does not.
//!
//! Invariant: a queued chain counts as in flight, for strict mode and for accesses to local memory, until it has run.

use super::map::Map;
use super::run::Runner;
use super::strict::InFlight;
use super::worker::Shared;
use super::{DmaConfig, Strictness};
use crate::dma::{Capabilities, Chain, Completion, RegionKey, Scope, Status, Step, Tag};
use std::collections::VecDeque;
use std::sync::Arc;

/// A queued chain.
struct Waiting {
    tag: Tag,
    scope: Scope,
    generation: u16,
    steps: usize,
}

/// Runs chains on the submitting thread.
pub(super) struct InlineRunner {
    /// Borrows from `shared`, which is dropped later.
    runner: Runner<'static>,
    shared: Arc<Shared>,
    shares_work: bool,
    inline_len_bytes: u64,
    waiting: VecDeque<Waiting>,
    steps: VecDeque<Step>,
    /// The steps of the chain that runs.
    chain: Vec<Step>,
    pub(super) in_flight: InFlight,
}

impl InlineRunner {
    pub(super) fn new(shared: &Arc<Shared>, capabilities: Capabilities, config: &DmaConfig) -> Self {
        // SAFETY: `shared` keeps the map alive and is dropped after the runner. The content of an `Arc` does not move.
        let map: &'static Map = unsafe { &*std::ptr::from_ref(&shared.map) };
        let depth = config.queue_depth as usize;
        let capacity = if config.shares_work { depth } else { 0 };
        Self {
            runner: Runner::new(map, capabilities, config.strictness != Strictness::Hardware),
            shared: shared.clone(),
            shares_work: config.shares_work,
            inline_len_bytes: config.inline_len_bytes,
            waiting: VecDeque::with_capacity(capacity),
            steps: VecDeque::with_capacity(capacity),
            chain: Vec::with_capacity(config.max_steps as usize),
            in_flight: InFlight::new(capacity),
        }
    }

    pub(super) const fn shares_work(&self) -> bool {
        self.shares_work
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Run a chain at once if it is short enough.
    pub(super) fn run_short(&mut self, chain: &Chain<'_>) -> Option<Completion> {
        let written: u64 = chain.steps.iter().map(Step::dst_len_bytes).sum();
        if written > self.inline_len_bytes {
            return None;
        }
        let (status, step) = self.runner.run(chain.steps, || false);
        Some(Completion { tag: chain.tag, status, step })
    }

    /// Queue a chain for [`InlineRunner::work`]; there must be room. Its accesses to the `local` regions are recorded,
    /// or all its accesses if `local` is `None`.
    pub(super) fn push(&mut self, chain: &Chain<'_>, local: Option<impl Iterator<Item = RegionKey>>) {
        let Chain { tag, scope, steps } = *chain;
        let generation = self.shared.generation(scope);
        match local {
            Some(local) => self.in_flight.push_local(tag, steps, local),
            None => self.in_flight.push(tag, steps),
        }
        self.steps.extend(steps);
        self.waiting.push_back(Waiting { tag, scope, generation, steps: steps.len() });
    }

    /// Run the oldest queued chain, if there is one.
    pub(super) fn work(&mut self) -> Option<Completion> {
        let Waiting { tag, scope, generation, steps } = self.waiting.pop_front()?;
        self.chain.clear();
        self.chain.extend(self.steps.drain(..steps));
        let shared = &self.shared;
        let aborted = || shared.generation(scope) != generation;
        let (status, step) = if aborted() { (Status::Aborted, 0) } else { self.runner.run(&self.chain, aborted) };
        self.in_flight.pop();
        Some(Completion { tag, status, step })
    }
}
