//! Make, list and revoke keys in a controller's store.

use crate::exit::Failure;
use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use sumac::controller::keys::{KeyRecord, KeyStore, Principal, write_new_key};
use sumac_hal::ctrl::secure::{Key, KeyId};
use zeroize::Zeroizing;

/// `sumac key`.
#[derive(Debug, Args)]
pub(crate) struct KeyArgs {
    #[command(subcommand)]
    command: KeyCommand,
}

#[derive(Debug, Subcommand)]
enum KeyCommand {
    /// Make a key: add it to the controller's store, and write it to a file for the principal that it stands for
    New(NewArgs),
    /// List the keys of a store, without their secrets
    Show(ShowArgs),
    /// Revoke keys: a running controller ends their connections within a second
    Revoke(RevokeArgs),
}

#[derive(Debug, Args)]
struct StoreOption {
    /// The controller's store of keys (`sumac controller --keys`); `key new` makes it if there is none
    #[arg(long, value_name = "FILE")]
    keys: PathBuf,
}

#[derive(Debug, Args)]
struct NewArgs {
    #[command(flatten)]
    store: StoreOption,
    #[command(flatten)]
    principal: PrincipalOption,
    /// Days until the key expires, by the controller's clock; connections that it has opened stay [default: never]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=36_500))]
    expires_days: Option<u64>,
    /// The new file to write the key to, readable by its owner only; `-` prints it
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct PrincipalOption {
    /// A device's key: may register under these names, separated by commas
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    device: Option<Vec<String>>,
    /// A tenant's key: its ranks may join jobs of this tenant, and it sees them in `status`
    #[arg(long, value_name = "TENANT")]
    tenant: Option<String>,
    /// An operator's key: sees all of `status`, and may run jobs on chosen devices
    #[arg(long)]
    operator: bool,
}

#[derive(Debug, Args)]
struct ShowArgs {
    #[command(flatten)]
    store: StoreOption,
}

#[derive(Debug, Args)]
struct RevokeArgs {
    #[command(flatten)]
    store: StoreOption,
    /// Ids of the keys, as `sumac key show` lists them
    #[arg(required = true, value_name = "ID")]
    ids: Vec<KeyId>,
}

/// Run `sumac key`.
pub(crate) fn run(args: &KeyArgs) -> Result<(), Failure> {
    match &args.command {
        KeyCommand::New(args) => new(args),
        KeyCommand::Show(args) => show(&args.store.keys),
        KeyCommand::Revoke(args) => revoke(args),
    }
}

fn new(args: &NewArgs) -> Result<(), Failure> {
    let path = &args.store.keys;
    let _lock = lock(path)?;
    // Only a store that does not exist is new: one that cannot be read must not be replaced.
    let mut store =
        if path.try_exists()? { KeyStore::read(path).map_err(Failure::input)? } else { KeyStore::default() };
    let expires_unix_s = args.expires_days.map(|days| now_unix_s() + days * DAY_S);
    let principal = args.principal.principal();
    let described = principal.to_string();
    let key = store.add(principal, expires_unix_s, &random()?).map_err(Failure::input)?.clone();
    let is_printed = args.output.as_os_str() == "-";
    if !is_printed {
        write_new_key(&args.output, &key, &described).map_err(Failure::input)?;
    }
    if let Err(error) = store.write(path) {
        if !is_printed {
            // A key that no controller knows.
            let _ = std::fs::remove_file(&args.output);
        }
        return Err(Failure::run(error));
    }
    if is_printed { print(&key) } else { Ok(writeln!(io::stdout(), "{} {described}", key.id())?) }
}

fn print(key: &Key) -> Result<(), Failure> {
    let text = Zeroizing::new(format!("{}\n", key.reveal()));
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

fn show(path: &Path) -> Result<(), Failure> {
    let store = KeyStore::read(path).map_err(Failure::input)?;
    let mut out = io::stdout().lock();
    let now = now_unix_s();
    store.records().try_for_each(|record| {
        writeln!(out, "{}  {:<16}  {}", record.key.id(), state(record, now), record.principal)
    })?;
    Ok(out.flush()?)
}

/// Whether a key is good, and for how long.
fn state(record: &KeyRecord, now_unix_s: u64) -> String {
    match record.expires_unix_s {
        _ if record.is_revoked => "revoked".into(),
        None => "valid".into(),
        Some(expires) if expires <= now_unix_s => "expired".into(),
        Some(expires) => format!("expires in {} d", (expires - now_unix_s).div_ceil(DAY_S)),
    }
}

fn revoke(args: &RevokeArgs) -> Result<(), Failure> {
    let path = &args.store.keys;
    let _lock = lock(path)?;
    let mut store = KeyStore::read(path).map_err(Failure::input)?;
    args.ids.iter().try_for_each(|id| store.revoke(*id)).map_err(Failure::input)?;
    store.write(path).map_err(Failure::run)
}

impl PrincipalOption {
    fn principal(&self) -> Principal {
        match (&self.device, &self.tenant) {
            (Some(names), _) => Principal::Device { names: names.clone() },
            (None, Some(name)) => Principal::Tenant { name: name.clone() },
            (None, None) => Principal::Operator,
        }
    }
}

/// Lock a store against other commands that change it, by its folder: the file itself is replaced.
fn lock(store: &Path) -> Result<OwnedFd, Failure> {
    let folder = match store.parent() {
        Some(folder) if folder.as_os_str() != "" => folder,
        _ => Path::new("."),
    };
    let locked = open(folder, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .and_then(|folder| flock(&folder, FlockOperation::LockExclusive).map(|()| folder));
    locked.with_context(|| format!("cannot lock folder {}", folder.display())).map_err(Failure::Input)
}

fn random() -> Result<Zeroizing<[u8; 40]>, Failure> {
    let mut bytes = Zeroizing::new([0; 40]);
    let filled = rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty());
    match filled {
        Ok(40) => Ok(bytes),
        _ => Err(Failure::Run(anyhow!("the system has no random bytes"))),
    }
}

fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

const DAY_S: u64 = 86_400;
