//! Link rates, as numbers and in the notation of fabric tools (`4xNDR`).
//!
//! Rates are nominal, per direction, from the InfiniBand roadmap: the number of lanes times the rate of a lane.

use std::fmt;

/// The rate of a link in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rate {
    mbits_per_s: u32,
}

impl Rate {
    /// Create a rate in Gbit/s, or return `None` unless it is above 0 and at most 1,000,000.
    pub fn from_gbits(gbits_per_s: f64) -> Option<Self> {
        let valid = gbits_per_s > 0.0 && gbits_per_s <= 1e6;
        valid.then(|| Self { mbits_per_s: (gbits_per_s * 1000.0).round().max(1.0) as u32 })
    }

    /// The rate in Gbit/s.
    pub fn gbits(self) -> f64 {
        f64::from(self.mbits_per_s) / 1000.0
    }

    /// Parse `<lanes>x<speed>`, such as `4xNDR` (400 Gbit/s) or `1xQDR` (10 Gbit/s).
    ///
    /// Returns `None` for anything else, including unknown speeds (`4x???`).
    pub fn from_width_and_speed(text: &str) -> Option<Self> {
        let (lanes, speed) = text.split_once('x')?;
        let lanes: u32 = lanes.parse().ok().filter(|lanes| matches!(lanes, 1 | 2 | 4 | 8 | 12))?;
        let (_, lane_mbits_per_s) = LANE_MBITS_PER_S.iter().find(|(name, _)| *name == speed)?;
        Some(Self { mbits_per_s: lanes * lane_mbits_per_s })
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} Gbit/s", self.gbits())
    }
}

/// The nominal rate of one lane in Mbit/s (InfiniBand Trade Association, InfiniBand roadmap).
const LANE_MBITS_PER_S: [(&str, u32); 10] = [
    ("SDR", 2_500),
    ("DDR", 5_000),
    ("QDR", 10_000),
    ("FDR10", 10_000),
    ("FDR", 14_000),
    ("EDR", 25_000),
    ("HDR", 50_000),
    ("NDR", 100_000),
    ("XDR", 200_000),
    ("GDR", 400_000),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spelled_rates_have_their_roadmap_values() {
        let golden = [
            ("1xSDR", 2.5),
            ("1xQDR", 10.0),
            ("4xFDR10", 40.0),
            ("4xFDR", 56.0),
            ("4xEDR", 100.0),
            ("2xHDR", 100.0),
            ("4xHDR", 200.0),
            ("4xNDR", 400.0),
            ("12xQDR", 120.0),
            ("4xXDR", 800.0),
        ];
        for (text, gbits_per_s) in golden {
            assert_eq!(Rate::from_width_and_speed(text).map(Rate::gbits), Some(gbits_per_s), "{text}");
        }
        for text in ["4x???", "3xNDR", "xNDR", "4xndr", "4x", "", "mlx5_0", "0xe09d"] {
            assert_eq!(Rate::from_width_and_speed(text), None, "{text}");
        }
    }

    #[test]
    fn rate_out_of_range_is_refused() {
        assert_eq!(Rate::from_gbits(2.5).map(|rate| rate.to_string()), Some("2.5 Gbit/s".into()));
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e7] {
            assert_eq!(Rate::from_gbits(bad), None);
        }
    }
}
