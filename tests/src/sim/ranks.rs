//! Ranks that change their view as `sumac::comm` does, by its own machine, so that they may die meanwhile: freeze,
//! promise, work out the same plan, move or compute what is missing among those that live, find another tree if nobody
//! is dead, commit. Who dies when is [`super::deaths`]'s.
//!
//! Oracles: in one attempt all work out the same, and nothing is computed twice; what is moved is no more than twice the
//! message a rank; all that commit a view commit the same; an operation returns with the right result, or has not been
//! complete; nothing is taken in from a tree once it is frozen; letters of later views are few.

use super::cluster::Cluster;
use super::coverage::Mark;
use super::incident::Alarm;
use super::loss::Point;
use super::mail::Mail;
use super::repair::Way;
use super::report::Violation;
use super::trial::{Pieces, Trial};
use std::collections::BTreeMap;
use std::time::Duration;
use sumac::rehearsal::{Account, Attempt, Change, End, Landed, Outcome, Promise, Said, Step};
use sumac_hal::ids::Rank;

/// What a rank has of the views of a group.
#[derive(Default)]
pub(super) struct Membership {
    /// The change that it is in.
    pub(super) changing: Option<Changing>,
    /// The change of the view before: it answers who is behind.
    settled: Option<(u32, Change)>,
    /// Who has said what of later views.
    early: Vec<(u32, usize, Said)>,
    /// What came for attempts.
    pub(super) pieces: BTreeMap<(u32, Attempt), Pieces>,
    pub(super) end: Option<GroupEnd>,
}

/// How a group ended for a rank before all its operations had returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum GroupEnd {
    /// These ranks are dead, and this call is the first that fails.
    RanksFailed(Vec<Rank>, u64),
    /// It is out.
    Out(End),
}

/// A change on its way.
pub(super) struct Changing {
    pub(super) change: Change,
    /// What attempts have landed.
    pub(super) landed: Landed,
    /// What the frozen endpoint has.
    account: Account,
    /// How many operations had returned before.
    returned: u64,
    pub(super) trial: Option<Trial>,
    /// The tree that was found with the last plan that was done here.
    pub(super) found: Option<usize>,
}

impl Membership {
    /// Tell whether nothing is taken in from the tree, nor done by schedules.
    pub(super) fn is_frozen(&self) -> bool {
        self.changing.is_some() || self.end.is_some()
    }
}

impl Cluster<'_, '_> {
    /// Take part in a change of the view; it `begins` here, if nobody else has asked for it.
    pub(super) fn change_view(&mut self, at: (usize, usize), begins: bool) -> Result<(), Violation> {
        let (rank, group) = at;
        if self.deaths.is_dead(rank) || self.members[rank][group].membership.is_frozen() {
            return Ok(());
        }
        // What has landed by now has landed. Perhaps the tree is found to be lost in this moment.
        self.collect(rank, group)?;
        if self.members[rank][group].membership.is_frozen() {
            return Ok(());
        }
        let now = self.rank_time(rank);
        let own = (Rank(rank as u32), self.options.ranks as u32);
        let mut change = Change::new(own, self.deaths.has_controller(rank), now + LIMIT);
        for (of, by_word) in self.deaths.known(rank) {
            change.rank_died(Rank(of as u32), by_word);
        }
        if begins {
            change.begin();
        }
        change.handle_timeout(now);
        let member = &mut self.members[rank][group];
        member.endpoint.freeze();
        let (account, returned) = (Account::of(&member.endpoint), member.done);
        member.membership.changing =
            Some(Changing { change, landed: Landed::default(), account, returned, trial: None, found: None });
        self.seen.note(Mark::ViewChange);
        self.touch_rank(rank, group);
        self.reach_by(Point::Frozen, rank);
        self.drive_change(at)
    }

    /// The controller says that the tree of a view is lost.
    pub(super) fn hear_of_loss(&mut self, at: (usize, usize), view: u32) -> Result<(), Violation> {
        let member = &self.members[at.0][at.1];
        let concerns = member.view == view && matches!(member.way, Way::Tree(_));
        if concerns { self.change_view(at, true) } else { Ok(()) }
    }

    /// A rank that is in a change has news for its machine.
    pub(super) fn tell_change(&mut self, at: (usize, usize), news: impl FnOnce(&mut Change)) -> Result<(), Violation> {
        if let Some(changing) = &mut self.members[at.0][at.1].membership.changing {
            news(&mut changing.change);
        }
        self.drive_change(at)
    }

    /// Do all that the machine of a rank wants.
    pub(super) fn drive_change(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        loop {
            if self.deaths.is_dead(at.0) {
                return Ok(());
            }
            self.speak(at);
            let Some(changing) = &mut self.members[at.0][at.1].membership.changing else { return Ok(()) };
            match changing.change.poll_step() {
                None => break,
                Some(Step::Promise(attempt)) => self.promise(at, attempt),
                Some(Step::Run(attempt, promises)) => self.run_plan(at, attempt, &promises)?,
                Some(Step::Committed(outcome)) => self.commit_view(at, &outcome)?,
                Some(Step::Ended(end)) => self.leave(at, end),
            }
        }
        let (view, local) = {
            let member = &self.members[at.0][at.1];
            let Some(changing) = &member.membership.changing else { return Ok(()) };
            (member.view, changing.change.poll_timeout())
        };
        let wake_at = self.rank_when(at.0, local).max(self.now);
        self.schedule(wake_at, Alarm::ViewTimer { rank: at.0, group: at.1, view });
        Ok(())
    }

    /// Send what there is to say.
    pub(super) fn speak(&mut self, (rank, group): (usize, usize)) {
        loop {
            let member = &mut self.members[rank][group];
            let view = member.view;
            let Some(changing) = &mut member.membership.changing else { return };
            let Some((to, said)) = changing.change.poll_transmit() else { return };
            self.mail(Mail::View { from: rank, to: to.0 as usize, group, view, said: Box::new(said) });
        }
    }

    /// Somebody has said something about a view.
    pub(super) fn hear(
        &mut self,
        (from, rank, group): (usize, usize, usize),
        view: u32,
        said: Said,
    ) -> Result<(), Violation> {
        let now = self.rank_time(rank);
        let member = &mut self.members[rank][group];
        if view > member.view {
            member.membership.early.push((view, from, said));
            let (found, limit) = (member.membership.early.len() as u64, WAITING_MAX * self.options.ranks as u64);
            let what = "letters of later views";
            return if found > limit { Err(Violation::Limit { what, found, limit }) } else { Ok(()) };
        }
        if view < member.view {
            let Some((_, change)) = member.membership.settled.as_mut().filter(|(settled, _)| *settled == view) else {
                return Ok(());
            };
            change.handle(Rank(from as u32), said, now);
            let answers: Vec<_> = std::iter::from_fn(|| change.poll_transmit()).collect();
            for (to, said) in answers {
                self.seen.note(Mark::LateAnswered);
                self.mail(Mail::View { from: rank, to: to.0 as usize, group, view, said: Box::new(said) });
            }
            return Ok(());
        }
        if member.membership.end.is_some() {
            if let Some(said) = said.answer_of_the_ended() {
                self.mail(Mail::View { from: rank, to: from, group, view, said: Box::new(said) });
            }
            return Ok(());
        }
        self.change_view((rank, group), false)?;
        self.tell_change((rank, group), |change| {
            change.handle(Rank(from as u32), said, now);
            change.handle_timeout(now);
        })
    }

    pub(super) fn view_timer(&mut self, (rank, group): (usize, usize), view: u32) -> Result<(), Violation> {
        let member = &self.members[rank][group];
        let due = member.membership.changing.as_ref().filter(|_| member.view == view);
        let now = self.rank_time(rank);
        if self.deaths.is_dead(rank) || due.is_none_or(|changing| changing.change.poll_timeout() > now) {
            return Ok(());
        }
        self.tell_change((rank, group), |change| change.handle_timeout(now))
    }

    fn promise(&mut self, at: (usize, usize), attempt: Attempt) {
        let (rank, group) = at;
        let member = &mut self.members[rank][group];
        let Some(changing) = &mut member.membership.changing else { return };
        let promise = match member.way {
            Way::Tree(_) => Promise::of(&member.endpoint, &changing.landed, member.first as u64),
            Way::Schedules => Promise::without_tree(member.done),
        };
        changing.trial = None;
        changing.change.promise(attempt, promise);
        self.speak(at);
        self.reach_by(Point::Promised, rank);
    }

    /// All that live are through: operations return, and the group goes on, or ends with who is dead.
    fn commit_view(&mut self, at: (usize, usize), outcome: &Outcome) -> Result<(), Violation> {
        let (rank, group) = at;
        let member = &mut self.members[rank][group];
        let (view, has_tree) = (member.view, matches!(member.way, Way::Tree(_)));
        let changing = member.membership.changing.take().expect("in a change");
        let found = changing.found.filter(|tree| word_of(Some(*tree)) == outcome.word);
        if Account::of(&member.endpoint) != changing.account {
            return Err(Violation::NotFenced { group, rank, view });
        }
        let below = match has_tree {
            true => member.first as u64 + member.endpoint.first_behind(outcome.cut).0,
            false => member.done,
        };
        member.membership.settled = Some((view, changing.change));
        member.membership.pieces.retain(|(of, _), _| *of > view);
        let member = &mut self.members[rank][group];
        member.inboxes.remove(&view);
        member.view += 1;
        self.view_changes += u64::from(!self.outcomes.contains_key(&(group, view)));
        if self.outcomes.entry((group, view)).or_insert_with(|| outcome.clone()) != outcome {
            return Err(Violation::Disagreement { group, view });
        }
        while self.members[rank][group].done < below {
            self.seen.note(Mark::OpRepaired);
            self.finish_op(rank, group)?;
        }
        let member = &mut self.members[rank][group];
        if !outcome.dead.is_empty() {
            if member.done != changing.returned.max(outcome.operation) {
                return Err(Violation::RankEnd { group, rank, done: member.done, end: format!("{outcome:?}") });
            }
            self.seen.note(Mark::CommitRanksFailed);
            member.membership.end = Some(GroupEnd::RanksFailed(outcome.dead.clone(), outcome.operation));
            self.reach_by(Point::Committed, rank);
            return Ok(());
        }
        self.seen.note(if found.is_some() { Mark::CommitTree } else { Mark::CommitSchedules });
        self.install(rank, group, found);
        self.reach_by(Point::Committed, rank);
        self.go_on(at, found.is_none())
    }

    /// A view begins: with what came early for it, and with deaths that are known.
    fn go_on(&mut self, at: (usize, usize), by_schedules: bool) -> Result<(), Violation> {
        let (rank, group) = at;
        if by_schedules {
            self.enter_schedule(rank, group)?;
        }
        let member = &mut self.members[rank][group];
        let view = member.view;
        let early = std::mem::take(&mut member.membership.early);
        if self.deaths.known(rank).next().is_some() {
            self.change_view(at, early.is_empty())?;
        }
        for (of, from, said) in early.into_iter().filter(|(of, ..)| *of >= view) {
            if !self.deaths.is_dead(rank) {
                self.hear((from, rank, group), of, said)?;
            }
        }
        Ok(())
    }

    /// This rank is out.
    fn leave(&mut self, (rank, group): (usize, usize), end: End) {
        if end == End::Partitioned {
            self.seen.note(Mark::EndPartitioned);
        }
        let membership = &mut self.members[rank][group].membership;
        (membership.changing, membership.end) = (None, Some(GroupEnd::Out(end)));
    }
}

/// What ranks have to have in common: the tree, and one.
pub(super) fn word_of(found: Option<usize>) -> u64 {
    found.map_or(0, |tree| tree as u64 + 1)
}

/// How long a change may take: longer than whatever is lost for a while.
const LIMIT: Duration = Duration::from_secs(90);

/// Letters of a rank that wait for a later view.
const WAITING_MAX: u64 = 16;
