//! Who sent a datagram: the 40 bytes in front of it, which a device writes there.
//!
//! They are an InfiniBand global route header, which has the form of an IPv6 header, or, for RoCE over IPv4, 20 bytes of
//! anything and an IPv4 header (InfiniBand Architecture Specification, annex A17). No flag says which. As in Linux, what
//! does not begin like an IPv6 header is IPv4's; what does is IPv4's if the checksum of an IPv4 header is right (RFC 791).
//! Soft-RoCE leaves the checksum out of packets that stay on the host, and zeros in front of an IPv4 header.

/// The length of what is in front of each datagram.
pub(super) const GRH_LEN_BYTES: usize = 40;

/// Where the IPv4 header begins.
const IPV4_AT: usize = 20;

/// What the header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Origin {
    /// The sender's identifier.
    pub(super) gid: [u8; 16],
    /// Whether the network says that the packet met congestion (RFC 3168).
    pub(super) is_marked: bool,
}

/// Read the header; `None` if it is none.
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
    // The traffic class lies across the first two bytes.
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
    fn both_kinds_of_headers_say_who_sent_and_whether_it_was_marked() {
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
    fn bytes_in_front_of_an_ipv4_header_say_nothing() {
        let mut header = ipv4(0, [10, 9, 0, 1]);
        header[..IPV4_AT].fill(0x66);
        assert_eq!(origin(&header).map(|origin| origin.gid[12..].to_vec()), Some(vec![10, 9, 0, 1]));
    }

    #[test]
    fn what_is_no_header_is_nobodys() {
        assert_eq!(origin(&[0; GRH_LEN_BYTES]), None);
        let mut options = ipv4(0, [10, 9, 0, 1]);
        options[IPV4_AT] = 0x46;
        assert_eq!(origin(&options), None);
    }

    #[test]
    fn a_checksum_decides_only_where_there_is_a_doubt() {
        let mut header = ipv4(0, [10, 9, 0, 1]);
        header[IPV4_AT + 10..][..2].fill(0);
        assert_eq!(origin(&header).map(|origin| origin.gid[12..].to_vec()), Some(vec![10, 9, 0, 1]));
        header[0] = 0x60;
        assert_eq!(origin(&header).map(|origin| origin.gid), Some(*header[8..24].first_chunk().expect("16 bytes")));
    }
}
