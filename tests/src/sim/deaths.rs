//! Ranks that die, ranks that can't reach each other, a controller that is gone for good: who hears of what when, and how
//! each rank may end then.
//!
//! A rank dies at a drawn moment, or right after a step of an operation or of a view change, its own or another's. What it
//! had said last is lost from any letter on. The others hear of it one by one: for certain, as long as they have a
//! controller; otherwise nothing is heard of it, and that counts only among a strict majority.

use super::cluster::Cluster;
use super::coverage::Mark;
use super::incident::Alarm;
use super::loss::{Ill, Loss, Moment, Point};
use super::mail::Mail;
use super::options::{Draw, Options};
use super::ranks::GroupEnd;
use super::report::{Report, Violation};
use super::scenario::Scenario;
use crate::oracle::weight;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac::rehearsal::End;
use sumac_hal::ids::Rank;
use sumac_hal::time::Instant;

/// Which rank dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Victim {
    /// This one.
    Rank(usize),
    /// The lowest that lives: who leads.
    Lowest,
    /// The one that has made the step; the lowest, if ranks do not make it.
    Here,
}

/// Who is dead, cut off, and known to be.
#[derive(Default)]
pub(super) struct Deaths {
    dead: BTreeSet<usize>,
    /// By rank: of whom it has heard that they are dead, and whether for certain.
    known: BTreeMap<usize, BTreeMap<usize, bool>>,
    /// Ranks that have no controller any more.
    alone: BTreeSet<usize>,
    split: Option<Split>,
    /// Who makes the step that is counted now.
    here: Option<usize>,
}

/// Ranks on two sides that do not hear each other.
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

    pub(super) fn has_controller(&self, rank: usize) -> bool {
        !self.alone.contains(&rank)
    }

    /// Return whom a rank knows to be dead, and whether for certain.
    pub(super) fn known(&self, rank: usize) -> impl Iterator<Item = (usize, bool)> + use<> {
        self.known.get(&rank).cloned().unwrap_or_default().into_iter()
    }

    /// Until when some ranks do not hear each other, if that ever was so.
    pub(super) fn split_until(&self) -> Option<Instant> {
        self.split.map(|split| split.until)
    }

    /// Until when two ranks do not hear each other, if they don't.
    pub(super) fn cut_until(&self, one: usize, other: usize, now: Instant) -> Option<Instant> {
        let split = self.split.filter(|split| split.until > now)?;
        let side = |rank: usize| weight(&[split.salt, rank as u64]) % 1000 < split.share;
        (side(one) != side(other)).then_some(split.until)
    }
}

/// Draw what is lost where ranks die: at most one thing of the tree, one or two ranks, at times the controller for good,
/// seldom the way between ranks.
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
            _ => Victim::Here,
        };
        losses.push(Loss { ill: Ill::Kill(who), when: moment_of(draw, ranks) });
    }
    if draw.chance(450) {
        let (from_the_start, later) = (draw.chance(600), moment_of(draw, ranks));
        let when = if from_the_start { Moment::At(Duration::ZERO) } else { later };
        losses.push(Loss { ill: Ill::NoController, when });
    }
    if draw.chance(200) {
        let (salt, share) = (draw.bits(), draw.one_of(&[100, 300, 500]));
        let len = Duration::from_millis(draw.one_of(&[300, 2_000, 20_000]));
        let (in_an_attempt, nth) = (draw.chance(500), 1 + draw.below(ranks));
        let when = if in_an_attempt { Moment::After(Point::Decided, nth) } else { moment_of(draw, ranks) };
        losses.push(Loss { ill: Ill::Split { salt, share, len }, when });
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
    /// A rank has made a step.
    pub(super) fn reach_by(&mut self, point: Point, rank: usize) {
        self.deaths.here = Some(rank);
        self.reach(point, None);
        self.deaths.here = None;
    }

    fn live(&self) -> impl Iterator<Item = usize> {
        (0..self.options.ranks).filter(|&rank| !self.deaths.is_dead(rank))
    }

    pub(super) fn kill(&mut self, who: Victim) {
        let lowest = self.live().next().expect("one always lives");
        let rank = match who {
            Victim::Rank(rank) => rank,
            Victim::Lowest => lowest,
            Victim::Here => self.deaths.here.unwrap_or(lowest),
        };
        if self.live().count() < 2 || !self.deaths.dead.insert(rank) {
            return;
        }
        let in_change = |group: &super::setup::Member| group.membership.changing.is_some();
        self.seen.note(if self.members[rank].iter().any(in_change) { Mark::RankDiedInChange } else { Mark::RankDied });
        self.lose_letters(rank);
        for other in self.live().collect::<Vec<_>>() {
            let after = self.mail_draw.one_of(&[1_000_000, 20_000_000, 1_000_000_000]);
            let at = self.now + Duration::from_nanos(self.mail_draw.below(after));
            self.schedule(at, Alarm::Silent { rank: other, of: rank });
        }
    }

    /// What a dead rank had said last is lost, to each other rank from some letter on.
    fn lose_letters(&mut self, rank: usize) {
        let mut sent: BTreeMap<usize, Vec<(Instant, u64)>> = BTreeMap::new();
        for (key, mail) in &self.letters {
            if let Some((from, to)) = mail.between_ranks()
                && from == rank
            {
                sent.entry(to).or_default().push(*key);
            }
        }
        for keys in sent.into_values() {
            let kept = self.mail_draw.below(keys.len() as u64 + 1) as usize;
            keys[kept..].iter().for_each(|key| _ = self.letters.remove(key));
        }
    }

    /// A rank may have found out that another is silent.
    pub(super) fn find_silent(&mut self, rank: usize, of: usize) -> Result<(), Violation> {
        let is_cut = self.deaths.cut_until(rank, of, self.now).is_some();
        let (is_dead, has_controller) = (self.deaths.is_dead(of), self.deaths.has_controller(rank));
        let known = self.deaths.known.get(&rank).is_some_and(|known| known.contains_key(&of));
        if self.deaths.is_dead(rank) || known || !is_dead && (!is_cut || has_controller) {
            return Ok(());
        }
        self.deaths.known.entry(rank).or_default().insert(of, has_controller);
        self.seen.note(if has_controller { Mark::DeathByWord } else { Mark::DeathBySilence });
        for group in 0..self.options.groups.len() {
            if self.members[rank][group].membership.changing.is_some() {
                self.tell_change((rank, group), |change| change.rank_died(Rank(of as u32), has_controller))?;
            } else {
                self.change_view((rank, group), true)?;
            }
        }
        Ok(())
    }

    /// The controller is gone for good, as each rank finds out in its own time.
    pub(super) fn lose_controller(&mut self) {
        self.stop_controller(FOR_EVER);
        let most = self.mail_draw.one_of(&[10_000, 1_000_000, 200_000_000]);
        for rank in self.live().collect::<Vec<_>>() {
            let at = self.now + Duration::from_nanos(self.mail_draw.below(most));
            self.schedule(at, Alarm::NoController { rank });
        }
    }

    pub(super) fn miss_controller(&mut self, rank: usize) -> Result<(), Violation> {
        if self.deaths.is_dead(rank) || !self.deaths.alone.insert(rank) {
            return Ok(());
        }
        for group in 0..self.options.groups.len() {
            self.tell_change((rank, group), sumac::rehearsal::Change::controller_lost)?;
        }
        self.watch(rank);
        Ok(())
    }

    /// Ranks on two sides do not hear each other for a while.
    pub(super) fn split(&mut self, salt: u64, share: u64, len: Duration) {
        self.deaths.split = Some(Split { salt, share, until: self.now + len });
        self.live().collect::<Vec<_>>().into_iter().for_each(|rank| self.watch(rank));
    }

    /// Who is silent is found to be so after a while.
    fn watch(&mut self, rank: usize) {
        for of in self.live().filter(|&of| of != rank).collect::<Vec<_>>() {
            if self.deaths.cut_until(rank, of, self.now).is_some() {
                let at = self.now + Duration::from_secs(1) + Duration::from_nanos(self.mail_draw.below(1_000_000_000));
                self.schedule(at, Alarm::Silent { rank, of });
            }
        }
    }

    /// What becomes of a letter that is due: lost, or later, where ranks do not hear each other.
    pub(super) fn intercept(&mut self, mail: Mail) -> Option<Mail> {
        let Some((from, to)) = mail.between_ranks() else {
            return Some(mail).filter(|mail| !mail.to_rank().is_some_and(|rank| self.deaths.is_dead(rank)));
        };
        if self.deaths.is_dead(to) {
            return None;
        }
        let Some(until) = self.deaths.cut_until(from, to, self.now) else { return Some(mail) };
        // A schedule's connections stay; those of a view change are made anew.
        if matches!(mail, Mail::Entered { .. }) {
            self.mail_numbers += 1;
            self.letters.insert((until, self.mail_numbers), mail);
        }
        self.seen.note(Mark::LetterCut);
        None
    }

    /// Check how each rank that lives has ended, and that all that were told of the dead were told the same.
    pub(super) fn check_survivors(&self) -> Result<(), Violation> {
        let Scenario::Ranks { losses } = &self.options.scenario else { return Ok(()) };
        let lost = |what: fn(&Ill) -> bool| losses.iter().any(|loss| what(&loss.ill));
        let is_split = lost(|ill| matches!(ill, Ill::Split { .. }));
        let is_alone = !self.deaths.alone.is_empty();
        let is_minority = 2 * self.live().count() <= self.options.ranks;
        for rank in self.live() {
            for (group, member) in self.members[rank].iter().enumerate() {
                let is_complete = member.done == self.options.groups[group].ops.len() as u64;
                let is_fine = match &member.membership.end {
                    None => is_complete && member.error.is_none() && member.membership.changing.is_none(),
                    Some(GroupEnd::RanksFailed(dead, _)) => {
                        let is_out = |rank: &Rank| {
                            let end = &self.members[rank.0 as usize][group].membership.end;
                            // Who is cut off may have been through.
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

    /// Note how the ranks of such a run have ended.
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

/// Longer than any run.
const FOR_EVER: Duration = Duration::from_secs(100_000);
