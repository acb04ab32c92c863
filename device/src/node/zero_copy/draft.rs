//! The steps of a chain: pulls in order, then, at the root, publication of the result and its writes.
//!
//! Invariant: a chain that writes to a rank's memory publishes the result first, or an earlier chain has.

use super::GroupCtx;
use super::chain::{Draft, Place};
use sumac_hal::dma::{Address, Coverage, Status, Step};
use sumac_hal::planted;
use sumac_hal::reduce::Kernel;

impl GroupCtx<'_> {
    /// Return whether the engine can combine the contributions of slot `index` in the accumulator type.
    pub(super) fn engine_combines(&self, index: usize) -> bool {
        let (Some(kernel), Some(refs)) = (self.slots[index].kernel(), &self.refs) else { return true };
        let at = Address::default();
        let (op, source, accumulator) = (kernel.op(), kernel.dtype(), kernel.accumulator());
        let steps = [
            self.load_step(kernel, at, at, 1),
            Step::Reduce { op, source, accumulator, src: at, dst: at, count: 1 },
            Step::Reduce { op, source: accumulator, accumulator, src: at, dst: at, count: 1 },
        ];
        steps.iter().all(|step| refs.capabilities.check(step) != Err(Status::Unsupported))
    }

    /// Return the step that loads a first contribution into an accumulator: a copy if both have the same type.
    pub(super) fn load_step(&self, kernel: Kernel, src: Address, dst: Address, count: u32) -> Step {
        let (source, accumulator) = (kernel.dtype(), kernel.accumulator());
        if source == accumulator {
            return Step::Copy { src, dst, len_bytes: count * kernel.element_bytes() as u32 };
        }
        Step::Load { source, accumulator, src, dst, count }
    }

    /// Clear the record at the start of the first chain of an unpublished slot.
    pub(super) fn draft_begin(&self, index: usize, draft: &mut Draft) {
        if draft.steps.is_empty() && !self.has_begun(index) {
            draft.push(Step::Publish { dst: self.redo_address(index), words: [0, 0], covers: Coverage::NONE });
        }
    }

    /// Return whether an accumulator or the bounce buffer is in use; then the record is already clear.
    pub(super) fn has_begun(&self, index: usize) -> bool {
        let brought = self.with_data(index);
        self.refs.as_ref().is_some_and(|refs| {
            let redo = &refs.redo[index];
            redo.bounced.is_some() || !redo.pulled.intersection(&brought).is_empty()
        })
    }

    /// Add the pull of a child; false if there is no room.
    pub(super) fn draft_pull(&self, index: usize, child: usize, place: Place, draft: &mut Draft) -> bool {
        if !draft.has_room(2 + place.merges) {
            return false;
        }
        let (Some(refs), slot) = (&self.refs, &self.slots[index]) else { return false };
        let (count, dst) = (slot.elements.unwrap_or(0), self.accumulator(index, place.target));
        if let Some(src) = refs.buffers[index * self.children.len() + child].src {
            self.draft_begin(index, draft);
            draft.push(match slot.kernel() {
                Some(kernel) if place.first => self.load_step(kernel, src, dst, count),
                Some(kernel) => {
                    let (source, accumulator) = (kernel.dtype(), kernel.accumulator());
                    Step::Reduce { op: kernel.op(), source, accumulator, src, dst, count }
                }
                None => Step::Copy { src, dst, len_bytes: self.value_len(index) as u32 },
            });
        }
        if let Some(kernel) = slot.kernel() {
            let (op, accumulator) = (kernel.op(), kernel.accumulator());
            for (dst, src) in place.merging() {
                let (src, dst) = (self.accumulator(index, src), self.accumulator(index, dst));
                draft.push(Step::Reduce { op, source: accumulator, accumulator, src, dst, count });
            }
        }
        draft.plan.pulls.insert(child);
        true
    }

    /// Add the copy of a child's data into the bounce buffer.
    pub(super) fn draft_bounce(&self, index: usize, child: usize, draft: &mut Draft) {
        let Some(refs) = &self.refs else { return };
        let len_bytes =
            self.slots[index].elements.unwrap_or(0) * self.slots[index].element_bytes(false).unwrap_or(0) as u32;
        if let Some(src) = refs.buffers[index * self.children.len() + child].src {
            self.draft_begin(index, draft);
            draft.push(Step::Copy { src, dst: self.bounce(index), len_bytes });
            draft.plan.bounces = Some(child as u16);
        }
    }

    /// Add the steps that finish the result, publish it and write it to the children that want it. False if the
    /// processor has to finish it, or there is no room.
    pub(super) fn draft_store(&self, index: usize, draft: &mut Draft) -> bool {
        let Some(refs) = &self.refs else { return false };
        let (slot, redo) = (&self.slots[index], &refs.redo[index]);
        let src = self.accumulator(index, 0);
        let mut rounds = false;
        let store = slot.kernel().filter(|_| !redo.finished).map(|kernel| {
            let (op, accumulator, output) = (kernel.op(), kernel.accumulator(), kernel.dtype());
            rounds = accumulator != output;
            let dst = if rounds { self.bounce(index) } else { src };
            let (count, ranks) = (slot.elements.unwrap_or(0), self.active_ranks());
            Step::Store { op, accumulator, output, src, dst, count, ranks }
        });
        let can = store.as_ref().is_none_or(|step| refs.capabilities.check(step) != Err(Status::Unsupported));
        if !can || !draft.has_room(3) {
            return false;
        }
        store.into_iter().for_each(|step| draft.push(step));
        let published = draft.steps.len();
        let has_failed = redo.failures > 0;
        if has_failed || !(planted!(self.common, OutOfPlaceUnpublished) && self.is_out_of_place(index)) {
            draft.push(self.publication(index, rounds));
        }
        draft.plan.publishes = true;
        draft.plan.rounds = rounds;
        let buffers = &refs.buffers[index * self.children.len()..][..self.children.len()];
        let wants = (0..buffers.len()).filter(|&child| buffers[child].dst.is_some() && redo.failures == 0);
        self.draft_writes(index, rounds, wants, draft);
        if planted!(self.common, WrittenBeforePublished) {
            draft.steps[published..].rotate_left(1);
        }
        true
    }

    /// Return whether children of slot `index` want its result, and none of them where its data is.
    fn is_out_of_place(&self, index: usize) -> bool {
        let children = self.children.len();
        let buffers = self.refs.as_ref().map_or(&[][..], |refs| &refs.buffers[index * children..][..children]);
        let mut wanted = buffers.iter().filter(|buffer| buffer.dst.is_some()).peekable();
        wanted.peek().is_some() && wanted.all(|buffer| buffer.dst != buffer.src)
    }

    /// Return the step that publishes the result of slot `index`; `rounded` if it is in the bounce buffer.
    pub(super) fn publication(&self, index: usize, rounded: bool) -> Step {
        let value = if rounded { self.bounce(index) } else { self.accumulator(index, 0) };
        let (dst, len_bytes) = (self.redo_address(index), self.result_len_bytes(index));
        let covers = Coverage { offset_bytes: (value.offset_bytes - dst.offset_bytes) as u32, len_bytes };
        let covers = if len_bytes == 0 { Coverage::NONE } else { covers };
        Step::Publish { dst, words: self.record(index, rounded), covers }
    }

    /// Return the length in bytes of the result of slot `index` in ranks' buffers.
    fn result_len_bytes(&self, index: usize) -> u32 {
        let slot = &self.slots[index];
        slot.elements.unwrap_or(0) * slot.element_bytes(false).unwrap_or(0) as u32
    }

    pub(super) fn draft_writes(&self, index: usize, rounds: bool, to: impl Iterator<Item = usize>, draft: &mut Draft) {
        let Some(refs) = &self.refs else { return };
        let src = if rounds { self.bounce(index) } else { self.accumulator(index, 0) };
        let len_bytes = self.result_len_bytes(index);
        for child in to {
            let Some(dst) = refs.buffers[index * self.children.len() + child].dst else { continue };
            if !draft.has_room(1) {
                break;
            }
            draft.push(Step::Copy { src, dst, len_bytes });
            draft.plan.writes.insert(child);
        }
    }
}
