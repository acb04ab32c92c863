//! Plans over the forwarding tables of real tools' fabrics.

use super::*;
use crate::topo::routes::tables;
use crate::topo::tests::shared_text;
use crate::topo::{Device, DevicePlace};
use std::sync::Arc;

/// A fabric and its forwarding tables from the shared inputs, with a device at each switch.
fn real(name: &str) -> Option<(Fabric, Limits)> {
    let fabric = shared_input(&format!("{name}.ibnetdiscover"))?.with_devices_assumed();
    Some((fabric.clone(), with_tables(&fabric, name)))
}

fn with_tables(fabric: &Fabric, name: &str) -> Limits {
    let text = shared_text(&format!("{name}.lfts")).expect("tables beside the fabric");
    let routes = fabric.read_routes(&text).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(routes.unknown(), 0);
    Limits { pricing: Pricing { routes: Some(Arc::new(routes)), ..Pricing::default() }, ..Limits::default() }
}

#[test]
fn plans_follow_real_forwarding_tables() {
    for name in ["real-ft4", "real-t44", "real-dfp"] {
        let Some((fabric, limits)) = real(name) else { return };
        let plan = planned(&fabric, HostSelection::All, &limits);
        assert_eq!((plan.routing, plan.ranks.len()), (Routing::Tables, fabric.hosts().len()), "{name}");
        assert!(Planner::new(&fabric).ring_seconds(&plan, 8, &limits.pricing).is_some_and(|seconds| seconds > 0.0));
        assert_ne!(planned(&fabric, HostSelection::All, &Limits::default()).routing, Routing::Tables);
    }
}

#[test]
fn sharing_is_that_of_the_tables_even_where_other_routes_would_share_less() {
    // Two leaves with two hosts each and devices at one leaf only; the tables send all through spine0.
    let mut toml = String::new();
    for (switch, aggregation) in [("leaf0", true), ("leaf1", false), ("spine0", false), ("spine1", false)] {
        toml += &format!("[[switch]]\nname = \"{switch}\"\naggregation = {aggregation}\n");
    }
    for host in 0..4 {
        let leaf = host / 2;
        toml +=
            &format!("[[host]]\nname = \"h{host}\"\n[[link]]\nends = [\"h{host}\", \"leaf{leaf}:{}\"]\n", 1 + host % 2);
    }
    for (leaf, spine) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        toml += &format!("[[link]]\nends = [\"leaf{leaf}:{}\", \"spine{spine}:{}\"]\n", 3 + spine, 1 + leaf);
    }
    let fabric = Fabric::from_toml(&toml).expect("valid");
    let assumed = planned(&fabric, HostSelection::All, &Limits::default());
    assert_eq!(assumed.max_link_sharing, 1, "one over each spine");
    // Names stand for GUIDs in such a fabric, so the tables are made by hand.
    let through_spine0 = tables(&fabric, |at, to| match (at, to) {
        ("leaf0", "leaf1") | ("leaf1", "leaf0") => Some(3),
        ("spine0" | "spine1", "leaf0") => Some(1),
        ("spine0" | "spine1", "leaf1") => Some(2),
        _ => None,
    });
    let limits = Limits {
        pricing: Pricing { routes: Some(Arc::new(through_spine0)), ..Pricing::default() },
        ..Limits::default()
    };
    let plan = planned(&fabric, HostSelection::All, &limits);
    assert_eq!((plan.max_link_sharing, plan.routing), (2, Routing::Tables));
    let violation = verify(&fabric, &assumed, &limits).expect_err("other routes than those of the tables");
    assert!(matches!(violation, Violation::OtherRoute { .. }), "{violation}");
    let loops = tables(&fabric, |at: &str, _: &str| if at.starts_with("leaf") { Some(3) } else { Some(2) });
    let limits =
        Limits { pricing: Pricing { routes: Some(Arc::new(loops)), ..Pricing::default() }, ..Limits::default() };
    let error = super::plan(&fabric, &HostSelection::All, &limits).expect_err("no route leads to the device");
    assert!(matches!(error, PlanError::Disconnected { .. }), "{error}");
}

#[test]
fn tables_lead_to_devices_at_ports() {
    let Some((fabric, _)) = real("real-ft4") else { return };
    let edge = fabric.find_switch("edge0-0").expect("an edge switch");
    let places: Vec<DevicePlace> = fabric.host_ids().map(DevicePlace::Host).collect();
    for places in [vec![DevicePlace::Port(edge, None)], places] {
        let placed = fabric.with_devices(&places).expect("free places");
        let limits = with_tables(&placed, "real-ft4");
        let plan = planned(&placed, HostSelection::All, &limits);
        assert!(placed.switch(plan.root().switch).is_device);
    }
}

#[test]
fn tables_of_another_fabric_are_refused() {
    let Some((fabric, _)) = real("real-ft4") else { return };
    let text = shared_text("real-t44.lfts").expect("beside the other file");
    assert!(fabric.read_routes(&text).is_err());
    for (text, told) in [
        ("0x0001 001 : (Channel Adapter portguid 0x0000000000100001: 'h0')", "line 1: found `0x0001 001"),
        ("Unicast lids [0x0-0x24] of switch Lid 7\n", "guid 0x..."),
        (
            "Unicast lids [0x0-0x24] of switch Lid 7 guid 0x00000000002000ff (x):\n",
            "no switch with GUID 00000000002000ff",
        ),
        ("", "20 of the fabric's switches have no table"),
    ] {
        let error = fabric.read_routes(text).expect_err(text).to_string();
        assert!(error.contains(told), "{error}");
    }
    // A table is of the switch, and the switch of the port.
    let limits = with_tables(&fabric, "real-ft4");
    let tables = limits.pricing.routes.expect("tables");
    let core = fabric.find_switch("core0").expect("a core");
    let first = fabric.host_ids().next().expect("a host");
    let link = tables.next(core, Device::Host(first)).expect("a route");
    assert!(fabric.link(link).ends.iter().any(|end| end.device == Device::Switch(core)));
}
