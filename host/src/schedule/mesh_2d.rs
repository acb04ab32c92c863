//! Lines along the dimensions of a mesh, whose ends are not linked, one after the other.
//!
//! The order of dimensions is that of [`super::ring_2d`] (van de Geijn's composition for meshes: Chan, Heimlich,
//! Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience", Concurrency and
//! Computation 19(13), 2007). Its form along each dimension: every message goes to a neighbour. In a reduce-scatter the
//! contributions to a block rise from the first rank of the line and descend from the last one, and meet at the block's
//! rank; in an all-gather each block goes outwards in both directions. No link carries more than d-1 of d blocks, and
//! in both together each carries d.
//!
//! | along d >= 3 ranks with n elements | steps | a link, at most | busiest sender | path through one port |
//! |---|---|---|---|---|
//! | reduce-scatter | d-1 | n(d-1)/d | n(d-1)/d | floor((3d-1)/2) n/d |
//! | all-gather | d-1 | n(d-1)/d | n(d+1)/d | max(d+1, floor((3d-2)/2)) n/d |
//!
//! Ranks in the middle of a line receive, or send, in both directions at once. Where they have one port for both, the
//! path is half as long again as that of a ring. Two ranks exchange halves.

use super::dimensions::{self, Order};
use super::lines::Form;
use super::{Place, Schedule, Shape};

/// Schedule an all-reduce of `count` elements: the reduce-scatter begins along the last dimension.
pub fn all_reduce(place: Place, count: usize, shape: Shape) -> Schedule {
    let dims = shape.dims(place.ranks());
    let order: Order = (0..dims.as_slice().len()).rev().map(|dim| (dim, Form::Mesh)).collect();
    dimensions::all_reduce(place, count, dims.as_slice(), &[order])
}

/// Schedule a reduce-scatter of `count` elements: rank r gets block r of p. It begins along the first dimension, so
/// that messages are runs of blocks.
pub fn reduce_scatter(place: Place, count: usize, shape: Shape) -> Schedule {
    let dims = shape.dims(place.ranks());
    dimensions::reduce_scatter(place, count, dims.as_slice(), &[first_to_last(dims.as_slice())])
}

/// Schedule an all-gather of `count` elements in all: rank r contributes block r of p. It ends along the first
/// dimension.
pub fn all_gather(place: Place, count: usize, shape: Shape) -> Schedule {
    let dims = shape.dims(place.ranks());
    dimensions::all_gather(place, count, dims.as_slice(), &[first_to_last(dims.as_slice())])
}

fn first_to_last(dims: &[u32]) -> Order {
    (0..dims.len()).map(|dim| (dim, Form::Mesh)).collect()
}
