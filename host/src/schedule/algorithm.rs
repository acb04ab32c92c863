//! Algorithms with their collective, schedule and cost: used to select, test and explain them.
//!
//! [`all_to_all_v`](super::pairwise::all_to_all_v) is not included, because its counts are not part of a [`Problem`],
//! nor [`all_to_all_in_place`](super::pairwise::all_to_all_in_place) and that of
//! [`hierarchical_pairwise`](super::hierarchical_pairwise), which require equal blocks.

mod host_tree;
mod shaped;
mod size;
mod table;

pub use table::ALGORITHMS;

use super::tree::Tree;
use super::{Place, Schedule, Shape, recursive_doubling};
use size::Size;
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
    /// How the ranks lie, for algorithms that use it. One that does not fit them is a line.
    pub shape: Shape,
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
    /// Return the cost for `count` elements over `ranks` ranks of this shape, with the cheapest root and, if it follows
    /// a tree, for a tree of one node. Exact where `ranks` and its floor power of two divide `count`, and otherwise off
    /// by less than an element for each step.
    pub fn cost(&self, ranks: u32, shape: Shape, count: usize) -> Cost {
        (self.cost)(&Size::new(ranks, shape, count))
    }

    /// Create one rank's schedule for buffers of this kind: one for input and output, or two, where that saves a copy.
    pub fn schedule_for(&self, problem: &Problem<'_>, is_in_place: bool) -> Schedule {
        match (self.path, self.pattern) {
            (Path::RecursiveDoubling, Pattern::AllReduce) if !is_in_place => {
                recursive_doubling::all_reduce_apart(problem.place, problem.count)
            }
            _ => (self.schedule)(problem),
        }
    }

    /// Return whether the algorithm is made for ranks in several dimensions. In a line it is correct, but no other than
    /// an algorithm for lines.
    pub const fn needs_dimensions(&self) -> bool {
        matches!(
            self.path,
            Path::Ring2d | Path::Torus2d | Path::Mesh2d | Path::HierarchicalRing | Path::HierarchicalPairwise
        )
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
