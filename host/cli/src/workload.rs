//! One rank's buffers in a measurement: what is put in before an operation of any collective, and what must have come
//! out of it.
//!
//! Operations run in place, in one buffer that is as long as the longer of input and output, but all-to-all, which has
//! two. What is left from the iteration before is other values, so what is not written shows as wrong.

use crate::pattern::{Expected, Pattern, SCALE};
use std::ops::Range;
use sumac::{Buffers, CallOptions, Communicator, Outcome};
use sumac_hal::op::{Collective, OpDesc, ReduceOp};

/// An operation and its buffers at one rank.
#[derive(Debug)]
pub(crate) struct Workload {
    desc: OpDesc,
    rank: u32,
    ranks: u32,
    pattern: Pattern,
    buffer: Vec<u8>,
    /// The input, where it is a buffer of its own.
    input: Vec<u8>,
}

impl Workload {
    /// Make the buffers of `rank` among `ranks`; their content is any.
    pub(crate) fn new(desc: OpDesc, rank: u32, ranks: u32) -> Self {
        let dtype = desc.dtype.unwrap_or(sumac_hal::op::Dtype::F32);
        let pattern = Pattern::new(dtype, desc.op.unwrap_or(ReduceOp::Sum), ranks);
        let mut workload = Self { desc, rank, ranks, pattern, buffer: Vec::new(), input: Vec::new() };
        let own = workload.block(rank).len();
        let count = desc.count as usize;
        let at_root = desc.root.0 == rank;
        let elements = match desc.collective {
            Collective::Gather | Collective::Scatter if !at_root => own,
            Collective::AllToAll => own * ranks as usize,
            _ => count,
        };
        workload.buffer.resize(elements * desc.element_bytes(), 0);
        if desc.collective == Collective::AllToAll {
            workload.input.resize(count * desc.element_bytes(), 0);
        }
        workload
    }

    /// Return the elements of a rank's block.
    fn block(&self, rank: u32) -> Range<usize> {
        let start = |rank: u32| (u128::from(rank) * u128::from(self.desc.count) / u128::from(self.ranks)) as usize;
        start(rank)..start(rank + 1)
    }

    /// Put in what this rank contributes to `iteration`.
    pub(crate) fn fill(&mut self, iteration: u64) {
        let (own, at_root) = (self.block(self.rank), self.desc.root.0 == self.rank);
        let size = self.desc.element_bytes();
        let (buffer, first) = match self.desc.collective {
            Collective::Broadcast | Collective::Scatter if !at_root => return,
            Collective::AllToAll => (&mut self.input[..], 0),
            // A block of its own, or the same block among all.
            Collective::Gather if !at_root => (&mut self.buffer[..], own.start),
            Collective::AllGather | Collective::Gather => {
                (&mut self.buffer[own.start * size..own.end * size], own.start)
            }
            _ => (&mut self.buffer[..], 0),
        };
        self.pattern.fill(buffer, self.rank, iteration, first);
    }

    /// Run the operation: what is timed.
    pub(crate) fn run(&mut self, communicator: &Communicator, options: &CallOptions) -> Result<Outcome, sumac::Error> {
        let scalar = (self.desc.op == Some(ReduceOp::PremulSum)).then_some(SCALE);
        let options = CallOptions { scalar, ..*options };
        let buffers = match self.desc.collective {
            Collective::AllToAll => Buffers::Separate { input: &self.input, output: &mut self.buffer },
            _ => Buffers::InPlace(&mut self.buffer),
        };
        communicator.run(&self.desc, buffers, &options)
    }

    /// Return how many elements are not what `iteration` gives this rank.
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
