//! The ways in which flashing ends without success: each with its own exit status, message and advice.

use crate::bfb::Generation;
use crate::rshim::LogKind;
use std::time::Duration;
use thiserror::Error;

/// Why nothing was written: the image must not go to this card.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Too long for any card.
    #[error("the stream has {len_bytes} bytes; the limit is {max_bytes}")]
    TooLong {
        /// The stream, in bytes.
        len_bytes: u64,
        /// The limit, in bytes.
        max_bytes: u64,
    },
    /// For another kind of board.
    #[error("the image is for {board:?}, the card is a {expected}")]
    Board {
        /// What the manifest says.
        board: String,
        /// What the card is.
        expected: &'static str,
    },
    /// A card that no image is made for.
    #[error("{found} is no card that boot streams are known for; known are BlueField-1 to BlueField-3")]
    UnknownCard {
        /// What the card says that it is.
        found: String,
    },
    /// No boot loader for this card.
    #[error("the stream has no boot loader (bl2) for {generation}; build it with a --base that has one")]
    Generation {
        /// The card's generation.
        generation: Generation,
    },
    /// Older than what the card has had.
    #[error(
        "the image has epoch {epoch}, and the card has had {had}: older images must not come back (--allow-rollback)"
    )]
    Rollback {
        /// The image's.
        epoch: u64,
        /// The card's.
        had: u64,
    },
}

/// Where flashing stood.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Stage {
    /// Reading and setting what `misc` shows.
    Preparing,
    /// Opening `boot`, which resets the card.
    Opening,
    /// Writing the stream.
    Writing,
    /// All is written; the card boots.
    Booting,
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Preparing => "preparing",
            Self::Opening => "resetting the card",
            Self::Writing => "writing",
            Self::Booting => "waiting for the card to boot",
        })
    }
}

/// Why flashing failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Failure {
    /// No such folder or nodes.
    #[error("there is no card at {0}")]
    NotFound(String),
    /// `boot` can't be opened for lack of rights.
    #[error("no permission to use the card")]
    Permission,
    /// Another process of ours has the lock.
    #[error("another sumac is flashing this card")]
    Locked,
    /// `ENODEV` when opening `boot`.
    #[error("the driver has no connection to the card: another backend is attached, or none")]
    NotAttached,
    /// BF_MODE, or the boot log says it.
    #[error("the card is in NIC mode: its Arm cores do not run")]
    NicMode,
    /// SECURE_NIC_MODE, or `EPERM` when opening `boot`.
    #[error("the card is locked (secure NIC mode) and takes no boot stream from this host")]
    SecureMode,
    /// DROP_MODE, or `EINVAL` when opening `boot`.
    #[error("the driver is in drop mode: it throws away what is written, as another backend has the card")]
    DropMode,
    /// `EBUSY` when opening `boot`.
    #[error("the boot FIFO is open elsewhere")]
    Busy,
    /// `EBUSY` when writing.
    #[error("another process is writing to the boot FIFO; the two streams are mixed up by now")]
    OtherWriter,
    /// `ETIMEDOUT` when writing.
    #[error("the card has stopped taking the stream")]
    NotDraining,
    /// `ENODEV` and the like, once it has begun.
    #[error("the card is gone")]
    Gone,
    /// Nothing decisive was seen in time.
    #[error("not done within {limit_s} s; at the end it was {stage}", limit_s = limit.as_secs())]
    TimeLimit {
        /// The limit for all of it.
        limit: Duration,
        /// Where it stood.
        stage: Stage,
    },
    /// The boot log says that the boot failed.
    #[error("the boot log says: {line}")]
    Log {
        /// What kind of line.
        kind: LogKind,
        /// The line.
        line: String,
    },
    /// `misc` does not take a setting.
    #[error("the driver does not take {key}: {error}")]
    Setting {
        /// Which.
        key: &'static str,
        /// What the system says.
        error: String,
    },
    /// The bytes on their way to the card are not those that were checked, though these were sealed.
    #[error("the image changed after it was checked; its last bytes were held back, so it can't boot")]
    ImageChanged,
    /// The file can't be read any more.
    #[error("the image cannot be read any more: {0}")]
    Image(String),
    /// Another error of the system.
    #[error("{stage}: {error}")]
    Io {
        /// Where it stood.
        stage: Stage,
        /// What the system says.
        error: String,
    },
    /// A signal.
    #[error("interrupted while {stage}")]
    Interrupted {
        /// Its number.
        signal: i32,
        /// Where it stood.
        stage: Stage,
    },
}

impl Failure {
    /// Return a short name that does not change, for scripts.
    pub const fn name(&self) -> &'static str {
        self.row().0
    }

    /// Return the exit status; each kind has its own.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Interrupted { signal, .. } => 128_u8.saturating_add(u8::try_from(*signal).unwrap_or(0)),
            _ => self.row().1,
        }
    }

    /// Return what to do about it.
    pub const fn advice(&self) -> &'static str {
        self.row().2
    }

    /// Name, exit status and advice.
    const fn row(&self) -> (&'static str, u8, &'static str) {
        match self {
            Self::NotFound(_) => (
                "not-found",
                10,
                "see `sumac devices`. Is the rshim service running (one instance only, it keeps a PID lock)? Under kernel lockdown it needs VFIO or UIO",
            ),
            Self::NotAttached => (
                "not-attached",
                11,
                "stop rshim on the other side (the BMC over USB, or this host over PCIe), or take the card with FORCE_CMD 1 in misc, and try again",
            ),
            Self::NicMode => (
                "nic-mode",
                12,
                "set DPU mode with `mlxconfig -d DEVICE s INTERNAL_CPU_OFFLOAD_ENGINE=0`, then switch the host's power off and on",
            ),
            Self::SecureMode => (
                "secure-mode",
                13,
                "the card's owner must unlock it from the BMC or the card's own side; nothing on this host can",
            ),
            Self::DropMode => (
                "drop-mode",
                14,
                "write DROP_MODE 0 to misc if no other side uses the card, or take it from there with FORCE_CMD 1",
            ),
            Self::Busy => ("busy", 15, "`fuser -v` on the boot node names who has it; end that, and try again"),
            Self::OtherWriter => (
                "other-writer",
                16,
                "end the other writer (`fuser -v` on the boot node), and flash again: the card waits for a whole stream",
            ),
            Self::NotDraining => (
                "not-draining",
                17,
                "the boot log above says which stage stopped; check that the image is for this part (secured or not), and that the card has power. Switch power off and on before trying again",
            ),
            Self::Gone => (
                "gone",
                18,
                "was the host or the card restarted? See `sumac devices`; if it does not come back, restart the rshim service, then switch power off and on",
            ),
            Self::TimeLimit { .. } => (
                "time-limit",
                19,
                "look at the console node for what the card does; it may still be at work, so don't switch it off before you have looked. --timeout gives it more time",
            ),
            Self::Log { kind, .. } => match kind {
                LogKind::Panic => (
                    "log-panic",
                    21,
                    "a boot stage stopped: an image of it is wrong or damaged. Flash a vendor's stream to get the card back",
                ),
                LogKind::Exception => (
                    "log-exception",
                    22,
                    "a boot stage was stopped by the processor: an image of it is wrong or damaged. Flash a vendor's stream to get the card back",
                ),
                LogKind::Assert => (
                    "log-assert",
                    23,
                    "a boot stage found the hardware or an image not as it must be; the line names the place",
                ),
                LogKind::Critical => {
                    ("log-critical", 24, "what the stream started gave up; the console node shows why")
                }
                _ => (
                    "log-error",
                    20,
                    "a boot stage reported an error; `PSC error` means that the part does not accept the boot loaders (wrong signature or generation). If the card gets over it, --tolerate-errors goes on",
                ),
            },
            Self::Setting { .. } => {
                ("setting", 25, "the boot could not be followed, so it was not begun; update rshim-user-space")
            }
            Self::Locked => ("locked", 26, "wait for it to end"),
            Self::Permission => ("permission", 27, "run it as root, or as a user with rights on the card's nodes"),
            Self::ImageChanged => {
                ("image-changed", 28, "the copy in memory is damaged: check the host's memory, and flash again")
            }
            Self::Image(_) => ("image", 29, "see that the file system with the image is healthy, and flash again"),
            Self::Io { .. } => ("io", 30, "see the system log of the rshim service"),
            Self::Interrupted { .. } => ("interrupted", 130, "flash again before the card is used"),
        }
    }
}
