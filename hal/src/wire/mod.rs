//! The data plane: every byte of a packet.
//!
//! A packet is a little-endian header, followed by a payload to the end of the datagram. The header has two forms: the
//! full one of [`HEADER_LEN`] bytes, and for Data and Result a short one of [`SHORT_HEADER_LEN`] bytes, which has
//! [`Flags::SHORT`]. [`Packet`] is a view of a buffer; [`Repr`] is the parsed header. After [`Packet::new_checked`] no
//! accessor panics. Version 2, guarded by golden bytes in `tests.rs`. Both forms begin with:
//!
//! | offset | field | type | meaning |
//! |---|---|---|---|
//! | 0 | magic | u8 | 0xc5 |
//! | 1 | version | u8 | 2 |
//! | 2 | kind | u8 | [`Kind`]: Data, Ref, Empty, Result, Done, Probe, Status, Nak, Late, Cut, Operation |
//! | 3 | flags | u8 | [`Flags`] |
//! | 4 | group | u32 | [`GroupId`] |
//! | 8 | epoch | u32 | [`Epoch`] |
//! | 12 | signature | u32 | of the operation ([`OpDesc::signature`](crate::op::OpDesc::signature)); the short form names the operation by it |
//! | 16 | seq | u64 | [`ChunkNo`] |
//! | 24 | key | u64 | the child's key (PROTOCOL 10), in both directions; to the shared address: the key of all children |
//! | 32 | child | u8 | the child's index, in both directions; 0 in a Result to the shared address, which has [`Flags::SHARED`] and is parsed as [`ChildIndex::ALL`](crate::ids::ChildIndex::ALL) |
//! | 33 | attempt | u8 | of the seq (PROTOCOL 7), modulo 256 |
//! | 34 | lag | u16 | short form: `seq` minus the mark, 0xffff if unknown; full form: 0 |
//! | 36 | slowest | u16 | up: the last rank at or below the sender to contribute, plus one; down: the last of all ranks, plus one, as seen by the root; 0: unknown |
//! | 38 | late | u16 | how long after the first rank it contributed, in microseconds: a mantissa of 11 bits (low), and an exponent of 5 |
//!
//! The short form of Data continues with token (u32, at 40), that of Result with window (u16, at 40), view (u8, at 42)
//! and a byte of 0; both end with the checksum (at 44). They cover one seq. The full form continues:
//!
//! | offset | field | type | meaning |
//! |---|---|---|---|
//! | 40 | token | u32 | up: chosen by the sender; down: echoed from the packet that it answers |
//! | 44 | count | u16 | number of seqs that the packet covers, starting at `seq`; 1 for Data, Result and Operation; 0 for a Probe about the path, which is padded, and its Status (PROTOCOL 12) |
//! | 46 | window | u16 | down: the granted window, in contributions; up: 0 |
//! | 48 | mark | u64 | up: `have`; down: `stable` (PROTOCOL 1) |
//! | 56 | bits | u64 | Data, Ref, Empty, Late, Operation: element count of the whole operation. Probe: bit i = the sender holds the answer to the i-th seq of the same shard from `seq` on. Status: bit i = the child's contribution to that seq has arrived. Nak(Mismatch): count of the first operation seen. Nak(Missing), up: the highest seq whose answer the sender holds |
//! | 64 | bits2 | u64 | Data, Empty, Late and Operation with LIMITED: bits 0..32 distance in seqs from the operation's first seq, bits 32..64 the time that it waits for stragglers, in microseconds. Probe: bit i = the answer to that seq was lost, and is to be sent again. Status: bit i = the answer to that seq was sent to the child. Nak(Mismatch): the other operation, packed by [`pack_op`] |
//! | 72 | root | u32 | the root of rooted collectives, 0 otherwise |
//! | 76 | collective | u8 | [`Collective`](crate::op::Collective), 0 where it does not apply |
//! | 77 | dtype | u8 | [`Dtype`](crate::op::Dtype) of the operation, 0 for none |
//! | 78 | op | u8 | [`ReduceOp`](crate::op::ReduceOp), 0 for none |
//! | 79 | reason | u8 | [`NakReason`], 0 for other kinds |
//! | 80 | view | u16 | down: the number of decisions so far to continue without stragglers; up: 0, or in a Late without contribution the decision that it requests |
//! | 82 | spare | u16 | 0 |
//! | 84 | crc | u32 | CRC-32C of the header's bytes before it, followed by the CRC-32C of the payload, little-endian |
//!
//! The checksum has two levels, so that a node that sends one payload to 256 children reads it once.

mod compact;
mod header;
mod lead;
mod mask;
mod packet;
mod template;
#[cfg(test)]
mod tests;

pub use crate::crc::crc32c;
pub use header::{Flags, Kind, NakReason, Repr, StragglerLimit, pack_op, unpack_op};
pub use lead::Lead;
pub use mask::RankMask;
pub use packet::{Header, Packet, WireError, payload_crc};
pub use template::{ChunkFields, Template};

#[cfg(test)]
pub(crate) use packet::field_ranges;

#[cfg(doc)]
use crate::ids::{ChunkNo, Epoch, GroupId};

/// The length of the full header, in bytes.
pub const HEADER_LEN: usize = 88;

/// The length of the header of a Data or Result that names its operation by its signature, in bytes. A chunk is at most
/// as long as what remains of the longest packet.
pub const SHORT_HEADER_LEN: usize = 48;

/// Return the length of the longest packet of a group with this chunk, in bytes: one with a whole chunk, or with a full
/// header and the most that is sent under it for being too little for the short one, or a rank mask.
pub const fn packet_len_max(chunk_len_bytes: u16) -> usize {
    let (whole, least) = (SHORT_HEADER_LEN + chunk_len_bytes as usize, PACKET_LIMIT_MIN);
    if whole > least { whole } else { least }
}

/// The least limit of packets with which there are groups, in bytes, whatever their chunk.
pub const PACKET_LIMIT_MIN: usize = HEADER_LEN + (HEADER_LEN - SHORT_HEADER_LEN);
const _: () = assert!(HEADER_LEN - SHORT_HEADER_LEN >= RankMask::LEN_BYTES && PACKET_LIMIT_MIN.is_multiple_of(16));

/// The first byte of every packet.
pub const MAGIC: u8 = 0xc5;

/// The header version of this crate.
pub const VERSION: u8 = 2;

/// The maximum number of seqs in one Probe or Status: the width of a bitmap field.
pub const BITMAP_SEQS: u16 = 64;

/// The maximum number of children of a node.
pub const MAX_CHILDREN: usize = 256;
