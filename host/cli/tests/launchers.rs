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
            "name": "OMPI_COMM_WORLD_RANK", "value": "3", "launcher": "Open MPI", "role": "rank", "used": true,
            "source": "environment"
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

/// A script that runs `sumac perf` and prints its exit status.
fn perf(options: &str, redirection: &str) -> String {
    format!("{} perf {options} {redirection}; echo status $?", env!("CARGO_BIN_EXE_sumac"))
}

/// Run a script as the ranks of a run.
fn run(ranks: &str, script: &str) -> Output {
    let path = ("PATH", std::env::var("PATH").expect("a path"));
    sumac(&["run", "-n", ranks, "--", "sh", "-c", script], &[(path.0, path.1.as_str())])
}

#[test]
fn perf_under_a_launcher_is_its_ranks_and_rank_0_prints_one_table() {
    let output = run("4", &perf("-b 8 -e 4K -f 512 -n 3 -w 1 --algo tree,ring", ""));
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    let text = stdout(&output);
    assert_eq!(text.matches("status 0").count(), 4, "{text}");
    assert_eq!(text.matches("busbw").count(), 2, "one header: {text}");
    let rows: Vec<_> = text.lines().filter(|line| line.trim_start().starts_with("all_reduce")).collect();
    assert_eq!(rows.len(), 4, "{text}");
    for named in ["ranks 4  devices 1  tree levels 1", "# 4 rows, 0 wrong elements: OK", "# cores"] {
        assert!(text.contains(named), "{named}: {text}");
    }
    let output = run("3", &perf("--json -b 8 -e 8 -n 2 --collective reduce,barrier -r 2 --algo tree", ""));
    let text = stdout(&output);
    let rows: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let found: Vec<_> =
        rows.iter().map(|row| (&row["collective"], &row["ranks"], &row["wrong"], &row["path"])).collect();
    let tree = json!("tree");
    assert_eq!(
        found,
        [(&json!("reduce"), &json!(3), &json!(0), &tree), (&json!("barrier"), &json!(3), &json!(0), &tree)]
    );
}

#[test]
fn failure_at_rank_0_is_the_exit_status_of_all_ranks() {
    // Ring has no declared order.
    let output = run("3", &perf("-e 8 -n 1 --algo ring --order fold", ""));
    assert_eq!(stdout(&output).matches("status 1").count(), 3, "{}{}", stdout(&output), stderr(&output));
    assert_eq!(stderr(&output).matches("none of the requested algorithms is possible").count(), 1);
    // Rank 0 cannot print its rows.
    let output = run("3", &perf("-e 8 -n 1 --algo ring", ">/dev/full"));
    assert_eq!(stdout(&output).matches("status 1").count(), 3, "{}{}", stdout(&output), stderr(&output));
    assert!(stderr(&output).contains("No space left on device"), "{}", stderr(&output));
}

#[test]
fn explanation_under_a_launcher_is_printed_once() {
    let output = run("2", &perf("--explain -b 8 -e 8 --algo auto --json", ""));
    let text = stdout(&output);
    assert_eq!((text.matches("candidates").count(), text.matches("status 0").count()), (1, 2), "{text}");
}

#[test]
fn option_of_the_wrong_kind_of_run_is_refused() {
    let rank = [("SUMAC_RANK", "0"), ("SUMAC_WORLD", "2")];
    for (options, variables, named) in [
        (&["--topology", "f.toml"][..], &rank[..], "--topology is for the cluster that perf starts itself"),
        (&["--chaos", "--loss 5%"], &rank, "--chaos is for"),
        (&[], &[("RANK", "0")], "WORLD_SIZE: it is not set"),
        (&[], &[("RANK", "0")], "or give --ranks"),
        (&["--root", "2", "--collective", "reduce"], &rank, "the 2 ranks count from 0"),
        (&["--controller", "127.0.0.1:1"], &[], "--controller is for ranks that a launcher starts"),
        (&["--controller", "n:x"], &rank, "HOST:PORT"),
    ] {
        let output = sumac(&[&["perf"], options].concat(), variables);
        assert_eq!(exit_status(&output), 2, "{options:?}");
        assert!(stderr(&output).contains(named), "{options:?}: {}", stderr(&output));
    }
    let output = sumac(&["selftest", "--topology", "f.toml"], &rank);
    assert_eq!(exit_status(&output), 2);
    assert!(stderr(&output).contains("--topology is for the tree that selftest starts itself"), "{}", stderr(&output));
    // --ranks starts a cluster, also under a launcher.
    let output = sumac(&["perf", "--ranks", "2", "-e", "8", "-n", "1", "--algo", "tree"], &rank);
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
}

#[test]
fn mpirun_starts_ranks_of_perf() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        eprintln!("SKIPPED: there is no mpirun (Debian: apt-get install openmpi-bin)");
        return;
    }
    let mut controller = common::serve(&["controller", "--listen", "127.0.0.1:0"]);
    let line = controller.line();
    let addr = line.strip_prefix("listening ").expect("an address");
    let mut device = common::serve(&["device", "--name", "d", "--controller", addr]);
    assert_eq!(device.line(), "ready d");
    let mut mpirun = Command::new("mpirun");
    // Open MPI refuses root unless told twice, and counts cores, not processes.
    mpirun.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    mpirun.args(["--oversubscribe", "-np", "4", env!("CARGO_BIN_EXE_sumac"), "perf", "--controller", addr]);
    let output = mpirun.args(["-b", "8", "-e", "8", "-n", "3", "--algo", "tree"]).output().expect("mpirun runs");
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("ranks 4  devices 1") && text.contains("# 1 rows, 0 wrong elements: OK"), "{text}");
}

#[test]
fn selftest_under_a_launcher_tests_the_links_of_each_rank_in_one_table() {
    let selftest = |options: &str, redirection: &str| {
        format!("{} selftest -n 5 -e 64K {options} {redirection}; echo status $?", env!("CARGO_BIN_EXE_sumac"))
    };
    let path = std::env::var("PATH").expect("a path");
    let run = |script: &str| {
        let args = ["run", "-n", "3", "--devices", "2", "--", "sh", "-c", script];
        sumac(&args, &[("PATH", path.as_str())])
    };
    let output = run(&selftest("--json", ""));
    let text = stdout(&output);
    assert_eq!(text.matches("status 0").count(), 3, "{text}{}", stderr(&output));
    let rows: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let ends: Vec<_> = rows.iter().map(|row| (row["from"].as_str(), row["to"].as_str())).collect();
    let of = |rank: &'static str| [(Some(rank), Some("leaf0")), (Some(rank), Some("leaf1"))];
    assert_eq!(ends.len(), 7, "{ends:?}");
    assert_eq!((&ends[..2], &ends[3..]), (&of("rank 0")[..], &[of("rank 1"), of("rank 2")].concat()[..]));
    // Rank 0 cannot print the table.
    let output = run(&selftest("", ">/dev/full"));
    assert_eq!(stdout(&output).matches("status 1").count(), 3, "{}{}", stdout(&output), stderr(&output));
}
