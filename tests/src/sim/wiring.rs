//! From a shape to trees and groups, as they are wired in runs without a controller.
//!
//! All trees share the devices; the mapping of nodes to devices differs from tree to tree.

use super::options::{Draw, Options, Sharing};
use crate::oracle::{Shape, weight};
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use sumac::transport::packets::EndpointConfig;
use sumac_hal::ctrl::{ChildMask, GroupConfig, NodeParent, SharedLink, TreeConfig};
use sumac_hal::ids::{ChildIndex, Epoch, GroupId, Rank, TreeId};
use sumac_hal::key::GroupSecret;
use sumac_hal::planted;
use sumac_hal::port::Addr;
use sumac_hal::shard::{MAX_SHARDS, Shard};
use sumac_hal::uplink::HopTimers;

/// One node of a tree.
#[derive(Debug)]
pub(super) struct Wired {
    /// Its device.
    pub(super) device: usize,
    /// Its parent (by index in the tree) and its child index there.
    pub(super) parent: Option<(usize, u16)>,
    pub(super) children: u16,
}

/// The nodes of a tree, and each rank's leaf and child index there.
#[derive(Debug)]
pub(super) struct Wiring {
    tree: TreeId,
    pub(super) nodes: Vec<Wired>,
    pub(super) ranks: Vec<(usize, u16)>,
}

impl Wiring {
    /// Wire tree `index`, its nodes distributed over `devices`.
    pub(super) fn new(options: &Options, index: usize, devices: usize) -> Self {
        let tree = TreeId(index as u32 + 1);
        let mut wiring = Self { tree, nodes: Vec::new(), ranks: vec![(0, 0); options.ranks] };
        let mut draw = Draw::new(weight(&[options.seed, index as u64]));
        let mut free: Vec<usize> = (0..devices).collect();
        wiring.add(&options.trees[index], None, &mut || free.swap_remove(draw.below(free.len() as u64) as usize));
        wiring
    }

    /// Return the tree that a controller has asked devices for, in any order; `None` if a node or a rank is missing.
    pub(super) fn reserved<'c>(
        tree: TreeId,
        ranks: usize,
        asked: impl Iterator<Item = (usize, &'c TreeConfig)>,
    ) -> Option<Self> {
        let asked: Vec<(usize, &TreeConfig)> = asked.collect();
        let position = |addr: &Addr| match owner(*addr) {
            Owner::Node { device, .. } => asked.iter().position(|(other, _)| *other == device),
            _ => None,
        };
        let (mut nodes, mut leaves) = (Vec::new(), vec![None; ranks]);
        for (index, (device, config)) in asked.iter().enumerate() {
            let parent = match &config.parent {
                Some(parent) => Some((position(parent.data_addrs.first()?)?, parent.child.0)),
                None => None,
            };
            nodes.push(Wired { device: *device, parent, children: config.children });
            for (child, rank) in (0..).zip(&config.ranks) {
                if *rank != TreeConfig::NODE {
                    *leaves.get_mut(usize::from(*rank))? = Some((index, child));
                }
            }
        }
        Some(Self { tree, nodes, ranks: leaves.into_iter().collect::<Option<_>>()? })
    }

    /// Rewire the shape of tree `index` on the first of `devices`.
    pub(super) fn on(options: &Options, index: usize, tree: TreeId, devices: Vec<usize>) -> Self {
        let mut wiring = Self { tree, nodes: Vec::new(), ranks: vec![(0, 0); options.ranks] };
        let mut devices = devices.into_iter();
        wiring.add(&options.trees[index], None, &mut || devices.next().expect("as many devices as nodes"));
        wiring
    }

    fn add(&mut self, shape: &Shape, parent: Option<(usize, u16)>, take: &mut impl FnMut() -> usize) {
        match shape {
            Shape::Rank(rank) => self.ranks[*rank] = parent.expect("the root is a node"),
            Shape::Node(children) => {
                let index = self.nodes.len();
                self.nodes.push(Wired { device: take(), parent, children: children.len() as u16 });
                for (i, child) in children.iter().enumerate() {
                    self.add(child, Some((index, i as u16)), take);
                }
            }
        }
    }

    /// Return the devices between a rank and the root.
    pub(super) fn path(&self, rank: usize) -> impl Iterator<Item = usize> {
        let leaf = Some(self.ranks[rank].0);
        let nodes = std::iter::successors(leaf, |&node| self.nodes[node].parent.map(|(parent, _)| parent));
        nodes.map(|node| self.nodes[node].device)
    }

    /// Return whether a device is its root.
    pub(super) fn has_root(&self, device: usize) -> bool {
        self.nodes.iter().any(|node| node.device == device && node.parent.is_none())
    }

    /// Return how many levels of nodes it has.
    pub(super) fn levels(&self) -> u64 {
        (0..self.ranks.len()).map(|rank| self.path(rank).count() as u64).max().unwrap_or(0)
    }

    pub(super) fn tree(&self, node: usize, shards: u16) -> TreeConfig {
        let parent = self.nodes[node].parent.map(|(parent, child)| NodeParent {
            data_addrs: (0..shards).map(|shard| node_addr(self.nodes[parent].device, shard)).collect(),
            child: ChildIndex(child),
        });
        let children = self.nodes[node].children;
        let mut ranks = vec![TreeConfig::NODE; usize::from(children)];
        for (rank, (leaf, child)) in self.ranks.iter().enumerate() {
            if *leaf == node {
                ranks[usize::from(*child)] = rank as u16;
            }
        }
        TreeConfig { tree: self.tree, parent, children, ranks: ranks.into_iter().collect() }
    }

    pub(super) fn group(&self, options: &Options, node: usize, group: usize, epoch: Epoch) -> GroupConfig {
        let device = |node: usize| self.nodes[node].device;
        let parent_key = self.nodes[node]
            .parent
            .map_or(0, |(parent, child)| child_key(options, device(parent), group, epoch, ChildIndex(child)));
        GroupConfig {
            group: group_id(group),
            tree: self.tree,
            epoch,
            order: options.order(group),
            secret: secret(options, device(node)),
            parent_key,
            shared: (options.sharing != Sharing::Off).then(|| shared_addr(device(node), group)),
            parent_shared: self.nodes[node].parent.and_then(|(parent, child)| {
                let key = child_key(options, device(parent), group, epoch, ChildIndex::ALL);
                let link = SharedLink { addr: shared_addr(device(parent), group), key };
                options.sharing.claims_to_listen(options.seed, (device(parent), child), group).then_some(link)
            }),
            window_max: options.window,
            slots: slots_per_shard(options),
            chunk_len_bytes: options.chunk_len_bytes,
            ranks: NonZeroU32::new(options.ranks as u32).expect("a cluster has ranks"),
            lease_ms: LEASE_MS,
            timers: TIMERS.into(),
            zero_copy: ChildMask::EMPTY,
        }
    }

    /// Return who receives packets that a shard of `device` sends to its shared address in `group`: the same shard of
    /// child nodes, and ranks.
    pub(super) fn listeners(&self, options: &Options, (device, group, shard): Sharer) -> Vec<Addr> {
        let Some(own) = self.nodes.iter().position(|node| node.device == device) else { return Vec::new() };
        let receives = |child: u16| options.sharing.receives(options.seed, (device, child), group);
        let ranks = self.ranks.iter().enumerate().filter(|(_, (leaf, child))| *leaf == own && receives(*child));
        let nodes =
            self.nodes.iter().filter(|node| matches!(node.parent, Some((at, child)) if at == own && receives(child)));
        ranks.map(|(rank, _)| rank_addr(rank, group)).chain(nodes.map(|node| node_addr(node.device, shard))).collect()
    }

    pub(super) fn endpoint(
        &self,
        options: &Options,
        (rank, group): (usize, usize),
        incarnation: u64,
        epoch: Epoch,
    ) -> EndpointConfig {
        let (leaf, child) = self.ranks[rank];
        let device = self.nodes[leaf].device;
        EndpointConfig {
            group: group_id(group),
            epoch,
            rank: Rank(rank as u32),
            ranks: options.ranks as u32,
            child: ChildIndex(child),
            key: child_key(options, device, group, epoch, ChildIndex(child)),
            shared_key: options
                .sharing
                .claims_to_listen(options.seed, (device, child), group)
                .then(|| child_key(options, device, group, epoch, ChildIndex::ALL)),
            parents: (0..options.shards).map(|shard| node_addr(device, shard)).collect(),
            window_max: options.window,
            window_start: options.window,
            chunk_len_bytes: options.chunk_len_bytes,
            timers: TIMERS,
            table_version: 1,
            salt: weight(&[options.seed, rank as u64, group as u64, u64::from(epoch.to_bits()) + (incarnation << 32)])
                as u32,
        }
    }
}

/// Configure the endpoint of a rank whose group has no tree. It sends nothing.
pub(super) fn idle_endpoint(options: &Options, (rank, group): (usize, usize)) -> EndpointConfig {
    EndpointConfig {
        group: GroupId(0),
        epoch: Epoch::default(),
        rank: Rank(rank as u32),
        ranks: options.ranks as u32,
        child: ChildIndex(0),
        key: 0,
        shared_key: None,
        parents: std::iter::once(rank_addr(rank, group)).collect(),
        window_max: options.window,
        window_start: options.window,
        chunk_len_bytes: options.chunk_len_bytes,
        timers: TIMERS,
        table_version: 1,
        salt: 0,
    }
}

/// Return how many nodes a tree has.
pub(super) fn count_nodes(shape: &Shape) -> usize {
    match shape {
        Shape::Rank(_) => 0,
        Shape::Node(children) => 1 + children.iter().map(count_nodes).sum::<usize>(),
    }
}

/// Return how many levels of nodes a tree has.
pub(super) fn count_levels(shape: &Shape) -> u32 {
    match shape {
        Shape::Rank(_) => 0,
        Shape::Node(children) => 1 + children.iter().map(count_levels).max().unwrap_or(0),
    }
}

/// The slots of a group, unless a bug is planted.
pub(super) fn slots_per_shard(options: &Options) -> u16 {
    let slots = slots_for(options);
    // Evaluated separately, as without the feature both conditions are the same.
    if planted!(options.planted, SlotReusedEarly) {
        return slots / 2;
    }
    if planted!(options.planted, RedoReusedEarly) { slots / 2 } else { slots }
}

/// Twice the largest share of the window in one shard: the safe minimum (PROTOCOL 1).
pub(super) fn slots_for(options: &Options) -> u16 {
    let shard = Shard::new(0, options.shards).expect("drawn within limits");
    2 * shard.max_in_window(u64::from(options.window)) as u16
}

pub(super) fn node_addr(device: usize, shard: u16) -> Addr {
    Addr::Emu(device as u32 * 16 + u32::from(shard))
}

pub(super) fn rank_addr(rank: usize, group: usize) -> Addr {
    Addr::Emu(RANKS_FROM + rank as u32 * 16 + group as u32)
}

/// Return the address by which components know a port where paths are probed: a host's ports have its IP address.
pub(super) fn on_network(addr: Addr) -> Addr {
    let Addr::Emu(n) = addr else { return addr };
    Addr::Udp((Ipv4Addr::from_bits(NETWORK + (n >> 4)), PORTS_FROM + (n & 15) as u16).into())
}

/// Return the address of a port in the fabric, whatever it is known by.
pub(super) fn emulated(addr: Addr) -> Addr {
    let Addr::Udp(SocketAddr::V4(known)) = addr else { return addr };
    Addr::Emu(((known.ip().to_bits() - NETWORK) << 4) + u32::from(known.port() - PORTS_FROM))
}

/// The shared address of a device's first shard in a group.
pub(super) fn shared_addr(device: usize, group: usize) -> Addr {
    Addr::Emu(SHARED_FROM + (device as u32 * 16 + group as u32) * MAX_SHARDS as u32)
}

/// The owner of a shared address: device, group and shard.
pub(super) type Sharer = (usize, usize, u16);

/// Return the owner of a shared address.
pub(super) fn sharer(addr: Addr) -> Option<Sharer> {
    let Addr::Emu(n) = emulated(addr) else { return None };
    let n = n.checked_sub(SHARED_FROM).filter(|_| addr != ATTACKER)? as usize;
    Some((n / MAX_SHARDS / 16, n / MAX_SHARDS % 16, (n % MAX_SHARDS) as u16))
}

pub(super) fn child_key(options: &Options, device: usize, group: usize, epoch: Epoch, child: ChildIndex) -> u64 {
    secret(options, device).child_key(group_id(group), options.planted.key_epoch(epoch), child)
}

/// The owner of an address.
pub(super) enum Owner {
    Node { device: usize, shard: usize },
    Rank { rank: usize, group: usize },
    Attacker,
}

pub(super) fn owner(addr: Addr) -> Owner {
    let addr = emulated(addr);
    let Addr::Emu(n) = addr else { panic!("{addr} is no address of the simulator") };
    let parts = |n: u32| (n as usize / 16, n as usize % 16);
    if addr == ATTACKER {
        return Owner::Attacker;
    }
    if let Some(n) = n.checked_sub(RANKS_FROM) {
        let (rank, group) = parts(n);
        return Owner::Rank { rank, group };
    }
    let (device, shard) = parts(n);
    Owner::Node { device, shard }
}

pub(super) fn group_id(group: usize) -> GroupId {
    GroupId(100 + group as u32)
}

fn secret(options: &Options, device: usize) -> GroupSecret {
    let mut secret = [0; 16];
    secret[..8].copy_from_slice(&weight(&[options.seed, device as u64]).to_le_bytes());
    GroupSecret(secret)
}

pub(super) const EPOCH: Epoch = Epoch { term: 1, counter: 1 };
pub(super) const TIMERS: HopTimers = HopTimers::DEFAULT;
/// The attacker's own address.
pub(super) const ATTACKER: Addr = Addr::Emu(u32::MAX);
/// The lease of every group.
pub(super) const LEASE_MS: u32 = 3_600_000;
/// 10.0.0.0, and the first UDP port.
const NETWORK: u32 = 10 << 24;
const PORTS_FROM: u16 = 7000;
const RANKS_FROM: u32 = 1 << 20;
const SHARED_FROM: u32 = 1 << 24;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::ScenarioKind;

    #[test]
    fn tree_read_from_requests_is_the_one_that_they_describe() {
        for seed in 0..50 {
            let options = Options::draw(seed, ScenarioKind::Calm);
            let wiring = Wiring::new(&options, 0, options.devices());
            let configs: Vec<_> = (0..wiring.nodes.len())
                .map(|node| (wiring.nodes[node].device, wiring.tree(node, options.shards)))
                .collect();
            let read = |configs: &[(usize, TreeConfig)]| {
                let asked = configs.iter().rev().map(|(device, config)| (*device, config));
                Wiring::reserved(wiring.tree, options.ranks, asked)
            };
            let found = read(&configs).expect("it is complete");
            for rank in 0..options.ranks {
                assert!(found.path(rank).eq(wiring.path(rank)), "{seed}: rank {rank}");
                assert_eq!(found.ranks[rank].1, wiring.ranks[rank].1, "{seed}: rank {rank}");
            }
            assert!(read(&configs[1..]).is_none(), "{seed}: without its root");
        }
    }
}
