//! The bus between processes of one machine: shared memory, doorbells that are futexes, and what is handed over.
//!
//! A device process listens on a [`Listener`]. A rank connects, gets the memory of its function ([`BarMemory`], see
//! [`mmio`](crate::mmio)), and hands over memory of its own ([`Region`]) for the device's DMA engine: what PCIe does by
//! enumeration and by the IOMMU. All of it travels as file descriptors through the socket (`SCM_RIGHTS`), and the
//! memory is `memfd`s: nothing has a name, so nothing is left behind, whoever is killed at whatever moment.
//!
//! Invariants:
//! - Memory of others is mapped only if it is sealed against being resized, so that no access can fault.
//! - [`Region`]s are for engines and have no Rust references into them; [`BarMemory`] is atomics.
//! - A rank talks to devices of its own user, of the superuser, and of the user that the administrator names
//!   ([`DeviceUsers`]). A device talks to ranks of its own user and of the superuser; the superuser's device, and that of
//!   the user who is named, to ranks of all users. Which rank one is, its token has to prove to who handed the token out.
//! - A forked child has no part in it: it has no registers and no rings ([`BarMemory`]), and what it drops is not touched
//!   ([`ProcessMark`]). [`Region`]s it has, with whoever shares them.
//! - A peer's death is seen: the socket hangs up, and [`Peer`] tells by its process.

mod bell;
mod function;
mod machine;
mod mapping;
mod peer;
mod process;
mod ready;
mod socket;
#[cfg(test)]
mod tests;
mod users;
mod wait;

pub use bell::{Bell, Bells};
pub use function::{Function, FunctionError, FunctionQueue, FunctionRing};
pub use machine::machine;
pub use mapping::{BarMemory, MemoryError, Pages, ReadOnly, Region};
pub use peer::{Peer, PeerError};
pub use process::ProcessMark;
pub use socket::{AttachRefusal, Connection, Listener, Message, Received, SocketError};
pub use users::{DEVICE_USER_VARIABLE, DeviceUserError, DeviceUsers};
pub use wait::{SLEEPER_BELLS_MAX, WaitError, Waiter, ring};
