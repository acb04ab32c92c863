//! The configuration store: two copies, of which the newer intact one is current.
//!
//! ```text
//! store := copy copy               4,096 bytes each
//! copy  := magic "SUMACCFG"        8 format 1 u32    12 length u32    16 count u64
//!          24 text, `length` bytes of UTF-8; zeros   4092 CRC-32 of the 4,092 bytes before
//! ```
//!
//! All numbers are little-endian. `count` is the number of the write.
//!
//! Invariant: a write replaces the copy that is not current, and is flushed before it becomes current; whatever a power
//! cut leaves of it, the other copy is intact.

use std::fmt;
use sumac_hal::flash::{BlockDevice, Geometry};
use thiserror::Error;

/// The length of a copy in bytes.
pub const COPY_LEN_BYTES: usize = 4096;
/// The length of both copies in bytes.
pub const STORE_LEN_BYTES: u64 = 2 * COPY_LEN_BYTES as u64;
/// The maximum length of the text in bytes.
pub const TEXT_MAX_BYTES: usize = CRC_AT - TEXT_AT;

const MAGIC: &[u8; 8] = b"SUMACCFG";
const FORMAT: u32 = 1;
const TEXT_AT: usize = 24;
const CRC_AT: usize = COPY_LEN_BYTES - 4;

/// Why a store failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StoreError<E> {
    /// The device failed.
    #[error("{0}")]
    Device(E),
    /// The device does not fit two copies.
    #[error("{} blocks of {} bytes: a store needs {STORE_LEN_BYTES} bytes, in blocks that divide {COPY_LEN_BYTES}", .0.blocks, .0.block_len_bytes)]
    Geometry(Geometry),
    /// The text is too long.
    #[error("a configuration of {0} bytes; the limit is {TEXT_MAX_BYTES}")]
    TooLong(usize),
    /// The copy does not read back as written.
    #[error("copy {0} does not read back as written; the other copy is still current")]
    ReadBack(usize),
}

/// The contents of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Copy {
    count: u64,
    text: String,
}

impl Copy {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (bytes, crc) = bytes.split_at_checked(CRC_AT)?;
        if crc32(bytes).to_le_bytes() != *crc || !bytes.starts_with(MAGIC) || bytes[8..12] != FORMAT.to_le_bytes() {
            return None;
        }
        let len = u32::from_le_bytes(bytes[12..16].try_into().ok()?);
        let count = u64::from_le_bytes(bytes[16..24].try_into().ok()?);
        let text = bytes[TEXT_AT..].get(..usize::try_from(len).ok()?)?;
        Some(Self { count, text: String::from_utf8(text.to_vec()).ok()? })
    }

    fn emit(&self) -> Vec<u8> {
        let mut bytes = vec![0; COPY_LEN_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&FORMAT.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.text.len() as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.count.to_le_bytes());
        bytes[TEXT_AT..TEXT_AT + self.text.len()].copy_from_slice(self.text.as_bytes());
        let crc = crc32(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }
}

fn crc32(bytes: &[u8]) -> u32 {
    // The library returns every width as u64.
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, bytes) as u32
}

/// Which copies are intact, and which of them is current.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// The count of each copy, if it is intact.
    pub counts: [Option<u64>; 2],
}

impl State {
    /// Return the current copy.
    pub fn current(&self) -> Option<usize> {
        match self.counts {
            [None, None] => None,
            // `None` is less than any count.
            [a, b] => Some(usize::from(b > a)),
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let say = |count: Option<u64>| count.map_or_else(|| "no copy".to_owned(), |count| format!("write {count}"));
        let [a, b] = self.counts.map(say);
        match self.current() {
            Some(at) => write!(f, "A {a}, B {b}, {} is current", ["A", "B"][at]),
            None => f.write_str("no copy is intact"),
        }
    }
}

/// A configuration store.
#[derive(Debug)]
pub struct Store<D> {
    device: D,
    blocks: u32,
}

impl<D: BlockDevice> Store<D> {
    /// Open a store on a device; nothing is read yet.
    ///
    /// # Errors
    /// [`StoreError::Geometry`].
    pub fn open(device: D) -> Result<Self, StoreError<D::Error>> {
        let geometry = device.geometry();
        let block_len_bytes = geometry.block_len_bytes;
        let fits = block_len_bytes > 0 && COPY_LEN_BYTES.is_multiple_of(block_len_bytes);
        if !fits || geometry.len_bytes() < STORE_LEN_BYTES {
            return Err(StoreError::Geometry(geometry));
        }
        Ok(Self { device, blocks: (COPY_LEN_BYTES / block_len_bytes) as u32 })
    }

    /// Return the current text, if a copy is intact, and the state of the copies.
    ///
    /// # Errors
    /// The device failed on both copies; one unreadable copy counts as damaged.
    pub fn load(&mut self) -> Result<(Option<String>, State), StoreError<D::Error>> {
        let copies = self.copies()?;
        let state = copies.state();
        let text = state.current().and_then(|at| copies.0.into_iter().nth(at).flatten()).map(|copy| copy.text);
        Ok((text, state))
    }

    /// Make `text` the current one.
    ///
    /// # Errors
    /// [`StoreError`]; the previous text stays current, unless the device failed.
    pub fn save(&mut self, text: &str) -> Result<State, StoreError<D::Error>> {
        if text.len() > TEXT_MAX_BYTES {
            return Err(StoreError::TooLong(text.len()));
        }
        let state = self.copies()?.state();
        let current = state.current();
        let to = current.map_or(0, |current| 1 - current);
        let count = current.and_then(|at| state.counts[at]).map_or(1, |count| count.saturating_add(1));
        let copy = Copy { count, text: text.to_owned() };
        let block = self.blocks * to as u32;
        self.device.write(block, &copy.emit()).map_err(StoreError::Device)?;
        self.device.flush().map_err(StoreError::Device)?;
        if self.read(to).map_err(StoreError::Device)? != Some(copy) {
            return Err(StoreError::ReadBack(to));
        }
        Ok(self.copies()?.state())
    }

    fn read(&mut self, at: usize) -> Result<Option<Copy>, D::Error> {
        let mut bytes = vec![0; COPY_LEN_BYTES];
        self.device.read(self.blocks * at as u32, &mut bytes)?;
        Ok(Copy::parse(&bytes))
    }

    fn copies(&mut self) -> Result<Copies, StoreError<D::Error>> {
        match [self.read(0), self.read(1)] {
            [Err(error), Err(_)] => Err(StoreError::Device(error)),
            copies => Ok(Copies(copies.map(|copy| copy.ok().flatten()))),
        }
    }
}

/// Both copies, if intact.
struct Copies([Option<Copy>; 2]);

impl Copies {
    fn state(&self) -> State {
        let Self([a, b]) = self;
        State { counts: [a, b].map(|copy| copy.as_ref().map(|copy| copy.count)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory with unreadable blocks, and power that can fail in the middle of a write.
    #[derive(Debug, Clone)]
    struct Ram {
        bytes: Vec<u8>,
        bad_blocks: std::ops::Range<u32>,
        /// Bytes that are written before the power fails.
        power_bytes: usize,
    }

    const BLOCK: usize = 512;

    impl Ram {
        fn new(len: usize) -> Self {
            Self { bytes: vec![0xff; len], bad_blocks: 0..0, power_bytes: usize::MAX }
        }
    }

    impl BlockDevice for Ram {
        type Error = &'static str;

        fn geometry(&self) -> Geometry {
            Geometry { block_len_bytes: BLOCK, blocks: (self.bytes.len() / BLOCK) as u32 }
        }

        fn read(&mut self, block: u32, buffer: &mut [u8]) -> Result<(), Self::Error> {
            if self.bad_blocks.contains(&block) {
                return Err("bad block");
            }
            buffer.copy_from_slice(&self.bytes[block as usize * BLOCK..][..buffer.len()]);
            Ok(())
        }

        fn write(&mut self, block: u32, data: &[u8]) -> Result<(), Self::Error> {
            let len = data.len().min(self.power_bytes);
            self.bytes[block as usize * BLOCK..][..len].copy_from_slice(&data[..len]);
            self.power_bytes -= len;
            if len < data.len() { Err("no power") } else { Ok(()) }
        }

        fn flush(&mut self) -> Result<(), Self::Error> {
            Ok(())
        }
    }

    fn store(ram: &mut Ram) -> Store<&mut Ram> {
        Store::open(ram).expect("a store")
    }

    fn load(ram: &mut Ram) -> Option<String> {
        store(ram).load().expect("readable").0
    }

    #[test]
    fn newer_copy_is_current_and_the_older_one_is_overwritten() {
        let mut ram = Ram::new(STORE_LEN_BYTES as usize);
        assert_eq!(load(&mut ram), None, "never written");
        let states = ["one", "two", "three"].map(|text| store(&mut ram).save(text).expect("saved").to_string());
        assert_eq!(
            states,
            [
                "A write 1, B no copy, A is current",
                "A write 1, B write 2, B is current",
                "A write 3, B write 2, A is current"
            ]
        );
        assert_eq!(load(&mut ram).as_deref(), Some("three"));
    }

    #[test]
    fn damaged_copy_is_ignored_and_the_other_one_used() {
        let mut whole = Ram::new(STORE_LEN_BYTES as usize);
        store(&mut whole).save("older").expect("saved");
        store(&mut whole).save("newer").expect("saved");
        // The second copy is the newer. Flip a bit anywhere: in the header, the text, the padding, the checksum.
        for at in 0..COPY_LEN_BYTES {
            let mut ram = whole.clone();
            ram.bytes[COPY_LEN_BYTES + at] ^= 1 << (at % 8);
            assert_eq!(load(&mut ram).as_deref(), Some("older"), "byte {at}");
        }
        let mut ram = whole.clone();
        ram.bytes[0] = 0;
        assert_eq!(load(&mut ram).as_deref(), Some("newer"));
        ram.bytes[COPY_LEN_BYTES] = 0;
        assert_eq!(load(&mut ram), None);
        // Two damaged copies do not prevent a new write.
        store(&mut ram).save("again").expect("saved");
        assert_eq!(load(&mut ram).as_deref(), Some("again"));
    }

    #[test]
    fn power_cut_at_any_byte_of_a_write_leaves_the_old_text() {
        let mut before = Ram::new(STORE_LEN_BYTES as usize);
        store(&mut before).save("first").expect("saved");
        store(&mut before).save("old").expect("saved");
        for power_bytes in 0..COPY_LEN_BYTES {
            let mut ram = Ram { power_bytes, ..before.clone() };
            store(&mut ram).save("new").expect_err("the power is cut");
            let found = load(&mut ram);
            assert_eq!(found.as_deref(), Some("old"), "after {power_bytes} bytes");
        }
    }

    #[test]
    fn unreadable_copy_counts_as_damaged() {
        let mut ram = Ram::new(STORE_LEN_BYTES as usize);
        store(&mut ram).save("older").expect("saved");
        store(&mut ram).save("newer").expect("saved");
        ram.bad_blocks = 8..16;
        assert_eq!(load(&mut ram).as_deref(), Some("older"));
        ram.bad_blocks = 0..16;
        assert!(matches!(store(&mut ram).load(), Err(StoreError::Device("bad block"))));
    }

    #[test]
    fn short_device_or_long_text_is_refused() {
        let mut ram = Ram::new(STORE_LEN_BYTES as usize - BLOCK);
        assert!(matches!(Store::open(&mut ram), Err(StoreError::Geometry(_))));
        let mut ram = Ram::new(STORE_LEN_BYTES as usize);
        let longest = "x".repeat(TEXT_MAX_BYTES);
        store(&mut ram).save(&longest).expect("just fits");
        let error = store(&mut ram).save(&format!("{longest}x")).expect_err("one byte more");
        assert!(matches!(error, StoreError::TooLong(len) if len == TEXT_MAX_BYTES + 1));
        assert_eq!(load(&mut ram), Some(longest));
    }
}
