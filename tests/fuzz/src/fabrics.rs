//! Fabric descriptions of every format, and topologies of servers.
//!
//! Input: a byte (modulo 4: TOML, an `ibnetdiscover` dump, whatever the content tells, an NCCL topology), then the
//! text.

use std::collections::BTreeSet;
use sumac::topo::{Device, Difference, Fabric, Inside, Selection, Unit, Which};

/// Run the target.
///
/// # Panics
/// If an invariant is violated.
pub fn run(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    // As `Fabric::read` does.
    let text = String::from_utf8_lossy(bytes);
    let fabric = match kind % 4 {
        0 => Fabric::from_toml(&text),
        1 => Fabric::from_ibnetdiscover(&text),
        2 => Fabric::from_text(&text),
        _ => {
            if let Err(error) = Inside::from_nccl(&text) {
                assert!(!error.to_string().is_empty());
            }
            return;
        }
    };
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
    let mut grouped: Vec<_> = fabric.servers().iter().flat_map(|server| &server.adapters).collect();
    grouped.sort();
    assert!(grouped.into_iter().copied().eq(fabric.host_ids()), "every host is in one server");
    for (id, server) in fabric.server_ids().zip(fabric.servers()) {
        assert!(server.adapters.iter().all(|host| fabric.host(*host).server == id));
    }
    for id in fabric.host_ids() {
        assert_eq!(fabric.find_host(&fabric.host(id).name), Some(id));
    }
    for unit in [Unit::Server, Unit::Adapter] {
        let selection = Selection { unit, which: Which::All, exclude: Vec::new() };
        if let Ok(taken) = selection.resolve(fabric) {
            let hosts: BTreeSet<_> = taken.hosts.iter().collect();
            assert_eq!(hosts.len(), taken.hosts.len(), "no host twice");
            assert!(!taken.describe(fabric).is_empty());
        }
    }
    assert!(Difference::between(fabric, fabric).is_empty());
    // Derived fabrics keep the invariants.
    let fabric = fabric.clone().with_aggregation_everywhere();
    assert!(fabric.switches().iter().all(|switch| switch.aggregation.is_some()));
}
