//! What the rates of a fabric's cables allow an operation.
//!
//! The constants of a table are those of processors and of one kind of link. On a fabric with known rates, the plan of
//! the tree says how long a byte takes over the busiest cable or port of each algorithm. No operation takes less time
//! than that, so a device behind one port is not chosen for messages that its port delays.

use super::{JobFacts, TreeFacts, TreeTransport};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use sumac_hal::op::Path;

/// How long bytes take over the busiest cable that an algorithm uses, in picoseconds per byte in one direction. The
/// other edges of the tree, other messages of the same step, and other jobs' trees on that cable are included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkFacts {
    /// A byte of an operation in the tree, over cables and devices' ports.
    pub tree_byte_ps: u64,
    /// A byte that a rank sends to the next one of a ring.
    pub ring_byte_ps: u64,
    /// A byte that a rank sends by halving-doubling.
    pub halving_doubling_byte_ps: u64,
    /// A byte that a rank sends by recursive doubling, or by any other algorithm.
    pub doubling_byte_ps: u64,
}

impl LinkFacts {
    /// Seconds per byte that a rank sends by a host algorithm.
    pub(super) const fn schedule_byte_s(&self, path: Path) -> f64 {
        let ps = match path {
            Path::Ring => self.ring_byte_ps,
            Path::HalvingDoubling => self.halving_doubling_byte_ps,
            _ => self.doubling_byte_ps,
        };
        ps as f64 * 1e-12
    }

    /// How many bytes of an operation the tree takes in this time.
    pub(crate) fn tree_bytes_in(&self, time: Duration) -> u64 {
        u64::try_from(time.as_nanos() * 1000 / u128::from(self.tree_byte_ps.max(1))).unwrap_or(u64::MAX)
    }

    /// Seconds per byte of an operation in the tree.
    pub(super) const fn tree_byte_s(&self) -> f64 {
        self.tree_byte_ps as f64 * 1e-12
    }
}

impl JobFacts {
    /// The rates of cables, if they are known.
    pub(super) fn links(&self) -> Option<&LinkFacts> {
        self.tree.as_ref()?.links.as_ref()
    }
}

impl TreeFacts {
    /// Whether bytes of the tree cross cables: ranks and the devices of their own hosts share memory.
    pub(super) fn crosses_cables(&self, ranks: u32) -> bool {
        self.levels > 1 || self.transport(ranks) != TreeTransport::Shm
    }
}
