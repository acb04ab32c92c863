//! The caller's buffers of one operation.

use super::error::GpuError;
use super::{Gpu, Part};
use crate::exec::memory_layout::{Store, check_lengths};
use crate::schedule::Schedule;
use std::ops::Range;

/// One rank's buffers of an operation, as bytes of whole elements.
#[derive(Debug, Clone)]
pub enum GpuBuffers<M> {
    /// One buffer, as long as the longer of input and output.
    InPlace(M),
    /// Separate buffers; the input is not modified.
    Separate {
        /// The rank's contribution; empty if it has none.
        input: M,
        /// Destination of its result; empty if it receives none.
        output: M,
    },
}

impl<M: Clone> GpuBuffers<M> {
    pub(super) const fn is_in_place(&self) -> bool {
        matches!(self, Self::InPlace(_))
    }

    pub(super) const fn input(&self) -> &M {
        match self {
            Self::InPlace(buffer) => buffer,
            Self::Separate { input, .. } => input,
        }
    }

    const fn output(&self) -> &M {
        match self {
            Self::InPlace(buffer) => buffer,
            Self::Separate { output, .. } => output,
        }
    }

    /// Return the same output with another input.
    pub(super) fn with_input(&self, input: M) -> Self {
        Self::Separate { input, output: self.output().clone() }
    }
}

/// Memory of all ranks, as addressed by a program.
pub(super) struct ProgramMemory<'a, M> {
    pub(super) buffers: &'a [GpuBuffers<M>],
    pub(super) work: &'a [Option<M>],
}

impl<M: Clone> ProgramMemory<'_, M> {
    /// Return a part of a rank's memory; `None` if it has no such store, which no program uses.
    pub(super) fn part(&self, rank: usize, store: Store, bytes: &Range<usize>) -> Option<Part<'_, M>> {
        let memory = match store {
            Store::Input => self.buffers.get(rank)?.input(),
            Store::User => self.buffers.get(rank)?.output(),
            Store::Work => self.work.get(rank)?.as_ref()?,
        };
        Some(Part { memory, at: bytes.start, len_bytes: bytes.len() })
    }
}

/// Check the buffers of all ranks: lengths as scheduled, the same kind everywhere, and outputs disjoint from all other
/// buffers.
pub(super) fn check<G: Gpu>(
    gpu: &G,
    schedules: &[Schedule],
    element_bytes: usize,
    buffers: &[GpuBuffers<G::Memory>],
) -> Result<(), GpuError> {
    if buffers.len() != schedules.len() {
        let what = format!("buffers of {} ranks for a group of {}", buffers.len(), schedules.len());
        return Err(GpuError::Invalid(what));
    }
    if buffers.iter().any(|each| each.is_in_place() != buffers[0].is_in_place()) {
        return Err(GpuError::Invalid(
            "some ranks pass one buffer and others two: pass the same kind for all ranks".into(),
        ));
    }
    let len = |memory: &G::Memory| {
        let Range { start, end } = gpu.addresses(memory);
        (end - start) as usize
    };
    let mut written: Vec<(Range<u64>, usize)> = Vec::new();
    let mut read: Vec<(Range<u64>, usize)> = Vec::new();
    for (rank, (each, schedule)) in buffers.iter().zip(schedules).enumerate() {
        let input = (!each.is_in_place()).then(|| len(each.input()));
        check_lengths(schedule.layout(), element_bytes, input, len(each.output()))?;
        written.push((gpu.addresses(each.output()), rank));
        if !each.is_in_place() {
            read.push((gpu.addresses(each.input()), rank));
        }
    }
    let overlap = |a: &Range<u64>, b: &Range<u64>| a.start < b.end && b.start < a.end;
    for (index, (range, rank)) in written.iter().enumerate() {
        let others = written[index + 1..].iter().chain(&read);
        if let Some((_, other)) = others.filter(|(other, _)| overlap(range, other)).min_by_key(|(_, rank)| *rank) {
            let what = format!("the output of rank {rank} overlaps memory of rank {other}; buffers must be disjoint");
            return Err(GpuError::Invalid(what));
        }
    }
    Ok(())
}
