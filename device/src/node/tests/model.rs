//! A node against an oracle of plain sets: children that send, repeat, lose and land in any order.
//!
//! The oracle keeps, per child, which seqs it has contributed and what it has said to have; from these alone it says
//! of every packet whether the node takes it, and of every result what its value is. A child's value is
//! 2^child x (seq + 1), so a missing, double or stale contribution shows.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const CHUNKS: u64 = 24;

#[derive(Debug, Clone, Copy)]
enum Step {
    /// The next chunk, if the window allows it.
    Send(u16),
    /// An earlier contribution once more, from its start (0) to its end (255) of what was sent.
    Repeat(u16, u8),
    /// A contribution beyond the window.
    Overrun(u16, u8),
    /// One of the answers on its way arrives.
    Land(u16, u8),
    /// One of them is lost.
    Lose(u16, u8),
    /// Ask what is the matter.
    Probe(u16),
}

struct World {
    rig: Rig,
    sent: Vec<u64>,
    contributed: Vec<BTreeSet<u64>>,
    landed: Vec<BTreeSet<u64>>,
    /// What each child has told.
    told: Vec<u64>,
    /// Answers on their way, by child.
    wire: Vec<Vec<Sent>>,
    values: BTreeMap<u64, Vec<f32>>,
}

impl World {
    fn new(setup: Setup) -> Self {
        let n = usize::from(setup.children);
        Self {
            rig: Rig::new(setup),
            sent: vec![0; n],
            contributed: vec![BTreeSet::new(); n],
            landed: vec![BTreeSet::new(); n],
            told: vec![0; n],
            wire: vec![Vec::new(); n],
            values: BTreeMap::new(),
        }
    }

    fn window(&self) -> u64 {
        u64::from(self.rig.setup.window)
    }

    fn have(&self, child: usize) -> u64 {
        (0..).find(|seq| !self.landed[child].contains(seq)).expect("some number is free")
    }

    /// A contribution arrives: the oracle says what becomes of it.
    fn contribute(&mut self, child: usize, seq: u64) {
        self.told[child] = self.told[child].max(self.rig.have[child]);
        let fits = seq < self.told[child] + self.window();
        let fresh = fits && self.contributed[child].insert(seq);
        let before = *self.rig.node.counters();
        let value = f32::from(1_u16 << child) * (seq + 1) as f32;
        self.rig.data(child as u16, seq, &[value]);
        let after = *self.rig.node.counters();
        assert_eq!(after.contributions - before.contributions, u64::from(fresh), "child {child} seq {seq}");
        let dropped = |reason| after.dropped(reason) - before.dropped(reason);
        let repeats = dropped(DropReason::Duplicate) + dropped(DropReason::Stale);
        assert_eq!(repeats, u64::from(fits && !fresh), "child {child} seq {seq}");
        assert_eq!(dropped(DropReason::OverWindow), u64::from(!fits), "child {child} seq {seq}");
        let complete = self.contributed.iter().all(|seqs| seqs.contains(&seq));
        assert_eq!(after.completed - before.completed, u64::from(complete && fresh));
        self.collect();
    }

    fn collect(&mut self) {
        for sent in self.rig.drain() {
            let Addr::Emu(child) = sent.to else { panic!("{sent:?}") };
            match sent.repr.kind {
                Kind::Result => self.wire[child as usize].push(sent),
                Kind::Nak => {
                    assert!(sent.is_nak(NakReason::Missing));
                    assert!(!self.contributed[child as usize].contains(&sent.repr.seq.0), "asks for what is in");
                }
                _ => {}
            }
        }
    }

    fn step(&mut self, step: Step) {
        let n = self.sent.len();
        match step {
            Step::Send(child) => {
                let child = usize::from(child) % n;
                let seq = self.sent[child];
                if seq < CHUNKS && seq < self.have(child) + self.window() {
                    self.sent[child] += 1;
                    self.contribute(child, seq);
                }
            }
            Step::Repeat(child, which) => {
                let child = usize::from(child) % n;
                if self.sent[child] > 0 {
                    self.contribute(child, u64::from(which) % self.sent[child]);
                }
            }
            Step::Overrun(child, by) => {
                let child = usize::from(child) % n;
                let seq = self.told[child].max(self.rig.have[child]) + self.window() + u64::from(by);
                self.contribute(child, seq);
            }
            Step::Land(child, which) => self.land(usize::from(child) % n, which),
            Step::Lose(child, which) => {
                let wire = &mut self.wire[usize::from(child) % n];
                if !wire.is_empty() {
                    wire.remove(usize::from(which) % wire.len());
                }
            }
            Step::Probe(child) => self.probe(usize::from(child) % n),
        }
    }

    fn land(&mut self, child: usize, which: u8) {
        if self.wire[child].is_empty() {
            return;
        }
        let which = usize::from(which) % self.wire[child].len();
        let result = self.wire[child].remove(which);
        let seq = result.repr.seq.0;
        assert!(self.contributed.iter().all(|seqs| seqs.contains(&seq)), "a result before everybody was in");
        let weights = (1_u32 << self.sent.len()) - 1;
        assert_eq!(result.floats(), [weights as f32 * (seq + 1) as f32], "seq {seq}");
        let first = self.values.entry(seq).or_insert_with(|| result.floats());
        assert_eq!(*first, result.floats());
        self.landed[child].insert(seq);
        self.rig.have[child] = self.have(child);
    }

    fn probe(&mut self, child: usize) {
        let from = self.have(child);
        let held = (0..64).filter(|i| self.landed[child].contains(&(from + i))).fold(0, |bits, i| bits | 1 << i);
        self.told[child] = self.told[child].max(self.rig.have[child]);
        let count = (self.sent[child] - from).min(64) as u16;
        self.rig.probe(child as u16, from, count, held);
        self.collect();
    }

    /// After any beginning, plain sending, probing and landing gets everybody to the end.
    fn finish(&mut self) {
        for _ in 0..8 * CHUNKS {
            for child in 0..self.sent.len() {
                self.step(Step::Send(child as u16));
                self.probe(child);
                while !self.wire[child].is_empty() {
                    self.land(child, 0);
                }
            }
        }
        assert!(self.landed.iter().all(|seqs| seqs.len() as u64 == CHUNKS), "stuck: {:?}", self.landed);
        let counters = self.rig.node.counters();
        assert_eq!((counters.completed, counters.dropped(DropReason::SlotBusy)), (CHUNKS, 0));
    }
}

fn steps() -> impl Strategy<Value = Step> {
    let child = 0_u16..8;
    prop_oneof![
        6 => child.clone().prop_map(Step::Send),
        2 => (child.clone(), any::<u8>()).prop_map(|(child, which)| Step::Repeat(child, which)),
        1 => (child.clone(), 0_u8..40).prop_map(|(child, by)| Step::Overrun(child, by)),
        5 => (child.clone(), any::<u8>()).prop_map(|(child, which)| Step::Land(child, which)),
        1 => (child.clone(), any::<u8>()).prop_map(|(child, which)| Step::Lose(child, which)),
        1 => child.prop_map(Step::Probe),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_node_is_a_map_of_sets(
        script in prop::collection::vec(steps(), 0..250),
        children in 1_u16..5,
        window in 1_u16..6,
        order in prop::sample::select(vec![Order::Arrival, Order::TreeFold, Order::TreePairwise]),
    ) {
        let mut world = World::new(Setup { children, window, slots: 2 * window, order, ..Setup::default() });
        script.into_iter().for_each(|step| world.step(step));
        world.finish();
    }
}
