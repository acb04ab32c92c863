//! The random number generator of the emulation: SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
//! generators, OOPSLA 2014). It is implemented here so that a seed keeps its meaning; a crate might change the
//! sequence.

use core::time::Duration;

/// A seeded generator. A seed gives the same numbers on every machine and in every version.
#[derive(Debug, Clone)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// Return a generator for any `seed`.
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Draw 64 random bits.
    pub const fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Draw a number in `0..limit`; 0 if `limit` is 0. The bias of the multiplication (Lemire 2019) is below
    /// `limit / 2^64`.
    pub const fn below(&mut self, limit: u64) -> u64 {
        ((self.next_u64() as u128 * limit as u128) >> 64) as u64
    }

    /// Draw true with a probability of `per_mille` / 1000.
    pub const fn per_mille(&mut self, per_mille: u16) -> bool {
        self.below(1000) < per_mille as u64
    }

    /// Draw a duration in `0..=max`, up to 584 years.
    pub fn duration_up_to(&mut self, max: Duration) -> Duration {
        let max_ns = u64::try_from(max.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(self.below(max_ns.saturating_add(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_matches_the_reference_implementation() {
        // The first outputs of the reference implementation for seed 1234567.
        let mut rng = Rng::new(1_234_567);
        assert_eq!([rng.next_u64(), rng.next_u64()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
    }

    #[test]
    fn draws_have_the_requested_probability_and_range() {
        let mut rng = Rng::new(1);
        let hits = (0..100_000).filter(|_| rng.per_mille(100)).count();
        assert!((9_500..10_500).contains(&hits), "{hits}");
        assert!((0..1000).all(|_| rng.below(7) < 7 && !rng.per_mille(0) && rng.per_mille(1000)));
        assert_eq!(rng.below(0), 0);
    }
}
