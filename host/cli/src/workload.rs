//! One rank's buffers in a measurement: filling them before an operation and checking them after it.
//!
//! Operations run in place, in one buffer of the length of the longer of input and output, except all-to-all, which has
//! two buffers. A buffer still holds the values of the previous iteration, so elements that an operation fails to write
//! are detected.
//!
//! [`memory`] is the only function that creates buffers.

use crate::pattern::{Expected, Pattern, SCALE};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::ops::{Deref, DerefMut, Range};
use sumac::{Buffer, Buffers, CallOptions, Communicator, Outcome};
use sumac_hal::op::{Collective, OpDesc, ReduceOp};

/// The memory of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub(crate) enum MemoryKind {
    /// Memory of the communicator, which devices access zero-copy
    Registered,
    /// Ordinary memory of the process
    Plain,
}

impl MemoryKind {
    /// Return its name on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Registered => "registered",
            Self::Plain => "plain",
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
    /// and NCCL
    Ends,
}

/// A buffer in one kind of memory.
#[derive(Debug)]
enum Memory {
    Registered(Buffer<u8>),
    Plain(Vec<u8>),
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Registered(buffer) => buffer,
            Self::Plain(buffer) => buffer,
        }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Registered(buffer) => buffer,
            Self::Plain(buffer) => buffer,
        }
    }
}

/// Create a zeroed buffer.
fn memory(communicator: &Communicator, kind: MemoryKind, len_bytes: usize) -> Result<Memory, sumac::Error> {
    match kind {
        MemoryKind::Registered => communicator.alloc(len_bytes).map(Memory::Registered),
        MemoryKind::Plain => Ok(Memory::Plain(vec![0; len_bytes])),
    }
}

/// An operation and its buffers on one rank.
#[derive(Debug)]
pub(crate) struct Workload {
    desc: OpDesc,
    rank: u32,
    ranks: u32,
    pattern: Pattern,
    buffer: Memory,
    /// The input, if it has a buffer of its own.
    input: Option<Memory>,
}

impl Workload {
    /// Create the buffers of this rank.
    ///
    /// # Errors
    /// The communicator has no memory for them.
    pub(crate) fn new(desc: OpDesc, communicator: &Communicator, kind: MemoryKind) -> Result<Self, sumac::Error> {
        let (rank, ranks) = (communicator.rank(), communicator.size());
        let dtype = desc.dtype.unwrap_or(sumac_hal::op::Dtype::F32);
        let pattern = Pattern::new(dtype, desc.op.unwrap_or(ReduceOp::Sum), ranks);
        let own = block(&desc, rank, ranks).len();
        let count = desc.count as usize;
        let at_root = desc.root.0 == rank;
        let elements = match desc.collective {
            Collective::Gather | Collective::Scatter if !at_root => own,
            Collective::AllToAll => own * ranks as usize,
            _ => count,
        };
        let buffer = memory(communicator, kind, elements * desc.element_bytes())?;
        let input = (desc.collective == Collective::AllToAll)
            .then(|| memory(communicator, kind, count * desc.element_bytes()))
            .transpose()?;
        Ok(Self { desc, rank, ranks, pattern, buffer, input })
    }

    /// Return the elements of a rank's block.
    fn block(&self, rank: u32) -> Range<usize> {
        block(&self.desc, rank, self.ranks)
    }

    /// Fill in this rank's contribution to `iteration`.
    pub(crate) fn fill(&mut self, iteration: u64) {
        let (own, at_root) = (self.block(self.rank), self.desc.root.0 == self.rank);
        let size = self.desc.element_bytes();
        if let Some(input) = &mut self.input {
            return self.pattern.fill(input, self.rank, iteration, 0);
        }
        let (buffer, first) = match self.desc.collective {
            Collective::Broadcast | Collective::Scatter if !at_root => return,
            // The buffer holds either the rank's block alone or all blocks.
            Collective::Gather if !at_root => (&mut self.buffer[..], own.start),
            Collective::AllGather | Collective::Gather => {
                (&mut self.buffer[own.start * size..own.end * size], own.start)
            }
            _ => (&mut self.buffer[..], 0),
        };
        self.pattern.fill(buffer, self.rank, iteration, first);
    }

    /// Fill the buffers with zeros, of which every operator and collective makes zeros.
    pub(crate) fn clear(&mut self) {
        self.buffer.fill(0);
        if let Some(input) = &mut self.input {
            input.fill(0);
        }
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
        let buffers = match &self.input {
            Some(input) => Buffers::Separate { input, output: &mut self.buffer },
            None => Buffers::InPlace(&mut self.buffer),
        };
        communicator.run(&self.desc, buffers, &options)
    }

    /// Return the number of elements that differ from this rank's result of `iteration`.
    pub(crate) fn wrong(&self, iteration: u64) -> u64 {
        let (own, root) = (self.block(self.rank), self.desc.root.0);
        let size = self.desc.element_bytes();
        let check = |elements: Range<usize>, expected, first| {
            self.pattern.wrong(&self.buffer[elements.start * size..elements.end * size], expected, iteration, first)
        };
        let all = 0..self.buffer.len().checked_div(size).unwrap_or(0);
        match self.desc.collective {
            Collective::AllReduce => check(all, Expected::Reduced, 0),
            Collective::Reduce if root == self.rank => check(all, Expected::Reduced, 0),
            Collective::ReduceScatter => check(own.clone(), Expected::Reduced, own.start),
            Collective::Broadcast => check(all, Expected::Of(root), 0),
            Collective::Scatter if root == self.rank => check(own.clone(), Expected::Of(root), own.start),
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

/// Return the elements of a rank's block.
fn block(desc: &OpDesc, rank: u32, ranks: u32) -> Range<usize> {
    let start = |rank: u32| (u128::from(rank) * u128::from(desc.count) / u128::from(ranks)) as usize;
    start(rank)..start(rank + 1)
}
