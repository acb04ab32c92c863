//! A DMA engine for devices without one: the processor runs each chain synchronously when it is submitted.
//!
//! Memory is passed as atomics, because other processors, or processes across a BAR, access it concurrently. No chain
//! is in flight when a call returns. An abort therefore has nothing to do, and an unmapped region is no longer
//! accessed.
//!
//! Invariants:
//! - a step accesses only bytes of mapped regions, each checked against its region just before;
//! - there is room for the completion of every accepted chain.

use super::kernels::{Action, Elements, WORKSPACE_LEN_BYTES, Workspace};
use super::shared::covers_word;
use super::{
    Address, Capabilities, Chain, Completion, Coverage, Engine, LocalMemory, Profile, RegionKey, Scope, Span, Status,
    Step, SubmitError,
};
use crate::atomic::AtomicU64;
use core::slice;
use core::sync::atomic::{Ordering, fence};
use heapless::Deque;

/// What is mapped at an index.
#[derive(Debug, Clone, Copy)]
struct Mapping<'m> {
    /// The last generation that was mapped at this index; 0 if none was.
    generation: u32,
    memory: Option<&'m [AtomicU64]>,
}

/// A processor as an engine, with `REGIONS` regions and room for `COMPLETIONS` completions.
#[derive(Debug)]
pub struct Processor<'m, const REGIONS: usize, const COMPLETIONS: usize> {
    capabilities: Capabilities,
    mappings: [Mapping<'m>; REGIONS],
    /// The region of the device's local memory.
    local: Option<RegionKey>,
    completed: Deque<Completion, COMPLETIONS>,
    workspace: Workspace,
}

fn overlaps(a: Elements, b: Elements) -> bool {
    a.base.addr() < b.base.addr() + b.len_bytes && b.base.addr() < a.base.addr() + a.len_bytes
}

impl<'m, const REGIONS: usize, const COMPLETIONS: usize> Processor<'m, REGIONS, COMPLETIONS> {
    /// Return an engine without mapped regions that accepts chains of up to `max_steps` steps.
    pub const fn new(max_steps: u32) -> Self {
        const { assert!(REGIONS > 0 && REGIONS <= 1 << 16, "a region's index has 16 bits") };
        let queue_depth = max_steps.saturating_mul(COMPLETIONS as u32);
        Self {
            capabilities: Capabilities::new(Profile::Full, max_steps, queue_depth),
            mappings: [Mapping { generation: 0, memory: None }; REGIONS],
            local: None,
            completed: Deque::new(),
            workspace: Workspace::new(),
        }
    }

    /// Map memory under a key. Returns false if the index is out of range or in use, or the generation is not newer
    /// than the last one at this index.
    #[must_use = "the memory may not have been mapped"]
    pub fn map(&mut self, key: RegionKey, memory: &'m [AtomicU64]) -> bool {
        let Some(mapping) = self.mappings.get_mut(usize::from(key.index)) else { return false };
        if mapping.memory.is_some() || key.generation <= mapping.generation {
            return false;
        }
        *mapping = Mapping { generation: key.generation, memory: Some(memory) };
        true
    }

    /// Map the device's local memory, of which there is one region. Nothing else in this program may access it from
    /// then on.
    #[must_use = "the memory may not have been mapped"]
    pub fn map_local(&mut self, key: RegionKey, memory: &'m [AtomicU64]) -> bool {
        let mapped = self.local.is_none() && self.map(key, memory);
        if mapped {
            self.local = Some(key);
        }
        mapped
    }

    /// Unmap a region. Returns false if the key is not mapped.
    pub fn unmap(&mut self, key: RegionKey) -> bool {
        let mapping =
            self.mappings.get_mut(usize::from(key.index)).filter(|mapping| mapping.generation == key.generation);
        mapping.is_some_and(|mapping| mapping.memory.take().is_some())
    }

    /// Unmap all regions for which `keep` returns false.
    pub fn retain(&mut self, keep: impl Fn(RegionKey) -> bool) {
        for (index, mapping) in self.mappings.iter_mut().enumerate() {
            if mapping.memory.is_some() && !keep(RegionKey { index: index as u16, generation: mapping.generation }) {
                mapping.memory = None;
            }
        }
    }

    /// Return whether there are completions to poll.
    pub fn has_completions(&self) -> bool {
        !self.completed.is_empty()
    }

    fn bytes(&self, address: Address, len_bytes: u64) -> Result<Elements, Status> {
        let mapping = self.mappings.get(usize::from(address.region.index)).ok_or(Status::BadRegion)?;
        let memory = match mapping.memory {
            Some(memory) if mapping.generation == address.region.generation => memory,
            _ if (1..=mapping.generation).contains(&address.region.generation) => return Err(Status::StaleRegion),
            _ => return Err(Status::BadRegion),
        };
        let end = address.offset_bytes.checked_add(len_bytes).ok_or(Status::OutOfBounds)?;
        if end > size_of_val(memory) as u64 {
            return Err(Status::OutOfBounds);
        }
        // `AtomicU64` permits writes through a shared borrow, and so through this pointer.
        let base = memory.as_ptr().cast_mut().cast::<u8>().wrapping_add(address.offset_bytes as usize);
        Ok(Elements { base, len_bytes: len_bytes as usize })
    }

    fn run(&mut self, step: &Step) -> Result<(), Status> {
        self.capabilities.check(step)?;
        let dst = self.bytes(step.dst(), step.dst_len_bytes())?;
        let (action, count) = match *step {
            Step::Copy { len_bytes, .. } => (Some(Action::Copy), len_bytes),
            Step::Load { source, accumulator, count, .. } => (Action::load(source, accumulator), count),
            Step::Reduce { op, source, accumulator, count, .. } => (Action::reduce(op, source, accumulator), count),
            Step::Store { op, output, ranks, count, .. } => (Action::store(op, output, ranks), count),
            Step::Publish { words, covers, .. } => return self.publish(step.dst(), words, covers),
        };
        let (action, count) = (action.ok_or(Status::Unsupported)?, count as usize);
        let src = self.bytes(step.src().ok_or(Status::Unsupported)?, step.src_len_bytes())?;
        let action = match action {
            Action::Store(kernel, ranks) if src == dst => Action::Finish(kernel, ranks),
            _ if overlaps(src, dst) => return Err(Status::Overlap),
            action => action,
        };
        // `check` has ensured that `count` is not 0.
        let (dst_bytes, src_bytes) = (dst.len_bytes / count, src.len_bytes / count);
        let block = WORKSPACE_LEN_BYTES / dst_bytes.max(src_bytes);
        for from in (0..count).step_by(block) {
            let elements = block.min(count - from);
            let cut = |of: Elements, bytes: usize| Elements {
                base: of.base.wrapping_add(from * bytes),
                len_bytes: elements * bytes,
            };
            // SAFETY: both lie in memory that is borrowed for 'm as atomics, so it stays valid and may be read and
            // written through a shared borrow. They are disjoint or identical. A peer across a BAR can write there at
            // any time, but only corrupts values: they are copied before they are used, and none is an index or a
            // length.
            unsafe {
                self.workspace.step(action, elements, cut(dst, dst_bytes), cut(src, src_bytes), false, None);
                self.workspace.flush();
            }
        }
        Ok(())
    }

    /// Write the two words, preceded by the checksum of what they cover, after all earlier and before all later writes.
    fn publish(&self, dst: Address, words: [u64; 2], covers: Coverage) -> Result<(), Status> {
        let third = if covers.is_empty() {
            None
        } else {
            let at = covers.at(dst).ok_or(Status::OutOfBounds)?;
            let covered = self.bytes(at, covers.len_bytes.into())?;
            // SAFETY: the bytes lie in memory that is borrowed for 'm as atomics. A peer that writes there meanwhile,
            // against the rules, only makes the checksum wrong.
            Some(unsafe { covers_word(covered.base, covered.len_bytes) })
        };
        let mapping = self.mappings.get(usize::from(dst.region.index)).and_then(|mapping| mapping.memory);
        // `check` has checked the alignment, `bytes` the bounds and the generation.
        let first = dst.offset_bytes as usize / 8;
        let Some([to_first, to_second]) = mapping.and_then(|memory| memory.get(first..first + 2)) else {
            return Err(Status::OutOfBounds);
        };
        if let (Some(third), Some(to_third)) = (third, mapping.and_then(|memory| memory.get(first + 2))) {
            to_third.store(third.to_le(), Ordering::Release);
        }
        to_second.store(words[1].to_le(), Ordering::Release);
        to_first.store(words[0].to_le(), Ordering::Release);
        // Later steps of the chain overwrite the inputs of the published result.
        fence(Ordering::SeqCst);
        Ok(())
    }
}

impl<const REGIONS: usize, const COMPLETIONS: usize> Engine for Processor<'_, REGIONS, COMPLETIONS> {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn submit(&mut self, chain: Chain<'_>) -> Result<(), SubmitError> {
        let (steps, max) = (chain.steps.len(), self.capabilities.max_steps);
        if steps == 0 || steps > max as usize {
            return Err(SubmitError::Length { steps, max });
        }
        if self.completed.is_full() {
            return Err(SubmitError::Full { depth: self.capabilities.queue_depth });
        }
        let run = |(at, step)| Some((self.run(step).err()?, at));
        let failed = chain.steps.iter().enumerate().find_map(run);
        let (status, step) = failed.unwrap_or((Status::Done, steps));
        // There is room: checked above.
        let _ = self.completed.push_back(Completion { tag: chain.tag, status, step: step as u16 });
        Ok(())
    }

    fn poll(&mut self, completions: &mut [Completion]) -> usize {
        let mut count = 0;
        for (to, from) in completions.iter_mut().zip(core::iter::from_fn(|| self.completed.pop_front())) {
            *to = from;
            count += 1;
        }
        count
    }

    fn abort(&mut self, _scope: Scope) {
        // Every accepted chain has completed.
    }
}

impl<const REGIONS: usize, const COMPLETIONS: usize> LocalMemory for Processor<'_, REGIONS, COMPLETIONS> {
    fn with_local<R>(&mut self, dst: Span, src: Span, work: impl FnOnce(&mut [u8], &[u8]) -> R) -> Result<R, Status> {
        if self.local.is_none_or(|local| dst.address.region != local || src.address.region != local) {
            return Err(Status::BadRegion);
        }
        let (dst, src) = (self.bytes(dst.address, dst.len_bytes)?, self.bytes(src.address, src.len_bytes)?);
        if overlaps(dst, src) {
            return Err(Status::Overlap);
        }
        // SAFETY: both lie in memory that is borrowed for 'm, and they are disjoint. It is local memory, which
        // `map_local` requires nothing else to access. A peer that writes there across a BAR nevertheless only corrupts
        // values: `work` combines them and takes no index or length from them.
        let (dst, src) = unsafe {
            (slice::from_raw_parts_mut(dst.base, dst.len_bytes), slice::from_raw_parts(src.base, src.len_bytes))
        };
        Ok(work(dst, src))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dma::Tag;
    use crate::op::{Dtype, ReduceOp};
    use std::vec::Vec;

    const OWN: RegionKey = RegionKey { index: 0, generation: 1 };
    const RANK: RegionKey = RegionKey { index: 1, generation: 1 };

    fn memory() -> Vec<AtomicU64> {
        (0..64).map(AtomicU64::new).collect()
    }

    fn at(region: RegionKey, offset_bytes: u64) -> Address {
        Address { region, offset_bytes }
    }

    fn run(engine: &mut Processor<'_, 4, 2>, steps: &[Step]) -> (Status, u16) {
        let tag = Tag { seq: 7, slot: 1, attempt: 0 };
        engine.submit(Chain { tag, scope: Scope(0), steps }).expect("room");
        let mut completions = [Completion { tag: Tag::default(), status: Status::Hardware, step: 0 }; 2];
        assert_eq!(engine.poll(&mut completions), 1);
        assert_eq!(completions[0].tag, tag);
        (completions[0].status, completions[0].step)
    }

    #[test]
    fn chain_reduces_publishes_and_copies_the_result() {
        let (own, rank) = (memory(), memory());
        let mut engine = Processor::<4, 2>::new(8);
        assert!(engine.map_local(OWN, &own) && engine.map(RANK, &rank));
        let (source, accumulator, op) = (Dtype::U64, Dtype::U64, ReduceOp::Sum);
        let steps = [
            Step::Load { source, accumulator, src: at(RANK, 8), dst: at(OWN, 64), count: 2 },
            Step::Reduce { op, source, accumulator, src: at(RANK, 80), dst: at(OWN, 64), count: 2 },
            Step::Store { op, accumulator, output: Dtype::U64, src: at(OWN, 64), dst: at(OWN, 64), count: 2, ranks: 2 },
            Step::Publish { dst: at(OWN, 0), words: [5, 6], covers: Coverage { offset_bytes: 64, len_bytes: 16 } },
            Step::Copy { src: at(OWN, 64), dst: at(RANK, 8), len_bytes: 16 },
        ];
        assert_eq!(run(&mut engine, &steps), (Status::Done, 5));
        let read = |memory: &[AtomicU64], at: usize| memory[at].load(Ordering::Relaxed);
        assert_eq!([0, 1, 2, 3].map(|at| read(&rank, at)), [0, 1 + 10, 2 + 11, 3], "only the named words change");
        let result: Vec<u8> = [11_u64, 13].iter().flat_map(|value| value.to_ne_bytes()).collect();
        assert_eq!([0, 1, 2, 3].map(|at| read(&own, at)), [5, 6, Coverage::checksum_word(&result), 3]);
    }

    #[test]
    fn invalid_step_writes_nothing_and_ends_the_chain() {
        let (own, rank) = (memory(), memory());
        let mut engine = Processor::<4, 2>::new(8);
        assert!(engine.map_local(OWN, &own) && engine.map(RANK, &rank));
        let copy = |src, dst| Step::Copy { src, dst, len_bytes: 16 };
        let good = copy(at(OWN, 0), at(RANK, 0));
        let ends = |engine: &mut _, bad| run(engine, &[good, bad, copy(at(OWN, 64), at(RANK, 64))]);
        assert_eq!(ends(&mut engine, copy(at(RANK, 0), at(OWN, 512 - 15))), (Status::OutOfBounds, 1));
        assert_eq!(ends(&mut engine, copy(at(RANK, u64::MAX), at(OWN, 0))), (Status::OutOfBounds, 1));
        assert_eq!(ends(&mut engine, copy(at(OWN, 0), at(OWN, 8))), (Status::Overlap, 1));
        let publish = Step::Publish { dst: at(OWN, 504), words: [1, 2], covers: Default::default() };
        assert_eq!(ends(&mut engine, publish), (Status::OutOfBounds, 1));
        let covering =
            |dst, offset_bytes| Step::Publish { dst, words: [1, 2], covers: Coverage { offset_bytes, len_bytes: 8 } };
        assert_eq!(ends(&mut engine, covering(at(OWN, 0), 505)), (Status::OutOfBounds, 1));
        assert_eq!(ends(&mut engine, covering(at(OWN, 496), 24)), (Status::OutOfBounds, 1));
        assert_eq!(ends(&mut engine, covering(at(OWN, 0), 16)), (Status::Overlap, 1));
        let nobody = RegionKey { index: 2, generation: 1 };
        assert_eq!(ends(&mut engine, copy(at(nobody, 0), at(OWN, 0))), (Status::BadRegion, 1));
        assert!(engine.unmap(RANK) && !engine.unmap(RANK) && !engine.map(RANK, &rank), "a key is mapped only once");
        assert_eq!(run(&mut engine, &[good]), (Status::StaleRegion, 0));
        assert!(engine.map(RegionKey { generation: 2, ..RANK }, &rank), "a newer key can be mapped");
        engine.retain(|key| key == OWN);
        let again = RegionKey { generation: 2, ..RANK };
        assert_eq!(run(&mut engine, &[copy(at(OWN, 0), at(again, 0))]), (Status::StaleRegion, 0));
        assert_eq!(own[63].load(Ordering::Relaxed), 63);
        assert_eq!(rank[8].load(Ordering::Relaxed), 8, "steps after a failed one do not run");
    }

    #[test]
    fn submit_fails_while_completions_are_full() {
        let own = memory();
        let mut engine = Processor::<4, 2>::new(8);
        assert!(engine.map_local(OWN, &own));
        let steps = [Step::Publish { dst: at(OWN, 0), words: [1, 1], covers: Default::default() }];
        let chain = Chain { tag: Tag::default(), scope: Scope(0), steps: &steps };
        assert!(engine.submit(chain).is_ok() && engine.submit(chain).is_ok());
        assert!(matches!(engine.submit(chain), Err(SubmitError::Full { .. })));
        assert!(engine.has_completions());
    }
}
