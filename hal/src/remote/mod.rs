//! A function on another host: what a rank's rings carry goes as messages over a reliable connection, and the data goes by
//! itself, pulled and pushed by the device (RDMA READ and WRITE).
//!
//! ```text
//!   rank                                                             device
//!   endpoint -> rings --\                                    /--> rings -> function, node
//!                        Carrier == messages over a Link == Carrier
//!            <- rings <-/                                    \<-- rings <-
//!   memory <============ READ contributions, WRITE results ============ engine
//! ```
//!
//! Both sides have an ordinary function's rings ([`mmio`](crate::mmio)) in memory of their own, so that rank and device run the
//! same code as over shared memory; a [`Carrier`] at each side plays the one who is not there. What carries messages is a
//! [`Link`]: a queue pair (`verbs`), or two queues of one process (`Exchange`, with the feature `double`), by which all but the
//! hardware is tested on any machine.
//!
//! | file | what |
//! |---|---|
//! | `carrier` | rings to messages and back, with credits |
//! | `message` | every byte of a message |
//! | `handshake` | who may connect: the set-up over TCP, proven by the child's key |
//! | `region` | memory of the other side |
//! | `exchange` | the double of a link |
//!
//! # A device whose memory nobody can read (PROTOCOL 4 to 8)
//!
//! Over shared memory a result is published in a *redo slot*, which ranks read after the device's death; so the device may
//! write results over inputs, and may call a result held as soon as it has answered. Over a network a dead device's redo slots
//! are lost, and so is an answer that was on its way. Three rules take their place:
//!
//! 1. *The device never writes to a caller's memory.* Results land in a *landing area* of the rank, and the rank copies them
//!    out when it takes the answer. A caller's memory is opened for reading only; the hardware refuses anything else. So an
//!    input is intact until its own rank has the whole result (PROTOCOL 7's "unpublished: inputs are intact"), and a torn write
//!    tears nothing that anybody reads.
//! 2. *A result is announced in the same operation that writes it*: a WRITE into a landing area carries its place as immediate
//!    data, which the hardware queues at the rank once all bytes are there, and before the device hears that the write is done.
//!    The device counts a result as held ([`have`](crate#by-reference)) when it hears that. So whatever it tells others to be
//!    stable is at every rank in memory and announced there, though the answer may be lost with the device: `k < stable` =>
//!    every live rank can give result k. After the end, the rank looks its open chunks up among the announcements; they are
//!    to it what records in redo slots are over shared memory.
//! 3. *A rank keeps what it returned until it is stable*, as ranks by packets do (PROTOCOL 5), because no redo slot does.
//!
//! Repair needs, of each chunk, a holder or all inputs. A chunk that some survivor landed or has announced has a holder. Of one
//! that none has, `have` of no survivor passed it, so it is not stable and nobody was told so; each survivor's input is either
//! untouched in the caller's memory (1), or, of an operation that has returned, kept (3). Neither depends on what the device
//! did last. The announcements of a place are those of the chunk that is open there: a place is given to another chunk only
//! when the rank has taken the answer, and taking it takes the announcement.
//!
//! # The fence (PROTOCOL 6)
//!
//! A rank asks the device to let go, as over shared memory. One that does not answer is fenced here: the queue pair goes to its
//! error state, what is on its way is drained, and the registrations are given back, so that no key opens anything, by
//! whichever connection. A device does the same to a rank that is gone. Both are done before anything is salvaged.
//!
//! # A dead peer
//!
//! is an error by name, in a time with a limit: a send, READ or WRITE that is not acknowledged ([`LinkError::PeerGone`]); the end
//! of the TCP connection of the set-up, which stays open for that; or a runtime that stands still, whose count of turns
//! travels in each message.

mod carrier;
#[cfg(feature = "double")]
mod exchange;
pub mod handshake;
mod message;
mod region;
#[cfg(test)]
mod tests;

pub use carrier::{BUFFERS, CREDITS, Carrier, CarrierError, CarrierStats, Heard, Outbox};
#[cfg(all(feature = "double", feature = "emu"))]
pub use exchange::ExchangeDevice;
#[cfg(feature = "double")]
pub use exchange::{Exchange, ExchangeLink};
pub use message::{MESSAGE_LEN_BYTES, Memory, MessageError};
#[cfg(feature = "verbs")]
pub(crate) use region::inside;
pub use region::{RegionError, RemoteRegion};

use crate::shm::Region;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::string::String;
use thiserror::Error;

/// Why a connection is at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The peer's hardware does not let us there: a range outside, a key that was revoked, or of somebody else.
    #[error("the peer's memory is not open to this access")]
    RemoteAccess,
    /// The peer does not answer.
    #[error("the peer does not answer")]
    PeerGone,
    /// The connection was fenced here.
    #[error("the connection was ended here")]
    Fenced,
    /// Something else, by its number in `enum ibv_wc_status`.
    #[error("the RDMA device says status {0}")]
    Status(u32),
}

/// An end of a connection, as the other has to know it. Only those who make links read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkEnd(pub [u8; LINK_END_LEN_BYTES]);

/// The length of a [`LinkEnd`] in bytes.
pub const LINK_END_LEN_BYTES: usize = 28;

/// What a link has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrived {
    /// A message of so many bytes.
    Message(usize),
    /// The peer has written all of a result at this offset of the landing area.
    Landed(u32),
}

/// An end of a reliable connection: messages in order, each once.
pub trait Link {
    /// Send a message, of [`MESSAGE_LEN_BYTES`] at most; false, and nothing, if there is no room now.
    ///
    /// # Errors
    /// [`LinkError`]: the connection is at its end.
    fn send(&mut self, message: &[u8]) -> Result<bool, LinkError>;

    /// Take what has come; also after the end what came before it.
    ///
    /// # Errors
    /// [`LinkError`]: the connection is at its end, and nothing is left.
    fn receive(&mut self, into: &mut [u8; MESSAGE_LEN_BYTES]) -> Result<Option<Arrived>, LinkError>;
}

/// What a peer may do with memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read it: a caller's buffer.
    Read,
    /// Read and write it: the landing area.
    Land,
}

/// Why a link can't be made, or memory not be exposed. The text says what to do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct LinkFailure(pub String);

/// A rank's end.
pub trait RankLink: Link + Send + fmt::Debug {
    /// Return what the device has to know.
    fn end(&self) -> LinkEnd;

    /// Connect to the device's end.
    ///
    /// # Errors
    /// [`LinkFailure`]
    fn connect(&mut self, device: &LinkEnd) -> Result<(), LinkFailure>;

    /// Let the device reach memory until it is withdrawn; the link keeps a mapping of it.
    ///
    /// # Errors
    /// [`LinkFailure`]
    fn expose(&mut self, memory: Region, access: Access) -> Result<RemoteRegion, LinkFailure>;

    /// Take memory away from the device, by the key that it was told.
    fn withdraw(&mut self, rkey: u32);

    /// End the connection: afterwards nothing that the device has begun takes effect here (PROTOCOL 6), and no key that it
    /// knows opens anything. What has come before can still be taken.
    ///
    /// # Errors
    /// [`LinkFailure`]: the landing area must not be trusted.
    fn fence(&mut self) -> Result<(), LinkFailure>;

    /// Let [`RankLink::file`] become readable when something comes; look once more afterwards.
    fn arm(&mut self);

    /// Return what becomes readable.
    fn file(&self) -> BorrowedFd<'_>;
}

/// Open a rank's link on the RDMA port called `name` (see `VerbsLink`), with the identifier that is `prefer`'s if there is
/// one; or, with the feature `double`, on the double called `exchange:NAME`.
///
/// # Errors
/// [`LinkFailure`]
pub fn open(name: &str, prefer: std::net::IpAddr) -> Result<std::boxed::Box<dyn RankLink>, LinkFailure> {
    #[cfg(feature = "double")]
    if let Some(exchange) = Exchange::named(name) {
        return Ok(std::boxed::Box::new(exchange.rank_link()?));
    }
    #[cfg(feature = "verbs")]
    return crate::verbs::rank_link(name, prefer);
    #[cfg(not(feature = "verbs"))]
    {
        let _ = prefer;
        Err(LinkFailure(std::format!(
            "RDMA port {name}: this build has no verbs; build with `--features verbs`, which takes cmake, libclang and \
             libibverbs (Debian: apt-get install cmake libclang-dev libibverbs-dev)"
        )))
    }
}
