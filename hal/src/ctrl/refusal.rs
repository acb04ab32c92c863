//! Why a device refuses a request. The messages name what was requested, the limit and what to do.

use crate::ids::{GroupId, TreeId};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a device refused a request. A refused request changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The group already exists.
    #[error("{0} already exists; release it first")]
    GroupExists(GroupId),
    /// No such group.
    #[error("{0} does not exist on this device: it was released, its lease expired, or the device restarted")]
    NoGroup(GroupId),
    /// No such tree.
    #[error("{0} is not installed on this device")]
    NoTree(TreeId),
    /// A group uses the tree.
    #[error("{0} is in use by a group")]
    TreeInUse(TreeId),
    /// Too many trees or groups.
    #[error("all {limit} group entries are in use; release a group")]
    NoEntry {
        /// The number of entries on this device.
        limit: u16,
    },
    /// The tree's child count is out of range.
    #[error("{children} children; this device supports 1 to {limit}")]
    Children {
        /// Requested.
        children: u16,
        /// The maximum.
        limit: u16,
    },
    /// Not enough contiguous child entries are free.
    #[error("not enough free child entries: the group needs {need} contiguous ones")]
    NoChildren {
        /// The number required.
        need: u32,
    },
    /// Not enough contiguous slots are free.
    #[error("not enough free slots: the group needs {need} contiguous ones per shard")]
    NoSlots {
        /// The number required, per shard.
        need: u32,
    },
    /// Not enough contiguous slot memory is free.
    #[error("not enough free slot memory: the group needs {need} contiguous bytes per shard")]
    NoMemory {
        /// The number required, per shard.
        need: u64,
    },
    /// `window_max` violates `1 <= window_max <= slots / 2` or the protocol's limit.
    #[error("window of {window} chunks with {slots} slots; the window must be 1 to 256 and at most half the slots")]
    Window {
        /// Requested.
        window: u16,
        /// Requested.
        slots: u16,
    },
    /// The chunk does not fit the device's packets, or no element fits the chunk.
    #[error("chunk of {chunk_len_bytes} bytes; this device supports 64 to {limit}, in multiples of 16")]
    Chunk {
        /// Requested.
        chunk_len_bytes: u16,
        /// The maximum.
        limit: u32,
    },
    /// The parent has a different number of shards, and this device is not undivided or lacks room for a hop to each.
    #[error(
        "the parent has {parent} shards and this device {own}; the numbers must be equal, or this device have one, and \
         room for a hop to each of the parent's"
    )]
    Shards {
        /// Shards of the parent: the number of its addresses.
        parent: u16,
        /// Shards of this device.
        own: u16,
    },
    /// The device cannot serve zero-copy children.
    #[error("the device cannot serve zero-copy ranks: {0}")]
    NoZeroCopy(ZeroCopyRefusal),
    /// Not enough contiguous memory is free for redo slots.
    #[error("not enough free memory for redo slots: the group needs {need} contiguous bytes")]
    NoRedoMemory {
        /// The number required.
        need: u64,
    },
    /// This version does not know the request.
    #[error("unknown request: the device runs another version")]
    Unknown,
    /// A controller of a higher term has taken over.
    #[error("this device has served a controller of term {seen}, so it refuses those of lower terms")]
    OldTerm {
        /// The highest term that the device has seen.
        seen: u64,
    },
    /// The term is invalid.
    #[error("term {term} is out of range")]
    Term {
        /// The claimed term.
        term: u64,
    },
}

/// Why a device cannot serve a group's zero-copy children.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum ZeroCopyRefusal {
    /// The board has no attach point.
    #[error("zero-copy is not enabled on it")]
    Unsupported,
    /// The DMA engine's limits on chains, steps or alignment rule out the group's chunks.
    #[error("its DMA engine does not support the group's chunk size or number of children")]
    Engine,
    /// The engine has no free entry for another group.
    #[error("all groups that its DMA engine can distinguish are in use")]
    Groups,
}
