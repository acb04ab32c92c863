//! How each rank reaches its leaf: by reference, over the leaf's bus, where that is possible, else by packets.
//!
//! | the rank asks for | it is possible | it is not |
//! |---|---|---|
//! | auto | by reference | by packets; the rank is told why |
//! | shm | by reference | no tree, for that reason |
//! | rdma | by reference, from whichever host | no tree, for that reason |
//! | udp, verbs | by packets | by packets |
//!
//! Packets go the way by which the device receives them: there is no tree for a rank that sends by another, over UDP to a
//! device over verbs or the other way round.
//!
//! A leaf whose device has no room for redo slots takes all its ranks' packets, or, if one of them insists on shared
//! memory or RDMA, there is no tree.

use super::{PlacedNode, Placement};
use crate::controller::proto::{Attach, JoinRequest};
use sumac_hal::ctrl::{Announce, ChildMask};
use sumac_hal::shm::DEVICE_USER_VARIABLE;
use thiserror::Error;

/// Why a rank contributes by packets.
#[derive(Debug, PartialEq, Eq, Error)]
enum ByPackets<'a> {
    /// It wants to.
    #[error("the rank asks for it")]
    Asked,
    /// A bus belongs to one shard.
    #[error("the device has {0} shards, and only a device with one takes contributions by reference")]
    Shards(usize),
    /// The device has no bus.
    #[error("the device has no bus")]
    NoBus,
    /// The device takes nobody in from other hosts.
    #[error("the device has no RDMA engine; start it with --rdma")]
    NoRdma,
    /// The rank can't say where it is.
    #[error("the rank's system tells no name of its machine")]
    NoMachine,
    /// The rank does not trust the device.
    #[error(
        "the device runs as user {device}, and the rank, of user {rank}, shares memory with devices of its own user and of \
         root, and of the one that {DEVICE_USER_VARIABLE} names to it"
    )]
    DeviceUser {
        /// The device's.
        device: u32,
        /// The rank's.
        rank: u32,
    },
    /// The device does not let the rank in.
    #[error(
        "the device, of user {device}, serves ranks of its own user and of root alone, and the rank runs as {rank}; run the \
         device as root, or name its user to it in {DEVICE_USER_VARIABLE}"
    )]
    RankUser {
        /// The device's.
        device: u32,
        /// The rank's.
        rank: u32,
    },
    /// They don't share memory.
    #[error("the rank is on machine {rank}, the device on {device}")]
    OtherMachine {
        /// The rank's.
        rank: &'a str,
        /// The device's.
        device: &'a str,
    },
}

/// Tell whether a rank can contribute by reference to a device, and is willing to.
fn by_reference<'a>(request: &'a JoinRequest, device: &'a Announce) -> Result<(), ByPackets<'a>> {
    let is_far = request.attach == Attach::Rdma;
    if !request.attach.may_share_memory() && !is_far {
        return Err(ByPackets::Asked);
    }
    let shards = device.data_addrs.len();
    if shards > 1 {
        return Err(ByPackets::Shards(shards));
    }
    let bus = device.bus.as_ref().ok_or(ByPackets::NoBus)?;
    if is_far {
        return bus.remote.map(drop).ok_or(ByPackets::NoRdma);
    }
    let machine = request.machine.as_ref().ok_or(ByPackets::NoMachine)?;
    if *machine != bus.machine {
        return Err(ByPackets::OtherMachine { rank: machine, device: &bus.machine });
    }
    let (device, users) = (bus.user.uid, &request.device_users);
    if !users.admit(device) {
        return Err(ByPackets::DeviceUser { device, rank: users.own });
    }
    if !bus.user.serves(users.own) {
        return Err(ByPackets::RankUser { device, rank: users.own });
    }
    Ok(())
}

impl Placement {
    /// Decide how each rank reaches its leaf. Fails, with the reason, where one insists on what is not possible.
    pub(super) fn attach(&mut self, requests: &[&JoinRequest]) -> Result<(), String> {
        for (request, &(leaf, child)) in requests.iter().zip(&self.ranks) {
            let node = &mut self.nodes[leaf];
            let why = match by_reference(request, &node.device.announce) {
                Ok(()) => {
                    node.by_reference.insert(child);
                    self.ranks_by_rdma += u32::from(request.attach == Attach::Rdma);
                    continue;
                }
                Err(why) => why,
            };
            let (rank, device) = (request.rank, node.device.name());
            if request.attach.insists_on_reference() {
                return Err(refusal(request, device, &why.to_string()));
            }
            by_its_packets(request, node)?;
            tracing::debug!(job = request.job, %rank, device, %why, "contributes by packets");
            if why != ByPackets::Asked {
                self.by_packets.insert(rank, why.to_string());
            }
        }
        Ok(())
    }

    /// Let all ranks of a node contribute by packets after all. Fails, with the reason, where one insists on shared
    /// memory.
    pub(super) fn turn_inline(&mut self, index: usize, requests: &[&JoinRequest], why: &str) -> Result<(), String> {
        let node = &mut self.nodes[index];
        let device = node.device.name();
        let mut there = requests.iter().zip(&self.ranks).filter(|(_, (leaf, _))| *leaf == index);
        if let Some((request, _)) = there.find(|(request, _)| request.attach.insists_on_reference()) {
            return Err(refusal(request, device, why));
        }
        let mut there = requests.iter().zip(&self.ranks).filter(|(_, (leaf, _))| *leaf == index);
        there.try_for_each(|(request, _)| by_its_packets(request, node))?;
        let there = requests.iter().zip(&self.ranks).filter(|(_, (leaf, _))| *leaf == index);
        there.filter(|(request, _)| request.attach.may_share_memory()).for_each(|(request, _)| {
            self.by_packets.entry(request.rank).or_insert_with(|| why.to_owned());
        });
        tracing::warn!(group = %self.group, device, why, "its ranks contribute by packets instead of by reference");
        node.by_reference = ChildMask::EMPTY;
        Ok(())
    }

    /// Return how many ranks contribute by reference.
    pub(in crate::controller) fn ranks_by_reference(&self) -> u32 {
        self.nodes.iter().map(|node| node.by_reference.iter().count() as u32).sum()
    }

    /// Tell whether ranks at a node contribute by reference.
    pub(in crate::controller) fn has_references(&self, node: usize) -> bool {
        !self.nodes[node].by_reference.is_empty()
    }

    pub(super) fn all_by_reference(&self) -> bool {
        self.ranks_by_reference() == self.ranks.len() as u32
    }
}

/// Check that a rank sends packets by the way by which a device receives them.
fn by_its_packets(request: &JoinRequest, node: &PlacedNode) -> Result<(), String> {
    let (rank, device) = (request.rank, node.device.name());
    match (request.attach == Attach::Verbs, node.over_verbs()) {
        (true, false) => Err(format!(
            "{rank} sends over verbs, and its leaf device {device} receives over UDP; start the device with --verbs, or \
             let the rank attach as `auto` or `udp`"
        )),
        (false, true) => Err(format!(
            "{rank} sends over UDP, and its leaf device {device} receives over verbs; let the rank attach as `verbs`"
        )),
        _ => Ok(()),
    }
}

fn refusal(request: &JoinRequest, device: &str, why: &str) -> String {
    if request.attach == Attach::Rdma {
        return format!(
            "{} asks for contributions by RDMA, which its leaf device {device} does not take: {why}; let it attach as `auto`, \
             `udp` or `verbs`",
            request.rank
        );
    }
    format!(
        "{} asks for shared memory, which it can't share with its leaf device {device}: {why}; let it attach as `auto` \
         or `udp`",
        request.rank
    )
}
