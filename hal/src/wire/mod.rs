//! The data plane: every byte of a packet.
//!
//! A packet is one fixed little-endian header of [`HEADER_LEN`] bytes and a payload. [`Packet`] is a view of a
//! buffer that makes no judgement of its content; [`Repr`] is the meaningful struct. After
//! [`Packet::new_checked`] no accessor panics. Version 1, frozen by the golden bytes in `tests.rs`:
//!
//! | offset | field | type | meaning |
//! |---|---|---|---|
//! | 0 | magic | u32 | `"SUMC"`, 0x434d_5553 |
//! | 4 | version | u8 | 1 |
//! | 5 | kind | u8 | [`Kind`]: Data, Ref, Empty, Result, Done, Probe, Status, Nak, Late, Cut |
//! | 6 | flags | u16 | [`Flags`] |
//! | 8 | collective | u8 | [`Collective`](crate::op::Collective), 0 where it does not apply |
//! | 9 | dtype | u8 | [`Dtype`](crate::op::Dtype) of the operation, 0 for none |
//! | 10 | op | u8 | [`ReduceOp`](crate::op::ReduceOp), 0 for none |
//! | 11 | reason | u8 | [`NakReason`], 0 for other kinds |
//! | 12 | group | u32 | [`GroupId`] |
//! | 16 | epoch | u32 | [`Epoch`] |
//! | 20 | child | u16 | index of the child whose link this is, in both directions; down to the shared address: 0xffff, for [`ChildIndex::ALL`](crate::ids::ChildIndex::ALL) |
//! | 22 | count | u16 | seqs that the packet covers, from `seq` on: 1 for Data and Result |
//! | 24 | seq | u64 | [`ChunkNo`] |
//! | 32 | mark | u64 | up: `have`; down: `stable` (PROTOCOL 1) |
//! | 40 | key | u64 | the child's key (PROTOCOL 10), in both directions; that of all children in a packet to all |
//! | 48 | signature | u32 | of the operation ([`OpDesc::signature`](crate::op::OpDesc::signature)) |
//! | 52 | token | u32 | up: drawn by the sender; down: echoed from what it answers |
//! | 56 | window | u16 | down: contributions that the receiver may have in flight; up: 0 |
//! | 58 | payload_len | u16 | bytes behind the header |
//! | 60 | attempt | u16 | of the seq (PROTOCOL 7) |
//! | 62 | view | u16 | down: decisions to go on without ranks that were made so far; up: 0, in a bare Late the one that is asked for |
//! | 64 | bits | u64 | Data, Ref, Empty, Late: element count of the whole operation. Probe: bit i = the answer to the i-th seq of the same shard from `seq` on is held. Status: bit i = the child's contribution to that seq is in. Nak(Mismatch): count of the first operation seen. Nak(Missing), up: the highest seq that is held |
//! | 72 | bits2 | u64 | Data, Empty and Late with LIMITED: bits 0..32 how many seqs before this one the operation begins, 32..64 how long it waits for ranks to come to it, in microseconds. Status: bit i = that seq is complete here. Nak(Mismatch): the other operation, packed by [`pack_op`] |
//! | 80 | root | u32 | the root of rooted collectives, 0 otherwise |
//! | 84 | slowest | u32 | up: the rank at or below the sender that was the last to contribute, and one; down: the last of all, as the root saw it; 0: unknown |
//! | 88 | late_us | u32 | how long it came after the first, in microseconds |
//! | 92 | crc | u32 | CRC-32C of bytes 0..92 followed by the CRC-32C of the payload, little-endian |
//!
//! The checksum is taken in two levels, so that a node which sends one payload to 256 children reads it once.

mod header;
mod mask;
mod packet;
#[cfg(test)]
mod tests;

pub use crate::crc::crc32c;
pub use header::{Flags, Kind, Limit, NakReason, Repr, pack_op, unpack_op};
pub use mask::RankMask;
pub use packet::{Packet, WireError, payload_crc};

#[cfg(doc)]
use crate::ids::{ChunkNo, Epoch, GroupId};

/// The length of the header in bytes.
pub const HEADER_LEN: usize = 96;

/// The first four bytes of every packet, little-endian.
pub const MAGIC: u32 = u32::from_le_bytes(*b"SUMC");

/// The version of the header that this crate speaks.
pub const VERSION: u8 = 1;

/// The most seqs that one Probe or Status can speak of: the bits of one field.
pub const BITMAP_SEQS: u16 = 64;

/// The most children that a node can have below it.
pub const MAX_CHILDREN: usize = 256;
