//! Admission: from a job's ranks to a tree on the fabric, and to a group on each of its devices, all or none.
//!
//! [`draft`] asks nobody: it plans by what the books leave. What it returns is claimed in the books, and then
//! [`Placement::reserve`]d on the devices, which takes as long as they take.

mod attach;
mod reserve;
mod size;

pub(super) use reserve::Unreserved;
#[cfg(feature = "snapshot")]
pub(super) use reserve::{Failed, Reserving};

use super::ControllerConfig;
use super::books::{Amount, Books, Claim, Needs};
use super::device::{Asked, DeviceSession};
use super::entropy::Entropy;
use super::proto::{JoinRequest, TreeMembership};
use super::shape::Shape;
use crate::plan::{Child, DeviceLimits, HostSelection, Limits, Plan, plan};
use crate::select::TreeFacts;
use crate::topo::Fabric;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use std::sync::Arc;
use sumac_hal::ctrl::{ChildMask, GroupConfig, NodeParent, Order, Request, SharedLink, TreeConfig};
use sumac_hal::ids::{ChildIndex, Epoch, GroupId, Rank, TreeId};
use sumac_hal::key::GroupSecret;
use sumac_hal::port::Addr;
use sumac_hal::shard::Shard;
use sumac_hal::wire::{HEADER_LEN, MAX_CHILDREN};

/// One node of a placed tree.
#[derive(Debug)]
pub(super) struct PlacedNode {
    pub(super) device: Arc<DeviceSession>,
    secret: GroupSecret,
    /// Where it sends results to all its children at once.
    shared: Option<Addr>,
    /// The parent's index and this node's place there.
    parent: Option<(usize, ChildIndex)>,
    children: u16,
    /// The ranks here that contribute by reference.
    by_reference: ChildMask,
    /// Bytes that the group takes of each shard's slot memory.
    memory_bytes: u64,
    /// Bytes that the group takes of the memory for redo slots.
    redo_memory_bytes: u64,
}

impl PlacedNode {
    /// Whether its device receives packets over RDMA verbs.
    fn over_verbs(&self) -> bool {
        matches!(self.device.announce.data_addrs.first(), Some(Addr::Verbs(_)))
    }
}

/// A job's tree and group, reserved on every node.
#[derive(Debug)]
pub(super) struct Placement {
    pub(super) group: GroupId,
    tree: TreeId,
    epoch: Epoch,
    pub(super) levels: u32,
    max_children: u32,
    /// Root first.
    pub(super) nodes: Vec<PlacedNode>,
    /// Each rank's leaf and place there.
    ranks: Vec<(usize, ChildIndex)>,
    /// Why ranks that may contribute by reference contribute by packets.
    by_packets: BTreeMap<Rank, String>,
    /// Each rank's host, where a fabric names them.
    hosts: Option<Vec<String>>,
    /// How many ranks are reached by RDMA.
    ranks_by_rdma: u32,
    window_max: u16,
    slots: u16,
    chunk_len_bytes: u16,
    #[cfg(feature = "planted")]
    bug: Option<sumac_hal::planted::Bug>,
}

/// Devices by name.
pub(super) type Devices = BTreeMap<String, Arc<DeviceSession>>;

/// What a placement is called, and what its secrets are made of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ids {
    pub(super) group: GroupId,
    pub(super) tree: TreeId,
    pub(super) epoch: Epoch,
    pub(super) entropy: Entropy,
    #[cfg(feature = "planted")]
    pub(super) bug: Option<sumac_hal::planted::Bug>,
}

/// What a job asks for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asking<'j> {
    pub(super) tenant: &'j str,
    /// In order of rank.
    pub(super) requests: &'j [&'j JoinRequest],
    /// The devices that it is pinned to, the root first; none: as planned.
    pub(super) pinned: &'j [String],
}

/// Plan a tree for the ranks on what the books leave of these devices, or take those that the job pins; or say in one
/// sentence why not. Nothing is reserved.
pub(super) fn draft(
    config: &ControllerConfig,
    devices: &Devices,
    books: &Books,
    asking: Asking<'_>,
    ids: Ids,
) -> Result<Placement, String> {
    if devices.is_empty() {
        return Err("no device is connected to the controller".into());
    }
    if !asking.pinned.is_empty() {
        let shape = Shape::pinned(asking.pinned, asking.requests.len(), devices)?;
        return fitted(config, books, asking, shape, ids);
    }
    let Some(fabric) = &config.fabric else {
        // Any of them can stand for the fabric; why the first one can't is what is told.
        let mut first = None;
        for (switch, device) in devices {
            let (ranks, most) = (asking.requests.len(), most_children(device));
            if ranks > most {
                // No fabric has to be made up to see that.
                first.get_or_insert(format!(
                    "{ranks} ranks are more than the {most} children that a group has at most on device {switch}, and without \
                     a fabric trees have one level"
                ));
                continue;
            }
            let flat = flat_fabric(switch, asking.requests.len())?;
            match planned(config, &flat, devices, books, asking, ids) {
                Err(why) => drop(first.get_or_insert(why)),
                fits => return fits,
            }
        }
        return Err(first.unwrap_or_default());
    };
    planned(config, fabric, devices, books, asking, ids)
}

fn planned(
    config: &ControllerConfig,
    fabric: &Fabric,
    devices: &Devices,
    books: &Books,
    asking: Asking<'_>,
    ids: Ids,
) -> Result<Placement, String> {
    let plan = plan_tree(fabric, devices, books, asking)?;
    let hosts = config.fabric.as_ref().map(|_| plan.ranks.iter().map(|rank| rank.name.clone()).collect());
    fitted(config, books, asking, Shape { hosts, ..Shape::planned(&plan, devices)? }, ids)
}

/// Put a group on a shape, as large as fits.
fn fitted(
    config: &ControllerConfig,
    books: &Books,
    asking: Asking<'_>,
    shape: Shape,
    ids: Ids,
) -> Result<Placement, String> {
    let mut placement = place(shape, ids)?;
    placement.attach(asking.requests)?;
    placement.fit(config, books, asking)?;
    Ok(placement)
}

/// Without a fabric: all hosts on one device.
fn flat_fabric(switch: &str, hosts: usize) -> Result<Fabric, String> {
    let mut text = format!("[[switch]]\nname = {switch:?}\naggregation = true\n");
    for host in 0..hosts {
        let host = format!("host-{host}");
        text.push_str(&format!("[[host]]\nname = {host:?}\n[[link]]\nends = [{host:?}, {switch:?}]\n"));
    }
    Fabric::from_toml(&text).map_err(|error| format!("device {switch:?} can't stand for a fabric: {error}"))
}

fn plan_tree(fabric: &Fabric, devices: &Devices, books: &Books, asking: Asking<'_>) -> Result<Plan, String> {
    let limits = devices.values().filter_map(|device| {
        let left = books.left(asking.tenant, &device.key());
        let slots = if left.groups == 0 { 0 } else { left.slots };
        let limits =
            DeviceLimits { max_children: most_children(device), slots_free: u32::try_from(slots).unwrap_or(u32::MAX) };
        Some((fabric.find_switch(device.name())?, limits))
    });
    let limits = Limits {
        // The least window that still moves: the real one is cut to what is free.
        slots_needed: 2 * u32::from(shard_of(devices)?.most_within(1) as u16),
        devices: Some(limits.collect()),
        ..Limits::default()
    };
    let names: Option<Vec<String>> = asking.requests.iter().map(|request| request.host.clone()).collect();
    let hosts = names.map_or(HostSelection::First(asking.requests.len()), HostSelection::Named);
    plan(fabric, &hosts, &limits).map_err(|error| error.to_string())
}

fn shard_of(devices: &Devices) -> Result<Shard, String> {
    let shards = devices.values().map(|device| device.announce.data_addrs.len()).max().unwrap_or(1);
    Shard::new(0, shards as u16).ok_or_else(|| format!("a device with {shards} shards"))
}

/// Return how many children a group can have on a device, whatever it says.
fn most_children(device: &DeviceSession) -> usize {
    usize::from(device.announce.capabilities.children).min(MAX_CHILDREN)
}

fn place(shape: Shape, ids: Ids) -> Result<Placement, String> {
    if let Some((device, children)) =
        shape.nodes.iter().find(|(device, children)| children.len() > most_children(device))
    {
        let (name, len, most) = (device.name(), children.len(), most_children(device));
        return Err(format!("device {name} would have {len} children, and a group has at most {most} there"));
    }
    let Ids { group, tree, epoch, .. } = ids;
    let mut ranks = vec![(0, ChildIndex(0)); shape.ranks];
    let mut places = vec![None; shape.nodes.len()];
    for (index, (_, children)) in shape.nodes.iter().enumerate() {
        for (i, child) in children.iter().enumerate() {
            match *child {
                Child::Rank(rank) => ranks[rank.0 as usize] = (index, ChildIndex(i as u16)),
                Child::Node(below) => places[below] = Some((index, ChildIndex(i as u16))),
            }
        }
    }
    let nodes = (0..).zip(shape.nodes).zip(places).map(|((index, (device, children)), parent)| PlacedNode {
        device,
        secret: GroupSecret(ids.entropy.bytes([group.0.into(), index])),
        shared: None,
        parent,
        children: children.len() as u16,
        by_reference: ChildMask::EMPTY,
        memory_bytes: 0,
        redo_memory_bytes: 0,
    });
    let nodes: Vec<_> = nodes.collect();
    let shards = |node: &PlacedNode| node.device.announce.data_addrs.len();
    if let Some(other) = nodes.iter().find(|node| shards(node) != shards(&nodes[0])) {
        let (root, here) = (shards(&nodes[0]), shards(other));
        return Err(format!(
            "device {} has {here} shards, device {} has {root}; the devices of a tree need equally many",
            other.device.name(),
            nodes[0].device.name()
        ));
    }
    let kind = |node: &PlacedNode| if node.over_verbs() { "over verbs" } else { "over UDP" };
    if let Some(other) = nodes.iter().find(|node| node.over_verbs() != nodes[0].over_verbs()) {
        return Err(format!(
            "device {} receives {}, device {} {}; the devices of a tree need the same",
            other.device.name(),
            kind(other),
            nodes[0].device.name(),
            kind(&nodes[0])
        ));
    }
    Ok(Placement {
        group,
        tree,
        epoch,
        levels: shape.levels,
        max_children: shape.max_children,
        nodes,
        ranks,
        by_packets: BTreeMap::new(),
        hosts: shape.hosts,
        ranks_by_rdma: 0,
        window_max: 0,
        slots: 0,
        chunk_len_bytes: 0,
        #[cfg(feature = "planted")]
        bug: ids.bug,
    })
}

impl Placement {
    /// Tell whether all ranks and devices use loopback addresses of IPv4: the controller listens on loopback only, so
    /// that is one host.
    fn on_one_host(&self, requests: &[&JoinRequest]) -> bool {
        let loopback = |addr: SocketAddr| addr.is_ipv4() && addr.ip().is_loopback();
        let mut devices = self.nodes.iter().flat_map(|node| &node.device.announce.data_addrs);
        devices.all(|addr| matches!(addr, Addr::Udp(addr) if loopback(*addr)))
            && requests.iter().all(|request| loopback(request.mesh_addr))
    }

    /// Draw each node a shared address towards its children, if there are some whom packets bring results.
    fn share(&mut self) {
        for node in &mut self.nodes {
            let by_packets = usize::from(node.children) > node.by_reference.iter().count();
            node.shared = (node.children > 1 && by_packets).then(draw_shared);
        }
    }

    /// What a child of `node` knows of its shared address.
    fn shared_link(&self, node: &PlacedNode) -> Option<SharedLink> {
        let key = node.secret.child_key(self.group, self.epoch, ChildIndex::ALL);
        Some(SharedLink { addr: node.shared?, key })
    }

    /// The shared address of the parent.
    fn parent_shared(&self, node: &PlacedNode) -> Option<SharedLink> {
        let (parent, _) = node.parent?;
        self.shared_link(&self.nodes[parent])
    }

    /// Choose the sizes by what the books leave, and the ways of answers.
    fn fit(&mut self, config: &ControllerConfig, books: &Books, asking: Asking<'_>) -> Result<(), String> {
        self.size(config, books, asking)?;
        if config.shared_answers && self.on_one_host(asking.requests) {
            self.share();
        }
        Ok(())
    }

    /// Let the ranks of a node contribute by packets after all, and choose the sizes anew.
    pub(super) fn refit_inline(
        &mut self,
        (index, why): (usize, &str),
        config: &ControllerConfig,
        books: &Books,
        asking: Asking<'_>,
    ) -> Result<(), String> {
        self.turn_inline(index, asking.requests, why)?;
        self.fit(config, books, asking)
    }

    /// Return what the group takes of each device.
    pub(super) fn claim(&self, tenant: &str) -> Claim {
        Claim { group: self.group, tenant: tenant.to_owned(), needs: self.needs(u64::from(self.slots)) }
    }

    /// Return the least that the group could do with: a window of one chunk.
    pub(super) fn least(&self) -> Needs {
        let shard = Shard::new(0, self.nodes[0].device.announce.data_addrs.len() as u16);
        self.needs(shard.map_or(0, |shard| 2 * shard.most_within(1)))
    }

    fn needs(&self, slots: u64) -> Needs {
        let most = u64::from(self.slots).max(1);
        let need = |node: &PlacedNode| Amount {
            groups: 1,
            slots,
            memory_bytes: node.memory_bytes / most * slots,
            redo_memory_bytes: node.redo_memory_bytes / most * slots,
        };
        self.nodes.iter().map(|node| (node.device.key(), need(node))).collect()
    }

    fn tree_config(&self, index: usize) -> TreeConfig {
        let node = &self.nodes[index];
        let parent = node.parent.map(|(parent, child)| NodeParent {
            data_addrs: self.nodes[parent].device.announce.data_addrs.clone(),
            child,
        });
        let mut ranks: heapless::Vec<u16, MAX_CHILDREN> = (0..node.children).map(|_| TreeConfig::NODE).collect();
        for (rank, (leaf, child)) in (0..TreeConfig::NODE).zip(&self.ranks) {
            if let Some(place) = ranks.get_mut(usize::from(child.0)).filter(|_| *leaf == index) {
                *place = rank;
            }
        }
        TreeConfig { tree: self.tree, parent, children: node.children, ranks }
    }

    fn group_config(&self, config: &ControllerConfig, order: Order, node: &PlacedNode) -> GroupConfig {
        let key =
            |(parent, child): (usize, ChildIndex)| self.nodes[parent].secret.child_key(self.group, self.epoch, child);
        GroupConfig {
            group: self.group,
            tree: self.tree,
            epoch: self.epoch,
            order,
            secret: node.secret,
            parent_key: node.parent.map_or(0, key),
            shared: node.shared,
            parent_shared: self.parent_shared(node),
            window_max: self.window_max,
            slots: self.slots,
            chunk_len_bytes: self.chunk_len_bytes,
            ranks: NonZeroU32::new(self.ranks.len() as u32).unwrap_or(NonZeroU32::MIN),
            lease_ms: u32::try_from(config.lease.as_millis()).unwrap_or(u32::MAX),
            timers: config.timers.into(),
            by_reference: node.by_reference,
        }
    }

    /// Tell a rank its place.
    pub(super) fn membership(&self, config: &ControllerConfig, rank: Rank) -> TreeMembership {
        let (leaf, child) = self.ranks[rank.0 as usize];
        let node = &self.nodes[leaf];
        let announce = &node.device.announce;
        let packet = u32::from(self.chunk_len_bytes) + HEADER_LEN as u32;
        let bus = announce.bus.as_ref().filter(|_| node.by_reference.contains(child));
        // Packets of all children must find room; what comes by reference takes none.
        let start = match bus {
            Some(_) => u32::from(self.window_max),
            None => announce.capabilities.receive_buffer_bytes / (u32::from(node.children) * packet),
        };
        let all = self.nodes.iter().map(|node| &node.device.announce.capabilities);
        let facts = TreeFacts {
            levels: self.levels,
            max_children: self.max_children,
            dtypes: all.clone().fold(u32::MAX, |mask, device| mask & device.dtypes),
            ops: all.clone().fold(u32::MAX, |mask, device| mask & device.ops),
            collectives: all.fold(u32::MAX, |mask, device| mask & device.collectives),
            ranks_by_reference: self.ranks_by_reference(),
            ranks_by_rdma: self.ranks_by_rdma,
            over_verbs: self.nodes.iter().any(PlacedNode::over_verbs),
        };
        TreeMembership {
            group: self.group,
            epoch: self.epoch,
            leaf: node.device.name().to_owned(),
            host: self.hosts.as_ref().map(|hosts| hosts[rank.0 as usize].clone()),
            child,
            key: node.secret.child_key(self.group, self.epoch, child),
            shared: self.shared_link(node).filter(|_| bus.is_none()),
            parents: announce.data_addrs.iter().copied().collect(),
            window_max: self.window_max,
            window_start: start.clamp(1, u32::from(self.window_max)) as u16,
            chunk_len_bytes: self.chunk_len_bytes,
            timers: config.timers.into(),
            facts,
            bus: bus.cloned(),
            by_packets: self.by_packets.get(&rank).cloned(),
        }
    }

    /// Return each node's children in order, root first: the expression that the group evaluates.
    pub(super) fn expression(&self) -> Vec<Vec<Child>> {
        let mut nodes: Vec<_> =
            self.nodes.iter().map(|node| vec![Child::Node(0); usize::from(node.children)]).collect();
        for (index, node) in self.nodes.iter().enumerate() {
            if let Some((parent, child)) = node.parent {
                nodes[parent][usize::from(child.0)] = Child::Node(index);
            }
        }
        for (rank, (leaf, child)) in (0..).zip(&self.ranks) {
            nodes[*leaf][usize::from(child.0)] = Child::Rank(Rank(rank));
        }
        nodes
    }

    /// Tell a device to free the group and its tree. One that can't be told frees by itself: it restarted, or the lease
    /// runs out. Returns the last request.
    pub(super) fn release_on(&self, device: &DeviceSession) -> Option<Asked> {
        let mut requests = [Request::ReleaseGroup(self.group), Request::RemoveTree(self.tree)].into_iter();
        let asked = requests.try_fold(None, |_, request| device.post(request).map(Some));
        asked.unwrap_or_else(|error| {
            tracing::debug!(device = device.name(), group = %self.group, %error, "not released");
            None
        })
    }
}

/// Draw a multicast address of the site's own (239.255.0.0/16, RFC 2365) and a port. Two groups that draw the same are
/// told apart by their keys, and only hear more than they need.
fn draw_shared() -> Addr {
    let [x, y, high, low] = random_bytes();
    let port = SHARED_PORTS.start() + u16::from_be_bytes([high, low]) % (SHARED_PORTS.end() - SHARED_PORTS.start() + 1);
    Addr::Udp(SocketAddr::from((Ipv4Addr::new(239, 255, x, y), port)))
}

/// The UDP ports of first shards' shared addresses: there is room for all shards behind each.
const SHARED_PORTS: std::ops::RangeInclusive<u16> = 20_000..=60_000;

pub(super) fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    assert_eq!(filled, Ok(N), "the system gives randomness once it has booted");
    bytes
}
