//! `sumac perf --fault`: injected faults, their rows and remarks, and no remaining processes.

mod common;

use common::{Process, exit_status, processes_with, stderr, stdout, sumac};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Pid;
use serde_json::Value;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

/// Run `perf` with a fault, wait until all its processes have ended, and return its output.
fn faulted(args: &str) -> Output {
    faulted_with(args, &[])
}

/// Like [`faulted`], with additional arguments that may contain spaces.
fn faulted_with(args: &str, more: &[&str]) -> Output {
    // Marks all processes of the run.
    const RUN: &str = "SUMAC_TEST_RUN";
    static RUNS: AtomicU32 = AtomicU32::new(0);
    let run = format!("{}.{}", std::process::id(), RUNS.fetch_add(1, Ordering::Relaxed));
    let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
    command.args(["perf", "--json"]).args(args.split_whitespace()).args(more).env(RUN, &run);
    let mut process =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
    let pid = Pid::from_raw(process.id() as i32);
    // It is started a little before the kernel shows its environment.
    while !processes_with(RUN, &run).iter().any(|found| Some(found.pid) == pid) {
        assert_eq!(process.try_wait().expect("a child"), None, "it ended before it could be seen");
        thread::yield_now();
    }
    let output = process.wait_with_output().expect("ended");
    for Process { pid, command, ended } in processes_with(RUN, &run) {
        let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
        let events = poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&limit)).expect("polled");
        assert_eq!(events, 1, "process {} is left: {command}", pid.as_raw_pid());
    }
    output
}

/// Return the rows of a successful run without wrong elements.
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

/// Run `perf` and assert that every row recovered from its fault.
fn repaired(args: &str, done: &str) -> Vec<Value> {
    repaired_with_remarks(args, done).0
}

/// Like [`repaired`], and return the remark of each row.
fn repaired_with_remarks(args: &str, done: &str) -> (Vec<Value>, Vec<String>) {
    let output = faulted(args);
    let rows = rows(&output);
    assert!(rows.iter().all(|row| row["repaired"] == true), "{rows:?}");
    // Recovery sends no more than the data that the ranks lack; short pieces of it, to all others at once.
    let bytes = |row: &Value, key: &str| row[key].as_u64().expect("a number");
    let times = |row: &Value| (bytes(row, "ranks") - 1).max(2);
    let is_spare = |row: &Value| bytes(row, "repair_bytes") <= times(row) * bytes(row, "size_bytes");
    assert!(rows.iter().all(is_spare), "{rows:?}");
    let remarks = lines_with(&output, done);
    assert_eq!(remarks.len(), rows.len(), "{}", stderr(&output));
    assert!(remarks.iter().all(|line| line.contains("detected and recovered in ")), "{remarks:?}");
    (rows, remarks)
}

#[test]
fn every_row_recovers_from_a_killed_device() {
    let args = "-b 8 -e 4M -f 524288 -n 6 -w 2 --algo tree,ring --fault kill-device";
    let (rows, remarks) = repaired_with_remarks(args, "device leaf0 killed in");
    assert_eq!(rows.len(), 4);
    // In rows of ring only barriers use the tree: recovery happens in the iteration, in the next barrier, or in
    // between.
    let when = ["the time of iteration 4 beyond the median", "next to iteration 4", "while no rank was in a call"];
    assert!(remarks.iter().all(|line| when.iter().any(|when| line.ends_with(when))), "{remarks:?}");
    // The other leaf serves the job again once the dead one is known to be gone: rows may be on either path.
}

/// The operation ends before the fault is injected; its ranks wait for the fault.
#[test]
fn fault_is_injected_into_a_single_small_operation() {
    repaired("-b 8 -e 8 -n 1 -w 0 --algo tree --fault kill-device", "device leaf0 killed in iteration 1 of 1");
}

#[test]
fn packet_ranks_recover_from_the_only_device_killed() {
    repaired(
        "-b 1M -e 1M -n 4 -w 1 --algo tree --transport udp --levels 1 --fault kill-device",
        "device leaf0 killed in",
    );
}

#[test]
fn restarted_device_serves_the_next_row() {
    let args = "-b 1M -e 8M -f 8 -n 6 -w 2 --algo tree --memory plain --fault restart-device";
    assert_eq!(repaired(args, "device leaf0 killed and restarted in").len(), 2);
}

#[test]
fn ranks_recover_from_a_cut_link() {
    let rows = repaired(
        "-b 1M -e 1M -n 4 -w 1 --algo tree,ring --shards 2 --fault cut-link",
        "link between rank 0 and device leaf0 cut in",
    );
    assert_eq!(rows.len(), 2);
}

/// Return the number of packets that chaos dropped.
fn lost_in_chaos(output: &Output) -> u64 {
    let lost = |line: &String| line.split_once(" lost")?.0.rsplit(' ').next()?.parse::<u64>().ok();
    lines_with(output, "chaos on device ").iter().filter_map(lost).sum()
}

#[test]
fn chaos_on_each_device_causes_no_wrong_element() {
    let chaos = "--chaos=--loss 3% --duplicate 1% --reorder 2% --corrupt 1%";
    let output = faulted_with("-b 8 -e 1M -f 131072 -n 6 -w 1 --algo tree --transport udp", &[chaos]);
    let rows = rows(&output);
    assert!(rows.len() == 2 && rows.iter().all(|row| row["path"] == "tree" && row["repaired"] == false), "{rows:?}");
    assert!(lost_in_chaos(&output) > 0, "{}", stderr(&output));
}

/// The restarted device uses its predecessor's port.
#[test]
fn device_restarts_behind_chaos() {
    let args = "-b 4M -e 4M -n 4 -w 1 --algo tree,ring --transport shm --fault restart-device";
    let output = faulted_with(args, &["--chaos=--loss 2% --delay 50us..100us"]);
    let rows = rows(&output);
    assert!(rows.len() == 2 && rows.iter().all(|row| row["repaired"] == true), "{rows:?}");
    assert!(lost_in_chaos(&output) > 0, "{}", stderr(&output));
}

#[test]
fn invalid_chaos_is_refused_before_anything_starts() {
    for (chaos, named) in [("--los 1%", "unexpected argument '--los'"), ("--loss 60% --reorder 60%", "120.0% together")]
    {
        let output = sumac(&["perf", "--chaos", chaos]);
        assert_eq!((exit_status(&output), stdout(&output)), (2, String::new()), "{}", stderr(&output));
        assert!(stderr(&output).contains(named), "{}", stderr(&output));
    }
}

#[test]
fn operations_complete_after_the_controller_is_killed() {
    let output = faulted("-b 8 -e 1M -f 131072 -n 6 -w 2 --algo tree,hd -v --fault kill-controller");
    let rows = rows(&output);
    assert!(rows.len() == 4 && rows.iter().all(|row| row["repaired"] == false), "{rows:?}");
    assert!(rows.iter().all(|row| row["path"] == row["algo"]), "{rows:?}");
    assert_eq!(lines_with(&output, "the controller killed in").len(), 4, "{}", stderr(&output));
}

/// Operations in flight continue, and the former tree serves until all ranks migrate to the new controller's tree.
#[test]
fn restarted_controller_takes_the_job_over() {
    let output = faulted("-b 8 -e 1M -f 131072 -n 40 -w 2 --algo tree,hd -v --fault restart-controller");
    let rows = rows(&output);
    assert!(rows.len() == 4 && rows.iter().all(|row| row["repaired"] == false), "{rows:?}");
    assert!(rows.iter().all(|row| row["path"] == row["algo"]), "{rows:?}");
    let remarks = lines_with(&output, "the controller killed and restarted (job restored after ");
    assert_eq!(remarks.len(), 4, "{}", stderr(&output));
}

#[test]
fn survivors_name_the_killed_rank() {
    let output = faulted("-b 1M -e 8M -f 8 -n 6 -w 2 --algo tree --fault kill-rank");
    assert_eq!((exit_status(&output), stdout(&output)), (1, String::new()), "{}", stderr(&output));
    assert_eq!(lines_with(&output, "rank 3 killed in iteration 4 of 6").len(), 1, "{}", stderr(&output));
    for rank in 0..3 {
        let remarks = lines_with(&output, &format!("rank {rank}: all_reduce "));
        let is_named = |line: &String| line.contains("rank 3 is lost: collective #");
        assert!(remarks.len() == 1 && remarks.iter().all(is_named), "{}", stderr(&output));
    }
    assert!(stderr(&output).contains("error: rank 3 is lost"), "{}", stderr(&output));
    // Each rank logs the error that its call returns, and only the killed rank counts as lost.
    let logged = |what: &str| stderr(&output).lines().filter(|line| line.contains(what)).count();
    for rank in 0..3 {
        let remarks = lines_with(&output, &format!("rank {rank}: all_reduce "));
        let error =
            remarks.iter().find_map(|line| Some(format!("rank 3 is lost{}", line.split_once("rank 3 is lost")?.1)));
        let error = error.expect("named above");
        let line =
            stderr(&output).lines().any(|line| line.starts_with(&format!("rank {rank}: ")) && line.contains(&error));
        assert!(line, "rank {rank}: {error}: {}", stderr(&output));
    }
    assert_eq!(logged("rank is lost job="), 1, "{}", stderr(&output));
}
