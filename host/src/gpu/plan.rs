//! A program with the kernel and events that it needs, and its enqueueing to the streams.
//!
//! Every operation begins and ends at the hub stream: each rank's stream waits for the hub, and the hub for each
//! rank's. Work enqueued later therefore comes after all of it, and a capture that begins at the hub captures all of
//! it. A serial plan uses the hub alone: its operations are listed in an order that keeps all their waits.

use super::buffers::{GpuBuffers, ProgramMemory};
use super::error::GpuError;
use super::program::{Op, OpKind, Piece, Program};
use super::trace::{Kind, Trace};
use super::{Fused, Gpu, Part};
use crate::schedule::Schedule;
use std::sync::Arc;
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;

/// Destination and source of a copy.
pub(super) type Pair<'a, M> = (Part<'a, M>, Part<'a, M>);

/// The streams of a group.
pub(super) struct Streams<G: Gpu> {
    /// Where an operation begins and ends.
    pub(super) hub: G::Stream,
    /// One stream for each rank.
    pub(super) each: Vec<G::Stream>,
}

/// A program with its kernel and events.
pub(super) struct Plan<G: Gpu> {
    pub(super) schedules: Vec<Schedule>,
    pub(super) program: Program,
    pub(super) kernel: Option<Arc<G::Kernel>>,
    /// Whether everything runs on the hub.
    is_serial: bool,
    begin: G::Event,
    end_events: Vec<G::Event>,
    /// For each operation, its event if another stream waits for it.
    events: Vec<Option<G::Event>>,
}

/// A contribution to be multiplied first.
pub(super) struct Scaling<M> {
    pub(super) rank: usize,
    pub(super) from: M,
    pub(super) to: M,
    pub(super) scalar: f64,
}

/// An operation that is checked and prepared.
pub(super) struct Prepared<G: Gpu> {
    pub(super) shape: (OpDesc, Path, bool),
    pub(super) path: Path,
    pub(super) fallback: Option<String>,
    pub(super) buffers: Vec<GpuBuffers<G::Memory>>,
    pub(super) scalings: Vec<Scaling<G::Memory>>,
    /// Each rank's partial values.
    pub(super) work: Vec<Option<G::Memory>>,
    /// Shares of all memory that it accesses.
    pub(super) held: Vec<G::Memory>,
}

impl<G: Gpu> Plan<G> {
    pub(super) fn new(
        gpu: &G,
        schedules: Vec<Schedule>,
        program: Program,
        kernel: Option<Arc<G::Kernel>>,
        is_serial: bool,
    ) -> Result<Self, GpuError> {
        let event = |op: &Op| (op.is_awaited && !is_serial).then(|| gpu.event()).transpose();
        let events = program.ops.iter().map(event).collect::<Result<_, _>>()?;
        let streams = if is_serial { 0 } else { program.ranks };
        let end_events = (0..streams).map(|_| gpu.event()).collect::<Result<_, _>>()?;
        Ok(Self { schedules, program, kernel, is_serial, begin: gpu.event()?, end_events, events })
    }

    /// Enqueue a program, from the hub to the streams and back.
    pub(super) fn enqueue(
        &self,
        gpu: &G,
        streams: &Streams<G>,
        prepared: &Prepared<G>,
        trace: &mut Option<Trace<G>>,
    ) -> Result<(), GpuError> {
        self.fork(gpu, streams)?;
        if let Some(kernel) = &self.kernel
            && !prepared.scalings.is_empty()
        {
            self.scale_all(gpu, streams, kernel, &prepared.scalings)?;
        }
        let memory = ProgramMemory { buffers: &prepared.buffers, work: &prepared.work };
        for (op, event) in self.program.ops.iter().zip(&self.events) {
            let stream = self.stream(streams, op.stream());
            for &earlier in &op.waits {
                let event = self.events[earlier].as_ref();
                event.map_or(Ok(()), |event| gpu.wait(stream, event))?;
            }
            let passes = Passes { kernel: self.kernel.as_deref(), mover: None, ranks: self.program.ranks as u32 };
            let enqueue = || enqueue_op(gpu, stream, op, &memory, &passes);
            match trace {
                None => enqueue()?,
                Some(trace) => {
                    let lane = format!("rank {}", op.stream());
                    trace.span(gpu, stream, (&lane, op.name(), Kind::Communication), enqueue)?;
                }
            }
            event.as_ref().map_or(Ok(()), |event| gpu.record(event, stream))?;
        }
        self.join(gpu, streams)
    }

    /// Return the stream of a rank.
    fn stream<'s>(&self, streams: &'s Streams<G>, rank: usize) -> &'s G::Stream {
        if self.is_serial { &streams.hub } else { &streams.each[rank] }
    }

    /// Make the ranks' streams wait for the hub.
    fn fork(&self, gpu: &G, Streams { hub, each }: &Streams<G>) -> Result<(), GpuError> {
        if self.is_serial {
            return Ok(());
        }
        gpu.record(&self.begin, hub)?;
        each.iter().try_for_each(|stream| gpu.wait(stream, &self.begin))
    }

    /// Make the hub wait for the ranks' streams.
    fn join(&self, gpu: &G, Streams { hub, each }: &Streams<G>) -> Result<(), GpuError> {
        for (stream, end) in each.iter().zip(&self.end_events) {
            gpu.record(end, stream)?;
            gpu.wait(hub, end)?;
        }
        Ok(())
    }

    /// Multiply contributions, each on its rank's stream; no rank continues before all are done.
    fn scale_all(
        &self,
        gpu: &G,
        streams: &Streams<G>,
        kernel: &G::Kernel,
        scalings: &[Scaling<G::Memory>],
    ) -> Result<(), GpuError> {
        let whole = |memory| {
            let range = gpu.addresses(memory);
            Part { memory, at: 0, len_bytes: (range.end - range.start) as usize }
        };
        for Scaling { rank, from, to, scalar } in scalings {
            gpu.scale(self.stream(streams, *rank), kernel, whole(to), whole(from), *scalar)?;
        }
        self.join(gpu, streams)?;
        self.fork(gpu, streams)
    }
}

/// Code of a program's passes.
pub(super) struct Passes<'a, K> {
    /// The kernel of its type and operator.
    pub(super) kernel: Option<&'a K>,
    /// The kernel that copies bytes ([`mover`]), where copies must end with a stop; otherwise the driver copies.
    pub(super) mover: Option<&'a K>,
    /// The number of ranks.
    pub(super) ranks: u32,
}

/// Return the kernel whose passes without an operand copy bytes.
pub(super) fn mover() -> Option<Kernel> {
    Kernel::new(Dtype::U8, ReduceOp::Max)
}

/// Enqueue one operation of a program.
pub(super) fn enqueue_op<G: Gpu>(
    gpu: &G,
    stream: &G::Stream,
    op: &Op,
    memory: &ProgramMemory<'_, G::Memory>,
    passes: &Passes<'_, G::Kernel>,
) -> Result<(), GpuError> {
    let none = || GpuError::Invalid("a program for other memory".into());
    let part = |piece: &Piece| memory.part(piece.rank, piece.store, &piece.bytes).ok_or_else(none);
    let (from, to) = (part(&op.from)?, part(&op.to)?);
    match &op.kind {
        OpKind::Copy => match passes.mover {
            None => gpu.copy(stream, to, from),
            Some(mover) => {
                let (is_partial, own, is_finished, count) = (false, None, true, from.len_bytes);
                gpu.land(stream, mover, &Fused { from, is_partial, own, to, is_finished, count, ranks: 1 })
            }
        },
        OpKind::Land { is_partial, own, is_finished, count } => {
            let kernel = passes.kernel.ok_or_else(none)?;
            let own = match own {
                Some((piece, is_partial)) => Some((part(piece)?, *is_partial)),
                None => None,
            };
            let (is_partial, is_finished, count, ranks) = (*is_partial, *is_finished, *count, passes.ranks);
            gpu.land(stream, kernel, &Fused { from, is_partial, own, to, is_finished, count, ranks })
        }
    }
}
