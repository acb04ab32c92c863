//! A function on another host: ring entries travel as messages over a reliable connection, and the device moves the
//! data itself with RDMA READ and WRITE.
//!
//! ```text
//!   rank                                                             device
//!   endpoint -> rings --\                                    /--> rings -> function, node
//!                        Carrier == messages over a Link == Carrier
//!            <- rings <-/                                    \<-- rings <-
//!   memory <============ READ contributions, WRITE results ============ engine
//! ```
//!
//! Both sides have the rings of an ordinary function ([`mmio`](crate::mmio)) in their own memory, so rank and device
//! run the same code as over shared memory; on each side a [`Carrier`] stands in for the remote one. Messages travel
//! over a [`Link`]: a queue pair (`verbs`), or two queues of one process (`Exchange`, feature `double`), with which
//! everything but the hardware is tested on any machine.
//!
//! | file | what |
//! |---|---|
//! | `carrier` | ring entries to messages and back, with credits |
//! | `message` | the message format |
//! | `handshake` | connection set-up over TCP, authenticated by the child's key |
//! | `region` | a peer's memory: address, length, key |
//! | `exchange` | an in-process link for tests |
//!
//! # A device whose memory ranks cannot read (PROTOCOL 4 to 8)
//!
//! Over shared memory a result is published in a *redo slot*, which ranks can still read after the device has died. The
//! device may therefore overwrite inputs with results, and may count a result as delivered once it has answered. Over a
//! network the redo slots are lost with the device, and so is an answer in flight. Three rules replace them:
//!
//! 1. *The device never writes to a caller's memory.* Results are written to a *landing area* of the rank, and the rank
//!    copies them out when it takes the answer. A caller's memory is registered for remote reads only, which the
//!    hardware enforces. An input therefore stays intact until its own rank has the whole result (PROTOCOL 7:
//!    "unpublished: inputs are intact"), and a torn write affects nothing that anybody reads.
//! 2. *A result is announced by the operation that writes it*: an RDMA WRITE to the landing area carries its offset as
//!    immediate data, which the hardware queues at the rank once all bytes have arrived, and before the device sees the
//!    completion. The device counts a result as delivered ([`have`](crate#zero-copy)) on that completion, which means
//!    that the rank's card has accepted it, not that it is in memory: the rank's fence waits until it is. Whatever the
//!    device reports as stable is thus, after the fence, in the memory of every rank and announced there, even if the
//!    answer is lost with the device: `k < stable` => every rank that runs can provide result k. After the device has
//!    ended, a rank looks its open chunks up among the announcements, which replace the records in redo slots.
//! 3. *A rank keeps a returned result until it is stable*, as ranks that use packets do (PROTOCOL 5), because no redo
//!    slot does.
//!
//! For each chunk, recovery needs a holder of the result or all inputs. A chunk that has landed or was announced at
//! some survivor has a holder. For any other chunk, `have` of no survivor is past it, so it is not stable and was never
//! reported as stable; each survivor's input is either untouched in the caller's memory (rule 1) or, if the operation
//! has returned, kept (rule 3). Neither depends on the device's last actions. An announcement always refers to the
//! chunk that is open at that offset: an offset is reused only after the rank has taken the answer, and taking the
//! answer consumes the announcement.
//!
//! # The fence (PROTOCOL 6)
//!
//! A rank first asks the device to release its memory, as over shared memory. A device that does not answer is fenced
//! here: the queue pair is moved to the error state; the rank waits for the hardware's report that all that the device
//! had begun has taken effect, or destroys the queue pair, which includes that; and the memory is deregistered, so that
//! no key opens it through any connection. If memory cannot be deregistered, the fence has failed. A device does the
//! same to a rank that has gone. Both happen before any result is salvaged.
//!
//! # Detection of a dead peer
//!
//! A dead peer is detected in bounded time, by one of: a SEND, READ or WRITE that is not acknowledged
//! ([`LinkError::PeerGone`]); the end of the TCP connection of the set-up, which stays open for this purpose; a stalled
//! heartbeat, the counter of the peer's turns that every message carries.

mod carrier;
#[cfg(feature = "double")]
mod exchange;
pub mod handshake;
mod message;
mod region;
#[cfg(test)]
mod tests;

pub use carrier::{BUFFERS, CREDITS, Carrier, CarrierError, CarrierEvent, CarrierStats, Outbox};
#[cfg(all(feature = "double", feature = "emu"))]
pub use exchange::ExchangeDevice;
#[cfg(feature = "double")]
pub use exchange::{Exchange, ExchangeLink};
pub use message::{MESSAGE_LEN_BYTES, Memory, MessageError};
#[cfg(feature = "verbs")]
pub(crate) use region::check_range;
pub use region::{RegionError, RemoteRegion};

use crate::shm::Region;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::string::String;
use thiserror::Error;

/// Why a connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The peer's hardware refused the access: a range outside the region, or a key that was revoked or belongs to
    /// another domain. The kernel revokes the keys of a process that is killed before it ends its connections: if the
    /// peer's process ends as well, it is gone.
    #[error(
        "the peer's hardware refused access to its memory: its process is being killed, or range or key is not valid"
    )]
    RemoteAccess,
    /// The peer does not respond.
    #[error("the peer does not respond")]
    PeerGone,
    /// The connection was fenced on this side.
    #[error("the connection was fenced on this side")]
    Fenced,
    /// This side's device has failed, was reset, or has lost its driver.
    #[error("this host's RDMA device has failed, was reset, or has lost its driver")]
    DeviceFailed,
    /// Any other status.
    #[error("the RDMA device reported completion status {status} (enum ibv_wc_status), vendor error {vendor:#x}")]
    Status {
        /// Its number in `enum ibv_wc_status`, or the system's error if the operation could not be posted.
        status: u32,
        /// The vendor's error, for its support.
        vendor: u32,
    },
}

/// The address of one end of a connection, opaque to all but the implementation of the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkEnd(pub [u8; LINK_END_LEN_BYTES]);

/// The length of a [`LinkEnd`] in bytes.
pub const LINK_END_LEN_BYTES: usize = 28;

/// What a link has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrived {
    /// A message of this many bytes.
    Message(usize),
    /// The peer has written a whole result at this offset of the landing area.
    Landed(u32),
}

/// One end of a reliable connection, which delivers each message once and in order.
pub trait Link {
    /// Send a message of at most [`MESSAGE_LEN_BYTES`]. Returns false, and sends nothing, if there is no room now.
    ///
    /// # Errors
    /// [`LinkError`] if the connection has ended.
    fn send(&mut self, message: &[u8]) -> Result<bool, LinkError>;

    /// Take the next arrival. After the connection has ended, this still returns what arrived before.
    ///
    /// # Errors
    /// [`LinkError`] if the connection has ended and no arrival is left.
    fn receive(&mut self, into: &mut [u8; MESSAGE_LEN_BYTES]) -> Result<Option<Arrived>, LinkError>;
}

/// The access that a peer gets to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read: a caller's buffer.
    Read,
    /// Read and write: the landing area.
    Land,
}

/// Why a link could not be created, or memory not exposed. The text says what to do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct LinkFailure(pub String);

/// The rank's end of a link.
pub trait RankLink: Link + Send + fmt::Debug {
    /// Return the address of this end, for the device.
    fn end(&self) -> LinkEnd;

    /// Connect to the device's end.
    ///
    /// # Errors
    /// [`LinkFailure`]
    fn connect(&mut self, device: &LinkEnd) -> Result<(), LinkFailure>;

    /// Let the device access memory until it is withdrawn; the link keeps a mapping of it.
    ///
    /// # Errors
    /// [`LinkFailure`]
    fn expose(&mut self, memory: Region, access: Access) -> Result<RemoteRegion, LinkFailure>;

    /// Withdraw memory from the device, by its remote key. Hardware uses keys again, though not soon: a device that
    /// goes on using this one may some day access other memory of this rank.
    fn withdraw(&mut self, rkey: u32);

    /// End the connection. Afterwards no operation that the device has begun takes effect here (PROTOCOL 6), and no key
    /// that it was given is valid. Earlier arrivals can still be taken.
    ///
    /// # Errors
    /// [`LinkFailure`]: the landing area must not be read.
    fn fence(&mut self) -> Result<(), LinkFailure>;

    /// Let [`RankLink::file`] become readable on the next arrival. Poll once more after this call.
    fn arm(&mut self);

    /// Return the descriptor that becomes readable.
    fn file(&self) -> BorrowedFd<'_>;
}
