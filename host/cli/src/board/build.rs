//! Building a board's image: choice of the compiler, the run of cargo, and a report of the memory that it uses.

use crate::exit::Failure;
use anyhow::{Context, anyhow, bail};
use clap::ValueEnum;
use object::{Object, ObjectSection};
use std::env;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A board without an operating system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BareBoard {
    /// QEMU's virt machine, aarch64
    QemuVirt,
    /// QEMU's microvm, x86-64: a minimal board
    X86Microvm,
    /// QEMU's virt machine, riscv64: within 512 KiB of memory
    RiscvVirt,
}

impl BareBoard {
    /// Return its folder in `firmware/boards` and the name of its binary.
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::QemuVirt => ("qemu-virt", "sumac-qemu-virt"),
            Self::X86Microvm => ("x86-microvm", "sumac-x86-microvm"),
            Self::RiscvVirt => ("riscv-virt", "sumac-riscv-virt"),
        }
    }

    const fn target(self) -> &'static str {
        match self {
            Self::QemuVirt => "aarch64-unknown-none",
            Self::X86Microvm => "x86_64-unknown-none",
            Self::RiscvVirt => "riscv64gc-unknown-none-elf",
        }
    }
}

/// The source of the standard library: `core` for a board, all of it for the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Toolchain {
    /// rustup, if it has the target or can download it, else Debian's compiler
    Auto,
    /// rustup's compiler and target
    Rustup,
    /// Debian's rustc-web, which builds the library from rust-web-src
    Debian,
}

/// Options for building.
#[derive(Debug, clap::Args)]
pub(crate) struct BuildOptions {
    /// Checkout of Sumac to build from [default: the one that contains the current folder]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) source: Option<PathBuf>,
    /// Source of the standard library for the board's processor
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub(crate) toolchain: Toolchain,
    /// Features of the board's crate, comma-separated
    #[arg(long, value_name = "NAME", hide = true, value_delimiter = ',')]
    pub(crate) features: Vec<String>,
}

/// How long rustup may take to download a target, in seconds.
const RUSTUP_LIMIT_S: u32 = 120;

/// Debian's compiler, which must have the same release as its library source.
pub(super) const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
const DEBIAN_SOURCE: &str = "/usr/lib/rustlib/src/rust";

/// Return the path of `board`'s image, if it was built in the checkout that contains the current folder.
pub(crate) fn default_image(board: BareBoard) -> Option<PathBuf> {
    let image = image_path(&source(None, board).ok()?, board);
    image.is_file().then_some(image)
}

/// Build `board`'s image, print the sizes of its sections, and copy it to `output` if that is given.
///
/// # Errors
/// There are no sources or no compiler for it, or the build fails.
pub(crate) fn build(board: BareBoard, options: &BuildOptions, output: Option<&Path>) -> Result<(), Failure> {
    let source = source(options.source.as_deref(), board).map_err(Failure::Input)?;
    let toolchain = choose(options.toolchain, board.target()).map_err(Failure::Input)?;
    let (folder, _) = board.names();
    let mut cargo = Command::new("cargo");
    cargo.current_dir(source.join("firmware/boards").join(folder));
    cargo.args(["build", "--release", "--locked"]).arg("--target-dir").arg(target_folder(&source));
    if !options.features.is_empty() {
        cargo.arg("--features").arg(options.features.join(","));
    }
    if toolchain == Toolchain::Debian {
        // build-std is unstable; RUSTC_BOOTSTRAP switches it on in a released compiler.
        cargo.arg("-Zbuild-std=core").env("RUSTC", DEBIAN_RUSTC).env("RUSTC_BOOTSTRAP", "1");
        let linker = format!("CARGO_TARGET_{}_LINKER", board.target().to_uppercase().replace('-', "_"));
        cargo.env(linker, "ld.lld");
    }
    let status = cargo.status().context("cannot start cargo").map_err(Failure::Run)?;
    if !status.success() {
        return Err(Failure::Run(anyhow!("cargo failed to build the image ({status}); see its messages")));
    }
    let image = image_path(&source, board);
    let bytes = fs::read(&image).with_context(|| format!("cannot read {}", image.display())).map_err(Failure::Run)?;
    let sections = sections(&bytes).map_err(Failure::Run)?;
    let shown = match output {
        Some(output) => {
            publish(&bytes, output)
                .with_context(|| format!("cannot write {}", output.display()))
                .map_err(Failure::Run)?;
            output
        }
        None => &image,
    };
    writeln!(io::stdout(), "{}: {sections}", shown.display())?;
    Ok(())
}

/// Write a file atomically.
fn publish(bytes: &[u8], output: &Path) -> io::Result<()> {
    let folder = output.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(output)?;
    Ok(())
}

fn target_folder(source: &Path) -> PathBuf {
    source.join("target/boards")
}

fn image_path(source: &Path, board: BareBoard) -> PathBuf {
    target_folder(source).join(board.target()).join("release").join(board.names().1)
}

/// Return the checkout to build from.
fn source(given: Option<&Path>, board: BareBoard) -> anyhow::Result<PathBuf> {
    source_with(given, &Path::new("firmware/boards").join(board.names().0))
}

/// Return the checkout with a package in `folder`.
pub(super) fn source_with(given: Option<&Path>, folder: &Path) -> anyhow::Result<PathBuf> {
    let manifest = folder.join("Cargo.toml");
    if let Some(given) = given {
        return if given.join(&manifest).is_file() {
            Ok(given.canonicalize()?)
        } else {
            bail!("{} is not a checkout of Sumac: it has no {}", given.display(), manifest.display())
        };
    }
    let here = env::current_dir().context("cannot get the current folder")?;
    let found = here.ancestors().find(|folder| folder.join(&manifest).is_file());
    found.map(Path::to_path_buf).ok_or_else(|| {
        anyhow!(
            "{} is not in a checkout of Sumac; images are built from its sources, name them with --source",
            here.display()
        )
    })
}

/// Choose the source of `core`.
fn choose(wanted: Toolchain, target: &str) -> anyhow::Result<Toolchain> {
    if wanted != Toolchain::Debian && has_rustup_target(target) {
        return Ok(Toolchain::Rustup);
    }
    if wanted != Toolchain::Rustup && has_debian_source() && has_debian_linker() {
        return Ok(Toolchain::Debian);
    }
    bail!(
        "no core library for {target}: run 'rustup target add {target}', or, on Debian, 'apt-get install --no-remove \
         rustc-web rust-web-src lld'"
    )
}

pub(super) fn has_rustup_target(target: &str) -> bool {
    let installed = || {
        let listed = Command::new("rustup").args(["target", "list", "--installed"]).output();
        listed.is_ok_and(|listed| String::from_utf8_lossy(&listed.stdout).lines().any(|line| line == target))
    };
    if installed() {
        return true;
    }
    let add =
        Command::new("timeout").arg(RUSTUP_LIMIT_S.to_string()).args(["rustup", "target", "add", target]).output();
    // Check again: success of rustup does not mean that the target is there.
    add.is_ok_and(|added| added.status.success()) && installed()
}

pub(super) fn has_debian_source() -> bool {
    let version = Command::new(DEBIAN_RUSTC).arg("--version").output();
    let version = version.ok().map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let release = version.as_deref().and_then(|text| text.split_whitespace().nth(1));
    let source = fs::canonicalize(DEBIAN_SOURCE).ok();
    release.zip(source).is_some_and(|(release, source)| source.ends_with(format!("rustc-{release}")))
}

fn has_debian_linker() -> bool {
    Command::new("ld.lld").arg("--version").output().is_ok_and(|output| output.status.success())
}

/// The sections of an image and their sizes, as named in `link.ld`.
#[derive(Debug, PartialEq, Eq)]
struct Sections(Vec<(String, u64)>);

impl std::fmt::Display for Sections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let total: u64 = self.0.iter().map(|(_, len)| len).sum();
        for (name, len) in &self.0 {
            write!(f, "{name} {len} B, ")?;
        }
        write!(f, "total {total} B of memory")
    }
}

fn sections(image: &[u8]) -> anyhow::Result<Sections> {
    let file = object::File::parse(image).context("the image is not an ELF file")?;
    let known = |name: &str| file.section_by_name(&format!(".{name}")).map(|section| (name.to_owned(), section.size()));
    Ok(Sections(["text", "rodata", "data", "bss", "stack", "keep"].into_iter().filter_map(known).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_found_from_within_a_checkout_only() {
        let root = source(None, BareBoard::QemuVirt).expect("the tests run within the sources");
        assert!(root.join("firmware/boards/qemu-virt/link.ld").is_file());
        assert_eq!(source(Some(&root), BareBoard::QemuVirt).expect("given"), root);
        let empty = tempfile::tempdir().expect("a folder");
        let error = source(Some(empty.path()), BareBoard::QemuVirt).expect_err("no sources").to_string();
        assert!(error.contains("is not a checkout of Sumac"), "{error}");
    }

    #[test]
    fn sections_are_printed_with_their_total() {
        let all = Sections(vec![("text".into(), 10), ("bss".into(), 5)]);
        assert_eq!(all.to_string(), "text 10 B, bss 5 B, total 15 B of memory");
        assert!(sections(b"no ELF").is_err());
    }
}
