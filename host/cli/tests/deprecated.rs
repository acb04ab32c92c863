//! Old names of options, subcommands and variables: each works for one release, and warns once with the new name.

mod common;

use common::{Dir, exit_status, stderr, stdout};
use std::process::{Command, Output, Stdio};
use sumac::comm::environment::DEPRECATED;
use sumac::{JoinConfig, Transport};

/// Marks the process that [`deprecated_variable_is_read_and_warns_once`] starts to read a rank's configuration.
const READS_VARIABLES: &str = "SUMAC_TEST_READS_VARIABLES";

fn sumac(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
    command.args(args).envs(variables.iter().copied()).stdin(Stdio::null()).output().expect("the command runs")
}

/// Every old option and subcommand, in a command line that is cheap to run, with the new spelling of the same line and
/// the warning.
#[test]
fn deprecated_spelling_does_the_same_and_warns_once() {
    let dir = Dir::new("no-cards");
    let folder = dir.path("");
    let board = ["image", "run", "--board", "x86-microvm", "--image", "none"];
    let board = |rest: &[&'static str]| [&board[..], rest].concat();
    let perf = |rest: &[&'static str]| [&["perf", "--fault", "cut-link"][..], rest].concat();
    let cases: [(Vec<&str>, Vec<&str>, &str); 7] = [
        (perf(&["--attach", "shm"]), perf(&["--transport", "shm"]), "--attach is deprecated; use --transport"),
        (perf(&["--attach=shm"]), perf(&["--transport=shm"]), "--attach is deprecated; use --transport"),
        (
            vec!["all-reduce", "--attach", "roce"],
            vec!["all-reduce", "--transport", "roce"],
            "--attach is deprecated; use --transport",
        ),
        (
            vec!["device", "--name", "d", "--no-bus", "--dma-strict"],
            vec!["device", "--name", "d", "--no-shm", "--dma-strict"],
            "--no-bus is deprecated; use --no-shm",
        ),
        (board(&["--seats", "1"]), board(&["--ranks-max", "1"]), "--seats is deprecated; use --ranks-max"),
        (
            board(&["--seat-mib", "3"]),
            board(&["--rank-memory-mib", "3"]),
            "--seat-mib is deprecated; use --rank-memory-mib",
        ),
        (
            vec!["devices", "--json", "--root", &folder],
            vec!["card", "list", "--json", "--root", &folder],
            "`sumac devices` is deprecated; use `sumac card list`",
        ),
    ];
    for (old, new, warning) in cases {
        let (of_old, of_new) = (sumac(&old, &[]), sumac(&new, &[]));
        assert_eq!(stderr(&of_old), format!("warning: {warning}\n{}", stderr(&of_new)), "{old:?}");
        assert_eq!((exit_status(&of_old), stdout(&of_old)), (exit_status(&of_new), stdout(&of_new)), "{old:?}");
    }
}

#[test]
fn help_shows_new_names_only() {
    for args in [&["--help"][..], &["perf", "--help"], &["device", "--help"], &["image", "run", "--help"]] {
        let help = stdout(&sumac(args, &[]));
        for old in ["--attach", "--no-bus", "--seats", "--seat-mib", "  devices ", "SUMAC_ATTACH", "SUMAC_REPAIR"] {
            assert!(!help.contains(old), "{args:?} shows {old}: {help}");
        }
    }
}

/// The library reads the variables of ranks. It does so in a process of its own, whose environment is set when it
/// starts.
#[test]
fn deprecated_variable_is_read_and_warns_once() {
    if std::env::var_os(READS_VARIABLES).is_some() {
        tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stderr).init();
        let read = || {
            let JoinConfig { transport, recover, .. } = JoinConfig::from_env().expect("a rank's variables");
            (transport, recover)
        };
        assert_eq!((read(), read()), ((Transport::Shm, false), (Transport::Shm, false)));
        return;
    }
    assert_eq!(DEPRECATED, [("SUMAC_ATTACH", "SUMAC_TRANSPORT"), ("SUMAC_REPAIR", "SUMAC_RECOVER")]);
    let warnings = DEPRECATED.map(|(old, new)| format!("{old} is deprecated; use {new}"));
    let old = [("SUMAC_ATTACH", "shm"), ("SUMAC_REPAIR", "0")];
    let command = sumac(&["plan", "--help"], &old);
    let lines: String = warnings.iter().map(|warning| format!("warning: {warning}\n")).collect();
    assert_eq!((exit_status(&command), stderr(&command)), (0, lines));
    let mut rank = Command::new(std::env::current_exe().expect("this test"));
    rank.args(["--exact", "deprecated_variable_is_read_and_warns_once", "--nocapture"]);
    rank.envs([(READS_VARIABLES, "1"), ("RANK", "0"), ("WORLD_SIZE", "1")]).envs(old);
    let output = rank.output().expect("it runs");
    assert_eq!(exit_status(&output), 0, "{}", stdout(&output));
    for warning in warnings {
        assert_eq!(stderr(&output).matches(&warning).count(), 1, "{}", stderr(&output));
    }
}

#[test]
fn unknown_variable_warns_once_with_the_closest_name() {
    let output = sumac(&["plan", "--help"], &[("SUMAC_TENNANT", "a"), ("SUMAC_PORT", "1")]);
    let warning = "warning: unknown environment variable SUMAC_TENNANT; did you mean SUMAC_TENANT?\n";
    assert_eq!((exit_status(&output), stderr(&output)), (0, warning.to_owned()));
}
