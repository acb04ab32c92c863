//! How ranks come back to the next controller, as `sumac::controller::Session` does: each dials until a controller has
//! resumed its job, or refuses it.

use super::TenantViolation as Violation;
use super::job::Phase;
use super::world::{Alarm, World};
use crate::sim::controller::Peer;
use crate::sim::coverage::Mark;
use std::time::Duration;
use sumac::controller::proto::{ClientReply, ClientRequest, JoinRefusal, ResumeRequest};
use sumac_hal::ctrl::Hello;

impl World<'_, '_> {
    /// A rank has lost the controller: it dials the next one, unless it does not hear of it.
    pub(super) fn await_controller(&mut self, at: (usize, usize)) {
        let member = &self.jobs[at.0].ranks[at.1];
        let has_begun = !matches!(member.phase, Phase::Disconnected | Phase::Joining(_) | Phase::Ended(_));
        if !has_begun || member.takeover.is_refused {
            return;
        }
        let delay = match self.plan.takeover {
            Takeover::All => Duration::from_micros(self.draw.below(500_000)),
            Takeover::Some if self.draw.chance(600) => Duration::from_micros(self.draw.below(500_000)),
            Takeover::Some => {
                self.jobs[at.0].is_disturbed = true;
                self.report.seen.note(Mark::TakeoverMissed);
                // After the limit of the controller, or not at all.
                if self.draw.chance(500) {
                    return;
                }
                Duration::from_secs(12)
            }
        };
        self.schedule(self.now + delay, Alarm::Redial(at.0, at.1));
    }

    /// A rank dials the next controller.
    pub(super) fn redial(&mut self, at: (usize, usize)) {
        let now = self.now;
        let member = &self.jobs[at.0].ranks[at.1];
        if matches!(member.phase, Phase::Ended(_)) || member.conn.is_some() || member.takeover.is_refused {
            return;
        }
        let Some(conn) = self.controller.as_mut().and_then(|controller| controller.dial(&Hello::Client, now)) else {
            return self.schedule(now + REDIAL_INTERVAL, Alarm::Redial(at.0, at.1));
        };
        self.conns.insert(conn, Peer::Rank(at.0, at.1));
        let request = self.request(at);
        let incarnation = self.incarnation;
        let job = &mut self.jobs[at.0];
        job.came_back.entry(incarnation).or_default().insert(at.1);
        let member = &mut job.ranks[at.1];
        (member.conn, member.takeover.is_pending, member.takeover.asked) = (Some(conn), true, incarnation);
        let resumption = ResumeRequest {
            request,
            devices: Vec::new(),
            view: member.takeover.view,
            shrink_count: 0,
            secret: member.takeover.secret.clone().expect("only ranks that have joined come back"),
            expression: member.takeover.expression.clone(),
        };
        self.ask_controller(at, ClientRequest::Resume(Box::new(resumption)));
    }

    /// Handle the reply to `Resume`.
    pub(super) fn on_takeover(&mut self, at: (usize, usize), reply: ClientReply) -> Result<(), Violation> {
        let now = self.now;
        match reply {
            ClientReply::Resumed { view } => {
                self.check_takeover(at, view)?;
                self.report.seen.note(Mark::TakenOver);
                let member = &mut self.jobs[at.0].ranks[at.1];
                (member.takeover.is_pending, member.takeover.taken) = (false, 0);
                member.takeover.view = member.takeover.view.max(view);
                member.view = member.view.max(view);
                self.advance(at)
            }
            ClientReply::Refused(refusal) => {
                let takeover = &mut self.jobs[at.0].ranks[at.1].takeover;
                takeover.is_pending = false;
                if matches!(refusal, JoinRefusal::RankTaken { .. }) && takeover.taken < TAKEN_RETRIES_MAX {
                    takeover.taken += 1;
                    self.schedule(now + REDIAL_INTERVAL, Alarm::Redial(at.0, at.1));
                } else {
                    takeover.is_refused = true;
                    self.report.seen.note(Mark::TakeoverRefused);
                }
                if let Some(conn) = self.jobs[at.0].ranks[at.1].conn.take() {
                    self.close(conn);
                }
                self.advance(at)
            }
            _ => Ok(()),
        }
    }

    /// A controller resumes a job with more than half of its ranks, in a view that no controller has used.
    fn check_takeover(&self, at: (usize, usize), view: u32) -> Result<(), Violation> {
        let job = &self.jobs[at.0];
        let found = |oracle, what| Err(Violation { oracle, what });
        // The reply may be one of a controller that has ended since.
        let asked = job.ranks[at.1].takeover.asked;
        let came = job.came_back.get(&asked).map_or(0, std::collections::BTreeSet::len);
        if 2 * came <= job.ranks.len() {
            return found("minority", format!("job {} resumes with {came} of {} ranks", at.0, job.ranks.len()));
        }
        let takeover = &job.ranks[at.1].takeover;
        if view <= takeover.view {
            return found("view reused", format!("job {} resumes in view {view} after {}", at.0, takeover.view));
        }
        Ok(())
    }
}

/// Which ranks come back to a restarted controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takeover {
    /// All, within half a second.
    All,
    /// Some; others too late, or never.
    Some,
}

/// The pause between attempts to reconnect.
const REDIAL_INTERVAL: Duration = Duration::from_millis(500);

/// How often a rank retries whose place is still taken.
const TAKEN_RETRIES_MAX: u32 = 20;
