//! What is in flight, and whether a new chain, or the device's processor, gets in its way.
//!
//! Two chains in flight may run at the same time. If one writes what the other reads or writes, the result depends on
//! which comes first; hardware lets that pass, and the bug shows once in a thousand runs. Strict mode shows it always.
//! References are compared as they are named: memory that is registered twice is not seen to be the same.

use crate::dma::{Address, RegionKey, Step, Tag};
use std::collections::VecDeque;

/// A reference to registered memory.
#[derive(Debug, Clone, Copy)]
struct Touch {
    address: Address,
    len_bytes: u64,
    written: bool,
}

impl Touch {
    fn of(step: &Step) -> impl Iterator<Item = Self> {
        let dst = Self { address: step.dst(), len_bytes: step.dst_len_bytes(), written: true };
        let src = step.src().map(|address| Self { address, len_bytes: step.src_len_bytes(), written: false });
        std::iter::once(dst).chain(src)
    }

    fn end(&self) -> u64 {
        self.address.offset_bytes.saturating_add(self.len_bytes)
    }

    fn conflicts(&self, other: &Self) -> bool {
        let (a, b) = (self.address, other.address);
        (self.written || other.written)
            && a.region == b.region
            && u128::from(a.offset_bytes) < u128::from(b.offset_bytes) + u128::from(other.len_bytes)
            && u128::from(b.offset_bytes) < u128::from(a.offset_bytes) + u128::from(self.len_bytes)
    }
}

/// The chains of one queue, oldest first, and what they touch.
pub(super) struct InFlight {
    /// Tag, steps and touches of each.
    chains: VecDeque<(Tag, usize, usize)>,
    touches: VecDeque<Touch>,
    steps: usize,
}

impl InFlight {
    /// Make room for chains of `steps` steps together.
    pub(super) fn new(steps: usize) -> Self {
        Self { chains: VecDeque::with_capacity(steps), touches: VecDeque::with_capacity(2 * steps), steps: 0 }
    }

    /// Return the number of chains.
    pub(super) fn len(&self) -> usize {
        self.chains.len()
    }

    /// Return the number of steps.
    pub(super) fn steps(&self) -> usize {
        self.steps
    }

    /// Note a chain, with everything that it touches.
    pub(super) fn push(&mut self, tag: Tag, steps: &[Step]) {
        let before = self.touches.len();
        self.touches.extend(steps.iter().flat_map(Touch::of));
        self.note(tag, steps, before);
    }

    /// Note a chain, with what it reads of these regions, and what it writes, as one span each: all that the device's
    /// processor has to know.
    pub(super) fn push_local(&mut self, tag: Tag, steps: &[Step], regions: impl Iterator<Item = RegionKey>) {
        let before = self.touches.len();
        for (region, written) in regions.flat_map(|region| [(region, false), (region, true)]) {
            let here = steps.iter().flat_map(Touch::of);
            let here = here.filter(|touch| touch.address.region == region && touch.written == written);
            let ends = here.map(|touch| (touch.address.offset_bytes, touch.end()));
            let span = ends.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
            self.touches.extend(span.map(|(offset_bytes, end)| {
                let address = Address { region, offset_bytes };
                Touch { address, len_bytes: end - offset_bytes, written }
            }));
        }
        self.note(tag, steps, before);
    }

    fn note(&mut self, tag: Tag, steps: &[Step], touches_before: usize) {
        self.steps += steps.len();
        self.chains.push_back((tag, steps.len(), self.touches.len() - touches_before));
    }

    /// Forget the oldest chain.
    pub(super) fn pop(&mut self) -> Option<Tag> {
        let (tag, steps, touches) = self.chains.pop_front()?;
        self.steps -= steps;
        self.touches.drain(..touches);
        Some(tag)
    }

    /// Return the first step that touches what a chain here writes, or writes what one here touches.
    pub(super) fn conflict(&self, steps: &[Step]) -> Option<usize> {
        steps.iter().position(|step| Touch::of(step).any(|touch| self.conflicts(touch)))
    }

    /// Tell whether reading or writing some bytes would get in the way.
    pub(super) fn touches(&self, address: Address, len_bytes: u64, written: bool) -> bool {
        self.conflicts(Touch { address, len_bytes, written })
    }

    fn conflicts(&self, touch: Touch) -> bool {
        self.touches.iter().any(|other| touch.conflicts(other))
    }
}
