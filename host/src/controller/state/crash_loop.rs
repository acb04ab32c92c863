//! Exponential backoff for crash-looping devices, whose connections keep ending soon after they begin.
//!
//! A tree on such a device is lost at once, and each time costs the job's ranks a recovery. So no job is placed on the
//! device for a while, which doubles with each short connection.

use super::State;
use crate::controller::device::Device;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac_hal::time::Instant;

/// A connection that lasts this long is not short.
const STABLE_AFTER: Duration = Duration::from_secs(10);

/// How many short connections in a row are tolerated without a backoff.
const SHORT_TOLERATED: u32 = 2;

/// The first backoff. The maximum is [`Limits::device_backoff`](crate::controller::limits::Limits::device_backoff).
const BACKOFF_START: Duration = Duration::from_secs(1);

/// How long the record of a disconnected device is kept.
const RECORD_TTL: Duration = Duration::from_secs(120);

/// The recent connections of a device.
#[derive(Debug)]
struct Record {
    /// When the connection started to count: when the device connected, or when its last backoff ended.
    stable_since: Instant,
    gone: Option<Instant>,
    /// The number of short connections in a row.
    short: u32,
    /// When the backoff ends.
    backoff_until: Option<Instant>,
}

/// Connection records by device name.
#[derive(Debug)]
pub(super) struct CrashLoops {
    records: BTreeMap<String, Record>,
    backoff_max: Duration,
}

impl CrashLoops {
    /// The backoff doubles up to `backoff_max`; zero disables it.
    pub(super) const fn new(backoff_max: Duration) -> Self {
        Self { records: BTreeMap::new(), backoff_max }
    }

    fn record_connect(&mut self, name: &str, now: Instant) {
        self.records.retain(|_, record| record.gone.is_none_or(|gone| now.saturating_since(gone) < RECORD_TTL));
        let new = || Record { stable_since: now, gone: None, short: 0, backoff_until: None };
        let record = self.records.entry(name.to_owned()).or_insert_with(new);
        let doublings = record.short.checked_sub(SHORT_TOLERATED + 1);
        let backoff = doublings
            .map(|times| BACKOFF_START.saturating_mul(1 << times.min(16)).min(self.backoff_max))
            .filter(|backoff| !backoff.is_zero());
        (record.gone, record.backoff_until) = (None, backoff.map(|backoff| now + backoff));
        record.stable_since = record.backoff_until.unwrap_or(now);
    }

    fn record_disconnect(&mut self, name: &str, now: Instant) {
        let Some(record) = self.records.get_mut(name) else { return };
        let lasted = now.saturating_since(record.stable_since);
        record.backoff_until = None;
        record.short = if lasted < STABLE_AFTER { record.short.saturating_add(1) } else { 0 };
        record.gone = Some(now);
    }

    /// End expired backoffs. Returns whether there were any, and when the next one ends.
    fn expire(&mut self, now: Instant) -> (bool, Option<Instant>) {
        let mut is_over = false;
        for record in self.records.values_mut() {
            is_over |= record.backoff_until.take_if(|until| *until <= now).is_some();
        }
        (is_over, self.records.values().filter_map(|record| record.backoff_until).min())
    }

    /// The devices in backoff.
    pub(super) fn backed_off(&self) -> BTreeSet<String> {
        let backed_off = self.records.iter().filter(|(_, record)| record.backoff_until.is_some());
        backed_off.map(|(name, _)| name.clone()).collect()
    }
}

impl State {
    pub(super) fn record_connect(&mut self, session: &Device) {
        self.crash_loops.record_connect(session.name(), self.now);
        if self.crash_loops.backed_off().contains(session.name()) {
            tracing::warn!(
                device = session.name(),
                "device is in a crash loop; no job is placed on it during its backoff"
            );
        }
    }

    pub(super) fn record_disconnect(&mut self, session: &Device) {
        self.crash_loops.record_disconnect(session.name(), self.now);
    }

    /// Make devices eligible again whose backoff has ended. Returns the next deadline.
    pub(super) fn expire_backoffs(&mut self) -> Option<Instant> {
        let (is_over, next) = self.crash_loops.expire(self.now);
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

    const BACKOFF_MAX: Duration = Duration::from_secs(32);

    #[test]
    fn zero_backoff_max_disables_the_backoff() {
        let (mut crash_loops, now) = (CrashLoops::new(Duration::ZERO), Instant::ZERO);
        for _ in 0..10 {
            crash_loops.record_connect("d", now);
            assert!(crash_loops.backed_off().is_empty());
            crash_loops.record_disconnect("d", now);
        }
    }

    #[test]
    fn backoff_doubles_with_each_short_connection_and_ends_after_a_long_one() {
        let mut crash_loops = CrashLoops::new(BACKOFF_MAX);
        let mut now = Instant::ZERO;
        let mut backoffs = Vec::new();
        for _ in 0..10 {
            crash_loops.record_connect("d", now);
            let until = crash_loops.records["d"].backoff_until;
            backoffs.push(until.map_or(0, |until| (until - now).as_secs()));
            now = until.unwrap_or(now) + Duration::from_secs(1);
            assert_eq!(crash_loops.expire(now), (until.is_some(), None));
            crash_loops.record_disconnect("d", now);
        }
        assert_eq!(backoffs, [0, 0, 0, 1, 2, 4, 8, 16, 32, 32]);
        crash_loops.record_connect("d", now);
        now = now + BACKOFF_MAX + STABLE_AFTER;
        crash_loops.record_disconnect("d", now);
        crash_loops.record_connect("d", now);
        assert!(crash_loops.backed_off().is_empty(), "the last connection was long");
        crash_loops.record_disconnect("d", now);
        crash_loops.record_connect("other", now + RECORD_TTL);
        assert_eq!(crash_loops.records.len(), 1, "old records are dropped");
    }
}
