//! The card's disks, from sysfs: which one has slots and a store, and which one may get them.

use crate::log::Log;
use crate::system;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use sumac_firmware::boot::{Partition, SlotLoader, lock_disk};
use sumac_firmware::disk::{self, DiskError, Found, Layout, Part, Permission};
use sumac_firmware::slots::{FileBlocks, Slot, SlotError, Slots};
use thiserror::Error;

/// How long to wait for a disk to appear.
const DISK_LIMIT: Duration = Duration::from_secs(15);

/// Devices that are no disks of a card, by the beginning of their names; eMMC's boot and replay-protected partitions,
/// by their end.
const NO_DISKS: [&str; 6] = ["loop", "ram", "zram", "dm-", "md", "sr"];
const NO_DISK_PARTS: [&str; 4] = ["boot0", "boot1", "rpmb", "gp0"];

/// Why no disk can be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DisksError {
    /// The folder of disks cannot be read.
    #[error("cannot list disks: {0}")]
    List(io::Error),
    /// The named disk, or any with slots, did not appear.
    #[error("no disk {0} appeared within {s} s", s = DISK_LIMIT.as_secs())]
    Missing(String),
    /// No disk is empty, or several are.
    #[error("no disk is chosen: {0}; name one with sumac.install=DISK")]
    Choice(String),
    /// The disk cannot be used.
    #[error("{path}: {source}")]
    Disk {
        /// The disk.
        path: String,
        /// The reason.
        source: DiskError,
    },
    /// A slot cannot be used.
    #[error("{0}")]
    Slots(#[from] SlotError<io::Error>),
    /// Another update is being written.
    #[error("{0}: another update is being written to it")]
    Busy(String),
    /// The disk has no partitions of ours.
    #[error("{0} has no slots: flash the card again")]
    NoSlots(String),
}

/// Where to install (`sumac.install=`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The disk, such as `/dev/nvme0n1`; `None`: the one that has slots, else the only empty one.
    pub disk: Option<PathBuf>,
    /// What may be done to it.
    pub permission: Permission,
}

impl Default for Target {
    fn default() -> Self {
        Self { disk: None, permission: Permission::IfEmpty }
    }
}

impl Target {
    /// Parse `auto`, `DISK` or `DISK,erase`.
    pub fn parse(text: &str) -> Option<Self> {
        let named = |disk: &str, permission| {
            let is_device = disk.starts_with("/dev/") && disk.len() > "/dev/".len();
            is_device.then(|| Self { disk: Some(disk.into()), permission })
        };
        match text.split_once(',') {
            None if text == "auto" => Some(Self::default()),
            None => named(text, Permission::Add),
            Some((disk, "erase")) => named(disk, Permission::Erase),
            Some(_) => None,
        }
    }
}

/// A disk with slots and a store.
#[derive(Debug, Clone)]
pub struct SlotDisk {
    /// The disk.
    pub path: PathBuf,
    /// Its partitions.
    pub layout: Layout,
}

impl SlotDisk {
    /// Find the disk with slots; wait for it.
    ///
    /// # Errors
    /// [`DisksError`].
    pub fn find(log: &Log) -> Result<Self, DisksError> {
        let missing = || DisksError::Missing("with slots".into());
        wait(|| with_slots(log)).and_then(|found| found.ok_or_else(missing))
    }

    /// Find the disk to install on, and make its partitions if there are none.
    ///
    /// # Errors
    /// [`DisksError`]; nothing is written then, unless writing itself failed.
    pub fn prepare(target: &Target, log: &Log) -> Result<Self, DisksError> {
        let path = match &target.disk {
            Some(path) => {
                let found = wait(|| Ok(path.exists().then(|| path.clone())))?;
                found.ok_or_else(|| DisksError::Missing(path.display().to_string()))?
            }
            None => choose(log)?,
        };
        let fail = |source| DisksError::Disk { path: path.display().to_string(), source };
        let mut file = open(&path).map_err(|error| fail(error.into()))?;
        let sector_bytes = sector_bytes(&path);
        let had = disk::find(&mut file, sector_bytes).map_err(fail)?;
        let layout = disk::prepare(&mut file, sector_bytes, target.permission).map_err(fail)?;
        file.sync_all().map_err(|error| fail(error.into()))?;
        if !matches!(had, Found::Layout(_)) {
            log.info(&format!("{}: new partitions for slots", path.display()));
        }
        Ok(Self { path, layout })
    }

    /// Return the slots of this disk.
    ///
    /// # Errors
    /// [`DisksError`].
    pub fn at(path: &Path) -> Result<Self, DisksError> {
        let fail = |source| DisksError::Disk { path: path.display().to_string(), source };
        let mut file = open(path).map_err(|error| fail(error.into()))?;
        match disk::find(&mut file, sector_bytes(path)).map_err(fail)? {
            Found::Layout(layout) => Ok(Self { path: path.into(), layout }),
            _ => Err(DisksError::NoSlots(path.display().to_string())),
        }
    }

    /// Open both slots as parts of the disk: the kernel may not know partitions yet that have just been made.
    ///
    /// # Errors
    /// [`DisksError`].
    pub fn slots(&self) -> Result<Slots<FileBlocks>, DisksError> {
        let [a, b] = self.layout.slots.map(|part| self.open(part));
        Ok(Slots::new([a?, b?])?)
    }

    /// Open both slots by their partitions' devices. Processes that use a slot at the same time have to use the same
    /// device: the kernel caches what is read from a disk apart from what is read from its partitions.
    ///
    /// # Errors
    /// [`DisksError`].
    pub fn partition_slots(&self) -> Result<Slots<FileBlocks>, DisksError> {
        let open = |part: Part| {
            let path = self.partition_path(part);
            let found = wait(|| Ok(path.exists().then_some(())))?;
            found.ok_or_else(|| DisksError::Missing(path.display().to_string()))?;
            FileBlocks::open(&path)
                .map_err(|error| DisksError::Disk { path: path.display().to_string(), source: error.into() })
        };
        let [a, b] = self.layout.slots.map(open);
        Ok(Slots::new([a?, b?])?)
    }

    /// Return the partition of a slot.
    pub fn partition(&self, slot: Slot) -> Partition {
        self.layout.slots[usize::from(slot == Slot::B)].partition
    }

    /// Return what starts the slots for updates while one of them runs: boot entries for these partitions and this
    /// command line.
    pub fn boot_loader<E>(&self, entries: E, running: Option<Slot>, command_line: &str) -> SlotLoader<E> {
        let partitions = self.layout.slots.map(|part| part.partition);
        SlotLoader::new(entries, running, partitions, command_line.to_owned()).on_disk(self.path.clone())
    }

    /// Keep others from writing slots, also other processes, until the file is dropped.
    ///
    /// # Errors
    /// [`DisksError::Busy`], or the disk cannot be opened.
    pub fn lock(&self) -> Result<File, DisksError> {
        let path = || self.path.display().to_string();
        lock_disk(&self.path).map_err(|error| match error {
            None => DisksError::Busy(path()),
            Some(source) => DisksError::Disk { path: path(), source: source.into() },
        })
    }

    /// Open the store.
    ///
    /// # Errors
    /// [`DisksError`].
    pub fn open_store(&self) -> Result<FileBlocks, DisksError> {
        self.open(self.layout.store)
    }

    /// Return the store's device, once the kernel has read the partition table.
    pub fn store_path(&self) -> PathBuf {
        self.partition_path(self.layout.store)
    }

    /// Return a partition's device, once the kernel has read the partition table.
    fn partition_path(&self, part: Part) -> PathBuf {
        let disk = self.path.display().to_string();
        let separator = if disk.ends_with(|last: char| last.is_ascii_digit()) { "p" } else { "" };
        PathBuf::from(format!("{disk}{separator}{}", part.partition.number))
    }

    fn open(&self, part: Part) -> Result<FileBlocks, DisksError> {
        FileBlocks::open_range(&self.path, part.offset, part.len_bytes)
            .map_err(|error| DisksError::Disk { path: self.path.display().to_string(), source: error.into() })
    }
}

/// Choose the disk with slots, else the only empty one.
fn choose(log: &Log) -> Result<PathBuf, DisksError> {
    // The first disk is not waited for longer than necessary, but a later one may be the one with slots.
    wait(|| Ok(disks()?.first().cloned()))?;
    if let Some(found) = with_slots(log)? {
        return Ok(found.path);
    }
    let (mut empty, mut seen) = (Vec::new(), Vec::new());
    for path in disks()? {
        let found =
            open(&path).map_err(DiskError::from).and_then(|mut file| disk::find(&mut file, sector_bytes(&path)));
        seen.push(match found {
            Ok(Found::Empty) => {
                empty.push(path.clone());
                format!("{} is empty", path.display())
            }
            Ok(Found::Table(count)) => format!("{} has {count} partitions of another system", path.display()),
            Ok(_) => format!("{} is not empty", path.display()),
            Err(error) => format!("{}: {error}", path.display()),
        });
    }
    match &empty[..] {
        [path] => Ok(path.clone()),
        _ if seen.is_empty() => Err(DisksError::Choice("there is none".into())),
        _ => Err(DisksError::Choice(seen.join(", "))),
    }
}

fn with_slots(log: &Log) -> Result<Option<SlotDisk>, DisksError> {
    let mut found = Vec::new();
    for path in disks()? {
        // What cannot be read has no slots; it may be an empty drive of removable media.
        let Ok(mut file) = open(&path) else { continue };
        if let Ok(Found::Layout(layout)) = disk::find(&mut file, sector_bytes(&path)) {
            found.push(SlotDisk { path, layout });
        }
    }
    if let [first, _, ..] = &found[..] {
        log.warn(&format!("several disks have slots; using {}", first.path.display()));
    }
    Ok(found.into_iter().next())
}

/// Return the disks, in the order of their names.
fn disks() -> Result<Vec<PathBuf>, DisksError> {
    let names = fs::read_dir("/sys/block").map_err(DisksError::List)?;
    let mut names: Vec<String> = names.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.retain(|name| {
        !NO_DISKS.iter().any(|kind| name.starts_with(kind)) && !NO_DISK_PARTS.iter().any(|part| name.ends_with(part))
    });
    names.sort();
    Ok(names.into_iter().map(|name| Path::new("/dev").join(name)).filter(|path| path.exists()).collect())
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path).or_else(|_| File::open(path))
}

/// Return the length of a disk's sectors in bytes.
fn sector_bytes(path: &Path) -> u64 {
    let name = path.file_name().unwrap_or_default();
    let file = Path::new("/sys/block").join(name).join("queue/logical_block_size");
    // What is no device is a file.
    fs::read_to_string(file).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(512)
}

/// Look again when a device appears, until there is something, or time is up.
fn wait<T>(mut look: impl FnMut() -> Result<Option<T>, DisksError>) -> Result<Option<T>, DisksError> {
    let mut result = Ok(None);
    let watched = system::wait_until(Path::new("/dev"), DISK_LIMIT, || {
        result = look();
        !matches!(result, Ok(None))
    });
    watched.map_err(DisksError::List)?;
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_names_a_device_or_nothing() {
        assert_eq!(Target::parse("auto"), Some(Target::default()));
        let named = |permission| Some(Target { disk: Some("/dev/nvme0n1".into()), permission });
        assert_eq!(Target::parse("/dev/nvme0n1"), named(Permission::Add));
        assert_eq!(Target::parse("/dev/nvme0n1,erase"), named(Permission::Erase));
        for bad in ["", "nvme0n1", "/dev/", "/dev/nvme0n1,wipe", "auto,erase"] {
            assert_eq!(Target::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn slots_and_store_of_a_file_are_found_where_they_were_made() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("disk0");
        File::create(&path).and_then(|file| file.set_len(300 << 20)).expect("made");
        let log = Log::new([]);
        let target = Target { disk: Some(path.clone()), permission: Permission::IfEmpty };
        let made = SlotDisk::prepare(&target, &log).expect("made");
        let again = SlotDisk::prepare(&target, &log).expect("there");
        assert_eq!(made.layout, again.layout);
        assert_eq!(made.slots().expect("open").capacity_bytes(Slot::B), made.layout.slots[1].len_bytes - 8192);
        assert!(made.store_path().ends_with("disk0p3"));
        assert!(made.partition_path(made.layout.slots[1]).ends_with("disk0p2"));
        made.open_store().expect("open");
        assert_eq!(SlotDisk::at(&path).expect("there").layout, made.layout);
        fs::write(&path, "data").expect("written");
        let error = SlotDisk::prepare(&target, &log).expect_err("foreign").to_string();
        assert!(error.contains("disk0") && error.contains("erase"), "{error}");
        let error = SlotDisk::at(&path).expect_err("nothing there").to_string();
        assert!(error.contains("disk0 has no slots"), "{error}");
    }
}
