//! Pickier than hardware: what is in flight, and whether a new chain gets in its way.
//!
//! Two chains in flight may run at the same time. If one writes what the other reads or writes, the result depends on
//! which comes first; hardware lets that pass, and the bug shows once in a thousand runs. Here it shows always.
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

/// The chains of one queue, oldest first, and in strict mode what they touch.
pub(super) struct InFlight {
    strict: bool,
    chains: VecDeque<(Tag, usize)>,
    touches: VecDeque<Touch>,
}

impl InFlight {
    /// Make room for `chains` chains of `steps` steps together.
    pub(super) fn new(strict: bool, chains: usize, steps: usize) -> Self {
        let touches = if strict { 2 * (chains + steps) } else { 0 };
        Self { strict, chains: VecDeque::with_capacity(chains), touches: VecDeque::with_capacity(touches) }
    }

    pub(super) fn len(&self) -> usize {
        self.chains.len()
    }

    pub(super) fn push(&mut self, tag: Tag, steps: &[Step]) {
        let before = self.touches.len();
        if self.strict {
            self.touches.extend(steps.iter().flat_map(Touch::of));
        }
        self.chains.push_back((tag, self.touches.len() - before));
    }

    /// Forget the oldest chain.
    pub(super) fn pop(&mut self) -> Option<Tag> {
        let (tag, touches) = self.chains.pop_front()?;
        self.touches.drain(..touches);
        Some(tag)
    }

    /// Return the first step that touches what a chain here writes, or writes what one here touches.
    pub(super) fn conflict(&self, steps: &[Step]) -> Option<usize> {
        let conflicts = |touch: Touch| self.touches.iter().any(|other| touch.conflicts(other));
        steps.iter().position(|step| Touch::of(step).any(conflicts))
    }
}
