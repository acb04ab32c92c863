//! Full meshes inside servers, and rings between them.
//!
//! On G servers of m ranks: a full-mesh reduce-scatter inside each server, a ring all-reduce of each rank's share among
//! the ranks of its place on all servers, and a full-mesh all-gather inside. So each rank sends only 2(n/m)(G-1)/G
//! elements between servers (the two levels of Jia et al., "Highly scalable deep learning training system with
//! mixed-precision", arXiv 1807.11205, with the exchange inside of Thakur, Rabenseifner and Gropp 2005).
//!
//! | p = G m | cost |
//! |---|---|
//! | [`all_reduce`] | 2G steps, two of them of m-1 messages; 2n(p-1)/p beta through one port, n(p-1)/p gamma |
//! | [`reduce_scatter`], [`all_gather`] | half of it; messages inside have a piece for each server |
//!
//! The servers of a grid are its rows, those of the last dimension. A line is servers of one rank each: a ring.

use super::dimensions::{self, Order};
use super::lines::Form;
use super::{Dims, Place, Schedule, Shape};

/// Schedule an all-reduce of `count` elements.
pub fn all_reduce(place: Place, count: usize, shape: Shape) -> Schedule {
    dimensions::all_reduce(place, count, &servers_of(shape.dims(place.ranks())), &[order()])
}

/// Schedule a reduce-scatter of `count` elements: rank r gets block r of p.
pub fn reduce_scatter(place: Place, count: usize, shape: Shape) -> Schedule {
    dimensions::reduce_scatter(place, count, &servers_of(shape.dims(place.ranks())), &[order()])
}

/// Schedule an all-gather of `count` elements in all: rank r contributes block r of p.
pub fn all_gather(place: Place, count: usize, shape: Shape) -> Schedule {
    dimensions::all_gather(place, count, &servers_of(shape.dims(place.ranks())), &[order()])
}

/// The number of servers, and of ranks on each.
pub(super) fn servers_of(dims: Dims) -> [u32; 2] {
    match *dims.as_slice() {
        [.., _, each] => [dims.ranks() / each, each],
        _ => [dims.ranks(), 1],
    }
}

fn order() -> Order {
    vec![(1, Form::FullMesh), (0, Form::Ring)]
}
