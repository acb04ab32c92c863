//! What a session is told, asks for and shows.

use super::failure::{Failure, Stage};
use crate::rshim::{LogKind, Misc, Setting};
use rustix::io::Errno;
use std::time::Duration;

/// How long things may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// All of it, up to the last line of the boot log.
    pub total: Duration,
    /// Between two readings of `misc`.
    pub poll: Duration,
    /// Failed readings in a row after which the card is gone. A card that resets itself may be away for some.
    pub gone_polls: u32,
    /// Restoring the card's settings, in addition to `total`.
    pub restore: Duration,
}

impl Default for Limits {
    /// Half an hour, as vendors' installers take a quarter; a reading a second, as bfb-install does.
    fn default() -> Self {
        Self {
            total: Duration::from_secs(1800),
            poll: Duration::from_secs(1),
            gone_polls: 30,
            restore: Duration::from_secs(30),
        }
    }
}

/// What success is, and what is not yet failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Goal {
    /// The line of the boot log that is success.
    pub until: Until,
    /// An `ERR` line of the boot log is shown, but does not end it; all worse ones do.
    pub tolerates_errors: bool,
}

/// Which line of the boot log is success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Until {
    /// `DPU is ready`.
    Ready,
    /// `Linux up`, or `DPU is ready`.
    LinuxUp,
    /// `Rebooting...`: a vendor's installer is done.
    Rebooting,
}

impl Until {
    pub(super) fn is_reached_by(self, kind: LogKind) -> bool {
        match self {
            Self::Ready => kind == LogKind::Ready,
            Self::LinuxUp => matches!(kind, LogKind::Ready | LogKind::LinuxUp),
            Self::Rebooting => kind == LogKind::Rebooting,
        }
    }
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A setting was made, or not.
    Set(Setting, Result<(), Errno>),
    /// `misc` was read, or not.
    Misc(Result<Box<Misc>, Errno>),
    /// `boot` is open: the card has been reset.
    Opened,
    /// `boot` can't be opened.
    OpenFailed(Errno),
    /// So many more bytes were taken.
    Wrote(u64),
    /// Writing failed; `boot` is closed or about to be.
    WriteFailed(Errno),
    /// The image is not what it was, or can't be read.
    ImageFailed(Failure),
    /// `boot` is closed, whether all was written or not.
    Closed,
    /// The user wants it to end.
    Signal(i32),
}

/// What to do; the answer is an [`Event`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Command {
    /// Change a setting of `misc`: [`Event::Set`].
    Set(Setting),
    /// Read `misc`: [`Event::Misc`].
    ReadMisc,
    /// Open `boot` and write: [`Event::Opened`] or [`Event::OpenFailed`], then [`Event::Wrote`] and [`Event::Closed`].
    Write,
    /// Write no more, and close: [`Event::Closed`].
    StopWriting,
}

/// What to show.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// A stage begins.
    Stage(Stage),
    /// So many bytes of the stream have been taken.
    Written(u64),
    /// A line of the boot log.
    Log(String),
    /// The decision has fallen; settings are being restored.
    Restoring,
}

/// Whether the card's settings are as they were.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Restored {
    /// Yes, and that was seen.
    Yes,
    /// Nothing was changed.
    NotTouched,
    /// No, or that was not seen.
    No(String),
}

/// How it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The line that was waited for, or why it did not come.
    pub result: Result<String, Failure>,
    /// Bytes that the card has taken.
    pub written_bytes: u64,
    /// Whether the card's settings are as they were.
    pub restored: Restored,
    /// The last lines of the boot log, oldest first.
    pub log_tail: Vec<String>,
}
