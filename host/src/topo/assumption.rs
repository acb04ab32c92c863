//! What a file does not say and a plan needs.
//!
//! Invariant: nothing is assumed in silence. Whoever prints a plan prints [`Fabric::assumptions`] with it.

use super::{AggregationNode, Fabric};
use std::fmt;

/// Something that is taken for granted because the source does not say it. Displays as a sentence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Assumption {
    /// No switch has an aggregation node in the source; every switch is taken to have a device.
    DevicesAtSwitches {
        /// The number of switches.
        switches: usize,
    },
    /// The source names no cables; each switch and node is taken to hang by one on what the source puts above it.
    OneCableEach,
    /// The source does not say how blocks are connected; one switch is taken to join them.
    BlocksJoined {
        /// The number of blocks.
        blocks: usize,
    },
    /// Cables without a rate; they are taken to be as fast as each other.
    EqualRates {
        /// Cables without a rate.
        unknown: usize,
        /// All cables.
        cables: usize,
    },
}

impl fmt::Display for Assumption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DevicesAtSwitches { switches } => {
                write!(f, "the file names no aggregation nodes; a device is assumed at each of the {switches} switches")
            }
            Self::OneCableEach => f.write_str(
                "the file names no cables; one is assumed from each node to its leaf and from each switch to the one \
                 above it, so sharing and rates may be wrong",
            ),
            Self::BlocksJoined { blocks } => write!(
                f,
                "the file does not say how its {blocks} blocks are connected; one switch above them is assumed, with \
                 one cable to each"
            ),
            Self::EqualRates { unknown, cables } => {
                write!(f, "the rates of {unknown} of {cables} cables are unknown; those cables are assumed to be alike")
            }
        }
    }
}

impl Fabric {
    /// What the source does not say and is taken for granted, in a fixed order.
    pub fn assumptions(&self) -> Vec<Assumption> {
        let (unknown, cables) = (self.links.iter().filter(|link| link.rate.is_none()).count(), self.links.len());
        let rates = (unknown > 0).then_some(Assumption::EqualRates { unknown, cables });
        self.assumptions.iter().copied().chain(rates).collect()
    }

    /// Assume a device at every switch if no switch has an aggregation node, as in dumps of fabrics without them. A
    /// fabric with aggregation nodes stays as it is.
    #[must_use]
    pub fn with_devices_assumed(mut self) -> Self {
        if self.switches.iter().any(|switch| switch.aggregation.is_some()) {
            return self;
        }
        for switch in &mut self.switches {
            switch.aggregation = Some(AggregationNode { guid: None, rate: None });
        }
        self.assumptions.push(Assumption::DevicesAtSwitches { switches: self.switches.len() });
        self
    }
}
