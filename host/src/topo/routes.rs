//! Forwarding tables: the routes that a fabric takes, from the output of `dump_lfts`.
//!
//! ```text
//! Unicast lids [0x0-0x20] of switch Lid 16 guid 0x000000000020000a (t2-2):
//!   Lid  Out   Destination
//! 0x0001 001 : (Channel Adapter portguid 0x0000000000100001: 'h0')
//! ```
//!
//! Traffic for a switch's device is addressed to its aggregation node where the tables have one, else to the switch,
//! else, where switches are no destinations, as if to a host below it. A DPU's is its host's.
//!
//! Invariants: an entry belongs to a switch and a destination of the fabric; lines of unknown destinations are counted,
//! not guessed.

use super::{Device, Fabric, HostId, LinkId, SwitchId, bare_guid};
use std::collections::{BTreeMap, HashMap};

/// Forwarding tables of a fabric's switches. They belong to the fabric that they were read for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routes {
    /// Per switch: the cable towards each destination.
    next: Vec<HashMap<Device, LinkId>>,
    /// The host behind each device at a host's port, and one host at each switch.
    hosts: BTreeMap<SwitchId, HostId>,
    unknown: usize,
}

/// Why forwarding tables cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RoutesError {
    /// The text does not follow the format. Lines count from 1.
    #[error("line {line}: found {found}, expected {expected}; forwarding tables are the output of `dump_lfts`")]
    Syntax {
        /// The line.
        line: usize,
        /// What was found.
        found: String,
        /// What the format expects.
        expected: &'static str,
    },
    /// A table is of a switch that the fabric does not have.
    #[error("line {line}: the fabric has no switch with GUID {guid}; are both of one fabric, and of one time?")]
    UnknownSwitch {
        /// The line.
        line: usize,
        /// The GUID.
        guid: String,
    },
    /// Switches have no table.
    #[error("{count} of the fabric's switches have no table, `{first}` among them; is the dump complete?")]
    Missing {
        /// How many.
        count: usize,
        /// One of them.
        first: String,
    },
}

impl Fabric {
    /// Read the forwarding tables of this fabric's switches from the output of `dump_lfts`.
    ///
    /// # Errors
    /// [`RoutesError`].
    pub fn read_routes(&self, text: &str) -> Result<Routes, RoutesError> {
        let ports: HashMap<(SwitchId, u16), LinkId> = (0u32..)
            .map(LinkId)
            .zip(self.links())
            .flat_map(|(id, link)| link.ends.map(|end| (end, id)))
            .filter_map(|(end, id)| match end.device {
                Device::Switch(switch) => Some(((switch, end.number), id)),
                Device::Host(_) => None,
            })
            .collect();
        let names = Destinations::of(self);
        let mut routes =
            Routes { next: vec![HashMap::new(); self.switches().len()], hosts: first_hosts(self), unknown: 0 };
        let mut has_table = vec![false; self.switches().len()];
        let mut at: Option<SwitchId> = None;
        for (line, content) in (1..).zip(text.lines()) {
            let syntax = |expected| {
                let found = format!("`{}`", content.trim().chars().take(60).collect::<String>());
                RoutesError::Syntax { line, found, expected }
            };
            if content.starts_with("Unicast lids") {
                let guid = content.split_once(" guid 0x").and_then(|(_, rest)| rest.split_whitespace().next());
                let guid = guid.ok_or_else(|| syntax("`guid 0x...` of the switch"))?;
                let known = self.find_switch(&bare_guid(guid));
                let known = known.ok_or_else(|| RoutesError::UnknownSwitch { line, guid: guid.into() })?;
                has_table[known.0 as usize] = true;
                at = Some(known);
            } else if content.starts_with("0x") {
                let switch = at.ok_or_else(|| syntax("`Unicast lids ... of switch ...` before entries"))?;
                let out = content.split_whitespace().nth(1).and_then(|port| port.parse::<u16>().ok());
                let out = out.ok_or_else(|| syntax("`<lid> <port> : (<destination>)`"))?;
                match names.find(content) {
                    // A port without a cable leads nowhere; port 0 is the switch itself.
                    Some((to, rank)) => {
                        if let Some(link) = ports.get(&(switch, out)) {
                            let next = &mut routes.next[switch.0 as usize];
                            // An aggregation node's own address comes before its switch's.
                            if rank == 0 || !next.contains_key(&to) {
                                next.insert(to, *link);
                            }
                        }
                    }
                    None => routes.unknown += 1,
                }
            }
        }
        let is_missing = |id: &SwitchId| !has_table[id.0 as usize] && !self.switch(*id).is_device;
        let missing: Vec<SwitchId> = self.switch_ids().filter(is_missing).collect();
        match missing.first() {
            Some(first) => Err(RoutesError::Missing { count: missing.len(), first: self.switch(*first).name.clone() }),
            None => Ok(routes),
        }
    }
}

/// One host at each switch, or behind each device at a host's port.
fn first_hosts(fabric: &Fabric) -> BTreeMap<SwitchId, HostId> {
    let mut hosts = BTreeMap::new();
    for host in fabric.host_ids() {
        for uplink in &fabric.host(host).uplinks {
            hosts.entry(uplink.switch).or_insert(host);
            if fabric.switch(uplink.switch).is_device {
                let behind = fabric.adjacent(uplink.switch).iter().filter(|(next, _)| !fabric.switch(*next).is_device);
                behind.for_each(|(next, _)| {
                    hosts.entry(*next).or_insert(host);
                });
            }
        }
    }
    hosts
}

/// The destinations of a fabric, by what a line says of them.
struct Destinations<'a> {
    fabric: &'a Fabric,
    /// The switches, by the GUIDs of their aggregation nodes.
    aggregation: HashMap<&'a str, SwitchId>,
}

impl<'a> Destinations<'a> {
    fn of(fabric: &'a Fabric) -> Self {
        let guid = |id: SwitchId| Some((fabric.switch(id).aggregation.as_ref()?.guid.as_deref()?, id));
        Self { fabric, aggregation: fabric.switch_ids().filter_map(guid).collect() }
    }

    /// The destination of a line, and 0 if it is an aggregation node's.
    fn find(&self, line: &str) -> Option<(Device, u8)> {
        let (_, rest) = line.split_once(" portguid 0x")?;
        let (guid, rest) = rest.split_once(':')?;
        let number = u64::from_str_radix(guid.trim(), 16).ok()?;
        // An adapter's first port has the number of its node, or the next one.
        let guids = [number, number.wrapping_sub(1)].map(|number| format!("{number:016x}"));
        if line.contains("(Switch ") {
            return self.fabric.find_switch(&guids[0]).map(|switch| (Device::Switch(switch), 1));
        }
        if let Some(switch) = guids.iter().find_map(|guid| self.aggregation.get(guid.as_str())) {
            return Some((Device::Switch(*switch), 0));
        }
        let name = rest.split_once('\'').and_then(|(_, name)| Some(name.rsplit_once('\'')?.0));
        let named = name.and_then(|name| self.fabric.find_host(name));
        let host = named.or_else(|| guids.iter().find_map(|guid| self.fabric.find_host(guid)))?;
        Some((Device::Host(host), 1))
    }
}

impl Routes {
    /// The number of entries whose destination is not in the fabric.
    pub fn unknown(&self) -> usize {
        self.unknown
    }

    /// The cable by which a switch forwards to a destination.
    pub fn next(&self, at: SwitchId, to: Device) -> Option<LinkId> {
        let next = self.next.get(at.0 as usize)?;
        match to {
            Device::Switch(switch) => {
                let below = || next.get(&Device::Host(*self.hosts.get(&switch)?));
                next.get(&to).or_else(below).copied()
            }
            Device::Host(_) => next.get(&to).copied(),
        }
    }

    /// The route between two switches or devices behind ports; `None` if the tables have none.
    pub fn route(&self, fabric: &Fabric, from: SwitchId, to: SwitchId) -> Option<Vec<LinkId>> {
        if from == to {
            return Some(Vec::new());
        }
        let switch_of = |device: SwitchId| {
            fabric.adjacent(device).iter().copied().find(|(next, _)| !fabric.switch(*next).is_device)
        };
        let mut cables = Vec::new();
        let mut at = from;
        if fabric.switch(from).is_device {
            let (next, link) = switch_of(from)?;
            cables.push(link);
            at = next;
        }
        // A device beside a switch has no address of its own in the tables.
        let (target, last) = match fabric.switch(to).is_device {
            true if !self.hosts.contains_key(&to) => {
                let (switch, link) = switch_of(to)?;
                (switch, Some(link))
            }
            _ => (to, None),
        };
        for _ in 0..=fabric.switches().len() {
            if at == target {
                cables.extend(last);
                return Some(cables);
            }
            let link = self.next(at, Device::Switch(target))?;
            cables.push(link);
            match fabric.link(link).across(Device::Switch(at))? {
                Device::Switch(next) => at = next,
                Device::Host(_) => return None,
            }
        }
        // A loop.
        None
    }
}

/// Tables in which each switch forwards to others by the port that a function names.
#[cfg(test)]
pub(crate) fn tables(fabric: &Fabric, port: impl Fn(&str, &str) -> Option<u16>) -> Routes {
    let mut next = vec![HashMap::new(); fabric.switches().len()];
    for (at, to) in fabric.switch_ids().flat_map(|at| fabric.switch_ids().map(move |to| (at, to))) {
        let Some(port) = port(&fabric.switch(at).name, &fabric.switch(to).name).filter(|_| at != to) else { continue };
        let is_there = |end: &super::Port| end.device == Device::Switch(at) && end.number == port;
        let link = (0u32..).zip(fabric.links()).find(|(_, link)| link.ends.iter().any(is_there));
        next[at.0 as usize].extend(link.map(|(id, _)| (Device::Switch(to), LinkId(id))));
    }
    Routes { next, hosts: BTreeMap::new(), unknown: 0 }
}
