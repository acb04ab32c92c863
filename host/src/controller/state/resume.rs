//! Jobs that an earlier life of the controller has begun: they are known again by what their ranks say.
//!
//! ```text
//!   each rank  -- Resume(what it knows) --> controller     as soon as it is reached
//!   controller -- Resumed ----------------> all ranks      when all have come, or RESUME_LIMIT after the first
//!              -- RankLost ----------------> those that came, for each that has not
//! ```
//!
//! The tree that such a job has is on no books, and goes on without this controller. To it the job has none, so that it
//! gets one as any other that runs without, at a call that all ranks agree on.
//!
//! Invariant: no job is resumed by fewer than all its ranks unless the others count as lost from then on; one that comes
//! later is refused.

use super::{Client, Job, Member, State, agree};
use crate::coll::tree::Tree;
use crate::controller::ControllerConfig;
use crate::controller::proto::{ClientReply, JoinRefusal, Resumption, check_tenant};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;

/// How long a job's ranks may take to come back, from the first one on; they dial twice a second. Who is not there by
/// then is dead to the others, as one whose connection has ended.
pub(super) const RESUME_LIMIT: Duration = Duration::from_secs(10);

/// A job of which not all ranks have come back.
#[derive(Debug)]
pub(super) struct Resuming {
    until: Instant,
    /// Those that came back to leave.
    left: BTreeSet<Rank>,
}

impl State {
    /// Take in a rank of a job from before; it goes on if this was the last one missing. Returns what [`State::depart`]
    /// wants.
    pub(super) fn resume(
        &mut self,
        config: &ControllerConfig,
        resumption: Resumption,
        client: &Arc<Client>,
    ) -> Result<(String, Rank), JoinRefusal> {
        let Resumption { request, devices, view, shrunk, mesh_token, expression } = resumption;
        check_tenant(&request.terms.tenant)?;
        let (name, rank, world) = (request.job.clone(), request.rank, request.world);
        if rank.0 >= world {
            return Err(JoinRefusal::Rank { rank, world });
        }
        let declared = (request.order != Order::Arrival).then(|| Tree::new(expression, world, request.order));
        let declared = declared
            .transpose()
            .map_err(|error| JoinRefusal::Expression { job: name.clone(), reason: error.to_string() })?;
        if let Some(job) = self.jobs.get(&name) {
            if job.resuming.is_none() {
                return Err(JoinRefusal::Running { job: name });
            }
            if job.members.contains_key(&rank) {
                return Err(JoinRefusal::Taken { rank, job: name });
            }
            if let Some(member) = job.members.values().next() {
                agree(&name, (&request, &devices), member)?;
                job.agrees(&name, mesh_token, declared.as_ref())?;
            }
        }
        let until = self.now + RESUME_LIMIT;
        let job = self.jobs.entry(name.clone()).or_insert_with(|| {
            let resuming = Some(Resuming { until, left: BTreeSet::new() });
            Job { resuming, expression: declared, ..Job::new(world, mesh_token) }
        });
        // One that has not heard the last of it is told by the next offer.
        (job.view, job.shrunk) = (job.view.max(view), job.shrunk.max(shrunk));
        job.members.insert(rank, Member { request, pinned: devices, client: Arc::clone(client) });
        if job.members.len() == world as usize {
            self.go_on(config, &name);
        }
        self.wake.notify_all();
        Ok((name, rank))
    }

    /// Go on with the jobs whose ranks had their time to come back. Returns when the next is due.
    pub(super) fn expire_resuming(&mut self, config: &ControllerConfig) -> Option<Instant> {
        let now = self.now;
        let until = |job: &Job| job.resuming.as_ref().map(|resuming| resuming.until);
        let due = self.jobs.iter().filter(|(_, job)| until(job).is_some_and(|until| until <= now));
        let due: Vec<String> = due.map(|(name, _)| name.clone()).collect();
        for name in &due {
            self.go_on(config, name);
        }
        self.jobs.values().filter_map(until).min()
    }

    /// The job runs, as far as this controller is concerned.
    fn go_on(&mut self, config: &ControllerConfig, name: &str) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        let Some(Resuming { left, .. }) = job.resuming.take() else { return };
        tracing::info!(job = name, view = job.view, ranks = job.members.len(), "job is resumed");
        job.placement = Some(Err("its tree is from before this controller started, and not on its books".into()));
        job.tell(&ClientReply::Resumed);
        let is_lost = |rank: &Rank| !job.members.contains_key(rank) && !left.contains(rank);
        for rank in (0..job.world).map(Rank).filter(is_lost) {
            tracing::warn!(job = name, %rank, "rank is lost: it has not come back");
            job.tell(&ClientReply::RankLost(rank));
        }
        if job.can_move() {
            self.enter_queue(config, name);
            if let Some(entry) = self.queue.get_mut(name) {
                entry.tried = None;
            }
        }
        self.pump(config);
    }

    /// A rank of a job that has not gone on yet is gone again: if it died, it may still come back.
    pub(super) fn depart_early(&mut self, (name, rank): (&str, Rank), clean: bool) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        if job.members.is_empty() {
            self.jobs.remove(name);
        } else if let Some(resuming) = job.resuming.as_mut().filter(|_| clean) {
            resuming.left.insert(rank);
        }
    }
}

impl Job {
    /// Check that a rank means the job that the others are of.
    fn agrees(&self, name: &str, mesh_token: u64, declared: Option<&Tree>) -> Result<(), JoinRefusal> {
        let disagree = |what: &str| JoinRefusal::Disagree {
            job: name.to_owned(),
            what: what.to_owned(),
            first: "one".into(),
            other: "another".into(),
            rank: self.members.keys().next().copied().unwrap_or_default(),
        };
        if mesh_token != self.mesh_token {
            return Err(disagree("the token of its connections"));
        }
        if declared != self.expression.as_ref() {
            return Err(disagree("what the declared order means"));
        }
        Ok(())
    }
}
