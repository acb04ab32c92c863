//! CRC-32C by the processor's instruction, in three interleaved lanes, for the lengths of headers and chunks.
//!
//! The instruction takes 8 bytes, and the next can start every cycle, but its result takes three: three independent
//! lanes keep it busy (Gopal et al., "Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction", Intel 2011).
//! At the end two carry-less multiplications move the checksums of the first lanes behind the last.
//!
//! `crc-fast` folds vectors, which is faster where the processor multiplies several vectors at once (AVX-512 with
//! VPCLMULQDQ): 1,344 bytes took 23 ns there, and 35 ns here. Without that it computes the factors for its
//! multiplications in each call; here they are a table of 512 bytes, for buffers of up to [`MAX_BYTES`].

use super::ShortWords;
use core::arch::x86_64::{_mm_clmulepi64_si128, _mm_crc32_u8, _mm_crc32_u64, _mm_cvtsi64_si128, _mm_cvtsi128_si64};
use core::sync::atomic::{AtomicU8, Ordering};

/// Words of 8 bytes in a block: a lane is a whole number of blocks.
const BLOCK_WORDS: usize = 8;

/// The longest lane in blocks.
const LANE_BLOCKS_MAX: usize = 64;

/// The longest buffer: three lanes, and what is shorter than another block of each.
const MAX_BYTES: usize = 3 * 8 * BLOCK_WORDS * (LANE_BLOCKS_MAX + 1);

/// From this length on, `crc-fast` is faster where it folds wide vectors.
const WIDE_MIN_BYTES: usize = 512;

/// Return the checksum if the processor has the instructions, and the buffer is short enough; `None` also if `crc-fast`
/// is faster.
#[inline]
pub(super) fn crc32c(bytes: &[u8]) -> Option<u32> {
    // SAFETY: the processor has the features that the function needs.
    is_by_lanes(bytes.len()).then(|| unsafe { of::<false>(bytes) })
}

/// What the processor has for checksums. Found once: asking for each feature takes longer than a header's checksum.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
enum Support {
    /// Not looked yet.
    Unknown,
    /// Not the instructions of this module.
    None,
    /// Those, and what `crc-fast` needs to fold wide vectors.
    Wide,
    /// Those, and no wide vectors.
    Lanes,
}

static SUPPORT: AtomicU8 = AtomicU8::new(Support::Unknown as u8);

/// Return what the processor has, as the number of a [`Support`].
#[inline]
fn support() -> u8 {
    match SUPPORT.load(Ordering::Relaxed) {
        0 => find_support(),
        found => found,
    }
}

#[cold]
fn find_support() -> u8 {
    let has_lanes = is_x86_feature_detected!("sse4.2") && is_x86_feature_detected!("pclmulqdq");
    let folds_wide = is_x86_feature_detected!("avx512vl") && is_x86_feature_detected!("vpclmulqdq");
    let found = match (has_lanes, folds_wide) {
        (false, _) => Support::None,
        (true, true) => Support::Wide,
        (true, false) => Support::Lanes,
    };
    // Every thread finds the same.
    SUPPORT.store(found as u8, Ordering::Relaxed);
    found as u8
}

/// Return whether the processor has the instructions.
#[inline]
fn has_lanes() -> bool {
    support() > Support::None as u8
}

/// Return whether the processor has the instructions for a buffer of this length, and `crc-fast` is not faster.
#[inline]
fn is_by_lanes(len_bytes: usize) -> bool {
    let support = support();
    let is_best = support == Support::Lanes as u8 || len_bytes < WIDE_MIN_BYTES && support > Support::None as u8;
    is_best && len_bytes <= MAX_BYTES
}

/// Return the checksum of a header whose last four bytes are taken to be `payload_crc`.
#[inline]
pub(super) fn of_header<const WORDS: usize>(header: &[[u8; 8]; WORDS], payload_crc: u32) -> Option<u32> {
    // SAFETY: the processor has the feature that the function needs.
    has_lanes().then(|| unsafe { header_crc(header, payload_crc) })
}

/// Return [`of_header`], and the checksum of the payload that it takes, which is not empty.
#[inline]
pub(super) fn of_packet(header: &ShortWords, payload: &[u8]) -> Option<(u32, u32)> {
    if !is_by_lanes(payload.len()) {
        return None;
    }
    // SAFETY: the processor has the features that the function needs.
    Some(unsafe { packet_crc(header, payload) })
}

#[target_feature(enable = "sse4.2,pclmulqdq")]
fn packet_crc(header: &ShortWords, payload: &[u8]) -> (u32, u32) {
    let payload_crc = of::<true>(payload);
    (header_crc(header, payload_crc), payload_crc)
}

#[target_feature(enable = "sse4.2")]
#[inline]
fn header_crc<const WORDS: usize>(header: &[[u8; 8]; WORDS], payload_crc: u32) -> u32 {
    let mut crc = u64::from(u32::MAX);
    for (at, &word) in header.iter().enumerate() {
        let word = u64::from_le_bytes(word);
        let is_last = at + 1 == WORDS;
        let word = if is_last { word & u64::from(u32::MAX) | u64::from(payload_crc) << 32 } else { word };
        crc = _mm_crc32_u64(crc, word);
    }
    !(crc as u32)
}

/// Return the checksum. A packet's payload has a copy of the function to itself (`IN_PACKET`), which the compiler makes
/// part of its only caller.
#[target_feature(enable = "sse4.2,pclmulqdq")]
#[inline]
fn of<const IN_PACKET: bool>(bytes: &[u8]) -> u32 {
    let (mut words, rest) = bytes.as_chunks::<8>();
    let mut crc = u64::from(u32::MAX);
    let lane_blocks = (words.len() / (3 * BLOCK_WORDS)).min(LANE_BLOCKS_MAX);
    if lane_blocks > 0 {
        let (lanes, others) = words.split_at(3 * lane_blocks * BLOCK_WORDS);
        let (first, lanes) = lanes.as_chunks::<BLOCK_WORDS>().0.split_at(lane_blocks);
        let (second, third) = lanes.split_at(lane_blocks);
        let (mut a, mut b, mut c) = (crc, 0, 0);
        for ((first, second), third) in first.iter().zip(second).zip(third) {
            for at in 0..BLOCK_WORDS {
                a = _mm_crc32_u64(a, u64::from_le_bytes(first[at]));
                b = _mm_crc32_u64(b, u64::from_le_bytes(second[at]));
                c = _mm_crc32_u64(c, u64::from_le_bytes(third[at]));
            }
        }
        let moved = product(a, FACTORS[2 * lane_blocks - 1]) ^ product(b, FACTORS[lane_blocks - 1]);
        crc = c ^ _mm_crc32_u64(0, moved);
        if others.is_empty() && rest.is_empty() {
            return !(crc as u32);
        }
        words = others;
    }
    let (blocks, words) = words.as_chunks::<BLOCK_WORDS>();
    for block in blocks {
        for &word in block {
            crc = _mm_crc32_u64(crc, u64::from_le_bytes(word));
        }
    }
    for &word in words {
        crc = _mm_crc32_u64(crc, u64::from_le_bytes(word));
    }
    behind(crc, rest)
}

/// Return the checksum of `bytes` behind others that have left the processor's state at `crc`.
#[target_feature(enable = "sse4.2")]
#[inline]
fn behind(mut crc: u64, bytes: &[u8]) -> u32 {
    let (words, rest) = bytes.as_chunks::<8>();
    for &word in words {
        crc = _mm_crc32_u64(crc, u64::from_le_bytes(word));
    }
    !rest.iter().fold(crc as u32, |crc, &byte| _mm_crc32_u8(crc, byte))
}

/// Return the product of two polynomials, of which the instruction then takes the checksum.
#[target_feature(enable = "pclmulqdq,sse4.2")]
#[inline]
fn product(crc: u64, factor: u32) -> u64 {
    let product = _mm_clmulepi64_si128::<0>(_mm_cvtsi64_si128(crc as i64), _mm_cvtsi64_si128(i64::from(factor)));
    _mm_cvtsi128_si64(product) as u64
}

/// The factor at `n - 1` moves a checksum behind `n` blocks: x to the power of that number of bits, less 33, modulo the
/// polynomial. The checksum of the product multiplies by x^32, and the product of two bit-reversed numbers by x.
static FACTORS: [u32; 2 * LANE_BLOCKS_MAX] = {
    /// The polynomial, bit-reversed: the lowest bit is that of x^31.
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let mut factors = [0; 2 * LANE_BLOCKS_MAX];
    let (mut power, mut exponent) = (1_u32 << 31, 0);
    let mut at = 0;
    while at < factors.len() {
        while exponent < (at + 1) * BLOCK_WORDS * 64 - 33 {
            power = power >> 1 ^ if power & 1 == 1 { POLYNOMIAL } else { 0 };
            exponent += 1;
        }
        factors[at] = power;
        at += 1;
    }
    factors
};

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn lanes_give_the_crc_of_a_table_at_every_length_and_alignment() {
        let reference = crc::Crc::<u32>::new(&crc::CRC_32_ISCSI);
        let bytes: Vec<u8> = (0..2 * MAX_BYTES as u64).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 11) as u8).collect();
        let edges = (1..=LANE_BLOCKS_MAX + 1).flat_map(|blocks| [0, 7, 8, 9].map(|more| 192 * blocks + more));
        for len in (0..600).chain(1340..1350).chain(edges) {
            let bytes = &bytes[len % 8..][..len];
            if has_lanes() && len <= MAX_BYTES {
                // SAFETY: the processor has the features that the function needs.
                let found = unsafe { (of::<false>(bytes), of::<true>(bytes)) };
                let expected = reference.checksum(bytes);
                assert_eq!(found, (expected, expected), "{len} bytes");
            }
        }
        assert!(!is_by_lanes(MAX_BYTES + 1));
    }
}
