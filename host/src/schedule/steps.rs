//! Parts of a schedule: places, spans of elements, steps.
//!
//! All lengths are in elements; bytes matter only where a type is known (the executor, the cost model). Invariant: a
//! [`Place`] always lies inside its communicator, so that index arithmetic needs no checks.

use super::buffer::{Buffer, Layout, Local, Recv, Send};
use sumac_hal::ids::Rank;
use thiserror::Error;

/// One rank's place in a communicator: `rank < ranks`, `ranks >= 1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    rank: u32,
    ranks: u32,
}

impl Place {
    /// Return the place of rank `rank` among `ranks`.
    ///
    /// # Errors
    /// [`PlaceError`] if `rank` is not below `ranks`.
    pub const fn new(rank: Rank, ranks: u32) -> Result<Self, PlaceError> {
        if rank.0 < ranks { Ok(Self { rank: rank.0, ranks }) } else { Err(PlaceError { rank: rank.0, ranks }) }
    }

    /// Return every place of a communicator, in rank order.
    pub fn all(ranks: u32) -> impl Iterator<Item = Self> {
        (0..ranks).map(move |rank| Self { rank, ranks })
    }

    /// Return the rank.
    pub const fn rank(self) -> Rank {
        Rank(self.rank)
    }

    /// Return the number of ranks.
    pub const fn ranks(self) -> u32 {
        self.ranks
    }

    /// Return the rank `distance` places after this one, modulo the number of ranks.
    pub(crate) const fn after(self, distance: u32) -> Rank {
        Rank(((self.rank as u64 + distance as u64) % self.ranks as u64) as u32)
    }

    /// Return the rank `distance` places before this one, modulo the number of ranks.
    pub(crate) const fn before(self, distance: u32) -> Rank {
        self.after(self.ranks - distance % self.ranks)
    }
}

/// A rank outside its communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("rank {rank} is not in a communicator of {ranks} ranks; ranks count from 0")]
pub struct PlaceError {
    /// The rank.
    pub rank: u32,
    /// The size of the communicator.
    pub ranks: u32,
}

/// A run of elements; it may be empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Span {
    /// The first element.
    pub start: usize,
    /// The number of elements.
    pub len: usize,
}

impl Span {
    /// No elements: a message that only signals presence.
    pub const EMPTY: Self = Self { start: 0, len: 0 };

    /// Return blocks `first..last` of `count` elements divided into `blocks` blocks.
    ///
    /// Block b starts at `floor(b * count / blocks)`. So any run of m blocks is within one element of `m * count /
    /// blocks`, any count can be divided (0, 1, fewer elements than blocks), and a run of blocks is a span.
    pub(crate) fn of_blocks(count: usize, blocks: u32, first: u32, last: u32) -> Self {
        let (each, rest) = (count / blocks as usize, (count % blocks as usize) as u64);
        // rest < blocks < 2^32: the product fits.
        let start_of = |block: u32| block as usize * each + (u64::from(block) * rest / u64::from(blocks)) as usize;
        Self { start: start_of(first), len: start_of(last) - start_of(first) }
    }

    /// Return block `index` of `blocks`; see [`Self::of_blocks`].
    pub(crate) fn of_block(count: usize, blocks: u32, index: u32) -> Self {
        Self::of_blocks(count, blocks, index, index + 1)
    }

    /// Return the first `len` elements.
    pub const fn first(len: usize) -> Self {
        Self { start: 0, len }
    }

    /// Return the element after the last.
    pub const fn end(self) -> usize {
        self.start + self.len
    }
}

/// A step: its local moves run first, in order; then its messages, concurrently, in any order between peers and in this
/// order for each peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Step<'a> {
    /// Moves within the rank.
    pub locals: &'a [Local],
    /// Messages sent. Their values are those from before the step's messages.
    pub sends: &'a [Send],
    /// Messages received.
    pub recvs: &'a [Recv],
}

/// One rank's part of a collective: steps that run in order.
///
/// Step k of one rank is unrelated to step k of another: messages match by their order between two ranks. Empty spans
/// are sent as messages without payload: they let ranks detect mismatched calls, and keep a rank from returning before
/// all others have entered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    place: Place,
    layout: Layout,
    reduces: bool,
    locals: Vec<Local>,
    sends: Vec<Send>,
    recvs: Vec<Recv>,
    /// For each step, its end in these three lists.
    ends: Vec<Ends>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Ends {
    locals: usize,
    sends: usize,
    recvs: usize,
}

impl Schedule {
    /// Create an empty schedule that only moves elements.
    pub const fn moving(place: Place, layout: Layout) -> Self {
        Self::empty(place, layout, false)
    }

    /// Create an empty schedule that combines elements: it needs a kernel, and rounds finished values.
    pub const fn reducing(place: Place, layout: Layout) -> Self {
        Self::empty(place, layout, true)
    }

    const fn empty(place: Place, layout: Layout, reduces: bool) -> Self {
        Self { place, layout, reduces, locals: Vec::new(), sends: Vec::new(), recvs: Vec::new(), ends: Vec::new() }
    }

    /// Append a step.
    pub fn push(&mut self, step: Step<'_>) {
        self.locals.extend_from_slice(step.locals);
        self.sends.extend_from_slice(step.sends);
        self.recvs.extend_from_slice(step.recvs);
        self.ends.push(Ends { locals: self.locals.len(), sends: self.sends.len(), recvs: self.recvs.len() });
    }

    /// Append a step of messages.
    pub fn exchange(&mut self, sends: &[Send], recvs: &[Recv]) {
        self.push(Step { locals: &[], sends, recvs });
    }

    /// Append a step of local moves.
    pub fn move_locally(&mut self, locals: &[Local]) {
        self.push(Step { locals, ..Step::default() });
    }

    /// Return the rank whose part this is.
    pub const fn place(&self) -> Place {
        self.place
    }

    /// Return the lengths of this rank's buffers.
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Set the length of `Work`, once the steps are known.
    pub(super) const fn set_work(&mut self, elements: usize) {
        self.layout.work = elements;
    }

    /// Return whether the collective combines elements, even if this rank (alone, or a leaf) combines none.
    pub const fn reduces(&self) -> bool {
        self.reduces
    }

    /// Return the number of steps.
    pub const fn len(&self) -> usize {
        self.ends.len()
    }

    /// Return the number of messages that this rank sends and receives.
    pub const fn messages(&self) -> usize {
        self.sends.len() + self.recvs.len()
    }

    /// Return whether it has no steps.
    pub const fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Return step `index`, if there is one.
    pub fn step(&self, index: usize) -> Option<Step<'_>> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { Ends::default() } else { self.ends[index - 1] };
        Some(Step {
            locals: &self.locals[start.locals..end.locals],
            sends: &self.sends[start.sends..end.sends],
            recvs: &self.recvs[start.recvs..end.recvs],
        })
    }

    /// Return the steps in order.
    pub fn steps(&self) -> impl Iterator<Item = Step<'_>> {
        (0..self.len()).filter_map(|index| self.step(index))
    }

    /// Return the bytes that this rank sends, with elements of `element_bytes` and partial ones of `partial_bytes`;
    /// frame headers are not counted.
    pub fn sent_bytes(&self, element_bytes: usize, partial_bytes: usize) -> u64 {
        let bytes = |send: &Send| match send.from.buffer {
            Buffer::Work => send.from.span.len as u64 * partial_bytes as u64,
            Buffer::Input | Buffer::Output => send.from.span.len as u64 * element_bytes as u64,
        };
        self.sends.iter().map(bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn place_requires_a_rank_below_ranks() {
        assert_eq!(Place::new(Rank(3), 3), Err(PlaceError { rank: 3, ranks: 3 }));
        assert!(Place::new(Rank(0), 0).is_err());
        let place = Place::new(Rank(1), 5).expect("inside");
        assert_eq!((place.after(4), place.before(2), place.before(5)), (Rank(0), Rank(4), Rank(1)));
    }

    proptest! {
        #[test]
        fn blocks_tile_the_elements(count in 0_usize..10_000, blocks in 1_u32..200) {
            let mut end = 0;
            for index in 0..blocks {
                let block = Span::of_blocks(count, blocks, index, index + 1);
                prop_assert_eq!(block.start, end);
                prop_assert!(block.len.abs_diff(count / blocks as usize) <= 1);
                end = block.end();
            }
            prop_assert_eq!(end, count);
        }
    }
}
