//! When a rank looks at its sockets, and when it sleeps.

/// When to look at the other sockets, and when to sleep.
///
/// A wake-up from sleep costs tens of microseconds across cores, a yield to another rank's process on the same
/// core a few: so ranks yield for a while before they sleep.
#[derive(Debug, Default)]
pub(super) struct Polls {
    busy: u32,
    idle: u32,
}

/// What to do after a round of transfers.
pub(super) enum Polling {
    Not,
    Yield,
    Look,
    Block,
}

impl Polls {
    pub(super) const fn after(&mut self, moved: bool) -> Polling {
        if moved {
            self.idle = 0;
            self.busy += 1;
            return if self.busy.is_multiple_of(LOOK_EVERY) { Polling::Look } else { Polling::Not };
        }
        self.idle += 1;
        match self.idle {
            YIELDS_BEFORE_BLOCK.. => Polling::Block,
            idle if idle.is_multiple_of(LOOK_EVERY) => Polling::Look,
            _ => Polling::Yield,
        }
    }
}

/// Rounds between two looks at the sockets that the step does not use.
const LOOK_EVERY: u32 = 32;
const YIELDS_BEFORE_BLOCK: u32 = 100;
