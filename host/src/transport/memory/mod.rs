//! Contributions by reference: a rank says where its data is, and its leaf device's DMA engine fetches, reduces and
//! delivers it (PROTOCOL 5 to 7).
//!
//! Packets cost a rank two copies and a checksum of every byte. Where rank and leaf share memory, the rank only names
//! places, 64 bytes for up to 16 chunks:
//!
//! ```text
//!   Communicator::alloc -> Buffer ------- registered (admin queue) ------> the device's engine
//!   post -> ReferenceEndpoint -> runs of chunks -> submission ring -----------> pulls, reduces
//!   events <-       "         <- answers        <- completion ring <--- writes back, publishes
//!                   ^
//!   other memory ---'  through a bounce buffer, copied in ahead and out as answers come
//! ```
//!
//! | file | what |
//! |---|---|
//! | `endpoint` | the state machine, sans I/O: which run is next, what an answer means |
//! | `bounce` | where chunks of other memory lie in the bounce buffer |
//! | `attach` | the handshake with the device |
//! | `queue` | both ends of a queue of the function, and who wakes whom |
//! | `arena` | where memory comes from |
//! | `memory` | registered memory: [`Buffer`], and where a slice lies in it |
//! | `redo` | what the device has published, as this rank reads it |
//! | `pulse` | whether the device's runtime goes on |
//! | `far` | a device on another host: messages, and memory opened to it ([`sumac_hal::remote`]) |
//! | `driver` | all of it together, as [`TreeDriver`](crate::transport::packets::TreeDriver) is for packets |
//! | `wait` | sleeping until the device has something |
//! | `retire` | the fence, and what is left when the device is gone |
//!
//! Invariants:
//! - Nothing that the device writes is believed: each answer has to name chunks that were submitted and not yet
//!   answered; what does not ends the group with a named error ([`Breach`]).
//! - Memory that an operation was given is the device's until its chunk is answered. No call returns an error while
//!   the device could still write to the caller's memory: the group is fenced first, by the device itself, by the
//!   end of its process, or by taking the memory away from it.
//! - After an error each chunk of the caller's buffer is wholly old or wholly new: what the device had published is
//!   copied from its redo slot, and of what it had not it has touched no destination. Only of a device that goes on while
//!   its memory is taken away there may be chunks of which that is not known; then the error says so.
//! - The device writes to pages that hold nothing but the output of an operation in flight: those can be taken away from it
//!   beside threads of this process that write to anything else.
//! - Registered memory stays mapped until the device has let go of it and its [`Buffer`] is dropped.

mod arena;
mod attach;
mod bounce;
mod driver;
mod endpoint;
mod error;
mod far;
mod memory;
mod pulse;
mod queue;
mod redo;
mod retire;
#[cfg(test)]
mod tests;
mod wait;

pub use attach::{Remote, Seating};
pub use driver::ReferenceDriver;
pub use endpoint::{BounceConfig, Drain, Fill, Places, ReferenceConfig, ReferenceEndpoint, Run};
pub use error::{AttachError, Breach, RegisterError};
pub use memory::Buffer;
pub use queue::Waker;
#[cfg(feature = "snapshot")]
pub(crate) use redo::{ReadAt, Redo};

/// The way that an operation's bytes took between this rank and its leaf device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Transfer {
    /// In packets.
    Packets,
    /// By the device's engine, straight from and to the caller's registered memory ([`Buffer`]), but for results on pages
    /// that hold other memory too, a chunk at either end, or more if they are shorter than a page; or there were none.
    Registered,
    /// By the device's engine, at least in part through a bounce buffer: the caller's memory is not registered, or all of
    /// the output lies on pages that hold other memory too.
    Bounced,
}

impl Transfer {
    /// Return the name, as tables print it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Packets => "packets",
            Self::Registered => "registered",
            Self::Bounced => "bounced",
        }
    }
}
