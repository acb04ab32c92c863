//! Sets of ranks, in the form of a packet's payload.

use crate::ids::Rank;
use core::fmt;

/// A set of ranks of a group with at most 256 ranks. Larger groups do not continue without stragglers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct RankMask([u64; RankMask::RANKS / 64]);

impl RankMask {
    /// The maximum number of ranks.
    pub const RANKS: usize = 256;

    /// The length of a set in a packet, in bytes.
    pub const LEN_BYTES: usize = Self::RANKS / 8;

    /// The empty set.
    pub const EMPTY: Self = Self([0; Self::RANKS / 64]);

    /// Add a rank. A rank of [`RankMask::RANKS`] or more is ignored.
    pub const fn insert(&mut self, rank: Rank) {
        if (rank.0 as usize) < Self::RANKS {
            self.0[rank.0 as usize / 64] |= 1 << (rank.0 % 64);
        }
    }

    /// Return whether a rank is in the set.
    pub const fn contains(&self, rank: Rank) -> bool {
        (rank.0 as usize) < Self::RANKS && self.0[rank.0 as usize / 64] >> (rank.0 % 64) & 1 == 1
    }

    /// Return whether the set is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        *self == Self::EMPTY
    }

    /// Return the number of ranks in the set.
    pub fn len(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Return the union of both sets.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self(core::array::from_fn(|i| self.0[i] | other.0[i]))
    }

    /// Iterate over the ranks in the set, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = Rank> + '_ {
        (0..Self::RANKS as u32).map(Rank).filter(|&rank| self.contains(rank))
    }

    /// Return the wire form: bit n % 8 of byte n / 8 stands for rank n.
    pub fn to_bytes(self) -> [u8; Self::LEN_BYTES] {
        let mut bytes = [0; Self::LEN_BYTES];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(self.0) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Return the set as two halves, for ring entries that hold one half each: in the first, bit n % 64 of word n / 64
    /// stands for rank n, in the second for rank n + 128.
    pub const fn halves(&self) -> [[u64; 2]; 2] {
        let [a, b, c, d] = self.0;
        [[a, b], [c, d]]
    }

    /// Return the set with these halves.
    pub const fn from_halves([[a, b], [c, d]]: [[u64; 2]; 2]) -> Self {
        Self([a, b, c, d])
    }

    /// Parse a packet's payload; `None` unless it has [`RankMask::LEN_BYTES`] bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN_BYTES] = bytes.try_into().ok()?;
        Some(Self::from_array(bytes))
    }

    /// [`RankMask::from_bytes`] without the length check: a bug that the search in `tests/fuzz` has to find.
    ///
    /// # Panics
    /// If there are fewer than [`RankMask::LEN_BYTES`] bytes.
    #[cfg(feature = "planted")]
    pub fn from_bytes_unchecked(bytes: &[u8]) -> Option<Self> {
        bytes[..Self::LEN_BYTES].try_into().ok().map(Self::from_array)
    }

    fn from_array(bytes: &[u8; Self::LEN_BYTES]) -> Self {
        let (words, _) = bytes.as_chunks::<8>();
        Self(core::array::from_fn(|i| u64::from_le_bytes(words[i])))
    }
}

impl FromIterator<Rank> for RankMask {
    fn from_iter<I: IntoIterator<Item = Rank>>(ranks: I) -> Self {
        let mut mask = Self::EMPTY;
        ranks.into_iter().for_each(|rank| mask.insert(rank));
        mask
    }
}

/// The ranks' numbers, as in `3, 17`.
impl fmt::Display for RankMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, rank) in self.iter().enumerate() {
            write!(f, "{}{}", if i > 0 { ", " } else { "" }, rank.0)?;
        }
        Ok(())
    }
}
