//! What path selection needs to know of a tree.

use super::{PlacedNode, Placement};
use crate::controller::proto::JoinRequest;
use crate::schedule::Shape;
use crate::select::{JobFacts, TreeFacts, ranks_per_host};

/// Return the shape of a job whose ranks, in order, sent `requests`: the one that they ask for, or that of their
/// machines.
pub(in crate::controller) fn job_shape<'a>(requests: impl Iterator<Item = &'a JoinRequest>) -> Shape {
    let mut asked = None;
    let machine = |request: &JoinRequest| {
        asked = asked.or(request.terms.shape);
        request.mesh_addr.ip()
    };
    let machines: Vec<_> = requests.map(machine).collect();
    asked.unwrap_or_else(|| Shape::of_machines(&machines))
}

impl Placement {
    /// The properties of the job that costs depend on.
    pub(super) fn job_facts(&self, requests: &[&JoinRequest]) -> JobFacts {
        let ranks_per_host = ranks_per_host(requests.iter().map(|request| request.mesh_addr.ip()));
        let (ranks, shape) = (requests.len() as u32, job_shape(requests.iter().copied()));
        JobFacts { ranks, ranks_per_host, shape, tree: Some(self.facts()) }
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
