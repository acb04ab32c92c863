//! The capture of a board's packets: one file that all shards share, each as an interface of its own.
//!
//! Invariants:
//! - blocks of different shards never mix;
//! - only the file's owner can read it, because packets carry keys;
//! - an error ends the capture, not the board.

use super::BoardError;
use std::fs::{File, OpenOptions};
use std::io::BufWriter;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;
use sumac_hal::port::Addr;
use sumac_hal::port::pcap::{self, IoSink, Pcap, PcapSink};

/// A capture file. Clones write to the same file.
#[derive(Debug, Clone)]
pub(super) struct Capture {
    file: Arc<Mutex<IoSink<BufWriter<File>>>>,
}

impl Capture {
    /// Create the file, or replace it, and begin the capture.
    pub(super) fn create(path: &Path) -> Result<Self, BoardError> {
        let open = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
        let file = open.map_err(|source| BoardError::Capture { path: path.into(), source })?;
        let mut capture = Self { file: Arc::new(Mutex::new(IoSink::new(BufWriter::new(file)))) };
        pcap::begin(&mut capture);
        Ok(capture)
    }

    /// Add a shard, whose times begin at `start`. Shards are added in the order of their numbers.
    pub(super) fn shard(&self, (device, shard): (&str, u16), addr: Addr, start: SystemTime) -> Pcap<Self> {
        let epoch = start.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let epoch_ns = u64::try_from(epoch.as_nanos()).unwrap_or(u64::MAX);
        Pcap::add(self.clone(), shard.into(), &format!("{device}/shard-{shard}"), addr, epoch_ns)
    }

    fn lock(&self) -> MutexGuard<'_, IoSink<BufWriter<File>>> {
        // A panic elsewhere cannot leave a block half-written: nothing in a write panics.
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Write, and log the error that this runs into.
    fn try_to(&self, action: impl FnOnce(&mut IoSink<BufWriter<File>>)) {
        let mut file = self.lock();
        let had_failed = file.error().is_some();
        action(&mut file);
        if let Some(error) = file.error().filter(|_| !had_failed) {
            tracing::warn!(%error, "the capture has ended: its file cannot be written");
        }
    }
}

impl PcapSink for Capture {
    fn write(&mut self, parts: &[&[u8]]) {
        self.try_to(|file| file.write(parts));
    }

    fn flush(&mut self) {
        self.try_to(PcapSink::flush);
    }
}
