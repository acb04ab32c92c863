//! What ranks have when their tree is lost: all that a repair can begin with, from all states of the tree.
//!
//! A rank freezes at a moment of its own, and the tree goes on without it for the others. That is a run in which nothing
//! happens at that rank any more, so what all ranks have in the end they also have in one state of the tree, all at once.
//! A device that is dead is one at which nothing happens any more; one that has started again has nothing to tell.
//!
//! A repair reads of a rank which chunks are answered, what is kept of those operations that have returned, and the
//! buffers. States of ranks that are alike in that are the same to it ([`Key`]); whatever timers, windows and packets are
//! there besides, nothing reads them once the endpoint is frozen, and what still arrives changes nothing
//! ([`Fronts::check_frozen`]).

use super::flaw::Rules;
use crate::machine::Machine;
use crate::rank::Memory;
use crate::scope::Scope;
use crate::search::{Moment, moments};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;
use sumac::rehearsal::{Landed, Promise};
use sumac::transport::packets::{Endpoint, OpId};
use sumac_hal::ids::ChunkNo;
use sumac_hal::port::Addr;
use sumac_hal::uplink::Uplink;

/// What a caller does with its buffers once they are its own again.
const GARBAGE: u8 = 0xee;

/// What one rank has.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Front {
    /// Its endpoint, frozen; one of those that are the same to a repair.
    pub(super) endpoint: Endpoint,
    /// How many operations it has called.
    pub(super) called: u64,
    /// How many of them have returned.
    pub(super) returned: u64,
    /// Its buffers; those of operations that have returned are garbage.
    pub(super) memory: Memory,
}

/// All of a rank that a repair reads.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    promise: Promise,
    answered: Vec<bool>,
    kept: Vec<Option<Vec<u8>>>,
    next: OpId,
    called: u64,
    returned: u64,
    memory: Memory,
}

/// What is on its way to a rank, from whom.
pub(super) type Late = (usize, Addr, Vec<u8>);

/// All that ranks can have at once.
#[derive(Debug, Default)]
pub(super) struct Fronts {
    /// What single ranks have, by number.
    pub(super) ranks: Vec<Rc<Front>>,
    keys: HashMap<(usize, Key), usize>,
    /// The numbers of what all have, each once, and of packets that were on their way then, if those matter.
    pub(super) all: BTreeMap<Vec<usize>, Vec<Vec<Late>>>,
    /// Of how many states of the ranks.
    pub(super) moments: usize,
    frozen: HashSet<(usize, Addr, Vec<u8>)>,
}

impl Front {
    fn of(machine: &Machine, scope: &Scope, rules: Rules) -> Self {
        let Machine::Rank(member) = machine else { panic!("devices repair nothing") };
        let (mut endpoint, called, returned, mut memory) = member.leave(scope);
        memory.0[..returned as usize].iter_mut().for_each(|buffer| buffer.fill(GARBAGE));
        if rules.keeps_nothing {
            endpoint.forget_kept();
        }
        if !rules.unfenced {
            endpoint.freeze();
        }
        // That it has failed is why it is frozen.
        endpoint.poll_event();
        endpoint.rest();
        Self { endpoint, called, returned, memory }
    }

    fn key(&self, scope: &Scope) -> Key {
        let seqs = 0..scope.ops().last().map_or(0, |(_, seqs)| seqs.end);
        Key {
            promise: Promise::of(&self.endpoint, &Landed::default(), 0),
            answered: seqs.clone().map(|seq| self.endpoint.holds(seq)).collect(),
            kept: seqs.map(|seq| self.endpoint.kept(ChunkNo(seq))).collect(),
            next: self.endpoint.first_behind(u64::MAX),
            called: self.called,
            returned: self.returned,
            memory: self.memory.clone(),
        }
    }
}

impl Fronts {
    /// Find all that the ranks of a scope can have.
    pub(super) fn of(scope: &Scope, rules: Rules) -> Self {
        Self::from(scope, moments(scope), rules)
    }

    /// Collect what the ranks have in these states.
    pub(super) fn from(scope: &Scope, moments: Vec<Moment>, rules: Rules) -> Self {
        let mut fronts = Self::default();
        let mut numbers: HashMap<*const Machine, usize> = HashMap::new();
        let mut tuples = HashSet::new();
        for Moment { ranks, packets } in &moments {
            let number = |(rank, machine): (usize, &Rc<Machine>)| {
                let known = numbers.get(&Rc::as_ptr(machine)).copied();
                let number = known.unwrap_or_else(|| fronts.number_of(rank, Front::of(machine, scope, rules), scope));
                numbers.insert(Rc::as_ptr(machine), number);
                number
            };
            let all: Vec<usize> = ranks.iter().enumerate().map(number).collect();
            tuples.insert(ranks.iter().map(Rc::as_ptr).collect::<Vec<_>>());
            if !rules.unfenced {
                packets.iter().for_each(|(rank, from, bytes)| fronts.check_frozen(all[*rank], *from, bytes));
            }
            let late = if rules.unfenced { packets.clone() } else { Vec::new() };
            let lates = fronts.all.entry(all).or_default();
            if !lates.contains(&late) {
                lates.push(late);
            }
        }
        fronts.moments = tuples.len();
        fronts
    }

    fn number_of(&mut self, rank: usize, front: Front, scope: &Scope) -> usize {
        let next = self.ranks.len();
        let number = *self.keys.entry((rank, front.key(scope))).or_insert(next);
        if number == next {
            self.ranks.push(Rc::new(front));
        }
        number
    }

    /// What arrives after the freeze changes nothing.
    fn check_frozen(&mut self, number: usize, from: Addr, bytes: &[u8]) {
        if !self.frozen.insert((number, from, bytes.to_vec())) {
            return;
        }
        let mut front = Front::clone(&self.ranks[number]);
        front.endpoint.handle(from, bytes, &mut front.memory, Uplink::AFTERWARDS);
        front.endpoint.rest();
        assert_eq!(front, *self.ranks[number], "a frozen endpoint takes in {bytes:?}");
    }

    /// Return what all ranks can have at once, in words that are the same in every search.
    pub(super) fn in_words(&self, scope: &Scope) -> std::collections::BTreeSet<String> {
        let word = |&number: &usize| format!("{:?}", self.ranks[number].key(scope));
        self.all.keys().map(|all| all.iter().map(word).collect::<Vec<_>>().join("\n")).collect()
    }
}
