//! The counters of rank and devices at one moment of a test.

use super::probe::{Probe, ProbeError};
use std::collections::BTreeMap;
use sumac::controller::proto::JobStatus;
use sumac::controller::{ControllerAddr, status};
use sumac::transport::packets::EndpointStats;
use sumac_hal::ctrl::{Counters, DropReason};

/// Counters of the rank and of all devices.
#[derive(Debug, Clone, Default)]
pub(super) struct Snapshot {
    /// The rank's counters.
    pub(super) rank: EndpointStats,
    /// The counters of each device that replies.
    pub(super) devices: BTreeMap<String, Counters>,
    /// Whether another job has a tree or is getting one, so that the devices' counters may include its packets.
    pub(super) shared: bool,
}

/// The change of a device's counters between two snapshots.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct DeviceDelta {
    /// Well-formed packets received.
    pub(super) received: u64,
    /// Packets sent.
    pub(super) packets_out: u64,
    /// Results retransmitted to children.
    pub(super) answers_resent: u64,
    /// Contributions retransmitted to the parent.
    pub(super) contributions_resent: u64,
}

impl Snapshot {
    /// Get the devices' counters from the controller, then those of the rank. In this order, packets that a device
    /// counts as sent have had time to arrive.
    ///
    /// # Errors
    /// The controller does not reply.
    pub(super) fn take(controller: &ControllerAddr, job: &str, probe: &mut Probe) -> Result<Self, ProbeError> {
        let report = status(controller.clone())?;
        let counters = report.devices.into_iter().filter_map(|device| Some((device.name, device.stats.ok()?.counters)));
        Ok(Self {
            devices: counters.collect(),
            shared: report.jobs_left_out > 0 || report.jobs.iter().any(|other| other.name != job && may_send(other)),
            rank: probe.stats(),
        })
    }

    /// Return the change of the rank's counters since `before`.
    pub(super) fn rank_since(&self, before: &Self) -> EndpointStats {
        let (now, then) = (&self.rank, &before.rank);
        EndpointStats {
            packets_out: now.packets_out - then.packets_out,
            bytes_out: now.bytes_out - then.bytes_out,
            packets_in: now.packets_in - then.packets_in,
            marked: now.marked - then.marked,
            retransmits: now.retransmits - then.retransmits,
            probes: now.probes - then.probes,
            dropped: now.dropped - then.dropped,
            shared_results: now.shared_results - then.shared_results,
        }
    }

    /// Return the change of a device's counters since `before`: zero if it did not reply or has restarted.
    pub(super) fn device_since(&self, before: &Self, device: &str) -> DeviceDelta {
        let (Some(now), Some(then)) = (self.devices.get(device), before.devices.get(device)) else {
            return DeviceDelta::default();
        };
        let whole = |counters: &Counters| counters.packets_in.saturating_sub(counters.dropped(DropReason::Malformed));
        DeviceDelta {
            received: whole(now).saturating_sub(whole(then)),
            packets_out: now.packets_out.saturating_sub(then.packets_out),
            answers_resent: now.answers_resent.saturating_sub(then.answers_resent),
            contributions_resent: now.contributions_resent.saturating_sub(then.contributions_resent),
        }
    }
}

/// Return whether a job may send packets to devices: it has a tree, or is offered one. Ranks that wait for their job's
/// last member, as those of a launcher do while one of them tests, send none.
fn may_send(job: &JobStatus) -> bool {
    job.is_offered || job.trees() > 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::job;
    use sumac::controller::proto::JobTree;
    use sumac_hal::ids::GroupId;

    #[test]
    fn jobs_send_to_devices_with_a_tree_or_the_offer_of_one() {
        let waiting = JobStatus { running: false, tree: None, is_offered: false, ..job() };
        assert!(!may_send(&waiting));
        assert!(may_send(&JobStatus { is_offered: true, ..waiting.clone() }));
        let (levels, devices, zero_copy_ranks) = (1, vec!["a".to_owned()], 0);
        let tree = JobTree { group: GroupId(1), levels, devices, zero_copy_ranks, transport: "udp".into() };
        assert!(may_send(&JobStatus { tree: Some(Ok(tree)), ..waiting.clone() }));
        assert!(!may_send(&JobStatus { running: true, tree: Some(Err("no device is free".into())), ..waiting }));
    }
}
