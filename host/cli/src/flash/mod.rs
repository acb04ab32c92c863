//! `sumac flash`: push a boot stream to cards, follow their boot, and report the outcome.
//!
//! Invariants: image and card are checked completely before the first change to the card. The checked bytes are the
//! ones that are pushed. stdout has a single result, or the events of several cards, everything else goes to stderr.
//! The exit status of one card identifies the failure ([`sumac_firmware::flash`] has the table).

mod args;
mod batch;
mod fleet;
mod identity;
mod interrupts;
mod inventory;
mod nic;
mod one;
mod pin;
mod record;
#[cfg(feature = "redfish")]
mod redfish;
mod remote;
mod show;
mod table;
pub(crate) mod tail;
mod targets;
pub(crate) mod worker;

pub(crate) use args::FlashArgs;
pub(crate) use inventory::{Inventory, set_pin};
pub(crate) use pin::Pin;
pub(crate) use show::Card;

use crate::exit::Failure as Exit;
use crate::image::{ImageFile, read_public_key};
use anyhow::anyhow;
use ed25519_dalek::VerifyingKey;
use interrupts::Interrupts;
use one::{Ended, Event, Job};
use remote::stream::Received;
use show::Display;
use sumac::controller::keys::read_key;
use sumac_firmware::bfb::Policy;
use sumac_firmware::enrolment;
use sumac_firmware::flash::{Image, SealedImage};
use sumac_firmware::manifest::{self, Trust, hex};
use sumac_firmware::rshim::Rshim;
use sumac_hal::ctrl::secure::Key;

/// Flash one card or several.
pub(crate) fn run(args: &FlashArgs) -> Result<(), Exit> {
    let display = Display::new(args.json);
    let done = attempt(args, &display);
    if let Err(Exit::Input(error)) = &done {
        display.refused(error)?;
    }
    done
}

/// What is flashed, before it is checked: a sealed copy, which is what is pushed, even if the file changes.
struct Copied {
    bytes: SealedImage,
    /// The key that must have signed it.
    key: Option<VerifyingKey>,
    /// The device's key, which follows it.
    device_key: Option<Key>,
    /// Whether a configuration or a root file system follows it.
    has_more: bool,
}

impl Copied {
    /// Copy the image that the options name.
    fn read(args: &FlashArgs) -> Result<Self, Exit> {
        if args.follow_stdin {
            let Received { image: bytes, key } = remote::stream::receive().map_err(Exit::Input)?;
            if key.is_none() && !args.allow_unsigned {
                return Err(Exit::Input(anyhow!("neither a key nor --allow-unsigned came with the image")));
            }
            let has_more = bytes.tail_len_bytes() > 0;
            return Ok(Self { bytes, key, device_key: None, has_more });
        }
        if args.key_file.is_some() && args.is_fleet() {
            return Err(Exit::Input(anyhow!("--key-file is the key of one device: name one card with --rshim")));
        }
        let key = args.key.as_deref().map(read_public_key).transpose()?;
        let file = ImageFile::open(&args.image)?;
        if file.is_emmc {
            return Err(Exit::Input(anyhow!(
                "{} has the form of an eMMC boot partition, which a card does not boot over rshim; convert it to a boot stream \
                 with `sumac image repack`",
                args.image.display()
            )));
        }
        let device_key = args.key_file.as_deref().map(read_key).transpose().map_err(Exit::input)?;
        let tail = device_key.as_ref().map(enrolment::emit);
        let bytes = file.seal(tail::open(args, tail.as_deref().map_or(&[][..], |tail| &tail[..]))?)?;
        Ok(Self { bytes, key, device_key, has_more: args.config.is_some() || args.rootfs.is_some() })
    }
}

/// Check the image and flash. Errors of the input are left to the caller to show.
fn attempt(args: &FlashArgs, display: &Display) -> Result<(), Exit> {
    let Copied { bytes, key, device_key, has_more } = Copied::read(args)?;
    let failure = |error: anyhow::Error| Exit::Input(error.context(args.image.display().to_string()));
    let trust = key.as_ref().map_or(Trust::AnySigner, Trust::Key);
    let reader = bytes.reader().map_err(|error| failure(error.into()))?;
    // With a key, the policy is strict.
    let checked = manifest::check(reader, Policy::Vendor, trust).map_err(|error| failure(error.into()))?;
    let tail_sha256 = has_more.then(|| bytes.tail_sha256()).transpose().map_err(|error| failure(error.into()))?;
    let image = Image { bytes, sha256: checked.sha256, is_tail_only: args.runtime };
    let tail_sha256 = tail_sha256.as_ref().map(|digest| hex(digest));
    let mut job = Job { args, image, checked, tail_sha256, done_since: None };
    if !args.hosts.is_empty() {
        return remote::run(&job, key.as_ref());
    }
    #[cfg(feature = "redfish")]
    if !args.redfish.urls.is_empty() {
        if args.ram {
            note!("note: the image runs from the cards' memory, until the next reset");
        }
        return redfish::run(&job);
    }
    if args.is_fleet() {
        return fleet::run(&mut job, key.as_ref());
    }
    if args.ram {
        note!("note: the image runs from the card's memory, until the next reset");
    }
    if args.runtime {
        note!("note: the card goes on with the version that it runs; its next reset starts this one");
    }
    let interrupts = Interrupts::watch()?;
    let card = Rshim::new(args.rshim.first().map_or("", String::as_str));
    let mut bar = None;
    let ended = job.flash(&card, &interrupts, |event| match event {
        Event::Card { card, identity, had } => display.card(&card, &identity, had.as_ref()),
        Event::Different(why) => note!("flashing it: {why}"),
        Event::Accepted(generation) => {
            display.image(&job.checked, generation, key.as_ref());
            device_key.iter().for_each(|key| display.device_key(key.id()));
        }
        Event::Progress(progress) => bar.get_or_insert_with(|| display.bar(job.len_bytes())).show(progress),
    });
    drop(interrupts);
    match ended {
        Ended::Refused(error) => Err(Exit::Input(error)),
        Ended::Broken(error) => Err(Exit::Run(error)),
        Ended::DryRun => Ok(display.dry_run()?),
        Ended::Unchanged => Ok(display.unchanged(&card)?),
        ended @ Ended::Flashed(_) => display.ended(&card, &ended),
    }
}
