//! Ranks that are processes of their own and may be killed: this test program again, with `rank_process` as its only
//! test and a task in its environment.

// Each test binary uses its part of this.
#![allow(dead_code, unused_imports)]

mod cluster;
mod left;
mod rank;

pub(crate) use cluster::{Cluster, DEADLINE, Seen, start};
use left::dev_shm;
pub(crate) use left::{DeviceMemory, Sockets};

use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Long enough for a machine that does something else first; a test that works never waits for it.
const LONG: Duration = Duration::from_secs(60);

/// The variable that holds a rank's task.
const TASK: &str = "SUMAC_TEST_TASK";

/// Where a rank's data is, and how it gets to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Memory {
    /// By reference, from registered memory.
    Registered,
    /// By reference, through the bounce buffer.
    Plain,
    /// In packets.
    Packets,
}

/// What a rank is to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) controller: SocketAddr,
    pub(crate) job: String,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) memory: Memory,
    pub(crate) elements: usize,
    /// Whether elements are of a type that the device rounds results to, so that they are published from another place.
    pub(crate) rounds_values: bool,
    /// What the job's chunks are long.
    pub(crate) chunk_bytes: usize,
    /// All-reduces, one after the other.
    pub(crate) rounds: u64,
    /// Of each, and of joining.
    pub(crate) deadline_ms: u64,
    /// Whether a lost tree is got over: then operations take the tree while there is one, and the buffer is looked at
    /// again also after the last round.
    pub(crate) repair: bool,
}

/// A round that begins now, and how long the one before took.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Round {
    pub(crate) round: u64,
    pub(crate) took_us: u64,
    /// Whether the one before was repaired.
    pub(crate) repaired: bool,
}

/// How a rank's work ended.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ending {
    /// The error's variant; `None` if all rounds went well.
    pub(crate) error: Option<String>,
    /// The error's words, or where a chunk is torn.
    pub(crate) text: String,
    /// Rounds that went well.
    pub(crate) rounds: u64,
    /// Chunks of the last round that hold this rank's contribution.
    pub(crate) old: usize,
    /// Chunks of the last round that hold the result.
    pub(crate) new: usize,
    /// Chunks of the last round that hold anything else.
    pub(crate) torn: usize,
    /// When the call returned, on the machine's clock.
    pub(crate) at_ns: u64,
    /// Rounds that were repaired.
    pub(crate) repaired: Vec<u64>,
    /// Whether the last round that went well took the tree.
    pub(crate) by_tree: bool,
}

/// What became of the buffer after the call had failed.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Later {
    /// Elements that are not what they were when the call returned.
    pub(crate) changed: usize,
}

/// What is left in a rank that has dropped its communicator and its buffer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Left {
    /// Shared memory.
    pub(crate) mappings: usize,
}

/// Return the machine's monotonic clock, which all processes share.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Be a rank, as the environment says.
pub(crate) fn be_a_rank() {
    let task = std::env::var(TASK).expect("started by a test");
    let (parent, task): (i32, Task) = serde_json::from_str(&task).expect("a task");
    // It ends with the test, also with one that does not come to kill it.
    set_parent_process_death_signal(Some(Signal::KILL)).expect("any process may");
    if getppid().map(Pid::as_raw_pid) == Some(parent) {
        rank::run(&task, std::io::stdin());
    }
}

/// A running rank, which is killed with the test if nothing ended it before.
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
        // Ends with the rank.
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

    /// Wait for its second round to begin, and return how long the first took.
    pub(crate) fn second_round(&mut self) -> Duration {
        let Round { round, took_us, .. } = self.line();
        assert_eq!(round, 1, "{}", self.name);
        Duration::from_micros(took_us)
    }

    /// Wait for a round to begin.
    pub(crate) fn round(&mut self) -> Round {
        self.line()
    }

    /// Wait for the end of its work.
    pub(crate) fn ending(&mut self) -> Ending {
        loop {
            let line: Value = self.line();
            if line.get("took_us").is_none() {
                let ending = serde_json::from_value(line.clone());
                return ending.unwrap_or_else(|error| panic!("{}: {line}: {error}", self.name));
            }
        }
    }

    /// Let it look at its buffer again, now, after a call that failed or the last round.
    pub(crate) fn look_again(&mut self) -> Later {
        drop(self.stdin.take());
        self.line()
    }

    /// Wait for its end, and see that it has let go of all shared memory.
    pub(crate) fn end(mut self) {
        drop(self.stdin.take());
        assert_eq!(self.line::<Left>().mappings, 0, "{} has let go of its memory", self.name);
        assert!(self.process.wait().expect("it is ours").success(), "{}", self.name);
    }

    /// Return its process.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    /// Kill it.
    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("it is ours");
        self.process.wait().expect("it is ours");
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // It may have ended; both calls then do nothing.
        let _ = (self.process.kill(), self.process.wait());
    }
}

/// Send a signal to a process that is running.
pub(crate) fn signal(process: Pid, signal: Signal) {
    kill_process(process, signal).expect("running");
}
