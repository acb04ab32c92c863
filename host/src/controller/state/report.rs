//! Makes status reports.

use super::replan::LOST;
use super::{Job, State};
use crate::controller::ControllerConfig;
use crate::controller::admit::Placement;
use crate::controller::device::Device;
use crate::controller::outbox::Frames;
use crate::controller::proto::{
    ClientReply, DeviceStatus, FabricStatus, JobStatus, JobTree, QueuePosition, RankRange, StatusReport, TenantStatus,
};
use crate::controller::queue::EntryStatus;
#[cfg(feature = "snapshot")]
use crate::controller::resources::{Claim, ClaimRecord, DeviceKey, Resources};
use std::collections::BTreeSet;
use std::sync::Arc;
use sumac_hal::ctrl::FrameError;

/// Encode a report in at most `len_max` bytes. Leaves out jobs, and counts them, if it would be longer.
pub(in crate::controller) fn encode(mut report: StatusReport, len_max: usize) -> Result<Frames, FrameError> {
    loop {
        let frames = Frames::of(&ClientReply::Status(report.clone()))?;
        if frames.bytes().len() <= len_max || report.jobs.is_empty() {
            return Ok(frames);
        }
        let kept = report.jobs.len() / 2;
        report.jobs_left_out += (report.jobs.len() - kept) as u32;
        report.jobs.truncate(kept);
        // Tenants may be as many as jobs, so they are cut, too.
        report.tenants.truncate(kept.max(TENANTS_SHOWN));
    }
}

/// How many tenants are always shown.
const TENANTS_SHOWN: usize = 256;

/// A report that still lacks the devices' counters.
#[derive(Debug)]
pub(in crate::controller) struct Report {
    pub(super) report: StatusReport,
    pub(super) devices: Vec<Arc<Device>>,
}

impl Report {
    /// Return the report without counters.
    #[cfg(any(test, feature = "snapshot"))]
    pub(in crate::controller) fn without_devices(self) -> StatusReport {
        self.report
    }
}

/// How many ranges of missing ranks a report lists of a job.
const MISSING_RANGES_MAX: usize = 32;

impl Job {
    /// Return the ranks that are not connected.
    fn missing_ranks(&self) -> Vec<RankRange> {
        let mut missing = Vec::new();
        let mut next = 0;
        let end = std::iter::once(self.world);
        for rank in self.members.keys().map(|rank| rank.0).chain(end) {
            if rank > next && missing.len() < MISSING_RANGES_MAX {
                missing.push(RankRange { first: next, last: rank - 1 });
            }
            next = rank + 1;
        }
        missing
    }
}

impl State {
    pub(in crate::controller) fn report(&self, config: &ControllerConfig) -> Report {
        let fabric = config.fabric.as_ref();
        let device = |session: &Arc<Device>| DeviceStatus {
            name: session.name().to_owned(),
            in_fabric: fabric.is_none_or(|fabric| self.planning.index.find_switch(fabric, session.name()).is_some()),
            data_addrs: session.announce.data_addrs.iter().copied().collect(),
            capabilities: session.announce.capabilities,
            attach: session.announce.attach.clone(),
            stats: Err(String::new()),
            slots: session.announce.slots.is_some().then(|| self.known_slots(session)),
        };
        let resuming = self.resuming.iter().map(|((name, _), resuming)| (name, &resuming.job));
        let positions = self.queue.positions(&self.ledger);
        let report = |(name, job): (&String, &Job)| self.report_job(name, job, positions.get(name).copied());
        // Further trees are shown with their jobs.
        let is_alone = |(_, job): &(&String, &Job)| !self.has_job_of_stripe(job);
        let mut jobs: Vec<_> = self.jobs.iter().chain(resuming).filter(is_alone).map(report).collect();
        jobs.sort_by(|one, other| one.name.cmp(&other.name));
        let report = StatusReport {
            fabric: fabric.map(|fabric| FabricStatus {
                switches: fabric.switches().len() as u32,
                hosts: fabric.hosts().len() as u32,
                aggregation_nodes: fabric.switches().iter().filter(|switch| switch.aggregation.is_some()).count()
                    as u32,
            }),
            devices: self.devices.values().map(device).collect(),
            jobs,
            jobs_left_out: 0,
            tenants: self.report_tenants(),
            recoveries: self.recoveries.report(self.now),
            pair: self.pair.clone(),
        };
        Report { report, devices: self.devices.values().cloned().collect() }
    }

    /// All claims in the ledger, by group and device.
    #[cfg(feature = "snapshot")]
    pub(in crate::controller) fn claim_records(&self) -> Vec<ClaimRecord> {
        let of = |claim: &Claim| {
            let (group, tenant, communicator) = (claim.group, claim.tenant.clone(), claim.communicator.clone());
            let record = move |(key, need): &(DeviceKey, Resources)| ClaimRecord {
                group,
                tenant: tenant.clone(),
                communicator: communicator.clone(),
                device: key.name.clone(),
                boot_id: key.boot_id,
                slots: need.slots,
                memory_bytes: need.memory_bytes,
            };
            claim.needs.iter().map(record).collect::<Vec<_>>()
        };
        self.ledger.claims().flat_map(of).collect()
    }

    fn report_job(&self, name: &str, job: &Job, queue: Option<QueuePosition>) -> JobStatus {
        let status = self.queue.get(name).map(|entry| entry.status);
        JobStatus {
            name: name.to_owned(),
            tenant: job.tenant().to_owned(),
            joined: job.members.len() as u32,
            world: job.world,
            missing: job.missing_ranks(),
            running: job.placement.is_some(),
            view: job.view,
            tree: job.placement.as_ref().map(|placed| self.report_tree(job, placed)),
            queue,
            is_offered: status.is_some_and(|status| status != EntryStatus::Waiting) || job.placing.is_some(),
            stripes: self.report_stripes(name),
        }
    }

    /// Describe a job's tree. A lost tree counts as none even before its ranks request another one, and so does a tree
    /// with a disconnected device even before its ranks have noticed.
    pub(super) fn report_tree(&self, job: &Job, placed: &Result<Placement, String>) -> Result<JobTree, String> {
        let placement = placed.as_ref().map_err(Clone::clone)?;
        let mut devices = placement.nodes.iter().map(|node| &node.device);
        if let Some(gone) = devices.find(|device| self.session(&device.key()).is_none()) {
            return Err(format!("device {} of its tree is not connected", gone.name()));
        }
        if job.tree_suspected {
            return Err(LOST.into());
        }
        Ok(JobTree {
            group: placement.group,
            levels: placement.levels,
            devices: placement.nodes.iter().map(|node| node.device.name().to_owned()).collect(),
            zero_copy_ranks: placement.zero_copy_ranks(),
            transport: placement.facts().transport(job.world).name().to_owned(),
        })
    }

    fn report_tenants(&self) -> Vec<TenantStatus> {
        let running = self.jobs.values().map(|job| job.tenant().to_owned());
        let names: BTreeSet<String> = self.ledger.tenants().chain(running).collect();
        let tenant = |name: String| {
            let (held, quota) = self.ledger.usage(&name);
            let (groups, slots, memory_bytes) = (held.groups, held.slots, held.memory_bytes);
            TenantStatus { name, groups, slots, memory_bytes, quota }
        };
        names.into_iter().map(tenant).collect()
    }
}
