//! The cost table: the constants of the model, what measurements add to them, and where they come from.
//!
//! Invariant: the version is a checksum of everything else in the table, so tables that select differently have
//! different versions. It is part of every operation's signature (PROTOCOL 2): ranks with different tables are
//! detected.

use super::JobFacts;
use super::curve::Curve;
use super::overrides::{Override, OverrideError, parse_overrides};
use serde::{Deserialize, Serialize};
use std::fmt;
use sumac_hal::op::Path;

/// Number of constants.
pub(super) const CONSTANTS: usize = Constants::NAMES.len();

macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The constants of the cost model, in seconds. [`super`] has the formulas.
        #[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Constants {
            $($(#[$doc])* pub $name: f64,)*
        }

        impl Constants {
            /// Their names, in the order of [`Constants::to_array`].
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name)),*];

            /// The constants as an array.
            pub const fn to_array(self) -> [f64; CONSTANTS] {
                [$(self.$name),*]
            }

            /// The inverse of [`Constants::to_array`].
            pub const fn from_array([$($name),*]: [f64; CONSTANTS]) -> Self {
                Self { $($name),* }
            }
        }
    };
}

constants! {
    /// Per hop of the tree, one way.
    alpha_tree_s,
    /// Per packet that a node receives or sends.
    packet_node_s,
    /// Per byte that a rank sends and receives through the tree.
    beta_tree_s,
    /// Per byte that a rank moves through the tree, for each further rank on its host.
    beta_tree_shared_s,
    /// Per byte that a node receives and sends.
    beta_node_s,
    /// Per step of a schedule, between hosts.
    alpha_step_s,
    /// Per message of a schedule beyond one a step: what a rank sends to several others in a step, and what other ranks
    /// of its host send meanwhile, which share its processors.
    alpha_shared_s,
    /// Per byte that a rank sends and receives in a schedule.
    beta_step_s,
    /// Per byte of a schedule that other ranks of a host send meanwhile.
    beta_shared_s,
    /// Per short operation in one step where all ranks are on one host: each posts once for all others.
    alpha_post_s,
    /// As `alpha_step_s`, where all ranks are on one host.
    alpha_shm_step_s,
    /// As `alpha_shared_s`, where all ranks are on one host.
    alpha_shm_shared_s,
    /// As `beta_step_s`, where all ranks are on one host.
    beta_shm_step_s,
    /// As `beta_shared_s`, where all ranks are on one host.
    beta_shm_shared_s,
    /// Per byte combined.
    gamma_s,
    /// From a rank to its leaf with zero-copy, one way.
    alpha_zero_copy_s,
    /// Per chunk and child that a leaf's DMA engine serves.
    chunk_zero_copy_s,
    /// Per byte that a leaf's DMA engine reads or writes, including the combining on the way.
    beta_zero_copy_s,
}

/// Schedules among the ranks of one host. [`CostTable::emulated`] says what was measured.
const SHARED_MEMORY: Constants = Constants {
    alpha_post_s: 1.5e-6,
    alpha_shm_step_s: 1e-6,
    alpha_shm_shared_s: 0.7e-6,
    beta_shm_step_s: 0.08e-9,
    beta_shm_shared_s: 0.06e-9,
    ..Constants::from_array([0.0; CONSTANTS])
};

/// The constants of the cost model, with corrections and overrides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CostTable {
    /// A checksum of all the rest; part of every signature.
    pub version: u32,
    /// Where the constants come from.
    pub origin: Origin,
    /// The constants.
    pub constants: Constants,
    /// Measured times over predicted ones, by which predictions for similar jobs are corrected.
    pub curves: Vec<Curve>,
    /// Overrides of the costs; the first match applies.
    pub overrides: Vec<Override>,
}

/// Where the constants of a cost table come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Origin {
    /// Measured with emulated devices and ranks on one machine.
    Emulator,
    /// Data sheets; nothing was measured.
    DataSheets,
    /// Measured on the cluster by `sumac calibrate`.
    Calibrated {
        /// When, as RFC 3339 has it.
        date: String,
        /// The median error of its predictions, as a fraction of the measured time.
        error: f64,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Emulator => f.write_str("emulated devices on one machine, not calibrated"),
            Self::DataSheets => f.write_str("data sheets, not calibrated"),
            Self::Calibrated { date, error } => {
                write!(f, "calibrated {date}, median error {:.0} %", error * 100.0)
            }
        }
    }
}

impl CostTable {
    /// Create a table without corrections and overrides.
    pub fn new(origin: Origin, constants: Constants) -> Self {
        Self { version: 0, origin, constants, curves: Vec::new(), overrides: Vec::new() }.sealed()
    }

    /// For emulated devices on one machine, where ranks and devices take turns on its cores: fitted to medians of
    /// `sumac perf` with 4 ranks, two levels, on 2 cores (AMD EPYC, Linux 6.18, 350 ns for a cache line there and
    /// back). Through the tree 8 B took 80 us, 1 MiB 1.9 ms and 16 MiB 26 ms. Steps between hosts are those over
    /// loopback TCP, 22 to 59 us each; a message beyond one a step is taken as a fifth of a step, and was not measured.
    ///
    /// Zero-copy and shared memory: medians of `sumac calibrate` and `sumac perf` on 2 such cores, 110 to 140 ns for a
    /// cache line there and back. With 2 ranks 8 B took 6 to 10 us by zero-copy, 0.4 us by a post, 1.1 us by recursive
    /// doubling and 1.5 us by ring; 256 KiB 90 to 170 us by zero-copy and 45 to 60 us by ring; 16 MiB 2.5 to 3.9 ms by
    /// zero-copy and 3.2 to 4.8 ms by ring. With 4 ranks, twice the cores, 8 B took 20, 5, 15 and 24 us, 256 KiB 190 us
    /// by zero-copy and 180 us by ring, and 16 MiB 5.5 ms and 11 ms. Between two cores of an Intel Xeon (150 ns) 16 KiB
    /// took 2 ranks 6.2 us by ring and halving-doubling, 9.6 us by binomial trees; 64 KiB took 4 ranks 49 us by ring,
    /// 55 us by halving-doubling, 96 us by chain, and 28 to 48 us by zero-copy.
    pub fn emulated() -> Self {
        Self::new(
            Origin::Emulator,
            Constants {
                alpha_tree_s: 20e-6,
                beta_tree_s: 0.30e-9,
                beta_node_s: 0.10e-9,
                alpha_step_s: 50e-6,
                alpha_shared_s: 10e-6,
                beta_step_s: 1.00e-9,
                gamma_s: 0.20e-9,
                alpha_zero_copy_s: 6e-6,
                beta_zero_copy_s: 0.06e-9,
                ..SHARED_MEMORY
            },
        )
    }

    /// For a network that nobody has calibrated: links of 100 Gbit/s in both directions at once, devices that combine
    /// at the rate of their links, one in the path of each (a switch's, not a card's), and 12 us for a message
    /// through two kernels, half of which a rank's processor is busy with a message beside another.
    pub fn data_sheets() -> Self {
        Self::new(
            Origin::DataSheets,
            Constants {
                alpha_tree_s: 12e-6,
                beta_tree_s: 0.04e-9,
                alpha_step_s: 12e-6,
                alpha_shared_s: 6e-6,
                beta_step_s: 0.08e-9,
                gamma_s: 0.02e-9,
                alpha_zero_copy_s: 5e-6,
                beta_zero_copy_s: 0.04e-9,
                ..SHARED_MEMORY
            },
        )
    }

    /// For ranks on one GPU, none of it measured: 5 us for a kernel that waits for another stream's event, one for each
    /// message, and the 3.35 TB/s of memory of NVIDIA's data sheet of the H100 SXM, at which a byte copied is read and
    /// written, and one combined is read once more. There is no tree. Ranks share the memory: [`crate::gpu::Group`]
    /// charges each with the bytes of all.
    pub fn gpu() -> Self {
        let constants = Constants {
            alpha_step_s: 5e-6,
            alpha_shared_s: 5e-6,
            beta_step_s: 0.6e-12,
            gamma_s: 0.3e-12,
            ..Constants::default()
        };
        Self::new(Origin::DataSheets, constants)
    }

    /// Replace the overrides with those of an override file.
    ///
    /// # Errors
    /// [`OverrideError`] names the invalid entry.
    pub fn with_overrides(mut self, toml: &str) -> Result<Self, OverrideError> {
        self.overrides = parse_overrides(toml)?;
        Ok(self.sealed())
    }

    /// The table for ranks on so many hosts: constants of the emulator say nothing about a network.
    #[must_use]
    pub fn for_hosts(&self, hosts: usize) -> Self {
        if hosts < 2 || self.origin != Origin::Emulator {
            return self.clone();
        }
        Self { overrides: self.overrides.clone(), ..Self::data_sheets() }.sealed()
    }

    /// The constants for a path of a job. Where the rates of its cables are known, they replace the links of data
    /// sheets. The devices of data sheets combine while bytes arrive, so combining takes the tree no time of its own.
    pub(super) fn constants_for(&self, facts: &JobFacts, path: Path) -> Constants {
        let mut constants = self.constants;
        if self.origin == Origin::DataSheets {
            if facts.links().is_some() {
                (constants.beta_tree_s, constants.beta_step_s) = (0.0, 0.0);
            }
            if path == Path::Tree {
                constants.gamma_s = 0.0;
            }
        }
        constants
    }

    /// Compute the version of a table that was changed.
    #[must_use]
    pub fn sealed(mut self) -> Self {
        self.version = 0;
        let bytes = postcard::to_allocvec(&self).unwrap_or_default();
        self.version = sumac_hal::wire::crc32c(&bytes).max(1);
        self
    }
}
