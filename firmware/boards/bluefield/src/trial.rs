//! The thread that watches a version which runs from a slot: it feeds the watchdog, confirms a version on trial once it
//! is healthy, and restarts the machine if that takes too long.
//!
//! Before the restart the firmware's order is as it was: it goes on with the version that was confirmed last.

use crate::install::{InstallError, Running};
use crate::log::Log;
use crate::receive::Installer;
use crate::supervisor::Readiness;
use crate::system;
use crate::watchdog::{FEED_INTERVAL, Watchdog};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant as Clock};
use sumac_firmware::boot::BootEntries;
use sumac_firmware::slots::{Event, Health, HealthEvent, Notice, Policy, Selected, Slots, State, Updater};
use sumac_hal::flash::BlockDevice;
use sumac_hal::time::Instant;

/// Start watching; the runtime's events go into the returned channel. A version on trial is healthy once it has served
/// for `confirm_after`. Once it is confirmed, images are received from the host.
pub fn watch(
    running: Running,
    (policy, confirm_after): (Policy, Duration),
    installer: Installer,
    readiness: &Arc<Readiness>,
    log: &Log,
) -> Sender<HealthEvent> {
    let (sender, events) = channel();
    let is_on_trial = running.selected.record.state != State::Confirmed;
    readiness.hold(is_on_trial);
    let (log, readiness) = (log.clone(), Arc::clone(readiness));
    let watchdog = Watchdog::start(&log);
    let trial = Trial::new(running.selected.clone(), (policy, confirm_after), Instant::ZERO);
    let mut installer = Some(installer);
    std::thread::spawn(move || {
        let mut receive = || installer.take().into_iter().for_each(|installer| installer.start(&log));
        if !is_on_trial {
            receive();
        }
        let confirmed = || {
            readiness.release(&log);
            receive();
        };
        match serve(running, trial, &events, watchdog, confirmed, &log) {
            Ok(()) => system::restart(&log, "slot did not become healthy in time: going back to the one before"),
            Err(error) => system::restart(&log, &error.to_string()),
        }
    });
    sender
}

/// Watch until the version has to go.
fn serve(
    running: Running,
    mut trial: Trial,
    events: &Receiver<HealthEvent>,
    mut watchdog: Watchdog,
    mut confirmed: impl FnMut(),
    log: &Log,
) -> Result<(), InstallError> {
    let start = Clock::now();
    let now = || Instant::from_nanos(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let Running { mut slots, mut order, .. } = running;
    loop {
        watchdog.feed();
        match events.recv_timeout(trial.wait(now())) {
            Ok(event) => trial.health.handle(event, now()),
            Err(RecvTimeoutError::Timeout) => {}
            // The supervisor never ends; without it, nothing gets healthy.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(FEED_INTERVAL),
        }
        match trial.advance(now(), &mut slots, &mut order)? {
            Step::Goes => {}
            Step::Confirmed => {
                log.info(&format!("slot {}: {}, confirmed", trial.selected.slot, trial.selected.record.version));
                confirmed();
            }
            Step::Over => return Ok(()),
        }
    }
}

/// What has become of a trial.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Goes,
    Confirmed,
    Over,
}

/// A version that may be on trial.
#[derive(Debug)]
struct Trial {
    selected: Selected,
    updater: Updater,
    health: Health,
    is_told: bool,
}

impl Trial {
    fn new(selected: Selected, (policy, confirm_after): (Policy, Duration), now: Instant) -> Self {
        let updater = Updater::new(policy, Some(selected.clone()), now);
        Self { selected, updater, health: Health::new(confirm_after), is_told: false }
    }

    /// Return how long to wait for events.
    fn wait(&self, now: Instant) -> Duration {
        let deadlines = [self.updater.poll_timeout(), self.health.poll_timeout()];
        let next = deadlines.into_iter().flatten().min();
        next.map_or(FEED_INTERVAL, |next| next.saturating_since(now)).min(FEED_INTERVAL)
    }

    /// Confirm the version if it is healthy: first its record, then the firmware's order. If power fails in between,
    /// the version before finds the record at its start, and sets the order.
    fn advance<D, O>(&mut self, now: Instant, slots: &mut Slots<D>, order: &mut O) -> Result<Step, InstallError>
    where
        D: BlockDevice<Error = std::io::Error>,
        O: BootEntries,
        InstallError: From<O::Error>,
    {
        self.health.handle_timeout(now);
        if self.health.is_healthy() && !self.is_told {
            self.is_told = true;
            self.updater.handle(Event::Healthy, slots)?;
        }
        self.updater.handle_timeout(now);
        match self.updater.poll_event() {
            Some(Notice::Confirmed) => {
                let Selected { slot, record } = &self.selected;
                order.prefer(*slot)?;
                if slots.record(slot.other())?.is_some_and(|other| other.epoch < record.epoch) {
                    order.retire(slot.other())?;
                }
                Ok(Step::Confirmed)
            }
            Some(Notice::RollBack { .. }) => Ok(Step::Over),
            _ => Ok(Step::Goes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_variables::MemoryVariables;
    use sumac_firmware::boot::{EfiBootOrder, Partition};
    use sumac_firmware::manifest::from_hex;
    use sumac_firmware::slots::{BootOrder, FileBlocks, HEALTHY_AFTER, Offer, Slot};

    fn at(seconds: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(seconds)
    }

    /// Slots with version 1 in A, and version 2 on trial in B, started at second 0.
    fn on_trial(folder: &tempfile::TempDir) -> (Slots<FileBlocks>, EfiBootOrder<MemoryVariables>, Trial) {
        let devices = ["a", "b"].map(|name| FileBlocks::create(&folder.path().join(name), 8192).expect("made"));
        let mut slots = Slots::new(devices).expect("large enough");
        // SHA-256 of nothing (FIPS 180-4).
        let sha256 = from_hex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855").expect("a digest");
        for epoch in [1, 2] {
            let mut updater = Updater::new(Policy::default(), None, Instant::ZERO);
            let offer = Offer { version: epoch.to_string(), epoch, len_bytes: 0, sha256 };
            updater.handle(Event::Begin(&offer), &mut slots).expect("begun");
            updater.handle(Event::Finish, &mut slots).expect("finished");
        }
        let selected = slots.select().expect("selected");
        assert_eq!(selected.slot, Slot::B);
        let mut order = EfiBootOrder::new(MemoryVariables::default());
        let partition = Partition { number: 1, start: 0, blocks: 1, guid: [0; 16] };
        for slot in Slot::ALL {
            order.set_entry(slot, partition, "").expect("set");
        }
        (slots, order, Trial::new(selected, (Policy::default(), HEALTHY_AFTER), at(0)))
    }

    #[test]
    fn healthy_version_is_confirmed_and_preferred() {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut slots, mut order, mut trial) = on_trial(&folder);
        trial.health.handle(HealthEvent::SelfTestPassed, at(1));
        trial.health.handle(HealthEvent::Joined, at(2));
        assert_eq!(trial.wait(at(2)), FEED_INTERVAL);
        assert_eq!(trial.advance(at(61), &mut slots, &mut order).expect("goes"), Step::Goes);
        assert_eq!(trial.wait(at(61)), Duration::from_secs(1));
        assert_eq!(order.preferred().expect("read"), None);
        assert_eq!(trial.advance(at(62), &mut slots, &mut order).expect("goes"), Step::Confirmed);
        assert_eq!(order.preferred().expect("read"), Some(Slot::B));
        assert_eq!(slots.record(Slot::B).expect("read").map(|record| record.state), Some(State::Confirmed));
        assert_eq!(
            trial.advance(at(10_000), &mut slots, &mut order).expect("goes"),
            Step::Goes,
            "no deadline any more"
        );
    }

    #[test]
    fn version_that_is_not_healthy_in_time_has_to_go() {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut slots, mut order, mut trial) = on_trial(&folder);
        trial.health.handle(HealthEvent::SelfTestPassed, at(1));
        assert_eq!(trial.advance(at(299), &mut slots, &mut order).expect("goes"), Step::Goes);
        assert_eq!(trial.advance(at(300), &mut slots, &mut order).expect("goes"), Step::Over);
        // Too late.
        trial.health.handle(HealthEvent::Joined, at(301));
        assert_eq!(trial.advance(at(400), &mut slots, &mut order).expect("goes"), Step::Goes);
        assert_eq!(order.preferred().expect("read"), None);
    }

    #[test]
    fn older_epoch_is_taken_out_of_the_order_after_confirmation() {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut slots, mut order, mut trial) = on_trial(&folder);
        order.prefer(Slot::A).expect("set");
        for (event, second) in [(HealthEvent::SelfTestPassed, 1), (HealthEvent::Joined, 2)] {
            trial.health.handle(event, at(second));
        }
        trial.advance(at(62), &mut slots, &mut order).expect("confirmed");
        assert_eq!(order.preferred().expect("read"), Some(Slot::B));
        // Nothing of ours is left behind it.
        order.retire(Slot::B).expect("set");
        assert_eq!(order.preferred().expect("read"), None);
    }
}
