//! Resources that processes leave behind: memory and descriptors of a device, names of sockets, files.

use super::LONG;
use rustix::process::Pid;
use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

/// How often to poll.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The external resources that a device holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceMemory {
    /// Mappings of shared memory: of ranks, of its redo slots, and of rings.
    pub(crate) mappings: usize,
    /// Open descriptors.
    pub(crate) files: usize,
}

impl DeviceMemory {
    pub(crate) fn of(device: Pid) -> Self {
        let process = format!("/proc/{}", device.as_raw_pid());
        let maps = fs::read_to_string(format!("{process}/maps")).expect("running");
        let mappings = maps.lines().filter(|line| line.contains("memfd:sumac-")).count();
        Self { mappings, files: fs::read_dir(format!("{process}/fd")).expect("running").count() }
    }

    /// Wait until a device holds no more than before; it may have fewer descriptors.
    pub(crate) fn wait_for(self, device: Pid, context: &str) {
        let is_so = wait_until(|| {
            let now = Self::of(device);
            now.mappings == self.mappings && now.files <= self.files
        });
        assert!(is_so, "{context}: the device holds {:?}, and held {self:?}", Self::of(device));
    }
}

/// Names of sockets in the abstract namespace.
#[derive(Debug)]
pub(crate) struct Sockets(BTreeSet<String>);

impl Sockets {
    /// Return the names of a device's sockets.
    pub(crate) fn of(device: Pid) -> Self {
        let files = fs::read_dir(format!("/proc/{}/fd", device.as_raw_pid())).expect("running");
        let links = files.flatten().filter_map(|file| fs::read_link(file.path()).ok());
        let own: BTreeSet<_> = links.map(|link| link.to_string_lossy().into_owned()).collect();
        Self(named().filter(|(inode, _)| own.contains(&format!("socket:[{inode}]"))).map(|(_, name)| name).collect())
    }

    /// Wait until no socket of these names exists.
    pub(crate) fn wait_until_gone(&self, context: &str) {
        assert!(!self.0.is_empty(), "{context}: the device has no named socket");
        assert!(wait_until(|| named().all(|(_, name)| !self.0.contains(&name))), "{context}: {:?} is left", self.0);
    }
}

/// Return the inodes and names of all sockets of this project.
fn named() -> impl Iterator<Item = (String, String)> {
    let sockets = fs::read_to_string("/proc/net/unix").expect("/proc");
    let lines = sockets.lines().map(|line| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    let named: Vec<_> = lines.filter_map(|words| Some((words.get(6)?.clone(), words.get(7)?.clone()))).collect();
    named.into_iter().filter(|(_, name)| name.starts_with("@sumac-"))
}

/// Return the names of this project's files in `/dev/shm`. There should be none.
pub(crate) fn dev_shm() -> Vec<String> {
    // A system may lack the folder.
    let files = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    files.map(|file| file.file_name().to_string_lossy().into_owned()).filter(|name| name.contains("sumac")).collect()
}

/// Poll until the condition holds. Returns false if it does not hold in time.
fn wait_until(mut is_so: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    true
}
