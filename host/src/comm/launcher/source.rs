//! The table of launchers and their variables.

use super::{Launcher, Role, Variable};

/// How deep a launcher is nested, the innermost first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    /// torchrun starts the processes of a host, and is itself started by any of the others.
    Workers,
    /// Launchers of MPI, and variables that a script sets.
    Processes,
    /// The resource manager's.
    Steps,
    /// The orchestrator's.
    Pods,
}

/// Look a variable up. Empty ones are not set.
pub(super) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// A job's name, and the variables that it was made of.
pub(super) type JobName = (&'static [&'static str], String);

/// A launcher's variables. Of several names, the first that is set counts.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) launcher: Launcher,
    pub(super) level: Level,
    pub(super) rank: &'static [&'static str],
    pub(super) world: &'static [&'static str],
    pub(super) local_rank: &'static [&'static str],
    /// The variables that identify the job.
    pub(super) job_names: &'static [&'static str],
    /// Name the job.
    pub(super) job: fn(Lookup<'_>) -> Option<JobName>,
}

/// All launchers, the innermost first.
pub(super) static SOURCES: [Source; 6] = [
    Source {
        launcher: Launcher::Torchrun,
        level: Level::Workers,
        rank: &["RANK"],
        world: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        job_names: &["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"],
        job: torchrun_job,
    },
    Source {
        launcher: Launcher::OpenMpi,
        level: Level::Processes,
        rank: &["OMPI_COMM_WORLD_RANK", "PMIX_RANK"],
        world: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        job_names: &["PMIX_NAMESPACE"],
        job: |variable| Some((&["PMIX_NAMESPACE"], format!("pmix-{}", variable("PMIX_NAMESPACE")?))),
    },
    Source {
        launcher: Launcher::Pmi,
        level: Level::Processes,
        rank: &["PMI_RANK"],
        world: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID"],
        job_names: &["PMI_JOBID"],
        job: |variable| Some((&["PMI_JOBID"], format!("pmi-{}", variable("PMI_JOBID")?))),
    },
    Source {
        launcher: Launcher::Plain,
        level: Level::Processes,
        rank: &["RANK"],
        world: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        job_names: &[],
        job: |_| None,
    },
    Source {
        launcher: Launcher::Slurm,
        level: Level::Steps,
        rank: &["SLURM_PROCID"],
        world: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: &["SLURM_LOCALID"],
        job_names: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
        job: slurm_job,
    },
    Source {
        launcher: Launcher::Kubernetes,
        level: Level::Pods,
        rank: &["JOB_COMPLETION_INDEX"],
        world: &[],
        local_rank: &[],
        job_names: &[],
        job: |_| None,
    },
];

/// Whether variables of a launcher that are set are really its own.
pub(super) fn is_active(source: &Source, variable: impl Fn(&str) -> Option<String>) -> bool {
    match source.launcher {
        Launcher::Torchrun => variable("TORCHELASTIC_RUN_ID").is_some(),
        Launcher::Plain => variable("TORCHELASTIC_RUN_ID").is_none(),
        // Slurm's own PMIx server: the same launch, which Slurm describes with the size.
        Launcher::OpenMpi => {
            variable("OMPI_COMM_WORLD_RANK").is_some()
                || variable("PMIX_NAMESPACE").is_none_or(|name| !name.starts_with("slurm."))
        }
        Launcher::Slurm => variable("SLURM_STEP_ID").is_some_and(|step| is_started_by_srun(&step)),
        _ => true,
    }
}

/// Whether a step runs tasks of srun. Batch scripts and interactive shells have no step or a special one.
fn is_started_by_srun(step: &str) -> bool {
    step.parse().is_ok_and(|step: u32| step < FIRST_SPECIAL_STEP)
}

/// Slurm's `slurm.h`: `SLURM_MAX_NORMAL_STEP_ID` is the number before.
const FIRST_SPECIAL_STEP: u32 = 0xffff_fff0;

/// Name a job of torchrun. Its id alone is `none` unless one was given; the address of the rendezvous is unique.
fn torchrun_job(variable: Lookup<'_>) -> Option<JobName> {
    let run = variable("TORCHELASTIC_RUN_ID")?;
    match variable("MASTER_ADDR").zip(variable("MASTER_PORT")) {
        Some((host, port)) => {
            Some((&["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"], format!("torchrun-{run}-{host}:{port}")))
        }
        None if run == "none" => None,
        None => Some((&["TORCHELASTIC_RUN_ID"], format!("torchrun-{run}"))),
    }
}

fn slurm_job(variable: Lookup<'_>) -> Option<JobName> {
    let (job, step) = (variable("SLURM_JOB_ID")?, variable("SLURM_STEP_ID")?);
    Some((&["SLURM_JOB_ID", "SLURM_STEP_ID"], format!("slurm-{job}.{step}")))
}

/// Return all variables of launchers that are set, each once.
pub(super) fn set(variable: &impl Fn(&str) -> Option<String>) -> Vec<Variable> {
    let explicit = [
        ("SUMAC_RANK", Role::Rank),
        ("SUMAC_WORLD", Role::World),
        ("SUMAC_LOCAL_RANK", Role::LocalRank),
        ("SUMAC_JOB", Role::Job),
    ];
    let explicit = explicit.map(|(name, role)| (Launcher::Sumac, name, role));
    // Variables of torchrun and of scripts have the same names.
    let is_active = |source: &&Source| {
        !matches!(source.launcher, Launcher::Torchrun | Launcher::Plain) || is_active(source, variable)
    };
    let others = SOURCES.iter().filter(is_active).flat_map(|source| {
        let of = |names: &'static [&'static str], role| names.iter().map(move |&name| (source.launcher, name, role));
        of(source.rank, Role::Rank)
            .chain(of(source.world, Role::World))
            .chain(of(source.local_rank, Role::LocalRank))
            .chain(of(source.job_names, Role::Job))
    });
    let all = explicit.into_iter().chain(others);
    all.filter_map(|(launcher, name, role)| {
        Some(Variable { name, value: variable(name)?, launcher, role, is_used: false })
    })
    .collect()
}
