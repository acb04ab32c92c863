//! A fake engine that the test controls: chains complete in any order. A failing chain has executed some of its steps
//! and half of the next, and does not report which.

use std::collections::HashMap;
use std::vec;
use std::vec::Vec;
use sumac_hal::dma::{
    Address, Capabilities, Chain, Completion, Engine, LocalMemory, RegionKey, Scope, Span, Status, Step, SubmitError,
    Tag,
};
use sumac_hal::reduce::Kernel;

/// The device's own memory.
pub(super) const REDO: RegionKey = RegionKey { index: 99, generation: 1 };

pub(super) struct FakeEngine {
    pub(super) memory: HashMap<RegionKey, Vec<u8>>,
    pub(super) in_flight: Vec<(Tag, Scope, Vec<Step>)>,
    pub(super) capabilities: Capabilities,
    /// Maximum number of chains in flight.
    pub(super) depth: usize,
    /// Length of a redo slot, to find the record that belongs to a result.
    slot_len: usize,
    pub(super) aborts: Vec<Scope>,
}

impl FakeEngine {
    pub(super) fn new(capabilities: Capabilities, slot_len: usize, slots: usize) -> Self {
        // Garbage: earlier content must not matter.
        let memory = HashMap::from([(REDO, vec![0xa5; slot_len * slots])]);
        Self { memory, in_flight: Vec::new(), capabilities, depth: usize::MAX, slot_len, aborts: Vec::new() }
    }

    fn bytes(&mut self, at: Address, len: u64) -> &mut [u8] {
        let memory = self.memory.get_mut(&at.region).expect("checked before");
        &mut memory[at.offset_bytes as usize..][..len as usize]
    }

    pub(super) fn record_of(&mut self, address: Address) -> [u64; 2] {
        assert_eq!(address.region, REDO);
        let slot = address.offset_bytes as usize / self.slot_len * self.slot_len;
        let bytes = self.bytes(Address { region: REDO, offset_bytes: slot as u64 }, 16);
        [0, 8].map(|at| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes")))
    }

    fn run(&mut self, tag: Tag, step: &Step, halfway: bool) {
        self.capabilities.check(step).expect("a step that the engine supports");
        let source = step.src().map(|at| (at, self.bytes(at, step.src_len_bytes()).to_vec()));
        if step.dst().region != REDO {
            let (from, _) = source.as_ref().expect("a copy");
            let record = self.record_of(*from);
            assert!(
                record[0] != 0 && record[1] == tag.seq,
                "{tag:?} overwrites rank memory before publishing: {record:x?}"
            );
        }
        let mut out = self.bytes(step.dst(), step.dst_len_bytes()).to_vec();
        match (*step, source) {
            (Step::Copy { .. }, Some((_, src))) => out.copy_from_slice(&src),
            (Step::Load { source, .. }, Some((_, src))) => {
                let sum = Kernel::new(source, sumac_hal::op::ReduceOp::Sum).expect("a number");
                sum.load(&mut out, &src, false);
            }
            (Step::Reduce { op, source, accumulator, .. }, Some((_, src))) => {
                let kernel = Kernel::new(source, op).or(Kernel::new(accumulator, op)).expect("checked");
                kernel.combine(&mut out, &src, kernel.dtype() == accumulator);
            }
            (Step::Store { op, output, ranks, .. }, Some((_, src))) => {
                Kernel::new(output, op).expect("checked").store(&mut out, &src, ranks);
            }
            (Step::Publish { dst, words, covers }, None) => {
                assert!(!halfway, "a publication is in one piece");
                out = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                if !covers.is_empty() {
                    let covered = self.bytes(covers.at(dst).expect("an address"), covers.len_bytes.into());
                    out.extend(sumac_hal::dma::Coverage::checksum_word(covered).to_le_bytes());
                }
            }
            other => panic!("{other:?}"),
        }
        let len = if halfway { out.len() / 2 } else { out.len() };
        self.bytes(step.dst(), len as u64).copy_from_slice(&out[..len]);
    }

    /// Complete one of the chains in flight; with `fails`, fail after that many steps and a half.
    pub(super) fn complete(&mut self, which: usize, fails: Option<usize>) -> Completion {
        let (tag, _, steps) = self.in_flight.remove(which % self.in_flight.len());
        let until = fails.map_or(steps.len(), |fails| fails % (steps.len() + 1));
        steps[..until].iter().for_each(|step| self.run(tag, step, false));
        if fails.is_none() {
            return Completion { tag, status: Status::Done, step: steps.len() as u16 };
        }
        if let Some(step) = steps.get(until).filter(|step| !matches!(step, Step::Publish { .. })) {
            self.run(tag, step, true);
        }
        Completion { tag, status: Status::Hardware, step: 0 }
    }
}

/// Return whether one of two steps writes what the other accesses.
fn conflict(a: &Step, b: &Step) -> bool {
    let spans = |step: &Step| {
        let written = (step.dst(), step.dst_len_bytes(), true);
        [Some(written), step.src().map(|src| (src, step.src_len_bytes(), false))]
    };
    let overlaps = |a: (Address, u64, bool), b: (Address, u64, bool)| {
        let behind = |a: (Address, u64, bool), b: (Address, u64, bool)| a.0.offset_bytes < b.0.offset_bytes + b.1;
        (a.2 || b.2) && a.0.region == b.0.region && behind(a, b) && behind(b, a)
    };
    spans(a).into_iter().flatten().any(|a| spans(b).into_iter().flatten().any(|b| overlaps(a, b)))
}

impl Engine for FakeEngine {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn submit(&mut self, chain: Chain<'_>) -> Result<(), SubmitError> {
        assert!(!chain.steps.is_empty() && chain.steps.len() <= self.capabilities.max_steps as usize);
        if self.in_flight.len() == self.depth {
            return Err(SubmitError::Full { depth: self.depth as u32 });
        }
        for (tag, _, steps) in &self.in_flight {
            assert_ne!(*tag, chain.tag, "a tag is used again before it retired");
            let conflicts = steps.iter().any(|a| chain.steps.iter().any(|b| conflict(a, b)));
            assert!(!conflicts, "{:?} conflicts with {tag:?}", chain.tag);
        }
        self.in_flight.push((chain.tag, chain.scope, chain.steps.to_vec()));
        Ok(())
    }

    fn poll(&mut self, _: &mut [Completion]) -> usize {
        0
    }

    fn abort(&mut self, scope: Scope) {
        self.aborts.push(scope);
    }
}

impl LocalMemory for FakeEngine {
    fn with_local<R>(&mut self, dst: Span, src: Span, work: impl FnOnce(&mut [u8], &[u8]) -> R) -> Result<R, Status> {
        for (span, written) in [(dst, true), (src, false)] {
            let at = span.address;
            let conflicts = |step: &Step| {
                let touched = [
                    Some((step.dst(), step.dst_len_bytes(), true)),
                    step.src().map(|src| (src, step.src_len_bytes(), false)),
                ];
                touched.into_iter().flatten().any(|(to, len, writes)| {
                    (writes || written)
                        && to.region == at.region
                        && to.offset_bytes < at.offset_bytes + span.len_bytes
                        && at.offset_bytes < to.offset_bytes + len
                })
            };
            assert!(
                !self.in_flight.iter().any(|(_, _, steps)| steps.iter().any(conflicts)),
                "the processor touches memory of a chain in flight"
            );
        }
        let from = self.bytes(src.address, src.len_bytes).to_vec();
        Ok(work(self.bytes(dst.address, dst.len_bytes), &from))
    }
}
