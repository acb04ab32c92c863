//! Building the agent, a static program for the Arm Linux of a BlueField-class card.

use super::build::{BuildOptions, DEBIAN_RUSTC, Toolchain, has_debian_source, has_rustup_target, source_with};
use crate::exit::Failure;
use anyhow::{Context, anyhow, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

const FOLDER: &str = "firmware/boards/bluefield";
const PROGRAM: &str = "sumac-agent";

/// rustup's target, which includes the C library.
const MUSL: &str = "aarch64-unknown-linux-musl";
/// Debian's target, whose C library is linked statically. Its standard library is built from Debian's source, because
/// the package of the library needs a foreign architecture to be enabled.
const GNU: &str = "aarch64-unknown-linux-gnu";
const DEBIAN_LINKER: &str = "aarch64-linux-gnu-gcc";
/// The C library to link.
const DEBIAN_C_LIBRARY: &str = "libc.a";

/// Build the agent and return its path.
///
/// # Errors
/// There are no sources or no compiler for it, or the build fails.
pub(crate) fn build_agent(options: &BuildOptions) -> Result<PathBuf, Failure> {
    let source = source_with(options.source.as_deref(), Path::new(FOLDER)).map_err(Failure::Input)?;
    let target = choose(options.toolchain).map_err(Failure::Input)?;
    let folder = source.join("target/boards");
    let mut cargo = Command::new("cargo");
    cargo.current_dir(source.join(FOLDER)).args(["build", "--release", "--locked", "--bin", PROGRAM]);
    cargo.args(["--target", target]).arg("--target-dir").arg(&folder);
    if target == GNU {
        // build-std is unstable; RUSTC_BOOTSTRAP switches it on in a released compiler.
        cargo.arg("-Zbuild-std=std").env("RUSTC", DEBIAN_RUSTC).env("RUSTC_BOOTSTRAP", "1");
    }
    let status = cargo.status().context("cannot start cargo").map_err(Failure::Run)?;
    if !status.success() {
        return Err(Failure::Run(anyhow!("cargo failed to build the agent ({status}); see its messages")));
    }
    Ok(folder.join(target).join("release").join(PROGRAM))
}

/// Return a target for which this machine can build.
fn choose(wanted: Toolchain) -> anyhow::Result<&'static str> {
    if wanted != Toolchain::Debian && has_rustup_target(MUSL) {
        return Ok(MUSL);
    }
    if wanted != Toolchain::Rustup && has_debian_source() && has_debian_c_library() {
        return Ok(GNU);
    }
    bail!(
        "no standard library for aarch64 Linux: run 'rustup target add {MUSL}', or, on Debian, 'apt-get install \
         --no-remove rustc-web rust-web-src gcc-aarch64-linux-gnu libc6-dev-arm64-cross'"
    )
}

/// Ask the linker for the path of the library; it replies with the bare name if it finds none.
fn has_debian_c_library() -> bool {
    let found = Command::new(DEBIAN_LINKER).arg(format!("-print-file-name={DEBIAN_C_LIBRARY}")).output();
    found.is_ok_and(|found| Path::new(String::from_utf8_lossy(&found.stdout).trim()).is_absolute())
}
