//! How long a waiting thread polls before it sleeps.
//!
//! A wake-up across cores costs about 20 us on a virtual machine, while polling costs nothing as long as no other
//! thread needs the core. So a wait first spins, then yields, which suffices if the peer shares the core, and only then
//! sleeps. With more threads than cores it does not spin, because spinning would only keep the peer from running.

/// What to do after a poll that found nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pause {
    /// Poll again at once.
    Spin,
    /// Yield the core, then poll again.
    Yield,
    /// Arm the doorbell, poll once more, and sleep.
    Sleep,
}

/// How often to spin and to yield before sleeping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpinPolicy {
    /// The number of polls without a pause; `u32::MAX` means without end.
    pub spins: u32,
    /// The number of polls after those that yield first; `u32::MAX` means without end.
    pub yields: u32,
}

impl SpinPolicy {
    /// About 20 us of spinning, the cost of a wake-up across cores.
    const SPINS: u32 = 1000;

    /// Enough to let a handful of peers on the same core run.
    const YIELDS: u32 = 8;

    /// Set the number of yields: more if an answer is expected soon, from peers that may share the core.
    #[must_use]
    pub const fn with_yields(mut self, yields: u32) -> Self {
        self.yields = yields;
        self
    }

    /// Sleep without polling first.
    pub const NONE: Self = Self { spins: 0, yields: 0 };

    /// Return the policy for `threads` threads that work together on `cores` cores.
    pub const fn new(threads: usize, cores: usize) -> Self {
        Self { spins: if threads <= cores { Self::SPINS } else { 0 }, yields: Self::YIELDS }
    }

    /// Return the policy for `threads` threads that work together on this machine.
    #[cfg(feature = "std")]
    pub fn for_this_machine(threads: usize) -> Self {
        Self::new(threads, std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// Return what to do after `polls` earlier polls that found nothing.
    pub const fn after(&self, polls: u32) -> Pause {
        if polls < self.spins || self.spins == u32::MAX {
            Pause::Spin
        } else if polls - self.spins < self.yields || self.yields == u32::MAX {
            Pause::Yield
        } else {
            Pause::Sleep
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_spins_only_with_a_core_per_thread_then_yields_then_sleeps() {
        assert_eq!(SpinPolicy::new(2, 2).after(0), Pause::Spin);
        assert_eq!(SpinPolicy::new(3, 2).after(0), Pause::Yield);
        assert_eq!(SpinPolicy::NONE.after(0), Pause::Sleep);
        let policy = SpinPolicy { spins: 2, yields: 1 };
        let pauses: Vec<_> = (0..4).map(|polls| policy.after(polls)).collect();
        assert_eq!(pauses, [Pause::Spin, Pause::Spin, Pause::Yield, Pause::Sleep]);
        assert_eq!(policy.after(u32::MAX), Pause::Sleep);
        let endless = |spins, yields| SpinPolicy { spins, yields }.after(u32::MAX);
        assert_eq!((endless(u32::MAX, 0), endless(0, u32::MAX)), (Pause::Spin, Pause::Yield));
    }
}
