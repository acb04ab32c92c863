//! Non-volatile block storage: eMMC partitions, NOR flash behind a translation layer, files.
//!
//! Code that must survive power failures relies on this contract:
//! - a write changes the blocks that it names and no others, even if power fails during the write;
//! - a block that was being written when power failed holds arbitrary data: old, new, a mix, or neither;
//! - writes before a [`BlockDevice::flush`] that returned survive a power failure; each write after it may survive or
//!   not, in any order.

use core::fmt;

/// The size of a device. It never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// The length of a block in bytes.
    pub block_len_bytes: usize,
    /// The number of blocks.
    pub blocks: u32,
}

impl Geometry {
    /// Return the length of the device in bytes.
    pub const fn len_bytes(self) -> u64 {
        self.block_len_bytes as u64 * self.blocks as u64
    }

    /// Return whether `len_bytes` bytes, starting at `block`, are whole blocks within this device.
    pub const fn holds(self, block: u32, len_bytes: usize) -> bool {
        let end = block as u64 * self.block_len_bytes as u64 + len_bytes as u64;
        len_bytes.is_multiple_of(self.block_len_bytes) && end <= self.len_bytes()
    }
}

/// A block device.
pub trait BlockDevice {
    /// The device's error type.
    type Error: fmt::Debug + fmt::Display;

    /// Return the device's size.
    fn geometry(&self) -> Geometry;

    /// Read from `block` on into `buffer`, whose length is a multiple of the block length.
    ///
    /// # Errors
    /// If the device fails or [`Geometry::holds`] is false.
    fn read(&mut self, block: u32, buffer: &mut [u8]) -> Result<(), Self::Error>;

    /// Write `data`, whose length is a multiple of the block length, from `block` on. The data is durable only after
    /// [`BlockDevice::flush`].
    ///
    /// # Errors
    /// If the device fails or [`Geometry::holds`] is false.
    fn write(&mut self, block: u32, data: &[u8]) -> Result<(), Self::Error>;

    /// Wait until all earlier writes are durable.
    ///
    /// # Errors
    /// If the device fails; the earlier writes may then be lost or not.
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
    fn geometry_holds_only_whole_blocks_within_the_device() {
        let geometry = Geometry { block_len_bytes: 512, blocks: u32::MAX };
        assert_eq!(geometry.len_bytes(), 512 * u64::from(u32::MAX));
        assert!(geometry.holds(u32::MAX - 1, 512) && geometry.holds(u32::MAX, 0));
        assert!(!geometry.holds(u32::MAX - 1, 1024) && !geometry.holds(0, 511) && !geometry.holds(0, 513));
    }
}
