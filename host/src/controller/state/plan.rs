//! A plan: a snapshot of all that it depends on, and how a tree, or the reason for having none, is found with it.

use super::job::Job;
use super::placement::{NoTree, Wait};
use super::planning::PlaceJob;
use super::stripes::SiblingTrees;
use crate::controller::ControllerConfig;
use crate::controller::admit::facts::job_shape;
use crate::controller::admit::{Devices, GroupIds, HostBlock, NarrowPaths, Placement, PlacementRequest, draft};
use crate::controller::device::Device;
use crate::controller::proto::JoinRequest;
use crate::controller::queue::{BlockedOn, Candidate, Reservations};
use crate::controller::resources::{ResourceLedger, Shortage};
use crate::plan::{Child, KeptIndex};
use crate::schedule::Shape;
use crate::schedule::tree::Tree;
use crate::secret::JobSecret;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;

/// The parts of a job that a plan depends on.
#[derive(Debug)]
pub(super) struct JobSnapshot {
    /// Distinguishes the job from earlier and later ones of the same name.
    pub(super) secret: JobSecret,
    world: u32,
    /// How its ranks lie; `None`: nobody has found out yet.
    pub(super) shape: Option<Shape>,
    requests: Vec<Arc<JoinRequest>>,
    pub(super) pinned: Vec<String>,
    lost_devices: Vec<Arc<Device>>,
    declined_devices: Vec<Arc<Device>>,
    pub(super) expression: Option<Tree>,
    /// The hosts with a device of the job's own.
    pub(super) hosts: Vec<HostBlock>,
    pub(super) narrow: NarrowPaths,
    /// The job's other trees.
    pub(super) siblings: SiblingTrees,
    /// The devices of the communicator's other rails, if the job is a rail.
    pub(super) of_other_rails: BTreeSet<String>,
}

/// A plan to be made, with a snapshot of all that it depends on.
#[derive(Debug)]
pub struct Plan {
    pub(super) goal: Goal,
    pub(super) job: JobSnapshot,
    pub(super) devices: Devices,
    pub(super) devices_version: u64,
    pub(super) index: KeptIndex,
    pub(super) ledger: ResourceLedger,
    pub(super) reservations: Reservations,
    /// Devices in crash-loop backoff.
    pub(super) backed_off: BTreeSet<String>,
    /// Devices that do not respond.
    pub(super) unresponsive: BTreeSet<String>,
    /// Devices that owe the counters of an earlier report.
    pub(super) overdue: BTreeSet<String>,
    /// Devices that are about to restart, and why.
    pub(super) draining: BTreeMap<String, String>,
    pub(super) ids: GroupIds,
}

/// What a plan is for.
#[derive(Debug)]
pub(super) enum Goal {
    PlaceJob { task: PlaceJob, was_held: bool },
    Enqueue { name: String, tried: Option<u64> },
    Serve(Candidate),
}

/// The result of a plan.
pub struct PlanResult {
    pub(super) plan: Plan,
    pub(super) found: Result<Placement, NoTree>,
}

impl Plan {
    /// Make the plan. Call it with the machine unlocked: it takes long on large fabrics.
    pub fn run(mut self, config: &ControllerConfig) -> PlanResult {
        #[cfg(test)]
        config.gate.pass();
        let requests = self.job.requests.iter().map(Arc::as_ref);
        self.job.shape = self.job.shape.or_else(|| Some(job_shape(requests, (config, &self.index))));
        let mut found = match &self.goal {
            Goal::Serve(_) => self.draft_now(config).map_err(NoTree::permanent),
            _ => self.draft_or_explain(config),
        };
        if let (Goal::PlaceJob { .. }, Err(none)) = (&self.goal, &mut found) {
            none.wait_running = self.wait_running(config, none.wait.clone());
        }
        let is_for_job = matches!(self.goal, Goal::PlaceJob { .. } | Goal::Serve(_));
        let found = if is_for_job { found.map(|first| self.plan_trees(config, first)) } else { found };
        PlanResult { plan: self, found }
    }

    /// What the job could wait for while it runs without a tree: a declared order is then that of one node with all
    /// ranks, which few trees preserve.
    fn wait_running(&mut self, config: &ControllerConfig, wait: Option<Wait>) -> Option<Wait> {
        let order = self.job.requests.first().map_or(Order::Arrival, |request| request.order);
        if wait.is_none() || self.job.expression.is_some() || order == Order::Arrival {
            return wait;
        }
        let flat = vec![(0..self.job.world).map(|rank| Child::Rank(Rank(rank))).collect()];
        self.job.expression = Tree::new(flat, self.job.world, order).ok();
        match self.draft_or_explain(config) {
            Ok(placement) => Some((BlockedOn::Devices, placement.minimum_needs())),
            Err(none) => none.wait,
        }
    }

    pub(super) fn requests(&self) -> Vec<&JoinRequest> {
        self.job.requests.iter().map(Arc::as_ref).collect()
    }

    pub(super) fn tenant(&self) -> &str {
        self.job.tenant()
    }

    /// How the ranks of the job lie.
    pub(super) fn shape(&self) -> Shape {
        self.job.shape.unwrap_or_default()
    }

    /// Draft a tree for the job, or find out why there is none and what it could wait for.
    fn draft_or_explain(&self, config: &ControllerConfig) -> Result<Placement, NoTree> {
        let requests = self.requests();
        let (tenant, ledger, job) = (self.tenant(), &self.ledger, &self.job);
        let request = PlacementRequest {
            tenant,
            requests: &requests,
            shape: self.shape(),
            pinned: &job.pinned,
            hosts: &job.hosts,
            narrow: &job.narrow,
            trees: job.siblings.trees,
            adapters: None,
        };
        let (devices, left_out) = self.eligible_devices().map_err(NoTree::permanent)?;
        let add = |why: String| if left_out.is_empty() { why } else { format!("{why}; {left_out}") };
        let drafted = |devices: &Devices, ledger: &ResourceLedger| self.draft_on(config, devices, ledger, request);
        let tenant_reservation = self.reservations.tenants.get(tenant);
        let why = match self.draft_now(config) {
            Ok(placement) => return Ok(placement),
            Err(why) => why,
        };
        // Could it have a tree if it were alone?
        let Ok(ideal) = drafted(&devices, &ledger.without_claims()) else {
            // Not even then: because of its quota, or for the reason in `why`.
            let short = drafted(&devices, &ledger.without_claims().without_quotas())
                .map(|ideal| ledger.without_claims().check(tenant, &ideal.minimum_needs()));
            return Err(NoTree::permanent(match short {
                Ok(Err(short)) => short.to_string(),
                _ => add(why),
            }));
        };
        let least = ideal.minimum_needs();
        let reserved_for =
            least.iter().find_map(|(device, _)| self.reservations.devices.get(device)).or(tenant_reservation);
        let (blocked_on, why) = match (reserved_for, ledger.check(tenant, &least)) {
            (_, Err(short)) if short.is_quota() => (BlockedOn::Quota, short.to_string()),
            (Some(other), _) => {
                let blocked_on = if tenant_reservation.is_some() { BlockedOn::Quota } else { BlockedOn::Devices };
                (blocked_on, format!("its resources are reserved for job {other:?}, which was skipped too often"))
            }
            (None, Err(short @ Shortage::Device { what: "groups", .. })) => (BlockedOn::Devices, short.to_string()),
            (None, _) => (BlockedOn::Devices, why),
        };
        Err(NoTree::temporary(add(why), Some((blocked_on, least))))
    }

    /// Draft a tree on these devices that evaluates the declared expression: one contribution a host or, if that cannot
    /// be, one a rank. The reason is that of the latter.
    fn draft_on(
        &self,
        config: &ControllerConfig,
        devices: &Devices,
        ledger: &ResourceLedger,
        request: PlacementRequest<'_>,
    ) -> Result<Placement, String> {
        let drafted = |hosts| {
            self.draft_exactly_on(config, devices, ledger, PlacementRequest { hosts, ..request })
                .and_then(|placement| self.job.check_order(placement))
        };
        match drafted(request.hosts) {
            Err(why) if !request.hosts.is_empty() => {
                tracing::debug!(why, "no tree with host devices");
                drafted(&[])
            }
            found => found,
        }
    }

    /// Draft a tree for the job with what is available now.
    fn draft_now(&self, config: &ControllerConfig) -> Result<Placement, String> {
        let requests = self.requests();
        let (tenant, job) = (self.tenant(), &self.job);
        let request = PlacementRequest {
            tenant,
            requests: &requests,
            shape: self.shape(),
            pinned: &job.pinned,
            hosts: &job.hosts,
            narrow: &job.narrow,
            trees: job.siblings.trees,
            adapters: None,
        };
        if let Some(other) = self.reservations.tenants.get(request.tenant) {
            return Err(format!("resources are reserved for job {other:?} of the same tenant"));
        }
        let (mut devices, _) = self.eligible_devices()?;
        devices.retain(|_, device| !self.reservations.devices.contains_key(&device.key()));
        let drafted = |devices: &Devices| self.draft_on(config, devices, &self.ledger, request);
        // Prefer devices that no other rail has. On a fabric, the plan follows the cables.
        let mut own = devices.clone();
        own.retain(|name, _| !job.of_other_rails.contains(name));
        if config.fabric.is_none()
            && own.len() < devices.len()
            && let Ok(placement) = drafted(&own)
        {
            return Ok(placement);
        }
        // Prefer devices that are not overdue with a response: each of the others may cost the job a timeout.
        let mut prompt = devices.clone();
        prompt.retain(|_, device| !self.overdue.contains(device.name()));
        if prompt.len() < devices.len()
            && let Ok(placement) = drafted(&prompt)
        {
            return Ok(placement);
        }
        drafted(&devices)
    }

    /// The devices that the job may be placed on, and a clause that names the excluded ones. Fails with the reason if a
    /// pinned device is excluded.
    pub(super) fn eligible_devices(&self) -> Result<(Devices, String), String> {
        let pinned = &self.job.pinned;
        let mut left_out = String::new();
        let mut leave_out = |devices: Devices, why: [&str; 2], is_out: &dyn Fn(&Arc<Device>) -> bool| {
            let (out, rest): (Devices, Devices) = devices.into_iter().partition(|(_, device)| is_out(device));
            if let Some(name) = pinned.iter().find(|name| out.contains_key(*name)) {
                return Err(format!("device {name} is pinned, but {}", why[1]));
            }
            if !out.is_empty() {
                let names: Vec<&str> = out.keys().map(String::as_str).collect();
                let between = if left_out.is_empty() { "" } else { "; " };
                left_out.push_str(&format!("{between}excluded devices ({}): {}", why[0], names.join(", ")));
            }
            Ok(rest)
        };
        let is_among =
            |known: &[Arc<Device>], device: &Arc<Device>| known.iter().any(|other| Arc::ptr_eq(other, device));
        let lost = ["tree lost", "its tree was lost; it is used again after a while, or once it has restarted"];
        let devices = leave_out(self.devices.clone(), lost, &|device| is_among(&self.job.lost_devices, device))?;
        let devices = leave_out(devices, ["not responding", "it does not respond"], &|device| {
            self.unresponsive.contains(device.name())
        })?;
        let (out, devices): (Devices, Devices) =
            devices.into_iter().partition(|(name, _)| self.draining.contains_key(name));
        let restarting: Vec<&str> = out.keys().filter_map(|name| self.draining.get(name)).map(String::as_str).collect();
        if pinned.iter().any(|name| out.contains_key(name)) || (devices.is_empty() && !out.is_empty()) {
            return Err(restarting.join("; "));
        }
        let crash_loop = ["crash loop", "it is in a crash loop: its connections keep ending soon after they begin"];
        let devices = leave_out(devices, crash_loop, &|device| self.backed_off.contains(device.name()))?;
        let declined = ["attach failed", "a rank could not attach to it"];
        let devices = leave_out(devices, declined, &|device| is_among(&self.job.declined_devices, device))?;
        let siblings = &self.job.siblings;
        let other = ["of other trees of the job", "it is not planned for this tree of the job"];
        let devices = leave_out(devices, other, &|device| !siblings.allow(device.name()))?;
        let clauses: Vec<&str> =
            restarting.into_iter().chain([left_out.as_str()]).filter(|clause| !clause.is_empty()).collect();
        let left_out = clauses.join("; ");
        Ok((devices, left_out))
    }

    /// Draft a tree on these devices, one contribution a rank, whatever the job has declared.
    pub(super) fn draft_exactly_on(
        &self,
        config: &ControllerConfig,
        devices: &Devices,
        ledger: &ResourceLedger,
        request: PlacementRequest<'_>,
    ) -> Result<Placement, String> {
        draft((config, &self.index), devices, ledger, request, self.ids)
    }
}

impl JobSnapshot {
    pub(super) fn of(job: &Job) -> Self {
        Self {
            secret: job.secret.clone(),
            world: job.world,
            shape: job.shape,
            requests: job.members.values().map(|member| Arc::clone(&member.request)).collect(),
            pinned: job.first().map_or_else(Vec::new, |member| member.pinned.clone()),
            lost_devices: job.lost_devices.devices().to_vec(),
            declined_devices: job.declined_devices.clone(),
            expression: job.expression.clone(),
            hosts: job.host_blocks(),
            narrow: job.narrow.clone(),
            siblings: SiblingTrees::default(),
            of_other_rails: BTreeSet::new(),
        }
    }

    pub(super) fn tenant(&self) -> &str {
        self.requests.first().map_or("", |request| &request.terms.tenant)
    }

    /// The job whose communicator it serves.
    pub(super) fn communicator(&self) -> &str {
        self.requests.first().map_or("", |request| request.communicator())
    }

    /// Accept a placement only if it evaluates the job's declared expression.
    fn check_order(&self, placement: Placement) -> Result<Placement, String> {
        let Some(declared) = &self.expression else { return Ok(placement) };
        let order = self.requests.first().map_or(Order::Arrival, |request| request.order);
        if Tree::new(placement.expression(), self.world, order).is_ok_and(|tree| tree == *declared) {
            return Ok(placement);
        }
        let devices: Vec<&str> = placement.nodes.iter().map(|node| node.device.name()).collect();
        Err(format!("a tree on {} would reduce in a different order than the declared one", devices.join(", ")))
    }
}
