//! [`Lead`]: the first packet of a train, by which the next ones are recognised.
//!
//! Consecutive chunks of one child and one operation have headers that differ only in seq, mark and times. What is
//! checked of the first one's header holds for the others, and they are parsed by reading these fields alone.
//!
//! Invariant: a lead parses a packet as [`Packet::new_checked_with_crc`](super::Packet::new_checked_with_crc) and
//! [`Repr::parse`] do.

use super::compact::{late_from_wire, mark_of};
use super::packet::{check_short, field};
use super::{Flags, Repr, SHORT_HEADER_LEN, WireError};
use crate::ids::{ChunkNo, Rank};

/// The header of a Data or Result in the short form, parsed, with the bytes that the next packets of its train share.
#[derive(Debug, Clone, Copy)]
pub struct Lead {
    repr: Repr,
    shared: Shared,
}

/// Magic to signature, key, child to attempt, and what is between the times and the checksum.
type Shared = (u128, u64, u16, u32);

impl Lead {
    /// Return the lead of the packets behind `packet`, which was parsed as `repr`; `None` if its header is not short.
    #[inline]
    pub fn new(packet: &[u8], repr: &Repr) -> Option<Self> {
        let header = packet.first_chunk().filter(|_| repr.flags.contains(Flags::SHORT))?;
        Some(Self { repr: *repr, shared: shared(header) })
    }

    /// Return whether the header of `packet` has the lead's bytes wherever it may not differ.
    #[inline]
    pub fn leads(&self, packet: &[u8]) -> bool {
        packet.first_chunk().is_some_and(|header| shared(header) == self.shared)
    }

    /// Return the header that was parsed last.
    #[inline]
    pub const fn repr(&self) -> &Repr {
        &self.repr
    }

    /// Return the seq of a packet that the lead [`leads`](Lead::leads); it may be damaged.
    #[inline]
    pub fn seq_of(&self, packet: &[u8]) -> Option<ChunkNo> {
        let header = packet.first_chunk::<SHORT_HEADER_LEN>()?;
        Some(ChunkNo(u64::from_le_bytes(read(header, field::SEQ.start))))
    }

    /// Parse a packet that the lead [`leads`](Lead::leads): return its header, its payload, and the payload's checksum.
    /// Flags that were added to the lead's header stay.
    ///
    /// # Errors
    /// [`WireError::Checksum`] if the packet is damaged.
    #[inline]
    pub fn parse<'p>(&mut self, packet: &'p [u8]) -> Result<(&Repr, &'p [u8], u32), WireError> {
        let (header, payload, payload_crc) = check_short(packet)?;
        let seq = u64::from_le_bytes(read(header, field::SEQ.start));
        self.repr.seq = ChunkNo(seq);
        self.repr.mark = mark_of(seq, u16::from_le_bytes(read(header, field::LAG.start)));
        let slowest = u16::from_le_bytes(read(header, field::SLOWEST.start));
        self.repr.slowest = slowest.checked_sub(1).map(|rank| Rank(rank.into()));
        self.repr.late_us = late_from_wire(u16::from_le_bytes(read(header, field::LATE.start)));
        self.repr.payload_len_bytes = payload.len() as u16;
        Ok((&self.repr, payload, payload_crc))
    }
}

#[inline]
fn shared(header: &[u8; SHORT_HEADER_LEN]) -> Shared {
    (
        u128::from_le_bytes(read(header, field::MAGIC.start)),
        u64::from_le_bytes(read(header, field::KEY.start)),
        u16::from_le_bytes(read(header, field::CHILD.start)),
        u32::from_le_bytes(read(header, field::TOKEN.start)),
    )
}

/// Read the bytes of a field, or of several, from `start` on.
#[inline]
fn read<const N: usize>(header: &[u8; SHORT_HEADER_LEN], start: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&header[start..start + N]);
    bytes
}
