//! Decides between spinning, yielding, polling and sleeping.

use sumac_hal::ring::{Pause, SpinPolicy};

/// Backoff of a rank that waits for its connections.
///
/// It spins, yields and sleeps as its policy says ([`crate::WaitPolicy`]), and now and then looks at the sockets.
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

    pub(super) fn after(&mut self, moved: bool) -> NextPoll {
        if moved {
            self.idle = 0;
            self.busy += 1;
            return if self.busy.is_multiple_of(POLL_INTERVAL) { NextPoll::Poll } else { NextPoll::Continue };
        }
        let pause = self.policy.after(self.idle);
        // Without end, if the policy says so; still with polls now and then.
        self.idle = self.idle.checked_add(1).unwrap_or(u32::MAX << 10);
        match pause {
            Pause::Spin if self.idle.is_multiple_of(SPIN_POLL_INTERVAL) => NextPoll::Poll,
            Pause::Spin => NextPoll::Spin,
            Pause::Yield if self.idle.is_multiple_of(POLL_INTERVAL) => NextPoll::Poll,
            Pause::Yield => NextPoll::Yield,
            Pause::Sleep => NextPoll::Block,
        }
    }
}

/// Rounds between two polls of the sockets that the step does not use.
const POLL_INTERVAL: u32 = 32;
/// The same while it spins: a system call costs as much as a few dozen rounds.
const SPIN_POLL_INTERVAL: u32 = 256;
