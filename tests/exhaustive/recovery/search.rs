//! Breadth-first search of all courses of a recovery, from every state in which ranks can lose their tree.
//!
//! Messages about a view arrive in order, as on a connection, until their sender dies; any suffix of the rest may then
//! be lost. After a connection breaks, its pending messages arrive at any time or never. Data contributed to a plan is
//! available to all ranks at once, and they take it chunk by chunk, at any time or never: every schedule is a subset of
//! this. Time is not modelled: timers fire at any time, or only when nothing else can happen, as stated for each step.

use super::facts::{Ended, Facts};
use super::initial::InitialStates;
use super::rank::Setting;
use super::report::{Report, Violation};
use super::violation::ViolationKind;
use super::visited::{Envelope, NO_SHARED_DATA, NumberedEvent, Outcome, VisitedRanks};
use super::world::{Fault, World};
use crate::store::Store;
use std::rc::Rc;
use std::time::Instant;
use sumac::harness::{End, Origin, Outcome as Committed};

/// A step of the search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// From and to; 0 for the current connection, 1 for the one before.
    Deliver(usize, usize, usize),
    /// All messages in flight there are lost.
    Drop(usize, usize, usize),
    Break(usize, usize),
    Cut(usize, usize),
    Die(usize),
    LoseTree,
    To(usize, NumberedEvent, Option<Fault>),
}

/// The faults that a search may inject.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// The maximum number of faults.
    pub(super) faults: u32,
    /// Their kinds.
    pub(super) kinds: &'static [Fault],
}

/// A search in progress.
#[derive(Debug)]
pub(super) struct Search<'s> {
    setting: &'s Setting<'s>,
    limits: Limits,
    visited_states: VisitedRanks<'s>,
    store: Store,
    /// The predecessor of each state and the step from it; `None` for initial states.
    origins: Vec<Option<(u32, Step)>>,
    depths: Vec<u16>,
    /// Steps without a fault, from and to.
    free: Vec<(u32, u32)>,
    ends: Vec<u32>,
    kinds: [usize; 3],
    roots: usize,
    transitions: usize,
    began: Instant,
}

type Found = Option<(ViolationKind, String)>;

impl<'s> Search<'s> {
    pub(super) fn new(setting: &'s Setting<'s>, limits: Limits) -> Self {
        Self {
            setting,
            limits,
            visited_states: VisitedRanks::new(setting),
            store: Store::new(),
            origins: Vec::new(),
            depths: Vec::new(),
            free: Vec::new(),
            ends: Vec::new(),
            kinds: [0; 3],
            roots: 0,
            transitions: 0,
            began: Instant::now(),
        }
    }

    fn ranks(&self) -> usize {
        self.setting.wiring.ranks.len()
    }

    /// Search completely from these initial states.
    ///
    /// # Errors
    /// The [`Violation`] with the shortest trace.
    pub(super) fn run(&mut self, initial_states: &InitialStates) -> Result<Report, Box<Violation>> {
        let ranks = self.ranks();
        let mut words = Vec::new();
        for (all, lates) in &initial_states.all {
            for late in lates {
                let parts =
                    all.iter().enumerate().map(|(rank, &front)| self.visited_states.begin(initial_states, rank, front));
                let parts: Vec<u32> = parts.collect();
                let mut world = World { parts, wires: vec![Default::default(); ranks * ranks], ..World::default() };
                for packet in late {
                    let envelope = self.visited_states.late(packet);
                    world.wire(packet.0, packet.0)[0].push(envelope);
                }
                world.encode(&mut words);
                if self.store.insert(&words).1 {
                    self.origins.push(None);
                    self.depths.push(0);
                }
            }
        }
        self.roots = self.store.len();
        let (mut steps, mut index) = (Vec::new(), 0);
        while index < self.store.len() {
            assert!(index < STATES_MAX, "more than {STATES_MAX} states: narrow the scope");
            let world = World::decode(self.store.get(index), ranks);
            if self.is_end(&world) {
                self.ends.push(index as u32);
                self.kinds[self.kind_of(&world)] += 1;
            }
            steps.clear();
            self.enabled(&world, &mut steps);
            for &step in &steps {
                self.transitions += 1;
                let mut next = world.clone();
                let wrong = self.take(&mut next, step);
                next.encode(&mut words);
                let (to, fresh) = self.store.insert(&words);
                if fresh {
                    self.origins.push(Some((index as u32, step)));
                    self.depths.push(self.depths[index] + 1);
                }
                if let Some((wrong, text)) = wrong {
                    return Err(self.violation(wrong, text, index, Some(step)));
                }
                if fresh && let Some((wrong, text)) = self.judge(&next) {
                    return Err(self.violation(wrong, text, to, None));
                }
                if next.used == world.used {
                    self.free.push((index as u32, to as u32));
                }
            }
            index += 1;
        }
        self.check_ends()?;
        if let Some(envelope) = self.visited_states.revived() {
            let text = self.describe_letter(envelope);
            return Err(self.violation(ViolationKind::Revived, text, 0, None));
        }
        Ok(self.report())
    }

    fn facts(&self, world: &World, rank: usize) -> &Facts {
        self.visited_states.facts(rank, world.parts[rank])
    }

    /// List the possible steps in a state.
    fn enabled(&self, world: &World, steps: &mut Vec<Step>) {
        let ranks = self.ranks();
        let is_left = world.faults() < self.limits.faults;
        let may = |fault: Fault| is_left && self.limits.kinds.contains(&fault);
        for (pair, wire) in world.wires.iter().enumerate() {
            let (from, to) = (pair / ranks, pair % ranks);
            for (older, _) in wire.iter().enumerate().filter(|(_, envelopes)| !envelopes.is_empty()) {
                steps.push(Step::Deliver(from, to, older));
                if older == 1 || world.is_dead(from) || world.is_cut(from, to) {
                    steps.push(Step::Drop(from, to, older));
                }
            }
        }
        for rank in world.live() {
            self.enabled_at(world, rank, steps);
        }
        let is_quiet = steps.is_empty();
        for rank in world.live().filter(|&rank| self.facts(world, rank).is_changing) {
            let tries_in_vain = Self::tries_in_vain(world, self.facts(world, rank));
            if !tries_in_vain && (is_quiet || may(Fault::Hurry)) {
                let fault = (!is_quiet).then_some(Fault::Hurry);
                steps.push(Step::To(rank, NumberedEvent::Resend, fault));
            }
            let waits_in_vain = is_quiet && world.cut != 0;
            if waits_in_vain || may(Fault::Late) {
                let fault = (!waits_in_vain).then_some(Fault::Late);
                steps.push(Step::To(rank, NumberedEvent::Deadline, fault));
            }
        }
        if may(Fault::Death) && world.live().count() > 1 {
            steps.extend(world.live().map(Step::Die));
        }
        for (one, other) in world.live().flat_map(|one| world.live().map(move |other| (one, other))) {
            if one < other && may(Fault::Cut) && !world.is_cut(one, other) {
                steps.push(Step::Cut(one, other));
            }
            if one != other && may(Fault::Break) && !world.wires[one * ranks + other][0].is_empty() {
                steps.push(Step::Break(one, other));
            }
        }
        let is_on_the_next = |facts: &Facts| facts.view == 1 && facts.has_tree;
        let is_used = world.live().any(|rank| is_on_the_next(self.facts(world, rank)));
        if may(Fault::Tree) && world.count(Fault::Tree) == 0 && is_used {
            steps.push(Step::LoseTree);
        }
    }

    /// Return whether a coordinator is about to retry in vain, because ranks cannot reach each other.
    fn tries_in_vain(world: &World, facts: &Facts) -> bool {
        let is_last = facts.promised.is_some_and(|attempt| attempt.number() >= ATTEMPTS);
        world.cut != 0 && facts.retries && is_last
    }

    /// List the possible steps of one rank.
    fn enabled_at(&self, world: &World, rank: usize, steps: &mut Vec<Step>) {
        let facts = self.facts(world, rank);
        if facts.end.is_some() {
            return;
        }
        let is_left = world.faults() < self.limits.faults;
        let may = |fault: Fault| is_left && self.limits.kinds.contains(&fault);
        let mut push = |happening, fault| steps.push(Step::To(rank, happening, fault));
        let is_tree_lost = facts.view == 0 || facts.view == 1 && world.count(Fault::Tree) > 0;
        if !facts.is_changing && facts.has_tree && is_tree_lost {
            push(NumberedEvent::Begin, None);
        }
        for other in (0..self.ranks()).filter(|other| *other != rank && !facts.known.contains(other)) {
            if world.is_dead(other) || world.is_cut(rank, other) && !self.setting.has_controller {
                push(NumberedEvent::Hear(other), None);
            }
        }
        if facts.retries && !Self::tries_in_vain(world, facts) {
            push(NumberedEvent::Retry, None);
        }
        let Some((attempt, live)) = &facts.trial else { return };
        let Some(origin) = facts.next else {
            if facts.asks {
                push(NumberedEvent::Finish(true), None);
            }
            if !facts.asks || may(Fault::NoTree) {
                push(NumberedEvent::Finish(false), facts.asks.then_some(Fault::NoTree));
            }
            return;
        };
        let has_left = |other: usize| {
            let other_facts = self.facts(world, other);
            let is_elsewhere = other_facts.view > facts.view || other_facts.end.is_some();
            is_elsewhere || world.is_dead(other) || world.is_cut(rank, other) || other_facts.promised > Some(*attempt)
        };
        let is_cause = live.iter().any(|&other| other != rank && has_left(other));
        if is_cause || may(Fault::Piece) {
            push(NumberedEvent::Fail, (!is_cause).then_some(Fault::Piece));
        }
        let mut shared_data_sets = [NO_SHARED_DATA; 3];
        for &number in &world.shared_data_sets {
            let shared_data = self.visited_states.shared_data(number);
            let is_asked = match origin {
                Origin::Held(holder) => holder.0 as usize == shared_data.from,
                Origin::Recompute => true,
            };
            if is_asked && (shared_data.view, shared_data.attempt) == (facts.view, *attempt) {
                shared_data_sets[shared_data.from] = number;
            }
        }
        let given = shared_data_sets.iter().filter(|&&shared_data| shared_data != NO_SHARED_DATA).count();
        let due = if matches!(origin, Origin::Held(_)) { 1 } else { live.len() };
        if given == due {
            push(NumberedEvent::Land(shared_data_sets), None);
        }
    }

    /// Take a step.
    fn take(&mut self, world: &mut World, step: Step) -> Found {
        let (rank, happening) = match step {
            Step::Deliver(from, to, older) => (to, NumberedEvent::Envelope(world.wire(from, to)[older].remove(0))),
            Step::Drop(from, to, older) => {
                world.wire(from, to)[older].clear();
                return None;
            }
            Step::Break(from, to) => {
                world.use_up(Fault::Break);
                let [wire, older] = world.wire(from, to);
                older.append(wire);
                return None;
            }
            Step::Cut(one, other) => {
                world.use_up(Fault::Cut);
                world.cut(one, other);
                return None;
            }
            Step::Die(rank) => {
                world.use_up(Fault::Death);
                world.dead |= 1 << rank;
                (0..self.ranks()).for_each(|from| *world.wire(from, rank) = Default::default());
                self.forget_gifts(world);
                return None;
            }
            Step::LoseTree => {
                world.use_up(Fault::Tree);
                return None;
            }
            Step::To(rank, happening, fault) => {
                fault.into_iter().for_each(|fault| world.use_up(fault));
                (rank, happening)
            }
        };
        let outcome = self.visited_states.outcome(rank, world.parts[rank], happening);
        self.settle(world, rank, &outcome);
        outcome.wrong.clone()
    }

    /// Apply an outcome: the rank's next state, its messages and its contributed data.
    fn settle(&mut self, world: &mut World, rank: usize, outcome: &Rc<Outcome>) {
        world.parts[rank] = outcome.next;
        for &(to, envelope) in &outcome.said {
            if !world.is_dead(to) && !world.is_cut(rank, to) {
                world.wire(rank, to)[0].push(envelope);
            }
        }
        if let Some(shared_data) = outcome.shared_data
            && let Err(place) = world.shared_data_sets.binary_search(&shared_data)
        {
            world.shared_data_sets.insert(place, shared_data);
        }
        for other in 0..self.ranks() {
            self.read_inert(world, rank, other);
            self.read_inert(world, other, rank);
        }
        self.forget_gifts(world);
    }

    /// Deliver inert messages at once.
    fn read_inert(&mut self, world: &mut World, from: usize, to: usize) {
        for older in 0..2 {
            while let Some(&envelope) = world.wire(from, to)[older].first() {
                if !self.visited_states.outcome(to, world.parts[to], NumberedEvent::Envelope(envelope)).inert {
                    break;
                }
                world.wire(from, to)[older].remove(0);
            }
        }
    }

    /// Drop the data of attempts in which no rank can use it any more.
    fn forget_gifts(&self, world: &mut World) {
        let shared_data_sets = std::mem::take(&mut world.shared_data_sets);
        let may_take = |shared_data: &u32| {
            let shared_data = self.visited_states.shared_data(*shared_data);
            let takes = |rank: usize| {
                let facts = self.facts(world, rank);
                let is_through = facts.ran == Some(shared_data.attempt)
                    && facts.trial.as_ref().is_none_or(|(attempt, _)| *attempt != shared_data.attempt);
                let is_past = facts.view > shared_data.view
                    || facts.view == shared_data.view && facts.promised > Some(shared_data.attempt);
                facts.end.is_none() && !is_past && !(facts.view == shared_data.view && is_through)
            };
            world.live().any(takes)
        };
        world.shared_data_sets = shared_data_sets.into_iter().filter(may_take).collect();
    }

    /// Check the invariants in a new state.
    fn judge(&self, world: &World) -> Found {
        let all: Vec<&Facts> = (0..self.ranks()).map(|rank| self.facts(world, rank)).collect();
        for view in 0..all.iter().map(|facts| facts.outcomes.len()).max().unwrap_or(0) {
            let mut outcomes = all.iter().filter_map(|facts| facts.outcomes.get(view));
            let first = outcomes.next()?;
            // The vote decides the next tree, which does not concern dead ranks.
            let of = |outcome: &Committed| (outcome.dead.clone(), outcome.cut, outcome.operation);
            let live: Vec<u64> = world.live().filter_map(|rank| Some(all[rank].outcomes.get(view)?.vote)).collect();
            let is_torn = live.iter().any(|&word| word != live[0]);
            if let Some(other) = outcomes.find(|other| is_torn || of(other) != of(first)) {
                return Some((ViolationKind::Disagreement, format!("one has committed {first:?}, another {other:?}")));
            }
        }
        for rank in world.live() {
            match &all[rank].end {
                Some(Ended::Out(End::Partitioned)) if self.setting.has_controller => {
                    return Some((ViolationKind::End, format!("rank {rank} is partitioned, and has a controller")));
                }
                Some(Ended::Out(end @ (End::Deadline | End::Unknown)))
                    if world.count(Fault::Late) + world.count(Fault::Cut) == 0 =>
                {
                    return Some((ViolationKind::End, format!("rank {rank} is out, with {end:?}")));
                }
                Some(Ended::RanksFailed(dead, _)) => {
                    let is_behind = |named: usize| all[named].outcomes.len() < all[rank].outcomes.len();
                    let may_be_out = |named: usize| match &all[named].end {
                        Some(Ended::Out(_)) => true,
                        // The majority continues without ranks that it cannot reach.
                        None => !self.setting.has_controller && world.cut != 0 && is_behind(named),
                        Some(Ended::RanksFailed(..)) => false,
                    };
                    let is_fine = |named: usize| world.is_dead(named) || may_be_out(named);
                    if let Some(named) = dead.iter().find(|named| !is_fine(named.0 as usize)) {
                        return Some((
                            ViolationKind::Named,
                            format!("rank {rank} takes {named} for dead, which lives"),
                        ));
                    }
                }
                Some(Ended::Out(_)) | None => {}
            }
        }
        None
    }

    /// Return whether nothing is pending: every live rank is excluded, or all of them continue on the same path.
    fn is_end(&self, world: &World) -> bool {
        let on: Vec<&Facts> =
            world.live().map(|rank| self.facts(world, rank)).filter(|facts| facts.end.is_none()).collect();
        let Some(first) = on.first() else { return true };
        let is_like_first =
            |facts: &&Facts| !facts.is_changing && (facts.view, facts.has_tree) == (first.view, first.has_tree);
        let is_lost = first.has_tree && (first.view == 0 || first.view == 1 && world.count(Fault::Tree) > 0);
        world.dead == 0
            && !is_lost
            && on.iter().all(is_like_first)
            && !world.live().any(|rank| self.has_failed(world, rank))
    }

    fn has_failed(&self, world: &World, rank: usize) -> bool {
        matches!(self.facts(world, rank).end, Some(Ended::RanksFailed(..)))
    }

    /// Return the index of an end in [`Report::ends`].
    fn kind_of(&self, world: &World) -> usize {
        let goes_on = world.live().any(|rank| self.facts(world, rank).end.is_none());
        let has_failed = world.live().any(|rank| self.has_failed(world, rank));
        if goes_on { 0 } else { 2 - usize::from(has_failed) }
    }

    /// Check that from every state an end is reachable without further faults.
    fn check_ends(&self) -> Result<(), Box<Violation>> {
        let mut sources: Vec<Vec<u32>> = vec![Vec::new(); self.store.len()];
        self.free.iter().for_each(|&(from, to)| sources[to as usize].push(from));
        let mut ends = vec![false; self.store.len()];
        let mut queue = self.ends.clone();
        queue.iter().for_each(|&end| ends[end as usize] = true);
        while let Some(to) = queue.pop() {
            for &from in &sources[to as usize] {
                if !std::mem::replace(&mut ends[from as usize], true) {
                    queue.push(from);
                }
            }
        }
        match ends.iter().position(|ends| !ends) {
            Some(stuck) => Err(self.violation(ViolationKind::Stuck, "no way to the end".into(), stuck, None)),
            None => Ok(()),
        }
    }

    fn report(&self) -> Report {
        Report {
            roots: self.roots,
            states: self.store.len(),
            transitions: self.transitions,
            depth: self.depths.iter().copied().max().unwrap_or(0).into(),
            ends: self.kinds,
            parts: self.visited_states.states(),
            runs: self.visited_states.runs(),
            took: self.began.elapsed(),
        }
    }

    fn violation(&self, wrong: ViolationKind, text: String, at: usize, last: Option<Step>) -> Box<Violation> {
        let mut steps: Vec<(Option<usize>, Step)> = last.map(|step| (Some(at), step)).into_iter().collect();
        let mut index = at;
        while let Some((from, step)) = self.origins[index] {
            steps.push((Some(from as usize), step));
            index = from as usize;
        }
        let trace = steps.iter().rev().map(|(from, step)| self.describe(*from, *step)).collect();
        Box::new(Violation { wrong, text, trace, report: self.report() })
    }

    fn describe(&self, from: Option<usize>, step: Step) -> String {
        match (from, step) {
            (Some(state), Step::Deliver(from, to, older)) => {
                let world = World::decode(self.store.get(state), self.ranks());
                let envelope = world.wires[from * self.ranks() + to][older][0];
                format!("to rank {to}: {}", self.describe_letter(envelope))
            }
            (_, step) => format!("{step:?}"),
        }
    }

    fn describe_letter(&self, envelope: u32) -> String {
        match &**self.visited_states.envelope(envelope) {
            Envelope::ViewMessage(from, view, said) => format!("rank {from} of view {view}: {said}"),
            Envelope::Late((_, from, bytes)) => format!("{from} late: {} bytes", bytes.len()),
        }
    }
}

/// The maximum number of attempts of ranks that cannot reach each other; they would retry until their deadline.
const ATTEMPTS: u32 = 2;

/// The maximum number of states.
const STATES_MAX: usize = 20_000_000;
