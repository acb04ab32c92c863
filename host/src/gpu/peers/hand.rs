//! One rank's part of a program: its own passes, and the words that order them among those of the others.

use super::page;
use super::{PeerError, Peered};
use crate::gpu::GpuError;
use crate::gpu::buffers::{GpuBuffers, Rooms};
use crate::gpu::plan::hand_op;
use crate::gpu::program::Program;
use crate::gpu::trace::{Kind, Trace};
use crate::schedule::Schedule;
use std::sync::Arc;

/// A program, and for each of its operations the other ranks that wait for it.
pub(super) struct PeerPlan<G: Peered> {
    pub(super) schedules: Vec<Schedule>,
    pub(super) program: Program,
    pub(super) kernel: Option<Arc<G::Kernel>>,
    awaited_by: Vec<Vec<usize>>,
}

/// A rank's own words and everyone's pages.
pub(super) struct Words<M> {
    pub(super) banner: M,
    pub(super) pages: Vec<M>,
}

/// What one run of a program works on.
pub(super) struct Run<'a, M> {
    pub(super) me: usize,
    pub(super) words: &'a Words<M>,
    pub(super) buffers: &'a [GpuBuffers<M>],
    pub(super) work: &'a [Option<M>],
    /// What all ranks have to take part in.
    pub(super) signature: u32,
    /// What the counters have got to before it.
    pub(super) base: u32,
}

impl<G: Peered> PeerPlan<G> {
    pub(super) fn new(schedules: Vec<Schedule>, program: Program, kernel: Option<Arc<G::Kernel>>) -> Self {
        let mut awaited_by: Vec<Vec<usize>> = vec![Vec::new(); program.ops.len()];
        for op in &program.ops {
            for &earlier in op.waits.iter().filter(|&&earlier| program.ops[earlier].stream() != op.stream()) {
                if !awaited_by[earlier].contains(&op.stream()) {
                    awaited_by[earlier].push(op.stream());
                }
            }
        }
        Self { schedules, program, kernel, awaited_by }
    }

    /// Return how far the counters go on for one run: entry, operations, end.
    pub(super) fn steps(&self) -> u32 {
        self.program.ops.len() as u32 + 2
    }

    /// Hand this rank's part over.
    pub(super) fn hand_over(
        &self,
        gpu: &G,
        stream: &G::Stream,
        run: &Run<'_, G::Memory>,
        trace: &mut Option<Trace<G>>,
    ) -> Result<(), PeerError> {
        let Run { me, words, signature, base, .. } = *run;
        gpu.signal(stream, page::signature(&words.banner), signature)?;
        self.meet(gpu, stream, run, base.wrapping_add(1))?;
        let rooms = Rooms { buffers: run.buffers, work: run.work };
        let at = |op: usize| base.wrapping_add(2).wrapping_add(op as u32);
        let lane = format!("rank {me}");
        for (index, op) in self.program.ops.iter().enumerate().filter(|(_, op)| op.stream() == me) {
            for &earlier in &op.waits {
                let owner = self.program.ops[earlier].stream();
                if owner != me {
                    gpu.await_signal(stream, page::counter(&words.pages[me], owner), at(earlier))?;
                }
            }
            let hand = || {
                let kernel = (self.kernel.as_deref(), self.program.ranks as u32);
                hand_op(gpu, stream, op, &rooms, kernel)
            };
            match trace {
                None => hand()?,
                Some(trace) => trace.span(gpu, stream, (&lane, op.name(), Kind::Communication), hand)?,
            }
            for &peer in &self.awaited_by[index] {
                gpu.signal(stream, page::counter(&words.pages[peer], me), at(index))?;
            }
        }
        // Into all pages, own too: what this rank took part in, and whether it has given up.
        for page in &words.pages {
            gpu.copy(stream, page::verdict(page, me), page::banner(&words.banner))?;
        }
        self.meet(gpu, stream, run, base.wrapping_add(self.steps()))
    }

    /// Say that this rank has come to a point, and wait until all have.
    fn meet(&self, gpu: &G, stream: &G::Stream, run: &Run<'_, G::Memory>, at: u32) -> Result<(), PeerError> {
        let Run { me, words, .. } = run;
        for page in &words.pages {
            gpu.signal(stream, page::counter(page, *me), at)?;
        }
        let own = &words.pages[*me];
        let wait = |peer| gpu.await_signal(stream, page::counter(own, peer), at);
        (0..words.pages.len()).try_for_each(wait).map_err(GpuError::into)
    }
}
