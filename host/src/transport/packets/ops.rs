//! The operations of a group in the order of their posting: which chunk belongs to which, and what this rank has to do
//! with it.
//!
//! Every offloaded collective is the same mechanism with other sets: per chunk, who contributes and who receives
//! (PROTOCOL 1). [`Op::part`] is where these sets are said, once:
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
//! Who contributes by moving its own elements (broadcast, all-gather) does not receive them again.
//!
//! Blocks are those of [`Span::of_blocks`]. The chunks of an all-gather do not cross blocks, since each has one owner;
//! those of a reduce-scatter may, and each owner lands its part.

use super::PostError;
use super::verdict::{Cuts, Slowest, Verdict};
use crate::schedule::Span;
use std::collections::VecDeque;
use std::ops::Range;
use sumac_hal::op::{Collective, OpDesc};
use sumac_hal::wire::Limit;

/// The most operations in flight in one group.
pub(crate) const MAX_OPS: usize = 1024;

/// One operation of one endpoint, in the order of posting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

/// The caller's buffers, lent while an endpoint works; which elements they hold is in the table of [`OpDesc`]'s
/// collectives at the head of this module.
///
/// Input and output may share bytes where they are the same elements: a chunk's input is not read any more once its
/// result is written.
pub trait Buffers {
    /// Return what `op` contributes at this rank.
    fn input(&self, op: OpId) -> &[u8];

    /// Return where the results of `op` go at this rank.
    fn output(&mut self, op: OpId) -> &mut [u8];
}

/// What a rank has to do with one chunk, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Part {
    /// What it contributes: a range of the input.
    pub(crate) gives: Option<Range<usize>>,
    /// What it receives.
    pub(crate) takes: Option<Landing>,
}

/// Where a chunk's result goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Landing {
    /// The length of the whole result in bytes.
    pub(crate) result_len: usize,
    /// The part of it that this rank owns.
    pub(crate) part: Range<usize>,
    /// Its place in the output.
    pub(crate) at: usize,
}

/// A rank among those of its group, as far as blocks and roots are concerned.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub(crate) struct Seat {
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
}

/// Which bytes a rank keeps of a chunk once its operation has returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Keep {
    /// Nothing that another could need.
    Nothing,
    /// Of the output: the whole result.
    Result(Range<usize>),
    /// Of the input: the whole result as well, as nothing is added to it.
    Own(Range<usize>),
    /// Of the input: this rank's contribution.
    Contribution(Range<usize>),
}

/// An operation that has returned, while other ranks may still lack results of it (PROTOCOL 5).
#[derive(Debug, Clone, Copy)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub(crate) struct Kept {
    pub(crate) op: Op,
    /// The first of its chunks that may be lacking.
    pub(crate) from: u64,
    /// How many bytes are kept of the chunks from there on; 0 where they are kept elsewhere.
    len_bytes: usize,
    /// Where they begin, counted over all that was ever kept.
    at: u64,
}

impl Kept {
    /// Tell whether its bytes are kept here.
    pub(crate) const fn has_bytes(&self) -> bool {
        self.len_bytes > 0
    }

    /// Return how many bytes are kept here.
    #[cfg(feature = "snapshot")]
    pub(crate) const fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

impl Keep {
    /// Append the bytes of `op` that are meant.
    pub(crate) fn retain(self, op: OpId, buffers: &mut impl Buffers, to: &mut VecDeque<u8>) {
        match self {
            Self::Nothing => {}
            Self::Result(range) => to.extend(&buffers.output(op)[range]),
            Self::Own(range) | Self::Contribution(range) => to.extend(&buffers.input(op)[range]),
        }
    }

    /// Return how many bytes they are.
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
    /// How long it waits for ranks to come to it, if not as long as it takes.
    pub(crate) limit: Option<Limit>,
    slowest: Option<Slowest>,
    seat: Seat,
    /// Its seqs.
    first: u64,
    end: u64,
    landed: u64,
    /// Elements in all chunks but the last of a block; 0 for an operation that moves none.
    chunk_elements: u64,
}

impl Op {
    /// Return its first seq.
    pub(crate) const fn first(&self) -> u64 {
        self.first
    }

    /// Return the seq after its last.
    pub(crate) const fn end(&self) -> u64 {
        self.end
    }

    /// Tell whether it moves elements through the tree.
    pub(crate) fn moves(&self) -> bool {
        self.element_bytes().is_some()
    }

    /// Return the length of the whole result of chunk `seq` in bytes, as it lies in buffers.
    pub(crate) fn result_len(&self, seq: u64) -> usize {
        self.element_bytes().map_or(0, |element| self.chunk(seq - self.first).1.len * element)
    }

    /// Return what this rank has of chunk `seq`, once it has its answer, that another may need: a result that it has
    /// whole, else its own contribution.
    pub(crate) fn keep(&self, seq: u64) -> Keep {
        let Part { gives, takes } = self.part(seq);
        match (self.desc.collective, gives, takes) {
            (Collective::AllReduce, _, Some(landing)) => Keep::Result(landing.at..landing.at + landing.result_len),
            (Collective::Broadcast | Collective::AllGather, Some(own), _) => Keep::Own(own),
            // The root is the only one that needs the result, and has it.
            (Collective::Reduce, Some(_), Some(_)) => Keep::Nothing,
            (Collective::Reduce | Collective::ReduceScatter, Some(own), _) => Keep::Contribution(own),
            _ => Keep::Nothing,
        }
    }

    /// Return the bytes of a chunk that is not the last of its block, as they lie in buffers; 0 if none are moved.
    pub(crate) fn full_chunk_bytes(&self) -> usize {
        self.element_bytes().map_or(0, |element| self.chunk_elements as usize * element)
    }

    /// Return what this rank has to do with chunk `seq`.
    pub(crate) fn part(&self, seq: u64) -> Part {
        let Some(element) = self.element_bytes() else { return Part::default() };
        let Seat { rank, ranks } = self.seat;
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
            Collective::AllReduce => Part { gives: Some(bytes(chunk)), takes: whole(true) },
            Collective::Reduce => Part { gives: Some(bytes(chunk)), takes: whole(is_root) },
            Collective::Broadcast => Part { gives: is_root.then(|| bytes(chunk)), takes: whole(!is_root) },
            Collective::AllGather => {
                let mine = owner == Some(rank);
                let gives = Span { start: chunk.start.wrapping_sub(own.start), len: chunk.len };
                Part { gives: mine.then(|| bytes(gives)), takes: whole(!mine) }
            }
            Collective::ReduceScatter => {
                let (start, end) = (chunk.start.max(own.start), chunk.end().min(own.end()));
                let takes = (start < end).then(|| Landing {
                    result_len: chunk.len * element,
                    part: (start - chunk.start) * element..(end - chunk.start) * element,
                    at: (start - own.start) * element,
                });
                Part { gives: Some(bytes(chunk)), takes }
            }
            _ => Part::default(),
        }
    }

    /// Return the length of an element in bytes, `None` if the operation moves none through the tree.
    fn element_bytes(&self) -> Option<usize> {
        (self.chunk_elements > 0 && self.desc.count > 0).then(|| self.desc.element_bytes())
    }

    /// Return the elements of chunk `index`, and whose block they belong to if chunks do not cross blocks.
    fn chunk(&self, index: u64) -> (Option<u32>, Span) {
        let count = self.desc.count as usize;
        let chunk = self.chunk_elements as usize;
        if self.desc.collective != Collective::AllGather {
            let start = index as usize * chunk;
            return (None, Span { start, len: chunk.min(count - start) });
        }
        let before = |block: u32| chunks_before(self.desc.count, self.seat.ranks, self.chunk_elements, block);
        // The last block whose chunks begin at or before this one: blocks without elements have none.
        let (mut low, mut high) = (0, self.seat.ranks);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if before(middle) <= index { low = middle } else { high = middle }
        }
        let block = Span::of_blocks(count, self.seat.ranks, low, low + 1);
        let start = block.start + (index - before(low)) as usize * chunk;
        (Some(low), Span { start, len: chunk.min(block.end() - start) })
    }
}

/// Return how many chunks the first `block` blocks have, if none crosses a block: of `count / blocks` or one element
/// more, as [`Span::of_blocks`] cuts them.
fn chunks_before(count: u64, blocks: u32, chunk_elements: u64, block: u32) -> u64 {
    let each = count / u64::from(blocks);
    let start = Span::of_blocks(count as usize, blocks, 0, block).len as u64;
    let longer = start - u64::from(block) * each;
    longer * (each + 1).div_ceil(chunk_elements) + (u64::from(block) - longer) * each.div_ceil(chunk_elements)
}

/// The operations in flight.
#[derive(Debug)]
#[cfg_attr(feature = "snapshot", derive(Clone, PartialEq, Eq, Hash))]
pub(crate) struct Ops {
    queue: VecDeque<Op>,
    /// Those that moved elements and have returned, the newest last.
    kept: VecDeque<Kept>,
    /// How many of `kept` are new: they have not been seen by [`Ops::keep_new`].
    unseen: usize,
    /// What is kept of them, one behind the other. As long as the most that was ever kept at once: a window of chunks.
    retained: VecDeque<u8>,
    /// How many bytes were ever let go from `retained`.
    let_go: u64,
    completed: VecDeque<(OpId, Verdict)>,
    /// Of the operation that was popped last.
    verdict: Verdict,
    /// Who has left the group.
    pub(crate) cuts: Cuts,
    next_id: u64,
    /// The seq after the last posted.
    end: u64,
    chunk_len_bytes: usize,
    seat: Seat,
}

impl Ops {
    pub(crate) fn new(chunk_len_bytes: usize, seat: Seat) -> Self {
        Self {
            queue: VecDeque::with_capacity(MAX_OPS),
            kept: VecDeque::with_capacity(MAX_OPS),
            unseen: 0,
            retained: VecDeque::new(),
            let_go: 0,
            completed: VecDeque::with_capacity(MAX_OPS),
            verdict: Verdict::default(),
            cuts: Cuts::default(),
            next_id: 0,
            end: 0,
            chunk_len_bytes,
            seat,
        }
    }

    /// Take in an operation; `offloaded` if its data goes through the tree.
    #[cfg(test)]
    pub(crate) fn post(&mut self, desc: OpDesc, signature: u32, offloaded: bool) -> Result<OpId, PostError> {
        self.post_within(desc, signature, offloaded, None)
    }

    /// The same for one that may not wait for ranks as long as it takes.
    pub(crate) fn post_within(
        &mut self,
        desc: OpDesc,
        signature: u32,
        offloaded: bool,
        limit: Option<Limit>,
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
        let (end, seat) = (self.end, self.seat);
        let op = Op { id, desc, signature, limit, slowest: None, seat, first, end, landed: 0, chunk_elements };
        self.queue.push_back(op);
        self.retire();
        Ok(id)
    }

    /// Tell whether another operation can be posted.
    pub(crate) fn has_room(&self) -> bool {
        self.queue.len() + self.completed.len() < MAX_OPS
    }

    /// Return how many seqs an operation has that goes through the tree.
    pub(crate) fn chunks(&self, desc: &OpDesc) -> u64 {
        let seqs = match (self.chunk_elements(desc), desc.collective) {
            (0, _) => 1,
            (elements, Collective::AllGather) => chunks_before(desc.count, self.seat.ranks, elements, self.seat.ranks),
            (elements, _) => desc.count.div_ceil(elements),
        };
        seqs.max(1)
    }

    /// Return how many elements fit a chunk: as many as their partial results, in the accumulator type (PROTOCOL 1);
    /// 0 for an operation without elements.
    fn chunk_elements(&self, desc: &OpDesc) -> u64 {
        self.chunk_len_bytes.checked_div(desc.partial_bytes()).unwrap_or(0) as u64
    }

    /// Return the seq after the last posted.
    pub(crate) const fn end(&self) -> u64 {
        self.end
    }

    /// Return the operation in flight that `seq` belongs to.
    pub(crate) fn of_seq(&self, seq: u64) -> Option<Op> {
        let index = self.queue.partition_point(|op| op.end <= seq);
        self.queue.get(index).filter(|op| op.first <= seq).copied()
    }

    /// Note that a chunk's result has landed, once a chunk; operations complete when all theirs have.
    pub(crate) fn landed(&mut self, seq: u64) {
        let index = self.queue.partition_point(|op| op.end <= seq);
        if let Some(op) = self.queue.get_mut(index) {
            op.landed += 1;
            assert!(op.landed <= op.end - op.first, "a chunk lands once");
        }
        self.retire();
    }

    /// Complete what is complete, in the order of posting.
    fn retire(&mut self) {
        while let Some(mut op) = self.queue.pop_front_if(|op| op.landed == op.end - op.first) {
            let missing = self.cuts.missing_at(op.first);
            self.completed.push_back((op.id, Verdict { slowest: op.slowest.take(), missing }));
            if op.moves() {
                if self.kept.len() == MAX_OPS {
                    self.forget();
                }
                self.kept.push_back(Kept { op, from: op.first, len_bytes: 0, at: 0 });
                self.unseen = (self.unseen + 1).min(MAX_OPS);
            }
        }
    }

    /// Describe an operation that this rank may not know any more.
    pub(crate) fn describe(&self, desc: OpDesc, (first, end): (u64, u64)) -> Op {
        let (chunk_elements, seat) = (self.chunk_elements(&desc), self.seat);
        let (id, limit) = (OpId(u64::MAX), None);
        Op { id, desc, signature: 0, limit, slowest: None, seat, first, end, landed: 0, chunk_elements }
    }

    fn forget(&mut self) {
        if let Some(kept) = self.kept.pop_front() {
            self.retained.drain(..kept.len_bytes);
            self.let_go += kept.len_bytes as u64;
            self.unseen = self.unseen.min(self.kept.len());
        }
    }

    /// Keep no operation of which every rank has every result: those that end at `stable` or below.
    pub(crate) fn forget_below(&mut self, stable: u64) {
        while self.kept.front().is_some_and(|kept| kept.op.end <= stable) {
            self.forget();
        }
    }

    /// Keep of the operations that have returned since this was called last what other ranks may lack: of the chunks
    /// from `stable` on. `is_elsewhere` tells of an operation and its first such chunk whether that can be had without,
    /// and `retain` appends what [`Op::keep`] says of a chunk.
    pub(crate) fn keep_new(
        &mut self,
        stable: u64,
        is_elsewhere: impl Fn(&Op, u64) -> bool,
        mut retain: impl FnMut(&Op, Keep, &mut VecDeque<u8>),
    ) {
        let seen = self.kept.len() - std::mem::take(&mut self.unseen);
        for Kept { op, from, len_bytes, at } in self.kept.range_mut(seen..) {
            *from = stable.max(op.first);
            let before = self.retained.len();
            *at = self.let_go + before as u64;
            if !is_elsewhere(op, *from) {
                (*from..op.end).for_each(|seq| retain(op, op.keep(seq), &mut self.retained));
            }
            *len_bytes = self.retained.len() - before;
        }
    }

    /// Append to `to` what is kept of a chunk, one of those of `kept` that may be lacking.
    pub(crate) fn give_kept(&self, kept: &Kept, seq: u64, to: &mut Vec<u8>) {
        let before: usize = (kept.from..seq).map(|seq| kept.op.keep(seq).len()).sum();
        if kept.has_bytes() {
            let first = (kept.at - self.let_go) as usize + before;
            to.extend(self.retained.range(first..first + kept.op.keep(seq).len()));
        }
    }

    /// Return the operations that have returned and are kept, oldest first.
    pub(crate) fn kept(&self) -> impl Iterator<Item = &Kept> {
        self.kept.iter()
    }

    /// Return the operations in flight, oldest first.
    pub(crate) fn in_flight(&self) -> impl Iterator<Item = &Op> {
        self.queue.iter()
    }

    /// Return the number of the next operation.
    pub(crate) const fn next_id(&self) -> OpId {
        OpId(self.next_id)
    }

    pub(crate) fn pop_completed(&mut self) -> Option<OpId> {
        let (id, verdict) = self.completed.pop_front()?;
        self.verdict = verdict;
        Some(id)
    }

    /// Return what is known of the operation that was popped last.
    pub(crate) const fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// Note which rank was the last to come to chunk `seq`: what is told of an operation is that of its first.
    pub(crate) fn note_slowest(&mut self, seq: u64, slowest: Option<Slowest>) {
        let index = self.queue.partition_point(|op| op.end <= seq);
        if let Some(op) = self.queue.get_mut(index).filter(|op| op.first == seq) {
            op.slowest = slowest;
        }
    }

    /// Forget who was the last: it changes nothing that follows.
    #[cfg(feature = "snapshot")]
    pub(super) fn forget_slowest(&mut self) {
        self.queue.iter_mut().for_each(|op| op.slowest = None);
        self.verdict.slowest = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sumac_hal::ids::Rank;
    use sumac_hal::op::{Dtype, ReduceOp};

    const CHUNK_LEN: usize = 32;

    /// All collectives that have elements.
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

    /// However operations of all sizes follow each other, what is kept takes the memory of the most that was ever kept at
    /// once, and no entry stays.
    #[test]
    fn what_is_kept_stays_bounded() {
        const WINDOW: u64 = 64;
        let mut ops = Ops::new(CHUNK_LEN, Seat { rank: 0, ranks: 2 });
        let bytes = [7; CHUNK_LEN];
        for nth in 0..20_000_u64 {
            let chunks = if nth % 97 == 0 { WINDOW } else { 1 };
            ops.post(OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, chunks * 8), 0, true).expect("room");
            (ops.end() - chunks..ops.end()).for_each(|seq| ops.landed(seq));
            let stable = ops.end().saturating_sub(WINDOW);
            ops.forget_below(stable);
            ops.keep_new(stable, |_, _| false, |_, keep, to| to.extend(&bytes[..keep.len()]));
            assert!(ops.pop_completed().is_some());
            assert!(ops.kept.len() <= WINDOW as usize && ops.retained.len() <= 2 * WINDOW as usize * CHUNK_LEN);
        }
        let capacity = ops.retained.capacity();
        assert!(capacity <= 4 * WINDOW as usize * CHUNK_LEN, "{capacity} bytes");
        ops.forget_below(ops.end());
        assert_eq!((ops.kept.len(), ops.retained.len()), (0, 0));
    }

    proptest! {
        /// Over all ranks and chunks: who contributes and who receives which byte is what the collective says.
        #[test]
        fn parts_make_the_collective(ranks in 1_u32..12, root in 0_u32..12, count in 0_u64..100, before in 0_u64..3) {
            let root = root % ranks;
            for desc in descs(root, count) {
                let mut ends = Vec::new();
                let mut given = vec![0_u32; count as usize * 4];
                for rank in 0..ranks {
                    let mut ops = Ops::new(CHUNK_LEN, Seat { rank, ranks });
                    (0..before).for_each(|_| { ops.post(OpDesc::barrier(), 0, true).unwrap(); });
                    ops.post(desc, 0, true).unwrap();
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
                        let gives = part.gives.clone().unwrap_or_default();
                        prop_assert!(gives.len() <= CHUNK_LEN && gives.len().is_multiple_of(4));
                        let base = if desc.collective == Collective::AllGather { own.start * 4 } else { 0 };
                        gives.clone().for_each(|byte| given[base + byte] += 1);
                        read.extend(gives);
                        if let Some(Landing { result_len, part, at }) = part.takes {
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
