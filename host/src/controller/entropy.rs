//! The source of secrets: the system, or a seed for reproducible test runs.

use super::admit::random_bytes;

/// A source of unpredictable numbers.
#[derive(Debug, Clone, Copy)]
pub enum Entropy {
    /// The system.
    System,
    /// Predictable numbers, for tests and the simulator only.
    Seeded(u64),
}

impl Entropy {
    /// Draw bytes. From a seed, the same `what` yields the same bytes.
    pub(super) fn bytes<const N: usize>(self, what: [u64; 2]) -> [u8; N] {
        match self {
            Self::System => random_bytes(),
            Self::Seeded(seed) => {
                let mut state = what.into_iter().fold(seed, |state, part| mix(state ^ part));
                std::array::from_fn(|_| {
                    state = mix(state);
                    state as u8
                })
            }
        }
    }
}

/// The finaliser of SplitMix64.
const fn mix(state: u64) -> u64 {
    let mixed = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}
