//! Jobs on several trees: how many trees a job gets, and which devices are whose.
//!
//! Every tree but a job's own belongs to a stripe, which is a job too ([`StripeOf`]). The trees are planned together
//! when the job starts: on a fabric as many as raise the predicted rate, and without one each on devices of its own.
//! The plan is part of the job's membership. A stripe that joins is placed on the devices that were planned for it. If
//! they are lost, it may use any that no other tree of the job has.
//!
//! Where ranks have addresses for several adapters of their servers ([`JobRails`]), the plan also says at which adapter
//! each rank enters each tree. A rank joins a stripe with that adapter as its host, so later trees of the stripe enter
//! there, too.
//!
//! Invariants:
//! - trees of one job share no device, except where they were planned so;
//! - a stripe evaluates the expression that its job has declared, so the bits do not depend on the number of trees;
//! - ranks join stripes of a running job of the same tenant only, and at most as many as were planned;
//! - a job and its stripes count once in the quota of groups, whichever of them are left.

use super::State;
use super::job::Job;
use super::plan::Plan;
use crate::controller::ControllerConfig;
use crate::controller::admit::{Devices, JobRails, Placement, PlacementRequest, TreeSketch, sketch_trees};
use crate::controller::limits::TREES_MAX;
use crate::controller::proto::{JoinRefusal, JoinRequest, RailGrant, StripeOf, StripeStatus, Striping, stripe_name};
use crate::plan::{Bottleneck, TreesLimit};
use crate::schedule::tree::Tree;
use crate::topo::{Fabric, HostId};
use std::collections::BTreeSet;
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;

/// The trees that were planned for a job when it started.
#[derive(Debug, Clone, Default)]
pub(in crate::controller) struct PlannedTrees {
    pub(super) striping: Striping,
    /// The devices of each tree, by name.
    devices: Vec<BTreeSet<String>>,
    /// Where each rank enters each tree. Empty if ranks enter all of them at their hosts.
    entries: Vec<Vec<HostId>>,
}

/// What the plan of a tree has to know of the job's other trees.
#[derive(Debug, Clone, Default)]
pub(super) struct SiblingTrees {
    /// How many trees are requested, if the job is about to start; 0: as many as are faster.
    wanted: Option<u8>,
    /// Whether the tree is to be on the devices that were planned for it, and on no others.
    is_first_view: bool,
    /// How many trees the job has.
    pub(super) trees: usize,
    /// The devices that were planned for this tree.
    planned: BTreeSet<String>,
    /// The devices of the other trees.
    taken: BTreeSet<String>,
}

impl SiblingTrees {
    /// Whether the tree may use a device.
    pub(super) fn allow(&self, device: &str) -> bool {
        self.planned.contains(device)
            || !(self.is_first_view && !self.planned.is_empty() || self.taken.contains(device))
    }
}

impl Job {
    /// The job and place of this one, if it is a stripe.
    pub(super) fn stripe_of(&self) -> Option<&StripeOf> {
        self.first()?.request.terms.stripe.as_ref()
    }
}

impl State {
    /// Check that a rank may join a stripe. Returns the expression that the stripe has to evaluate.
    pub(super) fn check_stripe(&self, request: &JoinRequest, stripe: &StripeOf) -> Result<Option<Tree>, JoinRefusal> {
        let refuse = |why: String| JoinRefusal::Stripe { job: request.job.clone(), why };
        let Some(job) = self.jobs.get(&stripe.job).filter(|job| job.placement.is_some() && !job.members.is_empty())
        else {
            return Err(refuse(format!("job {:?} is not running", stripe.job)));
        };
        let trees = job.trees.striping.shares.len();
        if usize::from(stripe.index) >= trees {
            return Err(refuse(format!("job {:?} has {} trees", stripe.job, trees.max(1))));
        }
        if job.tenant() != request.terms.tenant || job.world != request.world {
            return Err(refuse(format!("job {:?} has another tenant or number of ranks", stripe.job)));
        }
        if job.first().is_some_and(|member| member.request.order != request.order) {
            return Err(refuse(format!("job {:?} has declared another order", stripe.job)));
        }
        Ok(job.expression.clone())
    }

    /// What a plan for a job has to know of its other trees.
    pub(super) fn sibling_trees(&self, name: &str) -> SiblingTrees {
        let Some(job) = self.jobs.get(name) else { return SiblingTrees::default() };
        let is_new = job.placement.is_none();
        let (main, own) = job.stripe_of().map_or((name, 0), |stripe| (&stripe.job, stripe.index));
        if is_new && own == 0 {
            let wanted = job.first().map(|member| member.request.terms.trees.min(TREES_MAX));
            return SiblingTrees { wanted: wanted.filter(|_| job.world > 1), ..SiblingTrees::default() };
        }
        let mut taken = BTreeSet::new();
        for index in (0..TREES_MAX).filter(|&index| index != own) {
            let sibling = if index == 0 { self.jobs.get(main) } else { self.stripe((main, job), index) };
            let Some(sibling) = sibling.filter(|sibling| sibling.tenant() == job.tenant()) else { continue };
            let placed = sibling.placement.as_ref().and_then(|placed| placed.as_ref().ok());
            let groups = placed.map(|placed| placed.group).into_iter().chain(sibling.placing);
            let groups = groups.chain(sibling.offer_claim.map(|(group, _)| group));
            taken.extend(groups.flat_map(|group| self.ledger.devices_of(group)).map(|device| device.name.clone()));
        }
        let all = self.jobs.get(main).map(|job| &job.trees.devices);
        let planned = all.and_then(|trees| trees.get(usize::from(own))).cloned().unwrap_or_default();
        SiblingTrees { wanted: None, is_first_view: is_new, trees: all.map_or(1, Vec::len), planned, taken }
    }
}

impl State {
    /// Whether a job is a further tree of one that is known.
    pub(super) fn has_job_of_stripe(&self, job: &Job) -> bool {
        let Some(stripe) = job.stripe_of() else { return false };
        let resuming = self.resuming.iter().filter(|((name, _), _)| *name == stripe.job);
        let mut named = self.jobs.get(&stripe.job).into_iter().chain(resuming.map(|(_, resuming)| &resuming.job));
        named.any(|main| main.tenant() == job.tenant())
    }

    /// A further tree of a job, if it has joined. Ranks that resume may name any job; that of another tenant is not
    /// meant.
    fn stripe(&self, (name, main): (&str, &Job), index: u8) -> Option<&Job> {
        let job = self.jobs.get(&stripe_name(name, index))?;
        let is_of = |stripe: &&StripeOf| stripe.job == name && job.tenant() == main.tenant();
        job.stripe_of().filter(is_of).map(|_| job)
    }

    /// Report the further trees of a job that have joined.
    pub(super) fn report_stripes(&self, name: &str) -> Vec<StripeStatus> {
        let Some(main) = self.jobs.get(name) else { return Vec::new() };
        let of = |index: u8| {
            let job = self.stripe((name, main), index)?;
            let placed = job.placement.as_ref()?;
            let share = main.trees.striping.shares.get(usize::from(index)).copied().unwrap_or(SHARE);
            Some(StripeStatus { index, share, view: job.view, tree: self.report_tree(job, placed) })
        };
        (1..TREES_MAX).filter_map(of).collect()
    }
}

impl Plan {
    /// Plan the further trees of a job that is about to start with `first`. Returns its first tree, with the plan. It
    /// is another one if that leaves more to the others.
    pub(super) fn plan_trees(&self, config: &ControllerConfig, mut first: Placement) -> Placement {
        let Some(wanted) = self.job.siblings.wanted.filter(|&wanted| wanted != 1) else { return first };
        if let Some(why) = self.needs_one_tree(&first) {
            first.trees.striping.reason = Some(why).filter(|_| wanted > 1);
            return first;
        }
        let planned = match &config.fabric {
            Some(fabric) => self.trees_on_fabric(config, fabric, first, wanted),
            None => self.trees_on_any_devices(config, first, wanted),
        };
        planned.unwrap_or_else(|single| {
            let (mut first, why) = *single;
            first.trees = PlannedTrees::default();
            first.trees.striping.reason = Some(why).filter(|_| wanted > 1);
            first
        })
    }

    /// Plan the trees on the fabric: as many as raise the predicted rate.
    fn trees_on_fabric(
        &self,
        config: &ControllerConfig,
        fabric: &Fabric,
        first: Placement,
        wanted: u8,
    ) -> Result<Placement, Box<(Placement, String)>> {
        let (requests, ledger) = (self.requests(), self.ledger.without_group_quota(self.tenant()));
        let rails = JobRails::of(fabric, &requests);
        let adapters = rails.as_ref().map(|rails| &rails.adapters[..]);
        let request = PlacementRequest { adapters, ..self.request_for_trees(&requests, 1) };
        let devices = match self.free_devices() {
            Ok(devices) => devices,
            Err(why) => return Err(Box::new((first, why))),
        };
        let most = if wanted == 0 { TREES_MAX } else { wanted };
        let sketched = sketch_trees((config, &self.index.planner(fabric)), &devices, &ledger, request, most);
        let (mut sketches, limit) = match sketched {
            Ok(sketched) => sketched,
            Err(why) => return Err(Box::new((first, why))),
        };
        let mut reason = (sketches.len() < usize::from(wanted))
            .then(|| describe_fewer((sketches.len(), wanted), limit, rails.as_ref()));
        if let Some(rails) = rails.as_ref().filter(|_| sketches.len() > 1)
            && let Err(why) = rails.put_own_first(&mut sketches)
        {
            return Err(Box::new((first, why)));
        }
        let mut trees = sketches.into_iter();
        let Some(own) = trees.next().filter(|_| trees.len() > 0) else {
            return Err(Box::new((first, reason.unwrap_or_default())));
        };
        let request = PlacementRequest { trees: 1 + trees.len(), ..request };
        let on = |sketch: &TreeSketch| {
            let mut devices = devices.clone();
            devices.retain(|name, _| sketch.devices.contains(name));
            let at: Vec<Vec<HostId>> = sketch.adapters.iter().map(|adapter| vec![*adapter]).collect();
            let request = PlacementRequest { adapters: rails.as_ref().map(|_| &at[..]), ..request };
            self.draft_exactly_on(config, &devices, &ledger, request)
        };
        let mut first = match self.draft_in_order(on(&own), self.job.expression.as_ref()) {
            Ok(first) => first,
            // The job's declared order is that of the first tree, which it keeps.
            Err(why) => return Err(Box::new((first, why))),
        };
        let expression = self.expression_of(&first);
        let mut planned = PlannedTrees::of(own);
        for sketch in trees {
            match self.draft_in_order(on(&sketch), expression.as_ref()) {
                Ok(_) => planned.push(sketch),
                Err(why) => {
                    reason = Some(format!("{} trees: {why}", planned.devices.len()));
                    break;
                }
            }
        }
        if !rails.is_some_and(|rails| rails.has_several()) {
            planned.entries.clear();
        }
        planned.striping.reason = reason.filter(|_| wanted > 0);
        first.trees = planned;
        Ok(first)
    }

    /// Plan the trees without a fabric: as many as requested, each on devices that the others leave.
    fn trees_on_any_devices(
        &self,
        config: &ControllerConfig,
        mut first: Placement,
        wanted: u8,
    ) -> Result<Placement, Box<(Placement, String)>> {
        let (requests, ledger) = (self.requests(), self.ledger.without_group_quota(self.tenant()));
        let request = self.request_for_trees(&requests, usize::from(wanted));
        let mut devices = match self.free_devices() {
            Ok(devices) => devices,
            Err(why) => return Err(Box::new((first, why))),
        };
        let expression = self.expression_of(&first);
        let sketch = |placement: &Placement| TreeSketch {
            devices: placement.nodes.iter().map(|node| node.device.name().to_owned()).collect(),
            share: SHARE,
            adapters: Vec::new(),
        };
        let mut planned = PlannedTrees::of(sketch(&first));
        while planned.devices.len() < usize::from(wanted) {
            if let Some(used) = planned.devices.last() {
                devices.retain(|name, _| !used.contains(name));
            }
            let drafted = self.draft_exactly_on(config, &devices, &ledger, request);
            match self.draft_in_order(drafted, expression.as_ref()) {
                Ok(placement) => planned.push(sketch(&placement)),
                Err(why) => {
                    planned.striping.reason = Some(format!("{} of {wanted} trees: {why}", planned.devices.len()));
                    break;
                }
            }
        }
        let resized = PlacementRequest { trees: planned.devices.len(), ..request };
        if let Err(why) = first.choose_sizes(config, &self.ledger, resized) {
            return Err(Box::new((first, why)));
        }
        first.trees = planned;
        Ok(first)
    }

    /// The devices that a further tree may use now.
    fn free_devices(&self) -> Result<Devices, String> {
        let (mut devices, _) = self.eligible_devices()?;
        devices.retain(|_, device| !self.reservations.devices.contains_key(&device.key()));
        Ok(devices)
    }

    fn request_for_trees<'r>(&'r self, requests: &'r [&'r JoinRequest], trees: usize) -> PlacementRequest<'r> {
        let (tenant, narrow, shape) = (self.tenant(), &self.job.narrow, self.shape());
        PlacementRequest { tenant, requests, shape, pinned: &[], hosts: &[], narrow, trees, adapters: None }
    }

    /// The expression that further trees have to evaluate, if the job has declared an order.
    fn expression_of(&self, first: &Placement) -> Option<Tree> {
        let order = self.order();
        (order != Order::Arrival).then(|| Tree::new(first.expression(), first.ranks_len(), order).ok()).flatten()
    }

    fn order(&self) -> Order {
        self.requests().first().map_or(Order::Arrival, |request| request.order)
    }

    /// Accept a draft only if it evaluates the expression, if there is one.
    fn draft_in_order(
        &self,
        drafted: Result<Placement, String>,
        expression: Option<&Tree>,
    ) -> Result<Placement, String> {
        let placement = drafted?;
        let Some(declared) = expression else { return Ok(placement) };
        if Tree::new(placement.expression(), placement.ranks_len(), self.order()).is_ok_and(|tree| tree == *declared) {
            return Ok(placement);
        }
        let devices: Vec<&str> = placement.nodes.iter().map(|node| node.device.name()).collect();
        Err(format!("a tree on {} would reduce in a different order than the first one", devices.join(", ")))
    }

    /// Why the job cannot have several trees.
    fn needs_one_tree(&self, first: &Placement) -> Option<String> {
        if !self.job.pinned.is_empty() {
            return Some("the job is pinned to the devices of one tree".into());
        }
        if first.zero_copy_ranks() > 0 {
            return Some("one tree, because ranks use zero-copy; join with `transport: udp` for several".into());
        }
        let is_host_device = |name: &str| crate::controller::resources::is_host_device(name);
        if first.nodes.iter().any(|node| is_host_device(node.device.name())) {
            return Some(
                "one tree, because ranks combine on their hosts first; join with `hierarchical: false`".into(),
            );
        }
        None
    }
}

/// The share of each of several equal trees.
const SHARE: u16 = 1;

impl PlannedTrees {
    fn of(first: TreeSketch) -> Self {
        let mut planned = Self::default();
        planned.push(first);
        planned
    }

    fn push(&mut self, tree: TreeSketch) {
        self.striping.shares.push(tree.share);
        self.devices.push(tree.devices);
        if !tree.adapters.is_empty() {
            self.entries.push(tree.adapters);
        }
    }

    /// What a rank is told of the trees.
    pub(super) fn striping_of(&self, fabric: Option<&Fabric>, rank: Rank) -> Striping {
        let grant = |fabric: &Fabric, tree: &Vec<HostId>| {
            let id = tree.get(rank.0 as usize)?;
            let adapter = fabric.host(*id);
            let index = fabric.server(adapter.server).adapters.iter().position(|other| other == id)?;
            Some(RailGrant { adapter: adapter.name.clone(), index: u16::try_from(index).ok()? })
        };
        let rails = fabric.and_then(|fabric| self.entries.iter().map(|tree| grant(fabric, tree)).collect());
        Striping { rails: rails.unwrap_or_default(), ..self.striping.clone() }
    }
}

/// Why there are fewer trees than requested.
fn describe_fewer((count, wanted): (usize, u8), limit: TreesLimit, rails: Option<&JobRails>) -> String {
    let why = format!("{count} of {wanted} trees: {}", describe_limit(limit));
    let rails = rails.and_then(|rails| rails.reason.as_ref());
    rails.map_or_else(|| why.clone(), |rails| format!("{why}; {rails}"))
}

fn describe_limit(limit: TreesLimit) -> String {
    let TreesLimit::Bottleneck(bottleneck) = limit else { return "these have the rate of the hosts' cables".into() };
    match bottleneck {
        Bottleneck::Cable { edges, .. } => format!("more are not faster on a cable that {edges} edges share"),
        Bottleneck::Port { children, .. } => format!("more are not faster at a device's port with {children} children"),
        Bottleneck::Window => "more are not faster by much, because the window limits each".into(),
    }
}
