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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LinkFacts {
    /// A byte of an operation in the tree, over cables and devices' ports.
    pub tree_byte_ps: u64,
    /// A byte that a rank sends by a host algorithm.
    pub schedule_byte_ps: PathTimes,
    /// The same by an algorithm whose routes were not followed.
    pub others_byte_ps: u64,
}

/// A time for each of some paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<(Path, u64)>", into = "Vec<(Path, u64)>")]
pub struct PathTimes {
    /// By the path's number; [`UNKNOWN`] for the others. Longer times than fit are as bad as the longest.
    by_number: [u32; PATHS_MAX],
}

/// Above the numbers of all paths.
const PATHS_MAX: usize = 48;
const UNKNOWN: u32 = u32::MAX;

impl Default for PathTimes {
    /// No path's time is known.
    fn default() -> Self {
        Self { by_number: [UNKNOWN; PATHS_MAX] }
    }
}

impl FromIterator<(Path, u64)> for PathTimes {
    fn from_iter<T: IntoIterator<Item = (Path, u64)>>(times: T) -> Self {
        let mut all = Self::default();
        for (path, time) in times {
            if let Some(known) = all.by_number.get_mut(path as usize) {
                *known = u32::try_from(time).unwrap_or(UNKNOWN).min(UNKNOWN - 1);
            }
        }
        all
    }
}

impl From<Vec<(Path, u64)>> for PathTimes {
    fn from(times: Vec<(Path, u64)>) -> Self {
        times.into_iter().collect()
    }
}

impl From<PathTimes> for Vec<(Path, u64)> {
    fn from(times: PathTimes) -> Self {
        Path::ALL.iter().filter_map(|&path| Some((path, times.get(path)?))).collect()
    }
}

impl PathTimes {
    /// The time of a path, if it is known.
    pub fn get(&self, path: Path) -> Option<u64> {
        self.by_number.get(path as usize).copied().filter(|time| *time != UNKNOWN).map(u64::from)
    }
}

impl LinkFacts {
    /// Seconds per byte that a rank sends by a host algorithm.
    pub(super) fn schedule_byte_s(&self, path: Path) -> f64 {
        self.schedule_byte_ps.get(path).unwrap_or(self.others_byte_ps) as f64 * 1e-12
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
