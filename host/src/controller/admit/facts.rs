//! What path selection needs to know of a tree.

use super::rails::find_adapter;
use super::{PlacedNode, Placement, PlacementRequest};
use crate::controller::ControllerConfig;
use crate::controller::proto::JoinRequest;
use crate::plan::KeptIndex;
use crate::schedule::Shape;
use crate::select::{JobFacts, TreeFacts, ranks_per_host};
use crate::topo::HostId;
use std::collections::BTreeSet;

/// Return the shape of a job whose ranks, in order, sent `requests`: the one that they ask for, or that of their
/// machines, or if these are no servers of several ranks, that of their hosts on the fabric. Ranks that name none are
/// at the first ones, as their tree is planned. Ranks of one machine, which meet in its memory, are in a line.
pub(in crate::controller) fn job_shape<'a>(
    requests: impl Iterator<Item = &'a JoinRequest>,
    (config, index): (&ControllerConfig, &KeptIndex),
) -> Shape {
    let requests: Vec<&JoinRequest> = requests.collect();
    if let Some(asked) = requests.iter().find_map(|request| request.terms.shape) {
        return asked;
    }
    let machines: Vec<_> = requests.iter().map(|request| request.mesh_addr.ip()).collect();
    let of_machines = Shape::of_machines(&machines);
    let Some(fabric) = config.fabric.as_ref().filter(|_| of_machines == Shape::Line) else { return of_machines };
    let different = machines.iter().collect::<BTreeSet<_>>().len();
    let are_alone = different == machines.len();
    let hosts: Option<Vec<HostId>> = if requests.iter().all(|request| request.host.is_none()) {
        Some(fabric.host_ids().take(requests.len()).collect()).filter(|_| are_alone)
    } else {
        requests.iter().map(|request| find_adapter(fabric, request.host.as_deref()?)).collect()
    };
    let hosts = hosts.filter(|hosts| different > 1 && hosts.len() == requests.len());
    hosts.map_or(Shape::Line, |hosts| index.groups(fabric).shape_of(fabric, &hosts))
}

impl Placement {
    /// The properties of the job that costs depend on.
    pub(super) fn job_facts(&self, request: PlacementRequest<'_>) -> JobFacts {
        let requests = request.requests;
        let ranks_per_host = ranks_per_host(requests.iter().map(|request| request.mesh_addr.ip()));
        JobFacts { ranks: requests.len() as u32, ranks_per_host, shape: request.shape, tree: Some(self.facts()) }
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
