//! Rates of devices, from the counters of two reports.

use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use sumac::controller::proto::StatusReport;
use sumac_hal::ctrl::Stats;

/// A report, and when it arrived.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) report: StatusReport,
    at: Instant,
}

/// What a device did per second between two samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct DeviceRates {
    pub(super) packets_in: f64,
    pub(super) marked: f64,
    pub(super) bytes_in: f64,
    pub(super) packets_out: f64,
    pub(super) bytes_out: f64,
    pub(super) contributions: f64,
    pub(super) zero_copy_contributions: f64,
    pub(super) completed: f64,
    pub(super) dropped: f64,
}

/// The rates of all devices that have them, by name.
#[derive(Debug)]
pub(super) struct Rates {
    /// The time between the samples.
    pub(super) interval: Duration,
    pub(super) devices: BTreeMap<String, DeviceRates>,
}

impl Sample {
    /// Take a report that has just arrived.
    pub(super) fn new(report: StatusReport) -> Self {
        Self { report, at: Instant::now() }
    }

    /// Return the rates since `before`.
    pub(super) fn rates_since(&self, before: &Self) -> Rates {
        between(&before.report, &self.report, self.at.saturating_duration_since(before.at))
    }
}

/// Return the rates between two reports. A device that is missing in one of them, or that has restarted meanwhile, has
/// none.
fn between(before: &StatusReport, now: &StatusReport, interval: Duration) -> Rates {
    let stats = |report: &StatusReport| -> BTreeMap<String, Stats> {
        let devices = report.devices.iter();
        devices.filter_map(|device| Some((device.name.clone(), *device.stats.as_ref().ok()?))).collect()
    };
    let before = stats(before);
    let seconds = interval.as_secs_f64();
    let rates = |(name, now): (String, Stats)| {
        let then = before.get(&name).filter(|then| then.boot_id == now.boot_id && seconds > 0.0)?;
        let (now, then) = (&now.counters, &then.counters);
        let rate = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds;
        let rates = DeviceRates {
            packets_in: rate(now.packets_in, then.packets_in),
            marked: rate(now.marked, then.marked),
            bytes_in: rate(now.bytes_in, then.bytes_in),
            packets_out: rate(now.packets_out, then.packets_out),
            bytes_out: rate(now.bytes_out, then.bytes_out),
            contributions: rate(now.contributions, then.contributions),
            zero_copy_contributions: rate(now.zero_copy_contributions, then.zero_copy_contributions),
            completed: rate(now.completed, then.completed),
            dropped: rate(now.dropped.iter().sum(), then.dropped.iter().sum()),
        };
        Some((name, rates))
    };
    Rates { interval, devices: stats(now).into_iter().filter_map(rates).collect() }
}

#[cfg(test)]
mod tests {
    use super::super::text::tests::{device, report};
    use super::*;
    use sumac_hal::ids::BootId;

    fn with(boot_id: u64, packets_in: u64, zero_copy_contributions: u64) -> StatusReport {
        let mut device = device("leaf0");
        let stats = device.stats.as_mut().expect("it answered");
        stats.boot_id = BootId(boot_id);
        (stats.counters.packets_in, stats.counters.zero_copy_contributions) = (packets_in, zero_copy_contributions);
        StatusReport { devices: vec![device], ..report() }
    }

    #[test]
    fn rate_is_the_difference_per_second() {
        let rates = between(&with(1, 100, 7), &with(1, 150, 17), Duration::from_millis(2500));
        let device = rates.devices["leaf0"];
        assert_eq!((device.packets_in, device.zero_copy_contributions, device.packets_out), (20.0, 4.0, 0.0));
    }

    #[test]
    fn restarted_or_new_device_has_no_rate() {
        let second = Duration::from_secs(1);
        assert!(between(&with(1, 100, 0), &with(2, 150, 0), second).devices.is_empty());
        assert!(between(&report(), &with(1, 150, 0), second).devices.is_empty());
        assert!(between(&with(1, 0, 0), &with(1, 150, 0), Duration::ZERO).devices.is_empty());
    }
}
