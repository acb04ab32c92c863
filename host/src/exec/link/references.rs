//! Payloads that are sent as references: the receiver copies them out of the sender's memory, and says so.

use super::{IoOutcome, Link};
use crate::exec::regions::RegionPlace;

/// Where the rest of a payload is in the peer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::exec) enum Reference {
    /// At this address: the kernel copies it.
    Address(u64),
    /// In a region that this rank has mapped.
    Mapped(RegionPlace),
}

impl Reference {
    /// Return the number whose last bits are those of the place in its page.
    const fn page_bits(self) -> usize {
        match self {
            Self::Address(address) => address as usize,
            Self::Mapped(place) => place.offset_bytes as usize,
        }
    }

    /// Return where the rest is after some bytes.
    const fn after(self, len_bytes: usize) -> Self {
        let len = len_bytes as u64;
        match self {
            Self::Address(address) => Self::Address(address.wrapping_add(len)),
            Self::Mapped(RegionPlace { handle, offset_bytes }) => {
                Self::Mapped(RegionPlace { handle, offset_bytes: offset_bytes.wrapping_add(len) })
            }
        }
    }
}

impl Link {
    /// Return the part of scratch memory to which the kernel copies a reference fastest, behind `carried` bytes: where
    /// it is as far into its page as the source.
    pub(in crate::exec) fn aligned<'s>(&self, scratch: &'s mut [u8], carried: usize) -> &'s mut [u8] {
        let address = self.rx.reference.map_or(0, Reference::page_bits);
        let ahead = address.wrapping_sub(scratch.as_ptr().addr()).wrapping_sub(carried) % PAGE_BYTES;
        let len = scratch.len() - PAGE_BYTES;
        &mut scratch[if self.rx.reference.is_some() { ahead } else { 0 }..][..len]
    }

    /// Return whether the kernel copies a payload to this place fast. Some processors copy byte by byte if the
    /// destination begins just after the source in its page, as glibc's bug 30994 describes.
    pub(in crate::exec) fn is_fast_to(&self, place: &[u8]) -> bool {
        let Some(Reference::Address(address)) = self.rx.reference else { return true };
        let ahead = place.as_ptr().addr().wrapping_sub(address as usize) % PAGE_BYTES;
        !(1..SLOW_BELOW_BYTES).contains(&ahead)
    }

    /// Copy bytes of a reference, and say so after the last one.
    pub(in crate::exec) fn copy_reference(&mut self, reference: Reference, into: &mut [u8]) -> IoOutcome {
        let Some(shared) = &self.shared else { return IoOutcome::Ended };
        let copied = match reference {
            Reference::Address(address) => shared.copy(address, into),
            Reference::Mapped(place) => shared.copy_mapped(place, into),
        };
        if copied == IoOutcome::Bytes(into.len()) {
            let is_last = into.len() == self.rx.left_bytes;
            self.rx.reference = (!is_last).then(|| reference.after(into.len()));
            if is_last && !shared.take_reference() {
                self.rx.left_bytes = 0;
                return IoOutcome::Ended;
            }
        }
        copied
    }

    /// Forget a reference that the peer has withdrawn, or whose memory is gone: only an abort can follow.
    pub(in crate::exec) const fn forget_reference(&mut self) {
        if self.rx.reference.is_some() {
            (self.rx.reference, self.rx.left_bytes, self.rx.frame) = (None, 0, None);
        }
    }

    /// Return whether a payload is sent as a reference.
    pub(in crate::exec) fn sends_reference(&self, len_bytes: usize) -> bool {
        self.tx.is_shared && self.shared.as_ref().is_some_and(|shared| shared.sends_reference(len_bytes))
    }

    /// Return the bytes of a reference once the peer has copied them.
    pub(in crate::exec) fn finish_reference(&mut self, number: u32) -> IoOutcome {
        let Some(shared) = &self.shared else { return IoOutcome::Ended };
        let outcome = shared.reference_outcome(number, self.tx.left_bytes);
        if matches!(outcome, IoOutcome::Bytes(_)) {
            (self.tx.reference, self.tx.left_bytes) = (None, 0);
        }
        outcome
    }

    /// Send a payload as a reference, whose header is sent, and wait for [`Link::finish_reference`].
    pub(in crate::exec) fn begin_reference(&mut self, len_bytes: usize) {
        self.tx.left_bytes = len_bytes;
        self.tx.reference = self.shared.as_mut().map(|shared| shared.number_reference());
    }

    /// Withdraw a reference that the peer has not copied: its memory goes back to the caller.
    pub(in crate::exec) fn withdraw_reference(&mut self) {
        if self.tx.reference.take().is_some() {
            self.tx.left_bytes = 0;
            self.shared.iter_mut().for_each(|shared| shared.withdraw());
        }
    }
}

/// Bytes of a reference copied at a time, so that an operation notices an abort meanwhile.
pub(in crate::exec) const COPY_MAX_BYTES: usize = 1 << 20;
/// The period of addresses after which stores and loads disturb each other.
pub(in crate::exec) const PAGE_BYTES: usize = 4096;
/// How far a destination has to be ahead of its source within that.
const SLOW_BELOW_BYTES: usize = 64;
