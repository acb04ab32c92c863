//! What `sumac card update`, `rollback` and `confirm` print: events while cards are updated, and how each ended.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};
use sumac_firmware::update::{Event, Outcome};

/// The steps of progress that are printed, in percent.
const STEP_PERCENT: u64 = 10;

/// Prints events and outcomes of several cards.
#[derive(Debug)]
pub(super) struct Show {
    is_json: bool,
    total_bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// How far each card is, in steps.
    steps: BTreeMap<String, u64>,
    error: Option<io::Error>,
}

impl Show {
    pub(super) fn new(is_json: bool, total_bytes: u64) -> Self {
        Self { is_json, total_bytes, state: Mutex::default() }
    }

    /// Print an event of a card.
    pub(super) fn event(&self, device: &str, event: &Event) {
        let text = match event {
            Event::Progress(bytes) => match self.step(device, *bytes) {
                Some(percent) => format!("{percent}% of {} bytes", self.total_bytes),
                None => return,
            },
            Event::Checks => "the card checks the image".into(),
            Event::Restarts => "jobs move off the card, and it restarts".into(),
            Event::OnTrial(slot) => format!("slot {slot} runs, on trial"),
            Event::Retries(why) => format!("asks again: {}", escape(why)),
            other => format!("{other:?}"),
        };
        if self.is_json {
            let event = match event {
                Event::Progress(bytes) => json!({ "event": "progress", "bytes": bytes, "of_bytes": self.total_bytes }),
                Event::Checks => json!({ "event": "checking" }),
                Event::Restarts => json!({ "event": "restarting" }),
                Event::OnTrial(slot) => json!({ "event": "on-trial", "slot": slot.to_string() }),
                Event::Retries(why) => json!({ "event": "retrying", "message": why }),
                other => json!({ "event": format!("{other:?}") }),
            };
            self.print(device, event);
        } else {
            note!("{}: {text}", escape(device));
        }
    }

    /// Print how a card ended.
    pub(super) fn outcome(&self, device: &str, outcome: &Result<Outcome, String>) {
        if self.is_json {
            let value = match outcome {
                Ok(done) => json!({
                    "outcome": word(done),
                    "slot": done.slot.to_string(),
                    "version": done.version,
                    "epoch": done.epoch,
                    "changed": !done.was_so_before,
                }),
                Err(why) => json!({ "outcome": "failed", "message": why }),
            };
            return self.print(device, value);
        }
        let device = escape(device);
        let line = match outcome {
            Ok(done) => {
                let before = if done.was_so_before { ", as before" } else { "" };
                let (slot, version, epoch) = (done.slot, escape(&done.version), done.epoch);
                format!("{device}  slot {slot}  version {version}  epoch {epoch}  {}{before}", word(done))
            }
            Err(why) => format!("{device}  FAILED: {}", escape(why)),
        };
        self.write(&line);
    }

    /// Return the percentage, if a step was reached.
    fn step(&self, device: &str, bytes: u64) -> Option<u64> {
        let percent = bytes.saturating_mul(100).checked_div(self.total_bytes).unwrap_or(100).min(100);
        let step = percent / STEP_PERCENT + 1;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let last = state.steps.entry(device.to_owned()).or_default();
        // A transfer that starts over is shown again.
        (std::mem::replace(last, step) != step).then_some(percent)
    }

    fn print(&self, device: &str, mut value: Value) {
        value["device"] = json!(device);
        self.write(&value.to_string());
    }

    fn write(&self, line: &str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = writeln!(io::stdout(), "{line}") {
            // The cards are updated nevertheless.
            state.error.get_or_insert(error);
        }
    }

    /// Return the first error of printing.
    pub(super) fn finish(self) -> io::Result<()> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        state.error.map_or(Ok(()), Err)
    }
}

const fn word(outcome: &Outcome) -> &'static str {
    if outcome.is_confirmed { "confirmed" } else { "on trial" }
}

/// Escape what a terminal would interpret: names and reasons come from elsewhere.
fn escape(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}
