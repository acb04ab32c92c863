//! [`Train`]: packets that arrived together.

use core::iter;

/// Packets from one sender with the same congestion mark, in the order in which they arrived: at least one.
///
/// A port with receive offload returns the packets that the kernel has coalesced as one train, in one buffer. Whoever
/// handles it may check once what they have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Train<'a> {
    first: &'a [u8],
    rest: &'a [u8],
}

impl<'a> Train<'a> {
    /// Return a train of one packet.
    pub const fn of_one(packet: &'a [u8]) -> Self {
        Self { first: packet, rest: &[] }
    }

    /// Return the train of the packets in `bytes`, each of `packet_len_bytes`, but for the last one, which may be
    /// shorter.
    pub fn new(bytes: &'a [u8], packet_len_bytes: usize) -> Self {
        let (first, rest) = bytes.split_at(packet_len_bytes.min(bytes.len()));
        Self { first, rest }
    }

    /// Return the first packet.
    pub const fn first(&self) -> &'a [u8] {
        self.first
    }

    /// Return the number of packets.
    pub fn packets_len(&self) -> usize {
        1 + self.rest.len().div_ceil(self.first.len().max(1))
    }

    /// Return the packets in order.
    pub fn packets(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        iter::once(self.first).chain(self.rest.chunks(self.first.len().max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn packets_are_those_of_the_buffer_and_the_last_may_be_short() {
        let packets = |bytes, len| {
            let train = Train::new(bytes, len);
            let packets: Vec<&[u8]> = train.packets().collect();
            assert_eq!(train.packets_len(), packets.len());
            packets
        };
        assert_eq!(packets(&[1, 2, 3, 4, 5], 2), [&[1, 2][..], &[3, 4], &[5]]);
        assert_eq!(packets(&[1, 2, 3, 4], 2), [[1, 2], [3, 4]]);
        assert_eq!(packets(&[1, 2], 9), [[1, 2]]);
        assert_eq!(Train::of_one(&[]).packets().collect::<Vec<_>>(), [[0_u8; 0]], "an empty packet is one, too");
    }
}
