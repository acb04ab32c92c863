//! One operation: which chunks it has, and a rank's part in each.
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

use super::completion::Slowest;
use crate::schedule::Span;
use std::collections::VecDeque;
use std::ops::Range;
use sumac_hal::op::{Collective, OpDesc};
use sumac_hal::wire::StragglerLimit;

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
    pub(super) slowest: Option<Slowest>,
    pub(super) rank_info: RankInfo,
    /// Its sequence numbers, `end` excluded.
    pub(super) first: u64,
    pub(super) end: u64,
    pub(super) landed: u64,
    /// Elements of each chunk but the last of a block; 0 for an operation that moves none.
    pub(super) chunk_elements: u64,
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

    /// Return how many of its chunks have not landed.
    pub(super) const fn missing(&self) -> u64 {
        self.end - self.first - self.landed
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
        let own = || Span::of_blocks(self.desc.count as usize, ranks, rank, rank + 1);
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
                let input = Span { start: chunk.start.wrapping_sub(own().start), len: chunk.len };
                Part { input: mine.then(|| bytes(input)), landing: whole(!mine) }
            }
            Collective::ReduceScatter => {
                let own = own();
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
    pub(super) fn element_bytes(&self) -> Option<usize> {
        (self.chunk_elements > 0 && self.desc.count > 0).then(|| self.desc.element_bytes())
    }

    /// Return the elements of chunk `index`, and the owner of their block if chunks do not cross blocks.
    pub(super) fn chunk(&self, index: u64) -> (Option<u32>, Span) {
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
pub(super) fn chunks_before(count: u64, blocks: u32, chunk_elements: u64, block: u32) -> u64 {
    let each = count / u64::from(blocks);
    let start = Span::of_blocks(count as usize, blocks, 0, block).len as u64;
    let longer = start - u64::from(block) * each;
    longer * (each + 1).div_ceil(chunk_elements) + (u64::from(block) - longer) * each.div_ceil(chunk_elements)
}
