//! Dead ranks, partitioned ranks, a permanently lost controller: which rank detects what and when, and how each
//! rank may end.
//!
//! A rank dies at a drawn time, or right after a step of an operation or view change, its own or another rank's. Its
//! last messages are lost from some point on. The others learn of the death one by one: for certain from the controller
//! as long as they have one, otherwise by silence, which counts only with a strict majority.

use super::cluster::Cluster;
use super::coverage::Mark;
use super::incident::Alarm;
use super::loss::{Loss, LossKind, Moment, Point};
use super::messages::Message;
use super::options::{Draw, Options};
use super::ranks::GroupEnd;
use super::report::{Report, Violation};
use super::scenario::Scenario;
use crate::oracle::weight;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac::harness::End;
use sumac_hal::ids::Rank;
use sumac_hal::time::Instant;

/// Which rank dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Victim {
    /// This rank.
    Rank(usize),
    /// The lowest surviving rank: the coordinator.
    Lowest,
    /// The rank that made the step; the lowest, if ranks do not make it.
    Current,
}

/// Dead and disconnected ranks, and which deaths are known.
#[derive(Default)]
pub(super) struct Deaths {
    dead: BTreeSet<usize>,
    /// By rank and group: the deaths it knows of, and whether for certain.
    known: BTreeMap<(usize, usize), BTreeMap<usize, bool>>,
    split: Option<Split>,
    /// The rank that makes the current step.
    current: Option<usize>,
}

/// A partition of the ranks into two sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Split {
    salt: u64,
    share: u64,
    until: Instant,
}

impl Deaths {
    pub(super) fn is_dead(&self, rank: usize) -> bool {
        self.dead.contains(&rank)
    }

    /// Return the ranks that a rank knows for certain to be dead.
    pub(super) fn confirmed(&self, at: (usize, usize)) -> Vec<Rank> {
        self.known(at, true)
    }

    /// Return the ranks that a rank only suspects to be dead.
    pub(super) fn suspected(&self, at: (usize, usize)) -> Vec<Rank> {
        self.known(at, false)
    }

    /// Return whether a rank knows of a dead rank.
    pub(super) fn knows_any(&self, at: (usize, usize)) -> bool {
        self.known.contains_key(&at)
    }

    fn known(&self, at: (usize, usize), is_confirmed: bool) -> Vec<Rank> {
        let known = self.known.get(&at).into_iter().flatten().filter(|(_, confirmed)| **confirmed == is_confirmed);
        known.map(|(&of, _)| Rank(of as u32)).collect()
    }

    /// Return when the last partition ends, if there ever was one.
    pub(super) fn split_until(&self) -> Option<Instant> {
        self.split.map(|split| split.until)
    }

    /// Return until when two ranks cannot reach each other, if they cannot.
    pub(super) fn cut_until(&self, one: usize, other: usize, now: Instant) -> Option<Instant> {
        let split = self.split.filter(|split| split.until > now)?;
        let side = |rank: usize| weight(&[split.salt, rank as u64]) % 1000 < split.share;
        (side(one) != side(other)).then_some(split.until)
    }
}

/// Draw the losses of a run with dead ranks: at most one loss in the tree, one or two ranks, sometimes the controller
/// for good, rarely a partition.
pub(super) fn draw_deaths(draw: &mut Draw, options: &Options) -> Vec<Loss> {
    let mut losses = Vec::new();
    let ranks = options.ranks as u64;
    if draw.chance(600) {
        losses.push(Loss::draw(draw, options, options.devices(), true));
    }
    for _ in 0..draw.one_of(&[1, 1, 1, 2, 2]) {
        let who = match draw.below(4) {
            0 => Victim::Lowest,
            1 => Victim::Rank(draw.below(ranks) as usize),
            _ => Victim::Current,
        };
        losses.push(Loss { kind: LossKind::Kill(who), when: moment_of(draw, ranks) });
    }
    if draw.chance(450) {
        let (from_the_start, later) = (draw.chance(600), moment_of(draw, ranks));
        let when = if from_the_start { Moment::At(Duration::ZERO) } else { later };
        losses.push(Loss { kind: LossKind::NoController, when });
    }
    if draw.chance(200) {
        let (salt, share) = (draw.bits(), draw.one_of(&[100, 300, 500]));
        let len = Duration::from_millis(draw.one_of(&[300, 2_000, 20_000]));
        let (in_an_attempt, nth) = (draw.chance(500), 1 + draw.below(ranks));
        let when = if in_an_attempt { Moment::After(Point::Decided, nth) } else { moment_of(draw, ranks) };
        losses.push(Loss { kind: LossKind::Split { salt, share, len }, when });
    }
    losses
}

fn moment_of(draw: &mut Draw, ranks: u64) -> Moment {
    if draw.chance(200) {
        return Moment::At(super::faults::moment(draw));
    }
    let points = [
        (Point::Sent, 200),
        (Point::Completed, 40),
        (Point::Frozen, ranks),
        (Point::Promised, 2 * ranks),
        (Point::Decided, 2 * ranks),
        (Point::Landed, 20),
        (Point::Done, ranks),
        (Point::Committed, ranks),
    ];
    let (point, most) = draw.one_of(&points);
    Moment::After(point, 1 + draw.below(most))
}

impl Cluster<'_, '_> {
    /// Count a step of a rank.
    pub(super) fn reach_by(&mut self, point: Point, rank: usize) {
        self.deaths.current = Some(rank);
        self.reach(point, None);
        self.deaths.current = None;
    }

    fn live(&self) -> impl Iterator<Item = usize> {
        (0..self.options.ranks).filter(|&rank| !self.deaths.is_dead(rank))
    }

    pub(super) fn kill(&mut self, who: Victim) {
        let lowest = self.live().next().expect("one always lives");
        let rank = match who {
            Victim::Rank(rank) => rank,
            Victim::Lowest => lowest,
            Victim::Current => self.deaths.current.unwrap_or(lowest),
        };
        if self.live().count() < 2 || !self.deaths.dead.insert(rank) {
            return;
        }
        let in_change = |group: &super::setup::Member| group.membership.changing.is_some();
        self.seen.note(if self.members[rank].iter().any(in_change) { Mark::RankDiedInChange } else { Mark::RankDied });
        self.lose_messages(rank);
        self.close_sessions(rank);
        for other in self.live().collect::<Vec<_>>() {
            let after = self.message_draw.one_of(&[1_000_000, 20_000_000, 1_000_000_000]);
            let at = self.now + Duration::from_nanos(self.message_draw.below(after));
            self.schedule(at, Alarm::Silent { rank: other, of: rank });
        }
    }

    /// Lose a dead rank's last messages: to each other rank, from some message on.
    fn lose_messages(&mut self, rank: usize) {
        let mut sent: BTreeMap<usize, Vec<(Instant, u64)>> = BTreeMap::new();
        for (key, message) in &self.messages {
            if let Some((from, to)) = message.between_ranks()
                && from == rank
            {
                sent.entry(to).or_default().push(*key);
            }
        }
        for keys in sent.into_values() {
            let kept = self.message_draw.below(keys.len() as u64 + 1) as usize;
            keys[kept..].iter().for_each(|key| _ = self.messages.remove(key));
        }
    }

    /// Let a rank detect that another is silent. In groups with a controller, that would tell it.
    pub(super) fn detect_silence(&mut self, rank: usize, of: usize) -> Result<(), Violation> {
        let is_cut = self.deaths.cut_until(rank, of, self.now).is_some();
        if self.deaths.is_dead(rank) || !self.deaths.is_dead(of) && !is_cut {
            return Ok(());
        }
        for group in 0..self.options.groups.len() {
            if !self.has_controller((rank, group)) {
                self.learn_death((rank, group), of, false)?;
            }
        }
        Ok(())
    }

    /// A rank learns of another one's death: for certain from the controller, or it only suspects it.
    pub(super) fn learn_death(&mut self, at: (usize, usize), of: usize, is_confirmed: bool) -> Result<(), Violation> {
        let known = self.deaths.known.entry(at).or_default();
        if self.deaths.dead.contains(&at.0) || known.contains_key(&of) {
            return Ok(());
        }
        known.insert(of, is_confirmed);
        self.seen.note(if is_confirmed { Mark::DeathConfirmed } else { Mark::DeathSuspected });
        if self.members[at.0][at.1].membership.changing.is_none() {
            return self.change_view(at, true);
        }
        let confirmed = self.deaths.confirmed(at);
        self.advance_change(at, |change| match is_confirmed {
            true => _ = change.report_deaths(&confirmed, true),
            false => change.rank_died(Rank(of as u32), false),
        })
    }

    /// Partition the ranks into two sides for a while.
    pub(super) fn split(&mut self, salt: u64, share: u64, len: Duration) {
        self.deaths.split = Some(Split { salt, share, until: self.now + len });
        self.live().collect::<Vec<_>>().into_iter().for_each(|rank| self.watch(rank));
    }

    /// Schedule the detection of silent ranks.
    pub(super) fn watch(&mut self, rank: usize) {
        for of in (0..self.options.ranks).filter(|&of| of != rank) {
            if self.deaths.is_dead(of) || self.deaths.cut_until(rank, of, self.now).is_some() {
                let at =
                    self.now + Duration::from_secs(1) + Duration::from_nanos(self.message_draw.below(1_000_000_000));
                self.schedule(at, Alarm::Silent { rank, of });
            }
        }
    }

    /// Lose or delay a due message between partitioned ranks.
    pub(super) fn intercept(&mut self, message: Message) -> Option<Message> {
        let Some((from, to)) = message.between_ranks() else { return Some(message) };
        if self.deaths.is_dead(to) {
            return None;
        }
        let Some(until) = self.deaths.cut_until(from, to, self.now) else { return Some(message) };
        // Connections of host collectives stay; those of a view change are new.
        if matches!(message, Message::Entered { .. }) {
            self.message_numbers += 1;
            self.messages.insert((until, self.message_numbers), message);
        }
        self.seen.note(Mark::MessageCut);
        None
    }

    /// Check how each surviving rank ended, and that all ranks that failed because of dead ranks name the same ones.
    pub(super) fn check_survivors(&self) -> Result<(), Violation> {
        let Scenario::Ranks { losses } = &self.options.scenario else { return Ok(()) };
        let lost = |what: fn(&LossKind) -> bool| losses.iter().any(|loss| what(&loss.kind));
        let is_split = lost(|kind| matches!(kind, LossKind::Split { .. }));
        let is_alone = self.control.is_gone;
        let is_minority = 2 * self.live().count() <= self.options.ranks;
        for rank in self.live() {
            for (group, member) in self.members[rank].iter().enumerate() {
                let is_complete = member.done == self.options.groups[group].ops.len() as u64;
                let is_fine = match &member.membership.end {
                    None => is_complete && member.error.is_none() && member.membership.changing.is_none(),
                    Some(GroupEnd::RanksFailed(dead, _)) => {
                        let is_out = |rank: &Rank| {
                            let end = &self.members[rank.0 as usize][group].membership.end;
                            // A disconnected rank may have finished before.
                            let is_cut_off = is_alone && is_split;
                            is_cut_off || self.deaths.is_dead(rank.0 as usize) || matches!(end, Some(GroupEnd::Out(_)))
                        };
                        !dead.contains(&Rank(rank as u32)) && dead.iter().all(is_out)
                    }
                    Some(GroupEnd::Out(End::Partitioned)) => is_alone && (is_minority || is_split),
                    Some(GroupEnd::Out(_)) => is_alone && is_split,
                };
                if !is_fine {
                    let end = format!("{:?}", member.membership.end);
                    return Err(Violation::RankEnd { group, rank, done: member.done, end });
                }
            }
        }
        Ok(())
    }

    /// Count how the ranks of such a run ended.
    pub(super) fn count_survivors(&self, report: &mut Report) {
        report.killed = self.deaths.dead.len() as u64;
        for member in self.live().flat_map(|rank| &self.members[rank]) {
            match &member.membership.end {
                None => {}
                Some(GroupEnd::RanksFailed(..)) => report.ranks_failed += 1,
                Some(GroupEnd::Out(End::Partitioned)) => report.partitioned += 1,
                Some(GroupEnd::Out(_)) => report.undecided += 1,
            }
        }
    }
}
