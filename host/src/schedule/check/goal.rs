//! The postconditions of each collective, and their check against a simulation.

use super::error::CheckError;
use super::expression::ExprId;
use super::memory::Run;
use super::simulation::Simulation;
use crate::schedule::{Buffer, Pattern, Schedule, Span};
use sumac_hal::ids::Rank;

/// The postcondition of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Goal<'a> {
    /// Every rank ends with every rank's contribution to every element.
    AllReduce,
    /// The root does.
    Reduce {
        /// Who.
        root: Rank,
    },
    /// Every rank ends with the root's elements.
    Broadcast {
        /// Whose.
        root: Rank,
    },
    /// Rank r ends with every rank's contribution to block r.
    ReduceScatter,
    /// Every rank ends with every rank's block, in rank order.
    AllGather,
    /// The root does.
    Gather {
        /// Who.
        root: Rank,
    },
    /// Rank r ends with block r of the root's elements.
    Scatter {
        /// Whose.
        root: Rank,
    },
    /// Rank r ends with block r of every rank's elements, in rank order.
    AllToAll,
    /// The same with blocks of any length, packed in rank order at both ends.
    AllToAllV {
        /// How many elements go from rank a to rank b, at `a * ranks + b`.
        counts: &'a [usize],
    },
    /// Rank r ends with every rank's block of any length, in rank order.
    AllGatherV {
        /// How many elements each rank has.
        counts: &'a [usize],
    },
    /// Rank r ends with every rank's contribution to block r of any length.
    ReduceScatterV {
        /// How many elements each rank gets.
        counts: &'a [usize],
    },
    /// Every rank ends knowing that every rank has entered.
    Barrier,
}

/// The required value of one run of a rank's output.
enum Postcondition {
    /// Every contribution to these elements.
    Sum,
    /// This rank's input.
    Input(Rank),
}

impl Goal<'_> {
    /// Return the goal of a pattern.
    pub const fn of(pattern: Pattern, root: Rank) -> Self {
        match pattern {
            Pattern::AllReduce => Self::AllReduce,
            Pattern::Reduce => Self::Reduce { root },
            Pattern::Broadcast => Self::Broadcast { root },
            Pattern::ReduceScatter => Self::ReduceScatter,
            Pattern::AllGather => Self::AllGather,
            Pattern::Gather => Self::Gather { root },
            Pattern::Scatter => Self::Scatter { root },
            Pattern::AllToAll => Self::AllToAll,
            Pattern::Barrier => Self::Barrier,
        }
    }

    const fn reduces(&self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce { .. } | Self::ReduceScatter | Self::ReduceScatterV { .. })
    }

    /// Check that the schedules are those of one communicator's ranks, with buffers as long as the goal wants them.
    pub(super) fn fits(&self, schedules: &[Schedule]) -> Result<(), CheckError> {
        let ranks = schedules.len();
        let counts_fit = match self {
            Self::AllToAllV { counts } => counts.len() == ranks * ranks,
            Self::AllGatherV { counts } | Self::ReduceScatterV { counts } => counts.len() == ranks,
            Self::Reduce { root } | Self::Broadcast { root } | Self::Gather { root } | Self::Scatter { root } => {
                (root.0 as usize) < ranks
            }
            _ => true,
        };
        let count = self.count(schedules);
        for (index, schedule) in schedules.iter().enumerate() {
            let place = schedule.place();
            let is_own = place.rank().0 as usize == index && place.ranks() as usize == ranks;
            let lens = (schedule.layout().input, schedule.layout().output);
            if !is_own || !counts_fit || schedule.reduces() != self.reduces() || lens != self.lens(index, ranks, count)
            {
                return Err(CheckError::NotOneCollective { index });
            }
        }
        Ok(())
    }

    /// Return `n`, as the rank that has all elements shows it.
    fn count(&self, schedules: &[Schedule]) -> usize {
        let layout_of = |rank: Rank| schedules.get(rank.0 as usize).map(|schedule| *schedule.layout());
        let layout = match *self {
            Self::Broadcast { root } | Self::Gather { root } | Self::Scatter { root } => layout_of(root),
            _ => layout_of(Rank(0)),
        };
        let layout = layout.unwrap_or_default();
        if matches!(self, Self::AllGather | Self::AllGatherV { .. } | Self::Gather { .. }) {
            layout.output
        } else {
            layout.input
        }
    }

    /// Return a rank's block of the whole.
    fn block(&self, rank: usize, ranks: usize, count: usize) -> Span {
        match self {
            Self::AllGatherV { counts } | Self::ReduceScatterV { counts } => {
                Span { start: counts[..rank].iter().sum(), len: counts[rank] }
            }
            _ => Span::of_block(count, ranks as u32, rank as u32),
        }
    }

    /// Return how long a rank's input and output must be.
    fn lens(&self, rank: usize, ranks: usize, count: usize) -> (usize, usize) {
        let block = self.block(rank, ranks, count).len;
        let at = |root: Rank, len: usize| if rank == root.0 as usize { len } else { 0 };
        match *self {
            Self::AllReduce => (count, count),
            Self::Reduce { root } => (count, at(root, count)),
            Self::Broadcast { root } => (at(root, count), count),
            Self::ReduceScatter | Self::ReduceScatterV { .. } => (count, block),
            Self::AllGather | Self::AllGatherV { .. } => (block, count),
            Self::Gather { root } => (block, at(root, count)),
            Self::Scatter { root } => (at(root, count), block),
            Self::AllToAll => (count, block * ranks),
            Self::AllToAllV { counts } => {
                (counts[rank * ranks..][..ranks].iter().sum(), counts.iter().skip(rank).step_by(ranks).sum())
            }
            Self::Barrier => (0, 0),
        }
    }

    /// Check that every rank ends with its postconditions; returns the expressions of a reduction.
    pub(super) fn check_postconditions(&self, simulation: &Simulation<'_>) -> Result<Vec<(Span, ExprId)>, CheckError> {
        if *self == Self::Barrier {
            return simulation.check_barrier().map(|()| Vec::new());
        }
        let ranks = simulation.ranks();
        let mut blocks = Blocks::default();
        for rank in 0..ranks {
            for (at, len, element, postcondition) in self.postconditions(rank, simulation) {
                let rank = Rank(rank as u32);
                for run in simulation.output(rank, Buffer::Output.at(Span { start: at, len }))? {
                    check_run(simulation, rank, at, element, &run, &postcondition)?;
                    if matches!(postcondition, Postcondition::Sum) {
                        blocks.add(rank, &run)?;
                    }
                }
            }
        }
        Ok(blocks.runs.into_iter().map(|run| (Span { start: run.start, len: run.len }, run.value.expression)).collect())
    }

    /// Return the required contents of a rank's output: start, number of elements, first element of the inputs, and
    /// value.
    fn postconditions(&self, rank: usize, simulation: &Simulation<'_>) -> Vec<(usize, usize, usize, Postcondition)> {
        let schedules = simulation.schedules();
        let (ranks, count) = (schedules.len(), self.count(schedules));
        let block = |index: usize| self.block(index, ranks, count);
        let all = 0..ranks;
        let gathered = |from: usize| (block(from).start, block(from).len, 0, Postcondition::Input(Rank(from as u32)));
        match *self {
            Self::AllReduce => vec![(0, count, 0, Postcondition::Sum)],
            Self::Reduce { root } if rank == root.0 as usize => vec![(0, count, 0, Postcondition::Sum)],
            Self::Broadcast { root } => vec![(0, count, 0, Postcondition::Input(root))],
            Self::ReduceScatter | Self::ReduceScatterV { .. } => {
                vec![(0, block(rank).len, block(rank).start, Postcondition::Sum)]
            }
            Self::AllGather | Self::AllGatherV { .. } => all.map(gathered).collect(),
            Self::Gather { root } if rank == root.0 as usize => all.map(gathered).collect(),
            Self::Scatter { root } => vec![(0, block(rank).len, block(rank).start, Postcondition::Input(root))],
            Self::AllToAll => {
                let Span { start, len } = block(rank);
                all.map(|from| (from * len, len, start, Postcondition::Input(Rank(from as u32)))).collect()
            }
            Self::AllToAllV { counts } => {
                let before = |from: usize| counts[from * ranks..][..rank].iter().sum();
                let mut at = 0;
                let taken = |from: usize| {
                    let len = counts[from * ranks + rank];
                    at += len;
                    (at - len, len, before(from), Postcondition::Input(Rank(from as u32)))
                };
                all.map(taken).collect()
            }
            Self::Barrier | Self::Reduce { .. } | Self::Gather { .. } => Vec::new(),
        }
    }
}

/// Check one run of the output, read from element `at` on.
fn check_run(
    simulation: &Simulation<'_>,
    rank: Rank,
    at: usize,
    element: usize,
    run: &Run,
    postcondition: &Postcondition,
) -> Result<(), CheckError> {
    let contributors = simulation.contributors(run.value.expression);
    let is_place_right = run.value.element == element + run.start;
    match postcondition {
        Postcondition::Sum => {
            if let Some(missing) = contributors.first_missing(simulation.ranks()) {
                return Err(CheckError::Missing { rank, element: run.value.element, missing });
            }
            if is_place_right { Ok(()) } else { Err(CheckError::Misplaced { rank, element: at + run.start }) }
        }
        Postcondition::Input(from) if contributors.is_only(*from) && is_place_right => Ok(()),
        Postcondition::Input(_) => Err(CheckError::Misplaced { rank, element: at + run.start }),
    }
}

/// The expressions of a reduction's elements, sorted by element, with the rank that showed them first.
#[derive(Default)]
struct Blocks {
    runs: Vec<Run>,
    shown_by: Vec<Rank>,
    /// Where the run after the last one that was looked for is.
    next: usize,
}

impl Blocks {
    /// Return the index of the first run that ends after an element. Most ranks show their elements in order.
    fn find(&self, element: usize) -> usize {
        let is_after = |index: usize| self.runs.get(index).is_some_and(|known| known.start + known.len > element);
        match self.next {
            next if next > 0 && is_after(next) && !is_after(next - 1) => next,
            _ => self.runs.partition_point(|known| known.start + known.len <= element),
        }
    }

    /// Add a run that `rank` ends with; it must agree with what other ranks have shown.
    fn add(&mut self, rank: Rank, run: &Run) -> Result<(), CheckError> {
        let (mut element, end) = (run.value.element, run.value.element + run.len);
        while element < end {
            let next = self.find(element);
            self.next = next + 1;
            let known = self.runs.get(next).copied();
            match known.filter(|known| known.start <= element) {
                Some(known) if known.value.expression == run.value.expression => element = known.start + known.len,
                Some(_) => {
                    return Err(CheckError::Differs { rank, element, other: self.shown_by[next] });
                }
                None => {
                    let until = known.map_or(end, |known| known.start.min(end));
                    let value = super::memory::Value { element, ..run.value };
                    self.runs.insert(next, Run { start: element, len: until - element, value });
                    self.shown_by.insert(next, rank);
                    element = until;
                }
            }
        }
        Ok(())
    }
}
