//! Packets of the data plane.
//!
//! Input: a byte of options (bit 0: write a valid length and checksums), then the packet.

use sumac_hal::op::Path;
use sumac_hal::wire::{HEADER_LEN, Kind, MAGIC, NakReason, Packet, RankMask, Repr, VERSION, payload_crc, unpack_op};

/// Offsets of the header fields that are written.
const VERSION_AT: usize = 4;
const PAYLOAD_LEN_AT: usize = 58;
const CRC_AT: usize = 92;

/// Write the constant fields, the length and the checksum.
pub fn mend(packet: &mut [u8]) {
    let Some(payload) = packet.get(HEADER_LEN..) else { return };
    let (len, crc) = (payload.len() as u16, payload_crc(payload));
    packet[..4].copy_from_slice(&MAGIC.to_le_bytes());
    packet[VERSION_AT] = VERSION;
    packet[PAYLOAD_LEN_AT..][..2].copy_from_slice(&len.to_le_bytes());
    let mut header = [0; HEADER_LEN];
    header[..CRC_AT].copy_from_slice(&packet[..CRC_AT]);
    header[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    packet[CRC_AT..HEADER_LEN].copy_from_slice(&sumac_hal::wire::crc32c(&header).to_le_bytes());
}

/// Run the target.
///
/// # Panics
/// If an invariant is violated.
pub fn run(data: &[u8]) {
    with(data, RankMask::from_bytes);
}

/// Run the target with a planted bug in the parser of rank sets: its length is not checked.
///
/// # Panics
/// As [`run`], and if the bug takes effect.
#[cfg(feature = "planted")]
pub fn planted(data: &[u8]) {
    with(data, RankMask::from_bytes_unchecked);
}

fn with(data: &[u8], read_mask: fn(&[u8]) -> Option<RankMask>) {
    let Some((options, packet)) = data.split_first() else { return };
    let mut bytes = packet.to_vec();
    if options & 1 != 0 {
        mend(&mut bytes);
    }
    let Ok((packet, crc)) = Packet::new_checked_with_crc(&bytes[..]) else { return };
    assert_eq!(crc, payload_crc(packet.payload()));
    let Ok(repr) = Repr::parse(&packet) else { return };
    assert_eq!(repr.packet_len(), bytes.len());
    let carries_ranks = matches!(repr.kind, Kind::Late | Kind::Cut) || repr.reason == Some(NakReason::Stragglers);
    if carries_ranks && let Some(mask) = read_mask(packet.payload()) {
        assert_eq!(mask.to_bytes(), packet.payload());
        assert_eq!(mask.iter().collect::<RankMask>(), mask);
        assert_eq!(mask.len() as usize, mask.iter().count());
        assert_eq!(RankMask::from_halves(mask.halves()), mask);
    }
    if let Some(desc) = repr.op_desc() {
        let _ = (desc.signature(Path::Tree, 1), sumac_hal::wire::pack_op(&desc));
    }
    let _ = (unpack_op(repr.bits), unpack_op(repr.bits2));
    if let Some((limit, _)) = repr.limit() {
        let _ = limit.sign(repr.signature);
    }
    // Parsed packets survive a round trip.
    let mut again = bytes.clone();
    repr.emit(&mut Packet::new_unchecked(&mut again[..]), crc);
    let packet = Packet::new_checked(&again[..]).expect("what was written is a packet");
    assert_eq!(Repr::parse(&packet), Ok(repr));
}
