//! Output of `sumac flash` and `sumac card list`: lines and a progress bar on stderr, or one JSON object on stdout.

use super::identity::Identity;
use super::record::Record;
use crate::exit::{Failure as Exit, is_quiet};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::io::{self, Write};
use sumac_firmware::bfb::Generation;
use sumac_firmware::flash::{Failure, Outcome, Progress, Restored, Stage};
use sumac_firmware::manifest::{Checked, envelope, hex};
use sumac_firmware::rshim::{CardMode, Misc, Rshim};
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

/// The JSON form of the outcome of `flash`.
#[derive(Serialize)]
struct Report<'a> {
    outcome: &'static str,
    exit_status: u8,
    card: String,
    /// The line of the boot log that meant success.
    seen: Option<&'a str>,
    message: Option<String>,
    advice: Option<&'static str>,
    written_bytes: u64,
    restored: Option<bool>,
    not_restored: Option<&'a str>,
    boot_log: &'a [String],
}

/// The output of `flash`.
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
        match had {
            Some(Record { version, epoch, sha256, .. }) => {
                let version = version.as_deref().unwrap_or("without a manifest");
                note!(
                    "last flashed from here: {version}, epoch {epoch}, sha256 {}",
                    &sha256.get(..16).unwrap_or(sha256)
                );
            }
            None => note!("never flashed from here"),
        }
    }

    /// Show the image.
    pub(super) fn image(&self, checked: &Checked, generation: Generation, key: Option<&ed25519_dalek::VerifyingKey>) {
        let (version, epoch) = match &checked.manifest {
            Some(manifest) => (manifest.version.as_str(), manifest.epoch),
            None => ("without a manifest", 0),
        };
        let signed = key
            .map_or_else(|| "NOT CHECKED for a signature".into(), |key| format!("signed by {}", envelope::key_id(key)));
        let (len, sha256) = (checked.report.len_bytes, hex(&checked.sha256[..8]));
        note!("image: {version}, epoch {epoch}, {len} bytes for {generation}, {signed}, sha256 {sha256}");
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

    /// Report a failure before the first change to the card.
    pub(super) fn failed(&self, card: &Rshim, failure: &Failure) -> Exit {
        let outcome = Outcome {
            result: Err(failure.clone()),
            written_bytes: 0,
            restored: Restored::NotTouched,
            log_tail: Vec::new(),
        };
        self.ended(card, &outcome).err().unwrap_or(Exit::Reported)
    }

    /// Report the outcome.
    pub(super) fn ended(&self, card: &Rshim, outcome: &Outcome) -> Result<(), Exit> {
        let failure = outcome.result.as_ref().err();
        let exit_status = failure.map_or(0, Failure::exit_status);
        let mut out = io::stdout().lock();
        if self.json {
            let report = Report {
                outcome: failure.map_or("ready", Failure::name),
                exit_status,
                card: card.folder().display().to_string(),
                seen: outcome.result.as_deref().ok(),
                message: failure.map(ToString::to_string),
                advice: failure.map(Failure::advice),
                written_bytes: outcome.written_bytes,
                restored: match outcome.restored {
                    Restored::NotTouched => None,
                    ref restored => Some(*restored == Restored::Yes),
                },
                not_restored: match &outcome.restored {
                    Restored::No(why) => Some(why),
                    _ => None,
                },
                boot_log: &outcome.log_tail,
            };
            serde_json::to_writer(&mut out, &report).map_err(io::Error::from)?;
            writeln!(out)?;
        } else if let Ok(line) = &outcome.result {
            writeln!(
                out,
                "{}: done, {} bytes; the card reported: {line}",
                card.folder().display(),
                outcome.written_bytes
            )?;
        }
        out.flush()?;
        self.settings(card, &outcome.restored);
        match failure {
            None => Ok(()),
            Some(failure) => {
                message!("error: {}: {failure}", card.folder().display());
                message!("what to do: {}", failure.advice());
                Err(Exit::Status(exit_status))
            }
        }
    }

    /// Report whether the card's settings were restored.
    fn settings(&self, card: &Rshim, restored: &Restored) {
        let misc = card.folder().join("misc");
        match restored {
            Restored::NotTouched => {}
            Restored::Yes => note!("the card's settings are restored"),
            Restored::No(why) => {
                let misc = misc.display();
                message!(
                    "the card's settings are NOT restored ({why}); when the driver responds: echo \"BOOT_MODE 1\" > {misc}"
                );
            }
        }
    }
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
                if stage == Stage::Booting {
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
