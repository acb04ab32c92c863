//! Updates over the network: which slot runs, its trial, and what runtime and supervisor tell each other.
//!
//! ```text
//!   controller -- requests --> runtime: update::Service ---- writes ----> the other slot
//!                                 | lines of its status: CONFIRMS, RESTARTS
//!                                 v
//!                              supervisor: Trial ----------- confirms --> the running slot's record
//! ```
//!
//! The runtime writes the other slot, and only while the running one is confirmed; the supervisor writes the running
//! slot's record, and only while it is on trial. So a runtime that crashes neither harms a slot nor ends a trial.
//!
//! Of a service, [`Trial`] is here, and what starts the service reads the slots' records. A version that `sumac flash`
//! has installed is started by the firmware's boot entries, and watched by [`crate::trial`]; its runtime also sets the
//! entry of the slot that it writes ([`sumac_firmware::boot::SlotLoader`]).

use crate::boot_order::{CardBootOrder, OrderError};
use crate::config::{Config, SlotPaths};
use crate::disks::{DisksError, SlotDisk};
use crate::log::{Level, Log};
use crate::runtime::report;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use sumac_firmware::emulated::Maintenance;
use sumac_firmware::slots::{
    Event, FileBlocks, HEALTHY_AFTER, Health, HealthEvent, Notice, Policy, Selected, Slot, SlotError, Slots, State,
    Updater,
};
use sumac_firmware::update::{Card, NoBootOrder, Service, Supervisor};
use sumac_hal::time::Instant;
use thiserror::Error;

/// The status line with which the runtime asks for the confirmation of the running slot.
pub const CONFIRMS: &str = "confirms its slot";
/// The status line with which the runtime asks for a restart of the card.
pub const RESTARTS: &str = "restarts the card";

/// How long a healthy runtime serves before its slot is confirmed, by default.
pub const CONFIRM_AFTER: Duration = HEALTHY_AFTER;

/// Why slots cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SlotsError {
    /// A slot cannot be opened.
    #[error("slot {path}: {source}")]
    Open {
        /// The file or block device.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// A slot is unusable.
    #[error("{0}")]
    Slot(#[from] SlotError<io::Error>),
    /// The disk of an installed version is unusable.
    #[error("{0}")]
    Disk(#[from] DisksError),
    /// The card has no usable boot order.
    #[error("{0}")]
    Order(#[from] OrderError),
    /// A service has no boot entries.
    #[error("slots=disk:{0}: a service has its slots in two files, such as slots=/var/lib/sumac/a,/var/lib/sumac/b")]
    DiskOfService(String),
    /// The thread that writes cannot be started.
    #[error("cannot start the thread that writes slots: {0}")]
    Thread(io::Error),
    /// What runs does not say how it was started.
    #[error("/proc/cmdline: {0}")]
    CommandLine(io::Error),
}

/// What the path of a disk with both slots begins with, in the setting.
pub(crate) const DISK: &str = "disk:";

/// Parse the paths of the slots, or of a disk with both.
pub(crate) fn slot_paths(value: &str) -> Option<SlotPaths> {
    let is_path = |path: &str| !path.is_empty() && !path.contains(',');
    match value.split_once(',') {
        Some((a, b)) if is_path(a) && is_path(b) && a != b => Some(SlotPaths::Files([a.to_owned(), b.to_owned()])),
        Some(_) => None,
        None => value.strip_prefix(DISK).filter(|path| is_path(path)).map(|path| SlotPaths::Disk(path.to_owned())),
    }
}

/// Parse a slot's name.
pub(crate) fn slot(value: &str) -> Option<Slot> {
    Slot::ALL.into_iter().find(|slot| slot.to_string() == value)
}

/// Open the slots.
fn open(paths: &SlotPaths) -> Result<Slots<FileBlocks>, SlotsError> {
    let open = |path: &String| {
        FileBlocks::open(path.as_ref()).map_err(|source| SlotsError::Open { path: path.clone(), source })
    };
    match paths {
        SlotPaths::Files([a, b]) => Ok(Slots::new([open(a)?, open(b)?])?),
        SlotPaths::Disk(path) => Ok(SlotDisk::at(Path::new(path))?.partition_slots()?),
    }
}

/// Find out which slot runs, and count the try if it is on trial. What started the agent may know, and has counted it
/// then. `None`: there are no slots, or none holds anything.
///
/// # Errors
/// [`SlotsError`].
pub fn select(config: &Config, log: &Log) -> Result<Option<Selected>, SlotsError> {
    let Some(paths) = &config.slots else { return Ok(None) };
    if let SlotPaths::Disk(path) = paths {
        return Err(SlotsError::DiskOfService(path.clone()));
    }
    let mut slots = open(paths)?;
    if let Some(slot) = config.slot {
        let record = slots.record(slot)?;
        log.info(&format!("slot {slot}: {}", record.as_ref().map_or("no record".into(), ToString::to_string)));
        return Ok(record.map(|record| Selected { slot, record }));
    }
    match slots.select() {
        Ok(selected) => {
            log.info(&format!("slot {}: {}", selected.slot, selected.record));
            Ok(Some(selected))
        }
        Err(SlotError::NothingBoots { .. }) => {
            log.info("no slot holds an image; an update installs the first one");
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// A slot's trial.
#[derive(Debug)]
pub struct Trial {
    updater: Updater,
    slot: Slot,
    health: Health,
}

/// The end of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The slot is confirmed.
    Confirmed,
    /// The slot did not become healthy in time: restart.
    Failed,
}

impl Trial {
    /// Begin the trial of a slot, which is healthy after this time; `None` if it is confirmed.
    pub fn new(selected: &Selected, policy: Policy, confirm_after: Duration, now: Instant) -> Option<Self> {
        if selected.record.state == State::Confirmed {
            return None;
        }
        let (updater, slot) = (Updater::new(policy, Some(selected.clone()), now), selected.slot);
        Some(Self { updater, slot, health: Health::new(confirm_after) })
    }

    /// Process what happens to the runtime.
    pub fn handle(&mut self, event: HealthEvent, now: Instant) {
        self.health.handle(event, now);
    }

    /// Return when to look again.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.health.poll_timeout().into_iter().chain(self.updater.poll_timeout()).min()
    }

    /// Look whether the trial has ended by now. A healthy slot's record is written.
    ///
    /// # Errors
    /// The record cannot be written; the trial goes on.
    pub fn judge(&mut self, slots: &mut Slots<FileBlocks>, now: Instant) -> Result<Option<Verdict>, String> {
        self.health.handle_timeout(now);
        if self.health.is_healthy() {
            self.updater.handle(Event::Healthy, slots).map_err(|error| error.to_string())?;
        } else {
            self.updater.handle_timeout(now);
        }
        Ok(match self.updater.poll_event() {
            Some(Notice::Confirmed) => Some(Verdict::Confirmed),
            Some(Notice::RollBack { .. }) => Some(Verdict::Failed),
            _ => None,
        })
    }
}

/// Watch a trial on a thread of its own. Returns where to send what happens to the runtime; `fail` is called if the
/// slot does not become healthy in time.
///
/// # Errors
/// [`SlotsError`].
pub fn watch(
    trial: Trial,
    config: &Config,
    log: &Log,
    fail: impl FnOnce() + Send + 'static,
) -> Result<Option<Sender<HealthEvent>>, SlotsError> {
    let Some(paths) = &config.slots else { return Ok(None) };
    let (sender, events) = channel();
    let (slots, log) = (open(paths)?, log.clone());
    let began = std::time::Instant::now();
    std::thread::spawn(move || run(trial, slots, &events, (&log, began), fail));
    Ok(Some(sender))
}

fn run(
    mut trial: Trial,
    mut slots: Slots<FileBlocks>,
    events: &Receiver<HealthEvent>,
    (log, began): (&Log, std::time::Instant),
    fail: impl FnOnce(),
) {
    let now = || Instant::ZERO + began.elapsed();
    loop {
        let due = trial.poll_timeout().map_or(Duration::MAX, |at| at.saturating_since(now()));
        match events.recv_timeout(due) {
            Ok(event) => trial.handle(event, now()),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        match trial.judge(&mut slots, now()) {
            Ok(None) => {}
            Ok(Some(Verdict::Confirmed)) => return log.info(&format!("slot {} is confirmed", trial.slot)),
            Ok(Some(Verdict::Failed)) => {
                log.write(Level::Error, &format!("slot {} has not become healthy in time; restarting", trial.slot));
                return fail();
            }
            Err(error) => log.warn(&format!("slot {} cannot be confirmed: {error}", trial.slot)),
        }
    }
}

/// The runtime's way to its supervisor: lines of its status.
#[derive(Debug)]
struct Pipe;

impl Supervisor for Pipe {
    fn confirm(&mut self) -> io::Result<()> {
        report(CONFIRMS)
    }

    fn restart(&mut self) -> io::Result<()> {
        report(RESTARTS)?;
        // The supervisor restarts the card once this process has ended.
        std::process::exit(0)
    }
}

/// Start what updates the card, if it has slots and a key for updates.
///
/// # Errors
/// [`SlotsError`].
pub(crate) fn maintenance(config: &Config) -> Result<Option<Arc<dyn Maintenance>>, SlotsError> {
    let (Some(paths), Some(key)) = (&config.slots, &config.update_key) else { return Ok(None) };
    let (key, running) = (key.clone(), config.slot);
    let slots = || open(paths);
    let service = match paths {
        SlotPaths::Files(_) => {
            Service::start(Card::new(slots()?, running, key, (NoBootOrder, Pipe)), slots()?, running)
        }
        SlotPaths::Disk(path) => {
            let command_line = fs::read_to_string("/proc/cmdline").map_err(SlotsError::CommandLine)?;
            let loader = SlotDisk::at(Path::new(path))?.boot_loader(CardBootOrder::of_card()?, running, &command_line);
            Service::start(Card::new(slots()?, running, key, (loader, Pipe)), slots()?, running)
        }
    };
    Ok(Some(Arc::new(service.map_err(SlotsError::Thread)?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sumac_firmware::slots::Offer;

    const AFTER: Duration = Duration::from_secs(60);

    fn at(seconds: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(seconds)
    }

    /// SHA-256 of the empty payload (FIPS 180-4), which a slot may hold.
    fn sha2_of() -> [u8; 32] {
        const HEX: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        std::array::from_fn(|at| u8::from_str_radix(&HEX[2 * at..2 * at + 2], 16).expect("two digits"))
    }

    /// Slots of which A is on trial.
    fn on_trial(folder: &tempfile::TempDir) -> (Slots<FileBlocks>, Trial) {
        let path = |name| folder.path().join(name);
        let mut slots =
            Slots::new(["a", "b"].map(|name| FileBlocks::create(&path(name), 4096).expect("a file"))).expect("fit");
        let mut updater = Updater::new(Policy::default(), None, Instant::ZERO);
        let offer = Offer { version: "1".into(), epoch: 1, len_bytes: 0, sha256: sha2_of() };
        for event in [Event::Begin(&offer), Event::Finish] {
            updater.handle(event, &mut slots).expect("written");
        }
        let selected = slots.select().expect("one");
        let trial = Trial::new(&selected, Policy::default(), AFTER, at(0)).expect("on trial");
        (slots, trial)
    }

    #[test]
    fn slot_is_confirmed_once_its_runtime_has_served_for_the_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut slots, mut trial) = on_trial(&folder);
        assert_eq!(trial.poll_timeout(), Some(at(300)), "the limit of the trial");
        let serve = |trial: &mut Trial, now| {
            trial.handle(HealthEvent::SelfTestPassed, now);
            trial.handle(HealthEvent::Joined, now);
        };
        serve(&mut trial, at(10));
        assert_eq!(trial.poll_timeout(), Some(at(70)));
        // A restart of the runtime begins the time anew.
        trial.handle(HealthEvent::Ended, at(20));
        assert_eq!(trial.judge(&mut slots, at(70)), Ok(None));
        serve(&mut trial, at(30));
        assert_eq!(trial.judge(&mut slots, at(89)), Ok(None));
        assert_eq!(trial.judge(&mut slots, at(90)), Ok(Some(Verdict::Confirmed)));
        let selected = slots.select().expect("one");
        assert_eq!(selected.record.state, State::Confirmed);
        assert!(Trial::new(&selected, Policy::default(), AFTER, at(0)).is_none());
    }

    #[test]
    fn slot_that_never_registers_fails_and_an_operator_may_confirm_it_before() {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut slots, mut trial) = on_trial(&folder);
        for seconds in (0..299).step_by(10) {
            trial.handle(HealthEvent::Joined, at(seconds));
            trial.handle(HealthEvent::Ended, at(seconds + 5));
            assert_eq!(trial.judge(&mut slots, at(seconds + 9)), Ok(None));
        }
        assert_eq!(trial.judge(&mut slots, at(300)), Ok(Some(Verdict::Failed)));
        let folder = tempfile::tempdir().expect("a folder");
        let (mut slots, mut trial) = on_trial(&folder);
        trial.handle(HealthEvent::Confirmed, at(1));
        assert_eq!(trial.judge(&mut slots, at(1)), Ok(Some(Verdict::Confirmed)));
    }
}
