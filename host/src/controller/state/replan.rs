//! Replaces the lost tree of a running job at the request of its ranks (PROTOCOL 8).
//!
//! ```text
//!   a rank                      controller                      the other ranks
//!     | -- Suspect { view } --->    |  --- TreeLost { view } -------> |   to all, once per view
//!     | -- Replan { view } ---->    |  <----------- Replan { view } - |
//!     | <- Replanned { view + 1 } - |  --- Replanned { view + 1 } --> |   once all have asked
//! ```
//!
//! If a job has lost ranks, the survivors request the list of survivors and continue as a job of their own. The reply
//! comes once all survivors have asked, and is the same for all.
//!
//! A job moves only if all its ranks request it for the same view. Devices of the lost tree are excluded from the next
//! one, for a while, even if they appear to be alive (see `lost_devices`). The new group shares nothing with the lost
//! one, including number and epoch, so that a device that recovers late cannot be mistaken for a member.

use super::{Job, State};
use crate::controller::output::{ConnId, Outputs};
use crate::controller::proto::{AbortReason, ClientReply, RecoveryOutcome};
use std::time::Duration;
use sumac_hal::ids::Rank;
use sumac_hal::time::Instant;

/// How long replan requests stay valid after a rank has stopped waiting.
const LATE_LIMIT: Duration = Duration::from_secs(6);

/// The reason for having no tree after losing one.
pub(super) const LOST: &str = "its tree is lost";

impl State {
    /// A rank reports a lost tree: notify all ranks of its job, once per view. If its path is only too narrow, the
    /// tree's devices are not to blame.
    pub(in crate::controller) fn suspect(
        &mut self,
        (place, client): (Option<&(String, Rank)>, ConnId),
        view: u32,
        is_path_narrow: bool,
    ) {
        let Some((name, rank)) = place else { return };
        let Some(job) = self.jobs.get_mut(name).filter(|job| job.has(*rank, client)) else { return };
        if job.placement.is_none() || view != job.view || job.tree_suspected {
            return;
        }
        tracing::warn!(job = name, %rank, view, is_path_narrow, "tree is lost: reported by a rank");
        (job.tree_suspected, job.spares_devices) = (true, is_path_narrow);
        self.recoveries.begin(name, view, &format!("tree lost: reported by {rank}"), self.now);
        job.broadcast(&mut self.output, &ClientReply::TreeLost { view });
    }

    /// A rank aborts the job: notify all ranks, once.
    pub(in crate::controller) fn abort(
        &mut self,
        place: Option<&(String, Rank)>,
        client: ConnId,
        reason: &AbortReason,
    ) {
        let Some((name, rank)) = place else { return };
        let Some(job) = self.jobs.get_mut(name).filter(|job| job.has(*rank, client)) else { return };
        // Reject more stragglers than there are ranks.
        let is_possible = !matches!(reason, AbortReason::Stragglers { missing } if missing.len() > job.world as usize);
        if !is_possible || job.placement.is_none() || std::mem::replace(&mut job.is_aborted, true) {
            return;
        }
        tracing::warn!(job = name, %rank, ?reason, "job aborted by a rank");
        job.broadcast(&mut self.output, &ClientReply::Aborted(reason.clone()));
    }

    /// A rank requests a replacement for the tree of `view`. The last request replaces it.
    pub(in crate::controller) fn replan(&mut self, place: Option<&(String, Rank)>, client: ConnId, view: u32) {
        match self.record_replan_request(place, client, view) {
            Ok(Some(name)) => self.replace_tree(name),
            Ok(None) => {}
            Err(reason) => self.output.send(client, &ClientReply::ReplanRefused { view, reason }),
        }
    }

    /// Record a rank's replan request. Returns the job's name once all ranks have requested one.
    fn record_replan_request<'p>(
        &mut self,
        place: Option<&'p (String, Rank)>,
        client: ConnId,
        view: u32,
    ) -> Result<Option<&'p str>, String> {
        let (name, rank) = place.ok_or("no job was joined on this connection")?;
        let job = self.jobs.get_mut(name).filter(|job| job.has(*rank, client));
        let job = job.ok_or_else(|| format!("{rank} is no longer a member of job {name:?}"))?;
        if job.placement.is_none() {
            return Err(format!(
                "job {name:?} has not started: {} of its {} ranks have joined",
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
            // All ranks have asked; the replacement is in progress.
            return Ok(None);
        }
        job.replan_requests.insert(*rank);
        job.replan_abandoned.remove(rank);
        Ok((job.replan_requests.len() == job.world as usize).then_some(name.as_str()))
    }

    /// A rank stops waiting for a replacement. Its request stays valid for ranks that have yet to ask.
    pub(in crate::controller) fn abandon_replan(&mut self, place: Option<&(String, Rank)>, client: ConnId, view: u32) {
        let Some((name, rank)) = place else { return };
        let Some(job) = self.jobs.get_mut(name).filter(|job| job.has(*rank, client) && job.view == view) else {
            return;
        };
        if job.placing.is_none() && job.replan_requests.contains(rank) {
            job.replan_abandoned.insert(*rank);
            job.replan_abandoned_until = Some(self.now + LATE_LIMIT);
        }
    }

    /// Drop expired replan requests that no rank is waiting for: the ranks continue without a tree and will be offered
    /// the next one. Returns the next deadline.
    pub(super) fn expire_abandoned_replans(&mut self) -> Option<Instant> {
        let now = self.now;
        let due: Vec<String> = {
            let is_due = |job: &Job| job.replan_abandoned_until.is_some_and(|until| until <= now);
            self.jobs.iter().filter(|(_, job)| is_due(job)).map(|(name, _)| name.clone()).collect()
        };
        for name in &due {
            let Some(job) = self.jobs.get_mut(name) else { continue };
            job.replan_abandoned_until = None;
            if job.placing.is_some() || !job.replan_requests.is_subset(&job.replan_abandoned) {
                continue;
            }
            tracing::warn!(
                job = name,
                view = job.view,
                "not all ranks requested a replacement for the lost tree in time"
            );
            job.clear_replan_requests();
            (job.tree_suspected, job.is_moving) = (false, false);
            let reason = "not all ranks requested another one in time".to_owned();
            self.recoveries.end(name, RecoveryOutcome::NoTree { reason }, now);
            self.drop_lost_tree(name);
            self.offer_soon(name);
        }
        self.jobs.values().filter_map(|job| job.replan_abandoned_until).min()
    }

    /// Release a job's lost tree, and exclude its devices from the next one, unless one of them has disconnected.
    pub(super) fn drop_lost_tree(&mut self, name: &str) {
        // A view without a tree keeps the devices that were lost before it.
        let placed = self.jobs.get_mut(name).and_then(|job| job.placement.take_if(|placed| placed.is_ok()));
        if let Some(Ok(placement)) = placed {
            let devices = || placement.nodes.iter().map(|node| &node.device);
            let is_whole = devices().all(|device| self.is_connected(device));
            let Some(job) = self.jobs.get_mut(name) else { return };
            job.placement = Some(Err(LOST.into()));
            // If one of them has disconnected, that is why, and the others may be used again.
            match is_whole && !std::mem::take(&mut job.spares_devices) {
                true => job.lost_devices.exclude(devices().cloned().collect(), self.now),
                false => job.lost_devices.clear(),
            }
            self.release(&placement);
        }
    }

    /// A rank requests the list of survivors.
    pub(in crate::controller) fn survivors(&mut self, place: Option<&(String, Rank)>, client: ConnId) {
        let job = place.and_then(|(name, rank)| {
            let job = self.jobs.get_mut(name).filter(|job| job.has(*rank, client) && job.placement.is_some())?;
            job.survivor_requests.insert(*rank);
            Some(job)
        });
        match job {
            Some(job) => {
                if let (Some(ranks), Some((name, _))) = (job.try_report_survivors(&mut self.output), place) {
                    self.recoveries.end(name, RecoveryOutcome::Survivors { ranks }, self.now);
                }
            }
            None => {
                let ranks = Err("no running job was joined on this connection".to_owned());
                self.output.send(client, &ClientReply::Survivors { round: 0, ranks });
            }
        }
    }
}

impl Job {
    /// Drop all replan requests.
    pub(super) fn clear_replan_requests(&mut self) {
        self.replan_requests.clear();
        self.replan_abandoned.clear();
        self.replan_abandoned_until = None;
    }

    /// Send the list of survivors once all of them have asked. Returns how many they are.
    pub(super) fn try_report_survivors(&mut self, output: &mut Outputs) -> Option<u32> {
        if self.survivor_requests.is_empty() || self.survivor_requests.len() < self.members.len() {
            return None;
        }
        self.survivor_requests.clear();
        let round = self.shrink_count;
        self.shrink_count += 1;
        let ranks: Vec<Rank> = self.members.keys().copied().collect();
        let count = ranks.len() as u32;
        self.broadcast(output, &ClientReply::Survivors { round, ranks: Ok(ranks) });
        Some(count)
    }

    /// Refuse pending replan requests because a rank is gone.
    pub(super) fn refuse_replans(&mut self, output: &mut Outputs, name: &str, gone: Rank) {
        let view = self.view;
        let replan_requests = std::mem::take(&mut self.replan_requests);
        self.clear_replan_requests();
        for rank in replan_requests {
            if let Some(member) = self.members.get(&rank) {
                output.send(member.client, &ClientReply::ReplanRefused { view, reason: is_gone(name, gone) });
            }
        }
    }
}

fn is_gone(job: &str, rank: Rank) -> String {
    format!("{rank} of job {job:?} is gone; a tree needs all ranks")
}
