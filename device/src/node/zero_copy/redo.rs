//! Layout of a redo slot, and its record (see the table in `mod.rs`).

use super::{GroupCtx, HEAD_BYTES, Node};
use core::ops::Range;
use core::sync::atomic::{Ordering, fence};
use sumac_hal::dma::{Address, LocalMemory, Span, Status};
use sumac_hal::wire::crc32c;

impl GroupCtx<'_> {
    /// Return the words that publish the result of slot `index`; `rounded` if it is in the bounce buffer. Their
    /// checksum covers the record itself. The third word, which the engine writes before them, covers the result's
    /// bytes. Ranks check both when the device is gone.
    pub(super) fn record(&self, index: usize, rounded: bool) -> [u64; 2] {
        let seq = self.shard().global(self.slots[index].local).0;
        let (group, epoch) = (self.group.config.group.0, self.group.config.epoch.to_bits());
        let mut bytes = [0; 17];
        bytes[..4].copy_from_slice(&group.to_le_bytes());
        bytes[4..8].copy_from_slice(&epoch.to_le_bytes());
        bytes[8..16].copy_from_slice(&seq.to_le_bytes());
        bytes[16] = u8::from(rounded);
        [u64::from(epoch) << 32 | u64::from(crc32c(&bytes)), seq]
    }

    pub(super) fn read_record<E: LocalMemory>(&self, index: usize, engine: &mut E) -> Result<[u64; 2], Status> {
        let address = self.redo_address(index);
        engine.with_local(nothing_at(address), Span { address, len_bytes: 16 }, |_, bytes| {
            let word = |at: usize| bytes[at..at + 8].iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
            [word(0), word(8)]
        })
    }

    /// Clear the record of slot `index`, before any byte that it covers is touched.
    pub(super) fn clear_record<E: LocalMemory>(&self, index: usize, engine: &mut E) -> Result<(), Status> {
        let address = self.redo_address(index);
        // A rank that finds the record cleared must find the answers that allowed the reuse.
        fence(Ordering::Release);
        engine.with_local(Span { address, len_bytes: 16 }, nothing_at(address), |bytes, _| bytes.fill(0))?;
        // Ranks may read the record, the result and the record again at the same time. On a machine that reorders
        // stores they could otherwise see new bytes under the old record, and take a mixture for a whole result.
        fence(Ordering::SeqCst);
        Ok(())
    }

    /// Return the length in bytes of the accumulators of slot `index`.
    pub(super) fn value_len(&self, index: usize) -> usize {
        let slot = &self.slots[index];
        slot.elements.unwrap_or(0) as usize * slot.element_bytes(true).unwrap_or(0)
    }

    pub(super) fn stage_range(&self, index: usize, stage: usize, len: usize) -> Range<usize> {
        let start = (index * self.group.stages + stage) * usize::from(self.group.config.chunk_len_bytes);
        start..start + len
    }

    pub(super) fn redo_address(&self, index: usize) -> Address {
        let config = &self.group.config;
        let slot = Node::redo_slot_len_bytes(config.order, self.children.len() as u16, config.chunk_len_bytes);
        let memory = self.refs.as_ref().map_or(Address::default(), |refs| refs.memory);
        Address { offset_bytes: memory.offset_bytes + (index * slot) as u64, ..memory }
    }

    pub(super) fn bounce(&self, index: usize) -> Address {
        let slot = self.redo_address(index);
        Address { offset_bytes: slot.offset_bytes + HEAD_BYTES as u64, ..slot }
    }

    pub(super) fn accumulator(&self, index: usize, which: usize) -> Address {
        let bounce = self.bounce(index);
        let skip = (1 + which) as u64 * u64::from(self.group.config.chunk_len_bytes);
        Address { offset_bytes: bounce.offset_bytes + skip, ..bounce }
    }
}

/// An empty span of device memory, for work on one span only.
pub(super) fn nothing_at(address: Address) -> Span {
    Span { address, len_bytes: 0 }
}
