//! Migration: moving to a tree that the controller offers to a job without one, at a call that all ranks agree on.
//!
//! ```text
//!   controller -- Offer ------> all ranks      resources for a tree have become available
//!   each rank  -- Pause(at) --> controller     "I begin no call from number `at` on until you decide"
//!   controller -- MoveAt(k) --> all ranks      the maximum of these numbers
//!              or Withdrawn
//! ```
//!
//! All ranks make the same calls in the same order, so call k is the same everywhere. No rank has begun it, and earlier
//! calls end on the path that was selected for them. Ranks that have not reached it go on meanwhile: a rank blocks only
//! if it is [`CALLS_AHEAD_MAX`] calls ahead before the decision arrives.
//!
//! Invariants:
//! - A call begins only below [`Migration::limit`]. Whoever changes it passes the number of calls that have begun, and
//!   no call begins meanwhile.
//! - Only the controller or a later view takes back a promise. An offer may arrive before this rank has entered the
//!   view that it belongs to; other ranks, which have, rely on the reply. If the controller disconnects before it
//!   decides, it may have told other ranks: the promise then holds until all ranks have exchanged what they were told,
//!   in a view change.
//! - All ranks that were told the call meet there, whatever has happened since, because some are already waiting. If
//!   the tree no longer exists, they find out together.

use super::decide::MigrationPromise;
use super::migration_vote::MigrationVote;
#[cfg(feature = "planted")]
use sumac_hal::planted::Bug;

/// How many calls a rank may begin between its promise and the decision.
pub(crate) const CALLS_AHEAD_MAX: u64 = 16;

/// No limit.
pub(crate) const NO_LIMIT: u64 = u64::MAX;

/// What a call must do before it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(feature = "snapshot"), expect(unreachable_pub, reason = "simulators of other crates name it"))]
pub enum CallStart {
    /// Begin.
    Begin,
    /// Migrate to the tree offered with this view, and begin there.
    Migrate(u32),
    /// Wait for the decision.
    Wait,
}

/// What a rank has promised about its calls, and what it was told.
#[derive(Debug)]
pub(crate) struct Migration {
    /// Calls from this number on may not begin.
    limit: u64,
    /// The call that migrates, until it does.
    move_at: Option<u64>,
    /// The view of the last promise.
    view: u32,
    /// The agreed call, from the decision until this rank has migrated, or has found that no rank can.
    call: Option<u64>,
    /// The controller that decided it has disconnected, so there is no tree.
    is_cut_off: bool,
    /// The controller has disconnected, and may have told other ranks the call.
    in_doubt: bool,
    /// The view of the next offer, if there is one.
    next: Option<u32>,
    #[cfg(feature = "planted")]
    bug: Option<Bug>,
}

impl Migration {
    pub(crate) const fn new() -> Self {
        Self {
            limit: NO_LIMIT,
            move_at: None,
            view: 0,
            call: None,
            is_cut_off: false,
            in_doubt: false,
            next: None,
            #[cfg(feature = "planted")]
            bug: None,
        }
    }

    /// Plant a bug.
    #[cfg(all(feature = "planted", feature = "snapshot"))]
    pub(crate) const fn plant(&mut self, bug: Bug) {
        self.bug = Some(bug);
    }

    /// Return the first call that may not begin.
    pub(crate) const fn limit(&self) -> u64 {
        self.limit
    }

    /// Return whether it is unknown if other ranks migrate.
    pub(crate) const fn in_doubt(&self) -> bool {
        self.in_doubt
    }

    /// Begin the vote at the agreed call, on the tree that is `offered` with a view; see [`MigrationVote`].
    pub(crate) const fn vote(&self, offered: u32, job_view: u32, trees: u32) -> MigrationVote {
        #[cfg_attr(not(feature = "planted"), expect(unused_mut, reason = "only to plant a bug"))]
        let mut vote = MigrationVote::new(offered, job_view, trees, self.is_cut_off);
        #[cfg(feature = "planted")]
        vote.plant(self.bug);
        vote
    }

    /// The controller offers a tree; `begun` calls have begun. Returns the first call that this rank holds back; `None`
    /// if [`Migration::moved`] or [`Migration::settle`] will return it later.
    pub(crate) const fn offer(&mut self, view: u32, begun: u64) -> Option<u64> {
        if self.is_binding() {
            self.next = Some(view);
            return None;
        }
        Some(self.promise(view, begun))
    }

    /// The controller decides: all ranks migrate at this call, if the offer is still the current one.
    pub(crate) const fn move_at(&mut self, view: u32, call: u64) {
        if self.is_promised() && !self.is_binding() && self.view == view {
            self.set_call(call);
        }
    }

    /// Return what a counted call must do. A result of `Migrate` counts as done.
    pub(crate) fn start_of(&mut self, call: u64) -> CallStart {
        if call < self.limit {
            return CallStart::Begin;
        }
        if self.move_at != Some(call) {
            return CallStart::Wait;
        }
        self.end();
        CallStart::Migrate(self.view)
    }

    /// This rank has migrated, or has found that it cannot. Returns the promise for the next offer, if there is one:
    /// its view, and the first call that this rank holds back.
    pub(crate) fn moved(&mut self, begun: u64) -> Option<(u32, u64)> {
        let next = self.next.take();
        (self.call, self.is_cut_off, self.in_doubt) = (None, false, false);
        if next.is_none() {
            self.end();
        }
        next.map(|view| (view, self.promise(view, begun)))
    }

    /// The controller disconnected. Returns true if this rank was promised a decision and has not received it: other
    /// ranks may have, so a view change must find out.
    pub(crate) fn controller_lost(&mut self) -> bool {
        (self.is_cut_off, self.next) = (self.call.is_some(), None);
        if sumac_hal::planted!(self, DoubtForgotten) {
            self.withdraw();
            return false;
        }
        self.in_doubt |= self.call.is_none() && self.is_promised();
        self.in_doubt
    }

    /// Return what this rank has promised, and what it was told.
    pub(crate) fn offered(&self) -> Option<MigrationPromise> {
        let promise = MigrationPromise { view: self.view, call: self.call, in_doubt: self.in_doubt };
        self.is_open().then_some(promise)
    }

    /// All ranks know now whether any was told the call for this offer: they migrate there, or none does. Returns the
    /// next promise, as [`Migration::moved`] does.
    fn settle(&mut self, view: u32, call: Option<u64>, begun: u64) -> Option<(u32, u64)> {
        if !self.is_open() || self.view != view {
            return None;
        }
        let Some(call) = call else { return self.moved(begun) };
        (self.is_cut_off, self.in_doubt) = (true, false);
        if self.call.is_none() {
            self.set_call(call);
        }
        None
    }

    /// The view has changed, and ranks have agreed on this about an offer. Returns the next promise, as
    /// [`Migration::moved`] does, and whether the view must change again: the controller may have disconnected after
    /// this rank had reported what it was told, so the ranks did not know that there was anything to settle.
    pub(crate) fn commit(&mut self, settled: Option<(u32, Option<u64>)>, begun: u64) -> (Option<(u32, u64)>, bool) {
        let promise = settled.and_then(|(view, call)| self.settle(view, call, begun));
        (promise, self.in_doubt)
    }

    /// The controller withdraws its offer.
    pub(crate) const fn withdraw(&mut self) {
        if self.is_binding() {
            self.next = None;
        } else {
            self.end();
        }
    }

    /// This rank has entered a view: an offer for an earlier one is void. A controller sends its decision before it
    /// gives any rank another view.
    pub(crate) const fn enter_view(&mut self, view: u32) {
        if !self.is_binding() && self.view < view {
            self.end();
        }
    }

    /// Whether this migration must be completed or settled before the next offer counts.
    const fn is_binding(&self) -> bool {
        self.call.is_some() || self.in_doubt
    }

    /// Return whether calls are held back.
    const fn is_promised(&self) -> bool {
        self.limit != NO_LIMIT
    }

    const fn is_open(&self) -> bool {
        self.call.is_some() || self.is_promised()
    }

    const fn promise(&mut self, view: u32, begun: u64) -> u64 {
        (self.view, self.move_at, self.limit) = (view, None, begun + CALLS_AHEAD_MAX);
        self.limit
    }

    const fn set_call(&mut self, call: u64) {
        (self.call, self.move_at, self.limit) = (Some(call), Some(call), call);
    }

    const fn end(&mut self) {
        (self.move_at, self.limit) = (None, NO_LIMIT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank that counts its calls.
    struct Rank {
        migration: Migration,
        begun: u64,
    }

    impl Rank {
        const fn new() -> Self {
            Self { migration: Migration::new(), begun: 0 }
        }

        /// Count a call, and return what it must do.
        fn begin(&mut self) -> CallStart {
            self.begun += 1;
            self.migration.start_of(self.begun - 1)
        }

        fn begin_all(&mut self, calls: u64) {
            (0..calls).for_each(|_| assert_eq!(self.begin(), CallStart::Begin));
        }

        fn offer(&mut self, view: u32) -> Option<u64> {
            self.migration.offer(view, self.begun)
        }

        fn moved(&mut self) -> Option<(u32, u64)> {
            self.migration.moved(self.begun)
        }

        fn settle(&mut self, view: u32, call: Option<u64>) -> Option<(u32, u64)> {
            self.migration.settle(view, call, self.begun)
        }
    }

    #[test]
    fn calls_are_held_after_the_margin_and_migrate_at_the_decided_call() {
        let mut rank = Rank::new();
        assert_eq!(rank.begin(), CallStart::Begin);
        assert_eq!(rank.offer(3), Some(1 + CALLS_AHEAD_MAX));
        rank.begin_all(CALLS_AHEAD_MAX);
        assert_eq!(rank.begin(), CallStart::Wait);
        rank.migration.withdraw();
        assert_eq!(rank.begin(), CallStart::Begin);
        let at = rank.offer(4).expect("at once");
        rank.migration.move_at(3, at);
        rank.migration.move_at(4, at + 5);
        rank.begin_all(CALLS_AHEAD_MAX + 5);
        assert_eq!(rank.begin(), CallStart::Migrate(4));
        assert_eq!(rank.moved(), None);
        assert_eq!(rank.begin(), CallStart::Begin);
        // A decision for a finished offer is ignored.
        rank.migration.move_at(4, 0);
        assert_eq!(rank.begin(), CallStart::Begin);
    }

    /// Other ranks migrate at the agreed call, whether or not this rank was in that view when it replied.
    #[test]
    fn offer_remains_valid_when_its_own_view_is_entered() {
        let mut rank = Rank::new();
        let at = rank.offer(1).expect("at once");
        rank.migration.enter_view(1);
        rank.migration.move_at(1, at);
        rank.begin_all(at);
        assert_eq!(rank.begin(), CallStart::Migrate(1));
        assert_eq!(rank.moved(), None);
        rank.offer(2);
        rank.migration.enter_view(3);
        rank.begin_all(2 * CALLS_AHEAD_MAX);
    }

    /// Some ranks have migrated already when the controller disconnects: the others do, too, and only then consider the
    /// next offer.
    #[test]
    fn decided_migration_outlives_its_controller() {
        let mut rank = Rank::new();
        let at = rank.offer(2).expect("at once");
        rank.migration.move_at(2, at);
        assert!(!rank.migration.is_cut_off);
        assert!(!rank.migration.controller_lost());
        assert!(rank.migration.is_cut_off);
        assert_eq!(rank.offer(5), None);
        // Nor does another view affect a decision.
        rank.migration.enter_view(5);
        rank.begin_all(at);
        assert_eq!(rank.begin(), CallStart::Migrate(2));
        assert_eq!(rank.moved(), Some((5, at + 1 + CALLS_AHEAD_MAX)));
    }

    /// The ranks have reported before the controller disconnected, so they settle nothing: the view changes again.
    #[test]
    fn doubt_after_the_report_outlives_the_view_change() {
        let mut rank = Rank::new();
        rank.offer(2);
        assert_eq!(rank.migration.offered().map(|reported| reported.in_doubt), Some(false));
        rank.migration.controller_lost();
        assert_eq!(rank.migration.commit(None, rank.begun), (None, true));
        assert_eq!(rank.migration.commit(Some((2, None)), rank.begun), (None, false));
    }

    /// The controller may have told other ranks the call. They report it, or all ranks go on.
    #[test]
    fn promise_outlives_its_controller_until_ranks_have_settled_it() {
        for decided in [None, Some(20)] {
            let mut rank = Rank::new();
            assert!(!rank.migration.controller_lost(), "there is none to be in doubt of");
            let at = rank.offer(2).expect("at once");
            assert!(rank.migration.controller_lost());
            let offered = rank.migration.offered();
            assert_eq!(offered, Some(MigrationPromise { view: 2, call: None, in_doubt: true }));
            rank.begin_all(at);
            assert_eq!(rank.begin(), CallStart::Wait);
            // Neither a later view nor the next controller settles it.
            rank.migration.enter_view(3);
            assert_eq!(rank.offer(4), None);
            rank.migration.move_at(4, at);
            assert_eq!(rank.settle(3, None), None);
            assert_eq!(rank.migration.start_of(at), CallStart::Wait);
            let after = rank.settle(2, decided);
            let Some(call) = decided else {
                assert_eq!(after, Some((4, at + 1 + CALLS_AHEAD_MAX)));
                assert_eq!(rank.migration.start_of(at), CallStart::Begin);
                continue;
            };
            assert_eq!((after, rank.migration.is_cut_off), (None, true));
            rank.begin_all(call - at - 1);
            assert_eq!(rank.begin(), CallStart::Migrate(2));
            assert_eq!(rank.moved(), Some((4, call + 1 + CALLS_AHEAD_MAX)));
        }
    }

    /// Other ranks may not have asked the controller for the tree yet.
    #[test]
    fn controller_lost_during_the_migration_is_not_asked() {
        let mut rank = Rank::new();
        let at = rank.offer(1).expect("at once");
        rank.migration.move_at(1, at);
        rank.begin_all(at);
        assert_eq!(rank.begin(), CallStart::Migrate(1));
        rank.migration.controller_lost();
        assert!(rank.migration.is_cut_off);
        assert_eq!(rank.offer(2), None);
        rank.migration.withdraw();
        assert_eq!(rank.moved(), None);
        rank.begin_all(2 * CALLS_AHEAD_MAX);
    }
}
