//! A controller, devices and ranks as processes of their own, and which ports they have.

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
use sumac::Attach;
use sumac::controller::proto::{DeviceStatus, JobStatus, StatusReport};
use sumac::controller::status;

/// More than anything here takes that is not stuck.
pub(crate) const LONG: Duration = Duration::from_secs(20);

/// How often to look.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The job's ranks.
pub(crate) const RANKS: u32 = 3;

/// The user that attacks where another one than the job's is meant.
pub(crate) const NOBODY: u32 = 65_534;

/// What all cases share.
pub(crate) struct Tools {
    /// The command.
    pub(crate) sumac: PathBuf,
    /// This program.
    pub(crate) own: PathBuf,
    /// Where processes log to.
    pub(crate) logs: PathBuf,
    /// How many files a process may open unless it is told otherwise.
    pub(crate) files: Rlimit,
}

/// Wait until something is so.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "not in {LONG:?}: {what}");
        thread::sleep(LOOK_EVERY);
    }
}

/// A process, which is killed when this is dropped.
pub(crate) struct Process {
    pub(crate) name: String,
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
    log: PathBuf,
}

impl Process {
    /// Start a process; `user` is another one than this program's.
    pub(crate) fn start(tools: &Tools, name: &str, program: &[&str], user: Option<u32>) -> Self {
        let case = thread::current().name().unwrap_or("hostile").to_owned();
        let log = tools.logs.join(format!("{case}-{name}"));
        let file = File::create(&log).expect("a log");
        let user = user.map(|user| user.to_string());
        let mut words: Vec<&str> = Vec::new();
        if let Some(user) = &user {
            words.extend([tools.own.to_str().expect("UTF-8"), "--as", user]);
        }
        words.extend(program);
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(file);
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

    /// Say something on its stdin; false if it does not listen any more.
    pub(crate) fn say(&mut self, line: &str) -> bool {
        self.to.as_mut().is_some_and(|to| writeln!(to, "{line}").is_ok())
    }

    /// Wait for a line on its stdout; empty if it has ended.
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

    /// Wait for its end; `None` if it has not ended in time, or by a signal.
    pub(crate) fn status_within(&mut self, limit: Duration) -> Option<i32> {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status.code();
            }
            thread::sleep(LOOK_EVERY);
        }
        None
    }

    /// Check that it has not panicked, and still runs.
    pub(crate) fn check(&mut self) {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let tail = || log.lines().rev().take(8).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("\n");
        assert!(!log.contains("panicked at"), "{} has panicked:\n{}", self.name, tail());
        let ended = self.child.try_wait().expect("a child");
        assert!(ended.is_none(), "{} has ended, {}:\n{}", self.name, ended.expect("ended"), tail());
    }

    /// What share of a while its busiest thread ran, but for the time in which it waited for a processor: a thread that
    /// spins comes to all of it, however busy the machine is, and one that is woken now and then to next to nothing.
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

    /// Where it listens over TCP, in order.
    pub(crate) fn tcp_ports(&self) -> Vec<SocketAddr> {
        ports(self.pid(), "tcp", Some("0A"))
    }

    /// Where it receives over UDP.
    pub(crate) fn udp_ports(&self) -> Vec<SocketAddr> {
        ports(self.pid(), "udp", None)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The local addresses of a process's sockets, of a table in `/proc/net`, in this state if one is asked for.
fn ports(pid: Pid, table: &str, state: Option<&str>) -> Vec<SocketAddr> {
    let mut sockets = BTreeSet::new();
    let files = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).expect("a process of ours");
    for file in files.flatten() {
        let link = fs::read_link(file.path()).unwrap_or_default();
        let inode =
            link.to_str().and_then(|link| link.strip_prefix("socket:[")?.strip_suffix(']')?.parse::<u64>().ok());
        sockets.extend(inode);
    }
    let rows = fs::read_to_string(format!("/proc/net/{table}")).expect("the kernel tells");
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

/// How a job is to run.
#[derive(Clone, Copy)]
pub(crate) struct Way {
    pub(crate) attach: Attach,
    /// Whether now and then a schedule takes the place of the tree.
    pub(crate) schedules: bool,
}

/// What a rank has done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) rounds: u64,
    pub(crate) in_tree: u64,
    pub(crate) repaired: u64,
}

/// The processes that nobody may hurt.
pub(crate) struct Place<'t> {
    pub(crate) tools: &'t Tools,
    pub(crate) addr: SocketAddr,
    pub(crate) controller: Process,
    pub(crate) devices: Vec<Process>,
    pub(crate) ranks: Vec<Process>,
}

impl<'t> Place<'t> {
    /// A controller and a device.
    pub(crate) fn start(tools: &'t Tools) -> Self {
        let mut place = Self::without_devices(tools);
        place.add_device("one", None);
        place
    }

    pub(crate) fn without_devices(tools: &'t Tools) -> Self {
        let sumac = tools.sumac.to_str().expect("UTF-8");
        let listen = ["controller", "--listen", "127.0.0.1:0", "--prefer-tree", "--lease", "3"];
        let words: Vec<&str> = [sumac].into_iter().chain(listen).collect();
        let mut controller = Process::start(tools, "controller", &words, None);
        let line = controller.line();
        let addr = line.strip_prefix("listening ").and_then(|addr| addr.parse().ok());
        let addr = addr.unwrap_or_else(|| panic!("the controller says {line:?}"));
        Self { tools, addr, controller, devices: Vec::new(), ranks: Vec::new() }
    }

    pub(crate) fn add_device(&mut self, name: &str, user: Option<u32>) {
        let (sumac, addr) = (self.tools.sumac.to_str().expect("UTF-8"), self.addr.to_string());
        let words = [sumac, "device", "--name", name, "--controller", &addr];
        let mut device = Process::start(self.tools, &format!("device-{name}"), &words, user);
        assert_eq!(device.line(), format!("ready {name}"));
        self.devices.push(device);
    }

    /// Start the job that everything is to leave alone, and wait until it works.
    pub(crate) fn with_job(mut self, way: Way) -> Self {
        self.ranks = self.job("work", way);
        let worked = |place: &mut Self| place.count().rounds >= 5;
        wait_until("the job does not begin", || worked(&mut self));
        self
    }

    /// Start ranks of a job.
    pub(crate) fn job(&self, name: &str, way: Way) -> Vec<Process> {
        let rank = |rank: u32| {
            let numbers = [self.addr.to_string(), rank.to_string(), RANKS.to_string()];
            let (own, attach) = (self.tools.own.to_str().expect("UTF-8"), way.attach.name());
            let schedules = if way.schedules { "schedules" } else { "tree" };
            let words = [own, "--rank", &numbers[0], name, &numbers[1], &numbers[2], attach, schedules];
            Process::start(self.tools, &format!("{name}-{rank}"), &words, None)
        };
        (0..RANKS).map(rank).collect()
    }

    /// What rank 0 has done; panics if a rank has failed.
    pub(crate) fn count(&mut self) -> Count {
        // All are asked, as any of them may have failed.
        let counts: Vec<Count> = self.ranks.iter_mut().map(count).collect();
        counts[0].clone()
    }

    /// Wait until the job has done so many rounds more; returns what it has done meanwhile.
    pub(crate) fn wait_for_rounds(&mut self, more: u64) -> Count {
        let before = self.count();
        wait_until("the job does not go on", || self.count().rounds >= before.rounds + more);
        let after = self.count();
        Count {
            rounds: after.rounds - before.rounds,
            in_tree: after.in_tree - before.in_tree,
            repaired: after.repaired - before.repaired,
        }
    }

    /// What the controller says, which it is to say at once.
    pub(crate) fn report(&self) -> StatusReport {
        self.report_within(LONG).unwrap_or_else(|why| panic!("no status: {why}"))
    }

    pub(crate) fn report_within(&self, limit: Duration) -> Result<StatusReport, String> {
        let (to, from) = channel();
        let addr = self.addr;
        // One that is never answered is left behind.
        thread::spawn(move || to.send(status(addr)));
        match from.recv_timeout(limit) {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_) => Err(format!("not within {limit:?}")),
        }
    }

    pub(crate) fn job_status(&self, name: &str) -> Option<JobStatus> {
        self.report().jobs.into_iter().find(|job| job.name == name)
    }

    /// What the controller knows of a device.
    pub(crate) fn device_status(&self, name: &str) -> DeviceStatus {
        self.report().devices.into_iter().find(|device| device.name == name).expect("the device is registered")
    }

    /// How many groups device `one` holds.
    pub(crate) fn groups(&self) -> u16 {
        self.device_status("one").stats.expect("it answers").groups
    }

    /// Check that another job can join, and gets a tree.
    pub(crate) fn check_that_others_join(&self, name: &str, way: Way) {
        let mut ranks = self.job(name, way);
        wait_until(&format!("job {name} has no tree"), || {
            let counts: Vec<Count> = ranks.iter_mut().map(count).collect();
            counts[0].in_tree >= 3
        });
        finish(&mut ranks);
    }

    /// Check that nothing was hurt: all processes are there and have not panicked, and the job goes on, in its tree, which
    /// nobody had to repair since `before`.
    pub(crate) fn check_unhurt(mut self, before: &Count) {
        self.check_alive();
        // Longer than what is on its way takes.
        let meanwhile = self.wait_for_rounds(20);
        assert_eq!(meanwhile.rounds, meanwhile.in_tree, "the job has lost its tree");
        assert_eq!(self.count().repaired, before.repaired, "the job was repaired, though nothing has died");
        self.finish();
    }

    pub(crate) fn check_alive(&mut self) {
        let all = self.devices.iter_mut().chain(&mut self.ranks);
        std::iter::once(&mut self.controller).chain(all).for_each(Process::check);
    }

    /// End the job in good order.
    pub(crate) fn finish(mut self) {
        finish(&mut self.ranks);
        self.devices.iter_mut().for_each(Process::check);
        self.controller.check();
    }
}

/// Ask a rank what it has done; panics if it has failed.
pub(crate) fn count(rank: &mut Process) -> Count {
    rank.say("count");
    let line = rank.line();
    let Some(numbers) = line.strip_prefix("count ") else {
        rank.check();
        panic!("{}: {line}", rank.name);
    };
    let numbers: Vec<u64> = numbers.split(' ').map(|number| number.parse().expect("a number")).collect();
    Count { rounds: numbers[0], in_tree: numbers[1], repaired: numbers[2] }
}

/// Let ranks end behind the same round, and check that they had no error.
pub(crate) fn finish(ranks: &mut [Process]) {
    for rank in &mut *ranks {
        assert!(rank.say("stop"), "{} does not listen", rank.name);
    }
    for rank in ranks {
        let ended = rank.status_within(LONG);
        let said = fs::read_to_string(&rank.log).unwrap_or_default();
        assert_eq!(ended, Some(0), "{}: {said}", rank.name);
    }
}

/// Tell whether a word can only be of a job's results.
pub(crate) const fn is_secret(word: u64) -> bool {
    word >> 48 == SECRET_BITS
}
