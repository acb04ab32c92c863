//! The mapping of chunks to a node's shards.
//!
//! A device with K shards splits the sequence into runs of [`RUN`] chunks and assigns them in turn: shard =
//! (seq / RUN) % K (PROTOCOL 1). Shards share no state and need no locks. Within a shard, chunks are renumbered without
//! gaps (*local* numbers), so that windows, slot rings and bitmaps are contiguous.

use crate::ids::ChunkNo;

/// The number of consecutive seqs in one shard.
pub const RUN: u64 = 16;

/// The maximum number of shards of a node.
pub const MAX_SHARDS: usize = 8;

/// One of a node's K shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shard {
    index: u64,
    shards: u64,
}

impl Shard {
    /// The only shard of an undivided node.
    pub const WHOLE: Self = Self { index: 0, shards: 1 };

    /// Return shard `index` of `shards`; `None` unless `index < shards <= MAX_SHARDS`.
    pub const fn new(index: u16, shards: u16) -> Option<Self> {
        if index < shards && shards as usize <= MAX_SHARDS {
            Some(Self { index: index as u64, shards: shards as u64 })
        } else {
            None
        }
    }

    /// Return this shard's index.
    pub const fn index(self) -> u16 {
        self.index as u16
    }

    /// Return the number of shards.
    pub const fn shards(self) -> u16 {
        self.shards as u16
    }

    /// Return the shard index that `seq` belongs to, of `shards`.
    #[inline]
    pub const fn of(seq: ChunkNo, shards: u16) -> u16 {
        if shards == 1 {
            return 0;
        }
        ((seq.0 / RUN) % shards as u64) as u16
    }

    /// Return the local number of `seq`, or `None` if it belongs to another shard.
    #[inline]
    pub const fn local(self, seq: ChunkNo) -> Option<u64> {
        if Self::of(seq, self.shards as u16) as u64 == self.index { Some(self.below(seq)) } else { None }
    }

    /// Return how many seqs below `seq` belong to this shard: the local form of a mark (`have`, `stable`).
    #[inline]
    pub const fn below(self, seq: ChunkNo) -> u64 {
        // The usual case, without divisions.
        if self.shards == 1 {
            return seq.0;
        }
        let (run, rest) = (seq.0 / RUN, seq.0 % RUN);
        let full = run / self.shards * RUN;
        let turn = run % self.shards;
        if turn > self.index {
            full + RUN
        } else if turn == self.index {
            full + rest
        } else {
            full
        }
    }

    /// Return the maximum number of seqs in one shard among any `window` consecutive seqs.
    pub const fn max_in_window(self, window: u64) -> u64 {
        let turn = RUN * self.shards;
        let rest = window % turn;
        window / turn * RUN + if rest < RUN { rest } else { RUN }
    }

    /// Return the seq of a local number, saturating at the largest seq.
    #[inline]
    pub const fn global(self, local: u64) -> ChunkNo {
        let run = (local / RUN).saturating_mul(self.shards).saturating_add(self.index);
        ChunkNo(run.saturating_mul(RUN).saturating_add(local % RUN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_numbers_are_a_bijection() {
        for shards in 1..=MAX_SHARDS as u16 {
            let mut counts = [0_u64; MAX_SHARDS];
            for seq in (0..1000).map(ChunkNo) {
                let owner = Shard::of(seq, shards);
                for index in 0..shards {
                    let shard = Shard::new(index, shards).unwrap();
                    assert_eq!(shard.below(seq), counts[usize::from(index)]);
                    let local = shard.local(seq);
                    assert_eq!(local, (index == owner).then_some(counts[usize::from(index)]));
                    if let Some(local) = local {
                        assert_eq!(shard.global(local), seq);
                    }
                }
                counts[usize::from(owner)] += 1;
            }
        }
        assert_eq!(Shard::new(1, 1), None);
        assert_eq!(Shard::new(0, 9), None);
    }

    #[test]
    fn max_in_window_is_the_maximum_over_all_windows() {
        for shards in 1..=4 {
            let shard = Shard::new(0, shards).unwrap();
            for window in 1..200 {
                let found = (0..300).map(|from| shard.below(ChunkNo(from + window)) - shard.below(ChunkNo(from)));
                assert_eq!(shard.max_in_window(window), found.max().unwrap());
            }
        }
    }
}
