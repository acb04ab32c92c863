//! Leases: groups are renewed while their job runs, and an expired lease tears the group down on every device.
//!
//! Any valid packet caused by a rank renews the group at the device that it reaches. The controller renews it on all
//! devices, so that an idle job keeps its tree. A device that no longer has the group refuses the renewal. The group is
//! then released on all nodes and in the ledger, and the job's ranks are notified that the tree is lost.
//!
//! Groups of an earlier incarnation of the controller are not in the ledger. Only the job's own packets renew them. A
//! device that has less room than the ledger says is queried until it has more.

use super::{Purpose, State};
use crate::controller::ControllerConfig;
use crate::controller::device::{Device, DeviceError, OnTimeout, REPLY_TIMEOUT, Reply, expect_done, expect_stats};
use crate::controller::proto::ClientReply;
use crate::controller::resources::DeviceKey;
use std::collections::BTreeSet;
use std::sync::Arc;
use sumac_hal::ctrl::{Refusal, Request};
use sumac_hal::ids::GroupId;
use sumac_hal::time::Instant;

/// Marks a device whose slots in use are not known yet.
const NOT_COUNTED: u32 = u32::MAX;

/// A round of renewals: the leases that are renewed, and the crowded devices that are queried, in this order.
#[derive(Debug)]
pub(in crate::controller) struct LeaseRound {
    leases: Vec<(Arc<Device>, GroupId)>,
    crowded: Vec<Arc<Device>>,
}

impl State {
    /// Start a round of renewals every third of a lease. Returns when the next one starts.
    pub(in crate::controller) fn renew_leases(&mut self, config: &ControllerConfig) -> Instant {
        if self.now >= self.renews_at {
            self.renews_at = self.now + config.lease / 3;
            self.start_lease_round();
        }
        self.renews_at
    }

    /// Renew each group on each of its devices, and query crowded devices.
    pub(in crate::controller) fn start_lease_round(&mut self) {
        let placements = self.jobs.values().filter_map(|job| job.placement.as_ref()?.as_ref().ok());
        let leases = placements.flat_map(|placement| {
            let devices = placement.nodes.iter().filter_map(|node| self.session(&node.device.key()));
            devices.map(|device| (device, placement.group))
        });
        let leases: Vec<_> = leases.collect();
        let crowded: Vec<_> = self.crowded.keys().filter_map(|key| self.session(key)).collect();
        let renew = leases.iter().map(|(device, group)| (Arc::clone(device), Request::RenewGroup(*group)));
        let count = crowded.iter().map(|device| (Arc::clone(device), Request::Stats));
        let requests: Vec<_> = renew.chain(count).collect();
        let purpose = Purpose::Renew(LeaseRound { leases, crowded });
        let until = self.now + REPLY_TIMEOUT;
        self.links.exchange(&mut self.output, (purpose, OnTimeout::Normal, until), requests);
    }

    /// The session of a device in that incarnation, if it is connected.
    pub(super) fn session(&self, key: &DeviceKey) -> Option<Arc<Device>> {
        self.connected(&key.name).filter(|device| device.announce.boot_id == key.boot_id).cloned()
    }

    /// Handle the responses to a round.
    pub(super) fn finish_lease_round(&mut self, round: LeaseRound, replies: Vec<Reply>) {
        let mut replies = replies.into_iter();
        let mut unresponsive = Vec::new();
        for ((device, group), reply) in round.leases.into_iter().zip(replies.by_ref()) {
            match expect_done(reply) {
                Ok(()) => {}
                Err(DeviceError::Refused(Refusal::NoGroup(_))) => self.expire(&device.key(), group),
                Err(error) => {
                    tracing::warn!(device = device.name(), %group, %error, "cannot renew the lease of a group");
                    unresponsive.push(device.key());
                }
            }
        }
        for (device, reply) in round.crowded.into_iter().zip(replies) {
            match expect_stats(reply) {
                Ok(stats) => self.count_slots(&device.key(), stats.slots_used),
                Err(_) => unresponsive.push(device.key()),
            }
        }
        let mut were_unresponsive = std::mem::take(&mut self.unresponsive);
        were_unresponsive.extend(unresponsive);
        // Also those that hold no group: jobs that were planned without them must learn when they respond.
        were_unresponsive.extend(self.devices.values().filter(|it| !self.links.is_responsive(it)).map(|it| it.key()));
        let is_unresponsive =
            |key: &DeviceKey| self.session(key).is_some_and(|device| !self.links.is_responsive(&device));
        let (unresponsive, others): (_, BTreeSet<_>) = were_unresponsive.into_iter().partition(is_unresponsive);
        self.unresponsive = unresponsive;
        if !others.is_empty() {
            self.ledger.bump_version();
            // Plans made without them are void.
            self.planning.devices_version += 1;
            self.reconsider();
        }
        self.ledger.settle();
        self.offer_again();
        self.serve_queue();
    }

    /// A crowded device reports its slots in use.
    fn count_slots(&mut self, device: &DeviceKey, slots_used: u32) {
        let Some(known) = self.crowded.get_mut(device) else { return };
        let (is_less, was_counted) = (slots_used < *known, *known != NOT_COUNTED);
        *known = slots_used;
        if is_less {
            self.ledger.bump_version();
            // A first count stays, so that the next refusal is compared with it.
            if was_counted {
                self.crowded.remove(device);
            }
        }
    }

    /// A device has refused although the ledger has resources left, and then reported its slots in use. If the slots
    /// were freed before it counted, it will never report fewer, so the next count lets jobs try once more.
    pub(super) fn mark_crowded(&mut self, device: &Device, need: u64, slots_used: Option<u32>) {
        if slots_used.is_none() && self.links.is_responsive(device) {
            // It responds, but not with its counters.
            return;
        }
        let has_capacity = |used: &u32| u64::from(*used) + need <= device.capacity().slots;
        let known = self.crowded.get(&device.key()).copied();
        let is_freed = |used: &u32| has_capacity(used) && known.is_none_or(|known| *used < known);
        let count = slots_used.filter(|used| !is_freed(used)).unwrap_or(NOT_COUNTED);
        self.crowded.insert(device.key(), count);
    }

    /// A device no longer has a group: the tree is lost.
    fn expire(&mut self, device: &DeviceKey, group: GroupId) {
        let of_group = |placed: &Result<_, String>| matches!(placed, Ok(placement) if holds(placement, group));
        let found = self.jobs.iter_mut().find(|(_, job)| job.placement.as_ref().is_some_and(of_group));
        // The job may have ended or moved meanwhile.
        let Some((name, job)) = found else { return };
        let why = format!("the lease of its group expired on device {}", device.name);
        tracing::warn!(job = name, view = job.view, %group, why, "tree is lost");
        self.recoveries.begin(name, job.view, &format!("tree lost: {why}"), self.now);
        let lost = job.placement.replace(Err(why));
        if !std::mem::replace(&mut job.tree_suspected, true) {
            job.broadcast(&mut self.output, &ClientReply::TreeLost { view: job.view });
        }
        if let Some(Ok(placement)) = lost {
            self.release(&placement);
        }
    }
}

fn holds(placement: &crate::controller::admit::Placement, group: GroupId) -> bool {
    placement.group == group
}
