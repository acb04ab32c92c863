//! Two byte streams in shared memory, one in each direction, between two processes that do not trust each other.
//!
//! One process creates the memory and hands it over through a [`Connection`](super::Connection); the other opens it.
//! Each end writes one stream and reads the other. Long transfers need not go through a stream: one end sends the
//! address of its bytes, and the other copies them with [`PeerMemory`] and then counts the reference as taken.
//!
//! | offset | size | of the creator, and 0x400 further on of the opener |
//! |---|---|---|
//! | 0x000 | 0x100 | indices of the stream that it writes |
//! | 0x100 | 4 | doorbell: whether it sleeps |
//! | 0x180 | 4 | references that it has taken |
//! | 0x184 | 4 | 1 once it has withdrawn its references |
//! | 0x188 | 4 | 1 if it can read the other's memory |
//! | 0x18c | 4 | the last handle of the other's memory that it has mapped ([`MemoryChannel`](super::MemoryChannel)) |
//! | 0x190 | 8 | address of its probe |
//! | 0x198 | 8 | the probe's value |
//!
//! The bytes of the creator's stream begin at 0x1000, those of the opener's follow. All words are little-endian.
//!
//! Invariants:
//! - No count that the other end can write sizes anything or indexes memory: streams check indices, and a count of
//!   taken references and a handle are only compared.
//! - Whoever leaves while a reference of its own is not taken withdraws first. A reader checks for that after its copy,
//!   so it never takes bytes that their owner may have reused.

use super::bar_memory::BarMemory;
use super::mapping::MemoryError;
use super::peer::Peer;
use super::peer_memory::{PeerMemory, PeerMemoryError};
use crate::ring::{Doorbell, Indices, STREAM_CAPACITY_MAX_BYTES, StreamConsumer, StreamMemory, StreamProducer};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// The words of one end.
#[repr(C, align(1024))]
struct EndWords {
    indices: Indices,
    bell: AtomicU32,
    _other_line: [u8; 124],
    taken: AtomicU32,
    is_withdrawn: AtomicU32,
    reads_peer: AtomicU32,
    mapped: AtomicU32,
    probe_address: AtomicU64,
    probe_value: AtomicU64,
}

const _: () = assert!(size_of::<EndWords>() == 0x400);
const _: () = assert!(std::mem::offset_of!(EndWords, taken) == 0x180);
const _: () = assert!(std::mem::offset_of!(EndWords, probe_address) == 0x190);

/// Where the bytes of the streams begin.
const STREAMS_AT_BYTES: usize = 0x1000;
const _: () = assert!(2 * size_of::<EndWords>() <= STREAMS_AT_BYTES);

/// The minimum capacity of a stream in bytes.
const CAPACITY_MIN_BYTES: u32 = 0x1000;

/// Why the memory of two streams could not be created or opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DuplexError {
    /// Its memory could not be allocated or mapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The capacity of a stream is invalid.
    #[error(
        "{len_bytes} bytes do not hold two streams, each a power of two from {CAPACITY_MIN_BYTES} to \
         {STREAM_CAPACITY_MAX_BYTES} bytes long"
    )]
    Capacity {
        /// The length of the memory in bytes.
        len_bytes: usize,
    },
}

/// One end of two streams.
#[derive(Debug)]
pub struct Duplex {
    memory: Arc<BarMemory>,
    is_creator: bool,
    capacity_bytes: u32,
    /// What the other end reads to see whether it can; on the heap, since its address is published.
    probe: Box<u64>,
}

/// The memory of one of the streams.
#[derive(Debug)]
pub struct DuplexStream {
    memory: Arc<BarMemory>,
    is_creators: bool,
    capacity_bytes: u32,
}

impl Duplex {
    /// Create the memory of two streams of `capacity_bytes` each. `probe` is a random number.
    ///
    /// # Errors
    /// [`DuplexError`].
    pub fn create(capacity_bytes: u32, probe: u64) -> Result<Self, DuplexError> {
        let len_bytes = STREAMS_AT_BYTES.saturating_add(2 * capacity_bytes as usize);
        let capacity_bytes = capacity_of(len_bytes)?;
        let duplex = Self {
            memory: Arc::new(BarMemory::create(len_bytes)?),
            is_creator: true,
            capacity_bytes,
            probe: Box::new(probe),
        };
        duplex.publish_probe();
        Ok(duplex)
    }

    /// Open memory that another process has handed over. `probe` is a random number.
    ///
    /// # Errors
    /// [`DuplexError`]; also for memory of another length, or that can be resized.
    pub fn open(file: OwnedFd, probe: u64) -> Result<Self, DuplexError> {
        let max = STREAMS_AT_BYTES as u64 + 2 * u64::from(STREAM_CAPACITY_MAX_BYTES);
        let memory = BarMemory::open(file, max)?;
        let capacity_bytes = capacity_of(8 * memory.words().len())?;
        let duplex = Self { memory: Arc::new(memory), is_creator: false, capacity_bytes, probe: Box::new(probe) };
        duplex.publish_probe();
        Ok(duplex)
    }

    /// Return the descriptor to hand over.
    ///
    /// # Panics
    /// If this end opened the memory.
    #[track_caller]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.memory.file()
    }

    /// Return the stream that this end writes, and the one that it reads. Call it once: each stream has one end here.
    pub fn streams(&self) -> (StreamProducer<DuplexStream>, StreamConsumer<DuplexStream>) {
        let (own, other) = (self.stream(self.is_creator), self.stream(!self.is_creator));
        (StreamProducer::new(own), StreamConsumer::new(other))
    }

    fn stream(&self, is_creators: bool) -> DuplexStream {
        DuplexStream { memory: Arc::clone(&self.memory), is_creators, capacity_bytes: self.capacity_bytes }
    }

    /// Return the doorbell that this end arms before it sleeps.
    pub fn own_bell(&self) -> Doorbell<&AtomicU32> {
        Doorbell::new(&self.own().bell)
    }

    /// Return the doorbell that this end rings.
    #[inline]
    pub fn peer_bell(&self) -> Doorbell<&AtomicU32> {
        Doorbell::new(&self.peer().bell)
    }

    /// Count a reference as taken. Returns false, and counts nothing, if the other end has withdrawn it: then the bytes
    /// that were copied may be anything.
    pub fn take_reference(&self) -> bool {
        // The copy comes before the check: what the check does not see happened after the copy.
        fence(Ordering::SeqCst);
        if self.peer().is_withdrawn.load(Ordering::Acquire) != 0 {
            return false;
        }
        let taken = &self.own().taken;
        taken.store(u32::from_le(taken.load(Ordering::Relaxed)).wrapping_add(1).to_le(), Ordering::Release);
        true
    }

    /// Return how many references the other end has taken, modulo 2^32.
    pub fn taken_by_peer(&self) -> u32 {
        u32::from_le(self.peer().taken.load(Ordering::Acquire))
    }

    /// Withdraw all references that are not taken. Call it before their memory is used for anything else.
    pub fn withdraw(&self) {
        self.own().is_withdrawn.store(1_u32.to_le(), Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Publish that this end has mapped the other's memory up to this handle.
    pub fn set_mapped(&self, handle: u32) {
        self.own().mapped.store(handle.to_le(), Ordering::Release);
    }

    /// Return the last handle of this end's memory that the other has mapped.
    pub fn mapped_by_peer(&self) -> u32 {
        u32::from_le(self.peer().mapped.load(Ordering::Acquire))
    }

    /// Try to read the memory of the other end's process, `peer`, and publish whether that works.
    ///
    /// # Errors
    /// [`PeerMemoryError`]: its bytes have to go through the stream.
    pub fn probe_peer(&self, peer: Peer) -> Result<PeerMemory, PeerMemoryError> {
        let (address, value) = (&self.peer().probe_address, &self.peer().probe_value);
        let address = u64::from_le(address.load(Ordering::Acquire));
        let value = u64::from_le(value.load(Ordering::Acquire));
        let memory = PeerMemory::new(peer)?;
        let mut found = [0; 8];
        memory.read(address, &mut found)?;
        if u64::from_ne_bytes(found) != value {
            return Err(PeerMemoryError::Probe);
        }
        self.own().reads_peer.store(1_u32.to_le(), Ordering::Release);
        Ok(memory)
    }

    /// Return whether the other end says that it can read this process's memory.
    pub fn is_read_by_peer(&self) -> bool {
        self.peer().reads_peer.load(Ordering::Acquire) != 0
    }

    fn publish_probe(&self) {
        let own = self.own();
        own.probe_value.store(self.probe.to_le(), Ordering::Release);
        let address = std::ptr::from_ref::<u64>(&self.probe).expose_provenance() as u64;
        own.probe_address.store(address.to_le(), Ordering::Release);
    }

    fn own(&self) -> &EndWords {
        words_of(&self.memory, self.is_creator)
    }

    #[inline]
    fn peer(&self) -> &EndWords {
        words_of(&self.memory, !self.is_creator)
    }
}

impl StreamMemory for DuplexStream {
    fn capacity_bytes(&self) -> u32 {
        self.capacity_bytes
    }

    fn produced(&self) -> u32 {
        self.indices().produced()
    }

    fn set_produced(&self, produced: u32) {
        self.indices().set_produced(produced);
    }

    fn consumed(&self) -> u32 {
        self.indices().consumed()
    }

    fn set_consumed(&self, consumed: u32) {
        self.indices().set_consumed(consumed);
    }

    fn read(&self, place: u32, bytes: &mut [u8]) {
        self.memory.read(self.offset_bytes(place), bytes);
    }

    fn write(&self, place: u32, bytes: &[u8]) {
        self.memory.write(self.offset_bytes(place), bytes);
    }
}

impl DuplexStream {
    fn indices(&self) -> &Indices {
        &words_of(&self.memory, self.is_creators).indices
    }

    fn offset_bytes(&self, place: u32) -> usize {
        let stream = if self.is_creators { 0 } else { self.capacity_bytes as usize };
        STREAMS_AT_BYTES + stream + place as usize
    }
}

/// Return the capacity of each of two streams in memory of this length.
fn capacity_of(len_bytes: usize) -> Result<u32, DuplexError> {
    let error = DuplexError::Capacity { len_bytes };
    let streams = len_bytes.checked_sub(STREAMS_AT_BYTES).ok_or(error)?;
    let capacity = u32::try_from(streams / 2).map_err(|_| error)?;
    let is_valid = capacity.is_power_of_two() && (CAPACITY_MIN_BYTES..=STREAM_CAPACITY_MAX_BYTES).contains(&capacity);
    if is_valid && streams == 2 * capacity as usize { Ok(capacity) } else { Err(error) }
}

/// Return the words of one end.
#[inline]
fn words_of(memory: &BarMemory, is_creators: bool) -> &EndWords {
    let words = memory.words();
    assert!(size_of_val(words) >= STREAMS_AT_BYTES, "checked when the memory was created or opened");
    // SAFETY: `EndWords` consists of atomics and padding, for which any bytes are valid, and both lie within the first
    // page of the mapping, which the slice covers; a page is aligned for it. The other process can only change values.
    unsafe { &*words.as_ptr().cast::<EndWords>().add(usize::from(!is_creators)) }
}
