//! How threads of a machine wait for each other: one policy for ranks in collectives on the host, and for ranks that
//! wait for a device in shared memory.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::thread::available_parallelism;
use sumac_hal::ring::SpinPolicy;

/// What a rank does while it waits for another process of its machine.
///
/// Waking a sleeping thread costs tens of microseconds across cores, a yield to a process on the same core a few. What
/// is right depends on the cores that ranks have for themselves; OpenMP has the same choice in `OMP_WAIT_POLICY`
/// (OpenMP 5.2, section 21.10). Ranks may differ in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum WaitPolicy {
    /// Spin for about 20 us if there is a core for each thread, then yield a hundred times, then sleep.
    #[default]
    Auto,
    /// Spin without end: right where each rank has a core of its own, and nothing else needs it.
    Spin,
    /// Yield without end: right where ranks outnumber the cores, and nothing else needs them.
    Yield,
    /// Sleep at once: right where other programs need the cores.
    Sleep,
}

impl WaitPolicy {
    /// Each policy with its name in `SUMAC_WAIT_POLICY`.
    pub const NAMES: [(&'static str, Self); 4] =
        [("auto", Self::Auto), ("spin", Self::Spin), ("yield", Self::Yield), ("sleep", Self::Sleep)];

    /// Return what it means for `threads` threads of this machine that work together.
    pub(crate) fn for_threads(self, threads: usize) -> SpinPolicy {
        self.on(threads, available_parallelism().map_or(1, usize::from))
    }

    /// Return what it means for a wait that is known to be long.
    pub(crate) fn for_long_waits(self, threads: usize) -> SpinPolicy {
        if self == Self::Auto { SpinPolicy::NONE } else { self.for_threads(threads) }
    }

    /// Return what it means for `threads` threads on `cores` cores.
    fn on(self, threads: usize, cores: usize) -> SpinPolicy {
        match self {
            Self::Auto => SpinPolicy::new(threads, cores).with_yields(YIELDS),
            Self::Spin => SpinPolicy { spins: u32::MAX, yields: 0 },
            Self::Yield => SpinPolicy { spins: 0, yields: u32::MAX },
            Self::Sleep => SpinPolicy::NONE,
        }
    }

    /// Return what `ranks` ranks of this machine do, one after the other: `spin, yield, sleep`.
    pub fn stages(self, ranks: usize) -> &'static str {
        let SpinPolicy { spins, yields } = self.for_threads(ranks);
        match (spins, yields) {
            (u32::MAX, _) => "spin",
            (_, u32::MAX) => "yield",
            (0, 0) => "sleep",
            (0, _) => "yield, sleep",
            _ => "spin, yield, sleep",
        }
    }
}

impl fmt::Display for WaitPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, policy)| policy == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

/// Enough for the peers that share a core to run, and to answer.
pub(crate) const YIELDS: u32 = 100;

#[cfg(test)]
mod tests {
    use super::*;
    use sumac_hal::ring::Pause;

    #[test]
    fn policy_decides_whether_a_wait_spins_yields_or_sleeps() {
        let first = |policy: WaitPolicy, threads| policy.on(threads, 4).after(0);
        let late = |policy: WaitPolicy, threads| policy.on(threads, 4).after(1_000_000);
        for threads in [2, 40] {
            assert_eq!((first(WaitPolicy::Spin, threads), late(WaitPolicy::Spin, threads)), (Pause::Spin, Pause::Spin));
            let yields = (first(WaitPolicy::Yield, threads), late(WaitPolicy::Yield, threads));
            assert_eq!(yields, (Pause::Yield, Pause::Yield));
            assert_eq!(first(WaitPolicy::Sleep, threads), Pause::Sleep);
            assert_eq!(late(WaitPolicy::Auto, threads), Pause::Sleep);
        }
        assert_eq!((first(WaitPolicy::Auto, 4), first(WaitPolicy::Auto, 5)), (Pause::Spin, Pause::Yield));
    }

    #[test]
    fn stages_follow_from_the_policy_and_the_cores() {
        let stages = |policy: WaitPolicy| policy.stages(usize::MAX);
        let all = WaitPolicy::NAMES.map(|(_, policy)| stages(policy));
        assert_eq!(all, ["yield, sleep", "spin", "yield", "sleep"]);
        assert_eq!(WaitPolicy::Auto.stages(1), "spin, yield, sleep");
        assert!(WaitPolicy::NAMES.iter().all(|(name, policy)| *name == policy.to_string()));
    }
}
