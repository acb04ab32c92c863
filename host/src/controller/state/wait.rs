//! Jobs without a tree that could have one: how they enter the queue, when they are reconsidered, and when they give
//! up.
//!
//! A tree that the ranks declined is not offered again until something has changed, and never on a device that one of
//! them could not attach to. Ranks that decline without naming a device may just have been late, so they get a few more
//! offers, one per round of lease renewals. Resources on offer are claimed for the job for a limited time.

use super::{Job, State};
use crate::controller::limits::sanitize_reason;
use crate::controller::output::ConnId;
use crate::controller::proto::ClientReply;
use crate::controller::queue::EntryStatus;
use std::sync::Arc;
use sumac_hal::ids::Rank;
use sumac_hal::time::Instant;

/// How many more offers a job gets after declining without naming a device.
const DECLINES_MAX: u32 = 8;

impl State {
    /// A rank declines the tree of a view: the job runs without one from now on.
    pub(in crate::controller) fn decline(
        &mut self,
        (place, client): (Option<&(String, Rank)>, ConnId),
        view: u32,
        (device, why): (Option<String>, String),
    ) {
        let Some((name, rank)) = place else { return };
        let why = sanitize_reason(&why);
        let device = device.and_then(|device| self.connected(&device).cloned());
        let Some(job) = self.jobs.get_mut(name).filter(|job| job.has(*rank, client) && job.view == view) else {
            return;
        };
        if job.placement.is_none() || job.placing.is_some() {
            return;
        }
        let is_first = matches!(job.placement, Some(Ok(_)));
        // Ranks that only heard of the failure may be faster than the one that names the device.
        if is_first || device.is_some() {
            tracing::warn!(job = name, %rank, view, why, "tree declined by a rank");
            if device.is_none() && job.decline_count < DECLINES_MAX {
                job.decline_count += 1;
                job.offer_again_due = true;
            }
            let placed = job.placement.replace(Err(format!("{rank} declined its tree: {why}")));
            job.declined_devices
                .extend(device.filter(|device| !job.declined_devices.iter().any(|known| Arc::ptr_eq(known, device))));
            if let Some(Ok(placement)) = placed {
                self.release(&placement);
            }
            let tried = Some(self.ledger.version());
            self.enqueue(name, tried);
            self.serve_queue();
        }
    }

    /// Offer a tree again to jobs that declined one without naming a device.
    pub(super) fn offer_again(&mut self) {
        let is_due = |job: &Job| job.offer_again_due && job.can_take_offer();
        let due: Vec<String> = self.jobs.iter().filter(|(_, job)| is_due(job)).map(|(name, _)| name.clone()).collect();
        for name in &due {
            if let Some(job) = self.jobs.get_mut(name) {
                job.offer_again_due = false;
            }
            self.offer_soon(name);
        }
    }

    /// The set of eligible devices has changed: reconsider all jobs without a tree.
    pub(super) fn reconsider(&mut self) {
        let without = self.jobs.iter().filter(|(_, job)| job.can_take_offer() || job.join_waits_until.is_some());
        let names: Vec<String> = without.map(|(name, _)| name.clone()).collect();
        for name in names {
            let mut entry = self.queue.get_mut(&name);
            if let Some(entry) = &mut entry {
                entry.refused_version = None;
            }
            match entry {
                Some(entry) if entry.status != EntryStatus::Waiting => entry.tried_version = None,
                _ => self.enqueue(&name, None),
            }
        }
        self.serve_queue();
    }

    /// Notify the ranks of jobs whose position in the queue has changed.
    pub(super) fn report_queue_positions(&mut self) {
        let positions = self.queue.positions(&self.ledger);
        for (name, job) in &mut self.jobs {
            let place = positions.get(name).copied();
            if job.placement.is_some() && job.placing.is_none() && job.reported_position != place {
                job.reported_position = place;
                job.broadcast(&mut self.output, &ClientReply::Queued(place));
            }
        }
    }

    /// Handle all deadlines of jobs and devices that have passed. Returns the next one.
    pub(in crate::controller) fn expire_all(&mut self) -> Option<Instant> {
        let waits = self.expire_waits().into_iter().chain(self.expire_reconnect_grace());
        waits
            .chain(self.expire_resuming())
            .chain(self.expire_host_devices())
            .chain(self.expire_abandoned_replans())
            .chain(self.expire_backoffs())
            .chain(self.expire_exclusions())
            .chain(self.advance_drains())
            .min()
    }

    /// Expire offers and waits for a tree. Returns the next deadline.
    pub(in crate::controller) fn expire_waits(&mut self) -> Option<Instant> {
        let now = self.now;
        let due = |job: &Job| job.join_waits_until.into_iter().chain(job.offer_claim.map(|(_, until)| until)).min();
        let is_due = |job: &Job| due(job).is_some_and(|at| at <= now);
        let names: Vec<String> =
            self.jobs.iter().filter(|(_, job)| is_due(job)).map(|(name, _)| name.clone()).collect();
        for name in &names {
            self.give_up(name);
        }
        if !names.is_empty() {
            self.serve_queue();
        }
        self.jobs.values().filter_map(due).min()
    }

    fn give_up(&mut self, name: &str) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        if let Some((group, _)) = job.offer_claim.take() {
            tracing::warn!(job = name, "the ranks did not accept the offered tree in time; releasing its resources");
            self.ledger.free(group);
            if let Some(entry) = self.queue.get_mut(name) {
                entry.status = EntryStatus::Parked;
            }
        }
        if job.join_waits_until.take().is_none() {
            return;
        }
        tracing::warn!(job = name, tenant = job.tenant(), "timed out waiting for a tree");
        self.request_reason(name);
    }

    /// Remove a job from the queue.
    pub(super) fn leave_queue(&mut self, name: &str) {
        if self.queue.remove(name) {
            self.ledger.bump_version();
        }
    }
}
