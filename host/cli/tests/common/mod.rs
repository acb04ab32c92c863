//! Helpers for tests of the command: running it, and temporary folders.

// Each test binary uses only a part of this module.
#![allow(dead_code)]

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use sumac::{Communicator, Error, Outcome, ReduceOp};

/// Two leaves with two hosts each. The planner picks one leaf as the root, because the spine has no device.
pub(crate) const TWO_LEAVES: &str = r#"
switch = [
    { name = "leaf0", aggregation = true },
    { name = "leaf1", aggregation = true },
    { name = "spine0" },
]
host = [{ name = "h0" }, { name = "h1" }, { name = "h2" }, { name = "h3" }]
link = [
    { ends = ["h0", "leaf0"] },
    { ends = ["h1", "leaf0"] },
    { ends = ["h2", "leaf1"] },
    { ends = ["h3", "leaf1"] },
    { ends = ["leaf0", "spine0"] },
    { ends = ["leaf1", "spine0"] },
]
"#;

/// Run the command and wait for its end.
pub(crate) fn sumac(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sumac")).args(args).stdin(Stdio::null()).output().expect("the command runs")
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Return the exit status. An end by a signal panics.
pub(crate) fn exit_status(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("ended by a signal: {}", output.status))
}

/// A running controller, device or rank. Dropping it kills the process.
pub(crate) struct Server {
    process: Child,
    stdout: BufReader<ChildStdout>,
}

/// Start a command that serves.
pub(crate) fn serve(args: &[&str]) -> Server {
    serve_with(args, "")
}

/// Start a command that reads `stdin` to its end and then serves or works.
pub(crate) fn serve_with(args: &[&str], stdin: &str) -> Server {
    serve_from(command(), args, stdin).expect("started")
}

/// Start a command that serves, as another user. Prints a message and returns `None` if this process may not do so.
pub(crate) fn serve_as(uid: u32, args: &[&str]) -> Option<Server> {
    let mut other = command();
    other.uid(uid).gid(uid);
    match serve_from(other, args, "") {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            eprintln!(
                "SKIPPED: cannot run the command as user {uid}: this needs root, and a folder that all users can enter"
            );
            None
        }
        server => Some(server.expect("started")),
    }
}

fn command() -> Command {
    Command::new(env!("CARGO_BIN_EXE_sumac"))
}

fn serve_from(mut command: Command, args: &[&str], stdin: &str) -> std::io::Result<Server> {
    // The kernel kills it with the test's thread, even if the test does not drop it.
    command.args(args).env("SUMAC_SUPERVISOR", std::process::id().to_string());
    let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut to = process.stdin.take().expect("piped");
    let stdout = BufReader::new(process.stdout.take().expect("piped"));
    let server = Server { process, stdout };
    to.write_all(stdin.as_bytes()).expect("read by the command");
    Ok(server)
}

impl Server {
    /// Return its process id.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    /// Kill it with SIGKILL.
    pub(crate) fn kill(mut self) {
        self.process.kill().expect("it is ours");
        self.process.wait().expect("it is ours");
    }

    /// Wait for a line on its stdout.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    /// Wait until it has succeeded, and return the remaining lines of its stdout.
    pub(crate) fn expect_success(mut self) -> Vec<String> {
        let lines = self.stdout.by_ref().lines().map(|line| line.expect("a line")).collect();
        assert_eq!(self.process.wait().expect("ended").code(), Some(0), "{lines:?}");
        lines
    }

    /// End it with SIGINT, and assert that it succeeds.
    pub(crate) fn interrupt_and_expect_success(&mut self) {
        kill_process(Pid::from_child(&self.process), Signal::INT).expect("running");
        assert_eq!(self.process.wait().expect("ended").code(), Some(0));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A process that another one has started. The pidfd becomes readable when it ends.
pub(crate) struct Process {
    pub(crate) pid: Pid,
    pub(crate) command: String,
    pub(crate) ended: OwnedFd,
}

/// Return the children of a process.
pub(crate) fn children(parent: u32) -> Vec<Process> {
    let is_child = |status: &str| {
        status.lines().any(|line| line.strip_prefix("PPid:").is_some_and(|ppid| ppid.trim() == parent.to_string()))
    };
    processes(|path| fs::read_to_string(path.join("status")).is_ok_and(|status| is_child(&status)))
}

/// Return all processes with this variable in their environment, which children inherit.
pub(crate) fn processes_with(variable: &str, value: &str) -> Vec<Process> {
    let entry = format!("{variable}={value}");
    processes(|path| {
        let environment = fs::read(path.join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|found| found == entry.as_bytes())
    })
}

/// Return the processes whose folder in `/proc` matches. Processes that end meanwhile are skipped.
fn processes(is_wanted: impl Fn(&Path) -> bool) -> Vec<Process> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        let path = entry.path();
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw) else {
            continue;
        };
        let Ok(ended) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        if is_wanted(&path) {
            let command = fs::read_to_string(path.join("cmdline")).unwrap_or_default().replace('\0', " ");
            found.push(Process { pid, command, ended });
        }
    }
    found
}

/// A temporary folder, which is removed when it is dropped.
pub(crate) struct Dir(PathBuf);

impl Dir {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("sumac-{name}-{}", std::process::id()));
        fs::create_dir(&path).expect("a writable temporary directory");
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("UTF-8").to_owned()
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.path(name);
        fs::write(&path, bytes).expect("written");
        path
    }

    /// Return the names of its entries, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).expect("listed");
        let mut names: Vec<_> =
            entries.map(|entry| entry.expect("listed").file_name().into_string().expect("UTF-8")).collect();
        names.sort();
        names
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Return a .npy file of f32 elements; `shape` is in Python's notation.
pub(crate) fn npy_f32(values: &[f32], shape: &str) -> Vec<u8> {
    let head = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((head.len() as u16).to_le_bytes());
    bytes.extend(head.bytes());
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    bytes
}

/// Read a .npy file of f32 elements with the npyz crate.
pub(crate) fn read_npy_f32(path: impl AsRef<Path>) -> Vec<f32> {
    let bytes = fs::read(path).expect("a file");
    npyz::NpyFile::new(&bytes[..]).and_then(npyz::NpyFile::into_vec).expect("an array of f32")
}

/// Run an all-reduce of `len` elements that depend on `round` and the rank, and check every element.
pub(crate) fn checked_sum(comm: &Communicator, round: u64, len: usize) -> Result<Outcome, Error> {
    let (ranks, rank) = (u64::from(comm.size()), u64::from(comm.rank()));
    let mut buffer: Vec<u64> = (0..len as u64).map(|i| round * i + rank).collect();
    let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum)?;
    let sum = |i: u64| ranks * round * i + ranks * (ranks - 1) / 2;
    assert!((0..).zip(&buffer).all(|(i, &x)| x == sum(i)), "round {round} is wrong");
    Ok(outcome)
}
