//! Tests of loss and rating, from counters as devices and ranks report them.

use super::*;
use std::collections::BTreeMap;
use sumac::transport::packets::EndpointStats;
use sumac_hal::ctrl::Counters;

fn rank(packets_out: u64, packets_in: u64, retransmits: u64) -> EndpointStats {
    EndpointStats { packets_out, packets_in, retransmits, ..EndpointStats::default() }
}

fn device(packets_in: u64, packets_out: u64, answers_resent: u64, contributions_resent: u64) -> Counters {
    Counters { packets_in, packets_out, answers_resent, contributions_resent, ..Counters::default() }
}

fn after(rank: EndpointStats, devices: &[(&str, Counters)]) -> Snapshot {
    let devices = devices.iter().map(|(name, counters)| ((*name).to_owned(), *counters)).collect();
    Snapshot { rank, devices, shared: false }
}

/// Return a snapshot with all counters at zero.
fn zero(names: &[&str]) -> Snapshot {
    let devices: BTreeMap<_, _> = names.iter().map(|name| ((*name).to_owned(), Counters::default())).collect();
    Snapshot { devices, ..Snapshot::default() }
}

#[test]
fn missing_and_retransmitted_packets_count_as_lost() {
    // 1000 up of which 10 are lost, 1005 down of which 5 are.
    let now = after(rank(1010, 1000, 10), &[("a", device(1000, 1005, 5, 0))]);
    let flows = Flows::to_device(&zero(&["a"]), &now, "a");
    assert_eq!(flows.up, Flow { sent: 1010, lost: 10 });
    assert_eq!(flows.down, Flow { sent: 1005, lost: 5 });
    assert!((flows.loss() - 15.0 / 2015.0).abs() < 1e-12);
}

#[test]
fn late_packets_count_as_lost_only_if_other_jobs_share_the_device() {
    let late = after(rank(1010, 1005, 10), &[("a", device(1010, 1005, 5, 0))]);
    let before = zero(&["a"]);
    assert_eq!(Flows::to_device(&before, &late, "a").loss(), 0.0);
    let shared = Snapshot { shared: true, ..late };
    assert_eq!(Flows::to_device(&before, &shared, "a").up.lost, 10);
}

#[test]
fn malformed_packets_count_as_lost() {
    let mut counters = device(1010, 1000, 0, 0);
    counters.dropped[0] = 10;
    let now = after(rank(1010, 1000, 10), &[("a", counters)]);
    assert_eq!(Flows::to_device(&zero(&["a"]), &now, "a").up.lost, 10);
}

#[test]
fn losses_are_attributed_to_the_link_that_caused_them() {
    let before = zero(&["child", "root"]);
    // The rank's link loses 20 contributions; between the devices 7 contributions and 3 results are lost.
    let child = device(1000 + 1000, 1000 + 1007, 0, 7);
    let now = after(rank(1020, 1000, 20), &[("child", child), ("root", device(1000, 1003, 3, 0))]);
    let flows = Flows::between(&before, &now, "child", "root");
    assert_eq!((flows.up, flows.down), (Flow { sent: 1007, lost: 7 }, Flow { sent: 1003, lost: 3 }));
    // If only the rank's link loses packets, retransmissions between the devices are no loss.
    let child = device(1000 + 1003, 1000 + 1007, 0, 7);
    let now = after(rank(1020, 1000, 20), &[("child", child), ("root", device(1007, 1003, 3, 0))]);
    assert_eq!(Flows::between(&before, &now, "child", "root").loss(), 0.0);
}

#[test]
fn lossy_link_is_bad_and_names_loss_direction_and_limit() {
    let link = Link::Between("leaf0".into(), "spine0".into());
    let flows = Flows { up: Flow { sent: 1000, lost: 50 }, down: Flow { sent: 1000, lost: 2 } };
    let measured = Measured { flows, latency_ns: 12_345.0, bandwidth_gbytes_s: 1.5 };
    let row = Row::measured(&link, &measured, 0.1);
    let problem = row.problem.expect("a problem");
    assert!(!row.ok && problem.contains("leaf0 - spine0 loses 2.60 %"), "{problem}");
    assert!(problem.contains("mostly towards spine0") && problem.contains("limit 0.1 %"), "{problem}");
    let good = Row::measured(&link, &measured, 2.6);
    assert!(good.ok && good.problem.is_none());
}

#[test]
fn json_row_has_the_documented_keys() {
    let row = Row::unreachable(&Link::ToDevice("leaf0".into()), "no result within 10 s");
    let json = serde_json::to_string(&row).expect("plain data");
    let start = "{\"from\":\"rank\",\"to\":\"leaf0\",\"ok\":false,\"packets\":null,\"lost\":null,\"loss_percent\":null,\
                 \"latency_us\":null,\"bandwidth_gbytes_s\":null,\"problem\":\"rank - leaf0 does not work: no result";
    assert!(json.starts_with(start), "{json}");
}
