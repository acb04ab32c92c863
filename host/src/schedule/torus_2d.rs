//! Rings along all dimensions of a torus at once, each on its share of the elements.
//!
//! Each of D shares goes along the dimensions as in [`super::ring_2d`], and begins with another one. So in each step a
//! rank sends along every dimension, and on a torus of equal dimensions each of its D links carries as much (Sack and
//! Gropp, "Collective algorithms for multiported torus networks", ACM TOPC 1(2), 2015; Jain and Sabharwal,
//! "Optimal bucket algorithms for large MPI collectives on torus interconnects", ICS 2010). Where dimensions differ,
//! shares meet in the longest one, and the links of the others are idle meanwhile.
//!
//! | p = a c | cost |
//! |---|---|
//! | [`all_reduce`] over two links | 2(a-1 + c-1) alpha + n(p-1)/p beta + n(p-1)/p gamma, a = c |
//! | the same through one port | 2n(p-1)/p beta |
//! | [`reduce_scatter`], [`all_gather`] | half of it; a share of a block is a piece of its own |

use super::dimensions::{self, Order};
use super::lines::Form;
use super::{Place, Schedule, Shape};

/// Schedule an all-reduce of `count` elements.
pub fn all_reduce(place: Place, count: usize, shape: Shape) -> Schedule {
    let dims = shape.dims(place.ranks());
    dimensions::all_reduce(place, count, dims.as_slice(), &orders(dims.as_slice()))
}

/// Schedule a reduce-scatter of `count` elements: rank r gets block r of p.
pub fn reduce_scatter(place: Place, count: usize, shape: Shape) -> Schedule {
    let dims = shape.dims(place.ranks());
    dimensions::reduce_scatter(place, count, dims.as_slice(), &orders(dims.as_slice()))
}

/// Schedule an all-gather of `count` elements in all: rank r contributes block r of p.
pub fn all_gather(place: Place, count: usize, shape: Shape) -> Schedule {
    let dims = shape.dims(place.ranks());
    dimensions::all_gather(place, count, dims.as_slice(), &orders(dims.as_slice()))
}

/// For each dimension of more than one rank, the order that begins there.
fn orders(dims: &[u32]) -> Vec<Order> {
    let used: Vec<usize> = (0..dims.len()).filter(|&dim| dims[dim] > 1).collect();
    let order = |first: usize| (0..used.len()).map(|turn| (used[(first + turn) % used.len()], Form::Ring)).collect();
    // A rank alone has one order, of no dimension.
    (0..used.len().max(1)).map(order).collect()
}
