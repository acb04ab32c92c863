//! A rank of a group of GPUs in several processes.

use super::join::{NetworkCost, OpenedMemory, exchange_memory, first_reason, hello, join_nccl, ranks_on_busiest_gpu};
use super::plan::{PeerPlan, PlanRun, SignalPages};
use super::resources::create_pages;
use super::select::{PeerExplanation, PeerSelection, PeerTransport};
use super::{Bootstrap, PeerError, PeerFacts, Peered, WhyStaged, page};
use crate::gpu::buffers::{GpuBuffers, check};
use crate::gpu::group::{GroupOptions, SpinWait, contended_table, selection_context};
use crate::gpu::nccl::Nccl;
use crate::gpu::staged::Staging;
use crate::gpu::trace::{Kind, Timeline, Trace};
use crate::gpu::{GpuCanceller, GpuError, Part};
use crate::select::{Algo, Constants, CostTable, Origin, SelectionContext};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::reduce::Kernel;

/// Options of a group between processes; equal on all ranks.
#[derive(Debug, Clone)]
pub struct PeerOptions {
    /// Order, cost constants and piece length of direct algorithms.
    pub group: GroupOptions,
    /// Chunk length of staged transfers in bytes: a multiple of the size of every element.
    pub chunk_bytes: usize,
    /// Whether to try direct access.
    pub direct: bool,
    /// Whether all-reduces whose transport is open are staged through the network first; if it loses its tree, the rest
    /// is transferred directly.
    pub network_first: bool,
    /// Whether to set up NCCL.
    pub nccl: bool,
}

impl Default for PeerOptions {
    fn default() -> Self {
        // 5 us as on one GPU; NVLink 4's 450 GB/s for each direction, by NVIDIA's data sheet of the H100 SXM. Not
        // measured.
        let constants = Constants { beta_step_s: 1.0 / 450e9, ..CostTable::gpu().constants };
        let table = CostTable::new(Origin::DataSheets, constants);
        let group = GroupOptions { table, ..GroupOptions::default() };
        Self { group, chunk_bytes: 4 << 20, direct: true, network_first: false, nccl: true }
    }
}

/// One rank's memory, which the other ranks have opened if possible.
pub struct Shared<G: Peered> {
    pub(super) number: u32,
    pub(super) own: G::Memory,
    pub(super) opened_memory: OpenedMemory<G::Memory>,
}

impl<G: Peered> Shared<G> {
    /// Return why it cannot be used directly, if so.
    pub fn why_staged(&self) -> Option<&WhyStaged> {
        self.opened_memory.as_ref().err()
    }
}

/// An operation in flight.
pub struct PeerWork<G: Peered> {
    pub(super) number: u64,
    pub(super) done: Arc<G::Event>,
    pub(super) path: Path,
}

impl<G: Peered> PeerWork<G> {
    /// Return the event that marks the end of the operation; consumers make their streams wait for it.
    pub const fn done(&self) -> &Arc<G::Event> {
        &self.done
    }

    /// Return the algorithm that it uses.
    pub const fn path(&self) -> Path {
        self.path
    }
}

/// Outcome of an all-reduce.
#[derive(Debug, Clone, PartialEq)]
pub struct PeerOutcome {
    /// The transport used.
    pub transport: PeerTransport,
    /// Staged: the path of each chunk through the network.
    pub chunks: Vec<Path>,
    /// Why the network's tree was not used, or not to the end.
    pub fallback: Option<String>,
    /// Staged: bytes at the end that were transferred directly because the network had lost its tree.
    pub direct_bytes: usize,
}

/// An operation in flight, the memory that it uses, and how its end is checked.
pub(super) struct PeerInFlight<G: Peered> {
    pub(super) number: u64,
    pub(super) done: Arc<G::Event>,
    pub(super) held: Vec<G::Memory>,
    /// This rank's page at the end; none for NCCL.
    pub(super) page: Option<G::Pinned>,
    pub(super) desc: OpDesc,
    pub(super) path: Path,
    pub(super) signature: u32,
    pub(super) base: u32,
}

/// A rank of a group of GPUs in several processes.
pub struct PeerGroup<G: Peered + Nccl, B: Bootstrap> {
    pub(super) gpu: G,
    pub(super) bootstrap: B,
    pub(super) me: usize,
    pub(super) facts: Vec<PeerFacts>,
    network: Option<NetworkCost>,
    pub(super) options: PeerOptions,
    pub(super) selection: SelectionContext,
    pub(super) stream: G::Stream,
    pub(super) canceller: GpuCanceller,
    /// The pages for direct access, or why it is impossible.
    pub(super) direct: Result<SignalPages<G::Memory>, WhyStaged>,
    pub(super) nccl: Result<G::Comm, String>,
    pub(super) staging: Option<Staging<G>>,
    /// All ranks' partial values, and the length of each in bytes.
    pub(super) work: Vec<Option<G::Memory>>,
    pub(super) work_bytes: Vec<usize>,
    pub(super) plans: HashMap<(OpDesc, Path), Arc<PeerPlan<G>>>,
    pub(super) kernels: HashMap<Kernel, Arc<G::Kernel>>,
    /// Value of the counters.
    counter: u32,
    /// Number of exports so far.
    pub(super) exported: u32,
    pub(super) started: u64,
    pub(super) in_flight: Vec<PeerInFlight<G>>,
    /// Pinned pages that are free.
    pub(super) pins: Vec<G::Pinned>,
    /// The error that ended the group, and the first operation that it affects.
    pub(super) ended: Option<(u64, PeerError)>,
    /// Memory that other ranks may still access.
    pub(super) retained: Vec<G::Memory>,
    trace: Option<Trace<G>>,
    pid: u32,
}

impl<G: Peered + Nccl, B: Bootstrap> PeerGroup<G, B> {
    /// Exchange facts with the other ranks, and decide on a transport together. All ranks call it with the same
    /// options.
    ///
    /// # Errors
    /// [`PeerError`]. Lack of direct access is not an error; see [`PeerGroup::why_staged`].
    pub fn join(gpu: G, bootstrap: B, options: PeerOptions, deadline: Instant) -> Result<Self, PeerError> {
        let (me, ranks) = (bootstrap.rank() as usize, bootstrap.ranks());
        let (facts, network) = hello(&gpu, &bootstrap, &options, deadline)?;
        let table = contended_table(&options.group.table, ranks_on_busiest_gpu(&facts));
        let no_tree = "transfers between GPUs do not pass through the network";
        let selection = selection_context(ranks, &options.group, table, no_tree)?;
        let direct = match first_reason(&facts) {
            Some(why) => Err(why),
            None if !options.direct => Err(WhyStaged::Asked),
            None => create_pages(&gpu, &bootstrap, &facts, deadline)?,
        };
        let nccl = match options.nccl {
            true => join_nccl(&gpu, &bootstrap, &facts, deadline)?,
            false => Err("disabled by the options".into()),
        };
        let stream = gpu.stream()?;
        Ok(Self {
            gpu,
            bootstrap,
            me,
            facts,
            network,
            options,
            selection,
            stream,
            canceller: GpuCanceller::default(),
            direct,
            nccl,
            staging: None,
            work: (0..ranks).map(|_| None).collect(),
            work_bytes: vec![0; ranks as usize],
            plans: HashMap::new(),
            kernels: HashMap::new(),
            counter: 0,
            exported: 1,
            started: 0,
            in_flight: Vec::new(),
            pins: Vec::new(),
            ended: None,
            retained: Vec::new(),
            trace: None,
            pid: std::process::id(),
        })
    }

    /// Check that this process was not forked from the one that joined.
    pub(super) fn check_process(&self) -> Result<(), GpuError> {
        if self.pid == std::process::id() { Ok(()) } else { Err(GpuError::Forked) }
    }

    /// Leak everything that dropping would end on the GPU or for the other ranks: in a forked child it belongs to the
    /// parent.
    pub(super) fn forget(&mut self) {
        std::mem::forget((std::mem::take(&mut self.in_flight), std::mem::take(&mut self.retained)));
        std::mem::forget((std::mem::take(&mut self.work), std::mem::take(&mut self.pins)));
        std::mem::forget((std::mem::take(&mut self.plans), std::mem::take(&mut self.kernels)));
        std::mem::forget((self.staging.take(), self.trace.take()));
        std::mem::forget(std::mem::replace(&mut self.direct, Err(WhyStaged::Asked)));
        std::mem::forget(std::mem::replace(&mut self.nccl, Err(String::new())));
    }

    /// Return the GPU.
    pub const fn gpu(&self) -> &G {
        &self.gpu
    }

    /// Return the bootstrap connections.
    pub const fn bootstrap(&self) -> &B {
        &self.bootstrap
    }

    /// Return the facts of each rank.
    pub fn facts(&self) -> &[PeerFacts] {
        &self.facts
    }

    /// Return why the ranks cannot access each other's memory, if so; identical on all ranks.
    pub fn why_staged(&self) -> Option<&WhyStaged> {
        self.direct.as_ref().err()
    }

    /// Return why NCCL is unavailable, if so; identical on all ranks.
    pub fn why_no_nccl(&self) -> Option<&str> {
        self.nccl.as_ref().err().map(String::as_str)
    }

    /// Return a handle that cancels a wait from another thread.
    pub fn canceller(&self) -> GpuCanceller {
        self.canceller.clone()
    }

    /// Start recording when enqueued work runs; one trace at a time.
    ///
    /// # Errors
    /// The driver's error.
    pub fn start_trace(&mut self) -> Result<(), PeerError> {
        self.trace = Some(Trace::new(&self.gpu, &self.stream)?);
        Ok(())
    }

    /// Read the trace; its work must be complete. Empty if none was started.
    ///
    /// # Errors
    /// As for [`Trace::finish`].
    pub fn take_trace(&mut self) -> Result<Timeline, PeerError> {
        Ok(self.trace.take().map(|trace| trace.finish(&self.gpu)).transpose()?.unwrap_or_default())
    }

    /// Share all of `memory` with the other ranks. All ranks call it, each with its own, and keep the memory until all
    /// have closed it ([`PeerGroup::unshare`]).
    ///
    /// # Errors
    /// [`PeerError`]. Memory that cannot be opened is not an error; see [`Shared::why_staged`], identical on all ranks.
    pub fn share(&mut self, memory: &G::Memory, deadline: Instant) -> Result<Shared<G>, PeerError> {
        self.check_usable()?;
        let number = self.exported;
        self.exported += 1;
        let opened_memory = match &self.direct {
            Err(why) => Err(why.clone()),
            Ok(_) => exchange_memory(&self.gpu, &self.bootstrap, &self.facts, (number, memory, &[]), deadline)?,
        };
        Ok(Shared { number, own: memory.clone(), opened_memory })
    }

    /// Close the shared memory of the other ranks, so that each may free its own. All ranks call it, after all
    /// operations on it are complete.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn unshare(&mut self, shared: Shared<G>, deadline: Instant) -> Result<(), PeerError> {
        self.wait_all(deadline)?;
        let Shared { own, opened_memory, .. } = shared;
        drop(opened_memory);
        self.bootstrap.exchange(&[], deadline)?;
        drop(own);
        Ok(())
    }

    /// Leave the group. All ranks call it, after all operations are complete. Shared memory must have been closed
    /// before ([`PeerGroup::unshare`]).
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn leave(mut self, deadline: Instant) -> Result<(), PeerError> {
        self.wait_all(deadline)?;
        let words = std::mem::replace(&mut self.direct, Err(WhyStaged::Asked));
        let own = words.map(|words| words.pages[self.me].clone());
        let own_work = self.work[self.me].take();
        self.work.iter_mut().for_each(|work| *work = None);
        self.bootstrap.exchange(&[], deadline)?;
        drop((own, own_work));
        Ok(())
    }

    /// Explain the selection for an operation: costs, reasons and the choice.
    pub fn explain(&self, shared: &Shared<G>, desc: &OpDesc, algo: Algo) -> PeerExplanation {
        let choice = PeerSelection {
            selection: &self.selection,
            options: &self.options,
            why_staged: shared.why_staged(),
            no_nccl: self.why_no_nccl(),
            network: self.network,
        };
        choice.explain(desc, algo)
    }

    /// Enqueue an in-place operation, which begins when the events `after` have completed on all ranks. The host does
    /// not wait, except, at most until `deadline`, the first time that partial values need more memory.
    ///
    /// # Errors
    /// [`PeerError::Staged`] if it can only be staged; [`PeerError`].
    pub fn start(
        &mut self,
        shared: &Shared<G>,
        (desc, algo): (&OpDesc, Algo),
        after: &[&G::Event],
        deadline: Instant,
    ) -> Result<PeerWork<G>, PeerError> {
        match self.explain(shared, desc, algo).transport {
            Ok(PeerTransport::Direct(path)) => self.start_direct((shared, 0), (desc, path), after, deadline),
            Ok(PeerTransport::Nccl) => self.start_nccl(shared, desc, after, deadline),
            Ok(PeerTransport::Staged(why)) => Err(PeerError::Staged(why)),
            Err(why) => Err(GpuError::Invalid(format!("{desc}: {why}")).into()),
        }
    }

    /// Enqueue a schedule on the memory behind the first `from` bytes.
    pub(super) fn start_direct(
        &mut self,
        (shared, from): (&Shared<G>, usize),
        (desc, path): (&OpDesc, Path),
        after: &[&G::Event],
        deadline: Instant,
    ) -> Result<PeerWork<G>, PeerError> {
        self.check_usable()?;
        let opened_memory = shared.opened_memory.as_ref().map_err(|why| PeerError::Staged(why.clone()))?;
        let plan = self.plan(desc, path)?;
        let behind = |memory: &G::Memory| {
            let range = self.gpu.addresses(memory);
            let len_bytes = ((range.end - range.start) as usize).saturating_sub(from);
            GpuBuffers::InPlace(self.gpu.part(memory, from, len_bytes))
        };
        let buffers: Vec<_> = opened_memory.iter().map(behind).collect();
        check(&self.gpu, &plan.schedules, desc.element_bytes(), &buffers)?;
        self.grow_work(&plan.program.work_bytes, deadline)?;
        let signature = desc.signature(path, self.selection.table.version) ^ shared.number.rotate_left(16);
        let base = self.counter;
        self.counter = base.wrapping_add(plan.steps());
        let words = self.direct.as_ref().map_err(|why| PeerError::Staged(why.clone()))?;
        let run = PlanRun { me: self.me, words, buffers: &buffers, work: &self.work, signature, base };
        let held = opened_memory.iter().chain(self.work.iter().flatten()).cloned().collect();
        let mut page = self.pins.pop().map_or_else(|| self.gpu.pinned(self.facts.len() * page::ENTRY_BYTES), Ok)?;
        let enqueued = after.iter().try_for_each(|event| self.gpu.wait(&self.stream, event)).map_err(PeerError::from);
        let enqueued = enqueued.and_then(|()| plan.enqueue(&self.gpu, &self.stream, &run, &mut self.trace));
        let own = page::whole(&words.pages[self.me], self.facts.len());
        let enqueued = enqueued.and_then(|()| Ok(self.gpu.download(&self.stream, &mut page, own)?));
        let flight = PeerInFlight {
            number: 0,
            done: Arc::new(self.gpu.event()?),
            held,
            page: Some(page),
            desc: *desc,
            path,
            signature,
            base,
        };
        self.track(enqueued, flight)
    }

    fn start_nccl(
        &mut self,
        shared: &Shared<G>,
        desc: &OpDesc,
        after: &[&G::Event],
        deadline: Instant,
    ) -> Result<PeerWork<G>, PeerError> {
        self.check_usable()?;
        let (gpu, stream, own) = (&self.gpu, &self.stream, &shared.own);
        let comm = self.nccl.as_ref().map_err(|why| GpuError::Invalid(why.clone()))?;
        let (Some(dtype), Some(op)) = (desc.dtype, desc.op) else {
            return Err(GpuError::Invalid(format!("{desc} by NCCL: no type")).into());
        };
        let range = gpu.addresses(own);
        let len_bytes = (range.end - range.start) as usize;
        if desc.count.checked_mul(desc.element_bytes() as u64) != Some(len_bytes as u64) {
            return Err(GpuError::Invalid(format!("a buffer of {len_bytes} bytes for {desc}")).into());
        }
        let whole = Part { memory: own, at: 0, len_bytes };
        let enqueue_op = || gpu.nccl_all_reduce(comm, stream, (dtype, op), (whole, whole));
        let enqueued = after.iter().try_for_each(|event| gpu.wait(stream, event));
        let enqueued = enqueued.and_then(|()| match &mut self.trace {
            None => enqueue_op(),
            Some(trace) => {
                let lane = format!("rank {}", self.me);
                trace.span(gpu, stream, (&lane, "NCCL", Kind::Communication), enqueue_op)
            }
        });
        let enqueued = enqueued.map_err(PeerError::from).and_then(|()| wait_enqueued(gpu, comm, desc, deadline));
        let done = Arc::new(gpu.event()?);
        let (held, path) = (vec![own.clone()], Path::Nccl);
        let flight = PeerInFlight { number: 0, done, held, page: None, desc: *desc, path, signature: 0, base: 0 };
        self.track(enqueued, flight)
    }

    /// Record that work was enqueued, even if only partly.
    fn track(&mut self, enqueued: Result<(), PeerError>, flight: PeerInFlight<G>) -> Result<PeerWork<G>, PeerError> {
        let recorded = self.gpu.record(&flight.done, &self.stream).map_err(PeerError::from);
        self.started += 1;
        let work = PeerWork { number: self.started, done: Arc::clone(&flight.done), path: flight.path };
        self.gpu.hold_frees();
        self.in_flight.push(PeerInFlight { number: self.started, ..flight });
        match enqueued.and(recorded) {
            Ok(()) => Ok(work),
            // The other ranks wait for something that this one never sends.
            Err(error) => Err(self.give_up(error)),
        }
    }
}

/// Wait until NCCL has enqueued an operation: on the first, it connects the ranks before.
fn wait_enqueued<G: Nccl>(gpu: &G, comm: &G::Comm, desc: &OpDesc, deadline: Instant) -> Result<(), PeerError> {
    let mut spin = SpinWait::default();
    while !gpu.nccl_is_ready(comm)? {
        if Instant::now() >= deadline {
            return Err(PeerError::Deadline { desc: *desc, missing: Vec::new() });
        }
        spin.wait();
    }
    Ok(())
}
