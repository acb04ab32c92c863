//! What `rab` does between ranks: inside servers a reduction to the leader and a broadcast, around the leaders' tree.
//!
//! On G servers of m ranks, the leader of a server is its first rank. Inside each server the ranks reduce to their
//! leader; the leaders all-reduce in one aggregation tree (`engine::hybrid`); the leaders broadcast inside their
//! servers. So one rank of a server sends n elements into the network, whatever m is, and the others exchange in shared
//! memory. UCC names it `rab`, reduce, all-reduce, broadcast (its layer CL/HIER); MPI libraries have it as leader-based
//! collectives (Mamidala, Kumar, De and Panda, "MPI collectives on modern multicore clusters: performance optimizations
//! and communication characteristics", CCGRID 2008; Open MPI's `han`).
//!
//! Each part is the cheapest of three algorithms over m ranks for this count, which all ranks know ([`reduction`],
//! [`broadcast`]):
//!
//! | part | for short messages | for long ones |
//! |---|---|---|
//! | [`reduce_inside`] | [`binomial::reduce`] | [`chain::reduce`] or [`double_tree::reduce`], in segments |
//! | [`broadcast_inside`] | [`binomial::broadcast`] | [`chain::broadcast`] or [`double_tree::broadcast`] |
//!
//! Invariant: with any all-reduce among the leaders between them, these are an all-reduce. The checker proves it.

use super::pipeline::LATENCY_ELEMENTS;
use super::{Algorithm, Buffer, Layout, Place, Schedule, Shape, binomial, chain, double_tree};
use sumac_hal::ids::Rank;

/// An algorithm from or to a root, by its name and the function that schedules it.
type Rooted = (&'static str, fn(Place, usize, Rank) -> Schedule);

const REDUCTIONS: [Rooted; 3] = [
    ("binomial::reduce", binomial::reduce),
    ("chain::reduce", chain::reduce),
    ("double_tree::reduce", double_tree::reduce),
];

const BROADCASTS: [Rooted; 3] = [
    ("binomial::broadcast", binomial::broadcast),
    ("chain::broadcast", chain::broadcast),
    ("double_tree::broadcast", double_tree::broadcast),
];

/// Return whether a rank is the leader of its server of `each` ranks.
pub const fn is_leader(rank: Rank, each: u32) -> bool {
    rank.0.is_multiple_of(each)
}

/// Return the name of the algorithm by which servers of `each` ranks reduce `count` elements.
pub fn reduction(count: usize, each: u32) -> &'static str {
    cheapest(&REDUCTIONS, count, each).0
}

/// Return the name of the algorithm by which servers of `each` ranks broadcast `count` elements.
pub fn broadcast(count: usize, each: u32) -> &'static str {
    cheapest(&BROADCASTS, count, each).0
}

/// Schedule the reduction inside servers of `each` ranks, of an all-reduce of `count` elements: each leader gets the
/// reduction over its server.
pub fn reduce_inside(place: Place, count: usize, each: u32) -> Schedule {
    let part = on_server(&REDUCTIONS, place, count, each);
    // The other ranks have an output, too, which they get later.
    let layout = Layout { output: count, ..*part.layout() };
    append(Schedule::reducing(place, layout), part, each)
}

/// Schedule the broadcast inside servers of `each` ranks, of an all-reduce of `count` elements: each leader has the
/// result, and the others get it.
pub fn broadcast_inside(place: Place, count: usize, each: u32) -> Schedule {
    let part = on_server(&BROADCASTS, place, count, each);
    append(Schedule::moving(place, Layout::moves(count, count, Some(0))), part, each)
}

/// The cheapest one for servers of `each` ranks, the first of equals. An element takes as long to combine as to move.
fn cheapest(of: &'static [Rooted; 3], count: usize, each: u32) -> &'static Rooted {
    let seconds = |(name, _): &Rooted| {
        let cost = Algorithm::named(name).map(|algorithm| algorithm.cost(each, Shape::Line, count));
        cost.map_or(f64::INFINITY, |cost| cost.seconds(LATENCY_ELEMENTS, 1.0, 1.0))
    };
    of.iter().min_by(|a, b| seconds(a).total_cmp(&seconds(b))).unwrap_or(&of[0])
}

/// The part of a rank among those of its server.
fn on_server(of: &'static [Rooted; 3], place: Place, count: usize, each: u32) -> Schedule {
    let (_, schedule) = cheapest(of, count, each);
    schedule(place.in_row(each), count, Rank(0))
}

/// Append the steps of a part over the ranks of a server, by their numbers among all. A leader's `Input` is no longer
/// what it broadcasts.
fn append(mut schedule: Schedule, part: Schedule, each: u32) -> Schedule {
    let (first, moves) = (schedule.place().rank().0 / each * each, !part.reduces());
    schedule.compute(part.len(), move |index, step| {
        part.read(index, step);
        step.sends.iter_mut().for_each(|send| send.peer.0 += first);
        step.recvs.iter_mut().for_each(|recv| recv.peer.0 += first);
        step.locals.retain(|local| !(moves && local.from.buffer == Buffer::Input));
    });
    schedule
}
