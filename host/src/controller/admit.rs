//! Admission: plans a tree for a job's ranks and reserves a group on each of its devices, all or none.
//!
//! [`draft`] sends nothing: it plans with what the ledger has available. Its result is claimed in the ledger and then
//! reserved on the devices with [`Placement::reservation`].

mod alike;
mod attach;
pub(super) mod facts;
mod paths;
mod rails;
mod request;
mod size;
mod tree;

pub(super) use paths::{Hop, NarrowPaths};
pub(super) use rails::JobRails;
pub(super) use request::{HostBlock, PlacementRequest};
pub(super) use tree::{TreeSketch, sketch_trees};

use super::ControllerConfig;
use super::device::Device;
use super::entropy::Entropy;
use super::proto::{JoinRequest, TreeMembership};
use super::resources::{Claim, Needs, ResourceLedger, Resources};
use super::shape::TreeShape;
use super::state::PlannedTrees;
use crate::plan::{Child, KeptIndex, Planner};
use crate::select::{LinkFacts, prefers_packets};
use crate::topo::LinkId;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use std::sync::Arc;
use sumac_hal::ctrl::{ChildMask, GroupConfig, NodeParent, Order, Request, SharedLink, TreeConfig};
use sumac_hal::ids::{ChildIndex, Epoch, GroupId, Rank, TreeId};
use sumac_hal::key::GroupSecret;
use sumac_hal::planted;
use sumac_hal::port::Addr;
use sumac_hal::shard::Shard;
use sumac_hal::wire::{MAX_CHILDREN, SHORT_HEADER_LEN};
use tree::{flat_fabric, link_facts, plan_tree};

/// One node of a placed tree.
#[derive(Debug)]
pub(super) struct PlacedNode {
    pub(super) device: Arc<Device>,
    secret: GroupSecret,
    /// The multicast address to which it sends results to all its children.
    shared: Option<Addr>,
    /// The parent's index, and this node's index among its children.
    parent: Option<(usize, ChildIndex)>,
    children: u16,
    /// The children that use zero-copy.
    zero_copy: ChildMask,
    /// The group's slots in each shard.
    slots: u16,
    /// The group's slot memory in each shard, in bytes.
    memory_bytes: u64,
    /// The group's redo memory, in bytes.
    redo_memory_bytes: u64,
}

impl PlacedNode {
    /// Whether the device receives packets over RDMA verbs.
    fn over_verbs(&self) -> bool {
        self.device.over_verbs()
    }

    /// The number of the device's shards.
    fn shards(&self) -> u16 {
        self.device.announce.data_addrs.len() as u16
    }

    /// How many slots the group needs in each shard for a window of so many chunks.
    fn slots_for(&self, window: u64) -> u64 {
        Shard::new(0, self.shards()).map_or(0, |shard| 2 * shard.max_in_window(window))
    }
}

/// A job's tree and group: drafted, or reserved on every node.
#[derive(Debug)]
pub(super) struct Placement {
    pub(super) group: GroupId,
    tree: TreeId,
    epoch: Epoch,
    pub(super) levels: u32,
    max_children: u32,
    /// Root first.
    pub(super) nodes: Vec<PlacedNode>,
    /// Each rank's leaf, and its index among the leaf's children.
    ranks: Vec<(usize, ChildIndex)>,
    /// Why ranks that may use zero-copy use packets.
    packets_reasons: BTreeMap<Rank, String>,
    /// Each rank's host, if there is a fabric.
    hosts: Option<Vec<String>>,
    /// The cables of the tree's edges, if there is a fabric; once for each edge.
    cables: Arc<[LinkId]>,
    /// What the rates of cables allow, if all are known.
    links: Option<LinkFacts>,
    /// How many ranks use RDMA.
    rdma_ranks: u32,
    window_max: u16,
    chunk_len_bytes: u16,
    /// The job whose communicator it serves.
    communicator: String,
    /// The trees that were planned with it, if it is the first tree of a job that starts.
    pub(super) trees: PlannedTrees,
    #[cfg(feature = "planted")]
    pub(super) bug: Option<sumac_hal::planted::Bug>,
}

/// Devices by name.
pub(super) type Devices = BTreeMap<String, Arc<Device>>;

/// The identifiers of a new group, and the source of its secrets.
#[derive(Debug, Clone, Copy)]
pub(super) struct GroupIds {
    pub(super) group: GroupId,
    pub(super) tree: TreeId,
    pub(super) epoch: Epoch,
    pub(super) entropy: Entropy,
    #[cfg(feature = "planted")]
    pub(super) bug: Option<sumac_hal::planted::Bug>,
}

/// Plan a tree on what the ledger has available of `devices`, or build the one that the job pins. Reserves nothing.
///
/// # Errors
/// The reason why there is no tree, in one sentence.
pub(super) fn draft(
    (config, index): (&ControllerConfig, &KeptIndex),
    devices: &Devices,
    ledger: &ResourceLedger,
    request: PlacementRequest<'_>,
    ids: GroupIds,
) -> Result<Placement, String> {
    if devices.is_empty() {
        return Err("no device is connected to the controller".into());
    }
    if !request.pinned.is_empty() {
        let shape = TreeShape::pinned(request.pinned, request.requests.len(), devices)?;
        return build_placement(config, ledger, request, (shape, None), ids);
    }
    let Some(fabric) = &config.fabric else {
        // Any device can serve as the fabric. Report the reason why the first one cannot.
        let mut first = None;
        let groups = request.groups().len();
        for (switch, device) in devices {
            let (ranks, most) = (groups, children_max(device));
            if ranks > most {
                // Checked before building a fabric of that size.
                first.get_or_insert(format!(
                    "{ranks} ranks exceed the {most} children of a group on device {switch}; without a fabric, trees \
                     have one level: start the controller with a fabric"
                ));
                continue;
            }
            let flat = flat_fabric(switch, groups)?;
            match plan_and_build(config, &Planner::new(&flat), devices, ledger, request, ids) {
                Err(why) => drop(first.get_or_insert(why)),
                fits => return fits,
            }
        }
        return Err(first.unwrap_or_default());
    };
    plan_and_build(config, &index.planner(fabric), devices, ledger, request, ids)
}

fn plan_and_build(
    config: &ControllerConfig,
    planner: &Planner<'_>,
    devices: &Devices,
    ledger: &ResourceLedger,
    request: PlacementRequest<'_>,
    ids: GroupIds,
) -> Result<Placement, String> {
    let groups = request.groups();
    let (plan, limits) = plan_tree((config, planner), devices, ledger, (request, &groups))?;
    let host = |group: usize| plan.ranks[group].name.clone();
    let hosts = config.fabric.as_ref().map(|_| groups.group_of_ranks().into_iter().map(host).collect());
    let shape = TreeShape::planned(&plan, devices)?.expand(&groups, request.hosts);
    let links = config.fabric.as_ref().and_then(|_| link_facts(planner, ledger, (request, &groups), (&plan, limits)));
    let mut placement = build_placement(config, ledger, request, (TreeShape { hosts, ..shape }, links), ids)?;
    if config.fabric.is_some() {
        let nodes = plan.nodes.iter().flat_map(|node| &node.path);
        placement.cables = nodes.chain(plan.ranks.iter().flat_map(|rank| &rank.path)).copied().collect();
    }
    Ok(placement)
}

/// Build a placement of the given shape, with the largest sizes that fit, and ranks attached in the faster way.
fn build_placement(
    config: &ControllerConfig,
    ledger: &ResourceLedger,
    request: PlacementRequest<'_>,
    (shape, links): (TreeShape, Option<LinkFacts>),
    ids: GroupIds,
) -> Result<Placement, String> {
    let attached = |shape: TreeShape| {
        let mut placement = place(shape, ids)?;
        let first = request.requests.first();
        placement.communicator = first.map_or_else(String::new, |request| request.communicator().into());
        placement.links = links;
        placement.attach(request.requests)?;
        Ok::<_, String>(placement)
    };
    let mut placement = attached(shape.clone())?;
    placement.choose_sizes(config, ledger, request)?;
    if placement.may_prefer_packets(request) {
        let by_packets = attached(shape).and_then(|mut placement| {
            placement.leave_zero_copy(request.requests)?;
            placement.choose_sizes(config, ledger, request)?;
            Ok(placement)
        });
        let is_faster = |by_packets: &Placement| {
            let facts = |placement: &Placement| placement.job_facts(request);
            prefers_packets(&config.table, &facts(&placement), &facts(by_packets))
        };
        if let Some(by_packets) = by_packets.ok().filter(is_faster) {
            return Ok(by_packets);
        }
    }
    Ok(placement)
}

fn shard_of(devices: &Devices) -> Result<Shard, String> {
    let shards = devices.values().map(|device| device.announce.data_addrs.len()).max().unwrap_or(1);
    Shard::new(0, shards as u16).ok_or_else(|| format!("a device announces {shards} shards, which is out of range"))
}

/// The maximum number of children of a group on a device, capped whatever the device announces.
fn children_max(device: &Device) -> usize {
    usize::from(device.announce.capabilities.children).min(MAX_CHILDREN)
}

fn place(shape: TreeShape, ids: GroupIds) -> Result<Placement, String> {
    if let Some((device, children)) =
        shape.nodes.iter().find(|(device, children)| children.len() > children_max(device))
    {
        let (name, len, most) = (device.name(), children.len(), children_max(device));
        return Err(format!("device {name} would have {len} children; a group has at most {most} there"));
    }
    let GroupIds { group, tree, epoch, .. } = ids;
    let mut ranks = vec![(0, ChildIndex(0)); shape.ranks];
    let mut positions = vec![None; shape.nodes.len()];
    for (index, (_, children)) in shape.nodes.iter().enumerate() {
        for (i, child) in children.iter().enumerate() {
            match *child {
                Child::Rank(rank) => ranks[rank.0 as usize] = (index, ChildIndex(i as u16)),
                Child::Node(below) => positions[below] = Some((index, ChildIndex(i as u16))),
            }
        }
    }
    let nodes = (0..).zip(shape.nodes).zip(positions).map(|((index, (device, children)), parent)| PlacedNode {
        device,
        secret: GroupSecret(ids.entropy.bytes([group.0.into(), index])),
        shared: None,
        parent,
        children: children.len() as u16,
        zero_copy: ChildMask::EMPTY,
        slots: 0,
        memory_bytes: 0,
        redo_memory_bytes: 0,
    });
    let nodes: Vec<_> = nodes.collect();
    alike::check(&nodes)?;
    Ok(Placement {
        group,
        tree,
        epoch,
        levels: shape.levels,
        max_children: shape.max_children,
        nodes,
        ranks,
        packets_reasons: BTreeMap::new(),
        hosts: shape.hosts,
        cables: Arc::default(),
        links: None,
        rdma_ranks: 0,
        window_max: 0,
        chunk_len_bytes: 0,
        communicator: String::new(),
        trees: PlannedTrees::default(),
        #[cfg(feature = "planted")]
        bug: ids.bug,
    })
}

impl Placement {
    /// Whether all ranks and devices use IPv4 loopback addresses. They are then on one host, if the controller listens
    /// on loopback only.
    fn on_one_host(&self, requests: &[&JoinRequest]) -> bool {
        let loopback = |addr: SocketAddr| addr.is_ipv4() && addr.ip().is_loopback();
        let mut devices = self.nodes.iter().flat_map(|node| &node.device.announce.data_addrs);
        devices.all(|addr| matches!(addr, Addr::Udp(addr) if loopback(*addr)))
            && requests.iter().all(|request| loopback(request.mesh_addr))
    }

    /// Assign a multicast address to each node with several children of which some receive results in packets.
    fn draw_multicast(&mut self) {
        for node in &mut self.nodes {
            let by_packets = usize::from(node.children) > node.zero_copy.iter().count();
            node.shared = (node.children > 1 && by_packets).then(random_multicast_addr);
        }
    }

    /// The key of a child of `node`.
    fn child_key(&self, node: &PlacedNode, child: ChildIndex) -> u64 {
        let epoch = if planted!(self, EpochUnchecked) { Epoch::default() } else { self.epoch };
        node.secret.child_key(self.group, epoch, child)
    }

    /// The multicast address and key of `node`, for its children.
    fn shared_link(&self, node: &PlacedNode) -> Option<SharedLink> {
        let key = self.child_key(node, ChildIndex::ALL);
        Some(SharedLink { addr: node.shared?, key })
    }

    /// The multicast address and key of the node's parent. A node with fewer shards would get the results of the first
    /// shard only.
    fn parent_shared(&self, node: &PlacedNode) -> Option<SharedLink> {
        let (parent, _) = node.parent?;
        let parent = &self.nodes[parent];
        self.shared_link(parent).filter(|_| parent.shards() == node.shards())
    }

    /// Choose chunk and window for what is available, and whether results are multicast.
    pub(super) fn choose_sizes(
        &mut self,
        config: &ControllerConfig,
        ledger: &ResourceLedger,
        request: PlacementRequest<'_>,
    ) -> Result<(), String> {
        self.size(config, ledger, request)?;
        if config.multicast_results && config.listen.ip().is_loopback() && self.on_one_host(request.requests) {
            self.draw_multicast();
        }
        Ok(())
    }

    /// Switch the ranks of a node to packets and choose the sizes again.
    pub(super) fn refit_with_packets(
        &mut self,
        (index, why): (usize, &str),
        config: &ControllerConfig,
        ledger: &ResourceLedger,
        request: PlacementRequest<'_>,
    ) -> Result<(), String> {
        self.fall_back_to_packets(index, request.requests, why)?;
        self.choose_sizes(config, ledger, request)
    }

    /// The group's claim on each device.
    pub(super) fn claim(&self, tenant: &str) -> Claim {
        let (needs, cables) = (self.needs(u64::from(self.window_max)), Arc::clone(&self.cables));
        let (tenant, communicator) = (tenant.to_owned(), self.communicator.clone());
        Claim { group: self.group, tenant, communicator, needs, cables }
    }

    /// The minimum that the group needs: a window of one chunk.
    pub(super) fn minimum_needs(&self) -> Needs {
        self.needs(1)
    }

    /// What the group needs for a window of so many chunks.
    fn needs(&self, window: u64) -> Needs {
        let need = |node: &PlacedNode| {
            let (slots, most) = (node.slots_for(window), u64::from(node.slots).max(1));
            Resources {
                groups: 1,
                slots,
                memory_bytes: node.memory_bytes / most * slots,
                redo_memory_bytes: node.redo_memory_bytes / most * slots,
            }
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
        let key = |(parent, child): (usize, ChildIndex)| self.child_key(&self.nodes[parent], child);
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
            slots: node.slots,
            chunk_len_bytes: self.chunk_len_bytes,
            ranks: NonZeroU32::new(self.ranks.len() as u32).unwrap_or(NonZeroU32::MIN),
            lease_ms: u32::try_from(config.lease.as_millis()).unwrap_or(u32::MAX),
            timers: config.timers.into(),
            zero_copy: node.zero_copy,
        }
    }

    /// The membership of a rank.
    pub(super) fn membership(&self, config: &ControllerConfig, rank: Rank) -> TreeMembership {
        let (leaf, child) = self.ranks[rank.0 as usize];
        let node = &self.nodes[leaf];
        let announce = &node.device.announce;
        let packet = u32::from(self.chunk_len_bytes) + SHORT_HEADER_LEN as u32;
        let attach = announce.attach.as_ref().filter(|_| node.zero_copy.contains(child));
        // Initial packets of all children must fit into the receive buffer. Zero-copy needs no room there.
        let start = match attach {
            Some(_) => u32::from(self.window_max),
            None => announce.capabilities.receive_buffer_bytes / (u32::from(node.children) * packet),
        };
        let facts = self.facts();
        TreeMembership {
            group: self.group,
            epoch: self.epoch,
            leaf: node.device.name().to_owned(),
            host: self.hosts.as_ref().map(|hosts| hosts[rank.0 as usize].clone()),
            child,
            key: self.child_key(node, child),
            shared: self.shared_link(node).filter(|_| attach.is_none()),
            parents: announce.data_addrs.iter().copied().collect(),
            window_max: self.window_max,
            window_start: start.clamp(1, u32::from(self.window_max)) as u16,
            chunk_len_bytes: self.chunk_len_bytes,
            timers: config.timers.into(),
            facts,
            attach: attach.cloned(),
            packets_reason: self.packets_reasons.get(&rank).cloned(),
        }
    }

    /// The number of ranks.
    pub(super) fn ranks_len(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// Each node's children in order, root first: the expression that the group evaluates.
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

    /// The requests that reserve the tree and its group, two for each node, root first.
    pub(super) fn reservation(&self, config: &ControllerConfig, order: Order) -> Vec<(Arc<Device>, Request)> {
        let of_node = |(index, node): (usize, &PlacedNode)| {
            let install = Request::InstallTree(self.tree_config(index));
            [install, Request::CreateGroup(self.group_config(config, order, node))]
                .map(|request| (Arc::clone(&node.device), request))
        };
        self.nodes.iter().enumerate().flat_map(of_node).collect()
    }

    /// The requests that release the group and its tree on a device.
    pub(super) const fn release_requests(&self) -> [Request; 2] {
        [Request::ReleaseGroup(self.group), Request::RemoveTree(self.tree)]
    }
}

/// Draw a site-local multicast address (239.255.0.0/16, RFC 2365) and a port. If two groups draw the same, their keys
/// tell them apart; they only receive unneeded packets.
fn random_multicast_addr() -> Addr {
    let [x, y, high, low] = random_bytes();
    let port = MULTICAST_PORTS.start()
        + u16::from_be_bytes([high, low]) % (MULTICAST_PORTS.end() - MULTICAST_PORTS.start() + 1);
    Addr::Udp(SocketAddr::from((Ipv4Addr::new(239, 255, x, y), port)))
}

/// The UDP ports of the first shards' multicast addresses, with room for the ports of the other shards.
const MULTICAST_PORTS: std::ops::RangeInclusive<u16> = 20_000..=60_000;

pub(super) fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    assert_eq!(filled, Ok(N), "the system provides randomness once it has booted");
    bytes
}
