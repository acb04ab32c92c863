//! The fabric: switches, hosts, aggregation nodes and the cables between them.
//!
//! A [`Fabric`] is read from a raw `ibnetdiscover` dump ([`Fabric::from_ibnetdiscover`], which also takes ibsim's
//! `.net` files), from a small TOML file ([`Fabric::from_toml`]), or generated ([`Fabric::leaf_spine`],
//! [`Fabric::fat_tree`]).
//!
//! - A **host** here is one HCA: a server with eight HCAs is eight hosts, one rank each.
//! - An **aggregation node** is the processor beside a switch that combines contributions. A dump lists it as a
//!   one-port channel adapter with that description; here it is a property of its switch.
//! - A node's **name** is its description if that is unique in the fabric, else its GUID.
//!
//! Invariants: ids are indices in natural name order, so the first N hosts have ids 0..N whatever the order in the
//! file; names are unique across hosts and switches; every link has at least one end at a switch; adjacency lists are
//! sorted.

mod build;
mod error;
mod generate;
mod ibnetdiscover;
mod natural;
mod rate;
#[cfg(test)]
pub(crate) mod tests;
mod toml_file;

pub use error::{FabricError, ReadError, Warning};
pub use generate::LeafSpine;
pub use natural::natural_cmp;
pub use rate::Rate;

use std::collections::BTreeSet;
use std::path::Path;

/// A switch, by its index in natural name order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SwitchId(pub u32);

/// A host (one HCA), by its index in natural name order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u32);

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
}

/// A fabric. See the [module](self) for its invariants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fabric {
    switches: Vec<Switch>,
    hosts: Vec<Host>,
    links: Vec<Link>,
    /// Per switch: its neighbours and the cable to each, sorted.
    adjacent: Vec<Vec<(SwitchId, LinkId)>>,
    warnings: Vec<Warning>,
}

impl Fabric {
    /// Read a fabric file: TOML if its name ends in `.toml`, else an `ibnetdiscover` dump or ibsim `.net` file.
    ///
    /// # Errors
    /// [`ReadError`] names the file and, for an error in the text, the line.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, ReadError> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|source| ReadError::Io { path: path.into(), source })?;
        // Node descriptions are arbitrary bytes from the devices; invalid UTF-8 must not make the dump unreadable.
        let text = String::from_utf8_lossy(&bytes);
        let is_toml = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("toml"));
        let fabric = if is_toml { Self::from_toml(&text) } else { Self::from_ibnetdiscover(&text) };
        fabric.map_err(|source| ReadError::Fabric { path: path.into(), source })
    }

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

    /// Find a switch by name or GUID (with or without a `0x` or `S-` prefix).
    pub fn find_switch(&self, name: &str) -> Option<SwitchId> {
        let guid = bare_guid(name);
        let found = self
            .switches
            .iter()
            .position(|s| s.name == name)
            .or_else(|| self.switches.iter().position(|s| s.guid == guid));
        found.map(|index| SwitchId(index as u32))
    }

    /// Find a host by name or GUID (with or without a `0x` or `H-` prefix).
    pub fn find_host(&self, name: &str) -> Option<HostId> {
        let guid = bare_guid(name);
        let found =
            self.hosts.iter().position(|h| h.name == name).or_else(|| self.hosts.iter().position(|h| h.guid == guid));
        found.map(|index| HostId(index as u32))
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
        Self::assemble(self.switches.clone(), self.hosts.clone(), left.collect(), self.warnings.clone())
    }

    /// Assemble a fabric and derive adjacency and uplinks from the links.
    fn assemble(switches: Vec<Switch>, mut hosts: Vec<Host>, mut links: Vec<Link>, warnings: Vec<Warning>) -> Self {
        links.sort_by_key(|link| link.ends);
        let mut adjacent = vec![Vec::new(); switches.len()];
        hosts.iter_mut().for_each(|host| host.uplinks.clear());
        for (id, link) in (0u32..).map(LinkId).zip(&links) {
            match link.ends.map(|end| end.device) {
                [Device::Switch(a), Device::Switch(b)] => {
                    adjacent[a.0 as usize].push((b, id));
                    adjacent[b.0 as usize].push((a, id));
                }
                [Device::Switch(switch), Device::Host(host)] => {
                    let uplink = Uplink { port: link.ends[1].number, switch, link: id };
                    hosts[host.0 as usize].uplinks.push(uplink);
                }
                // `ends` is sorted, so a host comes second; cables between hosts are dropped by the builder.
                [Device::Host(_), _] => {}
            }
        }
        adjacent.iter_mut().for_each(|list| list.sort());
        hosts.iter_mut().for_each(|host| host.uplinks.sort_by_key(|uplink| uplink.port));
        Self { switches, hosts, links, adjacent, warnings }
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
