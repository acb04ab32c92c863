//! Several ranks on one GPU.

mod prepare;
mod replays;

pub(super) use prepare::{PLANS_MAX, kernel_of, schedules};

use super::buffers::GpuBuffers;
use super::error::GpuError;
use super::in_flight::{GpuCanceller, InFlight, Work};
use super::plan::{Pair, Plan, Prepared, Streams};
use super::trace::{Kind, Timeline, Trace};
use super::{Gpu, nccl};
use crate::memory_kind::MemoryKind;
use crate::plan::Child;
use crate::schedule;
use crate::select::{
    Algo, Candidate, Constants, CostTable, Declared, Explanation, RuledOut, SelectionContext, explain_with,
};
use prepare::Shape;
use replays::Replays;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::reduce::Kernel;

/// Options of a group.
#[derive(Debug, Clone)]
pub struct GroupOptions {
    /// The declared order, over one node with all ranks: it keeps the bits of a result the same for any algorithm.
    pub order: Order,
    /// How the ranks lie, for algorithms of several dimensions. All ranks have the same.
    pub shape: schedule::Shape,
    /// Constants of the cost model.
    pub table: CostTable,
    /// The longest single pass in bytes. Longer ones are split, so that the next rank need not wait for all of it.
    pub piece_bytes: usize,
    /// The average bytes that passes of an operation move, up to which it uses one stream: events between streams cost
    /// more than passes of this length gain by overlapping.
    pub serial_bytes: u64,
    /// The same, up to which an operation that is called again with the same memory is captured, and replayed from then
    /// on: one launch instead of one for each pass.
    pub replay_bytes: u64,
    /// Grace period for stopped operations to end.
    pub grace: Duration,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            order: Order::Arrival,
            shape: schedule::Shape::Line,
            table: CostTable::gpu(),
            piece_bytes: 16 << 20,
            serial_bytes: 256 << 10,
            replay_bytes: 4 << 20,
            grace: Duration::from_secs(2),
        }
    }
}

/// One operation of all ranks.
#[derive(Debug, Clone)]
pub struct Request<'a, M> {
    /// The operation.
    pub desc: OpDesc,
    /// The requested algorithm.
    pub algo: Algo,
    /// Buffers of each rank.
    pub buffers: &'a [GpuBuffers<M>],
    /// Factor of each rank's contribution, for [`ReduceOp::PremulSum`](sumac_hal::op::ReduceOp::PremulSum); empty for
    /// factors of 1.
    pub scalars: &'a [f64],
}

/// What the operations of `ranks` ranks are selected by, with the constants of this table.
pub(super) fn selection_context(
    ranks: u32,
    options: &GroupOptions,
    table: CostTable,
    no_tree: &str,
) -> Result<SelectionContext, GpuError> {
    let invalid = |error: &dyn fmt::Display| GpuError::Invalid(format!("a group of {ranks} ranks: {error}"));
    let GroupOptions { order, shape, .. } = *options;
    let children = (0..ranks).map(|rank| Child::Rank(Rank(rank))).collect();
    shape.check(ranks).map_err(|error| invalid(&error))?;
    let declared = Declared::new(vec![children], ranks, order, shape).map_err(|error| invalid(&error))?;
    let no_rails = || Err("they are of ranks with memory of the host".into());
    let (tree, rails, leaders) = (Err(no_tree.into()), no_rails(), no_rails());
    // Its buffers are in the memory of GPUs.
    let memory = MemoryKind::Registered;
    Ok(SelectionContext { ranks, ranks_per_host: 1, shape, order, tree, rails, leaders, table, declared, memory })
}

/// Several ranks on one GPU, each with its own stream. See [`super`].
pub struct Group<G: Gpu> {
    gpu: G,
    ranks: u32,
    options: GroupOptions,
    selection: SelectionContext,
    canceller: GpuCanceller,
    streams: Streams<G>,
    /// Partial values, sized for the largest operation so far.
    work: Vec<Option<(usize, G::Memory)>>,
    kernels: HashMap<Kernel, Arc<G::Kernel>>,
    plans: HashMap<Shape, Arc<Plan<G>>>,
    replays: Replays<G>,
    in_flight: Vec<InFlight<G>>,
    trace: Option<Trace<G>>,
    /// A stopped operation has not ended.
    is_stuck: bool,
    pid: u32,
}

/// A captured operation that can be repeated on the same memory.
pub struct Repeat<G: Gpu> {
    graph: G::Graph,
    held: Vec<G::Memory>,
    path: Path,
    fallback: Option<String>,
    // Owns the events that the graph uses.
    _plan: Plan<G>,
}

impl<G: Gpu> Group<G> {
    /// Set up `ranks` ranks on a GPU.
    ///
    /// # Errors
    /// [`GpuError::Invalid`] for no ranks, or a shape that does not fit them; the driver's error.
    pub fn new(gpu: G, ranks: u32, options: GroupOptions) -> Result<Self, GpuError> {
        let table = contended_table(&options.table, ranks);
        let no_tree = "the ranks are on one GPU, which no device of the network sees";
        let selection = selection_context(ranks, &options, table, no_tree)?;
        let each = (0..ranks).map(|_| gpu.stream()).collect::<Result<_, _>>()?;
        let streams = Streams { hub: gpu.stream()?, each };
        Ok(Self {
            gpu,
            ranks,
            options,
            selection,
            canceller: GpuCanceller::default(),
            streams,
            work: (0..ranks).map(|_| None).collect(),
            kernels: HashMap::new(),
            plans: HashMap::new(),
            replays: Replays::default(),
            in_flight: Vec::new(),
            trace: None,
            is_stuck: false,
            pid: std::process::id(),
        })
    }

    /// Return the GPU.
    pub const fn gpu(&self) -> &G {
        &self.gpu
    }

    /// Return the number of ranks.
    pub const fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Return a handle that cancels a wait from another thread.
    pub fn canceller(&self) -> GpuCanceller {
        self.canceller.clone()
    }

    /// Explain the selection for an operation: the candidates with their costs or the reasons that rule them out, and
    /// the choice.
    pub fn explain(&self, desc: &OpDesc, algo: Algo) -> Explanation {
        let why = RuledOut::Nccl("the ranks share a GPU, which it does not support".into());
        let nccl = Candidate { path: Path::Nccl, cost_s: Err(nccl::why_not(self.options.order, desc).unwrap_or(why)) };
        explain_with(&self.selection, desc, algo, vec![nccl])
    }

    /// Start recording when enqueued work runs; one trace at a time. Captured work is not traced.
    ///
    /// # Errors
    /// The driver's error.
    pub fn start_trace(&mut self) -> Result<(), GpuError> {
        self.trace = Some(Trace::new(&self.gpu, &self.streams.hub)?);
        Ok(())
    }

    /// Record what `body` enqueues to a stream of a producer or consumer as one span, if a trace is on.
    ///
    /// # Errors
    /// As for [`Trace::span`].
    pub fn trace_span(
        &mut self,
        on: &G::Stream,
        (lane, name): (&str, &str),
        body: impl FnOnce() -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        match &mut self.trace {
            None => body(),
            Some(trace) => trace.span(&self.gpu, on, (lane, name, Kind::Compute), body),
        }
    }

    /// Read the trace; its work must be complete. Empty if none was started.
    ///
    /// # Errors
    /// As for [`Trace::finish`].
    pub fn take_trace(&mut self) -> Result<Timeline, GpuError> {
        Ok(self.trace.take().map(|trace| trace.finish(&self.gpu)).transpose()?.unwrap_or_default())
    }

    /// Return the number of bytes that an operation's passes and copies read and write.
    ///
    /// # Errors
    /// As for [`Self::start`].
    pub fn moved_bytes(&mut self, request: &Request<'_, G::Memory>) -> Result<u64, GpuError> {
        Ok(self.prepare(request)?.1.program.moved_bytes())
    }

    /// Enqueue an operation, which begins when the events `after` have completed. The host does not wait.
    ///
    /// # Errors
    /// [`GpuError::Invalid`] and [`GpuError::Kernel`], before anything was enqueued; the driver's error.
    pub fn start(&mut self, request: &Request<'_, G::Memory>, after: &[&G::Event]) -> Result<Work<G>, GpuError> {
        self.start_between(request, after, &[])
    }

    /// The same, with a copy from the second to the first of each pair before, and back afterwards.
    pub(super) fn start_between(
        &mut self,
        request: &Request<'_, G::Memory>,
        after: &[&G::Event],
        copies: &[Pair<'_, G::Memory>],
    ) -> Result<Work<G>, GpuError> {
        self.check_usable()?;
        let (mut prepared, plan) = self.prepare(request)?;
        if copies.is_empty()
            && let Some(work) = self.replay_known(&mut prepared, &plan, after)
        {
            return work;
        }
        prepared.held.extend(copies.iter().flat_map(|(to, from)| [to.memory.clone(), from.memory.clone()]));
        let (gpu, hub) = (&self.gpu, &self.streams.hub);
        let enqueued = after.iter().try_for_each(|event| gpu.wait(hub, event));
        let enqueued = enqueued.and_then(|()| copies.iter().try_for_each(|&(to, from)| gpu.copy(hub, to, from)));
        let enqueued = enqueued.and_then(|()| plan.enqueue(&self.gpu, &self.streams, &prepared, &mut self.trace));
        let enqueued = enqueued.and_then(|()| copies.iter().try_for_each(|&(to, from)| gpu.copy(hub, from, to)));
        self.track(enqueued, prepared.held, prepared.path, prepared.fallback)
    }

    /// Return the length of memory.
    pub(super) fn len_bytes(&self, memory: &G::Memory) -> usize {
        let range = self.gpu.addresses(memory);
        (range.end - range.start) as usize
    }

    /// Capture an operation, to repeat it with [`Self::replay`] at the cost of one launch.
    ///
    /// # Errors
    /// As for [`Self::start`].
    pub fn capture(&mut self, request: &Request<'_, G::Memory>) -> Result<Repeat<G>, GpuError> {
        self.check_usable()?;
        let (prepared, shared) = self.prepare(request)?;
        let (graph, plan) = self.graph(&prepared, &shared)?;
        let Prepared { path, fallback, held, .. } = prepared;
        Ok(Repeat { graph, held, path, fallback, _plan: plan })
    }

    /// Enqueue a captured operation again.
    ///
    /// # Errors
    /// The driver's error.
    pub fn replay(&mut self, repeat: &Repeat<G>, after: &[&G::Event]) -> Result<Work<G>, GpuError> {
        self.check_usable()?;
        let (gpu, hub) = (&self.gpu, &self.streams.hub);
        let enqueued = after.iter().try_for_each(|event| gpu.wait(hub, event));
        let enqueued = enqueued.and_then(|()| gpu.launch(&repeat.graph, hub));
        self.track(enqueued, repeat.held.clone(), repeat.path, repeat.fallback.clone())
    }

    /// Return whether an operation is complete.
    ///
    /// # Errors
    /// The error of the GPU; [`GpuError::Cancelled`] if the operation was stopped.
    pub fn is_done(&mut self, work: &Work<G>) -> Result<bool, GpuError> {
        if self.pid != std::process::id() {
            return Err(GpuError::Forked);
        }
        let is_done = self.gpu.is_done(&work.done)?;
        if is_done && work.is_broken.load(Ordering::Relaxed) {
            return Err(GpuError::Cancelled);
        }
        Ok(is_done)
    }

    /// Wait for an operation until `deadline` and, if it must be stopped, for the grace period.
    ///
    /// Stopping one operation stops all that are in flight: passes that have not begun are disabled.
    ///
    /// # Errors
    /// [`GpuError::Deadline`] and [`GpuError::Cancelled`] once nothing of it runs any more, [`GpuError::Stuck`] if it
    /// could not be stopped; the error of the GPU.
    pub fn wait(&mut self, work: Work<G>, deadline: Instant) -> Result<(), GpuError> {
        let mut spin = SpinWait::default();
        loop {
            if self.is_done(&work)? {
                self.retire_done()?;
                return Ok(());
            }
            let why = match () {
                () if self.canceller.take() => GpuError::Cancelled,
                () if Instant::now() >= deadline => GpuError::Deadline,
                () => {
                    spin.wait();
                    continue;
                }
            };
            return Err(self.give_up(why));
        }
    }

    /// Stop everything in flight; returns `why`, or the error if that failed.
    fn give_up(&mut self, why: GpuError) -> GpuError {
        for flight in &self.in_flight {
            flight.is_broken.store(true, Ordering::Relaxed);
        }
        self.is_stuck = true;
        let ended = self.gpu.stop(true).and_then(|()| {
            let (until, mut spin) = (Instant::now() + self.options.grace, SpinWait::default());
            while !self.retire_done()? && Instant::now() < until {
                spin.wait();
            }
            self.check_usable()
        });
        ended.err().unwrap_or(why)
    }

    /// Check that no stopped operation is still in flight.
    fn check_usable(&mut self) -> Result<(), GpuError> {
        let is_idle = self.retire_done()?;
        if self.is_stuck {
            if !is_idle {
                return Err(GpuError::Stuck);
            }
            self.gpu.stop(false)?;
            self.is_stuck = false;
        }
        Ok(())
    }

    /// Release the memory of complete operations; returns whether none is in flight.
    fn retire_done(&mut self) -> Result<bool, GpuError> {
        if self.pid != std::process::id() {
            return Err(GpuError::Forked);
        }
        let mut index = 0;
        while let Some(flight) = self.in_flight.get(index) {
            if self.gpu.is_done(&flight.done)? {
                self.in_flight.swap_remove(index);
            } else {
                index += 1;
            }
        }
        Ok(self.in_flight.is_empty())
    }

    /// Record that work was enqueued, even if only partly.
    fn track(
        &mut self,
        enqueued: Result<(), GpuError>,
        held: Vec<G::Memory>,
        path: Path,
        fallback: Option<String>,
    ) -> Result<Work<G>, GpuError> {
        let done = Arc::new(self.gpu.event()?);
        let is_broken = Arc::new(AtomicBool::new(enqueued.is_err()));
        let recorded = self.gpu.record(&done, &self.streams.hub);
        self.in_flight.push(InFlight { done: Arc::clone(&done), is_broken: Arc::clone(&is_broken), held });
        enqueued.and(recorded)?;
        Ok(Work { done, is_broken, path, fallback })
    }
}

impl<G: Gpu> Drop for Group<G> {
    fn drop(&mut self) {
        if matches!(self.retire_done(), Ok(true)) {
            return;
        }
        if self.pid != std::process::id() {
            // In a forked child all of it belongs to the parent.
            std::mem::forget((std::mem::take(&mut self.in_flight), std::mem::take(&mut self.work)));
            std::mem::forget((std::mem::take(&mut self.plans), std::mem::take(&mut self.kernels), self.trace.take()));
            std::mem::forget(std::mem::take(&mut self.replays));
            return;
        }
        // Stop what is in flight; what cannot be stopped keeps its memory for ever.
        self.give_up(GpuError::Cancelled);
        if self.in_flight.is_empty() {
            return;
        }
        for flight in self.in_flight.drain(..) {
            flight.held.into_iter().for_each(std::mem::forget);
        }
        for (_, memory) in self.work.drain(..).flatten() {
            std::mem::forget(memory);
        }
    }
}

/// Return the cost constants of ranks that share one memory, whose traffic contends.
pub(super) fn contended_table(table: &CostTable, ranks: u32) -> CostTable {
    let times = f64::from(ranks);
    let Constants { beta_step_s, gamma_s, .. } = table.constants;
    let constants = Constants { beta_step_s: beta_step_s * times, gamma_s: gamma_s * times, ..table.constants };
    CostTable { constants, ..table.clone() }.sealed()
}

/// Waits for something that takes microseconds or seconds: spins, then yields, then sleeps.
#[derive(Default)]
pub(super) struct SpinWait {
    rounds: u32,
}

impl SpinWait {
    pub(super) fn wait(&mut self) {
        self.rounds = self.rounds.saturating_add(1);
        match self.rounds {
            0..1_000 => std::hint::spin_loop(),
            1_000..10_000 => std::thread::yield_now(),
            _ => std::thread::park_timeout(Duration::from_micros(50)),
        }
    }
}
