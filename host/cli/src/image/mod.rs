//! `sumac image`: boot streams for BlueField-class cards, read, checked, made and changed; images of boards without an
//! operating system, made and run.
//!
//! Invariants: images go through in pieces, however long they are; a file that is written appears whole and checked, or
//! not at all.

mod build;
mod extract;
mod file;
mod initramfs;
mod repack;
mod show;

pub(crate) use file::{ImageFile, read_public_key};

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

/// What to do with boot streams.
#[derive(Debug, Subcommand)]
enum ImageCommand {
    /// Show what is in a boot stream
    ///
    /// Takes BFB files and what is in eMMC boot partitions. What can be put right by `repack` is noted; other damage
    /// is an error, with offset and field.
    List(show::ListArgs),
    /// Check every byte of a boot stream, and its signed manifest
    ///
    /// Stricter than the boot stages are: also the order of the images and what the headers say about each other must
    /// be right.
    Verify(show::VerifyArgs),
    /// Make a boot stream with an own kernel and file system, or the image of a board without an operating system
    ///
    /// The boot loaders come from a vendor's stream (--base), which is yours: none comes with Sumac. The result has a
    /// manifest of all images, signed if there is a key.
    #[command(after_long_help = BUILD_HELP)]
    Build(build::BuildArgs),
    /// Make the first file system of a card: the agent as /init, and the kernel modules that it loads
    ///
    /// For `image build --initramfs`. The agent takes its configuration from the kernel's command line (`image build
    /// --append 'sumac.name=leaf0 sumac.controller=10.0.0.1:7847'`) and from a store on the card.
    Initramfs(initramfs::InitramfsArgs),
    /// Run a board without an operating system in QEMU, and print its log
    ///
    /// It dials the controller, and this host's UDP port is its own: `sumac perf --device 127.0.0.1:7100` measures it. Runs
    /// until it is interrupted.
    Run(RunArgs),
    /// Write images of a boot stream to files named dump-NAME-vN
    Extract(extract::ExtractArgs),
    /// Put boot streams and images together, in the order that the boot stages need
    ///
    /// Later inputs win over earlier ones, and --set and --text over all of them. A manifest that no longer fits is left
    /// out unless a new one is asked for with --image-version.
    Repack(repack::RepackArgs),
    /// On a card: check the files that the agent starts against the manifest beside them
    ///
    /// The manifest is etc/sumac/manifest.json below the root; `image build --agent` writes it.
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

/// Do it.
pub(crate) fn run(args: &ImageArgs) -> Result<(), Failure> {
    match &args.command {
        ImageCommand::List(args) => show::list(args),
        ImageCommand::Verify(args) => show::verify(args),
        ImageCommand::Build(args) => build::run(args),
        ImageCommand::Initramfs(args) => initramfs::run(args),
        ImageCommand::Run(args) => board::run(args),
        ImageCommand::Extract(args) => extract::run(args),
        ImageCommand::Repack(args) => repack::run(args),
        ImageCommand::VerifyFiles(args) => verify_files(args),
    }
}

fn verify_files(args: &VerifyFilesArgs) -> Result<(), Failure> {
    let key = read_public_key(&args.key)?;
    let manifest = files::check(&args.root, Trust::Key(&key)).map_err(Failure::input)?;
    let count = manifest.files.len();
    let (version, epoch, key) = (&manifest.version, manifest.epoch, envelope::key_id(&key));
    println!("{count} files as in the manifest: version {version}, epoch {epoch}, signed by {key}");
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

The initramfs must say `Linux up` and then `DPU is ready` through the driver mlxbf-bootctl (write to
/sys/devices/platform/MLNXBF04:00/rsh_log): `sumac flash` waits for it. That of `sumac image initramfs` does.";
