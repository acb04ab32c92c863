//! The ways to other hosts, each found once.
//!
//! A way leads to a port, whatever queue pair is behind it: there is one for each host that this one talks to.
//!
//! Invariants:
//! - A way is let go of only when nothing that goes by it is in flight.
//! - The table does not grow: looking a way up allocates nothing.

use super::config::VerbsError;
use super::datagrams::Path;
use super::objects::{Domain, GidEntry};
use crate::port::VerbsAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most hosts that are known at a time; beyond, the one that was not sent to for longest is forgotten.
const MAX_PATHS: usize = 4096;

/// How long a host that was not found is not looked for again: each look can take as long as the kernel waits for it.
const RETRY: Duration = Duration::from_secs(1);

/// Where a way leads.
type Key = ([u8; 16], u16);

struct Entry {
    key: Key,
    path: Result<Path, Instant>,
    /// The last packet that went by it, as the transmit queue counts.
    last: u64,
}

/// The ways that are known, in order of where they lead.
pub(super) struct Paths {
    entries: Vec<Entry>,
    domain: Arc<Domain>,
    from: GidEntry,
}

impl Paths {
    pub(super) fn new(domain: &Arc<Domain>, from: GidEntry) -> Self {
        Self { entries: Vec::with_capacity(MAX_PATHS), domain: Arc::clone(domain), from }
    }

    /// Find the way to `to` for packet number `nth`, where those below `done` have left. `None`: there is none now.
    pub(super) fn find(&mut self, to: &VerbsAddr, nth: u64, done: u64) -> Option<&Path> {
        let key = (to.gid, to.lid);
        let at = match self.entries.binary_search_by_key(&key, |entry| entry.key) {
            Ok(at) if self.entries[at].path.as_ref().is_err_and(|retry| Instant::now() >= *retry) => {
                self.entries[at].path = self.look(to);
                at
            }
            Ok(at) => at,
            Err(_) => self.insert(to, done)?,
        };
        let entry = &mut self.entries[at];
        entry.last = nth;
        entry.path.as_ref().ok()
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
        let entry = Entry { key, path: self.look(to), last: 0 };
        let at = self.entries.partition_point(|entry| entry.key < key);
        self.entries.insert(at, entry);
        Some(at)
    }

    fn look(&self, to: &VerbsAddr) -> Result<Path, Instant> {
        Path::new(&self.domain, &self.from, to.gid, to.lid).map_err(|_: VerbsError| Instant::now() + RETRY)
    }

    /// Forget all ways, as nothing is in flight: hosts may have moved.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }
}
