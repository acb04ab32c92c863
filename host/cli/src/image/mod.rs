//! `sumac image`: list, verify, build and repack boot streams for BlueField-class cards; build and run images of boards
//! without an operating system.
//!
//! Invariants: images are streamed in pieces, whatever their length. Output files are written atomically, after they
//! have been verified.

mod build;
mod extract;
mod file;
mod initramfs;
mod repack;
mod show;
mod tail;

pub(crate) use file::{ImageFile, read_public_key};
pub(crate) use tail::{SlotImage, payload};

use crate::board::{self, RunArgs};
use crate::exit::Failure;
use clap::{Args, Subcommand};
use std::path::PathBuf;
use sumac_firmware::manifest::files;
use sumac_firmware::manifest::{Trust, envelope};

/// `sumac image`.
#[derive(Debug, Args)]
pub(crate) struct ImageArgs {
    #[command(subcommand)]
    command: ImageCommand,
}

/// The subcommands of `sumac image`.
#[derive(Debug, Subcommand)]
enum ImageCommand {
    /// List the images in a boot stream
    ///
    /// Reads BFB files and the contents of eMMC boot partitions. Faults that `repack` can fix are noted; other damage
    /// is an error that names offset and field.
    List(show::ListArgs),
    /// Verify every byte of a boot stream, and its signed manifest
    ///
    /// Stricter than the boot stages: the order of the images and the references between headers must be right, too.
    /// Without --key, what vendors' tools write is noted: the references of streams that `mlx-mkbfb` has filtered, and
    /// data behind the last image.
    Verify(show::VerifyArgs),
    /// Build a boot stream from a kernel and a file system, or the image of a board without an operating system
    ///
    /// The boot loaders come from a vendor's stream (--base), which you provide; Sumac includes none. The result
    /// contains a manifest of all images, signed if a key is given.
    #[command(after_long_help = BUILD_HELP)]
    Build(build::BuildArgs),
    /// Build the initramfs of a card: the agent as /init, and the kernel modules that it loads
    ///
    /// For `image build --initramfs`. The agent takes its configuration from the kernel's command line (`image build
    /// --append 'sumac.name=leaf0 sumac.controller=10.0.0.1:7847'`) and from a store on the card.
    Initramfs(initramfs::InitramfsArgs),
    /// Run a board without an operating system in QEMU, and print its log
    ///
    /// The board registers with the controller, and a UDP port of this host is forwarded to it, so that
    /// `sumac perf --device 127.0.0.1:7100` measures it. Runs until interrupted.
    Run(RunArgs),
    /// Extract images of a boot stream to files named dump-NAME-vN
    Extract(extract::ExtractArgs),
    /// Combine boot streams and images, in the order that the boot stages need
    ///
    /// Later inputs override earlier ones; --set and --text override all inputs. A manifest that no longer matches is
    /// dropped, unless --image-version requests a new one.
    Repack(repack::RepackArgs),
    /// Write what `sumac flash` sends behind a boot stream: its manifest, and the payload for the card's slots
    ///
    /// For machines without rshim, where the agent reads it from a disk (`sumac.boot-fifo=/dev/vdb`).
    Tail(tail::TailArgs),
    /// On a card: verify the files that the agent starts against their manifest
    ///
    /// The manifest is etc/sumac/manifest.json below the root. `image build --agent` writes it.
    VerifyFiles(VerifyFilesArgs),
}

/// `sumac image verify-files`.
#[derive(Debug, Args)]
struct VerifyFilesArgs {
    /// Root of the file system
    #[arg(value_name = "FOLDER", default_value = "/")]
    root: PathBuf,
    /// Public key (PEM) that must have signed the manifest
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
}

/// Run a subcommand of `sumac image`.
pub(crate) fn run(args: &ImageArgs) -> Result<(), Failure> {
    match &args.command {
        ImageCommand::List(args) => show::list(args),
        ImageCommand::Verify(args) => show::verify(args),
        ImageCommand::Build(args) => build::run(args),
        ImageCommand::Initramfs(args) => initramfs::run(args),
        ImageCommand::Run(args) => board::run(args),
        ImageCommand::Extract(args) => extract::run(args),
        ImageCommand::Repack(args) => repack::run(args),
        ImageCommand::Tail(args) => tail::run(args),
        ImageCommand::VerifyFiles(args) => verify_files(args),
    }
}

fn verify_files(args: &VerifyFilesArgs) -> Result<(), Failure> {
    let key = read_public_key(&args.key)?;
    let manifest = files::check(&args.root, Trust::Key(&key)).map_err(Failure::input)?;
    let count = manifest.files.len();
    let (version, epoch, key) = (&manifest.version, manifest.epoch, envelope::key_id(&key));
    println!("{count} files match the manifest: version {version}, epoch {epoch}, signed by {key}");
    Ok(())
}

const BUILD_HELP: &str = "\
EXAMPLES
  openssl genpkey -algorithm ed25519 -out key.pem && openssl pkey -in key.pem -pubout -out pub.pem
  sumac image build --board bluefield --kernel Image --initramfs initramfs.cpio.gz \\
      --base /lib/firmware/mellanox/boot/default.bfb --agent /usr/bin/sumac=sumac \\
      --image-version 1.2.0 --epoch 1 --sign-key key.pem -o sumac.bfb
  sumac image verify sumac.bfb --key pub.pem
  sumac image initramfs --modules /lib/modules/VERSION -o initramfs.cpio

`sumac flash` waits until the card reports `Linux up` and then `DPU is ready` through the driver mlxbf-bootctl (by
a write to /sys/devices/platform/MLNXBF04:00/rsh_log). The initramfs of `sumac image initramfs` does so; yours must, too.";
