//! What all parties of a test have counted at one moment.

use super::probe::{Probe, ProbeError};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use sumac::controller::status;
use sumac::transport::packets::EndpointStats;
use sumac_hal::ctrl::{Counters, DropReason};

/// Counters of the rank and of all devices.
#[derive(Debug, Clone, Default)]
pub(super) struct Snapshot {
    /// The rank's.
    pub(super) rank: EndpointStats,
    /// Those of each device that answers.
    pub(super) devices: BTreeMap<String, Counters>,
    /// Whether other jobs' packets are among the devices'.
    pub(super) shared: bool,
}

/// What a device has counted between two snapshots.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct DeviceDelta {
    /// Whole packets received.
    pub(super) received: u64,
    /// Packets sent.
    pub(super) packets_out: u64,
    /// Answers sent down again.
    pub(super) answers_resent: u64,
    /// Contributions sent up again.
    pub(super) contributions_resent: u64,
}

impl Snapshot {
    /// Ask the controller for the devices' counters, then the rank for its own: so what a device says that it has sent
    /// has had the time to arrive.
    ///
    /// # Errors
    /// A controller that does not answer.
    pub(super) fn take(controller: SocketAddr, job: &str, probe: &mut Probe) -> Result<Self, ProbeError> {
        let report = status(controller)?;
        let counters = report.devices.into_iter().filter_map(|device| Some((device.name, device.stats.ok()?.counters)));
        Ok(Self {
            devices: counters.collect(),
            shared: report.jobs.iter().any(|other| other.name != job),
            rank: probe.stats(),
        })
    }

    /// Return what the rank has counted since `before`.
    pub(super) fn rank_since(&self, before: &Self) -> EndpointStats {
        let (now, then) = (&self.rank, &before.rank);
        EndpointStats {
            packets_out: now.packets_out - then.packets_out,
            bytes_out: now.bytes_out - then.bytes_out,
            packets_in: now.packets_in - then.packets_in,
            retransmits: now.retransmits - then.retransmits,
            probes: now.probes - then.probes,
            dropped: now.dropped - then.dropped,
            shared_results: now.shared_results - then.shared_results,
        }
    }

    /// Return what a device has counted since `before`; nothing of one that did not answer, or has restarted.
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
