//! The common part of boards without an operating system: packets over smoltcp, the control plane, and one step
//! function that drives both and the node.
//!
//! ```text
//!   NIC (smoltcp::phy::Device)
//!     |
//!   Stack: ARP, IP, one UDP socket, one TCP socket ----- Port ----> Node
//!     |                                                              ^
//!     +------ Control: dials the controller, serves its requests -----+
//! ```
//!
//! A board supplies the NIC, a clock, randomness, storage, and a loop around [`Board::step`] that sleeps until an
//! interrupt or the instant that `step` returns. Nothing here accesses a register, so all of it also runs, and is
//! tested, on an operating system: the port passes the conformance suite on an emulated network.
//!
//! Invariants:
//! - no allocation: the board provides all buffers ([`Buffers`]), and every queue has a limit;
//! - the work of a step is bounded;
//! - a board that loses its controller keeps serving its groups, and dials again;
//! - a board with a key sends its controller nothing in clear but a key exchange, and none without real randomness.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

mod board;
mod control;
mod options;
mod stack;
#[cfg(test)]
mod tests;
mod zero_copy;

pub use board::{
    Board, BoardEvent, Mailbox, MailboxClient, MailboxServer, OtherShards, SecondaryShard, SingleShard, StackGauge,
};
pub use control::{Control, ControlError, Entropy, REDIAL};
#[cfg(feature = "faults")]
pub use options::Fault;
pub use options::{BoardOptions, OPTIONS_MAX_BYTES, OptionsError};
pub use stack::{
    Buffers, MAX_PACKET_LEN_BYTES, PACKET_GUARANTEED_LEN_BYTES, RX_PACKETS, Room, RxPacket, Stack, TX_PACKETS,
};
pub use zero_copy::{ZeroCopyMemory, ZeroCopyServer, ZeroCopyTables};
