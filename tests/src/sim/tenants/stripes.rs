//! Jobs on several trees. Each further tree belongs to a stripe, a job of the same ranks with a connection, a group and
//! recoveries of its own. A rank joins the stripes that its membership names, and calls nothing before that. It dies in
//! all of them.
//!
//! Production code plans the trees, counts them in quotas, and recovers each. Models: a rank that starts its stripes,
//! and how operations are divided: the job and its stripes have operations of their own.
//!
//! Oracles, besides those of all jobs: a communicator counts once in its tenant's quota, with all its trees and
//! whichever of them are left; without a fabric its trees share no device; a stripe evaluates the expression that its
//! job declared.

use super::TenantViolation as Violation;
use super::draw::{JobPlan, Tenancy};
use super::job::{End, Phase};
use super::watch::{index_in, violation};
use super::world::{Alarm, World};
use crate::oracle::weight;
use crate::sim::coverage::Mark;
use crate::sim::options::{Draw, draw_ops};
use std::collections::BTreeSet;
use sumac::controller::proto::{ClientRequest, Membership, StatusReport, StripeOf, stripe_name};
use sumac_hal::ctrl::Order;

impl Tenancy {
    /// Draw the parameters of a seed, for jobs on several trees.
    pub fn draw_stripes(seed: u64) -> Self {
        let mut plan = Self { has_stripes: true, ..Self::draw(seed) };
        let mut draw = Draw::new(weight(&[seed, 0x7374_7269]));
        for job in 0..plan.jobs.len() {
            let main = &mut plan.jobs[job];
            if !(2..=10).contains(&main.world) || !draw.chance(700) {
                continue;
            }
            main.trees = 2 + draw.below(3) as u8;
            // Of these jobs, no two are alike.
            main.kind = KINDS_FROM + job;
            for index in 1..main.trees {
                let main = plan.jobs[job].clone();
                let rounds = 1 + draw.below(main.ops.len().clamp(1, 16) as u64);
                let ops: Vec<_> =
                    (0..rounds).flat_map(|_| draw_ops(&mut draw, main.world, plan.chunk_len_bytes, 2)).collect();
                let by_ranks = ops.iter().map(|_| [false; 2]).collect();
                let kind = KINDS_FROM + plan.jobs.len();
                let stripe = Some((job, index));
                plan.jobs.push(JobPlan { trees: 1, stripe, wait_ms: 0, ops, by_ranks, refuses: false, kind, ..main });
            }
        }
        plan
    }

    /// The name of a job.
    pub(super) fn name_of(&self, job: usize) -> String {
        match self.jobs[job].stripe {
            None => format!("job{job}"),
            Some((main, index)) => stripe_name(&self.name_of(main), index),
        }
    }

    /// The job of a name.
    pub(super) fn job_named(&self, name: &str) -> usize {
        let stripe = || (0..self.jobs.len()).find(|&job| self.jobs[job].stripe.is_some() && self.name_of(job) == name);
        if self.has_stripes
            && let Some(stripe) = stripe()
        {
            stripe
        } else {
            index_in(name, "job")
        }
    }

    /// The stripe that a job is.
    pub(super) fn stripe_of(&self, job: usize) -> Option<StripeOf> {
        self.jobs[job].stripe.map(|(main, index)| StripeOf { job: self.name_of(main), index })
    }

    /// The stripes of a job.
    fn stripes_of(&self, job: usize) -> impl Iterator<Item = (usize, u8)> + use<> {
        let of_job = |(index, plan): (usize, &JobPlan)| {
            plan.stripe.filter(|(main, _)| *main == job).map(|(_, nth)| (index, nth))
        };
        self.jobs.iter().enumerate().filter_map(of_job).collect::<Vec<_>>().into_iter()
    }
}

impl World<'_, '_> {
    /// Whether a rank of a stripe has not begun to join it.
    pub(super) fn waits_for_job(&self, (job, rank): (usize, usize)) -> bool {
        self.plan.jobs[job].stripe.is_some() && !self.jobs[job].released.contains(&rank)
    }

    /// Whether a rank still joins a stripe: until then it calls nothing.
    pub(super) fn joins_stripes(&self, (job, rank): (usize, usize)) -> bool {
        let is_joining = |(stripe, _): (usize, u8)| {
            matches!(self.jobs[stripe].ranks[rank].phase, Phase::Disconnected | Phase::Joining(_))
        };
        self.plan.has_stripes && self.plan.stripes_of(job).any(is_joining)
    }

    /// A rank has joined its job: it joins the stripes that are planned.
    pub(super) fn join_stripes(&mut self, at: (usize, usize), membership: &Membership) -> Result<(), Violation> {
        let trees = membership.striping.shares.len();
        for (stripe, index) in self.plan.stripes_of(at.0) {
            if usize::from(index) < trees {
                self.jobs[stripe].released.insert(at.1);
                self.schedule(self.now, Alarm::Rank(stripe, at.1));
            } else {
                self.skip_stripe((stripe, at.1))?;
            }
        }
        Ok(())
    }

    /// A rank leaves a stripe that has no tree. Returns false if the job is no stripe.
    pub(super) fn leaves_stripe(&mut self, at: (usize, usize)) -> Result<bool, Violation> {
        let is_stripe = self.plan.jobs[at.0].stripe.is_some();
        if is_stripe {
            self.jobs[at.0].is_disturbed = true;
            self.ask_controller(at, ClientRequest::Leave);
            self.end(at, End::NotJoined)?;
        }
        Ok(is_stripe)
    }

    /// A rank has joined a stripe. Returns a violation if that evaluates another expression than the job.
    pub(super) fn check_stripe(&mut self, at: (usize, usize), membership: &Membership) -> Result<(), Violation> {
        let Some((main, _)) = self.plan.jobs[at.0].stripe else { return Ok(()) };
        self.report.seen.note(Mark::StripeJoined);
        self.schedule(self.now, Alarm::Rank(main, at.1));
        let expected = &self.jobs[main].ranks[at.1].takeover.expression;
        if self.plan.jobs[main].order == Order::Arrival || membership.expression == *expected {
            return Ok(());
        }
        let what = format!("job {} evaluates {:?} and its job {expected:?}", at.0, membership.expression);
        Err(violation("expression of a stripe", what))
    }

    /// A rank of a job has ended. If it died, it did so in all stripes; others do not begin.
    pub(super) fn end_stripes(&mut self, at: (usize, usize), end: End) -> Result<(), Violation> {
        if let Some((main, _)) = self.plan.jobs[at.0].stripe {
            self.schedule(self.now, Alarm::Rank(main, at.1));
            return Ok(());
        }
        for (stripe, _) in self.plan.stripes_of(at.0) {
            self.skip_stripe((stripe, at.1))?;
            if end == End::Killed {
                self.kill_rank((stripe, at.1))?;
            }
        }
        Ok(())
    }

    /// A rank that has not begun to join a stripe never does.
    fn skip_stripe(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        if !self.waits_for_job(at) || matches!(self.jobs[at.0].ranks[at.1].phase, Phase::Ended(_)) {
            return Ok(());
        }
        self.jobs[at.0].is_disturbed = true;
        self.end(at, End::NotJoined)
    }

    /// Whether what disturbed a stripe's job may have kept its ranks from joining.
    pub(super) fn is_job_disturbed(&self, job: usize) -> bool {
        let main = self.plan.jobs[job].stripe.map(|(main, _)| &self.jobs[main]);
        main.is_some_and(|main| main.is_disturbed || main.has_lost_controller)
    }

    /// Without a fabric, the trees of a communicator share no device.
    pub(super) fn check_trees(&mut self, report: &StatusReport) -> Result<(), Violation> {
        for status in &report.jobs {
            let own = status.tree.as_ref().and_then(|tree| tree.as_ref().ok());
            let further = status.stripes.iter().filter_map(|stripe| stripe.tree.as_ref().ok());
            let mut seen = BTreeSet::new();
            let devices = own.into_iter().chain(further).flat_map(|tree| &tree.devices);
            let twice = devices.into_iter().find(|device| !seen.insert(*device));
            if status.trees() > 1 {
                self.report.seen.note(Mark::SeveralTrees);
            }
            if let Some(device) = twice.filter(|_| self.plan.fabric.is_none()) {
                return Err(violation("device in two trees", format!("{device} of {status:?}")));
            }
        }
        Ok(())
    }
}

/// Other kinds of jobs are below.
const KINDS_FROM: usize = 1 << 20;
