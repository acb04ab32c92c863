//! The coordinator's part of a view change.

use super::{Ballot, Dead, Done, Flaw, Message, Outcome, RETRY, View};
use std::collections::BTreeMap;
use sumac_hal::ids::Rank;
use sumac_hal::time::Instant;

/// A ballot that this rank leads. Its ranks are those that are not dead; if one dies, a new ballot begins.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Coordinator<P, D> {
    ballot: Ballot,
    promises: BTreeMap<Rank, (Option<Done<D>>, P)>,
    /// The votes of the ranks that have executed the plan; `None` before the plan is made.
    votes: Option<BTreeMap<Rank, u64>>,
}

impl<P, D> Coordinator<P, D> {
    pub(super) const fn ballot(&self) -> Ballot {
        self.ballot
    }

    /// Return whether this rank has not replied yet.
    pub(super) fn awaits(&self, rank: Rank) -> bool {
        self.votes.as_ref().map_or_else(|| !self.promises.contains_key(&rank), |votes| !votes.contains_key(&rank))
    }
}

impl<P: Clone, D: Clone + PartialEq> View<P, D> {
    /// Begin a ballot that is higher than all that were seen.
    pub(super) fn lead(&mut self) {
        self.highest += 1;
        let ballot = Ballot { attempt: self.highest, coordinator: self.rank };
        self.retry_at = None;
        self.coordinating = Some(Coordinator { ballot, promises: BTreeMap::new(), votes: None });
        self.broadcast(&Message::Prepare { ballot, dead: self.dead.clone() });
        self.enter(ballot);
    }

    pub(super) fn on_promise(&mut self, from: Rank, ballot: Ballot, dead: &Dead, done: Option<Done<D>>, report: P) {
        let awaits = |coordinating: &Coordinator<P, D>| coordinating.ballot == ballot && coordinating.votes.is_none();
        if !self.coordinating.as_ref().is_some_and(awaits) {
            return;
        }
        if self.add_dead(dead) {
            return self.try_advance();
        }
        if let Some(coordinating) = &mut self.coordinating {
            coordinating.promises.insert(from, (done, report));
        }
        self.check_promises();
    }

    /// Make the plan once all surviving ranks have promised.
    fn check_promises(&mut self) {
        let Some(coordinating) = &self.coordinating else { return };
        if !self.live().all(|rank| coordinating.promises.contains_key(&rank)) {
            return;
        }
        if let Some(outcome) = coordinating.maybe_committed().filter(|_| !self.breaks(Flaw::NothingAdopted)) {
            return self.commit(outcome);
        }
        let (ballot, dead) = (coordinating.ballot, self.dead.clone());
        let reports: BTreeMap<Rank, P> =
            coordinating.promises.iter().map(|(&rank, (_, report))| (rank, report.clone())).collect();
        if let Some(coordinating) = &mut self.coordinating {
            coordinating.votes = Some(BTreeMap::new());
        }
        self.broadcast(&Message::Plan { ballot, dead: dead.clone(), reports: reports.clone() });
        self.run(ballot, dead, reports);
    }

    pub(super) fn on_done(&mut self, from: Rank, ballot: Ballot, vote: u64) {
        let Some(votes) = self
            .coordinating
            .as_mut()
            .filter(|coordinating| coordinating.ballot == ballot)
            .and_then(|l| l.votes.as_mut())
        else {
            return;
        };
        votes.insert(from, vote);
        let votes = votes.clone();
        let Some(done) = self.done.clone().filter(|done| done.ballot == ballot) else { return };
        if self.live().all(|rank| votes.contains_key(&rank)) {
            self.commit(Outcome { vote: common(votes.values().copied()), ..done.outcome });
        }
    }

    pub(super) fn on_failed(&mut self, ballot: Ballot, now: Instant) {
        if self.coordinating.as_ref().is_some_and(|coordinating| coordinating.ballot == ballot)
            && self.retry_at.is_none()
        {
            self.retry_at = Some(now + RETRY);
        }
    }

    /// Repeat messages that were not answered.
    pub(super) fn resend(&mut self) {
        let Some(coordinating) = &self.coordinating else {
            if self.promised.is_none_or(|(_, has_promised)| has_promised) {
                self.try_advance();
            }
            return;
        };
        let (ballot, dead) = (coordinating.ballot, self.dead.clone());
        let message = match &coordinating.votes {
            None => Message::Prepare { ballot, dead },
            Some(_) => {
                let reports = coordinating.promises.iter().map(|(&rank, (_, report))| (rank, report.clone())).collect();
                Message::Plan { ballot, dead, reports }
            }
        };
        let awaited = self.awaited();
        self.transmit.extend(awaited.into_iter().map(|rank| (rank, message.clone())));
    }
}

impl<P, D: Clone + PartialEq> Coordinator<P, D> {
    /// Return an outcome that may have been committed: all ranks have executed it.
    fn maybe_committed(&self) -> Option<Outcome<D>> {
        let mut all = self.promises.values().map(|(done, _)| done.as_ref());
        let first = all.next()??;
        all.all(|done| done.is_some_and(|done| done.ballot == first.ballot)).then(|| {
            let votes = self.promises.values().filter_map(|(done, _)| Some(done.as_ref()?.outcome.vote));
            Outcome { vote: common(votes), ..first.outcome.clone() }
        })
    }
}

/// Return the vote that all have in common, or 0.
fn common(mut votes: impl Iterator<Item = u64>) -> u64 {
    let first = votes.next().unwrap_or(0);
    if votes.all(|vote| vote == first) { first } else { 0 }
}
