//! Breadth-first search of all reachable states of a cluster; checks the invariants in each.
//!
//! A state consists of the faults used up, the state of each machine, and the unordered set of packets in flight. Time
//! is not part of it: an armed timer may fire whenever no packet is in flight, and otherwise as often as the scope
//! allows. Inert packets are removed at once, because it makes no difference whether they arrive, are lost or are
//! duplicated. For each step of the receiver the search verifies that they stay inert ([`Library::revived`]).

use crate::library::{Library, NumberedEvent};
use crate::machine::{Facts, Machine, ViolationKind};
use crate::scope::{Scope, Wiring};
use crate::store::Store;
use std::collections::BTreeSet;
use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};
use sumac_hal::port::Addr;

/// A step of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Deliver(u32),
    /// A copy arrives; the packet stays in flight.
    Repeat(u32),
    Lose(u32),
    Burst(u32, u32),
    To(usize, NumberedEvent),
}

/// A limited fault, by its position in a state's first word.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Loss = 0,
    Duplicate = 8,
    EarlyTimer = 16,
    Restart = 24,
}

/// The size of a search.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Report {
    /// States of the cluster.
    pub(crate) states: usize,
    /// Steps between them.
    pub(crate) transitions: usize,
    /// The maximum number of steps to a state.
    pub(crate) depth: usize,
    /// States in which every rank has all results.
    pub(crate) ends: usize,
    /// States of single machines.
    pub(crate) parts: usize,
    /// Runs of production code.
    pub(crate) runs: usize,
    /// The duration.
    pub(crate) took: Duration,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { states, transitions, depth, ends, parts, runs, took } = self;
        let seconds = took.as_secs_f64();
        write!(f, "{states} states ({ends} ends), {transitions} transitions, depth {depth}, ")?;
        write!(f, "{parts} states of machines, {runs} runs of theirs, {seconds:.1} s")
    }
}

/// A violation, with the shortest trace to it.
#[derive(Debug)]
pub(crate) struct Violation {
    /// The kind.
    pub(crate) flaw: ViolationKind,
    /// Details.
    pub(crate) text: String,
    /// The steps.
    pub(crate) trace: Vec<String>,
    /// The search up to the violation.
    pub(crate) report: Report,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}: {} (found after {})", self.flaw, self.text, self.report)?;
        self.trace.iter().zip(1..).try_for_each(|(step, i)| writeln!(f, "  {i:3}. {step}"))
    }
}

/// A search in progress.
#[derive(Debug)]
pub(crate) struct Search<'s> {
    scope: &'s Scope,
    wiring: &'s Wiring,
    library: Library<'s>,
    store: Store,
    /// How each state was found.
    origins: Vec<(u32, Step)>,
    depths: Vec<u16>,
    /// Steps that need no fault, from and to.
    free: Vec<(u32, u32)>,
    ends: Vec<u32>,
    transitions: usize,
    /// Whether inert packets are removed.
    reduced: bool,
    began: Instant,
}

/// Search a scope completely.
///
/// # Errors
/// The [`Violation`] with the shortest trace.
pub(crate) fn search(scope: &Scope) -> Result<Report, Box<Violation>> {
    Search::new(scope, &Wiring::new(&scope.shape), true).run()
}

/// Search a scope without violations; return the number of its states, and the fingerprint of the machines' states in
/// them, regardless of packets.
pub(crate) fn reachable(scope: &Scope, reduced: bool) -> (usize, BTreeSet<u64>) {
    let wiring = Wiring::new(&scope.shape);
    let mut search = Search::new(scope, &wiring, reduced);
    let report = search.run().unwrap_or_else(|violation| panic!("{scope}: {violation}"));
    let mut prints = BTreeSet::new();
    for index in 0..search.store.len() {
        let mut state = search.store.get(index)[..1 + search.library.machines()].to_vec();
        // Machines calm down when no packet is in flight, and that depends on whether inert packets are removed.
        search.calm(&mut state);
        prints.insert(search.library.fingerprint(&state[1..]));
    }
    (report.states, prints)
}

/// The ranks' states in one state of a cluster, and the packets in flight to them.
#[derive(Debug)]
pub(crate) struct Moment {
    /// The ranks.
    pub(crate) ranks: Vec<Rc<Machine>>,
    /// Receiver, sender and bytes of each packet.
    pub(crate) packets: Vec<(usize, Addr, Vec<u8>)>,
}

/// Search a scope in which not every run reaches an end; return the distinct states of its ranks.
pub(crate) fn moments(scope: &Scope) -> Vec<Moment> {
    let wiring = Wiring::new(&scope.shape);
    let mut search = Search::new(scope, &wiring, true);
    search.explore().unwrap_or_else(|violation| panic!("{scope}: {violation}"));
    let devices = wiring.devices.len();
    let mut seen = BTreeSet::new();
    for index in 0..search.store.len() {
        let (machines, packets) = search.split(search.store.get(index));
        let to_ranks = packets.iter().copied().filter(|&packet| search.library.receiver(packet) >= devices);
        seen.insert((machines[devices..].to_vec(), to_ranks.collect::<Vec<u32>>()));
    }
    let library = &search.library;
    let moment = |(ranks, packets): (Vec<u32>, Vec<u32>)| {
        let rank = |(index, &state): (usize, &u32)| Rc::clone(library.machine(devices + index, state));
        let packet = |packet| {
            let (from, bytes) = library.envelope(packet);
            (library.receiver(packet) - devices, from, bytes.to_vec())
        };
        Moment {
            ranks: ranks.iter().enumerate().map(rank).collect(),
            packets: packets.into_iter().map(packet).collect(),
        }
    };
    seen.into_iter().map(moment).collect()
}

impl<'s> Search<'s> {
    fn new(scope: &'s Scope, wiring: &'s Wiring, reduced: bool) -> Self {
        Self {
            scope,
            wiring,
            library: Library::new(scope, wiring),
            store: Store::new(),
            origins: Vec::new(),
            depths: Vec::new(),
            free: Vec::new(),
            ends: Vec::new(),
            transitions: 0,
            reduced,
            began: Instant::now(),
        }
    }

    fn run(&mut self) -> Result<Report, Box<Violation>> {
        self.explore()?;
        self.check_ends()?;
        Ok(self.report())
    }

    /// Visit all states and check the invariants in each.
    fn explore(&mut self) -> Result<(), Box<Violation>> {
        self.store.insert(&vec![0; 1 + self.library.machines()]);
        self.origins.push((0, Step::To(0, NumberedEvent::Calm)));
        self.depths.push(0);
        let (mut steps, mut state, mut next) = (Vec::new(), Vec::new(), Vec::new());
        let mut index = 0;
        while index < self.store.len() {
            assert!(index < STATES_MAX, "more than {STATES_MAX} states: narrow the scope");
            state.clear();
            state.extend_from_slice(self.store.get(index));
            steps.clear();
            self.enabled(&state, &mut steps);
            for &step in &steps {
                self.transitions += 1;
                let flaw = self.successor(&state, step, &mut next);
                let (to, fresh) = self.store.insert(&next);
                if fresh {
                    self.origins.push((index as u32, step));
                    self.depths.push(self.depths[index] + 1);
                }
                if let Some((flaw, text)) = flaw {
                    return Err(self.violation(flaw, text, index, Some(step)));
                }
                if fresh && let Some((flaw, text)) = self.judge(to, &next) {
                    return Err(self.violation(flaw, text, to, None));
                }
                if next[0] == state[0] {
                    self.free.push((index as u32, to as u32));
                }
            }
            index += 1;
        }
        if let Some(packet) = self.library.revived() {
            let text = self.library.describe(packet);
            return Err(self.violation(ViolationKind::Revived, text, 0, None));
        }
        Ok(())
    }

    /// List the possible steps in a state.
    fn enabled(&self, state: &[u32], steps: &mut Vec<Step>) {
        let (machines, packets) = self.split(state);
        let left = |fault: Fault| u32::from(self.limit(fault)) > (state[0] >> fault as u32 & 0xff);
        for (i, &packet) in packets.iter().enumerate() {
            if i > 0 && packets[i - 1] == packet {
                continue;
            }
            steps.push(Step::Deliver(packet));
            if left(Fault::Duplicate) {
                steps.push(Step::Repeat(packet));
            }
            if left(Fault::Loss) {
                steps.push(Step::Lose(packet));
            }
            if self.scope.bursts {
                let receiver = self.library.receiver(packet);
                let others = packets.iter().enumerate().filter(|&(j, _)| j != i);
                let same = others.filter(|&(_, &other)| self.library.receiver(other) == receiver);
                steps.extend(same.map(|(_, &other)| Step::Burst(packet, other)));
            }
        }
        let restarted = state[0] >> Fault::Restart as u32 != 0;
        let last = self.scope.last_epoch();
        let devices = 0..self.wiring.devices.len();
        let renewed = devices.clone().all(|device| self.library.facts(device, machines[device]).epoch == last);
        for (machine, &number) in machines.iter().enumerate() {
            let facts = self.library.facts(machine, number);
            if facts.can_call {
                steps.push(Step::To(machine, NumberedEvent::Call));
            }
            if facts.armed && !self.scope.rules.timeless && (packets.is_empty() || left(Fault::EarlyTimer)) {
                steps.push(Step::To(machine, NumberedEvent::Timer));
            }
            if devices.contains(&machine) && left(Fault::Restart) {
                steps.push(Step::To(machine, NumberedEvent::Restart));
            }
            if restarted && facts.epoch < last && (renewed || devices.contains(&machine)) {
                steps.push(Step::To(machine, NumberedEvent::Renew));
            }
        }
    }

    fn limit(&self, fault: Fault) -> u8 {
        match fault {
            Fault::Loss => self.scope.losses,
            Fault::Duplicate => self.scope.duplicates,
            Fault::EarlyTimer => self.scope.early_timers,
            Fault::Restart => self.scope.restarts,
        }
    }

    fn split<'a>(&self, state: &'a [u32]) -> (&'a [u32], &'a [u32]) {
        state[1..].split_at(self.library.machines())
    }

    /// Take a step; write the resulting state to `next`.
    fn successor(&mut self, state: &[u32], step: Step, next: &mut Vec<u32>) -> Option<(ViolationKind, String)> {
        next.clear();
        next.extend_from_slice(state);
        let is_calm = self.split(state).1.is_empty();
        let mut use_up = |fault: Fault| next[0] += 1 << fault as u32;
        match step {
            Step::Lose(_) => use_up(Fault::Loss),
            Step::Repeat(_) => use_up(Fault::Duplicate),
            Step::To(_, NumberedEvent::Timer) if !is_calm => use_up(Fault::EarlyTimer),
            Step::To(_, NumberedEvent::Restart) => use_up(Fault::Restart),
            _ => {}
        }
        let taken: &[u32] = match &step {
            Step::Deliver(packet) | Step::Lose(packet) => &[*packet],
            Step::Burst(first, second) => &[*first, *second],
            Step::Repeat(_) | Step::To(..) => &[],
        };
        let first = 1 + self.library.machines();
        for packet in taken {
            let place = next[first..].iter().position(|other| other == packet).expect("it was on its way");
            next.remove(first + place);
        }
        let (machine, happening) = match step {
            Step::Lose(_) => {
                self.calm(next);
                return None;
            }
            Step::Deliver(packet) | Step::Repeat(packet) => {
                (self.library.receiver(packet), NumberedEvent::Packet(packet))
            }
            Step::Burst(one, two) => (self.library.receiver(one), NumberedEvent::Two(one, two)),
            Step::To(machine, happening) => (machine, happening),
        };
        let outcome = self.library.outcome(machine, next[1 + machine], happening);
        next[1 + machine] = outcome.next;
        next.extend_from_slice(&outcome.sent);
        let mut place = first;
        while place < next.len() {
            if self.is_inert(next, next[place], machine, &outcome.sent) {
                next.swap_remove(place);
            } else {
                place += 1;
            }
        }
        next[first..].sort_unstable();
        self.calm(next);
        outcome.flaw.clone()
    }

    /// Return whether a packet has become inert: either the packet or its receiver's state is new.
    fn is_inert(&mut self, state: &[u32], packet: u32, changed: usize, sent: &[u32]) -> bool {
        let receiver = self.library.receiver(packet);
        let may_be = self.reduced && (receiver == changed || sent.contains(&packet));
        may_be && self.library.outcome(receiver, state[1 + receiver], NumberedEvent::Packet(packet)).inert
    }

    /// Without packets in flight, machines forget their outstanding requests.
    fn calm(&mut self, state: &mut [u32]) {
        if !self.split(state).1.is_empty() {
            return;
        }
        for machine in 0..self.library.machines() {
            state[1 + machine] = self.library.outcome(machine, state[1 + machine], NumberedEvent::Calm).next;
        }
    }

    /// Check a new state.
    fn judge(&mut self, index: usize, state: &[u32]) -> Option<(ViolationKind, String)> {
        let (machines, packets) = self.split(state);
        let facts: Vec<&Facts> =
            machines.iter().enumerate().map(|(machine, &number)| self.library.facts(machine, number)).collect();
        let (devices, ranks) = facts.split_at(self.wiring.devices.len());
        for (device, (facts, place)) in devices.iter().zip(&self.wiring.devices).enumerate() {
            for &rank in &place.ranks {
                let held = if ranks[rank].epoch == facts.epoch { ranks[rank].held } else { 0 };
                if facts.passed & !held != 0 {
                    let chunk = (facts.passed & !held).trailing_zeros();
                    return Some((
                        ViolationKind::Freed,
                        format!("device {device} let go of chunk {chunk} before rank {rank} had it"),
                    ));
                }
            }
        }
        let least = ranks.iter().map(|rank| u64::from(rank.held.trailing_ones())).min().unwrap_or(0);
        let is_told = !self.scope.rules.trusting && ranks.iter().all(|rank| rank.epoch == ranks[0].epoch);
        if let Some(rank) = ranks.iter().position(|rank| is_told && rank.stable > least) {
            return Some((
                ViolationKind::Unstable,
                format!("rank {rank} was told {}, and {least} is true", ranks[rank].stable),
            ));
        }
        let epoch = 1 + (state[0] >> Fault::Restart as u32) as u16;
        if ranks.iter().all(|rank| rank.done && rank.epoch == epoch) {
            let restless = facts.iter().position(|facts| packets.is_empty() && facts.armed);
            if let Some(machine) = restless {
                return Some((ViolationKind::Restless, format!("{} waits for something", self.wiring.name(machine))));
            }
            self.ends.push(index as u32);
        }
        None
    }

    /// Check that from every state an end is reachable without further faults.
    fn check_ends(&self) -> Result<(), Box<Violation>> {
        let states = self.store.len();
        let mut starts = vec![0_u32; states + 1];
        self.free.iter().for_each(|&(_, to)| starts[to as usize + 1] += 1);
        (0..states).for_each(|i| starts[i + 1] += starts[i]);
        let mut places = starts.clone();
        let mut sources = vec![0_u32; self.free.len()];
        for &(from, to) in &self.free {
            sources[places[to as usize] as usize] = from;
            places[to as usize] += 1;
        }
        let mut ends = vec![false; states];
        let mut queue = self.ends.clone();
        queue.iter().for_each(|&end| ends[end as usize] = true);
        while let Some(to) = queue.pop() {
            let range = starts[to as usize] as usize..starts[to as usize + 1] as usize;
            for &from in &sources[range] {
                if !std::mem::replace(&mut ends[from as usize], true) {
                    queue.push(from);
                }
            }
        }
        match ends.iter().position(|ends| !ends) {
            Some(stuck) => {
                let packets = self.split(self.store.get(stuck)).1.len();
                let text = format!("no way to the end, with {packets} packets on their way");
                Err(self.violation(ViolationKind::Stuck, text, stuck, None))
            }
            None => Ok(()),
        }
    }

    fn report(&self) -> Report {
        Report {
            states: self.store.len(),
            transitions: self.transitions,
            depth: self.depths.iter().copied().max().unwrap_or(0).into(),
            ends: self.ends.len(),
            parts: self.library.states(),
            runs: self.library.runs(),
            took: self.began.elapsed(),
        }
    }

    fn violation(&self, flaw: ViolationKind, text: String, at: usize, last: Option<Step>) -> Box<Violation> {
        let mut steps: Vec<Step> = last.into_iter().collect();
        let mut index = at;
        while index != 0 {
            let (from, step) = self.origins[index];
            steps.push(step);
            index = from as usize;
        }
        let trace = steps.iter().rev().map(|step| self.describe(*step)).collect();
        Box::new(Violation { flaw, text, trace, report: self.report() })
    }

    fn describe(&self, step: Step) -> String {
        let packet = |packet| self.library.describe(packet);
        match step {
            Step::Deliver(one) => packet(one),
            Step::Repeat(one) => format!("a copy of {}", packet(one)),
            Step::Lose(one) => format!("lost: {}", packet(one)),
            Step::Burst(one, two) => format!("in one go: {}; {}", packet(one), packet(two)),
            Step::To(machine, happening) => format!("{}: {happening:?}", self.wiring.name(machine)),
        }
    }
}

/// The maximum number of states, limited by memory and the width of a number.
const STATES_MAX: usize = 40_000_000;
