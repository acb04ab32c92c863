//! Output of `sumac flash` for several cards: a line for each step on stderr and a table on stdout, or one JSON object
//! on stdout for each event as it happens.
//!
//! Errors of writing stop no card: the first one is returned at the end.

use super::identity::Identity;
use super::one::{Ended, Event};
use super::record::Record;
use super::show::{Report, describe};
use ed25519_dalek::VerifyingKey;
use serde::Serialize;
use serde_json::{Value, json};
use std::io::{self, Write};
use std::time::Duration;
use sumac_firmware::flash::Progress;
use sumac_firmware::manifest::Checked;
use sumac_firmware::rshim::Rshim;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// The number of events about what was written of a stream.
const WRITTEN_EVENTS: u64 = 16;

/// The cards and how far they are.
#[derive(Debug)]
pub(super) struct Table<'a> {
    json: bool,
    len_bytes: u64,
    rows: Vec<Row<'a>>,
    /// The first error of writing to stdout.
    error: Option<io::Error>,
}

#[derive(Debug)]
struct Row<'a> {
    card: &'a Rshim,
    /// Its name in messages.
    label: String,
    serial: Option<String>,
    /// The last reported part of the stream.
    written: u64,
    ended: Option<(Ended, Duration)>,
}

/// How many cards ended in which way.
#[derive(Debug, Default, Serialize)]
struct Counts {
    done: usize,
    unchanged: usize,
    failed: usize,
    not_started: usize,
}

impl<'a> Table<'a> {
    pub(super) fn new(json: bool, cards: &'a [Rshim], len_bytes: u64) -> Self {
        let name = |card: &Rshim| card.folder().file_name().map(|name| name.to_string_lossy().into_owned());
        let row = |card: &'a Rshim| {
            let is_unique = cards.iter().filter(|other| name(other) == name(card)).count() == 1;
            let label = name(card).filter(|_| is_unique).unwrap_or_else(|| card.folder().display().to_string());
            Row { card, label, serial: None, written: 0, ended: None }
        };
        Self { json, len_bytes, rows: cards.iter().map(row).collect(), error: None }
    }

    /// Show the image.
    pub(super) fn image(&mut self, checked: &Checked, key: Option<&VerifyingKey>) {
        note!("image for {} cards: {}", self.rows.len(), describe(checked, key));
        checked.report.notes.iter().for_each(|note| note!("note: {note}"));
    }

    /// Show what happens to a card.
    pub(super) fn event(&mut self, index: usize, event: Event) {
        let json = self.json;
        let row = &mut self.rows[index];
        let label = &row.label;
        let value = match event {
            Event::Card { card, identity, had } => {
                let slot = "no serial number can be read".to_owned();
                row.serial = match identity {
                    Identity::Serial(serial) => Some(serial),
                    Identity::Slot { .. } => None,
                };
                let serial = row.serial.as_ref().map_or(slot, |serial| format!("serial number {serial}"));
                if !json {
                    note!(
                        "{}, {serial}, {}",
                        card.line(),
                        had.as_ref().map_or("never flashed from here".into(), Record::line)
                    );
                }
                json!({ "event": "card", "state": card, "serial": row.serial, "record": had })
            }
            Event::Different(why) => {
                note!("{label}: flashing it: {why}");
                json!({ "event": "different", "reason": why })
            }
            Event::Progress(Progress::Stage(stage)) => {
                if !json {
                    note!("{label}: {stage}");
                }
                json!({ "event": "stage", "stage": stage.to_string() })
            }
            Event::Progress(Progress::Written(bytes)) => {
                let part = bytes.saturating_mul(WRITTEN_EVENTS) / self.len_bytes.max(1);
                if part <= row.written {
                    return;
                }
                row.written = part;
                json!({ "event": "written", "bytes": bytes, "total_bytes": self.len_bytes })
            }
            Event::Progress(Progress::Log(line)) => {
                tracing::info!("{label}: {line}");
                json!({ "event": "log", "line": line })
            }
            _ => return,
        };
        self.emit(Some(index), value);
    }

    /// Show how a card ended.
    pub(super) fn ended(&mut self, index: usize, ended: Ended, time: Duration) {
        let row = &mut self.rows[index];
        let (ended, time) = row.ended.insert((ended, time));
        let report = Report::new(row.card, Some(ended));
        if report.exit_status == 0 {
            note!("{}: {} after {} s", row.label, report.outcome, time.as_secs());
        }
        report.warn(&row.label);
        let mut value = serde_json::to_value(&report).unwrap_or_default();
        if let Value::Object(fields) = &mut value {
            fields.insert("event".into(), "end".into());
            fields.insert("serial".into(), row.serial.clone().into());
            fields.insert("seconds".into(), time.as_secs_f64().into());
        }
        self.emit(Some(index), value);
    }

    /// Return whether all cards are done.
    pub(super) fn is_done(&self) -> bool {
        self.rows.iter().all(|row| row.report().exit_status == 0)
    }

    /// Print the table, or the last event.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        let mut counts = Counts::default();
        for row in &self.rows {
            *match row.report() {
                _ if row.ended.is_none() => &mut counts.not_started,
                Report { outcome: "unchanged", .. } => &mut counts.unchanged,
                Report { exit_status: 0, .. } => &mut counts.done,
                _ => &mut counts.failed,
            } += 1;
        }
        if self.json {
            let card = |row: &Row<'_>| {
                let report = row.report();
                let seconds = row.ended.as_ref().map(|(_, time)| time.as_secs_f64());
                json!({ "card": row.card.folder(), "serial": row.serial, "outcome": report.outcome,
                    "exit_status": report.exit_status, "message": report.message, "seconds": seconds })
            };
            let cards: Vec<_> = self.rows.iter().map(card).collect();
            let counts = serde_json::to_value(&counts).map_err(io::Error::from)?;
            self.emit(None, json!({ "event": "summary", "counts": counts, "cards": cards }));
            return self.error.take().map_or(Ok(()), Err);
        }
        write_table(&self.rows, &counts, &mut io::stdout().lock())
    }

    /// Print an event as JSON, if that is wanted.
    fn emit(&mut self, index: Option<usize>, mut value: Value) {
        if !self.json || self.error.is_some() {
            return;
        }
        if let (Value::Object(fields), Some(index)) = (&mut value, index) {
            fields.insert("card".into(), self.rows[index].card.folder().display().to_string().into());
        }
        self.error = emit(value).err();
    }
}

impl Row<'_> {
    fn report(&self) -> Report<'_> {
        Report::new(self.card, self.ended.as_ref().map(|(ended, _)| ended))
    }
}

/// Print an event with the time, unless it has one.
pub(super) fn emit(mut event: Value) -> io::Result<()> {
    if let Value::Object(fields) = &mut event {
        // Formatting fails for years beyond 9999.
        let time = || OffsetDateTime::now_utc().format(&Rfc3339).unwrap_or_default().into();
        fields.entry("time").or_insert_with(time);
    }
    writeln!(io::stdout(), "{event}")
}

/// Print a line for each card, and their numbers.
fn write_table(rows: &[Row<'_>], counts: &Counts, out: &mut impl Write) -> io::Result<()> {
    let serial = |row: &Row<'_>| row.serial.clone().unwrap_or_else(|| "-".into());
    let width = |texts: &mut dyn Iterator<Item = usize>, head: &str| texts.max().unwrap_or(0).max(head.len());
    let label_width = width(&mut rows.iter().map(|row| row.label.len()), "card");
    let serial_width = width(&mut rows.iter().map(|row| serial(row).len()), "serial");
    writeln!(out, "{:label_width$}  {:serial_width$}  {:14} {:>7}", "card", "serial", "outcome", "seconds")?;
    for row in rows {
        let report = row.report();
        let time = row.ended.as_ref().map_or("-".into(), |(_, time)| time.as_secs().to_string());
        let (label, serial, outcome) = (&row.label, serial(row), report.outcome);
        let line = format!("{label:label_width$}  {serial:serial_width$}  {outcome:14} {time:>7}");
        match &report.message {
            Some(message) => writeln!(out, "{line}  {message}")?,
            None => writeln!(out, "{line}")?,
        }
    }
    let Counts { done, unchanged, failed, not_started } = counts;
    writeln!(out, "{done} done, {unchanged} unchanged, {failed} failed, {not_started} not started")?;
    out.flush()
}
