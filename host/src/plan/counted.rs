//! What the messages of schedules load onto the cables of a fabric, for every algorithm of an all-reduce.
//!
//! The messages are taken in the order of time ([`rounds`]), and those of a round at once. Invariant: a schedule of as
//! many steps as its closed form has, with the same partners, costs what the closed form costs.

use super::ring::{Counted, HostAlgorithm, Job, Part, Steps};
use crate::schedule::rounds::{Message, rounds};
use crate::schedule::tree::Tree;
use crate::schedule::{ALGORITHMS, Algorithm, Pattern, Place, Problem, Schedule, Shape};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;

/// The elements whose messages are counted: enough that algorithms with segments have many.
const COUNT: usize = 1 << 18;

/// The algorithms of an all-reduce but those of `known`, which ranks of this shape can run with at most `messages_max`
/// messages, further pieces included; `None` if two ranks are not connected.
pub(super) fn counted(
    job: &mut Job<'_>,
    shape: Shape,
    known: &[HostAlgorithm],
    messages_max: f64,
) -> Option<Vec<HostAlgorithm>> {
    let Some(ranks) = u32::try_from(job.ranks()).ok().filter(|ranks| *ranks > 1) else { return Some(Vec::new()) };
    let Ok(tree) = Tree::flat(ranks, Order::TreeFold) else { return Some(Vec::new()) };
    let is_missing = |algorithm: &&Algorithm| known.iter().all(|known| known.path != algorithm.path());
    let is_possible = |algorithm: &&Algorithm| {
        let cost = algorithm.cost(ranks, shape, COUNT);
        let fits = !algorithm.needs_dimensions() || shape.is_multidimensional(ranks);
        fits && cost.messages + f64::from(ranks) * cost.extra_pieces <= messages_max
    };
    let all = ALGORITHMS.iter().filter(|algorithm| algorithm.pattern == Pattern::AllReduce);
    all.filter(is_missing).filter(is_possible).filter_map(|algorithm| count(job, (algorithm, shape), &tree)).collect()
}

/// Count the messages of an algorithm. The inner `None`: two ranks are not connected.
fn count(
    job: &mut Job<'_>,
    (algorithm, shape): (&'static Algorithm, Shape),
    tree: &Tree,
) -> Option<Option<HostAlgorithm>> {
    let ranks = tree.ranks();
    let problem = |place| Problem { place, count: COUNT, root: Rank(0), tree, shape };
    let schedules: Vec<Schedule> = Place::all(ranks).map(|place| (algorithm.schedule)(&problem(place))).collect();
    let part = |message: &Message| -> Part {
        (message.from.0 as usize, message.to.0 as usize, message.elements as f64 / COUNT as f64)
    };
    let steps = rounds(&schedules, COUNT)?.into_iter().map(|messages| {
        let part_max = messages.iter().map(|message| message.elements).max().unwrap_or(0) as f64 / COUNT as f64;
        let round = job.round(messages.iter().map(part))?;
        Some(Steps { count: 1.0, part: part_max, round })
    });
    let steps: Option<Vec<Steps>> = steps.collect();
    Some(steps.map(|steps| HostAlgorithm::counted(Counted { algorithm, ranks, shape, count: COUNT }, steps)))
}
