//! Flashing of one card, the same whether it is the only one or one of many.

use super::args::FlashArgs;
use super::identity::Identity;
use super::interrupts::Interrupts;
use super::nic::Unbound;
use super::pin::Pin;
use super::record::{Record, unix_s};
use super::show::Card;
use super::worker::{self, Spawn};
use crate::exit::Failure as Exit;
use anyhow::{Context, anyhow};
use std::io;
use std::time::Instant as Clock;
use sumac_firmware::bfb::Generation;
use sumac_firmware::flash::{
    self, Failure, Image, Length, Outcome, Progress, Refusal, Restored, RollbackPolicy, Session, Stage, Workers,
};
use sumac_firmware::manifest::{Checked, hex};
use sumac_firmware::rshim::{CardMode, Lock, Misc, Rshim};
use sumac_hal::time::Instant;

/// What is flashed: the same for all cards.
#[derive(Debug)]
pub(super) struct Job<'a> {
    pub(super) args: &'a FlashArgs,
    pub(super) image: Image,
    pub(super) checked: Checked,
    /// The digest of what follows the image, in hexadecimal.
    pub(super) tail_sha256: Option<String>,
    /// A card that was flashed with this image since then, in seconds since 1970, is done.
    pub(super) done_since: Option<u64>,
}

/// What happens to a card.
#[derive(Debug)]
pub(super) enum Event {
    /// The card and its record were read.
    Card { card: Box<Card>, identity: Identity, had: Option<Record> },
    /// The card takes the image.
    Accepted(Generation),
    /// A card that was to be left out if it runs the image does not, for this reason.
    Different(&'static str),
    /// Flashing goes on.
    Progress(Progress),
}

/// How it ended.
#[derive(Debug)]
pub(super) enum Ended {
    /// The image is not for this card, or its record cannot be used; nothing was changed.
    Refused(anyhow::Error),
    /// All was checked, and nothing changed.
    DryRun,
    /// It runs the image already; nothing was changed.
    Unchanged,
    /// It was flashed, or that failed.
    Flashed(Outcome),
    /// It was flashed, but this host failed.
    Broken(anyhow::Error),
}

impl From<Failure> for Ended {
    /// A failure before the first change to the card.
    fn from(failure: Failure) -> Self {
        let (written_bytes, restored, log_tail) = (0, Restored::NotTouched, Vec::new());
        Self::Flashed(Outcome { result: Err(failure), written_bytes, restored, log_tail, up_time_s: None })
    }
}

impl From<Exit> for Ended {
    fn from(exit: Exit) -> Self {
        match exit {
            Exit::Input(error) => Self::Refused(error),
            Exit::Run(error) => Self::Broken(error),
            other => Self::Broken(anyhow!("{other:?}")),
        }
    }
}

impl Job<'_> {
    /// Return the length of what is written to each card, in bytes.
    pub(super) fn len_bytes(&self) -> u64 {
        let images = if self.image.is_tail_only { 0 } else { self.image.bytes.len_bytes() };
        images + self.image.bytes.tail_len_bytes()
    }

    /// Flash a card. `show` is called with what happens.
    pub(super) fn flash(&self, card: &Rshim, interrupts: &Interrupts, mut show: impl FnMut(Event)) -> Ended {
        self.attempt(card, interrupts, &mut show).unwrap_or_else(|ended| ended)
    }

    fn attempt(&self, card: &Rshim, interrupts: &Interrupts, show: &mut dyn FnMut(Event)) -> Result<Ended, Ended> {
        let Self { args, checked, .. } = self;
        // The time limit covers everything from here on, and the lock excludes other instances of this command.
        let start = Clock::now();
        let LockedCard { _lock, misc, workers } = lock_and_read(card, args, interrupts)?;
        let identity = Identity::of(card, &misc, &args.sysfs);
        let had = Record::read(&args.records, &identity)?;
        let shown = had.clone().map(Record::without_token);
        show(Event::Card { card: Box::new(Card::new(card, &misc)), identity: identity.clone(), had: shown });
        let policy =
            RollbackPolicy { had_epoch: had.as_ref().map(|had| had.epoch), allow_rollback: args.allow_rollback };
        if let Some(pin) = Pin::read(&args.records, &identity)? {
            pin.check(checked.manifest.as_ref()).map_err(|why| Ended::Refused(anyhow!(why)))?;
        }
        let refused = |refusal: Refusal| Ended::Refused(anyhow!(refusal).context(args.image.display().to_string()));
        let generation = flash::check(checked, &misc, policy).map_err(refused)?;
        if args.nic_mode && misc.mode == Some(CardMode::Dpu) {
            return Err(Ended::Refused(anyhow!("the card is in DPU mode: leave out --nic-mode")));
        }
        flash::usable(&misc, args.until())?;
        if args.if_different || self.done_since.is_some() {
            match self.difference(had.as_ref(), &misc) {
                None => return Ok(Ended::Unchanged),
                Some(why) => show(Event::Different(why)),
            }
        }
        show(Event::Accepted(generation));
        if args.dry_run {
            return Ok(Ended::DryRun);
        }
        // Fail now if the record cannot be written afterwards.
        Record::probe(&args.records)?;
        let unbound = args.nic_mode.then(|| Unbound::unbind(&args.sysfs, misc.dev_name.as_deref())).transpose();
        let unbound = unbound.context("cannot take the network driver off the card").map_err(Ended::Broken)?;
        let outcome = self.push(workers, &misc, start, show)?;
        drop(unbound);
        if outcome.result.is_ok() {
            // The card was reset after the start.
            let counts_resets = outcome.up_time_s.is_some_and(|up| up <= start.elapsed().as_secs() + 1);
            self.record(&identity, policy, counts_resets)?;
        }
        Ok(Ended::Flashed(outcome))
    }

    /// Return why a card is not known to run the image, if it is not.
    fn difference(&self, had: Option<&Record>, misc: &Misc) -> Option<&'static str> {
        let Some(had) = had else { return Some("it has no record") };
        if (&had.sha256, &had.tail_sha256) != (&hex(&self.checked.sha256), &self.tail_sha256) {
            return Some("another image was flashed last");
        }
        let is_done = self.done_since.zip(had.ready_unix_s).is_some_and(|(since, ready)| ready >= since);
        if is_done { None } else { had.why_not_running(misc, unix_s()) }
    }

    /// Push the image, follow the boot, and restore the settings.
    fn push(
        &self,
        workers: Workers<Spawn>,
        misc: &Misc,
        start: Clock,
        show: &mut dyn FnMut(Event),
    ) -> Result<Outcome, Ended> {
        let report = &self.checked.report;
        let image = self.image.try_clone().context("cannot share the image").map_err(Ended::Broken)?;
        let tail_bytes = report.tail_len_bytes + image.bytes.tail_len_bytes();
        let length = match image.is_tail_only {
            // The card runs: it waits for the end as it otherwise does for that of the images.
            true => Length { images_bytes: self.len_bytes(), tail_bytes: 0 },
            false => Length { images_bytes: report.len_bytes - report.tail_len_bytes, tail_bytes },
        };
        let clock = move || Instant::from_nanos(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let session = Session::new(length, misc, self.args.goal(), self.args.limits(), Instant::ZERO);
        Ok(workers.run(session, image, clock, |progress| show(Event::Progress(progress))))
    }

    /// Record the card's image. The recorded epoch never decreases, unless a rollback was allowed. An image without a
    /// manifest, such as a vendor's for recovery, has no epoch, and the one before stays.
    fn record(&self, identity: &Identity, policy: RollbackPolicy, counts_resets: bool) -> Result<(), Ended> {
        let manifest = self.checked.manifest.as_ref();
        let had = policy.had_epoch.unwrap_or(0);
        let epoch = match manifest {
            Some(manifest) if policy.allow_rollback => manifest.epoch,
            manifest => manifest.map_or(0, |manifest| manifest.epoch).max(had),
        };
        let record = Record {
            version: manifest.map(|manifest| manifest.version.clone()),
            epoch,
            sha256: hex(&self.checked.sha256),
            tail_sha256: self.tail_sha256.clone(),
            ready_unix_s: Some(unix_s()),
            is_installed: self.args.installs(),
            counts_resets,
            token: identity.token().map(str::to_owned),
        };
        Ok(record.write(&self.args.records, identity)?)
    }
}

/// A locked card and its state.
struct LockedCard {
    _lock: Lock,
    misc: Box<Misc>,
    workers: Workers<Spawn>,
}

/// Lock a card and read its state.
fn lock_and_read(card: &Rshim, args: &FlashArgs, interrupts: &Interrupts) -> Result<LockedCard, Ended> {
    if !card.exists() {
        return Err(Failure::NotFound(card.folder().display().to_string()).into());
    }
    let lock = card.lock().map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => Failure::Locked,
        _ => failure_of(&error),
    })?;
    let mut workers = worker::start(card).map_err(Ended::Broken)?;
    interrupts.tell(workers.interrupter());
    let (limit, stage) = (args.timeout(), Stage::Preparing);
    match (workers.read_misc(limit), interrupts.signal()) {
        (_, Some(signal)) => Err(Failure::Interrupted { signal, stage }.into()),
        (Some(Ok(misc)), None) => Ok(LockedCard { _lock: lock, misc, workers }),
        (Some(Err(errno)), None) => Err(failure_of(&errno.into()).into()),
        (None, None) => Err(Failure::TimeLimit { limit, stage, is_linux_up: false, error_line: None }.into()),
    }
}

fn failure_of(error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::PermissionDenied => Failure::Permission,
        _ => Failure::Gone,
    }
}
