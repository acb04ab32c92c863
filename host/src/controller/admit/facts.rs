//! What path selection needs to know of a tree.

use super::{PlacedNode, Placement};
use crate::controller::proto::JoinRequest;
use crate::select::{JobFacts, TreeFacts, ranks_per_host};

impl Placement {
    /// The properties of the job that costs depend on.
    pub(super) fn job_facts(&self, requests: &[&JoinRequest]) -> JobFacts {
        let ranks_per_host = ranks_per_host(requests.iter().map(|request| request.mesh_addr.ip()));
        JobFacts { ranks: requests.len() as u32, ranks_per_host, tree: Some(self.facts()) }
    }

    /// The tree's properties that path selection uses.
    pub(in crate::controller) fn facts(&self) -> TreeFacts {
        let all = self.nodes.iter().map(|node| &node.device.announce.capabilities);
        TreeFacts {
            levels: self.levels,
            max_children: self.max_children,
            chunk_len_bytes: self.chunk_len_bytes.into(),
            dtypes: all.clone().fold(u32::MAX, |mask, device| mask & device.dtypes),
            ops: all.clone().fold(u32::MAX, |mask, device| mask & device.ops),
            collectives: all.fold(u32::MAX, |mask, device| mask & device.collectives),
            zero_copy_ranks: self.zero_copy_ranks(),
            rdma_ranks: self.rdma_ranks,
            over_verbs: self.nodes.iter().any(PlacedNode::over_verbs),
            shards: self.nodes.iter().map(PlacedNode::shards).max().unwrap_or(1),
            links: self.links,
        }
    }
}
