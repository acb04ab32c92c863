//! Folds ranks beyond the largest power of two into their left neighbours, for algorithms that need a power of two.
//!
//! Of the first 2(p-p') ranks the odd ones are *extras*: before the exchange each sends its contribution to the rank on
//! its left, and receives the result from it afterwards (Thakur, Rabenseifner and Gropp, "Optimization of collective
//! communication operations in MPICH", IJHPCA 19(1), 2005). Every operand remains a run of neighbouring ranks.
//! Survivors are numbered by *position*, 0..p', in rank order.

use super::{Place, Span};
use sumac_hal::ids::Rank;

/// The fold of a communicator.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fold {
    /// The largest power of two not greater than the number of ranks.
    pub(super) survivors: u32,
    /// The number of ranks beyond it: the odd ones of the first `2 * extras`.
    extras: u32,
}

/// Role of a rank in the fold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// It folds into this rank, and takes no part in the exchange.
    Extra { survivor: Rank },
    /// It takes part; the extra folds into it, if there is one.
    Survivor { position: u32, extra: Option<Rank> },
}

impl Fold {
    pub(super) const fn of(ranks: u32) -> Self {
        let survivors = 1 << ranks.ilog2();
        Self { survivors, extras: ranks - survivors }
    }

    /// Return the number of exchanges: log2 of the survivors.
    pub(super) const fn levels(&self) -> u32 {
        self.survivors.ilog2()
    }

    pub(super) fn role(&self, place: Place) -> Role {
        let rank = place.rank().0;
        if self.is_extra(rank) {
            return Role::Extra { survivor: Rank(rank - 1) };
        }
        let extra = self.is_extra(rank + 1).then_some(Rank(rank + 1));
        Role::Survivor { position: self.position_of(rank), extra }
    }

    /// Return whether the rank at `position` has an extra.
    pub(super) const fn has_extra(&self, position: u32) -> bool {
        position < self.extras
    }

    pub(super) const fn rank_at(&self, position: u32) -> Rank {
        Rank(self.first_rank(position))
    }

    /// Return the blocks, one for each rank (extras too), of positions `first..last`.
    pub(super) fn blocks_of(&self, count: usize, (first, last): (u32, u32)) -> Span {
        let ranks = self.survivors + self.extras;
        Span::of_blocks(count, ranks, self.first_rank(first), self.first_rank(last))
    }

    const fn first_rank(&self, position: u32) -> u32 {
        if position < self.extras { 2 * position } else { position + self.extras }
    }

    const fn is_extra(&self, rank: u32) -> bool {
        rank % 2 == 1 && rank / 2 < self.extras
    }

    const fn position_of(&self, rank: u32) -> u32 {
        if rank / 2 < self.extras { rank / 2 } else { rank - self.extras }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folding_preserves_rank_order() {
        for ranks in 1..200 {
            let fold = Fold::of(ranks);
            let survivors: Vec<_> = (0..ranks).filter(|&rank| !fold.is_extra(rank)).collect();
            assert_eq!(survivors.len(), fold.survivors as usize);
            for (position, &rank) in survivors.iter().enumerate() {
                assert_eq!(fold.position_of(rank) as usize, position);
                assert_eq!(fold.rank_at(position as u32), Rank(rank));
            }
            assert_eq!(fold.blocks_of(ranks as usize, (0, fold.survivors)), Span::first(ranks as usize));
        }
    }
}
