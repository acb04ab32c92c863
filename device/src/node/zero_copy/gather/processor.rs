//! The processor's part of combining: inline contributions, and everything if the engine only copies.

use super::{Next, Place};
use crate::node::GroupCtx;
use crate::node::zero_copy::redo::nothing_at;
use crate::order::{Input, take};
use sumac_hal::ctrl::Order;
use sumac_hal::dma::{LocalMemory, Span, Status};
use sumac_hal::reduce::Kernel;

impl GroupCtx<'_> {
    /// Keep inline data until its turn: in a stage of its own if the order is declared, otherwise combined in one.
    pub(in crate::node) fn stage_inline(
        &mut self,
        index: usize,
        child: usize,
        kernel: Kernel,
        input: Option<Input<'_>>,
    ) {
        let Some(input) = input else { return };
        let apart = matches!(self.group.config.order, Order::TreeFold | Order::TreePairwise);
        let mut others = self.slots[index].data.difference(&self.zero_copy_children());
        others.remove(child);
        let mut stages = self.stages(index);
        let acc = stages.stage(if apart { child } else { 0 });
        take(kernel, acc, input, !apart && !others.is_empty());
    }

    /// Do the processor's part of combining, while no chain of the slot is in flight.
    pub(super) fn combine_here<E: LocalMemory>(
        &mut self,
        index: usize,
        next: Next,
        place: Place,
        engine: &mut E,
    ) -> Result<(), Status> {
        if !self.has_begun(index) {
            self.clear_record(index, engine)?;
        }
        let slot = self.slots[index];
        let (target, len) = (self.accumulator(index, place.target), self.value_len(index));
        let acc = Span { address: target, len_bytes: len as u64 };
        let inline = slot.data.difference(&self.zero_copy_children());
        let moved = slot.kernel().is_none();
        match next {
            Next::ZeroCopy(child) if self.has_data(index, child) => {
                let len_bytes = u64::from(slot.elements.unwrap_or(0)) * slot.element_bytes(false).unwrap_or(0) as u64;
                let bounce = Span { address: self.bounce(index), len_bytes };
                engine.with_local(acc, bounce, |acc, payload| {
                    combine_or_load(slot.kernel(), acc, payload, false, place.first)
                })?;
            }
            Next::Inline(child) if inline.contains(child) => {
                let stage = self.stage_range(index, if moved { 0 } else { child }, len);
                let payload = &self.bytes[stage];
                engine.with_local(acc, nothing_at(target), |acc, _| {
                    combine_or_load(slot.kernel(), acc, payload, true, place.first)
                })?;
            }
            Next::InlineTogether if !inline.is_empty() => {
                let payload = &self.bytes[self.stage_range(index, 0, len)];
                engine.with_local(acc, nothing_at(target), |acc, _| {
                    combine_or_load(slot.kernel(), acc, payload, true, place.first)
                })?;
            }
            _ => {}
        }
        for (dst, src) in place.merging() {
            let span = |n| Span { address: self.accumulator(index, n), len_bytes: len as u64 };
            engine.with_local(span(dst), span(src), |acc, right| {
                combine_or_load(slot.kernel(), acc, right, true, false)
            })?;
        }
        if let Some(redo) = self.redo(index) {
            redo.bounced = None;
        }
        match next {
            Next::ZeroCopy(child) | Next::Inline(child) => self.note_pulled(index, child),
            Next::InlineTogether => {
                let came = slot.bits.difference(&self.zero_copy_children());
                (0..self.children.len())
                    .filter(|&child| came.contains(child))
                    .for_each(|child| self.note_pulled(index, child));
            }
        }
        Ok(())
    }

    /// Finish the result in place, in the accumulators.
    pub(super) fn finish_here<E: LocalMemory>(&mut self, index: usize, engine: &mut E) -> Result<(), Status> {
        let (slot, ranks) = (self.slots[index], self.active_ranks());
        let address = self.accumulator(index, 0);
        if let Some(kernel) = slot.kernel() {
            let span = Span { address, len_bytes: self.value_len(index) as u64 };
            let count = slot.elements.unwrap_or(0) as usize;
            engine.with_local(span, nothing_at(address), |acc, _| kernel.finish(acc, count, ranks))?;
        }
        if let Some(redo) = self.redo(index) {
            redo.finished = true;
        }
        Ok(())
    }
}

/// Combine, or load the first contribution. Data that is only moved is always first.
fn combine_or_load(kernel: Option<Kernel>, acc: &mut [u8], payload: &[u8], partial: bool, first: bool) {
    match kernel {
        Some(kernel) => take(kernel, acc, Input { payload, partial }, !first),
        None => acc.copy_from_slice(payload),
    }
}
