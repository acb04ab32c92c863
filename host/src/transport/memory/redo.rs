//! A rank's read access to the redo slots of its group: the results that the device had published when it was last seen
//! (PROTOCOL 7).
//!
//! Invariant: a result is accepted only if its record names the chunk and carries the checksum and length of the very
//! bytes that were read.

use std::collections::BTreeMap;
use std::sync::atomic::{Ordering, fence};
use sumac_hal::dma::Coverage;
use sumac_hal::ids::{Epoch, GroupId};
use sumac_hal::shm::ReadOnly;
use sumac_hal::wire::crc32c;

/// The maximum redo memory that is mapped: more than any device has.
pub(super) const REDO_MAX_BYTES: u64 = 1 << 40;

/// Length in bytes of the head of a redo slot, which begins with the record. Behind it lie the bounce area, one chunk
/// long, and the accumulators.
pub(super) const REDO_HEAD_BYTES: u64 = 64;

/// Memory that another process writes.
pub(crate) trait ReadAt {
    /// Copy bytes out; a mixture of old and new if the owner writes meanwhile. Returns false, and copies nothing, if
    /// the range lies outside the memory.
    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> bool;
}

impl ReadAt for ReadOnly {
    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> bool {
        self.read(offset_bytes, bytes)
    }
}

/// The redo slots of the group. They outlive the device's process (PROTOCOL 7).
#[derive(Debug)]
pub(crate) struct Redo<M = ReadOnly> {
    pub(crate) memory: M,
    pub(crate) offset_bytes: u64,
    pub(crate) slot_len_bytes: u64,
    pub(crate) slots: u64,
    pub(crate) chunk_len_bytes: u64,
    /// Results published when the device's access was ended, by chunk: the device may reuse the slots afterwards.
    pub(crate) frozen: Option<BTreeMap<u64, Vec<u8>>>,
}

impl<M: ReadAt> Redo<M> {
    /// Read the published result of a chunk. Returns false, with arbitrary bytes in `result`, if there is none.
    ///
    /// A live device reuses the slot once this rank has been answered, perhaps while it is read here. It clears the
    /// record before it overwrites what the record stands for, so a record that is still there afterwards vouches for
    /// all bytes read. A cleared one stands for a chunk that this rank already has, or of which nothing was written.
    pub(crate) fn published(&self, view: (GroupId, Epoch), seq: u64, result: &mut [u8]) -> bool {
        if let Some(frozen) = &self.frozen {
            let found = frozen.get(&seq).filter(|found| found.len() == result.len());
            found.into_iter().for_each(|found| result.copy_from_slice(found));
            return found.is_some();
        }
        let Some(slot) = (seq % self.slots).checked_mul(self.slot_len_bytes) else { return false };
        let Some(slot) = slot.checked_add(self.offset_bytes) else { return false };
        if result.len() as u64 > self.chunk_len_bytes {
            return false;
        }
        let found = self.record_at(slot, view, seq);
        fence(Ordering::Acquire);
        let bounce = slot.checked_add(REDO_HEAD_BYTES);
        // The result is in the first accumulator, or, if it was rounded, in the bounce area.
        let at = match (found, bounce) {
            (Some((0, _)), Some(bounce)) => bounce.checked_add(self.chunk_len_bytes),
            (Some(_), at) => at,
            (None, _) => None,
        };
        let was_read = at.is_some_and(|at| self.memory.read_at(at, result));
        fence(Ordering::Acquire);
        was_read
            && self.record_at(slot, view, seq) == found
            && found.is_some_and(|(_, covers)| covers == Coverage::checksum_word(result))
    }

    /// Return whether a record says that the result of a chunk is published.
    pub(crate) fn is_published(&self, view: (GroupId, Epoch), seq: u64) -> bool {
        if let Some(frozen) = &self.frozen {
            return frozen.contains_key(&seq);
        }
        let slot = (seq % self.slots).checked_mul(self.slot_len_bytes);
        slot.and_then(|slot| slot.checked_add(self.offset_bytes))
            .is_some_and(|slot| self.record_at(slot, view, seq).is_some())
    }

    /// Copy what is published of these chunks, given with the lengths of their results, and stop reading the device's
    /// memory: a result that this rank reports must remain available until it is requested.
    pub(crate) fn freeze(&mut self, view: (GroupId, Epoch), chunks: impl Iterator<Item = (u64, usize)>) {
        if self.frozen.is_some() {
            return;
        }
        let mut frozen = BTreeMap::new();
        for (seq, len_bytes) in chunks.filter(|&(_, len_bytes)| len_bytes > 0) {
            let mut result = vec![0; len_bytes];
            if self.is_published(view, seq) && self.published(view, seq, &mut result) {
                frozen.insert(seq, result);
            }
        }
        self.frozen = Some(frozen);
    }

    /// Return where the record of a slot locates the result of a chunk, and its checksum, if it is published.
    fn record_at(&self, slot: u64, (group, epoch): (GroupId, Epoch), seq: u64) -> Option<(u8, u64)> {
        let mut bytes = [0; RECORD_LEN_BYTES];
        if !self.memory.read_at(slot, &mut bytes) {
            return None;
        }
        let (words, _) = bytes.as_chunks::<8>();
        let found = [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])];
        let location = (0..2).find(|&location| found == record(group, epoch, seq, location))?;
        Some((location, u64::from_le_bytes(words[2])))
    }
}

/// Length of a record in bytes: two words, and the checksum of the result.
const RECORD_LEN_BYTES: usize = Coverage::OFFSET_MIN_BYTES as usize;

/// Return the two words of a record. Behind them follows [`Coverage::checksum_word`] of the result.
pub(super) fn record(group: GroupId, epoch: Epoch, seq: u64, location: u8) -> [u64; 2] {
    let mut bytes = [0; 17];
    bytes[..4].copy_from_slice(&group.0.to_le_bytes());
    bytes[4..8].copy_from_slice(&epoch.to_bits().to_le_bytes());
    bytes[8..16].copy_from_slice(&seq.to_le_bytes());
    bytes[16] = location;
    [u64::from(epoch.to_bits()) << 32 | u64::from(crc32c(&bytes)), seq]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU64};
    use sumac_hal::shm::{Pages, Region};

    const CHUNK: usize = 60 << 10;
    const VIEW: (GroupId, Epoch) = (GroupId(1), Epoch { term: 1, counter: 1 });

    /// Number of times the slot is reused.
    const SLOTS_USED: u64 = 3000;

    /// The result of a chunk: bytes with the low bits of its number.
    fn result(seq: u64) -> Vec<u8> {
        vec![seq as u8; CHUNK]
    }

    /// Publish a chunk in the only slot, as a device does.
    fn publish(memory: &Region, seq: u64, location: u8) {
        let head = REDO_HEAD_BYTES as usize;
        memory.write(0, &[0; 16]);
        fence(Ordering::Release);
        memory.write(head + CHUNK, &result(seq));
        if location == 1 {
            memory.write(head, &result(seq));
        }
        fence(Ordering::Release);
        let [first, second] = record(VIEW.0, VIEW.1, seq, location);
        let words = [first, second, Coverage::checksum_word(&result(seq))];
        memory.write(0, &words.map(u64::to_le_bytes).concat());
    }

    fn redo_of(memory: &Region) -> Redo {
        Redo {
            memory: ReadOnly::open(memory.read_only_file().expect("a descriptor"), REDO_MAX_BYTES).expect("sealed"),
            offset_bytes: 0,
            slot_len_bytes: REDO_HEAD_BYTES + 2 * CHUNK as u64,
            slots: 1,
            chunk_len_bytes: CHUNK as u64,
            frozen: None,
        }
    }

    /// The record names a chunk; only the checksum tells whether the bytes belong to it.
    #[test]
    fn bytes_with_wrong_checksum_are_not_a_result() {
        for location in 0..2 {
            let memory = Region::create(REDO_HEAD_BYTES as usize + 2 * CHUNK, Pages::Normal).expect("memory");
            let redo = redo_of(&memory);
            publish(&memory, 5, location);
            let mut found = vec![0; CHUNK];
            assert!(redo.published(VIEW, 5, &mut found) && found == result(5));
            assert!(!redo.published(VIEW, 5, &mut found[1..]), "a part is not the result");
            let at = REDO_HEAD_BYTES as usize + if location == 0 { CHUNK } else { 0 };
            memory.write(at + CHUNK - 1, &[6]);
            assert!(!redo.published(VIEW, 5, &mut found), "a byte of another");
            memory.write(at + CHUNK - 1, &[5]);
            assert!(redo.published(VIEW, 5, &mut found));
        }
    }

    /// A live device reuses its slots while ranks recover.
    #[test]
    fn frozen_results_survive_slot_reuse() {
        let memory = Region::create(REDO_HEAD_BYTES as usize + 2 * CHUNK, Pages::Normal).expect("memory");
        let mut redo = redo_of(&memory);
        publish(&memory, 5, 1);
        redo.freeze(VIEW, [(4, CHUNK), (5, CHUNK), (6, 0)].into_iter());
        publish(&memory, 6, 0);
        let mut found = vec![0; CHUNK];
        assert!(redo.is_published(VIEW, 5) && redo.published(VIEW, 5, &mut found) && found == result(5));
        assert!([4, 6].iter().all(|&seq| !redo.is_published(VIEW, seq) && !redo.published(VIEW, seq, &mut found)));
    }

    /// A mixture of two chunks would overwrite this rank's data.
    #[test]
    fn slot_reused_during_read_gives_whole_result_or_none() {
        let memory = Region::create(REDO_HEAD_BYTES as usize + 2 * CHUNK, Pages::Normal).expect("memory");
        let redo = redo_of(&memory);
        let (stop, newest) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for seq in (1..).take_while(|_| !stop.load(Ordering::Relaxed)) {
                    publish(&memory, seq, (seq % 2) as u8);
                    newest.store(seq, Ordering::Relaxed);
                    // Sometimes pause long enough for an undisturbed read.
                    (0..seq % 64 * 200).for_each(|_| std::hint::spin_loop());
                }
            });
            let mut found = vec![0; CHUNK];
            let (mut seq, mut whole, mut mixed) = (0, 0, false);
            while (seq < SLOTS_USED || whole == 0) && !mixed {
                seq = newest.load(Ordering::Relaxed);
                if redo.published(VIEW, seq, &mut found) {
                    (whole, mixed) = (whole + 1, found != result(seq));
                }
            }
            stop.store(true, Ordering::Relaxed);
            assert!(!mixed, "a mixture, after {whole} results");
        });
    }
}
