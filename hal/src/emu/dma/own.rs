//! What the engine's user does itself: short chains at once, and, where it *helps*, a share of the others.
//!
//! On a machine with fewer cores than threads, a thread that hands everything over has to take a core from an engine's
//! thread each time it has something to say. One that works as well, between two looks at its rings, needs none.
//!
//! Invariant: whatever is in the queue is in flight, as strict mode and the device's processor see it, until it has run.

use super::map::Map;
use super::run::Runner;
use super::strict::InFlight;
use super::worker::Shared;
use super::{DmaConfig, Strictness};
use crate::dma::{Capabilities, Chain, Completion, RegionKey, Scope, Status, Step, Tag};
use std::collections::VecDeque;
use std::sync::Arc;

/// A chain that waits.
struct Waiting {
    tag: Tag,
    scope: Scope,
    generation: u16,
    steps: usize,
}

/// The user's own part of an engine.
pub(super) struct Own {
    /// It borrows from `shared`, and is dropped before.
    runner: Runner<'static>,
    shared: Arc<Shared>,
    helps: bool,
    inline_len_bytes: u64,
    waiting: VecDeque<Waiting>,
    steps: VecDeque<Step>,
    /// The chain that runs.
    chain: Vec<Step>,
    pub(super) in_flight: InFlight,
}

impl Own {
    pub(super) fn new(shared: &Arc<Shared>, capabilities: Capabilities, config: &DmaConfig) -> Self {
        // SAFETY: the runner keeps this borrow beside an `Arc` of what it borrows from, which is dropped later; what is
        // behind an `Arc` does not move.
        let map: &'static Map = unsafe { &*std::ptr::from_ref(&shared.map) };
        let depth = config.queue_depth as usize;
        let kept = if config.helps { depth } else { 0 };
        Self {
            runner: Runner::new(map, capabilities, config.strictness != Strictness::Hardware),
            shared: shared.clone(),
            helps: config.helps,
            inline_len_bytes: config.inline_len_bytes,
            waiting: VecDeque::with_capacity(kept),
            steps: VecDeque::with_capacity(kept),
            chain: Vec::with_capacity(config.max_steps as usize),
            in_flight: InFlight::new(kept),
        }
    }

    pub(super) const fn helps(&self) -> bool {
        self.helps
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Run a chain at once if it is short.
    pub(super) fn run_short(&mut self, chain: &Chain<'_>) -> Option<Completion> {
        let written: u64 = chain.steps.iter().map(Step::dst_len_bytes).sum();
        if written > self.inline_len_bytes {
            return None;
        }
        let (status, step) = self.runner.run(chain.steps, || false);
        Some(Completion { tag: chain.tag, status, step })
    }

    /// Keep a chain for [`Own::work`]; there is room. What it touches of the device's own memory is noted, or, without
    /// `local`, all that it touches.
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

    /// Run the oldest chain, if there is one.
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
