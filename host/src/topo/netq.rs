//! Reads NetQ's topology graph, which it learns from LLDP, in JSON.
//!
//! ```text
//! [{ "links": [{ "compounded_links": [{ "interfaces": [
//!        { "node": "node9", "interface": "swp17s0" }, { "node": "node12", "interface": "ens4f0np0" }] }] }],
//!    "nodes": [{ "compounded_nodes": [{ "id": "node9", "name": "leaf1", "device_type": "switch", "tier": 1 }] }] }]
//! ```
//!
//! A device of type `switch`, or of tier 1 and above, is a switch. Each interface of another device is an adapter of a
//! server of that name. A switch's ports are numbered in the natural order of their names, which [`Fabric::port_name`]
//! keeps. Management interfaces (`eth0`, `mgmt0`) are left out. The graph has no rates.
//!
//! LLDP reports what it hears, so a cable listed twice counts once, and one that contradicts an earlier one is left out
//! with a warning.

use super::build::{Builder, Kind, Node, Record};
use super::servers::Origin;
use super::{Fabric, FabricError, Format, natural_cmp};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap, HashSet};

#[derive(Deserialize)]
struct Graph {
    #[serde(default)]
    links: Vec<Group>,
    #[serde(default)]
    nodes: Vec<Tier>,
}

#[derive(Deserialize)]
struct Group {
    #[serde(default)]
    compounded_links: Vec<Cable>,
}

#[derive(Deserialize)]
struct Cable {
    #[serde(default)]
    interfaces: Vec<Interface>,
}

#[derive(Deserialize, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Interface {
    #[serde(default)]
    node: String,
    #[serde(default)]
    interface: String,
}

#[derive(Deserialize)]
struct Tier {
    #[serde(default)]
    compounded_nodes: Vec<Described>,
}

#[derive(Deserialize)]
struct Described {
    id: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    device_type: String,
    #[serde(default)]
    tier: Option<i64>,
}

impl Fabric {
    /// Parse NetQ's topology graph in JSON: `links[].compounded_links[].interfaces[]`.
    ///
    /// # Errors
    /// [`FabricError`] names the line of malformed JSON; a graph without a switch is refused.
    pub fn from_netq(text: &str) -> Result<Self, FabricError> {
        let graphs = if text.trim_start().starts_with('[') {
            serde_json::from_str::<Vec<Graph>>(text)
        } else {
            serde_json::from_str::<Graph>(text).map(|graph| vec![graph])
        };
        let graphs = graphs.map_err(|error| FabricError::Syntax {
            line: error.line(),
            found: format!("malformed JSON ({error})"),
            expected: "NetQ's topology graph: links[].compounded_links[].interfaces[]".into(),
        })?;
        let mut builder = Builder::default();
        let cables = cables(&graphs, &mut builder);
        let devices = Devices::new(&graphs, &cables);
        let ports = devices.add_to(&mut builder, &cables)?;
        for [a, b] in &cables {
            builder.cable(ports[a], ports[b], None, 0)?;
        }
        builder.finish(Format::NetQ, "a node with \"device_type\": \"switch\"")
    }
}

/// The graph's cables, each once, without those of management interfaces and contradictions.
fn cables<'a>(graphs: &'a [Graph], builder: &mut Builder) -> Vec<[&'a Interface; 2]> {
    let is_management = |end: &Interface| {
        let name = end.interface.to_ascii_lowercase();
        name == "eth0" || name.starts_with("mgmt")
    };
    let (mut kept, mut far_ends) = (Vec::new(), HashMap::new());
    let (mut management, mut incomplete) = (0, 0);
    let mut seen = HashSet::new();
    for cable in graphs.iter().flat_map(|graph| &graph.links).flat_map(|group| &group.compounded_links) {
        let [a, b] = cable.interfaces.as_slice() else {
            incomplete += 1;
            continue;
        };
        if [a, b].iter().any(|end| end.node.is_empty() || end.interface.is_empty()) || a.node == b.node {
            incomplete += 1;
        } else if is_management(a) || is_management(b) {
            management += 1;
        } else if seen.insert(if a < b { (a, b) } else { (b, a) }) {
            match [a, b].into_iter().find(|end| far_ends.contains_key(*end)) {
                Some(end) => {
                    let text = format!("`{}` of `{}` is in two cables; the first is kept", end.interface, end.node);
                    builder.warn(0, text);
                }
                None => {
                    far_ends.insert(a, b);
                    far_ends.insert(b, a);
                    kept.push([a, b]);
                }
            }
        }
    }
    for (count, what) in [(management, "of management interfaces"), (incomplete, "without two different ends")] {
        if count > 0 {
            builder.warn(0, format!("{count} cables {what} are left out"));
        }
    }
    kept
}

/// Names and kinds of the graph's devices, by id.
struct Devices<'a> {
    switches: BTreeMap<&'a str, &'a str>,
    servers: BTreeMap<&'a str, &'a str>,
}

impl<'a> Devices<'a> {
    fn new(graphs: &'a [Graph], cables: &[[&'a Interface; 2]]) -> Self {
        let mut devices = Self { switches: BTreeMap::new(), servers: BTreeMap::new() };
        for node in graphs.iter().flat_map(|graph| &graph.nodes).flat_map(|tier| &tier.compounded_nodes) {
            let name = if node.name.trim().is_empty() { &node.id } else { &node.name };
            let is_switch = node.device_type.contains("switch") || node.tier.is_some_and(|tier| tier > 0);
            let list = if is_switch { &mut devices.switches } else { &mut devices.servers };
            list.insert(&node.id, name.trim());
        }
        // Without a description, the ports of Cumulus Linux and SONiC tell a switch.
        let is_port = |name: &str| name.starts_with("swp") || name.starts_with("Ethernet");
        for end in cables.iter().flatten() {
            let id = end.node.as_str();
            if !devices.switches.contains_key(id) && !devices.servers.contains_key(id) && is_port(&end.interface) {
                devices.switches.insert(id, id);
            }
        }
        for end in cables.iter().flatten().filter(|end| !devices.switches.contains_key(end.node.as_str())) {
            devices.servers.entry(&end.node).or_insert(&end.node);
        }
        devices
    }

    /// Add switches and adapters, and number their ports.
    fn add_to(
        &self,
        builder: &mut Builder,
        cables: &[[&'a Interface; 2]],
    ) -> Result<HashMap<&'a Interface, (Node, u16)>, FabricError> {
        let mut switches = HashMap::new();
        for (id, name) in &self.switches {
            switches.insert(*id, builder.named(Kind::Switch, id, 0)?);
            builder.describe(switches[id], name);
        }
        let mut ends: Vec<&Interface> = cables.iter().flatten().copied().collect();
        ends.sort_by(|a, b| a.node.cmp(&b.node).then_with(|| natural_cmp(&a.interface, &b.interface)));
        let (mut ports, mut last_ports) = (HashMap::new(), HashMap::new());
        for end in ends {
            let port = if let Some(&switch) = switches.get(end.node.as_str()) {
                let last: &mut u16 = last_ports.entry(switch).or_default();
                *last = last.checked_add(1).ok_or_else(|| FabricError::Syntax {
                    line: 0,
                    found: format!("more cables at `{}`", end.node),
                    expected: "at most 65535 at one switch".into(),
                })?;
                (switch, *last)
            } else {
                let server = self.servers.get(end.node.as_str()).copied().unwrap_or(&end.node);
                let description = Some(format!("{server} {}", end.interface));
                let origin = Origin { system_image: None, server: Some(server.into()) };
                let id = format!("{}:{}", end.node, end.interface);
                let node = builder.record(&id, Record { kind: Kind::Host, description, origin, line: 0 })?;
                (node, 1)
            };
            builder.label(port, &end.interface);
            ports.insert(end, port);
        }
        Ok(ports)
    }
}
