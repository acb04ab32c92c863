//! Ranks that a launcher starts: what they read from the environment, and what they do as one job.

mod common;

use common::{exit_status, stderr, stdout};
use serde_json::{Value, json};
use std::process::{Command, Output, Stdio};

/// Run the command with these variables and none that a launcher of the tests might have set.
fn sumac(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
    command.env_clear().envs(variables.iter().copied()).args(args).stdin(Stdio::null());
    command.output().expect("the command runs")
}

#[test]
fn doctor_shows_each_variable_its_launcher_and_the_result() {
    let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "0")];
    let mpi = [("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "4"), ("PMIX_NAMESPACE", "12.1")];
    let output = sumac(&["doctor", "--env"], &[&slurm[..], &mpi].concat());
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("rank 3 of 4, job pmix-12.1, by Open MPI\n"), "{text}");
    let row = |name: &str| text.lines().find(|line| line.starts_with(name)).expect("a row").split_whitespace().last();
    assert_eq!((row("OMPI_COMM_WORLD_RANK"), row("SLURM_PROCID")), (Some("yes"), Some("no")), "{text}");
    let output = sumac(&["doctor", "--env", "--json"], &[&slurm[..], &mpi].concat());
    let found: Value = serde_json::from_str(&stdout(&output)).expect("one object");
    assert_eq!(
        found["variables"][0],
        json!({
            "name": "OMPI_COMM_WORLD_RANK", "value": "3", "launcher": "Open MPI", "role": "rank", "used": true
        })
    );
    assert_eq!((&found["rank"], &found["world"], &found["error"]), (&json!(3), &json!(4), &Value::Null));
}

#[test]
fn environment_of_no_rank_is_invalid_input_that_names_variable_value_and_remedy() {
    type Case<'a> = (&'a [(&'a str, &'a str)], [&'a str; 3]);
    let cases: [Case<'_>; 5] = [
        (&[], ["RANK: it is not set", "sumac run", "SUMAC_WORLD"]),
        (&[("JOB_COMPLETION_INDEX", "1")], ["SUMAC_WORLD", "Kubernetes", "JOB_COMPLETION_INDEX"]),
        (&[("PMI_RANK", "one"), ("PMI_SIZE", "2")], ["PMI_RANK", "\"one\"", "number"]),
        (
            &[("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("RANK", "0"), ("WORLD_SIZE", "2")],
            ["PMI_RANK", "RANK=0", "SUMAC_RANK"],
        ),
        (
            &[("RANK", "0"), ("WORLD_SIZE", "1"), ("SUMAC_CONTROLLER", "n1:x")],
            ["SUMAC_CONTROLLER", "n1:x", "HOST:PORT"],
        ),
    ];
    for (variables, named) in cases {
        for args in [&["doctor", "--env"][..], &["doctor", "--env", "--json"]] {
            let output = sumac(args, variables);
            assert_eq!(exit_status(&output), 2, "{variables:?}");
            let error = stderr(&output);
            assert!(named.iter().all(|name| error.contains(name)), "{variables:?}: {error}");
        }
    }
}
