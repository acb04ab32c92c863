//! CRC-32C (Castagnoli, as in iSCSI, RFC 3720 B.4), in one call or incrementally.

#[cfg(all(feature = "std", target_arch = "x86_64"))]
mod lanes;

/// Return the CRC-32C (Castagnoli, as in iSCSI, RFC 3720 B.4) of `bytes`.
#[cfg(feature = "std")]
pub fn crc32c(bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if let Some(crc) = lanes::crc32c(bytes) {
        return crc;
    }
    // Uses carry-less multiplication where the processor has it.
    crc_fast::crc32_iscsi(bytes)
}

/// Return the CRC-32C (Castagnoli, as in iSCSI, RFC 3720 B.4) of `bytes`.
#[cfg(not(feature = "std"))]
pub fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = Crc32c::new();
    crc.update(bytes);
    crc.value()
}

/// Return the checksum of a header whose last four bytes are taken to be `payload_crc`, the checksum of what follows.
#[inline]
pub(crate) fn crc32c_header<const WORDS: usize>(header: &[[u8; 8]; WORDS], payload_crc: u32) -> u32 {
    #[cfg(all(feature = "std", target_arch = "x86_64"))]
    if let Some(crc) = lanes::of_header(header, payload_crc) {
        return crc;
    }
    let mut words = *header;
    if let Some([.., a, b, c, d]) = words.last_mut() {
        [*a, *b, *c, *d] = payload_crc.to_le_bytes();
    }
    crc32c(words.as_flattened())
}

/// The words of a header in the short form.
pub(crate) type ShortWords = [[u8; 8]; crate::wire::SHORT_HEADER_LEN / 8];

/// Return [`crc32c_header`] of a header and its payload, and the payload's checksum; 0 if that is empty.
#[inline]
pub(crate) fn crc32c_packet(header: &ShortWords, payload: &[u8]) -> (u32, u32) {
    if payload.is_empty() {
        return (crc32c_header(header, 0), 0);
    }
    #[cfg(all(feature = "std", target_arch = "x86_64"))]
    if let Some(crcs) = lanes::of_packet(header, payload) {
        return crcs;
    }
    let payload_crc = crc32c(payload);
    (crc32c_header(header, payload_crc), payload_crc)
}

/// An incremental CRC-32C.
pub(crate) struct Crc32c(imp::State);

impl Crc32c {
    pub(crate) fn new() -> Self {
        Self(imp::new())
    }

    pub(crate) fn update(&mut self, block: &[u8]) {
        imp::update(&mut self.0, block);
    }

    pub(crate) fn value(self) -> u32 {
        imp::value(self.0)
    }
}

#[cfg(feature = "std")]
mod imp {
    pub(super) type State = crc_fast::Digest;

    pub(super) fn new() -> State {
        State::new(crc_fast::CrcAlgorithm::Crc32Iscsi)
    }

    pub(super) fn update(state: &mut State, block: &[u8]) {
        state.update(block);
    }

    pub(super) fn value(state: State) -> u32 {
        state.finalize() as u32
    }
}

#[cfg(all(not(feature = "std"), target_arch = "aarch64", target_feature = "crc"))]
mod imp {
    use core::arch::aarch64::{__crc32cb, __crc32cd};

    pub(super) type State = u32;

    pub(super) const fn new() -> State {
        u32::MAX
    }

    pub(super) fn update(state: &mut State, block: &[u8]) {
        let (words, rest) = block.as_chunks();
        // SAFETY: this module is compiled only for processors with these instructions (Arm ARM, CRC32CX and CRC32CB).
        let word = |crc, word: &[u8; 8]| unsafe { __crc32cd(crc, u64::from_le_bytes(*word)) };
        // SAFETY: see above.
        let byte = |crc, byte: &u8| unsafe { __crc32cb(crc, *byte) };
        *state = rest.iter().fold(words.iter().fold(*state, word), byte);
    }

    pub(super) const fn value(state: State) -> u32 {
        !state
    }
}

#[cfg(all(not(feature = "std"), not(all(target_arch = "aarch64", target_feature = "crc"))))]
mod imp {
    static CRC: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISCSI);

    pub(super) type State = crc::Digest<'static, u32>;

    pub(super) fn new() -> State {
        CRC.digest()
    }

    pub(super) fn update(state: &mut State, block: &[u8]) {
        state.update(block);
    }

    pub(super) fn value(state: State) -> u32 {
        state.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc_of_a_packet_covers_its_header_and_the_checksum_of_its_payload() {
        let bytes: [u8; 3000] = core::array::from_fn(|at| (at * 7 + at / 256) as u8);
        let words: &ShortWords = bytes.as_chunks().0.first_chunk().expect("long enough");
        for len in [0, 1, 8, 64, 500, 512, 1344, 2900] {
            let payload = &bytes[48..][..len];
            let payload_crc = if payload.is_empty() { 0 } else { crc32c(payload) };
            let mut header = bytes[..48].to_vec();
            header[44..].copy_from_slice(&payload_crc.to_le_bytes());
            assert_eq!(crc32c_packet(words, payload), (crc32c(&header), payload_crc), "{len} bytes");
            assert_eq!(crc32c_header(words, payload_crc), crc32c(&header), "{len} bytes");
        }
    }

    #[test]
    fn incremental_crc_equals_crc_of_all_bytes() {
        let bytes: [u8; 300] = core::array::from_fn(|at| (at * 7) as u8);
        for block in [1, 7, 8, 64, 299, 300] {
            let mut crc = Crc32c::new();
            bytes.chunks(block).for_each(|block| crc.update(block));
            assert_eq!(crc.value(), crc32c(&bytes));
        }
    }
}
