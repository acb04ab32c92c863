//! Leases: groups are renewed while their job lives, and a group that a device has freed is freed everywhere.
//!
//! Any valid packet that comes of a rank's doing renews a group at the device that it reaches; the controller renews it at
//! all, so that a job which does nothing for a while keeps its tree. A device that has no such group any more says so when
//! it is to renew it. Then the group is released on all nodes, what it took is given back, and the job's ranks are told that
//! the tree is lost.
//!
//! What an earlier life of the controller has left on a device is not in the books; nobody but the job's own packets renews
//! it, and a device that is more crowded than the books say is asked again until it is less so.

use super::State;
use crate::controller::books::DeviceKey;
use crate::controller::device::{Asked, DeviceError, DeviceSession};
use crate::controller::proto::ClientReply;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;
use sumac_hal::ctrl::{Refusal, Request};
use sumac_hal::ids::GroupId;

/// Stands for the slots in use on a device that has yet to count them.
const NOT_COUNTED: u32 = u32::MAX;

/// What devices are asked for the leases' sake.
pub(in crate::controller) struct Round {
    leases: Vec<(Arc<DeviceSession>, GroupId)>,
    crowded: Vec<Arc<DeviceSession>>,
}

/// What came of it.
pub(in crate::controller) struct Renewed {
    expired: Vec<(DeviceKey, GroupId)>,
    /// The slots in use on devices that were crowded.
    slots_used: Vec<(DeviceKey, u32)>,
    /// Devices that did not answer: jobs may do without them meanwhile.
    silent: Vec<DeviceKey>,
}

/// What they were asked, until they have answered.
pub(in crate::controller) struct Renewing {
    leases: Vec<(Arc<DeviceSession>, GroupId, Result<Asked, DeviceError>)>,
    stats: Vec<(Arc<DeviceSession>, Result<Asked, DeviceError>)>,
}

impl Round {
    /// Ask all devices at once.
    pub(in crate::controller) fn ask(self) -> Renewing {
        let renew = |(device, group): (Arc<DeviceSession>, GroupId)| {
            let asked = device.post(Request::RenewGroup(group));
            (device, group, asked)
        };
        let count = |device: Arc<DeviceSession>| {
            let asked = device.post(Request::Stats);
            (device, asked)
        };
        let leases = self.leases.into_iter().map(renew).collect();
        Renewing { leases, stats: self.crowded.into_iter().map(count).collect() }
    }
}

impl Renewing {
    /// Take in what devices say, waiting until `due` at most. The state is not locked meanwhile: one that has stopped takes
    /// seconds.
    pub(in crate::controller) fn answered(self, due: Instant) -> Renewed {
        let mut renewed = Renewed { expired: Vec::new(), slots_used: Vec::new(), silent: Vec::new() };
        for (device, group, asked) in self.leases {
            match asked.and_then(|asked| device.done(&asked, due)) {
                Ok(()) => {}
                Err(DeviceError::Refused(Refusal::NoGroup(_))) => renewed.expired.push((device.key(), group)),
                Err(error) => {
                    tracing::warn!(device = device.name(), %group, %error, "lease not renewed");
                    renewed.silent.push(device.key());
                }
            }
        }
        for (device, asked) in self.stats {
            match asked.and_then(|asked| device.counted(&asked, due)) {
                Ok(stats) => renewed.slots_used.push((device.key(), stats.slots_used)),
                Err(_) => renewed.silent.push(device.key()),
            }
        }
        renewed
    }

    /// Tell whether nothing more has to be waited for.
    #[cfg(feature = "snapshot")]
    pub(in crate::controller) fn has_answers(&self) -> bool {
        let is_answered = |device: &DeviceSession, asked: &Result<Asked, DeviceError>| {
            asked.as_ref().map_or(true, |asked| device.is_answered(asked))
        };
        let mut leases = self.leases.iter().map(|(device, _, asked)| (device, asked));
        let mut stats = self.stats.iter().map(|(device, asked)| (device, asked));
        leases.all(|(device, asked)| is_answered(device, asked))
            && stats.all(|(device, asked)| is_answered(device, asked))
    }
}

impl State {
    /// Return what devices are to be asked: to renew each group on each of its devices.
    pub(in crate::controller) fn round(&self) -> Round {
        let placements = self.jobs.values().filter_map(|job| job.placement.as_ref()?.as_ref().ok());
        let leases = placements.flat_map(|placement| {
            let devices = placement.nodes.iter().filter_map(|node| self.session(&node.device.key()));
            devices.map(|device| (device, placement.group))
        });
        Round { leases: leases.collect(), crowded: self.crowded.keys().filter_map(|key| self.session(key)).collect() }
    }

    /// Return the connection of a device in that life, if it is there.
    pub(super) fn session(&self, key: &DeviceKey) -> Option<Arc<DeviceSession>> {
        self.devices.get(&key.name).filter(|device| device.announce.boot_id == key.boot_id).cloned()
    }

    /// Take in what devices have said.
    pub(in crate::controller) fn renewed(&mut self, renewed: Renewed) {
        for (device, group) in renewed.expired {
            self.expire(&device, group);
        }
        for (device, slots_used) in renewed.slots_used {
            let Some(known) = self.crowded.get_mut(&device) else { continue };
            let (is_less, was_counted) = (slots_used < *known, *known != NOT_COUNTED);
            *known = slots_used;
            if is_less {
                self.books.touch();
                // One that was not counted stays, so that what is refused again is compared with this count.
                if was_counted {
                    self.crowded.remove(&device);
                }
            }
        }
        let mut were_silent = std::mem::take(&mut self.silent);
        were_silent.extend(renewed.silent);
        let is_silent = |key: &DeviceKey| self.session(key).is_some_and(|device| !device.answers());
        let (silent, others): (_, BTreeSet<_>) = were_silent.into_iter().partition(is_silent);
        self.silent = silent;
        if !others.is_empty() {
            self.books.touch();
            // A plan that was made without them is void.
            self.planning.devices_version += 1;
            self.reconsider();
        }
        self.offer_again();
        self.pump();
    }

    /// A device has refused what the books leave of it, and then counted so many slots in use. What it was short of may have
    /// been freed before it counted, and then it never counts fewer: it is asked again once.
    pub(super) fn note_crowded(&mut self, device: &DeviceSession, need: u64, slots_used: Option<u32>) {
        if slots_used.is_none() && device.answers() {
            // It answers, but not that.
            return;
        }
        let is_room = |used: &u32| u64::from(*used) + need <= device.room().slots;
        let known = self.crowded.get(&device.key()).copied();
        let is_freed = |used: &u32| is_room(used) && known.is_none_or(|known| *used < known);
        let count = slots_used.filter(|used| !is_freed(used)).unwrap_or(NOT_COUNTED);
        self.crowded.insert(device.key(), count);
    }

    /// A device has a group no more that it should have: the tree is lost.
    fn expire(&mut self, device: &DeviceKey, group: GroupId) {
        let of_group = |placed: &Result<_, String>| matches!(placed, Ok(placement) if holds(placement, group));
        let found = self.jobs.iter_mut().find(|(_, job)| job.placement.as_ref().is_some_and(of_group));
        // It may have ended or moved meanwhile.
        let Some((name, job)) = found else { return };
        let why = format!("the lease of its group ran out on device {}", device.name);
        tracing::warn!(job = name, view = job.view, %group, why, "tree is lost");
        let lost = job.placement.replace(Err(why));
        if !std::mem::replace(&mut job.suspected, true) {
            job.tell(&ClientReply::Repair { view: job.view });
        }
        if let Some(Ok(placement)) = lost {
            self.release(&placement);
        }
    }
}

fn holds(placement: &crate::controller::admit::Placement, group: GroupId) -> bool {
    placement.group == group
}
