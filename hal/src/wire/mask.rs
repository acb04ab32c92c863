//! Sets of ranks, as they travel behind a header.

use crate::ids::Rank;
use core::fmt;

/// A set of a group's ranks, of which it can have 256: larger groups do not go on without a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct RankMask([u64; RankMask::RANKS / 64]);

impl RankMask {
    /// The most ranks of a group whose sets can be told.
    pub const RANKS: usize = 256;

    /// The bytes of a set in a packet.
    pub const LEN_BYTES: usize = Self::RANKS / 8;

    /// The empty set.
    pub const EMPTY: Self = Self([0; Self::RANKS / 64]);

    /// Put a rank in; one that has no place is left out.
    pub const fn insert(&mut self, rank: Rank) {
        if (rank.0 as usize) < Self::RANKS {
            self.0[rank.0 as usize / 64] |= 1 << (rank.0 % 64);
        }
    }

    /// Tell whether a rank is in.
    pub const fn contains(&self, rank: Rank) -> bool {
        (rank.0 as usize) < Self::RANKS && self.0[rank.0 as usize / 64] >> (rank.0 % 64) & 1 == 1
    }

    /// Tell whether no rank is in.
    pub fn is_empty(&self) -> bool {
        *self == Self::EMPTY
    }

    /// Return how many ranks are in.
    pub fn len(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Return the ranks of either.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self(core::array::from_fn(|i| self.0[i] | other.0[i]))
    }

    /// Return the ranks that are in, in order.
    pub fn iter(&self) -> impl Iterator<Item = Rank> + '_ {
        (0..Self::RANKS as u32).map(Rank).filter(|&rank| self.contains(rank))
    }

    /// Return the bytes that travel: bit n % 8 of byte n / 8 is rank n.
    pub fn to_bytes(self) -> [u8; Self::LEN_BYTES] {
        let mut bytes = [0; Self::LEN_BYTES];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(self.0) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Return the two halves, for entries that have no room for more: bit n % 64 of word n / 64 is rank n, or n + 128.
    pub const fn halves(&self) -> [[u64; 2]; 2] {
        let [a, b, c, d] = self.0;
        [[a, b], [c, d]]
    }

    /// Put two halves together.
    pub const fn from_halves([[a, b], [c, d]]: [[u64; 2]; 2]) -> Self {
        Self([a, b, c, d])
    }

    /// Read a set from a packet's payload, which is exactly one.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN_BYTES] = bytes.try_into().ok()?;
        Some(Self::from_array(bytes))
    }

    /// [`RankMask::from_bytes`] with a bug: the length is not checked. For `tests/fuzz`, whose search has to find it.
    ///
    /// # Panics
    /// If there are fewer bytes.
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

/// The numbers, as in `3, 17`.
impl fmt::Display for RankMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, rank) in self.iter().enumerate() {
            write!(f, "{}{}", if i > 0 { ", " } else { "" }, rank.0)?;
        }
        Ok(())
    }
}
