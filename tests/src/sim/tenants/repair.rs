//! How the ranks of a job repair a lost tree together: reports, missing chunks, a vote on the next tree.

use super::TenantViolation as Violation;
use super::job::{Job, JobMessage, Member, Phase};
use super::world::{Alarm, World};
use crate::sim::coverage::Mark;
use crate::sim::memory::{OpMemory, chunks};
use crate::sim::reduce::{reduce, tree};
use std::collections::BTreeSet;
use sumac::harness::{Decision, Origin, RankReport};
use sumac_hal::ids::Rank;

impl World<'_, '_> {
    /// The tree is lost: freeze, and send the report to all.
    pub(super) fn freeze(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        if self.is_busy(at) || !self.member(at).has_tree {
            return Ok(());
        }
        self.suspect(at);
        let member = self.member(at);
        let epoch = member.epoch;
        let Some(endpoint) = &mut member.endpoint else { return Ok(()) };
        endpoint.freeze();
        let report = RankReport::of(endpoint);
        member.sent_report = Some(report.clone());
        member.resumes = std::mem::replace(&mut member.phase, Phase::Frozen);
        self.report.repairs += 1;
        self.report.seen.note(Mark::FrozenByLoss);
        self.broadcast(at, &JobMessage::Lost(epoch));
        self.broadcast(at, &JobMessage::RankReport(epoch, report));
        self.collect(at)
    }

    /// With all reports: compute the plan, and send this rank's part.
    pub(super) fn decide(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let job = &mut self.jobs[at.0];
        let member = &mut job.ranks[at.1];
        let epoch = member.epoch;
        let reports: Vec<RankReport> = member.peers.reports[&epoch].values().cloned().collect();
        let Some(endpoint) = &member.endpoint else { return Ok(()) };
        let failed = |why: String| Violation { oracle: "unrepairable", what: format!("job {}: {why}", at.0) };
        let decision = Decision::of(&reports, endpoint).map_err(failed)?;
        if *job.decisions.entry(epoch).or_insert_with(|| decision.clone()) != decision {
            return Err(Violation { oracle: "disagreement", what: format!("job {} epoch {epoch}", at.0) });
        }
        for chunk in &decision.chunks {
            let bytes = chunk.give(endpoint, Rank(at.1 as u32), &mut member.memory);
            let piece = job.pieces.entry((epoch, chunk.seq)).or_default();
            match chunk.origin {
                Origin::Held(holder) if holder.0 as usize == at.1 => piece.result = Some(bytes),
                Origin::Held(_) => {}
                Origin::Recompute => {
                    piece.contributions.insert(at.1, bytes);
                    if piece.contributions.len() == reports.len() {
                        let options = job.options.as_ref().expect("it has begun");
                        let given: Vec<Vec<u8>> = piece.contributions.values().cloned().collect();
                        let tree = tree(&options.trees[0], options.ranks, options.order(0));
                        piece.result = Some(reduce(&tree, &chunk.desc, &given));
                    }
                }
            }
        }
        member.missing = decision.chunks.iter().map(|chunk| chunk.seq).collect();
        member.decision = Some(decision);
        member.phase = Phase::Collecting;
        self.broadcast(at, &JobMessage::Given);
        Ok(())
    }

    /// Store received chunks.
    pub(super) fn land(&mut self, at: (usize, usize)) {
        let Job { ranks, pieces, .. } = &mut self.jobs[at.0];
        let Member { endpoint, memory, missing, decision, epoch, .. } = &mut ranks[at.1];
        let (Some(endpoint), Some(decision)) = (endpoint, decision) else { return };
        for chunk in &decision.chunks {
            let result = pieces.get(&(*epoch, chunk.seq)).and_then(|piece| piece.result.as_ref());
            if let Some(result) = result.filter(|_| missing.remove(&chunk.seq)) {
                chunk.land(endpoint, result, memory);
            }
        }
    }

    /// Continue with the result of the vote.
    pub(super) fn commit(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let member = self.member(at);
        let votes: BTreeSet<u64> = member.peers.votes[&member.epoch].values().copied().collect();
        let all_alike = votes.len() == 1 && !votes.contains(&0);
        let found = member.found.take();
        if let Some(decision) = member.decision.take() {
            let endpoint = member.endpoint.as_ref().expect("of the lost tree");
            if Some(RankReport::of(endpoint)) != member.sent_report {
                return Err(Violation { oracle: "not fenced", what: format!("job {} rank {}", at.0, at.1) });
            }
            let below = member.memory.first + decision.completed_below(endpoint).0 as usize;
            while self.member(at).done < below {
                self.report.seen.note(Mark::OpRepaired);
                self.finish_op(at)?;
            }
        } else if found.is_some() && !all_alike {
            self.decline(at, "a rank is not in it");
        }
        let moves = self.member(at).moves;
        self.report.seen.note(match (moves, all_alike) {
            (true, true) => Mark::MovedBack,
            (true, false) => Mark::OfferDeclined,
            (false, true) => Mark::CommitTree,
            (false, false) => Mark::CommitSchedules,
        });
        let now = self.now;
        let member = self.member(at);
        member.epoch += 1;
        (member.sent_report, member.endpoint) = (None, None);
        member.missing.clear();
        // As `sumac::comm` does, with or without a tree.
        member.calls.enter_view(member.view);
        let (moved, resumes) = (std::mem::take(&mut member.moves), member.resumes.clone());
        let offered = if moved { member.calls.moved() } else { None };
        let begins = moved || member.called > member.done;
        member.phase = if resumes == Phase::InTree { Phase::Computing(now) } else { resumes };
        self.pause(at, offered);
        self.install(at, found.filter(|_| all_alike));
        if begins {
            self.call(at)?;
        }
        self.schedule(now, Alarm::Rank(at.0, at.1));
        self.catch_up(at)
    }

    /// Check the buffers of a failed operation: each chunk is entirely old or new.
    pub(super) fn check_torn(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let op = self.member(at).done;
        if self.jobs[at.0].options.is_none() || op >= self.plan.jobs[at.0].ops.len() {
            return Ok(());
        }
        let after = self.after(at, op);
        let job = &self.jobs[at.0];
        let options = job.options.as_ref().expect("checked above");
        let desc = &options.groups[0].ops[op];
        let before = OpMemory::before(options, 0, 0, at.1, op);
        let cut = chunks(desc, options.ranks, options.chunk_len_bytes);
        match job.ranks[at.1].memory.ops.get(op).and_then(|found| found.torn_chunk(&before, &after, desc, &cut)) {
            Some(chunk) => {
                let what = format!("job {} rank {} operation {op} chunk {chunk}", at.0, at.1);
                Err(Violation { oracle: "torn chunk", what })
            }
            None => Ok(()),
        }
    }
}
