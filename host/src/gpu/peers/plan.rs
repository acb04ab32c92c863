//! One rank's part of a program: its own passes, and the signals that order them among those of the others.

use super::page;
use super::{PeerError, Peered};
use crate::gpu::GpuError;
use crate::gpu::buffers::{GpuBuffers, ProgramMemory};
use crate::gpu::plan::{Passes, enqueue_op};
use crate::gpu::program::Program;
use crate::gpu::trace::{Kind, Trace};
use crate::schedule::Schedule;
use std::sync::Arc;

/// A program, and for each of its operations the other ranks that wait for it.
pub(super) struct PeerPlan<G: Peered> {
    pub(super) schedules: Vec<Schedule>,
    pub(super) program: Program,
    pub(super) kernel: Option<Arc<G::Kernel>>,
    /// Copies bytes, until a stop: the driver's copies would go on reading memory of a process that has died.
    mover: Option<Arc<G::Kernel>>,
    awaited_by: Vec<Vec<usize>>,
}

/// A rank's banner and all ranks' pages.
pub(super) struct SignalPages<M> {
    pub(super) banner: M,
    pub(super) pages: Vec<M>,
}

/// Inputs of one run of a program.
pub(super) struct PlanRun<'a, M> {
    pub(super) me: usize,
    pub(super) words: &'a SignalPages<M>,
    pub(super) buffers: &'a [GpuBuffers<M>],
    pub(super) work: &'a [Option<M>],
    /// The signature that all ranks must share.
    pub(super) signature: u32,
    /// Value of the counters before it.
    pub(super) base: u32,
}

impl<G: Peered> PeerPlan<G> {
    pub(super) fn new(
        schedules: Vec<Schedule>,
        program: Program,
        [kernel, mover]: [Option<Arc<G::Kernel>>; 2],
    ) -> Self {
        let mut awaited_by: Vec<Vec<usize>> = vec![Vec::new(); program.ops.len()];
        for op in &program.ops {
            for &earlier in op.waits.iter().filter(|&&earlier| program.ops[earlier].stream() != op.stream()) {
                if !awaited_by[earlier].contains(&op.stream()) {
                    awaited_by[earlier].push(op.stream());
                }
            }
        }
        Self { schedules, program, kernel, mover, awaited_by }
    }

    /// Return by how much one run advances the counters: entry, operations, end.
    pub(super) fn steps(&self) -> u32 {
        self.program.ops.len() as u32 + 2
    }

    /// Enqueue this rank's part.
    pub(super) fn enqueue(
        &self,
        gpu: &G,
        stream: &G::Stream,
        run: &PlanRun<'_, G::Memory>,
        trace: &mut Option<Trace<G>>,
    ) -> Result<(), PeerError> {
        let PlanRun { me, words, signature, base, .. } = *run;
        let end = base.wrapping_add(self.steps());
        gpu.signal(stream, page::signature(&words.banner), signature)?;
        gpu.signal(stream, page::sequence(&words.banner), end)?;
        self.barrier(gpu, stream, run, base.wrapping_add(1))?;
        let memory = ProgramMemory { buffers: run.buffers, work: run.work };
        let at = |op: usize| base.wrapping_add(2).wrapping_add(op as u32);
        let lane = format!("rank {me}");
        for (index, op) in self.program.ops.iter().enumerate().filter(|(_, op)| op.stream() == me) {
            for &earlier in &op.waits {
                let owner = self.program.ops[earlier].stream();
                if owner != me {
                    gpu.await_signal(stream, page::counter(&words.pages[me], owner), at(earlier))?;
                }
            }
            let enqueue = || {
                let (kernel, mover) = (self.kernel.as_deref(), self.mover.as_deref());
                enqueue_op(gpu, stream, op, &memory, &Passes { kernel, mover, ranks: self.program.ranks as u32 })
            };
            match trace {
                None => enqueue()?,
                Some(trace) => trace.span(gpu, stream, (&lane, op.name(), Kind::Communication), enqueue)?,
            }
            for &peer in &self.awaited_by[index] {
                gpu.signal(stream, page::counter(&words.pages[peer], me), at(index))?;
            }
        }
        // Publish this rank's outcome in all pages, its own included.
        for page in &words.pages {
            gpu.copy(stream, page::outcome(page, me), page::banner(&words.banner))?;
        }
        self.barrier(gpu, stream, run, end)?;
        // A GPU that cannot flush remote writes may show a counter before the outcome that was written before it. The
        // outcome has a number of its own.
        let own = &words.pages[me];
        (0..words.pages.len()).try_for_each(|peer| gpu.await_signal(stream, page::published(own, peer), end))?;
        Ok(())
    }

    /// Barrier: signal that this rank has reached a point, and wait until all have.
    fn barrier(&self, gpu: &G, stream: &G::Stream, run: &PlanRun<'_, G::Memory>, at: u32) -> Result<(), PeerError> {
        let PlanRun { me, words, .. } = run;
        for page in &words.pages {
            gpu.signal(stream, page::counter(page, *me), at)?;
        }
        let own = &words.pages[*me];
        let wait = |peer| gpu.await_signal(stream, page::counter(own, peer), at);
        (0..words.pages.len()).try_for_each(wait).map_err(GpuError::into)
    }
}
