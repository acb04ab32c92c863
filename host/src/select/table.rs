//! The constants of the cost model, and the operator's overrides.
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

use serde::{Deserialize, Serialize};
use sumac_hal::op::{Collective, OpDesc, Path};
use thiserror::Error;

/// The constants of the cost model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CostTable {
    /// Changes with every change of the table; part of every signature.
    pub version: u32,
    /// Seconds per hop of the tree, one way.
    pub alpha_tree_s: f64,
    /// Seconds per step of a schedule.
    pub alpha_step_s: f64,
    /// Seconds per byte that a rank sends and receives through the tree.
    pub beta_tree_s: f64,
    /// Seconds per byte that a rank sends and receives in a schedule.
    pub beta_step_s: f64,
    /// Seconds per byte that a node receives and sends.
    pub beta_node_s: f64,
    /// Seconds per byte combined.
    pub gamma_s: f64,
    /// Seconds from a rank to its leaf with zero-copy, one way.
    pub alpha_zero_copy_s: f64,
    /// Seconds per byte that a leaf's DMA engine reads or writes, including the combining on the way.
    pub beta_zero_copy_s: f64,
    /// Overrides of the costs; the first match applies.
    pub overrides: Vec<Override>,
}

impl CostTable {
    /// For emulated devices on one machine, where ranks and devices take turns on its cores: fitted by eye to medians
    /// of `sumac perf` with 4 ranks, two levels, on 2 cores (AMD EPYC, Linux 6.18, 350 ns for a cache line there and
    /// back). 8 B took 80 us through the tree, 22 to 59 us a step by schedules (binomial 87, recursive doubling 118,
    /// halving-doubling 131, ring 185); 1 MiB 1.9 ms through the tree and 1.3 ms by halving-doubling; 16 MiB 26 ms, 26
    /// ms by ring and 36 ms by halving-doubling. On one machine each device is one more process that copies every byte;
    /// a network's own table has the device's line rate for `beta_node_s`.
    ///
    /// By reference, on the same machine: 8 B took 14 us with 4 ranks, and 16 MiB 3.5 ms, of which the engine moves
    /// eight times as much: 26 ps a byte.
    pub const EMULATED: Self = Self {
        version: 3,
        alpha_tree_s: 20e-6,
        alpha_step_s: 50e-6,
        beta_tree_s: 0.30e-9,
        beta_step_s: 1.10e-9,
        beta_node_s: 0.20e-9,
        gamma_s: 0.02e-9,
        alpha_zero_copy_s: 7e-6,
        beta_zero_copy_s: 0.026e-9,
        overrides: Vec::new(),
    };

    /// For ranks on one GPU, none of it measured: 5 us for a kernel that waits for another stream's event, and the
    /// 3.35 TB/s of memory of NVIDIA's data sheet of the H100 SXM, at which a byte copied is read and written, and one
    /// combined is read once more. There is no tree. Ranks share the memory: [`crate::gpu::Group`] charges each
    /// with the bytes of all.
    pub const GPU: Self = Self {
        version: 1,
        alpha_tree_s: 0.0,
        alpha_step_s: 5e-6,
        beta_tree_s: 0.0,
        beta_step_s: 0.6e-12,
        beta_node_s: 0.0,
        gamma_s: 0.3e-12,
        alpha_zero_copy_s: 0.0,
        beta_zero_copy_s: 0.0,
        overrides: Vec::new(),
    };
}

impl CostTable {
    /// Replace the overrides with those of an override file.
    ///
    /// # Errors
    /// [`OverrideError`] names the invalid entry.
    pub fn with_overrides(mut self, toml: &str) -> Result<Self, OverrideError> {
        let file: File = toml::from_str(toml)?;
        self.overrides = file.entries.iter().map(Entry::read).collect::<Result<_, _>>()?;
        // Different entries get a different version; the top bit keeps it apart from versions assigned by hand.
        self.version = sumac_hal::wire::crc32c(format!("{:?}", self.overrides).as_bytes()) | 1 << 31;
        Ok(self)
    }

    /// The path of the first entry that matches an operation.
    pub(super) fn overridden(&self, desc: &OpDesc) -> Option<Path> {
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
        let table = CostTable::EMULATED.with_overrides(toml).expect("an override file");
        assert_eq!(table.overridden(&sum(4)), Some(Path::Tree));
        assert_eq!(table.overridden(&sum(5)), Some(Path::Ring));
        assert_eq!(table.overridden(&OpDesc::all_gather(Dtype::F32, 5)), None);
        let other = CostTable::EMULATED.with_overrides("").expect("an empty file");
        assert!(table.version != other.version && table.version != CostTable::EMULATED.version);
    }

    #[test]
    fn malformed_override_is_refused_with_the_name() {
        let error = |toml: &str| CostTable::EMULATED.with_overrides(toml).expect_err("refused").to_string();
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
