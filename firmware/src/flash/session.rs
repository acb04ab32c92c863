//! Flashing as a state machine: events and time in, commands out.
//!
//! ```text
//! prepare: show the log, empty it, read it ──> open and write ──> boot: read the log until it decides
//!    │                                             │                    │
//!    └──────────────── failure, time limit or signal ───────────────────┴──> end: stop writing, read the log once
//!                                                                            more, restore the settings, look at them
//! ```
//!
//! Invariants:
//! - only a boot log line that appeared after the last byte of the images was written counts as success. The log is
//!   read once at that time, and those lines do not count. What follows the images must be written, too;
//! - the first decisive line, event or time limit determines the outcome; later ones are only shown;
//! - restoring has a time limit of its own, so that a driver that hangs cannot delay the end;
//! - at most one command is in flight on each of the two nodes, `misc` and `boot`;
//! - a card that has received part of a stream is reset, because it cannot boot; a card that has received all of it is
//!   never reset, because it may be writing its own flash;
//! - a card that is to go on running ([`Until::Runtime`]) is never reset: `boot` is opened only after the driver has
//!   taken BOOT_RESET_SKIP, which is restored once `boot` is closed. Every other run clears what a killed one has left.

use super::failure::{Failure, Stage};
use super::messages::{Command, Event, Goal, Length, Limits, Outcome, Progress, Restored, Until};
use crate::rshim::{LogKind, LogReader, Misc, Setting, kind_of};
use rustix::io::Errno;
use std::collections::VecDeque;
use sumac_hal::time::Instant;

/// The number of boot log lines in the outcome.
const TAIL_LINES: usize = 16;
/// The boot mode while `boot` is open.
const BOOT_MODE_RSHIM: u32 = 0;
/// The default boot mode: eMMC.
const BOOT_MODE_EMMC: u32 = 1;
/// How often to poll whether the driver has noticed that `boot` is closed.
const CLOSED_POLLS: u32 = 10;

/// One run of flashing a card.
#[derive(Debug)]
pub struct Session {
    limits: Limits,
    goal: Goal,
    /// The length of the images: the card boots once it has them.
    images_len_bytes: u64,
    /// The length of the images and of what follows them.
    len_bytes: u64,
    /// The line that means success, if it came before the last byte of what follows the images.
    reached: Option<String>,
    /// The last error in the log that did not end flashing.
    error_line: Option<String>,
    /// The stream's Linux is up.
    is_linux_up: bool,
    /// The settings in `misc` before.
    boot_mode_before: u32,
    display_level_before: u32,
    deadline: Instant,
    stage: Stage,
    /// A command is in flight on `misc`.
    is_misc_busy: bool,
    /// `boot` is being opened or open.
    is_boot_open: bool,
    was_boot_opened: bool,
    was_misc_set: bool,
    written_bytes: u64,
    clears_log: bool,
    /// The driver has taken BOOT_RESET_SKIP.
    skips_reset: bool,
    log: Option<LogReader>,
    tail: VecDeque<String>,
    failed_polls: u32,
    up_time_s: Option<u64>,
    next_poll: Instant,
    /// Readings of `misc` whose lines may predate the last byte: the one in flight, and one more.
    stale_readings: u32,
    /// Pending commands, executed one at a time on each node.
    queue: VecDeque<Command>,
    ending: Option<Ending>,
    shown: VecDeque<Progress>,
    is_done: bool,
}

/// The outcome, and the progress of restoring.
#[derive(Debug)]
struct Ending {
    result: Result<String, Failure>,
    deadline: Instant,
    /// The first setting that could not be restored, and why.
    trouble: Option<String>,
    step: Step,
}

/// The steps of restoring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Waits for `boot` to be closed and the command in flight on `misc` to end.
    Closing,
    /// Waits for the driver to notice the close, upon which it sets the boot mode: a value set before would be
    /// overwritten. Holds the polls left.
    Noticing(u32),
    /// Restores the settings and verifies them.
    Restoring,
}

impl Session {
    /// Start flashing a stream of this length to a card with the settings `before`. The time limit counts from `now`.
    pub fn new(length: Length, before: &Misc, goal: Goal, limits: Limits, now: Instant) -> Self {
        let is_runtime = goal.until == Until::Runtime;
        let skips = Setting::BootResetSkip(is_runtime);
        let settings = [Setting::DisplayLevel(2), Setting::ClearOnRead(!goal.keeps_log), skips];
        Self {
            limits,
            goal,
            images_len_bytes: length.images_bytes,
            len_bytes: length.images_bytes + length.tail_bytes,
            reached: None,
            error_line: None,
            is_linux_up: is_runtime,
            // 0 was left behind by another tool; a card with it would wait for a stream for ever.
            boot_mode_before: before.boot_mode.filter(|mode| *mode != BOOT_MODE_RSHIM).unwrap_or(BOOT_MODE_EMMC),
            display_level_before: before.display_level.unwrap_or(0),
            deadline: now + limits.total,
            stage: Stage::Preparing,
            is_misc_busy: false,
            is_boot_open: false,
            was_boot_opened: false,
            was_misc_set: false,
            written_bytes: 0,
            clears_log: false,
            skips_reset: false,
            log: None,
            tail: VecDeque::new(),
            failed_polls: 0,
            up_time_s: None,
            next_poll: now,
            stale_readings: 0,
            queue: settings.into_iter().map(Command::Set).chain([Command::ReadMisc]).collect(),
            ending: None,
            shown: [Progress::Stage(Stage::Preparing)].into(),
            is_done: false,
        }
    }

    /// Process an event. Afterwards, call all `poll` functions again.
    pub fn handle(&mut self, event: Event, now: Instant) {
        match event {
            Event::Set(setting, result) => self.on_set(setting, result, now),
            Event::Misc(result) => self.on_misc(result, now),
            Event::Opened => self.enter(Stage::Writing),
            Event::OpenFailed(errno) => {
                // The card was not reset, and another process may be using it.
                (self.is_boot_open, self.was_boot_opened) = (false, false);
                self.end(Err(on_open(errno, self.stage)), now);
            }
            Event::Wrote(bytes) => {
                self.written_bytes += bytes;
                self.shown.push_back(Progress::Written(self.written_bytes));
                if self.written_bytes >= self.images_len_bytes && self.stage < Stage::Booting {
                    self.enter(if self.is_runtime() { Stage::Installing } else { Stage::Booting });
                    self.stale_readings = 1 + u32::from(self.is_misc_busy);
                    self.next_poll = now;
                }
                if self.written_bytes >= self.len_bytes
                    && let Some(line) = self.reached.take()
                {
                    self.end(Ok(line), now);
                }
            }
            Event::WriteFailed(errno) => self.end(Err(on_write(errno, self.stage)), now),
            Event::ImageFailed(failure) => self.end(Err(failure), now),
            Event::Closed => self.is_boot_open = false,
            Event::Signal(_) if self.ending.is_some() => self.end_early("interrupted again"),
            Event::Signal(signal) => self.end(Err(Failure::Interrupted { signal, stage: self.stage }), now),
        }
        self.advance();
    }

    /// Process timeouts. Call this when [`Session::poll_timeout`] has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        match &self.ending {
            None if now >= self.deadline => {
                let Self { stage, is_linux_up, .. } = *self;
                let (limit, error_line) = (self.limits.total, self.error_line.take());
                self.end(Err(Failure::TimeLimit { limit, stage, is_linux_up, error_line }), now);
            }
            Some(ending) if now >= ending.deadline => {
                let what =
                    if self.is_boot_open { "the boot node cannot be closed" } else { "the driver does not respond" };
                self.end_early(what);
            }
            _ => {}
        }
        if self.is_polling() && now >= self.next_poll {
            self.next_poll = now + self.limits.poll;
            if !self.is_misc_busy && self.queue.is_empty() {
                self.queue.push_back(Command::ReadMisc);
            }
        }
        self.advance();
    }

    /// Return the next command to execute.
    pub fn poll_transmit(&mut self) -> Option<Command> {
        let command = *self.queue.front()?;
        match command {
            Command::Set(_) | Command::ReadMisc => {
                if self.is_misc_busy {
                    return None;
                }
                self.is_misc_busy = true;
                self.was_misc_set |= matches!(command, Command::Set(_));
            }
            Command::Write => {
                (self.is_boot_open, self.was_boot_opened) = (true, true);
                self.enter(if self.is_runtime() { Stage::Writing } else { Stage::Opening });
            }
            Command::StopWriting => {}
        }
        self.queue.pop_front()
    }

    /// Return when to call [`Session::handle_timeout`]; `None` when flashing has ended.
    pub fn poll_timeout(&self) -> Option<Instant> {
        match &self.ending {
            _ if self.is_done => None,
            ending => {
                let deadline = ending.as_ref().map_or(self.deadline, |ending| ending.deadline);
                Some(if self.is_polling() { deadline.min(self.next_poll) } else { deadline })
            }
        }
    }

    /// Return the next progress report.
    pub fn poll_event(&mut self) -> Option<Progress> {
        self.shown.pop_front()
    }

    /// Return the outcome, once flashing has ended.
    pub fn outcome(&self) -> Option<Outcome> {
        let ending = self.ending.as_ref().filter(|_| self.is_done)?;
        let restored = match &ending.trouble {
            Some(trouble) => Restored::No(trouble.clone()),
            None if self.was_misc_set || self.was_boot_opened => Restored::Yes,
            None => Restored::NotTouched,
        };
        let log_tail = self.tail.iter().cloned().collect();
        let (result, written_bytes, up_time_s) = (ending.result.clone(), self.written_bytes, self.up_time_s);
        Some(Outcome { result, written_bytes, restored, log_tail, up_time_s })
    }

    /// Return whether the card goes on running.
    fn is_runtime(&self) -> bool {
        self.goal.until == Until::Runtime
    }

    /// Return whether `misc` is polled.
    fn is_polling(&self) -> bool {
        match &self.ending {
            None => self.stage > Stage::Preparing,
            Some(ending) => matches!(ending.step, Step::Noticing(_)),
        }
    }

    fn enter(&mut self, stage: Stage) {
        if self.stage < stage {
            self.stage = stage;
            self.shown.push_back(Progress::Stage(stage));
        }
    }

    fn on_set(&mut self, setting: Setting, result: Result<(), Errno>, now: Instant) {
        self.is_misc_busy = false;
        self.skips_reset |= setting == Setting::BootResetSkip(true) && result.is_ok();
        match (&mut self.ending, setting, result) {
            // An old driver rejects this setting, so it was not set before either.
            (Some(_), Setting::ClearOnRead(_), _) if !self.clears_log => {}
            (Some(ending), _, Err(errno)) if ending.step == Step::Restoring => {
                ending.trouble.get_or_insert_with(|| format!("{}: {errno}", setting.key()));
            }
            (None, Setting::ClearOnRead(clears), result) => self.clears_log = clears && result.is_ok(),
            // A driver without this setting always resets the card.
            (None, Setting::BootResetSkip(false), Err(Errno::INVAL)) => {}
            (None, _, Err(errno)) => {
                let failure = match errno {
                    Errno::ACCESS | Errno::PERM => Failure::Permission,
                    errno if is_gone(errno) => Failure::Gone,
                    errno => Failure::Setting { key: setting.key(), error: errno.to_string() },
                };
                self.end(Err(failure), now);
            }
            _ => {}
        }
    }

    fn on_misc(&mut self, result: Result<Box<Misc>, Errno>, now: Instant) {
        self.is_misc_busy = false;
        let is_stale = self.stale_readings > 0;
        if result.is_ok() {
            self.stale_readings = self.stale_readings.saturating_sub(1);
        } else {
            // The reading in flight failed; the next may still show older lines.
            self.stale_readings = self.stale_readings.min(1);
        }
        let misc = match result {
            Ok(misc) => misc,
            Err(errno) => return self.on_misc_failed(errno, now),
        };
        self.failed_polls = 0;
        self.up_time_s = misc.up_time_s;
        let boot_mode = misc.boot_mode;
        match &mut self.log {
            None if self.ending.is_none() => {
                // The log's contents so far are from an earlier boot.
                self.log = Some(LogReader::new(self.clears_log, misc.log));
                self.queue.push_back(Command::Write);
            }
            None => {}
            Some(log) => {
                for line in log.new_lines(misc.log) {
                    self.on_line(line, is_stale, now);
                }
            }
        }
        self.on_boot_mode(boot_mode);
    }

    /// Process the boot mode while restoring.
    fn on_boot_mode(&mut self, boot_mode: Option<u32>) {
        let expected = self.boot_mode_before;
        let Some(ending) = &mut self.ending else { return };
        match ending.step {
            Step::Noticing(polls) if boot_mode != Some(BOOT_MODE_RSHIM) || polls == 0 => self.restore(),
            Step::Noticing(polls) => ending.step = Step::Noticing(polls - 1),
            // The final verification.
            Step::Restoring if self.queue.is_empty() && self.was_boot_opened && boot_mode != Some(expected) => {
                let found = boot_mode.map_or("not shown".into(), |mode| mode.to_string());
                ending.trouble.get_or_insert_with(|| format!("BOOT_MODE is {found}, not {expected}"));
            }
            _ => {}
        }
    }

    fn on_misc_failed(&mut self, errno: Errno, now: Instant) {
        match self.ending.as_mut().map(|ending| (ending.step, ending)) {
            Some((Step::Restoring, ending)) if self.queue.is_empty() => {
                ending.trouble.get_or_insert_with(|| format!("misc: {errno}"));
            }
            Some((Step::Noticing(_), _)) => self.restore(),
            Some(_) => {}
            None => {
                self.failed_polls += 1;
                if self.stage == Stage::Preparing || self.failed_polls >= self.limits.gone_polls {
                    self.end(Err(Failure::Gone), now);
                }
            }
        }
    }

    fn on_line(&mut self, line: String, is_stale: bool, now: Instant) {
        if self.tail.len() == TAIL_LINES {
            self.tail.pop_front();
        }
        self.tail.push_back(line.clone());
        self.shown.push_back(Progress::Log(line.clone()));
        if self.ending.is_some() {
            return;
        }
        let kind = kind_of(&line);
        self.is_linux_up |= kind == LogKind::LinuxUp && self.stage >= Stage::Booting && !is_stale;
        match kind {
            LogKind::NicMode if self.goal.until != Until::NicMode => self.end(Err(Failure::NicMode), now),
            LogKind::SystemError => self.error_line = Some(line),
            LogKind::Error if self.goal.tolerates_errors => self.error_line = Some(line),
            kind if kind.is_failure() || kind == LogKind::RuntimeFailed && self.is_runtime() => {
                self.end(Err(Failure::Log { kind, line }), now);
            }
            // A line from before the last byte cannot be about this stream.
            kind if self.stage >= Stage::Booting && !is_stale && self.goal.until.is_reached_by(kind) => {
                if self.written_bytes >= self.len_bytes {
                    self.end(Ok(line), now);
                } else {
                    // The system that is up reads what follows the images.
                    self.reached = Some(line);
                }
            }
            _ => {}
        }
    }

    /// Set the outcome, unless it is set, and start restoring.
    fn end(&mut self, result: Result<String, Failure>, now: Instant) {
        if self.ending.is_some() {
            return;
        }
        self.shown.push_back(Progress::Restoring);
        self.queue.clear();
        if self.is_boot_open {
            self.queue.push_back(Command::StopWriting);
        }
        let deadline = now + self.limits.restore;
        self.ending = Some(Ending { result, deadline, trouble: None, step: Step::Closing });
    }

    /// Start the next step of restoring once the previous one is done.
    fn advance(&mut self) {
        let is_waiting = self.is_boot_open || self.is_misc_busy || !self.queue.is_empty();
        let Some(ending) = self.ending.as_mut().filter(|_| !is_waiting && !self.is_done) else { return };
        match ending.step {
            Step::Closing if !(self.was_misc_set || self.was_boot_opened) => self.is_done = true,
            Step::Closing if self.was_boot_opened => {
                // This also reads the log once more, which may show the cause.
                ending.step = Step::Noticing(CLOSED_POLLS);
                self.queue.push_back(Command::ReadMisc);
            }
            Step::Closing => self.restore(),
            Step::Noticing(_) => {}
            Step::Restoring => self.is_done = true,
        }
    }

    /// Restore the previous settings and verify them.
    fn restore(&mut self) {
        if let Some(ending) = &mut self.ending {
            ending.step = Step::Restoring;
        }
        if self.was_boot_opened {
            self.queue.push_back(Command::Set(Setting::BootMode(self.boot_mode_before)));
            // Opening `boot` has reset the card, and a card without a complete stream does not boot.
            if matches!(self.stage, Stage::Opening | Stage::Writing) && !self.is_runtime() {
                self.queue.push_back(Command::Set(Setting::Reset));
            }
        }
        if self.skips_reset {
            self.queue.push_back(Command::Set(Setting::BootResetSkip(false)));
        }
        self.queue.push_back(Command::Set(Setting::ClearOnRead(false)));
        self.queue.push_back(Command::Set(Setting::DisplayLevel(self.display_level_before)));
        self.queue.push_back(Command::ReadMisc);
    }

    /// End before all settings are restored.
    fn end_early(&mut self, why: &str) {
        if let Some(ending) = &mut self.ending {
            ending.trouble.get_or_insert_with(|| why.into());
            self.queue.clear();
            self.is_done = true;
        }
    }
}

fn is_gone(errno: Errno) -> bool {
    matches!(errno, Errno::NODEV | Errno::NXIO | Errno::NOENT | Errno::IO | Errno::NOTCONN)
}

/// Map an error of opening `boot`.
fn on_open(errno: Errno, stage: Stage) -> Failure {
    match errno {
        Errno::BUSY => Failure::Busy,
        Errno::NODEV | Errno::NXIO => Failure::NotAttached,
        Errno::INVAL => Failure::DropMode,
        Errno::PERM => Failure::SecureMode,
        Errno::ACCESS => Failure::Permission,
        errno if is_gone(errno) => Failure::Gone,
        errno => Failure::Io { stage, error: errno.to_string() },
    }
}

/// Map an error of writing `boot`.
fn on_write(errno: Errno, stage: Stage) -> Failure {
    match errno {
        Errno::BUSY => Failure::OtherWriter,
        Errno::TIMEDOUT => Failure::NotDraining,
        errno if is_gone(errno) => Failure::Gone,
        errno => Failure::Io { stage, error: errno.to_string() },
    }
}
