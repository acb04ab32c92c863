//! A job, its ranks, and the messages to all of them.

use super::hosts::JobHost;
use super::lost_devices::LostDevices;
use super::membership::{MembershipMessages, SharedFields};
use super::stripes::PlannedTrees;
use crate::controller::ControllerConfig;
use crate::controller::admit::facts::job_shape;
use crate::controller::admit::{NarrowPaths, Placement};
use crate::controller::device::Device;
use crate::controller::outbox::Frames;
use crate::controller::output::{ConnId, Outputs};
use crate::controller::proto::{ClientReply, JoinRequest, Membership, QueuePosition};
use crate::plan::{Child, KeptIndex};
use crate::schedule::Shape;
use crate::schedule::tree::Tree;
use crate::secret::JobSecret;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use sumac_hal::ctrl::{Order, encode_frames};
use sumac_hal::ids::{GroupId, Rank};
use sumac_hal::time::Instant;

/// One rank of a job.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) request: Arc<JoinRequest>,
    /// The devices that the job is pinned to, root first; empty if the controller plans the tree.
    pub(super) pinned: Vec<String>,
    /// Its connection.
    pub(super) client: ConnId,
}

/// A job, before and after it has started.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) world: u32,
    pub(super) members: BTreeMap<Rank, Member>,
    /// The job's secret, the same in every view.
    pub(super) secret: JobSecret,
    /// The current view: how often the job was placed anew.
    pub(super) view: u32,
    /// Whether the ranks were notified that the tree of this view is lost.
    pub(super) tree_suspected: bool,
    /// Whether it is lost because a path has become too narrow for its packets.
    pub(super) spares_devices: bool,
    /// Whether the ranks were notified of an abort.
    pub(super) is_aborted: bool,
    /// Whether the ranks were notified of a lost rank, which makes others end.
    pub(super) has_lost_ranks: bool,
    /// The ranks that have requested a replacement for this view's tree.
    pub(super) replan_requests: BTreeSet<Rank>,
    /// Those of `replan_requests` that have stopped waiting, and when their requests expire if no other rank is
    /// waiting.
    pub(super) replan_abandoned: BTreeSet<Rank>,
    pub(super) replan_abandoned_until: Option<Instant>,
    /// For a resumed job: when to offer a tree at the earliest, so that devices have time to reconnect.
    pub(super) offer_not_before: Option<Instant>,
    /// The devices of the last lost tree. A device that restarts has another session.
    pub(super) lost_devices: LostDevices<Device>,
    /// While a tree is on offer: the call that each rank named in `Pause`.
    pub(super) offer: Option<BTreeMap<Rank, u64>>,
    /// The ranks that have requested the list of survivors.
    pub(super) survivor_requests: BTreeSet<Rank>,
    /// How many lists of survivors were sent.
    pub(super) shrink_count: u32,
    /// The tree of this view, or why there is none. `None` before the job has started.
    pub(super) placement: Option<Result<Placement, String>>,
    /// The group that is being planned or reserved.
    pub(super) placing: Option<GroupId>,
    /// The group claimed for the job while a tree is on offer, and until when.
    pub(super) offer_claim: Option<(GroupId, Instant)>,
    /// Whether `MoveAt` was sent to all ranks.
    pub(super) is_moving: bool,
    /// Until when joining waits for a tree.
    pub(super) join_waits_until: Option<Instant>,
    /// The latest time at which joining returns, set once it has to wait.
    pub(super) join_deadline: Option<Instant>,
    /// Devices that a rank could not attach to. A device that restarts has another session.
    pub(super) declined_devices: Vec<Arc<Device>>,
    /// How often the ranks declined a tree without naming a device, and whether to offer one again.
    pub(super) decline_count: u32,
    pub(super) offer_again_due: bool,
    /// How its ranks lie, fixed when the job started: it takes long for many ranks, and each rank of a rail asks.
    pub(super) shape: Option<Shape>,
    /// The expression of a declared order, fixed when the job started.
    pub(super) expression: Option<Tree>,
    /// The hosts whose ranks combine before they contribute, and until when the job waits for their devices.
    pub(super) hosts: Vec<JobHost>,
    pub(super) hosts_until: Option<Instant>,
    /// The trees that were planned when it started.
    pub(super) trees: PlannedTrees,
    /// Its paths that carry shorter packets than their ends, and how many trees in a row were given up for that.
    pub(super) narrow: NarrowPaths,
    pub(super) narrow_trees: u32,
    /// The position in the queue that was last sent to the ranks.
    pub(super) reported_position: Option<QueuePosition>,
}

impl Job {
    pub(super) fn new(world: u32, secret: JobSecret) -> Self {
        Self {
            world,
            members: BTreeMap::new(),
            secret,
            view: 0,
            tree_suspected: false,
            spares_devices: false,
            is_aborted: false,
            has_lost_ranks: false,
            replan_requests: BTreeSet::new(),
            replan_abandoned: BTreeSet::new(),
            replan_abandoned_until: None,
            offer_not_before: None,
            lost_devices: LostDevices::new(),
            offer: None,
            survivor_requests: BTreeSet::new(),
            shrink_count: 0,
            placement: None,
            placing: None,
            offer_claim: None,
            is_moving: false,
            join_waits_until: None,
            join_deadline: None,
            declined_devices: Vec::new(),
            decline_count: 0,
            offer_again_due: false,
            shape: None,
            expression: None,
            hosts: Vec::new(),
            hosts_until: None,
            trees: PlannedTrees::default(),
            narrow: NarrowPaths::default(),
            narrow_trees: 0,
            reported_position: None,
        }
    }

    /// The request of any rank: parameters of the job are the same on all ranks.
    pub(super) fn first(&self) -> Option<&Member> {
        self.members.values().next()
    }

    pub(super) fn tenant(&self) -> &str {
        self.first().map_or("", |member| &member.request.terms.tenant)
    }

    pub(super) fn has(&self, rank: Rank, client: ConnId) -> bool {
        self.members.get(&rank).is_some_and(|member| member.client == client)
    }

    /// How its ranks lie.
    pub(super) fn shape(&self, fabric: (&ControllerConfig, &KeptIndex)) -> Shape {
        self.shape.unwrap_or_else(|| job_shape(self.members.values().map(|member| &*member.request), fabric))
    }

    /// The expression that the job evaluates. Without a tree, it is one node with all ranks, so that a declared order
    /// is still defined.
    fn expression_of(&self, placed: &Result<Placement, String>) -> Vec<Vec<Child>> {
        let flat = || vec![(0..self.world).map(|rank| Child::Rank(Rank(rank))).collect()];
        placed.as_ref().map_or_else(|_| flat(), Placement::expression)
    }

    /// Fix the expression of a declared order when the job starts.
    pub(super) fn declare(&mut self) {
        let Some(placed) = &self.placement else { return };
        let order = self.first().map_or(Order::Arrival, |member| member.request.order);
        if self.expression.is_none() && order != Order::Arrival {
            self.expression = Tree::new(self.expression_of(placed), self.world, order).ok();
        }
    }

    /// Send each rank its membership.
    pub(super) fn send_memberships(
        &mut self,
        output: &mut Outputs,
        (config, shape): (&ControllerConfig, Shape),
        queue: Option<QueuePosition>,
        reply: impl Fn(Box<Membership>) -> ClientReply,
    ) {
        self.reported_position = queue;
        let Some(placed) = &self.placement else { return };
        let mesh: Vec<_> = self.members.values().map(|member| member.request.mesh_addr).collect();
        let recovery_mesh: Vec<_> = self.members.values().map(|member| member.request.recovery_addr).collect();
        let expression = self.expression_of(placed);
        let hosts: BTreeSet<_> = mesh.iter().map(|addr| addr.ip()).collect();
        let (secret, table) = (self.secret.clone(), config.table.for_hosts(hosts.len()));
        let messages = MembershipMessages::new(SharedFields { mesh, recovery_mesh, secret, expression, table, shape });
        for (rank, member) in &self.members {
            let striping = self.trees.striping_of(config.fabric.as_ref(), *rank);
            let tree = placed.as_ref().map(|placement| placement.membership(config, *rank)).map_err(Clone::clone);
            messages.send((output, member.client), (tree, queue, striping), &reply);
        }
    }

    /// Send a message to all connected ranks.
    pub(super) fn broadcast(&self, output: &mut Outputs, reply: &ClientReply) {
        output.broadcast(self.clients(), Frames::of(reply));
    }

    /// Send several messages as one queue entry, shared by all ranks: thousands of ranks may be lost together.
    pub(super) fn broadcast_all(&self, output: &mut Outputs, replies: impl Iterator<Item = ClientReply>) {
        let frames: Result<Vec<_>, _> = replies.map(|reply| encode_frames(&reply)).collect();
        output.broadcast(self.clients(), frames.map(|frames| Frames::new(frames.concat())));
    }

    fn clients(&self) -> impl Iterator<Item = ConnId> {
        self.members.values().map(|member| member.client)
    }
}
