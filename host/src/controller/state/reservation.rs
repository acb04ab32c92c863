//! Reserves a tree and its group on every node, or on none.
//!
//! The steps, with an exchange between them: send the requests to all nodes; if one refuses or does not respond, roll
//! back on all and, if it refused, query its counters; then probe the paths of the tree (`paths`), or decide what to
//! try next.

use super::placement::{Draft, NoTree};
use super::{Purpose, State};
use crate::controller::ControllerConfig;
use crate::controller::admit::{Placement, PlacementRequest};
use crate::controller::device::{DeviceError, OnTimeout, REPLY_TIMEOUT, Reply, expect_done, expect_stats};
use crate::controller::proto::JoinRequest;
use crate::controller::queue::{BlockedOn, Queue};
use sumac_hal::ctrl::{Refusal, Request};
use sumac_hal::planted;

/// How many trees are tried for a job, each without the devices that did not respond before.
const TRIES_MAX: u32 = 4;

/// A reservation whose responses are awaited.
#[derive(Debug)]
pub(in crate::controller) struct Reserving {
    draft: Draft,
    /// The node that failed and why, once the reservation is rolled back and that node's counters are queried.
    failed: Option<(usize, DeviceError)>,
}

/// A failed reservation.
#[derive(Debug)]
pub(in crate::controller) struct ReservationFailure {
    /// The index of the node that failed.
    pub(in crate::controller) index: usize,
    pub(in crate::controller) error: DeviceError,
    /// The slots in use on its device without the group, if the device refused and reported them.
    pub(in crate::controller) slots_used: Option<u32>,
}

impl State {
    /// Reserve all drafts that are ready.
    pub(in crate::controller) fn reserve_drafts(&mut self, config: &ControllerConfig) {
        while let Some(draft) = self.ready.pop_front() {
            let requests = draft.placement.reservation(config, draft.order);
            self.exchange_for(Reserving { draft, failed: None }, requests);
        }
    }

    fn exchange_for(&mut self, reserving: Reserving, requests: Vec<(std::sync::Arc<super::Device>, Request)>) {
        let until = self.now + REPLY_TIMEOUT;
        let purpose = Purpose::Reserve(Box::new(reserving));
        self.links.exchange(&mut self.output, (purpose, OnTimeout::Normal, until), requests);
    }

    /// Handle the responses to a step of a reservation.
    pub(super) fn continue_reservation(
        &mut self,
        config: &ControllerConfig,
        Reserving { draft, failed }: Reserving,
        replies: Vec<Reply>,
    ) {
        let mut replies = replies.into_iter();
        if let Some((index, error)) = failed {
            let stats = replies.next().and_then(|reply| expect_stats(reply).ok());
            let slots_used = stats.map(|stats| stats.slots_used);
            return self.finish_reservation(config, draft, Err(ReservationFailure { index, error, slots_used }));
        }
        let failed = (0..).zip(replies).find_map(|(nth, reply)| Some((nth / 2, expect_done(reply).err()?)));
        let Some((index, error)) = failed else { return self.finish_reservation(config, draft, Ok(())) };
        for (at, node) in draft.placement.nodes.iter().enumerate() {
            if planted!(draft.placement, ReservationKept) && at != index {
                continue;
            }
            self.post_release(&draft.placement, &node.device);
        }
        let is_refused = matches!(error, DeviceError::Refused(_));
        let device = draft.placement.nodes[index].device.clone();
        let query = is_refused.then_some((device, Request::Stats)).into_iter().collect();
        self.exchange_for(Reserving { draft, failed: Some((index, error)) }, query);
    }

    /// Handle the result of reserving a draft. The next draft to try is among those that are ready.
    pub(in crate::controller) fn finish_reservation(
        &mut self,
        config: &ControllerConfig,
        mut draft: Draft,
        reserved: Result<(), ReservationFailure>,
    ) {
        let (name, group) = (draft.job.clone(), draft.placement.group);
        let is_wanted = self.jobs.get(&name).is_some_and(|job| job.placing == Some(group));
        let failure = match reserved {
            Ok(()) if is_wanted => return self.probe_paths(config, draft),
            Ok(()) => {
                // The job no longer needs it.
                self.release(&draft.placement);
                self.serve_queue();
                return;
            }
            Err(failure) => failure,
        };
        self.ledger.roll_back(group);
        if matches!(failure.error, DeviceError::Unreachable) {
            // Whether or not this job still wants it, others are planned without it until it responds.
            self.unresponsive.insert(draft.placement.nodes[failure.index].device.key());
        }
        let next = if is_wanted { self.retry(config, &name, &mut draft, failure) } else { Ok(None) };
        match next {
            Ok(Some(())) => self.ready.push_back(draft),
            Ok(None) => {}
            Err(RetryOutcome::RequestTree) => self.request_tree(&name, draft.tries + 1),
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
            }
        }
        self.serve_queue();
    }

    /// Publish a tree that is reserved, and whose paths carry its packets.
    pub(super) fn publish_reserved(&mut self, config: &ControllerConfig, Draft { job, placement, .. }: Draft) {
        let (group, levels, zero_copy) = (placement.group, placement.levels, placement.zero_copy_ranks());
        let devices: Vec<&str> = placement.nodes.iter().map(|node| node.device.name()).collect();
        let packet_len_bytes = placement.packet_len_bytes();
        tracing::info!(job, %group, levels, ?devices, zero_copy, packet_len_bytes, "tree reserved");
        self.leave_queue(&job);
        self.publish_placement(config, &job, Ok(placement));
        self.serve_queue();
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
            DeviceError::Unreachable if draft.tries + 1 < TRIES_MAX => return Err(RetryOutcome::RequestTree),
            _ => return Err(RetryOutcome::Without(NoTree::permanent(refused))),
        };
        if matches!(refusal, Refusal::NoZeroCopy(_) | Refusal::NoRedoMemory { .. }) && is_zero_copy {
            let requests: Vec<&JoinRequest> = job.members.values().map(|member| &*member.request).collect();
            let (tenant, narrow) = (job.tenant(), &job.narrow);
            let shape = job.shape((config, &self.planning.index));
            let request = PlacementRequest {
                tenant,
                requests: &requests,
                shape,
                pinned: &[],
                hosts: &[],
                narrow,
                trees: 1,
                adapters: None,
            };
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

    /// Tell a device to release a group and its tree. If that cannot be sent, the device has restarted or the lease
    /// will expire.
    fn post_release(&mut self, placement: &Placement, device: &super::Device) {
        for request in placement.release_requests() {
            if let Err(error) = self.links.post(&mut self.output, device, request) {
                let group = placement.group;
                return tracing::debug!(device = device.name(), %group, %error, "not released; its lease will expire");
            }
        }
    }

    /// Release a tree on all its devices and in the ledger.
    pub(super) fn release(&mut self, placement: &Placement) {
        self.ledger.free(placement.group);
        for node in &placement.nodes {
            // The device may have reconnected since.
            if let Some(device) = self.session(&node.device.key()) {
                self.post_release(placement, &device);
            }
        }
    }

    /// Release all trees and disconnect all ranks, for shutdown. An exchange awaits the responses.
    pub(in crate::controller) fn release_all(&mut self) {
        self.queue = Queue::default();
        let (jobs, resuming) = (std::mem::take(&mut self.jobs), std::mem::take(&mut self.resuming));
        // From here on ranks look for the next controller.
        let all = jobs.values().chain(resuming.values().map(|resuming| &resuming.job));
        all.flat_map(|job| job.members.values()).for_each(|member| self.output.close(member.client));
        let mut requests = Vec::new();
        for placement in jobs.into_values().filter_map(|job| job.placement?.ok()) {
            self.ledger.free(placement.group);
            let devices = placement.nodes.iter().filter_map(|node| self.session(&node.device.key()));
            let of_device = |device| placement.release_requests().map(|request| (Clone::clone(&device), request));
            requests.extend(devices.flat_map(of_device));
        }
        let until = self.now + REPLY_TIMEOUT;
        self.links.exchange(&mut self.output, (Purpose::Stop, OnTimeout::Normal, until), requests);
    }
}

/// What to do about a failed reservation.
enum RetryOutcome {
    /// Plan another tree, without the device that did not respond.
    RequestTree,
    Without(NoTree),
}
