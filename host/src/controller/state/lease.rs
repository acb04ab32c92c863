//! Leases: groups are renewed while their job runs, and an expired lease tears the group down on every device.
//!
//! Any valid packet caused by a rank renews the group at the device that it reaches. The controller renews it on all
//! devices, so that an idle job keeps its tree. A device that no longer has the group refuses the renewal. The group is
//! then released on all nodes and in the ledger, and the job's ranks are notified that the tree is lost.
//!
//! Groups of an earlier incarnation of the controller are not in the ledger. Only the job's own packets renew them. A
//! device that has less room than the ledger says is queried until it has more.

use super::State;
use crate::controller::device::{DeviceError, DeviceSession, PendingReply};
use crate::controller::proto::ClientReply;
use crate::controller::resources::DeviceKey;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;
use sumac_hal::ctrl::{Refusal, Request};
use sumac_hal::ids::GroupId;

/// Marks a device whose slots in use are not known yet.
const NOT_COUNTED: u32 = u32::MAX;

/// A round of renewals: the leases to renew, and the crowded devices to query.
pub(in crate::controller) struct LeaseRound {
    leases: Vec<(Arc<DeviceSession>, GroupId)>,
    crowded: Vec<Arc<DeviceSession>>,
}

/// The results of a round.
pub(in crate::controller) struct RenewalResults {
    expired: Vec<(DeviceKey, GroupId)>,
    /// The slots in use on crowded devices.
    slots_used: Vec<(DeviceKey, u32)>,
    /// Devices that did not respond.
    unresponsive: Vec<DeviceKey>,
}

/// A round whose responses are outstanding.
pub(in crate::controller) struct PendingRenewals {
    leases: Vec<(Arc<DeviceSession>, GroupId, Result<PendingReply, DeviceError>)>,
    stats: Vec<(Arc<DeviceSession>, Result<PendingReply, DeviceError>)>,
}

impl LeaseRound {
    /// Send all requests.
    pub(in crate::controller) fn send(self) -> PendingRenewals {
        let renew = |(device, group): (Arc<DeviceSession>, GroupId)| {
            let asked = device.post(Request::RenewGroup(group));
            (device, group, asked)
        };
        let count = |device: Arc<DeviceSession>| {
            let asked = device.post(Request::Stats);
            (device, asked)
        };
        let leases = self.leases.into_iter().map(renew).collect();
        PendingRenewals { leases, stats: self.crowded.into_iter().map(count).collect() }
    }
}

impl PendingRenewals {
    /// Collect the responses, waiting until `due` at most. Call it with the state unlocked: an unresponsive device
    /// takes seconds.
    pub(in crate::controller) fn wait(self, due: Instant) -> RenewalResults {
        let mut renewed = RenewalResults { expired: Vec::new(), slots_used: Vec::new(), unresponsive: Vec::new() };
        for (device, group, asked) in self.leases {
            match asked.and_then(|asked| device.wait_done(&asked, due)) {
                Ok(()) => {}
                Err(DeviceError::Refused(Refusal::NoGroup(_))) => renewed.expired.push((device.key(), group)),
                Err(error) => {
                    tracing::warn!(device = device.name(), %group, %error, "cannot renew the lease of a group");
                    renewed.unresponsive.push(device.key());
                }
            }
        }
        for (device, asked) in self.stats {
            match asked.and_then(|asked| device.wait_stats(&asked, due)) {
                Ok(stats) => renewed.slots_used.push((device.key(), stats.slots_used)),
                Err(_) => renewed.unresponsive.push(device.key()),
            }
        }
        renewed
    }

    /// Whether all responses have arrived.
    #[cfg(feature = "snapshot")]
    pub(in crate::controller) fn has_answers(&self) -> bool {
        let is_answered = |device: &DeviceSession, asked: &Result<PendingReply, DeviceError>| {
            asked.as_ref().map_or(true, |asked| device.is_answered(asked))
        };
        let mut leases = self.leases.iter().map(|(device, _, asked)| (device, asked));
        let mut stats = self.stats.iter().map(|(device, asked)| (device, asked));
        leases.all(|(device, asked)| is_answered(device, asked))
            && stats.all(|(device, asked)| is_answered(device, asked))
    }
}

impl State {
    /// Collect a round: each group on each of its devices.
    pub(in crate::controller) fn lease_round(&self) -> LeaseRound {
        let placements = self.jobs.values().filter_map(|job| job.placement.as_ref()?.as_ref().ok());
        let leases = placements.flat_map(|placement| {
            let devices = placement.nodes.iter().filter_map(|node| self.session(&node.device.key()));
            devices.map(|device| (device, placement.group))
        });
        LeaseRound {
            leases: leases.collect(),
            crowded: self.crowded.keys().filter_map(|key| self.session(key)).collect(),
        }
    }

    /// The session of a device in that incarnation, if it is connected.
    pub(super) fn session(&self, key: &DeviceKey) -> Option<Arc<DeviceSession>> {
        self.devices.get(&key.name).filter(|device| device.announce.boot_id == key.boot_id).cloned()
    }

    /// Handle the results of a round.
    pub(in crate::controller) fn renewed(&mut self, renewed: RenewalResults) {
        for (device, group) in renewed.expired {
            self.expire(&device, group);
        }
        for (device, slots_used) in renewed.slots_used {
            let Some(known) = self.crowded.get_mut(&device) else { continue };
            let (is_less, was_counted) = (slots_used < *known, *known != NOT_COUNTED);
            *known = slots_used;
            if is_less {
                self.ledger.bump_version();
                // A first count stays, so that the next refusal is compared with it.
                if was_counted {
                    self.crowded.remove(&device);
                }
            }
        }
        let mut were_unresponsive = std::mem::take(&mut self.unresponsive);
        were_unresponsive.extend(renewed.unresponsive);
        let is_unresponsive = |key: &DeviceKey| self.session(key).is_some_and(|device| !device.is_responsive());
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

    /// A device has refused although the ledger has resources left, and then reported its slots in use. If the slots
    /// were freed before it counted, it will never report fewer, so the next count lets jobs try once more.
    pub(super) fn mark_crowded(&mut self, device: &DeviceSession, need: u64, slots_used: Option<u32>) {
        if slots_used.is_none() && device.is_responsive() {
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
            job.broadcast(&ClientReply::TreeLost { view: job.view });
        }
        if let Some(Ok(placement)) = lost {
            self.release(&placement);
        }
    }
}

fn holds(placement: &crate::controller::admit::Placement, group: GroupId) -> bool {
    placement.group == group
}
