//! Zero-copy transport: a rank submits addresses, and the DMA engine of its leaf device fetches, reduces and delivers
//! the data (PROTOCOL 5 to 7).
//!
//! The packet transport costs a rank two copies and a checksum of every byte. Where rank and leaf share memory, the
//! rank submits 64-byte descriptors instead, one for up to 16 chunks:
//!
//! ```text
//!   Communicator::alloc -> Buffer ------- registered (admin queue) ------> the device's engine
//!   post -> ZeroCopyEndpoint -> runs of chunks -> submission ring -----------> pulls, reduces
//!   events <-       "         <- answers        <- completion ring <--- writes back, publishes
//!                   ^
//!   other memory ---'  through a bounce buffer, copied in ahead and out as answers come
//! ```
//!
//! | file | what |
//! |---|---|
//! | `endpoint` | sans-I/O state machine: which run to submit next, how to apply an answer |
//! | `bounce` | ring allocator of the bounce buffer, for memory that is not registered |
//! | `attach` | handshake with the device |
//! | `queue` | host side of a queue pair of the function, admin commands, wake-ups |
//! | `arena` | allocation of registered memory |
//! | `memory` | registered memory: [`Buffer`], and the lookup of a slice in it |
//! | `redo` | read access to the results that the device has published |
//! | `heartbeat` | detection of a device whose runtime has stopped |
//! | `remote` | leaf device on another host, over RDMA ([`sumac_hal::remote`]) |
//! | `driver` | combines all of the above, as [`TreeDriver`](crate::transport::packets::TreeDriver) does for packets |
//! | `wait` | sleeping until the device has made progress |
//! | `retire` | end of a group: fencing the device and salvaging published results |
//!
//! Invariants:
//! - Nothing that the device writes is trusted. Each answer must name chunks that were submitted and not yet answered;
//!   anything else ends the group with a [`ProtocolViolation`].
//! - Memory of an operation belongs to the device until its chunks are answered. No call returns an error while the
//!   device could still write to the caller's memory: the group is fenced first, by the device itself, by the end of
//!   its process, or by revoking the memory.
//! - After an error each chunk of the caller's buffer is wholly old or wholly new. Results that the device had
//!   published are copied from its redo slots; of unpublished ones it has not touched any destination. Only a device
//!   that keeps running while its memory is revoked can leave chunks whose contents are unknown, and the error says so.
//! - The device writes only to pages that hold nothing but the output of an operation in flight. Such pages can be
//!   revoked while other threads of this process write to the rest of the memory.
//! - Registered memory stays mapped until the device has released it and its [`Buffer`] is dropped.

mod arena;
mod attach;
mod bounce;
mod driver;
mod endpoint;
mod error;
mod heartbeat;
mod queue;
mod redo;
mod registered;
mod remote;
mod retire;
#[cfg(test)]
mod tests;
mod wait;

pub use attach::{AttachParams, Remote};
pub use driver::ZeroCopyDriver;
pub use endpoint::{BounceConfig, Places, Run, StageIn, StageOut, ZeroCopyConfig, ZeroCopyEndpoint};
pub use error::{AttachError, ProtocolViolation, RegisterError};
pub use queue::Waker;
#[cfg(feature = "snapshot")]
pub(crate) use redo::{ReadAt, Redo};
pub use registered::Buffer;

/// How the payload of an operation moved between this rank and its leaf device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Transfer {
    /// Inline, in packets.
    Packets,
    /// Zero-copy: the device's engine read and wrote the caller's registered memory ([`Buffer`]) directly. Results on
    /// pages that hold other memory too are still copied: a chunk at either end, or all of an output that is shorter
    /// than a page. Operations without payload count as zero-copy.
    ZeroCopy,
    /// At least in part through a bounce buffer: the caller's memory is not registered, or all of the output lies on
    /// pages that hold other memory too.
    Bounced,
}

impl Transfer {
    /// The old name of [`ZeroCopy`](Self::ZeroCopy).
    #[deprecated(since = "0.2.0", note = "renamed to `ZeroCopy`")]
    #[allow(non_upper_case_globals, reason = "it stands for a variant")]
    pub const Registered: Self = Self::ZeroCopy;

    /// Return the name as printed in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Packets => "packets",
            Self::ZeroCopy => "zero-copy",
            Self::Bounced => "bounced",
        }
    }
}
