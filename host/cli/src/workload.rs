//! One rank's buffers in a measurement: filling them before an operation and checking them after it.
//!
//! In place, an operation runs in one buffer, in which the shorter of input and output is a part of the longer. Out of
//! place, its input is a buffer of its own, and its output starts at the beginning of the other one. Buffers still hold
//! the values of the previous iteration, so elements that an operation fails to write are detected.
//!
//! [`memory`] is the only function that creates buffers.

use crate::pattern::{Expected, Pattern, SCALE};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::ops::{Deref, DerefMut, Range};
use sumac::{Buffer, Buffers, CallOptions, Communicator, MemoryKind, Outcome};
use sumac_hal::op::{Collective, OpDesc, ReduceOp};

/// Where the input and the output of an operation lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Placement {
    /// In buffers of their own.
    OutOfPlace,
    /// In one buffer.
    InPlace,
}

/// The placements to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub(crate) enum Placements {
    /// Out of place, then in place
    Both,
    /// Out of place: separate buffers for input and output
    OutOfPlace,
    /// In place: one buffer for input and output
    InPlace,
}

impl Placements {
    /// Return its name on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::OutOfPlace => "out-of-place",
            Self::InPlace => "in-place",
        }
    }

    /// Return those that a collective has, in the order in which they are measured.
    ///
    /// A barrier has no buffers, so there is nothing to distinguish. All-to-all is measured out of place only, because
    /// in place it runs another schedule than the requested one, and only with equal blocks.
    pub(crate) const fn of(self, collective: Collective) -> &'static [Placement] {
        match (self, collective) {
            (_, Collective::Barrier) => &[Placement::InPlace],
            (_, Collective::AllToAll) | (Self::OutOfPlace, _) => &[Placement::OutOfPlace],
            (Self::InPlace, _) => &[Placement::InPlace],
            (Self::Both, _) => &[Placement::OutOfPlace, Placement::InPlace],
        }
    }
}

/// Which iterations are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub(crate) enum Check {
    /// Every iteration, with new values: each element is written before the operation and read after it, which leaves
    /// the caches as in a program that computes between operations
    Every,
    /// One iteration before and one after the timed ones, which run back to back on zeros, as in the benchmarks of MPI
    /// and NCCL; `1` as in nccl-tests is the same
    #[value(alias("1"))]
    Ends,
}

impl Check {
    /// Return its name on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Every => "every",
            Self::Ends => "ends",
        }
    }
}

/// The size of a page.
const PAGE_BYTES: usize = 4096;

/// A buffer in one kind of memory.
#[derive(Debug)]
enum Memory {
    Registered(Buffer<u8>),
    Plain(PageAligned),
}

/// Memory that begins on a page, as registered memory and the buffers of other benchmarks do: where others begin
/// depends on what was allocated before, and costs up to a fifth of the time.
#[derive(Debug)]
struct PageAligned {
    bytes: Vec<u8>,
    used: Range<usize>,
}

impl PageAligned {
    fn zeroed(len_bytes: usize) -> Self {
        let bytes = vec![0; len_bytes + PAGE_BYTES];
        let start = bytes.as_ptr().align_offset(PAGE_BYTES).min(PAGE_BYTES);
        Self { bytes, used: start..start + len_bytes }
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Registered(buffer) => buffer,
            Self::Plain(memory) => &memory.bytes[memory.used.clone()],
        }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Registered(buffer) => buffer,
            Self::Plain(memory) => &mut memory.bytes[memory.used.clone()],
        }
    }
}

/// Create a zeroed buffer.
fn memory(communicator: &Communicator, kind: MemoryKind, len_bytes: usize) -> Result<Memory, sumac::Error> {
    match kind {
        MemoryKind::Registered => communicator.alloc(len_bytes).map(Memory::Registered),
        _ => Ok(Memory::Plain(PageAligned::zeroed(len_bytes))),
    }
}

/// An operation and its buffers on one rank.
#[derive(Debug)]
pub(crate) struct Workload {
    desc: OpDesc,
    rank: u32,
    ranks: u32,
    pattern: Pattern,
    /// The elements of `buffer` that are the input in place. Out of place, only their number matters.
    input_range: Range<usize>,
    /// The elements of `buffer` that are the output in place. Out of place, only their number matters.
    output_range: Range<usize>,
    /// Input and output in place, the output out of place.
    buffer: Memory,
    /// The input out of place; empty if the operation only runs in place.
    input: Memory,
    placement: Placement,
}

impl Workload {
    /// Create the buffers of this rank for operations in place and, if `out_of_place`, also for those.
    ///
    /// # Errors
    /// The communicator has no memory for them.
    pub(crate) fn new(
        desc: OpDesc,
        communicator: &Communicator,
        kind: MemoryKind,
        out_of_place: bool,
    ) -> Result<Self, sumac::Error> {
        let (rank, ranks) = (communicator.rank(), communicator.size());
        let dtype = desc.dtype.unwrap_or(sumac_hal::op::Dtype::F32);
        let pattern = Pattern::new(dtype, desc.op.unwrap_or(ReduceOp::Sum), ranks);
        let (input_range, output_range) = ranges(&desc, rank, ranks);
        let memory = |elements: usize| memory(communicator, kind, elements * desc.element_bytes());
        let buffer = memory(input_range.end.max(output_range.end))?;
        let input = memory(if out_of_place { input_range.len() } else { 0 })?;
        let placement = Placement::InPlace;
        Ok(Self { desc, rank, ranks, pattern, input_range, output_range, buffer, input, placement })
    }

    /// Run the next operations in this placement.
    pub(crate) fn place(&mut self, placement: Placement) {
        self.placement = placement;
    }

    /// Return the elements of a rank's block.
    fn block(&self, rank: u32) -> Range<usize> {
        block(&self.desc, rank, self.ranks)
    }

    /// Fill in this rank's contribution to `iteration`.
    pub(crate) fn fill(&mut self, iteration: u64) {
        let first = match self.desc.collective {
            Collective::AllGather | Collective::Gather => self.block(self.rank).start,
            _ => 0,
        };
        let size = self.desc.element_bytes();
        let input = match self.placement {
            Placement::OutOfPlace => &mut self.input[..],
            Placement::InPlace => &mut self.buffer[in_bytes(&self.input_range, size)],
        };
        if !input.is_empty() {
            self.pattern.fill(input, self.rank, iteration, first);
        }
    }

    /// Fill the buffers with zeros, of which every operator and collective makes zeros.
    pub(crate) fn clear(&mut self) {
        self.buffer.fill(0);
        self.input.fill(0);
    }

    /// Return the number of elements that are not zero, after [`clear`](Self::clear).
    pub(crate) fn not_clear(&self) -> u64 {
        let size = self.desc.element_bytes().max(1);
        self.buffer.chunks(size).filter(|element| element.iter().any(|&byte| byte != 0)).count() as u64
    }

    /// Run the operation. This is the timed part.
    pub(crate) fn run(&mut self, communicator: &Communicator, options: &CallOptions) -> Result<Outcome, sumac::Error> {
        let scalar = (self.desc.op == Some(ReduceOp::PremulSum)).then_some(SCALE);
        let options = CallOptions { scalar, ..*options };
        let output_len = self.output_range.len() * self.desc.element_bytes();
        let buffers = match self.placement {
            Placement::OutOfPlace => Buffers::Separate { input: &self.input, output: &mut self.buffer[..output_len] },
            Placement::InPlace => Buffers::InPlace(&mut self.buffer),
        };
        communicator.run(&self.desc, buffers, &options)
    }

    /// Return the number of elements that differ from this rank's result of `iteration`.
    pub(crate) fn wrong(&self, iteration: u64) -> u64 {
        let output = match self.placement {
            Placement::OutOfPlace => 0..self.output_range.len(),
            Placement::InPlace => self.output_range.clone(),
        };
        let (own, root, size) = (self.block(self.rank), self.desc.root.0, self.desc.element_bytes());
        let output = &self.buffer[in_bytes(&output, size)];
        let check = |elements: Range<usize>, expected, first| {
            self.pattern.wrong(&output[in_bytes(&elements, size)], expected, iteration, first)
        };
        let all = 0..self.output_range.len();
        match self.desc.collective {
            Collective::AllReduce | Collective::Reduce => check(all, Expected::Reduced, 0),
            Collective::ReduceScatter => check(all, Expected::Reduced, own.start),
            Collective::Broadcast => check(all, Expected::Of(root), 0),
            Collective::Scatter => check(all, Expected::Of(root), own.start),
            Collective::Gather if root != self.rank => 0,
            Collective::AllGather | Collective::Gather => {
                let block = |rank| check(self.block(rank), Expected::Of(rank), self.block(rank).start);
                (0..self.ranks).map(block).sum()
            }
            Collective::AllToAll => {
                let at = |rank: u32| rank as usize * own.len();
                let block = |rank| check(at(rank)..at(rank + 1), Expected::Of(rank), own.start);
                (0..self.ranks).map(block).sum()
            }
            _ => 0,
        }
    }
}

fn in_bytes(elements: &Range<usize>, element_bytes: usize) -> Range<usize> {
    elements.start * element_bytes..elements.end * element_bytes
}

/// Return the elements of a rank's block.
fn block(desc: &OpDesc, rank: u32, ranks: u32) -> Range<usize> {
    let start = |rank: u32| (u128::from(rank) * u128::from(desc.count) / u128::from(ranks)) as usize;
    start(rank)..start(rank + 1)
}

/// Return the elements of a buffer that are input and output of an operation in place: the table in [`sumac::comm`].
fn ranges(desc: &OpDesc, rank: u32, ranks: u32) -> (Range<usize>, Range<usize>) {
    let (own, all, none) = (block(desc, rank, ranks), 0..desc.count as usize, 0..0);
    let alone = 0..own.len();
    match (desc.collective, desc.root.0 == rank) {
        (Collective::Barrier, _) => (none.clone(), none),
        (Collective::Reduce, false) => (all, none),
        (Collective::Broadcast, false) => (none, all),
        (Collective::ReduceScatter, _) | (Collective::Scatter, true) => (all, own),
        (Collective::AllGather, _) | (Collective::Gather, true) => (own, all),
        (Collective::Gather, false) => (alone, none),
        (Collective::Scatter, false) => (none, alone),
        (Collective::AllToAll, _) => (all, 0..own.len() * ranks as usize),
        _ => (all.clone(), all),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sumac_hal::ids::Rank;
    use sumac_hal::op::Dtype;

    #[test]
    fn plain_memory_begins_on_a_page_and_is_zeroed() {
        for len_bytes in [0, 1, PAGE_BYTES, 3 * PAGE_BYTES + 8] {
            let memory = Memory::Plain(PageAligned::zeroed(len_bytes));
            assert_eq!((memory.len(), memory.as_ptr().addr() % PAGE_BYTES), (len_bytes, 0));
            assert!(memory.iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn ranges_put_the_shorter_part_where_the_library_expects_it() {
        let of = |collective, rank| {
            let desc = OpDesc { collective, dtype: Some(Dtype::F32), op: None, root: Rank(1), count: 7 };
            ranges(&desc, rank, 3)
        };
        assert_eq!(of(Collective::AllReduce, 2), (0..7, 0..7));
        assert_eq!([of(Collective::Reduce, 0), of(Collective::Reduce, 1)], [(0..7, 0..0), (0..7, 0..7)]);
        assert_eq!([of(Collective::Broadcast, 0), of(Collective::Broadcast, 1)], [(0..0, 0..7), (0..7, 0..7)]);
        assert_eq!(of(Collective::ReduceScatter, 1), (0..7, 2..4));
        assert_eq!(of(Collective::AllGather, 2), (4..7, 0..7));
        assert_eq!([of(Collective::Gather, 2), of(Collective::Gather, 1)], [(0..3, 0..0), (2..4, 0..7)]);
        assert_eq!([of(Collective::Scatter, 2), of(Collective::Scatter, 1)], [(0..0, 0..3), (0..7, 2..4)]);
        assert_eq!(of(Collective::AllToAll, 0), (0..7, 0..6));
    }
}
