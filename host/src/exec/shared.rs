//! The shared memory of a connection between two ranks of one machine.
//!
//! It takes over from the connection's socket ([`super::sharing`]): each rank switches its direction between two
//! frames. The socket stays, because its end is how a rank notices that the other is gone. Short payloads go through a
//! byte stream. A long one is sent as a reference where the kernel lets the receiver read the sender's memory, or where
//! the receiver has mapped it ([`super::regions`]): the receiver copies it straight to its place, and the transfer is
//! over when it has said so.
//!
//! Invariants:
//! - The peer's socket ends first, its stream afterwards: what it wrote before it left is read.
//! - A rank that leaves an operation withdraws its references before the caller gets the memory back.
//! - A peer that breaks the rules of the streams counts as gone.

use super::frame::HEADER_BYTES;
use super::link::IoOutcome;
use super::regions::{RegionLink, RegionPlace};
use crate::region_exports::RegionExports;
use std::sync::Arc;
use sumac_hal::ring::{Poisoned, StreamConsumer, StreamProducer};
use sumac_hal::shm::{Bell, Connection, Duplex, DuplexStream, PeerMemory};

/// This rank's end of the shared memory of a connection.
#[derive(Debug)]
pub(super) struct SharedLink {
    duplex: Duplex,
    tx: StreamProducer<DuplexStream>,
    rx: StreamConsumer<DuplexStream>,
    /// Wakes the peer.
    bell: Bell,
    /// The peer's memory; `None` if the kernel does not let this process read it.
    pub(super) memory: Option<PeerMemory>,
    /// Registered memory of both ranks, where they map it.
    pub(super) regions: Option<Box<RegionLink>>,
    /// References sent, modulo 2^32.
    references: u32,
    /// The socket has ended: nothing is written to the peer's stream any more.
    is_ended: bool,
}

impl SharedLink {
    /// Take over memory that both ranks have. `connection` leads to the peer's process. With `exports`, the ranks map
    /// each other's registered memory.
    pub(super) fn new(duplex: Duplex, bell: Bell, connection: Connection, exports: Option<Arc<RegionExports>>) -> Self {
        let (channel, peer) = connection.into_channel();
        let regions = exports.map(|exports| Box::new(RegionLink::new(channel, exports)));
        let memory = duplex.probe_peer(peer);
        if let Err(why) = &memory {
            crate::log::info!(%why, "long transfers between ranks of this machine are copied twice, unless from registered memory");
        }
        let (tx, rx) = duplex.streams();
        Self { duplex, tx, rx, bell, memory: memory.ok(), regions, references: 0, is_ended: false }
    }

    /// Note that the peer's socket has ended.
    pub(super) const fn note_end(&mut self) {
        self.is_ended = true;
    }

    /// Return whether the peer's socket has ended.
    pub(super) const fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Read what the peer has written.
    pub(super) fn read(&mut self, into: &mut [u8]) -> IoOutcome {
        match self.rx.read(into) {
            Ok(0) if !self.is_ended => IoOutcome::WouldBlock,
            Ok(0) => IoOutcome::Ended,
            Ok(n) => {
                self.ring();
                IoOutcome::Bytes(n)
            }
            Err(error) => broken(&error),
        }
    }

    /// Write both pieces, as far as there is room.
    pub(super) fn write(&mut self, head: &[u8], body: &[u8]) -> IoOutcome {
        if self.is_ended {
            return IoOutcome::Ended;
        }
        match self.tx.write(&[head, body]) {
            Ok(0) => IoOutcome::WouldBlock,
            Ok(n) => {
                self.ring();
                IoOutcome::Bytes(n)
            }
            Err(error) => broken(&error),
        }
    }

    /// Return whether a payload of this length is better sent as a reference, and can be.
    pub(super) fn sends_reference(&self, len_bytes: usize) -> bool {
        len_bytes >= REFERENCE_MIN_BYTES && self.duplex.is_read_by_peer()
    }

    /// Return where the peer finds a payload in memory that it has mapped, if it is better sent as such a reference.
    pub(super) fn place_of(&mut self, payload: &[u8]) -> Option<RegionPlace> {
        let regions = self.regions.as_mut().filter(|_| payload.len() >= MAPPED_MIN_BYTES)?;
        regions.place_of(payload, self.duplex.mapped_by_peer())
    }

    /// Return whether the next frame has to say that messages about mapped memory wait.
    pub(super) fn take_news(&mut self) -> bool {
        self.regions.as_mut().is_some_and(|regions| regions.take_news())
    }

    /// Take the peer's messages about mapped memory.
    pub(super) fn receive_regions(&mut self) {
        if let Some(regions) = &mut self.regions {
            self.duplex.set_mapped(regions.receive());
        }
    }

    /// Withdraw memory that was freed.
    pub(super) fn withdraw_freed(&mut self) {
        self.regions.iter_mut().for_each(|regions| regions.withdraw_freed());
    }

    /// Number a reference that has been written.
    pub(super) const fn number_reference(&mut self) -> u32 {
        self.references = self.references.wrapping_add(1);
        self.references
    }

    /// Return whether the peer has copied the bytes of a reference; `Ended` if it never will.
    pub(super) fn reference_outcome(&self, number: u32, len_bytes: usize) -> IoOutcome {
        // A peer is never 2^31 references behind: there is one at a time.
        if self.duplex.taken_by_peer().wrapping_sub(number).cast_signed() >= 0 {
            IoOutcome::Bytes(len_bytes)
        } else if self.is_ended {
            IoOutcome::Ended
        } else {
            IoOutcome::WouldBlock
        }
    }

    /// Withdraw the references that the peer has not taken. Later ones count for nothing either.
    pub(super) fn withdraw(&mut self) {
        self.duplex.withdraw();
        self.ring();
    }

    /// Copy bytes of the peer's memory.
    pub(super) fn copy(&self, address: u64, into: &mut [u8]) -> IoOutcome {
        let Some(memory) = &self.memory else { return IoOutcome::Ended };
        match memory.read(address, into) {
            Ok(()) => IoOutcome::Bytes(into.len()),
            Err(error) => {
                crate::log::debug!(%error, "a reference cannot be copied");
                IoOutcome::Ended
            }
        }
    }

    /// Copy bytes of the peer's memory that this rank has mapped.
    pub(super) fn copy_mapped(&self, place: RegionPlace, into: &mut [u8]) -> IoOutcome {
        match &self.regions {
            Some(regions) if regions.read(place, into) => IoOutcome::Bytes(into.len()),
            _ => {
                crate::log::warn!(?place, "a rank refers to memory that it has not handed over, and counts as gone");
                IoOutcome::Ended
            }
        }
    }

    /// Tell the peer that all bytes of its reference are copied. Returns false if it has withdrawn it.
    pub(super) fn take_reference(&self) -> bool {
        let is_taken = self.duplex.take_reference();
        self.ring();
        is_taken
    }

    /// Return whether a read would return something other than `WouldBlock`.
    pub(super) fn is_readable(&mut self) -> bool {
        self.is_ended || self.rx.available_bytes().map_or(true, |bytes| bytes > 0)
    }

    /// Return whether a write would return something other than `WouldBlock`.
    pub(super) fn is_writable(&mut self) -> bool {
        self.is_ended || self.tx.room_bytes().map_or(true, |bytes| bytes > 0)
    }

    /// Wake the peer if it sleeps, after something was published for it.
    pub(super) fn ring(&self) {
        self.bell.ring(self.duplex.peer_bell());
    }

    /// Announce that this rank is about to sleep: the peer rings its bell from now on.
    pub(super) fn arm(&self) {
        self.duplex.own_bell().arm();
    }

    /// Revoke the announcement.
    pub(super) fn disarm(&self) {
        self.duplex.own_bell().disarm();
    }
}

/// The last bytes that a rank sends over the socket.
#[derive(Debug, Clone, Copy)]
pub(super) struct Switch {
    pub(super) bytes: [u8; HEADER_BYTES],
    pub(super) len_bytes: usize,
}

impl Switch {
    /// Switch after these bytes.
    pub(super) fn after(last: &[u8]) -> Self {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..last.len()].copy_from_slice(last);
        Self { bytes, len_bytes: last.len() }
    }
}

impl Drop for SharedLink {
    /// What the peer has not copied by now is about to be freed.
    fn drop(&mut self) {
        self.withdraw();
    }
}

fn broken(error: &Poisoned) -> IoOutcome {
    crate::log::warn!(%error, "a rank broke the rules of shared memory, and counts as gone");
    IoOutcome::Ended
}

/// The length from which a payload is sent as a reference: below, two copies through the cache cost less than a system
/// call of the receiver and its answer.
pub(super) const REFERENCE_MIN_BYTES: usize = 64 << 10;
/// The same for a reference to memory that the receiver has mapped: only its answer is to be waited for.
pub(super) const MAPPED_MIN_BYTES: usize = 16 << 10;
