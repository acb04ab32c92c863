//! Every state that some machine was ever in, every packet that was ever sent, and what happened when they met.
//!
//! A machine's next state depends on its own state and the event only, so production code runs once for each such
//! pair, however many states of the whole cluster they occur in; those are sequences of numbers of this library.

use crate::machine::{Event, Facts, Flaw, Machine};
use crate::scope::{Scope, Wiring};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use sumac_hal::port::Addr;
use sumac_hal::wire::{Packet, Repr};

/// A packet on its way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Letter {
    from: Addr,
    to: Addr,
    bytes: Vec<u8>,
}

/// What happened to one machine, by numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Happening {
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

impl Happening {
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

/// What came of it.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The machine's next state.
    pub(crate) next: u32,
    /// Packets sent.
    pub(crate) sent: Vec<u32>,
    /// See [`Act::inert`](crate::machine::Act::inert).
    pub(crate) inert: bool,
    /// What was wrong.
    pub(crate) flaw: Option<(Flaw, String)>,
}

/// What was found out about one machine.
#[derive(Debug, Default)]
struct Shelf {
    states: Vec<Rc<Machine>>,
    facts: Vec<Facts>,
    numbers: HashMap<Rc<Machine>, u32, BuildHasherDefault<DefaultHasher>>,
    outcomes: HashMap<(u32, u64), Rc<Outcome>, BuildHasherDefault<Mix>>,
    /// Steps from one state to another.
    steps: Vec<(u32, u32)>,
    /// States, and packets that are inert there.
    inert: Vec<(u32, u32)>,
}

/// What was found out.
#[derive(Debug)]
pub(crate) struct Library<'s> {
    scope: &'s Scope,
    wiring: &'s Wiring,
    shelves: Vec<Shelf>,
    letters: Vec<Letter>,
    /// Which machine each goes to.
    receivers: Vec<usize>,
    numbers: HashMap<Letter, u32>,
}

impl<'s> Library<'s> {
    /// A library that knows the machines before anything happened; each has number 0.
    pub(crate) fn new(scope: &'s Scope, wiring: &'s Wiring) -> Self {
        let (letters, receivers, numbers) = (Vec::new(), Vec::new(), HashMap::new());
        let machines = Machine::all(scope, wiring);
        let shelves = machines.iter().map(|_| Shelf::default()).collect();
        let mut library = Self { scope, wiring, shelves, letters, receivers, numbers };
        for (index, machine) in machines.into_iter().enumerate() {
            library.number_of(index, machine);
        }
        library
    }

    /// Return how many machines there are.
    pub(crate) fn machines(&self) -> usize {
        self.shelves.len()
    }

    /// Return how many states of single machines were seen.
    pub(crate) fn states(&self) -> usize {
        self.shelves.iter().map(|shelf| shelf.states.len()).sum()
    }

    /// Return how often production code ran.
    pub(crate) fn runs(&self) -> usize {
        self.shelves.iter().map(|shelf| shelf.outcomes.len()).sum()
    }

    /// Return the machine that a packet goes to.
    pub(crate) fn receiver(&self, packet: u32) -> usize {
        self.receivers[packet as usize]
    }

    /// Return a machine in a state.
    pub(crate) fn machine(&self, machine: usize, state: u32) -> &Rc<Machine> {
        &self.shelves[machine].states[state as usize]
    }

    /// Return who sent a packet, and its bytes.
    pub(crate) fn letter(&self, packet: u32) -> (Addr, &[u8]) {
        let letter = &self.letters[packet as usize];
        (letter.from, &letter.bytes)
    }

    /// Return what is known of a machine in a state.
    pub(crate) fn facts(&self, machine: usize, state: u32) -> &Facts {
        &self.shelves[machine].facts[state as usize]
    }

    /// Return what comes of a happening to a machine in a state.
    pub(crate) fn outcome(&mut self, machine: usize, state: u32, happening: Happening) -> Rc<Outcome> {
        let key = (state, happening.key());
        if let Some(outcome) = self.shelves[machine].outcomes.get(&key) {
            return Rc::clone(outcome);
        }
        let before = Rc::clone(&self.shelves[machine].states[state as usize]);
        let letter = |packet: u32| {
            let letter = &self.letters[packet as usize];
            (letter.from, &letter.bytes[..])
        };
        let (one, two);
        let event = match happening {
            Happening::Packet(packet) => {
                one = [letter(packet)];
                Event::Packets(&one)
            }
            Happening::Two(first, second) => {
                two = [letter(first), letter(second)];
                Event::Packets(&two)
            }
            Happening::Timer => Event::Timer,
            Happening::Call => Event::Call,
            Happening::Restart => Event::Restart,
            Happening::Renew => Event::Renew,
            Happening::Calm => Event::Calm,
        };
        let act = before.act(self.scope, self.wiring, event);
        let from = self.wiring.addr(machine);
        let sent = act.sent.into_iter().map(|(to, bytes)| self.letter_number(Letter { from, to, bytes })).collect();
        let next = self.number_of(machine, act.next);
        let outcome = Rc::new(Outcome { next, sent, inert: act.inert, flaw: act.flaw });
        let shelf = &mut self.shelves[machine];
        shelf.outcomes.insert(key, Rc::clone(&outcome));
        // Where machines are calm they only change the names of their tokens, to some that were used before; what was
        // taken away until then would have to change with them.
        if next != state && happening != Happening::Calm {
            shelf.steps.push((state, next));
        }
        if let Happening::Packet(packet) = happening
            && act.inert
        {
            shelf.inert.push((state, packet));
        }
        outcome
    }

    /// Return a packet that was inert in a state of its receiver, and is not in a later one. If there is none, it was
    /// right to take such packets away: one step after the other, they stay without effect.
    pub(crate) fn revived(&mut self) -> Option<u32> {
        (0..self.machines()).find_map(|machine| {
            let steps = self.shelves[machine].steps.clone();
            let mut nexts: HashMap<u32, Vec<u32>> = HashMap::new();
            steps.iter().for_each(|&(state, next)| nexts.entry(state).or_default().push(next));
            // What turns out to be inert in a later state is added behind, and looked at in its turn.
            let mut looked = 0;
            while let Some(&(state, packet)) = self.shelves[machine].inert.get(looked) {
                looked += 1;
                for &next in nexts.get(&state).into_iter().flatten() {
                    if !self.outcome(machine, next, Happening::Packet(packet)).inert {
                        return Some(packet);
                    }
                }
            }
            None
        })
    }

    fn number_of(&mut self, machine: usize, state: Machine) -> u32 {
        let shelf = &mut self.shelves[machine];
        if let Some(&number) = shelf.numbers.get(&state) {
            return number;
        }
        let number = shelf.states.len() as u32;
        let state = Rc::new(state);
        shelf.facts.push(state.facts(self.scope));
        shelf.states.push(Rc::clone(&state));
        shelf.numbers.insert(state, number);
        number
    }

    fn letter_number(&mut self, letter: Letter) -> u32 {
        if let Some(&number) = self.numbers.get(&letter) {
            return number;
        }
        let number = self.letters.len() as u32;
        self.receivers.push(self.wiring.machine(letter.to));
        self.letters.push(letter.clone());
        self.numbers.insert(letter, number);
        number
    }

    /// Return a hash of the states that machines are in, the same in every search.
    pub(crate) fn fingerprint(&self, states: &[u32]) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (shelf, &state) in self.shelves.iter().zip(states) {
            shelf.states[state as usize].hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Say what a packet is.
    pub(crate) fn describe(&self, packet: u32) -> String {
        let Letter { from, to, bytes } = &self.letters[packet as usize];
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

/// A hash for keys of two numbers that are all different.
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
