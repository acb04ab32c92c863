//! Table of all algorithms with their collective, schedule and cost: used to select, test and explain them.
//!
//! [`pairwise::all_to_all_v`] is not included, because its counts are not part of a [`Problem`], nor
//! [`pairwise::all_to_all_in_place`], which requires equal blocks.

use super::tree::Tree;
use super::{
    Place, Schedule, bine, binomial, bruck, dissemination, double_tree, full_mesh, halving_doubling, nhr, one_shot,
    pairwise, pat, recursive_doubling, ring, star, swing, tree, van_de_geijn,
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
    /// Messages of the busiest rank beyond one in each direction for each step: its processor handles them one by one.
    pub extra_messages: f64,
    /// Pieces of its messages beyond one for each: each has a frame of its own.
    pub extra_pieces: f64,
    /// The figures are upper bounds, not exact.
    pub is_bound: bool,
}

/// A piece of a message, in latencies.
const PIECE: f64 = 1.0 / 16.0;

impl Cost {
    /// How often the latency of a step is paid, of which a further piece of a message costs a sixteenth.
    pub fn latencies(&self) -> f64 {
        self.steps + PIECE * self.extra_pieces
    }

    /// Return the time in seconds: `alpha_s` for each step, `beta_s` for each element moved, `gamma_s` for each element
    /// combined.
    ///
    /// A further message of a step costs as much as a step here. [`crate::select`] prices it by a constant of its own.
    pub fn seconds(&self, alpha_s: f64, beta_s: f64, gamma_s: f64) -> f64 {
        (self.latencies() + self.extra_messages) * alpha_s
            + self.path_elements * beta_s
            + self.reduced_elements * gamma_s
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

    /// 1 if there are other ranks, otherwise 0.
    fn others(&self) -> f64 {
        self.log_ceil.min(1.0)
    }

    /// The partners of a rank in each step of Swing: two ranks have only each other.
    fn directions(&self) -> f64 {
        if self.floor > 2.0 { 2.0 } else { 1.0 }
    }

    /// The height of a double tree, and the number of its segments.
    fn double_tree(&self) -> (f64, f64) {
        let ranks = self.p as u32;
        let height = f64::from(ranks.saturating_sub(1).max(1).ilog2());
        (height, f64::from(double_tree::segments(ranks, self.n as usize)))
    }

    /// The steps of PAT, and its number of segments.
    fn pat(&self) -> (f64, f64) {
        let (ranks, count) = (self.p as u32, self.n as usize);
        let aggregation = pat::Aggregation::within(pat::BUFFER_ELEMENTS, ranks, count);
        (f64::from(aggregation.steps(ranks)), f64::from(aggregation.segments))
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

    /// The same, with messages beyond one for each step and pieces beyond one for each message.
    const fn with_extra(self, extra_messages: f64, extra_pieces: f64) -> Self {
        Self { extra_messages, extra_pieces, ..self }
    }

    /// The same figures as bounds.
    const fn bound(self) -> Self {
        Self { is_bound: true, ..self }
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
    "one_shot::all_reduce" OneShot AllReduce true: |x| one_shot::all_reduce(x.place, x.count, x.tree),
        |s| cost(s.others(), s.once(), s.once(), s.once()).by_all((s.pairs_of_ranks(), s.p * s.once())).with_extra((s.p - 2.0).max(0.0), 0.0);
    "one_shot::reduce" OneShot Reduce true: |x| one_shot::reduce(x.place, x.count, x.tree, x.root),
        |s| cost(s.others(), s.once(), s.once(), s.n * s.others()).by_all((s.p - 1.0, s.once())).with_extra((s.p - 2.0).max(0.0), 0.0);
    "one_shot::broadcast" OneShot Broadcast false: |x| one_shot::broadcast(x.place, x.count, x.root),
        |s| cost(s.others(), s.once(), 0.0, s.once()).by_all((s.p - 1.0, s.once())).with_extra((s.p - 2.0).max(0.0), 0.0);
    "one_shot::reduce_scatter" OneShot ReduceScatter true: |x| one_shot::reduce_scatter(x.place, x.count, x.tree),
        |s| cost(s.others(), s.rest(), s.rest(), s.rest()).by_all((s.pairs_of_ranks(), s.once())).with_extra((s.p - 2.0).max(0.0), 0.0);
    "one_shot::all_gather" OneShot AllGather false: |x| one_shot::all_gather(x.place, x.count),
        |s| cost(s.others(), s.rest(), 0.0, s.rest()).by_all((s.pairs_of_ranks(), s.once())).with_extra((s.p - 2.0).max(0.0), 0.0);
    "one_shot::barrier" OneShot Barrier false: |x| one_shot::barrier(x.place),
        |s| cost(s.others(), 0.0, 0.0, 0.0).by_all((s.pairs_of_ranks(), 0.0)).with_extra((s.p - 2.0).max(0.0), 0.0);
    "star::all_reduce" Star AllReduce false: |x| star::all_reduce(x.place, x.count),
        |s| cost(2.0 * (s.p - 1.0), 2.0 * s.once(), s.once(), s.once()).by_all((2.0 * (s.p - 1.0), 2.0 * s.once()));
    "full_mesh::all_reduce" FullMesh AllReduce true: |x| full_mesh::all_reduce(x.place, x.count, x.tree),
        |s| cost(2.0 * s.others(), 2.0 * s.rest(), s.rest(), 2.0 * s.rest())
            .by_all((2.0 * s.pairs_of_ranks(), 2.0 * s.once()))
            .with_extra(2.0 * (s.p - 2.0).max(0.0), 0.0);
    "double_tree::all_reduce" DoubleTree AllReduce false: |x| double_tree::all_reduce(x.place, x.count), |s| {
        let (h, k) = s.double_tree();
        cost(2.0 * h + k + 1.0, s.n * (2.0 + 2.0 * h / k), s.n, 2.0 * s.n)
            .by_all((4.0 * k * (s.p - 1.0), 2.0 * s.once()))
            .with_extra(3.0 * k, 0.0)
            .bound()
    };
    "nhr::all_reduce" Nhr AllReduce false: |x| nhr::all_reduce(x.place, x.count),
        |s| cost(2.0 * s.log_ceil, 2.0 * s.rest(), s.rest(), 2.0 * s.rest())
            .by_all((2.0 * s.p * s.log_ceil, 2.0 * s.once()))
            .with_extra(0.0, 2.0 * (s.p - 1.0 - s.log_ceil));
    "swing::all_reduce" Swing AllReduce false: |x| swing::all_reduce(x.place, x.count), |s| cost(
        2.0 * (s.log_floor + s.folds()),
        2.0 * (s.rest_of_floor() + s.n * s.folds()),
        s.rest_of_floor() + s.n * s.folds(),
        2.0 * s.rest_of_floor() + s.n * s.folds(),
    )
    .by_all((2.0 * (s.directions() * s.exchanges() + s.folded()), 2.0 * s.once()))
    .with_extra(2.0 * s.log_floor * (s.directions() - 1.0), 0.0);
    "swing::all_reduce_latency" SwingLatency AllReduce false: |x| swing::all_reduce_latency(x.place, x.count), |s| cost(
        s.log_floor + 2.0 * s.folds(),
        s.n * (s.log_floor + 2.0 * s.folds()),
        s.n * (s.log_floor + s.folds()),
        s.n * (s.log_floor + s.folds()),
    )
    .by_all((s.directions() * s.exchanges() + 2.0 * s.folded(), s.n * (s.exchanges() + 2.0 * s.folded())))
    .with_extra(s.log_floor * (s.directions() - 1.0), 0.0);
    "bine::all_reduce" Bine AllReduce false: |x| bine::all_reduce(x.place, x.count), |s| cost(
        2.0 * (s.log_floor + s.folds()),
        2.0 * (s.rest_of_floor() + s.n * s.folds()),
        s.rest_of_floor() + s.n * s.folds(),
        2.0 * s.rest_of_floor() + s.n * s.folds(),
    ).by_all((2.0 * (s.exchanges() + s.folded()), 2.0 * s.once()));
    "star::reduce" Star Reduce false: |x| star::reduce(x.place, x.count, x.root),
        |s| cost(s.p - 1.0, s.once(), s.once(), s.n * s.others()).by_all((s.p - 1.0, s.once()));
    "double_tree::reduce" DoubleTree Reduce false: |x| double_tree::reduce(x.place, x.count, x.root), |s| {
        let (h, k) = s.double_tree();
        cost(h + k, s.n * (1.0 + h / k), s.n, s.n)
            .by_all((2.0 * k * (s.p - 1.0), s.once()))
            .with_extra(k, 0.0)
            .bound()
    };
    "bine::reduce" Bine Reduce false: |x| bine::reduce(x.place, x.count, x.root),
        |s| cost(s.log_ceil, s.n * s.log_ceil, s.n * s.log_ceil, s.n * s.others()).by_all((s.p - 1.0, s.once()));
    "star::broadcast" Star Broadcast false: |x| star::broadcast(x.place, x.count, x.root),
        |s| cost(s.p - 1.0, s.once(), 0.0, s.once()).by_all((s.p - 1.0, s.once()));
    "double_tree::broadcast" DoubleTree Broadcast false: |x| double_tree::broadcast(x.place, x.count, x.root), |s| {
        let (h, k) = s.double_tree();
        cost(h + k, s.n * (1.0 + h / k), 0.0, s.n)
            .by_all((2.0 * k * (s.p - 1.0), s.once()))
            .with_extra(k, 0.0)
            .bound()
    };
    "bine::broadcast" Bine Broadcast false: |x| bine::broadcast(x.place, x.count, x.root),
        |s| cost(s.log_ceil, s.n * s.log_ceil, 0.0, s.n * s.log_ceil).by_all((s.p - 1.0, s.once()));
    "van_de_geijn::broadcast" VanDeGeijn Broadcast false: |x| van_de_geijn::broadcast(x.place, x.count, x.root),
        |s| cost(2.0 * s.log_ceil, 2.0 * s.rest(), 0.0, 2.0 * s.rest())
            .by_all((s.p - 1.0 + s.p * s.log_ceil, s.n * s.tree_blocks() / s.p + s.once()));
    "full_mesh::reduce_scatter" FullMesh ReduceScatter true: |x| full_mesh::reduce_scatter(x.place, x.count, x.tree),
        |s| cost(s.others(), s.rest(), s.rest(), s.rest())
            .by_all((s.pairs_of_ranks(), s.once()))
            .with_extra((s.p - 2.0).max(0.0), 0.0);
    "nhr::reduce_scatter" Nhr ReduceScatter false: |x| nhr::reduce_scatter(x.place, x.count),
        |s| cost(s.log_ceil, s.rest(), s.rest(), s.rest())
            .by_all((s.p * s.log_ceil, s.once()))
            .with_extra(0.0, s.p - 1.0 - s.log_ceil);
    "pat::reduce_scatter" Pat ReduceScatter false: |x| pat::reduce_scatter(x.place, x.count), |s| {
        let (steps, segments) = s.pat();
        cost(steps * segments, s.rest(), s.rest(), s.rest())
            .by_all((s.p * steps * segments, s.once()))
            .with_extra(0.0, segments * (s.p - 1.0 - steps))
    };
    "bine::reduce_scatter" Bine ReduceScatter false: |x| bine::reduce_scatter(x.place, x.count), |s| match s.is_power {
        true => cost(s.log_floor, s.rest(), s.rest(), s.rest()).by_all((s.exchanges(), s.once())),
        false => cost(s.log_floor + 2.0, s.n + s.pairs() + s.n / s.p, s.n + s.pairs(), s.n + s.pairs())
            .by_all((s.exchanges() + 2.0 * s.folded(), s.floor * s.pairs() + 2.0 * s.n * s.folded()))
            .bound(),
    };
    "full_mesh::all_gather" FullMesh AllGather false: |x| full_mesh::all_gather(x.place, x.count),
        |s| cost(s.others(), s.rest(), 0.0, s.rest())
            .by_all((s.pairs_of_ranks(), s.once()))
            .with_extra((s.p - 2.0).max(0.0), 0.0);
    "nhr::all_gather" Nhr AllGather false: |x| nhr::all_gather(x.place, x.count),
        |s| cost(s.log_ceil, s.rest(), 0.0, s.rest())
            .by_all((s.p * s.log_ceil, s.once()))
            .with_extra(0.0, s.p - 1.0 - s.log_ceil);
    "pat::all_gather" Pat AllGather false: |x| pat::all_gather(x.place, x.count), |s| {
        let (steps, _) = s.pat();
        cost(steps, s.rest(), 0.0, s.rest())
            .by_all((s.p * steps, s.once()))
            .with_extra(0.0, s.p - 1.0 - steps)
    };
    "bine::all_gather" Bine AllGather false: |x| bine::all_gather(x.place, x.count), |s| match s.is_power {
        true => cost(s.log_floor, s.rest(), 0.0, s.rest()).by_all((s.exchanges(), s.once())),
        false => cost(s.log_floor + 2.0, s.n / s.p + s.pairs() + s.n, 0.0, s.pairs() + s.n)
            .by_all((s.exchanges() + 2.0 * s.folded(), s.floor * s.pairs() + 2.0 * s.n * s.folded()))
            .bound(),
    };
    "star::gather" Star Gather false: |x| star::gather(x.place, x.count, x.root),
        |s| cost(s.p - 1.0, s.rest(), 0.0, s.n / s.p * s.others()).by_all((s.p - 1.0, s.rest()));
    "star::scatter" Star Scatter false: |x| star::scatter(x.place, x.count, x.root),
        |s| cost(s.p - 1.0, s.rest(), 0.0, s.rest()).by_all((s.p - 1.0, s.rest()));
}
