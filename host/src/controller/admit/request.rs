//! What a tree is planned for.

use super::NarrowPaths;
use crate::controller::device::Device;
use crate::controller::proto::JoinRequest;
use crate::schedule::Shape;
use crate::topo::HostId;
use crate::transport::local::HostGroups;
use std::sync::Arc;
use sumac_hal::ids::Rank;

/// The job that a tree is planned for.
#[derive(Debug, Clone, Copy)]
pub(in crate::controller) struct PlacementRequest<'j> {
    pub(in crate::controller) tenant: &'j str,
    /// In order of rank.
    pub(in crate::controller) requests: &'j [&'j JoinRequest],
    /// How the ranks lie.
    pub(in crate::controller) shape: Shape,
    /// The devices that the job is pinned to, root first; empty to plan on the fabric.
    pub(in crate::controller) pinned: &'j [String],
    /// The hosts whose ranks combine before they contribute.
    pub(in crate::controller) hosts: &'j [HostBlock],
    /// The paths that carry shorter packets than their ends.
    pub(in crate::controller) narrow: &'j NarrowPaths,
    /// The number of the job's trees. A rank's port takes the windows of all of them, so they share what one has.
    pub(in crate::controller) trees: usize,
    /// The adapters through which each rank may enter the tree; `None`: only its host.
    pub(in crate::controller) adapters: Option<&'j [Vec<HostId>]>,
}

/// The ranks of a job that share a host, and the device that they combine on.
#[derive(Debug, Clone)]
pub(in crate::controller) struct HostBlock {
    pub(in crate::controller) device: Arc<Device>,
    pub(in crate::controller) ranks: Vec<Rank>,
}

impl PlacementRequest<'_> {
    /// The groups of ranks that a tree is planned for.
    pub(super) fn groups(&self) -> HostGroups {
        let hosts: Vec<_> = self.hosts.iter().map(|host| host.ranks.clone()).collect();
        HostGroups::new(self.requests.len() as u32, &hosts)
    }
}
