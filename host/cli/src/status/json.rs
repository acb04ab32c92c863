//! The report as JSON: the controller's, with names and rates added to each device and the path to each job.

use super::rates::{Rates, Sample};
use super::text::drops;
use crate::exit::Failure;
use serde_json::{Map, Value, json};
use sumac::controller::proto::{DeviceStatus, JobStatus};

/// Return a sample as JSON, with the rates since an earlier one if there is one.
///
/// # Errors
/// The report cannot be serialised, which is a bug.
pub(super) fn value(sample: &Sample, rates: Option<&Rates>) -> Result<Value, Failure> {
    let report = &sample.report;
    let mut value = serde_json::to_value(report).map_err(Failure::run)?;
    value["interval_s"] = json!(rates.map(|rates| rates.interval.as_secs_f64()));
    for (device, status) in each(&mut value, "devices").zip(&report.devices) {
        device.insert("drops".into(), drops_of(status));
        device.insert("rates".into(), json!(rates.and_then(|rates| rates.devices.get(&status.name))));
    }
    for (job, status) in each(&mut value, "jobs").zip(&report.jobs) {
        job.insert("path".into(), json!(path(status)));
    }
    Ok(value)
}

/// Return the objects in an array of the report.
fn each<'v>(value: &'v mut Value, key: &str) -> impl Iterator<Item = &'v mut Map<String, Value>> {
    value.get_mut(key).and_then(Value::as_array_mut).into_iter().flatten().filter_map(Value::as_object_mut)
}

/// Return how many packets a device dropped, by reason; null if it did not answer.
fn drops_of(device: &DeviceStatus) -> Value {
    let Ok(stats) = &device.stats else { return Value::Null };
    drops(&stats.counters).map(|(reason, count)| (reason.name().to_owned(), json!(count))).collect::<Map<_, _>>().into()
}

/// Return which path the calls of a job take that name no algorithm; `None` before it has started.
pub(super) fn path(job: &JobStatus) -> Option<&'static str> {
    job.tree.as_ref().map(|tree| if tree.is_ok() { "tree" } else { "host" })
}

#[cfg(test)]
mod tests {
    use super::super::text::tests::{device, job, report};
    use super::*;
    use sumac::controller::proto::StatusReport;
    use sumac_hal::ctrl::DropReason;

    #[test]
    fn devices_have_named_drops_and_jobs_a_path() {
        let mut busy = device("leaf0");
        let counters = &mut busy.stats.as_mut().expect("it answered").counters;
        (0..3).for_each(|_| counters.drop_packet(DropReason::Stale));
        let silent = DeviceStatus { stats: Err("no response".into()), ..device("leaf1") };
        let jobs = vec![job(), JobStatus { tree: Some(Err("no slots".into())), ..job() }];
        let report = StatusReport { devices: vec![busy, silent], jobs, ..report() };
        let value = value(&Sample::new(report), None).expect("JSON");
        let (busy, silent) = (&value["devices"][0], &value["devices"][1]);
        assert_eq!(busy["drops"], json!({ "stale": 3 }));
        assert_eq!(busy["stats"]["Ok"]["counters"]["dropped"][DropReason::Stale as usize], 3, "the old key stays");
        assert_eq!((&silent["drops"], &silent["stats"]["Err"]), (&Value::Null, &json!("no response")));
        assert_eq!((&value["interval_s"], &busy["rates"]), (&Value::Null, &Value::Null));
        assert_eq!((&value["jobs"][0]["path"], &value["jobs"][1]["path"]), (&Value::Null, &json!("host")));
    }

    #[test]
    fn watched_devices_have_rates() {
        let sample = || Sample::new(StatusReport { devices: vec![device("leaf0")], ..report() });
        let (before, now) = (sample(), sample());
        let value = value(&now, Some(&now.rates_since(&before))).expect("JSON");
        assert!(value["interval_s"].is_f64(), "{value}");
        assert_eq!(value["devices"][0]["rates"]["packets_in"], 0.0, "{value}");
    }
}
