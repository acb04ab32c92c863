//! Plans a job's tree on the fabric with the devices that are connected.

use super::rails::find_adapter;
use super::{Devices, PlacementRequest, children_max, shard_of};
use crate::controller::ControllerConfig;
use crate::controller::resources::ResourceLedger;
use crate::plan::{
    DeviceLimits, FabricCosts, HostSelection, Limits, Plan, PlannedTree, Planner, Pricing, Size, TreesLimit,
};
use crate::select::LinkFacts;
use crate::topo::{Fabric, HostId};
use crate::transport::local::HostGroups;
use std::collections::BTreeSet;

/// Build a fabric of one switch that connects all hosts.
pub(super) fn flat_fabric(switch: &str, hosts: usize) -> Result<Fabric, String> {
    let mut text = format!("[[switch]]\nname = {switch:?}\naggregation = true\n");
    for host in 0..hosts {
        let host = format!("host-{host}");
        text.push_str(&format!("[[host]]\nname = {host:?}\n[[link]]\nends = [{host:?}, {switch:?}]\n"));
    }
    Fabric::from_toml(&text).map_err(|error| format!("cannot use device {switch:?} as a one-level fabric: {error}"))
}

/// Plan a tree with what the ledger has available, on cables that carry the edges of all other trees. Returns also the
/// limits of the plan.
pub(super) fn plan_tree(
    (config, planner): (&ControllerConfig, &Planner<'_>),
    devices: &Devices,
    ledger: &ResourceLedger,
    (request, groups): (PlacementRequest<'_>, &HostGroups),
) -> Result<(Plan, Limits), String> {
    let (hosts, limits) = planning_task((config, planner), devices, ledger, (request, groups))?;
    let plan = planner.plan(&hosts, &limits).map_err(|error| error.to_string())?;
    Ok((plan, limits))
}

/// What the rates of cables allow the tree and the host algorithms, if all are known. Further trees of the communicator
/// do not count: each takes a share of the bytes.
pub(super) fn link_facts(
    planner: &Planner<'_>,
    ledger: &ResourceLedger,
    (request, groups): (PlacementRequest<'_>, &HostGroups),
    (plan, limits): (&Plan, Limits),
) -> Option<LinkFacts> {
    let communicator = request.requests.first()?.communicator();
    let pricing = Pricing { load: ledger.load_by_others(request.tenant, communicator), ..limits.pricing };
    let places = groups.group_of_ranks();
    let times = planner.cable_times(plan, &Limits { pricing, ..limits }, (&places, request.shape))?;
    let ps = |byte_s: f64| (byte_s * 1e12).round() as u64;
    Some(LinkFacts {
        tree_byte_ps: ps(times.tree_s),
        schedule_byte_ps: times.schedules_s.iter().map(|&(path, byte_s)| (path, ps(byte_s))).collect(),
        others_byte_ps: ps(times.others_s),
    })
}

/// A tree to be: its devices, its share of each message in thousandths, and where it is entered.
#[derive(Debug)]
pub(in crate::controller) struct TreeSketch {
    pub(in crate::controller) devices: BTreeSet<String>,
    pub(in crate::controller) share: u16,
    /// The adapter of each rank; empty without a fabric.
    pub(in crate::controller) adapters: Vec<HostId>,
}

/// Plan up to `max_trees` trees on the fabric, where they are faster than one. Returns also what keeps them from a
/// higher rate.
pub(in crate::controller) fn sketch_trees(
    (config, planner): (&ControllerConfig, &Planner<'_>),
    devices: &Devices,
    ledger: &ResourceLedger,
    request: PlacementRequest<'_>,
    max_trees: u8,
) -> Result<(Vec<TreeSketch>, TreesLimit), String> {
    let (hosts, limits) = planning_task((config, planner), devices, ledger, (request, &request.groups()))?;
    let planned = planner.plan_trees(&hosts, &limits, max_trees.into()).map_err(|error| error.to_string())?;
    let sketch = |tree: &PlannedTree| {
        let named = tree.plan.nodes.iter().flat_map(|node| [&node.name, &node.guid]);
        let devices = named.filter(|name| devices.contains_key(*name)).cloned().collect();
        let adapters = tree.plan.ranks.iter().map(|rank| rank.host).collect();
        TreeSketch { devices, share: (tree.share * 1000.0).round().clamp(1.0, 1000.0) as u16, adapters }
    };
    Ok((planned.trees.iter().map(sketch).collect(), planned.limited_by))
}

/// The hosts of a job, and the limits of its plan.
fn planning_task(
    (config, planner): (&ControllerConfig, &Planner<'_>),
    devices: &Devices,
    ledger: &ResourceLedger,
    (request, groups): (PlacementRequest<'_>, &HostGroups),
) -> Result<(HostSelection, Limits), String> {
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
        pricing: Pricing { costs, size: Size::Any, load: ledger.load_of_cables(), routes: config.routes.clone() },
        ..Limits::default()
    };
    Ok((host_selection(config, request, groups), limits))
}

/// The hosts of a job.
fn host_selection(config: &ControllerConfig, request: PlacementRequest<'_>, groups: &HostGroups) -> HostSelection {
    if let Some(adapters) = request.adapters {
        return HostSelection::Rails(adapters.to_vec());
    }
    let named = |name: &str| {
        let adapter = config.fabric.as_ref().and_then(|fabric| Some(fabric.host(find_adapter(fabric, name)?)));
        adapter.map_or_else(|| name.to_owned(), |adapter| adapter.name.clone())
    };
    let names: Option<Vec<String>> =
        groups.lowest().map(|rank| request.requests[rank.0 as usize].host.as_deref().map(named)).collect();
    names.map_or(HostSelection::First(groups.len()), HostSelection::Named)
}
