//! What `hybrid` does between ranks: reduce-scatter and all-gather inside servers, around a tree for each rail.
//!
//! On G servers of m ranks, rail j is the ranks with place j on their servers. Inside each server a ring reduce-scatter
//! leaves block j of m at place j; each rail all-reduces its block in an aggregation tree of its own
//! (`engine::hybrid`), all rails at once; a ring all-gather inside the servers distributes the blocks. So each rank
//! sends n/m elements into the network, and each tree carries n/m. This is the decomposition of Cho et al.,
//! "BlueConnect: Decomposing all-reduce for deep learning on heterogeneous network hierarchy" (MLSys 2019), with
//! in-network trees as NCCL's CollNet and SHARP with several rails have them.
//!
//! Rings need no memory beside the result, which an exchange of all with all does.
//!
//! | part | cost |
//! |---|---|
//! | [`reduce_scatter_inside`] | m-1 steps; n(m-1)/m beta, n(m-1)/m gamma |
//! | [`all_gather_inside`] | m-1 steps; n(m-1)/m beta |
//!
//! Invariant: with any all-reduce of block j among rail j between them, these are an all-reduce. The checker proves it.
//!
//! The servers of a grid are its rows, those of the last dimension.

use super::dimensions::{all_gather_inside_of, reduce_scatter_inside_of};
use super::{Layout, Place, Schedule, Shape, Span, hierarchical_ring};

/// Return the number of servers and of ranks on each, at least two of both; `None` if the shape has no such servers.
pub fn servers(shape: Shape, ranks: u32) -> Option<[u32; 2]> {
    let servers = hierarchical_ring::servers_of(shape.dims(ranks));
    servers.iter().all(|&extent| extent > 1).then_some(servers)
}

/// Return the block of `count` elements that a rank's rail reduces, on servers of `each` ranks.
pub fn block_of(place: Place, count: usize, each: u32) -> Span {
    Span::of_block(count, each, place.rank().0 % each)
}

/// Schedule the reduce-scatter inside servers of `each` ranks, of an all-reduce of `count` elements: each rank gets the
/// reduction over its server of its block ([`block_of`]), at its place in the result.
pub fn reduce_scatter_inside(place: Place, count: usize, each: u32) -> Schedule {
    let mut schedule = Schedule::reducing(place, Layout::all_reduce(count));
    reduce_scatter_inside_of(&mut schedule, count, each);
    schedule
}

/// Schedule the all-gather inside servers of `each` ranks, of an all-reduce of `count` elements: each rank has its
/// block at its place in the result, and gets those of the others.
pub fn all_gather_inside(place: Place, count: usize, each: u32) -> Schedule {
    let mut schedule = Schedule::moving(place, Layout::moves(count, count, Some(0)));
    all_gather_inside_of(&mut schedule, count, each);
    schedule
}
