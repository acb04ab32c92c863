//! Registered memory that the two ranks of a connection have mapped of each other.
//!
//! A rank hands a region over when it first sends from it, under a handle, and sends what it has to send as before.
//! Once the peer has published the handle, references name it, and a place in it: the peer reads there without a system
//! call, and without permission to trace this process. A freed region is withdrawn, and the peer unmaps it. A frame
//! says that such messages wait, so that nobody looks for them in vain.
//!
//! Invariants:
//! - A handle is never used for a second region.
//! - Memory is mapped read-only, and only if it cannot be resized. Each access is checked against the mapping's length.
//!   What is read was written by another process and may change meanwhile: it is copied before it is used.
//! - Each side has at most [`REGIONS_MAX`] regions of the other mapped.
//! - A peer that breaks these rules gets no more memory mapped, and its references fail.

use crate::region_exports::{ExportPlace, RegionExports};
use std::sync::{Arc, PoisonError};
use sumac_hal::shm::{MemoryChannel, MemoryError, Message, ReadOnly, Received, SocketError};

/// One rank's end.
#[derive(Debug)]
pub(super) struct RegionLink {
    channel: MemoryChannel,
    exports: Arc<RegionExports>,
    /// Handle and number of the regions that the peer has, or is about to map.
    handed_over: Vec<(u32, u64)>,
    last_handle: u32,
    /// [`RegionExports::removals`] when the freed ones among them were withdrawn.
    removals_seen: u32,
    /// There are messages that no frame has announced.
    has_news: bool,
    /// The peer's regions that this rank has mapped, in the order of their handles.
    mapped: Vec<(u32, ReadOnly)>,
    last_mapped: u32,
    /// Nothing more is handed over.
    is_closed_to_peer: bool,
    /// Nothing more is mapped.
    is_closed_to_us: bool,
}

/// A place in a region of the sender's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RegionPlace {
    pub(super) handle: u32,
    pub(super) offset_bytes: u64,
}

impl RegionPlace {
    /// Return the place that a frame names.
    pub(super) const fn from_wire(word: u64) -> Self {
        Self { handle: (word >> OFFSET_BITS) as u32, offset_bytes: word & (REGION_MAX_BYTES - 1) }
    }

    pub(super) const fn to_wire(self) -> u64 {
        (self.handle as u64) << OFFSET_BITS | self.offset_bytes
    }
}

impl RegionLink {
    pub(super) fn new(channel: MemoryChannel, exports: Arc<RegionExports>) -> Self {
        Self {
            channel,
            removals_seen: exports.removals(),
            exports,
            handed_over: Vec::new(),
            last_handle: 0,
            has_news: false,
            mapped: Vec::new(),
            last_mapped: 0,
            is_closed_to_peer: false,
            is_closed_to_us: false,
        }
    }

    /// Return where the peer finds these bytes, if it has mapped their region up to handle `mapped_by_peer`. If it does
    /// not have the region, hand it over for the next time.
    pub(super) fn place_of(&mut self, bytes: &[u8], mapped_by_peer: u32) -> Option<RegionPlace> {
        let export = self.exports.find(bytes)?;
        let found = self.handed_over.iter().find(|(_, number)| *number == export.number);
        let Some(&(handle, _)) = found else {
            self.hand_over(&export, mapped_by_peer);
            return None;
        };
        (handle <= mapped_by_peer).then_some(RegionPlace { handle, offset_bytes: export.offset_bytes })
    }

    /// Hand a region over, unless the peer has not mapped the last one yet, or has enough of them.
    fn hand_over(&mut self, export: &ExportPlace, mapped_by_peer: u32) {
        self.withdraw_freed();
        let is_due = self.handed_over.last().is_none_or(|&(handle, _)| handle <= mapped_by_peer)
            && self.handed_over.len() < REGIONS_MAX
            && self.last_handle < HANDLE_MAX;
        if self.is_closed_to_peer || !is_due {
            return;
        }
        let Some(region) = export.region.upgrade() else { return };
        let file = region.lock().unwrap_or_else(PoisonError::into_inner).reader_file();
        let handle = self.last_handle + 1;
        let handed_over = file
            .map_err(HandOverError::from)
            .and_then(|file| Ok(self.channel.hand_over(handle.into(), std::os::fd::AsFd::as_fd(&file))?));
        match handed_over {
            Ok(()) => {
                self.last_handle = handle;
                self.handed_over.push((handle, export.number));
                self.has_news = true;
            }
            // A severed one, which is not exported for long.
            Err(HandOverError::Memory(MemoryError::Private)) => {}
            Err(error) => self.close_to_peer(&error),
        }
    }

    /// Tell the peer which regions were freed since the last time.
    pub(super) fn withdraw_freed(&mut self) {
        let removals = self.exports.removals();
        if removals == self.removals_seen {
            return;
        }
        self.removals_seen = removals;
        let freed = |&(_, number): &(u32, u64)| !self.exports.has(number);
        for (handle, _) in self.handed_over.extract_if(.., |entry| freed(entry)).collect::<Vec<_>>() {
            match self.channel.withdraw(handle.into()) {
                Ok(()) => self.has_news = true,
                Err(error) => self.close_to_peer(&error.into()),
            }
        }
    }

    fn close_to_peer(&mut self, error: &HandOverError) {
        if !std::mem::replace(&mut self.is_closed_to_peer, true) {
            crate::log::info!(%error, "a rank of this machine maps no more registered memory of this one");
        }
    }

    /// Return whether the next frame has to say that messages wait.
    pub(super) const fn take_news(&mut self) -> bool {
        std::mem::replace(&mut self.has_news, false)
    }

    /// Take the messages that wait. Returns the last handle that is mapped.
    pub(super) fn receive(&mut self) -> u32 {
        for _ in 0..MESSAGES_MAX {
            if self.is_closed_to_us {
                break;
            }
            match self.channel.receive() {
                Ok(None) => break,
                Ok(Some(received)) => self.take(received),
                Err(error) => self.close_to_us(&error),
            }
        }
        self.last_mapped
    }

    fn take(&mut self, Received { message, file }: Received) {
        match (message, file) {
            (Message::Memory { handle }, Some(file)) => match u32::try_from(handle) {
                Ok(handle) if self.last_mapped < handle && handle <= HANDLE_MAX && self.mapped.len() < REGIONS_MAX => {
                    match ReadOnly::open(file, REGION_MAX_BYTES) {
                        Ok(memory) => {
                            self.mapped.push((handle, memory));
                            self.last_mapped = handle;
                        }
                        Err(error) => self.close_to_us(&error),
                    }
                }
                _ => self.close_to_us(&"a handle out of turn, or too many regions"),
            },
            (Message::Withdrawn { handle }, None) => self.mapped.retain(|&(mapped, _)| u64::from(mapped) != handle),
            (other, _) => self.close_to_us(&format_args!("an unexpected message: {other:?}")),
        }
    }

    fn close_to_us(&mut self, why: &dyn std::fmt::Display) {
        self.is_closed_to_us = true;
        crate::log::info!(%why, "no more registered memory of a rank of this machine is mapped");
    }

    /// Copy bytes of the peer's memory. Returns false if the place is not one of a region that is mapped.
    pub(super) fn read(&self, place: RegionPlace, into: &mut [u8]) -> bool {
        let found = self.mapped.binary_search_by_key(&place.handle, |&(handle, _)| handle);
        found.is_ok_and(|index| self.mapped[index].1.read(place.offset_bytes, into))
    }

    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.handed_over.len(), self.mapped.len())
    }
}

/// Why a region could not be handed over.
#[derive(Debug, thiserror::Error)]
enum HandOverError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Socket(#[from] SocketError),
}

/// The maximum number of regions that a rank has mapped of a peer.
pub(super) const REGIONS_MAX: usize = 128;
/// Bits of an offset in a region, in the word of a frame that names a place; the handle has the others.
const OFFSET_BITS: u32 = 40;
/// The length of the longest region that is mapped.
const REGION_MAX_BYTES: u64 = 1 << OFFSET_BITS;
const HANDLE_MAX: u32 = (1 << (64 - OFFSET_BITS)) - 1;
/// Messages taken at a time: all that a peer that keeps to the rules can have sent.
const MESSAGES_MAX: usize = 2 * REGIONS_MAX;
