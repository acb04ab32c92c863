//! Output of `sumac flash` for one card, and of `sumac card list`: lines and a progress bar on stderr, or one JSON
//! object on stdout. [`super::table`] is that for several cards.

use super::identity::Identity;
use super::one::Ended;
use super::record::Record;
use crate::exit::{Failure as Exit, chain, is_quiet};
use ed25519_dalek::VerifyingKey;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::io::{self, Write};
use sumac_firmware::bfb::Generation;
use sumac_firmware::flash::{Progress, Restored, Stage};
use sumac_firmware::manifest::{Checked, envelope, hex};
use sumac_firmware::rshim::{CardMode, LogKind, Misc, Rshim, kind_of};
use sumac_hal::ctrl::secure::KeyId;

/// The state of a card, from its `misc` node.
#[derive(Debug, Serialize)]
pub(crate) struct Card {
    path: String,
    device: Option<String>,
    info: Option<String>,
    generation: Option<&'static str>,
    part: Option<String>,
    mode: Option<&'static str>,
    boot_mode: Option<u32>,
    drop_mode: Option<bool>,
    secure_nic_mode: Option<bool>,
    up_time_s: Option<u64>,
}

impl Card {
    pub(crate) fn new(card: &Rshim, misc: &Misc) -> Self {
        Self {
            path: card.folder().display().to_string(),
            device: misc.dev_name.clone(),
            info: misc.dev_info.clone(),
            generation: misc.generation().map(Generation::name),
            part: misc.opn.clone(),
            mode: misc.mode.map(|mode| match mode {
                CardMode::Dpu => "DPU",
                CardMode::Nic => "NIC",
                _ => "unknown",
            }),
            boot_mode: misc.boot_mode,
            drop_mode: misc.drop_mode,
            secure_nic_mode: misc.secure_nic_mode,
            up_time_s: misc.up_time_s,
        }
    }

    /// Return the card's state as a line of text.
    pub(crate) fn line(&self) -> String {
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "?".into());
        let mut parts = vec![text(&self.info), text(&self.device)];
        parts.extend(self.part.clone());
        parts.extend(self.mode.map(|mode| format!("{mode} mode")));
        parts.extend(self.boot_mode.map(|mode| match mode {
            0 => "waits for a boot stream (BOOT_MODE 0)".into(),
            1 => "boots from eMMC".into(),
            2 => "boots from the other eMMC partition".into(),
            other => format!("BOOT_MODE {other}"),
        }));
        parts.extend(self.up_time_s.map(|seconds| format!("up {seconds} s")));
        parts.extend((self.drop_mode == Some(true)).then(|| "DROP MODE".into()));
        parts.extend((self.secure_nic_mode == Some(true)).then(|| "LOCKED".into()));
        format!("{}: {}", self.path, parts.join(", "))
    }
}

/// The JSON form of how a card ended.
#[derive(Debug, Serialize)]
pub(super) struct Report<'a> {
    pub(super) outcome: &'static str,
    pub(super) exit_status: u8,
    card: String,
    /// The line of the boot log that meant success.
    seen: Option<&'a str>,
    pub(super) message: Option<String>,
    advice: Option<&'static str>,
    written_bytes: u64,
    restored: Option<bool>,
    not_restored: Option<&'a str>,
    boot_log: &'a [String],
}

impl<'a> Report<'a> {
    /// Report how a card ended; `None`: it was not begun.
    pub(super) fn new(card: &Rshim, ended: Option<&'a Ended>) -> Self {
        let (outcome, exit_status, message) = match ended {
            None => ("not-started", 1, Some("interrupted before its turn".into())),
            Some(Ended::Refused(error)) => ("refused", 2, Some(chain(error))),
            Some(Ended::Broken(error)) => ("broken", 1, Some(chain(error))),
            Some(Ended::DryRun) => ("dry-run", 0, None),
            Some(Ended::Unchanged) => ("unchanged", 0, None),
            Some(Ended::Flashed(outcome)) => match &outcome.result {
                Ok(line) if kind_of(line) == LogKind::RuntimeFinished => ("installed", 0, None),
                Ok(_) => ("ready", 0, None),
                Err(failure) => (failure.name(), failure.exit_status(), Some(failure.to_string())),
            },
        };
        let flashed = match ended {
            Some(Ended::Flashed(outcome)) => Some(outcome),
            _ => None,
        };
        let restored = flashed.map(|outcome| &outcome.restored);
        Self {
            outcome,
            exit_status,
            card: card.folder().display().to_string(),
            seen: flashed.and_then(|outcome| outcome.result.as_deref().ok()),
            message,
            advice: flashed.and_then(|outcome| Some(outcome.result.as_ref().err()?.advice())),
            written_bytes: flashed.map_or(0, |outcome| outcome.written_bytes),
            restored: restored.filter(|restored| **restored != Restored::NotTouched).map(|it| *it == Restored::Yes),
            not_restored: match restored {
                Some(Restored::No(why)) => Some(why),
                _ => None,
            },
            boot_log: flashed.map_or(&[], |outcome| &outcome.log_tail),
        }
    }

    /// Print what is wrong on stderr, if anything is.
    pub(super) fn warn(&self, label: &str) {
        if let Some(why) = self.not_restored {
            message!(
                "{label}: the card's settings are NOT restored ({why}); when the driver responds: echo \"BOOT_MODE 1\" > \
                 {}/misc",
                self.card
            );
        }
        if let Some(message) = &self.message {
            message!("error: {label}: {message}");
        }
        if let Some(advice) = self.advice {
            message!("what to do: {advice}");
        }
    }
}

/// The output of `flash` for one card.
#[derive(Debug)]
pub(super) struct Display {
    json: bool,
}

impl Display {
    pub(super) fn new(json: bool) -> Self {
        Self { json }
    }

    /// Show the card's state and record.
    pub(super) fn card(&self, card: &Card, identity: &Identity, had: Option<&Record>) {
        note!("{}", card.line());
        match identity {
            Identity::Serial(serial) => note!("serial number {serial}"),
            Identity::Slot { .. } => note!("no serial number can be read: its record ends with this start of the host"),
        }
        note!("{}", had.map_or_else(|| "never flashed from here".into(), Record::line));
    }

    /// Show the image.
    pub(super) fn image(&self, checked: &Checked, generation: Generation, key: Option<&VerifyingKey>) {
        note!("image for {generation}: {}", describe(checked, key));
        checked.report.notes.iter().for_each(|note| note!("note: {note}"));
    }

    /// Show which key is sent to the card.
    pub(super) fn device_key(&self, id: KeyId) {
        note!("device key {id} follows the image");
    }

    /// Report a dry run.
    pub(super) fn dry_run(&self) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if self.json {
            writeln!(out, r#"{{"outcome":"dry-run","exit_status":0}}"#)
        } else {
            writeln!(out, "dry run: image and card are ready; nothing was changed")
        }
    }

    /// Report an invalid image or usage as JSON. As text, it is printed like any error.
    pub(super) fn refused(&self, error: &anyhow::Error) -> io::Result<()> {
        if !self.json {
            return Ok(());
        }
        let report = serde_json::json!({ "outcome": "refused", "exit_status": 2, "message": format!("{error:#}") });
        writeln!(io::stdout(), "{report}")
    }

    /// Create the progress bar.
    pub(super) fn bar(&self, len_bytes: u64) -> Bar {
        let target = if self.json || is_quiet() { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(Some(len_bytes), target);
        let style = "{msg:10} {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}";
        // The template is a valid constant.
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        Bar { bar, json: self.json }
    }

    /// Report that the card runs the image already.
    pub(super) fn unchanged(&self, card: &Rshim) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if self.json {
            let card = card.folder().display().to_string();
            let report = serde_json::json!({ "outcome": "unchanged", "exit_status": 0, "card": card });
            writeln!(out, "{report}")
        } else {
            writeln!(out, "{}: runs this image already; nothing was changed", card.folder().display())
        }
    }

    /// Report the outcome.
    pub(super) fn ended(&self, card: &Rshim, ended: &Ended) -> Result<(), Exit> {
        let report = Report::new(card, Some(ended));
        let mut out = io::stdout().lock();
        if self.json {
            serde_json::to_writer(&mut out, &report).map_err(io::Error::from)?;
            writeln!(out)?;
        } else if let Some(line) = report.seen {
            let bytes = report.written_bytes;
            writeln!(out, "{}: done, {bytes} bytes; the card reported: {line}", report.card)?;
        }
        out.flush()?;
        if report.restored == Some(true) {
            note!("the card's settings are restored");
        }
        report.warn(&report.card);
        match report.exit_status {
            0 => Ok(()),
            status => Err(Exit::Status(status)),
        }
    }
}

/// Return a line that describes an image.
pub(super) fn describe(checked: &Checked, key: Option<&VerifyingKey>) -> String {
    let (version, epoch) = match &checked.manifest {
        Some(manifest) => (manifest.version.as_str(), manifest.epoch),
        None => ("without a manifest", 0),
    };
    let signed =
        key.map_or_else(|| "NOT CHECKED for a signature".into(), |key| format!("signed by {}", envelope::key_id(key)));
    let (len, sha256) = (checked.report.len_bytes, hex(&checked.sha256[..8]));
    format!("{version}, epoch {epoch}, {len} bytes, {signed}, sha256 {sha256}")
}

/// A progress bar below the boot log.
#[derive(Debug)]
pub(super) struct Bar {
    bar: ProgressBar,
    json: bool,
}

impl Bar {
    /// Show progress.
    pub(super) fn show(&mut self, progress: Progress) {
        match progress {
            Progress::Stage(stage) => {
                if stage == Stage::Writing {
                    self.bar.reset();
                }
                if stage >= Stage::Booting {
                    // Freeze the rate of writing.
                    self.bar.abandon_with_message("written");
                }
                self.line(&format!("{stage}"));
            }
            Progress::Written(bytes) => self.bar.set_position(bytes),
            Progress::Log(line) => self.line(&format!("  {line}")),
            // A finished bar keeps showing the rate of writing.
            Progress::Restoring if !self.bar.is_finished() => self.bar.abandon(),
            _ => {}
        }
    }

    fn line(&self, line: &str) {
        if self.json {
            tracing::info!("{line}");
        } else {
            self.bar.suspend(|| note!("{line}"));
        }
    }
}
