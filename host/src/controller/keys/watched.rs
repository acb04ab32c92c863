//! A controller's file of keys, read again when it changes.

use super::KeyStore;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::time::Instant;

/// How often to look whether the file has changed.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// What differs between two versions of the file: device, inode, length, time of the last change in seconds and
/// nanoseconds.
type Stamp = (u64, u64, u64, i64, i64);

/// The file.
#[derive(Debug)]
pub(in crate::controller) struct KeysFile {
    path: PathBuf,
    stamp: Option<Stamp>,
    looked_at: Option<Instant>,
}

impl KeysFile {
    /// Watch a file. It is read at the first look, since it may have changed after the caller has read it.
    pub(in crate::controller) const fn new(path: PathBuf) -> Self {
        Self { path, stamp: None, looked_at: None }
    }

    /// Return the keys if the file has changed. A file that cannot be used is reported, and the keys remain.
    pub(in crate::controller) fn poll(&mut self, now: Instant) -> Option<Arc<KeyStore>> {
        if self.looked_at.is_some_and(|at| now - at < LOOK_INTERVAL) {
            return None;
        }
        self.looked_at = Some(now);
        let stamp = std::fs::metadata(&self.path)
            .ok()
            .map(|file| (file.dev(), file.ino(), file.len(), file.ctime(), file.ctime_nsec()));
        if stamp == self.stamp {
            return None;
        }
        self.stamp = stamp;
        match KeyStore::read(&self.path) {
            Ok(keys) => Some(Arc::new(keys)),
            Err(error) => {
                tracing::error!(%error, "cannot read the changed keys; those read before remain valid");
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_file_is_read_again_and_an_unusable_one_changes_nothing() {
        let path = std::env::temp_dir().join(format!("sumac-watched-{}.toml", std::process::id()));
        let at = |ms| Instant::ZERO + Duration::from_millis(ms);
        KeyStore::default().write(&path).expect("a folder");
        let mut file = KeysFile::new(path.clone());
        assert!(file.poll(at(0)).is_some(), "it may have changed since it was read");
        assert!(file.poll(at(1000)).is_none(), "unchanged");
        KeyStore::default().write(&path).expect("a folder");
        assert!(file.poll(at(1400)).is_none(), "not due");
        assert!(file.poll(at(1500)).is_some());
        std::fs::write(&path, "[[key]]\n").expect("a file");
        assert!(file.poll(at(2000)).is_none() && file.poll(at(2500)).is_none(), "malformed");
        std::fs::remove_file(&path).expect("a file");
        assert!(file.poll(at(3000)).is_none(), "gone");
    }
}
