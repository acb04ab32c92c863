//! Jobs that an earlier life of the controller has begun: they are known again by what their ranks say.
//!
//! ```text
//!   each rank  -- Resume(what it knows) --> controller     as soon as it is reached
//!   controller -- Resumed ----------------> all ranks      when all have come, or RESUME_LIMIT after the first
//!              -- RankLost ----------------> those that came, for each that has not
//! ```
//!
//! The tree that such a job has is on no books, and goes on without this controller. To it the job has none, so that it
//! gets one as any other that runs without, at a call that all ranks agree on; then nobody renews the one from before.
//!
//! Invariants:
//! - Ranks are of one job only if they know the same secret, which the controller of before gave to its ranks alone. A
//!   stranger that knows a job's name comes back to a job of its own, which keeps nobody away from the other.
//! - No job is resumed by fewer than all its ranks unless the others count as lost from then on, and never by half of them
//!   or fewer: those that did not come may go on by themselves (PROTOCOL 8). One that comes later is refused.
//! - A resumed job is in a view that no controller before has spoken of.

use super::{Client, Job, Member, State, agree, check_request};
use crate::controller::ControllerConfig;
use crate::controller::proto::{ClientReply, JoinRefusal, Resumption};
use crate::controller::queue::Standing;
use crate::schedule::tree::Tree;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;

/// How long a job's ranks may take to come back, from the first one on; they dial twice a second. Who is not there by
/// then is dead to the others, as one whose connection has ended.
pub(super) const RESUME_LIMIT: Duration = Duration::from_secs(10);

/// The last view, and round of survivors, that a job from before may be at: it goes on counting from there.
const COUNT_MAX: u32 = 1 << 30;

/// A job of which not all ranks have come back: its name, and what only its ranks know.
pub(super) type Key = (String, u64);

/// What is known of it.
#[derive(Debug)]
pub(super) struct Resuming {
    pub(super) job: Job,
    until: Instant,
    /// Those that came back to leave.
    left: BTreeSet<Rank>,
}

impl Resuming {
    fn came(&self) -> u32 {
        (self.job.members.len() + self.left.len()) as u32
    }

    fn refuse(&self, refusal: &JoinRefusal) {
        self.job.tell(&ClientReply::Refused(refusal.clone()));
    }
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
        check_request(&request, &devices)?;
        let (name, rank, world) = (request.job.clone(), request.rank, request.world);
        for (what, found) in [("view", view), ("round", shrunk)] {
            if found > COUNT_MAX {
                return Err(JoinRefusal::Count { job: name, what: what.into(), found, max: COUNT_MAX });
            }
        }
        let nonsense = |reason| JoinRefusal::Expression { job: name.clone(), reason };
        let declared = (request.order != Order::Arrival).then(|| Tree::new(expression, world, request.order));
        let declared = declared.transpose().map_err(|error| nonsense(error.to_string()))?;
        if let Some(job) = self.jobs.get(&name) {
            return Err(match job {
                job if job.mesh_token != mesh_token => JoinRefusal::Running { job: name },
                job if job.members.contains_key(&rank) => JoinRefusal::Taken { rank, job: name },
                _ => JoinRefusal::TooLate { rank, job: name },
            });
        }
        let (key, until) = ((name.clone(), mesh_token), self.now + RESUME_LIMIT);
        if let Some(Resuming { job, left, .. }) = self.resuming.get(&key) {
            if job.members.contains_key(&rank) || left.contains(&rank) {
                return Err(JoinRefusal::Taken { rank, job: name });
            }
            if let Some(member) = job.members.values().next() {
                agree(&name, (&request, &devices), member)?;
            }
            if job.world != world || declared != job.expression {
                return Err(nonsense("it is another one than that of a rank that came before".into()));
            }
        }
        if !self.resuming.contains_key(&key) {
            self.check_jobs(config)?;
        }
        let resuming = self.resuming.entry(key.clone()).or_insert_with(|| {
            let job = Job { expression: declared, ..Job::new(world, mesh_token) };
            Resuming { job, until, left: BTreeSet::new() }
        });
        let job = &mut resuming.job;
        // One that has not heard the last of it is told by what follows.
        (job.view, job.shrunk) = (job.view.max(view), job.shrunk.max(shrunk));
        job.members.insert(rank, Member { request: Arc::new(request), pinned: devices, client: Arc::clone(client) });
        if resuming.came() == world {
            self.go_on(&key);
        }
        self.wake.notify_all();
        Ok((name, rank))
    }

    /// Go on with the jobs whose ranks, and then devices, had their time to come back. Returns when the next is due.
    pub(super) fn expire_resuming(&mut self) -> Option<Instant> {
        let now = self.now;
        let is_due = |resuming: &Resuming| resuming.until <= now;
        let due: Vec<Key> =
            self.resuming.iter().filter(|(_, resuming)| is_due(resuming)).map(|(key, _)| key.clone()).collect();
        for key in &due {
            self.go_on(key);
        }
        let is_due = |job: &Job| job.settles_at.is_some_and(|at| at <= now);
        let due: Vec<String> = self.jobs.iter().filter(|(_, job)| is_due(job)).map(|(name, _)| name.clone()).collect();
        for name in &due {
            if let Some(job) = self.jobs.get_mut(name) {
                job.settles_at = None;
            }
            self.offer_soon(name);
        }
        let settling = self.jobs.values().filter_map(|job| job.settles_at);
        self.resuming.values().map(|resuming| resuming.until).chain(settling).min()
    }

    /// The job runs, as far as this controller is concerned.
    fn go_on(&mut self, key: &Key) {
        let Some(resuming) = self.resuming.remove(key) else { return };
        let (name, world, came) = (&key.0, resuming.job.world, resuming.came());
        if 2 * came <= world {
            tracing::warn!(job = name, came, world, "job is not resumed: too few of its ranks have come back");
            let waited_s = RESUME_LIMIT.as_secs();
            return resuming.refuse(&JoinRefusal::Minority { job: name.clone(), came, world, waited_s });
        }
        // Whoever else came by that name has another job in mind.
        self.resuming.retain(|(other, _), resuming| {
            if other == name {
                resuming.refuse(&JoinRefusal::Running { job: name.clone() });
            }
            other != name
        });
        let Resuming { mut job, left, .. } = resuming;
        job.view += 1;
        tracing::info!(job = name, view = job.view, ranks = job.members.len(), "job is resumed");
        job.placement = Some(Err("its tree is from before this controller started, and not on its books".into()));
        job.tell(&ClientReply::Resumed { view: job.view });
        let is_lost = |rank: &Rank| !job.members.contains_key(rank) && !left.contains(rank);
        for rank in (0..world).map(Rank).filter(is_lost) {
            tracing::warn!(job = name, %rank, "rank is lost: it has not come back");
            job.tell(&ClientReply::RankLost(rank));
        }
        // A tree of the devices that came first would be all that it ever gets.
        job.settles_at = Some(self.devices_by).filter(|at| *at > self.now);
        self.jobs.insert(name.clone(), job);
        self.offer_soon(name);
    }

    /// A running job without a tree is offered one as soon as there is one for it.
    pub(super) fn offer_soon(&mut self, name: &str) {
        if !self.jobs.get(name).is_some_and(Job::can_move) {
            return;
        }
        if self.queue.get(name).is_none_or(|entry| entry.standing == Standing::Waits) {
            self.enter_queue(name, None);
        } else if let Some(job) = self.jobs.get_mut(name) {
            // What it takes is held for it.
            job.make_offer();
        }
        self.pump();
    }

    /// A rank of a job that has not gone on yet is gone again: if it died, it may still come back.
    pub(super) fn depart_early(&mut self, (name, rank): (&str, Rank), client: &Arc<Client>, clean: bool) {
        let mut of_name = self.resuming.iter_mut().filter(|((other, _), _)| other == name);
        let Some((key, resuming)) = of_name.find(|(_, resuming)| resuming.job.has(rank, client)) else { return };
        let key = key.clone();
        resuming.job.members.remove(&rank);
        if clean {
            resuming.left.insert(rank);
        }
        if resuming.job.members.is_empty() {
            self.resuming.remove(&key);
        } else if resuming.came() == resuming.job.world {
            self.go_on(&key);
        }
    }
}
