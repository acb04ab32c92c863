//! What can go wrong between a rank and a device that share memory.

use std::time::Duration;
use sumac_hal::dma::RegionKey;
use sumac_hal::ids::ChunkNo;
use sumac_hal::mmio::{EntryError, EntryStatus, Features};
use sumac_hal::ring::Poisoned;
use sumac_hal::shm::{AttachRefusal, DeviceUserError, FunctionError, MemoryError, SocketError};
use thiserror::Error;

/// How a device broke the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum Breach {
    /// It moved a ring's index to where it can't be.
    #[error(transparent)]
    Ring(#[from] Poisoned),
    /// What it put into a ring is no entry.
    #[error("a completion is none: {0}")]
    Entry(#[from] EntryError),
    /// It answered what was not submitted, or a second time.
    #[error("an answer to {count} chunks from {first} on, which are not all submitted and open")]
    Unasked {
        /// The first chunk.
        first: ChunkNo,
        /// How many.
        count: u16,
    },
    /// It answered for another group, or another epoch.
    #[error("an answer for another group or epoch")]
    Stranger,
    /// It says that nobody wants a result that this rank wants.
    #[error("{chunk} is answered without the result that this rank wants")]
    NoResult {
        /// The chunk.
        chunk: ChunkNo,
    },
    /// It said that operations differ or are not supported, or that ranks are missing, and not which.
    #[error("{status:?} at {chunk}, without the operations or ranks that it speaks of")]
    Unnamed {
        /// What it said.
        status: EntryStatus,
        /// The chunk.
        chunk: ChunkNo,
    },
    /// It told of a decision to go on without ranks that can't be the next one, or of half of it.
    #[error(
        "decision {decision}, to go on without ranks from {first} on, is not the next, not whole, or without ranks"
    )]
    Undecided {
        /// Its number.
        decision: u16,
        /// The first chunk that they have no part in.
        first: ChunkNo,
    },
    /// An entry is on a queue where it does not belong, or answers no command of this rank.
    #[error("a completion on queue {queue} that belongs to nothing there")]
    Misplaced {
        /// The queue.
        queue: u32,
    },
    /// It gave memory the key of other memory that it has not let go of.
    #[error("{region:?} is the key of memory that is registered already")]
    SameRegion {
        /// The key.
        region: RegionKey,
    },
    /// It sent a message, where nothing is to be said any more.
    #[error("a message on the connection after attaching")]
    Message,
}

/// Why a rank can't attach to its leaf device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The device would not.
    #[error("it refuses: {0}")]
    Refused(AttachRefusal),
    /// The connection.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// Whose devices this rank lets in is not told in order.
    #[error(transparent)]
    Users(#[from] DeviceUserError),
    /// Its function.
    #[error("its function: {0}")]
    Function(#[from] FunctionError),
    /// Memory, its own or this rank's.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// It lacks what contributions by reference need.
    #[error("it has {has:?}, and {needs:?} is needed")]
    Features {
        /// What it has.
        has: Features,
        /// What it must have.
        needs: Features,
    },
    /// The engine of a device on another host asks for an alignment that memory does not have.
    #[error("its engine asks for addresses at multiples of {found} bytes, where at most {max} are to be had")]
    Alignment {
        /// What it asks for.
        found: u32,
        /// The most that memory has.
        max: u32,
    },
    /// It has more shards than one.
    #[error("it has {0} queues, and this version uses 2: admin and data of one shard")]
    Queues(u32),
    /// It said something else than was its turn to say.
    #[error("it said {0} where {1} was expected")]
    Order(&'static str, &'static str),
    /// Its redo slots can't hold a chunk.
    #[error("{slots} redo slots of {slot_len_bytes} bytes, where a chunk needs {needs} bytes")]
    Redo {
        /// How many.
        slots: u32,
        /// How long each is.
        slot_len_bytes: u32,
        /// How long one has to be.
        needs: u32,
    },
    /// Its redo slots are not where it says.
    #[error(
        "{slots} redo slots of {slot_len_bytes} bytes from {offset_bytes} on reach beyond the memory that it gave for them"
    )]
    RedoMemory {
        /// How many.
        slots: u32,
        /// How long each is.
        slot_len_bytes: u32,
        /// Where they begin.
        offset_bytes: u64,
    },
    /// A device on another host can't be reached by RDMA.
    #[error("by RDMA: {0}")]
    Remote(String),
    /// The bounce buffer.
    #[error("the bounce buffer of {len_bytes} bytes: {reason}")]
    Bounce {
        /// Its length.
        len_bytes: u64,
        /// Why it was not registered.
        reason: RegisterError,
    },
}

/// Why memory was not registered with a device.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The system gives none.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// It could not be handed over.
    #[error("handing it over: {0}")]
    Socket(String),
    /// The device would not.
    #[error("the device refuses: {0:?}")]
    Refused(EntryStatus),
    /// The device did not answer.
    #[error("the device has not answered within {} ms", .0.as_millis())]
    Silent(Duration),
    /// The device is gone, or its runtime stands still.
    #[error("the device is gone, or stands still")]
    Gone,
    /// The device makes no sense.
    #[error("the device has broken the protocol: {0}")]
    Broken(#[from] Breach),
}
