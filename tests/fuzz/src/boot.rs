//! Boot-time input of a device: boot streams and their manifests, boot partitions, update slots, and board options.
//!
//! Input: a byte of options (bit 0: write valid checksums; bits 1 to 3: the kind of input), then its bytes.

use crate::Cursor;
use std::convert::Infallible;
use std::io::Read;
use sumac_firmware::bfb::{self, HEADER_LEN_BYTES};
use sumac_firmware::emmc;
use sumac_firmware::manifest::{self, Trust};
use sumac_firmware::modules::Modules;
use sumac_firmware::rshim::{Misc, kind_of};
use sumac_firmware::slots::Slots;
use sumac_hal::flash::{BlockDevice, Geometry};

/// Write the checksum of each image of a boot stream.
pub fn mend(stream: &mut [u8]) {
    let mut at = 0;
    while let Some(header) = stream.get(at..at + HEADER_LEN_BYTES) {
        let len = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
        let data = at + HEADER_LEN_BYTES;
        let end = data + len as usize + bfb::padding_len_bytes(len.into());
        let Some(bytes) = stream.get(data..end) else { return };
        let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, bytes) as u32;
        stream[at + 12..at + 16].copy_from_slice(&crc.to_le_bytes());
        at = end;
    }
}

/// A block device in memory.
struct Blocks {
    bytes: Vec<u8>,
}

/// Block length in bytes.
const BLOCK_LEN_BYTES: usize = 128;

impl BlockDevice for Blocks {
    type Error = Infallible;

    fn geometry(&self) -> Geometry {
        Geometry { block_len_bytes: BLOCK_LEN_BYTES, blocks: (self.bytes.len() / BLOCK_LEN_BYTES) as u32 }
    }

    fn read(&mut self, block: u32, buffer: &mut [u8]) -> Result<(), Infallible> {
        assert!(self.geometry().holds(block, buffer.len()), "a read beyond the device");
        buffer.copy_from_slice(&self.bytes[block as usize * BLOCK_LEN_BYTES..][..buffer.len()]);
        Ok(())
    }

    fn write(&mut self, block: u32, data: &[u8]) -> Result<(), Infallible> {
        assert!(self.geometry().holds(block, data.len()), "a write beyond the device");
        self.bytes[block as usize * BLOCK_LEN_BYTES..][..data.len()].copy_from_slice(data);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Run the target.
///
/// # Panics
/// If an invariant is violated.
pub fn run(data: &[u8]) {
    let Some((options, bytes)) = data.split_first() else { return };
    let mut bytes = bytes.to_vec();
    let is_mended = options & 1 != 0;
    match options >> 1 & 7 {
        0 | 1 => {
            if is_mended {
                mend(&mut bytes);
            }
            stream(&bytes);
        }
        2 => {
            let mut out = Vec::new();
            // Bound the work per input: a partition can be much longer than its contents.
            let _ = emmc::Reader::after_first_word(&bytes[..]).take(1 << 20).read_to_end(&mut out);
            if is_mended {
                mend(&mut out);
            }
            stream(&out);
        }
        3 => slots(&bytes, is_mended),
        4 => {
            let text = String::from_utf8_lossy(&bytes);
            let _ = manifest::is_envelope(&bytes);
            let _ = (Misc::parse(&text), text.lines().map(kind_of).count());
            let modules = Modules::parse(&text);
            let names: Vec<&str> = text.split_whitespace().take(8).collect();
            let paths = modules.in_order(&names);
            let _ = modules.part(&paths);
        }
        _ => {
            if let Err(error) = sumac_bare::BoardOptions::parse(&String::from_utf8_lossy(&bytes)) {
                assert!(!error.to_string().is_empty());
            }
        }
    }
}

fn stream(bytes: &[u8]) {
    for policy in [bfb::Policy::Strict, bfb::Policy::Repairable] {
        match bfb::scan(bytes, policy, |_, _| Ok(())) {
            Ok(report) => {
                assert_eq!(report.len_bytes, bytes.len() as u64, "read to its end");
                for entry in &report.entries {
                    assert!(entry.data_offset() + u64::from(entry.header.len_bytes) <= report.len_bytes);
                    assert_eq!(report.find(entry.header.name).map(|found| found.header.name), Some(entry.header.name));
                }
                assert!(report.notes.iter().all(|note| !note.to_string().is_empty()));
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        match manifest::check(bytes, policy, Trust::AnySigner) {
            Ok(checked) => assert_eq!(checked.report.len_bytes, bytes.len() as u64),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}

/// Records of slots: a byte for the number of blocks of the first device, then both devices.
fn slots(bytes: &[u8], is_mended: bool) {
    const BLOCKS_MAX: usize = 16;
    let mut cursor = Cursor(bytes);
    let first = usize::from(cursor.byte()) % BLOCKS_MAX;
    let mut device = |blocks: usize| {
        let mut bytes = cursor.take(blocks * BLOCK_LEN_BYTES).to_vec();
        bytes.resize(blocks * BLOCK_LEN_BYTES, 0);
        if is_mended {
            for block in bytes.as_chunks_mut::<BLOCK_LEN_BYTES>().0 {
                let (record, crc) = block.split_at_mut(BLOCK_LEN_BYTES - 4);
                let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, record) as u32;
                crc.copy_from_slice(&sum.to_le_bytes());
            }
        }
        Blocks { bytes }
    };
    let devices = [device(first), device(BLOCKS_MAX - first)];
    let Ok(mut slots) = Slots::new(devices) else { return };
    let chosen = slots.select();
    // After a boot attempt was counted, the records are still readable.
    if let Ok(chosen) = chosen {
        let record = slots.record(chosen.slot).expect("no device fails").expect("it was chosen");
        assert_eq!(record, chosen.record);
        assert!(slots.is_whole(chosen.slot, &record).expect("no device fails"));
    }
}
