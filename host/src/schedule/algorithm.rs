//! Table of all algorithms with their collective, schedule and cost: used to select, test and explain them.
//!
//! [`pairwise::all_to_all_v`] is not included, because its counts are not part of a [`Problem`], nor
//! [`pairwise::all_to_all_in_place`], which requires equal blocks.

use super::tree::Tree;
use super::{
    Place, Schedule, binomial, bruck, dissemination, halving_doubling, pairwise, recursive_doubling, ring, tree,
};
use std::fmt;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Path};

/// What a schedule implements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pattern {
    /// Every rank gets the reduction of all `n` elements.
    AllReduce,
    /// The root gets the reduction of all `n` elements.
    Reduce,
    /// Every rank gets the root's `n` elements.
    Broadcast,
    /// Rank r gets block r of p of the reduction of `n` elements.
    ReduceScatter,
    /// Every rank gets the `n` elements of which rank r has block r of p.
    AllGather,
    /// The root gets the `n` elements of which rank r has block r of p.
    Gather,
    /// Rank r gets block r of p of the root's `n` elements.
    Scatter,
    /// Rank r gets block r of p of every rank's `n` elements.
    AllToAll,
    /// No rank proceeds before all have entered.
    Barrier,
}

impl Pattern {
    /// Every pattern.
    pub const ALL: [Self; 9] = [
        Self::AllReduce,
        Self::Reduce,
        Self::Broadcast,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::Barrier,
    ];

    /// Return the collective of this pattern.
    pub const fn collective(self) -> Collective {
        match self {
            Self::AllReduce => Collective::AllReduce,
            Self::Reduce => Collective::Reduce,
            Self::Broadcast => Collective::Broadcast,
            Self::ReduceScatter => Collective::ReduceScatter,
            Self::AllGather => Collective::AllGather,
            Self::Gather => Collective::Gather,
            Self::Scatter => Collective::Scatter,
            Self::AllToAll => Collective::AllToAll,
            Self::Barrier => Collective::Barrier,
        }
    }

    /// Return whether the pattern has a root.
    pub const fn is_rooted(self) -> bool {
        matches!(self, Self::Reduce | Self::Broadcast | Self::Gather | Self::Scatter)
    }
}

/// Parameters of a schedule.
#[derive(Debug, Clone, Copy)]
pub struct Problem<'a> {
    /// The rank whose part is scheduled.
    pub place: Place,
    /// `n` of the [`Pattern`].
    pub count: usize,
    /// The root of a rooted collective; ignored otherwise.
    pub root: Rank,
    /// The declared expression over all ranks, for algorithms that evaluate any.
    pub tree: &'a Tree,
}

/// Cost of a collective in the alpha-beta-gamma model.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    /// Consecutive messages: times alpha.
    pub steps: f64,
    /// Elements on the longest path: times beta.
    pub path_elements: f64,
    /// Elements combined by the busiest rank: times gamma.
    pub reduced_elements: f64,
    /// Elements sent by the busiest rank.
    pub sent_elements: f64,
    /// Messages of all ranks together. What a rank sends to another in one step is one message.
    pub messages: f64,
    /// Elements sent by all ranks together.
    pub moved_elements: f64,
    /// The figures are upper bounds, not exact.
    pub is_bound: bool,
}

impl Cost {
    /// Return the time in seconds: `alpha_s` for each step, `beta_s` for each element moved, `gamma_s` for each element
    /// combined.
    pub fn seconds(&self, alpha_s: f64, beta_s: f64, gamma_s: f64) -> f64 {
        self.steps * alpha_s + self.path_elements * beta_s + self.reduced_elements * gamma_s
    }
}

/// A collective algorithm.
pub struct Algorithm {
    /// Its name: `ring::all_reduce`.
    pub name: &'static str,
    /// The algorithm family.
    path: Path,
    /// The collective that it implements.
    pub pattern: Pattern,
    /// Whether it evaluates the expression of [`Problem::tree`], whatever that is.
    pub follows_tree: bool,
    /// Create one rank's schedule.
    pub schedule: fn(&Problem<'_>) -> Schedule,
    cost: fn(&Size) -> Cost,
}

impl fmt::Debug for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Algorithm {
    /// Return the cost for `count` elements over `ranks` ranks, with the cheapest root and, if it follows a tree, for a
    /// tree of one node. Exact where `ranks` and its floor power of two divide `count`, and otherwise off by less than
    /// an element for each step.
    pub fn cost(&self, ranks: u32, count: usize) -> Cost {
        let floor = f64::from(1 << ranks.ilog2());
        let is_power = ranks.is_power_of_two();
        let (log_floor, log_ceil) = (f64::from(ranks.ilog2()), f64::from(ranks.ilog2() + u32::from(!is_power)));
        (self.cost)(&Size { p: f64::from(ranks), n: count as f64, floor, log_floor, log_ceil, is_power })
    }

    /// Return the algorithm family: what ranks agree on.
    pub const fn path(&self) -> Path {
        self.path
    }

    /// Look up an algorithm by name.
    pub fn named(name: &str) -> Option<&'static Self> {
        ALGORITHMS.iter().find(|algorithm| algorithm.name == name)
    }
}

/// Problem size of a cost formula.
struct Size {
    /// Ranks.
    p: f64,
    /// Elements.
    n: f64,
    /// The largest power of two that is no larger than p.
    floor: f64,
    log_floor: f64,
    log_ceil: f64,
    is_power: bool,
}

impl Size {
    /// n(p-1)/p: all but one block.
    fn rest(&self) -> f64 {
        self.n * (self.p - 1.0) / self.p
    }

    /// The same among the survivors of a fold.
    fn rest_of_floor(&self) -> f64 {
        self.n * (self.floor - 1.0) / self.floor
    }

    /// What an exchange of p' - 1 pairs of blocks carries: no survivor of a fold has more than two blocks.
    fn pairs(&self) -> f64 {
        2.0 * self.n * (self.floor - 1.0) / self.p
    }

    /// n(p-1): what all ranks together send where each result is built and handed on once.
    fn once(&self) -> f64 {
        self.n * (self.p - 1.0)
    }

    /// p(p-1): a message of each rank to each other one.
    fn pairs_of_ranks(&self) -> f64 {
        self.p * (self.p - 1.0)
    }

    /// The messages of an exchange among the survivors of a fold.
    fn exchanges(&self) -> f64 {
        self.floor * self.log_floor
    }

    /// The number of ranks that are folded.
    fn folded(&self) -> f64 {
        self.p - self.floor
    }

    /// The blocks that a binomial tree moves, if each rank has one: a block travels as often as its rank's number has
    /// ones.
    fn tree_blocks(&self) -> f64 {
        let ranks = self.p as u64;
        let ones = |bit: u32| (ranks >> (bit + 1) << bit) + (ranks & ((2 << bit) - 1)).saturating_sub(1 << bit);
        (0..32).map(ones).sum::<u64>() as f64
    }

    /// 1 if there are ranks to fold, otherwise 0.
    fn folds(&self) -> f64 {
        f64::from(u8::from(!self.is_power))
    }
}

fn cost(steps: f64, path_elements: f64, reduced_elements: f64, sent_elements: f64) -> Cost {
    Cost { steps, path_elements, reduced_elements, sent_elements, ..Cost::default() }
}

impl Cost {
    /// The same, with what all ranks together send.
    const fn by_all(self, (messages, moved_elements): (f64, f64)) -> Self {
        Self { messages, moved_elements, ..self }
    }
}

macro_rules! algorithms {
    ($($name:literal $path:ident $pattern:ident $follows_tree:literal: |$problem:ident| $schedule:expr, |$size:ident| $cost:expr;)*) => {
        /// Every algorithm, by collective; the formulas of their costs are in the table of [`super`].
        pub const ALGORITHMS: &[Algorithm] = &[$(Algorithm {
            name: $name,
            path: Path::$path,
            pattern: Pattern::$pattern,
            follows_tree: $follows_tree,
            schedule: |$problem| $schedule,
            cost: |$size| $cost,
        }),*];
    };
}

algorithms! {
    "ring::all_reduce" Ring AllReduce false: |x| ring::all_reduce(x.place, x.count),
        |s| cost(2.0 * (s.p - 1.0), 2.0 * s.rest(), s.rest(), 2.0 * s.rest()).by_all((2.0 * s.pairs_of_ranks(), 2.0 * s.once()));
    "halving_doubling::all_reduce" HalvingDoubling AllReduce false: |x| halving_doubling::all_reduce(x.place, x.count), |s| cost(
        2.0 * (s.log_floor + s.folds()),
        2.0 * (s.rest_of_floor() + s.n * s.folds()),
        s.rest_of_floor() + s.n * s.folds(),
        2.0 * s.rest_of_floor() + s.n * s.folds(),
    ).by_all((2.0 * (s.exchanges() + s.folded()), 2.0 * s.once()));
    "recursive_doubling::all_reduce" RecursiveDoubling AllReduce false: |x| recursive_doubling::all_reduce(x.place, x.count), |s| cost(
        s.log_floor + 2.0 * s.folds(),
        s.n * (s.log_floor + 2.0 * s.folds()),
        s.n * (s.log_floor + s.folds()),
        s.n * (s.log_floor + s.folds()),
    ).by_all((s.exchanges() + 2.0 * s.folded(), s.n * (s.exchanges() + 2.0 * s.folded())));
    "binomial::all_reduce" Binomial AllReduce false: |x| binomial::all_reduce(x.place, x.count),
        |s| cost(2.0 * s.log_ceil, 2.0 * s.n * s.log_ceil, s.n * s.log_ceil, s.n * s.log_ceil).by_all((2.0 * (s.p - 1.0), 2.0 * s.once()));
    "tree::all_reduce" HostTree AllReduce true: |x| tree::all_reduce(x.place, x.count, x.tree), |s| cost(
        s.p - 1.0 + s.log_ceil,
        s.n * (s.p - 1.0 + s.log_ceil),
        s.n * (s.p - 1.0),
        s.n * s.log_ceil,
    ).by_all((2.0 * (s.p - 1.0), 2.0 * s.once()));
    "pairwise::all_reduce" Pairwise AllReduce true: |x| pairwise::all_reduce(x.place, x.count, x.tree),
        |s| cost(s.p - 1.0 + s.log_ceil, 2.0 * s.rest(), s.rest(), 2.0 * s.rest()).by_all((s.pairs_of_ranks() + s.p * s.log_ceil, 2.0 * s.once()));
    "binomial::reduce" Binomial Reduce false: |x| binomial::reduce(x.place, x.count, x.root),
        |s| cost(s.log_ceil, s.n * s.log_ceil, s.n * s.log_ceil, s.n * s.log_ceil.min(1.0)).by_all((s.p - 1.0, s.once()));
    "tree::reduce" HostTree Reduce true: |x| tree::reduce(x.place, x.count, x.tree, x.root),
        |s| cost(s.p - 1.0, s.n * (s.p - 1.0), s.n * (s.p - 1.0), s.n * s.log_ceil.min(1.0)).by_all((s.p - 1.0, s.once()));
    "binomial::broadcast" Binomial Broadcast false: |x| binomial::broadcast(x.place, x.count, x.root),
        |s| cost(s.log_ceil, s.n * s.log_ceil, 0.0, s.n * s.log_ceil).by_all((s.p - 1.0, s.once()));
    "ring::reduce_scatter" Ring ReduceScatter false: |x| ring::reduce_scatter(x.place, x.count),
        |s| cost(s.p - 1.0, s.rest(), s.rest(), s.rest()).by_all((s.pairs_of_ranks(), s.once()));
    "halving_doubling::reduce_scatter" HalvingDoubling ReduceScatter false: |x| halving_doubling::reduce_scatter(x.place, x.count),
        |s| match s.is_power {
            true => cost(s.log_floor, s.rest(), s.rest(), s.rest()).by_all((s.exchanges(), s.once())),
            false => Cost {
                is_bound: true,
                ..cost(s.log_floor + 2.0, s.n + s.pairs() + s.n / s.p, s.n + s.pairs(), s.n + s.pairs())
                    .by_all((s.exchanges() + 2.0 * s.folded(), s.floor * s.pairs() + 2.0 * s.n * s.folded()))
            },
        };
    "pairwise::reduce_scatter" Pairwise ReduceScatter true: |x| pairwise::reduce_scatter(x.place, x.count, x.tree),
        |s| cost(s.p - 1.0, s.rest(), s.rest(), s.rest()).by_all((s.pairs_of_ranks(), s.once()));
    "ring::all_gather" Ring AllGather false: |x| ring::all_gather(x.place, x.count),
        |s| cost(s.p - 1.0, s.rest(), 0.0, s.rest()).by_all((s.pairs_of_ranks(), s.once()));
    "halving_doubling::all_gather" HalvingDoubling AllGather false: |x| halving_doubling::all_gather(x.place, x.count),
        |s| match s.is_power {
            true => cost(s.log_floor, s.rest(), 0.0, s.rest()).by_all((s.exchanges(), s.once())),
            false => Cost {
                is_bound: true,
                ..cost(s.log_floor + 2.0, s.n / s.p + s.pairs() + s.n, 0.0, s.pairs() + s.n)
                    .by_all((s.exchanges() + 2.0 * s.folded(), s.floor * s.pairs() + 2.0 * s.n * s.folded()))
            },
        };
    "bruck::all_gather" Bruck AllGather false: |x| bruck::all_gather(x.place, x.count),
        |s| cost(s.log_ceil, s.rest(), 0.0, s.rest()).by_all((s.p * s.log_ceil, s.once()));
    "binomial::gather" Binomial Gather false: |x| binomial::gather(x.place, x.count, x.root), |s| {
        let half = s.log_ceil.exp2() / 2.0;
        let largest = (half / 2.0).max(s.p - half) * s.log_ceil.min(1.0);
        cost(s.log_ceil, s.rest(), 0.0, s.n * largest / s.p).by_all((s.p - 1.0, s.n * s.tree_blocks() / s.p))
    };
    "binomial::scatter" Binomial Scatter false: |x| binomial::scatter(x.place, x.count, x.root),
        |s| cost(s.log_ceil, s.rest(), 0.0, s.rest()).by_all((s.p - 1.0, s.n * s.tree_blocks() / s.p));
    "pairwise::all_to_all" Pairwise AllToAll false: |x| pairwise::all_to_all(x.place, x.count),
        |s| cost(s.p - 1.0, s.rest(), 0.0, s.rest()).by_all((s.pairs_of_ranks(), s.once()));
    "dissemination::barrier" Dissemination Barrier false: |x| dissemination::barrier(x.place),
        |s| cost(s.log_ceil, 0.0, 0.0, 0.0).by_all((s.p * s.log_ceil, 0.0));
}
