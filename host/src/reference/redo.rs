//! The redo slots of a group, as a rank reads them: what the device had published when it was last seen (PROTOCOL 7).

use std::sync::atomic::{Ordering, fence};
use sumac_hal::ids::{Epoch, GroupId};
use sumac_hal::shm::ReadOnly;
use sumac_hal::wire::crc32c;

/// The most redo memory that is mapped: more than a device has.
pub(super) const REDO_MAX_BYTES: u64 = 1 << 40;

/// The bytes before a redo slot's bounce; behind that, of one chunk, are the accumulators.
pub(super) const REDO_HEAD_BYTES: u64 = 64;

/// Memory that somebody else writes.
pub(crate) trait ReadAt {
    /// Copy bytes out: a mixture of old and new where its owner writes meanwhile. False, and nothing, if there are not
    /// as many.
    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> bool;
}

impl ReadAt for ReadOnly {
    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> bool {
        self.read(offset_bytes, bytes)
    }
}

/// The redo slots of the group, which outlive the device's process (PROTOCOL 7).
#[derive(Debug)]
pub(crate) struct Redo<M = ReadOnly> {
    pub(crate) memory: M,
    pub(crate) offset_bytes: u64,
    pub(crate) slot_len_bytes: u64,
    pub(crate) slots: u64,
    pub(crate) chunk_len_bytes: u64,
}

impl<M: ReadAt> Redo<M> {
    /// Read the result of a chunk; false, and anything in `result`, if none is published.
    ///
    /// A device that lives goes on with the slot once this rank was answered, perhaps while it is read here. It clears
    /// the record before it touches what the record stands for, so a record that is still there afterwards vouches for
    /// all that was read; one that is not stands for a chunk that this rank has, or that nothing was written of.
    pub(crate) fn published(&self, view: (GroupId, Epoch), seq: u64, result: &mut [u8]) -> bool {
        let Some(slot) = (seq % self.slots).checked_mul(self.slot_len_bytes) else { return false };
        let Some(slot) = slot.checked_add(self.offset_bytes) else { return false };
        if result.len() as u64 > self.chunk_len_bytes {
            return false;
        }
        let location = self.location(slot, view, seq);
        fence(Ordering::Acquire);
        let bounce = slot.checked_add(REDO_HEAD_BYTES);
        // Where the result is: in the first accumulator, or rounded in the bounce.
        let at = match (location, bounce) {
            (Some(0), Some(bounce)) => bounce.checked_add(self.chunk_len_bytes),
            (Some(_), at) => at,
            (None, _) => None,
        };
        let was_read = at.is_some_and(|at| self.memory.read_at(at, result));
        fence(Ordering::Acquire);
        was_read && self.location(slot, view, seq) == location
    }

    /// Tell whether the result of a chunk is published.
    pub(crate) fn is_published(&self, view: (GroupId, Epoch), seq: u64) -> bool {
        let slot = (seq % self.slots).checked_mul(self.slot_len_bytes);
        slot.and_then(|slot| slot.checked_add(self.offset_bytes))
            .is_some_and(|slot| self.location(slot, view, seq).is_some())
    }

    /// Return where the record of a slot says that the result of a chunk is, if it is published.
    fn location(&self, slot: u64, (group, epoch): (GroupId, Epoch), seq: u64) -> Option<u8> {
        let mut bytes = [0; 16];
        if !self.memory.read_at(slot, &mut bytes) {
            return None;
        }
        let (words, _) = bytes.as_chunks::<8>();
        let found = [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])];
        (0..2).find(|&location| found == record(group, epoch, seq, location))
    }
}

/// Return the words that publish a result.
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

    /// How often the slot is used again.
    const SLOTS_USED: u64 = 3000;

    /// A chunk's result: bytes of its number.
    fn result(seq: u64) -> Vec<u8> {
        vec![seq as u8; CHUNK]
    }

    /// Do with the only slot what a device does with one for each chunk.
    fn publish(memory: &Region, seq: u64, location: u8) {
        let head = REDO_HEAD_BYTES as usize;
        memory.write(0, &[0; 16]);
        fence(Ordering::Release);
        memory.write(head + CHUNK, &result(seq));
        if location == 1 {
            memory.write(head, &result(seq));
        }
        fence(Ordering::Release);
        let words = record(VIEW.0, VIEW.1, seq, location);
        memory.write(0, &words.map(u64::to_le_bytes).concat());
    }

    /// A mixture of two chunks would be copied over what this rank has.
    #[test]
    fn a_slot_that_the_device_goes_on_with_gives_a_whole_result_or_none() {
        let memory = Region::create(REDO_HEAD_BYTES as usize + 2 * CHUNK, Pages::Normal).expect("memory");
        let redo = Redo {
            memory: ReadOnly::open(memory.read_only_file().expect("a descriptor"), REDO_MAX_BYTES).expect("sealed"),
            offset_bytes: 0,
            slot_len_bytes: REDO_HEAD_BYTES + 2 * CHUNK as u64,
            slots: 1,
            chunk_len_bytes: CHUNK as u64,
        };
        let (stop, newest) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for seq in (1..).take_while(|_| !stop.load(Ordering::Relaxed)) {
                    publish(&memory, seq, (seq % 2) as u8);
                    newest.store(seq, Ordering::Relaxed);
                    // Now and then long enough to be read in peace.
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
