//! `sumac card list`: the cards that this host can flash, and the state that each reports.
//!
//! Only a card's `misc` node is read, because opening its `boot` node would reset the card.

use crate::exit::Failure;
use crate::flash::{Card, worker};
use anyhow::Context;
use clap::{Args, Subcommand};
use serde::Serialize;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;
use sumac_firmware::rshim::{DEV_FOLDER, Rshim};

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
    /// List the cards that this host can flash, with the state that each reports
    ///
    /// Reads each card's `misc` node and nothing else: opening its `boot` node would reset the card.
    List(ListArgs),
}

/// `sumac card list`.
#[derive(Debug, Args)]
struct ListArgs {
    /// The folder in which the driver creates one folder per card
    #[arg(long, value_name = "FOLDER", default_value = DEV_FOLDER)]
    root: PathBuf,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// A card, or why it cannot be read.
#[derive(Serialize)]
#[serde(untagged)]
enum Found {
    Card(Card),
    Error { path: String, error: String },
}

/// Run a subcommand of `sumac card`.
pub(crate) fn run(args: &CardArgs) -> Result<(), Failure> {
    let CardCommand::List(args) = &args.command;
    list(args)
}

/// List the cards.
fn list(args: &ListArgs) -> Result<(), Failure> {
    let cards = Rshim::find(&args.root).with_context(|| format!("cannot look for cards in {}", args.root.display()));
    let found = cards.map_err(Failure::Input)?.into_iter().map(|card| {
        let error = match worker::start(&card).map(|mut workers| workers.read_misc(ANSWER_LIMIT)) {
            Ok(Some(Ok(misc))) => return Found::Card(Card::new(&card, &misc)),
            Ok(Some(Err(errno))) => errno.to_string(),
            Err(error) => error.to_string(),
            Ok(None) => format!("the driver did not reply within {} s", ANSWER_LIMIT.as_secs()),
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
                Found::Card(card) => writeln!(out, "{}", card.line())?,
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
