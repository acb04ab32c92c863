//! All visited states of machines, all packets sent, and the outcomes of their combinations.
//!
//! The next state of a machine depends only on its state and the event, so production code runs once per pair,
//! regardless of the number of cluster states in which the pair occurs. A cluster state is a sequence of numbers of
//! this library.

use crate::machine::{Event, Facts, Machine, ViolationKind};
use crate::scope::{Scope, Wiring};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use sumac_hal::port::Addr;
use sumac_hal::wire::{Packet, Repr};

/// A packet in flight.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Envelope {
    from: Addr,
    to: Addr,
    bytes: Vec<u8>,
}

/// An event of one machine, with packets by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum NumberedEvent {
    /// A packet arrived.
    Packet(u32),
    /// Two packets arrived in one go.
    Two(u32, u32),
    /// See [`Event::Timer`].
    Timer,
    /// See [`Event::Call`].
    Call,
    /// See [`Event::Restart`].
    Restart,
    /// See [`Event::Renew`].
    Renew,
    /// See [`Event::Calm`].
    Calm,
}

impl NumberedEvent {
    fn key(self) -> u64 {
        match self {
            Self::Packet(packet) => u64::from(packet) << 3,
            Self::Two(first, second) => u64::from(first) << 32 | u64::from(second) << 3 | 1,
            Self::Timer => 2,
            Self::Call => 3,
            Self::Restart => 4,
            Self::Renew => 5,
            Self::Calm => 6,
        }
    }
}

/// The outcome of an event.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The machine's next state.
    pub(crate) next: u32,
    /// Packets sent.
    pub(crate) sent: Vec<u32>,
    /// See [`Act::inert`](crate::machine::Act::inert).
    pub(crate) inert: bool,
    /// The violation, if any.
    pub(crate) flaw: Option<(ViolationKind, String)>,
}

/// The visited states of one machine.
#[derive(Debug, Default)]
struct VisitedStates {
    states: Vec<Rc<Machine>>,
    facts: Vec<Facts>,
    numbers: HashMap<Rc<Machine>, u32, BuildHasherDefault<DefaultHasher>>,
    outcomes: HashMap<(u32, u64), Rc<Outcome>, BuildHasherDefault<Mix>>,
    /// Transitions between states.
    steps: Vec<(u32, u32)>,
    /// Pairs of a state and a packet that is inert in it.
    inert: Vec<(u32, u32)>,
}

/// All visited states and their transitions.
#[derive(Debug)]
pub(crate) struct Library<'s> {
    scope: &'s Scope,
    wiring: &'s Wiring,
    visited_states: Vec<VisitedStates>,
    envelopes: Vec<Envelope>,
    /// The receiver of each packet.
    receivers: Vec<usize>,
    numbers: HashMap<Envelope, u32>,
}

impl<'s> Library<'s> {
    /// Create a library with the initial states; each has number 0.
    pub(crate) fn new(scope: &'s Scope, wiring: &'s Wiring) -> Self {
        let (envelopes, receivers, numbers) = (Vec::new(), Vec::new(), HashMap::new());
        let machines = Machine::all(scope, wiring);
        let visited_states = machines.iter().map(|_| VisitedStates::default()).collect();
        let mut library = Self { scope, wiring, visited_states, envelopes, receivers, numbers };
        for (index, machine) in machines.into_iter().enumerate() {
            library.number_of(index, machine);
        }
        library
    }

    /// Return the number of machines.
    pub(crate) fn machines(&self) -> usize {
        self.visited_states.len()
    }

    /// Return the number of states of single machines.
    pub(crate) fn states(&self) -> usize {
        self.visited_states.iter().map(|visited| visited.states.len()).sum()
    }

    /// Return the number of runs of production code.
    pub(crate) fn runs(&self) -> usize {
        self.visited_states.iter().map(|visited| visited.outcomes.len()).sum()
    }

    /// Return the receiver of a packet.
    pub(crate) fn receiver(&self, packet: u32) -> usize {
        self.receivers[packet as usize]
    }

    /// Return a machine in a state.
    pub(crate) fn machine(&self, machine: usize, state: u32) -> &Rc<Machine> {
        &self.visited_states[machine].states[state as usize]
    }

    /// Return the sender of a packet, and its bytes.
    pub(crate) fn envelope(&self, packet: u32) -> (Addr, &[u8]) {
        let envelope = &self.envelopes[packet as usize];
        (envelope.from, &envelope.bytes)
    }

    /// Return the facts of a machine in a state.
    pub(crate) fn facts(&self, machine: usize, state: u32) -> &Facts {
        &self.visited_states[machine].facts[state as usize]
    }

    /// Return the outcome of an event for a machine in a state.
    pub(crate) fn outcome(&mut self, machine: usize, state: u32, happening: NumberedEvent) -> Rc<Outcome> {
        let key = (state, happening.key());
        if let Some(outcome) = self.visited_states[machine].outcomes.get(&key) {
            return Rc::clone(outcome);
        }
        let before = Rc::clone(&self.visited_states[machine].states[state as usize]);
        let envelope = |packet: u32| {
            let envelope = &self.envelopes[packet as usize];
            (envelope.from, &envelope.bytes[..])
        };
        let (one, two);
        let event = match happening {
            NumberedEvent::Packet(packet) => {
                one = [envelope(packet)];
                Event::Packets(&one)
            }
            NumberedEvent::Two(first, second) => {
                two = [envelope(first), envelope(second)];
                Event::Packets(&two)
            }
            NumberedEvent::Timer => Event::Timer,
            NumberedEvent::Call => Event::Call,
            NumberedEvent::Restart => Event::Restart,
            NumberedEvent::Renew => Event::Renew,
            NumberedEvent::Calm => Event::Calm,
        };
        let act = before.act(self.scope, self.wiring, event);
        let from = self.wiring.addr(machine);
        let sent = act.sent.into_iter().map(|(to, bytes)| self.envelope_number(Envelope { from, to, bytes })).collect();
        let next = self.number_of(machine, act.next);
        let outcome = Rc::new(Outcome { next, sent, inert: act.inert, flaw: act.flaw });
        let visited = &mut self.visited_states[machine];
        visited.outcomes.insert(key, Rc::clone(&outcome));
        // Calm machines only renumber their tokens, reusing earlier numbers; packets that were removed before would
        // have to be renumbered with them.
        if next != state && happening != NumberedEvent::Calm {
            visited.steps.push((state, next));
        }
        if let NumberedEvent::Packet(packet) = happening
            && act.inert
        {
            visited.inert.push((state, packet));
        }
        outcome
    }

    /// Return a packet that was inert in a state of its receiver but is not in a later one. If there is none, removing
    /// inert packets was sound: by induction they stay without effect.
    pub(crate) fn revived(&mut self) -> Option<u32> {
        (0..self.machines()).find_map(|machine| {
            let steps = self.visited_states[machine].steps.clone();
            let mut nexts: HashMap<u32, Vec<u32>> = HashMap::new();
            steps.iter().for_each(|&(state, next)| nexts.entry(state).or_default().push(next));
            // Pairs that turn out to be inert in a later state are appended and examined in turn.
            let mut looked = 0;
            while let Some(&(state, packet)) = self.visited_states[machine].inert.get(looked) {
                looked += 1;
                for &next in nexts.get(&state).into_iter().flatten() {
                    if !self.outcome(machine, next, NumberedEvent::Packet(packet)).inert {
                        return Some(packet);
                    }
                }
            }
            None
        })
    }

    fn number_of(&mut self, machine: usize, state: Machine) -> u32 {
        let visited = &mut self.visited_states[machine];
        if let Some(&number) = visited.numbers.get(&state) {
            return number;
        }
        let number = visited.states.len() as u32;
        let state = Rc::new(state);
        visited.facts.push(state.facts(self.scope));
        visited.states.push(Rc::clone(&state));
        visited.numbers.insert(state, number);
        number
    }

    fn envelope_number(&mut self, envelope: Envelope) -> u32 {
        if let Some(&number) = self.numbers.get(&envelope) {
            return number;
        }
        let number = self.envelopes.len() as u32;
        self.receivers.push(self.wiring.machine(envelope.to));
        self.envelopes.push(envelope.clone());
        self.numbers.insert(envelope, number);
        number
    }

    /// Return a hash of the machines' states that is the same in every search.
    pub(crate) fn fingerprint(&self, states: &[u32]) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (visited, &state) in self.visited_states.iter().zip(states) {
            visited.states[state as usize].hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Describe a packet.
    pub(crate) fn describe(&self, packet: u32) -> String {
        let Envelope { from, to, bytes } = &self.envelopes[packet as usize];
        let view = Packet::new_checked(&bytes[..]).expect("packets are sent whole");
        let repr = Repr::parse(&view).expect("packets are well-formed");
        let payload = match view.payload() {
            [] => String::new(),
            bytes => format!(" = {:#x}", bytes.iter().take(8).rev().fold(0_u64, |n, &byte| n << 8 | u64::from(byte))),
        };
        let names = [from, to].map(|addr| self.wiring.name(self.wiring.machine(*addr)));
        let Repr { kind, reason, seq, count, mark, window, bits, bits2, epoch, .. } = repr;
        let mut text = format!("{kind:?}");
        if let Some(reason) = reason {
            text += &format!("({reason:?})");
        }
        text += &format!(" {}", seq.0);
        if count > 1 {
            text += &format!("..{}", seq.0 + u64::from(count));
        }
        text += &format!("{payload}, mark {}", mark.0);
        if window > 0 {
            text += &format!(", window {window}");
        }
        if matches!(kind, sumac_hal::wire::Kind::Status) {
            text += &format!(", in {bits:#b}, complete {bits2:#b}");
        }
        if self.scope.restarts > 0 {
            text += &format!(", epoch {}", epoch.counter);
        }
        format!("{} -> {}: {text}", names[0], names[1])
    }
}

/// A hasher for keys of two numbers.
#[derive(Debug, Default)]
pub(crate) struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(u64::from(word));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31);
    }
}
