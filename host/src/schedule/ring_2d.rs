//! Rings along the dimensions of a grid, one after the other.
//!
//! On a grid of a rows and c columns: a ring reduce-scatter along rows, a ring all-reduce along columns, and a ring
//! all-gather along rows (Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a flash", arXiv
//! 1811.05233, where it is the 2D-torus all-reduce). Further dimensions have rings of their own.
//!
//! | p = a c | cost |
//! |---|---|
//! | [`all_reduce`] | 2(a-1 + c-1) alpha + 2n(p-1)/p beta + n(p-1)/p gamma |
//! | [`reduce_scatter`], [`all_gather`] | half of it |
//!
//! It sends as much as the ring ([`super::ring`]), in fewer steps. The shape of servers has rings inside them.

use super::dimensions::{self, Order};
use super::lines::Form;
use super::{Place, Schedule, Shape};

/// Schedule an all-reduce of `count` elements: the reduce-scatter begins along the last dimension.
pub fn all_reduce(place: Place, count: usize, shape: Shape) -> Schedule {
    let dims = shape.dims(place.ranks());
    let order: Order = (0..dims.as_slice().len()).rev().map(|dim| (dim, Form::Ring)).collect();
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
    (0..dims.len()).map(|dim| (dim, Form::Ring)).collect()
}
