//! The devices of a job's last lost tree, which are excluded from its next one.
//!
//! Ranks report that a tree is lost, but not which device or link is to blame, and a device whose link to the ranks was
//! cut may look alive to the controller. So all of them are excluded, until
//! - one of them disconnects: it was the cause, and the others may be used again;
//! - or the exclusion ends: the link may be back. If the next tree is lost soon after, the next exclusion lasts twice
//!   as long, as each attempt may cost the ranks a timeout.

use super::State;
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::time::Instant;

/// How long the first exclusion lasts.
const EXCLUSION_START: Duration = Duration::from_secs(10);

/// How long an exclusion lasts at most.
const EXCLUSION_MAX: Duration = Duration::from_secs(320);

/// A loss later than this after an exclusion has nothing to do with it.
const STABLE_AFTER: Duration = Duration::from_secs(60);

/// The excluded devices of a job.
#[derive(Debug)]
pub(super) struct LostDevices<D> {
    devices: Vec<Arc<D>>,
    /// How long the last exclusion lasted, and when it ended or will end.
    last: Option<(Duration, Instant)>,
}

impl<D> LostDevices<D> {
    pub(super) const fn new() -> Self {
        Self { devices: Vec::new(), last: None }
    }

    /// Exclude the devices of a lost tree, instead of those of an earlier one.
    pub(super) fn exclude(&mut self, devices: Vec<Arc<D>>, now: Instant) {
        let again = self.last.filter(|(_, until)| now.saturating_since(*until) < STABLE_AFTER);
        let length = again.map_or(EXCLUSION_START, |(length, _)| length.saturating_mul(2).min(EXCLUSION_MAX));
        (self.devices, self.last) = (devices, Some((length, now + length)));
    }

    /// Exclude none.
    pub(super) fn clear(&mut self) {
        self.devices.clear();
    }

    /// A device has disconnected: if it is one of these, exclude none.
    pub(super) fn disconnected(&mut self, device: &Arc<D>) {
        if self.devices.iter().any(|known| Arc::ptr_eq(known, device)) {
            self.clear();
        }
    }

    /// The excluded devices.
    pub(super) fn devices(&self) -> &[Arc<D>] {
        &self.devices
    }

    /// When the exclusion ends.
    fn due(&self) -> Option<Instant> {
        self.last.map(|(_, until)| until).filter(|_| !self.devices.is_empty())
    }
}

impl State {
    /// End exclusions whose time is over, and place jobs anew. Returns the next deadline.
    pub(super) fn expire_exclusions(&mut self) -> Option<Instant> {
        let now = self.now;
        let mut is_over = false;
        for (name, job) in &mut self.jobs {
            if job.lost_devices.due().is_some_and(|due| due <= now) {
                tracing::debug!(job = name, "devices of the job's lost tree may be used again");
                job.lost_devices.clear();
                is_over = true;
            }
        }
        if is_over {
            self.planning.devices_version += 1;
            self.reconsider();
        }
        self.jobs.values().filter_map(|job| job.lost_devices.due()).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths_of(losses: &[u64]) -> Vec<u64> {
        let mut lost = LostDevices::new();
        let length = |&at_s: &u64| {
            let now = Instant::ZERO + Duration::from_secs(at_s);
            lost.exclude(vec![Arc::new("leaf0")], now);
            lost.due().expect("it is excluded").saturating_since(now).as_secs()
        };
        losses.iter().map(length).collect()
    }

    #[test]
    fn exclusion_after_each_loss_soon_after_the_last_one_lasts_twice_as_long() {
        assert_eq!(lengths_of(&[0, 15, 40, 85, 170]), [10, 20, 40, 80, 160]);
        assert_eq!(lengths_of(&[0, 15, 40, 85, 170, 335, 660]).last(), Some(&320));
    }

    #[test]
    fn exclusion_after_a_late_loss_is_short() {
        assert_eq!(lengths_of(&[0, 69, 148, 149]), [10, 20, 40, 80]);
        assert_eq!(lengths_of(&[0, 70]), [10, 10]);
    }

    #[test]
    fn disconnected_device_ends_the_exclusion_of_all() {
        let (first, second, other) = (Arc::new("leaf0"), Arc::new("leaf1"), Arc::new("leaf0"));
        let mut lost = LostDevices::new();
        lost.exclude(vec![Arc::clone(&first), second], Instant::ZERO);
        lost.disconnected(&other);
        assert_eq!(lost.devices().len(), 2);
        lost.disconnected(&first);
        assert!(lost.devices().is_empty() && lost.due().is_none());
    }
}
