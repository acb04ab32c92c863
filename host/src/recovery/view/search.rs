//! Every way in which a view change of two or three ranks can go: all orders of messages of different pairs, and, where
//! connections are made anew, of the same; a rank that dies at any point, with what it had said lost from any point on,
//! and a second one, each heard of by each other rank at any time; and ranks that suspect each other rightly or not,
//! where nobody says who is dead.
//!
//! One operation is at stake. A rank holds its result or not; what nobody holds can be had while all are alive. Its plan
//! is done by each rank at any time, be the others at work on it or not, which is more than can happen.

use super::*;
use std::collections::HashSet;
use std::hash::{BuildHasher, Hash, RandomState};

type Said = Message<bool, bool>;

/// How much may go wrong.
#[derive(Debug, Clone, Copy)]
struct Scope {
    ranks: usize,
    /// How many die.
    deaths: usize,
    /// How many ranks hold the result at first, at most.
    holders: u32,
    /// The tree is lost, which all ranks notice by themselves; else nothing happens before a rank dies.
    tree_is_lost: bool,
    /// The controller says who is dead; else ranks suspect each other, so often wrongly.
    has_controller: bool,
    false_alarms: usize,
    /// Connections are made anew at any time, and what was on its way over an older one comes later, or never.
    reconnects: bool,
    flaw: Option<Flaw>,
}

#[derive(Clone, Hash)]
struct World {
    views: Vec<View<bool, bool>>,
    /// What is on its way, from and to.
    wires: BTreeMap<(usize, usize), VecDeque<Said>>,
    /// Who has died.
    is_dead: Vec<bool>,
    holds: Vec<bool>,
    running: Vec<Option<(Ballot, bool)>>,
    /// What each rank had at its end, also of those that died after it.
    committed: Vec<Option<Outcome<bool>>>,
    ended: Vec<Option<End>>,
    deaths_left: usize,
    false_alarms_left: usize,
}

#[derive(Debug, Clone, Copy)]
enum Action {
    /// From, to, and how many that were said earlier it overtakes.
    Deliver(usize, usize, usize),
    /// What is on its way from a dead rank is lost.
    Lose(usize, usize),
    Die(usize),
    /// The first hears that the second is dead.
    Hear(usize, usize, Authority),
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
            let authority = if scope.has_controller { Authority::Word } else { Authority::Suspicion };
            for other in ranks.clone().filter(|&other| other != rank) {
                let is_news = !self.views[rank].dead().contains_key(&Rank(other as u32)) && self.views[rank].is_open();
                if is_news && (self.is_dead[other] || self.false_alarms_left > 0) {
                    actions.push(Action::Hear(rank, other, authority));
                }
            }
        }
        actions
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Deliver(from, to, nth) => {
                let said = self.wires.get_mut(&(from, to)).and_then(|wire| wire.remove(nth)).expect("on its way");
                self.views[to].handle(Rank(from as u32), said, Instant::ZERO);
                self.settle(to);
            }
            Action::Lose(from, to) => self.wires.entry((from, to)).or_default().clear(),
            Action::Die(rank) => {
                self.deaths_left -= 1;
                self.is_dead[rank] = true;
                self.running[rank] = None;
                self.wires.retain(|(_, to), _| *to != rank);
            }
            Action::Hear(rank, other, authority) => {
                self.false_alarms_left -= usize::from(!self.is_dead[other]);
                self.views[rank].rank_died(Rank(other as u32), authority);
                self.settle(rank);
            }
            Action::FinishPlan(rank) => {
                let (ballot, completes) = self.running[rank].take().expect("at work");
                self.holds[rank] |= completes;
                self.views[rank].done(ballot, completes, 7);
                self.settle(rank);
            }
        }
        self.wires.retain(|_, wire| !wire.is_empty());
    }

    /// Do what a rank's view wants.
    fn settle(&mut self, rank: usize) {
        loop {
            while let Some((to, said)) = self.views[rank].poll_transmit() {
                if !self.is_dead[to.0 as usize] {
                    self.wires.entry((rank, to.0 as usize)).or_default().push_back(said);
                }
            }
            match self.views[rank].poll_event() {
                None => return,
                Some(Event::Promise { ballot }) => {
                    self.running[rank] = None;
                    self.views[rank].promise(ballot, self.holds[rank]);
                }
                Some(Event::Run { ballot, accounts }) => {
                    let completes = accounts.len() == self.views.len() || accounts.values().any(|&holds| holds);
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

    /// Return what is wrong, in a state that may be the last.
    fn wrong(&self, scope: &Scope, is_last: bool) -> Option<String> {
        let mut outcomes = self.committed.iter().flatten();
        if let Some(first) = outcomes.next()
            && let Some(other) = outcomes.find(|other| *other != first)
        {
            return Some(format!("one rank has committed {first:?}, another {other:?}"));
        }
        for (rank, outcome) in self.committed.iter().enumerate() {
            if outcome.as_ref().is_some_and(|outcome| outcome.decision && !self.holds[rank]) {
                return Some(format!("rank {rank} has completed what it does not have"));
            }
        }
        // Who is suspected wrongly may wait for ranks that do not listen: that is what deadlines are for.
        if !is_last || scope.false_alarms > 0 {
            return None;
        }
        let happened = !scope.tree_is_lost && self.is_dead.iter().all(|is_dead| !is_dead);
        let is_open = |rank: &usize| !happened && !self.is_dead[*rank] && self.views[*rank].is_open();
        if let Some(rank) = (0..scope.ranks).find(is_open) {
            return Some(format!("rank {rank} waits for ever"));
        }
        let live = self.is_dead.iter().filter(|is_dead| !**is_dead).count();
        let may_go_on = scope.has_controller || 2 * live > scope.ranks;
        let out = (0..scope.ranks).find(|&rank| !self.is_dead[rank] && self.ended[rank].is_some());
        out.filter(|_| may_go_on).map(|rank| format!("rank {rank} is out, with {:?}", self.ended[rank]))
    }
}

/// Search a scope; returns the number of states, and what was found wrong first, with how it came about.
fn search(scope: &Scope) -> (usize, Option<(String, Vec<Action>)>) {
    let hasher = RandomState::new();
    let (mut seen, mut states) = (HashSet::new(), 0);
    for held in (0..1_u32 << scope.ranks).filter(|held| held.count_ones() <= scope.holders) {
        let holds = (0..scope.ranks).map(|rank| held >> rank & 1 == 1).collect();
        let mut next = VecDeque::from([(World::new(scope, holds), Vec::new())]);
        while let Some((world, way)) = next.pop_front() {
            let actions = world.actions(scope);
            states += 1;
            if let Some(what) = world.wrong(scope, actions.is_empty()) {
                return (states, Some((what, way)));
            }
            for action in actions {
                let mut after = world.clone();
                after.act(action);
                if seen.insert(hasher.hash_one(&after)) {
                    let way = if scope.flaw.is_some() { [&way[..], &[action]].concat() } else { Vec::new() };
                    next.push_back((after, way));
                }
            }
        }
    }
    (states, None)
}

const BY_WORD: Scope = Scope {
    ranks: 2,
    deaths: 1,
    holders: 3,
    tree_is_lost: true,
    has_controller: true,
    false_alarms: 0,
    reconnects: false,
    flaw: None,
};

fn expect_sound(scopes: &[Scope]) {
    for scope in scopes {
        let (states, wrong) = search(scope);
        println!("{states} states: {scope:?}");
        assert!(wrong.is_none(), "{scope:?}: {wrong:?}");
    }
}

#[test]
fn ranks_agree_whoever_dies_when() {
    let two = BY_WORD;
    let three = Scope { ranks: 3, ..two };
    let only_deaths = |scope| Scope { tree_is_lost: false, ..scope };
    let twice = Scope { deaths: 2, ..three };
    expect_sound(&[two, only_deaths(two), three, only_deaths(three), twice, only_deaths(twice)]);
    expect_sound(&[Scope { reconnects: true, ..three }, Scope { reconnects: true, ..only_deaths(twice) }]);
}

/// The majority goes on, and what is left of two ranks does not.
#[test]
fn ranks_agree_where_nobody_says_who_is_dead() {
    let two = Scope { has_controller: false, ..BY_WORD };
    let three = Scope { ranks: 3, ..two };
    expect_sound(&[two, three, Scope { tree_is_lost: false, ..three }, Scope { deaths: 2, ..three }]);
}

/// Nobody contradicts another, though some wait until their deadline.
#[test]
fn ranks_agree_where_they_suspect_the_living() {
    let two = Scope { has_controller: false, false_alarms: 2, ..BY_WORD };
    let three = Scope { ranks: 3, deaths: 0, holders: 1, ..two };
    expect_sound(&[two, three, Scope { tree_is_lost: false, false_alarms: 3, ..three }]);
}

#[test]
fn rules_that_are_broken_are_found() {
    let three = Scope { ranks: 3, ..BY_WORD };
    let suspicious = Scope { has_controller: false, false_alarms: 2, deaths: 0, ..BY_WORD };
    for (flaw, scope) in [
        (Flaw::NothingAdopted, three),
        (Flaw::LowerBallots, Scope { reconnects: true, ..three }),
        (Flaw::TheDead, Scope { ranks: 3, ..suspicious }),
        (Flaw::AnyMinority, suspicious),
    ] {
        let (states, wrong) = search(&Scope { flaw: Some(flaw), ..scope });
        let (what, way) = wrong.unwrap_or_else(|| panic!("{flaw:?} is not found in {states} states"));
        println!("{flaw:?}, in state {states}, {} steps: {what}", way.len());
    }
}
