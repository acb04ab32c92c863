//! The operations of a group in order of posting, and what is retained of completed ones.

#[cfg(test)]
mod tests;

use super::completion::{CompletionInfo, Exclusions, Slowest};
use super::op::chunks_before;
use super::{Op, OpId, PostError, RankInfo, Retention};
use std::collections::VecDeque;
use sumac_hal::op::{Collective, OpDesc};
use sumac_hal::wire::StragglerLimit;

/// The maximum number of operations in flight in one group.
pub(crate) const MAX_OPS: usize = 1024;

/// A completed operation whose results other ranks may still lack (PROTOCOL 5).
#[derive(Debug, Clone, Copy)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub(crate) struct RetainedOp {
    pub(crate) op: Op,
    /// The first of its chunks that other ranks may lack.
    pub(crate) from: u64,
    /// Bytes retained of the chunks from there on; 0 where they are available elsewhere.
    len_bytes: usize,
    /// Their offset in the stream of all bytes ever retained.
    at: u64,
}

impl RetainedOp {
    /// Return whether its bytes are retained here.
    pub(crate) const fn has_bytes(&self) -> bool {
        self.len_bytes > 0
    }

    /// Return the number of bytes retained here.
    #[cfg(feature = "snapshot")]
    pub(crate) const fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

/// Operations in flight and retained ones.
#[derive(Debug)]
#[cfg_attr(feature = "snapshot", derive(Clone, PartialEq, Eq, Hash))]
pub(crate) struct Ops {
    queue: VecDeque<Op>,
    /// Completed operations that moved elements, newest last.
    retained_ops: VecDeque<RetainedOp>,
    /// How many of them are new: [`Ops::retain_new`] has not processed them.
    new_retained: usize,
    /// Their bytes, concatenated. Grows to the most that was ever retained at once: a window of chunks.
    retained_bytes: VecDeque<u8>,
    /// Number of bytes ever released from `retained_bytes`.
    released_bytes: u64,
    completed: VecDeque<(OpId, CompletionInfo)>,
    /// Details of the operation that was popped last.
    completion_info: CompletionInfo,
    /// Decisions to exclude ranks.
    pub(crate) exclusions: Exclusions,
    next_id: u64,
    /// The sequence number after the last posted.
    end: u64,
    chunk_len_bytes: usize,
    rank_info: RankInfo,
}

impl Ops {
    pub(crate) fn new(chunk_len_bytes: usize, rank_info: RankInfo) -> Self {
        Self {
            queue: VecDeque::with_capacity(MAX_OPS),
            retained_ops: VecDeque::with_capacity(MAX_OPS),
            new_retained: 0,
            retained_bytes: VecDeque::new(),
            released_bytes: 0,
            completed: VecDeque::with_capacity(MAX_OPS),
            completion_info: CompletionInfo::default(),
            exclusions: Exclusions::default(),
            next_id: 0,
            end: 0,
            chunk_len_bytes,
            rank_info,
        }
    }

    /// Post an operation; `offloaded` if its data goes through the tree. `limit` is how long it waits for ranks.
    pub(crate) fn post(
        &mut self,
        desc: OpDesc,
        signature: u32,
        offloaded: bool,
        limit: Option<StragglerLimit>,
    ) -> Result<OpId, PostError> {
        if !self.has_room() {
            return Err(PostError::TooMany { limit: MAX_OPS });
        }
        let id = OpId(self.next_id);
        self.next_id += 1;
        let chunk_elements = if offloaded { self.chunk_elements(&desc) } else { 0 };
        let seqs = if chunk_elements == 0 { 1 } else { self.chunks(&desc) };
        let first = self.end;
        self.end += seqs;
        let (end, rank_info) = (self.end, self.rank_info);
        let op = Op { id, desc, signature, limit, slowest: None, rank_info, first, end, landed: 0, chunk_elements };
        self.queue.push_back(op);
        self.retire();
        Ok(id)
    }

    /// Return whether another operation can be posted.
    pub(crate) fn has_room(&self) -> bool {
        self.queue.len() + self.completed.len() < MAX_OPS
    }

    /// Return the number of sequence numbers of an operation that goes through the tree.
    pub(crate) fn chunks(&self, desc: &OpDesc) -> u64 {
        let seqs = match (self.chunk_elements(desc), desc.collective) {
            (0, _) => 1,
            (elements, Collective::AllGather) => {
                chunks_before(desc.count, self.rank_info.ranks, elements, self.rank_info.ranks)
            }
            (elements, _) => desc.count.div_ceil(elements),
        };
        seqs.max(1)
    }

    /// Return the number of elements that fit a chunk: limited by their partial results, in the accumulator type
    /// (PROTOCOL 1). 0 for an operation without elements.
    fn chunk_elements(&self, desc: &OpDesc) -> u64 {
        self.chunk_len_bytes.checked_div(desc.partial_bytes()).unwrap_or(0) as u64
    }

    /// Return the sequence number after the last posted.
    pub(crate) const fn end(&self) -> u64 {
        self.end
    }

    /// Return the operation in flight that `seq` belongs to.
    pub(crate) fn of_seq(&self, seq: u64) -> Option<Op> {
        let index = self.queue.partition_point(|op| op.end <= seq);
        self.queue.get(index).filter(|op| op.first <= seq).copied()
    }

    /// Record that a chunk's result has landed, once for each chunk. An operation completes when all its chunks have.
    pub(crate) fn landed(&mut self, seq: u64) {
        let index = self.queue.partition_point(|op| op.end <= seq);
        if let Some(op) = self.queue.get_mut(index) {
            op.landed += 1;
            assert!(op.landed <= op.end - op.first, "a chunk lands once");
        }
        self.retire();
    }

    /// Record that `count` chunks from `seq` on have landed, which do not complete their operation.
    pub(super) fn landed_in_order(&mut self, seq: u64, count: u64) {
        let index = self.queue.partition_point(|op| op.end <= seq);
        if let Some(op) = self.queue.get_mut(index) {
            op.landed += count;
            assert!(op.landed < op.end - op.first, "the last chunk completes the operation");
        }
    }

    /// Complete finished operations in order of posting.
    fn retire(&mut self) {
        while let Some(mut op) = self.queue.pop_front_if(|op| op.landed == op.end - op.first) {
            let missing = self.exclusions.missing_at(op.first);
            self.completed.push_back((op.id, CompletionInfo { slowest: op.slowest.take(), missing }));
            if op.moves() {
                if self.retained_ops.len() == MAX_OPS {
                    self.forget();
                }
                self.retained_ops.push_back(RetainedOp { op, from: op.first, len_bytes: 0, at: 0 });
                self.new_retained = (self.new_retained + 1).min(MAX_OPS);
            }
        }
    }

    /// Describe an operation that this rank may have forgotten.
    pub(crate) fn describe(&self, desc: OpDesc, (first, end): (u64, u64)) -> Op {
        let (chunk_elements, rank_info) = (self.chunk_elements(&desc), self.rank_info);
        let (id, limit) = (OpId(u64::MAX), None);
        Op { id, desc, signature: 0, limit, slowest: None, rank_info, first, end, landed: 0, chunk_elements }
    }

    fn forget(&mut self) {
        if let Some(kept) = self.retained_ops.pop_front() {
            self.retained_bytes.drain(..kept.len_bytes);
            self.released_bytes += kept.len_bytes as u64;
            self.new_retained = self.new_retained.min(self.retained_ops.len());
        }
    }

    /// Forget operations of which every rank has every result: those that end at `stable` or below.
    pub(crate) fn forget_below(&mut self, stable: u64) {
        while self.retained_ops.front().is_some_and(|kept| kept.op.end <= stable) {
            self.forget();
        }
    }

    /// Retain what other ranks may lack of the operations completed since the last call: chunks from `stable` on.
    /// `is_available_elsewhere` tells, for an operation and its first such chunk, whether all of that can be obtained
    /// elsewhere; `retain` appends what [`Op::retention`] selects of a chunk.
    pub(crate) fn retain_new(
        &mut self,
        stable: u64,
        is_available_elsewhere: impl Fn(&Op, u64) -> bool,
        mut retain: impl FnMut(&Op, Retention, &mut VecDeque<u8>),
    ) {
        let seen = self.retained_ops.len() - std::mem::take(&mut self.new_retained);
        for RetainedOp { op, from, len_bytes, at } in self.retained_ops.range_mut(seen..) {
            *from = stable.max(op.first);
            let before = self.retained_bytes.len();
            *at = self.released_bytes + before as u64;
            if !is_available_elsewhere(op, *from) {
                (*from..op.end).for_each(|seq| retain(op, op.retention(seq), &mut self.retained_bytes));
            }
            *len_bytes = self.retained_bytes.len() - before;
        }
    }

    /// Append the retained bytes of a chunk to `to`.
    pub(crate) fn copy_retained(&self, kept: &RetainedOp, seq: u64, to: &mut Vec<u8>) {
        let before: usize = (kept.from..seq).map(|seq| kept.op.retention(seq).len()).sum();
        if kept.has_bytes() {
            let first = (kept.at - self.released_bytes) as usize + before;
            to.extend(self.retained_bytes.range(first..first + kept.op.retention(seq).len()));
        }
    }

    /// Return the retained operations, oldest first.
    pub(crate) fn retained(&self) -> impl Iterator<Item = &RetainedOp> {
        self.retained_ops.iter()
    }

    /// Return the operations in flight, oldest first.
    pub(crate) fn in_flight(&self) -> impl Iterator<Item = &Op> {
        self.queue.iter()
    }

    /// Return the id of the next operation.
    pub(crate) const fn next_id(&self) -> OpId {
        OpId(self.next_id)
    }

    pub(crate) fn pop_completed(&mut self) -> Option<OpId> {
        let (id, completion_info) = self.completed.pop_front()?;
        self.completion_info = completion_info;
        Some(id)
    }

    /// Return details of the operation that was popped last.
    pub(crate) const fn completion_info(&self) -> CompletionInfo {
        self.completion_info
    }

    /// Record the rank that entered last, as reported with chunk `seq`. Only the first chunk of an operation counts.
    pub(crate) fn note_slowest(&mut self, seq: u64, slowest: Option<Slowest>) {
        let index = self.queue.partition_point(|op| op.end <= seq);
        if let Some(op) = self.queue.get_mut(index).filter(|op| op.first == seq) {
            op.slowest = slowest;
        }
    }

    /// Forget which rank was last: it does not affect what follows.
    #[cfg(feature = "snapshot")]
    pub(super) fn forget_slowest(&mut self) {
        self.queue.iter_mut().for_each(|op| op.slowest = None);
        self.completion_info.slowest = None;
    }
}
