//! `sumac card`: the cards that this host can flash, the state that each reports, the versions that they are pinned to,
//! and updates of cards that serve ([`update`]).
//!
//! Only a card's `misc` node is read, because opening its `boot` node would reset the card.

mod drive;
mod show;
mod update;

use crate::exit::{Failure, chain};
use crate::flash::{Card, Inventory, Pin, set_pin, worker};
use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use serde::Serialize;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;
use sumac_firmware::rshim::{DEV_FOLDER, Misc, Rshim};
use update::{ConfirmArgs, RollbackArgs, UpdateArgs};

/// How long a card's driver may take to reply.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// `sumac card`.
#[derive(Debug, Args)]
pub(crate) struct CardArgs {
    #[command(subcommand)]
    command: CardCommand,
}

#[derive(Debug, Subcommand)]
enum CardCommand {
    /// List the cards that this host can flash: the state that each reports, what this host's Linux shows of it, and
    /// what was flashed last
    ///
    /// Reads each card's `misc` node and no other: opening its `boot` node would reset the card.
    List(ListArgs),
    /// Pin cards to a version: `flash` refuses them any other. A pin follows the card's serial number
    Pin(PinArgs),
    /// Remove the pins of cards
    Unpin(CardsArgs),
    /// Update cards that serve, over the network: their agents boot from two slots
    ///
    /// Sends a signed image through the controller to the slot that does not run. The card checks the image with its
    /// own key, and takes no epoch older than its own. Jobs go on by host collectives while it restarts, and come back
    /// to it. It is confirmed once it has served its controller for a while; if it does not come up, it falls back to
    /// the slot that ran before. A command that was cut is repeated: it goes on where it was.
    #[command(after_long_help = UPDATE_HELP)]
    Update(UpdateArgs),
    /// Restart cards into their other slots, if their epochs are not older; ends a trial
    Rollback(RollbackArgs),
    /// Confirm the running slots of cards, which are on trial, instead of waiting until they confirm themselves
    Confirm(ConfirmArgs),
}

const UPDATE_HELP: &str = "\
EXAMPLES
  sumac card update sumac.bfb --name leaf0,leaf1 --controller 10.0.0.1:7847 --key-file operator.key
  sumac card rollback --name leaf0 --controller 10.0.0.1:7847 --key-file operator.key

JSON
  device, and event (progress, checking, restarting, on-trial, retrying) bytes of_bytes slot message, or
  outcome (confirmed, on trial, failed) slot version epoch changed message

EXIT STATUS
  0 all cards run the image   1 a card failed; its line says what it runs   2 invalid usage or image, nothing was sent";

/// Where what is known of cards is kept and shown.
#[derive(Debug, Args)]
struct Folders {
    /// Folder with the records of `sumac flash`
    #[arg(long, value_name = "FOLDER", default_value = "/var/lib/sumac/cards", env = "SUMAC_CARDS")]
    records: PathBuf,
    /// Where Linux shows devices
    #[arg(long, value_name = "FOLDER", default_value = "/sys", hide = true)]
    sysfs: PathBuf,
}

/// `sumac card unpin`, and the cards of `sumac card pin`.
#[derive(Debug, Args)]
struct CardsArgs {
    /// Cards: names below /dev, or paths of their folders; may be repeated
    #[arg(long, value_name = "CARD,...", value_delimiter = ',', required = true)]
    rshim: Vec<String>,
    #[command(flatten)]
    folders: Folders,
}

/// `sumac card pin`.
#[derive(Debug, Args)]
struct PinArgs {
    #[command(flatten)]
    cards: CardsArgs,
    /// Version in the image's manifest
    #[arg(long, value_name = "VERSION")]
    image_version: String,
    /// Epoch in the image's manifest [default: any]
    #[arg(long, value_name = "N")]
    epoch: Option<u64>,
}

/// `sumac card list`.
#[derive(Debug, Args)]
struct ListArgs {
    /// The folder in which the driver creates one folder per card
    #[arg(long, value_name = "FOLDER", default_value = DEV_FOLDER)]
    root: PathBuf,
    #[command(flatten)]
    folders: Folders,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// A card, or why it cannot be read.
#[derive(Serialize)]
#[serde(untagged)]
enum Found {
    Card(Box<Known>),
    Error { path: String, error: String },
}

/// What is known of a card.
#[derive(Serialize)]
struct Known {
    #[serde(flatten)]
    card: Card,
    #[serde(flatten)]
    inventory: Inventory,
}

/// Run a subcommand of `sumac card`.
pub(crate) fn run(args: &CardArgs) -> Result<(), Failure> {
    match &args.command {
        CardCommand::List(args) => list(args),
        CardCommand::Pin(PinArgs { cards, image_version, epoch }) => {
            pin(cards, Some(&Pin { version: image_version.clone(), epoch: *epoch }))
        }
        CardCommand::Unpin(cards) => pin(cards, None),
        CardCommand::Update(args) => update::update(args),
        CardCommand::Rollback(args) => update::roll_back(args),
        CardCommand::Confirm(args) => update::confirm(args),
    }
}

/// Read a card's state.
fn read(card: &Rshim) -> anyhow::Result<Box<Misc>> {
    match worker::start(card)?.read_misc(ANSWER_LIMIT) {
        Some(misc) => Ok(misc?),
        None => bail!("the driver did not reply within {} s", ANSWER_LIMIT.as_secs()),
    }
}

/// Pin cards to a version, or to none: all of them, or those before the first one that cannot be read.
fn pin(args: &CardsArgs, pin: Option<&Pin>) -> Result<(), Failure> {
    let Folders { records, sysfs } = &args.folders;
    for name in &args.rshim {
        let card = Rshim::new(name);
        let why = || format!("cannot read the card at {}; `sumac card list` names the cards", card.folder().display());
        let misc = read(&card).with_context(why).map_err(Failure::Input)?;
        set_pin(pin, &card, &misc, sysfs, records)?;
        let what = pin.map_or_else(|| "not pinned".into(), |pin| format!("pinned to {pin}"));
        writeln!(io::stdout(), "{}: {what}", card.folder().display())?;
    }
    Ok(())
}

/// List the cards.
fn list(args: &ListArgs) -> Result<(), Failure> {
    let cards = Rshim::find(&args.root).with_context(|| format!("cannot look for cards in {}", args.root.display()));
    let found = cards.map_err(Failure::Input)?.into_iter().map(|card| {
        let Folders { records, sysfs } = &args.folders;
        let known = read(&card).map_err(Failure::Run).and_then(|misc| {
            let inventory = Inventory::read(&card, &misc, sysfs, records)?;
            Ok(Box::new(Known { card: Card::new(&card, &misc), inventory }))
        });
        let error = match known {
            Ok(known) => return Found::Card(known),
            Err(Failure::Input(error) | Failure::Run(error)) => chain(&error),
            Err(other) => format!("{other:?}"),
        };
        Found::Error { path: card.folder().display().to_string(), error }
    });
    let found: Vec<_> = found.collect();
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer(&mut out, &found).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        for card in &found {
            match card {
                Found::Card(known) => writeln!(out, "{}, {}", known.card.line(), known.inventory.line())?,
                Found::Error { path, error } => writeln!(out, "{path}: cannot be read: {error}")?,
            }
        }
    }
    if found.is_empty() {
        note!(
            "no cards in {}; check that the rshim service runs here, and that no other host or BMC uses the card",
            args.root.display()
        );
    }
    Ok(out.flush()?)
}
