//! Maps and unmaps a rank's memory.

use crate::emulated::engine::BoardEngine;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use sumac_hal::dma::{RegionKey, RegionTable};
use sumac_hal::ids::FunctionId;
use sumac_hal::mmio::EntryStatus;
use sumac_hal::shm::{MemoryError, Region};

/// Map the first `len_bytes` of a file under a key, if the file is that long: only what the rank's quota covers,
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
        MemoryError::System { .. } => EntryStatus::NoResources,
        MemoryError::Length { .. } => EntryStatus::OutOfBounds,
        _ => EntryStatus::BadRegion,
    })?;
    engine.map(key, Arc::new(region))
}

/// Deregister and unmap the memory of a detached rank; false if it is still in use and has to be unmapped later.
pub(in crate::emulated) fn unregister<const N: usize>(
    owner: FunctionId,
    key: RegionKey,
    regions: &mut RegionTable<N>,
    engine: &mut BoardEngine,
) -> bool {
    // The rank may have deregistered it itself.
    let _ = regions.deregister(owner, key);
    let unused = !regions.contains(key);
    if unused {
        engine.unmap(key);
    }
    unused
}
