//! Where a rank is among its calls, and where it moves to a tree that is offered: what `sumac::comm` decides, for a
//! simulator whose ranks do not wait in threads.

use super::offer::{Offers, Turn};
use crate::recovery::settled;

/// What a call has to do before it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// Begin.
    Go,
    /// Move to the tree that is offered with this view, and begin there.
    Move(u32),
    /// Wait: it is not said yet where to move.
    Wait,
}

/// A rank's calls.
#[derive(Debug)]
pub struct Calls(Offers);

impl Calls {
    /// Begin before the first call.
    pub const fn new() -> Self {
        Self(Offers::new())
    }

    /// The next call is made. Returns its number.
    pub fn call(&self) -> u64 {
        self.0.count()
    }

    /// Return what that call has to do. Told to move, it does, and says when it has.
    pub fn begin(&self, call: u64) -> Begin {
        match self.0.turn_of(call) {
            Some(Turn::Go) => Begin::Go,
            Some(Turn::Move(view)) => Begin::Move(view),
            _ => Begin::Wait,
        }
    }

    /// The controller offers a tree. Returns from which call on this rank waits for more; `None` if it says so later, by
    /// [`Calls::moved`].
    pub fn offer(&self, view: u32) -> Option<u64> {
        self.0.offer(view)
    }

    /// All ranks move at this call.
    pub fn move_at(&self, view: u32, call: u64) {
        self.0.move_at(view, call);
    }

    /// The rank has moved, or has seen that it can't. Returns what was offered meanwhile: its view, and from which call on
    /// this rank waits.
    pub fn moved(&self) -> Option<(u32, u64)> {
        self.0.moved()
    }

    /// Nobody moves, if nobody was told where.
    pub fn withdraw(&self) {
        self.0.withdraw();
    }

    /// The controller of all `ranks` of a job is gone, and they have found out of each other whether any of them was told
    /// where to move: they do, or nobody does.
    pub fn lose_controller(ranks: &[&Self]) {
        ranks.iter().for_each(|rank| _ = rank.0.lose_controller());
        let offered: Vec<_> = ranks.iter().map(|rank| rank.0.offered()).collect();
        for (rank, own) in ranks.iter().zip(&offered) {
            let Some(own) = own else { continue };
            if let Some(call) = settled(*own, offered.iter().flatten().copied()) {
                // Nobody offers anything.
                _ = rank.0.settle(own.view, call);
            }
        }
    }

    /// The rank is at that view now: an offer of an earlier one is void.
    pub fn outdate(&self, view: u32) {
        self.0.outdate(view);
    }

    /// Return how many calls have begun.
    pub fn begun(&self) -> u64 {
        self.0.begun()
    }
}

impl Default for Calls {
    fn default() -> Self {
        Self::new()
    }
}
