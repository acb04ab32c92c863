//! Where a rank is among its calls, and where it moves to a tree that is offered: what `sumac::comm` decides, for a
//! simulator whose ranks do not wait in threads.

use super::offer::{Offers, Turn};

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

    /// Return what that call has to do. Told to move, it has: the offer is over.
    pub fn begin(&self, call: u64) -> Begin {
        match self.0.turn_of(call) {
            Some(Turn::Go) => Begin::Go,
            Some(Turn::Move(view)) => Begin::Move(view),
            _ => Begin::Wait,
        }
    }

    /// The controller offers a tree. Returns from which call on this rank waits for more.
    ///
    /// # Panics
    /// Never: nobody here says that the controller is gone.
    pub fn offer(&self, view: u32) -> u64 {
        self.0.offer(view).expect("no move outlives a controller here")
    }

    /// All ranks move at this call.
    pub fn move_at(&self, view: u32, call: u64) {
        self.0.move_at(view, call);
    }

    /// Nobody moves.
    pub fn withdraw(&self) {
        self.0.withdraw();
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
