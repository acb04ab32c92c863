//! Launchers: which rank of which job this process is, by the variables that started it.
//!
//! | launcher | rank, size, local rank | job |
//! |---|---|---|
//! | `sumac run`, or by hand | `SUMAC_RANK`, `SUMAC_WORLD`, `SUMAC_LOCAL_RANK` | `SUMAC_JOB` |
//! | torchrun | `RANK`, `WORLD_SIZE`, `LOCAL_RANK` | `TORCHELASTIC_RUN_ID`, `MASTER_ADDR`, `MASTER_PORT` |
//! | Open MPI, PRRTE | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, or `PMIX_RANK` | `PMIX_NAMESPACE` |
//! | MPICH, Intel MPI | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID` | `PMI_JOBID`, or the address of `mpiexec` |
//! | `RANK`, by hand | `RANK`, `WORLD_SIZE`, `LOCAL_RANK` | - |
//! | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `_NTASKS`, `SLURM_LOCALID` | `SLURM_JOB_ID`, `SLURM_STEP_ID` |
//! | Kubernetes, indexed job | `JOB_COMPLETION_INDEX`; no size | - |
//!
//! Launchers are nested: Slurm starts `mpirun`, a pod starts torchrun. The innermost one, which is further up in the
//! table, started this process and wins. The three in the middle are of one level; if they disagree, nothing tells
//! which one is meant, and the process must set `SUMAC_RANK` and `SUMAC_WORLD`. Each variable `SUMAC_*` overrides what
//! a launcher says.
//!
//! Hydra, the launcher of MPICH and Intel MPI, sets no variable with the name of its key-value space, and a client that
//! asks for it must take part in PMI until the end, which is MPI's to do. [`hydra`] reads the address of `mpiexec`,
//! which is as unique, from the command line of the proxy that started this process.
//!
//! Invariant: [`read`] is a function of its arguments.

pub mod hydra;
mod source;
#[cfg(test)]
mod tests;

use crate::controller::derived_name;
use crate::controller::limits::NameKind;
use source::{SOURCES, Source};
use std::fmt;
use thiserror::Error;

/// What started this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// `SUMAC_RANK` and `SUMAC_WORLD`, as `sumac run` sets them.
    Sumac,
    /// PyTorch's torchrun.
    Torchrun,
    /// Open MPI or PRRTE.
    OpenMpi,
    /// Hydra, the launcher of MPICH and Intel MPI, or another one that speaks PMI.
    Pmi,
    /// `RANK` and `WORLD_SIZE`, set by hand or by a script.
    Plain,
    /// Slurm's srun.
    Slurm,
    /// An indexed job of Kubernetes.
    Kubernetes,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Sumac => "SUMAC_*",
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Pmi => "PMI",
            Self::Plain => "a script",
            Self::Slurm => "Slurm",
            Self::Kubernetes => "Kubernetes",
        })
    }
}

/// What a variable says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// The rank.
    Rank,
    /// The number of ranks.
    World,
    /// The number of the rank among those of its host.
    LocalRank,
    /// Part of the job's identity.
    Job,
}

/// A variable that is set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// Whose it is.
    pub launcher: Launcher,
    /// What it says.
    pub role: Role,
    /// Whether the result comes from it.
    pub is_used: bool,
}

/// Which rank of which job a process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// What says so.
    pub launcher: Launcher,
    /// The rank, from 0 to `world - 1`.
    pub rank: u32,
    /// The number of ranks.
    pub world: u32,
    /// The number of this rank among those of its host, if the launcher gives one.
    pub local_rank: Option<u32>,
    /// The job's name; `default` if rank and size were set by hand and nothing names the job.
    pub job: String,
}

/// Why variables do not tell which rank this process is.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// No launcher has set a rank.
    #[error(
        "it is not set, and no launcher has set its own; start the program by sumac run, torchrun, \
         mpirun or srun, or set SUMAC_RANK and SUMAC_WORLD"
    )]
    NoRank,
    /// The process runs in a batch script of Slurm, outside srun.
    #[error(
        "{value:?} is of a batch script, as SLURM_STEP_ID is not set by srun; start the program by srun, or \
         set SUMAC_RANK and SUMAC_WORLD"
    )]
    BatchScript {
        /// The value of `SLURM_PROCID`.
        value: String,
    },
    /// The launcher sets a rank, but no number of ranks.
    #[error("it is not set, and {launcher} sets {rank_name} but no number of ranks; set {name} to the number")]
    NoWorld {
        /// The launcher.
        launcher: Launcher,
        /// The variable with the rank.
        rank_name: &'static str,
        /// The variable to set.
        name: &'static str,
    },
    /// The launcher gives the job no name.
    #[error(
        "it is not set, and {launcher} gives the job no name; set SUMAC_JOB to one that \
         all ranks of this job share, and no other job"
    )]
    NoJob {
        /// The launcher.
        launcher: Launcher,
    },
    /// A value is no number.
    #[error("{value:?} is not a number from 0 to {}", u32::MAX)]
    NotANumber {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
    },
    /// The rank is not below the number of ranks.
    #[error("rank {rank} is not below {world}, the number of ranks in {world_name}; ranks count from 0")]
    OutOfRange {
        /// The variable with the rank.
        name: &'static str,
        /// The rank.
        rank: u32,
        /// The variable with the number of ranks.
        world_name: &'static str,
        /// The number of ranks.
        world: u32,
    },
    /// Two launchers of one level disagree.
    #[error(
        "{value} of {launcher} contradicts {other_name}={other_value} of {other}, and neither starts the other; set \
         SUMAC_RANK and SUMAC_WORLD to what is meant"
    )]
    Disagree {
        /// The variable of one launcher.
        name: &'static str,
        /// Its value.
        value: u32,
        /// The launcher.
        launcher: Launcher,
        /// The variable of the other one.
        other_name: &'static str,
        /// Its value.
        other_value: u32,
        /// The other launcher.
        other: Launcher,
    },
}

impl LaunchError {
    /// Return the variable that is missing or invalid.
    pub const fn variable(&self) -> &'static str {
        match self {
            Self::NoRank => "RANK",
            Self::BatchScript { .. } => "SLURM_PROCID",
            Self::NoJob { .. } => "SUMAC_JOB",
            Self::NoWorld { name, .. }
            | Self::NotANumber { name, .. }
            | Self::OutOfRange { name, .. }
            | Self::Disagree { name, .. } => name,
        }
    }
}

/// What an environment says about launchers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading {
    /// The variables that are set, the innermost launcher's first.
    pub variables: Vec<Variable>,
    /// The result.
    pub placement: Result<Placement, LaunchError>,
}

impl Reading {
    /// Whether anything says that this process is a rank, rightly or wrongly. A batch script of Slurm is none.
    pub const fn is_rank(&self) -> bool {
        !matches!(self.placement, Err(LaunchError::NoRank | LaunchError::BatchScript { .. }))
    }
}

/// Read the environment of this process.
pub fn from_env() -> Reading {
    read(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()), hydra::job)
}

/// Read what launchers have set. `variable` looks a variable up; `hydra_job` names a job that Hydra has started, and is
/// called only if nothing else does.
pub fn read(variable: impl Fn(&str) -> Option<String>, hydra_job: impl FnOnce() -> Option<String>) -> Reading {
    // An empty variable is how scripts unset one.
    let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
    let mut variables = source::set(&variable);
    let placement = Reader { variable: &variable, variables: &mut variables }.placement(hydra_job);
    Reading { variables, placement }
}

/// A number and the variable that it comes from.
type Number = (&'static str, u32);

/// What a launcher says.
#[derive(Debug, Clone, Copy)]
struct Figures {
    source: &'static Source,
    rank: Number,
    world: Option<Number>,
}

struct Reader<'a, F> {
    variable: &'a F,
    variables: &'a mut [Variable],
}

impl<F: Fn(&str) -> Option<String>> Reader<'_, F> {
    fn placement(&mut self, hydra_job: impl FnOnce() -> Option<String>) -> Result<Placement, LaunchError> {
        let rank = self.number(&["SUMAC_RANK"])?;
        let world = self.number(&["SUMAC_WORLD"])?;
        let is_explicit = rank.is_some() && world.is_some();
        let found = self.innermost(is_explicit);
        let (launcher, figures) = match found {
            _ if is_explicit => (Launcher::Sumac, None),
            Ok(figures) => (figures.source.launcher, Some(figures)),
            Err(LaunchError::NoRank) if rank.is_some() => (Launcher::Sumac, None),
            Err(error) => return Err(error),
        };
        let missing = || LaunchError::NoWorld {
            launcher,
            rank_name: rank.or(figures.map(|figures| figures.rank)).map_or("RANK", |(name, _)| name),
            name: if launcher == Launcher::Plain { "WORLD_SIZE" } else { "SUMAC_WORLD" },
        };
        let rank = rank.or(figures.map(|figures| figures.rank)).ok_or(LaunchError::NoRank)?;
        let world = world.or(figures.and_then(|figures| figures.world)).ok_or_else(missing)?;
        if rank.1 >= world.1 {
            let (name, rank) = rank;
            return Err(LaunchError::OutOfRange { name, rank, world_name: world.0, world: world.1 });
        }
        let local = match self.number(&["SUMAC_LOCAL_RANK"])? {
            None => figures.map(|figures| self.number(figures.source.local_rank)).transpose()?.flatten(),
            local => local,
        };
        let job = self.job(launcher, hydra_job)?;
        [Some(rank), Some(world), local].into_iter().flatten().for_each(|(name, _)| self.mark_used(name));
        Ok(Placement { launcher, rank: rank.1, world: world.1, local_rank: local.map(|(_, local)| local), job })
    }

    /// Return what the innermost launcher says.
    fn innermost(&self, is_explicit: bool) -> Result<Figures, LaunchError> {
        let Some(level) = SOURCES.iter().find(|source| self.is_present(source)).map(|source| source.level) else {
            let value = (self.variable)("SLURM_PROCID").filter(|_| !is_explicit);
            return Err(value.map_or(LaunchError::NoRank, |value| LaunchError::BatchScript { value }));
        };
        let of_level = SOURCES.iter().filter(|source| source.level == level && self.is_present(source));
        let all = of_level.map(|source| self.figures(source)).collect::<Result<Vec<_>, _>>()?;
        let first = all[0];
        for other in &all[1..] {
            let worlds = first.world.zip(other.world);
            let pairs = [Some((first.rank, other.rank)), worlds].into_iter().flatten();
            if let Some(((name, value), (other_name, other_value))) = pairs.into_iter().find(|(a, b)| a.1 != b.1) {
                let (launcher, other) = (first.source.launcher, other.source.launcher);
                return Err(LaunchError::Disagree { name, value, launcher, other_name, other_value, other });
            }
        }
        let world = all.iter().find_map(|figures| figures.world);
        Ok(Figures { world, ..first })
    }

    /// Whether a launcher has started this process, or one that did.
    fn is_present(&self, source: &Source) -> bool {
        source.rank.iter().any(|name| (self.variable)(name).is_some()) && source::is_active(source, self.variable)
    }

    fn figures(&self, source: &'static Source) -> Result<Figures, LaunchError> {
        let rank = self.number(source.rank)?.ok_or(LaunchError::NoRank)?;
        Ok(Figures { source, rank, world: self.number(source.world)? })
    }

    /// Return the first of these variables that is set.
    fn number(&self, names: &[&'static str]) -> Result<Option<Number>, LaunchError> {
        let Some((name, value)) = names.iter().find_map(|&name| Some((name, (self.variable)(name)?))) else {
            return Ok(None);
        };
        let number = value.parse().map_err(|_| LaunchError::NotANumber { name, value })?;
        Ok(Some((name, number)))
    }

    /// Name the job: by `SUMAC_JOB`, else by the innermost launcher that has a name for it.
    fn job(&mut self, launcher: Launcher, hydra_job: impl FnOnce() -> Option<String>) -> Result<String, LaunchError> {
        if let Some(job) = (self.variable)("SUMAC_JOB") {
            self.mark_used("SUMAC_JOB");
            return Ok(job);
        }
        let mut hydra_job = Some(hydra_job);
        for source in SOURCES.iter().filter(|source| self.is_present(source)) {
            let named = (source.job)(self.variable).map(|(names, job)| (names.to_vec(), job));
            let found = named.or_else(|| {
                let hydra_job = hydra_job.take_if(|_| source.launcher == Launcher::Pmi)?;
                Some((Vec::new(), hydra_job()?))
            });
            if let Some((names, job)) = found {
                names.into_iter().for_each(|name| self.mark_used(name));
                return Ok(valid_name(&job));
            }
        }
        match launcher {
            Launcher::Sumac | Launcher::Plain => Ok("default".into()),
            launcher => Err(LaunchError::NoJob { launcher }),
        }
    }

    fn mark_used(&mut self, name: &str) {
        // Of two launchers with the same variables, the one that is present comes first.
        self.variables.iter_mut().filter(|variable| variable.name == name).for_each(|variable| variable.is_used = true);
    }
}

/// Make a job name of any text: other characters become `_`, and what is too long ends with a hash of the whole.
fn valid_name(text: &str) -> String {
    let valid: String =
        text.bytes().map(|byte| if NameKind::Job.allows(byte) { char::from(byte) } else { '_' }).collect();
    derived_name(&valid, "")
}
