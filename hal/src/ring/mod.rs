//! Rings between two sides that do not trust each other: one producer, one consumer, fixed capacity.
//!
//! A ring is an array of entries and two free-running 32-bit indices. The producer writes entries and then publishes
//! `produced`; the consumer copies entries out and then hands the places back through `consumed`. Each side writes
//! one index and reads the other; they lie 128 bytes apart, because processors that fetch cache lines in pairs would
//! otherwise bounce both (Intel's optimization manual, "spatial prefetcher").
//!
//! Invariants:
//! - Nothing that the other side can write is trusted. Each side keeps its own index and the last valid one of its
//!   peer in private memory, and never reads its own index back. An index of the peer that went backwards, or more
//!   than the capacity away, poisons this end for good: it moves nothing any more and says why ([`Poisoned`]).
//! - An entry is copied out before anybody looks at it: what is checked is what is used.
//! - An entry is written before the index that covers it is published (release), and read after that index was
//!   (acquire). A place is handed back after its entry was copied out, in the same way.
//! - A batch is published by one store, and needs one ring of the [`Doorbell`].
//!
//! The ends reach the memory through [`Memory`], so that one code runs over shared memory ([`SharedRing`]), a heap
//! (`OwnedRing`, feature `std`) and the cells of `loom`, which tries every interleaving of it in the tests.
//! Volatile accesses would not do here: they order nothing between processors.

mod consumer;
mod doorbell;
#[cfg(feature = "std")]
mod owned;
mod patience;
mod producer;
mod shared;
#[cfg(test)]
mod tests;

pub use consumer::Consumer;
pub use doorbell::{Doorbell, Wanted, Word};
#[cfg(feature = "std")]
pub use owned::OwnedRing;
pub use patience::{Patience, Pause};
pub use producer::Producer;
pub use shared::{CAPACITY_MAX, Indices, Line, RingError, SharedRing};

/// The memory of a ring of entries of `WORDS` 64-bit words.
///
/// The methods neither check nor remember anything; [`Producer`] and [`Consumer`] do. `place` is below
/// [`Memory::capacity`].
pub trait Memory<const WORDS: usize> {
    /// Return the number of places: a power of two, fixed, and from trusted memory.
    fn capacity(&self) -> u32;

    /// Load what the producer has published, with acquire order.
    fn produced(&self) -> u32;

    /// Publish all entries before `produced`, with release order.
    fn set_produced(&self, produced: u32);

    /// Load what the consumer has handed back, with acquire order.
    fn consumed(&self) -> u32;

    /// Hand back all places before `consumed`, with release order.
    fn set_consumed(&self, consumed: u32);

    /// Copy an entry out.
    fn read(&self, place: u32) -> [u64; WORDS];

    /// Copy an entry in.
    fn write(&self, place: u32, entry: &[u64; WORDS]);
}

impl<M: Memory<WORDS> + ?Sized, const WORDS: usize> Memory<WORDS> for &M {
    fn capacity(&self) -> u32 {
        (**self).capacity()
    }

    fn produced(&self) -> u32 {
        (**self).produced()
    }

    fn set_produced(&self, produced: u32) {
        (**self).set_produced(produced);
    }

    fn consumed(&self) -> u32 {
        (**self).consumed()
    }

    fn set_consumed(&self, consumed: u32) {
        (**self).set_consumed(consumed);
    }

    fn read(&self, place: u32) -> [u64; WORDS] {
        (**self).read(place)
    }

    fn write(&self, place: u32, entry: &[u64; WORDS]) {
        (**self).write(place, entry);
    }
}

/// The peer has broken the ring's protocol: this end moves nothing any more.
///
/// What is in the ring is lost; the queue has to be attached anew, over fresh memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[error(
    "the peer moved its ring index from {from} to {to}, where {limit} is the furthest it may be: attach a fresh queue"
)]
pub struct Poisoned {
    /// The peer's last valid index.
    pub from: u32,
    /// What it has written.
    pub to: u32,
    /// The furthest that a correct peer can be.
    pub limit: u32,
}

/// The peer's index as it was last known to be valid.
#[derive(Debug, Clone, Copy)]
struct PeerIndex {
    valid: u32,
    poisoned: Option<Poisoned>,
}

impl PeerIndex {
    const fn new() -> Self {
        Self { valid: 0, poisoned: None }
    }

    /// Take over what the peer has written, if a correct peer could have: from the last index on, up to `limit`.
    fn update(&mut self, written: u32, limit: u32) -> Result<u32, Poisoned> {
        if let Some(poisoned) = self.poisoned {
            return Err(poisoned);
        }
        // Both distances are at most the capacity for a correct peer, so wrapping at 2^32 cannot confuse them.
        if written.wrapping_sub(self.valid) > limit.wrapping_sub(self.valid) {
            let poisoned = Poisoned { from: self.valid, to: written, limit };
            self.poisoned = Some(poisoned);
            return Err(poisoned);
        }
        self.valid = written;
        Ok(written)
    }
}
