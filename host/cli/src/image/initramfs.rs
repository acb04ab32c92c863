//! `sumac image initramfs`: build a card's initramfs with the agent.

use super::file::Outputs;
use crate::board::{BuildOptions, build_agent};
use crate::exit::Failure;
use clap::Args;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use sumac_firmware::initramfs;
use sumac_firmware::manifest::files::FilesError;

/// `sumac image initramfs`.
#[derive(Debug, Args)]
pub(super) struct InitramfsArgs {
    /// Agent, a static program for the card's processor [default: built from the sources]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["source", "toolchain"])]
    agent: Option<PathBuf>,
    /// Folder of the kernel's modules, as in /lib/modules/6.1.0-56-arm64 after depmod; the modules that the agent needs
    /// are included
    #[arg(long, value_name = "FOLDER")]
    modules: Option<PathBuf>,
    #[command(flatten)]
    build: BuildOptions,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

/// Build an initramfs.
pub(super) fn run(args: &InitramfsArgs) -> Result<(), Failure> {
    let agent = match &args.agent {
        Some(agent) => agent.clone(),
        None => build_agent(&args.build)?,
    };
    write(&agent, args.modules.as_deref(), &args.output)
}

fn write(agent: &Path, modules: Option<&Path>, path: &Path) -> Result<(), Failure> {
    let outputs = Outputs::new()?;
    let mut output = outputs.create(path)?;
    let contents = initramfs::write(agent, modules, &mut output).map_err(|error| match error {
        FilesError::Io { .. } => outputs.failure(Failure::input(error)),
        error => Failure::input(error),
    })?;
    let len_bytes = output.temporary().metadata().map_or(0, |metadata| metadata.len());
    output.publish()?;
    writeln!(io::stdout(), "{}: {len_bytes} bytes, {} modules", path.display(), contents.modules.len())?;
    if modules.is_none() {
        note!("note: without --modules, the kernel must have all drivers built in");
    }
    Ok(())
}
