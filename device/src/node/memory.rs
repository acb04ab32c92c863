//! A node's storage, supplied by its board.
//!
//! A node allocates nothing. Its tables and accumulators are slices supplied by the board: parts of a `static`
//! [`Memory`] on bare metal, or of the heap. The const parameters of [`Memory`] are its capacities, so their total size
//! is known at build time.

use super::group::{Child, Group, Hop};
use crate::slot::Slot;
use sumac_hal::ctrl::TreeConfig;

/// The tables of a node. Their lengths are its capacities.
#[derive(Debug)]
pub struct Storage<'m> {
    /// One entry per group.
    pub groups: &'m mut [Option<Group>],
    /// One entry per tree.
    pub trees: &'m mut [Option<TreeConfig>],
    /// Child entries of all groups.
    pub children: &'m mut [Child],
    /// The hops of all groups to their parents. One for each group is enough where parents have as many shards as the
    /// device; an undivided node below parents of several shards takes as many for each group.
    pub hops: &'m mut [Hop],
    /// Slots of all groups.
    pub slots: &'m mut [Slot],
    /// Accumulators and staging of all slots.
    pub bytes: &'m mut [u8],
}

/// Storage of fixed size for boards without a heap. Put it in a `static`, not on a stack.
#[derive(Debug)]
pub struct Memory<const GROUPS: usize, const CHILDREN: usize, const SLOTS: usize, const BYTES: usize> {
    groups: [Option<Group>; GROUPS],
    trees: [Option<TreeConfig>; GROUPS],
    children: [Child; CHILDREN],
    hops: [Hop; GROUPS],
    slots: [Slot; SLOTS],
    bytes: [u8; BYTES],
}

impl<const GROUPS: usize, const CHILDREN: usize, const SLOTS: usize, const BYTES: usize>
    Memory<GROUPS, CHILDREN, SLOTS, BYTES>
{
    /// The size of this storage in bytes.
    pub const SIZE_BYTES: usize = size_of::<Self>();

    /// Return empty storage.
    pub const fn new() -> Self {
        Self {
            groups: [const { None }; GROUPS],
            trees: [const { None }; GROUPS],
            children: [Child::EMPTY; CHILDREN],
            hops: [const { Hop::EMPTY }; GROUPS],
            slots: [Slot::EMPTY; SLOTS],
            bytes: [0; BYTES],
        }
    }

    /// Borrow it as a node's storage.
    pub fn storage(&mut self) -> Storage<'_> {
        Storage {
            groups: &mut self.groups,
            trees: &mut self.trees,
            children: &mut self.children,
            hops: &mut self.hops,
            slots: &mut self.slots,
            bytes: &mut self.bytes,
        }
    }
}

impl<const GROUPS: usize, const CHILDREN: usize, const SLOTS: usize, const BYTES: usize> Default
    for Memory<GROUPS, CHILDREN, SLOTS, BYTES>
{
    fn default() -> Self {
        Self::new()
    }
}

/// A run of entries in one of the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Span {
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl Span {
    pub(crate) const fn end(self) -> usize {
        self.start + self.len
    }

    pub(crate) const fn range(self) -> core::ops::Range<usize> {
        self.start..self.end()
    }

    const fn overlaps(self, other: Self) -> bool {
        self.start < other.end() && other.start < self.end()
    }
}

/// Return the first free run of `len` entries among `capacity`, given the runs in use.
pub(crate) fn first_fit<I>(used: I, len: usize, capacity: usize) -> Option<Span>
where
    I: Iterator<Item = Span> + Clone,
{
    let starts = core::iter::once(0).chain(used.clone().map(Span::end));
    starts
        .map(|start| Span { start, len })
        .filter(|span| span.end() <= capacity && used.clone().all(|other| other.len == 0 || !span.overlaps(other)))
        .min_by_key(|span| span.start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_fit_returns_the_lowest_gap_that_fits() {
        let used = [Span { start: 0, len: 4 }, Span { start: 6, len: 2 }, Span { start: 12, len: 4 }];
        let fit = |len| first_fit(used.iter().copied(), len, 20).map(|span| span.start);
        assert_eq!(fit(2), Some(4));
        assert_eq!(fit(3), Some(8));
        assert_eq!(fit(4), Some(8));
        assert_eq!(first_fit(used.iter().copied(), 5, 20), None);
        assert_eq!(first_fit(core::iter::empty(), 20, 20).map(|span| span.start), Some(0));
        assert_eq!(first_fit(core::iter::empty(), 21, 20), None);
    }

    #[test]
    fn memory_is_const_constructible_in_a_static() {
        type Small = Memory<2, 8, 16, 4096>;
        static CELL: Small = Small::new();
        assert_eq!(CELL.bytes.len(), 4096);
        assert_eq!(Small::SIZE_BYTES, size_of_val(&CELL));
    }
}
