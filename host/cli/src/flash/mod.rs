//! `sumac flash`: push a boot stream to a card, follow its boot, and report the outcome.
//!
//! Invariants: image and card are checked completely before the first change to the card. The checked bytes are the
//! ones that are pushed. stdout has a single result, everything else goes to stderr. The exit status identifies the
//! failure ([`sumac_firmware::flash`] has the table).

mod identity;
mod nic;
mod record;
mod show;
mod tail;
pub(crate) mod worker;

pub(crate) use show::Card;

use crate::exit::Failure as Exit;
use crate::image::{ImageFile, read_public_key};
use anyhow::{Context, anyhow};
use clap::Args;
use identity::Identity;
use nic::Unbound;
use record::Record;
use show::Display;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant as Clock};
use sumac::controller::keys::read_key;
use sumac_firmware::bfb::Policy;
use sumac_firmware::enrolment;
use sumac_firmware::flash::{
    self, Failure, Goal, Image, Length, Limits, Outcome, RollbackPolicy, Session, Stage, Until, Workers,
};
use sumac_firmware::manifest::{self, Checked, Trust, hex};
use sumac_firmware::rshim::{CardMode, Lock, Misc, Rshim};
use sumac_hal::time::Instant;
use worker::Spawn;

/// `sumac flash`.
#[derive(Debug, Args)]
pub(crate) struct FlashArgs {
    /// Boot stream
    #[arg(value_name = "FILE")]
    image: PathBuf,
    /// Card: a name below /dev, or the path of its folder
    #[arg(long, value_name = "CARD", default_value = "rshim0")]
    rshim: String,
    /// Public key (PEM) that must have signed the image
    #[arg(long, value_name = "FILE", required_unless_present = "allow_unsigned")]
    key: Option<PathBuf>,
    /// Device's key for the card's store, from `sumac key new --device`, sent behind the image; `-` is stdin
    // The installer of a vendor's image runs what follows the image as a script.
    #[arg(long, value_name = "FILE", conflicts_with = "allow_unsigned")]
    key_file: Option<PathBuf>,
    /// Configuration for a vendor's installer (bf.cfg), which follows the image
    #[arg(long, value_name = "FILE", conflicts_with = "key")]
    config: Option<PathBuf>,
    /// Root file system for a vendor's installer, a file of xz, which follows the image and --config
    #[arg(long, value_name = "FILE", conflicts_with = "key")]
    rootfs: Option<PathBuf>,
    /// Update a card in NIC mode with a vendor's stream in flat format, until `In Enhanced NIC mode`. Meanwhile this
    /// host has no network through the card
    #[arg(long, conflicts_with_all = ["key", "until"])]
    nic_mode: bool,
    /// Accept an unsigned image, such as a vendor's
    #[arg(long, conflicts_with = "key")]
    allow_unsigned: bool,
    /// Accept an image with a lower epoch than the card has had
    #[arg(long)]
    allow_rollback: bool,
    /// Line of the boot log that means success
    #[arg(long = "until", value_enum, default_value_t = UntilName::Ready)]
    until: UntilName,
    /// Continue after ERR lines of boot stages; PANIC, Exception, ASSERT and CRITICAL ERROR are failures all the same.
    /// ERR lines of the card's Linux (`ERR[MISC]`) never end flashing
    #[arg(long)]
    tolerate_errors: bool,
    /// Keep the boot log on the card after reading it. When it is full, new lines are lost
    #[arg(long)]
    keep_log: bool,
    /// Time limit in seconds, which does not include restoring the settings
    #[arg(long = "timeout", value_name = "SECONDS", default_value_t = 1800, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout_s: u64,
    /// Check everything and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Folder for the records of each card's last image
    #[arg(long, value_name = "FOLDER", default_value = "/var/lib/sumac/cards", env = "SUMAC_CARDS")]
    records: PathBuf,
    /// Where Linux shows devices
    #[arg(long, value_name = "FOLDER", default_value = "/sys", hide = true)]
    sysfs: PathBuf,
    /// Interval between two reads of the boot log, in milliseconds
    #[arg(long = "poll-ms", value_name = "N", default_value_t = 1000, hide = true, value_parser = clap::value_parser!(u64).range(1..))]
    poll_ms: u64,
    /// Number of failed reads after which the card counts as gone; restoring the settings may take as long
    #[arg(long, value_name = "N", default_value_t = 30, hide = true, value_parser = clap::value_parser!(u32).range(1..))]
    gone_polls: u32,
}

/// The line of the boot log that means success.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum UntilName {
    /// `DPU is ready`
    Ready,
    /// `Linux up`
    LinuxUp,
    /// `Rebooting...`, with which a vendor's installer ends
    Rebooting,
}

impl FlashArgs {
    /// Return the line of the boot log that means success.
    fn until(&self) -> Until {
        match self.until {
            _ if self.nic_mode => Until::NicMode,
            UntilName::Ready => Until::Ready,
            UntilName::LinuxUp => Until::LinuxUp,
            UntilName::Rebooting => Until::Rebooting,
        }
    }
}

/// Flash a card.
pub(crate) fn run(args: &FlashArgs) -> Result<(), Exit> {
    let display = Display::new(args.json);
    let done = attempt(args, &display);
    if let Err(Exit::Input(error)) = &done {
        display.refused(error)?;
    }
    done
}

/// Flash a card. Errors of the input are left to the caller to show.
fn attempt(args: &FlashArgs, display: &Display) -> Result<(), Exit> {
    let key = args.key.as_deref().map(read_public_key).transpose()?;
    let file = ImageFile::open(&args.image)?;
    if file.is_emmc {
        return Err(Exit::Input(anyhow!(
            "{} has the form of an eMMC boot partition, which a card does not boot over rshim; convert it to a boot stream \
             with `sumac image repack`",
            args.image.display()
        )));
    }
    let trust = key.as_ref().map_or(Trust::AnySigner, Trust::Key);
    // Check a sealed copy, which is what is pushed, even if the file changes.
    let device_key = args.key_file.as_deref().map(read_key).transpose().map_err(Exit::input)?;
    let tail = device_key.as_ref().map(enrolment::emit);
    let bytes = file.seal(tail::open(args, tail.as_deref().map_or(&[][..], |tail| &tail[..]))?)?;
    let reader = bytes.reader().map_err(|error| file.failure(error))?;
    // With a key, the policy is strict.
    let checked = manifest::check(reader, Policy::Vendor, trust).map_err(|error| file.failure(error))?;
    let card = Rshim::new(&args.rshim);
    // The lock excludes other instances of this command from here on.
    let (start, limit) = (Clock::now(), Duration::from_secs(args.timeout_s));
    let locked = lock_and_read(&card, limit).map_err(Exit::Run)?;
    let LockedCard { _lock, misc, workers } = locked.map_err(|failure| display.failed(&card, &failure))?;
    let identity = Identity::of(&card, &misc, &args.sysfs);
    let had = Record::read(&args.records, &identity)?;
    display.card(&Card::new(&card, &misc), &identity, had.as_ref());
    let policy = RollbackPolicy { had_epoch: had.map(|had| had.epoch), allow_rollback: args.allow_rollback };
    let generation = flash::check(&checked, &misc, policy).map_err(|refusal| file.failure(refusal))?;
    if args.nic_mode && misc.mode == Some(CardMode::Dpu) {
        return Err(Exit::Input(anyhow!("the card is in DPU mode: leave out --nic-mode")));
    }
    flash::usable(&misc, args.until()).map_err(|failure| display.failed(&card, &failure))?;
    display.image(&checked, generation, key.as_ref());
    device_key.iter().for_each(|key| display.device_key(key.id()));
    if args.dry_run {
        display.dry_run()?;
        return Ok(());
    }
    // Fail now if the record cannot be written afterwards.
    Record::probe(&args.records)?;
    checked.report.notes.iter().for_each(|note| note!("note: {note}"));
    let tail_bytes = checked.report.tail_len_bytes + bytes.tail_len_bytes();
    let length = Length { images_bytes: checked.report.len_bytes - checked.report.tail_len_bytes, tail_bytes };
    let image = Image { bytes, sha256: checked.sha256 };
    let unbound = args.nic_mode.then(|| Unbound::unbind(&args.sysfs, misc.dev_name.as_deref())).transpose();
    let unbound = unbound.context("cannot take the network driver off the card").map_err(Exit::Run)?;
    let outcome = push(args, workers, (image, length), &misc, start, display)?;
    drop(unbound);
    if outcome.result.is_ok() {
        write_record(args, &identity, &checked, policy)?;
    }
    display.ended(&card, &outcome)
}

/// A locked card and its state.
struct LockedCard {
    _lock: Lock,
    misc: Box<Misc>,
    workers: Workers<Spawn>,
}

/// Lock a card and read its state. The outer error means that the worker processes cannot be started.
fn lock_and_read(card: &Rshim, limit: Duration) -> anyhow::Result<Result<LockedCard, Failure>> {
    if !card.exists() {
        return Ok(Err(Failure::NotFound(card.folder().display().to_string())));
    }
    let lock = match card.lock() {
        Ok(lock) => lock,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Err(Failure::Locked)),
        Err(error) => return Ok(Err(failure_of(&error))),
    };
    let mut workers = worker::start(card)?;
    Ok(match workers.read_misc(limit) {
        Some(Ok(misc)) => Ok(LockedCard { _lock: lock, misc, workers }),
        Some(Err(errno)) => Err(failure_of(&errno.into())),
        None => Err(Failure::TimeLimit { limit, stage: Stage::Preparing, error_line: None }),
    })
}

fn failure_of(error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::PermissionDenied => Failure::Permission,
        _ => Failure::Gone,
    }
}

/// Push the image, follow the boot, and restore the settings.
fn push(
    args: &FlashArgs,
    workers: Workers<Spawn>,
    (image, length): (Image, Length),
    misc: &Misc,
    start: Clock,
    display: &Display,
) -> Result<Outcome, Exit> {
    let mut signals =
        Signals::new([SIGHUP, SIGINT, SIGTERM]).context("cannot install signal handlers").map_err(Exit::Run)?;
    let (handle, interrupter) = (signals.handle(), workers.interrupter());
    let watching = thread::spawn(move || signals.forever().for_each(|signal| interrupter.interrupt(signal)));
    let clock = move || Instant::from_nanos(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let poll = Duration::from_millis(args.poll_ms);
    let limits = Limits {
        total: Duration::from_secs(args.timeout_s),
        poll,
        gone_polls: args.gone_polls,
        restore: poll.saturating_mul(args.gone_polls),
    };
    let goal = Goal { until: args.until(), tolerates_errors: args.tolerate_errors, keeps_log: args.keep_log };
    // The clock starts when the card is first read, because the time limit covers everything from then on.
    let session = Session::new(length, misc, goal, limits, Instant::ZERO);
    let mut bar = display.bar(length.images_bytes + length.tail_bytes);
    let outcome = workers.run(session, image, clock, |progress| bar.show(progress));
    handle.close();
    // The thread ends at once, because its signals are closed.
    let _ = watching.join();
    Ok(outcome)
}

/// Record the card's image. The recorded epoch never decreases, unless a rollback was allowed. An image without a
/// manifest, such as a vendor's for recovery, has no epoch, and the one before stays.
fn write_record(args: &FlashArgs, identity: &Identity, checked: &Checked, policy: RollbackPolicy) -> Result<(), Exit> {
    let manifest = checked.manifest.as_ref();
    let had = policy.had_epoch.unwrap_or(0);
    let epoch = match manifest {
        Some(manifest) if policy.allow_rollback => manifest.epoch,
        manifest => manifest.map_or(0, |manifest| manifest.epoch).max(had),
    };
    let record = Record {
        version: manifest.map(|manifest| manifest.version.clone()),
        epoch,
        sha256: hex(&checked.sha256),
        token: identity.token().map(str::to_owned),
    };
    record.write(&args.records, identity)
}
