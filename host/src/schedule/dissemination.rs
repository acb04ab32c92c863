//! The dissemination barrier, for groups without a tree.
//!
//! Steps ceil(log2 p), one message without payload per rank and step: `ceil(log2 p) alpha` (Hensgen, Finkel and
//! Manber, "Two algorithms for barrier synchronization", International Journal of Parallel Programming 17(1),
//! 1988). After step s a rank has heard, directly or not, from the 2^(s+1) - 1 ranks before it.

use super::{Buffer, Landing, Layout, Place, Recv, Schedule, Send, Span};

/// Schedule a barrier: no rank leaves before every rank has entered.
pub fn barrier(place: Place) -> Schedule {
    let mut schedule = Schedule::moving(place, Layout::moves(0, 0, Some(0)));
    let mut distance = 1;
    while distance < place.ranks() {
        let nothing = Buffer::Output.at(Span::EMPTY);
        let send = Send { peer: place.after(distance), from: nothing };
        let recv = Recv { peer: place.before(distance), sent_from: Buffer::Output, landing: Landing::copy(nothing) };
        schedule.exchange(&[send], &[recv]);
        // Beyond 2^31 ranks the distance would wrap; this ends the loop instead.
        distance = distance.saturating_mul(2);
    }
    schedule
}
