//! One rank among GPUs of several processes.

use super::choose::{Choice, PeerExplanation, Way};
use super::hand::{PeerPlan, Run, Words};
use super::join::{NetworkCost, Seen, crowd, first_reason, hello, join_nccl, show};
use super::room::words;
use super::{Bootstrap, PeerError, PeerFacts, Peered, WhyStaged, page};
use crate::gpu::buffers::{GpuBuffers, check};
use crate::gpu::group::{GroupOptions, Patience, shared};
use crate::gpu::nccl::Nccl;
use crate::gpu::staged::Staging;
use crate::gpu::trace::{Kind, Timeline, Trace};
use crate::gpu::{GpuCanceller, GpuError, Part};
use crate::plan::Child;
use crate::select::{Algo, CostTable, Declared, Situation};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;
use sumac_hal::ids::Rank;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::reduce::Kernel;

/// How a group between processes works; the same at all ranks.
#[derive(Debug, Clone)]
pub struct PeerOptions {
    /// Order, constants and pieces of the direct way.
    pub group: GroupOptions,
    /// Chunks of the staged way, in bytes: a multiple of the size of every element.
    pub chunk_bytes: usize,
    /// Whether to try the direct way.
    pub direct: bool,
    /// Whether all-reduces whose way is open go through the network first, staged; where that has no tree any more,
    /// what is left of them goes directly.
    pub network_first: bool,
    /// Whether to set up NCCL.
    pub nccl: bool,
}

impl Default for PeerOptions {
    fn default() -> Self {
        // 5 us as on one GPU; NVLink 4's 450 GB/s each way, by NVIDIA's data sheet of the H100 SXM. Not measured.
        let table = CostTable { beta_step_s: 1.0 / 450e9, ..CostTable::GPU };
        let group = GroupOptions { table, ..GroupOptions::default() };
        Self { group, chunk_bytes: 4 << 20, direct: true, network_first: false, nccl: true }
    }
}

/// One rank's memory, which the others have opened where that is possible.
pub struct Shared<G: Peered> {
    pub(super) number: u32,
    pub(super) own: G::Memory,
    pub(super) seen: Seen<G::Memory>,
}

impl<G: Peered> Shared<G> {
    /// Return why it can't be used directly, if that is so.
    pub fn why_staged(&self) -> Option<&WhyStaged> {
        self.seen.as_ref().err()
    }
}

/// An operation on its way.
pub struct PeerWork<G: Peered> {
    pub(super) number: u64,
    pub(super) done: Arc<G::Event>,
    pub(super) path: Path,
}

impl<G: Peered> PeerWork<G> {
    /// Return the event that stands for the end of the operation: consumers let their streams wait for it.
    pub const fn done(&self) -> &Arc<G::Event> {
        &self.done
    }

    /// Return the path it takes.
    pub const fn path(&self) -> Path {
        self.path
    }
}

/// What became of an all-reduce.
#[derive(Debug, Clone, PartialEq)]
pub struct PeerOutcome {
    /// The way it took.
    pub way: Way,
    /// Staged: for each chunk that went through the network its path.
    pub chunks: Vec<Path>,
    /// Why the network did not go on through its tree, if it began with one or might have.
    pub fallback: Option<String>,
    /// Staged: the bytes at the end that went directly, because the network had no tree any more.
    pub direct_bytes: usize,
}

/// What is on its way, what it works on, and how its end is told.
pub(super) struct PeerFlight<G: Peered> {
    pub(super) number: u64,
    pub(super) done: Arc<G::Event>,
    pub(super) held: Vec<G::Memory>,
    /// The own page as it is at the end; none for NCCL.
    pub(super) page: Option<G::Pinned>,
    pub(super) desc: OpDesc,
    pub(super) path: Path,
    pub(super) signature: u32,
    pub(super) base: u32,
}

/// One rank among GPUs of several processes. See [`super`].
pub struct PeerGroup<G: Peered + Nccl, B: Bootstrap> {
    pub(super) gpu: G,
    pub(super) bootstrap: B,
    pub(super) me: usize,
    pub(super) facts: Vec<PeerFacts>,
    network: Option<NetworkCost>,
    pub(super) options: PeerOptions,
    pub(super) situation: Situation,
    pub(super) stream: G::Stream,
    pub(super) canceller: GpuCanceller,
    /// The words of the direct way, or why there is none.
    pub(super) direct: Result<Words<G::Memory>, WhyStaged>,
    pub(super) nccl: Result<G::Comm, String>,
    pub(super) staging: Option<Staging<G>>,
    /// All ranks' partial values, and how many bytes each has.
    pub(super) work: Vec<Option<G::Memory>>,
    pub(super) work_bytes: Vec<usize>,
    pub(super) plans: HashMap<(OpDesc, Path), Arc<PeerPlan<G>>>,
    pub(super) kernels: HashMap<Kernel, Arc<G::Kernel>>,
    /// How far the counters have got.
    counter: u32,
    /// How many pieces of memory were shown.
    pub(super) shown: u32,
    pub(super) started: u64,
    pub(super) flights: Vec<PeerFlight<G>>,
    /// Pages that nobody copies to.
    pub(super) pins: Vec<G::Pinned>,
    /// What ended the group, and the first operation that has it.
    pub(super) ended: Option<(u64, PeerError)>,
    /// Memory that others may still read.
    pub(super) kept: Vec<G::Memory>,
    trace: Option<Trace<G>>,
    pid: u32,
}

impl<G: Peered + Nccl, B: Bootstrap> PeerGroup<G, B> {
    /// Tell the other ranks what there is, and decide with them how to go. All ranks call it with the same options.
    ///
    /// # Errors
    /// [`PeerError`]. That ranks don't reach each other is none: [`PeerGroup::why_staged`] says it.
    pub fn join(gpu: G, bootstrap: B, options: PeerOptions, deadline: Instant) -> Result<Self, PeerError> {
        let (me, ranks) = (bootstrap.rank() as usize, bootstrap.ranks());
        let (facts, network) = hello(&gpu, &bootstrap, &options, deadline)?;
        let children = (0..ranks).map(|rank| Child::Rank(Rank(rank))).collect();
        let declared = Declared::new(vec![children], ranks, options.group.order)
            .map_err(|error| GpuError::Invalid(format!("a group of {ranks} ranks: {error}")))?;
        let situation = Situation {
            ranks,
            order: options.group.order,
            tree: Err("what goes from GPU to GPU does not pass through the network".into()),
            table: shared(&options.group.table, crowd(&facts)),
            declared,
        };
        let direct = match first_reason(&facts) {
            Some(why) => Err(why),
            None if !options.direct => Err(WhyStaged::Asked),
            None => words(&gpu, &bootstrap, &facts, deadline)?,
        };
        let nccl = match options.nccl {
            true => join_nccl(&gpu, &bootstrap, &facts, deadline)?,
            false => Err("the options leave it out".into()),
        };
        let stream = gpu.stream()?;
        Ok(Self {
            gpu,
            bootstrap,
            me,
            facts,
            network,
            options,
            situation,
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
            shown: 1,
            started: 0,
            flights: Vec::new(),
            pins: Vec::new(),
            ended: None,
            kept: Vec::new(),
            trace: None,
            pid: std::process::id(),
        })
    }

    /// Check that this process was not forked from the one that joined.
    pub(super) fn check_process(&self) -> Result<(), GpuError> {
        if self.pid == std::process::id() { Ok(()) } else { Err(GpuError::Forked) }
    }

    /// Forget all that drops would end on the GPU or for the other ranks: in a forked child it is the parent's.
    pub(super) fn forget(&mut self) {
        std::mem::forget((std::mem::take(&mut self.flights), std::mem::take(&mut self.kept)));
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

    /// Return the connections that the ranks had before.
    pub const fn bootstrap(&self) -> &B {
        &self.bootstrap
    }

    /// Return what each rank has.
    pub fn facts(&self) -> &[PeerFacts] {
        &self.facts
    }

    /// Return why the ranks don't reach each other's memory, if that is so: the same at all ranks.
    pub fn why_staged(&self) -> Option<&WhyStaged> {
        self.direct.as_ref().err()
    }

    /// Return why there is no NCCL, if that is so: the same at all ranks.
    pub fn why_no_nccl(&self) -> Option<&str> {
        self.nccl.as_ref().err().map(String::as_str)
    }

    /// Return what ends a wait from another thread.
    pub fn canceller(&self) -> GpuCanceller {
        self.canceller.clone()
    }

    /// Record when what is handed over from now on runs; one trace at a time.
    ///
    /// # Errors
    /// The driver's words.
    pub fn start_trace(&mut self) -> Result<(), PeerError> {
        self.trace = Some(Trace::new(&self.gpu, &self.stream)?);
        Ok(())
    }

    /// Read the trace; what it has must be waited for. An empty one if none was started.
    ///
    /// # Errors
    /// As [`Trace::finish`].
    pub fn take_trace(&mut self) -> Result<Timeline, PeerError> {
        Ok(self.trace.take().map(|trace| trace.finish(&self.gpu)).transpose()?.unwrap_or_default())
    }

    /// Let the other ranks open `memory`, all of it. All ranks call it, each with its own, and keep the memory until
    /// all have closed it ([`PeerGroup::unshare`]).
    ///
    /// # Errors
    /// [`PeerError`]. Memory that can't be opened is none: [`Shared::why_staged`] says it, alike at all ranks.
    pub fn share(&mut self, memory: &G::Memory, deadline: Instant) -> Result<Shared<G>, PeerError> {
        self.usable()?;
        let number = self.shown;
        self.shown += 1;
        let seen = match &self.direct {
            Err(why) => Err(why.clone()),
            Ok(_) => show(&self.gpu, &self.bootstrap, &self.facts, (number, memory, &[]), deadline)?,
        };
        Ok(Shared { number, own: memory.clone(), seen })
    }

    /// Close the other ranks' part of what was shared, so that each may free its own. All ranks call it, when all
    /// that they started on it is done.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn unshare(&mut self, shared: Shared<G>, deadline: Instant) -> Result<(), PeerError> {
        self.all_landed(deadline)?;
        let Shared { own, seen, .. } = shared;
        drop(seen);
        self.bootstrap.exchange(&[], deadline)?;
        drop(own);
        Ok(())
    }

    /// End the group in good order. All ranks call it, when all that they started is done. What is shared must have
    /// been closed before ([`PeerGroup::unshare`]).
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn leave(mut self, deadline: Instant) -> Result<(), PeerError> {
        self.all_landed(deadline)?;
        let words = std::mem::replace(&mut self.direct, Err(WhyStaged::Asked));
        let own = words.map(|words| words.pages[self.me].clone());
        let own_work = self.work[self.me].take();
        self.work.iter_mut().for_each(|work| *work = None);
        self.bootstrap.exchange(&[], deadline)?;
        drop((own, own_work));
        Ok(())
    }

    /// Say which way an operation would take, what each would cost, or why it is not possible.
    pub fn explain(&self, shared: &Shared<G>, desc: &OpDesc, algo: Algo) -> PeerExplanation {
        let choice = Choice {
            situation: &self.situation,
            options: &self.options,
            why_staged: shared.why_staged(),
            no_nccl: self.why_no_nccl(),
            network: self.network,
        };
        choice.explain(desc, algo)
    }

    /// Hand an operation in place to the GPU; it begins when the events `after` have come, at all ranks. The host does
    /// not wait, but the first time that partial values need more memory, at most until `deadline`.
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
        match self.explain(shared, desc, algo).way {
            Ok(Way::Direct(path)) => self.start_direct((shared, 0), (desc, path), after, deadline),
            Ok(Way::Nccl) => self.start_nccl(shared, desc, after, deadline),
            Ok(Way::Staged(why)) => Err(PeerError::Staged(why)),
            Err(why) => Err(GpuError::Invalid(format!("{desc}: {why}")).into()),
        }
    }

    /// Hand over a schedule on what is behind `from` bytes.
    pub(super) fn start_direct(
        &mut self,
        (shared, from): (&Shared<G>, usize),
        (desc, path): (&OpDesc, Path),
        after: &[&G::Event],
        deadline: Instant,
    ) -> Result<PeerWork<G>, PeerError> {
        self.usable()?;
        let seen = shared.seen.as_ref().map_err(|why| PeerError::Staged(why.clone()))?;
        let plan = self.plan(desc, path)?;
        let behind = |memory: &G::Memory| {
            let range = self.gpu.addresses(memory);
            let len_bytes = ((range.end - range.start) as usize).saturating_sub(from);
            GpuBuffers::InPlace(self.gpu.part(memory, from, len_bytes))
        };
        let buffers: Vec<_> = seen.iter().map(behind).collect();
        check(&self.gpu, &plan.schedules, desc.element_bytes(), &buffers)?;
        self.grow_work(&plan.program.work_bytes, deadline)?;
        let signature = desc.signature(path, self.situation.table.version) ^ shared.number.rotate_left(16);
        let base = self.counter;
        self.counter = base.wrapping_add(plan.steps());
        let words = self.direct.as_ref().map_err(|why| PeerError::Staged(why.clone()))?;
        let run = Run { me: self.me, words, buffers: &buffers, work: &self.work, signature, base };
        let held = seen.iter().chain(self.work.iter().flatten()).cloned().collect();
        let mut page = self.pins.pop().map_or_else(|| self.gpu.pinned(self.facts.len() * page::ENTRY_BYTES), Ok)?;
        let handed = after.iter().try_for_each(|event| self.gpu.wait(&self.stream, event)).map_err(PeerError::from);
        let handed = handed.and_then(|()| plan.hand_over(&self.gpu, &self.stream, &run, &mut self.trace));
        let own = page::whole(&words.pages[self.me], self.facts.len());
        let handed = handed.and_then(|()| Ok(self.gpu.download(&self.stream, &mut page, own)?));
        let told = PeerFlight {
            number: 0,
            done: Arc::new(self.gpu.event()?),
            held,
            page: Some(page),
            desc: *desc,
            path,
            signature,
            base,
        };
        self.fly(handed, told)
    }

    fn start_nccl(
        &mut self,
        shared: &Shared<G>,
        desc: &OpDesc,
        after: &[&G::Event],
        deadline: Instant,
    ) -> Result<PeerWork<G>, PeerError> {
        self.usable()?;
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
        let hand = || gpu.nccl_all_reduce(comm, stream, (dtype, op), (whole, whole));
        let handed = after.iter().try_for_each(|event| gpu.wait(stream, event));
        let handed = handed.and_then(|()| match &mut self.trace {
            None => hand(),
            Some(trace) => {
                let lane = format!("rank {}", self.me);
                trace.span(gpu, stream, (&lane, "NCCL", Kind::Communication), hand)
            }
        });
        let handed = handed.map_err(PeerError::from).and_then(|()| until_handed(gpu, comm, desc, deadline));
        let done = Arc::new(gpu.event()?);
        let (held, path) = (vec![own.clone()], Path::Nccl);
        let told = PeerFlight { number: 0, done, held, page: None, desc: *desc, path, signature: 0, base: 0 };
        self.fly(handed, told)
    }

    /// Note that something was handed over, also where not all of it could be.
    fn fly(&mut self, handed: Result<(), PeerError>, flight: PeerFlight<G>) -> Result<PeerWork<G>, PeerError> {
        let recorded = self.gpu.record(&flight.done, &self.stream).map_err(PeerError::from);
        self.started += 1;
        let work = PeerWork { number: self.started, done: Arc::clone(&flight.done), path: flight.path };
        self.flights.push(PeerFlight { number: self.started, ..flight });
        match handed.and(recorded) {
            Ok(()) => Ok(work),
            // The others wait for what never comes from here.
            Err(error) => Err(self.give_up(error)),
        }
    }
}

/// Wait until NCCL has handed an operation to its stream: the first time it connects the ranks before.
fn until_handed<G: Nccl>(gpu: &G, comm: &G::Comm, desc: &OpDesc, deadline: Instant) -> Result<(), PeerError> {
    let mut patience = Patience::default();
    while !gpu.nccl_is_ready(comm)? {
        if Instant::now() >= deadline {
            return Err(PeerError::Deadline { desc: *desc, missing: Vec::new() });
        }
        patience.wait();
    }
    Ok(())
}
