//! Builds a checked [`Fabric`] from records and cable ends.
//!
//! Every reader and generator uses it, so the checks exist once: no GUID or port appears twice, both ends of a cable
//! agree, names are unique. A cable that only one end lists is kept with a warning, because a live fabric changes while
//! it is dumped.

use super::{AggregationNode, Device, Fabric, FabricError, Host, Link, Port, Rate, Switch, Warning};
use super::{HostId, SwitchId, bare_guid, natural_cmp};
use std::collections::{BTreeMap, HashMap};

/// The kind of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Switch,
    Host,
    /// The channel adapter through which the aggregation node of a switch is reached.
    Aggregation,
    /// Valid in the source but unused here, such as a router.
    Ignored,
}

/// A record: a node of the fabric.
#[derive(Debug, Clone)]
pub(super) struct Record {
    pub(super) kind: Kind,
    /// The id by which cables refer to it.
    pub(super) id: String,
    pub(super) description: Option<String>,
    pub(super) line: usize,
}

/// One end of a cable as a source lists it.
#[derive(Debug, Clone)]
struct Listing {
    to: (String, u16),
    rate: Option<Rate>,
    line: usize,
    /// The description of the other end, if listed.
    to_description: Option<String>,
}

/// Collects records and listings; [`Builder::finish`] makes the fabric.
#[derive(Debug, Default)]
pub(super) struct Builder {
    records: Vec<Record>,
    index: HashMap<String, usize>,
    /// The line of the record with each GUID.
    guids: HashMap<String, usize>,
    listings: BTreeMap<(String, u16), Listing>,
    /// Switches that have an aggregation node without a record of its own.
    equipped: Vec<String>,
    warnings: Vec<Warning>,
}

impl Builder {
    /// Add a record.
    pub(super) fn record(&mut self, record: Record) -> Result<(), FabricError> {
        // `S-` and `H-` records share one space of GUIDs.
        if let Some(first_line) = self.guids.insert(bare_guid(&record.id), record.line) {
            return Err(FabricError::DuplicateNode { line: record.line, first_line, id: record.id });
        }
        self.index.insert(record.id.clone(), self.records.len());
        self.records.push(record);
        Ok(())
    }

    /// Add a switch or host of a source without descriptions.
    pub(super) fn named(&mut self, kind: Kind, name: &str, line: usize) -> Result<(), FabricError> {
        self.record(Record { kind, id: name.into(), description: Some(name.into()), line })
    }

    /// Add an aggregation node to the switch.
    pub(super) fn equip(&mut self, switch: &str) {
        self.equipped.push(switch.into());
    }

    /// Return the kind of the record with this id.
    pub(super) fn kind(&self, id: &str) -> Option<Kind> {
        self.index.get(id).map(|&index| self.records[index].kind)
    }

    /// Set a record's description, and so its name.
    pub(super) fn describe(&mut self, id: &str, description: &str) {
        if let Some(&index) = self.index.get(id) {
            self.records[index].description = Some(description.into());
        }
    }

    /// Add one end's listing of its cable.
    pub(super) fn listing(
        &mut self,
        from: (&str, u16),
        to: (&str, u16),
        rate: Option<Rate>,
        line: usize,
        to_description: Option<String>,
    ) -> Result<(), FabricError> {
        let key = (from.0.to_owned(), from.1);
        if let Some(first) = self.listings.get(&key) {
            return Err(FabricError::DuplicatePort { line, first_line: first.line, id: key.0, port: key.1 });
        }
        self.listings.insert(key, Listing { to: (to.0.to_owned(), to.1), rate, line, to_description });
        Ok(())
    }

    /// Add a whole cable.
    pub(super) fn cable(
        &mut self,
        a: (&str, u16),
        b: (&str, u16),
        rate: Option<Rate>,
        line: usize,
    ) -> Result<(), FabricError> {
        self.listing(a, b, rate, line, None)?;
        self.listing(b, a, rate, line, None)
    }

    /// Whether a port is in use.
    pub(super) fn port_is_taken(&self, id: &str, port: u16) -> bool {
        self.listings.contains_key(&(id.to_owned(), port))
    }

    /// Check everything and build the fabric. `expected` describes a switch in the source's format.
    pub(super) fn finish(mut self, expected: &'static str) -> Result<Fabric, FabricError> {
        self.add_missing_records()?;
        if !self.records.iter().any(|record| record.kind == Kind::Switch) {
            return Err(FabricError::Empty { records: self.records.len(), expected });
        }
        let cables = self.pair_listings()?;
        let names = self.names();
        let (mut switches, hosts, devices) = self.place(&names);
        for id in &self.equipped {
            if let Some(Device::Switch(switch)) = devices.get(id) {
                switches[switch.0 as usize].aggregation = Some(AggregationNode { guid: None, rate: None });
            }
        }
        let mut links = Vec::new();
        for Cable { ends: [a, b], rate, line } in cables {
            match (devices.get(&a.0), devices.get(&b.0)) {
                (Some(&Device::Host(_)), Some(&Device::Host(_))) => {
                    self.warn(line, format!("`{}` and `{}` are cabled back to back; ignored", a.0, b.0));
                }
                (Some(&near), Some(&far)) => {
                    let mut ends = [Port { device: near, number: a.1 }, Port { device: far, number: b.1 }];
                    ends.sort();
                    links.push(Link { ends, rate });
                }
                _ => self.attach_aggregation(&mut switches, &devices, (&a.0, &b.0), rate),
            }
        }
        self.warn_of_lost_aggregation_nodes(&switches);
        self.warnings.sort_by_key(|warning| warning.line);
        Ok(Fabric::assemble(switches, hosts, links, self.warnings))
    }

    fn warn(&mut self, line: usize, text: String) {
        self.warnings.push(Warning { line, text });
    }

    /// Add records for nodes that only their neighbours list, if the id tells their kind. Partial dumps have many of
    /// them.
    fn add_missing_records(&mut self) -> Result<(), FabricError> {
        let mut missing: BTreeMap<&str, (usize, Option<&String>)> = BTreeMap::new();
        for listing in self.listings.values().filter(|listing| !self.index.contains_key(&listing.to.0)) {
            let seen = missing.entry(&listing.to.0).or_insert((listing.line, listing.to_description.as_ref()));
            seen.0 = seen.0.min(listing.line);
        }
        let missing: Vec<Record> = missing
            .into_iter()
            .map(|(id, (line, description))| {
                let kind = match id.as_bytes() {
                    [b'S', b'-', ..] => Kind::Switch,
                    [b'R', b'-', ..] => Kind::Ignored,
                    [b'H', b'-', ..] if description.is_some_and(|text| is_aggregation_node(text)) => Kind::Aggregation,
                    [b'H', b'-', ..] => Kind::Host,
                    _ => return Err(FabricError::UnknownNode { line, id: id.into() }),
                };
                Ok(Record { kind, id: id.into(), description: description.cloned(), line })
            })
            .collect::<Result<_, _>>()?;
        for record in missing {
            self.warn(record.line, format!("`{}` has no record of its own; known from its neighbours only", record.id));
            self.record(record)?;
        }
        Ok(())
    }

    /// Join the listings of both ends into cables.
    fn pair_listings(&mut self) -> Result<Vec<Cable>, FabricError> {
        let mut cables = Vec::new();
        let mut warnings = Vec::new();
        for (from, listing) in &self.listings {
            let describe_listing = |from: &(String, u16), listing: &Listing| {
                let rate = listing.rate.map_or("unknown rate".into(), |rate| rate.to_string());
                format!("{}[{}] to {}[{}], {rate}", from.0, from.1, listing.to.0, listing.to.1)
            };
            let ends = [from.clone(), listing.to.clone()];
            if listing.to == *from {
                warnings.push((listing.line, format!("`{}` port {} is cabled to itself; ignored", from.0, from.1)));
                continue;
            }
            let Some(other) = self.listings.get(&listing.to) else {
                warnings.push((
                    listing.line,
                    format!("only this side lists the link to `{}` port {}; kept", listing.to.0, listing.to.1),
                ));
                cables.push(Cable { ends, rate: listing.rate, line: listing.line });
                continue;
            };
            let rates_differ = matches!((listing.rate, other.rate), (Some(a), Some(b)) if a != b);
            if other.to != *from || rates_differ {
                return Err(FabricError::LinkDisagrees {
                    line: listing.line,
                    near: describe_listing(from, listing),
                    other_line: other.line,
                    far: describe_listing(&listing.to, other),
                });
            }
            if *from < listing.to {
                cables.push(Cable { ends, rate: listing.rate.or(other.rate), line: listing.line });
            }
        }
        warnings.into_iter().for_each(|(line, text)| self.warn(line, text));
        self.refuse_shared_far_ports(cables)
    }

    /// Refuse two one-sided links into the same port: its own side does not tell which is right.
    fn refuse_shared_far_ports(&self, cables: Vec<Cable>) -> Result<Vec<Cable>, FabricError> {
        let mut taken: HashMap<&(String, u16), usize> = HashMap::new();
        for cable in &cables {
            for end in &cable.ends {
                if let Some(first_line) = taken.insert(end, cable.line) {
                    let (line, first_line) = (cable.line.max(first_line), cable.line.min(first_line));
                    return Err(FabricError::DuplicatePort { line, first_line, id: end.0.clone(), port: end.1 });
                }
            }
        }
        Ok(cables)
    }

    /// Choose each record's name: its description if unique among names and ids, else its GUID.
    fn names(&self) -> HashMap<&str, String> {
        let mut seen: HashMap<String, usize> = HashMap::new();
        for record in self.records.iter().filter(|record| matches!(record.kind, Kind::Switch | Kind::Host)) {
            let guid = bare_guid(&record.id);
            let description = record.description.clone().filter(|text| *text != guid);
            // A GUID claims its spelling too: a description may not pose as another node's GUID.
            for spelling in description.into_iter().chain([guid]) {
                *seen.entry(spelling).or_default() += 1;
            }
        }
        let name = |record: &Record| match record.description.as_deref() {
            Some(text) if seen.get(text) == Some(&1) => text.to_owned(),
            _ => bare_guid(&record.id),
        };
        self.records.iter().map(|record| (record.id.as_str(), name(record))).collect()
    }

    /// Sort switches and hosts by name and number them.
    fn place(&self, names: &HashMap<&str, String>) -> (Vec<Switch>, Vec<Host>, HashMap<String, Device>) {
        let mut sorted: Vec<&Record> = self.records.iter().collect();
        sorted.sort_by(|a, b| natural_cmp(&names[a.id.as_str()], &names[b.id.as_str()]));
        let (mut switches, mut hosts, mut devices) = (Vec::new(), Vec::new(), HashMap::new());
        for record in sorted {
            let (name, guid) = (names[record.id.as_str()].clone(), bare_guid(&record.id));
            let description = record.description.clone();
            let device = match record.kind {
                Kind::Switch => {
                    switches.push(Switch { name, guid, description, aggregation: None });
                    Device::Switch(SwitchId(switches.len() as u32 - 1))
                }
                Kind::Host => {
                    hosts.push(Host { name, guid, description, uplinks: Vec::new() });
                    Device::Host(HostId(hosts.len() as u32 - 1))
                }
                Kind::Aggregation | Kind::Ignored => continue,
            };
            devices.insert(record.id.clone(), device);
        }
        (switches, hosts, devices)
    }

    /// Note an aggregation node at the switch that its cable leads to.
    fn attach_aggregation(
        &self,
        switches: &mut [Switch],
        devices: &HashMap<String, Device>,
        ends: (&str, &str),
        rate: Option<Rate>,
    ) {
        for (node, other) in [ends, (ends.1, ends.0)] {
            if let (Some(Kind::Aggregation), Some(Device::Switch(switch))) = (self.kind(node), devices.get(other)) {
                let aggregation = AggregationNode { guid: Some(bare_guid(node)), rate };
                switches[switch.0 as usize].aggregation = Some(aggregation);
            }
        }
    }

    fn warn_of_lost_aggregation_nodes(&mut self, switches: &[Switch]) {
        let placed: Vec<&str> =
            switches.iter().filter_map(|switch| switch.aggregation.as_ref()?.guid.as_deref()).collect();
        let lost: Vec<(usize, String)> = self
            .records
            .iter()
            .filter(|record| record.kind == Kind::Aggregation && !placed.contains(&bare_guid(&record.id).as_str()))
            .map(|record| (record.line, record.id.clone()))
            .collect();
        for (line, id) in lost {
            self.warn(
                line,
                format!("aggregation node `{id}` is cabled to no switch, or to one that has another; ignored"),
            );
        }
    }
}

/// A cable between two ports, by the ids of the source.
#[derive(Debug)]
struct Cable {
    ends: [(String, u16); 2],
    rate: Option<Rate>,
    line: usize,
}

/// Return whether a description is that of a switch's aggregation node, such as
/// `Mellanox Technologies Aggregation Node`.
pub(super) fn is_aggregation_node(description: &str) -> bool {
    description.to_ascii_lowercase().contains("aggregation node")
}
