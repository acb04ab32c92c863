//! Building the agent for the Arm Linux of a BlueField-class card: a static program.

use super::build::{BuildOptions, DEBIAN_RUSTC, Toolchain, has_rustup_target, source_with};
use crate::exit::Failure;
use anyhow::{Context, anyhow, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

const FOLDER: &str = "firmware/boards/bluefield";
const PROGRAM: &str = "sumac-agent";

/// rustup's target, which brings the C library with it.
const MUSL: &str = "aarch64-unknown-linux-musl";
/// Debian's, whose C library is linked in.
const GNU: &str = "aarch64-unknown-linux-gnu";
/// Where Debian has the standard library for it (libstd-rust-web-dev:arm64).
const DEBIAN_LIBRARY: &str = "/usr/lib/rustlib/aarch64-unknown-linux-gnu/lib";
const DEBIAN_LINKER: &str = "aarch64-linux-gnu-gcc";

/// Build the agent and return where it is.
///
/// # Errors
/// No sources or no compiler for it (bad input); a build that fails.
pub(crate) fn build_agent(options: &BuildOptions) -> Result<PathBuf, Failure> {
    let source = source_with(options.source.as_deref(), Path::new(FOLDER)).map_err(Failure::Input)?;
    let target = choose(options.toolchain).map_err(Failure::Input)?;
    let folder = source.join("target/boards");
    let mut cargo = Command::new("cargo");
    cargo.current_dir(source.join(FOLDER)).args(["build", "--release", "--locked", "--bin", PROGRAM]);
    cargo.args(["--target", target]).arg("--target-dir").arg(&folder);
    if target == GNU {
        cargo.env("RUSTC", DEBIAN_RUSTC);
    }
    let status = cargo.status().context("can't start cargo").map_err(Failure::Run)?;
    if !status.success() {
        return Err(Failure::Run(anyhow!("cargo could not build the agent ({status}); its messages say why")));
    }
    Ok(folder.join(target).join("release").join(PROGRAM))
}

/// Return the target that this machine can build for.
fn choose(wanted: Toolchain) -> anyhow::Result<&'static str> {
    if wanted != Toolchain::Debian && has_rustup_target(MUSL) {
        return Ok(MUSL);
    }
    let links = || Command::new(DEBIAN_LINKER).arg("--version").output().is_ok_and(|output| output.status.success());
    if wanted != Toolchain::Rustup && Path::new(DEBIAN_LIBRARY).is_dir() && links() {
        return Ok(GNU);
    }
    bail!(
        "no standard library for aarch64 Linux: run 'rustup target add {MUSL}', or, on Debian, 'dpkg \
         --add-architecture arm64' and 'apt-get install --no-remove rustc-web libstd-rust-web-dev:arm64 \
         gcc-aarch64-linux-gnu libc6-dev-arm64-cross'"
    )
}
