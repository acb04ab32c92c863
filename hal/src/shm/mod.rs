//! Shared memory between processes of one machine: BARs, doorbells, registered memory and the socket that hands them
//! over.
//!
//! A device process listens on a [`Listener`]. A rank connects, receives the memory of its function ([`BarMemory`], see
//! [`mmio`](crate::mmio)) and hands over its own memory ([`Region`]) for the device's DMA engine; between a host and a
//! PCIe card, enumeration and the IOMMU do this. Everything travels through the socket as file descriptors
//! (`SCM_RIGHTS`), and all memory is `memfd`s. Nothing has a name in a file system, so nothing is left behind when a
//! process is killed.
//!
//! Invariants:
//! - Memory of another process is mapped only if it is sealed against resizing, so no access can fault.
//! - DMA engines access [`Region`]s, so no Rust reference points into them; [`BarMemory`] consists of atomics.
//! - A rank accepts devices of its own user, of root, and of the user that the administrator names ([`DeviceUsers`]). A
//!   device accepts ranks of its own user and of root; a device run by root or by the named user accepts ranks of all
//!   users. The rank's identity is proven by its attach key, not by its user.
//! - A forked child does not inherit the connection: it has no registers and no rings ([`BarMemory`]), and its drops
//!   leave the parent's resources alone ([`ProcessMark`]). It does inherit [`Region`]s.
//! - The death of a peer is detected: the socket hangs up, and [`Peer`] holds a pidfd of its process.

mod bar_memory;
mod bell;
mod board;
mod duplex;
mod function;
mod machine;
mod mapping;
mod memory_channel;
mod peer;
mod peer_memory;
mod process;
mod ready;
mod socket;
#[cfg(test)]
mod tests;
mod users;
mod wait;

pub use bar_memory::BarMemory;
pub use bell::{Bell, BellSet};
pub use board::{Board, BoardError};
pub use duplex::{Duplex, DuplexError, DuplexStream};
pub use function::{Function, FunctionError, FunctionQueue, FunctionRing};
pub use machine::machine;
pub use mapping::{MemoryError, Pages, ReadOnly, Region};
pub use memory_channel::MemoryChannel;
pub use peer::{Peer, PeerError};
pub use peer_memory::{PeerMemory, PeerMemoryError};
pub use process::ProcessMark;
pub use socket::{AttachRefusal, Connection, Listener, Message, Received, SocketError};
pub use users::{DEVICE_USER_VARIABLE, DeviceUserError, DeviceUsers};
pub use wait::{SLEEPER_BELLS_MAX, WaitError, Waiter, ring};
