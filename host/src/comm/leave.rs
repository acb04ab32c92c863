//! Leaving a job in good order: not before every rank has every result that this one may be needed for (PROTOCOL 5).
//!
//! A result reaches the ranks one by one. If a device dies before it has reached all of them, those that have it, or
//! their contribution, repair it for the others; a rank that has left can't. So a rank leaves when all others have what
//! it has posted. The ranks themselves say so ([`super::parley`]), outside of calls too: what the tree reports (`stable`)
//! reaches them one by one as well, and a rank that has not heard it needs those that have.
//!
//! Invariants:
//! - nothing that was started is left half done: other ranks wait for it;
//! - a rank that leaves changes no view unless others ask for it: they do if they lack a result;
//! - a rank that leaves waits for others no longer than its deadline, and says so.

use super::core::Core;
use super::error::Error;
use super::parley::{Landed, Parley};
use super::progress::Deadline;
use std::time::{Duration, Instant};

/// How a rank left its job ([`Communicator::leave_within`](super::Communicator::leave_within)).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Departure {
    /// All ranks have the results of all operations in the tree that this rank took part in.
    Settled,
    /// It is not known whether all have within the time: if a device of the tree dies now, an operation that completed
    /// here may be lost to them, which they are told ([`Error::RanksFailed`], or the loss of the tree).
    Unsettled {
        /// How long this rank has waited.
        waited: Duration,
    },
    /// The communicator had ended before, or an operation that was still on its way has failed.
    Failed(Error),
}

impl Core {
    /// Leave the job: the controller frees the group when all ranks have.
    pub(super) fn leave(&mut self, limit: Duration) -> Departure {
        let departure = self.settle_all(limit);
        match &departure {
            Departure::Settled => self.parley.iter().for_each(Parley::say_goodbye),
            Departure::Unsettled { waited } => {
                let (job, rank) = (&self.config.job, self.config.rank);
                tracing::warn!(job, rank, ?waited, "leaves, though ranks may still need results");
            }
            Departure::Failed(_) => {}
        }
        self.parley.iter().for_each(Parley::end);
        if let Some(session) = self.session.take() {
            session.leave();
        }
        departure
    }

    fn settle_all(&mut self, limit: Duration) -> Departure {
        let began = Instant::now();
        let deadline = (began + limit, limit);
        if let Err(error) = self.usable() {
            return if self.had_settled(deadline) { Departure::Settled } else { Departure::Failed(error) };
        }
        let ended = self.run_started(deadline).and_then(|()| self.end_started_in_tree(deadline));
        let stable = ended.and_then(|()| self.wait_until_stable(deadline));
        match stable {
            Ok(true) => Departure::Settled,
            Ok(false) => Departure::Unsettled { waited: began.elapsed() },
            Err(error) => {
                self.note_end(&error);
                if self.had_settled(deadline) { Departure::Settled } else { Departure::Failed(error) }
            }
        }
    }

    /// Tell whether all ranks had everything before this communicator ended: then those that it misses have left.
    fn had_settled(&self, deadline: Deadline) -> bool {
        let is_loss = matches!(self.ended, Some(Error::RanksFailed { .. }));
        let is_complete = self.tree.as_ref().is_some_and(|tree| tree.have() >= tree.end());
        let Some(parley) = self.parley.as_ref().filter(|_| is_loss && is_complete) else { return false };
        // Rank 0 has sent that before it left; it may still be on its way.
        let until = deadline.0.min(Instant::now() + WORD_OF_LOSS);
        while !parley.inbox().is_stable(self.posted()) && Instant::now() < until {
            parley.inbox().wait_for_stable(self.posted(), LOOK_INTERVAL);
        }
        parley.inbox().is_stable(self.posted())
    }

    /// Wait until all ranks have the results of all that was posted; false if that can't be had, or not in time.
    fn wait_until_stable(&mut self, deadline: Deadline) -> Result<bool, Error> {
        let mut asks_at = Instant::now();
        let mut gone_at = None;
        let mut interval = ASK_INTERVAL;
        while !self.is_stable() {
            let Some(inbox) = self.parley.as_ref().map(|parley| std::sync::Arc::clone(parley.inbox())) else {
                return Ok(true);
            };
            let now = Instant::now();
            if now >= deadline.0 {
                return Ok(false);
            }
            if inbox.is_coordinator_gone() && now >= *gone_at.get_or_insert(now + WORD_OF_LOSS) {
                // It has not said that all have everything, and nobody says that it died.
                return Ok(false);
            }
            if now >= asks_at {
                self.parley.iter().for_each(|parley| parley.ask_for_stable(self.posted()));
                (asks_at, interval) = (now + interval, (interval * 2).min(ASK_INTERVAL_MAX));
            }
            match self.advance(None, deadline) {
                Ok(idle) => inbox.wait_for_stable(self.posted(), idle.min(LOOK_INTERVAL)),
                Err(Error::Deadline { .. }) => return Ok(false),
                // It has all that it needs of that tree.
                Err(error) if error.is_loss_of_tree() && !self.is_unsettled() => {
                    inbox.wait_for_stable(self.posted(), LOOK_INTERVAL);
                }
                Err(error) => {
                    // From here on it matters who is gone.
                    inbox.stay();
                    self.get_over(Err(error), deadline)?;
                }
            }
        }
        Ok(true)
    }

    /// Tell whether all ranks have what this one has posted in its tree, or nobody could make anything of it.
    fn is_stable(&self) -> bool {
        // Where ranks were left out, or losses are not repaired, nobody asks for results; schedules keep none.
        let Some(tree) = self.tree.as_ref().filter(|tree| tree.gone().is_empty()) else { return true };
        self.parley.as_ref().is_none_or(|parley| parley.inbox().is_stable(Landed::new(self.view, tree.end().0)))
    }

    /// Return where this rank's operations in the tree end.
    fn posted(&self) -> Landed {
        Landed::new(self.view, self.tree.as_ref().map_or(0, |tree| tree.end().0))
    }

    /// Let others know, if they ask, which results this rank has.
    pub(super) fn publish_landed(&self) {
        if let Some(parley) = &self.parley {
            parley.inbox().publish(Landed::new(self.view, self.tree.as_ref().map_or(0, |tree| tree.have().0)));
        }
    }
}

/// How soon the ranks are asked again, at first and at last: notes may be lost.
const ASK_INTERVAL: Duration = Duration::from_millis(20);
const ASK_INTERVAL_MAX: Duration = Duration::from_millis(320);
/// How often the tree is looked at meanwhile.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// How soon the controller says of a rank whose process has ended that it is lost.
const WORD_OF_LOSS: Duration = Duration::from_millis(500);
