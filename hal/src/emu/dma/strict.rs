//! What is in flight, and whether a new chain, or the device's processor, gets in its way.
//!
//! Two chains in flight may run at the same time. If one writes what the other reads or writes, the result depends on
//! which comes first; hardware lets that pass, and the bug shows once in a thousand runs. Strict mode shows it always.
//! References are compared as they are named: memory that is registered twice is not seen to be the same.

use crate::dma::{Address, Step, Tag};
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
    chains: VecDeque<(Tag, usize)>,
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

    pub(super) fn push(&mut self, tag: Tag, steps: &[Step]) {
        self.steps += steps.len();
        self.touches.extend(steps.iter().flat_map(Touch::of));
        self.chains.push_back((tag, steps.len()));
    }

    /// Forget the oldest chain.
    pub(super) fn pop(&mut self) -> Option<Tag> {
        let (tag, steps) = self.chains.pop_front()?;
        self.steps -= steps;
        for _ in 0..steps {
            // A step touches its destination, and all but publications a source, which comes behind.
            self.touches.pop_front();
            if self.touches.front().is_some_and(|touch| !touch.written) {
                self.touches.pop_front();
            }
        }
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
