//! Fields of the header that take fewer bits on the wire than in memory: a mark relative to its seq, and a time with 11
//! bits of precision.
//!
//! Invariant: a field that does not fit is written as an earlier mark or a shorter time, never as a later or longer
//! one.

use crate::ids::ChunkNo;

/// Return how far `mark` is below `seq`, in 16 bits; [`LAG_UNKNOWN`] if it is further. A mark above `seq` is reported
/// as `seq`: marks only grow, so a lower one is outdated, never wrong.
pub(super) fn lag_of(seq: u64, mark: u64) -> u16 {
    u16::try_from(seq.saturating_sub(mark)).unwrap_or(LAG_UNKNOWN)
}

/// Return the mark that is `lag` below `seq`.
pub(super) fn mark_of(seq: u64, lag: u16) -> ChunkNo {
    ChunkNo(if lag == LAG_UNKNOWN { 0 } else { seq.saturating_sub(lag.into()) })
}

const LAG_UNKNOWN: u16 = u16::MAX;

/// Return a time in microseconds as 11 bits of mantissa and 5 of exponent, rounded down.
pub(super) const fn late_to_wire(late_us: u32) -> u16 {
    let exponent = (u32::BITS - late_us.leading_zeros()).saturating_sub(LATE_MANTISSA_BITS);
    (exponent << LATE_MANTISSA_BITS | late_us >> exponent) as u16
}

/// Return the time that [`late_to_wire`] has written; the longest for exponents that it does not write.
pub(super) const fn late_from_wire(late: u16) -> u32 {
    let exponent = late as u32 >> LATE_MANTISSA_BITS;
    let largest = u32::BITS - LATE_MANTISSA_BITS;
    let exponent = if exponent < largest { exponent } else { largest };
    (late as u32 & ((1 << LATE_MANTISSA_BITS) - 1)) << exponent
}

const LATE_MANTISSA_BITS: u32 = 11;
