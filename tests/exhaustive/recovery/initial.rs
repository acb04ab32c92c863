//! The initial states of a recovery: the ranks' data in every state in which a tree can be lost.
//!
//! Each rank freezes at its own moment while the tree continues for the others. This equals a run without further
//! events at that rank, so the ranks' final data also occurs in a single state of the tree. A dead device is one
//! without further events; a restarted one has no data.
//!
//! A recovery reads a rank's completed chunks, the retained data of returned operations, and the buffers. States that
//! agree in these are equivalent ([`Key`]): nothing reads timers and windows of a frozen endpoint, and later packets
//! change nothing ([`InitialStates::check_frozen`]).

use super::violation::Rules;
use crate::machine::Machine;
use crate::rank::Memory;
use crate::scope::Scope;
use crate::search::{Moment, moments};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;
use sumac::harness::{Landed, RankReport};
use sumac::transport::packets::{Endpoint, OpId};
use sumac_hal::ids::ChunkNo;
use sumac_hal::port::{Addr, Ecn};
use sumac_hal::uplink::Uplink;

/// The byte with which callers overwrite buffers that have been returned to them.
const GARBAGE: u8 = 0xee;

/// The data of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct InitialState {
    /// Its frozen endpoint, as a representative of those that are equivalent for a recovery.
    pub(super) endpoint: Endpoint,
    /// The number of operations that it has called.
    pub(super) called: u64,
    /// The number of operations that have returned.
    pub(super) returned: u64,
    /// Its buffers; those of returned operations hold garbage.
    pub(super) memory: Memory,
}

/// Everything of a rank that a recovery reads.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    report: RankReport,
    answered: Vec<bool>,
    kept: Vec<Option<Vec<u8>>>,
    next: OpId,
    called: u64,
    returned: u64,
    memory: Memory,
}

/// A packet in flight: receiver, sender, bytes.
pub(super) type Late = (usize, Addr, Vec<u8>);

/// All combinations of the ranks' data.
#[derive(Debug, Default)]
pub(super) struct InitialStates {
    /// The data of single ranks, by number.
    pub(super) ranks: Vec<Rc<InitialState>>,
    keys: HashMap<(usize, Key), usize>,
    /// The distinct combinations, as numbers, each with the packets in flight if they matter.
    pub(super) all: BTreeMap<Vec<usize>, Vec<Vec<Late>>>,
    /// The number of states of the ranks that they represent.
    pub(super) moments: usize,
    frozen: HashSet<(usize, Addr, Vec<u8>)>,
}

impl InitialState {
    fn of(machine: &Machine, scope: &Scope, rules: Rules) -> Self {
        let Machine::Rank(member) = machine else { panic!("devices recover nothing") };
        let (mut endpoint, called, returned, mut memory) = member.leave(scope);
        memory.0[..returned as usize].iter_mut().for_each(|buffer| buffer.fill(GARBAGE));
        if rules.keeps_nothing {
            endpoint.forget_retained();
        }
        if !rules.unfenced {
            endpoint.freeze();
        }
        // The failure event is what freezes it.
        let _ = endpoint.poll_event();
        endpoint.rest();
        Self { endpoint, called, returned, memory }
    }

    fn key(&self, scope: &Scope) -> Key {
        let seqs = 0..scope.ops().last().map_or(0, |(_, seqs)| seqs.end);
        Key {
            report: RankReport::of(&self.endpoint, &Landed::default(), 0, 0),
            answered: seqs.clone().map(|seq| self.endpoint.holds(seq)).collect(),
            kept: seqs.map(|seq| self.endpoint.kept(ChunkNo(seq))).collect(),
            next: self.endpoint.first_behind(u64::MAX),
            called: self.called,
            returned: self.returned,
            memory: self.memory.clone(),
        }
    }
}

impl InitialStates {
    /// Find all combinations of a scope.
    pub(super) fn of(scope: &Scope, rules: Rules) -> Self {
        Self::from(scope, moments(scope), rules)
    }

    /// Collect the combinations in these states.
    pub(super) fn from(scope: &Scope, moments: Vec<Moment>, rules: Rules) -> Self {
        let mut initial_states = Self::default();
        let mut numbers: HashMap<*const Machine, usize> = HashMap::new();
        let mut tuples = HashSet::new();
        for Moment { ranks, packets } in &moments {
            let number = |(rank, machine): (usize, &Rc<Machine>)| {
                let known = numbers.get(&Rc::as_ptr(machine)).copied();
                let number = known
                    .unwrap_or_else(|| initial_states.number_of(rank, InitialState::of(machine, scope, rules), scope));
                numbers.insert(Rc::as_ptr(machine), number);
                number
            };
            let all: Vec<usize> = ranks.iter().enumerate().map(number).collect();
            tuples.insert(ranks.iter().map(Rc::as_ptr).collect::<Vec<_>>());
            if !rules.unfenced {
                packets.iter().for_each(|(rank, from, bytes)| initial_states.check_frozen(all[*rank], *from, bytes));
            }
            let late = if rules.unfenced { packets.clone() } else { Vec::new() };
            let lates = initial_states.all.entry(all).or_default();
            if !lates.contains(&late) {
                lates.push(late);
            }
        }
        initial_states.moments = tuples.len();
        initial_states
    }

    fn number_of(&mut self, rank: usize, front: InitialState, scope: &Scope) -> usize {
        let next = self.ranks.len();
        let number = *self.keys.entry((rank, front.key(scope))).or_insert(next);
        if number == next {
            self.ranks.push(Rc::new(front));
        }
        number
    }

    /// Check that packets that arrive after the freeze change nothing.
    fn check_frozen(&mut self, number: usize, from: Addr, bytes: &[u8]) {
        if !self.frozen.insert((number, from, bytes.to_vec())) {
            return;
        }
        let mut front = InitialState::clone(&self.ranks[number]);
        front.endpoint.handle(Uplink::RESUME_AT, from, Ecn::Unmarked, bytes, &mut front.memory);
        front.endpoint.rest();
        assert_eq!(front, *self.ranks[number], "a frozen endpoint takes in {bytes:?}");
    }

    /// Return all combinations, in an encoding that is the same in every search.
    pub(super) fn in_words(&self, scope: &Scope) -> std::collections::BTreeSet<String> {
        let word = |&number: &usize| format!("{:?}", self.ranks[number].key(scope));
        self.all.keys().map(|all| all.iter().map(word).collect::<Vec<_>>().join("\n")).collect()
    }
}
