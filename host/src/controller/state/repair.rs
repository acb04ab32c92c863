//! Another tree for a running job whose tree is lost, as its ranks ask for it (PROTOCOL 8).
//!
//! ```text
//!   a rank                      controller                      the other ranks
//!     | -- Suspect { view } --->    |  --- Repair { view } ---------> |   to all, once a view
//!     | -- Replan { view } ---->    |  <----------- Replan { view } - |
//!     | <- Replanned { view + 1 } - |  --- Replanned { view + 1 } --> |   when all have asked
//! ```
//!
//! Ranks whose job has lost ranks ask who is left, and go on as a job of their own: the answer comes when all who are
//! left have asked, and is the same for all.
//!
//! A job is moved when all ranks of its world want that, of the same view, or not at all. Devices that the lost tree
//! was on are not asked for the next one, however alive they seem; one that has restarted and dialled anew is another.
//! The new group shares nothing with the lost one, number and epoch included: a device that wakes up late can't be
//! mistaken for a member.

use super::{Client, Job, State};
use crate::controller::proto::{ClientReply, Over};
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;

/// How long ranks may come to ask for another tree after one that has asked waits no more.
const LATE_LIMIT: Duration = Duration::from_secs(6);

/// Why a job has no tree that had one.
pub(super) const LOST: &str = "its tree is lost";

impl State {
    /// A rank says that its tree of a view is lost: tell all ranks of its job, unless they know.
    pub(in crate::controller) fn suspect(&mut self, place: Option<&(String, Rank)>, client: &Arc<Client>, view: u32) {
        let Some((name, rank)) = place else { return };
        let Some(job) = self.jobs.get_mut(name).filter(|job| job.has(*rank, client)) else { return };
        if job.placement.is_none() || view != job.view || job.suspected {
            return;
        }
        tracing::warn!(job = name, %rank, view, "tree is lost, as a rank says");
        job.suspected = true;
        job.tell(&ClientReply::Repair { view });
    }

    /// The job is over, as a rank says: tell all ranks, once.
    pub(in crate::controller) fn over(&mut self, place: Option<&(String, Rank)>, client: &Arc<Client>, over: &Over) {
        let Some((name, rank)) = place else { return };
        let Some(job) = self.jobs.get_mut(name).filter(|job| job.has(*rank, client)) else { return };
        // More than there are ranks can't be late.
        let is_possible = !matches!(over, Over::Stragglers { missing } if missing.len() > job.world as usize);
        if !is_possible || job.placement.is_none() || std::mem::replace(&mut job.is_over, true) {
            return;
        }
        tracing::warn!(job = name, %rank, ?over, "job is over, as a rank says");
        job.tell(&ClientReply::Over(over.clone()));
    }

    /// A rank wants another tree than that of a view; the last one to want it moves the job.
    pub(in crate::controller) fn replan(&mut self, place: Option<&(String, Rank)>, client: &Arc<Client>, view: u32) {
        match self.want(place, client, view) {
            Ok(Some(name)) => self.move_on(name),
            Ok(None) => {}
            Err(reason) => client.send(&ClientReply::NotReplanned { view, reason }),
        }
    }

    /// Note that a rank wants another tree. Returns the job if all its ranks do, or why it can't have one.
    fn want<'p>(
        &mut self,
        place: Option<&'p (String, Rank)>,
        client: &Arc<Client>,
        view: u32,
    ) -> Result<Option<&'p str>, String> {
        let (name, rank) = place.ok_or("no job was joined on this connection")?;
        let job = self.jobs.get_mut(name).filter(|job| job.has(*rank, client));
        let job = job.ok_or_else(|| format!("{rank} is no longer a member of job {name:?}"))?;
        if job.placement.is_none() {
            return Err(format!(
                "job {name:?} has not begun: {} of its {} ranks are there",
                job.members.len(),
                job.world
            ));
        }
        if view != job.view {
            return Err(format!("job {name:?} is at view {}", job.view));
        }
        if let Some(gone) = (0..job.world).map(Rank).find(|rank| !job.members.contains_key(rank)) {
            return Err(is_gone(name, gone));
        }
        if job.placing.is_some() {
            // All have asked, and are about to be told.
            return Ok(None);
        }
        job.waiting.insert(*rank);
        job.forgone.remove(rank);
        Ok((job.waiting.len() == job.world as usize).then_some(name.as_str()))
    }

    /// A rank waits no more for another tree than that of a view. Its wish stands, for others that have yet to ask.
    pub(in crate::controller) fn forgo(&mut self, place: Option<&(String, Rank)>, client: &Arc<Client>, view: u32) {
        let Some((name, rank)) = place else { return };
        let Some(job) = self.jobs.get_mut(name).filter(|job| job.has(*rank, client) && job.view == view) else {
            return;
        };
        if job.placing.is_none() && job.waiting.contains(rank) {
            job.forgone.insert(*rank);
            job.forgone_until = Some(self.now + LATE_LIMIT);
            self.wake.notify_all();
        }
    }

    /// Forget wishes for another tree that nobody waits for any more: the ranks have gone on without, and hear of the next
    /// one by an offer. Returns when the next is due.
    pub(super) fn expire_forgone(&mut self) -> Option<Instant> {
        let now = self.now;
        let due: Vec<String> = {
            let is_due = |job: &Job| job.forgone_until.is_some_and(|until| until <= now);
            self.jobs.iter().filter(|(_, job)| is_due(job)).map(|(name, _)| name.clone()).collect()
        };
        for name in &due {
            let Some(job) = self.jobs.get_mut(name) else { continue };
            job.forgone_until = None;
            if job.placing.is_some() || !job.waiting.is_subset(&job.forgone) {
                continue;
            }
            tracing::warn!(job = name, view = job.view, "not all its ranks have asked for another tree");
            job.forget_wishes();
            (job.suspected, job.is_moving) = (false, false);
            self.give_up_tree(name);
            self.offer_soon(name);
        }
        self.jobs.values().filter_map(|job| job.forgone_until).min()
    }

    /// Its ranks have lost a job's tree.
    pub(super) fn give_up_tree(&mut self, name: &str) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        // A view without a tree has lost none: what was lost before it still is.
        if let Some(Ok(placement)) = job.placement.take_if(|placed| placed.is_ok()) {
            job.placement = Some(Err(LOST.into()));
            job.lost = placement.nodes.iter().map(|node| node.device.clone()).collect();
            self.release(&placement);
        }
    }

    /// A rank wants to know who is left of its job.
    pub(in crate::controller) fn survivors(&mut self, place: Option<&(String, Rank)>, client: &Arc<Client>) {
        let job = place.and_then(|(name, rank)| {
            let job = self.jobs.get_mut(name).filter(|job| job.has(*rank, client) && job.placement.is_some())?;
            job.shrinking.insert(*rank);
            Some(job)
        });
        match job {
            Some(job) => job.tell_survivors(),
            None => {
                let ranks = Err("no job that has begun was joined on this connection".to_owned());
                client.send(&ClientReply::Survivors { round: 0, ranks });
            }
        }
    }
}

impl Job {
    /// Nobody waits for another tree than this view's.
    pub(super) fn forget_wishes(&mut self) {
        self.waiting.clear();
        self.forgone.clear();
        self.forgone_until = None;
    }

    /// Tell who is left who is left, if all of them have asked.
    pub(super) fn tell_survivors(&mut self) {
        if self.shrinking.is_empty() || self.shrinking.len() < self.members.len() {
            return;
        }
        self.shrinking.clear();
        let round = self.shrunk;
        self.shrunk += 1;
        let ranks: Vec<Rank> = self.members.keys().copied().collect();
        self.tell(&ClientReply::Survivors { round, ranks: Ok(ranks) });
    }

    /// A rank is gone: those that wait for another tree get none.
    pub(super) fn refuse_waiting(&mut self, name: &str, gone: Rank) {
        let view = self.view;
        let waiting = std::mem::take(&mut self.waiting);
        self.forget_wishes();
        for rank in waiting {
            if let Some(member) = self.members.get(&rank) {
                member.client.send(&ClientReply::NotReplanned { view, reason: is_gone(name, gone) });
            }
        }
    }
}

fn is_gone(job: &str, rank: Rank) -> String {
    format!("{rank} of job {job:?} is gone, and a tree is for all its ranks")
}
