//! View changes with the state machine of a communicator, while ranks may die: freeze, report, compute the same plan,
//! move or compute missing chunks among the survivors, find another tree if nobody is dead, commit. [`super::deaths`]
//! determines which ranks die, and when.
//!
//! Messages between ranks arrive in order per pair, as over connections, with varying delays. Ranks between two
//! operations, or done with all of them, are notified by the controller or the others, and take part too.
//!
//! Oracles: in one attempt all ranks compute the same plan, and nothing is computed twice; at most twice the message
//! size is moved per rank; all ranks that commit a view commit the same; an operation returns with the right result, or
//! was not complete; nothing is accepted from a frozen tree; few messages of later views are queued.

use super::cluster::{Actor, Cluster};
use super::coverage::Mark;
use super::incident::Alarm;
use super::loss::Point;
use super::messages::Message;
use super::report::Violation;
use super::route::Route;
use super::setup::Member;
use super::trial::{Pieces, Trial};
use std::collections::BTreeMap;
use std::time::Duration;
use sumac::harness::{Action, Attempt, Change, End, Landed, Outcome, RankReport, ViewMessage};
use sumac_hal::ids::Rank;

/// A rank's state of the views of a group.
#[derive(Default)]
pub(super) struct Membership {
    /// The view change in progress.
    pub(super) changing: Option<ViewChangeState>,
    /// The previous view change, which answers ranks that are behind.
    settled: Option<(u32, Change)>,
    /// Messages of later views, by sender.
    early: Vec<(u32, usize, ViewMessage)>,
    /// Pieces received for attempts.
    pub(super) pieces: BTreeMap<(u32, Attempt), Pieces>,
    pub(super) end: Option<GroupEnd>,
}

/// How a group failed for a rank before all its operations had returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum GroupEnd {
    /// These ranks are dead, and this is the first call that fails.
    RanksFailed(Vec<Rank>, u64),
    /// The rank was excluded.
    Out(End),
}

/// A view change in progress.
pub(super) struct ViewChangeState {
    pub(super) change: Change,
    /// Chunks stored by attempts.
    pub(super) landed: Landed,
    /// Report of the frozen endpoint.
    report: RankReport,
    /// Operations that had returned before.
    returned: u64,
    pub(super) trial: Option<Trial>,
    /// The tree found by the last plan executed here.
    pub(super) found: Option<usize>,
}

impl Membership {
    /// Return whether nothing is accepted from the tree or run as a host collective.
    pub(super) fn is_frozen(&self) -> bool {
        self.changing.is_some() || self.end.is_some()
    }
}

impl Cluster<'_, '_> {
    /// Join a view change; `begins` if this rank starts it.
    pub(super) fn change_view(&mut self, at: (usize, usize), begins: bool) -> Result<(), Violation> {
        let (rank, group) = at;
        if self.deaths.is_dead(rank) || self.members[rank][group].membership.is_frozen() {
            return Ok(());
        }
        // Accept what has arrived so far; this may reveal that the tree is lost.
        self.collect(rank, group)?;
        if self.members[rank][group].membership.is_frozen() {
            return Ok(());
        }
        let now = self.rank_time(rank);
        let own = (Rank(rank as u32), self.options.ranks as u32);
        let (trees, has_controller) = (self.members[rank][group].view, self.has_controller(at));
        let mut change = Change::new(own, trees, has_controller, now + LIMIT);
        change.report_deaths(&self.deaths.confirmed(at), has_controller);
        for suspect in self.deaths.suspected(at) {
            change.rank_died(suspect, false);
        }
        if begins {
            change.begin();
        }
        change.handle_timeout(now);
        let member = &mut self.members[rank][group];
        member.endpoint.freeze();
        let (report, returned) = (report_of(member), member.done);
        member.membership.changing =
            Some(ViewChangeState { change, landed: Landed::default(), report, returned, trial: None, found: None });
        self.seen.note(Mark::ViewChange);
        self.touched.insert(Actor::Rank { rank, group });
        self.reach_by(Point::Frozen, rank);
        self.drive_change(at)
    }

    /// The controller reports that the tree is lost.
    pub(super) fn on_tree_lost(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let member = &self.members[at.0][at.1];
        if member.membership.is_frozen() || member.route == Route::HostCollectives {
            return Ok(());
        }
        let is_idle = member.done == member.called as u64;
        self.seen.note(if is_idle { Mark::FrozenIdle } else { Mark::FrozenByController });
        self.change_view(at, true)
    }

    /// Pass an event to the state machine of a rank in a view change.
    pub(super) fn advance_change(
        &mut self,
        at: (usize, usize),
        event: impl FnOnce(&mut Change),
    ) -> Result<(), Violation> {
        if let Some(changing) = &mut self.members[at.0][at.1].membership.changing {
            event(&mut changing.change);
        }
        self.drive_change(at)
    }

    /// Perform all actions of a rank's state machine.
    pub(super) fn drive_change(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        loop {
            if self.deaths.is_dead(at.0) {
                return Ok(());
            }
            self.speak(at);
            let now = self.rank_time(at.0);
            let Member { endpoint, membership, route, .. } = &mut self.members[at.0][at.1];
            let Some(changing) = &mut membership.changing else { return Ok(()) };
            let tree = matches!(route, Route::Tree(_)).then_some(&*endpoint);
            match changing.change.poll_action(tree, now) {
                None => break,
                Some(Action::Report(attempt)) => self.report_chunks(at, attempt),
                Some(Action::Execute(attempt, plan)) => self.run_plan(at, attempt, plan)?,
                Some(Action::Unsound(of)) => {
                    let why = format!("the chunk inventory of {of} is invalid");
                    return Err(Violation::Unrecoverable { group: at.1, rank: at.0, why });
                }
                Some(Action::Commit(outcome)) => self.commit_view(at, &outcome)?,
                Some(Action::End(end)) => self.leave(at, end),
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

    /// Send the state machine's messages.
    pub(super) fn speak(&mut self, (rank, group): (usize, usize)) {
        loop {
            let member = &mut self.members[rank][group];
            let view = member.view;
            let Some(changing) = &mut member.membership.changing else { return };
            let Some((to, message)) = changing.change.poll_transmit() else { return };
            self.send_message(Message::View { from: rank, to: to.0 as usize, group, view, message: Box::new(message) });
        }
    }

    /// Handle a message about a view.
    pub(super) fn on_view_message(
        &mut self,
        (from, rank, group): (usize, usize, usize),
        view: u32,
        message: ViewMessage,
    ) -> Result<(), Violation> {
        let now = self.rank_time(rank);
        let member = &mut self.members[rank][group];
        if view > member.view {
            member.membership.early.push((view, from, message));
            let (found, limit) = (member.membership.early.len() as u64, WAITING_MAX * self.options.ranks as u64);
            let what = "messages of later views";
            return if found > limit { Err(Violation::Limit { what, found, limit }) } else { Ok(()) };
        }
        if view < member.view {
            let Some((_, change)) = member.membership.settled.as_mut().filter(|(settled, _)| *settled == view) else {
                return Ok(());
            };
            change.handle(Rank(from as u32), message, now);
            let answers: Vec<_> = std::iter::from_fn(|| change.poll_transmit()).collect();
            for (to, message) in answers {
                self.seen.note(Mark::LateAnswered);
                self.send_message(Message::View {
                    from: rank,
                    to: to.0 as usize,
                    group,
                    view,
                    message: Box::new(message),
                });
            }
            return Ok(());
        }
        if member.membership.end.is_some() {
            if let Some(message) = message.answer_after_end() {
                self.send_message(Message::View { from: rank, to: from, group, view, message: Box::new(message) });
            }
            return Ok(());
        }
        self.change_view((rank, group), false)?;
        self.advance_change((rank, group), |change| {
            change.handle(Rank(from as u32), message, now);
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
        self.advance_change((rank, group), |change| change.handle_timeout(now))
    }

    fn report_chunks(&mut self, at: (usize, usize), attempt: Attempt) {
        let (rank, group) = at;
        let member = &mut self.members[rank][group];
        let Some(changing) = &mut member.membership.changing else { return };
        let report = match member.route {
            Route::Tree(_) => RankReport::of(&member.endpoint, &changing.landed, member.first as u64, member.view),
            Route::HostCollectives => RankReport::without_tree(member.done, member.view),
        };
        changing.trial = None;
        changing.change.report(attempt, report);
        self.speak(at);
        self.reach_by(Point::Promised, rank);
    }

    /// All survivors are done: operations return, and the group continues, or fails because of dead ranks.
    fn commit_view(&mut self, at: (usize, usize), outcome: &Outcome) -> Result<(), Violation> {
        let (rank, group) = at;
        let member = &mut self.members[rank][group];
        let (view, has_tree) = (member.view, matches!(member.route, Route::Tree(_)));
        let changing = member.membership.changing.take().expect("in a change");
        let found = changing.found.filter(|tree| word_of(Some(*tree)) == outcome.vote);
        if report_of(member) != changing.report {
            return Err(Violation::NotFenced { group, rank, view });
        }
        let below = match has_tree {
            true => member.first as u64 + member.endpoint.first_behind(outcome.cut).0,
            false => member.done,
        };
        member.membership.settled = Some((view, changing.change));
        member.membership.pieces.retain(|(of, _), _| *of > view);
        self.members[rank][group].view += 1;
        self.view_changes += u64::from(!self.outcomes.contains_key(&(group, view)));
        if self.outcomes.entry((group, view)).or_insert_with(|| outcome.clone()) != outcome {
            return Err(Violation::Disagreement { group, view });
        }
        while self.members[rank][group].done < below {
            self.seen.note(Mark::OpRecovered);
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
        if member.done < member.called as u64 {
            self.seen.note(Mark::OpRestarted);
        }
        self.seen.note(if found.is_some() { Mark::CommitTree } else { Mark::CommitSchedules });
        self.install(rank, group, found);
        self.reach_by(Point::Committed, rank);
        self.go_on(at, found.is_none())
    }

    /// Start a view, with its early messages and the deaths that are known.
    fn go_on(&mut self, at: (usize, usize), by_schedules: bool) -> Result<(), Violation> {
        let (rank, group) = at;
        if by_schedules {
            self.enter_host_collective(rank, group)?;
        }
        let member = &mut self.members[rank][group];
        let view = member.view;
        let early = std::mem::take(&mut member.membership.early);
        if self.deaths.knows_any(at) {
            self.change_view(at, early.is_empty())?;
        }
        for (of, from, message) in early.into_iter().filter(|(of, ..)| *of >= view) {
            if !self.deaths.is_dead(rank) {
                self.on_view_message((from, rank, group), of, message)?;
            }
        }
        Ok(())
    }

    /// Exclude this rank.
    fn leave(&mut self, (rank, group): (usize, usize), end: End) {
        if end == End::Partitioned {
            self.seen.note(Mark::EndPartitioned);
        }
        let membership = &mut self.members[rank][group].membership;
        (membership.changing, membership.end) = (None, Some(GroupEnd::Out(end)));
    }
}

/// Return what a rank has of its lost tree alone.
fn report_of(member: &Member) -> RankReport {
    RankReport::of(&member.endpoint, &Landed::default(), member.first as u64, member.view)
}

/// What ranks must agree on: the tree, encoded.
pub(super) fn word_of(found: Option<usize>) -> u64 {
    found.map_or(0, |tree| tree as u64 + 1)
}

/// Limit of a view change: longer than any temporary loss.
const LIMIT: Duration = Duration::from_secs(90);

/// Limit of messages of a rank queued for later views.
const WAITING_MAX: u64 = 16;
