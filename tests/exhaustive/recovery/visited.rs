//! All visited states of ranks, all messages and contributed data, and the outcomes of their combinations. As in
//! [`crate::library`], production code runs once for each pair.

use super::facts::Facts;
use super::initial::{InitialStates, Late};
use super::rank::{Act, Event, RankState, Setting, SharedData};
use super::violation::ViolationKind;
use crate::library::Mix;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use sumac::harness::ViewMessage;

/// A message in flight to a rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Envelope {
    /// The sender, the view and the message.
    ViewMessage(usize, u32, Box<ViewMessage>),
    /// A packet of the lost tree.
    Late(Late),
}

/// An event at a rank, with numbers for messages and data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NumberedEvent {
    Begin,
    Envelope(u32),
    Hear(usize),
    Land([u32; 3]),
    Fail,
    Finish(bool),
    Retry,
    Resend,
    Deadline,
}

impl NumberedEvent {
    fn key(self) -> u64 {
        match self {
            Self::Envelope(envelope) => u64::from(envelope) << 4,
            Self::Hear(dead) => (dead as u64) << 4 | 1,
            Self::Land(shared_data_sets) => {
                shared_data_sets.iter().fold(0, |key, &shared_data| key << 20 | u64::from(shared_data)) << 4 | 2
            }
            Self::Begin => 3,
            Self::Fail => 4,
            Self::Finish(found) => 5 + u64::from(found),
            Self::Retry => 7,
            Self::Resend => 8,
            Self::Deadline => 9,
        }
    }
}

/// Stands for missing data.
pub(super) const NO_SHARED_DATA: u32 = (1 << 20) - 1;

/// The outcome of an event.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) next: u32,
    /// Receivers and messages.
    pub(super) said: Vec<(usize, u32)>,
    pub(super) shared_data: Option<u32>,
    pub(super) wrong: Option<(ViolationKind, String)>,
    /// The message had no effect and never will, because the rank has finished what it is about.
    pub(super) inert: bool,
}

/// Distinct values by number.
#[derive(Debug)]
struct Numbers<T> {
    values: Vec<Rc<T>>,
    numbers: HashMap<Rc<T>, u32>,
}

impl<T: Hash + Eq> Numbers<T> {
    fn new() -> Self {
        Self { values: Vec::new(), numbers: HashMap::new() }
    }

    fn of(&mut self, value: T) -> u32 {
        if let Some(&number) = self.numbers.get(&value) {
            return number;
        }
        let number = self.values.len() as u32;
        let value = Rc::new(value);
        self.values.push(Rc::clone(&value));
        self.numbers.insert(value, number);
        number
    }

    fn get(&self, number: u32) -> &Rc<T> {
        &self.values[number as usize]
    }
}

/// The visited states of one rank.
#[derive(Debug)]
struct VisitedStates {
    parts: Numbers<RankState>,
    facts: Vec<Facts>,
    outcomes: HashMap<(u32, u64), Rc<Outcome>, BuildHasherDefault<Mix>>,
    steps: Vec<(u32, u32)>,
    /// Pairs of a state and a message that is inert in it.
    inert: Vec<(u32, u32)>,
}

/// All visited states, messages and data.
#[derive(Debug)]
pub(super) struct VisitedRanks<'s> {
    setting: &'s Setting<'s>,
    visited_states: Vec<VisitedStates>,
    envelopes: Numbers<Envelope>,
    shared_data_sets: Numbers<SharedData>,
}

impl<'s> VisitedRanks<'s> {
    pub(super) fn new(setting: &'s Setting<'s>) -> Self {
        let visited = |_| VisitedStates {
            parts: Numbers::new(),
            facts: Vec::new(),
            outcomes: HashMap::default(),
            steps: Vec::new(),
            inert: Vec::new(),
        };
        let visited_states = (0..setting.wiring.ranks.len()).map(visited).collect();
        Self { setting, visited_states, envelopes: Numbers::new(), shared_data_sets: Numbers::new() }
    }

    /// Return the number of the state in which a rank loses its tree with this data.
    pub(super) fn begin(&mut self, initial_states: &InitialStates, rank: usize, front: usize) -> u32 {
        self.number_of(rank, RankState::new(rank, &initial_states.ranks[front]))
    }

    pub(super) fn late(&mut self, late: &Late) -> u32 {
        self.envelopes.of(Envelope::Late(late.clone()))
    }

    pub(super) fn facts(&self, rank: usize, part: u32) -> &Facts {
        &self.visited_states[rank].facts[part as usize]
    }

    pub(super) fn envelope(&self, envelope: u32) -> &Rc<Envelope> {
        self.envelopes.get(envelope)
    }

    /// Return `Some` if a rank has finished with a message before it arrives, because of its subject or its sender: it
    /// then only answers questions. The inner value is the rank that no answer reaches.
    fn past(&self, rank: usize, part: u32, envelope: u32) -> Option<Option<usize>> {
        let facts = self.facts(rank, part);
        match &**self.envelope(envelope) {
            // A rank that it knows to be dead is dead or unreachable.
            Envelope::ViewMessage(from, ..) if facts.known.contains(from) => Some(Some(*from)),
            Envelope::ViewMessage(_, view, _) => (facts.end.is_some() || facts.view > *view).then_some(None),
            Envelope::Late(_) => None,
        }
    }

    pub(super) fn shared_data(&self, shared_data: u32) -> &SharedData {
        self.shared_data_sets.get(shared_data)
    }

    pub(super) fn states(&self) -> usize {
        self.visited_states.iter().map(|visited| visited.facts.len()).sum()
    }

    pub(super) fn runs(&self) -> usize {
        self.visited_states.iter().map(|visited| visited.outcomes.len()).sum()
    }

    fn number_of(&mut self, rank: usize, part: RankState) -> u32 {
        let visited = &mut self.visited_states[rank];
        let number = visited.parts.of(part);
        if visited.facts.len() == number as usize {
            visited.facts.push(visited.parts.get(number).facts(self.setting));
        }
        number
    }

    /// Return the outcome of an event at a rank.
    pub(super) fn outcome(&mut self, rank: usize, part: u32, happening: NumberedEvent) -> Rc<Outcome> {
        let key = (part, happening.key());
        if let Some(outcome) = self.visited_states[rank].outcomes.get(&key) {
            return Rc::clone(outcome);
        }
        let mut next = RankState::clone(self.visited_states[rank].parts.get(part));
        let act = self.run(&mut next, happening);
        let next = self.number_of(rank, next);
        let said = act.said.into_iter();
        let said: Vec<_> = said
            .map(|(to, view, said)| (to, self.envelopes.of(Envelope::ViewMessage(rank, view, Box::new(said)))))
            .collect();
        let shared_data = act.shared_data.map(|shared_data| self.shared_data_sets.of(shared_data));
        assert!(
            shared_data.is_none_or(|shared_data| shared_data < NO_SHARED_DATA),
            "too many shared_data_sets for a key"
        );
        let past = match happening {
            NumberedEvent::Envelope(envelope) => self.past(rank, part, envelope),
            _ => None,
        };
        let reaches_nobody = past.is_some_and(|lost| said.iter().all(|(to, _)| Some(*to) == lost));
        let inert = reaches_nobody && next == part && shared_data.is_none() && act.wrong.is_none();
        let outcome = Rc::new(Outcome { next, said, shared_data, wrong: act.wrong, inert });
        let visited = &mut self.visited_states[rank];
        visited.outcomes.insert(key, Rc::clone(&outcome));
        match happening {
            _ if next != part => visited.steps.push((part, next)),
            NumberedEvent::Envelope(envelope) if inert => visited.inert.push((part, envelope)),
            _ => {}
        }
        outcome
    }

    fn run(&self, part: &mut RankState, happening: NumberedEvent) -> Act {
        let shared_data_sets: Vec<&SharedData> = match happening {
            NumberedEvent::Land(shared_data_sets) => shared_data_sets
                .iter()
                .filter(|&&shared_data| shared_data != NO_SHARED_DATA)
                .map(|&shared_data| self.shared_data(shared_data))
                .collect(),
            _ => Vec::new(),
        };
        let event = match happening {
            NumberedEvent::Envelope(envelope) => match &**self.envelope(envelope) {
                Envelope::ViewMessage(from, view, said) => Event::ViewMessage(*from, *view, said),
                Envelope::Late((_, from, bytes)) => Event::Late(*from, bytes),
            },
            NumberedEvent::Begin => Event::Begin,
            NumberedEvent::Hear(dead) => Event::Hear(dead),
            NumberedEvent::Land(_) => Event::Land(&shared_data_sets),
            NumberedEvent::Fail => Event::Fail,
            NumberedEvent::Finish(found) => Event::Finish(found),
            NumberedEvent::Retry => Event::Retry,
            NumberedEvent::Resend => Event::Resend,
            NumberedEvent::Deadline => Event::Deadline,
        };
        let act = catch_unwind(AssertUnwindSafe(|| part.meet(self.setting, event)));
        act.unwrap_or_else(|cause| {
            let text = cause.downcast_ref::<String>().cloned();
            let text = text.or_else(|| cause.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Act { wrong: Some((ViolationKind::Panicked, text.unwrap_or_default())), ..Act::default() }
        })
    }

    /// Return a message that was inert in a state of its receiver but is not in a later one; see
    /// [`crate::library::Library::revived`].
    pub(super) fn revived(&mut self) -> Option<u32> {
        (0..self.visited_states.len()).find_map(|rank| {
            let mut nexts: HashMap<u32, Vec<u32>> = HashMap::new();
            let steps = self.visited_states[rank].steps.clone();
            steps.iter().for_each(|&(part, next)| nexts.entry(part).or_default().push(next));
            let mut looked = 0;
            while let Some(&(part, envelope)) = self.visited_states[rank].inert.get(looked) {
                looked += 1;
                for &next in nexts.get(&part).into_iter().flatten() {
                    if !self.outcome(rank, next, NumberedEvent::Envelope(envelope)).inert {
                        return Some(envelope);
                    }
                }
            }
            None
        })
    }
}
