//! What boards without an operating system have in common: packets over smoltcp, the control plane, and one step that
//! drives both and the node.
//!
//! ```text
//!   NIC (smoltcp::phy::Device)
//!     |
//!   Stack: ARP, IP, one UDP socket, one TCP socket ----- Port ----> Node
//!     |                                                              ^
//!     +------ Control: dials the controller, answers requests -------+
//! ```
//!
//! A board supplies the NIC, a clock, randomness, storage, and a loop around [`Board::step`] that sleeps until the
//! instant that it returns or an interrupt; nothing here knows a register. So all of it also runs, and is tested, where
//! there is an operating system: the port passes the conformance suite on an emulated wire.
//!
//! Invariants:
//! - no allocation: all buffers are lent by the board ([`Buffers`]), and every queue has a limit;
//! - the work of a step is bounded;
//! - a board that loses its controller goes on serving its groups, and dials again.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

mod board;
mod bus;
mod control;
mod options;
mod stack;
#[cfg(test)]
mod tests;

pub use board::{Alone, Answering, Asking, Board, BoardEvent, Desk, Further, Gauge, Others};
pub use bus::{Bus, BusMemory, BusTables};
pub use control::{Control, ControlError, REDIAL};
#[cfg(feature = "faults")]
pub use options::Fault;
pub use options::{BoardOptions, OPTIONS_MAX_BYTES, OptionsError};
pub use stack::{Buffers, MAX_PACKET_LEN_BYTES, RX_PACKETS, Room, RxPacket, Stack, TX_PACKETS};
