//! The sender of a datagram, from the 40 bytes that a device writes in front of it.
//!
//! They are an InfiniBand global route header, which has the form of an IPv6 header, or, for RoCE over IPv4, 20
//! undefined bytes and an IPv4 header (InfiniBand Architecture Specification, annex A17). No flag distinguishes them.
//! As in Linux, a header that does not begin like IPv6 is IPv4; one that does is IPv4 if the IPv4 checksum is correct
//! (RFC 791). Soft-RoCE omits the checksum of packets that stay on the host, and writes zeros in front of an IPv4
//! header.

/// The length of the header in front of each datagram.
pub(super) const GRH_LEN_BYTES: usize = 40;

/// The offset of the IPv4 header.
const IPV4_AT: usize = 20;

/// The contents of the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Origin {
    /// The sender's GID.
    pub(super) gid: [u8; 16],
    /// Whether the network marked the packet (ECN-CE, RFC 3168).
    pub(super) is_marked: bool,
}

/// Parse the header; `None` if it is invalid.
pub(super) fn origin(header: &[u8; GRH_LEN_BYTES]) -> Option<Origin> {
    let ipv4 = &header[IPV4_AT..];
    let begins_as_ipv6 = header[0] >> 4 == 6;
    // Version 4, no options.
    if ipv4[0] == 0x45 && (!begins_as_ipv6 || has_checksum(ipv4)) {
        let mut gid = [0; 16];
        gid[10..12].fill(0xff);
        gid[12..].copy_from_slice(&ipv4[12..16]);
        return Some(Origin { gid, is_marked: ipv4[1] & 0b11 == 0b11 });
    }
    let mut gid = [0; 16];
    gid.copy_from_slice(&header[8..24]);
    // The traffic class spans the first two bytes.
    begins_as_ipv6.then_some(Origin { gid, is_marked: header[1] >> 4 & 0b11 == 0b11 })
}

fn has_checksum(header: &[u8]) -> bool {
    let sum: u32 = header.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    (sum & 0xffff) + (sum >> 16) == 0xffff
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header as Linux writes it: no options, to 10.9.0.2, with a checksum.
    fn ipv4(tos: u8, from: [u8; 4]) -> [u8; GRH_LEN_BYTES] {
        let mut header = [0; GRH_LEN_BYTES];
        let ip = &mut header[IPV4_AT..];
        ip.copy_from_slice(&[0x45, tos, 1, 2, 3, 4, 0x40, 0, 64, 17, 0, 0, 0, 0, 0, 0, 10, 9, 0, 2]);
        ip[12..16].copy_from_slice(&from);
        let sum: u32 = ip.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
        let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        header
    }

    fn ipv6(class: u8, from: [u8; 16]) -> [u8; GRH_LEN_BYTES] {
        let mut header = [0; GRH_LEN_BYTES];
        (header[0], header[1]) = (0x60 | class >> 4, class << 4);
        header[8..24].copy_from_slice(&from);
        header
    }

    #[test]
    fn ipv4_and_ipv6_headers_yield_sender_and_mark() {
        let mapped = |ip: [u8; 4]| std::net::Ipv4Addr::from(ip).to_ipv6_mapped().octets();
        for (class, is_marked) in [(0, false), (0b10, false), (0b01, false), (0b11, true), (0xfc, false), (0xff, true)]
        {
            let gid = mapped([10, 9, 0, 1]);
            assert_eq!(origin(&ipv4(class, [10, 9, 0, 1])), Some(Origin { gid, is_marked }));
            let gid = *b"0123456789abcdef";
            assert_eq!(origin(&ipv6(class, gid)), Some(Origin { gid, is_marked }));
        }
    }

    #[test]
    fn bytes_in_front_of_an_ipv4_header_are_ignored() {
        let mut header = ipv4(0, [10, 9, 0, 1]);
        header[..IPV4_AT].fill(0x66);
        assert_eq!(origin(&header).map(|origin| origin.gid[12..].to_vec()), Some(vec![10, 9, 0, 1]));
    }

    #[test]
    fn invalid_headers_yield_no_sender() {
        assert_eq!(origin(&[0; GRH_LEN_BYTES]), None);
        let mut options = ipv4(0, [10, 9, 0, 1]);
        options[IPV4_AT] = 0x46;
        assert_eq!(origin(&options), None);
    }

    #[test]
    fn checksum_matters_only_if_the_header_begins_like_ipv6() {
        let mut header = ipv4(0, [10, 9, 0, 1]);
        header[IPV4_AT + 10..][..2].fill(0);
        assert_eq!(origin(&header).map(|origin| origin.gid[12..].to_vec()), Some(vec![10, 9, 0, 1]));
        header[0] = 0x60;
        assert_eq!(origin(&header).map(|origin| origin.gid), Some(*header[8..24].first_chunk().expect("16 bytes")));
    }
}
