//! Wire format of the frames between two executors, which follow the handshake ([`super::auth`]).
//!
//! All numbers are little-endian.
//!
//! | Bytes | Field |
//! |---|---|
//! | 0..4 | magic `SMCF` |
//! | 4..6 | kind: 1 data, 2 abort, 3 announce, 4 shared, 5 reference, 6 mapped reference |
//! | 6 | 1 if the sender has the board ([`super::board`]) |
//! | 7 | 1 if messages about mapped memory wait ([`super::regions`]) |
//! | 8..16 | operation index |
//! | 16..20 | signature |
//! | 20..24 | step: number of the transfer of this pair in this operation, from 0 |
//! | 24..28 | payload length |
//! | 28..32 | collective, dtype, op, path |
//! | 32..36 | root |
//! | 36..40 | number of the call, from 1, modulo 2^32; 0 for what no call is |
//! | 40..48 | element count |
//! | 48..56 | length of the whole transfer in bytes (data, reference) |
//! | 56..64 | address of the payload in the sender's memory (reference), or its place in a region (mapped) |
//!
//! A transfer is sent as one or more data frames of at most [`FRAME_MAX_BYTES`], so that an abort never waits for more
//! than that. A reference, only in shared memory, takes the place of a data frame: its payload does not follow, the
//! receiver copies it ([`super::shared`]), through the kernel or out of memory that it has mapped. A place in a region
//! is an offset of 40 bits, and above it the region's handle, of 24.
//!
//! After a shared frame, the sender's bytes come through shared memory. The payload of an abort frame is the error,
//! encoded with postcard. Every frame describes its operation, because a signature alone cannot tell the user what the
//! other rank called. Frames carry no checksum of their own: TCP's is relied on.

use super::error::{Call, ExecError};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, Path, ReduceOp};

pub(super) const HEADER_BYTES: usize = 64;
/// The largest payload of a frame.
pub(super) const FRAME_MAX_BYTES: usize = 256 << 10;
/// The largest payload of a reference.
pub(super) const REFERENCE_MAX_BYTES: usize = 64 << 20;
/// The largest encoded error; longer reasons are dropped.
pub(super) const ABORT_MAX_BYTES: usize = 512;

const FRAME_MAGIC: [u8; 4] = *b"SMCF";

/// Kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// A piece of a transfer.
    Data,
    /// The end of the operation, with the error.
    Abort,
    /// No payload: the sender waits for the receiver in this operation.
    Announce,
    /// No payload: what the sender sends next comes through shared memory.
    Shared,
    /// A piece of a transfer, which the receiver copies from the sender's memory.
    Reference,
    /// The same, out of a region that the receiver has mapped.
    MappedReference,
}

/// A frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: FrameKind,
    pub(super) call: Call,
    pub(super) step: u32,
    pub(super) len_bytes: usize,
    /// Length of the whole transfer in bytes.
    pub(super) transfer_bytes: u64,
    /// Where the payload of a reference is in the sender's memory.
    pub(super) address: u64,
    /// Messages about mapped memory wait.
    pub(super) has_news: bool,
    /// The sender has the board.
    pub(super) has_board: bool,
    /// The number of the call ([`super::Context::number`]).
    pub(super) number: u32,
}

impl Header {
    /// Return the header of a frame without a payload.
    pub(super) const fn bare(kind: FrameKind, call: Call, step: u32) -> Self {
        Self {
            kind,
            call,
            step,
            len_bytes: 0,
            transfer_bytes: 0,
            address: 0,
            has_news: false,
            has_board: false,
            number: 0,
        }
    }

    pub(super) fn emit(&self) -> [u8; HEADER_BYTES] {
        let kind: u16 = match self.kind {
            FrameKind::Data => 1,
            FrameKind::Abort => 2,
            FrameKind::Announce => 3,
            FrameKind::Shared => 4,
            FrameKind::Reference => 5,
            FrameKind::MappedReference => 6,
        };
        let call = &self.call;
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&FRAME_MAGIC);
        bytes[4..6].copy_from_slice(&kind.to_le_bytes());
        bytes[6] = u8::from(self.has_board);
        bytes[7] = u8::from(self.has_news);
        bytes[8..16].copy_from_slice(&call.op_index.to_le_bytes());
        bytes[16..20].copy_from_slice(&call.signature.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.step.to_le_bytes());
        bytes[24..28].copy_from_slice(&(self.len_bytes as u32).to_le_bytes());
        bytes[28] = call.collective.to_wire();
        bytes[29] = call.dtype.map_or(0, Dtype::to_wire);
        bytes[30] = call.op.map_or(0, ReduceOp::to_wire);
        bytes[31] = call.path as u8;
        bytes[32..36].copy_from_slice(&call.root.0.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.number.to_le_bytes());
        bytes[40..48].copy_from_slice(&call.count.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.transfer_bytes.to_le_bytes());
        bytes[56..64].copy_from_slice(&self.address.to_le_bytes());
        bytes
    }

    /// Set the operation index and the number of the call in a header that was emitted.
    pub(super) fn set_numbers(bytes: &mut [u8; HEADER_BYTES], op_index: u64, number: u32) {
        bytes[8..16].copy_from_slice(&op_index.to_le_bytes());
        bytes[36..40].copy_from_slice(&number.to_le_bytes());
    }

    /// Parse the header of a frame from `rank`.
    ///
    /// # Errors
    /// [`ExecError::Protocol`] if these bytes are not a header of this version.
    pub(super) fn parse(rank: Rank, bytes: &[u8; HEADER_BYTES]) -> Result<Self, ExecError> {
        let refuse = |what: &str, number: u64| ExecError::protocol(rank, format!("a frame with {what} {number:#x}"));
        let magic = u32_at(bytes, 0);
        if bytes[0..4] != FRAME_MAGIC {
            return Err(refuse("magic", magic.into()));
        }
        let (kind, limit) = match u16_at(bytes, 4) {
            1 => (FrameKind::Data, FRAME_MAX_BYTES),
            2 => (FrameKind::Abort, ABORT_MAX_BYTES),
            3 => (FrameKind::Announce, 0),
            4 => (FrameKind::Shared, 0),
            5 => (FrameKind::Reference, REFERENCE_MAX_BYTES),
            6 => (FrameKind::MappedReference, REFERENCE_MAX_BYTES),
            other => return Err(refuse("kind", other.into())),
        };
        let len_bytes = u32_at(bytes, 24) as usize;
        if len_bytes > limit {
            return Err(refuse("length", len_bytes as u64));
        }
        let collective = Collective::from_wire(bytes[28]).ok_or_else(|| refuse("collective", bytes[28].into()))?;
        let optional = |number: u8| (number != 0).then_some(number);
        let dtype = optional(bytes[29]).map(|n| Dtype::from_wire(n).ok_or_else(|| refuse("dtype", n.into())));
        let op = optional(bytes[30]).map(|n| ReduceOp::from_wire(n).ok_or_else(|| refuse("operator", n.into())));
        let path = Path::from_wire(bytes[31]);
        let call = Call {
            rank,
            op_index: u64_at(bytes, 8),
            signature: u32_at(bytes, 16),
            collective,
            dtype: dtype.transpose()?,
            op: op.transpose()?,
            root: Rank(u32_at(bytes, 32)),
            count: u64_at(bytes, 40),
            path: path.ok_or_else(|| refuse("path", bytes[31].into()))?,
        };
        let (transfer_bytes, address) = (u64_at(bytes, 48), u64_at(bytes, 56));
        let (has_board, has_news) = (bytes[6] & 1 != 0, bytes[7] & 1 != 0);
        let (step, number) = (u32_at(bytes, 20), u32_at(bytes, 36));
        Ok(Self { kind, call, step, len_bytes, transfer_bytes, address, has_news, has_board, number })
    }
}

/// An abort frame: header and error, ready to send.
#[derive(Debug, Clone)]
pub(super) struct AbortFrame {
    bytes: [u8; HEADER_BYTES + ABORT_MAX_BYTES],
    len_bytes: usize,
}

impl AbortFrame {
    /// Encode `error`, of the call with this number, for the peers of `call`'s rank.
    pub(super) fn new((call, number): (Call, u32), error: &ExecError) -> Self {
        let mut bytes = [0; HEADER_BYTES + ABORT_MAX_BYTES];
        let payload = match postcard::to_slice(error, &mut bytes[HEADER_BYTES..]) {
            Ok(payload) => payload.len(),
            // Only a caller's reason can be too long: the error is sent without it.
            Err(_) => {
                let short = ExecError::Interrupted { rank: call.rank, reason: String::new() };
                postcard::to_slice(&short, &mut bytes[HEADER_BYTES..]).map_or(0, |payload| payload.len())
            }
        };
        let header = Header { len_bytes: payload, number, ..Header::bare(FrameKind::Abort, call, 0) };
        bytes[..HEADER_BYTES].copy_from_slice(&header.emit());
        Self { bytes, len_bytes: HEADER_BYTES + payload }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len_bytes]
    }

    /// Decode the payload of an abort frame.
    pub(super) fn parse(rank: Rank, payload: &[u8]) -> ExecError {
        postcard::from_bytes(payload).unwrap_or_else(|_| ExecError::protocol(rank, "an unreadable abort frame"))
    }
}

fn u16_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, at))
}

fn u32_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

fn u64_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// Copy a field; callers pass constant offsets inside a fixed-size header.
///
/// Not by [`std::array::from_fn`], which copies byte by byte: parsing a header then took a third of a short call.
fn array_at<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sumac_hal::op::OpDesc;

    fn header() -> Header {
        let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 0x0102_0304_0506);
        let call = Call::new(Rank(3), 0x1112_1314, 0x2122_2324, &desc, Path::Ring);
        let (transfer_bytes, address, number) = (0x3132_3334_3536, 0x4142_4344_4546, 0x5152_5354);
        Header {
            kind: FrameKind::Data,
            call,
            step: 5,
            len_bytes: 0x4000,
            transfer_bytes,
            address,
            has_news: true,
            has_board: true,
            number,
        }
    }

    #[test]
    fn header_has_golden_bytes() {
        let golden = *b"SMCF\x01\0\x01\x01\x14\x13\x12\x11\0\0\0\0\x24\x23\x22\x21\x05\0\0\0\0\x40\0\0\x01\x0b\x01\x02\
                        \0\0\0\0\x54\x53\x52\x51\x06\x05\x04\x03\x02\x01\0\0\
                        \x36\x35\x34\x33\x32\x31\0\0\x46\x45\x44\x43\x42\x41\0\0";
        assert_eq!(header().emit(), golden);
        assert_eq!(Header::parse(Rank(3), &golden), Ok(header()));
    }

    #[test]
    fn errors_travel_unchanged() {
        let mut other = header().call;
        other.rank = Rank(1);
        other.count = 7;
        let errors = [
            ExecError::mismatch(header().call, other),
            ExecError::RankLost { rank: Rank(9) },
            ExecError::Deadline { op_index: u64::MAX, rank: Rank(1), peer: Rank(2) },
            ExecError::Refused { rank: Rank(1), by: Rank(2), reason: crate::exec::Refusal::Version },
            ExecError::Unproven { rank: Rank(1), peer: Rank(2) },
            ExecError::Length { from: Rank(1), to: Rank(2), op_index: 3, sent_bytes: 4, expected_bytes: 5 },
            ExecError::Message { from: Rank(1), to: Rank(2), number: 3, sent: (4, 5), expected: (6, 7) },
            ExecError::MessageDeadline { rank: Rank(1), peer: Rank(2) },
        ];
        for error in errors {
            let frame = AbortFrame::new((header().call, 7), &error);
            assert_eq!(AbortFrame::parse(Rank(3), &frame.bytes()[HEADER_BYTES..]), error);
        }
        let long = ExecError::Interrupted { rank: Rank(1), reason: "x".repeat(ABORT_MAX_BYTES) };
        let frame = AbortFrame::new((header().call, 7), &long);
        let got = AbortFrame::parse(Rank(3), &frame.bytes()[HEADER_BYTES..]);
        assert_eq!(got, ExecError::Interrupted { rank: Rank(3), reason: String::new() });
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_parse_without_panic(bytes in any::<[u8; HEADER_BYTES]>(), payload in any::<Vec<u8>>(), magic in any::<bool>()) {
            let mut bytes = bytes;
            if magic {
                bytes[0..4].copy_from_slice(&FRAME_MAGIC);
            }
            if let Ok(header) = Header::parse(Rank(0), &bytes) {
                let is_reference = matches!(header.kind, FrameKind::Reference | FrameKind::MappedReference);
                let max = if is_reference { REFERENCE_MAX_BYTES } else { FRAME_MAX_BYTES };
                prop_assert!(header.len_bytes <= max);
                prop_assert_eq!(Header::parse(Rank(0), &header.emit()), Ok(header));
            }
            let _ = AbortFrame::parse(Rank(0), &payload);
        }
    }
}
