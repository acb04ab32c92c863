//! Errors between a rank and the device that reads and writes its memory.

use std::time::Duration;
use sumac_hal::dma::RegionKey;
use sumac_hal::ids::ChunkNo;
use sumac_hal::mmio::{EntryError, EntryStatus, Features};
use sumac_hal::ring::Poisoned;
use sumac_hal::shm::{AttachRefusal, DeviceUserError, FunctionError, MemoryError, SocketError};
use thiserror::Error;

/// How a device violated the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum ProtocolViolation {
    /// A ring index is out of range.
    #[error(transparent)]
    Ring(#[from] Poisoned),
    /// Malformed entry.
    #[error("malformed completion: {0}")]
    Entry(#[from] EntryError),
    /// It answered chunks that were not submitted, or were answered before.
    #[error("unsolicited answer to {count} chunks from {first} on: not all of them are submitted and open")]
    Unsolicited {
        /// The first chunk.
        first: ChunkNo,
        /// How many.
        count: u16,
    },
    /// It answered for another group or epoch.
    #[error("answer for another group or epoch")]
    WrongGroup,
    /// It completed a chunk without the result that this rank requires.
    #[error("{chunk} was completed without the result that this rank requires")]
    NoResult {
        /// The chunk.
        chunk: ChunkNo,
    },
    /// It reported mismatched or unsupported operations, or missing ranks, without naming them.
    #[error("{status:?} at {chunk} without the operations or ranks concerned")]
    MissingDetails {
        /// The reported status.
        status: EntryStatus,
        /// The chunk.
        chunk: ChunkNo,
    },
    /// It announced a decision to exclude ranks that is out of order, incomplete or empty.
    #[error("decision {decision} to exclude ranks from {first} on is out of order, incomplete or empty")]
    InvalidDecision {
        /// The number of the decision.
        decision: u16,
        /// The first chunk without these ranks.
        first: ChunkNo,
    },
    /// An entry on the wrong queue, or a reply to no open command.
    #[error("unexpected completion on queue {queue}")]
    UnexpectedEntry {
        /// The queue.
        queue: u32,
    },
    /// It registered memory under the key of other memory that is still registered.
    #[error("key {region:?} is already in use by other memory")]
    DuplicateRegion {
        /// The key.
        region: RegionKey,
    },
    /// It sent a message on the connection after attaching.
    #[error("unexpected message on the connection after attaching")]
    UnexpectedMessage,
}

/// Why a rank could not attach to its leaf device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The device refused.
    #[error("attach refused: {0}")]
    Refused(AttachRefusal),
    /// The connection failed.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The list of users whose devices this rank accepts is malformed.
    #[error(transparent)]
    Users(#[from] DeviceUserError),
    /// The device's function is invalid.
    #[error("invalid function: {0}")]
    Function(#[from] FunctionError),
    /// Memory of the device or of this rank could not be mapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// It lacks features that the zero-copy transport requires.
    #[error("the device offers {has:?}, but zero-copy requires {needs:?}")]
    Features {
        /// The features that it offers.
        has: Features,
        /// The features required.
        needs: Features,
    },
    /// The engine of a device on another host requires a larger alignment than memory here has.
    #[error("its engine requires addresses aligned to {found} bytes; at most {max} are supported")]
    Alignment {
        /// The required alignment in bytes.
        found: u32,
        /// The maximum supported.
        max: u32,
    },
    /// It has more than one shard.
    #[error("the device has {0} queues; this version supports 2 (admin and data of one shard)")]
    Queues(u32),
    /// It sent another message than the one due.
    #[error("the device sent {0}, expected {1}")]
    UnexpectedMessage(&'static str, &'static str),
    /// Its redo slots are too short for a chunk.
    #[error("{slots} redo slots of {slot_len_bytes} bytes; a chunk needs {needs} bytes")]
    Redo {
        /// How many.
        slots: u32,
        /// The length of each in bytes.
        slot_len_bytes: u32,
        /// The length required in bytes.
        needs: u32,
    },
    /// Its redo slots lie outside the memory that it provided.
    #[error(
        "{slots} redo slots of {slot_len_bytes} bytes from offset {offset_bytes} exceed the memory provided for them"
    )]
    RedoMemory {
        /// How many.
        slots: u32,
        /// The length of each in bytes.
        slot_len_bytes: u32,
        /// The offset of the first.
        offset_bytes: u64,
    },
    /// A device on another host could not be reached by RDMA.
    #[error("RDMA: {0}")]
    Remote(String),
    /// The bounce buffer could not be set up.
    #[error("cannot set up a bounce buffer of {len_bytes} bytes: {reason}")]
    Bounce {
        /// Its length in bytes.
        len_bytes: u64,
        /// The reason.
        reason: RegisterError,
    },
}

/// Why memory could not be registered with a device.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The system could not allocate or map it.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// It could not be passed to the device.
    #[error("cannot pass memory to the device: {0}")]
    Socket(String),
    /// The device refused.
    #[error("the device refused registration: {0:?}")]
    Refused(EntryStatus),
    /// The device did not reply in time.
    #[error("the device did not reply within {} ms", .0.as_millis())]
    Timeout(Duration),
    /// The device disconnected, or its runtime has stopped.
    #[error("the device disconnected or has stopped")]
    DeviceLost,
    /// The device violated the protocol.
    #[error("protocol violation by the device: {0}")]
    Protocol(#[from] ProtocolViolation),
}
