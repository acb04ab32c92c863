//! Fabric descriptions: `ibnetdiscover` dumps and TOML.
//!
//! Input: a byte (even: TOML), then the text.

use std::collections::BTreeSet;
use sumac::topo::{Device, Fabric};

/// Run the target.
///
/// # Panics
/// If an invariant is violated.
pub fn run(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    // As `Fabric::read` does.
    let text = String::from_utf8_lossy(bytes);
    let fabric = if kind % 2 == 0 { Fabric::from_toml(&text) } else { Fabric::from_ibnetdiscover(&text) };
    match fabric {
        Ok(fabric) => check(&fabric),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Check the invariants of `sumac::topo`.
fn check(fabric: &Fabric) {
    let switches = fabric.switches().iter().map(|switch| &switch.name);
    let hosts = fabric.hosts().iter().map(|host| &host.name);
    let names: BTreeSet<_> = switches.chain(hosts).collect();
    assert_eq!(names.len(), fabric.switches().len() + fabric.hosts().len(), "names are unique");
    for link in fabric.links() {
        assert!(link.ends.iter().any(|end| matches!(end.device, Device::Switch(_))), "an end at a switch");
        for end in link.ends {
            match end.device {
                Device::Switch(id) => assert!(!fabric.switch(id).name.is_empty()),
                Device::Host(id) => assert!(!fabric.host(id).name.is_empty()),
            }
        }
    }
    for id in fabric.switch_ids() {
        let adjacent = fabric.adjacent(id);
        assert!(adjacent.is_sorted(), "adjacency is sorted");
        assert!(
            adjacent
                .iter()
                .all(|&(other, link)| { fabric.link(link).across(Device::Switch(id)) == Some(Device::Switch(other)) })
        );
    }
    for warning in fabric.warnings() {
        assert!(!warning.to_string().is_empty());
    }
    // Derived fabrics keep the invariants.
    let fabric = fabric.clone().with_aggregation_everywhere();
    assert!(fabric.switches().iter().all(|switch| switch.aggregation.is_some()));
}
