//! Decides which ranks use zero-copy and which use packets.
//!
//! | transport | if available | if not |
//! |---|---|---|
//! | auto | zero-copy over shared memory | packets; the rank learns why |
//! | shm | zero-copy over shared memory | no tree, with that reason |
//! | rdma | zero-copy over RDMA, from any host | no tree, with that reason |
//! | udp, verbs | packets | no tree, with that reason |
//!
//! A rank must send packets over the link on which its leaf receives them: a rank that sends over UDP to a device that
//! receives over verbs, or the reverse, gets no tree.
//!
//! If a leaf's device lacks memory for redo slots, all its ranks use packets; if one of them requires zero-copy, there
//! is no tree.

use super::{PlacedNode, Placement, PlacementRequest};
use crate::controller::proto::{JoinRequest, Transport};
use sumac_hal::ctrl::{Announce, ChildMask};
use sumac_hal::shm::DEVICE_USER_VARIABLE;
use thiserror::Error;

/// Why a rank uses packets.
#[derive(Debug, PartialEq, Eq, Error)]
enum PacketsReason<'a> {
    /// The rank requested packets.
    #[error("the rank requested packets")]
    PendingReply,
    /// Zero-copy is limited to devices with one shard.
    #[error("the device has {0} shards; zero-copy requires exactly one")]
    Shards(usize),
    /// The device has no bus.
    #[error("the device does not offer zero-copy")]
    NoBus,
    /// The device has no RDMA engine, so it cannot reach ranks on other hosts.
    #[error("the device has no RDMA engine; start it with --rdma")]
    NoRdma,
    /// The rank does not know its machine.
    #[error("the rank's system does not name its machine")]
    NoMachine,
    /// The rank does not trust the device's user.
    #[error(
        "the device runs as user {device}; a rank of user {rank} shares memory only with devices of its own user, of \
         root, and of the user that {DEVICE_USER_VARIABLE} names to the rank"
    )]
    DeviceUser {
        /// The device's.
        device: u32,
        /// The rank's.
        rank: u32,
    },
    /// The device does not serve the rank's user.
    #[error(
        "the device runs as user {device} and serves only ranks of its own user and of root; this rank runs as user \
         {rank}; run the device as root, or name its user to it in {DEVICE_USER_VARIABLE}"
    )]
    RankUser {
        /// The device's.
        device: u32,
        /// The rank's.
        rank: u32,
    },
    /// Rank and device are on different machines.
    #[error("the rank is on machine {rank}, the device on {device}")]
    OtherMachine {
        /// The rank's.
        rank: &'a str,
        /// The device's.
        device: &'a str,
    },
}

/// Check whether a rank can use zero-copy with a device, and wants to.
fn zero_copy<'a>(request: &'a JoinRequest, device: &'a Announce) -> Result<(), PacketsReason<'a>> {
    let is_rdma = request.transport == Transport::Rdma;
    if !request.transport.may_share_memory() && !is_rdma {
        return Err(PacketsReason::PendingReply);
    }
    let shards = device.data_addrs.len();
    if shards > 1 {
        return Err(PacketsReason::Shards(shards));
    }
    let bus = device.attach.as_ref().ok_or(PacketsReason::NoBus)?;
    if is_rdma {
        return bus.remote.map(drop).ok_or(PacketsReason::NoRdma);
    }
    let machine = request.machine.as_ref().ok_or(PacketsReason::NoMachine)?;
    if *machine != bus.machine {
        return Err(PacketsReason::OtherMachine { rank: machine, device: &bus.machine });
    }
    let (device, users) = (bus.user.uid, &request.device_users);
    if !users.admit(device) {
        return Err(PacketsReason::DeviceUser { device, rank: users.own });
    }
    if !bus.user.serves(users.own) {
        return Err(PacketsReason::RankUser { device, rank: users.own });
    }
    Ok(())
}

impl Placement {
    /// Decide how each rank reaches its leaf. Fails with the reason if a rank requires an unavailable transport.
    pub(super) fn attach(&mut self, requests: &[&JoinRequest]) -> Result<(), String> {
        for (request, &(leaf, child)) in requests.iter().zip(&self.ranks) {
            let node = &mut self.nodes[leaf];
            let why = match zero_copy(request, &node.device.announce) {
                Ok(()) => {
                    node.zero_copy.insert(child);
                    self.rdma_ranks += u32::from(request.transport == Transport::Rdma);
                    continue;
                }
                Err(why) => why,
            };
            let (rank, device) = (request.rank, node.device.name());
            if request.transport.requires_zero_copy() {
                return Err(zero_copy_refusal(request, device, &why.to_string()));
            }
            check_packet_link(request, node)?;
            tracing::debug!(job = request.job, %rank, device, %why, "rank uses packets");
            if why != PacketsReason::PendingReply {
                self.packets_reasons.insert(rank, why.to_string());
            }
        }
        Ok(())
    }

    /// Switch all ranks of a node to packets. Fails with the reason if one of them requires zero-copy.
    pub(super) fn fall_back_to_packets(
        &mut self,
        index: usize,
        requests: &[&JoinRequest],
        why: &str,
    ) -> Result<(), String> {
        let device = self.nodes[index].device.name().to_owned();
        self.switch_to_packets(index, requests, why)?;
        tracing::warn!(group = %self.group, device, why, "its ranks use packets instead of zero-copy");
        Ok(())
    }

    /// Whether it is open how ranks reach the tree: some use zero-copy, none requires it, and there are packets between
    /// devices anyway. On a single device zero-copy saves all of them.
    pub(super) fn may_prefer_packets(&self, request: PlacementRequest<'_>) -> bool {
        let requires = |request: &&JoinRequest| request.transport.requires_zero_copy();
        let is_open = request.hosts.is_empty() && !request.requests.iter().any(requires);
        is_open && self.levels > 1 && self.zero_copy_ranks() > 0
    }

    /// Switch all ranks to packets, because these are faster.
    pub(super) fn leave_zero_copy(&mut self, requests: &[&JoinRequest]) -> Result<(), String> {
        let why = format!("packets are faster in a tree of {} levels, by the cost table", self.levels);
        (0..self.nodes.len()).try_for_each(|index| match self.has_zero_copy(index) {
            true => self.switch_to_packets(index, requests, &why),
            false => Ok(()),
        })
    }

    fn switch_to_packets(&mut self, index: usize, requests: &[&JoinRequest], why: &str) -> Result<(), String> {
        let node = &mut self.nodes[index];
        let device = node.device.name();
        let mut there = requests.iter().zip(&self.ranks).filter(|(_, (leaf, _))| *leaf == index);
        if let Some((request, _)) = there.find(|(request, _)| request.transport.requires_zero_copy()) {
            return Err(zero_copy_refusal(request, device, why));
        }
        let mut there = requests.iter().zip(&self.ranks).filter(|(_, (leaf, _))| *leaf == index);
        there.try_for_each(|(request, _)| check_packet_link(request, node))?;
        let there = requests.iter().zip(&self.ranks).filter(|(_, (leaf, _))| *leaf == index);
        there.filter(|(request, _)| request.transport.may_share_memory()).for_each(|(request, _)| {
            self.packets_reasons.entry(request.rank).or_insert_with(|| why.to_owned());
        });
        node.zero_copy = ChildMask::EMPTY;
        Ok(())
    }

    /// How many ranks use zero-copy.
    pub(in crate::controller) fn zero_copy_ranks(&self) -> u32 {
        self.nodes.iter().map(|node| node.zero_copy.iter().count() as u32).sum()
    }

    /// Whether ranks at a node use zero-copy.
    pub(in crate::controller) fn has_zero_copy(&self, node: usize) -> bool {
        !self.nodes[node].zero_copy.is_empty()
    }

    pub(super) fn all_zero_copy(&self) -> bool {
        self.zero_copy_ranks() == self.ranks.len() as u32
    }
}

/// Check that a rank sends packets over the link on which its leaf receives them.
fn check_packet_link(request: &JoinRequest, node: &PlacedNode) -> Result<(), String> {
    let (rank, device) = (request.rank, node.device.name());
    match (request.transport == Transport::Verbs, node.over_verbs()) {
        (true, false) => Err(format!(
            "{rank} sends over verbs, but its leaf device {device} receives over UDP; start the device with --verbs, \
             or use transport `auto` or `udp`"
        )),
        (false, true) => Err(format!(
            "{rank} sends over UDP, but its leaf device {device} receives over verbs; use transport `verbs`"
        )),
        _ => Ok(()),
    }
}

fn zero_copy_refusal(request: &JoinRequest, device: &str, why: &str) -> String {
    if request.transport == Transport::Rdma {
        return format!(
            "{} requires RDMA, which its leaf device {device} does not offer: {why}; use transport `auto`, `udp` or \
             `verbs`",
            request.rank
        );
    }
    format!(
        "{} requires shared memory, which it cannot share with its leaf device {device}: {why}; use transport `auto` \
         or `udp`",
        request.rank
    )
}
