//! The coordinator's part of a view change.

use super::{Ballot, Dead, Done, Flaw, Message, Outcome, RETRY, View};
use std::collections::BTreeMap;
use sumac_hal::ids::Rank;
use sumac_hal::time::Instant;

/// A ballot that this rank leads; its ranks are those that are not dead, or it begins anew.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Leading<P, D> {
    ballot: Ballot,
    promises: BTreeMap<Rank, (Option<Done<D>>, P)>,
    /// The words of those that have done it, once it is planned.
    words: Option<BTreeMap<Rank, u64>>,
}

impl<P, D> Leading<P, D> {
    pub(super) const fn ballot(&self) -> Ballot {
        self.ballot
    }

    /// Tell whether this rank has not answered yet.
    pub(super) fn awaits(&self, rank: Rank) -> bool {
        self.words.as_ref().map_or_else(|| !self.promises.contains_key(&rank), |words| !words.contains_key(&rank))
    }
}

impl<P: Clone, D: Clone + PartialEq> View<P, D> {
    /// Begin a ballot, higher than all that were heard of.
    pub(super) fn lead(&mut self) {
        self.highest += 1;
        let ballot = Ballot { attempt: self.highest, coordinator: self.rank };
        self.retry_at = None;
        self.leading = Some(Leading { ballot, promises: BTreeMap::new(), words: None });
        self.tell_all(&Message::Prepare { ballot, dead: self.dead.clone() });
        self.enter(ballot);
    }

    pub(super) fn on_promise(&mut self, from: Rank, ballot: Ballot, dead: &Dead, done: Option<Done<D>>, account: P) {
        let awaits = |leading: &Leading<P, D>| leading.ballot == ballot && leading.words.is_none();
        if !self.leading.as_ref().is_some_and(awaits) {
            return;
        }
        if self.bury(dead) {
            return self.urge();
        }
        if let Some(leading) = &mut self.leading {
            leading.promises.insert(from, (done, account));
        }
        self.see_promises();
    }

    /// Go on when all that live have promised.
    fn see_promises(&mut self) {
        let Some(leading) = &self.leading else { return };
        if !self.live().all(|rank| leading.promises.contains_key(&rank)) {
            return;
        }
        if let Some(outcome) = leading.maybe_committed().filter(|_| !self.breaks(Flaw::NothingAdopted)) {
            return self.commit(outcome);
        }
        let (ballot, dead) = (leading.ballot, self.dead.clone());
        let accounts: BTreeMap<Rank, P> =
            leading.promises.iter().map(|(&rank, (_, account))| (rank, account.clone())).collect();
        if let Some(leading) = &mut self.leading {
            leading.words = Some(BTreeMap::new());
        }
        self.tell_all(&Message::Plan { ballot, dead: dead.clone(), accounts: accounts.clone() });
        self.run(ballot, dead, accounts);
    }

    pub(super) fn on_done(&mut self, from: Rank, ballot: Ballot, word: u64) {
        let Some(words) =
            self.leading.as_mut().filter(|leading| leading.ballot == ballot).and_then(|l| l.words.as_mut())
        else {
            return;
        };
        words.insert(from, word);
        let words = words.clone();
        let Some(done) = self.done.clone().filter(|done| done.ballot == ballot) else { return };
        if self.live().all(|rank| words.contains_key(&rank)) {
            self.commit(Outcome { word: common(words.values().copied()), ..done.outcome });
        }
    }

    pub(super) fn on_failed(&mut self, ballot: Ballot, now: Instant) {
        if self.leading.as_ref().is_some_and(|leading| leading.ballot == ballot) && self.retry_at.is_none() {
            self.retry_at = Some(now + RETRY);
        }
    }

    /// Say again what was not answered.
    pub(super) fn resend(&mut self) {
        let Some(leading) = &self.leading else {
            if self.promised.is_none_or(|(_, has_promised)| has_promised) {
                self.urge();
            }
            return;
        };
        let (ballot, dead) = (leading.ballot, self.dead.clone());
        let message = match &leading.words {
            None => Message::Prepare { ballot, dead },
            Some(_) => {
                let accounts = leading.promises.iter().map(|(&rank, (_, account))| (rank, account.clone())).collect();
                Message::Plan { ballot, dead, accounts }
            }
        };
        let awaited = self.awaited();
        self.transmit.extend(awaited.into_iter().map(|rank| (rank, message.clone())));
    }
}

impl<P, D: Clone + PartialEq> Leading<P, D> {
    /// Return an outcome that may have been committed: all ranks have done it.
    fn maybe_committed(&self) -> Option<Outcome<D>> {
        let mut all = self.promises.values().map(|(done, _)| done.as_ref());
        let first = all.next()??;
        all.all(|done| done.is_some_and(|done| done.ballot == first.ballot)).then(|| {
            let words = self.promises.values().filter_map(|(done, _)| Some(done.as_ref()?.outcome.word));
            Outcome { word: common(words), ..first.outcome.clone() }
        })
    }
}

/// Return the word that all have in common, or 0.
fn common(mut words: impl Iterator<Item = u64>) -> u64 {
    let first = words.next().unwrap_or(0);
    if words.all(|word| word == first) { first } else { 0 }
}
