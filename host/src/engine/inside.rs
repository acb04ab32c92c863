//! The parts inside servers of an operation by the rails ([`super::hybrid`]), before and after those of the rails.
//!
//! Those of short messages are of one step, for the board of their server.
//!
//! Invariant: they are the same for all operations of as many elements by a path that are short alike, so the last ones
//! are kept.

use crate::exec::board::is_for_board;
use crate::schedule::{Place, Schedule, Span, hybrid, rab, server_step};
use sumac_hal::op::{OpDesc, Path};

/// Schedules the part of a rank of so many elements, on servers of so many ranks.
type Make = fn(Place, usize, u32) -> Schedule;

/// The parts of a rank inside its server.
#[derive(Debug)]
pub(super) struct Inside {
    path: Path,
    count: usize,
    is_short: bool,
    /// What runs before its rail reduces, and after it.
    pub(super) phases: [Schedule; 2],
    /// The elements that its rail reduces; `None` if it has none in the operation.
    pub(super) block: Option<Span>,
}

impl Inside {
    /// Schedule the parts of a rank on servers of `each` ranks.
    pub(super) fn new(path: Path, place: Place, (count, is_short): (usize, bool), each: u32) -> Self {
        let (make, block): ([Make; 2], _) = match path {
            Path::Rab => {
                let block = rab::is_leader(place.rank(), each).then(|| Span::first(count));
                let long: [Make; 2] = [rab::reduce_inside, rab::broadcast_inside];
                (if is_short { [server_step::reduce, server_step::broadcast] } else { long }, block)
            }
            _ => {
                let block = hybrid::block_of(place, count, each);
                let long: [Make; 2] = [hybrid::reduce_scatter_inside, hybrid::all_gather_inside];
                (if is_short { [server_step::reduce_scatter, server_step::all_gather] } else { long }, Some(block))
            }
        };
        Self { path, count, is_short, phases: make.map(|make| make(place, count, each)), block }
    }

    /// Return whether an operation on servers of `each` ranks is short: its parts fit the board of a server.
    pub(super) fn is_short(desc: &OpDesc, each: u32) -> bool {
        is_for_board(desc, Path::OneShot, each)
    }

    /// Return whether they are those of so many elements by a path.
    pub(super) fn is_of(&self, path: Path, count: (usize, bool)) -> bool {
        (self.path, self.count, self.is_short) == (path, count.0, count.1)
    }
}
