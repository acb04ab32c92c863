//! Gives each prefix of a disk's write log to the decision which slot starts: power that fails after any write.
//!
//! ```text
//! replay BASE LOG                  check every prefix, and every torn write behind it
//! replay BASE LOG NUMBER FILE      write the disk after NUMBER writes
//! ```
//!
//! BASE is the disk before, LOG what QEMU's blklogwrites has recorded (the format of Linux's dm-log-writes:
//! Documentation/admin-guide/device-mapper/log-writes.rst). Before, slot A holds a confirmed version. Whatever the
//! firmware starts, A serves in the end, or B does with all of its payload, and never an older epoch.
//!
//! Reordered and lost writes are in the tests of `slots`.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::process::ExitCode;
use std::{env, fs};
use sumac_firmware::disk::{self, Found, Part};
use sumac_firmware::slots::{BootOrder, DISK_BLOCK_LEN_BYTES, Slot, Slots, Start, State, start};
use sumac_hal::flash::{BlockDevice, Geometry};

const MAGIC: u64 = 0x6a_7366_7773_6872;
const DISCARD: u64 = 4;
const SECTOR: usize = 512;

/// A write.
struct Write {
    at: usize,
    data: std::ops::Range<usize>,
}

/// Parse a log into its writes.
fn parse(log: &[u8]) -> Result<Vec<Write>, String> {
    let number = |at: usize| -> Result<u64, String> {
        let bytes = log.get(at..at + 8).ok_or_else(|| format!("the log ends at {at}"))?;
        Ok(u64::from_le_bytes(bytes.try_into().map_err(|_| "no number")?))
    };
    if number(0)? != MAGIC || number(8)? != 1 || number(24)? as u32 as usize != SECTOR {
        return Err("not a log of dm-log-writes, version 1, with sectors of 512 bytes".into());
    }
    let (entries, mut at, mut writes) = (number(16)?, SECTOR, Vec::new());
    for _ in 0..entries {
        let (sector, sectors, flags) = (number(at)? as usize, number(at + 8)? as usize, number(at + 16)?);
        at += SECTOR;
        if flags & DISCARD == 0 && sectors > 0 {
            let data = at..at + sectors * SECTOR;
            at = data.end;
            writes.push(Write { at: sector * SECTOR, data });
        }
    }
    if at > log.len() { Err("the log ends within a write".into()) } else { Ok(writes) }
}

/// A slot of a disk in memory, whose writes do not reach the disk.
struct Overlay<'a> {
    disk: &'a [u8],
    part: Part,
    written: BTreeMap<u32, Vec<u8>>,
}

impl BlockDevice for Overlay<'_> {
    type Error = Infallible;

    fn geometry(&self) -> Geometry {
        let blocks = (self.part.len_bytes / DISK_BLOCK_LEN_BYTES as u64) as u32;
        Geometry { block_len_bytes: DISK_BLOCK_LEN_BYTES, blocks }
    }

    fn read(&mut self, block: u32, buffer: &mut [u8]) -> Result<(), Infallible> {
        let at = self.part.offset as usize + block as usize * DISK_BLOCK_LEN_BYTES;
        buffer.copy_from_slice(&self.disk[at..at + buffer.len()]);
        for (piece, block) in buffer.chunks_mut(DISK_BLOCK_LEN_BYTES).zip(block..) {
            if let Some(data) = self.written.get(&block) {
                piece.copy_from_slice(data);
            }
        }
        Ok(())
    }

    fn write(&mut self, block: u32, data: &[u8]) -> Result<(), Infallible> {
        for (piece, block) in data.chunks(DISK_BLOCK_LEN_BYTES).zip(block..) {
            self.written.insert(block, piece.to_vec());
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Infallible> {
        Ok(())
    }
}

/// A disk that is only read.
#[derive(Debug)]
struct ReadOnly<'a>(Cursor<&'a [u8]>);

impl Read for ReadOnly<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Seek for ReadOnly<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.0.seek(to)
    }
}

impl io::Write for ReadOnly<'_> {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A boot order in memory.
#[derive(Default)]
struct Order {
    next: Option<Slot>,
    first: Option<Slot>,
}

impl BootOrder for Order {
    type Error = Infallible;

    fn try_once(&mut self, slot: Slot) -> Result<(), Infallible> {
        self.next = Some(slot);
        Ok(())
    }

    fn prefer(&mut self, slot: Slot) -> Result<(), Infallible> {
        self.first = Some(slot);
        Ok(())
    }
}

/// What serves in the end: the slot, its epoch, and whether it was ever on trial.
type Served = (Slot, u64, bool);

/// Start the disk as the firmware would, with a version in B that always panics or one that is good.
fn boot(disk: &[u8], is_b_good: bool) -> Result<Served, String> {
    let Found::Layout(layout) =
        disk::find(&mut ReadOnly(Cursor::new(disk)), SECTOR as u64).map_err(|error| error.to_string())?
    else {
        return Err("the partitions are gone".into());
    };
    let devices = layout.slots.map(|part| Overlay { disk, part, written: BTreeMap::new() });
    let mut slots = Slots::new(devices).map_err(|error| error.to_string())?;
    let mut order = Order { next: None, first: Some(Slot::A) };
    let mut tried = false;
    for _ in 0..10 {
        let running = order.next.take().or(order.first).unwrap_or(Slot::A);
        if running == Slot::B && !is_b_good {
            continue;
        }
        match start(&mut slots, running, order.first, &mut order).map_err(|error| error.to_string())? {
            Start::Run(selected) => {
                let record = &selected.record;
                if !slots.is_whole(selected.slot, record).map_err(|error| error.to_string())? {
                    return Err(format!("slot {} serves, but its payload is not that of its record", selected.slot));
                }
                tried |= record.state != State::Confirmed;
                return Ok((selected.slot, record.epoch, tried));
            }
            Start::Restart(_) => {}
            _ => return Err("unknown start".into()),
        }
    }
    Err("it restarts without end".into())
}

/// Check one state of the disk. Returns whether the version in B is on trial.
fn check(disk: &[u8], what: &str) -> Result<bool, String> {
    let fail = |why: String| format!("{what}: {why}");
    let (slot, epoch, _) = boot(disk, false).map_err(fail)?;
    if (slot, epoch) != (Slot::A, 1) {
        return Err(fail(format!("slot {slot} with epoch {epoch} serves, not A with 1")));
    }
    let (slot, epoch, tried) = boot(disk, true).map_err(fail)?;
    match (slot, epoch, tried) {
        (Slot::A, 1, false) => Ok(false),
        (Slot::B, 2, true) => Ok(true),
        other => Err(fail(format!("{other:?} serves, neither A with 1 nor B with 2, on trial"))),
    }
}

fn run(args: &[String]) -> Result<(), String> {
    let read = |path: &String| fs::read(path).map_err(|error| format!("{path}: {error}"));
    let [base, log, rest @ ..] = args else { return Err("usage: replay BASE LOG [NUMBER FILE]".into()) };
    let (mut disk, log) = (read(base)?, read(log)?);
    let writes = parse(&log)?;
    if let [number, path] = rest {
        let number = number.parse().map_err(|error| format!("{number}: {error}"))?;
        for write in writes.iter().take(number) {
            disk[write.at..][..write.data.len()].copy_from_slice(&log[write.data.clone()]);
        }
        return fs::write(path, &disk).map_err(|error| format!("{path}: {error}"));
    }
    let (mut checks, mut trials) = (0, 0);
    for (number, write) in writes.iter().enumerate() {
        let data = &log[write.data.clone()];
        let before = disk[write.at..][..data.len()].to_vec();
        // Torn between sectors, and within the first and the last one.
        for cut in [data.len() / 2 / SECTOR * SECTOR, SECTOR / 2, data.len() - SECTOR / 2] {
            disk[write.at..][..cut].copy_from_slice(&data[..cut]);
            trials += u32::from(check(&disk, &format!("write {number}, torn after {cut} of {} bytes", data.len()))?);
            disk[write.at..][..data.len()].copy_from_slice(&before);
            checks += 1;
        }
        disk[write.at..][..data.len()].copy_from_slice(data);
        trials += u32::from(check(&disk, &format!("after write {number}"))?);
        checks += 1;
    }
    if trials == 0 || trials == checks {
        return Err(format!("{trials} of {checks} states have the new version on trial: this log is no install"));
    }
    println!("{} writes, {checks} states: A or B serves in each, B in {trials}", writes.len());
    Ok(())
}

fn main() -> ExitCode {
    match run(&env::args().skip(1).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("replay: {error}");
            ExitCode::FAILURE
        }
    }
}
