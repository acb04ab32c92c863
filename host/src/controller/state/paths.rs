//! The paths of a reserved tree are probed before its ranks get their places (PROTOCOL 12).
//!
//! ```text
//!   reserved -- ProbePath to each rank that sends packets --> PathProbed     all have answered,
//!            -- ProbePath to each device below another ----> Path            or PROBE_LIMIT later
//!                                                              v
//!                     all carry the group's packets: published;   else: released, and planned with shorter packets
//! ```
//!
//! Invariants:
//! - A tree waits for its paths for a limited time. Who does not answer by then says nothing about its path.
//! - The packets of a job's next tree are shorter than those that a path did not carry, and no more than
//!   [`NARROW_TREES_MAX`] trees in a row are given up.
//! - Ranks and devices report on their own paths only, and what a rank reports affects its job only.

use super::State;
use super::placement::{Draft, NoTree};
use crate::controller::ControllerConfig;
use crate::controller::admit::Hop;
use crate::controller::device::{DeviceError, OnTimeout, REPLY_TIMEOUT, Reply};
use crate::controller::output::ConnId;
use crate::controller::proto::ClientReply;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac_hal::ctrl::{Request, Response};
use sumac_hal::ids::{GroupId, Rank};
use sumac_hal::planted;
use sumac_hal::time::Instant;

/// How long a tree waits for its paths. Ranks search for 2 s at most.
const PROBE_LIMIT: Duration = Duration::from_secs(3);

/// How often a device that is still searching is asked.
const ASK_INTERVAL: Duration = Duration::from_millis(10);

/// How many trees in a row are given up because of narrow paths. Each was planned with all that was known before.
const NARROW_TREES_MAX: u32 = 4;

/// The reserved trees whose paths are probed.
pub(in crate::controller) type PathProbes = BTreeMap<GroupId, TreeProbes>;

/// The nodes of a tree that were asked.
#[derive(Debug)]
pub(in crate::controller) struct AskedNodes {
    group: GroupId,
    nodes: Vec<usize>,
}

/// A reserved tree whose paths are probed.
#[derive(Debug)]
pub(in crate::controller) struct TreeProbes {
    draft: Draft,
    /// The ranks and nodes that have not answered.
    ranks: BTreeSet<Rank>,
    nodes: BTreeSet<usize>,
    /// What was found of paths that do not carry the group's packets.
    narrow: Vec<(Hop, u32)>,
    /// When to ask the nodes again; `None` while they are being asked.
    ask_at: Option<Instant>,
    until: Instant,
}

impl TreeProbes {
    fn record(&mut self, hop: Option<Hop>, found: Option<u32>) {
        let narrow = hop.zip(found).filter(|(_, found)| *found < self.draft.placement.packet_len_bytes());
        self.narrow.extend(narrow);
    }

    fn is_complete(&self) -> bool {
        self.ranks.is_empty() && self.nodes.is_empty()
    }
}

impl State {
    /// Probe the paths of a reserved tree, and publish it if there are none to probe.
    pub(super) fn probe_paths(&mut self, config: &ControllerConfig, draft: Draft) {
        let Some(job) = self.jobs.get(&draft.job) else { return };
        let placement = &draft.placement;
        let mut ranks = BTreeSet::new();
        for (rank, member) in &job.members {
            if let Some(path) = placement.path_to_probe(*rank, member.request.mesh_addr.ip()) {
                self.output.send(member.client, &ClientReply::ProbePath(Box::new(path)));
                ranks.insert(*rank);
            }
        }
        let (group, nodes) = (placement.group, placement.nodes_to_probe().collect());
        let until = self.now + PROBE_LIMIT;
        let probes = TreeProbes { draft, ranks, nodes, narrow: Vec::new(), ask_at: None, until };
        if probes.is_complete() {
            return self.publish_reserved(config, probes.draft);
        }
        self.path_probes.insert(group, probes);
        self.ask_nodes(group);
    }

    /// Ask the devices of a tree whose paths are not known yet.
    fn ask_nodes(&mut self, group: GroupId) {
        let Some(probes) = self.path_probes.get_mut(&group).filter(|probes| !probes.nodes.is_empty()) else { return };
        probes.ask_at = None;
        let nodes: Vec<usize> = probes.nodes.iter().copied().collect();
        let device = |node: &usize| (probes.draft.placement.nodes[*node].device.clone(), Request::ProbePath(group));
        let requests: Vec<_> = nodes.iter().map(device).collect();
        let purpose = super::Purpose::ProbePaths(AskedNodes { group, nodes });
        self.links.exchange(&mut self.output, (purpose, OnTimeout::Normal, self.now + REPLY_TIMEOUT), requests);
    }

    /// Handle what devices have answered. One that refuses or is lost says nothing about its path.
    pub(super) fn continue_path_probes(
        &mut self,
        config: &ControllerConfig,
        AskedNodes { group, nodes }: AskedNodes,
        replies: Vec<Reply>,
    ) {
        let Some(probes) = self.path_probes.get_mut(&group) else { return };
        for (node, reply) in nodes.into_iter().zip(replies) {
            let found = match reply {
                Ok(Response::Path { max_packet_len_bytes: None }) => continue,
                Ok(Response::Path { max_packet_len_bytes }) => max_packet_len_bytes,
                Ok(_) | Err(DeviceError::Refused(_) | DeviceError::Unreachable | DeviceError::UnexpectedResponse) => {
                    None
                }
            };
            probes.nodes.remove(&node);
            let hop = probes.draft.placement.hop_of_node(node);
            probes.record(hop, found);
        }
        // A time to ask that nobody is asked at would stay due.
        probes.ask_at = (!probes.nodes.is_empty()).then_some(self.now + ASK_INTERVAL);
        self.finish_path_probes_of(config, group);
    }

    /// A rank has probed the path to its leaf.
    pub(in crate::controller) fn record_probed_path(
        &mut self,
        config: &ControllerConfig,
        (place, client): (Option<&(String, Rank)>, ConnId),
        group: GroupId,
        found: Option<u32>,
    ) {
        let Some((name, rank)) = place else { return };
        let is_member = self.jobs.get(name).is_some_and(|job| job.has(*rank, client));
        let Some(probes) = self.path_probes.get_mut(&group).filter(|probes| is_member && probes.draft.job == *name)
        else {
            return;
        };
        if probes.ranks.remove(rank) {
            let hop = probes.draft.placement.hop_of_rank(*rank);
            probes.record(hop, found);
            self.finish_path_probes_of(config, group);
        }
    }

    /// Ask devices again, and end probes whose time is over or whose jobs no longer want the tree. Returns the next
    /// deadline.
    pub(in crate::controller) fn expire_path_probes(&mut self, config: &ControllerConfig) -> Option<Instant> {
        let now = self.now;
        let is_over = |probes: &TreeProbes| probes.until <= now || !self.is_wanted(&probes.draft);
        let over: Vec<_> = self.path_probes.iter().filter(|(_, probes)| is_over(probes)).map(|(id, _)| *id).collect();
        for group in over {
            self.finish_path_probes(config, group);
        }
        let is_due = |probes: &TreeProbes| probes.ask_at.is_some_and(|at| at <= now);
        let due: Vec<_> = self.path_probes.iter().filter(|(_, probes)| is_due(probes)).map(|(id, _)| *id).collect();
        due.into_iter().for_each(|group| self.ask_nodes(group));
        self.path_probes.values().flat_map(|probes| probes.ask_at.into_iter().chain([probes.until])).min()
    }

    /// Whether a job still waits for this tree.
    fn is_wanted(&self, draft: &Draft) -> bool {
        self.jobs.get(&draft.job).is_some_and(|job| job.placing == Some(draft.placement.group))
    }

    fn finish_path_probes_of(&mut self, config: &ControllerConfig, group: GroupId) {
        if self.path_probes.get(&group).is_some_and(TreeProbes::is_complete) {
            self.finish_path_probes(config, group);
        }
    }

    /// Publish a tree whose paths carry its packets; plan another one if they do not.
    fn finish_path_probes(&mut self, config: &ControllerConfig, group: GroupId) {
        let Some(TreeProbes { draft, narrow, ranks, nodes, .. }) = self.path_probes.remove(&group) else { return };
        if !self.is_wanted(&draft) {
            self.release(&draft.placement);
            return self.serve_queue();
        }
        let name = draft.job.clone();
        if !ranks.is_empty() || !nodes.is_empty() {
            let silent = ranks.len() + nodes.len();
            tracing::warn!(job = name, %group, silent, "not all paths of the tree could be probed; packets may be too long");
        }
        let has_devices = self.has_devices(&draft.placement);
        let (now, fits) = (self.now, narrow.is_empty() || planted!(self, NarrowTreePublished));
        let Some(job) = self.jobs.get_mut(&name) else { return };
        if fits && has_devices {
            job.narrow_trees = 0;
            return self.publish_reserved(config, draft);
        }
        for (hop, max_packet_len_bytes) in narrow {
            let wanted_bytes = draft.placement.packet_len_bytes();
            tracing::info!(job = name, %hop, max_packet_len_bytes, wanted_bytes, "narrow path: planning with shorter packets");
            job.narrow.record(hop, max_packet_len_bytes, now);
        }
        job.narrow_trees += 1;
        let is_last = job.narrow_trees > NARROW_TREES_MAX;
        self.release(&draft.placement);
        if is_last {
            let why = format!("the paths of {NARROW_TREES_MAX} trees in a row were narrower than found before");
            let tried = Some(self.ledger.version());
            return self.proceed_without_tree(config, &name, NoTree::permanent(why), tried);
        }
        self.request_tree(&name, draft.tries);
    }
}
