//! Fuzz targets: each passes arbitrary bytes to production code that reads external input, and checks the invariants of
//! the result. A target fails on a panic, an overflow, a report of AddressSanitizer, or a limit of memory or time.
//!
//! Checksums would stop a search, so an input can ask its target to write valid ones first, as any attacker can.

pub mod admission;
pub mod arrays;
pub mod boot;
pub mod control;
pub mod fabrics;
pub mod rings;
pub mod seeds;
pub mod wire;

/// Reads an input from its start; missing bytes are zero.
#[derive(Debug, Clone)]
pub struct Cursor<'a>(pub &'a [u8]);

impl<'a> Cursor<'a> {
    /// Take a byte.
    pub fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Take a number.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Take a number.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// Take a number.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// Take bytes.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let taken = self.take(N);
        let mut array = [0; N];
        array[..taken.len()].copy_from_slice(taken);
        array
    }

    /// Take `len` bytes, or all remaining ones.
    pub fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// Return whether the input is used up.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
