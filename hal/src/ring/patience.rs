//! How long to look for news before sleeping.
//!
//! A wake-up across cores costs some 20 us on a virtual machine, and looking costs nothing while nobody else wants the
//! core. So a wait first spins, then yields (which is all it takes where the peer shares the core), and only then
//! sleeps. Where there are more threads than cores, spinning only keeps the peer from running, and is left out.

/// What to do after one more look that found nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pause {
    /// Look again at once.
    Spin,
    /// Let somebody else run first.
    Yield,
    /// Announce a sleep, look once more, and sleep.
    Sleep,
}

/// How often to spin and to yield before a sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// How many looks in a row.
    pub spins: u32,
    /// How many yields after those.
    pub yields: u32,
}

impl Patience {
    /// Some 20 us of spinning: as long as a wake-up across cores takes.
    const SPINS: u32 = 1000;

    /// Enough for a handful of peers that share the core to have had their turn.
    const YIELDS: u32 = 8;

    /// Replace the number of yields: for who expects an answer soon, from peers that may have to share the core first.
    #[must_use]
    pub const fn with_yields(mut self, yields: u32) -> Self {
        self.yields = yields;
        self
    }

    /// Sleep at once.
    pub const NONE: Self = Self { spins: 0, yields: 0 };

    /// Choose for `threads` threads that work together on `cores` cores.
    pub const fn new(threads: usize, cores: usize) -> Self {
        Self { spins: if threads <= cores { Self::SPINS } else { 0 }, yields: Self::YIELDS }
    }

    /// Choose for `threads` threads that work together on this machine.
    #[cfg(feature = "std")]
    pub fn for_this_machine(threads: usize) -> Self {
        Self::new(threads, std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// Return what to do after look number `looks`, counted from 0.
    pub const fn after(&self, looks: u32) -> Pause {
        if looks < self.spins {
            Pause::Spin
        } else if looks - self.spins < self.yields {
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
    fn spins_only_where_there_is_a_core_for_everybody() {
        assert_eq!(Patience::new(2, 2).after(0), Pause::Spin);
        assert_eq!(Patience::new(3, 2).after(0), Pause::Yield);
        assert_eq!(Patience::NONE.after(0), Pause::Sleep);
        let patience = Patience { spins: 2, yields: 1 };
        let pauses: Vec<_> = (0..4).map(|looks| patience.after(looks)).collect();
        assert_eq!(pauses, [Pause::Spin, Pause::Spin, Pause::Yield, Pause::Sleep]);
        assert_eq!(patience.after(u32::MAX), Pause::Sleep);
    }
}
