//! Devices whose connection has ended: their trees are lost unless they are back soon.
//!
//! A device that dies takes its connection along at once, and its ranks would find out by silence, seconds later. One that
//! only lost the connection dials again, in the same life and with its groups, before [`ABSENCE`] is over. One that comes
//! in another life has forgotten them.

use super::State;
use crate::controller::books::DeviceKey;
use crate::controller::proto::ClientReply;
use std::time::{Duration, Instant};

/// How long a device may be without a connection before its trees count as lost. Devices dial again after half of that.
pub(in crate::controller) const ABSENCE: Duration = Duration::from_secs(1);

impl State {
    /// A device's connection has ended.
    pub(super) fn note_absent(&mut self, device: DeviceKey) {
        self.absent.insert(device, self.now + ABSENCE);
        self.wake.notify_all();
    }

    /// A device is there: its absence in this life is over, and so are its lives before.
    pub(super) fn note_present(&mut self, device: &DeviceKey) {
        let now = self.now;
        self.absent.remove(device);
        for (other, due) in &mut self.absent {
            if other.name == device.name {
                *due = now;
            }
        }
        self.wake.notify_all();
    }

    /// Tell the ranks of trees on devices that have been away for too long. Returns when the next is due.
    pub(super) fn expire_absent(&mut self) -> Option<Instant> {
        let now = self.now;
        let gone: Vec<DeviceKey> =
            self.absent.iter().filter(|(_, due)| **due <= now).map(|(device, _)| device.clone()).collect();
        for device in &gone {
            self.absent.remove(device);
            for (name, job) in &mut self.jobs {
                let Some(Ok(placement)) = &job.placement else { continue };
                let is_there = placement.nodes.iter().any(|node| node.device.key() == *device);
                if is_there && !std::mem::replace(&mut job.suspected, true) {
                    tracing::warn!(
                        job = name,
                        view = job.view,
                        device = device.name,
                        "tree is lost: the device is gone"
                    );
                    job.tell(&ClientReply::Repair { view: job.view });
                }
            }
        }
        self.absent.values().min().copied()
    }
}
