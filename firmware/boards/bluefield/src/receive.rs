//! Images that a host sends while the card runs (`sumac flash --runtime`): through the boot FIFO, without a reset.
//!
//! The image is written to the slot that does not run, and the firmware is told to start it at the next restart,
//! whatever causes that. It is then on trial, as every new version.
//!
//! Nothing announces an image but the FIFO itself: the driver waits for half a second for words, and keeps a core busy
//! meanwhile, so it is asked now and then (Linux, drivers/platform/mellanox/mlxbf-bootctl.c: `bootfifo`). The host
//! waits until the card takes the first words (BOOT_TIMEOUT, 300 s).
//!
//! Invariants: nobody else writes a slot meanwhile ([`SlotDisk::lock`]); before the other slot changes, the firmware is
//! told to start the running one, in case that an image sent earlier was to be started; whatever fails, the running
//! version goes on, and starts again after a reset.

use crate::boot_order::CardBootOrder;
use crate::config::CommandLine;
use crate::disks::SlotDisk;
use crate::install::{InstallError, offer_of, select_next, write};
use crate::log::{Level, Log};
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::time::Duration;
use sumac_firmware::boot::{BootEntries, Partition};
use sumac_firmware::slots::{Selected, Slot, Slots, UpdateError, Updater};
use sumac_firmware::tail::{Fifo, Payload};
use sumac_hal::flash::BlockDevice;
use sumac_hal::time::Instant;

/// The pause between two looks into the FIFO.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// How often the outcome is repeated, unless another image comes: it is lost if the boot log is full.
const REPEATS: u32 = 6;

/// The line that the host waits for; the version follows.
pub const FINISHED: &str = "Runtime upgrade finished";
/// The line that tells it of a failure; the reason follows.
pub const FAILED: &str = "Runtime upgrade failed";

/// What a running version needs to install another one.
#[derive(Debug)]
pub struct Installer {
    /// The disk with the slots.
    pub disk: SlotDisk,
    /// The running slot.
    pub slot: Slot,
    /// The kernel's command line: whom to trust, and the limits of a trial.
    pub line: CommandLine,
    /// Its text, for the new version.
    pub command_line: String,
    /// The boot FIFO.
    pub fifo: PathBuf,
}

impl Installer {
    /// Wait for images on a thread of its own, if there is a boot FIFO. The running version must be confirmed, and
    /// nothing else may change the firmware's order from now on.
    pub fn start(self, log: &Log) {
        let file = match File::open(&self.fifo) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => return log.warn(&format!("{}: {error}", self.fifo.display())),
        };
        let log = log.clone();
        std::thread::spawn(move || {
            let mut fifo = Fifo::new(file, crate::init::pause);
            let mut outcome = Outcome::default();
            loop {
                if !self.look(&mut fifo, &mut outcome, &log) {
                    std::thread::sleep(POLL_INTERVAL);
                }
            }
        });
    }

    /// Look once, and install what is there; return whether anything was.
    fn look<R: Read, W: FnMut(u32) -> bool>(&self, fifo: &mut Fifo<R, W>, outcome: &mut Outcome, log: &Log) -> bool {
        let installed = match fifo.next_payload() {
            Ok(None) => {
                outcome.repeat(log);
                return false;
            }
            Ok(Some(payload)) => self.install(fifo, &payload, log).map_err(|error| error.to_string()),
            Err(error) => {
                outcome.report_once(&error.to_string(), log);
                return false;
            }
        };
        outcome.report(installed, log);
        true
    }

    fn install<R: Read, W: FnMut(u32) -> bool>(
        &self,
        fifo: &mut Fifo<R, W>,
        payload: &Payload,
        log: &Log,
    ) -> Result<Selected, InstallError> {
        let _lock = self.disk.lock()?;
        let mut slots = self.disk.partition_slots()?;
        let place = (&mut slots, &mut CardBootOrder::of_card()?, |slot| self.disk.partition(slot));
        install(fifo, payload, self, place, log)
    }
}

/// Write a payload to the slot that does not run, and select it for the next restart.
fn install<R, W, D, O>(
    fifo: &mut Fifo<R, W>,
    payload: &Payload,
    running: &Installer,
    (slots, order, partition): (&mut Slots<D>, &mut O, impl Fn(Slot) -> Partition),
    log: &Log,
) -> Result<Selected, InstallError>
where
    R: Read,
    W: FnMut(u32) -> bool,
    D: BlockDevice<Error = io::Error>,
    O: BootEntries,
    InstallError: From<O::Error>,
{
    let Installer { slot, line, command_line, .. } = running;
    let offer = offer_of(payload, line.update_key.as_ref())?;
    let record = slots.record(*slot)?.ok_or(UpdateError::NotFromSlot)?;
    let mut updater = Updater::new(line.trial, Some(Selected { slot: *slot, record }), Instant::ZERO);
    order.try_once(*slot)?;
    log.info(&format!("installing {}, while slot {slot} runs", offer.version));
    write(fifo, &offer, &mut updater, slots, |other| Ok(order.set_entry(other, partition(other), command_line)?))?;
    select_next(slots, order)
}

/// What the host is told, and how often it was not told yet.
#[derive(Debug, Default)]
struct Outcome {
    line: String,
    repeats: u32,
}

impl Outcome {
    fn report(&mut self, installed: Result<Selected, String>, log: &Log) {
        self.line = match installed {
            Ok(Selected { slot, record }) => {
                format!("{FINISHED}: {}; the next reset starts slot {slot}", record.version)
            }
            Err(why) => format!("{FAILED}: {why}"),
        };
        self.repeats = REPEATS;
        log.info(&self.line);
    }

    /// Report a failure of the FIFO, which may go on, unless it was the last outcome.
    fn report_once(&mut self, why: &str, log: &Log) {
        if self.line != format!("{FAILED}: {why}") {
            self.report(Err(why.to_owned()), log);
        }
    }

    fn repeat(&mut self, log: &Log) {
        if self.repeats > 0 {
            self.repeats -= 1;
            log.tell_host(Level::Info, &self.line);
        }
    }
}

#[cfg(test)]
mod tests;
