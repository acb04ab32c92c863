//! The configuration file of a host: settings of its controller, devices and ranks, in TOML.
//!
//! ```toml
//! [controller]
//! listen = "[::]:7847"
//! keys = "/var/lib/sumac/keys.toml"
//!
//! [device]
//! controller = "controller-a:7847"
//! key-file = "/etc/sumac/leaf0.key"
//!
//! [rank]
//! controller = "controller-a:7847"
//! join_timeout = 120
//! ```
//!
//! Keys of `[controller]` and `[device]` are the long options of `sumac controller` and `sumac device`; those of
//! `[rank]` are the variables that [`JoinConfig::from_env`](crate::JoinConfig::from_env) reads, without `SUMAC_` and in
//! lower case. Options beat the environment, the environment beats the file, and the file beats the defaults.
//!
//! Whoever reads a table says which keys it knows, so an unknown one is always an error.
//!
//! Invariants: a file is bounded before it is read. No key of a principal is accepted in it, and no error shows a value
//! that could be one.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The variable that names the file.
pub const VARIABLE: &str = "SUMAC_CONFIG";

/// The maximum length of a file in bytes.
pub const LEN_MAX_BYTES: usize = 64 << 10;

/// How the text of a key begins (`sumac key new`).
const SECRET: &str = "sumac-key-";

/// A table of the file: who it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Section {
    /// `sumac controller`.
    Controller,
    /// `sumac device`.
    Device,
    /// Ranks that join with [`JoinConfig::from_env`](crate::JoinConfig::from_env).
    Rank,
}

impl Section {
    /// All tables.
    pub const ALL: [Self; 3] = [Self::Controller, Self::Device, Self::Rank];

    /// Return the name of the table.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::Device => "device",
            Self::Rank => "rank",
        }
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}]", self.name())
    }
}

/// A value in the file. Numbers are text, as in options and variables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// `true` or `false`.
    Flag(bool),
    /// A string or a number.
    One(String),
    /// A list of strings and numbers.
    Many(Vec<String>),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(is_set) => is_set.fmt(f),
            Self::One(text) => f.pad(text),
            Self::Many(texts) => f.pad(&texts.join(",")),
        }
    }
}

/// A key and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The key, one of those that the reader knows.
    pub key: String,
    /// The value.
    pub value: Value,
}

/// Why a file is refused. Each error names the file.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigFileError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is too long.
    #[error("the configuration file {} is longer than {LEN_MAX_BYTES} bytes; is it the right file?", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// The file is not TOML.
    #[error("{}:{line}: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// There is no such table, or a key is in none.
    #[error("{}: {name:?} is no table of a configuration file; it has [controller], [device] and [rank]", path.display())]
    Section {
        /// The file.
        path: PathBuf,
        /// The name.
        name: String,
    },
    /// A table has no such key.
    #[error("{}: {section} has no key {key:?}{}", path.display(), suggestion(similar.as_deref()))]
    Key {
        /// The file.
        path: PathBuf,
        /// The table.
        section: Section,
        /// The key.
        key: String,
        /// The known key that is closest, if one is close.
        similar: Option<String>,
    },
    /// A key cannot have this value.
    #[error("{}: {section} {key}: {why}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The table.
        section: Section,
        /// The key.
        key: String,
        /// What is wrong with the value, and what to do.
        why: String,
    },
}

fn suggestion(similar: Option<&str>) -> String {
    similar.map_or_else(String::new, |similar| format!("; did you mean {similar:?}?"))
}

/// A file that has been read; its tables are checked by those who know their keys.
#[derive(Debug, Clone)]
pub struct ConfigFile {
    path: PathBuf,
    tables: toml::Table,
}

impl ConfigFile {
    /// Read the file that `SUMAC_CONFIG` names, if it names one.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn from_env() -> Result<Option<Self>, ConfigFileError> {
        let named = std::env::var_os(VARIABLE).filter(|path: &OsString| !path.is_empty());
        named.map(|path| Self::read(Path::new(&path))).transpose()
    }

    /// Read a file.
    ///
    /// # Errors
    /// [`ConfigFileError`], but for those about keys and values.
    pub fn read(path: &Path) -> Result<Self, ConfigFileError> {
        let failed = |source| ConfigFileError::Read { path: path.to_owned(), source };
        let mut text = String::new();
        let file = File::open(path).map_err(failed)?;
        file.take(LEN_MAX_BYTES as u64 + 1).read_to_string(&mut text).map_err(failed)?;
        Self::parse(path, &text)
    }

    /// Parse the text of a file. Errors name it as `path`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigFileError> {
        let path = path.to_owned();
        if text.len() > LEN_MAX_BYTES {
            return Err(ConfigFileError::TooLong { path });
        }
        // The error's own text would show the line, which may hold a secret.
        let tables: toml::Table = match toml::from_str(text) {
            Ok(tables) => tables,
            Err(error) => {
                let start = error.span().map_or(0, |span| span.start);
                let line = 1 + text.bytes().take(start).filter(|byte| *byte == b'\n').count();
                let message = error.message().trim().replace('\n', "; ");
                return Err(ConfigFileError::Syntax { path, line, message });
            }
        };
        let is_section = |name: &str| Section::ALL.iter().any(|section| section.name() == name);
        match tables.iter().find(|(name, value)| !is_section(name) || !value.is_table()) {
            Some((name, _)) => Err(ConfigFileError::Section { path, name: name.clone() }),
            None => Ok(Self { path, tables }),
        }
    }

    /// Return the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Return what a table sets; nothing if the file does not have it. `known` are the keys that it may have.
    ///
    /// # Errors
    /// [`ConfigFileError::Key`] and [`ConfigFileError::Value`].
    pub fn settings(&self, section: Section, known: &[&str]) -> Result<Vec<Setting>, ConfigFileError> {
        let Some(table) = self.tables.get(section.name()).and_then(toml::Value::as_table) else { return Ok(vec![]) };
        table.iter().map(|(key, value)| self.setting(section, known, key, value)).collect()
    }

    fn setting(
        &self,
        section: Section,
        known: &[&str],
        key: &str,
        value: &toml::Value,
    ) -> Result<Setting, ConfigFileError> {
        if !known.contains(&key) {
            if key == "key" {
                let named = known.iter().find(|known| known.starts_with("key")).unwrap_or(&"a file");
                return Err(self.invalid(section, key, format!("a key is never in this file; name its file: {named}")));
            }
            let similar = closest(key, known.iter().copied()).map(str::to_owned);
            return Err(ConfigFileError::Key { path: self.path.clone(), section, key: key.to_owned(), similar });
        }
        let value = match value {
            toml::Value::Boolean(is_set) => Value::Flag(*is_set),
            toml::Value::Array(values) => {
                let texts: Option<_> = values.iter().map(scalar).collect();
                let why = "a list has strings and numbers only";
                Value::Many(texts.ok_or_else(|| self.invalid(section, key, why))?)
            }
            _ => Value::One(scalar(value).ok_or_else(|| {
                self.invalid(section, key, format!("a {} is not a string, a number or a list", value.type_str()))
            })?),
        };
        if value.to_string().contains(SECRET) {
            return Err(self.invalid(section, key, "the value holds a key; write it to a file, and name that"));
        }
        Ok(Setting { key: key.to_owned(), value })
    }

    /// Return the error for a value.
    pub fn invalid(&self, section: Section, key: &str, why: impl Into<String>) -> ConfigFileError {
        ConfigFileError::Value { path: self.path.clone(), section, key: key.to_owned(), why: why.into() }
    }
}

/// Return a string or number as text.
fn scalar(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Return the known name that the fewest edits make of this one, if two are enough.
pub(crate) fn closest<'k>(name: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    // More than that is not close, and costs time.
    let is_short = name.len() <= 64;
    let near = known.into_iter().filter(|_| is_short).map(|known| (distance(name, known), known)).min();
    near.filter(|&(edits, _)| edits <= 2).map(|(_, known)| known)
}

/// Count the bytes to insert, delete or replace that make `b` of `a` (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: [&str; 5] = ["lease", "key-file", "quota", "no-shm", "controller"];

    fn device(text: &str) -> Result<Vec<Setting>, String> {
        let file = ConfigFile::parse(Path::new("a.toml"), text).map_err(|error| error.to_string())?;
        file.settings(Section::Device, &KNOWN).map_err(|error| error.to_string())
    }

    #[test]
    fn values_of_each_type_become_text_flags_and_lists() {
        let text = "[device]\nlease = 7\nno-shm = true\nquota = ['a', 2]\ncontroller = 'c'\n[rank]\nany = 1";
        let found = device(text).expect("valid");
        let value = |key: &str| found.iter().find(|setting| setting.key == key).expect("set").value.clone();
        assert_eq!((value("lease"), value("no-shm")), (Value::One("7".into()), Value::Flag(true)));
        assert_eq!(value("quota"), Value::Many(vec!["a".into(), "2".into()]));
        assert_eq!((value("controller"), found.len()), (Value::One("c".into()), 4));
        assert_eq!(device("[controller]\nlease = 1"), Ok(vec![]));
    }

    #[test]
    fn invalid_file_error_names_file_place_and_remedy() {
        for (text, named) in [
            ("[device]\nlease = 1\nlease = 2", "a.toml:3: duplicate key"),
            ("[device]\nlease 1", "a.toml:2: "),
            ("[devise]\n", "a.toml: \"devise\" is no table of a configuration file; it has [controller], [device] and"),
            ("lease = 1\n", "\"lease\" is no table"),
            ("device = 1\n", "\"device\" is no table"),
            ("[device]\nno_shm = true", "a.toml: [device] has no key \"no_shm\"; did you mean \"no-shm\"?"),
            ("[device]\ncolour = 1", "[device] has no key \"colour\""),
            ("[device]\nlease = 2026-01-01", "a.toml: [device] lease: a datetime is not a string, a number or a list"),
            ("[device]\nquota = [[1]]", "[device] quota: a list has strings and numbers only"),
            ("[device]\nkey = 'x'", "[device] key: a key is never in this file; name its file: key-file"),
        ] {
            let error = device(text).expect_err(text);
            assert!(error.contains(named), "{text}: {error}");
        }
        let long = format!("# {}\n", "x".repeat(LEN_MAX_BYTES));
        assert!(device(&long).expect_err("too long").contains("longer than 65536 bytes"));
        assert_eq!(device(&long[..LEN_MAX_BYTES]), Ok(vec![]));
    }

    #[test]
    fn secret_in_a_file_is_refused_and_not_shown() {
        let secret = "07".repeat(32);
        for text in [
            format!("[device]\nkey-file = 'sumac-key-v1 0000000000000009 {secret}'"),
            format!("[device]\nquota = ['sumac-key-v1 0000000000000009 {secret}']"),
            format!("[device]\nkey = '{secret}'"),
            format!("[device]\nkey-file = '{secret}"),
        ] {
            let error = device(&text).expect_err("refused");
            assert!(!error.contains("0707"), "{error}");
        }
    }

    #[test]
    fn endless_and_absent_files_are_refused() {
        let endless = ConfigFile::read(Path::new("/dev/zero")).expect_err("endless").to_string();
        let absent = ConfigFile::read(Path::new("/nonexistent/a.toml")).expect_err("absent").to_string();
        assert!(endless.contains("/dev/zero is longer than"), "{endless}");
        assert!(absent.contains("cannot read the configuration file /nonexistent/a.toml: "), "{absent}");
    }
}
