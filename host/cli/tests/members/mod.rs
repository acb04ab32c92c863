//! Ranks as processes that can be killed: each runs this test program with `rank_process` as its only test and with a
//! task in its environment.

// Each test binary uses only a part of this module.
#![allow(dead_code, unused_imports)]

mod cluster;
mod leftovers;
mod rank;

pub(crate) use cluster::{Cluster, DEADLINE, Seen, start};
use leftovers::dev_shm;
pub(crate) use leftovers::{DeviceMemory, Sockets};

use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Long enough for a loaded machine; a passing test never waits for it.
const LONG: Duration = Duration::from_secs(60);

/// The variable that holds a rank's task.
const TASK: &str = "SUMAC_TEST_TASK";

/// The memory of a rank's data, and its path to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Memory {
    /// Zero-copy, from registered memory.
    Registered,
    /// Zero-copy transport through the bounce buffer.
    Plain,
    /// Inline, in packets.
    Packets,
}

/// The task of a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) controller: SocketAddr,
    pub(crate) job: String,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) memory: Memory,
    pub(crate) elements: usize,
    /// Whether the device rounds results to the element type, which publishes them from another place.
    pub(crate) rounds_values: bool,
    /// The length of the job's chunks, in bytes.
    pub(crate) chunk_bytes: usize,
    /// The number of all-reduces.
    pub(crate) rounds: u64,
    /// The deadline of each all-reduce and of joining, in milliseconds.
    pub(crate) deadline_ms: u64,
    /// Whether ranks recover from a lost tree. Then operations use the tree while there is one, and the buffer is
    /// checked again after the last round.
    pub(crate) recovery: bool,
}

/// A round that begins now, and the time of the previous one.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Round {
    pub(crate) round: u64,
    pub(crate) took_us: u64,
    /// Whether there was a recovery in the previous round or before it.
    pub(crate) repaired: bool,
}

/// How a rank's work ended.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ending {
    /// The error's variant; `None` if all rounds succeeded.
    pub(crate) error: Option<String>,
    /// The error's message, or the place of a torn chunk.
    pub(crate) text: String,
    /// Rounds that succeeded.
    pub(crate) rounds: u64,
    /// Chunks of the last round that hold this rank's contribution.
    pub(crate) old: usize,
    /// Chunks of the last round that hold the result.
    pub(crate) new: usize,
    /// Chunks of the last round that hold anything else.
    pub(crate) torn: usize,
    /// When the call returned, on the machine's monotonic clock.
    pub(crate) at_ns: u64,
    /// Rounds whose operation recovered.
    pub(crate) repaired: Vec<u64>,
    /// Whether the last successful round used the tree.
    pub(crate) by_tree: bool,
}

/// The buffer some time after the call returned.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Recheck {
    /// Elements that have changed since the call returned.
    pub(crate) changed: usize,
}

/// Resources that remain in a rank after it has dropped its communicator and its buffer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Leftovers {
    /// Mappings of shared memory.
    pub(crate) mappings: usize,
}

/// Return the time on the machine's monotonic clock, which all processes share.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Run the task in the environment as a rank.
pub(crate) fn run_rank() {
    let task = std::env::var(TASK).expect("started by a test");
    let (parent, task): (i32, Task) = serde_json::from_str(&task).expect("a task");
    // It is killed with the test, even if the test cannot do so itself.
    set_parent_process_death_signal(Some(Signal::KILL)).expect("any process may");
    if getppid().map(Pid::as_raw_pid) == Some(parent) {
        rank::run(&task, std::io::stdin());
    }
}

/// A running rank. Dropping it kills the process.
pub(crate) struct Member {
    process: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<Value>,
    name: String,
}

impl Member {
    pub(crate) fn start(task: &Task) -> Self {
        let program = std::env::current_exe().expect("the test program");
        let parent = std::process::id();
        let mut process = Command::new(program)
            .args(["--quiet", "--exact", "--ignored", "--nocapture", "--test-threads=1", "rank_process"])
            .env(TASK, serde_json::to_string(&(parent, task)).expect("plain values"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let stdin = process.stdin.take();
        let from = BufReader::new(process.stdout.take().expect("piped"));
        let (to, lines) = channel();
        // The thread ends with the rank.
        std::thread::spawn(move || {
            let lines = from.lines().map_while(Result::ok).filter(|line| line.starts_with('{'));
            lines.map_while(|line| serde_json::from_str(&line).ok()).try_for_each(|line| to.send(line))
        });
        Self { process, stdin, lines, name: format!("rank {} of {}", task.rank, task.job) }
    }

    fn line<T: for<'de> Deserialize<'de>>(&mut self) -> T {
        let line = self.lines.recv_timeout(LONG);
        let line = line.unwrap_or_else(|error| panic!("{}: {error} without the next line", self.name));
        let parsed = serde_json::from_value(line.clone());
        parsed.unwrap_or_else(|error| panic!("{}: {line}: {error}", self.name))
    }

    /// Wait until its second round begins, and return the time of the first.
    pub(crate) fn second_round(&mut self) -> Duration {
        self.second_round_in_time().unwrap_or_else(|| panic!("{} ended in its first round", self.name))
    }

    /// The same; `None` if the first round did not complete within the deadline.
    pub(crate) fn second_round_in_time(&mut self) -> Option<Duration> {
        let line: Value = self.line();
        if matches!(line["error"].as_str(), Some("Deadline")) {
            return None;
        }
        let Round { round, took_us, .. } =
            serde_json::from_value(line.clone()).unwrap_or_else(|error| panic!("{}: {line}: {error}", self.name));
        assert_eq!(round, 1, "{}", self.name);
        Some(Duration::from_micros(took_us))
    }

    /// Wait until a round begins.
    pub(crate) fn round(&mut self) -> Round {
        self.line()
    }

    /// Wait until its work has ended.
    pub(crate) fn ending(&mut self) -> Ending {
        loop {
            let line: Value = self.line();
            if line.get("took_us").is_none() {
                let ending = serde_json::from_value(line.clone());
                return ending.unwrap_or_else(|error| panic!("{}: {line}: {error}", self.name));
            }
        }
    }

    /// Let it check its buffer again, after a failed call or after the last round.
    pub(crate) fn recheck(&mut self) -> Recheck {
        drop(self.stdin.take());
        self.line()
    }

    /// Wait for its end, and assert that it has unmapped all shared memory.
    pub(crate) fn end(mut self) {
        drop(self.stdin.take());
        assert_eq!(self.line::<Leftovers>().mappings, 0, "{} still maps shared memory", self.name);
        assert!(self.process.wait().expect("it is ours").success(), "{}", self.name);
    }

    /// Return its process id.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    /// Kill it with SIGKILL and reap it.
    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("it is ours");
        self.process.wait().expect("it is ours");
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // If it has ended, both calls do nothing.
        let _ = (self.process.kill(), self.process.wait());
    }
}

/// Send a signal to a running process.
pub(crate) fn signal(process: Pid, signal: Signal) {
    kill_process(process, signal).expect("running");
}
