//! Exhaustive search of the view change with two or three ranks. It covers all orders of messages between different
//! pairs and, with reconnections, within a pair; the death of a rank at any point, with its messages lost from any
//! point on, and of a second one; the detection of each death by each rank at any time; and right and wrong suspicions
//! where there is no controller.
//!
//! One operation is at stake. Each rank holds its result or not; a result that no rank holds is available while all are
//! alive. Each rank finishes executing the plan at any time, whether or not the others do, which includes more than can
//! happen.

use super::*;
use std::collections::HashSet;
use std::hash::{BuildHasher, Hash, RandomState};

type ViewMessage = Message<bool, bool>;

/// The faults to explore.
#[derive(Debug, Clone, Copy)]
struct Scope {
    ranks: usize,
    /// The number of ranks that may die.
    deaths: usize,
    /// Maximum number of ranks that hold the result at first.
    holders: u32,
    /// The tree is lost, which all ranks notice by themselves; otherwise nothing happens before a rank dies.
    tree_is_lost: bool,
    /// A controller reports dead ranks; otherwise ranks suspect each other, wrongly up to this number of times.
    has_controller: bool,
    false_alarms: usize,
    /// Connections may be replaced at any time; messages on the old one arrive later or never.
    reconnects: bool,
    flaw: Option<Flaw>,
}

#[derive(Clone, Hash)]
struct World {
    views: Vec<View<bool, bool>>,
    /// Messages in flight, by sender and receiver.
    wires: BTreeMap<(usize, usize), VecDeque<ViewMessage>>,
    /// Which ranks have died.
    is_dead: Vec<bool>,
    holds: Vec<bool>,
    running: Vec<Option<(Ballot, bool)>>,
    /// What each rank has committed, also if it died later.
    committed: Vec<Option<Outcome<bool>>>,
    ended: Vec<Option<End>>,
    deaths_left: usize,
    false_alarms_left: usize,
}

#[derive(Debug, Clone, Copy)]
enum Action {
    /// Sender, receiver, and how many earlier messages it overtakes.
    Deliver(usize, usize, usize),
    /// Messages in flight from a dead rank are lost.
    Lose(usize, usize),
    Die(usize),
    /// The first rank learns that the second is dead.
    Detect(usize, usize, Authority),
    FinishPlan(usize),
}

impl World {
    fn new(scope: &Scope, holds: Vec<bool>) -> Self {
        let ranks = scope.ranks;
        let view = |rank: usize| {
            let mut view =
                View::new((Rank(rank as u32), ranks as u32), Dead::new(), scope.has_controller, Instant::ZERO);
            view.set_flaw(scope.flaw);
            view
        };
        let mut world = Self {
            views: (0..ranks).map(view).collect(),
            wires: BTreeMap::new(),
            is_dead: vec![false; ranks],
            holds,
            running: vec![None; ranks],
            committed: vec![None; ranks],
            ended: vec![None; ranks],
            deaths_left: scope.deaths,
            false_alarms_left: scope.false_alarms,
        };
        for rank in (0..ranks).filter(|_| scope.tree_is_lost) {
            world.views[rank].begin();
            world.settle(rank);
        }
        world
    }

    fn actions(&self, scope: &Scope) -> Vec<Action> {
        let ranks = 0..self.views.len();
        let mut actions = Vec::new();
        for (&(from, to), wire) in &self.wires {
            if !wire.is_empty() && !self.is_dead[to] {
                let last = if scope.reconnects { wire.len() } else { 1 };
                actions.extend((0..last).map(|nth| Action::Deliver(from, to, nth)));
                if self.is_dead[from] {
                    actions.push(Action::Lose(from, to));
                }
            }
        }
        for rank in ranks.clone().filter(|&rank| !self.is_dead[rank]) {
            if self.deaths_left > 0 {
                actions.push(Action::Die(rank));
            }
            if self.running[rank].is_some() {
                actions.push(Action::FinishPlan(rank));
            }
            let authority = if scope.has_controller { Authority::Confirmed } else { Authority::Suspicion };
            for other in ranks.clone().filter(|&other| other != rank) {
                let is_news = !self.views[rank].dead().contains_key(&Rank(other as u32)) && self.views[rank].is_open();
                if is_news && (self.is_dead[other] || self.false_alarms_left > 0) {
                    actions.push(Action::Detect(rank, other, authority));
                }
            }
        }
        actions
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Deliver(from, to, nth) => {
                let message =
                    self.wires.get_mut(&(from, to)).and_then(|wire| wire.remove(nth)).expect("a message in flight");
                self.views[to].handle(Rank(from as u32), message, Instant::ZERO);
                self.settle(to);
            }
            Action::Lose(from, to) => self.wires.entry((from, to)).or_default().clear(),
            Action::Die(rank) => {
                self.deaths_left -= 1;
                self.is_dead[rank] = true;
                self.running[rank] = None;
                self.wires.retain(|(_, to), _| *to != rank);
            }
            Action::Detect(rank, other, authority) => {
                self.false_alarms_left -= usize::from(!self.is_dead[other]);
                self.views[rank].rank_died(Rank(other as u32), authority);
                self.settle(rank);
            }
            Action::FinishPlan(rank) => {
                let (ballot, completes) = self.running[rank].take().expect("a plan in execution");
                self.holds[rank] |= completes;
                self.views[rank].done(ballot, completes, 7);
                self.settle(rank);
            }
        }
        self.wires.retain(|_, wire| !wire.is_empty());
    }

    /// Process the messages and events of a rank's view.
    fn settle(&mut self, rank: usize) {
        loop {
            while let Some((to, message)) = self.views[rank].poll_transmit() {
                if !self.is_dead[to.0 as usize] {
                    self.wires.entry((rank, to.0 as usize)).or_default().push_back(message);
                }
            }
            match self.views[rank].poll_event() {
                None => return,
                Some(Event::Promise { ballot }) => {
                    self.running[rank] = None;
                    self.views[rank].promise(ballot, self.holds[rank]);
                }
                Some(Event::Run { ballot, reports }) => {
                    let completes = reports.len() == self.views.len() || reports.values().any(|&holds| holds);
                    self.running[rank] = Some((ballot, completes));
                }
                Some(Event::Committed(outcome)) => {
                    self.running[rank] = None;
                    self.committed[rank] = Some(outcome);
                }
                Some(Event::Ended(end)) => {
                    self.running[rank] = None;
                    self.ended[rank] = Some(end);
                }
            }
        }
    }

    /// Return the violation in a state, if any; `is_last` if no action is possible.
    fn violation(&self, scope: &Scope, is_last: bool) -> Option<String> {
        let mut outcomes = self.committed.iter().flatten();
        if let Some(first) = outcomes.next()
            && let Some(other) = outcomes.find(|other| *other != first)
        {
            return Some(format!("one rank has committed {first:?}, another {other:?}"));
        }
        for (rank, outcome) in self.committed.iter().enumerate() {
            if outcome.as_ref().is_some_and(|outcome| outcome.decision && !self.holds[rank]) {
                return Some(format!("rank {rank} has committed a result that it does not have"));
            }
        }
        // A wrongly suspected rank may wait for ranks that ignore it, until its deadline.
        if !is_last || scope.false_alarms > 0 {
            return None;
        }
        let happened = !scope.tree_is_lost && self.is_dead.iter().all(|is_dead| !is_dead);
        let is_open = |rank: &usize| !happened && !self.is_dead[*rank] && self.views[*rank].is_open();
        if let Some(rank) = (0..scope.ranks).find(is_open) {
            return Some(format!("rank {rank} never finishes"));
        }
        let live = self.is_dead.iter().filter(|is_dead| !**is_dead).count();
        let may_continue = scope.has_controller || 2 * live > scope.ranks;
        let out = (0..scope.ranks).find(|&rank| !self.is_dead[rank] && self.ended[rank].is_some());
        out.filter(|_| may_continue).map(|rank| format!("rank {rank} was excluded with {:?}", self.ended[rank]))
    }
}

/// Search a scope. Returns the number of states and the first violation, with the actions that led to it.
fn search(scope: &Scope) -> (usize, Option<(String, Vec<Action>)>) {
    let hasher = RandomState::new();
    let (mut seen, mut states) = (HashSet::new(), 0);
    for held in (0..1_u32 << scope.ranks).filter(|held| held.count_ones() <= scope.holders) {
        let holds = (0..scope.ranks).map(|rank| held >> rank & 1 == 1).collect();
        let mut next = VecDeque::from([(World::new(scope, holds), Vec::new())]);
        while let Some((world, trace)) = next.pop_front() {
            let actions = world.actions(scope);
            states += 1;
            if let Some(what) = world.violation(scope, actions.is_empty()) {
                return (states, Some((what, trace)));
            }
            for action in actions {
                let mut after = world.clone();
                after.act(action);
                if seen.insert(hasher.hash_one(&after)) {
                    let trace = if scope.flaw.is_some() { [&trace[..], &[action]].concat() } else { Vec::new() };
                    next.push_back((after, trace));
                }
            }
        }
    }
    (states, None)
}

const CONFIRMED_DEATHS: Scope = Scope {
    ranks: 2,
    deaths: 1,
    holders: 3,
    tree_is_lost: true,
    has_controller: true,
    false_alarms: 0,
    reconnects: false,
    flaw: None,
};

fn expect_no_violation(scopes: &[Scope]) {
    for scope in scopes {
        let (states, violation) = search(scope);
        println!("{states} states: {scope:?}");
        assert!(violation.is_none(), "{scope:?}: {violation:?}");
    }
}

#[test]
fn ranks_agree_when_any_rank_dies_at_any_point() {
    let two = CONFIRMED_DEATHS;
    let three = Scope { ranks: 3, ..two };
    let only_deaths = |scope| Scope { tree_is_lost: false, ..scope };
    let twice = Scope { deaths: 2, ..three };
    expect_no_violation(&[two, only_deaths(two), three, only_deaths(three), twice, only_deaths(twice)]);
    expect_no_violation(&[Scope { reconnects: true, ..three }, Scope { reconnects: true, ..only_deaths(twice) }]);
}

/// A majority continues; one of two ranks does not.
#[test]
fn ranks_agree_without_a_controller() {
    let two = Scope { has_controller: false, ..CONFIRMED_DEATHS };
    let three = Scope { ranks: 3, ..two };
    expect_no_violation(&[two, three, Scope { tree_is_lost: false, ..three }, Scope { deaths: 2, ..three }]);
}

/// No two ranks contradict each other, though some wait until their deadline.
#[test]
fn ranks_agree_under_false_suspicions() {
    let two = Scope { has_controller: false, false_alarms: 2, ..CONFIRMED_DEATHS };
    let three = Scope { ranks: 3, deaths: 0, holders: 1, ..two };
    expect_no_violation(&[two, three, Scope { tree_is_lost: false, false_alarms: 3, ..three }]);
}

#[test]
fn search_finds_every_broken_rule() {
    let three = Scope { ranks: 3, ..CONFIRMED_DEATHS };
    let suspicious = Scope { has_controller: false, false_alarms: 2, deaths: 0, ..CONFIRMED_DEATHS };
    for (flaw, scope) in [
        (Flaw::NothingAdopted, three),
        (Flaw::LowerBallots, Scope { reconnects: true, ..three }),
        (Flaw::MessagesFromDead, Scope { ranks: 3, ..suspicious }),
        (Flaw::AnyMinority, suspicious),
    ] {
        let (states, violation) = search(&Scope { flaw: Some(flaw), ..scope });
        let (what, trace) = violation.unwrap_or_else(|| panic!("{flaw:?} is not found in {states} states"));
        println!("{flaw:?}, in state {states}, {} steps: {what}", trace.len());
    }
}
