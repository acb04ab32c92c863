//! The paths between the ranks and devices of a tree: which of them are probed, and how long packets may be on those
//! that turned out to be narrow (PROTOCOL 12).

use super::Placement;
use crate::transport::path::PathToProbe;
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;
use sumac_hal::ids::Rank;
use sumac_hal::path_mtu::needs_probes;
use sumac_hal::port::Addr;
use sumac_hal::time::Instant;
use sumac_hal::wire::packet_len_max;

/// How long a narrow path counts as such: RFC 8899's timer for probing a larger size again.
const VALIDITY: Duration = Duration::from_secs(600);

/// A path of a tree: the device that is the parent, and its child.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::controller) struct Hop {
    parent: String,
    child: HopChild,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum HopChild {
    Rank(u32),
    Device(String),
}

impl fmt::Display for Hop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.child {
            HopChild::Rank(rank) => write!(f, "{} to {}", Rank(*rank), self.parent),
            HopChild::Device(name) => write!(f, "{name} to {}", self.parent),
        }
    }
}

/// The paths of a job that carry shorter packets than their ends: the longest packet in bytes, and since when that is
/// known. At most one entry a rank and a pair of devices.
#[derive(Debug, Clone, Default)]
pub(in crate::controller) struct NarrowPaths(BTreeMap<Hop, (u32, Instant)>);

impl NarrowPaths {
    /// Record what a path carries.
    pub(in crate::controller) fn record(&mut self, hop: Hop, max_packet_len_bytes: u32, now: Instant) {
        self.0.insert(hop, (max_packet_len_bytes, now));
    }

    /// Forget what was found long ago: paths may have become wider.
    pub(in crate::controller) fn forget_old(&mut self, now: Instant) {
        self.0.retain(|_, (_, since)| now - *since < VALIDITY);
    }
}

impl Placement {
    /// The longest packet that the group sends, in bytes.
    pub(in crate::controller) fn packet_len_bytes(&self) -> u32 {
        packet_len_max(self.chunk_len_bytes) as u32
    }

    /// The path of a rank to its leaf, if packets travel on it.
    pub(in crate::controller) fn hop_of_rank(&self, rank: Rank) -> Option<Hop> {
        let (leaf, child) = *self.ranks.get(rank.0 as usize)?;
        let node = &self.nodes[leaf];
        let hop = Hop { parent: node.device.name().to_owned(), child: HopChild::Rank(rank.0) };
        (!node.zero_copy.contains(child)).then_some(hop)
    }

    /// The path of a node to its parent.
    pub(in crate::controller) fn hop_of_node(&self, node: usize) -> Option<Hop> {
        let (parent, _) = self.nodes[node].parent?;
        let name = |node: usize| self.nodes[node].device.name().to_owned();
        Some(Hop { parent: name(parent), child: HopChild::Device(name(node)) })
    }

    /// The longest packet that all its paths carry, as far as they are known to be narrow.
    pub(super) fn narrowest(&self, narrow: &NarrowPaths) -> u32 {
        let ranks = (0..self.ranks.len() as u32).filter_map(|rank| self.hop_of_rank(Rank(rank)));
        let nodes = (0..self.nodes.len()).filter_map(|node| self.hop_of_node(node));
        ranks.chain(nodes).filter_map(|hop| Some(narrow.0.get(&hop)?.0)).min().unwrap_or(u32::MAX)
    }

    /// The nodes that probe the path to their parent.
    pub(in crate::controller) fn nodes_to_probe(&self) -> impl Iterator<Item = usize> {
        let is_probed = |node: usize| {
            let own = self.addrs(node).first().and_then(ip_of);
            self.nodes[node].parent.is_some_and(|(parent, _)| is_elsewhere(self.addrs(parent), own))
        };
        (0..self.nodes.len()).filter(move |node| is_probed(*node))
    }

    /// What a rank at this address probes of the path to its leaf, if it does.
    pub(in crate::controller) fn path_to_probe(&self, rank: Rank, own: IpAddr) -> Option<PathToProbe> {
        self.hop_of_rank(rank)?;
        let (leaf, child) = self.ranks[rank.0 as usize];
        Some(PathToProbe {
            group: self.group,
            epoch: self.epoch,
            child,
            key: self.nodes[leaf].secret.child_key(self.group, self.epoch, child),
            parents: self.addrs(leaf).to_vec(),
            packet_len_bytes: self.packet_len_bytes(),
        })
        .filter(|path| is_elsewhere(&path.parents, Some(own)))
    }

    fn addrs(&self, node: usize) -> &[Addr] {
        &self.nodes[node].device.announce.data_addrs
    }
}

fn ip_of(addr: &Addr) -> Option<IpAddr> {
    if let Addr::Udp(addr) = addr { Some(addr.ip()) } else { None }
}

/// Whether packets to any of these addresses leave the host that has the address `own`.
fn is_elsewhere(addrs: &[Addr], own: Option<IpAddr>) -> bool {
    addrs.iter().any(|addr| needs_probes(addr) && ip_of(addr) != own)
}
