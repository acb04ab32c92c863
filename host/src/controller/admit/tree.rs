//! Plans a job's tree on the fabric with the devices that are connected.

use super::{Devices, PlacementRequest, children_max, shard_of};
use crate::controller::ControllerConfig;
use crate::controller::resources::ResourceLedger;
use crate::plan::{DeviceLimits, FabricCosts, HostSelection, Limits, Plan, Planner, Pricing, Size};
use crate::topo::Fabric;
use crate::transport::local::HostGroups;

/// Build a fabric of one switch that connects all hosts.
pub(super) fn flat_fabric(switch: &str, hosts: usize) -> Result<Fabric, String> {
    let mut text = format!("[[switch]]\nname = {switch:?}\naggregation = true\n");
    for host in 0..hosts {
        let host = format!("host-{host}");
        text.push_str(&format!("[[host]]\nname = {host:?}\n[[link]]\nends = [{host:?}, {switch:?}]\n"));
    }
    Fabric::from_toml(&text).map_err(|error| format!("cannot use device {switch:?} as a one-level fabric: {error}"))
}

/// Plan a tree with what the ledger has available, on cables that carry the edges of all other trees.
pub(super) fn plan_tree(
    (config, planner): (&ControllerConfig, &Planner<'_>),
    devices: &Devices,
    ledger: &ResourceLedger,
    (request, groups): (PlacementRequest<'_>, &HostGroups),
) -> Result<Plan, String> {
    let available = ledger.available_everywhere(request.tenant);
    let limits = devices.values().filter_map(|device| {
        let left = available(&device.key());
        let slots = if left.groups == 0 { 0 } else { left.slots };
        let slots_free = u32::try_from(slots).unwrap_or(u32::MAX);
        let limits = DeviceLimits { max_children: children_max(device), slots_free, port: None };
        Some((planner.find_switch(device.name())?, limits))
    });
    let costs = FabricCosts {
        chunk_bytes: config.chunk_max_bytes.into(),
        window_bytes: config.window_bytes.max(1),
        ..FabricCosts::DATA_SHEET
    };
    let limits = Limits {
        // The minimum window. The actual one is sized later, to what is available.
        slots_needed: 2 * u32::from(shard_of(devices)?.max_in_window(1) as u16),
        devices: Some(limits.collect()),
        pricing: Pricing { costs, size: Size::Any, load: ledger.load_of_cables(), routes: None },
        ..Limits::default()
    };
    let names: Option<Vec<String>> =
        groups.lowest().map(|rank| request.requests[rank.0 as usize].host.clone()).collect();
    let hosts = names.map_or(HostSelection::First(groups.len()), HostSelection::Named);
    planner.plan(&hosts, &limits).map_err(|error| error.to_string())
}
