//! Buffers for messages, from when they are queued until the peer's hardware has acknowledged them.
//!
//! Invariant: a slot is reused only when its message, or a later operation, has completed.

use super::config::VerbsError;
use super::memory::RegisteredBuffer;
use super::objects::Domain;
use crate::remote::{BUFFERS, MESSAGE_LEN_BYTES};
use std::sync::Arc;

/// As many as the peer has receive buffers for.
const SLOTS: usize = BUFFERS;

/// The slots of a connection.
pub(super) struct Slots {
    memory: RegisteredBuffer,
    /// For each slot, the number after its message's operation.
    used: [u64; SLOTS],
    next: usize,
}

impl Slots {
    pub(super) fn new(domain: &Arc<Domain>) -> Result<Self, VerbsError> {
        Ok(Self { memory: RegisteredBuffer::new(domain, SLOTS * MESSAGE_LEN_BYTES)?, used: [0; SLOTS], next: 0 })
    }

    /// Return whether the next slot is free, where operations below `done` have completed.
    pub(super) const fn has_room(&self, done: u64) -> bool {
        self.used[self.next] <= done
    }

    /// Copy a message into the next slot, for operation `nth`; returns its address and key.
    ///
    /// # Panics
    /// If the message is too long: a bug of the caller.
    pub(super) fn write(&mut self, message: &[u8], nth: u64) -> (u64, u32) {
        assert!(message.len() <= MESSAGE_LEN_BYTES, "a message of {} bytes", message.len());
        let offset = self.next * MESSAGE_LEN_BYTES;
        self.memory.copy_in(offset, message);
        self.used[self.next] = nth + 1;
        self.next = (self.next + 1) % SLOTS;
        (self.memory.device_addr(offset, message.len()), self.memory.lkey())
    }
}
