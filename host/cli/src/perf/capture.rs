//! `--pcap`: each device captures its packets to a file of its own; at the end of the run they become one.
//!
//! pcapng files that follow each other are one file with several sections, so nothing has to be parsed.
//!
//! Invariants: FILE is created or replaced only when it is complete, and nothing else remains beside it; only its owner
//! can read it.

use super::args::PerfArgs;
use crate::cluster::{ChildId, Limit, Supervisor};
use crate::exit::Failure;
use crate::layout::Layout;
use crate::options::Transport;
use anyhow::{Context, anyhow, ensure};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::{NamedTempFile, TempDir};

/// How long a device may take to end, and to write the rest of its capture.
const END_LIMIT: Duration = Duration::from_secs(20);

/// The captures of a run's devices.
#[derive(Debug)]
pub(super) struct Capture {
    path: PathBuf,
    /// The devices' captures, beside the result, where there must be room for as much.
    folder: TempDir,
    devices: usize,
}

impl Capture {
    /// Prepare the capture that the options request.
    ///
    /// # Errors
    /// The file cannot be created, or there would be no packets.
    pub(super) fn prepare(args: &PerfArgs, layout: &Layout) -> Result<Option<Self>, Failure> {
        let Some(path) = &args.pcap else { return Ok(None) };
        let devices = layout.devices.len();
        Self::create(path, devices, args.transport()).map(Some).map_err(Failure::Input)
    }

    fn create(path: &Path, devices: usize, transport: Transport) -> anyhow::Result<Self> {
        let is_without_packets = devices == 1 && !matches!(transport, Transport::Udp | Transport::Verbs);
        ensure!(
            !is_without_packets,
            "--pcap: with --transport {transport}, this run sends no packets, because its only device accesses the \
             ranks' memory; use --transport udp"
        );
        ensure!(!path.is_dir(), "--pcap {}: is a directory; name a file in it", path.display());
        let folder = tempfile::Builder::new().prefix(".sumac-perf-").tempdir_in(parent(path));
        let folder = folder.with_context(|| format!("--pcap {}: cannot write there", path.display()))?;
        Ok(Self { path: path.into(), folder, devices })
    }

    /// Return the option of each device that begins its capture.
    pub(super) fn device_options(&self) -> impl Iterator<Item = (usize, Vec<String>)> + '_ {
        (0..self.devices).map(|device| (device, vec![format!("--pcap={}", self.of(device).display())]))
    }

    fn of(&self, device: usize) -> PathBuf {
        self.folder.path().join(device.to_string())
    }

    /// End the devices, which writes the rest of their captures, and write the file. Other children may end as well.
    ///
    /// # Errors
    /// A device failed or did not end, or the file cannot be written; it then is as it was.
    pub(super) fn finish(self, supervisor: &mut Supervisor, devices: &[ChildId]) -> Result<(), Failure> {
        devices.iter().try_for_each(|&device| supervisor.terminate(device))?;
        for &device in devices {
            let (status, _) = supervisor.ending(device, Limit::new(END_LIMIT))?;
            if !status.success() {
                let name = supervisor.name(device);
                return Err(Failure::Run(anyhow!("no capture is written: {name} ended with {status}")));
            }
        }
        self.write().map_err(Failure::Run)
    }

    fn write(&self) -> anyhow::Result<()> {
        let all = || -> io::Result<NamedTempFile> {
            let mut all = NamedTempFile::new_in(self.folder.path())?;
            for device in 0..self.devices {
                io::copy(&mut File::open(self.of(device))?, &mut all)?;
            }
            all.as_file().sync_all()?;
            Ok(all)
        };
        let failed = || format!("--pcap {}: cannot write the capture", self.path.display());
        all().with_context(failed)?.persist(&self.path).map(drop).with_context(failed)
    }
}

/// Return the folder of a file.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
