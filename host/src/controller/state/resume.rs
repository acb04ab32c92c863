//! Resumes jobs of an earlier incarnation of the controller, from what their ranks report.
//!
//! ```text
//!   each rank  -- Resume(what it knows) --> controller     as soon as it has reconnected
//!   controller -- Resumed ----------------> all ranks      once all have come, or RESUME_LIMIT after the first
//!              -- RankLost ----------------> those that came, for each that has not
//! ```
//!
//! The ledger does not have the job's old tree, which keeps working without this controller. The controller treats the
//! job as one without a tree, and offers it a new one at a call that all ranks agree on. The old tree's lease then
//! expires.
//!
//! Invariants:
//! - Ranks belong to one job only if they know the same secret, which the earlier controller gave to its ranks alone. A
//!   client that knows only the job's name resumes a separate job, which does not interfere with the real one.
//! - If not all ranks come back, the missing ones count as lost from then on, and are refused if they come later. A job
//!   never resumes with half of its ranks or fewer, because the others may continue by themselves (PROTOCOL 8).
//! - A resumed job starts a view that no earlier controller has used.

use super::{Job, Member, State, agree, check_request};
use crate::controller::ControllerConfig;
use crate::controller::output::{ConnId, Outputs};
use crate::controller::proto::{ClientReply, JoinRefusal, ResumeRequest};
use crate::controller::queue::EntryStatus;
use crate::schedule::tree::Tree;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;
use sumac_hal::planted;
use sumac_hal::time::Instant;

/// How long a job's ranks may take to come back after the first one; they dial twice a second. Missing ranks then count
/// as lost, as if their connections had ended.
pub(super) const RESUME_LIMIT: Duration = Duration::from_secs(10);

/// Why a resumed job has no tree at first.
const EARLIER: &str = "its tree belongs to an earlier controller; this one reserves another";

/// The maximum view and survivor round that a resuming job may report; it counts up from there.
const COUNT_MAX: u32 = 1 << 30;

/// Identifies a resuming job: its name, and the fingerprint of the secret that only its ranks know.
pub(super) type Key = (String, [u8; 32]);

/// A job of which not all ranks have come back.
#[derive(Debug)]
pub(super) struct Resuming {
    pub(super) job: Job,
    until: Instant,
    /// Ranks that came back and left.
    left: BTreeSet<Rank>,
}

impl Resuming {
    fn came(&self) -> u32 {
        (self.job.members.len() + self.left.len()) as u32
    }

    fn refuse(&self, output: &mut Outputs, refusal: &JoinRefusal) {
        self.job.broadcast(output, &ClientReply::Refused(refusal.clone()));
    }
}

impl State {
    /// Add a rank to a resuming job, which continues with its last rank. Returns the place that [`State::depart`]
    /// expects.
    pub(super) fn resume(
        &mut self,
        config: &ControllerConfig,
        resumption: ResumeRequest,
        client: ConnId,
    ) -> Result<(String, Rank), JoinRefusal> {
        let ResumeRequest { request, devices, view, shrink_count, secret, expression } = resumption;
        check_request(&request, &devices)?;
        let (name, rank, world) = (request.job.clone(), request.rank, request.world);
        for (what, found) in [("view", view), ("round", shrink_count)] {
            if found > COUNT_MAX {
                return Err(JoinRefusal::CounterTooLarge { job: name, what: what.into(), found, max: COUNT_MAX });
            }
        }
        let nonsense = |reason| JoinRefusal::Expression { job: name.clone(), reason };
        let declared = (request.order != Order::Arrival).then(|| Tree::new(expression, world, request.order));
        let declared = declared.transpose().map_err(|error| nonsense(error.to_string()))?;
        if let Some(job) = self.jobs.get(&name) {
            return Err(match job {
                job if job.secret != secret => JoinRefusal::Running { job: name },
                job if job.members.contains_key(&rank) => JoinRefusal::RankTaken { rank, job: name },
                _ => JoinRefusal::TooLate { rank, job: name },
            });
        }
        let (key, until) = ((name.clone(), secret.fingerprint()), self.now + RESUME_LIMIT);
        if let Some(Resuming { job, left, .. }) = self.resuming.get(&key) {
            if job.members.contains_key(&rank) || left.contains(&rank) {
                return Err(JoinRefusal::RankTaken { rank, job: name });
            }
            if let Some(member) = job.members.values().next() {
                agree(&name, (&request, &devices), member)?;
            }
            if job.world != world || declared != job.expression {
                return Err(nonsense("it differs from the one that another rank reported".into()));
            }
        }
        if !self.resuming.contains_key(&key) {
            self.check_jobs(config)?;
        }
        let resuming = self.resuming.entry(key.clone()).or_insert_with(|| {
            let job = Job { expression: declared, ..Job::new(world, secret) };
            Resuming { job, until, left: BTreeSet::new() }
        });
        let job = &mut resuming.job;
        // Ranks may have missed the latest view; they learn it from `Resumed`.
        (job.view, job.shrink_count) = (job.view.max(view), job.shrink_count.max(shrink_count));
        job.members.insert(rank, Member { request: Arc::new(request), pinned: devices, client });
        if resuming.came() == world {
            self.finish_resume(&key);
        }
        Ok((name, rank))
    }

    /// Resume jobs whose ranks have had their time, and offer trees once devices have had theirs. Returns the next
    /// deadline.
    pub(super) fn expire_resuming(&mut self) -> Option<Instant> {
        let now = self.now;
        let is_due = |resuming: &Resuming| resuming.until <= now;
        let due: Vec<Key> =
            self.resuming.iter().filter(|(_, resuming)| is_due(resuming)).map(|(key, _)| key.clone()).collect();
        for key in &due {
            self.finish_resume(key);
        }
        let is_due = |job: &Job| job.offer_not_before.is_some_and(|at| at <= now);
        let due: Vec<String> = self.jobs.iter().filter(|(_, job)| is_due(job)).map(|(name, _)| name.clone()).collect();
        for name in &due {
            if let Some(job) = self.jobs.get_mut(name) {
                job.offer_not_before = None;
            }
            self.offer_soon(name);
        }
        let settling = self.jobs.values().filter_map(|job| job.offer_not_before);
        self.resuming.values().map(|resuming| resuming.until).chain(settling).min()
    }

    /// Resume a job with the ranks that have come back.
    fn finish_resume(&mut self, key: &Key) {
        let Some(resuming) = self.resuming.remove(key) else { return };
        let (name, world, came) = (&key.0, resuming.job.world, resuming.came());
        if 2 * came <= world && !planted!(self, MinorityResumed) {
            tracing::warn!(job = name, came, world, "cannot resume the job: too few of its ranks came back");
            let waited_s = RESUME_LIMIT.as_secs();
            let refusal = JoinRefusal::TooFewRanks { job: name.clone(), came, world, waited_s };
            return resuming.refuse(&mut self.output, &refusal);
        }
        // Other clients that used the job's name have a different secret.
        self.resuming.retain(|(other, _), resuming| {
            if other == name {
                resuming.refuse(&mut self.output, &JoinRefusal::Running { job: name.clone() });
            }
            other != name
        });
        let Resuming { mut job, left, until } = resuming;
        // The first rank came back that long before the others had to.
        let waited = RESUME_LIMIT.saturating_sub(until - self.now);
        let came_first = Instant::from_nanos(self.now.as_nanos().saturating_sub(waited.as_nanos() as u64));
        self.recoveries.begin(name, job.view, "its controller was restarted", came_first);
        self.recoveries.end_with_tree(name, &Err::<(), _>(EARLIER.to_owned()), self.now);
        if !planted!(self, ViewReused) {
            job.view += 1;
        }
        tracing::info!(job = name, view = job.view, ranks = job.members.len(), "job resumed");
        Self::expect_hosts(&mut job);
        job.placement = Some(Err(EARLIER.into()));
        job.broadcast(&mut self.output, &ClientReply::Resumed { view: job.view });
        let is_lost = |rank: &Rank| !job.members.contains_key(rank) && !left.contains(rank);
        for rank in (0..world).map(Rank).filter(is_lost) {
            tracing::warn!(job = name, %rank, "rank is lost: it did not come back");
            job.broadcast(&mut self.output, &ClientReply::RankLost(rank));
        }
        // Wait for devices to reconnect; otherwise the job would get a tree on the few that came first.
        job.offer_not_before = Some(self.devices_settled_at).filter(|at| *at > self.now);
        self.jobs.insert(name.clone(), job);
        self.offer_soon(name);
    }

    /// Offer a tree to a running job without one as soon as one is available.
    pub(super) fn offer_soon(&mut self, name: &str) {
        if !self.jobs.get(name).is_some_and(Job::can_take_offer) {
            return;
        }
        if self.queue.get(name).is_none_or(|entry| entry.status == EntryStatus::Waiting) {
            self.enqueue(name, None);
        } else if let Some(job) = self.jobs.get_mut(name) {
            // Its resources are already claimed.
            job.make_offer(&mut self.output);
        }
        self.serve_queue();
    }

    /// A rank of a resuming job disconnected. Unless it left, it may still come back.
    pub(super) fn depart_resuming(&mut self, (name, rank): (&str, Rank), client: ConnId, clean: bool) {
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
            self.finish_resume(&key);
        }
    }
}
