//! Fabric descriptions: files, or stdin for `-`, and the hosts that are taken of them.

use crate::exit::Failure;
use anyhow::{Context, anyhow, ensure};
use clap::Args;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use sumac::topo::{DevicePlace, FILE_MAX_BYTES, Fabric, HostId, Inside, Routes, Selection, Taken, Unit, Which};

/// Read a fabric, and return the text as well if it came from stdin, which cannot be read twice.
///
/// The content tells the format. In a fabric without aggregation nodes, a device is assumed at each switch;
/// [`Fabric::assumptions`] says so.
///
/// # Errors
/// A message that names the file or stdin, and the line of an error in the text.
pub(crate) fn read(path: &Path) -> anyhow::Result<(Fabric, Option<String>)> {
    if path.as_os_str() != "-" {
        return Ok((Fabric::read(path)?.with_devices_assumed(), None));
    }
    let mut bytes = Vec::new();
    let read = io::stdin().take(FILE_MAX_BYTES + 1).read_to_end(&mut bytes);
    read.context("cannot read the fabric from stdin")?;
    ensure!(bytes.len() as u64 <= FILE_MAX_BYTES, "stdin: the fabric has more than {} MiB", FILE_MAX_BYTES >> 20);
    // Node descriptions in dumps are arbitrary bytes from the devices.
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let fabric = Fabric::from_text(&text).context("stdin")?;
    Ok((fabric.with_devices_assumed(), Some(text)))
}

/// The fabric of a command that only reads it.
#[derive(Debug, Args)]
pub(crate) struct FabricArgs {
    /// Fabric description, told by its content: raw output of ibnetdiscover, an ibsim .net file, TOML, Slurm's
    /// topology.conf, or NetQ's topology graph in JSON; `-` reads it from stdin
    #[arg(long, value_name = "FILE", required = true)]
    topology: Option<PathBuf>,
    /// What is inside servers: a topology of NCCL in XML (NCCL_TOPO_DUMP_FILE), for the servers that match, as in
    /// `dgx-*=h100.xml`, or for the one whose adapters have its GUIDs; may be repeated
    #[arg(long, value_name = "[SERVER=]FILE")]
    inside: Vec<String>,
}

impl FabricArgs {
    /// Read the fabric, log its warnings, and join what is inside its servers.
    ///
    /// # Errors
    /// Invalid input, with the file's name.
    pub(crate) fn read(&self) -> Result<Fabric, Failure> {
        let Some(topology) = &self.topology else {
            return Err(Failure::Input(anyhow!("--topology: name the fabric's file, or - for stdin")));
        };
        let (mut fabric, _) = read(topology).map_err(Failure::Input)?;
        for warning in fabric.warnings() {
            tracing::warn!("{}: {warning}", topology.display());
        }
        for given in &self.inside {
            let (servers, file) = match given.split_once('=') {
                Some((servers, file)) => (Some(servers), file),
                None => (None, given.as_str()),
            };
            let inside = read_inside(Path::new(file)).map_err(Failure::Input)?;
            let joined = fabric.join_inside(servers, &inside).with_context(|| format!("--inside {given}"));
            let count = joined.map_err(Failure::Input)?.len();
            let (gpus, adapters) = (inside.gpus.len(), inside.adapters.len());
            note!("{file}: {gpus} GPUs and {adapters} adapters, inside {count} servers");
        }
        Ok(fabric)
    }
}

/// Read what is inside a server.
fn read_inside(path: &Path) -> anyhow::Result<Inside> {
    Inside::from_nccl(&read_text(path)?).with_context(|| path.display().to_string())
}

/// Read a text file of limited length.
///
/// # Errors
/// A message that names the file.
pub(crate) fn read_text(path: &Path) -> anyhow::Result<String> {
    let context = || path.display().to_string();
    let file = std::fs::File::open(path).with_context(context)?;
    let mut text = String::new();
    file.take(TEXT_MAX_BYTES + 1).read_to_string(&mut text).with_context(context)?;
    ensure!(text.len() as u64 <= TEXT_MAX_BYTES, "{}: more than {} MiB", path.display(), TEXT_MAX_BYTES >> 20);
    Ok(text)
}

/// Place devices in a fabric as an option says: in all switches, at the ports of `hosts`, or as a file lists them.
///
/// # Errors
/// Invalid input, with the file's name.
pub(crate) fn with_devices(
    fabric: &Fabric,
    devices: &str,
    hosts: impl Iterator<Item = HostId>,
) -> Result<Fabric, Failure> {
    let places = match devices {
        "switches" => fabric.switch_ids().map(DevicePlace::Switch).collect(),
        "hosts" => hosts.map(DevicePlace::Host).collect(),
        file => {
            let context = || format!("--devices {file}");
            let text = read_text(Path::new(file)).with_context(context).map_err(Failure::Input)?;
            fabric.read_devices(&text).with_context(context).map_err(Failure::Input)?
        }
    };
    fabric.with_devices(&places).map_err(Failure::input)
}

/// Read forwarding tables of a fabric from the text of a file.
///
/// # Errors
/// Invalid input, with the file's name.
pub(crate) fn routes(fabric: &Fabric, file: &Path, text: &str) -> Result<Routes, Failure> {
    fabric.read_routes(text).with_context(|| format!("--routes {}", file.display())).map_err(Failure::Input)
}

/// The longest file beside a fabric's, in bytes.
const TEXT_MAX_BYTES: u64 = 16 << 20;

/// The hosts of a tree.
#[derive(Debug, Args)]
#[group(skip)]
pub(crate) struct HostArgs {
    /// Hosts: the first N servers in natural name order, a list such as n1,n[4-7] of servers, adapters and GUIDs, or
    /// `all`; a server is one rank, whatever its adapters
    #[arg(long, value_name = "N|LIST", required_unless_present = "adapters")]
    hosts: Option<Which>,
    /// Hosts, by single adapters: each is a rank
    #[arg(long, value_name = "N|LIST", conflicts_with = "hosts")]
    adapters: Option<Which>,
    /// Servers, adapters or GUIDs to leave out, as in `n[1-4]` or `*-login-*`; may be repeated
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,
}

impl HostArgs {
    /// Take the hosts.
    ///
    /// # Errors
    /// Invalid input.
    pub(crate) fn take(&self, fabric: &Fabric) -> Result<Taken, Failure> {
        let (unit, which) = match (&self.hosts, &self.adapters) {
            (_, Some(which)) => (Unit::Adapter, which),
            (Some(which), None) => (Unit::Server, which),
            // clap requires one of them.
            (None, None) => (Unit::Server, &Which::All),
        };
        let selection = Selection { unit, which: which.clone(), exclude: self.exclude.clone() };
        selection.resolve(fabric).map_err(Failure::input)
    }
}
