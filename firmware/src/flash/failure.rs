//! The failures of flashing, each with its own exit status, message and advice.

use crate::bfb::Generation;
use crate::rshim::LogKind;
use std::time::Duration;
use thiserror::Error;

/// Why an image is refused, before anything is written.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The stream is too long.
    #[error("the stream has {len_bytes} bytes; the limit is {max_bytes}")]
    TooLong {
        /// The stream, in bytes.
        len_bytes: u64,
        /// The limit, in bytes.
        max_bytes: u64,
    },
    /// The image is for another kind of board.
    #[error("the image is for {board:?}, the card is a {expected}")]
    Board {
        /// The board in the manifest.
        board: String,
        /// The card's board.
        expected: &'static str,
    },
    /// The card's generation is unknown.
    #[error("{found} is not a supported card; boot streams exist for BlueField-1 to BlueField-3")]
    UnknownCard {
        /// The card's description.
        found: String,
    },
    /// The stream has no boot loader for this card.
    #[error("the stream has no boot loader (bl2) for {generation}; build it with a --base that has one")]
    Generation {
        /// The card's generation.
        generation: Generation,
    },
    /// The image is older than one that the card has had.
    #[error(
        "the image has epoch {epoch} (0 if it has no manifest), but the card has had epoch {had}: use --allow-rollback to go back"
    )]
    Rollback {
        /// The image's epoch.
        epoch: u64,
        /// The highest epoch that the card has had.
        had: u64,
    },
}

/// The stages of flashing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Stage {
    /// Reading and setting `misc`.
    Preparing,
    /// Opening `boot`, which resets the card.
    Opening,
    /// Writing the stream.
    Writing,
    /// The stream is written; the card boots.
    Booting,
    /// All is written; the card, which goes on running, installs it.
    Installing,
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Preparing => "preparing",
            Self::Opening => "resetting the card",
            Self::Writing => "writing",
            Self::Booting => "waiting for the card to boot",
            Self::Installing => "waiting for the card to install the image",
        })
    }
}

/// Why flashing failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Failure {
    /// The card's folder or device nodes do not exist.
    #[error("no card at {0}")]
    NotFound(String),
    /// No permission to open the card's nodes.
    #[error("no permission to use the card")]
    Permission,
    /// Another sumac process has the lock.
    #[error("another sumac is flashing this card")]
    Locked,
    /// `ENODEV` when opening `boot`.
    #[error("the driver has no connection to the card: another backend is attached, or none")]
    NotAttached,
    /// The card is in NIC mode, according to BF_MODE or the boot log.
    #[error("the card is in NIC mode: its Arm cores do not run")]
    NicMode,
    /// SECURE_NIC_MODE, or `EPERM` when opening `boot`.
    #[error("the card is locked (secure NIC mode) and takes no boot stream from this host")]
    SecureMode,
    /// DROP_MODE, or `EINVAL` when opening `boot`.
    #[error("the driver is in drop mode: it discards what is written, because another backend uses the card")]
    DropMode,
    /// `EBUSY` when opening `boot`.
    #[error("the boot FIFO is open elsewhere")]
    Busy,
    /// `EBUSY` when writing.
    #[error("another process is writing to the boot FIFO, so both streams are corrupt")]
    OtherWriter,
    /// `ETIMEDOUT` when writing.
    #[error("the card has stopped taking the stream")]
    NotDraining,
    /// `ENODEV` or similar after flashing began.
    #[error("the card has disappeared")]
    Gone,
    /// Neither success nor failure was seen in time.
    #[error(
        "not finished within {limit_s} s; the last stage was: {stage}{linux}{reported}",
        limit_s = limit.as_secs(),
        linux = match (stage, is_linux_up) {
            (Stage::Booting, true) => "; its Linux is up, but the awaited line has not come",
            (Stage::Booting, false) => "; its Linux has not come up",
            (Stage::Installing, _) => "; the agent has not reported an outcome",
            _ => "",
        },
        reported = error_line.as_ref().map_or_else(String::new, |line| format!("; the card had reported: {line}")),
    )]
    TimeLimit {
        /// The limit for all stages.
        limit: Duration,
        /// The stage at that time.
        stage: Stage,
        /// The card's Linux had reported that it is up.
        is_linux_up: bool,
        /// The last error in the boot log that did not end flashing.
        error_line: Option<String>,
    },
    /// The boot log reports a failure.
    #[error("the boot log reports: {line}")]
    Log {
        /// What kind of line.
        kind: LogKind,
        /// The line.
        line: String,
    },
    /// The driver rejected a setting in `misc`.
    #[error("the driver rejected {key}: {error}")]
    Setting {
        /// The setting.
        key: &'static str,
        /// The system's error.
        error: String,
    },
    /// The bytes being written differ from those that were checked, although these were sealed.
    #[error("the image changed after it was checked; its last bytes were not written, so it cannot boot")]
    ImageChanged,
    /// The image cannot be read any more.
    #[error("the image cannot be read any more: {0}")]
    Image(String),
    /// Another system error.
    #[error("{stage}: {error}")]
    Io {
        /// The stage at that time.
        stage: Stage,
        /// The system's error.
        error: String,
    },
    /// Flashing was interrupted by a signal.
    #[error("interrupted while {stage}")]
    Interrupted {
        /// The number of the signal.
        signal: i32,
        /// The stage at that time.
        stage: Stage,
    },
}

impl Failure {
    /// Return a short, stable name for scripts.
    pub const fn name(&self) -> &'static str {
        self.row().0
    }

    /// Return the exit status, which is unique to each kind.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Interrupted { signal, .. } => 128_u8.saturating_add(u8::try_from(*signal).unwrap_or(0)),
            _ => self.row().1,
        }
    }

    /// Return advice on what to do.
    pub const fn advice(&self) -> &'static str {
        self.row().2
    }

    /// Name, exit status and advice.
    const fn row(&self) -> (&'static str, u8, &'static str) {
        match self {
            Self::NotFound(_) => (
                "not-found",
                10,
                "see `sumac card list`. Is the rshim service running (one instance only, it keeps a PID lock)? Under kernel lockdown it needs VFIO or UIO",
            ),
            Self::NotAttached => (
                "not-attached",
                11,
                "stop rshim on the other side (the BMC over USB, or this host over PCIe), then restart it here, and try again",
            ),
            Self::NicMode => (
                "nic-mode",
                12,
                "set DPU mode with `mlxconfig -d DEVICE s INTERNAL_CPU_OFFLOAD_ENGINE=0`, then power-cycle the host",
            ),
            Self::SecureMode => (
                "secure-mode",
                13,
                "the card's owner has to unlock it from the BMC or from the card itself; it cannot be unlocked from this host",
            ),
            Self::DropMode => (
                "drop-mode",
                14,
                "write DROP_MODE 0 to misc if no other side uses the card, or take it over: write FORCE_CMD 1 to misc, which the driver accepts in drop mode only",
            ),
            Self::Busy => ("busy", 15, "find the process with `fuser -v` on the boot node, end it, and try again"),
            Self::OtherWriter => (
                "other-writer",
                16,
                "end the other writer (`fuser -v` on the boot node), and flash again: the card waits for a whole stream",
            ),
            Self::NotDraining => (
                "not-draining",
                17,
                "the boot log above shows which stage stopped; check that the image is for this part (secured or not), and that the card has power. Power-cycle it before trying again. With --runtime, the card was not reset: it must run a confirmed version of the agent from a slot, and it discards what it has got when it is flashed without --runtime",
            ),
            Self::Gone => (
                "gone",
                18,
                "was the host or the card restarted? See `sumac card list`; if it does not come back, restart the rshim service, then power-cycle",
            ),
            Self::TimeLimit { .. } => (
                "time-limit",
                19,
                "watch the console node: the card may still be working, so do not power it off before you have looked. --timeout raises the limit",
            ),
            Self::Log { kind, .. } => match kind {
                LogKind::Panic => (
                    "log-panic",
                    21,
                    "a boot stage stopped: one of its images is wrong or damaged. Flash a vendor's stream to recover the card: sumac flash VENDOR.bfb --allow-unsigned --allow-rollback --until rebooting",
                ),
                LogKind::Exception => (
                    "log-exception",
                    22,
                    "a boot stage was stopped by the processor: one of its images is wrong or damaged. Flash a vendor's stream to recover the card: sumac flash VENDOR.bfb --allow-unsigned --allow-rollback --until rebooting",
                ),
                LogKind::Assert => (
                    "log-assert",
                    23,
                    "a boot stage found an unexpected state of the hardware or an image; the line names the source location",
                ),
                LogKind::RuntimeFailed => (
                    "log-runtime",
                    31,
                    "the card goes on with the version that runs, and starts it again after a reset; flash it without --runtime if this does not pass",
                ),
                LogKind::Critical => {
                    ("log-critical", 24, "the program in the stream gave up; the console node shows why")
                }
                _ => (
                    "log-error",
                    20,
                    "a boot stage reported an error; `PSC error` means that the part does not accept the boot loaders (wrong signature or generation). If the card recovers from the error, use --tolerate-errors",
                ),
            },
            Self::Setting { .. } => {
                ("setting", 25, "the boot could not be monitored, so it was not started; update rshim-user-space")
            }
            Self::Locked => ("locked", 26, "wait until the other sumac has finished"),
            Self::Permission => {
                ("permission", 27, "run as root, or as a user with permission for the card's device nodes")
            }
            Self::ImageChanged => {
                ("image-changed", 28, "the copy in memory is damaged: check the host's memory, and flash again")
            }
            Self::Image(_) => ("image", 29, "check the file system with the image, and flash again"),
            Self::Io { .. } => ("io", 30, "see the system log of the rshim service"),
            Self::Interrupted { .. } => ("interrupted", 130, "flash again before the card is used"),
        }
    }
}
