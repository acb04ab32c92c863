//! Message sizes with units: `8`, `4K`, `16M`, `1GiB`. Units are powers of 1024, as in nccl-tests.

use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SizeBytes(pub(crate) u64);

/// Why a size cannot be parsed.
#[derive(Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub(crate) enum SizeError {
    /// No digits, or an unknown unit.
    #[error("{0:?} is not a size; use a whole number of bytes, optionally with K, M or G, as in 8, 4K or 16M")]
    Syntax(String),
    /// More than 64 bits.
    #[error("{0} exceeds the limit of {limit} bytes", limit = u64::MAX)]
    TooLarge(String),
}

impl FromStr for SizeBytes {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let digits_len = text.bytes().take_while(u8::is_ascii_digit).count();
        let (digits, unit) = text.split_at(digits_len);
        let shift = match unit.trim_start().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            _ => return Err(SizeError::Syntax(text.into())),
        };
        if digits.is_empty() {
            return Err(SizeError::Syntax(text.into()));
        }
        let number: u64 = digits.parse().map_err(|_| SizeError::TooLarge(text.into()))?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(|| SizeError::TooLarge(text.into()))
    }
}

impl fmt::Display for SizeBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(n) = *self;
        for (shift, unit) in [(30, 'G'), (20, 'M'), (10, 'K')] {
            if n >= 1 << shift && n.trailing_zeros() >= shift {
                return write!(f, "{}{unit}", n >> shift);
            }
        }
        n.fmt(f)
    }
}

/// What leads from one size of a sweep to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// A factor of at least 2. As no factor leads away from 0, the size after 0 is 8 bytes.
    Factor(u32),
    /// A difference of at least one byte.
    Bytes(SizeBytes),
}

/// Return the sizes of a sweep, from `begin` to `end`.
pub(crate) fn sweep(begin: SizeBytes, end: SizeBytes, step: Step) -> impl Iterator<Item = SizeBytes> + Clone {
    let next = move |size: &SizeBytes| match (step, size.0) {
        (Step::Factor(_), 0) => Some(SizeBytes(8)),
        (Step::Factor(factor), n) => n.checked_mul(u64::from(factor.max(2))).map(SizeBytes),
        (Step::Bytes(SizeBytes(step)), n) => n.checked_add(step.max(1)).map(SizeBytes),
    };
    std::iter::successors(Some(begin), next).take_while(move |size| *size <= end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn units_are_powers_of_1024() {
        for (text, bytes) in [("0", 0), ("8", 8), ("4K", 4096), ("16M", 16 << 20), ("1GiB", 1 << 30), ("2 kb", 2048)] {
            assert_eq!(text.parse(), Ok(SizeBytes(bytes)), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_refused_with_their_text() {
        for text in ["", "K", "-1", "1.5M", "8 apples", "0x10"] {
            assert_eq!(text.parse::<SizeBytes>(), Err(SizeError::Syntax(text.into())));
        }
        for text in ["18446744073709551616", "17179869184G"] {
            assert_eq!(text.parse::<SizeBytes>(), Err(SizeError::TooLarge(text.into())));
        }
    }

    fn sizes(begin: u64, end: u64, step: Step) -> Vec<u64> {
        sweep(SizeBytes(begin), SizeBytes(end), step).map(|size| size.0).collect()
    }

    #[test]
    fn sweep_by_bytes_has_equal_differences() {
        let sizes = |b, e, step| sizes(b, e, Step::Bytes(SizeBytes(step)));
        assert_eq!(sizes(0, 24, 8), [0, 8, 16, 24]);
        assert_eq!(sizes(8, 30, 10), [8, 18, 28]);
        assert_eq!(sizes(u64::MAX - 1, u64::MAX, 4), [u64::MAX - 1]);
    }

    #[test]
    fn sweep_includes_its_end_and_continues_from_zero_at_8() {
        let sizes = |b, e, f| sizes(b, e, Step::Factor(f));
        assert_eq!(sizes(8, 512, 8), [8, 64, 512]);
        assert_eq!(sizes(8, 511, 8), [8, 64]);
        assert_eq!(sizes(0, 32, 2), [0, 8, 16, 32]);
        assert_eq!(sizes(1 << 63, u64::MAX, 4), [1 << 63]);
        assert_eq!(sizes(9, 8, 2), [0_u64; 0]);
    }

    proptest! {
        #[test]
        fn printed_sizes_parse_back(bytes: u64, shift in 0_u32..40) {
            let size = SizeBytes(bytes >> shift << (shift / 2));
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }
    }
}
