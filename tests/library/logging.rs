//! What programs print to stderr without asking for it, and with `SUMAC_LOG`.

use crate::programs::{run_ranks, start_ranks, stderr, stdout};
use std::io::{BufRead, BufReader};
use std::process::Output;
use sumac::testing::{LocalCluster, LocalClusterConfig};

const NO_TREE: &str = "sumac: warning: no tree: using host collectives";

fn without_devices() -> LocalCluster {
    let config = LocalClusterConfig { devices: 0, ..LocalClusterConfig::new(2) };
    LocalCluster::start_with(config).expect("a cluster")
}

fn assert_success(output: &Output) {
    assert!(output.status.success(), "{}{}", stdout(output), stderr(output));
}

#[test]
fn fault_is_one_line_by_default_and_nothing_when_off() {
    let cluster = without_devices();
    for log in [None, Some("warn"), Some("")] {
        for output in run_ranks(&cluster, "join", log) {
            assert_success(&output);
            let text = stderr(&output);
            assert!(text.starts_with(NO_TREE) && text.lines().count() == 1, "{log:?}: {text}");
        }
    }
    for log in ["off", "error", "sumac::exec=trace"] {
        for output in run_ranks(&cluster, "join", Some(log)) {
            assert_success(&output);
            assert_eq!(stderr(&output), "", "{log}");
        }
    }
}

#[test]
fn invalid_filter_is_reported_and_replaced_by_the_default() {
    for output in run_ranks(&without_devices(), "join", Some("sumac=loud")) {
        let text = stderr(&output);
        let (first, rest) = text.split_once('\n').expect("lines");
        assert_eq!(first, "sumac: warning: SUMAC_LOG: \"sumac=loud\" is not LEVEL or TARGET=LEVEL");
        assert!(rest.starts_with(NO_TREE), "{text}");
    }
}

#[test]
fn subscriber_of_the_program_gets_everything() {
    for output in run_ranks(&without_devices(), "subscribe", Some("debug")) {
        assert_success(&output);
        assert_eq!(stderr(&output), "");
        assert!(stdout(&output).contains("no tree: using host collectives"), "{}", stdout(&output));
    }
}

/// The program may set its subscriber after it has joined and a line was printed: nothing stands in its way.
#[test]
fn subscriber_that_is_set_late_gets_later_events() {
    for output in run_ranks(&without_devices(), "subscribe-late", None) {
        assert_success(&output);
        let text = stderr(&output);
        assert!(text.starts_with(NO_TREE) && text.lines().count() == 1, "{text}");
        assert!(stdout(&output).contains("the communicator has ended"), "{}", stdout(&output));
    }
}

#[test]
fn ended_communicator_is_one_line() {
    let causes = ["error=cancelled by this rank's own program", "error=rank 0 is lost"];
    let cluster = LocalCluster::start(2).expect("a cluster");
    for (output, cause) in run_ranks(&cluster, "cancel", None).into_iter().zip(causes) {
        assert_success(&output);
        let text = stderr(&output);
        let is_line = text.starts_with("sumac: warning: the communicator has ended (") && text.lines().count() == 1;
        assert!(is_line && text.contains(cause), "{text}");
    }
}

/// Kill the device of two ranks; return what they printed.
fn lose_device(log: Option<&str>) -> Vec<String> {
    let cluster = LocalCluster::start(2).expect("a cluster");
    let mut ranks = start_ranks(&cluster, "recover", log);
    for rank in &mut ranks {
        let lines = BufReader::new(rank.stdout.as_mut().expect("a pipe")).lines();
        assert!(lines.map_while(Result::ok).any(|line| line.ends_with("ready")), "a rank ended early");
    }
    cluster.kill_device(0);
    let outputs = ranks.into_iter().map(|rank| rank.wait_with_output().expect("an end"));
    let text = |output| {
        assert_success(&output);
        stderr(&output)
    };
    outputs.map(text).collect()
}

#[test]
fn lost_device_is_one_line_that_tells_the_cause_and_what_follows() {
    for text in lose_device(None) {
        assert!(text.starts_with("sumac: warning: recovered (job=local-0, ") && text.lines().count() == 1, "{text}");
        // A rank sees the loss itself, or another rank reports it first.
        let causes = ["cause=device device0 is gone", "cause=the path through the tree is lost"];
        assert!(causes.iter().any(|cause| text.contains(cause)), "{text}");
        assert!(text.contains("on=host collectives, why=no device is connected"), "{text}");
    }
}

#[test]
fn lost_device_has_details_at_debug() {
    for text in lose_device(Some("debug")) {
        let has_detail = |line: &str| line.starts_with("sumac: info: sumac::") && line.contains("changing the view (");
        assert!(text.lines().any(has_detail), "{text}");
        assert!(text.lines().all(|line| line.starts_with("sumac: ")) && text.lines().count() > 2, "{text}");
    }
}
