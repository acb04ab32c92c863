//! Atomics of 64 bits, as rings and register blocks have them, on every target.
//!
//! Where the processor has none, as on 32-bit microcontrollers, they are those of `portable-atomic`, which has the same
//! layout and takes a lock. A peer that writes the same memory does not take that lock, so that its words may arrive in
//! halves. That is allowed: nothing is read before the index that covers it is published, and whatever a peer has
//! written, it is copied out and checked before it is used.

#[cfg(target_has_atomic = "64")]
pub use core::sync::atomic::AtomicU64;
#[cfg(not(target_has_atomic = "64"))]
pub use portable_atomic::AtomicU64;
