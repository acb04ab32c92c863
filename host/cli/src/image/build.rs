//! `sumac image build`.

use super::file::{Output, Outputs, parse_pair};
use super::repack::{ManifestArgs, StreamBuilder};
use crate::board::{self, BareBoard, BuildOptions};
use crate::exit::Failure;
use anyhow::{Context, anyhow};
use clap::Args;
use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::EncodePublicKey;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use sumac_firmware::bfb::{Entry, ImageId, Source};
use sumac_firmware::manifest::files::{self, FilesError};
use sumac_firmware::recipe::{self, Recipe};

/// The alignment of archives in an initramfs, in bytes.
const ARCHIVE_ALIGNMENT: u64 = 4;

/// The kernel argument with the public key, as the agent expects it.
const UPDATE_KEY: &str = "sumac.update-key=";

/// `sumac image build`.
#[derive(Debug, Args)]
pub(super) struct BuildArgs {
    /// Kind of card
    #[arg(long, value_enum, default_value_t = BoardName::Bluefield)]
    board: BoardName,
    /// Kernel (`image`): an uncompressed arm64 Image with EFI stub, or another UEFI application for arm64
    #[arg(long, value_name = "FILE", required_if_eq("board", "bluefield"))]
    kernel: Option<PathBuf>,
    /// Initramfs, compressed or not
    #[arg(long, value_name = "FILE", required_if_eq("board", "bluefield"))]
    initramfs: Option<PathBuf>,
    /// Boot stream with the vendor's boot loaders, such as /lib/firmware/mellanox/boot/default.bfb
    #[arg(long, value_name = "FILE")]
    base: Option<PathBuf>,
    /// Keep the firmware updates of --base, such as a capsule, which the card installs when it boots the stream
    #[arg(long, requires = "base")]
    keep_firmware: bool,
    /// File to append to the initramfs, with a manifest, as in /usr/bin/sumac=sumac; may be repeated
    #[arg(long, value_name = "PATH=FILE", value_parser = parse_pair)]
    agent: Vec<(String, String)>,
    /// Additional kernel arguments, after those for consoles and the initramfs
    #[arg(long, value_name = "ARGS", default_value = "")]
    append: String,
    #[command(flatten)]
    manifest: ManifestArgs,
    #[command(flatten)]
    bare: BuildOptions,
    /// File to write [default for boards without an operating system: the output of cargo]
    #[arg(short, long, value_name = "FILE", required_if_eq("board", "bluefield"))]
    output: Option<PathBuf>,
}

/// The supported kinds of cards and boards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum BoardName {
    /// BlueField, BlueField-2 and BlueField-3
    Bluefield,
    /// QEMU's virt machine without an operating system: an ELF file, built from the sources
    QemuVirt,
    /// QEMU's microvm (x86-64) without an operating system: an ELF file, built from the sources
    X86Microvm,
    /// QEMU's virt machine (riscv64) without an operating system: an ELF file, built from the sources
    RiscvVirt,
}

/// Build a boot stream or a board's image.
pub(super) fn run(args: &BuildArgs) -> Result<(), Failure> {
    let bare = match args.board {
        BoardName::Bluefield => None,
        BoardName::QemuVirt => Some(BareBoard::QemuVirt),
        BoardName::X86Microvm => Some(BareBoard::X86Microvm),
        BoardName::RiscvVirt => Some(BareBoard::RiscvVirt),
    };
    match (bare, &args.kernel, &args.initramfs, &args.output) {
        (Some(bare), None, None, output) if args.base.is_none() && args.agent.is_empty() => {
            board::build(bare, &args.bare, output.as_deref())
        }
        (None, Some(kernel), Some(initramfs), Some(output)) => stream(args, kernel, initramfs, output),
        _ => Err(Failure::Input(anyhow!(
            "--kernel, --initramfs, --base and --agent are for boot streams; boards without an operating system have none"
        ))),
    }
}

/// Build a boot stream.
fn stream(args: &BuildArgs, kernel: &Path, initramfs: &Path, output: &Path) -> Result<(), Failure> {
    let key = args.manifest.key()?;
    let outputs = Outputs::new()?;
    let mut stream = StreamBuilder::default();
    if let Some(base) = &args.base {
        take_base(&mut stream, base, args.keep_firmware, output, &outputs)?;
    }
    let file = |path: &Path| {
        Source::file(path).with_context(|| format!("cannot read {}", path.display())).map_err(Failure::Input)
    };
    let version = args.manifest.image_version.as_deref().unwrap_or("0");
    let mut initramfs = file(initramfs)?;
    if !args.agent.is_empty() {
        let archive = pack((args, output), version, key.as_ref(), &outputs)?;
        let padding = initramfs.len_bytes().wrapping_neg() % ARCHIVE_ALIGNMENT;
        let padding = Source::Bytes(vec![0; padding as usize]);
        initramfs = Source::Chain(vec![initramfs, padding, stream.spool(archive)?]);
    }
    let source = file(kernel)?;
    recipe::check_kernel(&source).map_err(|error| Failure::Input(anyhow!("--kernel {} {error}", kernel.display())))?;
    let mut recipe = Recipe::new(source, initramfs);
    recipe.more_args = arguments(&args.append, key.as_ref())?;
    recipe.put_into(&mut stream.builder).map_err(Failure::input)?;
    stream.add_manifest(version, args.manifest.epoch, key.as_ref())?;
    stream.write(output, key.as_ref(), &outputs)?.publish()?;
    let count = stream.builder.images().count();
    let signed = if key.is_some() { "signed" } else { "not signed (--sign-key)" };
    writeln!(io::stdout(), "{}: {count} images, version {version}, {signed}", output.display())?;
    if args.base.is_none() {
        note!("note: without --base, the stream contains no boot loader; a card needs one of its own to boot it");
    }
    Ok(())
}

/// Return the additional kernel arguments, with the key whose signature the card demands of what it installs.
fn arguments(append: &str, key: Option<&SigningKey>) -> Result<String, Failure> {
    match key {
        Some(key) if !append.split_whitespace().any(|word| word.starts_with(UPDATE_KEY)) => {
            let pem = key.verifying_key().to_public_key_pem(LineEnding::LF).map_err(Failure::run)?;
            let line = pem.lines().nth(1).unwrap_or_default();
            Ok(format!("{append} {UPDATE_KEY}{line}").trim_start().to_owned())
        }
        _ => Ok(append.to_owned()),
    }
}

/// Take the images of a base; firmware updates only if they are to be kept.
fn take_base(
    stream: &mut StreamBuilder,
    base: &Path,
    keeps_firmware: bool,
    output: &Path,
    outputs: &Outputs,
) -> Result<(), Failure> {
    let report = stream.take(base, &[ImageId::INFO], output, outputs)?;
    let is_firmware = |entry: &&Entry| entry.header.name.id.is_firmware_update();
    let firmware: Vec<_> = report.entries.iter().filter(is_firmware).map(|entry| entry.header).collect();
    let names: Vec<_> = firmware.iter().map(|header| format!("{} ({} bytes)", header.name, header.len_bytes)).collect();
    if keeps_firmware {
        match names.is_empty() {
            true => note!("note: {} has no firmware updates", base.display()),
            false => note!("note: the card will install firmware of {}: {}", base.display(), names.join(", ")),
        }
    } else if !names.is_empty() {
        note!("note: left out firmware of {}: {}; --keep-firmware keeps it", base.display(), names.join(", "));
        for header in firmware {
            stream.builder.remove(header.name.id);
        }
    }
    Ok(())
}

/// Pack the agent's files into an archive.
fn pack(
    (args, output): (&BuildArgs, &Path),
    version: &str,
    key: Option<&SigningKey>,
    outputs: &Outputs,
) -> Result<Output, Failure> {
    let mut archive = outputs.create(output)?;
    let agent: Vec<_> = args.agent.iter().map(|(path, file)| (path.clone(), PathBuf::from(file))).collect();
    let packed = files::write_archive(&agent, version, args.manifest.epoch, key, &mut archive);
    packed.map(|_| archive).map_err(|error| match error {
        FilesError::Io { .. } => outputs.failure(Failure::input(error)),
        error => Failure::input(error),
    })
}
