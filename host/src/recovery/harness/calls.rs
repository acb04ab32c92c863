//! A rank's calls, and what it has promised about them.

use super::super::decide::MigrationPromise;
use super::super::{self as recovery, CallStart, Migration, MigrationVote};
use super::Change;
use std::cell::{Cell, RefCell};
#[cfg(feature = "planted")]
use sumac_hal::planted::Bug;

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

    /// Plant a bug.
    #[cfg(feature = "planted")]
    pub fn plant(&self, bug: Bug) {
        self.migration.borrow_mut().plant(bug);
    }

    /// Return what this rank has promised a controller that offered a tree, and what it was told.
    pub(super) fn offered(&self) -> Option<MigrationPromise> {
        self.migration.borrow().offered()
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

    /// The controller disconnected. Returns whether the view must change, because other ranks may have been told the
    /// call where all migrate.
    pub fn controller_lost(&self) -> bool {
        self.migration.borrow_mut().controller_lost()
    }

    /// The view has changed, as [`Action::Commit`](super::Action::Commit) says. Returns the promise for the next offer,
    /// as [`Calls::moved`] does, and whether the view must change again.
    pub fn commit(&self, change: &Change) -> (Option<(u32, u64)>, bool) {
        self.migration.borrow_mut().commit(change.0.agreed().1, self.begun())
    }

    /// Begin the vote at the call where all ranks migrate, on the tree that is `offered` with a view. This rank knows
    /// `job_view`, and has recovered or migrated from this many trees.
    pub fn vote(&self, offered: u32, job_view: u32, trees: u32) -> MigrationVote {
        self.migration.borrow().vote(offered, job_view, trees)
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
