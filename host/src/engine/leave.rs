//! Leaving a job gracefully: not before every rank has every result for which recovery might need this one (PROTOCOL
//! 5).
//!
//! Results reach ranks one by one. If a device dies before it has delivered a result to all of them, the ranks that
//! have the result, or their contribution to it, recover it for the others; a rank that has left cannot. So a rank
//! leaves when all others have the results of everything that it has posted. The ranks report this among themselves
//! ([`super::membership`]), outside of calls too: the tree's own report (`stable`) also reaches ranks one by one, and a
//! rank that lacks it depends on those that have it.
//!
//! Invariants:
//! - a rank completes everything that it has started before it leaves, because other ranks wait for it;
//! - a leaving rank starts no view change, but takes part in one; other ranks start one if they lack a result;
//! - a rank waits for others no longer than its time limit, and reports a timeout.

use super::core::Core;
use super::data_path::{Deadline, Stop};
use super::departure::Departure;
use super::error::Error;
use super::membership::MembershipChannel;
use crate::deadline::after;
use crate::recovery::Watermark;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Core {
    /// Leave the job. The controller frees the group when all ranks have left.
    pub(crate) fn leave(&mut self, limit: Duration) -> Departure {
        let began = Instant::now();
        self.serve_submissions();
        let mut departure = self.drain(limit);
        if let Some(rail) = &self.rail {
            let left = rail.leave(limit.saturating_sub(began.elapsed()));
            departure = if departure == Departure::Clean { left } else { departure };
        }
        self.data.report_operations();
        if departure == Departure::Clean && !self.data.host.flush(after(began, limit)) {
            departure = Departure::Unconfirmed { waited: began.elapsed() };
        }
        match &departure {
            Departure::Clean => self.members.channel.iter().for_each(MembershipChannel::announce_departure),
            Departure::Unconfirmed { waited } => {
                let (job, rank) = (&self.data.config.job, self.data.config.rank);
                crate::log::warn!(
                    job,
                    rank,
                    ?waited,
                    "leaving, although other ranks may still need results from this one"
                );
            }
            Departure::Failed(_) => {}
        }
        self.members.channel.iter().for_each(MembershipChannel::end);
        match self.members.session.take() {
            // Other ranks of this host may still need its device, which ends with this communicator.
            Some(session) if self.members.host_device.is_some() => {
                let left = limit.saturating_sub(began.elapsed());
                session.leave_and_wait(Instant::now() + left.min(HOST_RANKS_TIMEOUT));
            }
            Some(session) => session.leave(),
            None => {}
        }
        if let Some(controller) = self.members.embedded.take().and_then(Arc::into_inner) {
            controller.wait_until_idle(limit.saturating_sub(began.elapsed()));
        }
        self.data.ended.get_or_insert(Error::Left);
        departure
    }

    fn drain(&mut self, limit: Duration) -> Departure {
        let began = Instant::now();
        let deadline = (after(began, limit), limit);
        if let Err(error) = self.check_usable() {
            return if self.had_all_results(deadline) { Departure::Clean } else { Departure::Failed(error) };
        }
        let ended = self.finish_started(deadline);
        let stable = ended.and_then(|()| self.wait_until_stable(deadline));
        match stable {
            Ok(true) => Departure::Clean,
            Ok(false) => Departure::Unconfirmed { waited: began.elapsed() },
            Err(error) => {
                self.note_end(&error);
                if self.had_all_results(deadline) { Departure::Clean } else { Departure::Failed(error) }
            }
        }
    }

    /// Return whether all ranks had all results before this communicator ended: then the ranks that it misses left
    /// gracefully.
    fn had_all_results(&self, deadline: Deadline) -> bool {
        let is_loss = matches!(self.data.ended, Some(Error::RanksFailed { .. }));
        let is_complete = self.data.tree.get().is_some_and(|tree| tree.have() >= tree.end());
        let Some(channel) = self.members.channel.as_ref().filter(|_| is_loss && is_complete) else { return false };
        // Rank 0 reported this before it left; the report may still be on its way.
        let until = deadline.0.min(Instant::now() + LOSS_REPORT_TIMEOUT);
        while !channel.inbox().is_stable(self.posted()) && Instant::now() < until {
            channel.inbox().wait_for_stable(self.posted(), POLL_INTERVAL);
        }
        channel.inbox().is_stable(self.posted())
    }

    /// Wait until all ranks have the results of everything that this one has posted; false if the time limit passes
    /// first, or nobody can tell.
    fn wait_until_stable(&mut self, deadline: Deadline) -> Result<bool, Error> {
        let mut asks_at = Instant::now();
        let mut give_up_at = None;
        let mut interval = ASK_INTERVAL;
        while !self.is_stable() {
            let Some(inbox) = self.members.channel.as_ref().map(|channel| Arc::clone(channel.inbox())) else {
                return Ok(true);
            };
            let now = Instant::now();
            if now >= deadline.0 {
                return Ok(false);
            }
            if inbox.is_coordinator_gone() && now >= *give_up_at.get_or_insert(now + LOSS_REPORT_TIMEOUT) {
                // Rank 0 disconnected without reporting that all ranks have everything, and the controller does not
                // report it dead.
                return Ok(false);
            }
            if now >= asks_at {
                self.members.channel.iter().for_each(|channel| channel.ask_for_stable(self.posted()));
                (asks_at, interval) = (now + interval, (interval * 2).min(ASK_INTERVAL_MAX));
            }
            match self.data.advance(None, deadline) {
                Ok(idle) => inbox.wait_for_stable(self.posted(), idle.min(POLL_INTERVAL)),
                Err(Stop::Failed(Error::Deadline { .. })) => return Ok(false),
                // This rank needs nothing more from that tree.
                Err(Stop::ViewInQuestion(error) | Stop::Failed(error))
                    if error.is_loss_of_tree() && !self.data.needs_view_change() =>
                {
                    inbox.wait_for_stable(self.posted(), POLL_INTERVAL);
                }
                Err(stop) => {
                    // This rank does not leave yet, so a disconnected rank counts as dead again.
                    inbox.cancel_leaving();
                    self.resume(Err::<(), _>(stop), deadline)?;
                }
            }
        }
        Ok(true)
    }

    /// Return whether all ranks have the results of what this one has posted in its tree, or could not use more of
    /// them.
    fn is_stable(&self) -> bool {
        // Results are needed only for recovery, which is off where ranks were excluded or recovery is disabled. Host
        // collectives retain no results.
        if self.data.tree.get().is_none_or(|tree| !tree.excluded_ranks().is_empty()) {
            return true;
        }
        self.members.channel.as_ref().is_none_or(|channel| channel.inbox().is_stable(self.posted()))
    }

    /// Return the watermark behind the last operation that this rank has posted in the tree.
    fn posted(&self) -> Watermark {
        self.data.watermarks().1
    }
}

/// The interval at which the ranks are asked again, and its maximum after backoff: messages may be lost.
const ASK_INTERVAL: Duration = Duration::from_millis(20);
const ASK_INTERVAL_MAX: Duration = Duration::from_millis(320);
/// The interval at which the tree is polled meanwhile.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long a rank waits with its host's device for the other ranks there, which leave at about the same time.
const HOST_RANKS_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the controller may take to report a rank lost whose process has ended.
const LOSS_REPORT_TIMEOUT: Duration = Duration::from_millis(500);
