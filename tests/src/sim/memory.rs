//! Ranks' buffers and their expected contents: which rank contributes and receives which element of a collective,
//! specified a second time, element by element and without the code under test.

use super::options::Options;
use super::setup::element;
use crate::oracle::{Shape, expected, weight};
use std::ops::Range;
use sumac::harness::StartedBuffers;
use sumac::transport::packets::{Buffers, OpId};
use sumac_hal::op::{Collective, OpDesc};

/// A rank's buffers in one group, by operation.
pub(super) struct Memory {
    /// The first operation of its endpoint.
    pub(super) first: usize,
    /// The operations of its endpoint, if not all are posted there.
    pub(super) posted: Vec<usize>,
    pub(super) ops: Vec<OpMemory>,
}

impl Memory {
    /// Return the index of an operation of the endpoint.
    pub(super) fn index(&self, op: OpId) -> usize {
        self.posted.get(op.0 as usize).copied().unwrap_or(self.first + op.0 as usize)
    }
}

impl Buffers for Memory {
    fn input(&self, op: OpId) -> &[u8] {
        let op = &self.ops[self.index(op)];
        match (op.in_place, op.collective) {
            (false, _) => &op.input,
            (true, Collective::AllGather) => &op.output[op.own.clone()],
            (true, _) => &op.output,
        }
    }

    fn output(&mut self, op: OpId) -> &mut [u8] {
        let index = self.index(op);
        let op = &mut self.ops[index];
        match (op.in_place, op.collective) {
            (true, Collective::ReduceScatter) => &mut op.output[op.own.clone()],
            _ => &mut op.output,
        }
    }
}

/// The buffers of one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OpMemory {
    collective: Collective,
    /// Input and output are the same buffer, which has room for every element of the operation.
    in_place: bool,
    /// The bytes of the rank's own block among all elements.
    own: Range<usize>,
    input: Vec<u8>,
    output: Vec<u8>,
}

/// Fill of an output before anything is written.
const UNTOUCHED: u8 = 0x5a;

/// The byte that callers write to their buffers after an operation has returned.
const GARBAGE: u8 = 0xee;

impl OpMemory {
    /// The buffers of `rank` as it calls operation `op`.
    pub(super) fn before(options: &Options, incarnation: u64, group: usize, rank: usize, op: usize) -> Self {
        let desc = options.call(group, rank, op);
        let size = desc.element_bytes();
        let own = own_block(&desc, options.ranks, rank);
        let in_place = weight(&[options.seed, group as u64, op as u64]) & 1 == 1;
        let given = |e: &u64| contributes(&desc, options.ranks, rank, *e);
        let taken = |e: &u64| receives(&desc, options.ranks, rank, *e);
        let (input, output) = if in_place {
            let whole = (0..desc.count).flat_map(|e| {
                if given(&e) { element(options, incarnation, group, rank, op, e) } else { vec![UNTOUCHED; size] }
            });
            (Vec::new(), whole.collect())
        } else {
            let input = (0..desc.count).filter(given).flat_map(|e| element(options, incarnation, group, rank, op, e));
            // An all-gather stores blocks at their places, so its output has room for the rank's own too.
            let len = match desc.collective {
                Collective::AllGather => desc.count as usize,
                _ => (0..desc.count).filter(taken).count(),
            };
            (input.collect(), vec![UNTOUCHED; len * size])
        };
        let own = own.start * size..own.end * size;
        Self { collective: desc.collective, in_place, own, input, output }
    }

    /// Return the allocated buffers: the input, which is empty in place, and the output.
    pub(super) fn buffers(&self) -> [&[u8]; 2] {
        [&self.input, &self.output]
    }

    /// Return the buffer and offset of the input, then those of the output.
    pub(super) fn places(&self) -> [(usize, usize); 2] {
        let start = |of| if self.in_place && self.collective == of { self.own.start } else { 0 };
        [(usize::from(self.in_place), start(Collective::AllGather)), (1, start(Collective::ReduceScatter))]
    }

    /// Write to a buffer on behalf of the engine.
    pub(super) fn write(&mut self, buffer: usize, at: usize, bytes: &[u8]) {
        let buffer = if buffer == 0 { &mut self.input } else { &mut self.output };
        buffer[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Hand the buffers over to a communicator.
    pub(super) fn give(&self) -> StartedBuffers {
        match self.in_place {
            true => StartedBuffers { memory: self.output.clone(), output: None },
            false => StartedBuffers { memory: self.input.clone(), output: Some(self.output.clone()) },
        }
    }

    /// Take the buffers back.
    pub(super) fn take(&mut self, buffers: StartedBuffers) {
        let StartedBuffers { memory, output } = buffers;
        match output {
            Some(output) => (self.input, self.output) = (memory, output),
            None => self.output = memory,
        }
    }

    /// The operation has returned: overwrite its buffers, as a caller may.
    pub(super) fn scribble(&mut self) {
        self.input.fill(GARBAGE);
        self.output.fill(GARBAGE);
    }

    /// Return the result of a chunk of elements, from a buffer with room for every element.
    pub(super) fn result(&self, chunk: &Range<u64>, size: usize) -> &[u8] {
        &self.output[chunk.start as usize * size..chunk.end as usize * size]
    }

    /// Return the range of element `e` of the operation in the output.
    fn place(&self, e: usize, size: usize) -> Range<usize> {
        let at = e * size;
        match (self.in_place, self.collective) {
            (false, Collective::ReduceScatter) => at - self.own.start..at - self.own.start + size,
            _ => at..at + size,
        }
    }

    /// Return these buffers of `rank` with all results in them.
    pub(super) fn after(&self, desc: &OpDesc, ranks: usize, rank: usize, results: &[Vec<u8>]) -> Self {
        let mut after = self.clone();
        for (e, result) in results.iter().enumerate().filter(|(e, _)| receives(desc, ranks, rank, *e as u64)) {
            let place = self.place(e, result.len());
            after.output[place].copy_from_slice(result);
        }
        after
    }

    /// Return the position of the first byte that differs from `other`, in the output, then in the input, with both
    /// values.
    pub(super) fn first_difference(&self, other: &Self) -> Option<(usize, [u8; 2])> {
        let differs = |a: &[u8], b: &[u8]| {
            a.iter().zip(b).enumerate().find_map(|(byte, (&a, &b))| (a != b).then_some((byte, [a, b])))
        };
        differs(&self.output, &other.output).or_else(|| differs(&self.input, &other.input))
    }

    /// Return the first chunk that matches neither `before` nor `after`.
    pub(super) fn torn_chunk(
        &self,
        before: &Self,
        after: &Self,
        desc: &OpDesc,
        chunks: &[Range<u64>],
    ) -> Option<usize> {
        let size = desc.element_bytes();
        let inside = |e: u64| {
            let place = self.place(e as usize, size);
            Some((self.output.get(place.clone())?, before.output.get(place.clone())?, after.output.get(place)?))
        };
        if self.input != before.input {
            return Some(0);
        }
        chunks.iter().position(|chunk| {
            // Elements outside the rank's own block are not in the output of a reduce-scatter.
            let held = |e: &u64| self.in_place || self.collective != Collective::ReduceScatter || self.owns(*e, size);
            let elements: Vec<_> = chunk.clone().filter(held).filter_map(inside).collect();
            let old = elements.iter().all(|(found, before, _)| found == before);
            let new = elements.iter().all(|(found, _, after)| found == after);
            !old && !new
        })
    }

    fn owns(&self, e: u64, size: usize) -> bool {
        self.own.contains(&(e as usize * size))
    }
}

/// Return the elements of a rank's own block: floor(r n / N) to floor((r + 1) n / N).
fn own_block(desc: &OpDesc, ranks: usize, rank: usize) -> Range<usize> {
    let start = |rank: usize| (rank as u128 * u128::from(desc.count) / ranks as u128) as usize;
    start(rank)..start(rank + 1)
}

/// Return whether a rank contributes to an element.
fn contributes(desc: &OpDesc, ranks: usize, rank: usize, e: u64) -> bool {
    match desc.collective {
        Collective::Broadcast => desc.root.0 as usize == rank,
        Collective::AllGather => own_block(desc, ranks, rank).contains(&(e as usize)),
        _ => true,
    }
}

/// Return whether a rank receives an element; of data that is only moved, the contributor receives none.
fn receives(desc: &OpDesc, ranks: usize, rank: usize, e: u64) -> bool {
    match desc.collective {
        Collective::AllReduce => true,
        Collective::Reduce => desc.root.0 as usize == rank,
        Collective::ReduceScatter => own_block(desc, ranks, rank).contains(&(e as usize)),
        _ => !contributes(desc, ranks, rank, e),
    }
}

/// Return the result of each element of an operation on a tree as drawn.
pub(super) fn results(options: &Options, incarnation: u64, group: usize, op: usize) -> Vec<Vec<u8>> {
    results_over(&options.trees[options.tree(group)], options, incarnation, group, op)
}

/// Return the result of each element of an operation on a tree of this shape.
pub(super) fn results_over(
    shape: &Shape,
    options: &Options,
    incarnation: u64,
    group: usize,
    op: usize,
) -> Vec<Vec<u8>> {
    let desc = options.groups[group].ops[op];
    let reduced = |e: u64| {
        let inputs = |rank| element(options, incarnation, group, rank, op, e);
        let (dtype, reduce) = (desc.dtype?, desc.op?);
        Some(expected(shape, options.order(group), dtype, reduce, &inputs))
    };
    let moved = |e: u64| {
        let owner = (0..options.ranks).find(|&rank| contributes(&desc, options.ranks, rank, e));
        element(options, incarnation, group, owner.expect("each element has an owner"), op, e)
    };
    (0..desc.count).map(|e| reduced(e).unwrap_or_else(|| moved(e))).collect()
}

/// Return the chunks of an operation (PROTOCOL 1): as many elements as fit in partial form; those of an all-gather do
/// not cross blocks.
pub(super) fn chunks(desc: &OpDesc, ranks: usize, chunk_len_bytes: u16) -> Vec<Range<u64>> {
    let Some(most) = usize::from(chunk_len_bytes).checked_div(desc.partial_bytes()) else { return Vec::new() };
    let blocks: Vec<Range<usize>> = match desc.collective {
        Collective::AllGather => (0..ranks).map(|rank| own_block(desc, ranks, rank)).collect(),
        _ => std::iter::once(0..desc.count as usize).collect(),
    };
    let cut = |block: Range<usize>| {
        block.clone().step_by(most).map(move |start| start as u64..block.end.min(start + most) as u64)
    };
    blocks.into_iter().flat_map(cut).collect()
}
