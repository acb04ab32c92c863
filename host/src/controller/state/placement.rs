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
use crate::controller::admit::{GroupIds, Placement, PlacementRequest, ReservationFailure};
use crate::controller::device::{DeviceError, DeviceSession, PendingReply};
use crate::controller::proto::{ClientReply, JoinRequest};
use crate::controller::queue::{BlockedOn, EntryStatus, Queue, QueueEntry};
use crate::controller::resources::Needs;
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ctrl::{Order, Refusal};
use sumac_hal::ids::{Epoch, GroupId, TreeId};

/// How many trees are tried for a job, each without the devices that did not respond before.
const TRIES_MAX: u32 = 4;

/// How much is kept of the reason for having no tree, in characters: it may list many excluded devices.
const REASON_STORED_CHARS_MAX: usize = 1000;

/// A tree that is claimed in the ledger and about to be reserved on its devices.
#[derive(Debug)]
pub(in crate::controller) struct Draft {
    job: String,
    placement: Placement,
    order: Order,
    tries: u32,
    /// The version of the set of devices that it was planned with.
    devices_version: u64,
}

impl Draft {
    pub(super) const fn new(job: String, placement: Placement, order: Order, tries: u32, devices_version: u64) -> Self {
        Self { job, placement, order, tries, devices_version }
    }

    /// Reserve the tree on its devices. Call it with the state unlocked.
    pub(in crate::controller) fn reserve(&self, config: &ControllerConfig) -> Result<(), ReservationFailure> {
        self.placement.reserve(config, self.order)
    }

    /// The parts needed to reserve step by step.
    #[cfg(feature = "snapshot")]
    pub(in crate::controller) const fn parts(&self) -> (&Placement, Order) {
        (&self.placement, self.order)
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
        let (group, epoch) = self.next_view.take();
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
        let (tenant, ticket) = (job.tenant().to_owned(), self.queue.ticket());
        let status = EntryStatus::Waiting;
        let (tried_version, refused_version) = (tried, None);
        self.queue.enter(
            name,
            QueueEntry { tenant, ticket, skips: 0, blocked_on, wanted, status, tried_version, refused_version },
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
        if is_new {
            return job.send_memberships(config, place, ClientReply::Joined);
        }
        if let Some(placed) = &job.placement {
            self.recoveries.end_with_tree(name, placed, self.now);
        }
        job.view += 1;
        (job.tree_suspected, job.is_moving, job.offer) = (false, false, None);
        job.clear_replan_requests();
        let view = job.view;
        job.send_memberships(config, place, |membership| ClientReply::Replanned { view, membership });
    }

    /// Handle the result of reserving a draft. Returns the next draft to try.
    pub(in crate::controller) fn finish_reservation(
        &mut self,
        config: &ControllerConfig,
        mut draft: Draft,
        reserved: Result<(), ReservationFailure>,
    ) -> Option<Draft> {
        let (name, group) = (draft.job.clone(), draft.placement.group);
        let is_wanted = self.jobs.get(&name).is_some_and(|job| job.placing == Some(group));
        let failure = match reserved {
            Ok(()) if is_wanted => {
                let placement = &draft.placement;
                let (levels, zero_copy) = (placement.levels, placement.zero_copy_ranks());
                let devices: Vec<&str> = placement.nodes.iter().map(|node| node.device.name()).collect();
                tracing::info!(job = name, %group, levels, ?devices, zero_copy, "tree reserved");
                self.leave_queue(&name);
                self.publish_placement(config, &name, Ok(draft.placement));
                self.serve_queue();
                return None;
            }
            Ok(()) => {
                // The job no longer needs it.
                self.release(&draft.placement);
                self.serve_queue();
                return None;
            }
            Err(failure) => failure,
        };
        self.ledger.roll_back(group);
        let next = if is_wanted { self.retry(config, &name, &mut draft, failure) } else { Ok(None) };
        let next = match next {
            Ok(Some(())) => Some(draft),
            Ok(None) => None,
            Err(RetryOutcome::RequestTree) => {
                self.request_tree(&name, draft.tries + 1);
                None
            }
            Err(RetryOutcome::Without(none)) => {
                let tried = Some(self.ledger.version());
                self.proceed_without_tree(config, &name, none, tried);
                if let Some(entry) = self.queue.get_mut(&name) {
                    entry.refused_version = tried;
                }
                if draft.devices_version != self.planning.devices_version {
                    // A device that connected meanwhile found the job busy.
                    self.reconsider();
                }
                None
            }
        };
        self.serve_queue();
        next
    }

    /// Decide what to do about a failed reservation.
    fn retry(
        &mut self,
        config: &ControllerConfig,
        name: &str,
        draft: &mut Draft,
        ReservationFailure { index, error, slots_used }: ReservationFailure,
    ) -> Result<Option<()>, RetryOutcome> {
        let Some(job) = self.jobs.get(name) else { return Ok(None) };
        let placement = &mut draft.placement;
        let (device, is_zero_copy) = (placement.nodes[index].device.clone(), placement.has_zero_copy(index));
        let refused = format!("device {}: {error}", device.name());
        let refusal = match error {
            DeviceError::Refused(refusal) => refusal,
            DeviceError::Unreachable if draft.tries + 1 < TRIES_MAX => {
                self.unresponsive.insert(device.key());
                return Err(RetryOutcome::RequestTree);
            }
            _ => return Err(RetryOutcome::Without(NoTree::permanent(refused))),
        };
        if matches!(refusal, Refusal::NoZeroCopy(_) | Refusal::NoRedoMemory { .. }) && is_zero_copy {
            let requests: Vec<&JoinRequest> = job.members.values().map(|member| &*member.request).collect();
            let request = PlacementRequest { tenant: job.tenant(), requests: &requests, pinned: &[] };
            let fitted = placement.refit_with_packets((index, &refusal.to_string()), config, &self.ledger, request);
            fitted.map_err(|why| RetryOutcome::Without(NoTree::permanent(why)))?;
            let claimed = self.ledger.claim(placement.claim(job.tenant()));
            claimed.map_err(|short| RetryOutcome::Without(NoTree::permanent(short.to_string())))?;
            return Ok(Some(()));
        }
        let is_short = matches!(
            refusal,
            Refusal::NoEntry { .. }
                | Refusal::NoChildren { .. }
                | Refusal::NoSlots { .. }
                | Refusal::NoMemory { .. }
                | Refusal::NoRedoMemory { .. }
        );
        let wait = is_short.then(|| (BlockedOn::Devices, placement.minimum_needs()));
        if is_short {
            let need = placement.claim(job.tenant()).needs[index].1.slots;
            self.mark_crowded(&device, need, slots_used);
        }
        Err(RetryOutcome::Without(NoTree::temporary(refused, wait)))
    }

    /// All ranks have requested a replacement for their tree.
    pub(super) fn replace_tree(&mut self, name: &str) {
        self.drop_lost_tree(name);
        self.request_tree(name, 0);
        self.serve_queue();
    }

    /// Release a tree on all its devices and in the ledger. Returns the outstanding responses, to wait for if needed.
    pub(super) fn release(&mut self, placement: &Placement) -> Vec<(Arc<DeviceSession>, PendingReply)> {
        self.ledger.free(placement.group);
        // Devices may have reconnected since.
        let devices = placement.nodes.iter().filter_map(|node| self.session(&node.device.key()));
        devices.filter_map(|device| placement.release_on(&device).map(|asked| (device, asked))).collect()
    }

    /// Release all trees and disconnect all ranks, for shutdown. Returns the outstanding responses.
    pub(in crate::controller) fn release_all(&mut self) -> Vec<(Arc<DeviceSession>, PendingReply)> {
        self.queue = Queue::default();
        let (jobs, resuming) = (std::mem::take(&mut self.jobs), std::mem::take(&mut self.resuming));
        // From here on ranks look for the next controller.
        let all = jobs.values().chain(resuming.values().map(|resuming| &resuming.job));
        all.flat_map(|job| job.members.values()).for_each(|member| member.client.disconnect());
        let placed = jobs.into_values().filter_map(|job| job.placement?.ok());
        let released: Vec<_> = placed.flat_map(|placement| self.release(&placement)).collect();
        released
    }
}

/// What to do about a failed reservation.
enum RetryOutcome {
    /// Plan another tree, without the device that did not respond.
    RequestTree,
    Without(NoTree),
}
