//! Jobs on several trees: how many trees a job gets, and which devices are whose.
//!
//! Every tree but a job's own belongs to a stripe, which is a job too ([`StripeOf`]). The trees are planned together
//! when the job starts, each on devices of its own, and the plan is part of the job's membership. A stripe that joins
//! is then placed on the devices that were planned for it, or on others that no tree of the job uses if these have
//! been lost.
//!
//! Invariants:
//! - trees of one job share no device;
//! - a stripe evaluates the expression that its job has declared, so the bits do not depend on the number of trees;
//! - stripes exist for a running job of the same tenant only, and at most as many as were planned. So a tenant's quota
//!   of groups, which does not count them, bounds them too.

use super::State;
use super::job::Job;
use super::plan::Plan;
use crate::controller::ControllerConfig;
use crate::controller::admit::{Placement, PlacementRequest};
use crate::controller::limits::TREES_MAX;
use crate::controller::proto::{JoinRefusal, JoinRequest, StripeOf, StripeStatus, Striping, stripe_name};
use crate::schedule::tree::Tree;
use std::collections::BTreeSet;
use sumac_hal::ctrl::Order;

/// The trees that were planned for a job when it started.
#[derive(Debug, Clone, Default)]
pub(in crate::controller) struct PlannedTrees {
    pub(super) striping: Striping,
    /// The devices of each tree, by name.
    devices: Vec<BTreeSet<String>>,
}

/// What the plan of a tree has to know of the job's other trees.
#[derive(Debug, Clone, Default)]
pub(super) struct SiblingTrees {
    /// How many trees to plan, if the job is about to start.
    wanted: u8,
    /// The devices that were planned for this tree; empty if it may use any.
    planned: BTreeSet<String>,
    /// The devices of the other trees.
    pub(super) taken: BTreeSet<String>,
}

impl SiblingTrees {
    /// Whether the tree may use a device.
    pub(super) fn allow(&self, device: &str) -> bool {
        !self.taken.contains(device) && (self.planned.is_empty() || self.planned.contains(device))
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
        if request.job != stripe_name(&stripe.job, stripe.index) {
            return Err(refuse(format!("tree {} of job {:?} has another name", stripe.index, stripe.job)));
        }
        let Some(job) = self.jobs.get(&stripe.job).filter(|job| job.placement.is_some() && !job.members.is_empty())
        else {
            return Err(refuse(format!("job {:?} is not running", stripe.job)));
        };
        let trees = job.trees.striping.shares.len();
        if stripe.index == 0 || usize::from(stripe.index) >= trees {
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
            let wanted = job.first().map_or(0, |member| member.request.terms.trees).min(TREES_MAX);
            return SiblingTrees { wanted, ..SiblingTrees::default() };
        }
        let mut taken = BTreeSet::new();
        for index in (0..TREES_MAX).filter(|&index| index != own) {
            let sibling = if index == 0 { main.to_owned() } else { stripe_name(main, index) };
            let Some(sibling) = self.jobs.get(&sibling) else { continue };
            let placed = sibling.placement.as_ref().and_then(|placed| placed.as_ref().ok());
            let groups = placed.map(|placed| placed.group).into_iter().chain(sibling.placing);
            let groups = groups.chain(sibling.offer_claim.map(|(group, _)| group));
            taken.extend(groups.flat_map(|group| self.ledger.devices_of(group)).map(|device| device.name.clone()));
        }
        // Later views may use any device that the other trees leave.
        let first = self.jobs.get(main).filter(|_| is_new);
        let planned = first.and_then(|job| job.trees.devices.get(usize::from(own)));
        SiblingTrees { wanted: 0, planned: planned.cloned().unwrap_or_default(), taken }
    }
}

impl State {
    /// Whether a job is a further tree of one that is known.
    pub(super) fn has_job_of_stripe(&self, job: &Job) -> bool {
        let Some(stripe) = job.stripe_of() else { return false };
        self.jobs.contains_key(&stripe.job) || self.resuming.keys().any(|(name, _)| *name == stripe.job)
    }

    /// Report the further trees of a job that have joined.
    pub(super) fn report_stripes(&self, name: &str) -> Vec<StripeStatus> {
        let shares = self.jobs.get(name).map(|job| &job.trees.striping.shares);
        let of = |index: u8| {
            let job = self.jobs.get(&stripe_name(name, index))?;
            let placed = job.stripe_of().filter(|stripe| stripe.job == name).and(job.placement.as_ref())?;
            let share = shares.and_then(|shares| shares.get(usize::from(index))).copied().unwrap_or(SHARE);
            Some(StripeStatus { index, share, view: job.view, tree: self.report_tree(job, placed) })
        };
        (1..TREES_MAX).filter_map(of).collect()
    }
}

impl Plan {
    /// Plan the further trees of a job that is about to start with `first`: each on devices that the others leave.
    pub(super) fn plan_trees(&self, config: &ControllerConfig, first: &Placement) -> PlannedTrees {
        let wanted = self.job.siblings.wanted;
        let single = |reason: Option<String>| PlannedTrees {
            striping: Striping { shares: Vec::new(), reason },
            devices: Vec::new(),
        };
        if wanted < 2 {
            return single(None);
        }
        if let Some(why) = self.needs_one_tree(first) {
            return single(Some(why));
        }
        let requests = self.requests();
        let order = requests.first().map_or(Order::Arrival, |request| request.order);
        let expression = match order {
            Order::Arrival => None,
            _ => Tree::new(first.expression(), requests.len() as u32, order).ok(),
        };
        let ledger = self.ledger.without_group_quota(self.tenant());
        let (mut devices, reason) = match self.eligible_devices() {
            Ok((devices, _)) => (devices, None),
            Err(why) => return single(Some(why)),
        };
        let names = |placement: &Placement| -> BTreeSet<String> {
            placement.nodes.iter().map(|node| node.device.name().to_owned()).collect()
        };
        let mut planned =
            PlannedTrees { striping: Striping { shares: vec![SHARE], reason }, devices: vec![names(first)] };
        let request = PlacementRequest {
            tenant: self.tenant(),
            requests: &requests,
            pinned: &[],
            hosts: &[],
            narrow: &self.job.narrow,
        };
        while planned.devices.len() < usize::from(wanted) {
            if let Some(used) = planned.devices.last() {
                devices.retain(|name, device| !used.contains(name) && !used.contains(device.name()));
            }
            devices.retain(|_, device| !self.reservations.devices.contains_key(&device.key()));
            let drafted = self.draft_exactly_on(config, &devices, &ledger, request);
            match drafted.and_then(|placement| check_expression(expression.as_ref(), order, placement)) {
                Ok(placement) => {
                    planned.striping.shares.push(SHARE);
                    planned.devices.push(names(&placement));
                }
                Err(why) => {
                    let trees = planned.devices.len();
                    planned.striping.reason = Some(format!("{trees} of {wanted} trees: {why}"));
                    break;
                }
            }
        }
        planned
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

/// Accept a placement only if it evaluates the expression, if there is one.
fn check_expression(expression: Option<&Tree>, order: Order, placement: Placement) -> Result<Placement, String> {
    let Some(declared) = expression else { return Ok(placement) };
    let ranks = placement.ranks_len();
    if Tree::new(placement.expression(), ranks, order).is_ok_and(|tree| tree == *declared) {
        return Ok(placement);
    }
    let devices: Vec<&str> = placement.nodes.iter().map(|node| node.device.name()).collect();
    Err(format!("a tree on {} would reduce in a different order than the first one", devices.join(", ")))
}
