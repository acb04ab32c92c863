//! Block storage that keeps its content without power: eMMC partitions, NOR behind a translation layer, files.
//!
//! The contract, on which power-safe code is built:
//! - a write changes the blocks that it names and no others, also when power fails in it;
//! - a block that was being written when power failed holds anything: old, new, parts of both, or neither;
//! - writes before a [`BlockDevice::flush`] that returned are there after a power failure; writes after it may be there
//!   or not, each by itself, in any order.

use core::fmt;

/// The size of a device; fixed for its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Length of a block, in bytes.
    pub block_len_bytes: usize,
    /// How many blocks there are.
    pub blocks: u32,
}

impl Geometry {
    /// Return the length of the device, in bytes.
    pub const fn len_bytes(self) -> u64 {
        self.block_len_bytes as u64 * self.blocks as u64
    }

    /// Tell whether `len_bytes` from `block` on are whole blocks of this device.
    pub const fn holds(self, block: u32, len_bytes: usize) -> bool {
        let end = block as u64 * self.block_len_bytes as u64 + len_bytes as u64;
        len_bytes.is_multiple_of(self.block_len_bytes) && end <= self.len_bytes()
    }
}

/// Storage in blocks.
pub trait BlockDevice {
    /// What can go wrong.
    type Error: fmt::Debug + fmt::Display;

    /// Return the size.
    fn geometry(&self) -> Geometry;

    /// Fill `buffer`, a whole number of blocks, from `block` on.
    ///
    /// # Errors
    /// The device fails, or [`Geometry::holds`] does not hold.
    fn read(&mut self, block: u32, buffer: &mut [u8]) -> Result<(), Self::Error>;

    /// Write `data`, a whole number of blocks, from `block` on. It is safe only after [`BlockDevice::flush`].
    ///
    /// # Errors
    /// The device fails, or [`Geometry::holds`] does not hold.
    fn write(&mut self, block: u32, data: &[u8]) -> Result<(), Self::Error>;

    /// Return when all writes before are safe from power failure.
    ///
    /// # Errors
    /// The device fails; then nothing is known of them.
    fn flush(&mut self) -> Result<(), Self::Error>;
}

impl<T: BlockDevice + ?Sized> BlockDevice for &mut T {
    type Error = T::Error;

    fn geometry(&self) -> Geometry {
        (**self).geometry()
    }

    fn read(&mut self, block: u32, buffer: &mut [u8]) -> Result<(), Self::Error> {
        (**self).read(block, buffer)
    }

    fn write(&mut self, block: u32, data: &[u8]) -> Result<(), Self::Error> {
        (**self).write(block, data)
    }

    fn flush(&mut self) -> Result<(), Self::Error> {
        (**self).flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_blocks_of_the_device_are_held() {
        let geometry = Geometry { block_len_bytes: 512, blocks: u32::MAX };
        assert_eq!(geometry.len_bytes(), 512 * u64::from(u32::MAX));
        assert!(geometry.holds(u32::MAX - 1, 512) && geometry.holds(u32::MAX, 0));
        assert!(!geometry.holds(u32::MAX - 1, 1024) && !geometry.holds(0, 511) && !geometry.holds(0, 513));
    }
}
