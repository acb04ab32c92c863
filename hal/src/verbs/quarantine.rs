//! Keys that were revoked recently, and must not open other memory while a peer may still use them.
//!
//! Drivers cache keys: mlx5 gives the key of a released registration to the next similar one, byte for byte. An
//! operation that a peer posted with the old key, and whose packets are late, would access the new memory.
//!
//! Invariant: bounded, and a key stays in it until its time has passed or [`KEYS_MAX`] later ones were revoked.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The maximum number of keys.
pub(super) const KEYS_MAX: usize = 64;

/// For how long: several times what a connection retries an operation (`one_sided::connection`).
const TIME: Duration = Duration::from_secs(30);

/// The keys, and when they were revoked.
#[derive(Debug, Default)]
pub(super) struct Quarantine(VecDeque<(u32, Instant)>);

impl Quarantine {
    /// Add a key.
    pub(super) fn add(&mut self, key: u32, now: Instant) {
        self.expire(now);
        if self.0.len() == KEYS_MAX {
            self.0.pop_front();
        }
        self.0.push_back((key, now));
    }

    /// Return whether a key is in quarantine.
    pub(super) fn has(&mut self, key: u32, now: Instant) -> bool {
        self.expire(now);
        self.0.iter().any(|(known, _)| *known == key)
    }

    fn expire(&mut self, now: Instant) {
        while self.0.front().is_some_and(|(_, revoked)| now.saturating_duration_since(*revoked) >= TIME) {
            self.0.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_leaves_after_its_time_or_when_others_need_the_room() {
        let (mut keys, start) = (Quarantine::default(), Instant::now());
        keys.add(7, start);
        assert!(keys.has(7, start + TIME - Duration::from_nanos(1)) && !keys.has(8, start));
        assert!(!keys.has(7, start + TIME));
        (0..=KEYS_MAX as u32).for_each(|key| keys.add(key, start));
        assert!(!keys.has(0, start) && keys.has(1, start) && keys.has(KEYS_MAX as u32, start));
    }
}
