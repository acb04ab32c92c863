//! Memory that is given up but cannot be freed yet.
//!
//! A driver frees memory only when everything enqueued before has run. While an operation waits for another process,
//! that may be never: a free would hang with it. So what is dropped in the meantime is kept until no operation waits.

/// Memory to free later, and how many operations wait for other processes.
#[derive(Debug)]
pub(super) struct Graveyard<T> {
    waiting: usize,
    dead: Vec<T>,
}

impl<T> Graveyard<T> {
    pub(super) const fn new() -> Self {
        Self { waiting: 0, dead: Vec::new() }
    }

    /// Count an operation that waits for other processes.
    pub(super) const fn hold(&mut self) {
        self.waiting += 1;
    }

    /// Count one less; returns what can be freed now.
    #[must_use]
    pub(super) fn release(&mut self) -> Vec<T> {
        self.waiting = self.waiting.saturating_sub(1);
        if self.waiting == 0 { std::mem::take(&mut self.dead) } else { Vec::new() }
    }

    /// Keep memory while an operation waits; returns it if it can be freed now.
    #[must_use]
    pub(super) fn bury(&mut self, memory: T) -> Option<T> {
        if self.waiting == 0 {
            return Some(memory);
        }
        self.dead.push(memory);
        None
    }
}

impl<T> Default for Graveyard<T> {
    fn default() -> Self {
        Self::new()
    }
}
