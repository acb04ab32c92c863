//! Operations that are called again and again with the same memory: captured at the second call, and replayed.
//!
//! A graph is known by what it does and by the addresses that it uses, and holds no memory: each replay holds that of
//! its call, at the same addresses.

use super::{Group, Plan, Prepared, Shape};
use crate::gpu::in_flight::Work;
use crate::gpu::{Gpu, GpuError};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// An operation and the addresses of all memory that it uses.
type Key = (Shape, Vec<Range<u64>>);

/// A graph, and the plan that owns the events that it uses.
type Captured<G> = (<G as Gpu>::Graph, Plan<G>);

/// Operations that were called, and the graphs of those that were called again.
pub(super) struct Replays<G: Gpu> {
    known: HashMap<Key, Option<Captured<G>>>,
}

impl<G: Gpu> Default for Replays<G> {
    fn default() -> Self {
        Self { known: HashMap::new() }
    }
}

impl<G: Gpu> Group<G> {
    /// Replay an operation, capturing it at its second call; `None` if it is to be enqueued pass by pass.
    pub(super) fn replay_known(
        &mut self,
        prepared: &mut Prepared<G>,
        plan: &Arc<Plan<G>>,
        after: &[&G::Event],
    ) -> Option<Result<Work<G>, GpuError>> {
        let passes = plan.program.ops.len() as u64;
        let is_short = plan.program.moved_bytes() <= self.options.replay_bytes.saturating_mul(passes);
        // One pass is one launch already; scalars are arguments of passes; captured passes have no times.
        if !is_short || passes < 2 || !prepared.scalings.is_empty() || self.trace.is_some() {
            return None;
        }
        let key = (prepared.shape, prepared.held.iter().map(|memory| self.gpu.addresses(memory)).collect());
        match self.replays.known.get(&key) {
            Some(Some(_)) => {}
            Some(None) => match self.graph(prepared, plan) {
                Ok(graph) => drop(self.replays.known.insert(key.clone(), Some(graph))),
                Err(error) => return Some(Err(error)),
            },
            None => {
                if self.replays.known.len() >= KNOWN_MAX {
                    self.replays.known.clear();
                }
                self.replays.known.insert(key, None);
                return None;
            }
        }
        let (graph, _) = self.replays.known.get(&key)?.as_ref()?;
        let (gpu, hub) = (&self.gpu, &self.streams.hub);
        let enqueued = after.iter().try_for_each(|event| gpu.wait(hub, event));
        let enqueued = enqueued.and_then(|()| gpu.launch(graph, hub));
        let held = std::mem::take(&mut prepared.held);
        Some(self.track(enqueued, held, prepared.path, prepared.fallback.take()))
    }

    /// Capture an operation.
    pub(super) fn graph(&self, prepared: &Prepared<G>, shared: &Plan<G>) -> Result<Captured<G>, GpuError> {
        // Captured events are meaningless outside their capture: use separate ones. A graph costs one launch, so its
        // passes may overlap however short they are.
        let kernel = shared.kernel.clone();
        let plan = Plan::new(&self.gpu, shared.schedules.clone(), shared.program.clone(), kernel, false)?;
        let graph = self.gpu.capture(&self.streams.hub, &mut || {
            // Captured events have no time.
            plan.enqueue(&self.gpu, &self.streams, prepared, &mut None)
        })?;
        Ok((graph, plan))
    }
}

/// Operations known by a group: enough for a training step; then all are forgotten.
const KNOWN_MAX: usize = 1024;
