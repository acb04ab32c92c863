//! Paths that the operator fixes, whatever they cost.
//!
//! An override file is TOML. Sizes are those of the whole operation, inclusive, and optional:
//!
//! ```toml
//! [[override]]
//! collective = "all_reduce"
//! max_bytes = 4096
//! path = "tree"
//!
//! [[override]]
//! min_bytes = 1048576
//! path = "hd"
//! ```
//!
//! For operations that request `auto`, the first matching entry applies. If its path is not possible, the explanation
//! gives the reason and costs decide. The table's version depends on the overrides and is part of every signature, so
//! ranks with different overrides are detected.

use super::table::CostTable;
use serde::{Deserialize, Serialize};
use sumac_hal::op::{Collective, OpDesc, Path};
use thiserror::Error;

impl CostTable {
    /// The path of the first entry that matches an operation.
    pub(crate) fn overridden(&self, desc: &OpDesc) -> Option<Path> {
        let bytes = desc.count.saturating_mul(desc.element_bytes() as u64);
        let fits = |entry: &&Override| {
            entry.collective.is_none_or(|collective| collective == desc.collective)
                && (entry.min_bytes..=entry.max_bytes).contains(&bytes)
        };
        self.overrides.iter().find(fits).map(|entry| entry.path)
    }
}

/// An override: a size range and its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Override {
    /// The collective; `None` for all.
    pub collective: Option<Collective>,
    /// The minimum size in bytes.
    pub min_bytes: u64,
    /// The maximum size in bytes.
    pub max_bytes: u64,
    /// The path to select.
    pub path: Path,
}

/// Why an override file is refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OverrideError {
    /// Not TOML, or with other keys.
    #[error("not an override file: {0}")]
    Form(#[from] toml::de::Error),
    /// An unknown name.
    #[error("unknown {what} {name:?}; choose one of {known}")]
    Name {
        /// What the name is for.
        what: &'static str,
        /// The unknown name.
        name: String,
        /// The known names.
        known: String,
    },
    /// The size range is empty.
    #[error("empty size range: min_bytes {min_bytes} is larger than max_bytes {max_bytes}")]
    Range {
        /// The lower end.
        min_bytes: u64,
        /// The upper end.
        max_bytes: u64,
    },
}

/// Read an override file.
pub(super) fn parse_overrides(toml: &str) -> Result<Vec<Override>, OverrideError> {
    let file: File = toml::from_str(toml)?;
    file.entries.iter().map(Entry::read).collect()
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(rename = "override", default)]
    entries: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    collective: Option<String>,
    min_bytes: Option<u64>,
    max_bytes: Option<u64>,
    path: String,
}

impl Entry {
    fn read(&self) -> Result<Override, OverrideError> {
        let unknown = |what, name: &str, all: Vec<&str>| {
            Err(OverrideError::Name { what, name: name.to_owned(), known: all.join(", ") })
        };
        let collective = match &self.collective {
            None => None,
            Some(name) => match Collective::from_name(name) {
                None => return unknown("collective", name, Collective::ALL.iter().map(|c| c.name()).collect()),
                some => some,
            },
        };
        let selectable = Path::ALL.iter().filter(|&&path| path != Path::Local && path != Path::PointToPoint);
        let Some(&path) = selectable.clone().find(|path| path.name() == self.path) else {
            return unknown("path", &self.path, selectable.map(|path| path.name()).collect());
        };
        let (min_bytes, max_bytes) = (self.min_bytes.unwrap_or(0), self.max_bytes.unwrap_or(u64::MAX));
        if min_bytes > max_bytes {
            return Err(OverrideError::Range { min_bytes, max_bytes });
        }
        Ok(Override { collective, min_bytes, max_bytes, path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sumac_hal::op::{Dtype, ReduceOp};

    fn sum(count: u64) -> OpDesc {
        OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, count)
    }

    #[test]
    fn first_matching_override_applies() {
        let toml = "[[override]]\nmax_bytes = 16\npath = \"tree\"\n\
                    [[override]]\ncollective = \"all_reduce\"\nmin_bytes = 8\npath = \"ring\"\n";
        let table = CostTable::emulated().with_overrides(toml).expect("an override file");
        assert_eq!(table.overridden(&sum(4)), Some(Path::Tree));
        assert_eq!(table.overridden(&sum(5)), Some(Path::Ring));
        assert_eq!(table.overridden(&OpDesc::all_gather(Dtype::F32, 5)), None);
        let other = CostTable::emulated().with_overrides("").expect("an empty file");
        assert!(table.version != other.version && table.version != CostTable::emulated().version);
    }

    #[test]
    fn malformed_override_is_refused_with_the_name() {
        let error = |toml: &str| CostTable::emulated().with_overrides(toml).expect_err("refused").to_string();
        let text = error("[[override]]\npath = \"treee\"");
        assert!(text.contains("treee") && text.contains("host-tree") && !text.contains("local"), "{text}");
        assert!(error("[[override]]\npath = \"tree\"\ncollective = \"sum\"").contains("all_to_all_v"));
        assert!(
            error("[[override]]\npath = \"tree\"\nmin_bytes = 9\nmax_bytes = 8")
                .contains("min_bytes 9 is larger than max_bytes 8")
        );
        assert!(error("[[overide]]\npath = \"tree\"").contains("overide"));
    }
}
