//! A rank's memory, between the table of regions and the engine.

use crate::emulated::engine::BoardEngine;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use sumac_hal::dma::{DmaMemory, RegionKey, RegionTable};
use sumac_hal::ids::FunctionId;
use sumac_hal::mmio::EntryStatus;
use sumac_hal::shm::{MemoryError, Region};

/// The longest memory that a rank may register, in bytes.
const MEMORY_MAX_BYTES: u64 = 1 << 40;

/// Map what was handed over under a key, if it is as long as was said.
pub(super) fn map(
    file: OwnedFd,
    key: RegionKey,
    (offset_bytes, len_bytes): (u64, u64),
    engine: &mut BoardEngine,
) -> Result<(), EntryStatus> {
    let region = Region::open(file, MEMORY_MAX_BYTES).map_err(|error| match error {
        MemoryError::System { .. } => EntryStatus::NoRoom,
        _ => EntryStatus::BadRegion,
    })?;
    if offset_bytes != 0 || len_bytes > region.len_bytes() as u64 {
        return Err(EntryStatus::OutOfBounds);
    }
    engine.map(key, Arc::new(region))
}

/// Take the memory of a rank that is gone away; false if it is still in use, and can be taken away when it no longer is.
pub(in crate::emulated) fn take_away<const N: usize>(
    owner: FunctionId,
    key: RegionKey,
    regions: &mut RegionTable<N>,
    engine: &mut BoardEngine,
) -> bool {
    // It may have been deregistered before, by the rank itself.
    let _ = regions.deregister(owner, key);
    let unused = !regions.contains(key);
    if unused {
        engine.unmap(key);
    }
    unused
}
