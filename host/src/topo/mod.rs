//! The fabric: switches, hosts, aggregation nodes and the cables between them.
//!
//! [`Fabric::read`] knows a file by its content ([`Format`]): a raw `ibnetdiscover` dump, an ibsim `.net` file, TOML, a
//! Slurm `topology.conf`, or NetQ's topology graph in JSON. What a file does not say and a plan needs is an
//! [`Assumption`]. [`generate`] makes fabrics of textbook shapes, and [`Fabric::to_toml`] and [`Fabric::to_ibsim`]
//! write them.
//!
//! - A **host** here is one HCA; a rank has one.
//! - A **server** is a machine: the hosts that belong together ([`Fabric::servers`]). [`Selection`] counts servers.
//! - An **aggregation node** is the processor beside a switch that combines contributions. A dump lists it as a
//!   one-port channel adapter with that description; here it is a property of its switch. Devices may also be placed
//!   behind ports ([`Fabric::with_devices`]).
//! - A node's **name** is its description if that is unique in the fabric, else its GUID.
//! - What is **inside** a server, GPUs and PCIe, comes from NCCL's topology files ([`Inside`]).
//!
//! Invariants: ids are indices in natural name order, so the first N hosts have ids 0..N whatever the order in the
//! file; names are unique across hosts and switches; every link has at least one end at a switch; adjacency lists are
//! sorted; every host belongs to exactly one server.

mod assumption;
mod build;
mod devices;
mod diff;
mod error;
pub mod generate;
mod groups;
mod hostlist;
mod ibnetdiscover;
mod inside;
mod natural;
mod netq;
mod rate;
mod read;
pub(crate) mod routes;
mod select;
mod servers;
pub(crate) mod similar;
mod slurm;
#[cfg(test)]
pub(crate) mod tests;
mod toml_file;
mod write;

pub use assumption::Assumption;
pub use devices::{DeviceError, DevicePlace};
pub use diff::Difference;
pub use error::{FabricError, JoinError, ReadError, SelectError, Warning};
pub use generate::LeafSpine;
pub use groups::Groups;
pub use inside::{Inside, InsideAdapter, InsideGpu, Locality, NvLink};
pub use natural::natural_cmp;
pub use rate::Rate;
pub use read::{FILE_MAX_BYTES, Format};
pub use routes::{Routes, RoutesError};
pub use select::{Selection, Taken, Unit, Which};
pub use servers::{KnownBy, Server};

use std::collections::{BTreeMap, BTreeSet};

/// A switch, by its index in natural name order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SwitchId(pub u32);

/// A host (one HCA), by its index in natural name order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u32);

/// A server, by its index: those that go by a name in natural order, then the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerId(pub u32);

/// A cable, by its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u32);

/// A device that a cable can be plugged into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Device {
    /// A switch.
    Switch(SwitchId),
    /// A host's HCA.
    Host(HostId),
}

/// One end of a cable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Port {
    /// The device.
    pub device: Device,
    /// The port's number, from 1.
    pub number: u16,
}

/// A cable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// Both ends, the smaller first.
    pub ends: [Port; 2],
    /// The rate, if the source has it.
    pub rate: Option<Rate>,
}

impl Link {
    /// The device at the other end, or `None` if neither end is at `from`.
    pub fn across(&self, from: Device) -> Option<Device> {
        match self.ends {
            [near, far] if near.device == from => Some(far.device),
            [far, near] if near.device == from => Some(far.device),
            _ => None,
        }
    }
}

/// The aggregation node of a switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AggregationNode {
    /// Its own GUID, if the source has it.
    pub guid: Option<String>,
    /// The rate between switch and node, if the source has it.
    pub rate: Option<Rate>,
}

/// A switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Switch {
    /// Unique name: the description, or the GUID where that is missing or ambiguous.
    pub name: String,
    /// The GUID as 16 hex digits; in formats without GUIDs the node's id there.
    pub guid: String,
    /// The switch's own description.
    pub description: Option<String>,
    /// The aggregation node beside it, if there is one.
    pub aggregation: Option<AggregationNode>,
    /// Whether it is no switch but a device behind a port ([`Fabric::with_devices`]): it forwards nothing but what its
    /// host sends and receives.
    pub is_device: bool,
}

/// A cable from a host to a switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Uplink {
    /// The HCA's port, from 1.
    pub port: u16,
    /// The switch at the other end.
    pub switch: SwitchId,
    /// The cable.
    pub link: LinkId,
}

/// A host: one HCA, home of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Unique name: the description, or the GUID where that is missing or ambiguous.
    pub name: String,
    /// The GUID as 16 hex digits; in formats without GUIDs the node's id there.
    pub guid: String,
    /// The HCA's own description.
    pub description: Option<String>,
    /// Its cables, by port.
    pub uplinks: Vec<Uplink>,
    /// The machine that it belongs to.
    pub server: ServerId,
}

impl Host {
    /// The adapter's own name behind the server's, as `HCA-1` in `node1 HCA-1`.
    pub fn rail(&self) -> Option<&str> {
        let (_, rail) = self.description.as_deref().unwrap_or(&self.name).split_once(char::is_whitespace)?;
        Some(rail.trim())
    }
}

/// A fabric. See the [module](self) for its invariants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fabric {
    switches: Vec<Switch>,
    hosts: Vec<Host>,
    links: Vec<Link>,
    /// Per switch: its neighbours and the cable to each, sorted.
    adjacent: Vec<Vec<(SwitchId, LinkId)>>,
    servers: Vec<Server>,
    /// The devices, by GUID.
    by_guid: Vec<Device>,
    /// Names of ports, where the source has others than numbers.
    labels: BTreeMap<Port, Box<str>>,
    insides: BTreeMap<ServerId, Inside>,
    warnings: Vec<Warning>,
    /// Those that the reader made; [`Fabric::assumptions`] adds what follows from the fabric.
    assumptions: Vec<Assumption>,
    format: Format,
}

impl Fabric {
    /// The switches; the index of each is its [`SwitchId`].
    pub fn switches(&self) -> &[Switch] {
        &self.switches
    }

    /// The hosts in natural name order; the index of each is its [`HostId`].
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// The cables; the index of each is its [`LinkId`].
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// Oddities in the source that did not prevent its use.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// Return a switch.
    ///
    /// # Panics
    /// If the id is of another fabric and out of range here.
    pub fn switch(&self, id: SwitchId) -> &Switch {
        &self.switches[id.0 as usize]
    }

    /// Return a host.
    ///
    /// # Panics
    /// If the id is of another fabric and out of range here.
    pub fn host(&self, id: HostId) -> &Host {
        &self.hosts[id.0 as usize]
    }

    /// Return a cable.
    ///
    /// # Panics
    /// If the id is of another fabric and out of range here.
    pub fn link(&self, id: LinkId) -> &Link {
        &self.links[id.0 as usize]
    }

    /// The neighbours of a switch with the cable to each, sorted. Parallel cables appear separately.
    ///
    /// # Panics
    /// If the id is of another fabric and out of range here.
    pub fn adjacent(&self, id: SwitchId) -> &[(SwitchId, LinkId)] {
        &self.adjacent[id.0 as usize]
    }

    /// The ids of all switches.
    pub fn switch_ids(&self) -> impl Iterator<Item = SwitchId> + use<> {
        (0..self.switches.len() as u32).map(SwitchId)
    }

    /// The ids of all hosts, in natural name order.
    pub fn host_ids(&self) -> impl Iterator<Item = HostId> + use<> {
        (0..self.hosts.len() as u32).map(HostId)
    }

    /// The servers; the index of each is its [`ServerId`].
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// Return a server.
    ///
    /// # Panics
    /// If the id is of another fabric and out of range here.
    pub fn server(&self, id: ServerId) -> &Server {
        &self.servers[id.0 as usize]
    }

    /// The ids of all servers.
    pub fn server_ids(&self) -> impl Iterator<Item = ServerId> + use<> {
        (0..self.servers.len() as u32).map(ServerId)
    }

    /// Find a server by name.
    pub fn find_server(&self, name: &str) -> Option<ServerId> {
        servers::find(&self.servers, name)
    }

    /// What is inside a server, if an NCCL topology was joined to it.
    pub fn inside(&self, server: ServerId) -> Option<&Inside> {
        self.insides.get(&server)
    }

    /// What the fabric was read from.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The source's own name of a port, such as `swp1`; `None` where ports only have numbers.
    pub fn port_name(&self, port: Port) -> Option<&str> {
        self.labels.get(&port).map(AsRef::as_ref)
    }

    /// The name of a switch or host.
    ///
    /// # Panics
    /// If the device is of another fabric and out of range here.
    pub fn name(&self, device: Device) -> &str {
        match device {
            Device::Switch(switch) => &self.switch(switch).name,
            Device::Host(host) => &self.host(host).name,
        }
    }

    /// Find a switch by name or GUID (with or without a `0x` or `S-` prefix).
    pub fn find_switch(&self, name: &str) -> Option<SwitchId> {
        let named = self.switches.binary_search_by(|switch| natural_cmp(&switch.name, name)).ok();
        named.map(|index| SwitchId(index as u32)).or_else(|| match self.find_guid(name)? {
            Device::Switch(switch) => Some(switch),
            Device::Host(_) => None,
        })
    }

    /// Find a host by name or GUID (with or without a `0x` or `H-` prefix).
    pub fn find_host(&self, name: &str) -> Option<HostId> {
        let named = self.hosts.binary_search_by(|host| natural_cmp(&host.name, name)).ok();
        named.map(|index| HostId(index as u32)).or_else(|| match self.find_guid(name)? {
            Device::Host(host) => Some(host),
            Device::Switch(_) => None,
        })
    }

    fn find_guid(&self, guid: &str) -> Option<Device> {
        let guid = bare_guid(guid);
        let found = self.by_guid.binary_search_by(|device| self.guid(*device).cmp(&guid)).ok()?;
        Some(self.by_guid[found])
    }

    fn guid(&self, device: Device) -> &str {
        match device {
            Device::Switch(switch) => &self.switch(switch).guid,
            Device::Host(host) => &self.host(host).guid,
        }
    }

    /// Add an aggregation node to every switch that has none, as if each had a DPU beside it.
    #[must_use]
    pub fn with_aggregation_everywhere(mut self) -> Self {
        for switch in &mut self.switches {
            switch.aggregation.get_or_insert(AggregationNode { guid: None, rate: None });
        }
        self
    }

    /// Remove failed cables. Switch and host ids stay; link ids are reassigned.
    #[must_use]
    pub fn without_links(&self, failed: &BTreeSet<LinkId>) -> Self {
        let left = (0u32..).zip(&self.links).filter(|(id, _)| !failed.contains(&LinkId(*id))).map(|(_, link)| *link);
        let mut fabric = self.clone();
        fabric.links = left.collect();
        fabric.derive();
        fabric
    }

    /// Derive adjacency, uplinks and the index of GUIDs from the links and devices.
    fn derive(&mut self) {
        self.links.sort_by_key(|link| link.ends);
        let mut adjacent = vec![Vec::new(); self.switches.len()];
        self.hosts.iter_mut().for_each(|host| host.uplinks.clear());
        for (id, link) in (0u32..).map(LinkId).zip(&self.links) {
            match link.ends.map(|end| end.device) {
                [Device::Switch(a), Device::Switch(b)] => {
                    adjacent[a.0 as usize].push((b, id));
                    adjacent[b.0 as usize].push((a, id));
                }
                [Device::Switch(switch), Device::Host(host)] => {
                    let uplink = Uplink { port: link.ends[1].number, switch, link: id };
                    self.hosts[host.0 as usize].uplinks.push(uplink);
                }
                // `ends` is sorted, so a host comes second; cables between hosts are dropped by the builder.
                [Device::Host(_), _] => {}
            }
        }
        adjacent.iter_mut().for_each(|list| list.sort());
        self.adjacent = adjacent;
        self.hosts.iter_mut().for_each(|host| host.uplinks.sort_by_key(|uplink| uplink.port));
        let mut by_guid: Vec<Device> =
            self.switch_ids().map(Device::Switch).chain(self.host_ids().map(Device::Host)).collect();
        by_guid.sort_by(|a, b| self.guid(*a).cmp(self.guid(*b)));
        self.by_guid = by_guid;
    }
}

/// Strip the prefixes with which tools print a GUID: `0x`, and the `S-` and `H-` of node ids.
fn bare_guid(text: &str) -> String {
    let bare = ["0x", "0X", "S-", "H-"].iter().find_map(|prefix| text.strip_prefix(prefix)).unwrap_or(text);
    if bare.len() == 16 && bare.bytes().all(|c| c.is_ascii_hexdigit()) {
        bare.to_ascii_lowercase()
    } else {
        text.into()
    }
}
