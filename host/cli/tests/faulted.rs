//! `sumac perf --fault`: what is done to a live run, what the rows say of it, and that nothing is left.

mod common;

use common::{Process, exit_status, processes_with, stderr, stdout, sumac};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Pid;
use serde_json::Value;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// What `perf` with a fault printed, once all of it has ended.
fn faulted(args: &str) -> Output {
    faulted_with(args, &[])
}

/// The same, with arguments that hold blanks.
fn faulted_with(args: &str, more: &[&str]) -> Output {
    // All processes of the run have it.
    const RUN: &str = "SUMAC_TEST_RUN";
    static RUNS: AtomicU32 = AtomicU32::new(0);
    let run = format!("{}.{}", std::process::id(), RUNS.fetch_add(1, Ordering::Relaxed));
    let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
    command.args(["perf", "--json"]).args(args.split_whitespace()).args(more).env(RUN, &run);
    let process = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
    let started = processes_with(RUN, &run);
    assert!(started.iter().any(|found| Some(found.pid) == Pid::from_raw(process.id() as i32)), "it can be seen");
    let output = process.wait_with_output().expect("ended");
    for Process { pid, command, ended } in processes_with(RUN, &run) {
        let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
        let events = poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&limit)).expect("polled");
        assert_eq!(events, 1, "process {} is left: {command}", pid.as_raw_pid());
    }
    output
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
    repaired_as_told(args, done).0
}

/// The same, with what was told of each.
fn repaired_as_told(args: &str, done: &str) -> (Vec<Value>, Vec<String>) {
    let output = faulted(args);
    let rows = rows(&output);
    assert!(rows.iter().all(|row| row["repaired"] == true), "{rows:?}");
    // What each rank holds suffices to make good what the others lack.
    let bytes = |row: &Value, key: &str| row[key].as_u64().expect("a number");
    assert!(rows.iter().all(|row| bytes(row, "repair_bytes") <= 2 * bytes(row, "size_bytes")), "{rows:?}");
    let told = lines_with(&output, done);
    assert_eq!(told.len(), rows.len(), "{}", stderr(&output));
    assert!(told.iter().all(|line| line.contains("noticed and repaired in ")), "{told:?}");
    (rows, told)
}

#[test]
fn a_killed_device_is_got_over_in_every_row() {
    let args = "-b 8 -e 4M -f 524288 -n 6 -w 2 --algo tree,ring --fault kill-device";
    let (rows, told) = repaired_as_told(args, "device leaf0 killed in");
    assert_eq!(rows.len(), 4);
    // By ring only barriers are in the tree: then it is the iteration that was hit, the barrier behind it, or in between.
    let when = ["which iteration 4 took longer than the median", "next to iteration 4", "while no rank was in a call"];
    assert!(told.iter().all(|line| when.iter().any(|when| line.ends_with(when))), "{told:?}");
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

/// Returns how many packets were lost on purpose.
fn lost_in_chaos(output: &Output) -> u64 {
    let lost = |line: &String| line.split_once(" lost")?.0.rsplit(' ').next()?.parse::<u64>().ok();
    lines_with(output, "chaos before device ").iter().filter_map(lost).sum()
}

#[test]
fn with_chaos_before_each_device_all_is_right() {
    let chaos = "--chaos=--loss 3% --duplicate 1% --reorder 2% --corrupt 1%";
    let output = faulted_with("-b 8 -e 1M -f 131072 -n 6 -w 1 --algo tree --attach udp", &[chaos]);
    let rows = rows(&output);
    assert!(rows.len() == 2 && rows.iter().all(|row| row["path"] == "tree" && row["repaired"] == false), "{rows:?}");
    assert!(lost_in_chaos(&output) > 0, "{}", stderr(&output));
}

/// It takes its predecessor's port.
#[test]
fn a_device_is_started_again_behind_chaos() {
    let args = "-b 4M -e 4M -n 4 -w 1 --algo tree,ring --attach shm --fault restart-device";
    let output = faulted_with(args, &["--chaos=--loss 2% --delay 50us..100us"]);
    let rows = rows(&output);
    assert!(rows.len() == 2 && rows.iter().all(|row| row["repaired"] == true), "{rows:?}");
    assert!(lost_in_chaos(&output) > 0, "{}", stderr(&output));
}

#[test]
fn chaos_that_can_not_be_is_refused_before_anything_is_started() {
    for (chaos, named) in [("--los 1%", "unexpected argument '--los'"), ("--loss 60% --reorder 60%", "120.0% together")]
    {
        let output = sumac(&["perf", "--chaos", chaos]);
        assert_eq!((exit_status(&output), stdout(&output)), (2, String::new()), "{}", stderr(&output));
        assert!(stderr(&output).contains(named), "{}", stderr(&output));
    }
}

#[test]
fn a_killed_controller_is_missed_by_no_operation_and_is_back_for_the_next_row() {
    let output = faulted("-b 8 -e 1M -f 131072 -n 6 -w 2 --algo tree,hd -v --fault kill-controller");
    let rows = rows(&output);
    assert!(rows.len() == 4 && rows.iter().all(|row| row["repaired"] == false), "{rows:?}");
    assert!(rows.iter().all(|row| row["path"] == row["algo"]), "{rows:?}");
    assert_eq!(lines_with(&output, "the controller killed in").len(), 4, "{}", stderr(&output));
}

/// Nothing is lost: what was under way goes on, and the tree from before serves until all move to the next one's.
#[test]
fn a_controller_that_is_killed_and_started_again_knows_the_job() {
    let output = faulted("-b 8 -e 1M -f 131072 -n 40 -w 2 --algo tree,hd -v --fault restart-controller");
    let rows = rows(&output);
    assert!(rows.len() == 4 && rows.iter().all(|row| row["repaired"] == false), "{rows:?}");
    assert!(rows.iter().all(|row| row["path"] == row["algo"]), "{rows:?}");
    let told = lines_with(&output, "the controller killed and started again, which knew the job after ");
    assert_eq!(told.len(), 4, "{}", stderr(&output));
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
    // What a rank logs is what its call returns, and those that end for it are not lost as well.
    let logged = |what: &str| stderr(&output).lines().filter(|line| line.contains(what)).count();
    for rank in 0..3 {
        let told = lines_with(&output, &format!("rank {rank}: all_reduce "));
        let error =
            told.iter().find_map(|line| Some(format!("rank 3 is lost{}", line.split_once("rank 3 is lost")?.1)));
        let error = error.expect("named above");
        let line =
            stderr(&output).lines().any(|line| line.starts_with(&format!("rank {rank}: ")) && line.contains(&error));
        assert!(line, "rank {rank}: {error}: {}", stderr(&output));
    }
    assert_eq!(logged("rank is lost job="), 1, "{}", stderr(&output));
}
