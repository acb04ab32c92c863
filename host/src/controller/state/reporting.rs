//! When reports are made: one at a time, for all clients that wait, with the counters of all devices.
//!
//! So many requests cost as much as one, and a report that waits for a device delays nobody else. A report may be long,
//! so it is encoded outside ([`State::next_report`]).
//!
//! A client with a tenant's key gets what concerns that tenant.

use super::report::{Report, encode};
use super::{Purpose, State};
use crate::controller::ControllerConfig;
use crate::controller::device::{OnTimeout, Reply, expect_stats};
use crate::controller::limits::REPLY_LEN_MAX;
use crate::controller::outbox::Frames;
use crate::controller::output::ConnId;
use crate::controller::proto::StatusReport;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ctrl::update::UpdateRequest;
use sumac_hal::ctrl::{FrameError, Request, Response};

/// How long all devices together may take to report their counters.
const STATS_LIMIT: Duration = Duration::from_secs(2);

/// Shown for a device that still owes the counters of an earlier report.
const STATS_OVERDUE: &str = "not queried: it has not answered an earlier query";

/// A client, and the tenant whose part it gets; `None`: all.
type Reader = (ConnId, Option<String>);

/// The clients that wait for a report.
#[derive(Debug, Default)]
pub(in crate::controller) struct Reporting {
    /// Clients of the next report.
    waiting: Vec<Reader>,
    /// Clients of the report that is being made.
    served: Option<Vec<Reader>>,
    /// A report to be encoded.
    complete: Option<StatusReport>,
}

/// A report to be encoded.
#[derive(Debug)]
pub struct ReportJob {
    report: StatusReport,
    tenants: BTreeSet<Option<String>>,
    len_max: usize,
}

/// An encoded report: whole, or the part of a tenant.
pub type EncodedReport = BTreeMap<Option<String>, Result<Frames, FrameError>>;

impl ReportJob {
    /// Encode the report. Call it with the machine unlocked. A part that does not fit into frames is an error.
    pub fn run(self) -> EncodedReport {
        let Self { report, tenants, len_max } = self;
        let part = |tenant: Option<String>| {
            let part = match &tenant {
                Some(tenant) => part_of(&report, tenant),
                None => report.clone(),
            };
            (tenant, encode(part, len_max))
        };
        tenants.into_iter().map(part).collect()
    }
}

/// What a tenant sees of a report: its own jobs and resources.
fn part_of(report: &StatusReport, tenant: &str) -> StatusReport {
    let jobs: Vec<_> = report.jobs.iter().filter(|job| job.tenant == tenant).cloned().collect();
    let recoveries = report.recoveries.iter().filter(|recovery| jobs.iter().any(|job| job.name == recovery.job));
    StatusReport {
        fabric: report.fabric,
        devices: Vec::new(),
        jobs_left_out: 0,
        tenants: report.tenants.iter().filter(|other| other.name == tenant).cloned().collect(),
        recoveries: recoveries.cloned().collect(),
        pair: report.pair.clone(),
        jobs,
    }
}

/// What a device is asked for.
#[derive(Debug, Clone, Copy)]
enum Query {
    Stats,
    Slots,
}

/// A report, and the indices of the devices that are queried.
#[derive(Debug)]
pub(in crate::controller) struct PendingReport {
    report: Report,
    asked: Vec<(usize, Query)>,
}

impl State {
    /// A client requests a report.
    pub(super) fn request_report(&mut self, client: ConnId, tenant: Option<&str>) {
        self.reporting.waiting.push((client, tenant.map(str::to_owned)));
    }

    /// Start a report if clients wait for one and none is being made.
    pub(in crate::controller) fn start_report(&mut self, config: &ControllerConfig) {
        if self.reporting.served.is_some() || self.reporting.waiting.is_empty() {
            return;
        }
        self.reporting.served = Some(std::mem::take(&mut self.reporting.waiting));
        let mut report = self.report(config);
        // Do not query a device again until it has answered the earlier query.
        let (mut asked, mut requests) = (Vec::new(), Vec::new());
        for (index, device) in report.devices.iter().enumerate() {
            if self.links.has_overdue_stats(device) {
                report.report.devices[index].stats = Err(STATS_OVERDUE.to_owned());
            } else {
                asked.push((index, Query::Stats));
                requests.push((Arc::clone(device), Request::Stats));
                if device.announce.slots.is_some() {
                    asked.push((index, Query::Slots));
                    requests.push((Arc::clone(device), Request::Update(UpdateRequest::Status)));
                }
            }
        }
        let purpose = Purpose::Report(PendingReport { report, asked });
        self.links.exchange(&mut self.output, (purpose, OnTimeout::Report, self.now + STATS_LIMIT), requests);
    }

    /// Handle the counters of the devices.
    pub(super) fn finish_report(&mut self, PendingReport { report, asked }: PendingReport, replies: Vec<Reply>) {
        let mut report = report.report;
        for ((index, query), reply) in asked.into_iter().zip(replies) {
            let device = &mut report.devices[index];
            match (query, reply) {
                (Query::Stats, reply) => device.stats = expect_stats(reply).map_err(|error| error.to_string()),
                (Query::Slots, Ok(Response::Update(status))) => device.slots = Some(status.slots),
                // They stay as they were reported last.
                (Query::Slots, _) => {}
            }
        }
        self.reporting.complete = Some(report);
    }

    /// Whether a report is to be encoded.
    pub(in crate::controller) const fn has_report(&self) -> bool {
        self.reporting.complete.is_some()
    }

    /// The next report to encode.
    pub(in crate::controller) fn next_report(&mut self, config: &ControllerConfig) -> Option<ReportJob> {
        let len_max = REPLY_LEN_MAX.min(config.limits.peer_output_bytes / 2);
        let served = self.reporting.served.iter().flatten();
        let tenants = served.map(|(_, tenant)| tenant.clone()).collect();
        self.reporting.complete.take().map(|report| ReportJob { report, tenants, len_max })
    }

    /// Send an encoded report to the clients that wait for it.
    pub(in crate::controller) fn send_report(&mut self, parts: EncodedReport) {
        let clients = self.reporting.served.take().unwrap_or_default();
        for (part, frames) in parts {
            let readers = clients.iter().filter(|(_, tenant)| *tenant == part).map(|(client, _)| *client);
            self.output.broadcast(readers, frames);
        }
    }
}
