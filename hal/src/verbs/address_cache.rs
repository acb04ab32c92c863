//! A cache of address handles: each host is resolved once.
//!
//! An address handle refers to a port, whatever queue pair is behind it: one serves all queue pairs of a host.
//!
//! Invariants:
//! - An address handle is destroyed only when no packet that uses it is in flight.
//! - The table does not grow, and a lookup allocates nothing.

use super::config::VerbsError;
use super::datagrams::{AddressHandle, Source};
use super::objects::{Domain, GidEntry};
use crate::port::VerbsAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The maximum number of hosts in the cache; beyond it, the least recently used one is evicted.
const MAX_PATHS: usize = 4096;

/// How long a host that could not be resolved is not tried again: an attempt can block for as long as the kernel waits.
const RETRY: Duration = Duration::from_secs(1);

/// The GID and LID of a port.
type Key = ([u8; 16], u16);

struct Entry {
    key: Key,
    handle: Result<AddressHandle, Instant>,
    /// The last packet that used it, as counted by the transmit queue.
    last: u64,
}

/// The cached handles, sorted by key.
pub(super) struct AddressCache {
    entries: Vec<Entry>,
    domain: Arc<Domain>,
    from: Source,
    /// Whether the device has the address.
    has_source: bool,
}

impl AddressCache {
    pub(super) fn new(domain: &Arc<Domain>, from: Source) -> Self {
        Self { entries: Vec::with_capacity(MAX_PATHS), domain: Arc::clone(domain), from, has_source: true }
    }

    /// Return the handle of `to` for packet number `nth`, where packets below `done` have completed. `None`: the host
    /// cannot be resolved now.
    pub(super) fn find(&mut self, to: &VerbsAddr, nth: u64, done: u64) -> Option<&AddressHandle> {
        let key = (to.gid, to.lid);
        let at = match self.entries.binary_search_by_key(&key, |entry| entry.key) {
            Ok(at) if self.entries[at].handle.as_ref().is_err_and(|retry| Instant::now() >= *retry) => {
                self.entries[at].handle = self.resolve(to);
                at
            }
            Ok(at) => at,
            Err(_) => self.insert(to, done)?,
        };
        let entry = &mut self.entries[at];
        entry.last = nth;
        entry.handle.as_ref().ok()
    }

    fn insert(&mut self, to: &VerbsAddr, done: u64) -> Option<usize> {
        if self.entries.len() == MAX_PATHS {
            let oldest = (0..MAX_PATHS).min_by_key(|&at| self.entries[at].last)?;
            if self.entries[oldest].last >= done {
                return None;
            }
            self.entries.remove(oldest);
        }
        let key = (to.gid, to.lid);
        let entry = Entry { key, handle: self.resolve(to), last: 0 };
        let at = self.entries.partition_point(|entry| entry.key < key);
        self.entries.insert(at, entry);
        Some(at)
    }

    fn resolve(&self, to: &VerbsAddr) -> Result<AddressHandle, Instant> {
        let retry = || Instant::now() + RETRY;
        if !self.has_source {
            return Err(retry());
        }
        AddressHandle::new(&self.domain, &self.from, to.gid, to.lid).map_err(|_: VerbsError| retry())
    }

    /// Send from this entry of the port's table from the next [`AddressCache::clear`] on; `None`: the device has the
    /// address no more.
    pub(super) fn set_source(&mut self, gid: Option<GidEntry>) {
        self.has_source = gid.is_some();
        self.from.gid = gid.unwrap_or(self.from.gid);
    }

    /// Drop all handles; nothing may be in flight. Hosts may have moved.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }
}
