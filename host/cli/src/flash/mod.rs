//! `sumac flash`: push a boot stream to a card, follow its boot, and say how it ended.
//!
//! Invariants: everything of the image and the card is checked before the first change to the card; the bytes that are checked
//! are those that are pushed; stdout has one
//! result, stderr the rest; the exit status is that of the failure ([`sumac_firmware::flash`] has the table).

mod record;
mod show;
pub(crate) mod worker;

pub(crate) use show::Card;

use crate::exit::Failure as Exit;
use crate::image::{ImageFile, read_public_key};
use anyhow::{Context, anyhow};
use clap::Args;
use record::Record;
use show::Display;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant as Clock};
use sumac_firmware::bfb::Policy;
use sumac_firmware::flash::{self, Failure, Goal, Image, Limits, Outcome, Session, Stage, Terms, Until, Workers};
use sumac_firmware::manifest::{self, Checked, Trust, hex};
use sumac_firmware::rshim::{Lock, Misc, Rshim};
use sumac_hal::time::Instant;
use worker::Spawn;

/// `sumac flash`.
#[derive(Debug, Args)]
pub(crate) struct FlashArgs {
    /// The boot stream
    #[arg(value_name = "FILE")]
    image: PathBuf,
    /// The card: a name below /dev, or the folder's path
    #[arg(long, value_name = "CARD", default_value = "rshim0")]
    rshim: String,
    /// Public key (PEM) that must have signed the image
    #[arg(long, value_name = "FILE", required_unless_present = "allow_unsigned")]
    key: Option<PathBuf>,
    /// Take an image that nobody has signed, as vendors' are
    #[arg(long, conflicts_with = "key")]
    allow_unsigned: bool,
    /// Take an image with a lower epoch than the card has had
    #[arg(long)]
    allow_rollback: bool,
    /// What the card must say to count as done
    #[arg(long = "until", value_enum, default_value_t = UntilName::Ready)]
    until: UntilName,
    /// Show ERR lines of the boot log, but go on; PANIC, Exception, ASSERT and CRITICAL ERROR end it all the same
    #[arg(long)]
    tolerate_errors: bool,
    /// Seconds for all of it, but for putting settings back
    #[arg(long = "timeout", value_name = "SECONDS", default_value_t = 1800, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout_s: u64,
    /// Check everything and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Where to keep what each card has had
    #[arg(long, value_name = "FOLDER", default_value = "/var/lib/sumac/cards", env = "SUMAC_CARDS")]
    records: PathBuf,
    /// Milliseconds between two looks at the boot log
    #[arg(long = "poll-ms", value_name = "N", default_value_t = 1000, hide = true, value_parser = clap::value_parser!(u64).range(1..))]
    poll_ms: u64,
    /// Looks that fail before the card counts as gone, and the time of so many for putting settings back
    #[arg(long, value_name = "N", default_value_t = 30, hide = true, value_parser = clap::value_parser!(u32).range(1..))]
    patience_polls: u32,
}

/// What success looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum UntilName {
    /// `DPU is ready`
    Ready,
    /// `Linux up` is enough
    LinuxUp,
    /// `Rebooting...`, the end of a vendor's installer
    Rebooting,
}

/// Flash.
pub(crate) fn run(args: &FlashArgs) -> Result<(), Exit> {
    let display = Display::new(args.json);
    let done = attempt(args, &display);
    if let Err(Exit::Input(error)) = &done {
        display.refused(error)?;
    }
    done
}

/// Flash; an error of the input has not been shown yet.
fn attempt(args: &FlashArgs, display: &Display) -> Result<(), Exit> {
    let key = args.key.as_deref().map(read_public_key).transpose()?;
    let file = ImageFile::open(&args.image)?;
    if file.is_emmc {
        return Err(Exit::Input(anyhow!(
            "{}: is in the form of an eMMC boot partition, which a card does not boot over rshim; turn it into a boot \
             stream with `sumac image repack`",
            args.image.display()
        )));
    }
    let trust = key.as_ref().map_or(Trust::Anybody, Trust::Key);
    // What is checked is what goes to the card, whatever becomes of the file.
    let bytes = file.seal()?;
    let reader = bytes.reader().map_err(|error| file.failure(error))?;
    let checked = manifest::check(reader, Policy::Strict, trust).map_err(|error| file.failure(error))?;
    let card = Rshim::new(&args.rshim);
    // From here on, no second one of our kind can do the same with the same card.
    let (start, limit) = (Clock::now(), Duration::from_secs(args.timeout_s));
    let looked = look_at(&card, limit).map_err(Exit::Run)?;
    let Looked { _lock, misc, workers } = looked.map_err(|failure| display.failed(&card, &failure))?;
    let name = misc.dev_name.clone().unwrap_or_else(|| card.folder().display().to_string());
    let had = Record::read(&args.records, &name)?;
    display.card(&Card::new(&card, &misc), had.as_ref());
    let terms = Terms { had_epoch: had.map(|had| had.epoch), allow_rollback: args.allow_rollback };
    let generation = flash::check(&checked, &misc, terms).map_err(|refusal| file.failure(refusal))?;
    flash::usable(&misc).map_err(|failure| display.failed(&card, &failure))?;
    display.image(&checked, generation, key.as_ref());
    if args.dry_run {
        display.dry_run()?;
        return Ok(());
    }
    // Where it can't be kept afterwards, nothing is begun.
    Record::probe(&args.records)?;
    let image = Image { bytes, sha256: checked.sha256 };
    let outcome = push(args, workers, image, &misc, start, display)?;
    if outcome.result.is_ok() {
        remember(args, &name, &checked, terms)?;
    }
    display.ended(&card, &outcome)
}

/// A card that is ours while this lives.
struct Looked {
    _lock: Lock,
    misc: Box<Misc>,
    workers: Workers<Spawn>,
}

/// Lock a card and read what it says; the outer error is that there are no workers.
fn look_at(card: &Rshim, limit: Duration) -> anyhow::Result<Result<Looked, Failure>> {
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
        Some(Ok(misc)) => Ok(Looked { _lock: lock, misc, workers }),
        Some(Err(errno)) => Err(failure_of(&errno.into())),
        None => Err(Failure::TimeLimit { limit, stage: Stage::Preparing }),
    })
}

fn failure_of(error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::PermissionDenied => Failure::Permission,
        _ => Failure::Gone,
    }
}

/// Write, follow, restore.
fn push(
    args: &FlashArgs,
    workers: Workers<Spawn>,
    image: Image,
    misc: &Misc,
    start: Clock,
    display: &Display,
) -> Result<Outcome, Exit> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).context("watch for signals").map_err(Exit::Run)?;
    let (handle, interrupter) = (signals.handle(), workers.interrupter());
    let watching = thread::spawn(move || signals.forever().for_each(|signal| interrupter.interrupt(signal)));
    let clock = move || Instant::from_nanos(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let poll = Duration::from_millis(args.poll_ms);
    let limits = Limits {
        total: Duration::from_secs(args.timeout_s),
        poll,
        gone_polls: args.patience_polls,
        restore: poll.saturating_mul(args.patience_polls),
    };
    let until = match args.until {
        UntilName::Ready => Until::Ready,
        UntilName::LinuxUp => Until::LinuxUp,
        UntilName::Rebooting => Until::Rebooting,
    };
    let goal = Goal { until, tolerates_errors: args.tolerate_errors };
    // The clock's zero is when the card was first looked at: the limit is for all of it.
    let len_bytes = image.bytes.len_bytes();
    let session = Session::new(len_bytes, misc, goal, limits, Instant::ZERO);
    let mut bar = display.bar(len_bytes);
    let outcome = workers.run(session, image, clock, |progress| bar.show(progress));
    handle.close();
    // It ends at once: its signals are closed.
    let _ = watching.join();
    Ok(outcome)
}

/// Keep what the card has now; a lower epoch does not make the card forget the higher one, unless it was allowed.
fn remember(args: &FlashArgs, name: &str, checked: &Checked, terms: Terms) -> Result<(), Exit> {
    let manifest = checked.manifest.as_ref();
    let epoch = manifest.map_or(0, |manifest| manifest.epoch);
    let record = Record {
        version: manifest.map(|manifest| manifest.version.clone()),
        epoch: if terms.allow_rollback { epoch } else { epoch.max(terms.had_epoch.unwrap_or(0)) },
        sha256: hex(&checked.sha256),
    };
    record.write(&args.records, name)
}
