//! Decides between spinning, yielding, polling and sleeping.

use sumac_hal::ring::{Pause, SpinPolicy};

/// Backoff of a rank that waits for its connections.
///
/// A wake-up from sleep costs tens of microseconds across cores, a yield to another rank's process on the same core a
/// few. Ranks therefore spin while each has a core, and yield for a while before they sleep ([`SpinPolicy`]).
#[derive(Debug)]
pub(super) struct PollBackoff {
    policy: SpinPolicy,
    busy: u32,
    idle: u32,
}

/// What to do after a round of transfers.
pub(super) enum NextPoll {
    Continue,
    Spin,
    Yield,
    Poll,
    Block,
}

impl PollBackoff {
    pub(super) const fn new(policy: SpinPolicy) -> Self {
        Self { policy, busy: 0, idle: 0 }
    }

    pub(super) const fn after(&mut self, moved: bool) -> NextPoll {
        if moved {
            self.idle = 0;
            self.busy += 1;
            return if self.busy.is_multiple_of(POLL_INTERVAL) { NextPoll::Poll } else { NextPoll::Continue };
        }
        let pause = self.policy.after(self.idle);
        self.idle = self.idle.saturating_add(1);
        match pause {
            Pause::Spin if self.idle.is_multiple_of(SPIN_POLL_INTERVAL) => NextPoll::Poll,
            Pause::Spin => NextPoll::Spin,
            Pause::Yield if self.idle.is_multiple_of(POLL_INTERVAL) => NextPoll::Poll,
            Pause::Yield => NextPoll::Yield,
            Pause::Sleep => NextPoll::Block,
        }
    }
}

/// Return how ranks wait for each other, `ranks` of them on this machine.
pub(super) fn policy(ranks: usize) -> SpinPolicy {
    SpinPolicy::for_this_machine(ranks).with_yields(YIELDS)
}

/// Rounds between two polls of the sockets that the step does not use.
const POLL_INTERVAL: u32 = 32;
/// The same while it spins: a system call costs as much as a few dozen rounds.
const SPIN_POLL_INTERVAL: u32 = 256;
const YIELDS: u32 = 100;
