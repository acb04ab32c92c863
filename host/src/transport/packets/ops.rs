//! The operations of a group in order of posting: which chunk belongs to which, and this rank's part in it.
//!
//! Every offloaded collective is the same mechanism with other sets: per chunk, which ranks contribute and which
//! receive (PROTOCOL 1). [`Op::part`] defines these sets:
//!
//! | collective | contributes | receives | [`Buffers::input`] | [`Buffers::output`] |
//! |---|---|---|---|---|
//! | all-reduce | all | all | all elements | all elements |
//! | reduce | all | root | all elements | all elements (root) |
//! | broadcast | root | all others | all elements (root) | all elements (others) |
//! | reduce-scatter | all | owner of the block | all elements | the rank's own block |
//! | all-gather | owner of the block | all others | the rank's own block | all elements |
//! | barrier | none | none | | |
//!
//! A rank that contributes its own elements to a broadcast or all-gather does not receive them again.
//!
//! Blocks are those of [`Span::of_blocks`]. Chunks of an all-gather do not cross blocks, since each has one owner.
//! Chunks of a reduce-scatter may; each owner lands its part.

use super::PostError;
use super::completion::{CompletionInfo, Exclusions, Slowest};
use crate::schedule::Span;
use std::collections::VecDeque;
use std::ops::Range;
use sumac_hal::op::{Collective, OpDesc};
use sumac_hal::wire::StragglerLimit;

/// The maximum number of operations in flight in one group.
pub(crate) const MAX_OPS: usize = 1024;

/// Identifies an operation of one endpoint, in order of posting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

/// The caller's buffers, borrowed while an endpoint works. The table at the head of this module lists the elements that
/// they hold for each collective of [`OpDesc`].
///
/// Input and output may overlap where they are the same elements: a chunk's input is not read after its result is
/// written.
pub trait Buffers {
    /// Return this rank's input of `op`.
    fn input(&self, op: OpId) -> &[u8];

    /// Return this rank's output of `op`.
    fn output(&mut self, op: OpId) -> &mut [u8];
}

/// A rank's part in one chunk, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Part {
    /// The range of the input that it contributes.
    pub(crate) input: Option<Range<usize>>,
    /// The result that it receives.
    pub(crate) landing: Option<Landing>,
}

/// Where a chunk's result goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Landing {
    /// Length of the whole result.
    pub(crate) result_len: usize,
    /// The part of it that belongs to this rank.
    pub(crate) part: Range<usize>,
    /// The offset of that part in the output.
    pub(crate) at: usize,
}

/// A rank and the size of its group, which determine blocks and roots.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub(crate) struct RankInfo {
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
}

/// Which bytes a rank retains of a chunk after its operation has returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Retention {
    /// Nothing that another rank could need.
    Nothing,
    /// Output bytes: the whole result.
    Result(Range<usize>),
    /// Input bytes that are also the whole result, as nothing is added to them.
    Own(Range<usize>),
    /// Input bytes: this rank's contribution.
    Contribution(Range<usize>),
}

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

impl Retention {
    /// Append the bytes to `to`.
    pub(crate) fn append_to(self, op: OpId, buffers: &mut impl Buffers, to: &mut VecDeque<u8>) {
        match self {
            Self::Nothing => {}
            Self::Result(range) => to.extend(&buffers.output(op)[range]),
            Self::Own(range) | Self::Contribution(range) => to.extend(&buffers.input(op)[range]),
        }
    }

    /// Return the number of bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Result(range) | Self::Own(range) | Self::Contribution(range) => range.len(),
        }
    }
}

/// One posted operation.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub(crate) struct Op {
    pub(crate) id: OpId,
    pub(crate) desc: OpDesc,
    pub(crate) signature: u32,
    /// The limit on waiting for ranks, if there is one.
    pub(crate) limit: Option<StragglerLimit>,
    slowest: Option<Slowest>,
    rank_info: RankInfo,
    /// Its sequence numbers, `end` excluded.
    first: u64,
    end: u64,
    landed: u64,
    /// Elements of each chunk but the last of a block; 0 for an operation that moves none.
    chunk_elements: u64,
}

impl Op {
    /// Return its first sequence number.
    pub(crate) const fn first(&self) -> u64 {
        self.first
    }

    /// Return the sequence number after its last.
    pub(crate) const fn end(&self) -> u64 {
        self.end
    }

    /// Return whether it moves elements through the tree.
    pub(crate) fn moves(&self) -> bool {
        self.element_bytes().is_some()
    }

    /// Return the length of the result of chunk `seq` in bytes, as stored in buffers.
    pub(crate) fn result_len(&self, seq: u64) -> usize {
        self.element_bytes().map_or(0, |element| self.chunk(seq - self.first).1.len * element)
    }

    /// Return what this rank has of chunk `seq`, once answered, that another may need: a whole result, else its own
    /// contribution.
    pub(crate) fn retention(&self, seq: u64) -> Retention {
        let Part { input, landing } = self.part(seq);
        match (self.desc.collective, input, landing) {
            (Collective::AllReduce, _, Some(landing)) => Retention::Result(landing.at..landing.at + landing.result_len),
            (Collective::Broadcast | Collective::AllGather, Some(own), _) => Retention::Own(own),
            // Only the root needs the result, and it has it.
            (Collective::Reduce, Some(_), Some(_)) => Retention::Nothing,
            (Collective::Reduce | Collective::ReduceScatter, Some(own), _) => Retention::Contribution(own),
            _ => Retention::Nothing,
        }
    }

    /// Return the length of a chunk that is not the last of its block, in bytes as stored in buffers; 0 if no elements
    /// are moved.
    pub(crate) fn full_chunk_bytes(&self) -> usize {
        self.element_bytes().map_or(0, |element| self.chunk_elements as usize * element)
    }

    /// Return this rank's part in chunk `seq`.
    pub(crate) fn part(&self, seq: u64) -> Part {
        let Some(element) = self.element_bytes() else { return Part::default() };
        let RankInfo { rank, ranks } = self.rank_info;
        let (owner, chunk) = self.chunk(seq - self.first);
        let own = Span::of_blocks(self.desc.count as usize, ranks, rank, rank + 1);
        let bytes = |span: Span| span.start * element..span.end() * element;
        let is_root = self.desc.root.0 == rank;
        let whole = |wanted: bool| {
            let landing =
                Landing { result_len: chunk.len * element, part: 0..chunk.len * element, at: bytes(chunk).start };
            wanted.then_some(landing)
        };
        match self.desc.collective {
            Collective::AllReduce => Part { input: Some(bytes(chunk)), landing: whole(true) },
            Collective::Reduce => Part { input: Some(bytes(chunk)), landing: whole(is_root) },
            Collective::Broadcast => Part { input: is_root.then(|| bytes(chunk)), landing: whole(!is_root) },
            Collective::AllGather => {
                let mine = owner == Some(rank);
                let input = Span { start: chunk.start.wrapping_sub(own.start), len: chunk.len };
                Part { input: mine.then(|| bytes(input)), landing: whole(!mine) }
            }
            Collective::ReduceScatter => {
                let (start, end) = (chunk.start.max(own.start), chunk.end().min(own.end()));
                let landing = (start < end).then(|| Landing {
                    result_len: chunk.len * element,
                    part: (start - chunk.start) * element..(end - chunk.start) * element,
                    at: (start - own.start) * element,
                });
                Part { input: Some(bytes(chunk)), landing }
            }
            _ => Part::default(),
        }
    }

    /// Return the length of an element in bytes; `None` if the operation moves none through the tree.
    fn element_bytes(&self) -> Option<usize> {
        (self.chunk_elements > 0 && self.desc.count > 0).then(|| self.desc.element_bytes())
    }

    /// Return the elements of chunk `index`, and the owner of their block if chunks do not cross blocks.
    fn chunk(&self, index: u64) -> (Option<u32>, Span) {
        let count = self.desc.count as usize;
        let chunk = self.chunk_elements as usize;
        if self.desc.collective != Collective::AllGather {
            let start = index as usize * chunk;
            return (None, Span { start, len: chunk.min(count - start) });
        }
        let before = |block: u32| chunks_before(self.desc.count, self.rank_info.ranks, self.chunk_elements, block);
        // The last block whose chunks begin at or before this one; blocks without elements have none.
        let (mut low, mut high) = (0, self.rank_info.ranks);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if before(middle) <= index { low = middle } else { high = middle }
        }
        let block = Span::of_blocks(count, self.rank_info.ranks, low, low + 1);
        let start = block.start + (index - before(low)) as usize * chunk;
        (Some(low), Span { start, len: chunk.min(block.end() - start) })
    }
}

/// Return the number of chunks of the first `block` blocks, none crossing a block. Blocks have `count / blocks`
/// elements or one more, as [`Span::of_blocks`] divides them.
fn chunks_before(count: u64, blocks: u32, chunk_elements: u64, block: u32) -> u64 {
    let each = count / u64::from(blocks);
    let start = Span::of_blocks(count as usize, blocks, 0, block).len as u64;
    let longer = start - u64::from(block) * each;
    longer * (each + 1).div_ceil(chunk_elements) + (u64::from(block) - longer) * each.div_ceil(chunk_elements)
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sumac_hal::ids::Rank;
    use sumac_hal::op::{Dtype, ReduceOp};

    const CHUNK_LEN: usize = 32;

    /// All collectives with elements.
    fn descs(root: u32, count: u64) -> [OpDesc; 5] {
        let (dtype, op) = (Dtype::F32, ReduceOp::Sum);
        [
            OpDesc::all_reduce(dtype, op, count),
            OpDesc::reduce(dtype, op, Rank(root), count),
            OpDesc::broadcast(dtype, Rank(root), count),
            OpDesc::reduce_scatter(dtype, op, count),
            OpDesc::all_gather(dtype, count),
        ]
    }

    /// For any sequence of operation sizes, retained bytes stay within the most that was retained at once, and no entry
    /// is left behind.
    #[test]
    fn retained_bytes_stay_bounded() {
        const WINDOW: u64 = 64;
        let mut ops = Ops::new(CHUNK_LEN, RankInfo { rank: 0, ranks: 2 });
        let bytes = [7; CHUNK_LEN];
        for nth in 0..20_000_u64 {
            let chunks = if nth % 97 == 0 { WINDOW } else { 1 };
            ops.post(OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, chunks * 8), 0, true, None).expect("room");
            (ops.end() - chunks..ops.end()).for_each(|seq| ops.landed(seq));
            let stable = ops.end().saturating_sub(WINDOW);
            ops.forget_below(stable);
            ops.retain_new(stable, |_, _| false, |_, retention, to| to.extend(&bytes[..retention.len()]));
            assert!(ops.pop_completed().is_some());
            assert!(
                ops.retained_ops.len() <= WINDOW as usize
                    && ops.retained_bytes.len() <= 2 * WINDOW as usize * CHUNK_LEN
            );
        }
        let capacity = ops.retained_bytes.capacity();
        assert!(capacity <= 4 * WINDOW as usize * CHUNK_LEN, "{capacity} bytes");
        ops.forget_below(ops.end());
        assert_eq!((ops.retained_ops.len(), ops.retained_bytes.len()), (0, 0));
    }

    proptest! {
        /// Over all ranks and chunks, the contributed and received bytes are those that the collective defines.
        #[test]
        fn parts_compose_the_collective(ranks in 1_u32..12, root in 0_u32..12, count in 0_u64..100, before in 0_u64..3) {
            let root = root % ranks;
            for desc in descs(root, count) {
                let mut ends = Vec::new();
                let mut given = vec![0_u32; count as usize * 4];
                for rank in 0..ranks {
                    let mut ops = Ops::new(CHUNK_LEN, RankInfo { rank, ranks });
                    (0..before).for_each(|_| { ops.post(OpDesc::barrier(), 0, true, None).unwrap(); });
                    ops.post(desc, 0, true, None).unwrap();
                    ends.push(ops.end());
                    let own = Span::of_blocks(count as usize, ranks, rank, rank + 1);
                    let reads = match desc.collective {
                        Collective::Broadcast if rank != root => 0..0,
                        Collective::AllGather => 0..own.len * 4,
                        _ => 0..count as usize * 4,
                    };
                    let writes = match desc.collective {
                        Collective::Reduce if rank != root => vec![],
                        Collective::Broadcast if rank == root => vec![],
                        Collective::ReduceScatter => (0..own.len * 4).collect(),
                        Collective::AllGather => (0..count as usize * 4).filter(|byte| !(own.start * 4..own.end() * 4).contains(byte)).collect(),
                        _ => (0..count as usize * 4).collect(),
                    };
                    let (mut read, mut written) = (Vec::new(), Vec::new());
                    for seq in before..ops.end() {
                        let part = ops.of_seq(seq).unwrap().part(seq);
                        let input = part.input.clone().unwrap_or_default();
                        prop_assert!(input.len() <= CHUNK_LEN && input.len().is_multiple_of(4));
                        let base = if desc.collective == Collective::AllGather { own.start * 4 } else { 0 };
                        input.clone().for_each(|byte| given[base + byte] += 1);
                        read.extend(input);
                        if let Some(Landing { result_len, part, at }) = part.landing {
                            prop_assert!(part.end <= result_len && result_len <= CHUNK_LEN);
                            written.extend(at..at + part.len());
                        }
                    }
                    prop_assert_eq!(read, reads.collect::<Vec<_>>(), "{:?} rank {}", desc, rank);
                    prop_assert_eq!(written, writes, "{:?} rank {}", desc, rank);
                }
                prop_assert!(ends.windows(2).all(|pair| pair[0] == pair[1]), "all ranks count the same seqs");
                let contributors = if desc.collective.reduces() { ranks } else { 1 };
                prop_assert!(given.iter().all(|&n| n == contributors), "{:?}: {:?}", desc, given);
            }
        }
    }
}
