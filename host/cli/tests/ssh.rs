//! `sumac perf --ssh`: the ranks that it starts, the key that it sends, and what is left when it ends.
//!
//! A script stands for ssh. It notes its arguments, and relays its standard input, so that the rank sees its end only
//! from there.

mod common;

use common::{Server, exit_status, serve, stderr, stdout, sumac};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const SCRIPT: &str = r#"#!/bin/sh
folder=${0%/*}
echo "$*" >> "$folder/arguments"
host=$1
shift
if [ "$host" = down ]; then
    echo "ssh: connect to host down port 22: Connection refused" >&2
    exit 255
fi
fifo=$folder/$$
mkfifo "$fifo"
exec 3<&0
sh -c "$*" < "$fifo" & rank=$!
cat <&3 > "$fifo" & relay=$!
echo $rank >> "$folder/ranks"
wait $rank
status=$?
kill $relay
exit $status
"#;

/// A folder with the script.
struct Ssh {
    folder: tempfile::TempDir,
}

impl Ssh {
    fn new() -> Self {
        let ssh = Self { folder: tempfile::tempdir().expect("a folder") };
        fs::write(ssh.script(), SCRIPT).expect("written");
        fs::set_permissions(ssh.script(), fs::Permissions::from_mode(0o755)).expect("ours");
        ssh
    }

    fn script(&self) -> PathBuf {
        self.folder.path().join("ssh")
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.folder.path().join(name)).unwrap_or_default()
    }

    fn perf(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
        command.arg("perf").args(args).env("SUMAC_SSH", self.script()).env_remove("SUMAC_CONTROLLER");
        command.stdin(Stdio::null());
        command
    }
}

/// Start a controller, with keys if `store` is one, and a device.
fn cluster(store: Option<(&Path, &Path)>) -> (Server, Server, String) {
    let keys = store.map(|(store, key)| (store.to_str().expect("UTF-8"), key.to_str().expect("UTF-8")));
    let listen = ["controller", "--listen", "127.0.0.1:0"];
    let mut controller =
        serve(&[&listen[..], keys.map(|(store, _)| ["--keys", store]).as_slice().as_flattened()].concat());
    let line = controller.line();
    let addr = line.strip_prefix("listening ").expect("an address").to_owned();
    let key = keys.map(|(_, key)| ["--key-file", key]);
    let mut device =
        serve(&[&["device", "--name", "d", "--controller", &addr][..], key.as_slice().as_flattened()].concat());
    assert_eq!(device.line(), "ready d");
    (controller, device, addr)
}

#[test]
fn ranks_of_all_hosts_print_one_table() {
    let (ssh, (_controller, _device, addr)) = (Ssh::new(), cluster(None));
    let args = ["--ssh", "n1:2,me@n2", "--controller", &addr, "-b", "8", "-e", "8", "-n", "3", "--algo", "tree,ring"];
    let output = ssh.perf(&args).env("SUMAC_ORDER", "fold").output().expect("it runs");
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    let text = stdout(&output);
    // The order is passed on; ring has none.
    assert!(text.contains("ranks 3  devices 1") && text.contains("# 1 rows, 0 wrong elements: OK"), "{text}");
    let arguments = ssh.read("arguments");
    let mut places: Vec<_> = arguments
        .lines()
        .map(|line| {
            let value = |name: &str| line.split_once(name).expect(name).1.split(' ').next().expect("a value");
            (line.split(' ').next().expect("a host"), value("SUMAC_RANK="), value("SUMAC_LOCAL_RANK="))
        })
        .collect();
    places.sort_unstable_by_key(|place| place.1);
    assert_eq!(places, [("n1", "0", "0"), ("n1", "1", "1"), ("me@n2", "2", "0")]);
}

#[test]
fn key_reaches_the_ranks_by_stdin_alone() {
    let (ssh, folder) = (Ssh::new(), tempfile::tempdir().expect("a folder"));
    let path = |name: &str| folder.path().join(name);
    for (name, principal) in [("d", &["--device", "d"][..]), ("ml", &["--tenant", "default"])] {
        let (store, key) = (path("store"), path(name));
        let files = ["--keys", store.to_str().expect("UTF-8"), "--output", key.to_str().expect("UTF-8")];
        let made = sumac(&[&["key", "new"], &files[..], principal].concat());
        assert_eq!(exit_status(&made), 0, "{}", stderr(&made));
    }
    let (_controller, _device, addr) = cluster(Some((&path("store"), &path("d"))));
    let args = ["--ssh", "n1,n2", "--controller", &addr, "-b", "8", "-e", "8", "-n", "3", "--algo", "tree"];
    let refused = ssh.perf(&args).output().expect("it runs");
    assert_eq!(exit_status(&refused), 1);
    assert!(stderr(&refused).contains("SUMAC_KEY_FILE"), "{}", stderr(&refused));
    let output = ssh.perf(&args).env("SUMAC_KEY_FILE", path("ml")).output().expect("it runs");
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    assert!(stdout(&output).contains("# 1 rows, 0 wrong elements: OK"), "{}", stdout(&output));
    let key = fs::read_to_string(path("ml")).expect("a key");
    let secret = key.split_ascii_whitespace().last().expect("a secret");
    let shown = [ssh.read("arguments"), stdout(&output), stderr(&output)].concat();
    assert!(!shown.contains(secret) && !shown.contains("SUMAC_KEY"), "{shown}");
}

#[test]
fn host_that_cannot_be_reached_ends_the_run_and_is_named() {
    let (ssh, (_controller, _device, addr)) = (Ssh::new(), cluster(None));
    let output = ssh.perf(&["--ssh", "n1,down,n3", "--controller", &addr]).output().expect("it runs");
    assert_eq!((exit_status(&output), stdout(&output).as_str()), (1, ""));
    let error = stderr(&output);
    assert!(error.contains("rank 1 on down") && error.contains("Connection refused"), "{error}");
    expect_ended(&ssh);
}

/// Expect that all ranks have ended, or are about to.
fn expect_ended(ssh: &Ssh) {
    for rank in ssh.read("ranks").lines() {
        let pid = Pid::from_raw(rank.parse().expect("a number")).expect("positive");
        // One that cannot be opened has ended.
        let Ok(rank) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
        let ended = poll(&mut [PollFd::new(&rank, PollFlags::IN)], Some(&limit)).expect("poll");
        assert_eq!(ended, 1, "rank {pid:?} outlives its run");
    }
}

#[test]
fn ranks_end_with_a_killed_run() {
    let (ssh, (_controller, _device, addr)) = (Ssh::new(), cluster(None));
    let args = ["--ssh", "n1,n2", "--controller", &addr, "-b", "8", "-e", "8", "-n", "1000000", "--algo", "tree"];
    let mut run = ssh.perf(&args).stdout(Stdio::null()).spawn().expect("started");
    let begun = Instant::now();
    while ssh.read("ranks").lines().count() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(20), "the ranks do not start");
        thread::yield_now();
    }
    run.kill().expect("ours");
    run.wait().expect("ended");
    expect_ended(&ssh);
}

#[test]
fn invalid_hosts_and_missing_controller_are_refused() {
    let ssh = Ssh::new();
    for (args, named) in [
        (&["--ssh", "n1"][..], "--controller or SUMAC_CONTROLLER"),
        (&["--ssh", "n1:0", "--controller", "c"], "HOST:RANKS"),
        (&["--ssh", "-oProxyCommand=x", "--controller", "c"], "--ssh"),
        (&["--ssh=-oProxyCommand=x", "--controller", "c"], "no name of a host"),
        (&["--ssh", "n1", "--ranks", "2"], "cannot be used with"),
        (&["--ssh", "n1", "--controller", "c", "--topology", "f.toml"], "--topology"),
        (&["--sumac-path", "/x"], "--ssh"),
    ] {
        let output = ssh.perf(args).output().expect("it runs");
        assert_eq!(exit_status(&output), 2, "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(named), "{args:?}: {}", stderr(&output));
    }
    assert_eq!(ssh.read("arguments"), "");
}
