//! A node against a model of plain sets: children send, repeat and lose packets in any order.
//!
//! The model keeps, per child, which seqs it has contributed and the `have` it reported. From these alone it predicts
//! whether the node accepts each packet, and the value of each result. A child's value is 2^child x (seq + 1), so a
//! missing, double or stale contribution shows.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const CHUNKS: u64 = 24;

#[derive(Debug, Clone, Copy)]
enum Step {
    /// Contribute the next chunk, if the window allows it.
    Send(u16),
    /// Repeat an earlier contribution: 0 selects the first sent, 255 the last.
    Repeat(u16, u8),
    /// Contribute beyond the window.
    Overrun(u16, u8),
    /// Deliver one of the answers in flight.
    Deliver(u16, u8),
    /// Lose one of the answers in flight.
    Lose(u16, u8),
    /// Send a probe.
    Probe(u16),
}

struct World {
    rig: Rig,
    sent: Vec<u64>,
    contributed: Vec<BTreeSet<u64>>,
    delivered: Vec<BTreeSet<u64>>,
    /// The highest `have` that each child has reported.
    reported: Vec<u64>,
    /// Answers in flight, by child.
    in_flight: Vec<Vec<Sent>>,
    values: BTreeMap<u64, Vec<f32>>,
}

impl World {
    fn new(setup: Setup) -> Self {
        let n = usize::from(setup.children);
        Self {
            rig: Rig::new(setup),
            sent: vec![0; n],
            contributed: vec![BTreeSet::new(); n],
            delivered: vec![BTreeSet::new(); n],
            reported: vec![0; n],
            in_flight: vec![Vec::new(); n],
            values: BTreeMap::new(),
        }
    }

    fn window(&self) -> u64 {
        u64::from(self.rig.setup.window)
    }

    fn have(&self, child: usize) -> u64 {
        (0..).find(|seq| !self.delivered[child].contains(seq)).expect("a seq without a result")
    }

    /// Deliver a contribution and check the node against the model.
    fn contribute(&mut self, child: usize, seq: u64) {
        self.reported[child] = self.reported[child].max(self.rig.have[child]);
        let fits = seq < self.reported[child] + self.window();
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
                Kind::Result => self.in_flight[child as usize].push(sent),
                Kind::Nak => {
                    assert!(sent.is_nak(NakReason::Missing));
                    assert!(
                        !self.contributed[child as usize].contains(&sent.repr.seq.0),
                        "requests a chunk that it has"
                    );
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
                let seq = self.reported[child].max(self.rig.have[child]) + self.window() + u64::from(by);
                self.contribute(child, seq);
            }
            Step::Deliver(child, which) => self.deliver(usize::from(child) % n, which),
            Step::Lose(child, which) => {
                let in_flight = &mut self.in_flight[usize::from(child) % n];
                if !in_flight.is_empty() {
                    in_flight.remove(usize::from(which) % in_flight.len());
                }
            }
            Step::Probe(child) => self.probe(usize::from(child) % n),
        }
    }

    fn deliver(&mut self, child: usize, which: u8) {
        if self.in_flight[child].is_empty() {
            return;
        }
        let which = usize::from(which) % self.in_flight[child].len();
        let result = self.in_flight[child].remove(which);
        let seq = result.repr.seq.0;
        assert!(self.contributed.iter().all(|seqs| seqs.contains(&seq)), "a result before every child had contributed");
        let weights = (1_u32 << self.sent.len()) - 1;
        assert_eq!(result.floats(), [weights as f32 * (seq + 1) as f32], "seq {seq}");
        let first = self.values.entry(seq).or_insert_with(|| result.floats());
        assert_eq!(*first, result.floats());
        self.delivered[child].insert(seq);
        self.rig.have[child] = self.have(child);
    }

    fn probe(&mut self, child: usize) {
        let from = self.have(child);
        let held = (0..64).filter(|i| self.delivered[child].contains(&(from + i))).fold(0, |bits, i| bits | 1 << i);
        self.reported[child] = self.reported[child].max(self.rig.have[child]);
        let count = (self.sent[child] - from).min(64) as u16;
        self.rig.probe(child as u16, from, count, held);
        self.collect();
    }

    /// After any start, plain sending, probing and delivering completes every chunk for every child.
    fn finish(&mut self) {
        for _ in 0..8 * CHUNKS {
            for child in 0..self.sent.len() {
                self.step(Step::Send(child as u16));
                self.probe(child);
                while !self.in_flight[child].is_empty() {
                    self.deliver(child, 0);
                }
            }
        }
        assert!(self.delivered.iter().all(|seqs| seqs.len() as u64 == CHUNKS), "stuck: {:?}", self.delivered);
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
        5 => (child.clone(), any::<u8>()).prop_map(|(child, which)| Step::Deliver(child, which)),
        1 => (child.clone(), any::<u8>()).prop_map(|(child, which)| Step::Lose(child, which)),
        1 => child.prop_map(Step::Probe),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn node_matches_a_model_of_sets(
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
