//! Several ranks on one GPU.

use super::buffers::{GpuBuffers, check};
use super::error::GpuError;
use super::flight::{Flight, GpuCanceller, Work};
use super::plan::{Pair, Plan, Prepared, Scaling, Streams};
use super::program::Program;
use super::trace::{Kind, Timeline, Trace};
use super::{Gpu, nccl};
use crate::plan::Child;
use crate::schedule::{ALGORITHMS, Place, Problem, Schedule};
use crate::select::{Algo, Candidate, CostTable, Declared, Explanation, RuledOut, Situation, explain_with};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;
use sumac_hal::op::{OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;

/// How a group works.
#[derive(Debug, Clone)]
pub struct GroupOptions {
    /// The declared order, over one node with all ranks: what keeps the bits of a result the same on any path.
    pub order: Order,
    /// The constants of the cost model.
    pub table: CostTable,
    /// The longest single pass, in bytes: what is longer is cut, so that the next rank need not wait for all of it.
    pub piece_bytes: usize,
    /// How long what is given up may take to end.
    pub grace: Duration,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self { order: Order::Arrival, table: CostTable::GPU, piece_bytes: 16 << 20, grace: Duration::from_secs(2) }
    }
}

/// One operation of all ranks.
#[derive(Debug, Clone)]
pub struct Request<'a, M> {
    /// What to do.
    pub desc: OpDesc,
    /// The algorithm that is asked for.
    pub algo: Algo,
    /// The memory of each rank.
    pub buffers: &'a [GpuBuffers<M>],
    /// What each rank multiplies its contribution by, for [`ReduceOp::PremulSum`]; 1 where there is none.
    pub scalars: &'a [f64],
}

/// Several ranks on one GPU, each with a stream of its own. See [`super`].
pub struct Group<G: Gpu> {
    gpu: G,
    ranks: u32,
    options: GroupOptions,
    situation: Situation,
    canceller: GpuCanceller,
    streams: Streams<G>,
    /// Partial values, as many bytes as the largest operation so far needed.
    work: Vec<Option<(usize, G::Memory)>>,
    kernels: HashMap<Kernel, Arc<G::Kernel>>,
    plans: HashMap<Shape, Arc<Plan<G>>>,
    flights: Vec<Flight<G>>,
    trace: Option<Trace<G>>,
    /// Something was given up and has not ended.
    is_stuck: bool,
    pid: u32,
}

/// Buffers, and what has to be multiplied before they are used.
type Scaled<G> = (Vec<GpuBuffers<<G as Gpu>::Memory>>, Vec<Scaling<<G as Gpu>::Memory>>);

/// What a program depends on.
type Shape = (OpDesc, Path, bool);

/// A captured operation, to be repeated on the same memory.
pub struct Repeat<G: Gpu> {
    graph: G::Graph,
    held: Vec<G::Memory>,
    path: Path,
    fallback: Option<String>,
    // The events that the graph was made of.
    _plan: Plan<G>,
}

impl<G: Gpu> Group<G> {
    /// Set up `ranks` ranks on a GPU.
    ///
    /// # Errors
    /// [`GpuError::Invalid`] for no ranks; what the driver says.
    pub fn new(gpu: G, ranks: u32, options: GroupOptions) -> Result<Self, GpuError> {
        let children = (0..ranks).map(|rank| Child::Rank(Rank(rank))).collect();
        let declared = Declared::new(vec![children], ranks, options.order)
            .map_err(|error| GpuError::Invalid(format!("a group of {ranks} ranks: {error}")))?;
        let situation = Situation {
            ranks,
            order: options.order,
            tree: Err("the ranks are on one GPU, which no device of the network sees".into()),
            table: shared(&options.table, ranks),
            declared,
        };
        let each = (0..ranks).map(|_| gpu.stream()).collect::<Result<_, _>>()?;
        let streams = Streams { hub: gpu.stream()?, each };
        Ok(Self {
            gpu,
            ranks,
            options,
            situation,
            canceller: GpuCanceller::default(),
            streams,
            work: (0..ranks).map(|_| None).collect(),
            kernels: HashMap::new(),
            plans: HashMap::new(),
            flights: Vec::new(),
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

    /// Return what ends a wait from another thread.
    pub fn canceller(&self) -> GpuCanceller {
        self.canceller.clone()
    }

    /// Say which path an operation would take, what each would cost, or why it is not possible.
    pub fn explain(&self, desc: &OpDesc, algo: Algo) -> Explanation {
        let why = RuledOut::Nccl("the ranks share a GPU, which it refuses".into());
        let nccl = Candidate { path: Path::Nccl, cost_s: Err(nccl::why_not(self.options.order, desc).unwrap_or(why)) };
        explain_with(&self.situation, desc, algo, vec![nccl])
    }

    /// Record when what is handed over from now on runs; one trace at a time. What is captured is not in it.
    ///
    /// # Errors
    /// The driver's words.
    pub fn start_trace(&mut self) -> Result<(), GpuError> {
        self.trace = Some(Trace::new(&self.gpu, &self.streams.hub)?);
        Ok(())
    }

    /// Record what `body` hands to a stream of a producer or a consumer as one span of the trace, if there is one.
    ///
    /// # Errors
    /// As [`Trace::span`].
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

    /// Read the trace; what it has must be waited for. An empty one if none was started.
    ///
    /// # Errors
    /// As [`Trace::finish`].
    pub fn take_trace(&mut self) -> Result<Timeline, GpuError> {
        Ok(self.trace.take().map(|trace| trace.finish(&self.gpu)).transpose()?.unwrap_or_default())
    }

    /// Return how many bytes an operation's passes and copies read and write.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn moved_bytes(&mut self, request: &Request<'_, G::Memory>) -> Result<u64, GpuError> {
        Ok(self.prepare(request)?.1.program.moved_bytes())
    }

    /// Hand an operation to the GPU; it begins when the events `after` have come. The host does not wait.
    ///
    /// # Errors
    /// [`GpuError::Invalid`] and [`GpuError::Kernel`], and then nothing has begun; what the driver says.
    pub fn start(&mut self, request: &Request<'_, G::Memory>, after: &[&G::Event]) -> Result<Work<G>, GpuError> {
        self.start_between(request, after, &[])
    }

    /// The same, with copies from the second of each pair to the first before, and back afterwards.
    pub(super) fn start_between(
        &mut self,
        request: &Request<'_, G::Memory>,
        after: &[&G::Event],
        copies: &[Pair<'_, G::Memory>],
    ) -> Result<Work<G>, GpuError> {
        self.usable()?;
        let (mut prepared, plan) = self.prepare(request)?;
        prepared.held.extend(copies.iter().flat_map(|(to, from)| [to.memory.clone(), from.memory.clone()]));
        let (gpu, hub) = (&self.gpu, &self.streams.hub);
        let handed = after.iter().try_for_each(|event| gpu.wait(hub, event));
        let handed = handed.and_then(|()| copies.iter().try_for_each(|&(to, from)| gpu.copy(hub, to, from)));
        let handed = handed.and_then(|()| plan.hand_over(&self.gpu, &self.streams, &prepared, &mut self.trace));
        let handed = handed.and_then(|()| copies.iter().try_for_each(|&(to, from)| gpu.copy(hub, from, to)));
        self.fly(handed, prepared.held, prepared.path, prepared.fallback)
    }

    /// Return the length of memory.
    pub(super) fn len_bytes(&self, memory: &G::Memory) -> usize {
        let range = self.gpu.addresses(memory);
        (range.end - range.start) as usize
    }

    /// Capture an operation, to repeat it with [`Self::replay`] at the cost of one launch.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn capture(&mut self, request: &Request<'_, G::Memory>) -> Result<Repeat<G>, GpuError> {
        self.usable()?;
        let (prepared, shared) = self.prepare(request)?;
        // Events of its own: those of a captured operation mean nothing outside.
        let plan = Plan::new(&self.gpu, shared.schedules.clone(), shared.program.clone(), shared.kernel.clone())?;
        let graph = self.gpu.capture(&self.streams.hub, &mut || {
            // A captured event has no time.
            plan.hand_over(&self.gpu, &self.streams, &prepared, &mut None)
        })?;
        let Prepared { path, fallback, held, .. } = prepared;
        Ok(Repeat { graph, held, path, fallback, _plan: plan })
    }

    /// Hand a captured operation over once more.
    ///
    /// # Errors
    /// What the driver says.
    pub fn replay(&mut self, repeat: &Repeat<G>, after: &[&G::Event]) -> Result<Work<G>, GpuError> {
        self.usable()?;
        let (gpu, hub) = (&self.gpu, &self.streams.hub);
        let handed = after.iter().try_for_each(|event| gpu.wait(hub, event));
        let handed = handed.and_then(|()| gpu.launch(&repeat.graph, hub));
        self.fly(handed, repeat.held.clone(), repeat.path, repeat.fallback.clone())
    }

    /// Tell whether an operation is done.
    ///
    /// # Errors
    /// What went wrong on the GPU; [`GpuError::Cancelled`] if it was given up.
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

    /// Wait for an operation, until `deadline` and, if it has to be given up, the time that this takes.
    ///
    /// Giving one up gives up all that are on their way: what has not begun does nothing any more.
    ///
    /// # Errors
    /// [`GpuError::Deadline`] and [`GpuError::Cancelled`] when nothing of it runs any more, [`GpuError::Stuck`] where
    /// that can't be brought about; what went wrong on the GPU.
    pub fn wait(&mut self, work: Work<G>, deadline: Instant) -> Result<(), GpuError> {
        let mut patience = Patience::default();
        loop {
            if self.is_done(&work)? {
                self.land_flights()?;
                return Ok(());
            }
            let why = match () {
                () if self.canceller.take() => GpuError::Cancelled,
                () if Instant::now() >= deadline => GpuError::Deadline,
                () => {
                    patience.wait();
                    continue;
                }
            };
            return Err(self.give_up(why));
        }
    }

    /// End everything that is on its way, and return `why`, or that it can't be ended.
    fn give_up(&mut self, why: GpuError) -> GpuError {
        for flight in &self.flights {
            flight.is_broken.store(true, Ordering::Relaxed);
        }
        self.is_stuck = true;
        let ended = self.gpu.stop(true).and_then(|()| {
            let (until, mut patience) = (Instant::now() + self.options.grace, Patience::default());
            while !self.land_flights()? && Instant::now() < until {
                patience.wait();
            }
            self.usable()
        });
        ended.err().unwrap_or(why)
    }

    /// Check that nothing that was given up is still on its way.
    fn usable(&mut self) -> Result<(), GpuError> {
        let is_idle = self.land_flights()?;
        if self.is_stuck {
            if !is_idle {
                return Err(GpuError::Stuck);
            }
            self.gpu.stop(false)?;
            self.is_stuck = false;
        }
        Ok(())
    }

    /// Let go of the memory of what is done; true if nothing is on its way.
    fn land_flights(&mut self) -> Result<bool, GpuError> {
        if self.pid != std::process::id() {
            return Err(GpuError::Forked);
        }
        let mut index = 0;
        while let Some(flight) = self.flights.get(index) {
            if self.gpu.is_done(&flight.done)? {
                self.flights.swap_remove(index);
            } else {
                index += 1;
            }
        }
        Ok(self.flights.is_empty())
    }

    /// Note that something was handed over, also where not all of it could be.
    fn fly(
        &mut self,
        handed: Result<(), GpuError>,
        held: Vec<G::Memory>,
        path: Path,
        fallback: Option<String>,
    ) -> Result<Work<G>, GpuError> {
        let done = Arc::new(self.gpu.event()?);
        let is_broken = Arc::new(AtomicBool::new(handed.is_err()));
        let recorded = self.gpu.record(&done, &self.streams.hub);
        self.flights.push(Flight { done: Arc::clone(&done), is_broken: Arc::clone(&is_broken), held });
        handed.and(recorded)?;
        Ok(Work { done, is_broken, path, fallback })
    }

    /// Check an operation, choose its path, and see to its program, code and memory.
    fn prepare(&mut self, request: &Request<'_, G::Memory>) -> Result<(Prepared<G>, Arc<Plan<G>>), GpuError> {
        let desc = request.desc;
        let explanation = self.explain(&desc, request.algo);
        let Some(path) = explanation.chosen else {
            let why = explanation.refusal().map_or_else(|| "no path".to_owned(), ToString::to_string);
            return Err(GpuError::Invalid(format!("{desc}: {why}")));
        };
        let fallback = explanation.fallback().map(ToString::to_string);
        let (buffers, scalings) = self.scaled(request)?;
        let is_in_place = buffers.first().is_some_and(GpuBuffers::is_in_place);
        let plan = self.plan((desc, path, is_in_place))?;
        check(&self.gpu, &plan.schedules, desc.element_bytes(), &buffers)?;
        self.grow_work(&plan.program.work_bytes)?;
        let work: Vec<_> = self.work.iter().map(|work| work.as_ref().map(|(_, memory)| memory.clone())).collect();
        let mut held: Vec<G::Memory> = work.iter().flatten().cloned().collect();
        for each in request.buffers.iter().chain(&buffers) {
            match each {
                GpuBuffers::InPlace(buffer) => held.push(buffer.clone()),
                GpuBuffers::Separate { input, output } => held.extend([input.clone(), output.clone()]),
            }
        }
        Ok((Prepared { path, fallback, buffers, scalings, work, held }, plan))
    }

    /// Return the buffers that the schedules work on, and what has to be multiplied before.
    fn scaled(&self, request: &Request<'_, G::Memory>) -> Result<Scaled<G>, GpuError> {
        let mut buffers = request.buffers.to_vec();
        let mut scalings = Vec::new();
        if request.scalars.is_empty() {
            return Ok((buffers, scalings));
        }
        if request.desc.op != Some(ReduceOp::PremulSum) || request.scalars.len() != buffers.len() {
            let what = format!("{} scalars for {}: premul_sum takes one a rank", request.scalars.len(), request.desc);
            return Err(GpuError::Invalid(what));
        }
        for (rank, (each, &scalar)) in buffers.iter_mut().zip(request.scalars).enumerate() {
            let from = each.input().clone();
            let to = if each.is_in_place() { from.clone() } else { self.gpu.alloc(self.len_bytes(&from))? };
            if !each.is_in_place() {
                *each = each.with_input(to.clone());
            }
            scalings.push(Scaling { rank, from, to, scalar });
        }
        Ok((buffers, scalings))
    }

    /// Return the program of a shape: the one that was made before, or a new one.
    fn plan(&mut self, shape: Shape) -> Result<Arc<Plan<G>>, GpuError> {
        if let Some(plan) = self.plans.get(&shape) {
            return Ok(Arc::clone(plan));
        }
        let (desc, path, is_in_place) = shape;
        let kernel = match desc.dtype.zip(desc.op) {
            Some((dtype, op)) => Some(Kernel::new(dtype, op).ok_or_else(|| GpuError::Kernel {
                kernel: format!("{dtype} {op}"),
                why: Kernel::why_not(dtype, op).unwrap_or("they do not go together").into(),
            })?),
            None => None,
        };
        let schedules = self.schedules(&desc, path)?;
        let piece_bytes = self.options.piece_bytes;
        let program = Program::new(&schedules, desc.element_bytes(), kernel.as_ref(), is_in_place, piece_bytes)?;
        let code = kernel.map(|kernel| self.code(kernel)).transpose()?;
        let plan = Arc::new(Plan::new(&self.gpu, schedules, program, code)?);
        if self.plans.len() >= PLANS_MAX {
            self.plans.clear();
        }
        self.plans.insert(shape, Arc::clone(&plan));
        Ok(plan)
    }

    fn code(&mut self, kernel: Kernel) -> Result<Arc<G::Kernel>, GpuError> {
        Ok(match self.kernels.entry(kernel) {
            Entry::Occupied(known) => Arc::clone(known.get()),
            Entry::Vacant(free) => Arc::clone(free.insert(Arc::new(self.gpu.load(&kernel)?))),
        })
    }

    fn schedules(&self, desc: &OpDesc, path: Path) -> Result<Vec<Schedule>, GpuError> {
        let known = ALGORITHMS
            .iter()
            .find(|algorithm| algorithm.path() == path && algorithm.pattern.collective() == desc.collective);
        let algorithm =
            known.ok_or_else(|| GpuError::Invalid(format!("{desc} by {}: there is no such schedule", path.name())))?;
        let count = usize::try_from(desc.count).map_err(|_| GpuError::Invalid(format!("{desc} is too long")))?;
        if desc.root.0 >= self.ranks {
            return Err(GpuError::Invalid(format!("{desc} to {} in a group of {}", desc.root, self.ranks)));
        }
        let tree = self.situation.declared.tree();
        let problem = |place| Problem { place, count, root: desc.root, tree };
        Ok(Place::all(self.ranks).map(|place| (algorithm.schedule)(&problem(place))).collect())
    }

    /// See to the memory of partial values. What is replaced stays with the operations that use it.
    fn grow_work(&mut self, wanted: &[usize]) -> Result<(), GpuError> {
        for (work, &wanted) in self.work.iter_mut().zip(wanted) {
            if work.as_ref().map_or(0, |(len, _)| *len) < wanted {
                *work = Some((wanted, self.gpu.alloc(wanted)?));
            }
        }
        Ok(())
    }
}

impl<G: Gpu> Drop for Group<G> {
    fn drop(&mut self) {
        if matches!(self.land_flights(), Ok(true)) {
            return;
        }
        if self.pid != std::process::id() {
            // A forked child: all of it is its parent's.
            std::mem::forget((std::mem::take(&mut self.flights), std::mem::take(&mut self.work)));
            std::mem::forget((std::mem::take(&mut self.plans), std::mem::take(&mut self.kernels), self.trace.take()));
            return;
        }
        // What is on its way is ended; what can't be ended keeps its memory for ever.
        self.give_up(GpuError::Cancelled);
        if self.flights.is_empty() {
            return;
        }
        for flight in self.flights.drain(..) {
            flight.held.into_iter().for_each(std::mem::forget);
        }
        for (_, memory) in self.work.drain(..).flatten() {
            std::mem::forget(memory);
        }
    }
}

/// Return the constants of ranks that share one memory, each moving its bytes at the others' expense.
pub(super) fn shared(table: &CostTable, ranks: u32) -> CostTable {
    let times = f64::from(ranks);
    CostTable { beta_step_s: table.beta_step_s * times, gamma_s: table.gamma_s * times, ..table.clone() }
}

/// How to wait for something that takes microseconds or seconds.
#[derive(Default)]
pub(super) struct Patience {
    rounds: u32,
}

impl Patience {
    pub(super) fn wait(&mut self) {
        self.rounds = self.rounds.saturating_add(1);
        match self.rounds {
            0..1_000 => std::hint::spin_loop(),
            1_000..10_000 => std::thread::yield_now(),
            _ => std::thread::park_timeout(Duration::from_micros(50)),
        }
    }
}

/// The programs that a group keeps: those of a training step; then it starts over.
pub(super) const PLANS_MAX: usize = 256;
