//! Packets of the data plane.
//!
//! Input: a byte of options (bit 0: write the constant fields and a valid checksum), then the packet.

use sumac_hal::op::Path;
use sumac_hal::wire::{
    Flags, HEADER_LEN, Kind, MAGIC, NakReason, Packet, RankMask, Repr, SHORT_HEADER_LEN, VERSION, payload_crc,
    unpack_op,
};

/// The offset of the flags, which decide on the header's form.
const FLAGS_AT: usize = 3;

/// Write the constant fields and the checksum.
pub fn mend(packet: &mut [u8]) {
    let is_short = packet.get(FLAGS_AT).is_some_and(|flags| flags & Flags::SHORT.bits() != 0);
    let Some((header, payload)) = packet.split_at_mut_checked(if is_short { SHORT_HEADER_LEN } else { HEADER_LEN })
    else {
        return;
    };
    (header[0], header[1]) = (MAGIC, VERSION);
    let (covered, crc) = header.split_at_mut(header.len() - size_of::<u32>());
    let covered = [&*covered, &payload_crc(payload).to_le_bytes()].concat();
    crc.copy_from_slice(&sumac_hal::wire::crc32c(&covered).to_le_bytes());
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
