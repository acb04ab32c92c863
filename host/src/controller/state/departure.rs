//! Ranks that leave or are lost, and the end of jobs.

use super::{Job, State};
use crate::controller::output::ConnId;
use crate::controller::proto::{ClientReply, JoinRefusal, RecoveryOutcome};
use std::collections::BTreeMap;
use sumac_hal::ids::Rank;

impl State {
    /// A rank has left or, unless `clean`, is lost. The job ends with its last rank.
    pub(in crate::controller) fn depart(&mut self, (name, rank): (&str, Rank), client: ConnId, clean: bool) {
        if self.jobs.get(name).is_some_and(|job| job.has(rank, client)) {
            self.depart_from(name, &[rank], clean);
        } else {
            self.depart_resuming((name, rank), client, clean);
        }
    }

    /// Ranks were lost together: notify only the survivors. If the lost ones may be with another controller, a job that
    /// keeps half of its ranks or fewer is given up instead: the others may resume it there.
    pub(in crate::controller) fn depart_all(&mut self, gone: Vec<(ConnId, (String, Rank))>, may_be_elsewhere: bool) {
        let mut by_job: BTreeMap<String, Vec<Rank>> = BTreeMap::new();
        for (client, (name, rank)) in gone {
            if self.jobs.get(&name).is_some_and(|job| job.has(rank, client)) {
                by_job.entry(name).or_default().push(rank);
            } else {
                self.depart_resuming((&name, rank), client, false);
            }
        }
        for (name, ranks) in &by_job {
            let is_minority = |job: &Job| 2 * (job.members.len() - ranks.len()) <= job.world as usize;
            let is_begun = |job: &Job| job.placement.is_some() && is_minority(job);
            if may_be_elsewhere && self.jobs.get(name).is_some_and(is_begun) {
                self.hand_over(name);
            } else {
                self.depart_from(name, ranks, false);
            }
        }
    }

    /// Disconnect the ranks of a job, as if this controller had ended. Its group stays until its lease expires.
    fn hand_over(&mut self, name: &str) {
        let Some(mut job) = self.jobs.remove(name) else { return };
        self.release_hosts(&mut job);
        tracing::warn!(
            job = name,
            ranks = job.members.len(),
            "giving the job up: half of its ranks or more may be with the other controller, which does not answer"
        );
        job.members.values().for_each(|member| self.output.close(member.client));
        self.recoveries.end(name, RecoveryOutcome::JobEnded, self.now);
        if let Some(Ok(placement)) = job.placement {
            self.ledger.free(placement.group);
        }
        if let Some((group, _)) = job.offer_claim {
            self.ledger.free(group);
        }
        self.leave_queue(name);
        self.serve_queue();
    }

    fn depart_from(&mut self, name: &str, ranks: &[Rank], clean: bool) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        for rank in ranks {
            job.members.remove(rank);
            job.survivor_requests.remove(rank);
        }
        job.release_leaders(&mut self.output);
        // A tree needs all ranks, so a pending one is dropped.
        job.placing = None;
        let held = job.offer_claim.take();
        let is_begun = job.placement.is_some();
        let Some(first) = ranks.first() else { return };
        if is_begun {
            if !clean {
                // One line for all ranks that are lost together.
                let others = ranks.len() - 1;
                if std::mem::replace(&mut job.has_lost_ranks, true) || job.is_aborted {
                    tracing::info!(job = name, rank = %first, others, "rank disconnected after its job failed");
                } else {
                    tracing::warn!(job = name, rank = %first, others, "rank is lost");
                    let cause = match others {
                        0 => format!("{first} is lost"),
                        _ => format!("{} ranks are lost", ranks.len()),
                    };
                    self.recoveries.begin(name, job.view, &cause, self.now);
                }
                job.broadcast_all(&mut self.output, ranks.iter().map(|rank| ClientReply::RankLost(*rank)));
            }
            job.refuse_replans(&mut self.output, name, *first);
            job.withdraw_offer(&mut self.output);
            if let Some(ranks) = job.try_report_survivors(&mut self.output) {
                self.recoveries.end(name, RecoveryOutcome::Survivors { ranks }, self.now);
            }
        } else {
            // Do not let the other ranks wait for one that may not come back.
            let refusal = JoinRefusal::RankLost { rank: *first, job: name.to_owned() };
            job.broadcast(&mut self.output, &ClientReply::Refused(refusal));
        }
        let is_over = !is_begun || job.members.is_empty();
        if is_over && let Some(mut job) = self.jobs.remove(name) {
            tracing::info!(job = name, "job ends");
            self.recoveries.end(name, RecoveryOutcome::JobEnded, self.now);
            if let Some(Ok(placement)) = job.placement.take() {
                self.release(&placement);
            }
            self.release_hosts(&mut job);
        }
        if let Some((group, _)) = held {
            self.ledger.free(group);
        }
        self.leave_queue(name);
        self.serve_queue();
    }
}
