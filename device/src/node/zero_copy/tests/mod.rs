//! Zero-copy contributions against an engine that completes in any order and fails half-way.

mod engine;
mod faults;
mod model;
mod rules;
mod stragglers;

use super::{BufferRef, Node, RedoSlot, ZeroCopyStorage};
use crate::node::tests::{EPOCH, OP, Rig, Setup, floats, group_id, parts};
use engine::{FakeEngine, REDO};
use std::vec;
use std::vec::Vec;
use sumac_hal::ctrl::Order;
use sumac_hal::dma::{Address, Capabilities, Profile, RegionKey, RegionTable, Span};
use sumac_hal::ids::{ChildIndex, ChunkNo, FunctionId};
use sumac_hal::mmio::{CompletionEntry, Contribution, EntryStatus};
use sumac_hal::op::Path;

/// Elements per chunk.
pub(in crate::node::zero_copy::tests) const ELEMENTS: usize = 8;
/// Chunks in each rank's memory.
pub(in crate::node::zero_copy::tests) const CHUNKS: u64 = 24;

/// A node, its engine, and ranks with registered memory.
pub(in crate::node::zero_copy::tests) struct World {
    pub(in crate::node::zero_copy::tests) rig: Rig,
    pub(in crate::node::zero_copy::tests) engine: FakeEngine,
    pub(in crate::node::zero_copy::tests) regions: RegionTable<16>,
    /// By child; `None` for inline children.
    pub(in crate::node::zero_copy::tests) keys: Vec<Option<RegionKey>>,
    pub(in crate::node::zero_copy::tests) answers: Vec<(FunctionId, CompletionEntry)>,
    /// A bit for each child that contributes no data.
    pub(in crate::node::zero_copy::tests) empty: u16,
}

pub(in crate::node::zero_copy::tests) fn owner(child: u16) -> FunctionId {
    FunctionId(100 + u32::from(child))
}

/// Return whether a mask has the bit of `child`; false for children beyond the mask.
pub(in crate::node::zero_copy::tests) fn has(mask: u16, child: u16) -> bool {
    mask.checked_shr(child.into()).is_some_and(|bits| bits & 1 == 1)
}

/// What `child` contributes to `seq`: values whose sums round, so that the order of summation shows.
pub(in crate::node::zero_copy::tests) fn values(child: u16, seq: u64) -> Vec<f32> {
    (0..ELEMENTS).map(|i| (0.1 + f32::from(child)) * 10_f32.powi((seq as usize + 3 * i) as i32 % 7 - 3)).collect()
}

impl World {
    /// Create a group without zero-copy children.
    pub(in crate::node::zero_copy::tests) fn detached(setup: Setup, capabilities: Capabilities) -> Self {
        let slots = usize::from(setup.slots) * setup.groups;
        let slot_len = Node::redo_slot_len_bytes(setup.order, setup.children, setup.chunk_len_bytes);
        let engine = FakeEngine::new(capabilities, slot_len, slots);
        let (config, storage) = parts(&setup);
        let memory = Span { address: Address { region: REDO, offset_bytes: 0 }, len_bytes: (slots * slot_len) as u64 };
        let tables = ZeroCopyStorage {
            redo: Vec::leak(vec![RedoSlot::EMPTY; slots]),
            buffers: Vec::leak(vec![BufferRef::EMPTY; slots * usize::from(setup.children)]),
            memory,
            capabilities,
        };
        let rig = Rig::with(setup, Node::with_zero_copy(config, storage, tables));
        let keys = vec![None; usize::from(setup.children)];
        Self { rig, engine, regions: RegionTable::new(2), keys, answers: Vec::new(), empty: 0 }
    }

    /// Create a group; `attached` has a bit for each zero-copy child.
    pub(in crate::node::zero_copy::tests) fn new(setup: Setup, attached: u16, capabilities: Capabilities) -> Self {
        let mut world = Self::detached(setup, capabilities);
        let children: Vec<u16> = (0..setup.children).filter(|&child| has(attached, child)).collect();
        for &child in &children {
            let bytes: Vec<u8> = (0..CHUNKS).flat_map(|seq| floats(&values(child, seq))).collect();
            let key = world.regions.register(owner(child), bytes.len() as u64).expect("room");
            world.engine.memory.insert(key, bytes);
            world.keys[usize::from(child)] = Some(key);
        }
        let owners: Vec<_> = children.iter().map(|&child| (ChildIndex(child), owner(child))).collect();
        world.rig.node.attach(group_id(0), &owners).expect("room");
        world
    }

    pub(in crate::node::zero_copy::tests) fn full() -> Capabilities {
        Capabilities::new(Profile::Full, 64, 64)
    }

    pub(in crate::node::zero_copy::tests) fn address(&self, child: u16, seq: u64) -> Address {
        let region = self.keys[usize::from(child)].expect("a zero-copy child");
        Address { region, offset_bytes: seq * (ELEMENTS * 4) as u64 }
    }

    /// What `child` submits for `seq`, in place.
    pub(in crate::node::zero_copy::tests) fn entry(&self, child: u16, seq: u64) -> Contribution {
        Contribution {
            group: group_id(0),
            epoch: EPOCH,
            seq: ChunkNo(seq),
            count: 1,
            elements: ELEMENTS as u32,
            lag: (seq - self.rig.have[usize::from(child)]) as u16,
            collective: OP.collective,
            dtype: OP.dtype,
            op: OP.op,
            root: OP.root,
            total: OP.count,
            signature: OP.signature(Path::Tree, 1),
            src: Some(self.address(child, seq)),
            dst: Some(self.address(child, seq)),
        }
    }

    pub(in crate::node::zero_copy::tests) fn submit(
        &mut self,
        child: u16,
        entry: &Contribution,
    ) -> Result<(), EntryStatus> {
        let done = self.rig.node.submit(owner(child), entry, &mut self.regions, self.rig.now);
        self.poll();
        done
    }

    /// Let `child` contribute, zero-copy or inline.
    pub(in crate::node::zero_copy::tests) fn contribute(&mut self, child: u16, seq: u64) {
        let is_empty = has(self.empty, child);
        if self.keys[usize::from(child)].is_some() {
            let entry = self.entry(child, seq);
            let entry = Contribution { src: entry.src.filter(|_| !is_empty), ..entry };
            assert_eq!(self.submit(child, &entry), Ok(()), "child {child} seq {seq}");
        } else if is_empty {
            let repr = self.rig.up(sumac_hal::wire::Kind::Empty, child, seq);
            self.rig.put(crate::node::tests::child_addr(child), repr, &[]);
            self.poll();
        } else {
            self.rig.data(child, seq, &values(child, seq));
            self.poll();
        }
    }

    pub(in crate::node::zero_copy::tests) fn poll(&mut self) {
        self.rig.node.poll_dma(&mut self.engine, self.rig.now);
        while let Some(answer) = self.rig.node.poll_answer(&mut self.regions) {
            if let (Some(missing), CompletionEntry::Answer { seq, .. }) = (answer.missing, answer.entry) {
                let halves = CompletionEntry::missing(0, seq, &missing);
                self.answers.extend(halves.map(|half| (answer.function, half)));
            }
            self.answers.push((answer.function, answer.entry));
        }
        crate::node::tests::check_invariants(&mut self.rig.node);
    }

    /// Complete a chain.
    pub(in crate::node::zero_copy::tests) fn complete(&mut self, which: usize, fails: Option<usize>) {
        let completion = self.engine.complete(which, fails);
        self.rig.node.handle_completion(&completion);
        self.poll();
    }

    pub(in crate::node::zero_copy::tests) fn run_all(&mut self) {
        while !self.engine.in_flight.is_empty() {
            self.complete(0, None);
        }
    }

    pub(in crate::node::zero_copy::tests) fn memory(&mut self, child: u16, seq: u64) -> Vec<f32> {
        let at = self.address(child, seq);
        let bytes = &self.engine.memory[&at.region][at.offset_bytes as usize..][..ELEMENTS * 4];
        bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
    }

    /// Return the answers since the last call, as (child, seq, status).
    pub(in crate::node::zero_copy::tests) fn take_answers(&mut self) -> Vec<(u16, u64, EntryStatus)> {
        let answers = self.answers.drain(..).map(|(owner, answer)| match answer {
            CompletionEntry::Answer { status, seq, count: 1, .. } => ((owner.0 - 100) as u16, seq.0, status),
            other => panic!("{other:?}"),
        });
        answers.collect()
    }
}

/// The oracle: the declared expression over `children`, element by element, left to right or pairwise. Children in
/// `empty` are skipped.
pub(in crate::node::zero_copy::tests) fn expression_without(
    order: Order,
    children: &[u16],
    seq: u64,
    empty: u16,
) -> Option<Vec<f32>> {
    let plus = |a: Option<Vec<f32>>, b: Option<Vec<f32>>| match (a, b) {
        (Some(a), Some(b)) => Some(a.iter().zip(&b).map(|(a, b)| a + b).collect()),
        (a, b) => a.or(b),
    };
    match children {
        [] => None,
        [one] => (!has(empty, *one)).then(|| values(*one, seq)),
        [rest @ .., last] if order != Order::TreePairwise => {
            plus(expression_without(order, rest, seq, empty), expression_without(order, &[*last], seq, empty))
        }
        _ => {
            let (left, right) = children.split_at(children.len().next_power_of_two() / 2);
            plus(expression_without(order, left, seq, empty), expression_without(order, right, seq, empty))
        }
    }
}

/// The expression over children that all have data.
pub(in crate::node::zero_copy::tests) fn expression(order: Order, children: &[u16], seq: u64) -> Vec<f32> {
    expression_without(order, children, seq, 0).expect("some child")
}
