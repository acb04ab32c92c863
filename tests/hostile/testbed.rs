//! A test bed of processes: a controller, devices and ranks, and their ports.

use crate::rank::SECRET_BITS;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{self, DirEntry, File};
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};
use sumac::Transport;
use sumac::controller::proto::{DeviceStatus, JobStatus, StatusReport};
use sumac::controller::status;

/// The limit of each wait.
pub(crate) const LONG: Duration = Duration::from_secs(20);

/// The polling interval of waits.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The number of ranks in a job.
pub(crate) const RANKS: u32 = 3;

/// The user of attackers that must not be the job's user.
pub(crate) const NOBODY: u32 = 65_534;

/// What all cases share.
pub(crate) struct Tools {
    /// The `sumac` command.
    pub(crate) sumac: PathBuf,
    /// This program.
    pub(crate) own: PathBuf,
    /// The folder of the processes' logs.
    pub(crate) logs: PathBuf,
    /// The default limit of open files.
    pub(crate) files: Rlimit,
}

/// Wait until a condition holds.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "not within {LONG:?}: {what}");
        thread::sleep(POLL_INTERVAL);
    }
}

/// A process; dropping it kills the process.
pub(crate) struct Process {
    pub(crate) name: String,
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
    log: PathBuf,
}

impl Process {
    /// Start a process, as `user` if given.
    pub(crate) fn start(tools: &Tools, name: &str, program: &[&str], user: Option<u32>) -> Self {
        let case = thread::current().name().unwrap_or("hostile").to_owned();
        let log = tools.logs.join(format!("{case}-{name}"));
        let file = File::create(&log).expect("a log");
        let user = user.map(|user| user.to_string());
        let mut arguments: Vec<&str> = Vec::new();
        if let Some(user) = &user {
            arguments.extend([tools.own.to_str().expect("UTF-8"), "--as", user]);
        }
        arguments.extend(program);
        let mut command = Command::new(arguments[0]);
        command.args(&arguments[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(file);
        // The command ends with the thread that started it.
        command.env("SUMAC_SUPERVISOR", std::process::id().to_string()).env("SUMAC_LOG", "info");
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{program:?}: {error}"));
        if user.is_none() {
            prlimit(Some(Pid::from_child(&child)), Resource::Nofile, tools.files).expect("its limit of files");
        }
        let to = child.stdin.take();
        let from = BufReader::new(child.stdout.take().expect("piped"));
        Self { name: name.to_owned(), child, to, from, log }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Write a line to its stdin; false if stdin is closed.
    pub(crate) fn send_line(&mut self, line: &str) -> bool {
        self.to.as_mut().is_some_and(|to| writeln!(to, "{line}").is_ok())
    }

    /// Read a line from its stdout; empty if the process has ended.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap_or_else(|error| panic!("{}: {error}", self.name));
        line.trim_end().to_owned()
    }

    /// Close its stdin.
    pub(crate) fn end_input(&mut self) {
        self.to = None;
    }

    pub(crate) fn kill(&mut self) {
        // Fails where it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub(crate) fn interrupt(&self) {
        kill_process(self.pid(), Signal::INT).expect("it runs");
    }

    /// Wait for its exit status; `None` on timeout or if a signal ended it.
    pub(crate) fn status_within(&mut self, limit: Duration) -> Option<i32> {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status.code();
            }
            thread::sleep(POLL_INTERVAL);
        }
        None
    }

    /// Check that it runs and has not panicked.
    pub(crate) fn check(&mut self) {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let tail = || log.lines().rev().take(8).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("\n");
        assert!(!log.contains("panicked at"), "{} has panicked:\n{}", self.name, tail());
        let ended = self.child.try_wait().expect("a child");
        assert!(ended.is_none(), "{} has ended, {}:\n{}", self.name, ended.expect("ended"), tail());
    }

    /// Return the share of time that its busiest thread ran, excluding the time it waited for a processor. A spinning
    /// thread has a share near 1 on any machine, and a mostly sleeping one near 0.
    pub(crate) fn busiest(&self, over: Duration) -> f64 {
        // Nanoseconds on a processor, and waiting for one.
        let times = || -> BTreeMap<OsString, [u64; 2]> {
            let threads = fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("it runs").flatten();
            let times = |thread: &DirEntry| {
                let stat = fs::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
                let mut numbers = stat.split(' ').map(|nanos| nanos.parse().unwrap_or(0));
                [(); 2].map(|()| numbers.next().unwrap_or(0))
            };
            threads.map(|thread| (thread.file_name(), times(&thread))).collect()
        };
        let (begun, before) = (Instant::now(), times());
        thread::sleep(over);
        let (took, after) = (begun.elapsed().as_nanos() as u64, times());
        let share = |(thread, now): (&OsString, &[u64; 2])| {
            let then = before.get(thread).unwrap_or(now);
            let [ran, waited] = [0, 1].map(|at| now[at].saturating_sub(then[at]));
            ran as f64 / took.saturating_sub(waited).max(1_000_000) as f64
        };
        after.iter().map(share).fold(0.0, f64::max)
    }

    /// Return its listening TCP addresses, in order.
    pub(crate) fn tcp_ports(&self) -> Vec<SocketAddr> {
        ports(self.pid(), "tcp", Some("0A"))
    }

    /// Return its UDP addresses.
    pub(crate) fn udp_ports(&self) -> Vec<SocketAddr> {
        ports(self.pid(), "udp", None)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Return the local addresses of a process's sockets in a table of `/proc/net`, optionally only those in `state`.
fn ports(pid: Pid, table: &str, state: Option<&str>) -> Vec<SocketAddr> {
    let mut sockets = BTreeSet::new();
    let files = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).expect("a process of ours");
    for file in files.flatten() {
        let link = fs::read_link(file.path()).unwrap_or_default();
        let inode =
            link.to_str().and_then(|link| link.strip_prefix("socket:[")?.strip_suffix(']')?.parse::<u64>().ok());
        sockets.extend(inode);
    }
    let rows = fs::read_to_string(format!("/proc/net/{table}")).expect("/proc is readable");
    let mut found = BTreeSet::new();
    for row in rows.lines().skip(1) {
        let fields: Vec<&str> = row.split_whitespace().collect();
        let (local, is_state, inode) = (fields[1], fields[3], fields[9]);
        if state.is_some_and(|state| state != is_state) || !inode.parse().is_ok_and(|inode| sockets.contains(&inode)) {
            continue;
        }
        let Some((ip, port)) = local.split_once(':') else { continue };
        let (ip, port) = (u32::from_str_radix(ip, 16).expect("hex"), u16::from_str_radix(port, 16).expect("hex"));
        found.insert(SocketAddr::from((Ipv4Addr::from(ip.to_le_bytes()), port)));
    }
    found.into_iter().collect()
}

/// The configuration of a job.
#[derive(Clone, Copy)]
pub(crate) struct JobConfig {
    pub(crate) transport: Transport,
    /// Whether some rounds use a host collective instead of the tree.
    pub(crate) schedules: bool,
}

/// The progress of a rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) rounds: u64,
    pub(crate) in_tree: u64,
    pub(crate) repaired: u64,
}

/// The processes that attacks must not affect.
pub(crate) struct TestBed<'t> {
    pub(crate) tools: &'t Tools,
    pub(crate) addr: SocketAddr,
    pub(crate) controller: Process,
    pub(crate) devices: Vec<Process>,
    pub(crate) ranks: Vec<Process>,
}

impl<'t> TestBed<'t> {
    /// Start a controller and a device.
    pub(crate) fn start(tools: &'t Tools) -> Self {
        let mut bed = Self::without_devices(tools);
        bed.add_device("one", None);
        bed
    }

    pub(crate) fn without_devices(tools: &'t Tools) -> Self {
        let sumac = tools.sumac.to_str().expect("UTF-8");
        let listen = ["controller", "--listen", "127.0.0.1:0", "--prefer-tree", "--lease", "3"];
        let command: Vec<&str> = [sumac].into_iter().chain(listen).collect();
        let mut controller = Process::start(tools, "controller", &command, None);
        let line = controller.line();
        let addr = line.strip_prefix("listening ").and_then(|addr| addr.parse().ok());
        let addr = addr.unwrap_or_else(|| panic!("the controller printed {line:?}"));
        Self { tools, addr, controller, devices: Vec::new(), ranks: Vec::new() }
    }

    pub(crate) fn add_device(&mut self, name: &str, user: Option<u32>) {
        let (sumac, addr) = (self.tools.sumac.to_str().expect("UTF-8"), self.addr.to_string());
        let command = [sumac, "device", "--name", name, "--controller", &addr];
        let mut device = Process::start(self.tools, &format!("device-{name}"), &command, user);
        assert_eq!(device.line(), format!("ready {name}"));
        self.devices.push(device);
    }

    /// Start the job that attacks must not affect, and wait until it makes progress.
    pub(crate) fn with_job(mut self, way: JobConfig) -> Self {
        self.ranks = self.job("work", way);
        let worked = |bed: &mut Self| bed.count().rounds >= 5;
        wait_until("the job makes progress", || worked(&mut self));
        self
    }

    /// Start ranks of a job.
    pub(crate) fn job(&self, name: &str, way: JobConfig) -> Vec<Process> {
        let rank = |rank: u32| {
            let numbers = [self.addr.to_string(), rank.to_string(), RANKS.to_string()];
            let (own, transport) = (self.tools.own.to_str().expect("UTF-8"), way.transport.name());
            let schedules = if way.schedules { "schedules" } else { "tree" };
            let command = [own, "--rank", &numbers[0], name, &numbers[1], &numbers[2], transport, schedules];
            Process::start(self.tools, &format!("{name}-{rank}"), &command, None)
        };
        (0..RANKS).map(rank).collect()
    }

    /// Return the progress of rank 0; panics if a rank has failed.
    pub(crate) fn count(&mut self) -> Count {
        // Ask all ranks, because any may have failed.
        let counts: Vec<Count> = self.ranks.iter_mut().map(count).collect();
        counts[0].clone()
    }

    /// Wait for `more` further rounds; return the progress since the call.
    pub(crate) fn wait_for_rounds(&mut self, more: u64) -> Count {
        let before = self.count();
        wait_until("the job continues", || self.count().rounds >= before.rounds + more);
        let after = self.count();
        Count {
            rounds: after.rounds - before.rounds,
            in_tree: after.in_tree - before.in_tree,
            repaired: after.repaired - before.repaired,
        }
    }

    /// Return the controller's status report.
    pub(crate) fn report(&self) -> StatusReport {
        self.report_within(LONG).unwrap_or_else(|why| panic!("no status: {why}"))
    }

    pub(crate) fn report_within(&self, limit: Duration) -> Result<StatusReport, String> {
        let (to, from) = channel();
        let addr = self.addr;
        // A thread without a reply is abandoned.
        thread::spawn(move || drop(to.send(status(addr))));
        match from.recv_timeout(limit) {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_) => Err(format!("not within {limit:?}")),
        }
    }

    pub(crate) fn job_status(&self, name: &str) -> Option<JobStatus> {
        self.report().jobs.into_iter().find(|job| job.name == name)
    }

    /// Return the controller's status of a device.
    pub(crate) fn device_status(&self, name: &str) -> DeviceStatus {
        self.report().devices.into_iter().find(|device| device.name == name).expect("the device is registered")
    }

    /// Return the number of groups on device `one`.
    pub(crate) fn groups(&self) -> u16 {
        self.device_status("one").stats.expect("it answers").groups
    }

    /// Check that another job can join, and gets a tree.
    pub(crate) fn check_that_others_join(&self, name: &str, way: JobConfig) {
        let mut ranks = self.job(name, way);
        wait_until(&format!("job {name} has a tree"), || {
            let counts: Vec<Count> = ranks.iter_mut().map(count).collect();
            counts[0].in_tree >= 3
        });
        finish(&mut ranks);
    }

    /// Check that all processes run without a panic, and that the job continues in its tree, without a recovery since
    /// `before`.
    pub(crate) fn check_unaffected(mut self, before: &Count) {
        self.check_alive();
        // Enough rounds for pending packets to arrive.
        let meanwhile = self.wait_for_rounds(20);
        assert_eq!(meanwhile.rounds, meanwhile.in_tree, "the job has lost its tree");
        assert_eq!(self.count().repaired, before.repaired, "the job recovered though nothing was lost");
        self.finish();
    }

    pub(crate) fn check_alive(&mut self) {
        let all = self.devices.iter_mut().chain(&mut self.ranks);
        std::iter::once(&mut self.controller).chain(all).for_each(Process::check);
    }

    /// End the job normally.
    pub(crate) fn finish(mut self) {
        finish(&mut self.ranks);
        self.devices.iter_mut().for_each(Process::check);
        self.controller.check();
    }
}

/// Ask a rank for its progress; panics if it has failed.
pub(crate) fn count(rank: &mut Process) -> Count {
    rank.send_line("count");
    let line = rank.line();
    let Some(numbers) = line.strip_prefix("count ") else {
        rank.check();
        panic!("{}: {line}", rank.name);
    };
    let numbers: Vec<u64> = numbers.split(' ').map(|number| number.parse().expect("a number")).collect();
    Count { rounds: numbers[0], in_tree: numbers[1], repaired: numbers[2] }
}

/// End the ranks after the same round, and check that they had no error.
pub(crate) fn finish(ranks: &mut [Process]) {
    for rank in &mut *ranks {
        assert!(rank.send_line("stop"), "{} does not read its stdin", rank.name);
    }
    for rank in ranks {
        let ended = rank.status_within(LONG);
        let log = fs::read_to_string(&rank.log).unwrap_or_default();
        assert_eq!(ended, Some(0), "{}: {log}", rank.name);
    }
}

/// Return whether a word can only come from a job's results.
pub(crate) const fn is_secret(word: u64) -> bool {
    word >> 48 == SECRET_BITS
}
