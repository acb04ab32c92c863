//! `sumac card update`, `rollback` and `confirm`: cards that serve, over the network.
//!
//! Each card is served by a thread of its own with a connection of its own to the controller, so that one that is slow
//! or fails holds up no other.

use super::drive::{self, Task};
use super::show::Show;
use crate::address::ControllerAddress;
use crate::exit::Failure;
use crate::image::{ImageFile, SlotImage, read_public_key};
use crate::key::KeyOption;
use crate::options::device_name;
use anyhow::anyhow;
use clap::Args;
use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;
use sumac::controller::ControllerAddr;
use sumac::controller::limits::InvalidName;
use sumac_firmware::bfb::Policy;
use sumac_firmware::manifest::{Trust, check};
use sumac_firmware::update::{Goal, Limits};
use sumac_hal::ctrl::update::{SLOT_VERSION_MAX_LEN, UPDATE_MANIFEST_MAX_BYTES, UpdateOffer};

/// The cards, and how to reach them.
#[derive(Debug, Args)]
pub(super) struct Remote {
    /// Devices, as `sumac status` names them; may be repeated
    #[arg(long, value_name = "DEVICE,...", value_delimiter = ',', required = true, value_parser = name)]
    name: Vec<String>,
    #[command(flatten)]
    controller: ControllerAddress,
    #[command(flatten)]
    key: KeyOption,
    /// How many cards to serve at once
    #[arg(long, value_name = "N", default_value = "8")]
    parallel: NonZeroUsize,
    /// How long a card may take, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 1800, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    time_limit: u64,
    /// Print one JSON object per line: what happens, and how it ended
    #[arg(long)]
    json: bool,
}

/// `sumac card update`.
#[derive(Debug, Args)]
pub(super) struct UpdateArgs {
    /// Signed boot stream (`sumac image build --sign-key`)
    image: PathBuf,
    #[command(flatten)]
    remote: Remote,
    /// Public key to check the image with before it is sent. The card checks it with its own in any case
    #[arg(long = "key", value_name = "PUB.pem")]
    public_key: Option<PathBuf>,
    /// End when the card runs the image, without waiting until it is confirmed
    #[arg(long)]
    no_wait: bool,
}

/// `sumac card rollback`.
#[derive(Debug, Args)]
pub(super) struct RollbackArgs {
    #[command(flatten)]
    remote: Remote,
    /// End when the card runs its other slot, without waiting until it is confirmed
    #[arg(long)]
    no_wait: bool,
}

/// `sumac card confirm`.
#[derive(Debug, Args)]
pub(super) struct ConfirmArgs {
    #[command(flatten)]
    remote: Remote,
}

/// Update cards.
pub(super) fn update(args: &UpdateArgs) -> Result<(), Failure> {
    let SlotImage { manifest, sealed, payload } = read(&args.image, args.public_key.as_deref())?;
    let (version, epoch) = (&manifest.version, manifest.epoch);
    let what = format!("update to version {version}, epoch {epoch}");
    let offer =
        UpdateOffer { manifest_len_bytes: sealed.len() as u32, len_bytes: payload.len_bytes, sha256: payload.sha256 };
    let task = Task { goal: Goal::Update { offer, epoch }, manifest: sealed, payload: Some(payload.file) };
    run(&args.remote, &task, !args.no_wait, &what)
}

/// Restart cards into their other slots.
pub(super) fn roll_back(args: &RollbackArgs) -> Result<(), Failure> {
    let task = Task { goal: Goal::RollBack, manifest: Vec::new(), payload: None };
    run(&args.remote, &task, !args.no_wait, "rollback")
}

/// Confirm the running slots of cards.
pub(super) fn confirm(args: &ConfirmArgs) -> Result<(), Failure> {
    let task = Task { goal: Goal::Confirm, manifest: Vec::new(), payload: None };
    run(&args.remote, &task, true, "confirmation")
}

/// Check an image before any card hears of it, and build what its slots hold.
fn read(path: &Path, public_key: Option<&Path>) -> Result<SlotImage, Failure> {
    let key = public_key.map(read_public_key).transpose()?;
    let file = ImageFile::open(path)?;
    if file.is_emmc {
        return Err(file.failure(anyhow!("has the form of an eMMC partition; give the boot stream itself")));
    }
    let trust = key.as_ref().map_or(Trust::AnySigner, Trust::Key);
    check(file.stream()?, Policy::Strict, trust).map_err(|error| file.failure(error))?;
    let image = SlotImage::build(&file, path, trust, "has nothing for a card's slot")?;
    let (version, len) = (&image.manifest.version, image.sealed.len());
    if version.len() > SLOT_VERSION_MAX_LEN || len > UPDATE_MANIFEST_MAX_BYTES as usize {
        return Err(file.failure(anyhow!(
            "has version {version:?} and a manifest of {len} bytes; cards take versions of {SLOT_VERSION_MAX_LEN} bytes \
             and manifests of {UPDATE_MANIFEST_MAX_BYTES} bytes"
        )));
    }
    Ok(image)
}

/// Parse a device's name, by the controller's rule: what cannot be one is wrong usage, and no controller hears of it.
fn name(text: &str) -> Result<String, InvalidName> {
    device_name(text.trim())
}

/// Pursue a task on all cards.
fn run(remote: &Remote, task: &Task, awaits_confirmation: bool, what: &str) -> Result<(), Failure> {
    let names: BTreeSet<&str> = remote.name.iter().map(String::as_str).collect();
    let key = remote.key.read_operator()?;
    let controller = ControllerAddr { key, ..remote.controller.or_default()? };
    let total = Duration::from_secs(remote.time_limit);
    let limits = Limits { total, awaits_confirmation, ..Limits::default() };
    let show = Show::new(remote.json, task.total_bytes());
    note!("{what} of {} cards, {} at once", names.len(), remote.parallel.get().min(names.len()));
    let waiting = Mutex::new(names.into_iter());
    let next = || waiting.lock().ok().and_then(|mut names| names.next());
    let failed = thread::scope(|scope| {
        let serve = || {
            let mut failed = 0;
            while let Some(name) = next() {
                let outcome = drive::pursue(&controller, name, task, limits, &show);
                failed += usize::from(outcome.is_err());
                show.outcome(name, &outcome);
            }
            failed
        };
        let threads: Vec<_> = (0..remote.parallel.get().min(remote.name.len())).map(|_| scope.spawn(serve)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(1)).sum::<usize>()
    });
    show.finish()?;
    if failed > 0 { Err(Failure::Reported) } else { Ok(()) }
}
