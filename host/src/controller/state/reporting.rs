//! When reports are made: one at a time, for all clients that wait, with the counters of all devices.
//!
//! So many requests cost as much as one, and a report that waits for a device delays nobody else. A report may be long,
//! so it is encoded outside ([`State::next_report`]).

use super::report::{Report, encode};
use super::{Purpose, State};
use crate::controller::ControllerConfig;
use crate::controller::device::{OnTimeout, Reply, expect_stats};
use crate::controller::limits::REPLY_LEN_MAX;
use crate::controller::outbox::Frames;
use crate::controller::output::ConnId;
use crate::controller::proto::StatusReport;
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ctrl::{FrameError, Request};

/// How long all devices together may take to report their counters.
const STATS_LIMIT: Duration = Duration::from_secs(2);

/// Shown for a device that still owes the counters of an earlier report.
const STATS_OVERDUE: &str = "not queried: it has not answered an earlier query";

/// The clients that wait for a report.
#[derive(Debug, Default)]
pub(in crate::controller) struct Reporting {
    /// Clients of the next report.
    waiting: Vec<ConnId>,
    /// Clients of the report that is being made.
    served: Option<Vec<ConnId>>,
    /// A report to be encoded.
    complete: Option<StatusReport>,
}

/// A report to be encoded.
#[derive(Debug)]
pub struct ReportJob {
    report: StatusReport,
    len_max: usize,
}

impl ReportJob {
    /// Encode the report. Call it with the machine unlocked.
    ///
    /// # Errors
    /// [`FrameError`] if the report does not fit into frames.
    pub fn run(self) -> Result<Frames, FrameError> {
        encode(self.report, self.len_max)
    }
}

/// A report, and the indices of the devices that are queried.
#[derive(Debug)]
pub(in crate::controller) struct PendingReport {
    report: Report,
    asked: Vec<usize>,
}

impl State {
    /// A client requests a report.
    pub(super) fn request_report(&mut self, client: ConnId) {
        self.reporting.waiting.push(client);
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
                asked.push(index);
                requests.push((Arc::clone(device), Request::Stats));
            }
        }
        let purpose = Purpose::Report(PendingReport { report, asked });
        self.links.exchange(&mut self.output, (purpose, OnTimeout::Report, self.now + STATS_LIMIT), requests);
    }

    /// Handle the counters of the devices.
    pub(super) fn finish_report(&mut self, PendingReport { report, asked }: PendingReport, replies: Vec<Reply>) {
        let mut report = report.report;
        for (index, reply) in asked.into_iter().zip(replies) {
            report.devices[index].stats = expect_stats(reply).map_err(|error| error.to_string());
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
        self.reporting.complete.take().map(|report| ReportJob { report, len_max })
    }

    /// Send an encoded report to the clients that wait for it.
    pub(in crate::controller) fn send_report(&mut self, frames: Result<Frames, FrameError>) {
        let clients = self.reporting.served.take().unwrap_or_default();
        self.output.broadcast(clients.into_iter(), frames);
    }
}
