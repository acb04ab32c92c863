//! Jobs that have no tree and could have one: how they come into the queue, what they get when something is freed, and
//! when they give up.
//!
//! What its ranks have declined a job is not offered again before something has changed, and never on a device that one of
//! them could not attach to. Ranks that decline for no device's sake may just have been late: they get a few more chances,
//! each with a round of leases. What is offered is held for it, for a while.

use super::{Client, Job, State};
use crate::controller::limits::plain_reason;
use crate::controller::proto::ClientReply;
use crate::controller::queue::Standing;
use std::sync::Arc;
use std::time::Instant;
use sumac_hal::ids::Rank;

/// How often a job is offered a tree again that its ranks have declined for no device's sake.
const DECLINES_MAX: u32 = 8;

impl State {
    /// A rank says that the tree of a view is not taken: the job is without one from here on.
    pub(in crate::controller) fn decline(
        &mut self,
        (place, client): (Option<&(String, Rank)>, &Arc<Client>),
        view: u32,
        (device, why): (Option<String>, String),
    ) {
        let Some((name, rank)) = place else { return };
        let why = plain_reason(&why);
        let device = device.and_then(|device| self.devices.get(&device).cloned());
        let Some(job) = self.jobs.get_mut(name).filter(|job| job.has(*rank, client) && job.view == view) else {
            return;
        };
        if job.placement.is_none() || job.placing.is_some() {
            return;
        }
        let is_first = matches!(job.placement, Some(Ok(_)));
        // Those who only heard of it may be faster than the one whose reason it is.
        if is_first || device.is_some() {
            tracing::warn!(job = name, %rank, view, why, "tree is declined");
            if device.is_none() && job.declines < DECLINES_MAX {
                job.declines += 1;
                job.has_declined = true;
            }
            let placed = job.placement.replace(Err(format!("{rank} declined its tree: {why}")));
            job.declined.extend(device.filter(|device| !job.declined.iter().any(|known| Arc::ptr_eq(known, device))));
            if let Some(Ok(placement)) = placed {
                self.release(&placement);
            }
            let tried = Some(self.books.version());
            self.enter_queue(name, tried);
            self.pump();
        }
    }

    /// Offer a tree again to jobs whose ranks have declined one for no device's sake.
    pub(super) fn offer_again(&mut self) {
        let is_due = |job: &Job| job.has_declined && job.can_move();
        let due: Vec<String> = self.jobs.iter().filter(|(_, job)| is_due(job)).map(|(name, _)| name.clone()).collect();
        for name in &due {
            if let Some(job) = self.jobs.get_mut(name) {
                job.has_declined = false;
            }
            self.offer_soon(name);
        }
    }

    /// A device has come or gone: jobs that could not have a tree may have one, or the other way round.
    pub(super) fn reconsider(&mut self) {
        let without = self.jobs.iter().filter(|(_, job)| job.can_move() || job.waits_until.is_some());
        let names: Vec<String> = without.map(|(name, _)| name.clone()).collect();
        for name in names {
            match self.queue.get_mut(&name) {
                Some(entry) if entry.standing != Standing::Waits => entry.tried = None,
                _ => self.enter_queue(&name, None),
            }
        }
        self.pump();
    }

    /// Tell the ranks of jobs whose place in the queue has changed.
    pub(super) fn tell_queue(&mut self) {
        let places = self.queue.places(&self.books);
        for (name, job) in &mut self.jobs {
            let place = places.get(name).copied();
            if job.placement.is_some() && job.placing.is_none() && job.told != place {
                job.told = place;
                job.tell(&ClientReply::Queued(place));
            }
        }
    }

    /// Give up what was held or waited for until now, devices and ranks included. Returns when the next is due.
    pub(in crate::controller) fn expire_all(&mut self) -> Option<Instant> {
        let waits = self.expire_waits().into_iter().chain(self.expire_absent());
        waits.chain(self.expire_resuming()).chain(self.expire_forgone()).chain(self.expire_rests()).min()
    }

    /// Give up what was held or waited for until now. Returns when the next is due.
    pub(in crate::controller) fn expire_waits(&mut self) -> Option<Instant> {
        let now = self.now;
        let due = |job: &Job| job.waits_until.into_iter().chain(job.hold.map(|(_, until)| until)).min();
        let is_due = |job: &Job| due(job).is_some_and(|at| at <= now);
        let names: Vec<String> =
            self.jobs.iter().filter(|(_, job)| is_due(job)).map(|(name, _)| name.clone()).collect();
        for name in &names {
            self.give_up(name);
        }
        if !names.is_empty() {
            self.pump();
        }
        self.jobs.values().filter_map(due).min()
    }

    fn give_up(&mut self, name: &str) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        if let Some((group, _)) = job.hold.take() {
            tracing::warn!(job = name, "no rank has come for the tree that was offered: it is given away");
            self.books.free(group);
            if let Some(entry) = self.queue.get_mut(name) {
                entry.standing = Standing::Parked;
            }
        }
        if job.waits_until.take().is_none() {
            return;
        }
        tracing::warn!(job = name, tenant = job.tenant(), "the time to wait for a tree is over");
        self.seek_reason(name);
    }

    /// A job waits no more.
    pub(super) fn leave_queue(&mut self, name: &str) {
        if self.queue.remove(name) {
            self.books.touch();
        }
    }
}
