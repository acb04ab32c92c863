//! The boot entries of a card that is updated while it runs from one of its slots.

use super::entries::BootEntries;
use super::load_option::Partition;
use crate::slots::{BootLoader, BootOrder, Slot};
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a slot cannot be written or started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoaderError<E> {
    /// The boot entries cannot be read or set.
    #[error(transparent)]
    Entries(E),
    /// The disk cannot be used.
    #[error("{path}: {source}")]
    Disk {
        /// The disk.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// Another update is being written.
    #[error("{0}: another update is being written to it")]
    Busy(String),
}

/// Exclude other writers of a disk's slots, also those of other processes, until the file is dropped.
///
/// # Errors
/// `None`: another one writes. Otherwise the system's error.
pub fn lock_disk(path: &Path) -> Result<File, Option<io::Error>> {
    let file = File::open(path).map_err(Some)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(None),
        Err(errno) => Err(Some(errno.into())),
    }
}

/// A boot order that also sets the entry of the slot that is written next.
#[derive(Debug)]
pub struct SlotLoader<E> {
    entries: E,
    running: Option<Slot>,
    partitions: [Partition; 2],
    command_line: String,
    disk: Option<PathBuf>,
}

impl<E> SlotLoader<E> {
    /// Use these entries for slots on these partitions. `running` is the slot that runs, if one does, and
    /// `command_line` that of the running kernel.
    pub const fn new(entries: E, running: Option<Slot>, partitions: [Partition; 2], command_line: String) -> Self {
        Self { entries, running, partitions, command_line, disk: None }
    }

    /// Exclude other processes that write slots of this disk ([`lock_disk`]).
    #[must_use]
    pub fn on_disk(mut self, path: PathBuf) -> Self {
        self.disk = Some(path);
        self
    }
}

impl<E: BootEntries> BootOrder for SlotLoader<E> {
    type Error = LoaderError<E::Error>;

    fn try_once(&mut self, slot: Slot) -> Result<(), Self::Error> {
        self.entries.try_once(slot).map_err(LoaderError::Entries)
    }

    fn prefer(&mut self, slot: Slot) -> Result<(), Self::Error> {
        self.entries.prefer(slot).map_err(LoaderError::Entries)
    }
}

impl<E: BootEntries> BootLoader for SlotLoader<E> {
    type Lock = Option<File>;

    const READS_RECORDS: bool = false;

    fn lock(&mut self) -> Result<Option<File>, Self::Error> {
        let Some(path) = &self.disk else { return Ok(None) };
        let name = || path.display().to_string();
        lock_disk(path).map(Some).map_err(|error| match error {
            None => LoaderError::Busy(name()),
            Some(source) => LoaderError::Disk { path: name(), source },
        })
    }

    fn prepare(&mut self, slot: Slot) -> Result<(), Self::Error> {
        // What runs may have been confirmed this moment, and be about to move to the front.
        if self.running == Some(slot.other()) {
            self.prefer(slot.other())?;
        }
        let [a, b] = self.partitions;
        let partition = if slot == Slot::A { a } else { b };
        self.entries.set_entry(slot, partition, &self.command_line).map_err(LoaderError::Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::{EfiBootOrder, Variables};
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::rc::Rc;

    /// Variables; copies are the same ones.
    #[derive(Debug, Default, Clone)]
    struct Memory(Rc<RefCell<BTreeMap<String, Vec<u8>>>>);

    impl Variables for Memory {
        fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
            Ok(self.0.borrow().get(name).cloned())
        }

        fn write(&mut self, name: &str, value: &[u8]) -> io::Result<()> {
            self.0.borrow_mut().insert(name.into(), value.into());
            Ok(())
        }

        fn remove(&mut self, name: &str) -> io::Result<()> {
            self.0.borrow_mut().remove(name);
            Ok(())
        }
    }

    fn loader(running: Option<Slot>) -> SlotLoader<EfiBootOrder<Memory>> {
        loader_with(running, Memory::default())
    }

    fn loader_with(running: Option<Slot>, variables: Memory) -> SlotLoader<EfiBootOrder<Memory>> {
        let partition = |number| Partition { number, start: 2048, blocks: 64, guid: [number as u8; 16] };
        let mut order = EfiBootOrder::new(variables);
        for (slot, number) in [(Slot::A, 1), (Slot::B, 2)] {
            order.set_entry(slot, partition(number), "console=hvc0").expect("set");
        }
        SlotLoader::new(order, running, [partition(1), partition(5)], "console=hvc0".into())
    }

    #[test]
    fn running_slot_is_in_front_before_the_other_one_is_written() {
        let mut started = loader(Some(Slot::B));
        started.prefer(Slot::A).expect("set");
        started.prepare(Slot::A).expect("set");
        assert_eq!(started.entries.preferred().expect("read"), Some(Slot::B));
        // Started over rshim: no slot runs.
        let mut from_memory = loader(None);
        from_memory.prefer(Slot::A).expect("set");
        from_memory.prepare(Slot::A).expect("set");
        assert_eq!(from_memory.entries.preferred().expect("read"), None);
    }

    #[test]
    fn entry_of_the_written_slot_gets_its_own_partition() {
        for (running, written, guid) in [(Slot::B, Slot::A, 1), (Slot::A, Slot::B, 5)] {
            let variables = Memory::default();
            let mut loader = loader_with(Some(running), variables.clone());
            let before = variables.0.borrow().clone();
            // The tables of the disk are others than when it was installed.
            loader.partitions[running as usize] = Partition { number: 9, start: 1, blocks: 1, guid: [9; 16] };
            loader.prepare(written).expect("set");
            let after = variables.0.borrow().clone();
            let has = |bytes: &[u8]| bytes.windows(16).any(|window| window == [guid; 16]);
            let entries = after.iter().filter(|(name, bytes)| name.len() == 8 && has(bytes));
            assert_eq!(entries.count(), 1, "slot {written}: {before:?}, {after:?}");
            assert!(!after.values().any(|bytes| bytes.windows(16).any(|window| window == [9; 16])));
        }
    }

    #[test]
    fn second_writer_of_a_disk_is_refused_until_the_first_has_ended() {
        let disk = tempfile::NamedTempFile::new().expect("a file");
        let [mut first, mut second] = [Some(Slot::A), None].map(|slot| loader(slot).on_disk(disk.path().into()));
        let lock = first.lock().expect("free");
        assert!(matches!(second.lock(), Err(LoaderError::Busy(_))));
        assert!(matches!(lock_disk(disk.path()), Err(None)));
        drop(lock);
        drop(second.lock().expect("free again"));
        let mut absent = loader(None).on_disk("/dev/absent-disk".into());
        assert!(matches!(absent.lock(), Err(LoaderError::Disk { .. })));
        assert!(loader(None).lock().expect("nobody else").is_none());
    }
}
