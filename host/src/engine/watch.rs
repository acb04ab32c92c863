//! Whether the view is in question, as far as this rank knows.

use super::error::Error;
use super::notices::Notices;
use crate::recovery::GracePeriod;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::wire::RankMask;

/// What calls the view into question: notices about it, and how long operations may still go on. Invariant: the grace
/// period belongs to the present view.
pub(super) struct Watch {
    pub(super) notices: Arc<Notices>,
    /// The number of view changes so far.
    epoch: u64,
    /// The grace period of operations since the view was called into question.
    grace: GracePeriod,
    /// The job's view, as this rank counts.
    job_view: u32,
}

impl Watch {
    pub(super) fn new(notices: Arc<Notices>) -> Self {
        Self { notices, epoch: 0, grace: GracePeriod::default(), job_view: 0 }
    }

    pub(super) const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The view has changed.
    pub(super) fn view_changed(&mut self) {
        self.epoch += 1;
        self.grace = GracePeriod::default();
    }

    /// Return the job's view, as the current controller counts.
    pub(super) fn job_view(&self) -> u32 {
        self.job_view.max(self.notices.job_view())
    }

    /// The job has reached this view.
    pub(super) fn enter_job_view(&mut self, view: u32) {
        self.job_view = self.job_view.max(view);
    }

    /// The controller has given this rank the tree of this view.
    pub(super) const fn set_job_view(&mut self, view: u32) {
        self.job_view = view;
    }

    /// Return whether the controller has reported the tree of this view lost.
    pub(super) fn is_tree_lost(&self) -> bool {
        self.notices.first_usable_view() > self.job_view()
    }

    /// Return whether the view must change. The loss of ranks that were excluded before is no reason.
    #[inline]
    pub(super) fn needs_view_change(&self, excluded: RankMask) -> bool {
        self.notices.has_news() && self.needs_view_change_now(excluded)
    }

    fn needs_view_change_now(&self, excluded: RankMask) -> bool {
        if !self.notices.needs_view_change(self.epoch) {
            return false;
        }
        let were_excluded =
            !excluded.is_empty() && self.notices.lost_ranks().into_iter().all(|rank| excluded.contains(rank));
        !were_excluded || self.notices.job_error().is_some()
    }

    /// If the view must change, count a poll of everything that other ranks have sent. Breaks when the grace period is
    /// over; otherwise returns how long until the next poll counts.
    pub(super) fn check_grace_period(&mut self, excluded: RankMask) -> ControlFlow<(), Option<Duration>> {
        if !self.needs_view_change(excluded) {
            return ControlFlow::Continue(None);
        }
        self.grace.poll(Instant::now()).map_or(ControlFlow::Break(()), |wait| ControlFlow::Continue(Some(wait)))
    }

    /// Return why the view must change, as reported by the controller.
    pub(super) fn loss_error(&self, excluded: RankMask) -> Error {
        let lost = || self.notices.lost_ranks().into_iter().find(|rank: &Rank| !excluded.contains(*rank));
        let dead = || lost().map_or(Error::PathLost, |rank| Error::RankLost { rank });
        self.notices.job_error().unwrap_or_else(dead)
    }
}
