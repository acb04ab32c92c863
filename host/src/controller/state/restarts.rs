//! Devices that end soon after they have come, again and again: no job is placed on them for a while, which doubles each time.
//!
//! What such a device is offered for is lost at once, and costs the ranks of a job a move each time.

use super::State;
use crate::controller::device::DeviceSession;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// A connection that lasts as long is no short one.
const STEADY: Duration = Duration::from_secs(10);

/// How many short connections in a row are let pass.
const SHORT_FREE: u32 = 2;

/// The first pause; the longest is [`Limits::device_backoff`](crate::controller::limits::Limits::device_backoff).
const PAUSE: Duration = Duration::from_secs(1);

/// How long a device that is gone is remembered.
const MEMORY: Duration = Duration::from_secs(120);

/// How the connections of a device of some name went.
#[derive(Debug)]
struct Record {
    /// From when on it counts as there: since it came, or since it was left alone last.
    steady_from: Instant,
    gone: Option<Instant>,
    /// Short connections in a row.
    short: u32,
    /// Until when no job is placed on it.
    rests_until: Option<Instant>,
}

/// Devices by name.
#[derive(Debug)]
pub(super) struct Restarts {
    records: BTreeMap<String, Record>,
    pause_max: Duration,
}

impl Restarts {
    /// Pauses double up to `pause_max`; zero: there are none.
    pub(super) const fn new(pause_max: Duration) -> Self {
        Self { records: BTreeMap::new(), pause_max }
    }

    fn note_come(&mut self, name: &str, now: Instant) {
        self.records.retain(|_, record| record.gone.is_none_or(|gone| now.saturating_duration_since(gone) < MEMORY));
        let new = || Record { steady_from: now, gone: None, short: 0, rests_until: None };
        let record = self.records.entry(name.to_owned()).or_insert_with(new);
        let doublings = record.short.checked_sub(SHORT_FREE + 1);
        let pause = doublings
            .map(|times| PAUSE.saturating_mul(1 << times.min(16)).min(self.pause_max))
            .filter(|pause| !pause.is_zero());
        (record.gone, record.rests_until) = (None, pause.map(|pause| now + pause));
        record.steady_from = record.rests_until.unwrap_or(now);
    }

    fn note_gone(&mut self, name: &str, now: Instant) {
        let Some(record) = self.records.get_mut(name) else { return };
        let lasted = now.saturating_duration_since(record.steady_from);
        record.rests_until = None;
        record.short = if lasted < STEADY { record.short.saturating_add(1) } else { 0 };
        record.gone = Some(now);
    }

    /// Let those go on whose pause is over. Returns whether there were any, and when the next is.
    fn expire(&mut self, now: Instant) -> (bool, Option<Instant>) {
        let mut is_over = false;
        for record in self.records.values_mut() {
            is_over |= record.rests_until.take_if(|until| *until <= now).is_some();
        }
        (is_over, self.records.values().filter_map(|record| record.rests_until).min())
    }

    /// Return those on which no job is placed now.
    pub(super) fn resting(&self) -> BTreeSet<String> {
        let resting = self.records.iter().filter(|(_, record)| record.rests_until.is_some());
        resting.map(|(name, _)| name.clone()).collect()
    }
}

impl State {
    pub(super) fn note_come(&mut self, session: &DeviceSession) {
        self.restarts.note_come(session.name(), self.now);
        if self.restarts.resting().contains(session.name()) {
            tracing::warn!(
                device = session.name(),
                "it has ended soon after it came again and again: it is left alone"
            );
            self.wake.notify_all();
        }
    }

    pub(super) fn note_gone(&mut self, session: &DeviceSession) {
        self.restarts.note_gone(session.name(), self.now);
    }

    /// Let jobs have devices again that were left alone. Returns when the next is due.
    pub(super) fn expire_rests(&mut self) -> Option<Instant> {
        let (is_over, next) = self.restarts.expire(self.now);
        if is_over {
            self.planning.devices_version += 1;
            self.reconsider();
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE_MAX: Duration = Duration::from_secs(32);

    #[test]
    fn device_without_backoff_is_never_left_alone() {
        let (mut restarts, now) = (Restarts::new(Duration::ZERO), Instant::now());
        for _ in 0..10 {
            restarts.note_come("d", now);
            assert!(restarts.resting().is_empty());
            restarts.note_gone("d", now);
        }
    }

    #[test]
    fn pause_doubles_with_each_short_connection_and_ends_with_a_long_one() {
        let mut restarts = Restarts::new(PAUSE_MAX);
        let mut now = Instant::now();
        let mut pauses = Vec::new();
        for _ in 0..10 {
            restarts.note_come("d", now);
            let until = restarts.records["d"].rests_until;
            pauses.push(until.map_or(0, |until| (until - now).as_secs()));
            now = until.unwrap_or(now) + Duration::from_secs(1);
            assert_eq!(restarts.expire(now), (until.is_some(), None));
            restarts.note_gone("d", now);
        }
        assert_eq!(pauses, [0, 0, 0, 1, 2, 4, 8, 16, 32, 32]);
        restarts.note_come("d", now);
        now += PAUSE_MAX + STEADY;
        restarts.note_gone("d", now);
        restarts.note_come("d", now);
        assert!(restarts.resting().is_empty(), "it has been there for long");
        restarts.note_gone("d", now);
        restarts.note_come("other", now + MEMORY);
        assert_eq!(restarts.records.len(), 1, "who is gone is forgotten");
    }
}
