//! Worker processes that access a card's driver, so that a hanging driver does not block the command.

use crate::cluster;
use crate::exit::Failure;
use anyhow::{Context, anyhow};
use clap::Args;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::process::{Child, Stdio};
use sumac_firmware::flash::{Contents, Role, Workers, serve_boot, serve_misc};
use sumac_firmware::manifest::hex;
use sumac_firmware::rshim::Rshim;

/// Starts worker processes.
pub(crate) type Spawn = Box<dyn FnMut(Role, Stdio) -> io::Result<Child>>;

/// `sumac rshim-worker`.
#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// The card's folder
    #[arg(long)]
    rshim: String,
    /// Length of the image on stdin in bytes, which is written to `boot`
    #[arg(long, requires = "sha256")]
    len_bytes: Option<u64>,
    /// Length of what follows the image on stdin, in bytes
    #[arg(long, default_value_t = 0)]
    tail_len_bytes: u64,
    /// Write only what follows the image
    #[arg(long)]
    tail_only: bool,
    /// SHA-256 of the image, in hexadecimal digits
    #[arg(long)]
    sha256: Option<String>,
}

/// Start the worker for a card's `misc` node.
pub(crate) fn start(card: &Rshim) -> anyhow::Result<Workers<Spawn>> {
    let folder = card.folder().to_owned();
    let spawn = move |role: Role, stdin: Stdio| {
        let mut command = cluster::supervised()?;
        // A path with a slash is taken as a folder, not as a name below /dev.
        command.arg("rshim-worker").arg("--rshim").arg(folder.join("."));
        if let Role::Boot(Contents { len_bytes, sha256, tail_len_bytes, is_tail_only }) = role {
            command.args(["--len-bytes", &len_bytes.to_string(), "--sha256", &hex(&sha256)]);
            command.args(["--tail-len-bytes", &tail_len_bytes.to_string()]);
            command.args(is_tail_only.then_some("--tail-only"));
        }
        command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()
    };
    Workers::start(Box::new(spawn) as Spawn).context("cannot start a worker process for the card")
}

/// Run as a worker process.
pub(crate) fn run(args: &WorkerArgs) -> Result<(), Failure> {
    let card = Rshim::new(&args.rshim);
    let stdout = io::stdout().lock();
    match (args.len_bytes, &args.sha256) {
        (Some(len_bytes), Some(digits)) => {
            let sha256 =
                parse_digest(digits).ok_or_else(|| Failure::Input(anyhow!("{digits:?} is not a SHA-256 digest")))?;
            let image = io::stdin().as_fd().try_clone_to_owned()?;
            let (tail_len_bytes, is_tail_only) = (args.tail_len_bytes, args.tail_only);
            let contents = Contents { len_bytes, sha256, tail_len_bytes, is_tail_only };
            serve_boot(&card, File::from(image), &contents, stdout)?;
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
