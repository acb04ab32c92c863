//! Ring allocator of the bounce buffer: chunks are allocated and freed in order of sequence number.
//!
//! Positions grow without bound; a position modulo the length is the offset. A chunk that does not fit before the end
//! begins at offset 0, and the skipped bytes are freed together with that chunk.

use super::endpoint::BounceConfig;
use sumac_hal::dma::Address;

/// Allocator state.
#[derive(Debug)]
pub(super) struct Bounce {
    config: BounceConfig,
    /// Where the next chunk may begin.
    head: u64,
    /// Everything below is free.
    tail: u64,
}

/// A candidate place for a chunk, allocated by [`Bounce::take`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// The offset in the buffer.
    pub(super) offset: u64,
    /// The position behind it.
    pub(super) end: u64,
}

impl Bounce {
    pub(super) const fn new(config: BounceConfig) -> Self {
        Self { config, head: 0, tail: 0 }
    }

    /// Find room for `len_bytes` at a multiple of `alignment_bytes`; `None` if the buffer is full.
    pub(super) fn find(&self, len_bytes: u64, alignment_bytes: u64) -> Option<Place> {
        let whole = self.config.len_bytes;
        let mut offset = (self.head % whole).next_multiple_of(alignment_bytes);
        let mut lap = self.head - self.head % whole;
        if offset + len_bytes > whole {
            (offset, lap) = (0, lap + whole);
        }
        let end = lap + offset + len_bytes;
        (end - self.tail <= whole).then_some(Place { offset, end })
    }

    /// Allocate the place that [`Bounce::find`] returned last.
    pub(super) const fn take(&mut self, place: Place) {
        self.head = place.end;
    }

    /// Free everything before `end`.
    pub(super) const fn free(&mut self, end: u64) {
        self.tail = end;
    }

    /// Return whether anything is allocated.
    pub(super) const fn is_in_use(&self) -> bool {
        self.head != self.tail
    }

    /// Restart at offset 0 while nothing is in use, so that nothing is skipped at the end.
    pub(super) const fn reset(&mut self) {
        (self.head, self.tail) = (0, 0);
    }

    pub(super) const fn address(&self, place: Place) -> Address {
        Address { region: self.config.region, offset_bytes: place.offset }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;
    use sumac_hal::dma::RegionKey;

    proptest! {
        /// Allocated places never overlap, stay inside and are aligned; a chunk of half the buffer fits an empty one.
        #[test]
        fn places_in_use_do_not_overlap(
            steps in prop::collection::vec((1_u64..=64, 0_u32..3, any::<bool>()), 1..200),
        ) {
            let config = BounceConfig { region: RegionKey::default(), len_bytes: 128 };
            let mut bounce = Bounce::new(config);
            let mut used: VecDeque<(u64, Place)> = VecDeque::new();
            for (len, shift, free) in steps {
                if free && let Some((_, oldest)) = used.pop_front() {
                    bounce.free(oldest.end);
                    if used.is_empty() {
                        bounce.reset();
                    }
                }
                let alignment = 1 << shift;
                match bounce.find(len, alignment) {
                    None => prop_assert!(!used.is_empty(), "{len} bytes fit 128"),
                    Some(place) => {
                        prop_assert!(place.offset + len <= 128 && place.offset % alignment == 0);
                        for (other_len, other) in &used {
                            let apart = place.offset + len <= other.offset || other.offset + other_len <= place.offset;
                            prop_assert!(apart, "{place:?} of {len}, {other:?} of {other_len}");
                        }
                        bounce.take(place);
                        used.push_back((len, place));
                    }
                }
            }
        }
    }
}
