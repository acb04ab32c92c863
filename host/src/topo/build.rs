//! Builds a checked [`Fabric`] from records and cable ends.
//!
//! Every reader and generator uses it, so the checks exist once: no GUID or port appears twice, both ends of a cable
//! agree, names are unique. A cable that only one end lists is kept with a warning, because a live fabric changes while
//! it is dumped.
//!
//! Invariant: time and memory grow in proportion to the records and listings. Nodes go by number from the first time
//! that their id is seen; no listing owns a string.

use super::servers::{self, Origin};
use super::{
    AggregationNode, Assumption, Device, Fabric, FabricError, Format, Host, Link, Port, Rate, Switch, Warning,
};
use super::{HostId, ServerId, SwitchId, bare_guid, natural_cmp};
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
    pub(super) description: Option<String>,
    /// What tells the machine that an adapter belongs to.
    pub(super) origin: Origin,
    pub(super) line: usize,
}

/// A node that a record or a listing has named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Node(u32);

/// A port of a node.
type End = (Node, u16);

/// What is known of a node.
#[derive(Debug)]
struct Entry {
    /// The id by which cables refer to it.
    id: Box<str>,
    record: Option<Record>,
    /// The description that a neighbour lists, for a node without a record.
    seen_as: Option<Box<str>>,
    /// The lowest port that may be free.
    next_port: u32,
}

/// One end of a cable as a source lists it.
#[derive(Debug, Clone, Copy)]
struct Listing {
    from: End,
    to: End,
    rate: Option<Rate>,
    line: usize,
}

/// Collects records and listings; [`Builder::finish`] makes the fabric.
#[derive(Debug, Default)]
pub(super) struct Builder {
    nodes: Vec<Entry>,
    index: HashMap<Box<str>, Node>,
    /// The line of the record with each GUID.
    guids: HashMap<String, usize>,
    listings: Vec<Listing>,
    /// The listing of each port.
    ports: HashMap<End, u32>,
    /// Switches that have an aggregation node without a record of its own.
    equipped: Vec<Node>,
    labels: Vec<(End, Box<str>)>,
    warnings: Vec<Warning>,
    assumptions: Vec<Assumption>,
}

impl Builder {
    /// Return the node with this id.
    pub(super) fn node(&mut self, id: &str) -> Node {
        if let Some(&node) = self.index.get(id) {
            return node;
        }
        let node = Node(self.nodes.len() as u32);
        self.nodes.push(Entry { id: id.into(), record: None, seen_as: None, next_port: 1 });
        self.index.insert(id.into(), node);
        node
    }

    /// Return the node with this id, if it has a record.
    pub(super) fn find(&self, id: &str) -> Option<Node> {
        self.index.get(id).copied().filter(|node| self.entry(*node).record.is_some())
    }

    fn entry(&self, node: Node) -> &Entry {
        &self.nodes[node.0 as usize]
    }

    fn entry_mut(&mut self, node: Node) -> &mut Entry {
        &mut self.nodes[node.0 as usize]
    }

    /// The records, with their nodes.
    fn records(&self) -> impl Iterator<Item = (Node, &Entry, &Record)> {
        (0u32..).map(Node).zip(&self.nodes).filter_map(|(node, entry)| Some((node, entry, entry.record.as_ref()?)))
    }

    fn kind(&self, node: Node) -> Option<Kind> {
        self.entry(node).record.as_ref().map(|record| record.kind)
    }

    /// Add a record.
    pub(super) fn record(&mut self, id: &str, record: Record) -> Result<Node, FabricError> {
        // `S-` and `H-` records share one space of GUIDs.
        if let Some(first_line) = self.guids.insert(bare_guid(id), record.line) {
            return Err(FabricError::DuplicateNode { line: record.line, first_line, id: id.into() });
        }
        let node = self.node(id);
        self.entry_mut(node).record = Some(record);
        Ok(node)
    }

    /// Add a switch or host of a source without descriptions.
    pub(super) fn named(&mut self, kind: Kind, name: &str, line: usize) -> Result<Node, FabricError> {
        self.record(name, Record { kind, description: Some(name.into()), origin: Origin::default(), line })
    }

    /// Set a record's description, and so its name.
    pub(super) fn describe(&mut self, node: Node, description: &str) {
        if let Some(record) = &mut self.entry_mut(node).record {
            record.description = Some(description.into());
        }
    }

    /// Add an aggregation node to the switch.
    pub(super) fn equip(&mut self, switch: Node) {
        self.equipped.push(switch);
    }

    /// Add one end's listing of its cable.
    pub(super) fn listing(&mut self, from: End, to: End, rate: Option<Rate>, line: usize) -> Result<(), FabricError> {
        let number = self.listings.len() as u32;
        if let Some(first) = self.ports.insert(from, number) {
            let first_line = self.listings[first as usize].line;
            return Err(FabricError::DuplicatePort { line, first_line, id: self.id(from.0), port: from.1 });
        }
        self.listings.push(Listing { from, to, rate, line });
        Ok(())
    }

    /// Note how a neighbour describes a node, in case that it has no record.
    pub(super) fn seen_as(&mut self, node: Node, description: Option<&str>) {
        let entry = self.entry_mut(node);
        if entry.record.is_none() && entry.seen_as.is_none() {
            entry.seen_as = description.map(Into::into);
        }
    }

    /// Add a whole cable.
    pub(super) fn cable(&mut self, a: End, b: End, rate: Option<Rate>, line: usize) -> Result<(), FabricError> {
        self.listing(a, b, rate, line)?;
        self.listing(b, a, rate, line)
    }

    /// Return the lowest free port of a node; `None` if all 65,535 are in use.
    pub(super) fn free_port(&mut self, node: Node) -> Option<u16> {
        let mut port = self.entry(node).next_port;
        // Ports are never freed, so each number is passed once.
        while port <= u32::from(u16::MAX) && self.ports.contains_key(&(node, port as u16)) {
            port += 1;
        }
        self.entry_mut(node).next_port = port;
        u16::try_from(port).ok()
    }

    /// Keep the source's own name of a port.
    pub(super) fn label(&mut self, end: End, label: &str) {
        self.labels.push((end, label.into()));
    }

    /// State what the source does not say.
    pub(super) fn assume(&mut self, assumption: Assumption) {
        self.assumptions.push(assumption);
    }

    /// Add a warning.
    pub(super) fn warn(&mut self, line: usize, text: String) {
        self.warnings.push(Warning { line, text });
    }

    /// The id of a node.
    pub(super) fn id(&self, node: Node) -> String {
        self.entry(node).id.to_string()
    }

    /// Check everything and build the fabric. `expected` describes a switch in the source's format.
    pub(super) fn finish(mut self, format: Format, expected: &'static str) -> Result<Fabric, FabricError> {
        self.add_missing_records()?;
        if !self.records().any(|(_, _, record)| record.kind == Kind::Switch) {
            return Err(FabricError::Empty { records: self.records().count(), expected });
        }
        let cables = self.pair_listings()?;
        let (mut switches, hosts, origins, devices) = self.place();
        for node in &self.equipped {
            if let Some(Device::Switch(switch)) = devices[node.0 as usize] {
                switches[switch.0 as usize].aggregation = Some(AggregationNode { guid: None, rate: None });
            }
        }
        let mut links = Vec::with_capacity(cables.len());
        for Listing { from, to, rate, line } in cables {
            match (devices[from.0.0 as usize], devices[to.0.0 as usize]) {
                (Some(Device::Host(_)), Some(Device::Host(_))) => {
                    self.warn(
                        line,
                        format!("`{}` and `{}` are cabled back to back; ignored", self.id(from.0), self.id(to.0)),
                    );
                }
                (Some(near), Some(far)) => {
                    let mut ends = [Port { device: near, number: from.1 }, Port { device: far, number: to.1 }];
                    ends.sort();
                    links.push(Link { ends, rate });
                }
                _ => self.attach_aggregation(&mut switches, &devices, (from.0, to.0), rate),
            }
        }
        self.warn_of_lost_aggregation_nodes(&switches);
        let labels = self
            .labels
            .drain(..)
            .filter_map(|((node, number), label)| Some((Port { device: devices[node.0 as usize]?, number }, label)));
        let labels = labels.collect();
        let mut fabric = Fabric {
            switches,
            hosts,
            links,
            labels,
            adjacent: Vec::new(),
            servers: Vec::new(),
            by_guid: Vec::new(),
            insides: BTreeMap::new(),
            warnings: self.warnings,
            assumptions: self.assumptions,
            format,
        };
        fabric.derive();
        servers::group(&mut fabric, &origins);
        fabric.warnings.sort_by_key(|warning| warning.line);
        Ok(fabric)
    }

    /// Add records for nodes that only their neighbours list, if the id tells their kind. Partial dumps have many of
    /// them.
    fn add_missing_records(&mut self) -> Result<(), FabricError> {
        let mut missing: BTreeMap<Node, usize> = BTreeMap::new();
        for listing in self.listings.iter().filter(|listing| self.entry(listing.to.0).record.is_none()) {
            let seen = missing.entry(listing.to.0).or_insert(listing.line);
            *seen = (*seen).min(listing.line);
        }
        for (node, line) in missing {
            let entry = self.entry(node);
            let (id, description) = (entry.id.to_string(), entry.seen_as.as_deref().map(str::to_owned));
            let kind = match id.as_bytes() {
                [b'S', b'-', ..] => Kind::Switch,
                [b'R', b'-', ..] => Kind::Ignored,
                [b'H', b'-', ..] if description.as_deref().is_some_and(is_aggregation_node) => Kind::Aggregation,
                [b'H', b'-', ..] => Kind::Host,
                _ => return Err(FabricError::UnknownNode { line, id }),
            };
            self.warn(line, format!("`{id}` has no record of its own; known from its neighbours only"));
            self.record(&id, Record { kind, description, origin: Origin::default(), line })?;
        }
        Ok(())
    }

    /// Join the listings of both ends into cables.
    fn pair_listings(&mut self) -> Result<Vec<Listing>, FabricError> {
        let mut cables = Vec::with_capacity(self.listings.len() / 2 + 1);
        let mut warnings = Vec::new();
        for listing in &self.listings {
            let Listing { from, to, rate, line } = *listing;
            if to == from {
                warnings.push((line, format!("`{}` port {} is cabled to itself; ignored", self.id(from.0), from.1)));
                continue;
            }
            let Some(other) = self.ports.get(&to).map(|number| &self.listings[*number as usize]) else {
                let far = self.id(to.0);
                warnings.push((line, format!("only this side lists the link to `{far}` port {}; kept", to.1)));
                cables.push(*listing);
                continue;
            };
            let rates_differ = matches!((rate, other.rate), (Some(a), Some(b)) if a != b);
            if other.to != from || rates_differ {
                let (near, far) = if line <= other.line { (listing, other) } else { (other, listing) };
                return Err(FabricError::LinkDisagrees {
                    line: near.line,
                    near: self.show(near),
                    other_line: far.line,
                    far: self.show(far),
                });
            }
            if from < to {
                cables.push(Listing { rate: rate.or(other.rate), ..*listing });
            }
        }
        warnings.into_iter().for_each(|(line, text)| self.warn(line, text));
        self.refuse_shared_far_ports(cables)
    }

    fn show(&self, listing: &Listing) -> String {
        let rate = listing.rate.map_or("unknown rate".into(), |rate| rate.to_string());
        let (from, to) = (listing.from, listing.to);
        format!("{}[{}] to {}[{}], {rate}", self.id(from.0), from.1, self.id(to.0), to.1)
    }

    /// Refuse two one-sided links into the same port: its own side does not tell which is right.
    fn refuse_shared_far_ports(&self, cables: Vec<Listing>) -> Result<Vec<Listing>, FabricError> {
        let mut taken: HashMap<End, usize> = HashMap::new();
        // A port with a listing of its own has one cable: both sides agree.
        let one_sided = |end: &End| !self.ports.contains_key(end);
        for cable in &cables {
            for end in [cable.from, cable.to].into_iter().filter(one_sided) {
                if let Some(first_line) = taken.insert(end, cable.line) {
                    let (line, first_line) = (cable.line.max(first_line), cable.line.min(first_line));
                    return Err(FabricError::DuplicatePort { line, first_line, id: self.id(end.0), port: end.1 });
                }
            }
        }
        Ok(cables)
    }

    /// Choose each node's name: its description if unique among names and ids, else its GUID.
    fn names(&self) -> Vec<String> {
        let mut seen: HashMap<&str, u32> = HashMap::new();
        let guids: Vec<String> = self.nodes.iter().map(|entry| bare_guid(&entry.id)).collect();
        let placed = |kind| matches!(kind, Kind::Switch | Kind::Host);
        for (node, _, record) in self.records().filter(|(_, _, record)| placed(record.kind)) {
            let guid = guids[node.0 as usize].as_str();
            let description = record.description.as_deref().filter(|text| *text != guid);
            // A GUID claims its spelling too: a description may not pose as another node's GUID.
            for spelling in description.into_iter().chain([guid]) {
                *seen.entry(spelling).or_default() += 1;
            }
        }
        let name = |(entry, guid): (&Entry, &String)| {
            let description = entry.record.as_ref().and_then(|record| record.description.as_deref());
            match description {
                Some(text) if seen.get(text) == Some(&1) => text.to_owned(),
                _ => guid.clone(),
            }
        };
        self.nodes.iter().zip(&guids).map(name).collect()
    }

    /// Sort switches and hosts by name and number them; return them, what tells each host's machine, and each node's
    /// device.
    fn place(&self) -> (Vec<Switch>, Vec<Host>, Vec<Origin>, Vec<Option<Device>>) {
        let mut names = self.names();
        let mut sorted: Vec<(Node, &Entry, &Record)> = self.records().collect();
        sorted.sort_by(|a, b| natural_cmp(&names[a.0.0 as usize], &names[b.0.0 as usize]));
        let (mut switches, mut hosts, mut origins) = (Vec::new(), Vec::new(), Vec::new());
        let mut devices = vec![None; self.nodes.len()];
        for (node, entry, record) in sorted {
            let (name, guid) = (std::mem::take(&mut names[node.0 as usize]), bare_guid(&entry.id));
            let description = record.description.clone();
            devices[node.0 as usize] = match record.kind {
                Kind::Switch => {
                    switches.push(Switch { name, guid, description, aggregation: None, is_device: false });
                    Some(Device::Switch(SwitchId(switches.len() as u32 - 1)))
                }
                Kind::Host => {
                    hosts.push(Host { name, guid, description, uplinks: Vec::new(), server: ServerId(0) });
                    origins.push(record.origin.clone());
                    Some(Device::Host(HostId(hosts.len() as u32 - 1)))
                }
                Kind::Aggregation | Kind::Ignored => None,
            };
        }
        (switches, hosts, origins, devices)
    }

    /// Note an aggregation node at the switch that its cable leads to.
    fn attach_aggregation(
        &self,
        switches: &mut [Switch],
        devices: &[Option<Device>],
        ends: (Node, Node),
        rate: Option<Rate>,
    ) {
        for (node, other) in [ends, (ends.1, ends.0)] {
            if let (Some(Kind::Aggregation), Some(Device::Switch(switch))) =
                (self.kind(node), devices[other.0 as usize])
            {
                let aggregation = AggregationNode { guid: Some(bare_guid(&self.entry(node).id)), rate };
                switches[switch.0 as usize].aggregation = Some(aggregation);
            }
        }
    }

    fn warn_of_lost_aggregation_nodes(&mut self, switches: &[Switch]) {
        let mut placed: Vec<&str> =
            switches.iter().filter_map(|switch| switch.aggregation.as_ref()?.guid.as_deref()).collect();
        placed.sort_unstable();
        let lost: Vec<(usize, String)> = self
            .records()
            .filter(|(_, entry, record)| {
                record.kind == Kind::Aggregation && placed.binary_search(&bare_guid(&entry.id).as_str()).is_err()
            })
            .map(|(_, entry, record)| (record.line, entry.id.to_string()))
            .collect();
        for (line, id) in lost {
            self.warn(
                line,
                format!("aggregation node `{id}` is cabled to no switch, or to one that has another; ignored"),
            );
        }
    }
}

/// Return whether a description is that of a switch's aggregation node, such as
/// `Mellanox Technologies Aggregation Node`.
pub(super) fn is_aggregation_node(description: &str) -> bool {
    description.to_ascii_lowercase().contains("aggregation node")
}
