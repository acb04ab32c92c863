//! [`Template`]: the header of Data or Results that are sent one after the other.
//!
//! The counterpart of [`Lead`](super::Lead): headers of one group in the short form differ in what [`ChunkFields`] has,
//! and those of several children also in child and key. The rest is written once.
//!
//! Invariant: a template makes the header that [`Repr::header`] makes of the same fields.

use super::compact::{lag_of, late_to_wire};
use super::packet::field;
use super::{Flags, Header, Repr, SHORT_HEADER_LEN};
use crate::ids::{ChildIndex, ChunkNo, Rank};

/// A header in the short form, of which headers with other numbers are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Template {
    bytes: [u8; SHORT_HEADER_LEN],
}

/// The fields that differ between the chunks of a group; see [`Repr`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkFields {
    /// The seq.
    pub seq: ChunkNo,
    /// Up: `have`. Down: `stable`.
    pub mark: ChunkNo,
    /// The operation's signature.
    pub signature: u32,
    /// The attempt at the seq, modulo 256.
    pub attempt: u8,
    /// The last rank to contribute, if known.
    pub slowest: Option<Rank>,
    /// How long after the first rank it contributed, in microseconds.
    pub late_us: u32,
}

impl Template {
    /// Return the template of headers like `repr`; `None` if it does not have the short form.
    pub fn new(repr: &Repr) -> Option<Self> {
        let header = repr.header(0);
        let bytes = *header.first_chunk().filter(|_| repr.flags.contains(Flags::SHORT))?;
        Some(Self { bytes })
    }

    /// Continue with another chunk.
    #[inline]
    pub fn set_chunk(&mut self, chunk: &ChunkFields) {
        let slowest = chunk.slowest.and_then(|rank| u16::try_from(rank.0).ok()?.checked_add(1)).unwrap_or(0);
        self.bytes[field::SEQ].copy_from_slice(&chunk.seq.0.to_le_bytes());
        self.bytes[field::LAG].copy_from_slice(&lag_of(chunk.seq.0, chunk.mark.0).to_le_bytes());
        self.bytes[field::SIGNATURE].copy_from_slice(&chunk.signature.to_le_bytes());
        self.bytes[field::ATTEMPT.start] = chunk.attempt;
        self.bytes[field::SLOWEST].copy_from_slice(&slowest.to_le_bytes());
        self.bytes[field::LATE].copy_from_slice(&late_to_wire(chunk.late_us).to_le_bytes());
    }

    /// Continue with another child.
    #[inline]
    pub fn set_child(&mut self, child: ChildIndex, key: u64) {
        self.bytes[field::CHILD.start] = child.0 as u8;
        self.bytes[field::KEY].copy_from_slice(&key.to_le_bytes());
    }

    /// Return the header of a packet with this [`payload_crc`](super::payload_crc).
    #[inline]
    pub fn header(&self, payload_crc: u32) -> Header {
        Header::of_short(&self.bytes, payload_crc)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Epoch, GroupId};
    use crate::wire::Kind;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn templates_make_the_headers_that_their_fields_make(
            is_result in any::<bool>(),
            numbers in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u32>(), any::<u8>()), 1..6),
            times in prop::collection::vec((prop::option::of(0_u32..70_000), any::<u32>()), 6),
            children in prop::collection::vec((0_u16..256, any::<u64>()), 6),
            (token, window, view, payload_crc) in (any::<u32>(), any::<u16>(), 0_u16..300, any::<u32>()),
        ) {
            let kind = if is_result { Kind::Result } else { Kind::Data };
            let flags = Flags::SHORT | Flags::WANT;
            let first = Repr { flags, token, window, view, ..Repr::new(kind, GroupId(3), Epoch::default(), ChildIndex(0), 9) };
            let mut template = Template::new(&first).unwrap();
            for ((&(seq, mark, signature, attempt), &(slowest, late_us)), &(child, key)) in
                numbers.iter().zip(&times).zip(&children)
            {
                let (seq, mark, slowest) = (ChunkNo(seq), ChunkNo(mark), slowest.map(Rank));
                template.set_chunk(&ChunkFields { seq, mark, signature, attempt, slowest, late_us });
                template.set_child(ChildIndex(child), key);
                let child = ChildIndex(child);
                let repr = Repr { seq, mark, signature, attempt, slowest, late_us, child, key, ..first };
                prop_assert_eq!(template.header(payload_crc), repr.header(payload_crc));
            }
            prop_assert_eq!(Template::new(&Repr { flags: Flags::WANT, ..first }), None);
        }
    }
}
