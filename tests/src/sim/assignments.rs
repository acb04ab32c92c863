//! The trees that a cluster's controller reserves, read from its requests to devices.
//!
//! Controllers assign shared addresses over UDP on one host only. An emulated network has its own: boards add them to
//! what they are asked to create, as they remove those that their ports cannot join.

use super::cluster::Cluster;
use super::options::{Options, Sharing};
use super::wiring::{Wiring, shared_addr};
use std::collections::{BTreeMap, BTreeSet};
use sumac::controller::proto::{Membership, TreeMembership};
use sumac::transport::packets::EndpointConfig;
use sumac_hal::ctrl::{GroupConfig, Request, SharedLink, TreeConfig};
use sumac_hal::ids::{ChildIndex, Epoch, GroupId, Rank, TreeId};
use sumac_hal::key::GroupSecret;
use sumac_hal::time::Instant;

/// A tree that the controller has requested from devices.
pub(super) struct Assignment {
    pub(super) wiring: Wiring,
    /// Index of the group that it is for.
    pub(super) group: usize,
    pub(super) id: GroupId,
    epoch: Epoch,
    pub(super) window: u16,
    pub(super) chunk_len_bytes: u16,
    /// When devices were asked for it.
    pub(super) since: Instant,
    /// By device: its node, and the secret of the group there.
    nodes: BTreeMap<usize, (usize, GroupSecret)>,
    /// The devices that have created the group.
    pub(super) reserved: BTreeSet<usize>,
    /// Ranks were told of it.
    pub(super) is_assigned: bool,
}

impl Assignment {
    /// Return the tree that consists of these nodes; `None` if one is missing.
    fn new((group, ranks): (usize, usize), nodes: &[(usize, TreeConfig, GroupConfig)], since: Instant) -> Option<Self> {
        let (_, _, first) = nodes.first()?;
        let wiring = Wiring::reserved(first.tree, ranks, nodes.iter().map(|(device, tree, _)| (*device, tree)))?;
        let nodes = nodes.iter().enumerate().map(|(node, (device, _, config))| (*device, (node, config.secret)));
        Some(Self {
            wiring,
            group,
            id: first.group,
            epoch: first.epoch,
            window: first.window_max,
            chunk_len_bytes: first.chunk_len_bytes,
            since,
            nodes: nodes.collect(),
            reserved: BTreeSet::new(),
            is_assigned: false,
        })
    }

    /// Return the key of a child of a device.
    fn child_key(&self, options: &Options, device: usize, epoch: Epoch, child: ChildIndex) -> Option<u64> {
        let (_, secret) = self.nodes.get(&device)?;
        Some(secret.child_key(self.id, options.planted.key_epoch(epoch), child))
    }

    /// Return the key of the shared address of a device, for a child that claims to listen there.
    fn shared_key(&self, options: &Options, (device, child): (usize, u16)) -> Option<u64> {
        let claims = options.sharing.claims_to_listen(options.seed, (device, child), self.group);
        self.child_key(options, device, self.epoch, ChildIndex::ALL).filter(|_| claims)
    }

    /// Add the shared addresses to what a device creates.
    pub(super) fn share(&self, options: &Options, device: usize, config: &mut GroupConfig) {
        let Some((node, _)) = self.nodes.get(&device).filter(|_| options.sharing != Sharing::Off) else { return };
        config.shared = Some(options.address(shared_addr(device, self.group)));
        config.parent_shared = self.wiring.nodes[*node].parent.and_then(|(parent, child)| {
            let parent = self.wiring.nodes[parent].device;
            let key = self.shared_key(options, (parent, child))?;
            Some(SharedLink { addr: options.address(shared_addr(parent, self.group)), key })
        });
    }

    /// Configure the endpoint of a rank, by what the controller has told it.
    fn endpoint(
        &self,
        options: &Options,
        rank: usize,
        place: &TreeMembership,
        (version, salt): (u32, u32),
    ) -> EndpointConfig {
        let (leaf, child) = self.wiring.ranks[rank];
        let shared_key = self.shared_key(options, (self.wiring.nodes[leaf].device, child));
        let config = place.endpoint((Rank(rank as u32), options.ranks as u32), shared_key, version);
        EndpointConfig { salt, ..config }
    }
}

impl Cluster<'_, '_> {
    /// Record the trees among requests that leave the controller: all requests for a tree leave at once.
    pub(super) fn record_assignments<'r>(&mut self, requests: impl Iterator<Item = (usize, &'r Request)>) {
        let mut trees: BTreeMap<(TreeId, usize), &TreeConfig> = BTreeMap::new();
        let mut found: BTreeMap<GroupId, Vec<(usize, TreeConfig, GroupConfig)>> = BTreeMap::new();
        for (device, request) in requests {
            match request {
                Request::InstallTree(tree) => _ = trees.insert((tree.tree, device), tree),
                Request::CreateGroup(config) => {
                    let tree = trees.get(&(config.tree, device));
                    found.entry(config.group).or_default().extend(tree.map(|&tree| (device, tree.clone(), *config)));
                }
                _ => {}
            }
        }
        for (id, nodes) in found {
            let group = self.group_of_claim(id);
            let assignment = group.and_then(|group| Assignment::new((group, self.options.ranks), &nodes, self.now));
            self.assignments.extend(assignment);
        }
    }

    /// Return the tree with a number.
    pub(super) fn tree_of(&self, id: GroupId) -> Option<usize> {
        self.assignments.iter().rposition(|assignment| assignment.id == id)
    }

    /// Return the key of a child of a device in a group of this number.
    pub(super) fn key_of(&self, id: GroupId, epoch: Epoch, device: usize, child: ChildIndex) -> Option<u64> {
        self.assignments[self.tree_of(id)?].child_key(self.options, device, epoch, child)
    }

    /// Configure the endpoint of a rank on a tree. `incarnation` distinguishes its endpoints.
    pub(super) fn endpoint_on(
        &self,
        (rank, group): (usize, usize),
        tree: usize,
        membership: &Membership,
        incarnation: u32,
    ) -> EndpointConfig {
        let assignment = &self.assignments[tree];
        let place = membership.tree.as_ref().expect("it has this tree");
        let salt = crate::oracle::weight(&[
            self.options.seed,
            rank as u64,
            group as u64,
            u64::from(assignment.epoch.to_bits()) + (u64::from(incarnation) << 32),
        ]);
        assignment.endpoint(self.options, rank, place, (membership.table.version, salt as u32))
    }
}
