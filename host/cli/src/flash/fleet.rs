//! Flashing of several cards at once. What happens to one has no effect on the others.
//!
//! Invariants: each card is tried once; cards whose turn has not come when a signal arrives are not begun; the batch
//! stays on disk, for `--continue`, until all its cards are done.

use super::args::FlashArgs;
use super::batch::Batch;
use super::interrupts::Interrupts;
use super::one::{Ended, Event, Job};
use super::record::{Record, unix_s};
use super::table::Table;
use crate::exit::Failure as Exit;
use anyhow::{Context, anyhow};
use ed25519_dalek::VerifyingKey;
use std::path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};
use sumac_firmware::manifest::hex;
use sumac_firmware::rshim::Rshim;

/// A message of a thread that flashes cards.
enum Message {
    Event(Event),
    Ended(Ended, Duration),
}

/// Flash the cards that the options name.
pub(super) fn run(job: &mut Job<'_>, key: Option<&VerifyingKey>) -> Result<(), Exit> {
    let args = job.args;
    let sha256 = hex(&job.checked.sha256);
    let batch = if args.continues {
        let batch = Batch::read(&args.records, &sha256)?;
        job.done_since = Some(batch.start_unix_s);
        batch
    } else {
        Batch { start_unix_s: unix_s(), cards: select(args)? }
    };
    let cards: Vec<_> = batch.cards.iter().map(|folder| Rshim::new(&folder.display().to_string())).collect();
    if !args.dry_run {
        Record::probe(&args.records)?;
        batch.write(&args.records, &sha256)?;
    }
    let interrupts = Interrupts::watch()?;
    let mut table = Table::new(args.json, &cards, job.len_bytes());
    table.image(&job.checked, key);
    flash_all(job, &cards, &interrupts, &mut table);
    let signal = interrupts.signal();
    drop(interrupts);
    if table.is_done() && !args.dry_run {
        Batch::remove(&args.records, &sha256)?;
    }
    table.finish()?;
    match signal {
        _ if table.is_done() => Ok(()),
        Some(signal) => Err(Exit::Signal(signal)),
        None => Err(Exit::Reported),
    }
}

/// Return the folders of the cards that the options name.
fn select(args: &FlashArgs) -> Result<Vec<path::PathBuf>, Exit> {
    let cards = if args.all {
        let why = || format!("cannot look for cards in {}", args.root.display());
        Rshim::find(&args.root).with_context(why).map_err(Exit::Input)?
    } else {
        args.rshim.iter().map(|name| Rshim::new(name)).collect()
    };
    if cards.is_empty() {
        let what = "check that the rshim service runs here, and that no other host or BMC uses the cards";
        return Err(Exit::Input(anyhow!("no cards in {}; {what}", args.root.display())));
    }
    let mut folders = Vec::with_capacity(cards.len());
    for card in cards {
        // A later run may have another working directory.
        let folder = path::absolute(card.folder()).context("--rshim").map_err(Exit::Input)?;
        if folders.contains(&folder) {
            return Err(Exit::Input(anyhow!("--rshim names {} twice", folder.display())));
        }
        folders.push(folder);
    }
    Ok(folders)
}

/// Flash cards on several threads, each one card at a time.
fn flash_all(job: &Job<'_>, cards: &[Rshim], interrupts: &Interrupts, table: &mut Table<'_>) {
    let next = AtomicUsize::new(0);
    let (sender, messages) = channel();
    thread::scope(|scope| {
        for _ in 0..cards.len().min(job.args.parallel.into()) {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                while interrupts.signal().is_none() {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(card) = cards.get(index) else { return };
                    let start = Instant::now();
                    // The receiver lives as long as this scope.
                    let send = |message| drop(sender.send((index, message)));
                    let ended = job.flash(card, interrupts, |event| send(Message::Event(event)));
                    send(Message::Ended(ended, start.elapsed()));
                }
            });
        }
        drop(sender);
        for (index, message) in messages {
            match message {
                Message::Event(event) => table.event(index, event),
                Message::Ended(ended, time) => table.ended(index, ended, time),
            }
        }
    });
}
