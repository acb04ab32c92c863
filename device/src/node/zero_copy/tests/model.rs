//! Any order of arrival, completion and failure gives the bits of the declared expression, reads each input before it
//! is overwritten, and answers every child once.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;
use sumac_hal::ctrl::Order;

#[derive(Debug, Clone, Copy)]
enum Step {
    /// Contribute the next chunk, if the window allows it.
    Send(u16),
    /// Deliver the oldest waiting answer.
    Deliver(u16),
    /// Complete a chain.
    Complete(usize),
    /// Fail a chain after this many steps and a half.
    Fail(usize, usize),
}

struct Model {
    world: World,
    sent: Vec<u64>,
    delivered: Vec<BTreeSet<u64>>,
    /// Chunk and its failed chains, by slot: fewer than the node tolerates.
    failures: Vec<(u64, usize)>,
    chunks: u64,
}

impl Model {
    fn new(setup: Setup, attached: u16, capabilities: Capabilities) -> Self {
        let n = usize::from(setup.children);
        let failures = vec![(0, 0); usize::from(setup.slots)];
        let world = World::new(setup, attached, capabilities);
        Self { world, sent: vec![0; n], delivered: vec![BTreeSet::new(); n], failures, chunks: CHUNKS }
    }

    fn children(&self) -> u16 {
        self.sent.len() as u16
    }

    fn expected(&self, seq: u64) -> Vec<u32> {
        let all: Vec<u16> = (0..self.children()).collect();
        let sum = expression_without(self.world.rig.setup.order, &all, seq, self.world.empty);
        sum.into_iter().flatten().map(f32::to_bits).collect()
    }

    fn check(&self, seq: u64, found: &[f32]) {
        let found: Vec<u32> = found.iter().map(|value| value.to_bits()).collect();
        if self.world.rig.setup.order == Order::Arrival {
            let close = |a: u32, b: u32| (f32::from_bits(a) / f32::from_bits(b) - 1.0).abs() < 1e-5;
            let values = |bits: Vec<u32>| bits.into_iter().map(f32::from_bits).collect::<Vec<_>>();
            let expected = self.expected(seq);
            let fits = expected.iter().zip(&found).all(|(a, b)| close(*a, *b));
            assert!(fits, "seq {seq}: {:?} is not {:?}", values(found), values(expected));
        } else {
            assert_eq!(found, self.expected(seq), "seq {seq}");
        }
    }

    /// Collect answers, from rings and packets.
    fn collect(&mut self) {
        for (child, seq, status) in self.world.take_answers() {
            assert_eq!(status, EntryStatus::Result, "child {child} seq {seq}");
            let found = self.world.memory(child, seq);
            self.check(seq, &found);
            assert!(self.delivered[usize::from(child)].insert(seq), "answered twice");
        }
        for sent in self.world.rig.drain() {
            if sent.repr.kind == sumac_hal::wire::Kind::Result {
                self.check(sent.repr.seq.0, &sent.floats());
                self.delivered[usize::from(sent.repr.child.0)].insert(sent.repr.seq.0);
            }
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Send(child) => {
                let child = child % self.children();
                let at = usize::from(child);
                let seq = self.sent[at];
                if seq < self.chunks && seq < self.world.rig.have[at] + u64::from(self.world.rig.setup.window) {
                    self.sent[at] += 1;
                    self.world.contribute(child, seq);
                }
            }
            Step::Deliver(child) => {
                let at = usize::from(child % self.children());
                let have = &mut self.world.rig.have[at];
                *have += u64::from(self.delivered[at].contains(have));
            }
            Step::Complete(_) | Step::Fail(..) if self.world.engine.in_flight.is_empty() => {}
            Step::Complete(which) => self.end(which, None),
            Step::Fail(which, steps) => self.end(which, Some(steps)),
        }
        self.collect();
    }

    fn end(&mut self, which: usize, fails: Option<usize>) {
        let which = which % self.world.engine.in_flight.len();
        let tag = self.world.engine.in_flight[which].0;
        let (seq, failures) = &mut self.failures[tag.slot as usize];
        if *seq != tag.seq {
            (*seq, *failures) = (tag.seq, 0);
        }
        let fails = fails.filter(|_| *failures < 3);
        *failures += usize::from(fails.is_some());
        self.world.complete(which, fails);
    }

    fn finish(&mut self) {
        for _ in 0..self.chunks {
            for child in 0..self.children() {
                (0..self.chunks).for_each(|_| self.step(Step::Deliver(child)));
                // Report `have` by a probe, as no contribution has carried it.
                if self.world.keys[usize::from(child)].is_none() {
                    self.world.rig.probe(child, self.world.rig.have[usize::from(child)], 1, 0);
                }
            }
            (0..self.children()).for_each(|child| self.step(Step::Send(child)));
            while !self.world.engine.in_flight.is_empty() {
                self.step(Step::Complete(0));
            }
            self.collect();
        }
        assert!(self.delivered.iter().all(|seqs| seqs.len() as u64 == self.chunks), "stuck: {:?}", self.delivered);
        let counters = self.world.rig.node.counters();
        assert_eq!(counters.completed, self.chunks);
        for child in 0..self.children() {
            if let Some(key) = self.world.keys[usize::from(child)] {
                assert_eq!(self.world.regions.deregister(owner(child), key), Ok(true), "no region is held");
            }
        }
    }
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0_u16..8).prop_map(Step::Send),
        5 => (0_u16..8).prop_map(Step::Deliver),
        4 => any::<usize>().prop_map(Step::Complete),
        2 => (any::<usize>(), any::<usize>()).prop_map(|(which, steps)| Step::Fail(which, steps)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn results_match_the_declared_expression_under_any_failures(
        script in prop::collection::vec(steps(), 0..250),
        children in 1_u16..7,
        attached in 0_u16..64,
        window in 1_u16..5,
        order in prop::sample::select(vec![Order::Arrival, Order::TreeFold, Order::TreePairwise]),
        profile in prop::sample::select(Profile::ALL.to_vec()),
        empty in 0_u16..64,
        max_steps in prop::sample::select(vec![9_u32, 12, 64]),
        depth in 1_usize..5,
    ) {
        let setup = Setup { children, window, slots: 2 * window, order, ..Setup::default() };
        let attached = (attached | 1) & ((1 << children) - 1);
        let mut model = Model::new(setup, attached, Capabilities::new(profile, max_steps, 64));
        model.world.engine.depth = depth;
        // Child 0 always has data.
        model.world.empty = empty & !1;
        script.into_iter().for_each(|step| model.step(step));
        model.finish();
    }
}
