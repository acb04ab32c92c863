//! Rings on the heap, between threads of one process.

use super::shared::check_capacity;
use super::{Indices, Memory, RingError, SharedRing};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// The memory of a ring, shared by its two ends.
#[derive(Debug, Clone)]
pub struct OwnedRing<const WORDS: usize> {
    shared: Arc<(Indices, Box<[AtomicU64]>)>,
}

impl<const WORDS: usize> OwnedRing<WORDS> {
    /// Allocate a ring of `capacity` entries.
    ///
    /// # Errors
    /// As [`SharedRing::new`].
    pub fn new(capacity: u32) -> Result<Self, RingError> {
        let words = capacity as usize * WORDS;
        // Check before allocating.
        check_capacity::<WORDS>(words)?;
        let entries: Box<[_]> = (0..words).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { shared: Arc::new((Indices::default(), entries)) })
    }

    fn ring(&self) -> SharedRing<'_, WORDS> {
        SharedRing::from_checked(&self.shared.0, &self.shared.1)
    }
}

impl<const WORDS: usize> Memory<WORDS> for OwnedRing<WORDS> {
    fn capacity(&self) -> u32 {
        (self.shared.1.len() / WORDS) as u32
    }

    fn produced(&self) -> u32 {
        self.ring().produced()
    }

    fn set_produced(&self, produced: u32) {
        self.ring().set_produced(produced);
    }

    fn consumed(&self) -> u32 {
        self.ring().consumed()
    }

    fn set_consumed(&self, consumed: u32) {
        self.ring().set_consumed(consumed);
    }

    fn read(&self, place: u32) -> [u64; WORDS] {
        self.ring().read(place)
    }

    fn write(&self, place: u32, entry: &[u64; WORDS]) {
        self.ring().write(place, entry);
    }
}
