//! The memory accesses of chains in flight, and the detection of conflicts with them.
//!
//! Chains in flight may run concurrently. If one writes what another reads or writes, the result depends on timing.
//! Hardware does not detect that, so the bug shows only in rare runs. Strict mode always reports it. Accesses are
//! compared by region and offset; memory that is registered twice is not recognized as the same.

use crate::dma::{Address, RegionKey, Step, Tag};
use std::collections::VecDeque;

/// An access to registered memory.
#[derive(Debug, Clone, Copy)]
struct Access {
    address: Address,
    len_bytes: u64,
    written: bool,
}

impl Access {
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

/// The chains of one queue, oldest first, and their accesses.
pub(super) struct InFlight {
    /// The tag and the numbers of steps and accesses of each chain.
    chains: VecDeque<(Tag, usize, usize)>,
    accesses: VecDeque<Access>,
    steps: usize,
}

impl InFlight {
    /// Return an empty list with room for chains with `steps` steps in total.
    pub(super) fn new(steps: usize) -> Self {
        Self { chains: VecDeque::with_capacity(steps), accesses: VecDeque::with_capacity(2 * steps), steps: 0 }
    }

    /// Return the number of chains.
    pub(super) fn len(&self) -> usize {
        self.chains.len()
    }

    /// Return the number of steps.
    pub(super) fn steps(&self) -> usize {
        self.steps
    }

    /// Add a chain with all its accesses.
    pub(super) fn push(&mut self, tag: Tag, steps: &[Step]) {
        let before = self.accesses.len();
        self.accesses.extend(steps.iter().flat_map(Access::of));
        self.add(tag, steps, before);
    }

    /// Add a chain, but only its reads and its writes of these regions, each as one span. This is what accesses of the
    /// device's processor are checked against.
    pub(super) fn push_local(&mut self, tag: Tag, steps: &[Step], regions: impl Iterator<Item = RegionKey>) {
        let before = self.accesses.len();
        for (region, written) in regions.flat_map(|region| [(region, false), (region, true)]) {
            let here = steps.iter().flat_map(Access::of);
            let here = here.filter(|access| access.address.region == region && access.written == written);
            let ends = here.map(|access| (access.address.offset_bytes, access.end()));
            let span = ends.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
            self.accesses.extend(span.map(|(offset_bytes, end)| {
                let address = Address { region, offset_bytes };
                Access { address, len_bytes: end - offset_bytes, written }
            }));
        }
        self.add(tag, steps, before);
    }

    fn add(&mut self, tag: Tag, steps: &[Step], accesses_before: usize) {
        self.steps += steps.len();
        self.chains.push_back((tag, steps.len(), self.accesses.len() - accesses_before));
    }

    /// Remove the oldest chain.
    pub(super) fn pop(&mut self) -> Option<Tag> {
        let (tag, steps, accesses) = self.chains.pop_front()?;
        self.steps -= steps;
        self.accesses.drain(..accesses);
        Some(tag)
    }

    /// Return the index of the first step that conflicts with a chain in flight.
    pub(super) fn conflict(&self, steps: &[Step]) -> Option<usize> {
        steps.iter().position(|step| Access::of(step).any(|access| self.conflicts(access)))
    }

    /// Return whether an access to these bytes conflicts with a chain in flight.
    pub(super) fn conflicts_with(&self, address: Address, len_bytes: u64, written: bool) -> bool {
        self.conflicts(Access { address, len_bytes, written })
    }

    fn conflicts(&self, access: Access) -> bool {
        self.accesses.iter().any(|other| access.conflicts(other))
    }
}
