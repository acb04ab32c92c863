//! The handshake with the device (`sumac_hal::shm`, socket): what a rank shows, and what it gets.

use super::error::AttachError;
use super::queue::Ends;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;
use sumac_hal::ids::{ChildIndex, Epoch, GroupId, Rank};
use sumac_hal::mmio::{Features, HostControl, Identity};
use sumac_hal::shm::{Bell, Connection, Function, Message, ReadOnly, Received};
use sumac_hal::wire::crc32c;

/// How long the device may take to accept, and for each message.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// What a device has to have.
const NEEDED: Features =
    Features::BY_REFERENCE.union(Features::FENCE).union(Features::REDO).union(Features::STRAGGLERS);

/// What regions are aligned to: pages.
const ALIGNMENT_MAX_BYTES: u32 = 4096;

/// The most redo memory that is mapped: more than a device has.
const REDO_MAX_BYTES: u64 = 1 << 40;

/// The bytes before a redo slot's bounce; behind that, of one chunk, are the accumulators.
const REDO_HEAD_BYTES: u64 = 64;

/// A rank's place at its leaf device.
#[derive(Debug, Clone)]
pub struct Seating {
    /// The device's name, for messages.
    pub device: String,
    /// What it listens on.
    pub socket: String,
    /// The group.
    pub group: GroupId,
    /// Its epoch.
    pub epoch: Epoch,
    /// Which child of the device the rank is.
    pub child: ChildIndex,
    /// The key of that link.
    pub key: u64,
    /// Which rank of the group this is.
    pub rank: Rank,
    /// How many there are.
    pub ranks: u32,
    /// How many of them run on this machine.
    pub ranks_here: usize,
    /// The payload limit of a packet in this group in bytes.
    pub chunk_len_bytes: u16,
    /// The most chunks that the device takes in ahead of the oldest.
    pub window_max: u16,
    /// The version of the cost table.
    pub table_version: u32,
}

/// What a device has given.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) connection: Connection,
    pub(super) function: Function,
    pub(super) identity: Identity,
    pub(super) admin: Ends,
    pub(super) data: Ends,
    pub(super) redo: Redo,
}

impl Attached {
    pub(super) fn open(seating: &Seating) -> Result<Self, AttachError> {
        let connection = Connection::open(&seating.socket, ANSWER_TIMEOUT)?;
        let Seating { group, child, key, .. } = *seating;
        connection.send(&Message::Attach { group, child, key }, None)?;
        let file = match next(&connection)? {
            Received { message: Message::Function, file: Some(file) } => file,
            other => return Err(unexpected(&other.message, "its function")),
        };
        let (function, identity) = Function::open(file)?;
        if !identity.features.contains(NEEDED) {
            return Err(AttachError::Features { has: identity.features, needs: NEEDED });
        }
        let found = identity.dma.alignment_bytes;
        if !found.is_power_of_two() || found > ALIGNMENT_MAX_BYTES {
            return Err(AttachError::Alignment { found, max: ALIGNMENT_MAX_BYTES });
        }
        let queues = function.bar().queues();
        if queues != 2 {
            return Err(AttachError::Queues(queues));
        }
        let ends = |number| -> Result<Ends, AttachError> {
            let bell = match next(&connection)? {
                Received { message: Message::Bell { queue }, file: Some(file) } if queue == number => Bell::open(file),
                other => return Err(unexpected(&other.message, "the bell of the next queue")),
            };
            let queue = function.queue(number).ok_or(AttachError::Queues(queues))?;
            Ok(Ends::new(queue, bell))
        };
        let (admin, data) = (ends(0)?, ends(1)?);
        let redo = match next(&connection)? {
            Received { message: Message::Redo { offset_bytes, slot_len_bytes, slots }, file: Some(file) } => {
                let needs = REDO_HEAD_BYTES as u32 + 2 * u32::from(seating.chunk_len_bytes);
                if slots == 0 || slot_len_bytes < needs {
                    return Err(AttachError::Redo { slots, slot_len_bytes, needs });
                }
                let memory = ReadOnly::open(file, REDO_MAX_BYTES)?;
                let chunk_len_bytes = seating.chunk_len_bytes.into();
                Redo {
                    memory,
                    offset_bytes,
                    slot_len_bytes: slot_len_bytes.into(),
                    slots: slots.into(),
                    chunk_len_bytes,
                }
            }
            other => return Err(unexpected(&other.message, "the redo slots")),
        };
        function.bar().set_control(HostControl::ENABLE);
        Ok(Self { connection, function, identity, admin, data, redo })
    }
}

fn next(connection: &Connection) -> Result<Received, AttachError> {
    match connection.receive(ANSWER_TIMEOUT)? {
        Received { message: Message::Refused { reason }, .. } => Err(AttachError::Refused(reason)),
        received => Ok(received),
    }
}

fn unexpected(message: &Message, expected: &'static str) -> AttachError {
    let said = match message {
        Message::Attach { .. } => "that it attaches",
        Message::Function => "its function",
        Message::Memory { .. } => "memory",
        Message::Bell { .. } => "a bell",
        Message::Redo { .. } => "the redo slots",
        _ => "something else",
    };
    AttachError::Order(said, expected)
}

/// The redo slots of the group, which outlive the device's process (PROTOCOL 7).
#[derive(Debug)]
pub(super) struct Redo {
    memory: ReadOnly,
    offset_bytes: u64,
    slot_len_bytes: u64,
    slots: u64,
    chunk_len_bytes: u64,
}

impl Redo {
    /// Read the result of a chunk; false, and anything in `result`, if none is published.
    ///
    /// A device that lives goes on with the slot once this rank was answered, perhaps while it is read here. It clears
    /// the record before it touches what the record stands for, so a record that is still there afterwards vouches for
    /// all that was read; one that is not stands for a chunk that this rank has, or that nothing was written of.
    pub(super) fn published(&self, view: (GroupId, Epoch), seq: u64, result: &mut [u8]) -> bool {
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
        let was_read = at.is_some_and(|at| self.memory.read(at, result));
        fence(Ordering::Acquire);
        was_read && self.location(slot, view, seq) == location
    }

    /// Tell whether the result of a chunk is published.
    pub(super) fn is_published(&self, view: (GroupId, Epoch), seq: u64) -> bool {
        let slot = (seq % self.slots).checked_mul(self.slot_len_bytes);
        slot.and_then(|slot| slot.checked_add(self.offset_bytes))
            .is_some_and(|slot| self.location(slot, view, seq).is_some())
    }

    /// Return where the record of a slot says that the result of a chunk is, if it is published.
    fn location(&self, slot: u64, (group, epoch): (GroupId, Epoch), seq: u64) -> Option<u8> {
        let mut bytes = [0; 16];
        if !self.memory.read(slot, &mut bytes) {
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
