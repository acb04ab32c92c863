//! The environments of real launchers, alone and nested, and environments that contradict themselves.

use super::*;

const TORCHRUN: [(&str, &str); 6] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("TORCHELASTIC_RUN_ID", "none"),
    ("MASTER_ADDR", "n1"),
    ("MASTER_PORT", "29500"),
];

/// `mpirun -np 2` of Open MPI 4.1.4.
const OPEN_MPI: [(&str, &str); 5] = [
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("PMIX_RANK", "1"),
    ("PMIX_NAMESPACE", "728891393"),
];

/// `mpiexec.hydra -n 2` of MPICH 4.0.2.
const MPICH: [(&str, &str); 4] = [("PMI_RANK", "0"), ("PMI_FD", "6"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "0")];

/// A task of `srun -n 4`.
const SLURM: [(&str, &str); 6] = [
    ("SLURM_PROCID", "2"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_STEP_NUM_TASKS", "4"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_JOB_ID", "77"),
    ("SLURM_STEP_ID", "0"),
];

fn reading(variables: &[(&str, &str)]) -> Reading {
    let variable = |name: &str| variables.iter().rev().find(|(known, _)| *known == name).map(|(_, v)| (*v).to_owned());
    read(variable, || Some("pmi-n1:39211".into()))
}

fn placed(variables: &[(&str, &str)]) -> (Launcher, u32, u32, Option<u32>, String) {
    let Placement { launcher, rank, world, local_rank, job } = reading(variables).placement.expect("valid");
    (launcher, rank, world, local_rank, job)
}

fn refused(variables: &[(&str, &str)]) -> (&'static str, String) {
    let error = reading(variables).placement.expect_err("refused");
    (error.variable(), error.to_string())
}

#[test]
fn each_launcher_gives_rank_size_and_job() {
    assert_eq!(placed(&TORCHRUN), (Launcher::Torchrun, 3, 8, Some(1), "torchrun-none-n1:29500".into()));
    assert_eq!(placed(&OPEN_MPI), (Launcher::OpenMpi, 1, 2, Some(1), "pmix-728891393".into()));
    assert_eq!(placed(&MPICH), (Launcher::Pmi, 0, 2, Some(0), "pmi-n1:39211".into()));
    assert_eq!(placed(&SLURM), (Launcher::Slurm, 2, 4, Some(0), "slurm-77.0".into()));
    assert_eq!(placed(&[("RANK", "0"), ("WORLD_SIZE", "1")]), (Launcher::Plain, 0, 1, None, "default".into()));
    let pod = [("JOB_COMPLETION_INDEX", "5"), ("SUMAC_WORLD", "6"), ("SUMAC_JOB", "train")];
    assert_eq!(placed(&pod), (Launcher::Kubernetes, 5, 6, None, "train".into()));
}

#[test]
fn innermost_of_nested_launchers_wins() {
    // sbatch or srun starts mpirun, whose ranks inherit Slurm's variables of another count.
    assert_eq!(placed(&[&SLURM[..], &OPEN_MPI].concat()).0, Launcher::OpenMpi);
    assert_eq!(placed(&[&SLURM[..], &MPICH].concat()), (Launcher::Pmi, 0, 2, Some(0), "pmi-n1:39211".into()));
    // srun or mpirun starts torchrun on each host.
    assert_eq!(placed(&[&SLURM[..], &TORCHRUN].concat()), placed(&TORCHRUN));
    assert_eq!(placed(&[&OPEN_MPI[..], &TORCHRUN].concat()), placed(&TORCHRUN));
    // A pod runs mpirun.
    assert_eq!(placed(&[&[("JOB_COMPLETION_INDEX", "0")][..], &OPEN_MPI].concat()), placed(&OPEN_MPI));
}

#[test]
fn one_launch_described_twice_is_no_contradiction() {
    let pmix = [("PMIX_RANK", "2"), ("PMIX_NAMESPACE", "slurm.pmix.77.0")];
    assert_eq!(placed(&[&SLURM[..], &pmix].concat()), placed(&SLURM));
    let pmi2 = [("PMI_RANK", "2"), ("PMI_SIZE", "4"), ("PMI_JOBID", "77.0")];
    assert_eq!(placed(&[&SLURM[..], &pmi2].concat()), (Launcher::Pmi, 2, 4, None, "pmi-77.0".into()));
    // A script translates Slurm's variables: the job's name is still Slurm's.
    let script = [("RANK", "2"), ("WORLD_SIZE", "4")];
    assert_eq!(placed(&[&SLURM[..], &script].concat()), (Launcher::Plain, 2, 4, None, "slurm-77.0".into()));
    let same = [("RANK", "1"), ("WORLD_SIZE", "2")];
    assert_eq!(placed(&[&OPEN_MPI[..], &same].concat()).0, Launcher::OpenMpi);
}

#[test]
fn step_smaller_than_its_allocation_counts_its_own_tasks() {
    let step = [&SLURM[..], &[("SLURM_NTASKS", "16")]].concat();
    assert_eq!(placed(&step).2, 4);
}

#[test]
fn launchers_of_one_level_that_disagree_are_refused() {
    let (name, error) = refused(&[&OPEN_MPI[..], &MPICH].concat());
    assert_eq!(name, "OMPI_COMM_WORLD_RANK");
    assert_eq!(
        error,
        "1 of Open MPI contradicts PMI_RANK=0 of PMI, and neither starts the other; set SUMAC_RANK and SUMAC_WORLD to \
         what is meant"
    );
    let (name, error) = refused(&[&OPEN_MPI[..], &[("RANK", "1"), ("WORLD_SIZE", "3")]].concat());
    assert!(name == "OMPI_COMM_WORLD_SIZE" && error.contains("WORLD_SIZE=3"), "{name}: {error}");
}

#[test]
fn explicit_variables_override_everything() {
    let explicit = [("SUMAC_RANK", "0"), ("SUMAC_WORLD", "1"), ("SUMAC_JOB", "mine"), ("SUMAC_LOCAL_RANK", "7")];
    for others in [&OPEN_MPI[..], &[&OPEN_MPI[..], &MPICH].concat(), &[], &[("RANK", "x")]] {
        let all = [others, &explicit].concat();
        assert_eq!(placed(&all), (Launcher::Sumac, 0, 1, Some(7), "mine".into()), "{others:?}");
    }
    // One of them overrides one figure.
    let one = [&OPEN_MPI[..], &[("SUMAC_WORLD", "5")]].concat();
    assert_eq!(placed(&one), (Launcher::OpenMpi, 1, 5, Some(1), "pmix-728891393".into()));
    // The launcher still names the job.
    let numbers = [&SLURM[..], &explicit[..2]].concat();
    assert_eq!(placed(&numbers).4, "slurm-77.0");
    assert_eq!(placed(&explicit[..2]).4, "default");
}

#[test]
fn missing_figure_error_names_the_variable_to_set() {
    let (name, error) = refused(&[]);
    assert!(name == "RANK" && error.contains("SUMAC_RANK and SUMAC_WORLD") && error.contains("mpirun"), "{error}");
    let (name, error) = refused(&[("JOB_COMPLETION_INDEX", "5")]);
    assert_eq!(name, "SUMAC_WORLD");
    assert!(error.contains("Kubernetes sets JOB_COMPLETION_INDEX but no number of ranks"), "{error}");
    let (name, error) = refused(&[("JOB_COMPLETION_INDEX", "5"), ("SUMAC_WORLD", "6")]);
    assert!(name == "SUMAC_JOB" && error.contains("Kubernetes gives the job no name"), "{error}");
    assert_eq!(refused(&[("RANK", "0")]).0, "WORLD_SIZE");
    assert_eq!(refused(&[("SUMAC_RANK", "0")]).0, "SUMAC_WORLD");
    // prun: a rank without a size.
    assert_eq!(refused(&[("PMIX_RANK", "0"), ("PMIX_NAMESPACE", "p.1")]).0, "SUMAC_WORLD");
    // A torchrun that shares its id with others and names no rendezvous.
    assert_eq!(refused(&TORCHRUN[..4]).0, "SUMAC_JOB");
    let variable = |name: &str| MPICH.iter().find(|(known, _)| *known == name).map(|(_, v)| (*v).to_owned());
    assert_eq!(read(variable, || None).placement.expect_err("no name").variable(), "SUMAC_JOB");
}

#[test]
fn invalid_number_error_names_variable_and_value() {
    for value in ["first", "-1", "4294967296", "1 "] {
        let (name, error) = refused(&[("PMI_RANK", value), ("PMI_SIZE", "2")]);
        assert!(name == "PMI_RANK" && error.contains(&format!("{value:?} is not a number")), "{error}");
    }
    let (name, error) = refused(&[("RANK", "2"), ("WORLD_SIZE", "2")]);
    assert!(name == "RANK" && error.contains("rank 2 is not below 2, the number of ranks in WORLD_SIZE"), "{error}");
    // An empty variable is not set.
    assert_eq!(refused(&[("RANK", ""), ("WORLD_SIZE", "2")]).0, "RANK");
}

#[test]
fn batch_script_of_slurm_is_no_rank() {
    let batch: Vec<_> = SLURM.into_iter().filter(|(name, _)| *name != "SLURM_STEP_ID").collect();
    let (name, error) = refused(&batch);
    assert!(name == "SLURM_PROCID" && error.contains("start the program by srun"), "{error}");
    assert!(!reading(&batch).is_rank() && !reading(&[]).is_rank() && reading(&SLURM).is_rank());
    // The shell of `salloc`: SLURM_INTERACTIVE_STEP.
    assert!(!reading(&[&SLURM[..], &[("SLURM_STEP_ID", "4294967290")]].concat()).is_rank());
    assert!(reading(&[("JOB_COMPLETION_INDEX", "5")]).is_rank(), "a rank with an error");
}

#[test]
fn reading_lists_what_is_set_and_what_was_used() {
    let reading = reading(&[&SLURM[..], &OPEN_MPI].concat());
    let found: Vec<_> = reading.variables.iter().map(|one| (one.name, one.launcher, one.is_used)).collect();
    let mpi = Launcher::OpenMpi;
    assert_eq!(
        found[..5],
        [
            ("OMPI_COMM_WORLD_RANK", mpi, true),
            ("PMIX_RANK", mpi, false),
            ("OMPI_COMM_WORLD_SIZE", mpi, true),
            ("OMPI_COMM_WORLD_LOCAL_RANK", mpi, true),
            ("PMIX_NAMESPACE", mpi, true),
        ]
    );
    assert!(
        found[5..].iter().all(|(name, launcher, is_used)| {
            name.starts_with("SLURM_") && *launcher == Launcher::Slurm && !is_used
        })
    );
    assert_eq!(found.len(), 11);
}

#[test]
fn job_name_is_valid_whatever_the_launcher_calls_it() {
    let long = "x".repeat(100);
    let [first, second] = ["a", "b"].map(|end| {
        let run = format!("my run {long}{end}");
        placed(&[&TORCHRUN[..], &[("TORCHELASTIC_RUN_ID", run.as_str())]].concat()).4
    });
    assert!(first.starts_with("torchrun-my_run_x") && first.len() <= 64, "{first}");
    assert_ne!(first, second, "what is cut off counts");
}
