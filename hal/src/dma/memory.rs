//! Memory that an engine may be told to read and write.

use core::ptr::NonNull;

/// Memory that stays where it is, for engines that reach it by the processor's addresses.
///
/// # Safety
/// From `base`, `len_bytes` bytes are valid for reads and writes from any thread, and stay so, at that address, until
/// the value is dropped, whatever anybody else does (a shared mapping must be sealed against truncation). No Rust
/// reference to them may live while an engine uses them: to this process they are like a device's memory, and what a
/// read gives while somebody writes is any mixture of old and new.
pub unsafe trait DmaMemory: Send + Sync {
    /// Return where the memory begins.
    fn base(&self) -> NonNull<u8>;

    /// Return how long it is.
    fn len_bytes(&self) -> usize;
}
