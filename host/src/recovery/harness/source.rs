//! What a rank can supply after its tree is lost, by packets or zero-copy; and the end of a zero-copy group, step by
//! step as `ZeroCopyDriver` performs it, for a caller with rings and memory of its own.

use super::super::RecoverySource;
use crate::transport::memory::{ReadAt, Redo, StageOut, ZeroCopyEndpoint};
use crate::transport::packets::{Buffers, Endpoint, OpId, Ops};
use std::fmt;
use sumac_hal::dma::Address;
use sumac_hal::ids::{Epoch, GroupId};
use sumac_hal::mmio::COMPLETION_WORDS;
use sumac_hal::op::OpDesc;

/// Copies bytes out of the redo memory from an offset on; returns false if there are too few.
pub type ReadRedo = Box<dyn Fn(u64, &mut [u8]) -> bool>;

impl ReadAt for ReadRedo {
    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> bool {
        self(offset_bytes, bytes)
    }
}

/// Where the redo slots of a group are: what a rank is told when it attaches.
#[derive(Debug, Clone, Copy)]
pub struct RedoPlace {
    /// The group.
    pub group: GroupId,
    /// Its epoch.
    pub epoch: Epoch,
    /// Where the first slot begins.
    pub offset_bytes: u64,
    /// The length of each slot.
    pub slot_len_bytes: u64,
    /// The number of slots.
    pub slots: u64,
    /// The group's chunk length.
    pub chunk_len_bytes: u64,
}

/// The redo slots of a group, as a rank reads them.
pub struct RedoSlots {
    redo: Redo<ReadRedo>,
    view: (GroupId, Epoch),
}

impl fmt::Debug for RedoSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedoSlots").field("view", &self.view).finish_non_exhaustive()
    }
}

impl RedoSlots {
    /// Read redo slots through `memory`.
    pub fn new(place: RedoPlace, memory: ReadRedo) -> Self {
        let RedoPlace { group, epoch, offset_bytes, slot_len_bytes, slots, chunk_len_bytes } = place;
        let frozen = None;
        Self {
            redo: Redo { memory, offset_bytes, slot_len_bytes, slots, chunk_len_bytes, frozen },
            view: (group, epoch),
        }
    }

    /// Retain what other ranks may lack of operations that are complete now. Call it after answers were taken in.
    pub fn keep(&self, endpoint: &mut ZeroCopyEndpoint, buffers: &mut impl Buffers) {
        endpoint.retain_completed(|seq| self.redo.is_published(self.view, seq), buffers);
    }

    /// Accept answers of the device again: it is fenced, and the ring is read once more. Published results have been
    /// read.
    pub fn reopen(&mut self, endpoint: &mut ZeroCopyEndpoint) {
        self.redo.freeze(self.view, endpoint.recoverable_chunks());
        endpoint.reopen();
    }

    /// After [`RedoSlots::recover`], accept what the device answered while memory was taken away from it.
    pub fn doubt(&self, endpoint: &mut ZeroCopyEndpoint, votes: &[u64; COMPLETION_WORDS]) {
        endpoint.mark_unknown(votes);
    }

    /// Then, after [`RedoSlots::land`], write what such an answer says to be in the bounce buffer; `drain` copies it.
    pub fn land_late(
        &self,
        endpoint: &mut ZeroCopyEndpoint,
        votes: &[u64; COMPLETION_WORDS],
        stage_out: impl FnMut(&StageOut),
    ) {
        endpoint.land_late_answers(votes, stage_out);
    }

    /// End the group: take in nothing more. Write results that were published and perhaps not delivered to where the
    /// device may have written part of them; `write` returns false for unknown memory. Returns the number of chunks
    /// written.
    pub fn recover(&self, endpoint: &mut ZeroCopyEndpoint, write: impl FnMut(Address, &[u8]) -> bool) -> usize {
        endpoint.close();
        endpoint.recover(|seq, result| self.redo.published(self.view, seq, result), write)
    }

    /// Then write what came through the bounce buffer, too.
    pub fn land(&self, endpoint: &mut ZeroCopyEndpoint, buffers: &mut impl Buffers) {
        endpoint.land_published(|seq, result| self.redo.published(self.view, seq, result), buffers);
    }
}

/// A rank's side of a lost tree: it takes in nothing more, and nothing writes to its buffers any more.
#[derive(Debug, Clone, Copy)]
pub enum TreeSource<'r> {
    /// Its endpoint is [frozen](Endpoint::freeze).
    Packets(&'r Endpoint),
    /// The results that the device had published were [copied](RedoSlots::land).
    References(&'r ZeroCopyEndpoint, &'r RedoSlots),
}

impl<'r> From<&'r Endpoint> for TreeSource<'r> {
    fn from(endpoint: &'r Endpoint) -> Self {
        Self::Packets(endpoint)
    }
}

impl TreeSource<'_> {
    /// Return the first operation that ends after chunk `cut`, or the next one to be posted.
    pub fn first_behind(&self, cut: u64) -> OpId {
        let ops = self.ops();
        ops.in_flight().find(|op| op.end() > cut).map_or(ops.next_id(), |op| op.id)
    }

    /// Return whether the answer to a chunk has arrived.
    pub fn has(&self, seq: u64) -> bool {
        self.is_answered(seq)
    }

    /// Return whether the rank's memory of an operation in flight is unknown.
    pub fn is_in_doubt(&self, op: OpId) -> bool {
        super::super::is_unknown(self, op)
    }

    /// Return the number of chunks of an operation in the tree.
    pub fn chunks(&self, desc: &OpDesc) -> u64 {
        self.ops().chunks(desc)
    }
}

impl RecoverySource for TreeSource<'_> {
    fn ops(&self) -> &Ops {
        match self {
            Self::Packets(endpoint) => RecoverySource::ops(*endpoint),
            Self::References(endpoint, _) => endpoint.ops(),
        }
    }

    fn is_answered(&self, seq: u64) -> bool {
        match self {
            Self::Packets(endpoint) => endpoint.is_answered(seq),
            Self::References(endpoint, _) => endpoint.has_landed(seq),
        }
    }

    fn published(&self, seq: u64, result: &mut [u8]) -> bool {
        match self {
            Self::Packets(endpoint) => endpoint.published(seq, result),
            Self::References(_, redo) => redo.redo.published(redo.view, seq, result),
        }
    }

    fn is_unknown(&self, seq: u64) -> bool {
        matches!(self, Self::References(endpoint, _) if endpoint.is_unknown(seq))
    }
}
