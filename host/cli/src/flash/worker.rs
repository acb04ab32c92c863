//! The processes that talk to a card's driver, so that one that hangs there can't hold up the command.

use crate::cluster;
use crate::exit::Failure;
use anyhow::{Context, anyhow};
use clap::Args;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::process::{Child, Stdio};
use sumac_firmware::flash::{Role, Workers, serve_boot, serve_misc};
use sumac_firmware::manifest::hex;
use sumac_firmware::rshim::Rshim;

/// Starts workers.
pub(crate) type Spawn = Box<dyn FnMut(Role, Stdio) -> io::Result<Child>>;

/// `sumac rshim-worker`.
#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// The card's folder
    #[arg(long)]
    rshim: String,
    /// Write stdin to `boot`: its length in bytes
    #[arg(long, requires = "sha256")]
    len_bytes: Option<u64>,
    /// Its SHA-256, in hexadecimal digits
    #[arg(long)]
    sha256: Option<String>,
}

/// Start the worker for `misc` of a card.
pub(crate) fn start(card: &Rshim) -> anyhow::Result<Workers<Spawn>> {
    let folder = card.folder().to_owned();
    let spawn = move |role: Role, stdin: Stdio| {
        let mut command = cluster::supervised()?;
        // A path with a slash is the folder itself, whatever it was called before.
        command.arg("rshim-worker").arg("--rshim").arg(folder.join("."));
        if let Role::Boot { len_bytes, sha256 } = role {
            command.args(["--len-bytes", &len_bytes.to_string(), "--sha256", &hex(&sha256)]);
        }
        command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()
    };
    Workers::start(Box::new(spawn) as Spawn).context("start a process for the card")
}

/// Be a worker.
pub(crate) fn run(args: &WorkerArgs) -> Result<(), Failure> {
    let card = Rshim::new(&args.rshim);
    let stdout = io::stdout().lock();
    match (args.len_bytes, &args.sha256) {
        (Some(len_bytes), Some(digits)) => {
            let sha256 = parse_digest(digits).ok_or_else(|| Failure::Input(anyhow!("{digits:?} is no SHA-256")))?;
            let image = io::stdin().as_fd().try_clone_to_owned()?;
            serve_boot(&card, File::from(image), len_bytes, &sha256, stdout)?;
        }
        _ => serve_misc(&card, io::stdin().lock(), stdout)?,
    }
    Ok(())
}

fn parse_digest(digits: &str) -> Option<[u8; 32]> {
    let mut digest = [0; 32];
    if digits.len() != 2 * digest.len() || !digits.is_ascii() {
        return None;
    }
    for (index, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * index..2 * index + 2], 16).ok()?;
    }
    Some(digest)
}
