//! Single-producer, single-consumer rings of fixed capacity between two sides that do not trust each other.
//!
//! A ring is an array of entries with two free-running 32-bit indices. The producer writes entries and then publishes
//! `produced`. The consumer copies entries out and then releases their places through `consumed`. Each side writes one
//! index and reads the other. The indices are 128 bytes apart, because processors that prefetch pairs of cache lines
//! would otherwise bounce both (Intel's optimization manual, "spatial prefetcher").
//!
//! Invariants:
//! - Nothing that the other side can write is trusted. Each side keeps its own index and its peer's last valid index in
//!   private memory, and never reads its own index back. A peer's index that moves backwards, or is more than the
//!   capacity away, poisons this end permanently: every later call fails with [`Poisoned`].
//! - An entry is copied out before it is examined, so that the peer cannot change it between check and use.
//! - An entry is written before the index that covers it is published (release), and read after that index is loaded
//!   (acquire). A place is released, in the same way, after its entry has been copied out.
//! - A batch is published by one store, and rings the [`Doorbell`] at most once.
//!
//! Both ends access the memory through [`Memory`], so that the same code runs over shared memory ([`SharedRing`]), the
//! heap (`OwnedRing`, feature `std`) and `loom`, which tries every interleaving in the tests. Volatile accesses would
//! not suffice: they do not order accesses between processors.

mod consumer;
mod doorbell;
#[cfg(feature = "std")]
mod owned;
mod producer;
mod shared;
mod spin;
mod stream;
#[cfg(test)]
mod tests;

pub use consumer::Consumer;
pub use doorbell::{Doorbell, WakeThreshold, Word};
#[cfg(feature = "std")]
pub use owned::OwnedRing;
pub use producer::Producer;
pub use shared::{CAPACITY_MAX, Indices, Line, RingError, SharedRing};
pub use spin::{Pause, SpinPolicy};
pub use stream::{STREAM_CAPACITY_MAX_BYTES, StreamConsumer, StreamMemory, StreamProducer};

/// The memory of a ring whose entries have `WORDS` 64-bit words.
///
/// The methods are unchecked accesses without state; [`Producer`] and [`Consumer`] do the checks. `place` is below
/// [`Memory::capacity`].
pub trait Memory<const WORDS: usize> {
    /// Return the number of entries: a constant power of two that the peer cannot change.
    fn capacity(&self) -> u32;

    /// Load the producer's index with acquire ordering.
    fn produced(&self) -> u32;

    /// Publish all entries before `produced` with release ordering.
    fn set_produced(&self, produced: u32);

    /// Load the consumer's index with acquire ordering.
    fn consumed(&self) -> u32;

    /// Release all places before `consumed` with release ordering.
    fn set_consumed(&self, consumed: u32);

    /// Copy an entry out of the ring.
    fn read(&self, place: u32) -> [u64; WORDS];

    /// Copy an entry into the ring.
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

/// The peer has violated the ring's protocol. This end no longer moves entries.
///
/// The entries in the ring are lost. The queue must be attached again over fresh memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[error(
    "the peer moved its ring index from {from} to {to}, beyond the limit of {limit}; attach again with a new queue"
)]
pub struct Poisoned {
    /// The peer's last valid index.
    pub from: u32,
    /// The index that the peer has written.
    pub to: u32,
    /// The largest valid index at that time.
    pub limit: u32,
}

/// The peer's last valid index.
#[derive(Debug, Clone, Copy)]
struct PeerIndex {
    valid: u32,
    poisoned: Option<Poisoned>,
}

impl PeerIndex {
    const fn new() -> Self {
        Self { valid: 0, poisoned: None }
    }

    /// Accept the index that the peer has written if it is valid: at least the last one, at most `limit`.
    fn update(&mut self, written: u32, limit: u32) -> Result<u32, Poisoned> {
        if let Some(poisoned) = self.poisoned {
            return Err(poisoned);
        }
        // Both distances are at most the capacity for a correct peer, so wrap-around at 2^32 is harmless.
        if written.wrapping_sub(self.valid) > limit.wrapping_sub(self.valid) {
            let poisoned = Poisoned { from: self.valid, to: written, limit };
            self.poisoned = Some(poisoned);
            return Err(poisoned);
        }
        self.valid = written;
        Ok(written)
    }
}
