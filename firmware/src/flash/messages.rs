//! The events, commands and reports of a session.

use super::failure::{Failure, Stage};
use crate::rshim::{LogKind, Misc, Setting};
use rustix::io::Errno;
use std::time::Duration;

/// Time limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The limit for flashing, up to the decisive line of the boot log.
    pub total: Duration,
    /// The interval between two readings of `misc`.
    pub poll: Duration,
    /// Consecutive failed readings after which the card counts as gone. A card that resets itself may be away for some.
    pub gone_polls: u32,
    /// The limit for restoring the card's settings, in addition to `total`.
    pub restore: Duration,
}

impl Default for Limits {
    /// Half an hour, because vendors' installers take a quarter; one reading per second, as bfb-install does.
    fn default() -> Self {
        Self {
            total: Duration::from_secs(1800),
            poll: Duration::from_secs(1),
            gone_polls: 30,
            restore: Duration::from_secs(30),
        }
    }
}

/// The length of what is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Length {
    /// The images, in bytes.
    pub images_bytes: u64,
    /// What follows them, in bytes. No boot stage reads it, but the system that they boot may.
    pub tail_bytes: u64,
}

/// What counts as success and as failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Goal {
    /// The boot log line that means success.
    pub until: Until,
    /// Whether an `ERR` line of a boot stage is only shown; worse lines always end flashing. Those of the card's Linux
    /// (`ERR[MISC]`) never do.
    pub tolerates_errors: bool,
    /// Whether the boot log stays after it was read. The card drops new lines once the log is full.
    pub keeps_log: bool,
}

/// The boot log line that means success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Until {
    /// `DPU is ready`.
    Ready,
    /// `Linux up`, or `DPU is ready`.
    LinuxUp,
    /// `Rebooting...`: a vendor's installer is done.
    Rebooting,
    /// `In Enhanced NIC mode`: a card in NIC mode has taken a vendor's update.
    NicMode,
    /// `Runtime upgrade finished`: a card that goes on running has installed what followed the images. Only that is
    /// written, and the card is never reset.
    Runtime,
}

impl Until {
    pub(super) fn is_reached_by(self, kind: LogKind) -> bool {
        match self {
            Self::Ready => kind == LogKind::Ready,
            Self::LinuxUp => matches!(kind, LogKind::Ready | LogKind::LinuxUp),
            Self::Rebooting => kind == LogKind::Rebooting,
            Self::NicMode => kind == LogKind::NicMode,
            Self::Runtime => kind == LogKind::RuntimeFinished,
        }
    }
}

/// An event for a session.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The result of changing a setting.
    Set(Setting, Result<(), Errno>),
    /// The result of reading `misc`.
    Misc(Result<Box<Misc>, Errno>),
    /// `boot` is open: the card has been reset, unless it is to go on running.
    Opened,
    /// `boot` could not be opened.
    OpenFailed(Errno),
    /// This many more bytes were written.
    Wrote(u64),
    /// Writing failed; `boot` is closed or about to be.
    WriteFailed(Errno),
    /// The image has changed or cannot be read.
    ImageFailed(Failure),
    /// `boot` is closed, whether or not everything was written.
    Closed,
    /// A signal asks to end.
    Signal(i32),
}

/// A command of a session; its result is an [`Event`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Command {
    /// Change a setting of `misc`: [`Event::Set`].
    Set(Setting),
    /// Read `misc`: [`Event::Misc`].
    ReadMisc,
    /// Open `boot` and write: [`Event::Opened`] or [`Event::OpenFailed`], then [`Event::Wrote`] and [`Event::Closed`].
    Write,
    /// Stop writing and close: [`Event::Closed`].
    StopWriting,
}

/// A progress report.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// A stage begins.
    Stage(Stage),
    /// This many bytes of the stream have been written.
    Written(u64),
    /// A line of the boot log.
    Log(String),
    /// The outcome is known; settings are being restored.
    Restoring,
}

/// Whether the card's settings are restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Restored {
    /// Restored and verified.
    Yes,
    /// Nothing was changed.
    NotTouched,
    /// Not restored, or not verified; the reason.
    No(String),
}

/// The outcome of flashing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The boot log line that means success, or the failure.
    pub result: Result<String, Failure>,
    /// Bytes written to the card.
    pub written_bytes: u64,
    /// Whether the card's settings are restored.
    pub restored: Restored,
    /// The last lines of the boot log, oldest first.
    pub log_tail: Vec<String>,
    /// The card's time since its last reset in seconds when `misc` was last read, if it reports that.
    pub up_time_s: Option<u64>,
}
