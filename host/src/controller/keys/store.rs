//! The controller's file of keys.
//!
//! ```toml
//! [[key]]
//! id = "3f2a9c0d11e08b77"
//! device = ["leaf0"]         # or: tenant = "ml", or: operator = true
//! secret = "..."             # 64 hexadecimal digits
//! expires_unix_s = 1830000000  # optional
//! revoked = true             # optional
//! ```

use super::{InvalidPrincipal, Principal};
use crate::controller::entropy::Entropy;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;
use sumac_hal::ctrl::secure::{Key, KeyError, KeyFileError, KeyId, KeyRefusal, read_private, replace_private};
use thiserror::Error;
use zeroize::Zeroizing;

/// The length of the longest store, in bytes.
const STORE_LEN_MAX: usize = 16 << 20;

/// A key that a controller knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRecord {
    /// The key.
    pub key: Key,
    /// Whom it stands for.
    pub principal: Arc<Principal>,
    /// When it expires, in seconds since 1970 by the controller's clock; `None`: never.
    pub expires_unix_s: Option<u64>,
    /// Whether it was revoked.
    pub is_revoked: bool,
}

/// The keys that a controller knows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyStore {
    records: BTreeMap<KeyId, KeyRecord>,
}

/// Why a store of keys cannot be used or changed. No message contains a secret.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KeyStoreError {
    /// The file cannot be read or written, or others can read it.
    #[error(transparent)]
    File(#[from] KeyFileError),
    /// The text is not a store.
    #[error("not a store of keys: {0}")]
    Syntax(String),
    /// A record is malformed.
    #[error("key {number} of the store: {source}")]
    Key {
        /// The record's number, from 1.
        number: usize,
        /// What is wrong with it.
        source: KeyError,
    },
    /// A record's principal is malformed.
    #[error("key {id}: {source}")]
    Principal {
        /// The key.
        id: KeyId,
        /// What is wrong with it.
        source: InvalidPrincipal,
    },
    /// A record has no principal, or several.
    #[error("key {0} must have exactly one of `device`, `tenant` and `operator = true`")]
    Kind(KeyId),
    /// Two records have the same id.
    #[error("two keys have the id {0}")]
    Duplicate(KeyId),
    /// There is no key of that id.
    #[error("no key {0}; `sumac key show` lists them")]
    Unknown(KeyId),
}

impl KeyStore {
    /// Read a store from a file.
    ///
    /// # Errors
    /// [`KeyStoreError`]; a file that others can read is refused.
    pub fn read(path: &Path) -> Result<Self, KeyStoreError> {
        Self::parse(&read_private(path, STORE_LEN_MAX)?)
    }

    /// Write the store to a file, which is replaced at once.
    ///
    /// # Errors
    /// [`KeyStoreError::File`].
    pub fn write(&self, path: &Path) -> Result<(), KeyStoreError> {
        Ok(replace_private(path, &self.reveal())?)
    }

    /// Parse a store.
    ///
    /// # Errors
    /// [`KeyStoreError`].
    pub fn parse(text: &str) -> Result<Self, KeyStoreError> {
        let file: File = toml::from_str(text).map_err(|error| {
            // The error's own text quotes the line, which may be a secret.
            let line = error.span().and_then(|span| text.get(..span.start)).map(|before| before.lines().count().max(1));
            KeyStoreError::Syntax(match line {
                Some(line) => format!("line {line} is malformed"),
                None => "it is malformed".into(),
            })
        })?;
        let mut store = Self::default();
        for (index, entry) in file.key.into_iter().enumerate() {
            let record = entry.into_record(index + 1)?;
            let id = record.key.id();
            if store.records.insert(id, record).is_some() {
                return Err(KeyStoreError::Duplicate(id));
            }
        }
        Ok(store)
    }

    /// Return the store as the text of its file, with all secrets.
    pub fn reveal(&self) -> Zeroizing<String> {
        // Of its final length, so that growing leaves no copies behind.
        let names = |record: &KeyRecord| record.principal.to_string().len() * 4;
        let len = self.records.values().map(|record| RECORD_TEXT_LEN + names(record)).sum::<usize>();
        let mut text = Zeroizing::new(String::with_capacity(HEAD.len() + len));
        text.push_str(HEAD);
        for record in self.records.values() {
            let _ = writeln!(text, "\n[[key]]\nid = \"{}\"", record.key.id());
            // What names may contain is quoted in the same way by TOML.
            let _ = match &*record.principal {
                Principal::Device { names } => writeln!(text, "device = {names:?}"),
                Principal::Tenant { name } => writeln!(text, "tenant = {name:?}"),
                Principal::Operator => writeln!(text, "operator = true"),
            };
            let _ = writeln!(text, "secret = \"{}\"", record.key.reveal_secret());
            if let Some(expires) = record.expires_unix_s {
                let _ = writeln!(text, "expires_unix_s = {expires}");
            }
            if record.is_revoked {
                text.push_str("revoked = true\n");
            }
        }
        text
    }

    /// Make a key for a principal, and add it. `random` is 40 random bytes, used for nothing else.
    ///
    /// # Errors
    /// [`InvalidPrincipal`].
    pub fn add(
        &mut self,
        principal: Principal,
        expires_unix_s: Option<u64>,
        random: &Zeroizing<[u8; 40]>,
    ) -> Result<&Key, InvalidPrincipal> {
        principal.check()?;
        let mut secret = Zeroizing::new([0; 32]);
        secret.copy_from_slice(&random[..32]);
        let mut id = random[32..].iter().fold(0_u64, |id, byte| id << 8 | u64::from(*byte));
        while self.records.contains_key(&KeyId(id)) {
            id = id.wrapping_add(1);
        }
        let key = Key::new(KeyId(id), *secret);
        let record = KeyRecord { key, principal: Arc::new(principal), expires_unix_s, is_revoked: false };
        Ok(&self.records.entry(KeyId(id)).or_insert(record).key)
    }

    /// Make a key for a principal by the system's randomness, and add it.
    ///
    /// # Errors
    /// [`InvalidPrincipal`].
    pub fn add_random(&mut self, principal: Principal) -> Result<&Key, InvalidPrincipal> {
        self.add(principal, None, &Zeroizing::new(Entropy::System.bytes([0; 2])))
    }

    /// Make a store of one key.
    ///
    /// # Errors
    /// [`InvalidPrincipal`].
    pub fn of_one(key: Key, principal: Principal) -> Result<Self, InvalidPrincipal> {
        principal.check()?;
        let id = key.id();
        let record = KeyRecord { key, principal: Arc::new(principal), expires_unix_s: None, is_revoked: false };
        Ok(Self { records: BTreeMap::from([(id, record)]) })
    }

    /// Return a store of those keys that are wanted, valid or not.
    pub fn only(&self, is_wanted: impl Fn(&KeyRecord) -> bool) -> Self {
        let wanted = self.records.iter().filter(|(_, record)| is_wanted(record));
        Self { records: wanted.map(|(id, record)| (*id, record.clone())).collect() }
    }

    /// Revoke a key.
    ///
    /// # Errors
    /// [`KeyStoreError::Unknown`].
    pub fn revoke(&mut self, id: KeyId) -> Result<(), KeyStoreError> {
        self.records.get_mut(&id).ok_or(KeyStoreError::Unknown(id))?.is_revoked = true;
        Ok(())
    }

    /// All keys, in order of their ids.
    pub fn records(&self) -> impl Iterator<Item = &KeyRecord> {
        self.records.values()
    }

    /// The key of this id, at this time.
    ///
    /// # Errors
    /// [`KeyRefusal::Unknown`], [`KeyRefusal::Revoked`] or [`KeyRefusal::Expired`].
    pub fn find(&self, id: KeyId, unix_s: u64) -> Result<&KeyRecord, KeyRefusal> {
        let record = self.get(id).ok_or(KeyRefusal::Unknown)?;
        record.check(unix_s).map(|()| record)
    }

    /// The key of this id, valid or not.
    pub(in crate::controller) fn get(&self, id: KeyId) -> Option<&KeyRecord> {
        self.records.get(&id)
    }
}

/// A key's life in the store's time.
impl KeyRecord {
    /// Check that the key is valid at this time.
    pub(in crate::controller) fn check(&self, unix_s: u64) -> Result<(), KeyRefusal> {
        if self.is_revoked {
            return Err(KeyRefusal::Revoked);
        }
        if self.expires_unix_s.is_some_and(|expires| expires <= unix_s) {
            return Err(KeyRefusal::Expired);
        }
        Ok(())
    }

    /// Whether the key has expired by now.
    pub fn has_expired(&self) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        self.expires_unix_s.is_some_and(|expires| expires <= now)
    }
}

const HEAD: &str = "# Keys of a Sumac controller: secrets. Written by `sumac key`.\n";

/// An upper bound of the text of a record, without its names.
const RECORD_TEXT_LEN: usize = 256;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    key: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    id: String,
    secret: Secret,
    device: Option<Vec<String>>,
    tenant: Option<String>,
    #[serde(default)]
    operator: bool,
    expires_unix_s: Option<u64>,
    #[serde(default)]
    revoked: bool,
}

#[derive(Deserialize)]
#[serde(from = "String")]
struct Secret(Zeroizing<String>);

impl From<String> for Secret {
    fn from(digits: String) -> Self {
        Self(Zeroizing::new(digits))
    }
}

impl Entry {
    fn into_record(self, number: usize) -> Result<KeyRecord, KeyStoreError> {
        let malformed = |source| KeyStoreError::Key { number, source };
        let id: KeyId = self.id.parse().map_err(malformed)?;
        let key = Key::from_parts(id, &self.secret.0).map_err(malformed)?;
        let principal = match (self.device, self.tenant, self.operator) {
            (Some(names), None, false) => Principal::Device { names },
            (None, Some(name), false) => Principal::Tenant { name },
            (None, None, true) => Principal::Operator,
            _ => return Err(KeyStoreError::Kind(id)),
        };
        principal.check().map_err(|source| KeyStoreError::Principal { id, source })?;
        let (expires_unix_s, is_revoked) = (self.expires_unix_s, self.revoked);
        Ok(KeyRecord { key, principal: Arc::new(principal), expires_unix_s, is_revoked })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{read_key, write_new_key};
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn random(byte: u8) -> Zeroizing<[u8; 40]> {
        let mut random = Zeroizing::new([byte; 40]);
        random[32..].fill(byte + 0x10);
        random
    }

    fn store() -> KeyStore {
        let mut store = KeyStore::default();
        let device = Principal::Device { names: vec!["leaf \"0\"\\".into(), "leaf1".into()] };
        store.add(device, Some(1000), &random(1)).expect("valid");
        store.add(Principal::Tenant { name: "ml".into() }, None, &random(2)).expect("valid");
        store.add(Principal::Operator, None, &random(3)).expect("valid");
        store
    }

    const ID: KeyId = KeyId(0x1212_1212_1212_1212);

    #[test]
    fn store_as_text_round_trips() {
        let mut store = store();
        store.revoke(ID).expect("it has that key");
        assert_eq!(KeyStore::parse(&store.reveal()).expect("a store"), store);
        assert!(store.reveal().capacity() >= store.reveal().len());
    }

    #[test]
    fn revoked_expired_and_unknown_keys_are_told_apart() {
        let mut store = store();
        let expiring = KeyId(0x1111_1111_1111_1111);
        assert!(store.find(expiring, 999).is_ok() && store.find(ID, u64::MAX).is_ok());
        assert_eq!(store.find(expiring, 1000), Err(KeyRefusal::Expired));
        assert_eq!(store.find(KeyId(7), 0), Err(KeyRefusal::Unknown));
        store.revoke(ID).expect("it has that key");
        assert_eq!(store.find(ID, 0), Err(KeyRefusal::Revoked));
        assert!(matches!(store.revoke(KeyId(7)), Err(KeyStoreError::Unknown(KeyId(7)))));
    }

    #[test]
    fn ids_that_collide_are_moved_apart() {
        let mut store = store();
        let id = store.add(Principal::Operator, None, &random(2)).expect("valid").id();
        assert_eq!((id, store.records().count()), (KeyId(ID.0 + 1), 4));
    }

    #[test]
    fn error_of_a_malformed_store_says_where_without_secrets() {
        let good = store().reveal();
        let secret = "02".repeat(32);
        for (from, to, says) in [
            ("secret = \"0202", "secret = 0202", "line 12 is malformed"),
            ("secret = \"0202", "sekret = \"0202", "malformed"),
            ("secret = \"0202", "secret = \"020", "64 hexadecimal digits"),
            ("tenant = \"ml\"\n", "", "exactly one"),
            ("tenant = \"ml\"\n", "tenant = \"ml\"\noperator = true\n", "exactly one"),
            ("tenant = \"ml\"\n", "tenant = \"m l\"\n", "letters, digits"),
            ("id = \"1111111111111111\"", "id = \"1212121212121212\"", "two keys"),
        ] {
            assert!(good.contains(from), "{from}");
            let error = KeyStore::parse(&good.replace(from, to)).expect_err(to);
            let shown = format!("{error} {error:?}");
            assert!(shown.contains(says) && !shown.contains(&secret[..8]), "{shown}");
        }
    }

    #[test]
    fn debug_of_a_store_shows_no_secret() {
        let shown = format!("{:?}", store());
        assert!(
            shown.contains("1212121212121212") && !shown.contains(&"02".repeat(9)) && !shown.contains("2, 2, 2"),
            "{shown}"
        );
    }

    #[test]
    fn files_are_private_and_others_are_refused() {
        let folder = Folder::new();
        let (path, key_path) = (folder.0.join("keys.toml"), folder.0.join("ml.key"));
        store().write(&path).expect("written");
        store().write(&path).expect("replaced");
        let store = KeyStore::read(&path).expect("read");
        let key = &store.find(ID, 0).expect("it has that key").key;
        write_new_key(&key_path, key, "tenant ml").expect("written");
        assert_eq!(read_key(&key_path).expect("read"), *key);
        assert!(write_new_key(&key_path, key, "tenant ml").is_err(), "a key is not replaced");
        for path in [&path, &key_path] {
            let mode = || path.metadata().expect("it exists").permissions().mode() & 0o7777;
            assert_eq!(mode(), 0o600);
            for mode in [0o640, 0o604, 0o620] {
                std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("it is ours");
                let errors = [
                    KeyStore::read(path).err().map(|error| error.to_string()),
                    read_key(path).err().map(|error| error.to_string()),
                ];
                assert!(errors.iter().flatten().filter(|error| error.contains("chmod 600")).count() == 2, "{errors:?}");
            }
        }
        assert_eq!(std::fs::read_dir(&folder.0).expect("it exists").count(), 2, "nothing else is left behind");
    }

    #[test]
    fn key_file_with_other_content_is_malformed() {
        let folder = Folder::new();
        let path = folder.0.join("key");
        for text in ["", "# only a comment\n", "a\nb\n", "sumac-key-v1 01 02\n"] {
            replace_private(&path, text).expect("written");
            assert!(matches!(read_key(&path), Err(KeyFileError::Key { .. })), "{text:?}");
        }
        replace_private(&path, &"x".repeat(70_000)).expect("written");
        assert!(matches!(read_key(&path), Err(KeyFileError::TooLong { .. })));
    }

    /// A folder that is removed when it is dropped.
    struct Folder(std::path::PathBuf);

    impl Folder {
        fn new() -> Self {
            use std::sync::atomic::{AtomicU32, Ordering};
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let name = format!("sumac-keys-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            let path = std::env::temp_dir().join(name);
            std::fs::create_dir(&path).expect("a new folder");
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}
