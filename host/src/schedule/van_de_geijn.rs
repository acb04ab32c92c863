//! Van de Geijn's broadcast for long messages: scatter, then all-gather.
//!
//! Steps 2 ceil(log2 p), 2n(p-1)/p elements on the path: `2 ceil(log2 p) alpha + 2 (p-1)/p n beta` (Barnett,
//! Gupta, Payne, Shuler, van de Geijn and Watts, "Interprocessor collective communication library", SHPCC 1994; Thakur,
//! Rabenseifner and Gropp 2005, section 4.2). The scatter is binomial, the all-gather Bruck's, which takes any number
//! of ranks. A root other than rank 0 may hold up to 2^ceil(log2 p) - 1 blocks' worth of the scatter's path.

use super::binomial::push_scatter_of_output;
use super::bruck::push_all_gather;
use super::{Buffer, Layout, Local, Place, Schedule, Span};
use sumac_hal::ids::Rank;

/// Schedule a broadcast of `count` elements from `root`, which alone has an input.
pub fn broadcast(place: Place, count: usize, root: Rank) -> Schedule {
    let whole = Span::first(count);
    let input = if place.rank() == root { count } else { 0 };
    let mut schedule = Schedule::moving(place, Layout::moves(input, count, Some(0)));
    if place.rank() == root {
        schedule.move_locally(&[Local::copy(Buffer::Input.at(whole), Buffer::Output.at(whole))]);
    }
    push_scatter_of_output(&mut schedule, count, root);
    push_all_gather(&mut schedule, count);
    schedule
}
