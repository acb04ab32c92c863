//! The table of memory that an engine's chains can access, local and of peers.
//!
//! Invariant: an entry is reused only with a later generation, so that an old key is never valid again.

use super::super::alias::AliasError;
use super::super::config::VerbsError;
use super::MemoryRange;
use crate::dma::{Address, DmaMemory, RegionKey, Status};
use crate::remote::RemoteRegion;
use std::sync::Arc;
use thiserror::Error;

/// The maximum length of a landing area: immediate data has 32 bits.
pub(super) const LANDING_MAX_BYTES: u64 = 1 << 32;

/// Why memory could not be mapped.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MapMemoryError {
    /// Memory is mapped at this index, or was with this or a later generation.
    #[error("region {index} cannot be mapped with generation {requested}: generation {now} is mapped or was used last")]
    Taken {
        /// The index.
        index: u16,
        /// The requested generation.
        requested: u32,
        /// The last generation at this index.
        now: u32,
    },
    /// The landing area is too long for 32-bit offsets.
    #[error("a landing area of {len_bytes} bytes; the limit is {LANDING_MAX_BYTES}")]
    TooLong {
        /// Its length.
        len_bytes: u64,
    },
    /// The device refused to register it.
    #[error(transparent)]
    Register(#[from] VerbsError),
    /// Another function's memory could not be attached.
    #[error(transparent)]
    Alias(#[from] AliasError),
}

pub(super) enum Mapped<R> {
    /// Memory of this process. The registration is dropped before the memory.
    ThisProcess { registration: R, memory: Arc<dyn DmaMemory>, lkey: u32, is_local: bool },
    /// Memory of another function of the device, under a local key that `_alias` keeps.
    Alias { _alias: R, region: RemoteRegion },
    /// Memory of a peer.
    Peer { peer: u16, region: RemoteRegion, lands: bool },
}

/// A range that was found.
pub(super) struct Found {
    /// Its address, if it is local.
    pub(super) local_ptr: Option<*mut u8>,
    pub(super) range: MemoryRange,
    pub(super) is_local: bool,
}

/// An entry of the table.
struct Entry<R> {
    generation: u32,
    mapped: Option<Mapped<R>>,
}

/// The table.
pub(super) struct Regions<R> {
    entries: Vec<Entry<R>>,
}

impl<R> Regions<R> {
    pub(super) fn new(regions: usize) -> Self {
        Self { entries: (0..regions).map(|_| Entry { generation: 0, mapped: None }).collect() }
    }

    pub(super) fn check_free(&self, key: RegionKey) -> Result<(), MapMemoryError> {
        let taken = |now| MapMemoryError::Taken { index: key.index, requested: key.generation, now };
        let entry = self.entries.get(usize::from(key.index)).ok_or(taken(u32::MAX))?;
        let is_free = entry.mapped.is_none() && key.generation > entry.generation;
        if is_free { Ok(()) } else { Err(taken(entry.generation)) }
    }

    /// Store memory under a key that is free.
    pub(super) fn put(&mut self, key: RegionKey, mapped: Mapped<R>) {
        self.entries[usize::from(key.index)] = Entry { generation: key.generation, mapped: Some(mapped) };
    }

    /// Remove memory, if it is mapped.
    pub(super) fn take(&mut self, key: RegionKey) -> Option<Mapped<R>> {
        let entry = self.entries.get_mut(usize::from(key.index))?;
        entry.mapped.take_if(|_| entry.generation == key.generation)
    }

    /// Return the range of `len_bytes` bytes at `at`, for the processor and for the hardware.
    pub(super) fn find(&self, at: Address, len_bytes: u64) -> Result<Found, Status> {
        let entry = self.entries.get(usize::from(at.region.index)).ok_or(Status::BadRegion)?;
        let Some(mapped) = entry.mapped.as_ref().filter(|_| entry.generation == at.region.generation) else {
            let was_assigned = (1..=entry.generation).contains(&at.region.generation);
            return Err(if was_assigned { Status::StaleRegion } else { Status::BadRegion });
        };
        match mapped {
            Mapped::Alias { region, .. } => {
                let addr = region.at(at.offset_bytes, len_bytes).map_err(|_| Status::OutOfBounds)?;
                let range =
                    MemoryRange { addr, key: region.rkey, is_alias: true, peer: None, word: None, backing: None };
                Ok(Found { local_ptr: None, range, is_local: false })
            }
            Mapped::Peer { peer, region, lands } => {
                let addr = region.at(at.offset_bytes, len_bytes).map_err(|_| Status::OutOfBounds)?;
                // Within a landing area, so 32 bits suffice.
                let word = lands.then_some(at.offset_bytes as u32);
                let range =
                    MemoryRange { addr, key: region.rkey, is_alias: false, peer: Some(*peer), word, backing: None };
                Ok(Found { local_ptr: None, range, is_local: false })
            }
            Mapped::ThisProcess { memory, lkey, is_local, .. } => {
                let end = at.offset_bytes.checked_add(len_bytes).ok_or(Status::OutOfBounds)?;
                if end > memory.len_bytes() as u64 {
                    return Err(Status::OutOfBounds);
                }
                // In range, so it fits `usize`.
                let local_ptr = memory.base().as_ptr().wrapping_add(at.offset_bytes as usize);
                let addr = local_ptr.expose_provenance() as u64;
                let backing = Some(memory.backing().at(at.offset_bytes));
                let range = MemoryRange { addr, key: *lkey, is_alias: false, peer: None, word: None, backing };
                Ok(Found { local_ptr: Some(local_ptr), range, is_local: *is_local })
            }
        }
    }
}
