//! The life cycle of a job's tree: planned, reserved, released.
//!
//! ```text
//!   request_tree: planned, fits? - yes -> claimed -> Draft -> reserved on devices -> finish_reservation -> placed
//!            | no                                  (state unlocked)                     | one refuses
//!            v                                                                          v
//!   runs without a tree, queued if waiting could help <-------------------------- rolled back on all
//!            | resources are freed or added (serve_queue)
//!            v
//!   claimed and offered to its ranks or, while joining still waits, reserved at once
//! ```

use super::{Job, State};
use crate::controller::ControllerConfig;
use crate::controller::admit::{GroupIds, Placement};
use crate::controller::proto::ClientReply;
use crate::controller::queue::{BlockedOn, EntryStatus, QueueEntry};
use crate::controller::resources::Needs;
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::ids::{Epoch, GroupId, TreeId};
use sumac_hal::planted;

/// How much is kept of the reason for having no tree, in characters: it may list many excluded devices.
const REASON_STORED_CHARS_MAX: usize = 1000;

/// A tree that is claimed in the ledger and about to be reserved on its devices.
#[derive(Debug)]
pub(in crate::controller) struct Draft {
    pub(super) job: String,
    pub(super) placement: Placement,
    pub(super) order: Order,
    pub(super) tries: u32,
    /// The version of the set of devices that it was planned with.
    pub(super) devices_version: u64,
}

impl Draft {
    pub(super) const fn new(job: String, placement: Placement, order: Order, tries: u32, devices_version: u64) -> Self {
        Self { job, placement, order, tries, devices_version }
    }
}

/// What a job could wait for, and the minimum that it needs.
pub(super) type Wait = (BlockedOn, Needs);

/// Why there is no tree, and whether waiting could help.
#[derive(Debug)]
pub(super) struct NoTree {
    pub(super) why: String,
    /// What the job could wait for before it starts.
    pub(super) wait: Option<Wait>,
    /// What it could wait for while it runs without a tree.
    pub(super) wait_running: Option<Wait>,
}

impl NoTree {
    pub(super) const fn permanent(why: String) -> Self {
        Self { why, wait: None, wait_running: None }
    }

    pub(super) fn temporary(why: String, wait: Option<Wait>) -> Self {
        Self { why, wait_running: wait.clone(), wait }
    }
}

impl State {
    pub(super) fn next_ids(&mut self, name: &str) -> GroupIds {
        let (mut group, epoch) = self.next_view.take();
        if planted!(self, SameEpoch) {
            let number = name.bytes().fold(0, |sum: u32, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
            return self.ids(GroupId(number), epoch);
        }
        if planted!(self, NumbersReused) {
            group.0 %= 256;
        }
        let job = self.jobs.get(name);
        // Views count from 0 and the epochs of their groups from 1. The epoch wraps after 65535 views, and still
        // differs from the previous one.
        let counter = job.map_or(1, |job| job.view + u32::from(job.placement.is_some()) + 1) as u16;
        self.ids(group, Epoch { counter, ..epoch })
    }

    pub(super) const fn ids(&self, group: GroupId, epoch: Epoch) -> GroupIds {
        GroupIds {
            group,
            tree: TreeId(group.0),
            epoch,
            entropy: self.entropy,
            #[cfg(feature = "planted")]
            bug: self.bug,
        }
    }

    /// There is no tree for a job. Queue it if waiting could help, and start it without a tree unless joining waits.
    /// `tried` is the ledger's version that was tried, if any.
    pub(super) fn proceed_without_tree(
        &mut self,
        config: &ControllerConfig,
        name: &str,
        none: NoTree,
        tried: Option<u64>,
    ) {
        let now = self.now;
        let Some(job) = self.jobs.get_mut(name) else { return };
        let (view, is_new, why) = (job.view, job.placement.is_none(), none.why);
        let terms = |job: &Job| job.first().map(|member| member.request.terms.clone()).unwrap_or_default();
        let wait = Duration::from_millis(u64::from(terms(job).wait_ms));
        let until = *job.join_deadline.get_or_insert_with(|| now + wait);
        let can_join_later = is_new && now < until;
        let can_wait = job.members.values().all(|member| member.request.terms.accepts_migration) || can_join_later;
        tracing::warn!(job = name, view, why, "no tree");
        let wait = if can_join_later { none.wait } else { none.wait_running };
        match wait.filter(|_| can_wait) {
            Some(wait) => {
                if can_join_later {
                    (job.join_waits_until, job.placing) = (Some(until), None);
                }
                self.insert_in_queue(name, wait, tried);
                if can_join_later {
                    // Resources may have been freed since the plan was made.
                    self.serve_queue();
                    self.report_queue_positions();
                    return;
                }
            }
            None => self.leave_queue(name),
        }
        self.publish_placement(config, name, Err(why));
        self.serve_queue();
        self.report_queue_positions();
    }

    /// Queue a job that has no tree. `tried` is the ledger's version that was tried, if any.
    pub(super) fn insert_in_queue(&mut self, name: &str, (blocked_on, wanted): Wait, tried: Option<u64>) {
        let Some(job) = self.jobs.get(name) else { return };
        let communicator = job.first().map_or(name, |member| member.request.communicator()).to_owned();
        let (tenant, ticket) = (job.tenant().to_owned(), self.queue.ticket());
        let status = EntryStatus::Waiting;
        self.queue.enter(
            name,
            QueueEntry {
                tenant,
                communicator,
                ticket,
                skips: 0,
                blocked_on,
                wanted,
                status,
                tried_version: tried,
                refused_version: None,
            },
        );
    }

    /// Publish a job's tree, or the reason why there is none, to its ranks.
    pub(super) fn publish_placement(
        &mut self,
        config: &ControllerConfig,
        name: &str,
        placed: Result<Placement, String>,
    ) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        (job.placing, job.join_waits_until) = (None, None);
        let is_new = job.placement.is_none();
        let mut placed = placed;
        if let Ok(placement) = &mut placed
            && is_new
        {
            job.trees = std::mem::take(&mut placement.trees);
        }
        job.placement = Some(placed.map_err(|why| why.chars().take(REASON_STORED_CHARS_MAX).collect()));
        if is_new {
            job.declare();
            // The tree that it was queued for may reduce in a different order than the one declared just now.
            if let Some(entry) = self.queue.get(name).filter(|entry| entry.status == EntryStatus::Waiting) {
                let tried = entry.tried_version;
                self.enqueue(name, tried);
            }
        }
        let place = self.queue.position(name, &self.ledger);
        let Some(job) = self.jobs.get_mut(name) else { return };
        let shape = job.shape((config, &self.planning.index));
        job.shape = Some(shape);
        if is_new {
            return job.send_memberships(&mut self.output, (config, shape), place, ClientReply::Joined);
        }
        if let Some(placed) = &job.placement {
            self.recoveries.end_with_tree(name, placed, self.now);
        }
        job.view += 1;
        (job.tree_suspected, job.is_moving, job.offer) = (false, false, None);
        job.clear_replan_requests();
        let view = job.view;
        job.send_memberships(&mut self.output, (config, shape), place, |membership| ClientReply::Replanned {
            view,
            membership,
        });
    }

    /// All ranks have requested a replacement for their tree.
    pub(super) fn replace_tree(&mut self, name: &str) {
        self.drop_lost_tree(name);
        self.request_tree(name, 0);
        self.serve_queue();
    }
}
