//! Which memory an engine's chains reach, by its key: of this process, and of peers.
//!
//! Invariant: a place of the table is taken again only under a later generation, so that an old key finds nothing.

use super::super::config::VerbsError;
use super::Place;
use crate::dma::{Address, DmaMemory, RegionKey, Status};
use crate::remote::RemoteRegion;
use std::sync::Arc;
use thiserror::Error;

/// The longest landing area: its places are named in 32 bits.
pub(super) const LANDING_MAX_BYTES: u64 = 1 << 32;

/// Why memory was not mapped.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MapMemoryError {
    /// Something is mapped there, or was with that generation or a later one.
    #[error("generation {asked} of region {index} comes after generation {now}, or that one is still mapped")]
    Taken {
        /// The index.
        index: u16,
        /// The generation asked for.
        asked: u32,
        /// The last generation there.
        now: u32,
    },
    /// A landing area whose places no word names.
    #[error("a landing area of {len_bytes} bytes; the limit is {LANDING_MAX_BYTES}")]
    TooLong {
        /// Its length.
        len_bytes: u64,
    },
    /// The device does not take it.
    #[error(transparent)]
    Register(#[from] VerbsError),
}

pub(super) enum Mapped<R> {
    /// Memory of this process. The registration goes before the memory does.
    Here { registration: R, memory: Arc<dyn DmaMemory>, lkey: u32, is_local: bool },
    /// A peer's.
    There { peer: u16, region: RemoteRegion, lands: bool },
}

/// Bytes that were found.
pub(super) struct Found {
    /// Where they are, if they are this process's.
    pub(super) here: Option<*mut u8>,
    pub(super) place: Place,
    pub(super) is_local: bool,
}

/// A place of the table of regions.
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
        let taken = |now| MapMemoryError::Taken { index: key.index, asked: key.generation, now };
        let entry = self.entries.get(usize::from(key.index)).ok_or(taken(u32::MAX))?;
        let is_free = entry.mapped.is_none() && key.generation > entry.generation;
        if is_free { Ok(()) } else { Err(taken(entry.generation)) }
    }

    /// Note memory under a key that was found free.
    pub(super) fn put(&mut self, key: RegionKey, mapped: Mapped<R>) {
        self.entries[usize::from(key.index)] = Entry { generation: key.generation, mapped: Some(mapped) };
    }

    /// Take memory out, if it is there.
    pub(super) fn take(&mut self, key: RegionKey) -> Option<Mapped<R>> {
        let entry = self.entries.get_mut(usize::from(key.index))?;
        entry.mapped.take_if(|_| entry.generation == key.generation)
    }

    /// Return where `len_bytes` bytes are, here and for the hardware.
    pub(super) fn find(&self, at: Address, len_bytes: u64) -> Result<Found, Status> {
        let entry = self.entries.get(usize::from(at.region.index)).ok_or(Status::BadRegion)?;
        let Some(mapped) = entry.mapped.as_ref().filter(|_| entry.generation == at.region.generation) else {
            let was_there = (1..=entry.generation).contains(&at.region.generation);
            return Err(if was_there { Status::StaleRegion } else { Status::BadRegion });
        };
        match mapped {
            Mapped::There { peer, region, lands } => {
                let addr = region.at(at.offset_bytes, len_bytes).map_err(|_| Status::OutOfBounds)?;
                // Within a landing area, so of 32 bits.
                let word = lands.then_some(at.offset_bytes as u32);
                let place = Place { addr, key: region.rkey, peer: Some(*peer), word, backing: None };
                Ok(Found { here: None, place, is_local: false })
            }
            Mapped::Here { memory, lkey, is_local, .. } => {
                let end = at.offset_bytes.checked_add(len_bytes).ok_or(Status::OutOfBounds)?;
                if end > memory.len_bytes() as u64 {
                    return Err(Status::OutOfBounds);
                }
                // Inside memory that is there.
                let here = memory.base().as_ptr().wrapping_add(at.offset_bytes as usize);
                let addr = here.expose_provenance() as u64;
                let backing = Some(memory.backing().at(at.offset_bytes));
                let place = Place { addr, key: *lkey, peer: None, word: None, backing };
                Ok(Found { here: Some(here), place, is_local: *is_local })
            }
        }
    }
}
