//! The options of `sumac flash`.

use clap::Args;
use std::path::PathBuf;
use std::time::Duration;
use sumac_firmware::flash::{Goal, Limits, Until};
use sumac_firmware::rshim::DEV_FOLDER;

/// The most cards that are flashed at once: each takes two processes and up to ten file descriptors.
const PARALLEL_MAX: i64 = 64;

/// `sumac flash`.
#[derive(Debug, Args)]
pub(crate) struct FlashArgs {
    /// Boot stream
    #[arg(value_name = "FILE")]
    pub(super) image: PathBuf,
    /// Cards: names below /dev, or paths of their folders; may be repeated
    #[arg(long, value_name = "CARD,...", value_delimiter = ',', default_value = "rshim0")]
    pub(super) rshim: Vec<String>,
    /// Flash all cards of this host
    #[arg(long, conflicts_with = "rshim")]
    pub(super) all: bool,
    /// Go on with the cards that an earlier run with this image and several cards has not done
    #[arg(long = "continue", conflicts_with_all = ["rshim", "all", "dry_run"])]
    pub(super) continues: bool,
    /// How many cards to flash at once, on each host of --host, or how many BMCs of --redfish
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=PARALLEL_MAX))]
    pub(super) parallel: u16,
    /// Leave out cards that run this image already: it was the last one flashed from here, and the card has not been
    /// reset since then
    // A key has to be sent in any case.
    #[arg(long, conflicts_with = "key_file")]
    pub(super) if_different: bool,
    /// Flash the cards of these hosts, by ssh: the image goes over once, and is checked there. Cards, records and pins
    /// are those of each host
    // A key is for one card.
    #[arg(long = "host", value_name = "HOST,...", value_delimiter = ',', conflicts_with = "key_file")]
    pub(super) hosts: Vec<String>,
    /// The `sumac` on the hosts of --host [default: the path of this one]
    #[arg(long, value_name = "PATH", requires = "hosts")]
    pub(super) sumac_path: Option<String>,
    /// This is the `sumac` on a host of --host: the image and the key are on stdin.
    #[arg(long, hide = true, conflicts_with_all = ["key", "key_file", "config", "rootfs", "hosts"])]
    pub(super) follow_stdin: bool,
    #[cfg(feature = "redfish")]
    #[command(flatten)]
    pub(super) redfish: super::redfish::RedfishArgs,
    /// Public key (PEM) that must have signed the image
    #[arg(long, value_name = "FILE", required_unless_present_any = ["allow_unsigned", "follow_stdin"])]
    pub(super) key: Option<PathBuf>,
    /// Device's key for the card's store, from `sumac key new --device`, sent behind the image; `-` is stdin
    // The installer of a vendor's image runs what follows the image as a script.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["allow_unsigned", "all", "continues"])]
    pub(super) key_file: Option<PathBuf>,
    /// Configuration for a vendor's installer (bf.cfg), which follows the image
    #[arg(long, value_name = "FILE", conflicts_with = "key")]
    pub(super) config: Option<PathBuf>,
    /// Root file system for a vendor's installer, a file of xz, which follows the image and --config
    #[arg(long, value_name = "FILE", conflicts_with = "key")]
    pub(super) rootfs: Option<PathBuf>,
    /// Run the image from the card's memory, until the next reset, instead of installing it on the card's disk
    #[arg(long, requires = "key")]
    pub(super) ram: bool,
    /// Install the image while the card goes on running, with the version that it runs now; its next reset starts the
    /// new one. The card must run from a slot
    #[arg(long, conflicts_with_all = ["ram", "nic_mode", "until", "key_file", "allow_unsigned"])]
    pub(super) runtime: bool,
    /// Update a card in NIC mode with a vendor's stream in flat format, until `In Enhanced NIC mode`. Meanwhile this
    /// host has no network through the card
    #[arg(long, conflicts_with_all = ["key", "until"])]
    pub(super) nic_mode: bool,
    /// Accept an unsigned image, such as a vendor's
    #[arg(long, conflicts_with = "key")]
    pub(super) allow_unsigned: bool,
    /// Accept an image with a lower epoch than the card has had
    #[arg(long)]
    pub(super) allow_rollback: bool,
    /// Line of the boot log that means success
    #[arg(long = "until", value_enum, default_value_t = UntilName::Ready)]
    pub(super) until: UntilName,
    /// Continue after ERR lines of boot stages; PANIC, Exception, ASSERT and CRITICAL ERROR are failures all the same.
    /// ERR lines of the card's Linux (`ERR[MISC]`) never end flashing
    #[arg(long)]
    pub(super) tolerate_errors: bool,
    /// Keep the boot log on the card after reading it. When it is full, new lines are lost
    #[arg(long)]
    pub(super) keep_log: bool,
    /// Time limit for each card in seconds, which does not include restoring the settings
    #[arg(long = "timeout", value_name = "SECONDS", default_value_t = 1800, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout_s: u64,
    /// Check everything and change nothing
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Print one JSON object; of several cards, one for each event as it happens, and a summary as the last one
    #[arg(long)]
    pub(super) json: bool,
    /// Folder for the records of each card's last image
    #[arg(long, value_name = "FOLDER", default_value = "/var/lib/sumac/cards", env = "SUMAC_CARDS")]
    pub(super) records: PathBuf,
    /// Where --all looks for cards
    #[arg(long, value_name = "FOLDER", default_value = DEV_FOLDER, hide = true)]
    pub(super) root: PathBuf,
    /// Where Linux shows devices
    #[arg(long, value_name = "FOLDER", default_value = "/sys", hide = true)]
    pub(super) sysfs: PathBuf,
    /// Interval between two reads of the boot log, in milliseconds
    #[arg(long = "poll-ms", value_name = "N", default_value_t = 1000, hide = true, value_parser = clap::value_parser!(u64).range(1..))]
    poll_ms: u64,
    /// Number of failed reads after which the card counts as gone; restoring the settings may take as long
    #[arg(long, value_name = "N", default_value_t = 30, hide = true, value_parser = clap::value_parser!(u32).range(1..))]
    gone_polls: u32,
}

/// The line of the boot log that means success.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum UntilName {
    /// `DPU is ready`
    Ready,
    /// `Linux up`
    LinuxUp,
    /// `Rebooting...`, with which a vendor's installer ends
    Rebooting,
}

impl FlashArgs {
    /// Return whether several cards may be meant, so that output has the form for several.
    pub(super) fn is_fleet(&self) -> bool {
        self.all || self.continues || self.rshim.len() > 1 || self.follow_stdin
    }

    /// Return the line of the boot log that means success.
    pub(super) fn until(&self) -> Until {
        match self.until {
            _ if self.nic_mode => Until::NicMode,
            _ if self.runtime => Until::Runtime,
            UntilName::Ready => Until::Ready,
            UntilName::LinuxUp => Until::LinuxUp,
            UntilName::Rebooting => Until::Rebooting,
        }
    }

    /// Return whether the image is installed in a slot of the card's disk: it is ours, and not to run from memory.
    pub(super) fn installs_slot(&self) -> bool {
        // On a host of --host, the key comes with the image.
        !self.allow_unsigned && !self.ram
    }

    /// Return whether the image installs a system that starts again after a reset, as a vendor's installer does.
    pub(super) fn installs(&self) -> bool {
        self.installs_slot() || matches!(self.until(), Until::Rebooting | Until::NicMode)
    }

    /// Return what counts as success and as failure.
    pub(super) fn goal(&self) -> Goal {
        Goal { until: self.until(), tolerates_errors: self.tolerate_errors, keeps_log: self.keep_log }
    }

    /// Return the time limit for a card.
    pub(super) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_s)
    }

    /// Return the time limits.
    pub(super) fn limits(&self) -> Limits {
        let poll = Duration::from_millis(self.poll_ms);
        let restore = poll.saturating_mul(self.gone_polls);
        Limits { total: self.timeout(), poll, gone_polls: self.gone_polls, restore }
    }
}
