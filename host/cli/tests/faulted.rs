//! `sumac perf --fault`: what is done to a live run, what the rows say of it, and that nothing is left.

mod common;

use common::{Process, children, exit_status, stderr, stdout};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

/// What `perf` with a fault printed, once all of it has ended.
fn faulted(args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
    command.args(["perf", "--json"]).args(args.split_whitespace());
    let mut process =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
    // Every child that it has at any line it prints.
    let mut seen: BTreeMap<i32, Process> = BTreeMap::new();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let from = process.stdout.take().expect("piped");
    let reader = std::thread::spawn(move || {
        BufReader::new(from).lines().map_while(Result::ok).for_each(|line| out.extend(format!("{line}\n").bytes()));
        out
    });
    for line in BufReader::new(process.stderr.take().expect("piped")).lines().map_while(Result::ok) {
        seen.extend(children(process.id()).into_iter().map(|child| (child.pid.as_raw_pid(), child)));
        err.extend(format!("{line}\n").bytes());
    }
    let (status, stdout) = (process.wait().expect("ended"), reader.join().expect("nobody panicked"));
    assert!(!seen.is_empty(), "it has children, which say something: {}", String::from_utf8_lossy(&err));
    for Process { pid, command, ended } in seen.values() {
        let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
        let events = poll(&mut [PollFd::new(ended, PollFlags::IN)], Some(&limit)).expect("polled");
        assert_eq!(events, 1, "process {} is left: {command}", pid.as_raw_pid());
    }
    Output { status, stdout, stderr: err }
}

/// Return the rows of a run that went well, in which no element is wrong.
fn rows(output: &Output) -> Vec<Value> {
    assert_eq!(exit_status(output), 0, "{}", stderr(output));
    let rows: Vec<Value> =
        stdout(output).lines().map(|line| serde_json::from_str(line).expect("a JSON object a line")).collect();
    assert!(rows.iter().all(|row| row["wrong"] == 0), "{rows:?}");
    rows
}

fn lines_with(output: &Output, what: &str) -> Vec<String> {
    stderr(output).lines().filter(|line| line.starts_with("# ") && line.contains(what)).map(str::to_owned).collect()
}

/// Every row is hurt and repaired.
fn repaired(args: &str, done: &str) -> Vec<Value> {
    let output = faulted(args);
    let rows = rows(&output);
    assert!(rows.iter().all(|row| row["repaired"] == true), "{rows:?}");
    let told = lines_with(&output, done);
    assert_eq!(told.len(), rows.len(), "{}", stderr(&output));
    assert!(told.iter().all(|line| line.contains("noticed and repaired in ")), "{told:?}");
    rows
}

#[test]
fn a_killed_device_is_got_over_in_every_row() {
    let rows =
        repaired("-b 8 -e 4M -f 524288 -n 6 -w 2 --algo tree,ring --fault kill-device", "device leaf0 killed in");
    assert_eq!(rows.len(), 4);
    // Nobody else takes over: the other leaf was of the same tree.
    assert!(rows.iter().all(|row| row["path"] != "tree"), "{rows:?}");
}

/// It ends sooner than the fault can come: its ranks wait for that.
#[test]
fn the_only_operation_of_a_row_may_be_small() {
    repaired("-b 8 -e 8 -n 1 -w 0 --algo tree --fault kill-device", "device leaf0 killed in iteration 1 of 1");
}

#[test]
fn a_killed_device_is_got_over_in_packets_and_with_one_level() {
    repaired("-b 1M -e 1M -n 4 -w 1 --algo tree --attach udp --levels 1 --fault kill-device", "device leaf0 killed in");
}

#[test]
fn a_device_that_is_started_again_serves_the_next_row() {
    let args = "-b 1M -e 8M -f 8 -n 6 -w 2 --algo tree --memory plain --fault restart-device";
    assert_eq!(repaired(args, "device leaf0 killed and started again in").len(), 2);
}

#[test]
fn a_cut_link_is_got_over() {
    let rows = repaired(
        "-b 1M -e 1M -n 4 -w 1 --algo tree,ring --shards 2 --fault cut-link",
        "link between rank 0 and device leaf0 cut in",
    );
    assert_eq!(rows.len(), 2);
}

#[test]
fn a_killed_controller_is_missed_by_no_operation_and_is_back_for_the_next_row() {
    let output = faulted("-b 8 -e 1M -f 131072 -n 6 -w 2 --algo tree,hd -v --fault kill-controller");
    let rows = rows(&output);
    assert!(rows.len() == 4 && rows.iter().all(|row| row["repaired"] == false), "{rows:?}");
    assert!(rows.iter().all(|row| row["path"] == row["algo"]), "{rows:?}");
    assert_eq!(lines_with(&output, "the controller killed in").len(), 4, "{}", stderr(&output));
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    let output = faulted("-b 1M -e 8M -f 8 -n 6 -w 2 --algo tree --fault kill-rank");
    assert_eq!((exit_status(&output), stdout(&output)), (1, String::new()), "{}", stderr(&output));
    assert_eq!(lines_with(&output, "rank 3 killed in iteration 4 of 6").len(), 1, "{}", stderr(&output));
    for rank in 0..3 {
        let told = lines_with(&output, &format!("rank {rank}: all_reduce "));
        let is_named = |line: &String| line.contains("rank 3 is lost: call ");
        assert!(told.len() == 1 && told.iter().all(is_named), "{}", stderr(&output));
    }
    assert!(stderr(&output).contains("error: rank 3 is lost"), "{}", stderr(&output));
}
