//! `sumac devices`: the cards that this host can flash, and what they say of themselves.
//!
//! Only `misc` is read: opening `boot` would reset a card.

use crate::exit::Failure;
use crate::flash::{Card, worker};
use anyhow::Context;
use clap::Args;
use serde::Serialize;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;
use sumac_firmware::rshim::{DEV_FOLDER, Rshim};

/// How long a card's driver may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// `sumac devices`.
#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Where the driver makes its folders
    #[arg(long, value_name = "FOLDER", default_value = DEV_FOLDER)]
    root: PathBuf,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// A card, or why it can't be read.
#[derive(Serialize)]
#[serde(untagged)]
enum Found {
    Card(Card),
    Error { path: String, error: String },
}

/// List the cards.
pub(crate) fn run(args: &DevicesArgs) -> Result<(), Failure> {
    let cards = Rshim::find(&args.root).with_context(|| format!("cannot look for cards in {}", args.root.display()));
    let found = cards.map_err(Failure::Input)?.into_iter().map(|card| {
        let error = match worker::start(&card).map(|mut workers| workers.read_misc(ANSWER_LIMIT)) {
            Ok(Some(Ok(misc))) => return Found::Card(Card::new(&card, &misc)),
            Ok(Some(Err(errno))) => errno.to_string(),
            Err(error) => error.to_string(),
            Ok(None) => format!("the driver does not answer within {} s", ANSWER_LIMIT.as_secs()),
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
        tell!(
            "no cards in {}: is the rshim service running, and is no other side using the card?",
            args.root.display()
        );
    }
    Ok(out.flush()?)
}
