//! Where devices are: in switches, beside them on ports of their own, or DPUs at hosts' ports.
//!
//! A device in a switch takes in all ports at once. The others are vertices of the fabric, with a cable each, so that
//! routes, loads and bounds count what passes it:
//!
//! ```text
//!   beside a switch:   leaf0 ---- leaf0/device0           all children's bytes pass one cable
//!   at a host's port:  h0 -- h0/dpu ---- leaf0            ... which is the host's, and carries its own as well
//! ```
//!
//! Invariants: hosts keep their ids; a device forwards nothing but what its host sends and receives.

use super::select::glob;
use super::{AggregationNode, Assumption, Device, Fabric, HostId, Link, LinkId, Port, Rate, Switch, SwitchId};
use super::{natural_cmp, similar};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// A place of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DevicePlace {
    /// In the switch: it receives from all ports at once.
    Switch(SwitchId),
    /// Beside the switch on a port of its own of this rate. Without a rate, that of the switch's fastest cable.
    Port(SwitchId, Option<Rate>),
    /// A DPU at the host's ports.
    Host(HostId),
}

/// Why devices cannot be placed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The text does not follow the format.
    #[error(
        "{reason}; expected entries such as [[device]] switch = \"leaf*\", with port_gbits = 400 and count = 2 for \
         devices on ports of their own, or host = \"n*\""
    )]
    Syntax {
        /// What is wrong.
        reason: String,
    },
    /// Nothing has such a name.
    #[error("no {what} is named `{name}`{}", similar::hint(near))]
    Unknown {
        /// `switch` or `host`.
        what: &'static str,
        /// The name or pattern.
        name: String,
        /// Similar names, the nearest first.
        near: Vec<String>,
    },
    /// A device's place is taken, by name.
    #[error("`{name}` is there already; place a device once")]
    Taken {
        /// The device, or the switch or host that has it.
        name: String,
    },
    /// There are more devices than planning is made for, or than ports can be numbered.
    #[error("{devices} devices are too many; place at most {DEVICES_MAX}, and 65,535 a switch")]
    TooMany {
        /// The number of devices.
        devices: usize,
    },
}

/// How many devices a fabric has at most.
const DEVICES_MAX: usize = 1 << 18;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    device: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    switch: Option<String>,
    host: Option<String>,
    port_gbits: Option<f64>,
    count: Option<usize>,
}

impl Fabric {
    /// Read places from TOML: entries `[[device]]` with a `switch` (a name, a GUID, or a pattern in which `*` stands
    /// for any text), or a `host`. With `port_gbits`, the switch's devices are beside it on ports of that rate, `count`
    /// of them (default 1).
    ///
    /// # Errors
    /// [`DeviceError`].
    ///
    /// ```
    /// use sumac::topo::generate;
    /// let star = generate::star(4, None)?;
    /// let places = star.read_devices("[[device]]\nswitch = \"s*\"\nport_gbits = 100\ncount = 2\n")?;
    /// let fabric = star.with_devices(&places)?;
    /// assert_eq!(fabric.switches().iter().filter(|switch| switch.is_device).count(), 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn read_devices(&self, text: &str) -> Result<Vec<DevicePlace>, DeviceError> {
        let syntax = |reason: &str| DeviceError::Syntax { reason: reason.into() };
        let file: File = toml::from_str(text).map_err(|error| syntax(&error.to_string().replace('\n', " ")))?;
        let mut places = Vec::new();
        for entry in file.device {
            let port = match entry.port_gbits {
                Some(gbits) => Some(Rate::from_gbits(gbits).ok_or_else(|| syntax("port_gbits is not a rate"))?),
                None => None,
            };
            let count = entry.count.unwrap_or(1);
            if places.len().saturating_add(count) > DEVICES_MAX {
                return Err(DeviceError::TooMany { devices: places.len().saturating_add(count) });
            }
            match (&entry.switch, &entry.host) {
                (Some(name), None) => {
                    for switch in self.switches_like(name)? {
                        let place =
                            port.map_or(DevicePlace::Switch(switch), |rate| DevicePlace::Port(switch, Some(rate)));
                        places.extend(std::iter::repeat_n(place, count));
                    }
                }
                (None, Some(name)) if port.is_none() && entry.count.is_none() => {
                    places.extend(self.hosts_like(name)?.into_iter().map(DevicePlace::Host));
                }
                (None, Some(_)) => return Err(syntax("a DPU at a host's port has no port_gbits and no count")),
                _ => return Err(syntax("a device has a switch or a host")),
            }
        }
        Ok(places)
    }

    fn switches_like(&self, name: &str) -> Result<Vec<SwitchId>, DeviceError> {
        if let Some(switch) = self.find_switch(name) {
            return Ok(vec![switch]);
        }
        let like: Vec<SwitchId> = self.switch_ids().filter(|id| glob(name, &self.switch(*id).name)).collect();
        if like.is_empty() {
            let near = similar::nearest(name, self.switches.iter().map(|switch| switch.name.as_str()));
            return Err(DeviceError::Unknown { what: "switch", name: name.into(), near });
        }
        Ok(like)
    }

    fn hosts_like(&self, name: &str) -> Result<Vec<HostId>, DeviceError> {
        if let Some(host) = self.find_host(name) {
            return Ok(vec![host]);
        }
        let like: Vec<HostId> = self.host_ids().filter(|id| glob(name, &self.host(*id).name)).collect();
        if like.is_empty() {
            let near = similar::nearest(name, self.hosts.iter().map(|host| host.name.as_str()));
            return Err(DeviceError::Unknown { what: "host", name: name.into(), near });
        }
        Ok(like)
    }

    /// The same fabric with devices in these places and nowhere else. Devices on ports are switches of their own there
    /// ([`Switch::is_device`]), `leaf0/device0` or `n0/dpu`; ids of switches and cables are assigned anew.
    ///
    /// # Errors
    /// [`DeviceError`] if a place is taken, or there are too many.
    pub fn with_devices(&self, places: &[DevicePlace]) -> Result<Self, DeviceError> {
        if places.len() > DEVICES_MAX {
            return Err(DeviceError::TooMany { devices: places.len() });
        }
        let mut switches = self.switches.clone();
        switches.iter_mut().for_each(|switch| switch.aggregation = None);
        let mut links = self.links.clone();
        // The next free port of each device, and the fastest cable of each switch.
        let mut next: BTreeMap<Device, u32> = BTreeMap::new();
        for port in self.links.iter().flat_map(|link| link.ends) {
            let next = next.entry(port.device).or_default();
            *next = (*next).max(u32::from(port.number) + 1);
        }
        let mut beside: BTreeMap<SwitchId, usize> = BTreeMap::new();
        let mut cables: BTreeMap<HostId, Vec<LinkId>> = BTreeMap::new();
        for (host, links) in self.host_ids().map(|id| (id, &self.host(id).uplinks)) {
            cables.insert(host, links.iter().map(|uplink| uplink.link).collect());
        }
        for place in places {
            let device = SwitchId(switches.len() as u32);
            match *place {
                DevicePlace::Switch(at) => {
                    let switch = &mut switches[at.0 as usize];
                    if switch.aggregation.replace(AggregationNode { guid: None, rate: None }).is_some() {
                        return Err(DeviceError::Taken { name: switch.name.clone() });
                    }
                }
                DevicePlace::Port(at, rate) => {
                    let number = beside.entry(at).or_default();
                    switches.push(behind_port(format!("{}/device{number}", switches[at.0 as usize].name)));
                    *number += 1;
                    let rate = rate.or_else(|| self.fastest(at));
                    let near = port(&mut next, Device::Switch(at), places.len())?;
                    links.push(Link { ends: [near, Port { device: Device::Switch(device), number: 1 }], rate });
                }
                DevicePlace::Host(at) => {
                    switches.push(behind_port(format!("{}/dpu", self.host(at).name)));
                    let own =
                        cables.remove(&at).ok_or_else(|| DeviceError::Taken { name: self.host(at).name.clone() })?;
                    let mut rate = Some(0.0);
                    for link in own {
                        let link = &mut links[link.0 as usize];
                        rate = rate.and_then(|sum: f64| Some(sum + link.rate?.gbits()));
                        for end in link.ends.iter_mut().filter(|end| end.device == Device::Host(at)) {
                            end.device = Device::Switch(device);
                        }
                    }
                    let far = Port { device: Device::Host(at), number: 1 };
                    let near = port(&mut next, Device::Host(at), places.len())?;
                    let near = Port { device: Device::Switch(device), ..near };
                    links.push(Link { ends: [near, far], rate: rate.and_then(Rate::from_gbits) });
                }
            }
        }
        self.rebuilt(switches, links)
    }

    /// The rate of a switch's fastest cable.
    fn fastest(&self, at: SwitchId) -> Option<Rate> {
        let is_here = |link: &&Link| link.ends.iter().any(|end| end.device == Device::Switch(at));
        self.links.iter().filter(is_here).filter_map(|link| link.rate).max()
    }

    /// The fabric with these switches, sorted by name again, and these cables.
    fn rebuilt(&self, switches: Vec<Switch>, mut links: Vec<Link>) -> Result<Self, DeviceError> {
        let mut order: Vec<usize> = (0..switches.len()).collect();
        order.sort_by(|a, b| natural_cmp(&switches[*a].name, &switches[*b].name));
        let mut names: BTreeSet<&str> = self.hosts.iter().map(|host| host.name.as_str()).collect();
        if let Some(twice) = switches.iter().find(|switch| !names.insert(&switch.name)) {
            return Err(DeviceError::Taken { name: twice.name.clone() });
        }
        let mut new = vec![SwitchId(0); switches.len()];
        for (to, from) in (0u32..).zip(&order) {
            new[*from] = SwitchId(to);
        }
        let moved = |port: Port| match port.device {
            Device::Switch(switch) => Port { device: Device::Switch(new[switch.0 as usize]), ..port },
            Device::Host(_) => port,
        };
        for link in &mut links {
            link.ends = link.ends.map(moved);
            link.ends.sort();
        }
        let labels = self.labels.iter().map(|(port, label)| (moved(*port), label.clone())).collect();
        let mut fabric = Self { links, labels, ..self.clone() };
        fabric.assumptions.retain(|assumed| !matches!(assumed, Assumption::DevicesAtSwitches { .. }));
        let mut old: Vec<Option<Switch>> = switches.into_iter().map(Some).collect();
        fabric.switches = order.into_iter().filter_map(|from| old[from].take()).collect();
        fabric.derive();
        Ok(fabric)
    }
}

/// A device behind a port.
fn behind_port(name: String) -> Switch {
    let aggregation = Some(AggregationNode { guid: None, rate: None });
    Switch { guid: name.clone(), name, description: None, aggregation, is_device: true }
}

/// The next free port of a device.
fn port(next: &mut BTreeMap<Device, u32>, device: Device, devices: usize) -> Result<Port, DeviceError> {
    let next = next.entry(device).or_insert(1);
    let number = u16::try_from(*next).map_err(|_| DeviceError::TooMany { devices })?;
    *next += 1;
    Ok(Port { device, number })
}
