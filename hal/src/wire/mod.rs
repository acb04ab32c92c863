//! The data plane: every byte of a packet.
//!
//! A packet is a fixed little-endian header of [`HEADER_LEN`] bytes, followed by a payload. [`Packet`] is a view of a
//! buffer; [`Repr`] is the parsed header. After [`Packet::new_checked`] no accessor panics. Version 1, guarded by
//! golden bytes in `tests.rs`:
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
//! | 20 | child | u16 | the child's index, in both directions; to the shared address: 0xffff, [`ChildIndex::ALL`](crate::ids::ChildIndex::ALL) |
//! | 22 | count | u16 | number of seqs that the packet covers, starting at `seq`; 1 for Data and Result |
//! | 24 | seq | u64 | [`ChunkNo`] |
//! | 32 | mark | u64 | up: `have`; down: `stable` (PROTOCOL 1) |
//! | 40 | key | u64 | the child's key (PROTOCOL 10), in both directions; to the shared address: the key of all children |
//! | 48 | signature | u32 | of the operation ([`OpDesc::signature`](crate::op::OpDesc::signature)) |
//! | 52 | token | u32 | up: chosen by the sender; down: echoed from the packet that it answers |
//! | 56 | window | u16 | down: the granted window, in contributions; up: 0 |
//! | 58 | payload_len | u16 | bytes after the header |
//! | 60 | attempt | u16 | of the seq (PROTOCOL 7) |
//! | 62 | view | u16 | down: the number of decisions so far to continue without stragglers; up: 0, or in a Late without contribution the decision that it requests |
//! | 64 | bits | u64 | Data, Ref, Empty, Late: element count of the whole operation. Probe: bit i = the sender holds the answer to the i-th seq of the same shard from `seq` on. Status: bit i = the child's contribution to that seq has arrived. Nak(Mismatch): count of the first operation seen. Nak(Missing), up: the highest seq whose answer the sender holds |
//! | 72 | bits2 | u64 | Data, Empty and Late with LIMITED: bits 0..32 distance in seqs from the operation's first seq, bits 32..64 the time that it waits for stragglers, in microseconds. Status: bit i = that seq is complete at the sender. Nak(Mismatch): the other operation, packed by [`pack_op`] |
//! | 80 | root | u32 | the root of rooted collectives, 0 otherwise |
//! | 84 | slowest | u32 | up: the last rank at or below the sender to contribute, plus one; down: the last of all ranks, plus one, as seen by the root; 0: unknown |
//! | 88 | late_us | u32 | how long after the first rank it contributed, in microseconds |
//! | 92 | crc | u32 | CRC-32C of bytes 0..92 followed by the CRC-32C of the payload, little-endian |
//!
//! The checksum has two levels, so that a node that sends one payload to 256 children reads it once.

mod header;
mod mask;
mod packet;
#[cfg(test)]
mod tests;

pub use crate::crc::crc32c;
pub use header::{Flags, Kind, NakReason, Repr, StragglerLimit, pack_op, unpack_op};
pub use mask::RankMask;
pub use packet::{Packet, WireError, payload_crc};

#[cfg(test)]
pub(crate) use packet::field_ranges;

#[cfg(doc)]
use crate::ids::{ChunkNo, Epoch, GroupId};

/// The length of the header, in bytes.
pub const HEADER_LEN: usize = 96;

/// The first four bytes of every packet, as a little-endian number.
pub const MAGIC: u32 = u32::from_le_bytes(*b"SUMC");

/// The header version of this crate.
pub const VERSION: u8 = 1;

/// The maximum number of seqs in one Probe or Status: the width of a bitmap field.
pub const BITMAP_SEQS: u16 = 64;

/// The maximum number of children of a node.
pub const MAX_CHILDREN: usize = 256;
