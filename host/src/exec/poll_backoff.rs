//! Decides between spinning, polling and sleeping.

/// Backoff of a rank that waits for its sockets.
///
/// A wake-up from sleep costs tens of microseconds across cores, a yield to another rank's process on the same core a
/// few. Ranks therefore yield for a while before they sleep.
#[derive(Debug, Default)]
pub(super) struct PollBackoff {
    busy: u32,
    idle: u32,
}

/// What to do after a round of transfers.
pub(super) enum NextPoll {
    Continue,
    Yield,
    Poll,
    Block,
}

impl PollBackoff {
    pub(super) const fn after(&mut self, moved: bool) -> NextPoll {
        if moved {
            self.idle = 0;
            self.busy += 1;
            return if self.busy.is_multiple_of(POLL_INTERVAL) { NextPoll::Poll } else { NextPoll::Continue };
        }
        self.idle += 1;
        match self.idle {
            YIELDS_BEFORE_BLOCK.. => NextPoll::Block,
            idle if idle.is_multiple_of(POLL_INTERVAL) => NextPoll::Poll,
            _ => NextPoll::Yield,
        }
    }
}

/// Rounds between two polls of the sockets that the step does not use.
const POLL_INTERVAL: u32 = 32;
const YIELDS_BEFORE_BLOCK: u32 = 100;
