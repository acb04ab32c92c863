//! [`Packet`]: a packet's fields, read and written in place.

use super::{HEADER_LEN, MAGIC, VERSION, crc32c};
use thiserror::Error;

/// Why bytes are not a valid packet of this version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// Shorter than a header.
    #[error("packet of {len} bytes is shorter than the header of 96 bytes")]
    Truncated {
        /// The buffer's length in bytes.
        len: usize,
    },
    /// Not a Sumac packet.
    #[error("magic is {found:#010x}, expected 0x434d5553 (\"SUMC\")")]
    Magic {
        /// The packet's magic.
        found: u32,
    },
    /// A packet of another version.
    #[error("header version is {found}; this build supports version 1")]
    Version {
        /// The packet's version.
        found: u8,
    },
    /// The length field does not match the packet's length.
    #[error("the header declares {declared} payload bytes, but the packet has {actual}")]
    Length {
        /// In the header.
        declared: usize,
        /// In the packet.
        actual: usize,
    },
    /// The packet is damaged.
    #[error("checksum is {found:#010x}, expected {computed:#010x}: the packet is damaged")]
    Checksum {
        /// In the header.
        found: u32,
        /// Computed from the bytes.
        computed: u32,
    },
    /// This version does not know a field's number.
    #[error("unknown {field} number {number}: the sender may be a newer version")]
    UnknownNumber {
        /// The name of the field.
        field: &'static str,
        /// The field's value.
        number: u8,
    },
}

/// A packet in a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet<T> {
    buffer: T,
}

/// The byte range of each field in the header. `wireshark/sumac.lua` repeats them, which a test compares.
mod field {
    use core::ops::Range;
    pub(super) const MAGIC: Range<usize> = 0..4;
    pub(super) const VERSION: usize = 4;
    pub(super) const KIND: usize = 5;
    pub(super) const FLAGS: Range<usize> = 6..8;
    pub(super) const COLLECTIVE: usize = 8;
    pub(super) const DTYPE: usize = 9;
    pub(super) const OP: usize = 10;
    pub(super) const REASON: usize = 11;
    pub(super) const GROUP: Range<usize> = 12..16;
    pub(super) const EPOCH: Range<usize> = 16..20;
    pub(super) const CHILD: Range<usize> = 20..22;
    pub(super) const COUNT: Range<usize> = 22..24;
    pub(super) const SEQ: Range<usize> = 24..32;
    pub(super) const MARK: Range<usize> = 32..40;
    pub(super) const KEY: Range<usize> = 40..48;
    pub(super) const SIGNATURE: Range<usize> = 48..52;
    pub(super) const TOKEN: Range<usize> = 52..56;
    pub(super) const WINDOW: Range<usize> = 56..58;
    pub(super) const PAYLOAD_LEN: Range<usize> = 58..60;
    pub(super) const ATTEMPT: Range<usize> = 60..62;
    pub(super) const VIEW: Range<usize> = 62..64;
    pub(super) const BITS: Range<usize> = 64..72;
    pub(super) const BITS2: Range<usize> = 72..80;
    pub(super) const ROOT: Range<usize> = 80..84;
    pub(super) const SLOWEST: Range<usize> = 84..88;
    pub(super) const LATE_US: Range<usize> = 88..92;
    pub(super) const CRC: Range<usize> = 92..96;
}

/// Return name, offset and length of each field, for the test of the dissector.
#[cfg(test)]
pub(crate) fn field_ranges() -> [(&'static str, usize, usize); 27] {
    [
        ("magic", field::MAGIC),
        ("version", field::VERSION..field::VERSION + 1),
        ("kind", field::KIND..field::KIND + 1),
        ("flags", field::FLAGS),
        ("collective", field::COLLECTIVE..field::COLLECTIVE + 1),
        ("dtype", field::DTYPE..field::DTYPE + 1),
        ("op", field::OP..field::OP + 1),
        ("reason", field::REASON..field::REASON + 1),
        ("group", field::GROUP),
        ("epoch", field::EPOCH),
        ("child", field::CHILD),
        ("count", field::COUNT),
        ("seq", field::SEQ),
        ("mark", field::MARK),
        ("key", field::KEY),
        ("signature", field::SIGNATURE),
        ("token", field::TOKEN),
        ("window", field::WINDOW),
        ("payload_len", field::PAYLOAD_LEN),
        ("attempt", field::ATTEMPT),
        ("view", field::VIEW),
        ("bits", field::BITS),
        ("bits2", field::BITS2),
        ("root", field::ROOT),
        ("slowest", field::SLOWEST),
        ("late_us", field::LATE_US),
        ("crc", field::CRC),
    ]
    .map(|(name, range)| (name, range.start, range.len()))
}

/// Return the checksum of a payload for [`Repr::emit`](super::Repr::emit); 0 if it is empty.
pub fn payload_crc(payload: &[u8]) -> u32 {
    if payload.is_empty() { 0 } else { crc32c(payload) }
}

/// Return the packet's checksum: over the header before the checksum field, followed by the payload's checksum.
fn packet_crc(header: &[u8], payload_crc: u32) -> u32 {
    let mut bytes = [0_u8; HEADER_LEN];
    bytes[..field::CRC.start].copy_from_slice(&header[..field::CRC.start]);
    bytes[field::CRC].copy_from_slice(&payload_crc.to_le_bytes());
    crc32c(&bytes)
}

macro_rules! read {
    ($($(#[$meta:meta])* $name:ident: $ty:ident = $field:ident;)*) => {$(
        $(#[$meta])*
        pub fn $name(&self) -> $ty {
            let mut bytes = [0; size_of::<$ty>()];
            bytes.copy_from_slice(&self.buffer.as_ref()[field::$field]);
            $ty::from_le_bytes(bytes)
        }
    )*};
}

macro_rules! read_byte {
    ($($(#[$meta:meta])* $name:ident = $field:ident;)*) => {$(
        $(#[$meta])*
        pub fn $name(&self) -> u8 {
            self.buffer.as_ref()[field::$field]
        }
    )*};
}

macro_rules! write {
    ($($name:ident: $ty:ident = $field:ident;)*) => {$(
        pub(super) fn $name(&mut self, value: $ty) {
            self.buffer.as_mut()[field::$field].copy_from_slice(&value.to_le_bytes());
        }
    )*};
}

macro_rules! write_byte {
    ($($name:ident = $field:ident;)*) => {$(
        pub(super) fn $name(&mut self, value: u8) {
            self.buffer.as_mut()[field::$field] = value;
        }
    )*};
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// View a buffer as a packet, without any check.
    pub const fn new_unchecked(buffer: T) -> Self {
        Self { buffer }
    }

    /// View a buffer as a packet if it holds exactly one intact packet of this version.
    ///
    /// # Errors
    /// [`WireError`] for the first failed check of: header length, magic, version, payload length, checksum.
    pub fn new_checked(buffer: T) -> Result<Self, WireError> {
        Self::new_checked_with_crc(buffer).map(|(packet, _)| packet)
    }

    /// Like [`Packet::new_checked`], but also return the [`payload_crc`], for nodes that forward the payload.
    ///
    /// # Errors
    /// As [`Packet::new_checked`].
    pub fn new_checked_with_crc(buffer: T) -> Result<(Self, u32), WireError> {
        let packet = Self::new_unchecked(buffer);
        let len = packet.buffer.as_ref().len();
        if len < HEADER_LEN {
            return Err(WireError::Truncated { len });
        }
        if packet.magic() != MAGIC {
            return Err(WireError::Magic { found: packet.magic() });
        }
        if packet.version() != VERSION {
            return Err(WireError::Version { found: packet.version() });
        }
        let (declared, actual) = (usize::from(packet.payload_len()), len - HEADER_LEN);
        if declared != actual {
            return Err(WireError::Length { declared, actual });
        }
        let payload_crc = payload_crc(packet.payload());
        let computed = packet_crc(packet.buffer.as_ref(), payload_crc);
        if packet.crc() != computed {
            return Err(WireError::Checksum { found: packet.crc(), computed });
        }
        Ok((packet, payload_crc))
    }

    /// Return the buffer.
    pub fn into_inner(self) -> T {
        self.buffer
    }

    read_byte! {
        /// Return the version field.
        version = VERSION;
        /// Return the kind field.
        kind = KIND;
        /// Return the collective field.
        collective = COLLECTIVE;
        /// Return the element type field.
        dtype = DTYPE;
        /// Return the operator field.
        op = OP;
        /// Return the Nak reason field.
        reason = REASON;
    }

    read! {
        /// Return the magic field.
        magic: u32 = MAGIC;
        /// Return the flags field.
        flags: u16 = FLAGS;
        /// Return the group field.
        group: u32 = GROUP;
        /// Return the epoch field.
        epoch: u32 = EPOCH;
        /// Return the child field.
        child: u16 = CHILD;
        /// Return the count field.
        count: u16 = COUNT;
        /// Return the sequence number field.
        seq: u64 = SEQ;
        /// Return the mark field (`have` up, `stable` down).
        mark: u64 = MARK;
        /// Return the key field.
        key: u64 = KEY;
        /// Return the signature field.
        signature: u32 = SIGNATURE;
        /// Return the token field.
        token: u32 = TOKEN;
        /// Return the window field.
        window: u16 = WINDOW;
        /// Return the payload length field.
        payload_len: u16 = PAYLOAD_LEN;
        /// Return the attempt field.
        attempt: u16 = ATTEMPT;
        /// Return the view field: the number of decisions to continue without stragglers.
        view: u16 = VIEW;
        /// Return the first bitmap field.
        bits: u64 = BITS;
        /// Return the second bitmap field.
        bits2: u64 = BITS2;
        /// Return the root field.
        root: u32 = ROOT;
        /// Return the slowest-rank field: the rank plus one, or 0 if unknown.
        slowest: u32 = SLOWEST;
        /// Return the lateness field: how late that rank was, in microseconds.
        late_us: u32 = LATE_US;
        /// Return the checksum field.
        crc: u32 = CRC;
    }

    /// Return the payload.
    pub fn payload(&self) -> &[u8] {
        &self.buffer.as_ref()[HEADER_LEN..]
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> Packet<T> {
    /// Return the payload for writing.
    pub fn payload_mut(&mut self) -> &mut [u8] {
        &mut self.buffer.as_mut()[HEADER_LEN..]
    }

    pub(super) fn clear_header(&mut self) {
        let header = &mut self.buffer.as_mut()[..HEADER_LEN];
        header.fill(0);
        header[field::MAGIC].copy_from_slice(&MAGIC.to_le_bytes());
        header[field::VERSION] = VERSION;
    }

    write_byte! {
        set_kind = KIND;
        set_collective = COLLECTIVE;
        set_dtype = DTYPE;
        set_op = OP;
        set_reason = REASON;
    }

    write! {
        set_flags: u16 = FLAGS;
        set_group: u32 = GROUP;
        set_epoch: u32 = EPOCH;
        set_child: u16 = CHILD;
        set_count: u16 = COUNT;
        set_seq: u64 = SEQ;
        set_mark: u64 = MARK;
        set_key: u64 = KEY;
        set_signature: u32 = SIGNATURE;
        set_token: u32 = TOKEN;
        set_window: u16 = WINDOW;
        set_payload_len: u16 = PAYLOAD_LEN;
        set_attempt: u16 = ATTEMPT;
        set_view: u16 = VIEW;
        set_bits: u64 = BITS;
        set_bits2: u64 = BITS2;
        set_root: u32 = ROOT;
        set_slowest: u32 = SLOWEST;
        set_late_us: u32 = LATE_US;
    }

    /// Write the checksum. Call it after all other fields are set.
    pub(super) fn seal(&mut self, payload_crc: u32) {
        let crc = packet_crc(self.buffer.as_ref(), payload_crc);
        self.buffer.as_mut()[field::CRC].copy_from_slice(&crc.to_le_bytes());
    }
}
