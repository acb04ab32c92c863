//! What is left of a tree at a rank, by packets or by reference; and the end of a group by reference step by step, as
//! `ReferenceDriver` goes through it, for a caller that has rings and memory of its own.

use super::super::Remains;
use crate::transport::memory::{Drain, ReadAt, Redo, ReferenceEndpoint};
use crate::transport::packets::{Buffers, Endpoint, OpId, Ops};
use std::fmt;
use sumac_hal::dma::Address;
use sumac_hal::ids::{Epoch, GroupId};
use sumac_hal::mmio::COMPLETION_WORDS;
use sumac_hal::op::OpDesc;

/// Copies bytes out of the redo memory, from an offset on; false if there are not as many.
pub type ReadRedo = Box<dyn Fn(u64, &mut [u8]) -> bool>;

impl ReadAt for ReadRedo {
    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> bool {
        self(offset_bytes, bytes)
    }
}

/// Where the redo slots of a group are: all that a rank is told when it attaches.
#[derive(Debug, Clone, Copy)]
pub struct RedoPlace {
    /// The group.
    pub group: GroupId,
    /// Its epoch.
    pub epoch: Epoch,
    /// Where the first one begins.
    pub offset_bytes: u64,
    /// How long each is.
    pub slot_len_bytes: u64,
    /// How many there are.
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
    /// Look at redo slots through `memory`.
    pub fn new(place: RedoPlace, memory: ReadRedo) -> Self {
        let RedoPlace { group, epoch, offset_bytes, slot_len_bytes, slots, chunk_len_bytes } = place;
        let frozen = None;
        Self {
            redo: Redo { memory, offset_bytes, slot_len_bytes, slots, chunk_len_bytes, frozen },
            view: (group, epoch),
        }
    }

    /// Keep of the operations that are complete now what others may lack: after answers were taken in.
    pub fn keep(&self, endpoint: &mut ReferenceEndpoint, buffers: &mut impl Buffers) {
        endpoint.keep(|seq| self.redo.is_published(self.view, seq), buffers);
    }

    /// Take in again what the device has answered: it is fenced, and what is in the ring is looked at once more; what is
    /// published was looked at.
    pub fn reopen(&mut self, endpoint: &mut ReferenceEndpoint) {
        self.redo.freeze(self.view, endpoint.looked_up());
        endpoint.reopen();
    }

    /// Take in, after [`RedoSlots::recover`], what the device has answered while memory was taken away from it.
    pub fn doubt(&self, endpoint: &mut ReferenceEndpoint, words: &[u64; COMPLETION_WORDS]) {
        endpoint.doubt(words);
    }

    /// Then, after [`RedoSlots::land`], land what such an answer says to be in the bounce buffer; `drain` copies it.
    pub fn land_late(
        &self,
        endpoint: &mut ReferenceEndpoint,
        words: &[u64; COMPLETION_WORDS],
        drain: impl FnMut(&Drain),
    ) {
        endpoint.land_late(words, drain);
    }

    /// End the group: nothing is taken in any more. Write what was published and perhaps not delivered to where the
    /// device may have written a part of it; `write` returns false for memory that it does not know. Returns how many
    /// chunks were written.
    pub fn recover(&self, endpoint: &mut ReferenceEndpoint, write: impl FnMut(Address, &[u8]) -> bool) -> usize {
        endpoint.close();
        endpoint.recover(|seq, result| self.redo.published(self.view, seq, result), write)
    }

    /// Then land what came by way of the bounce buffer, too.
    pub fn land(&self, endpoint: &mut ReferenceEndpoint, buffers: &mut impl Buffers) {
        endpoint.land_published(|seq, result| self.redo.published(self.view, seq, result), buffers);
    }
}

/// What is left of a tree at a rank: it takes in nothing more, and nobody writes to its buffers any more.
#[derive(Debug, Clone, Copy)]
pub enum Left<'r> {
    /// Its endpoint is [frozen](Endpoint::freeze).
    Packets(&'r Endpoint),
    /// What the device had published was [salvaged](RedoSlots::land).
    References(&'r ReferenceEndpoint, &'r RedoSlots),
}

impl<'r> From<&'r Endpoint> for Left<'r> {
    fn from(endpoint: &'r Endpoint) -> Self {
        Self::Packets(endpoint)
    }
}

impl Left<'_> {
    /// Return the first operation that ends behind chunk `cut`, or the one that is posted next.
    pub fn first_behind(&self, cut: u64) -> OpId {
        let ops = self.ops();
        ops.in_flight().find(|op| op.end() > cut).map_or(ops.next_id(), |op| op.id)
    }

    /// Tell whether the answer to a chunk is here.
    pub fn has(&self, seq: u64) -> bool {
        self.is_answered(seq)
    }

    /// Tell whether nobody knows what the rank's memory holds of an operation in flight.
    pub fn is_in_doubt(&self, op: OpId) -> bool {
        super::super::is_unknown(self, op)
    }

    /// Return how many chunks an operation has that goes through the tree.
    pub fn chunks(&self, desc: &OpDesc) -> u64 {
        self.ops().chunks(desc)
    }
}

impl Remains for Left<'_> {
    fn ops(&self) -> &Ops {
        match self {
            Self::Packets(endpoint) => Remains::ops(*endpoint),
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
