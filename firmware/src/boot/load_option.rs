//! A boot entry: the value of a variable `Boot####` (UEFI Specification 2.10, 3.1.3).
//!
//! ```text
//! load option := attributes u32, length of the path u16, description (UTF-16, NUL), path, optional data
//! path        := hard drive 04 01, 42 bytes: number u32, start u64, length u64, GUID, format 02, signature type 02
//!                file       04 04, 4 bytes and the path in UTF-16 with NUL
//!                end        7f ff, 4 bytes
//! ```
//!
//! The optional data is the kernel's command line: Linux's EFI stub takes it as UTF-16 (Linux,
//! drivers/firmware/efi/libstub). Only what this module writes is parsed; other entries are kept as bytes.

/// The firmware may choose the entry.
const ACTIVE: u32 = 1;
const HARD_DRIVE: [u8; 4] = [0x04, 0x01, 42, 0];
const FILE_PATH: [u8; 2] = [0x04, 0x04];
const END: [u8; 4] = [0x7f, 0xff, 4, 0];
/// A partition of a GUID partition table, with a GUID as its signature.
const GPT_GUID: [u8; 2] = [2, 2];

/// A partition, as a boot entry names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partition {
    /// Its number, from 1.
    pub number: u32,
    /// Its first block.
    pub start: u64,
    /// Its length in blocks.
    pub blocks: u64,
    /// Its own GUID, in the byte order of the partition table.
    pub guid: [u8; 16],
}

/// A boot entry for a file on a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadOption {
    /// The name in the firmware's menu.
    pub description: String,
    /// The partition.
    pub partition: Partition,
    /// The file's path, with backslashes.
    pub path: String,
    /// What the file is started with.
    pub arguments: String,
}

impl LoadOption {
    /// Encode it; `None` if the path is too long for the format.
    pub fn emit(&self) -> Option<Vec<u8>> {
        let Partition { number, start, blocks, guid } = self.partition;
        let path = utf16(&self.path, true);
        let mut nodes = HARD_DRIVE.to_vec();
        nodes.extend_from_slice(&number.to_le_bytes());
        nodes.extend_from_slice(&start.to_le_bytes());
        nodes.extend_from_slice(&blocks.to_le_bytes());
        nodes.extend_from_slice(&guid);
        nodes.extend_from_slice(&GPT_GUID);
        nodes.extend_from_slice(&FILE_PATH);
        nodes.extend_from_slice(&u16::try_from(4 + path.len()).ok()?.to_le_bytes());
        nodes.extend_from_slice(&path);
        nodes.extend_from_slice(&END);
        let mut bytes = ACTIVE.to_le_bytes().to_vec();
        bytes.extend_from_slice(&u16::try_from(nodes.len()).ok()?.to_le_bytes());
        bytes.extend_from_slice(&utf16(&self.description, true));
        bytes.extend_from_slice(&nodes);
        // With its NUL: Linux's stub takes text up to one, or up to the end.
        bytes.extend_from_slice(&utf16(&self.arguments, true));
        Some(bytes)
    }

    /// Return the description of an entry, whoever has written it.
    pub fn description_of(bytes: &[u8]) -> Option<String> {
        let (units, _) = bytes.get(6..)?.as_chunks::<2>();
        let end = units.iter().position(|unit| *unit == [0, 0])?;
        let units: Vec<u16> = units[..end].iter().map(|unit| u16::from_le_bytes(*unit)).collect();
        String::from_utf16(&units).ok()
    }
}

fn utf16(text: &str, ends: bool) -> Vec<u8> {
    let end = ends.then_some(0);
    text.encode_utf16().chain(end).flat_map(u16::to_le_bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn entry_has_the_bytes_of_the_specification() {
        let partition = Partition { number: 2, start: 0x800, blocks: 0x10_0000, guid: *b"0123456789abcdef" };
        let option = LoadOption { description: "Ab".into(), partition, path: "\\K".into(), arguments: "c".into() };
        #[rustfmt::skip]
        let expected = [
            1, 0, 0, 0,  56, 0,  b'A', 0, b'b', 0, 0, 0,
            4, 1, 42, 0,  2, 0, 0, 0,  0, 8, 0, 0, 0, 0, 0, 0,  0, 0, 0x10, 0, 0, 0, 0, 0,
            b'0', b'1', b'2', b'3', b'4', b'5', b'6', b'7', b'8', b'9', b'a', b'b', b'c', b'd', b'e', b'f',  2, 2,
            4, 4, 10, 0,  b'\\', 0, b'K', 0, 0, 0,
            0x7f, 0xff, 4, 0,
            b'c', 0, 0, 0,
        ];
        let bytes = option.emit().expect("fits");
        assert_eq!(bytes, expected);
        assert_eq!(LoadOption::description_of(&bytes).as_deref(), Some("Ab"));
        assert_eq!(LoadOption { path: "x".repeat(40_000), ..option }.emit(), None, "too long for its length field");
    }

    proptest! {
        #[test]
        fn arbitrary_entry_does_not_panic(bytes: Vec<u8>) {
            let _ = LoadOption::description_of(&bytes);
        }
    }
}
