//! The partitions of slots and store on a card's disk: eMMC or NVMe.
//!
//! ```text
//! sumac-a      a slot     64 MiB to 1 GiB, half of the free space each
//! sumac-b      a slot
//! sumac-store  the store  1 MiB
//! ```
//!
//! Partitions are found by type GUID and name, wherever they are. Slots are in free space: on an empty disk, or behind
//! the partitions of another system, which stay as they are. Nothing is erased unless the operator says so
//! ([`Permission::Erase`]).
//!
//! Invariants: a disk that is neither empty nor readable as a GUID partition table is foreign, whatever is on it.
//! Partitions of others keep their numbers.

use crate::boot::Partition;
use gpt::disk::LogicalBlockSize;
use gpt::mbr::ProtectiveMBR;
use gpt::partition_types::{OperatingSystem, Type};
use gpt::{GptConfig, GptDisk};
use std::fmt::Debug;
use std::io::{self, Read, Seek, SeekFrom, Write};
use thiserror::Error;
use uuid::{Uuid, uuid};

/// The partition type of a slot. Not that of an EFI system partition, which firmware and other systems look into.
pub const SLOT_TYPE: Uuid = uuid!("5d0c3a1e-7b52-4f0e-9c61-8a4be2d7f310");
/// The partition type of a store.
pub const STORE_TYPE: Uuid = uuid!("c2f4a8b6-0e93-4d7a-b185-3f6e9d21c704");
/// The partitions' names.
pub const NAMES: [&str; 3] = ["sumac-a", "sumac-b", "sumac-store"];

const MIB: u64 = 1 << 20;
const STORE_BYTES: u64 = MIB;
const SLOT_MIN_BYTES: u64 = 64 * MIB;
const SLOT_MAX_BYTES: u64 = 1024 * MIB;
/// What is read at either end of a disk to find out whether it is empty, in bytes: all partition tables and most file
/// systems begin or end there.
const PROBE_BYTES: u64 = MIB;

/// A disk: a block device or a file.
pub trait Disk: Read + Write + Seek + Debug {}
impl<D: Read + Write + Seek + Debug> Disk for D {}

/// A partition of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// As a boot entry names it.
    pub partition: Partition,
    /// Its offset in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
}

/// The partitions of slots and store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The slots, A and B.
    pub slots: [Part; 2],
    /// The store.
    pub store: Part,
}

/// What is on a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// Our partitions.
    Layout(Layout),
    /// Nothing.
    Empty,
    /// A partition table without our partitions; the number of partitions.
    Table(usize),
    /// Anything else.
    Unknown,
}

/// What may be done to a disk that has no partitions of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Permission {
    /// Use it only if it is empty.
    IfEmpty,
    /// Also add partitions in the free space of a partition table.
    Add,
    /// Erase whatever is there.
    Erase,
}

/// Why a disk cannot be used. No message names the disk, which the caller knows.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DiskError {
    /// It cannot be read or written.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Its partition table cannot be read or written.
    #[error("{0}")]
    Table(#[from] gpt::GptError),
    /// A protective record cannot be written.
    #[error("{0}")]
    Mbr(#[from] gpt::mbr::MBRError),
    /// Its sectors have an unsupported length.
    #[error("sectors of {0} bytes; 512 and 4096 are supported")]
    Sector(u64),
    /// Something else is on it.
    #[error("{0}; to erase it, name it with sumac.install=DISK,erase")]
    Foreign(String),
    /// There is no room.
    #[error(
        "{free} MiB are free, and {} MiB are required; to erase what is there, name the disk with sumac.install=DISK,erase",
        (2 * SLOT_MIN_BYTES + STORE_BYTES) / MIB
    )]
    Room {
        /// The length of the largest free part in MiB.
        free: u64,
    },
    /// Adding partitions would give others new numbers.
    #[error(
        "the numbers of its partitions have gaps, and adding some would change them; erase it with sumac.install=DISK,erase"
    )]
    Gaps,
}

/// Return what is on a disk with sectors of this length.
///
/// # Errors
/// [`DiskError`].
pub fn find(disk: &mut impl Disk, sector_bytes: u64) -> Result<Found, DiskError> {
    let Ok(table) = GptConfig::new().logical_block_size(sector(sector_bytes)?).open_from_device(&mut *disk) else {
        return Ok(if is_empty(disk)? { Found::Empty } else { Found::Unknown });
    };
    let part = |name: &str| {
        let kind = if name == NAMES[2] { STORE_TYPE } else { SLOT_TYPE };
        let mut partitions = table.partitions().iter();
        let (number, found) =
            partitions.find(|(_, partition)| partition.part_type_guid.guid == kind && partition.name == name)?;
        let (start, blocks) = (found.first_lba, found.last_lba.checked_sub(found.first_lba)?.checked_add(1)?);
        let partition = Partition { number: *number, start, blocks, guid: found.part_guid.to_bytes_le() };
        let bytes = |blocks: u64| blocks.checked_mul(sector_bytes);
        Some(Part { partition, offset: bytes(start)?, len_bytes: bytes(blocks)? })
    };
    Ok(match NAMES.map(part) {
        [Some(a), Some(b), Some(store)] => Found::Layout(Layout { slots: [a, b], store }),
        _ => Found::Table(table.partitions().len()),
    })
}

/// Return the partitions of a disk, and make them if there are none and `permission` allows it.
///
/// # Errors
/// [`DiskError`]; the disk is unchanged unless writing failed.
pub fn prepare(disk: &mut impl Disk, sector_bytes: u64, permission: Permission) -> Result<Layout, DiskError> {
    match (find(disk, sector_bytes)?, permission) {
        (Found::Layout(layout), _) => return Ok(layout),
        (Found::Empty, _) | (_, Permission::Erase) => create(disk, sector_bytes)?,
        (Found::Table(_), Permission::Add) => add(disk, sector_bytes)?,
        (Found::Table(count), Permission::IfEmpty) => {
            let what =
                format!("it has {count} partitions of another system; name it with sumac.install=DISK to add ours");
            return Err(DiskError::Foreign(what));
        }
        (Found::Unknown, _) => {
            return Err(DiskError::Foreign("it is not empty and has no GUID partition table".into()));
        }
    }
    match find(disk, sector_bytes)? {
        Found::Layout(layout) => Ok(layout),
        _ => Err(io::Error::other("the partitions do not read back as written").into()),
    }
}

fn sector(bytes: u64) -> Result<LogicalBlockSize, DiskError> {
    match bytes {
        512 => Ok(LogicalBlockSize::Lb512),
        4096 => Ok(LogicalBlockSize::Lb4096),
        other => Err(DiskError::Sector(other)),
    }
}

fn is_empty(disk: &mut impl Disk) -> Result<bool, DiskError> {
    let len_bytes = disk.seek(SeekFrom::End(0))?;
    for start in [0, len_bytes.saturating_sub(PROBE_BYTES)] {
        let mut piece = Vec::new();
        disk.seek(SeekFrom::Start(start))?;
        Read::by_ref(disk).take(PROBE_BYTES).read_to_end(&mut piece)?;
        if piece.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Make a new partition table.
fn create(disk: &mut impl Disk, sector_bytes: u64) -> Result<(), DiskError> {
    let sectors = disk.seek(SeekFrom::End(0))? / sector_bytes;
    let config = GptConfig::new().writable(true).logical_block_size(sector(sector_bytes)?);
    let mut table = config.create_from_device(&mut *disk, None)?;
    add_to(&mut table, sector_bytes)?;
    table.write()?;
    // Last: until then, an interrupted run leaves no table that other systems would take for complete.
    ProtectiveMBR::with_lb_size(u32::try_from(sectors - 1).unwrap_or(u32::MAX)).overwrite_lba0(disk)?;
    Ok(disk.flush()?)
}

/// Add the partitions to a table.
fn add(disk: &mut impl Disk, sector_bytes: u64) -> Result<(), DiskError> {
    let config = GptConfig::new().writable(true).logical_block_size(sector(sector_bytes)?);
    let mut table = config.open_from_device(&mut *disk)?;
    // The library numbers partitions anew when it writes them.
    if !table.partitions().keys().copied().eq(1..=table.partitions().len() as u32) {
        return Err(DiskError::Gaps);
    }
    add_to(&mut table, sector_bytes)?;
    table.write()?;
    Ok(disk.flush()?)
}

fn add_to<D: Disk>(table: &mut GptDisk<D>, sector_bytes: u64) -> Result<(), DiskError> {
    let alignment = MIB / sector_bytes;
    let mut free = 0;
    for (start, len) in table.find_free_sectors() {
        let aligned = len.saturating_sub(start.wrapping_neg() % alignment);
        free = free.max(aligned * sector_bytes);
    }
    let slot = (free.saturating_sub(STORE_BYTES) / 2 / MIB * MIB).min(SLOT_MAX_BYTES);
    if slot < SLOT_MIN_BYTES {
        return Err(DiskError::Room { free: free / MIB });
    }
    // All in the largest free part: the store, being small, would otherwise come first.
    for (name, len_bytes, kind) in
        [(NAMES[0], slot, SLOT_TYPE), (NAMES[1], slot, SLOT_TYPE), (NAMES[2], STORE_BYTES, STORE_TYPE)]
    {
        let kind = Type { guid: kind, os: OperatingSystem::Custom("Sumac".into()) };
        table.add_partition(name, len_bytes, kind, 0, Some(alignment))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    const LEN: usize = 200 << 20;

    fn empty() -> Cursor<Vec<u8>> {
        Cursor::new(vec![0; LEN])
    }

    /// A disk with two partitions of another system, of which the second ends at this MiB.
    fn foreign(end_mib: u64) -> Cursor<Vec<u8>> {
        let mut disk = empty();
        let mut table = GptConfig::new().writable(true).create_from_device(&mut disk, None).expect("a table");
        for (name, mib) in [("boot", 10), ("root", end_mib - 11)] {
            table.add_partition(name, mib << 20, gpt::partition_types::LINUX_FS, 0, Some(2048)).expect("room");
        }
        table.write().expect("written");
        ProtectiveMBR::new().overwrite_lba0(&mut disk).expect("written");
        disk
    }

    fn names(disk: &mut Cursor<Vec<u8>>) -> Vec<(u32, String)> {
        let table = GptConfig::new().open_from_device(disk).expect("a table");
        table.partitions().iter().map(|(number, part)| (*number, part.name.clone())).collect()
    }

    #[test]
    fn empty_disk_gets_partitions_that_are_found_again() {
        for sector_bytes in [512, 4096] {
            let mut disk = empty();
            assert_eq!(find(&mut disk, sector_bytes).expect("readable"), Found::Empty);
            let layout = prepare(&mut disk, sector_bytes, Permission::IfEmpty).expect("made");
            assert_eq!(find(&mut disk, sector_bytes).expect("readable"), Found::Layout(layout.clone()));
            let before = disk.get_ref().clone();
            assert_eq!(prepare(&mut disk, sector_bytes, Permission::Erase).expect("there"), layout);
            assert!(*disk.get_ref() == before, "a layout that exists is not written");
            let Layout { slots: [a, b], store } = layout;
            assert!(a.len_bytes == b.len_bytes && a.len_bytes >= 98 << 20, "{a:?}");
            for (part, next) in [(a, b.offset), (b, store.offset), (store, LEN as u64 - (1 << 20))] {
                assert!(part.offset % MIB == 0 && part.len_bytes % MIB == 0 && part.offset + part.len_bytes <= next);
            }
            assert_eq!(a.offset, a.partition.start * sector_bytes);
            assert_eq!([a, b, store].map(|part| part.partition.number), [1, 2, 3]);
        }
    }

    #[test]
    fn another_systems_table_is_kept_unless_erased() {
        let mut disk = foreign(40);
        let before = disk.get_ref().clone();
        assert_eq!(find(&mut disk, 512).expect("readable"), Found::Table(2));
        let error = prepare(&mut disk, 512, Permission::IfEmpty).expect_err("foreign").to_string();
        assert!(error.contains("2 partitions of another system") && error.contains("erase"), "{error}");
        assert!(*disk.get_ref() == before, "nothing is written");
        let layout = prepare(&mut disk, 512, Permission::Add).expect("added");
        let expected = ["boot", "root"].into_iter().chain(NAMES).zip(1..).map(|(name, at)| (at, name.to_owned()));
        assert_eq!(names(&mut disk), expected.collect::<Vec<_>>());
        assert!(layout.slots[0].offset >= 39 << 20 && layout.slots[0].partition.number == 3, "{layout:?}");
        let mut full = foreign(150);
        let before = full.get_ref().clone();
        assert!(matches!(prepare(&mut full, 512, Permission::Add), Err(DiskError::Room { free: 49 | 50 })));
        assert!(*full.get_ref() == before, "nothing is written");
        prepare(&mut full, 512, Permission::Erase).expect("erased");
        assert_eq!(names(&mut full).len(), 3);
    }

    #[test]
    fn unknown_contents_are_not_empty_wherever_they_are() {
        for at in [0, 440, (1 << 20) - 1, LEN - 1, LEN - (1 << 20)] {
            let mut disk = empty();
            disk.get_mut()[at] = 1;
            assert_eq!(find(&mut disk, 512).expect("readable"), Found::Unknown, "byte {at}");
            for permission in [Permission::IfEmpty, Permission::Add] {
                assert!(matches!(prepare(&mut disk, 512, permission), Err(DiskError::Foreign(_))), "byte {at}");
            }
        }
        assert!(matches!(find(&mut empty(), 520), Err(DiskError::Sector(520))));
        let mut small = Cursor::new(vec![0; 100 << 20]);
        assert!(matches!(prepare(&mut small, 512, Permission::Erase), Err(DiskError::Room { .. })));
        assert!(small.get_ref().iter().all(|byte| *byte == 0), "nothing is written");
    }

    #[test]
    fn gaps_between_numbers_are_refused() {
        let mut disk = foreign(40);
        // Delete the first entry as other tools do: the second one keeps its number. Checksums: UEFI Specification
        // 2.10, 5.3.2.
        let crc = |bytes: &[u8]| (crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, bytes) as u32).to_le_bytes();
        let bytes = disk.get_mut();
        bytes[1024..1152].fill(0);
        let entries = crc(&bytes[1024..1024 + 128 * 128]);
        bytes[512 + 88..512 + 92].copy_from_slice(&entries);
        bytes[512 + 16..512 + 20].fill(0);
        let header = crc(&bytes[512..512 + 92]);
        bytes[512 + 16..512 + 20].copy_from_slice(&header);
        assert_eq!(names(&mut disk), [(2, "root".to_owned())]);
        let before = disk.get_ref().clone();
        assert!(matches!(prepare(&mut disk, 512, Permission::Add), Err(DiskError::Gaps)));
        assert!(*disk.get_ref() == before, "nothing is written");
    }

    #[test]
    fn damaged_primary_table_is_still_a_table() {
        let mut disk = foreign(40);
        disk.get_mut()[512] ^= 1;
        assert_eq!(find(&mut disk, 512).expect("readable"), Found::Table(2));
    }
}
