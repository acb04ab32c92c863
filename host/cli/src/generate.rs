//! `sumac completions` and `sumac man`: what shells and readers of manual pages need, from the definition of the
//! command line.

use crate::exit::Failure;
use anyhow::Context;
use clap::{Args, Command};
use clap_complete::Shell;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

/// `sumac completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// `sumac man`.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// The folder to write to, as in ~/.local/share/man/man1; created if it does not exist
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

/// Print the completions of a shell.
pub(crate) fn completions(all: &Command, args: &CompletionsArgs) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut visible(all), "sumac", &mut script);
    let mut out = io::stdout().lock();
    out.write_all(&script)?;
    Ok(out.flush()?)
}

/// Write the manual pages.
pub(crate) fn man(all: &Command, args: &ManArgs) -> Result<(), Failure> {
    let folder = args.folder.display();
    fs::create_dir_all(&args.folder)
        .and_then(|()| clap_mangen::generate_to(visible(all), &args.folder))
        .with_context(|| format!("cannot write manual pages to {folder}"))
        .map_err(Failure::Run)
}

/// Return the command line `all` without the subcommands that only this program itself calls.
fn visible(all: &Command) -> Command {
    let kept: Vec<Command> = all.get_subcommands().filter(|command| !command.is_hide_set()).cloned().collect();
    let args: Vec<_> = all.get_arguments().cloned().collect();
    let mut command = Command::new("sumac").version(env!("CARGO_PKG_VERSION")).args(args).subcommands(kept);
    for (text, set) in [
        (all.get_about(), Command::about as fn(Command, clap::builder::StyledStr) -> Command),
        (all.get_long_about(), Command::long_about),
        (all.get_after_long_help(), Command::after_long_help),
    ] {
        if let Some(text) = text {
            command = set(command, text.clone());
        }
    }
    command
}
