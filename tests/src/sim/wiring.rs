//! From a shape to trees and groups: what a controller does, in its simplest form.

use super::options::Options;
use crate::oracle::{Shape, weight};
use sumac::endpoint::EndpointConfig;
use sumac_hal::ctrl::{GroupConfig, NodeParent, TreeConfig};
use sumac_hal::ids::{ChildIndex, Epoch, GroupId, TreeId};
use sumac_hal::key::GroupSecret;
use sumac_hal::port::Addr;
use sumac_hal::shard::Shard;
use sumac_hal::uplink::HopTimers;

/// One node of the tree.
#[derive(Debug)]
pub(super) struct Wired {
    /// Its parent and its place there.
    pub(super) parent: Option<(usize, u16)>,
    pub(super) children: u16,
}

/// The nodes of a shape, parents first, and each rank's leaf and place there.
#[derive(Debug)]
pub(super) struct Wiring {
    pub(super) nodes: Vec<Wired>,
    pub(super) ranks: Vec<(usize, u16)>,
}

impl Wiring {
    pub(super) fn new(options: &Options) -> Self {
        let mut wiring = Self { nodes: Vec::new(), ranks: vec![(0, 0); options.ranks] };
        wiring.add(&options.shape, None);
        wiring
    }

    fn add(&mut self, shape: &Shape, parent: Option<(usize, u16)>) {
        match shape {
            Shape::Rank(rank) => self.ranks[*rank] = parent.expect("the root is a node"),
            Shape::Node(children) => {
                let index = self.nodes.len();
                self.nodes.push(Wired { parent, children: children.len() as u16 });
                for (i, child) in children.iter().enumerate() {
                    self.add(child, Some((index, i as u16)));
                }
            }
        }
    }

    pub(super) fn tree(&self, node: usize, shards: u16) -> TreeConfig {
        let parent = self.nodes[node].parent.map(|(parent, child)| NodeParent {
            data_addrs: (0..shards).map(|shard| node_addr(parent, shard)).collect(),
            child: ChildIndex(child),
        });
        TreeConfig { tree: TreeId(1), parent, children: self.nodes[node].children }
    }

    pub(super) fn group(&self, options: &Options, node: usize, group: usize) -> GroupConfig {
        let (id, epoch) = (group_id(group), EPOCH);
        let parent_key = self.nodes[node]
            .parent
            .map_or(0, |(parent, child)| secret(options, parent).child_key(id, epoch, ChildIndex(child)));
        GroupConfig {
            group: id,
            tree: TreeId(1),
            epoch,
            order: options.order,
            secret: secret(options, node),
            parent_key,
            window_max: options.window,
            slots: slots_per_shard(options),
            chunk_len_bytes: options.chunk_len_bytes,
            lease_ms: 3_600_000,
            timers: TIMERS.into(),
        }
    }

    pub(super) fn endpoint(&self, options: &Options, rank: usize, group: usize) -> EndpointConfig {
        let (leaf, child) = self.ranks[rank];
        EndpointConfig {
            group: group_id(group),
            epoch: EPOCH,
            child: ChildIndex(child),
            key: secret(options, leaf).child_key(group_id(group), EPOCH, ChildIndex(child)),
            parents: (0..options.shards).map(|shard| node_addr(leaf, shard)).collect(),
            window_max: options.window,
            window_start: options.window,
            chunk_len_bytes: options.chunk_len_bytes,
            timers: TIMERS,
            table_version: 1,
            salt: weight(&[options.seed, rank as u64, group as u64]) as u32,
        }
    }
}

/// Twice what of the window can fall into one shard: the least that is safe (PROTOCOL 1).
pub(super) fn slots_per_shard(options: &Options) -> u16 {
    let shard = Shard::new(0, options.shards).expect("drawn within limits");
    2 * shard.most_within(u64::from(options.window)) as u16
}

pub(super) fn node_addr(node: usize, shard: u16) -> Addr {
    Addr::Emu(node as u32 * 16 + u32::from(shard))
}

pub(super) fn rank_addr(rank: usize, group: usize) -> Addr {
    Addr::Emu(RANKS_FROM + rank as u32 * 16 + group as u32)
}

/// What an address belongs to: (node, shard) or (rank, group).
pub(super) fn owner(addr: Addr) -> Result<(usize, usize), (usize, usize)> {
    let Addr::Emu(n) = addr else { panic!("the simulator has emulated addresses only") };
    match n.checked_sub(RANKS_FROM) {
        Some(n) => Err((n as usize / 16, n as usize % 16)),
        None => Ok((n as usize / 16, n as usize % 16)),
    }
}

fn group_id(group: usize) -> GroupId {
    GroupId(100 + group as u32)
}

fn secret(options: &Options, node: usize) -> GroupSecret {
    let mut secret = [0; 16];
    secret[..8].copy_from_slice(&weight(&[options.seed, node as u64]).to_le_bytes());
    GroupSecret(secret)
}

const EPOCH: Epoch = Epoch { term: 1, counter: 1 };
const RANKS_FROM: u32 = 1 << 20;
const TIMERS: HopTimers = HopTimers::DEFAULT;
