//! What a schedule is made of: places, spans of elements, transfers and steps.
//!
//! All lengths are in elements; bytes come in only where a type is known (the executor, the cost model).
//! Invariant: a [`Place`] is always inside its communicator, so that index arithmetic needs no checks.

use sumac_hal::ids::Rank;
use thiserror::Error;

/// One rank's place in a communicator: `rank < ranks`, `ranks >= 1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    rank: u32,
    ranks: u32,
}

impl Place {
    /// Name rank `rank` of `ranks`.
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

    /// Return the rank `distance` places after this one, round the ring.
    pub(crate) const fn after(self, distance: u32) -> Rank {
        Rank(((self.rank as u64 + distance as u64) % self.ranks as u64) as u32)
    }

    /// Return the rank `distance` places before this one, round the ring.
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

/// A run of elements of the caller's buffer; it may be empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Span {
    /// The first element.
    pub start: usize,
    /// The number of elements.
    pub len: usize,
}

impl Span {
    /// No elements: the span of a message that only says "I am here".
    pub const EMPTY: Self = Self { start: 0, len: 0 };

    /// Return blocks `first..last` of `count` elements cut into `blocks` blocks.
    ///
    /// Block b starts at `floor(b * count / blocks)`, so any run of m blocks is within one element of
    /// `m * count / blocks`, any count (0, 1, fewer elements than blocks) cuts, and a run of blocks is a span.
    pub(crate) fn of_blocks(count: usize, blocks: u32, first: u32, last: u32) -> Self {
        let (each, rest) = (count / blocks as usize, (count % blocks as usize) as u64);
        // rest < blocks < 2^32: the product fits.
        let start_of = |block: u32| block as usize * each + (u64::from(block) * rest / u64::from(blocks)) as usize;
        Self { start: start_of(first), len: start_of(last) - start_of(first) }
    }

    /// Return the element after the last.
    pub const fn end(self) -> usize {
        self.start + self.len
    }

    /// Return whether the two spans share an element.
    pub const fn overlaps(self, other: Self) -> bool {
        self.start < other.end() && other.start < self.end() && self.len != 0 && other.len != 0
    }
}

/// The side of the operator on which an operand stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// `received op own`.
    Left,
    /// `own op received`.
    Right,
}

/// What the receiver does with the elements of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Overwrite: the elements are finished, rounded to the operation's type.
    Copy,
    /// Combine with one's own: the elements are partial, in the accumulator type.
    Reduce {
        /// The side of the received operand, which together with the steps fixes the whole expression.
        ///
        /// Sum, min and max commute to the bit (NaN payloads fall to the canonical NaN), so an executor of
        /// these may put it on either; an operator that does not commute must not.
        received: Side,
        /// Whether every rank's contribution is in afterwards: the receiver rounds and makes NaNs canonical.
        completes: bool,
    },
}

/// One message of a step, as its sender or as its receiver sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// The rank at the other end.
    pub peer: Rank,
    /// The elements. Both ends name the same ones.
    pub span: Span,
    /// What the receiver does.
    pub action: Action,
}

/// One step: its transfers may run at the same time, in any order between peers and in this order per peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step<'a> {
    /// What this rank sends. The values are those from before the step.
    pub sends: &'a [Transfer],
    /// What this rank receives.
    pub recvs: &'a [Transfer],
}

/// One rank's part of a collective: steps that run one after the other.
///
/// Step k of one rank has nothing to do with step k of another: transfers match by their order between two
/// ranks. Empty spans stay in as messages without payload: they are what lets ranks notice that they called
/// different things, and what keeps a rank from returning before all others have entered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    place: Place,
    count: usize,
    transfers: Vec<Transfer>,
    /// For each step, where in `transfers` its sends and then its receives end.
    ends: Vec<(usize, usize)>,
}

impl Schedule {
    /// Start a schedule without steps over `count` elements.
    pub const fn new(place: Place, count: usize) -> Self {
        Self { place, count, transfers: Vec::new(), ends: Vec::new() }
    }

    /// Append a step.
    pub fn push(&mut self, sends: &[Transfer], recvs: &[Transfer]) {
        self.transfers.extend_from_slice(sends);
        let sends_end = self.transfers.len();
        self.transfers.extend_from_slice(recvs);
        self.ends.push((sends_end, self.transfers.len()));
    }

    /// Return whose part this is.
    pub const fn place(&self) -> Place {
        self.place
    }

    /// Return the number of elements of the whole buffer.
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Return the number of steps.
    pub const fn len(&self) -> usize {
        self.ends.len()
    }

    /// Return whether there is nothing to do, as for a single rank.
    pub const fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Return step `index`, if there is one.
    pub fn step(&self, index: usize) -> Option<Step<'_>> {
        let &(sends_end, recvs_end) = self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1].1 };
        Some(Step { sends: &self.transfers[start..sends_end], recvs: &self.transfers[sends_end..recvs_end] })
    }

    /// Return the steps in order.
    pub fn steps(&self) -> impl Iterator<Item = Step<'_>> {
        (0..self.len()).filter_map(|index| self.step(index))
    }

    /// Return whether any transfer of any step reduces.
    pub fn reduces(&self) -> bool {
        self.transfers.iter().any(|transfer| matches!(transfer.action, Action::Reduce { .. }))
    }

    /// Return the bytes that this rank sends: finished elements of `element_bytes`, partial ones of
    /// `partial_bytes`; frame headers not counted.
    pub fn sent_bytes(&self, element_bytes: usize, partial_bytes: usize) -> u64 {
        let bytes = |transfer: &Transfer| match transfer.action {
            Action::Copy => transfer.span.len as u64 * element_bytes as u64,
            Action::Reduce { .. } => transfer.span.len as u64 * partial_bytes as u64,
        };
        self.steps().flat_map(|step| step.sends).map(bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_place_is_inside_its_communicator() {
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

        #[test]
        fn overlap_is_a_shared_element(a in 0_usize..9, n in 0_usize..9, b in 0_usize..9, m in 0_usize..9) {
            let shared = (a..a + n).any(|element| (b..b + m).contains(&element));
            prop_assert_eq!(Span { start: a, len: n }.overlaps(Span { start: b, len: m }), shared);
        }
    }
}
