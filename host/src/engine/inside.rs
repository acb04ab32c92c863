//! The parts inside servers of an operation by the rails ([`super::hybrid`]), before and after those of the rails.
//!
//! Invariant: they are the same for all operations of as many elements by a path, so the last ones are kept.

use crate::schedule::{Place, Schedule, Span, hybrid, rab};
use sumac_hal::op::Path;

/// Schedules the part of a rank of so many elements, on servers of so many ranks.
type Make = fn(Place, usize, u32) -> Schedule;

/// The parts of a rank inside its server.
#[derive(Debug)]
pub(super) struct Inside {
    path: Path,
    count: usize,
    /// What runs before its rail reduces, and after it.
    pub(super) phases: [Schedule; 2],
    /// The elements that its rail reduces; `None` if it has none in the operation.
    pub(super) block: Option<Span>,
}

impl Inside {
    /// Schedule the parts of a rank on servers of `each` ranks.
    pub(super) fn new(path: Path, place: Place, count: usize, each: u32) -> Self {
        let (make, block): ([Make; 2], _) = match path {
            Path::Rab => {
                let block = rab::is_leader(place.rank(), each).then(|| Span::first(count));
                ([rab::reduce_inside, rab::broadcast_inside], block)
            }
            _ => {
                let block = hybrid::block_of(place, count, each);
                ([hybrid::reduce_scatter_inside, hybrid::all_gather_inside], Some(block))
            }
        };
        Self { path, count, phases: make.map(|make| make(place, count, each)), block }
    }

    /// Return whether they are those of so many elements by a path.
    pub(super) fn is_of(&self, path: Path, count: usize) -> bool {
        (self.path, self.count) == (path, count)
    }
}
