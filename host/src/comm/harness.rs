//! A harness for `comm::migration`: the production code, for simulators whose ranks do not block in threads.

use super::migration::{Admission, MigrationGate};
use crate::recovery::agreed_migration;

/// What a call must do before it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallStart {
    /// Begin.
    Begin,
    /// Migrate to the tree offered with this view, and begin there.
    Migrate(u32),
    /// Wait for the decision.
    Wait,
}

/// A rank's call counter and migration gate.
#[derive(Debug)]
pub struct Calls(MigrationGate);

impl Calls {
    /// Make a rank that has made no call.
    pub const fn new() -> Self {
        Self(MigrationGate::new())
    }

    /// Count the next call. Returns its number.
    pub fn call(&self) -> u64 {
        self.0.count_call()
    }

    /// Return what that call must do. A rank that is told to migrate does so, and reports that by [`Calls::moved`].
    pub fn begin(&self, call: u64) -> CallStart {
        match self.0.admission_of(call) {
            Some(Admission::Begin) => CallStart::Begin,
            Some(Admission::Migrate(view)) => CallStart::Migrate(view),
            _ => CallStart::Wait,
        }
    }

    /// The controller offers a tree. Returns the first call that this rank holds back; `None` if [`Calls::moved`] will
    /// return it later.
    pub fn offer(&self, view: u32) -> Option<u64> {
        self.0.offer(view)
    }

    /// All ranks migrate at this call.
    pub fn move_at(&self, view: u32, call: u64) {
        self.0.move_at(view, call);
    }

    /// The rank has migrated, or has found that it cannot. Returns the promise for the next offer, if there is one: its
    /// view, and the first call that this rank holds back.
    pub fn moved(&self) -> Option<(u32, u64)> {
        self.0.moved()
    }

    /// The controller withdraws its offer, if it has not decided.
    pub fn withdraw(&self) {
        self.0.withdraw();
    }

    /// The controller of all `ranks` of a job disconnected, and they have exchanged whether any of them was told the
    /// call: they migrate there, or none does.
    pub fn controller_lost(ranks: &[&Self]) {
        ranks.iter().for_each(|rank| _ = rank.0.controller_lost());
        let offered: Vec<_> = ranks.iter().map(|rank| rank.0.offered()).collect();
        for (rank, own) in ranks.iter().zip(&offered) {
            let Some(own) = own else { continue };
            if let Some(call) = agreed_migration(*own, offered.iter().flatten().copied()) {
                // There is no controller to promise anything.
                _ = rank.0.settle(own.view, call);
            }
        }
    }

    /// The rank has entered a view: an offer for an earlier one is void.
    pub fn enter_view(&self, view: u32) {
        self.0.enter_view(view);
    }

    /// Return the number of calls that have begun.
    pub fn begun(&self) -> u64 {
        self.0.begun()
    }
}

impl Default for Calls {
    fn default() -> Self {
        Self::new()
    }
}
