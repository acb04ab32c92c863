//! The grace period for disconnected devices: their trees count as lost unless they reconnect in time.
//!
//! A crashed device loses its connection at once, while its ranks would need seconds to notice. A device that only lost
//! the connection reconnects in the same incarnation, with its groups, within [`RECONNECT_GRACE`]. A device that comes
//! back in another incarnation has lost them.

use super::State;
use crate::controller::proto::ClientReply;
use crate::controller::resources::DeviceKey;
use std::time::Duration;
use sumac_hal::time::Instant;

/// How long a device may be disconnected before its trees count as lost. Devices reconnect after half of that.
pub(in crate::controller) const RECONNECT_GRACE: Duration = Duration::from_secs(1);

impl State {
    /// A device has disconnected.
    pub(super) fn start_reconnect_grace(&mut self, device: DeviceKey) {
        self.disconnected.insert(device, self.now + RECONNECT_GRACE);
    }

    /// A device has connected: its grace period ends, and earlier incarnations of it count as lost now.
    pub(super) fn end_reconnect_grace(&mut self, device: &DeviceKey) {
        let now = self.now;
        self.disconnected.remove(device);
        for (other, due) in &mut self.disconnected {
            if other.name == device.name {
                *due = now;
            }
        }
    }

    /// Notify the ranks of trees on devices whose grace period has expired. Returns the next deadline.
    pub(super) fn expire_reconnect_grace(&mut self) -> Option<Instant> {
        let now = self.now;
        let gone: Vec<DeviceKey> =
            self.disconnected.iter().filter(|(_, due)| **due <= now).map(|(device, _)| device.clone()).collect();
        for device in &gone {
            self.disconnected.remove(device);
            for (name, job) in &mut self.jobs {
                let Some(Ok(placement)) = &job.placement else { continue };
                let is_there = placement.nodes.iter().any(|node| node.device.key() == *device);
                if is_there && !std::mem::replace(&mut job.tree_suspected, true) {
                    tracing::warn!(
                        job = name,
                        view = job.view,
                        device = device.name,
                        "tree is lost: the device did not reconnect"
                    );
                    let cause = format!("tree lost: device {} did not reconnect", device.name);
                    self.recoveries.begin(name, job.view, &cause, now);
                    job.broadcast(&mut self.output, &ClientReply::TreeLost { view: job.view });
                }
            }
        }
        self.disconnected.values().min().copied()
    }
}
