//! Clusters that the command starts for itself serve only those who have their keys, though every user of the machine
//! reaches their controllers.

mod common;

use common::{Dir, children, exit_status, processes_with, serve, stderr, stdout, sumac};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use sumac::controller::keys::{KeyStore, Principal, read_key};
use sumac::{Communicator, JoinConfig};

/// The variable by which a test finds all processes that it has started.
const MARK: &str = "SUMAC_TEST_KEYS";

/// An unprivileged user.
const OTHER_USER: u32 = 65_534;

/// What follows a word of a line.
fn after<'a>(line: &'a str, word: &str) -> &'a str {
    let mut words = line.split_whitespace().skip_while(|found| *found != word);
    words.nth(1).unwrap_or_else(|| panic!("no {word} in {line:?}"))
}

#[test]
fn unknown_peer_on_the_port_of_perf_learns_and_changes_nothing() {
    // The second row takes far longer than the test. What is left is killed with the server.
    let mut running = serve(&["perf", "-b", "8", "-e", "64M", "-f", "8388608", "-n", "1000", "--algo", "tree"]);
    let line = loop {
        let line = running.line();
        assert!(!line.is_empty(), "the table names the controller before its header");
        if line.starts_with("# controller ") {
            break line;
        }
    };
    let (address, key_file) = (after(&line, "controller"), after(&line, "--key-file"));
    let learned = sumac(&["status", "--controller", address]);
    assert_eq!((exit_status(&learned), stdout(&learned).as_str()), (1, ""), "{}", stderr(&learned));
    assert!(stderr(&learned).contains("keys only"), "{}", stderr(&learned));
    for name in ["leaf0", "leaf9"] {
        let refused = sumac(&["device", "--name", name, "--controller", address, "--timeout", "1"]);
        assert_eq!(exit_status(&refused), 1, "{}", stderr(&refused));
    }
    let addr: SocketAddr = address.parse().expect("an address");
    for job in ["perf", "other"] {
        let refused = Communicator::join(JoinConfig::new(addr, job, 0, 1)).expect_err("it has no key").to_string();
        assert!(refused.contains("keys only"), "{refused}");
    }
    // Who started it sees that nothing has changed.
    let report = sumac(&["status", "--controller", address, "--key-file", key_file, "--json"]);
    let report: Value = serde_json::from_str(&stdout(&report)).unwrap_or_else(|_| panic!("{}", stderr(&report)));
    let (jobs, devices) = (report["jobs"].as_array().expect("a list"), report["devices"].as_array().expect("a list"));
    assert_eq!((jobs.len(), &jobs[0]["joined"], &jobs[0]["view"]), (1, &4.into(), &0.into()), "{report}");
    assert!(jobs[0]["tree"]["Ok"].is_object() && devices.len() == 2, "{report}");
    assert!(devices.iter().all(|device| device["name"] != "leaf9"), "{report}");
    // The key is in no file of others, no command line and no environment.
    assert_eq!(fs::metadata(key_file).expect("it is open").permissions().mode() & 0o777, 0o600);
    let key = fs::read_to_string(key_file).expect("ours");
    let secret = key.split_ascii_whitespace().last().expect("a secret");
    let parts = children(running.pid().as_raw_nonzero().get() as u32);
    assert_eq!(parts.len(), 1 + 2 + 4, "a controller, devices and ranks");
    for part in parts {
        for file in ["cmdline", "environ"] {
            let shown = fs::read(format!("/proc/{}/{file}", part.pid.as_raw_nonzero())).expect("it runs");
            assert!(!String::from_utf8_lossy(&shown).contains(secret), "{file}");
        }
    }
    running.kill();
    assert!(!fs::exists(key_file).expect("a path"), "it ends with the command");
}

/// A running `sumac run`, which is killed when it is dropped.
struct Run {
    process: Child,
    stdout: BufReader<ChildStdout>,
    mark: String,
    folder: Dir,
}

impl Run {
    /// Run a script as ranks, with all that is logged in a file, and an empty folder for temporary files.
    fn start(test: &str, script: &str) -> Self {
        let (mark, folder) = (format!("{test}-{}", std::process::id()), Dir::new(test));
        fs::create_dir(folder.path("tmp")).expect("ours");
        let log = File::create(folder.path("log")).expect("ours");
        let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
        command.args(["-vv", "run", "-n", "2", "--", "sh", "-c", script]);
        command.env(MARK, &mark).env("TMPDIR", folder.path("tmp")).env("SUMAC", env!("CARGO_BIN_EXE_sumac"));
        // The kernel kills it with the test's thread, even if the test does not drop it.
        command.env("SUMAC_SUPERVISOR", std::process::id().to_string());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let mut process = command.spawn().expect("started");
        let stdout = BufReader::new(process.stdout.take().expect("piped"));
        Self { process, stdout, mark, folder }
    }

    /// Wait for a line that begins with a word, and return the other words.
    fn words(&mut self, first: &str) -> Vec<String> {
        loop {
            let mut line = String::new();
            assert!(self.stdout.read_line(&mut line).expect("a line") > 0, "no {first}: {}", self.log());
            let mut words = line.split_whitespace().map(str::to_owned);
            if words.next().as_deref() == Some(first) {
                return words.collect();
            }
        }
    }

    fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.folder.path("log")).expect("a log")).into_owned()
    }

    /// Kill the command, and wait until all that it has started has ended.
    fn kill(&mut self) {
        self.process.kill().expect("running");
        self.process.wait().expect("ended");
        let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
        for process in processes_with(MARK, &self.mark) {
            let ended = poll(&mut [PollFd::new(&process.ended, PollFlags::IN)], Some(&limit)).expect("polled");
            assert_eq!(ended, 1, "process {} is left: {}", process.pid.as_raw_pid(), process.command);
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Run a command as another user. `None`, with a message, if this process may not do so.
fn as_other_user(program: &str, args: &[&str]) -> Option<Output> {
    let run = Command::new(program).args(args).uid(OTHER_USER).gid(OTHER_USER).stdin(Stdio::null()).output();
    match run {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            eprintln!("SKIPPED: cannot run {program} as user {OTHER_USER}: this needs root, and folders open to all");
            None
        }
        run => Some(run.expect("it runs")),
    }
}

/// Announces the variables of rank 0, and is a job for longer than any test.
const LONG_JOB: &str = "[ $SUMAC_RANK = 1 ] || echo named $SUMAC_CONTROLLER $SUMAC_KEY_FILE $SUMAC_OPERATOR_KEY_FILE; \
                        exec $SUMAC perf -b 8 -e 64M -f 8388608 -n 1000 --algo tree --json";

#[test]
fn unknown_peer_on_the_port_of_run_learns_and_changes_nothing() {
    let mut run = Run::start("stranger", LONG_JOB);
    let named = run.words("named");
    let [address, key_file, operator_file] = &named[..] else { panic!("{named:?}") };
    // The first row, so that the job runs.
    let mut row = String::new();
    run.stdout.read_line(&mut row).expect("a row");
    assert!(row.contains("all_reduce"), "{row}");
    // This user without the key, and with another key.
    let other = run.folder.path("other.key");
    assert_eq!(
        exit_status(&sumac(&["key", "new", "--keys", &run.folder.path("other"), "--operator", "--output", &other])),
        0
    );
    for (key, why) in [(None, "keys only"), (Some(&other), "does not know this key")] {
        let key: Vec<&str> = key.iter().flat_map(|file| ["--key-file", file.as_str()]).collect();
        let learned = sumac(&[&["status", "--controller", address], &key[..]].concat());
        assert_eq!((exit_status(&learned), stdout(&learned).as_str()), (1, ""), "{}", stderr(&learned));
        assert!(stderr(&learned).contains(why), "{}", stderr(&learned));
        let device = ["device", "--name", "leaf9", "--controller", address, "--timeout", "1"];
        assert_eq!(exit_status(&sumac(&[&device, &key[..]].concat())), 1);
    }
    let addr: SocketAddr = address.parse().expect("an address");
    let job = format!("run-{}", run.process.id());
    for key in [None, Some(read_key(other.as_ref()).expect("ours"))] {
        let join = JoinConfig { key, ..JoinConfig::new(addr, job.clone(), 1, 2) };
        Communicator::join(join).expect_err("it has no key of this run");
    }
    // Another user cannot read the keys.
    for file in [key_file, operator_file] {
        let Some(read) = as_other_user("cat", &[file]) else { break };
        assert_eq!((exit_status(&read), stdout(&read).as_str()), (1, ""));
        let Some(learned) =
            as_other_user(env!("CARGO_BIN_EXE_sumac"), &["status", "--controller", address, "--key-file", file])
        else {
            break;
        };
        assert_eq!((exit_status(&learned), stdout(&learned).as_str()), (2, ""));
        assert!(stderr(&learned).contains("Permission denied"), "{}", stderr(&learned));
    }
    // Who started it sees that nothing has changed.
    let report = sumac(&["status", "--controller", address, "--key-file", operator_file, "--json"]);
    let report: Value = serde_json::from_str(&stdout(&report)).unwrap_or_else(|_| panic!("{}", stderr(&report)));
    let (jobs, devices) = (report["jobs"].as_array().expect("a list"), report["devices"].as_array().expect("a list"));
    assert_eq!((jobs.len(), &jobs[0]["joined"], &jobs[0]["view"]), (1, &2.into(), &0.into()), "{report}");
    assert!(jobs[0]["tree"]["Ok"].is_object() && devices.len() == 1, "{report}");
}

#[test]
fn keys_of_run_are_nowhere_but_in_its_memory_and_gone_when_it_is_killed() {
    let mut run = Run::start("secrets", LONG_JOB);
    let named = run.words("named");
    let [_, key_file, operator_file] = &named[..] else { panic!("{named:?}") };
    let mut row = String::new();
    run.stdout.read_line(&mut row).expect("a row");
    let all = processes_with(MARK, &run.mark);
    let controller = all.iter().find(|process| process.command.contains(" controller ")).expect("one");
    let store = controller.command.split("--keys=").nth(1).and_then(|rest| rest.split(' ').next()).expect("a store");
    let files = [key_file.as_str(), operator_file, store];
    for file in files {
        assert_eq!(fs::metadata(file).expect("it is open").permissions().mode() & 0o777, 0o600);
    }
    let store = fs::read_to_string(store).expect("ours");
    let secrets: BTreeSet<_> = store.split('"').filter(|word| word.len() == 64).collect();
    assert_eq!(secrets.len(), 3, "a device, the ranks, an operator");
    let shows_none = |text: &[u8], what: &str| {
        let text = String::from_utf8_lossy(text);
        assert!(!secrets.iter().any(|secret| text.contains(secret)), "{what}");
    };
    // The command, a controller, a device, the guard, and two ranks.
    assert!(all.len() >= 6, "{}", all.len());
    for process in &all {
        let folder = format!("/proc/{}", process.pid.as_raw_nonzero());
        for file in ["cmdline", "environ"] {
            shows_none(&fs::read(format!("{folder}/{file}")).expect("it runs"), file);
        }
    }
    run.kill();
    assert!(run.log().contains("authenticated"), "all is logged");
    shows_none(&fs::read(run.folder.path("log")).expect("a log"), "the log");
    let mut rest = Vec::new();
    run.stdout.read_to_end(&mut rest).expect("closed");
    shows_none(&rest, "the output");
    assert!(files.iter().all(|file| !fs::exists(file).expect("a path")));
    let left: Vec<_> = fs::read_dir(run.folder.path("tmp")).expect("ours").collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Run a script as ranks, under these variables, until its end.
fn run_to_the_end(ranks: &str, variables: &[(&str, &str)], script: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
    command.args(["run", "-n", ranks, "--", "sh", "-c", script]).env("SUMAC", env!("CARGO_BIN_EXE_sumac"));
    // Open MPI refuses root unless told twice.
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.envs(variables.iter().copied()).stdin(Stdio::null()).output().expect("the command runs")
}

const SHORT_JOB: &str = "$SUMAC perf -b 8 -e 8 -n 2 --algo tree,ring";

#[test]
fn programs_find_their_key_whatever_they_close_or_start() {
    let close = "for fd in 3 4 5 6 7 8 9; do eval \"exec $fd>&-\"; done";
    for (number, ranks, script) in [
        (1, "2", format!("{close}; exec setsid -w {SHORT_JOB}")),
        // A run among the ranks of another has a controller and keys of its own.
        (2, "2", format!("exec $SUMAC run -n 2 -- {SHORT_JOB}")),
        (1, "3", format!("$SUMAC selftest -n 5 -e 4K >&2 && exec {SHORT_JOB}")),
    ] {
        let output = run_to_the_end(ranks, &[], &script);
        assert_eq!(exit_status(&output), 0, "{script}: {}{}", stdout(&output), stderr(&output));
        assert_eq!(stdout(&output).matches("2 rows, 0 wrong elements: OK").count(), number, "{}", stdout(&output));
    }
    let output = run_to_the_end("2", &[], "[ $SUMAC_RANK = 1 ] || $SUMAC status");
    assert!(stdout(&output).contains("leaf0"), "{}{}", stdout(&output), stderr(&output));
}

#[test]
fn mpirun_below_run_passes_the_key_on() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        eprintln!("SKIPPED: there is no mpirun (Debian: apt-get install openmpi-bin)");
        return;
    }
    // What the run sets would override what mpirun does.
    let own = ["SUMAC_RANK", "SUMAC_WORLD", "SUMAC_LOCAL_RANK", "SUMAC_HOST", "RANK", "WORLD_SIZE", "LOCAL_RANK"];
    let without: Vec<_> = own.iter().map(|variable| format!("-u {variable}")).collect();
    let mpirun = format!("env {} mpirun --oversubscribe -np 2 {SHORT_JOB}", without.join(" "));
    let output = run_to_the_end("2", &[], &format!("[ $SUMAC_RANK = 1 ] || exec {mpirun}"));
    assert_eq!(exit_status(&output), 0, "{}{}", stdout(&output), stderr(&output));
    assert!(stdout(&output).contains("ranks 2  devices 1"), "{}", stdout(&output));
}

#[test]
fn key_of_ranks_is_that_of_their_tenant_and_beats_other_keys() {
    let folder = Dir::new("tenant");
    let config = folder.write("config.toml", b"[rank]\ntenant = 'ml'\nkey_file = '/nonexistent'\n");
    let jobs = "$SUMAC perf -b 8 -e 8 -n 1 --algo tree && $SUMAC status --json";
    for variables in [
        &[("SUMAC_TENANT", "ml")][..],
        &[("SUMAC_CONFIG", &config)],
        &[("SUMAC_TENANT", "ml"), ("SUMAC_KEY", "none"), ("SUMAC_KEY_FILE", "/nonexistent")],
    ] {
        let output = run_to_the_end("1", variables, jobs);
        assert_eq!(exit_status(&output), 0, "{variables:?}: {}{}", stdout(&output), stderr(&output));
    }
    let output = run_to_the_end("1", &[("SUMAC_TENANT", "a b")], jobs);
    assert_eq!((exit_status(&output), stdout(&output).as_str()), (2, ""));
    assert!(stderr(&output).contains("SUMAC_TENANT"), "{}", stderr(&output));
}

/// Return a port of loopback that nobody uses.
fn free_ports() -> (String, String) {
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a port");
    let udp = UdpSocket::bind("127.0.0.1:0").expect("a port");
    (tcp.local_addr().expect("bound").to_string(), udp.local_addr().expect("bound").to_string())
}

#[test]
fn existing_device_with_a_key_takes_part_in_a_run_with_keys() {
    let folder = Dir::new("given");
    let (store, key) = (folder.path("keys.toml"), folder.path("leaf0.key"));
    let new = |whose: &[&str]| assert_eq!(exit_status(&sumac(&[&["key", "new", "--keys", &store], whose].concat())), 0);
    new(&["--device", "leaf0", "--output", &key]);
    let (listen, data) = free_ports();
    let port = data.rsplit(':').next().expect("a port");
    let _device =
        serve(&["device", "--name", "leaf0", "--controller", &listen, "--data-port", port, "--key-file", &key]);
    let given = ["perf", "--device", &data, "--listen", &listen, "--levels", "1", "--ranks", "2", "-e", "8", "-n", "2"];
    let output = sumac(&[&given[..], &["--algo", "tree", "--keys", &store]].concat());
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("0 wrong elements: OK") && text.contains("--key-file /proc/"), "{text}");
    // A store that has no key for it, or a revoked one.
    let mut other = KeyStore::default();
    let leaf = other.add_random(Principal::Device { names: vec!["leaf0".into()] }).expect("valid").id();
    other.revoke(leaf).expect("it has that key");
    other.add_random(Principal::Device { names: vec!["leaf1".into()] }).expect("valid");
    other.write(store.as_ref()).expect("ours");
    let output = sumac(&[&given[..], &["--keys", &store]].concat());
    assert_eq!(exit_status(&output), 2);
    assert!(stderr(&output).contains("no valid key for device leaf0"), "{}", stderr(&output));
    let output = sumac(&[&given[..3], &["--listen", "0.0.0.0:1", "--keys", &store]].concat());
    assert_eq!(exit_status(&output), 2);
    assert!(stderr(&output).contains("name the address"), "{}", stderr(&output));
}
