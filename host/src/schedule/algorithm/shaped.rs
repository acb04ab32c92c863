//! Costs of algorithms that use the shape of a communicator. Each of their formulas is a sum over dimensions.

use super::size::{Size, cost};
use super::{Cost, Pattern};
use crate::schedule::hierarchical_ring;

/// How often a pattern goes through all dimensions.
const fn ways(pattern: Pattern) -> f64 {
    if matches!(pattern, Pattern::AllReduce) { 2.0 } else { 1.0 }
}

/// Steps and messages of a rank in one way through all dimensions, each message with n/p elements of each block.
fn bandwidth_optimal(s: &Size, pattern: Pattern, steps: f64, messages: f64) -> Cost {
    let ways = ways(pattern);
    let reduced = if matches!(pattern, Pattern::AllGather) { 0.0 } else { s.rest() };
    cost(ways * steps, ways * s.rest(), reduced, ways * s.rest())
        .by_all((ways * s.p * messages, ways * s.once()))
        .with_extra(ways * (messages - steps), 0.0)
}

/// The extents with more than one rank.
fn extents(s: &Size) -> Vec<u32> {
    s.dims.as_slice().iter().copied().filter(|&extent| extent > 1).collect()
}

/// The steps of lines of d ranks: d-1 along each dimension.
fn line_steps(extents: &[u32]) -> f64 {
    extents.iter().map(|&extent| f64::from(extent - 1)).sum()
}

/// Of [`ring_2d`](crate::schedule::ring_2d).
pub(super) fn rings(s: &Size, pattern: Pattern) -> Cost {
    let steps = line_steps(&extents(s));
    bandwidth_optimal(s, pattern, steps, steps)
}

/// Of [`torus_2d`](crate::schedule::torus_2d): in each step, shares in the same dimension share a message.
pub(super) fn torus(s: &Size, pattern: Pattern) -> Cost {
    let extents = extents(s);
    let steps = line_steps(&extents);
    // For each share the dimension of each step, and the pieces of its message there.
    let turns = |first: usize| {
        let mut ranks = s.p;
        let mut turns = Vec::new();
        for dim in (0..extents.len()).map(|turn| (first + turn) % extents.len()) {
            ranks /= f64::from(extents[dim]);
            let pieces = if matches!(pattern, Pattern::AllReduce) { 1.0 } else { ranks };
            turns.extend((1..extents[dim]).map(|_| (dim, pieces)));
        }
        turns
    };
    let shares: Vec<Vec<(usize, f64)>> = (0..extents.len()).map(turns).collect();
    let (mut messages, mut pieces) = (0.0, 0.0);
    for step in 0..steps as usize {
        let is_used = |dim: &usize| shares.iter().any(|share| share[step].0 == *dim);
        messages += (0..extents.len()).filter(is_used).count() as f64;
        pieces += shares.iter().map(|share| share[step].1).sum::<f64>();
    }
    let whole = bandwidth_optimal(s, pattern, steps, messages);
    whole.with_extra(whole.extra_messages, ways(pattern) * (pieces - messages))
}

/// Of [`hierarchical_ring`]: a step inside servers, where messages of a reduce-scatter and an all-gather have a piece
/// for each server.
pub(super) fn servers(s: &Size, pattern: Pattern) -> Cost {
    let [servers, each] = hierarchical_ring::servers_of(s.dims).map(f64::from);
    let steps = (each - 1.0).min(1.0) + servers - 1.0;
    let whole = bandwidth_optimal(s, pattern, steps, each - 1.0 + servers - 1.0);
    let pieces = if matches!(pattern, Pattern::AllReduce) { 0.0 } else { (each - 1.0) * (servers - 1.0) };
    whole.with_extra(whole.extra_messages, pieces)
}

/// Of [`hierarchical_pairwise`](crate::schedule::hierarchical_pairwise): a step inside servers, of a piece for each
/// server in each message, and one with each other server.
pub(super) fn all_to_all(s: &Size) -> Cost {
    let [servers, each] = hierarchical_ring::servers_of(s.dims).map(f64::from);
    let inside = (each - 1.0).min(1.0);
    let sent = s.n * ((each - 1.0) / each + (servers - 1.0) / servers);
    cost(inside + servers - 1.0, sent, 0.0, sent)
        .by_all((s.p * (each - 1.0 + servers - 1.0), s.p * sent))
        .with_extra(each - 1.0 - inside, (each - 1.0) * (servers - 1.0))
}

/// Blocks of a line of d ranks of a mesh, in multiples of n/d.
struct MeshLine {
    /// What the busiest rank, in the middle, receives in a reduce-scatter and sends in an all-gather.
    busiest: u32,
    /// On the path of a reduce-scatter, through ranks of one port for both directions.
    path_in: u32,
    /// On that of an all-gather.
    path_out: u32,
    /// Steps in which a rank receives from, or sends to, both neighbours.
    both: u32,
}

impl MeshLine {
    fn new(extent: u32) -> Self {
        if extent == 2 {
            return Self { busiest: 1, path_in: 1, path_out: 1, both: 0 };
        }
        let busiest = extent + 1;
        let (path_in, path_out) = ((3 * extent - 1) / 2, busiest.max((3 * extent - 2) / 2));
        Self { busiest, path_in, path_out, both: extent.div_ceil(2) }
    }
}

/// Of [`mesh_2d`](crate::schedule::mesh_2d).
pub(super) fn mesh(s: &Size, pattern: Pattern) -> Cost {
    let mut extents = extents(s);
    let steps = line_steps(&extents);
    let (reduces, gathers) = match pattern {
        Pattern::ReduceScatter => (1.0, 0.0),
        Pattern::AllGather => (0.0, 1.0),
        _ => (1.0, 1.0),
    };
    // An all-reduce begins along the last dimension.
    if matches!(pattern, Pattern::AllReduce) {
        extents.reverse();
    }
    let (mut busiest, mut path, mut extra) = (0.0, 0.0, 0.0);
    let mut block = s.n;
    for extent in extents {
        let line = MeshLine::new(extent);
        block /= f64::from(extent);
        busiest += block * f64::from(line.busiest);
        path += block * (reduces * f64::from(line.path_in) + gathers * f64::from(line.path_out));
        extra += f64::from(line.both);
    }
    let ways = ways(pattern);
    cost(ways * steps, path, reduces * busiest, reduces * s.rest() + gathers * busiest)
        .by_all((ways * s.p * steps, ways * s.once()))
        .with_extra(ways * extra, 0.0)
}

/// The messages of a rank in one exchange of [`swing`](crate::schedule::swing), and their pieces.
pub(super) fn swing_messages(s: &Size) -> (f64, f64) {
    let extents = extents(s);
    if !crate::schedule::swing::is_torus(&extents) {
        // Two ranks have only each other.
        let messages = s.log_floor * if s.floor > 2.0 { 2.0 } else { 1.0 };
        return (messages, messages);
    }
    // In each round of steps every share goes once along each dimension that is left.
    let len = extents.len();
    let (mut messages, mut pieces) = (0, 0);
    let rounds = extents.iter().map(|extent| extent.ilog2()).max().unwrap_or(0);
    for round in 0..rounds {
        let left: Vec<usize> = (0..len).filter(|&dim| round < extents[dim].ilog2()).collect();
        let turns = |first: usize| {
            let order = (0..len).map(move |turn| (first + turn) % len);
            order.filter(|dim| left.contains(dim)).collect::<Vec<_>>()
        };
        let orders: Vec<Vec<usize>> = (0..len).map(turns).collect();
        for step in 0..left.len() {
            let is_used = |dim: &&usize| orders.iter().any(|order| order[step] == **dim);
            // The mirrored exchange of two ranks has the same partner.
            messages += left.iter().filter(is_used).map(|&dim| if extents[dim] > 2 { 2 } else { 1 }).sum::<usize>();
            pieces += 2 * len;
        }
    }
    (messages as f64, pieces as f64)
}
