//! No process of a cluster remains after its supervisor is interrupted or killed, or after a child dies.

mod common;

use common::{Dir, Process, children, exit_status, npy_f32, stderr};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

/// A supervisor and its children. Dropping it kills them.
struct Running {
    /// `None` once it has been reaped.
    supervisor: Option<Child>,
    stdout: BufReader<ChildStdout>,
    children: Vec<Process>,
}

impl Running {
    fn start(args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut supervisor = command.spawn().expect("started");
        let stdout = BufReader::new(supervisor.stdout.take().expect("piped"));
        Self { supervisor: Some(supervisor), stdout, children: Vec::new() }
    }

    /// Start a measurement whose second row takes far longer than the test, and wait for its first row.
    fn perf() -> Self {
        let mut running =
            Self::start(&["perf", "--json", "-b", "8", "-e", "64M", "-f", "8388608", "-n", "100", "--algo", "tree"]);
        let mut row = String::new();
        running.stdout.read_line(&mut row).expect("a row");
        running.children = children(running.supervisor().id());
        // The controller, two devices and four ranks.
        assert_eq!(running.children.len(), 7, "{row}");
        running
    }

    fn supervisor(&self) -> &Child {
        self.supervisor.as_ref().expect("not waited for yet")
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(self.supervisor()), signal).expect("running");
    }

    fn child(&self, command: &str) -> &Process {
        self.children.iter().find(|child| child.command.contains(command)).expect("such a child")
    }

    /// Wait for the supervisor and then for each child. A child that remains fails the test.
    fn end(mut self) -> Output {
        self.stdout.read_to_end(&mut Vec::new()).expect("read");
        let output = self.supervisor.take().expect("waited for once").wait_with_output().expect("ended");
        for Process { pid, command, ended } in &self.children {
            let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
            let events = poll(&mut [PollFd::new(ended, PollFlags::IN)], Some(&limit)).expect("polled");
            assert_eq!(events, 1, "process {} is left: {command}", pid.as_raw_pid());
        }
        output
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(supervisor) = &mut self.supervisor {
            // Its children die with it. It may have ended already.
            let _ = supervisor.kill();
            let _ = supervisor.wait();
        }
    }
}

#[test]
fn interrupted_perf_ends_all_processes_with_130() {
    let running = Running::perf();
    running.signal(Signal::INT);
    let output = running.end();
    assert_eq!(exit_status(&output), 130, "{}", stderr(&output));
}

#[test]
fn children_die_with_their_killed_supervisor() {
    let running = Running::perf();
    running.signal(Signal::KILL);
    assert_eq!(running.end().status.code(), None);
}

#[test]
fn killed_device_fails_the_run_and_is_named() {
    let running = Running::perf();
    kill_process(running.child("--name=leaf1").pid, Signal::KILL).expect("running");
    let output = running.end();
    assert_eq!(exit_status(&output), 1, "{}", stderr(&output));
    assert!(stderr(&output).contains("device leaf1 ended early (signal: 9"), "{}", stderr(&output));
}

#[test]
fn killed_rank_fails_the_run() {
    let running = Running::perf();
    kill_process(running.child(" rank").pid, Signal::KILL).expect("running");
    let output = running.end();
    assert_eq!(exit_status(&output), 1, "{}", stderr(&output));
    // The supervisor sees either the dead rank first, or another one that failed because of it.
    assert!(stderr(&output).contains("error: rank "), "{}", stderr(&output));
}

#[test]
fn interrupted_selftest_ends_with_130() {
    let mut running = Running::start(&["selftest", "-n", "1000000", "--levels", "1"]);
    // The table's header is printed when the cluster is up; measuring then takes far longer than the test.
    let mut head = String::new();
    running.stdout.read_line(&mut head).expect("the table's head");
    running.children = children(running.supervisor().id());
    assert_eq!(running.children.len(), 2, "a controller and a device: {head}");
    running.signal(Signal::INT);
    let output = running.end();
    assert_eq!(exit_status(&output), 130, "{}", stderr(&output));
}

#[test]
fn interrupted_all_reduce_leaves_no_file() {
    let dir = Dir::new("interrupted");
    let values = vec![1.0; 1 << 23];
    let inputs = ["a.npy", "b.npy"].map(|name| dir.write(name, &npy_f32(&values, "(8388608,)")));
    let out = dir.path("out.npy");
    let mut running = Running::start(&["all-reduce", "--input", &inputs[0], "--input", &inputs[1], "--output", &out]);
    // Signal handlers are installed before the first child starts, so the signal ends the command in order.
    while running.children.is_empty() {
        let ended = running.supervisor.as_mut().and_then(|supervisor| supervisor.try_wait().expect("asked"));
        assert_eq!(ended, None, "it ended before it had a child");
        running.children = children(running.supervisor().id());
    }
    running.signal(Signal::INT);
    let output = running.end();
    assert_eq!(exit_status(&output), 130, "{}", stderr(&output));
    assert_eq!(dir.names(), ["a.npy", "b.npy"]);
}
