//! A rank in a recovery: the production state machine of the view change and the data left by the tree, driven as by
//! `sumac::comm`.

use super::check::{compare, sum};
use super::facts::{Ended, Facts};
use super::initial::InitialState;
use super::violation::{Rules, ViolationKind};
use crate::rank::Memory;
use crate::scope::{Scope, Wiring};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;
use sumac::harness::{Action, Attempt, Change, Chunk, Landed, Origin, Outcome, Plan, RankReport, ViewMessage};
use sumac::transport::packets::{Endpoint, OpId};
use sumac_hal::ids::Rank;
use sumac_hal::op::Path;
use sumac_hal::port::{Addr, Ecn};
use sumac_hal::time::Instant;
use sumac_hal::uplink::Uplink;

/// What is fixed during a recovery.
#[derive(Debug)]
pub(super) struct Setting<'s> {
    pub(super) scope: &'s Scope,
    pub(super) wiring: &'s Wiring,
    pub(super) rules: Rules,
    /// Whether the controller reports dead ranks; otherwise ranks suspect each other.
    pub(super) has_controller: bool,
}

/// The path of a rank's operations.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Way {
    Tree(Rc<Endpoint>),
    Schedules,
}

/// A recovery plan in progress.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Trial {
    attempt: Attempt,
    plan: Plan,
    /// The number of its chunks that have landed.
    landed: usize,
}

/// A view change in progress.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Changing {
    change: Change,
    landed: Landed,
    trial: Option<Trial>,
    /// The attempt whose plan was started last; its connections can be used only once.
    ran: Option<Attempt>,
    /// The tree obtained with the last completed plan; 0 for none.
    found: u64,
    /// The number of operations that had returned before the view change.
    returned: u64,
}

/// A rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct RankState {
    rank: usize,
    view: u32,
    way: Way,
    /// The first operation on `way`.
    first: u64,
    called: u64,
    returned: u64,
    memory: Memory,
    /// The ranks that it knows to be dead.
    known: BTreeSet<usize>,
    changing: Option<Box<Changing>>,
    /// The previous view change, which answers ranks that lag behind.
    settled: Option<(u32, Box<Change>)>,
    /// Messages about later views: view, sender, message.
    early: Vec<(u32, usize, ViewMessage)>,
    /// The committed outcome of each view.
    outcomes: Vec<Outcome>,
    end: Option<Ended>,
}

/// The data that a rank contributes to an attempt, for all others.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct SharedData {
    pub(super) from: usize,
    pub(super) view: u32,
    pub(super) attempt: Attempt,
    pub(super) plan: Plan,
    /// For each chunk: the result if the rank has it, otherwise its contribution if the plan needs it.
    pub(super) chunks: Vec<Vec<u8>>,
}

/// An event at a rank.
#[derive(Debug, Clone, Copy)]
pub(super) enum Event<'e> {
    /// It detects the loss of its tree.
    Begin,
    /// A message about a view arrives.
    ViewMessage(usize, u32, &'e ViewMessage),
    /// A packet of the lost tree arrives.
    Late(Addr, &'e [u8]),
    /// It learns that a rank is dead.
    Hear(usize),
    /// The next chunk of its plan is available from these contributions.
    Land(&'e [&'e SharedData]),
    /// Its plan fails.
    Fail,
    /// Its plan is complete, with another tree or without one.
    Finish(bool),
    /// The retry timer fires.
    Retry,
    /// The retransmission timer fires.
    Resend,
    /// The deadline expires.
    Deadline,
}

/// The outcome of an event.
#[derive(Debug, Default)]
pub(super) struct Act {
    pub(super) said: Vec<(usize, u32, ViewMessage)>,
    pub(super) shared_data: Option<SharedData>,
    pub(super) wrong: Option<(ViolationKind, String)>,
}

impl RankState {
    /// Create a rank whose tree is about to be lost.
    pub(super) fn new(rank: usize, front: &InitialState) -> Self {
        Self {
            rank,
            view: 0,
            way: Way::Tree(Rc::new(front.endpoint.clone())),
            first: 0,
            called: front.called,
            returned: front.returned,
            memory: front.memory.clone(),
            known: BTreeSet::new(),
            changing: None,
            settled: None,
            early: Vec::new(),
            outcomes: Vec::new(),
            end: None,
        }
    }

    /// Apply an event.
    pub(super) fn meet(&mut self, setting: &Setting<'_>, event: Event<'_>) -> Act {
        let mut run = Run { part: self, setting, act: Act::default() };
        run.meet(event);
        let act = run.act;
        self.changing.iter_mut().for_each(|changing| changing.change.normalize_time());
        self.settled.iter_mut().for_each(|(_, change)| change.normalize_time());
        act
    }

    /// Return the facts for the oracles.
    pub(super) fn facts(&self, setting: &Setting<'_>) -> Facts {
        let changing = self.changing.as_deref();
        let trial = changing.and_then(|changing| changing.trial.as_ref());
        Facts {
            view: self.view,
            has_tree: matches!(self.way, Way::Tree(_)),
            is_changing: changing.is_some(),
            end: self.end.clone(),
            known: self.known.clone(),
            promised: changing.and_then(|changing| changing.change.attempt()),
            ran: changing.and_then(|changing| changing.ran),
            trial: trial.map(|trial| (trial.attempt, trial.plan.live.iter().map(|rank| rank.0 as usize).collect())),
            next: trial.and_then(|trial| Some(trial.plan.chunks.get(trial.landed)?.origin)),
            asks: trial.is_some_and(|trial| trial.plan.finds_tree && setting.has_controller),
            retries: changing.is_some_and(|changing| changing.change.poll_timeout() < Instant::ZERO + RESEND),
            outcomes: self.outcomes.clone(),
        }
    }
}

/// An event being applied to a rank.
struct Run<'r, 's> {
    part: &'r mut RankState,
    setting: &'r Setting<'s>,
    act: Act,
}

impl Run<'_, '_> {
    fn meet(&mut self, event: Event<'_>) {
        match event {
            Event::Begin => self.change_view(true),
            Event::ViewMessage(from, view, said) => self.hear(from, view, said.clone()),
            Event::Late(from, bytes) => self.take_late(from, bytes),
            Event::Hear(dead) => {
                self.part.known.insert(dead);
                if self.part.changing.is_some() {
                    let has_controller = self.setting.has_controller;
                    self.tell(|change| report_death(change, dead, has_controller));
                } else {
                    self.change_view(true);
                }
            }
            Event::Land(shared_data_sets) => self.land(shared_data_sets),
            Event::Fail => {
                let trial = self.changing().trial.take().expect("it does a plan");
                self.tell(|change| change.failed(trial.attempt, NOW));
            }
            Event::Finish(found) => self.finish(found),
            Event::Retry => self.tell(|change| change.handle_timeout(NOW + RETRY)),
            Event::Resend => self.tell(|change| change.handle_timeout(NOW + RESEND)),
            Event::Deadline => self.tell(|change| change.handle_timeout(NOW + LIMIT)),
        }
    }

    fn changing(&mut self) -> &mut Changing {
        self.part.changing.as_mut().expect("in a change")
    }

    fn wrong(&mut self, wrong: ViolationKind, text: String) {
        self.act.wrong.get_or_insert((wrong, format!("rank {}: {text}", self.part.rank)));
    }

    fn change_view(&mut self, begins: bool) {
        if self.part.changing.is_some() || self.part.end.is_some() {
            return;
        }
        let Setting { wiring, rules, has_controller, .. } = self.setting;
        let own = (Rank(self.part.rank as u32), wiring.ranks.len() as u32);
        let mut change = Change::new(own, self.part.view, *has_controller, NOW + LIMIT).with_flaw(rules.view);
        self.part.known.iter().for_each(|&dead| report_death(&mut change, dead, *has_controller));
        if begins {
            change.begin();
        }
        change.handle_timeout(NOW);
        let (landed, returned) = (Landed::default(), self.part.returned);
        let changing = Changing { change, landed, trial: None, ran: None, found: 0, returned };
        self.part.changing = Some(Box::new(changing));
        self.drive();
    }

    fn tell(&mut self, news: impl FnOnce(&mut Change)) {
        news(&mut self.changing().change);
        self.drive();
    }

    /// Perform all steps that the view change requests.
    fn drive(&mut self) {
        while let Some(changing) = &mut self.part.changing {
            let view = self.part.view;
            let said = std::iter::from_fn(|| changing.change.poll_transmit());
            self.act.said.extend(said.map(|(to, said)| (to.0 as usize, view, said)));
            let tree = match &self.part.way {
                Way::Tree(endpoint) => Some(&**endpoint),
                Way::Schedules => None,
            };
            match changing.change.poll_action(tree, NOW) {
                None => break,
                Some(Action::Report(attempt)) => self.report(attempt),
                Some(Action::Execute(attempt, plan)) => self.begin_plan(attempt, plan),
                Some(Action::Unsound(of)) => {
                    self.wrong(ViolationKind::Unrecoverable, format!("the chunk inventory of {of} is invalid"));
                }
                Some(Action::Commit(outcome)) => self.commit(outcome),
                Some(Action::End(end)) => self.leave(Ended::Out(end)),
            }
        }
    }

    fn hear(&mut self, from: usize, view: u32, said: ViewMessage) {
        let part = &mut *self.part;
        if view > part.view {
            part.early.push((view, from, said));
            return;
        }
        if view < part.view {
            let Some((_, change)) = part.settled.as_mut().filter(|(of, _)| *of == view) else { return };
            change.handle(Rank(from as u32), said, NOW);
            let answers = std::iter::from_fn(|| change.poll_transmit());
            self.act.said.extend(answers.map(|(to, said)| (to.0 as usize, view, said)));
            return;
        }
        if part.end.is_some() {
            self.act.said.extend(said.answer_after_end().map(|said| (from, view, said)));
            return;
        }
        self.change_view(false);
        if self.part.changing.is_some() {
            self.tell(|change| {
                change.handle(Rank(from as u32), said, NOW);
                change.handle_timeout(NOW);
            });
        }
    }

    fn take_late(&mut self, from: Addr, bytes: &[u8]) {
        let part = &mut *self.part;
        // Only the first tree can receive it; later trees have another epoch.
        if let (0, Way::Tree(endpoint)) = (part.view, &mut part.way) {
            let endpoint = Rc::make_mut(endpoint);
            endpoint.handle(Uplink::RESUME_AT, from, Ecn::Unmarked, bytes, &mut part.memory);
            while endpoint.poll_event().is_some() {}
            while endpoint.poll_transmit(Uplink::RESUME_AT, &part.memory).is_some() {}
            endpoint.rest();
        }
    }

    fn report(&mut self, attempt: Attempt) {
        let RankState { view, way, first, returned, changing, .. } = &mut *self.part;
        let changing = changing.as_mut().expect("in a change");
        let report = match way {
            Way::Tree(endpoint) => RankReport::of(&**endpoint, &changing.landed, *first, *view),
            Way::Schedules => RankReport::without_tree(*returned, *view),
        };
        changing.trial = None;
        changing.change.report(attempt, report);
    }

    /// All live ranks have reported: contribute this rank's data to the plan that follows.
    fn begin_plan(&mut self, attempt: Attempt, plan: Plan) {
        let lacks_tree = || (plan.len > plan.chunks.len() as u64).then(|| "a plan with chunks without a tree".into());
        if let Some(why) = plan.failure().or_else(lacks_tree) {
            return self.wrong(ViolationKind::Unrecoverable, why);
        }
        let RankState { rank, view, way, memory, changing, .. } = &mut *self.part;
        let changing = changing.as_mut().expect("in a change");
        let endpoint = match way {
            Way::Tree(endpoint) => Some(&**endpoint),
            Way::Schedules => None,
        };
        if changing.ran.replace(attempt) == Some(attempt) && !plan.chunks.is_empty() {
            return changing.change.failed(attempt, NOW);
        }
        if let Some(endpoint) = endpoint {
            let own = Rank(*rank as u32);
            let mut give = |chunk: &Chunk| chunk.give(endpoint, &changing.landed, own, memory);
            let chunks: Vec<Vec<u8>> = plan.chunks.iter().map(&mut give).collect();
            let shared_data = SharedData { from: *rank, view: *view, attempt, plan: plan.clone(), chunks };
            self.act.shared_data = Some(shared_data).filter(|shared_data| !shared_data.chunks.is_empty());
        }
        changing.found = 0;
        changing.trial = Some(Trial { attempt, plan, landed: 0 });
    }

    /// Land the next chunk.
    fn land(&mut self, shared_data_sets: &[&SharedData]) {
        let RankState { way, memory, changing, .. } = &mut *self.part;
        let (Some(changing), Way::Tree(endpoint)) = (changing, way) else { panic!("a chunk without a tree") };
        let trial = changing.trial.as_mut().expect("it does a plan");
        let at = trial.landed;
        let chunk = trial.plan.chunks[at];
        if let Some(other) = shared_data_sets.iter().find(|shared_data| shared_data.plan != trial.plan) {
            let text = format!("{:?} where rank {} has {:?}", trial.plan, other.from, other.plan);
            return self.wrong(ViolationKind::Disagreement, text);
        }
        let given: Vec<&[u8]> = shared_data_sets.iter().map(|shared_data| &shared_data.chunks[at][..]).collect();
        let result = match chunk.origin {
            Origin::Held(holder) => {
                let holder = shared_data_sets
                    .iter()
                    .position(|shared_data| shared_data.from == holder.0 as usize)
                    .expect("the holder gave");
                given[holder].to_vec()
            }
            Origin::Recompute => sum(&given),
        };
        if result.len() != chunk.len_bytes {
            let text = format!("chunk {}: {} bytes in place of {}", chunk.seq, result.len(), chunk.len_bytes);
            return self.wrong(ViolationKind::Unrecoverable, text);
        }
        if self.setting.rules.forgets_landed {
            chunk.land(endpoint, &result, memory);
        } else {
            chunk.land_once(&**endpoint, &mut changing.landed, &result, memory);
        }
        trial.landed += 1;
    }

    fn finish(&mut self, found: bool) {
        let word = if found { u64::from(self.part.view) + 2 } else { 0 };
        let returns_early = self.setting.rules.returns_early;
        let changing = self.changing();
        let trial = changing.trial.take().expect("it does a plan");
        changing.found = word;
        changing.change.executed(trial.attempt, word);
        if returns_early {
            self.complete_below(trial.plan.cut());
        }
        self.drive();
    }

    /// Return from the tree's operations that end at `cut` or below.
    fn complete_below(&mut self, cut: u64) {
        let Way::Tree(endpoint) = &self.part.way else { return };
        let below = self.part.first + endpoint.first_behind(cut).0;
        while self.part.returned < below {
            let op = self.part.returned;
            if let Some(text) = self.compare(op, |_| true) {
                self.wrong(ViolationKind::Result, format!("operation {op} returns: {text}"));
            }
            self.part.memory.0[op as usize].fill(0xee);
            self.part.returned += 1;
        }
    }

    fn commit(&mut self, outcome: Outcome) {
        let changing = self.part.changing.take().expect("in a change");
        self.complete_below(outcome.cut);
        self.part.outcomes.push(outcome.clone());
        if !outcome.dead.is_empty() {
            let returned = self.part.returned;
            // A rank that has returned from an operation can supply everything that others lack of it.
            if returned != outcome.operation {
                self.wrong(ViolationKind::Contradiction, format!("{returned} operations have returned: {outcome:?}"));
            }
            self.part.changing = Some(changing);
            self.leave(Ended::RanksFailed(outcome.dead, outcome.operation));
            return;
        }
        for op in self.part.returned..self.part.memory.0.len() as u64 {
            if let Some(text) = self.compare(op, |_| false) {
                self.wrong(ViolationKind::Result, format!("operation {op} begins again: {text}"));
            }
        }
        if outcome.vote != 0 && outcome.vote != changing.found {
            self.wrong(ViolationKind::Disagreement, format!("it has not got tree {}", outcome.vote));
        }
        self.part.settled = Some((self.part.view, Box::new(changing.change)));
        self.part.view += 1;
        self.part.first = self.part.returned;
        self.part.way = if outcome.vote == 0 { Way::Schedules } else { self.next_tree() };
        let early = std::mem::take(&mut self.part.early);
        if !self.part.known.is_empty() {
            self.change_view(early.is_empty());
        }
        early.into_iter().for_each(|(view, from, said)| self.hear(from, view, said));
    }

    /// Return the next tree at the moment of its loss, before any traffic.
    fn next_tree(&self) -> Way {
        let Setting { scope, wiring, .. } = self.setting;
        let mut endpoint = Endpoint::new(wiring.endpoint(scope, self.part.rank, 1 + self.part.view as u16));
        for (desc, _) in &scope.ops()[self.part.first as usize..self.part.called as usize] {
            endpoint.post(*desc, Path::Tree, None).expect("calls of a group that has not failed");
        }
        endpoint.freeze();
        let _ = endpoint.poll_event();
        endpoint.rest();
        Way::Tree(Rc::new(endpoint))
    }

    fn compare(&self, op: u64, is_new: impl Fn(u64) -> bool) -> Option<String> {
        let Setting { scope, wiring, .. } = self.setting;
        let RankState { rank, memory, .. } = &*self.part;
        compare(scope, (*rank, wiring.ranks.len()), memory, op, is_new)
    }

    /// End the group: each chunk must be entirely old or entirely new, as the error reports.
    fn leave(&mut self, end: Ended) {
        let changing = self.part.changing.take().expect("in a change");
        for op in self.part.returned..self.part.memory.0.len() as u64 {
            let fresh = match &self.part.way {
                Way::Tree(endpoint) if op < self.part.called => {
                    changing.landed.completed_elements(&**endpoint, OpId(op - self.part.first))
                }
                _ => Vec::new(),
            };
            let is_new = |i: u64| fresh.iter().any(|elements| elements.contains(&i));
            if let Some(text) = self.compare(op, is_new) {
                self.wrong(ViolationKind::Chunks, format!("operation {op} fails: {text}"));
            }
        }
        self.part.end = Some(end);
    }
}

/// Report a death as the controller does, or suspect it if there is none.
fn report_death(change: &mut Change, dead: usize, has_controller: bool) {
    let dead = Rank(dead as u32);
    match has_controller {
        true => _ = change.report_deaths(&[dead], true),
        false => change.rank_died(dead, false),
    }
}

/// Times are normalised between events.
const NOW: Instant = Instant::ZERO;
/// The coordinator's retry interval after a failed attempt.
const RETRY: Duration = Duration::from_millis(300);
/// The retransmission interval of unanswered messages.
const RESEND: Duration = Duration::from_secs(1);
/// The time limit of a view change.
const LIMIT: Duration = Duration::from_secs(1000);
