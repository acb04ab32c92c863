//! The operations of a group in the order of their posting, and which chunk belongs to which.

use super::PostError;
use std::collections::VecDeque;
use std::ops::Range;
use sumac_hal::op::{Collective, OpDesc};

/// The most operations in flight in one group.
const MAX_OPS: usize = 1024;

/// One operation of one endpoint, in the order of posting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

/// The caller's buffers, lent while an endpoint works.
///
/// Input and output may be the same bytes: a chunk's input is not read any more once its result is written.
pub trait Buffers {
    /// Return what `op` contributes; at least `count` elements for an operation with elements.
    fn input(&self, op: OpId) -> &[u8];

    /// Return where the result of `op` goes; as long as the input.
    fn output(&mut self, op: OpId) -> &mut [u8];
}

/// One posted operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Op {
    pub(super) id: OpId,
    pub(super) desc: OpDesc,
    pub(super) signature: u32,
    /// Its seqs.
    first: u64,
    end: u64,
    landed: u64,
    /// Elements in all chunks but the last; 0 for an operation that moves none.
    chunk_elements: u64,
}

impl Op {
    /// Return the bytes of the buffer that chunk `seq` is about; `None` if it carries none.
    pub(super) fn chunk(&self, seq: u64) -> Option<Range<usize>> {
        let size = self.desc.dtype.filter(|_| self.chunk_elements > 0).map(|_| self.desc.element_bytes() as u64)?;
        let start = (seq - self.first) * self.chunk_elements;
        let end = (start + self.chunk_elements).min(self.desc.count);
        Some((start * size) as usize..(end * size) as usize)
    }
}

/// The operations in flight.
#[derive(Debug)]
pub(super) struct Ops {
    queue: VecDeque<Op>,
    completed: VecDeque<OpId>,
    next_id: u64,
    /// The seq after the last posted.
    end: u64,
    chunk_len_bytes: usize,
}

impl Ops {
    pub(super) fn new(chunk_len_bytes: usize) -> Self {
        Self {
            queue: VecDeque::with_capacity(MAX_OPS),
            completed: VecDeque::with_capacity(MAX_OPS),
            next_id: 0,
            end: 0,
            chunk_len_bytes,
        }
    }

    /// Take in an operation; `offloaded` if its data goes through the tree.
    pub(super) fn post(&mut self, desc: OpDesc, signature: u32, offloaded: bool) -> Result<OpId, PostError> {
        if self.queue.len() + self.completed.len() >= MAX_OPS {
            return Err(PostError::TooMany { limit: MAX_OPS });
        }
        let id = OpId(self.next_id);
        self.next_id += 1;
        let carries = offloaded && desc.collective != Collective::Barrier;
        let chunk_elements = if carries { self.chunk_elements(&desc) } else { 0 };
        let seqs = if chunk_elements > 0 { desc.count.div_ceil(chunk_elements) } else { 1 };
        let first = self.end;
        self.end += seqs;
        self.queue.push_back(Op { id, desc, signature, first, end: self.end, landed: 0, chunk_elements });
        self.retire();
        Ok(id)
    }

    /// Return how many elements fit a chunk: as many as its partial results, in the accumulator type (PROTOCOL 1).
    fn chunk_elements(&self, desc: &OpDesc) -> u64 {
        self.chunk_len_bytes.checked_div(desc.partial_bytes()).unwrap_or(0) as u64
    }

    /// Return the seq after the last posted.
    pub(super) const fn end(&self) -> u64 {
        self.end
    }

    /// Return the operation in flight that `seq` belongs to.
    pub(super) fn of_seq(&self, seq: u64) -> Option<Op> {
        let index = self.queue.partition_point(|op| op.end <= seq);
        self.queue.get(index).filter(|op| op.first <= seq).copied()
    }

    /// Note that a chunk's result has landed, once a chunk; operations complete when all theirs have.
    pub(super) fn landed(&mut self, seq: u64) {
        let index = self.queue.partition_point(|op| op.end <= seq);
        if let Some(op) = self.queue.get_mut(index) {
            op.landed += 1;
            assert!(op.landed <= op.end - op.first, "a chunk lands once");
        }
        self.retire();
    }

    /// Complete what is complete, in the order of posting; an operation without elements as soon as it is first.
    fn retire(&mut self) {
        while let Some(op) = self.queue.front().filter(|op| op.landed == op.end - op.first) {
            self.completed.push_back(op.id);
            self.queue.pop_front();
        }
    }

    pub(super) fn pop_completed(&mut self) -> Option<OpId> {
        self.completed.pop_front()
    }
}
