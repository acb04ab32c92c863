//! A rank's memory, between the table of regions and the engine.

use crate::emulated::engine::BoardEngine;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use sumac_hal::dma::{RegionKey, RegionTable};
use sumac_hal::ids::FunctionId;
use sumac_hal::mmio::EntryStatus;
use sumac_hal::shm::{MemoryError, Region};

/// Map what was handed over under a key, if it is as long as was said: so much of it, which the rank's quota has covered,
/// however long the file is.
pub(super) fn map(
    file: OwnedFd,
    key: RegionKey,
    (offset_bytes, len_bytes): (u64, u64),
    engine: &mut BoardEngine,
) -> Result<(), EntryStatus> {
    let Some(len) = usize::try_from(len_bytes).ok().filter(|_| offset_bytes == 0) else {
        return Err(EntryStatus::OutOfBounds);
    };
    let region = Region::open_at(file.as_fd(), 0, len).map_err(|error| match error {
        MemoryError::System { .. } => EntryStatus::NoRoom,
        MemoryError::Length { .. } => EntryStatus::OutOfBounds,
        _ => EntryStatus::BadRegion,
    })?;
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
