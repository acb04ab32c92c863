//! The constants of the cost model, and the operator's own word in place of it.
//!
//! An override file is TOML; sizes are of the whole operation, ends inclusive, and may be left out:
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
//! The first entry that matches an operation whose caller left the choice open is taken, if it is possible; if it is
//! not, the explanation says so and costs decide. The table's version changes with the overrides, and is in every
//! signature, so ranks with other overrides find out.

use serde::{Deserialize, Serialize};
use sumac_hal::op::{Collective, OpDesc, Path};
use thiserror::Error;

/// The model's constants.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CostTable {
    /// Raised with each change; part of every signature.
    pub version: u32,
    /// Seconds a hop of the tree, one way.
    pub alpha_tree_s: f64,
    /// Seconds a step of a schedule.
    pub alpha_step_s: f64,
    /// Seconds a byte that a rank sends and receives through the tree.
    pub beta_tree_s: f64,
    /// Seconds a byte that a rank sends and receives by a schedule.
    pub beta_step_s: f64,
    /// Seconds a byte that a node takes in and sends out.
    pub beta_node_s: f64,
    /// Seconds a byte combined.
    pub gamma_s: f64,
    /// Seconds from a rank to its leaf, one way, by reference.
    pub alpha_reference_s: f64,
    /// Seconds a byte that a leaf's DMA engine reads or writes; what it combines on the way is in it.
    pub beta_reference_s: f64,
    /// What is to be taken whatever it costs, first match first.
    pub overrides: Vec<Override>,
}

impl CostTable {
    /// For emulated devices on one machine, where ranks and devices take turns on its cores: fitted by eye to medians of
    /// `sumac perf` with 4 ranks, two levels, on 2 cores (AMD EPYC, Linux 6.18, 350 ns for a cache line there and
    /// back). 8 B took 80 us through the tree, 22 to 59 us a step by schedules (binomial 87, recursive doubling 118,
    /// halving-doubling 131, ring 185); 1 MiB 1.9 ms through the tree and 1.3 ms by halving-doubling; 16 MiB 26 ms, 26
    /// ms by ring and 36 ms by halving-doubling. On one machine each device is one more process that copies every byte;
    /// a network's own table has the device's line rate for `beta_node_s`.
    ///
    /// By reference, on the same machine: 8 B took 14 us with 4 ranks, and 16 MiB 3.5 ms, of which the engine moves eight
    /// times as much: 26 ps a byte.
    pub const EMULATED: Self = Self {
        version: 3,
        alpha_tree_s: 20e-6,
        alpha_step_s: 50e-6,
        beta_tree_s: 0.30e-9,
        beta_step_s: 1.10e-9,
        beta_node_s: 0.20e-9,
        gamma_s: 0.02e-9,
        alpha_reference_s: 7e-6,
        beta_reference_s: 0.026e-9,
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
        alpha_reference_s: 0.0,
        beta_reference_s: 0.0,
        overrides: Vec::new(),
    };
}

impl CostTable {
    /// Take over the entries of an override file.
    ///
    /// # Errors
    /// [`OverrideError`] names what is not understood.
    pub fn with_overrides(mut self, toml: &str) -> Result<Self, OverrideError> {
        let file: File = toml::from_str(toml)?;
        self.overrides = file.entries.iter().map(Entry::read).collect::<Result<_, _>>()?;
        // Other entries, another version: of 31 bits that nobody chooses by hand.
        self.version = sumac_hal::wire::crc32c(format!("{:?}", self.overrides).as_bytes()) | 1 << 31;
        Ok(self)
    }

    /// Return the first entry for an operation.
    pub(super) fn overridden(&self, desc: &OpDesc) -> Option<Path> {
        let bytes = desc.count.saturating_mul(desc.element_bytes() as u64);
        let fits = |entry: &&Override| {
            entry.collective.is_none_or(|collective| collective == desc.collective)
                && (entry.min_bytes..=entry.max_bytes).contains(&bytes)
        };
        self.overrides.iter().find(fits).map(|entry| entry.path)
    }
}

/// One size range and its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Override {
    /// For this collective; `None` for all.
    pub collective: Option<Collective>,
    /// From this many bytes on.
    pub min_bytes: u64,
    /// Up to this many bytes.
    pub max_bytes: u64,
    /// What is taken.
    pub path: Path,
}

/// Why an override file is refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OverrideError {
    /// Not TOML, or of another form.
    #[error("not an override file: {0}")]
    Form(#[from] toml::de::Error),
    /// A name that is none.
    #[error("{what} {name:?} is not known; known are {known}")]
    Name {
        /// Of what.
        what: &'static str,
        /// The name.
        name: String,
        /// Those there are.
        known: String,
    },
    /// No size is in the range.
    #[error("from {min_bytes} to {max_bytes} bytes there is no size")]
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
    fn the_first_entry_that_fits_counts() {
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
    fn what_is_not_understood_is_named() {
        let error = |toml: &str| CostTable::EMULATED.with_overrides(toml).expect_err("refused").to_string();
        let text = error("[[override]]\npath = \"treee\"");
        assert!(text.contains("treee") && text.contains("host-tree") && !text.contains("local"), "{text}");
        assert!(error("[[override]]\npath = \"tree\"\ncollective = \"sum\"").contains("all_to_all_v"));
        assert!(error("[[override]]\npath = \"tree\"\nmin_bytes = 9\nmax_bytes = 8").contains("from 9 to 8"));
        assert!(error("[[overide]]\npath = \"tree\"").contains("overide"));
    }
}
