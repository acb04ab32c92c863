//! How threads of a machine wait for each other: one policy for ranks in collectives on the host, and for ranks that
//! wait for a device in shared memory.

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::thread::{self, available_parallelism};
use std::time::{Duration, Instant};
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

/// Notices that ranks share a core although there is one for each, and moves them apart.
///
/// Threads that yield to each other on one core stay there for up to a quarter of a second, though another core idles:
/// each has just run, so the kernel takes it for one that is better left in its cache (measured on Linux 6.18: 66 us an
/// operation instead of 0.4). MPI's launchers bind ranks to cores. A rank that finds itself in this state moves to any
/// other core that it may use, once, and is free again.
///
/// Where ranks outnumber the cores, all of them may end up on one (8 ranks on two cores: 96 us an operation instead of
/// 31). Then each has a core that it returns to, and these are shared out evenly.
#[derive(Debug, Default)]
pub(crate) struct CoreWatch {
    /// How often in a row a yield has let another thread run.
    long_yields: u32,
    /// How often it has yielded, modulo 2^32.
    yields: u32,
    moved_at: Option<Instant>,
}

/// A rank's number among those of this machine, and theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RankHere {
    pub(crate) index: usize,
    pub(crate) ranks: usize,
}

impl CoreWatch {
    /// Yield the core, and move away if other threads have run here in several yields in a row, although the policy
    /// says that there is a core for each. Of ranks that find that at the same time, the lower one moves first.
    pub(crate) fn yield_core(&mut self, policy: SpinPolicy, rank: u32, here: RankHere) {
        if policy.spins == 0 {
            thread::yield_now();
            self.yields = self.yields.wrapping_add(1);
            if self.yields.is_multiple_of(HOME_INTERVAL) && self.may_move(Instant::now()) {
                go_home(here);
            }
            return;
        }
        let begun = Instant::now();
        thread::yield_now();
        if self.is_over(begun.elapsed(), rank) && self.may_move(begun) {
            leave_core();
        }
    }

    /// Count a yield. Returns whether there were too many long ones in a row.
    fn is_over(&mut self, took: Duration, rank: u32) -> bool {
        self.long_yields = if took > YIELD_MAX { self.long_yields + 1 } else { 0 };
        let is_over = self.long_yields >= LONG_YIELDS_MAX * (1 + rank % TURNS);
        self.long_yields = if is_over { 0 } else { self.long_yields };
        is_over
    }

    /// Return whether the last move was long ago: where cores are in demand, moving helps nobody.
    fn may_move(&mut self, now: Instant) -> bool {
        let may_move = self.moved_at.is_none_or(|at| now.duration_since(at) > MOVE_INTERVAL);
        self.moved_at = if may_move { Some(now) } else { self.moved_at };
        may_move
    }
}

/// Move this thread to another core that it may use, if there is one.
fn leave_core() {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let mut others = allowed;
    others.unset(sched_getcpu());
    if others.count() > 0 && sched_setaffinity(None, &others).is_ok() {
        // It has moved, and may be moved anywhere again.
        let _ = sched_setaffinity(None, &allowed);
    }
}

/// Move this thread to its rank's core, if there are fewer of them than ranks.
fn go_home(here: RankHere) {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let Some(home) = home(&allowed, here).filter(|home| *home != sched_getcpu()) else { return };
    let mut only = CpuSet::new();
    only.set(home);
    if sched_setaffinity(None, &only).is_ok() {
        let _ = sched_setaffinity(None, &allowed);
    }
}

/// Return the core of a rank, of those that it may use, which all others may use too: `None` if there is one for each
/// rank, or only one for all.
fn home(allowed: &CpuSet, here: RankHere) -> Option<usize> {
    let cores = allowed.count() as usize;
    let is_shared = cores > 1 && cores < here.ranks;
    let mut set = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
    is_shared.then(|| set.nth(here.index % cores))?
}

/// A yield that takes longer has let another thread run.
const YIELD_MAX: Duration = Duration::from_micros(5);
/// So many long yields in a row show that a core is shared.
const LONG_YIELDS_MAX: u32 = 4;
/// So many ranks move one after another.
const TURNS: u32 = 8;
/// So many yields pass before a rank looks at the clock, and whether it is on its core.
const HOME_INTERVAL: u32 = 64;
/// The time between two moves.
const MOVE_INTERVAL: Duration = Duration::from_millis(20);

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
    fn rank_moves_after_long_yields_in_a_row_and_the_lower_one_first() {
        let (short, long) = (YIELD_MAX / 2, YIELD_MAX * 2);
        let yields_until_over = |rank| {
            let mut watch = CoreWatch::default();
            (1..).find(|_| watch.is_over(long, rank))
        };
        assert_eq!(yields_until_over(0), Some(LONG_YIELDS_MAX));
        assert!(yields_until_over(1) > yields_until_over(0) && yields_until_over(TURNS) == yields_until_over(0));
        let mut watch = CoreWatch::default();
        assert!((0..100).all(|nth| !watch.is_over(if nth % 3 == 0 { short } else { long }, 0)), "not in a row");
    }

    #[test]
    fn rank_does_not_move_again_soon() {
        let (mut watch, now) = (CoreWatch::default(), Instant::now());
        let moves = [0, 1, 21, 40, 42].map(|ms| watch.may_move(now + Duration::from_millis(ms)));
        assert_eq!(moves, [true, false, true, false, true]);
    }

    #[test]
    fn thread_that_leaves_its_core_may_use_the_same_cores_as_before() {
        let allowed = || sched_getaffinity(None).expect("of this thread");
        thread::spawn(move || {
            let before = allowed();
            leave_core();
            assert_eq!(allowed(), before);
        })
        .join()
        .expect("no panic");
    }

    #[test]
    fn cores_are_shared_out_evenly_among_more_ranks_than_cores() {
        let mut allowed = CpuSet::new();
        [1, 4, 6].into_iter().for_each(|core| allowed.set(core));
        let homes = |ranks| (0..ranks).map(|index| home(&allowed, RankHere { index, ranks })).collect::<Vec<_>>();
        assert_eq!(homes(7), [1, 4, 6, 1, 4, 6, 1].map(Some));
        assert!(homes(3).iter().all(Option::is_none), "a core for each");
        let mut one = CpuSet::new();
        one.set(4);
        assert_eq!(home(&one, RankHere { index: 1, ranks: 7 }), None);
    }

    #[test]
    fn rank_of_many_moves_to_its_core_and_may_use_the_same_cores_as_before() {
        let allowed = sched_getaffinity(None).expect("of this thread");
        let ranks = allowed.count() as usize * 2;
        thread::spawn(move || {
            for index in 0..ranks {
                go_home(RankHere { index, ranks });
                assert_eq!(sched_getaffinity(None).expect("of this thread"), allowed);
            }
        })
        .join()
        .expect("no panic");
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
