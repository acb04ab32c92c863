//! What the controller says of itself.

use super::repair::LOST;
use super::{Job, State};
use crate::controller::ControllerConfig;
use crate::controller::admit::Placement;
use crate::controller::device::DeviceSession;
use crate::controller::line::Frames;
use crate::controller::proto::{
    ClientReply, DeviceStatus, FabricStatus, JobStatus, JobTree, QueuePlace, StatusReport, TenantStatus,
};
use crate::controller::queue::Standing;
#[cfg(feature = "snapshot")]
use crate::controller::{
    books::{Amount, Claim, DeviceKey},
    rehearsal::Booked,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::{FrameError, Request};

/// How long all devices together may take to say what they count.
const STATS_LIMIT: Duration = Duration::from_secs(2);

/// Of a device that was asked before.
const OWES_STATS: &str = "it has not answered when it was asked before";

/// Encode a report within so many bytes: jobs are left out, and counted, where it would be longer.
pub(in crate::controller) fn encode(mut report: StatusReport, len_max: usize) -> Result<Frames, FrameError> {
    loop {
        let frames = Frames::of(&ClientReply::Status(report.clone()))?;
        if frames.bytes().len() <= len_max || report.jobs.is_empty() {
            return Ok(frames);
        }
        let kept = report.jobs.len() / 2;
        report.jobs_left_out += (report.jobs.len() - kept) as u32;
        report.jobs.truncate(kept);
        // Tenants have jobs or quotas: of those that have none of the jobs that are shown, the first are.
        report.tenants.truncate(kept.max(TENANTS_SHOWN));
    }
}

/// How many tenants are shown however long the report is.
const TENANTS_SHOWN: usize = 256;

/// A report that lacks what devices say of themselves.
pub(in crate::controller) struct Report {
    told: StatusReport,
    devices: Vec<Arc<DeviceSession>>,
}

impl Report {
    /// Leave out what devices say of themselves.
    #[cfg(any(test, feature = "snapshot"))]
    pub(in crate::controller) fn without_devices(self) -> StatusReport {
        self.told
    }

    /// Ask the devices. The state is not locked meanwhile: one that has stopped takes seconds.
    pub(in crate::controller) fn ask_devices(mut self) -> StatusReport {
        let due = Instant::now() + STATS_LIMIT;
        // Who was waited for in vain is asked again when it has answered that.
        let ask = |device: &Arc<DeviceSession>| match device.owes_stats() {
            true => Err(OWES_STATS.to_owned()),
            false => device.post(Request::Stats).map_err(|error| error.to_string()),
        };
        let asked: Vec<_> = self.devices.iter().map(ask).collect();
        for ((session, asked), device) in self.devices.iter().zip(asked).zip(&mut self.told.devices) {
            device.stats = asked.and_then(|asked| session.counted_soon(&asked, due).map_err(|error| error.to_string()));
        }
        self.told
    }
}

impl State {
    pub(in crate::controller) fn report(&self, config: &ControllerConfig) -> Report {
        let fabric = config.fabric.as_ref();
        let device = |session: &Arc<DeviceSession>| DeviceStatus {
            name: session.name().to_owned(),
            in_fabric: fabric.is_none_or(|fabric| fabric.find_switch(session.name()).is_some()),
            data_addrs: session.announce.data_addrs.iter().copied().collect(),
            capabilities: session.announce.capabilities,
            bus: session.announce.bus.clone(),
            stats: Err(String::new()),
        };
        let resuming = self.resuming.iter().map(|((name, _), resuming)| (name, &resuming.job));
        let places = self.queue.places(&self.books);
        let report = |(name, job): (&String, &Job)| self.report_job(name, job, places.get(name).copied());
        let mut jobs: Vec<_> = self.jobs.iter().chain(resuming).map(report).collect();
        jobs.sort_by(|one, other| one.name.cmp(&other.name));
        let told = StatusReport {
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
        };
        Report { told, devices: self.devices.values().cloned().collect() }
    }

    /// Return all that the books hold, by group and device.
    #[cfg(feature = "snapshot")]
    pub(in crate::controller) fn booked(&self) -> Vec<Booked> {
        let of = |claim: &Claim| {
            let (group, tenant) = (claim.group, claim.tenant.clone());
            let booked = move |(key, need): &(DeviceKey, Amount)| Booked {
                group,
                tenant: tenant.clone(),
                device: key.name.clone(),
                boot_id: key.boot_id,
                slots: need.slots,
                memory_bytes: need.memory_bytes,
            };
            claim.needs.iter().map(booked).collect::<Vec<_>>()
        };
        self.books.claims().flat_map(of).collect()
    }

    fn report_job(&self, name: &str, job: &Job, queue: Option<QueuePlace>) -> JobStatus {
        let standing = self.queue.get(name).map(|entry| entry.standing);
        JobStatus {
            name: name.to_owned(),
            tenant: job.tenant().to_owned(),
            joined: job.members.len() as u32,
            world: job.world,
            running: job.placement.is_some(),
            view: job.view,
            tree: job.placement.as_ref().map(|placed| self.report_tree(job, placed)),
            queue,
            is_offered: standing.is_some_and(|standing| standing != Standing::Waits) || job.placing.is_some(),
        }
    }

    /// Describe a job's tree. One that is lost is none, though its ranks have yet to ask for another; nor is one of a device
    /// that is not connected, though its ranks may not have noticed.
    fn report_tree(&self, job: &Job, placed: &Result<Placement, String>) -> Result<JobTree, String> {
        let placement = placed.as_ref().map_err(Clone::clone)?;
        let mut devices = placement.nodes.iter().map(|node| &node.device);
        if let Some(gone) = devices.find(|device| self.session(&device.key()).is_none()) {
            return Err(format!("device {} of its tree is not connected", gone.name()));
        }
        if job.suspected {
            return Err(LOST.into());
        }
        Ok(JobTree {
            group: placement.group,
            levels: placement.levels,
            devices: placement.nodes.iter().map(|node| node.device.name().to_owned()).collect(),
            by_reference: placement.ranks_by_reference(),
        })
    }

    fn report_tenants(&self) -> Vec<TenantStatus> {
        let running = self.jobs.values().map(|job| job.tenant().to_owned());
        let names: BTreeSet<String> = self.books.tenants().chain(running).collect();
        let tenant = |name: String| {
            let (held, quota) = self.books.held(&name);
            let (groups, slots, memory_bytes) = (held.groups, held.slots, held.memory_bytes);
            TenantStatus { name, groups, slots, memory_bytes, quota }
        };
        names.into_iter().map(tenant).collect()
    }
}
