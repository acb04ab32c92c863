//! A rank's calls, and what it has promised about them.

use super::super::decide::agreed_migration;
use super::super::{self as recovery, CallStart, Migration};
use std::cell::{Cell, RefCell};

/// A rank's call counter, and what it has promised about its calls.
#[derive(Debug)]
pub struct Calls {
    begun: Cell<u64>,
    migration: RefCell<Migration>,
}

impl Calls {
    /// Make a rank that has made no call.
    pub const fn new() -> Self {
        Self { begun: Cell::new(0), migration: RefCell::new(Migration::new()) }
    }

    /// Count the next call. Returns its number.
    pub fn call(&self) -> u64 {
        self.begun.replace(self.begun.get() + 1)
    }

    /// The call that was counted last was refused, and other ranks do not know of it: the next one takes its number.
    pub fn refused(&self) {
        self.begun.set(self.begun.get() - 1);
    }

    /// Return what that call must do. A rank that is told to migrate does so, and reports that by [`Calls::moved`].
    pub fn begin(&self, call: u64) -> CallStart {
        self.migration.borrow_mut().start_of(call)
    }

    /// The controller offers a tree. Returns the first call that this rank holds back; `None` if [`Calls::moved`] will
    /// return it later.
    pub fn offer(&self, view: u32) -> Option<u64> {
        self.migration.borrow_mut().offer(view, self.begun())
    }

    /// All ranks migrate at this call.
    pub fn move_at(&self, view: u32, call: u64) {
        self.migration.borrow_mut().move_at(view, call);
    }

    /// The rank has migrated, or has found that it cannot. Returns the promise for the next offer, if there is one: its
    /// view, and the first call that this rank holds back.
    pub fn moved(&self) -> Option<(u32, u64)> {
        self.migration.borrow_mut().moved(self.begun())
    }

    /// The controller withdraws its offer, if it has not decided.
    pub fn withdraw(&self) {
        self.migration.borrow_mut().withdraw();
    }

    /// The controller of all `ranks` of a job disconnected, and they have exchanged whether any of them was told the
    /// call: they migrate there, or none does.
    pub fn controller_lost(ranks: &[&Self]) {
        ranks.iter().for_each(|rank| _ = rank.migration.borrow_mut().controller_lost());
        let offered: Vec<_> = ranks.iter().map(|rank| rank.migration.borrow().offered()).collect();
        for (rank, own) in ranks.iter().zip(&offered) {
            let Some(own) = own else { continue };
            if let Some(call) = agreed_migration(*own, offered.iter().flatten().copied()) {
                // There is no controller to promise anything.
                _ = rank.migration.borrow_mut().settle(own.view, call, rank.begun());
            }
        }
    }

    /// The rank has entered a view: an offer for an earlier one is void.
    pub fn enter_view(&self, view: u32) {
        self.migration.borrow_mut().enter_view(view);
    }

    /// Return the number of calls that have begun.
    pub fn begun(&self) -> u64 {
        self.begun.get()
    }
}

impl Default for Calls {
    fn default() -> Self {
        Self::new()
    }
}

/// Which of a rank's calls keep the path of an earlier view.
#[derive(Debug)]
pub struct CallPaths<C>(recovery::CallPaths<C>);

impl<C> Default for CallPaths<C> {
    fn default() -> Self {
        Self(recovery::CallPaths::default())
    }
}

impl<C> CallPaths<C> {
    /// The view has changed. Any rank had begun at most `begun` calls, and `before` is what they selected paths by.
    pub fn view_changed(&mut self, begun: u64, before: C) {
        self.0.view_changed(begun, before);
    }

    /// Return the path of a call that runs as in an earlier view; `None` if the present view selects it. `select`
    /// returns the path in a view, or `None` if that is the tree.
    pub fn select<P>(&mut self, call: u64, select: impl FnMut(&C) -> Option<P>) -> Option<P> {
        self.0.select(call, select)
    }
}
