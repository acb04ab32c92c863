//! Bitmaps of children and of slots.

/// A set of the numbers 0 .. 64 x `WORDS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Bits<const WORDS: usize> {
    words: [u64; WORDS],
}

/// A set of children; a node has up to 256.
pub(crate) type ChildSet = Bits<{ sumac_hal::wire::MAX_CHILDREN / 64 }>;

/// A set of a group's slots: up to twice the largest window.
pub(crate) type SlotSet = Bits<{ MAX_SLOTS / 64 }>;

/// The most slots that one group can have in a shard.
pub(crate) const MAX_SLOTS: usize = 2 * sumac_hal::uplink::MAX_WINDOW as usize;

impl<const WORDS: usize> Bits<WORDS> {
    pub(crate) const EMPTY: Self = Self { words: [0; WORDS] };

    pub(crate) fn insert(&mut self, n: usize) {
        self.words[n / 64] |= 1 << (n % 64);
    }

    pub(crate) fn remove(&mut self, n: usize) {
        self.words[n / 64] &= !(1 << (n % 64));
    }

    pub(crate) fn contains(&self, n: usize) -> bool {
        self.words[n / 64] & (1 << (n % 64)) != 0
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    pub(crate) fn len(&self) -> usize {
        // Most words are empty, and not every processor counts bits.
        self.words.iter().filter(|&&word| word != 0).map(|word| word.count_ones() as usize).sum()
    }

    /// Return whether `n` is the only member. Cheaper than counting.
    pub(crate) fn is_only(&self, n: usize) -> bool {
        let others =
            self.words.iter().enumerate().map(|(i, word)| if i == n / 64 { word ^ 1 << (n % 64) } else { *word });
        others.fold(0, |all, word| all | word) == 0
    }

    /// Return whether all of `0..end` are members. Cheaper than counting.
    #[inline]
    pub(crate) fn has_first(&self, end: usize) -> bool {
        if end < 64 {
            return self.words[0] | u64::MAX << end == u64::MAX;
        }
        let (full, rest) = (end / 64, end % 64);
        let above = u64::MAX << rest;
        self.words[..full].iter().all(|&word| word == u64::MAX) && (rest == 0 || self.words[full] | above == u64::MAX)
    }

    /// Return the members of either.
    pub(crate) fn union(&self, other: &Self) -> Self {
        Self { words: core::array::from_fn(|i| self.words[i] | other.words[i]) }
    }

    /// Return the members that are not in `other`.
    pub(crate) fn difference(&self, other: &Self) -> Self {
        Self { words: core::array::from_fn(|i| self.words[i] & !other.words[i]) }
    }

    /// Return the members of both.
    pub(crate) fn intersection(&self, other: &Self) -> Self {
        Self { words: core::array::from_fn(|i| self.words[i] & other.words[i]) }
    }

    /// Return the smallest member.
    pub(crate) fn first(&self) -> Option<usize> {
        let i = self.words.iter().position(|&word| word != 0)?;
        Some(i * 64 + self.words[i].trailing_zeros() as usize)
    }

    /// Return the smallest member that is at least `from`, else the smallest of all.
    pub(crate) fn first_from(&self, from: usize) -> Option<usize> {
        let start = from / 64 % WORDS;
        let above = self.words[start] & (u64::MAX << (from % 64));
        if above != 0 {
            return Some(start * 64 + above.trailing_zeros() as usize);
        }
        let rest = (start + 1..WORDS).find(|&i| self.words[i] != 0);
        rest.map(|i| i * 64 + self.words[i].trailing_zeros() as usize).or_else(|| self.first())
    }

    /// Return all members, starting from `from` and wrapping around.
    pub(crate) fn iter_from(&self, from: usize) -> impl Iterator<Item = usize> {
        let (word, bits) = (from / 64 % WORDS, u64::MAX << (from % 64));
        // The word of `from` is visited twice: its upper part first, its lower part last.
        let parts = (0..=WORDS).map(move |turn| {
            let index = (word + turn) % WORDS;
            let mask = [u64::MAX, bits, !bits][if turn == 0 {
                1
            } else if turn == WORDS {
                2
            } else {
                0
            }];
            (index, self.words[index] & mask)
        });
        parts.flat_map(|(index, mut bits)| {
            core::iter::from_fn(move || {
                let bit = bits.trailing_zeros() as usize;
                bits &= bits.wrapping_sub(1);
                (bit < 64).then_some(index * 64 + bit)
            })
        })
    }

    /// Count the members in `start..end`.
    pub(crate) fn count_in(&self, start: usize, end: usize) -> usize {
        (0..WORDS)
            .map(|i| {
                let (low, high) = (start.max(i * 64), end.min(i * 64 + 64));
                if low >= high {
                    return 0;
                }
                let width = high - low;
                let mask = if width == 64 { u64::MAX } else { ((1 << width) - 1) << (low % 64) };
                (self.words[i] & mask).count_ones() as usize
            })
            .sum()
    }

    /// Return whether all of `start..end` are members.
    pub(crate) fn has_all(&self, start: usize, end: usize) -> bool {
        self.count_in(start, end) == end - start
    }

    /// Return whether any of `start..end` is a member.
    pub(crate) fn has_any(&self, start: usize, end: usize) -> bool {
        self.count_in(start, end) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::vec::Vec;

    proptest! {
        #[test]
        fn bits_match_a_btree_set(members in prop::collection::btree_set(0_usize..256, 0..80), start in 0_usize..256, len in 0_usize..200, from in 0_usize..256) {
            let mut bits = ChildSet::EMPTY;
            members.iter().for_each(|&n| bits.insert(n));
            let end = (start + len).min(256);
            prop_assert_eq!(bits.count_in(start, end), members.range(start..end).count());
            prop_assert_eq!(bits.first(), members.first().copied());
            prop_assert_eq!(bits.first_from(from), members.range(from..).next().or(members.first()).copied());
            prop_assert_eq!(bits.len(), members.len());
            prop_assert_eq!(bits.is_only(start), members.len() == 1 && members.contains(&start));
            prop_assert!(members.len() != 1 || bits.is_only(*members.first().expect("one")));
            let run = (0..256).take_while(|n| members.contains(n)).count();
            prop_assert!(bits.has_first(run) && (run == 256 || !bits.has_first(run + 1)));
            let in_turn: Vec<usize> = members.range(from..).chain(members.range(..from)).copied().collect();
            prop_assert_eq!(bits.iter_from(from).collect::<Vec<_>>(), in_turn);
            let mut upper = ChildSet::EMPTY;
            (from..256).for_each(|n| upper.insert(n));
            let (union, without, both) = (bits.union(&upper), bits.difference(&upper), bits.intersection(&upper));
            for n in 0..256 {
                let (member, above) = (members.contains(&n), n >= from);
                prop_assert_eq!(union.contains(n), member || above);
                prop_assert_eq!((without.contains(n), both.contains(n)), (member && !above, member && above));
            }
            let rest: BTreeSet<_> = members.iter().copied().filter(|n| n % 2 == 0).collect();
            members.iter().filter(|&n| n % 2 == 1).for_each(|&n| bits.remove(n));
            prop_assert!((0..256).all(|n| bits.contains(n) == rest.contains(&n)));
        }
    }
}
