//! Cards of other hosts, flashed by `ssh`. The hosts are servers on loopback with keys, records and cards of their own.
//!
//! Needs sshd (Debian: openssh-server). Without it the tests print that and are skipped; with CI=true they fail.

use super::Bench;
use super::rshim::{Script, SimulatedCard, When};
use fuser::Errno;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// Where Debian has it, which is not in the path of users.
const SSHD: &str = "/usr/sbin/sshd";
/// A folder's name that a shell would take apart.
const RECORDS: &str = "ca rds' $HOME";

/// A host: a folder and an sshd whose sessions start there.
struct Host {
    folder: PathBuf,
    process: Child,
}

/// Hosts and their cards.
struct Lab {
    bench: Bench,
    hosts: BTreeMap<&'static str, Host>,
    cards: BTreeMap<(&'static str, usize), SimulatedCard>,
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn keygen(path: &Path) -> String {
    let made = Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-f"])
        .arg(path)
        .output()
        .expect("ssh-keygen");
    assert!(made.status.success(), "{made:?}");
    fs::read_to_string(path.with_extension("pub")).expect("made")
}

impl Lab {
    /// `None` without sshd.
    fn new() -> Option<Self> {
        if !Path::new(SSHD).exists() {
            let why = format!("SKIPPED: no hosts without {SSHD}; install openssh-server");
            assert!(std::env::var("CI").as_deref() != Ok("true"), "{why}");
            eprintln!("{why}");
            return None;
        }
        // Its own folder for a part without privileges, which only root's needs.
        if rustix::process::geteuid().is_root() {
            fs::create_dir_all("/run/sshd").expect("made");
        }
        let bench = Bench::new();
        let key = keygen(&bench.path("id"));
        fs::write(bench.path("authorized"), key).expect("written");
        let common = format!(
            "Host *\nIdentityFile {}\nIdentitiesOnly yes\nUserKnownHostsFile {}\nStrictHostKeyChecking yes\nBatchMode yes\n\
             HostName 127.0.0.1\nConnectTimeout 60\n",
            bench.path("id").display(),
            bench.path("known").display()
        );
        fs::write(bench.path("ssh-config"), common).expect("written");
        Some(Self { bench, hosts: BTreeMap::new(), cards: BTreeMap::new() })
    }

    /// Start a host. `before` is a filter for what its commands get on stdin.
    fn host(&mut self, name: &'static str, before: &str) {
        let folder = self.bench.path(name);
        fs::create_dir_all(folder.join("dev")).expect("made");
        let public = keygen(&folder.join("host_key"));
        let text = |path: &str| self.bench.path(path).display().to_string();
        // Another program may take a port that was free.
        for _ in 0..20 {
            let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").port();
            let config = format!(
                "Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nAuthorizedKeysFile {}\nPidFile none\n\
                 StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n\
                 ForceCommand cd {folder} && {before} eval \"$SSH_ORIGINAL_COMMAND\"\n",
                text("authorized"),
                folder = folder.display(),
            );
            fs::write(folder.join("sshd_config"), config).expect("written");
            let log = File::create(folder.join("log")).expect("made");
            let mut start = Command::new(SSHD);
            start.args(["-D", "-E"]).arg(folder.join("log")).arg("-f").arg(folder.join("sshd_config"));
            let mut process = start.stdin(Stdio::null()).stderr(log).spawn().expect("sshd");
            let is_up = loop {
                let log = fs::read_to_string(folder.join("log")).unwrap_or_default();
                if log.contains("Server listening on") {
                    break true;
                }
                if process.try_wait().expect("a child").is_some() {
                    break false;
                }
                std::thread::yield_now();
            };
            if !is_up {
                continue;
            }
            let (mut known, mut config) = (
                fs::read_to_string(text("known")).unwrap_or_default(),
                fs::read_to_string(text("ssh-config")).expect("there"),
            );
            known.push_str(&format!("{name} {public}"));
            config = format!("Host {name}\nPort {port}\nHostKeyAlias {name}\n{config}");
            fs::write(text("known"), known).expect("written");
            fs::write(text("ssh-config"), config).expect("written");
            self.hosts.insert(name, Host { folder, process });
            return;
        }
        panic!("no sshd: {}", fs::read_to_string(folder.join("log")).unwrap_or_default());
    }

    fn good(&self) -> Script {
        Script::good(self.bench.image.len())
    }

    /// Insert a card into a host; `None` without FUSE.
    fn insert(&mut self, host: &'static str, number: usize, script: Script) -> Option<()> {
        let name = format!("{host}/dev/rshim{number}");
        fs::create_dir_all(self.bench.path(&name)).expect("made");
        let script = Script { dev_name: format!("pcie-0000:{:02x}:00.2", number + 4), ..script };
        self.cards.insert((host, number), self.bench.card_at(&name, script)?);
        Some(())
    }

    fn command(&self, hosts: &str, more: &[&str]) -> Command {
        let path = |name: &str| self.bench.path(name).display().to_string();
        let (image, key) = (path("image.bfb"), path("pub.pem"));
        let args =
            ["flash", &image, "--key", &key, "--host", hosts, "--root", "dev", "--sysfs", "sys", "--records", RECORDS];
        let rest = ["--ram", "--poll-ms", "20", "--timeout", "300"];
        let mut command = self.bench.command(&[&args[..], &rest, more].concat());
        command.env("SUMAC_SSH", format!("ssh -F {}", path("ssh-config")));
        command
    }

    fn flash(&self, hosts: &str, more: &[&str]) -> Ran {
        Ran::new(self.command(hosts, more).output().expect("it runs"))
    }

    /// How many sessions a host has had.
    fn sessions(&self, host: &str) -> usize {
        let log = fs::read_to_string(self.hosts[host].folder.join("log")).expect("there");
        log.matches("Accepted publickey").count()
    }
}

struct Ran {
    status: Option<i32>,
    events: Vec<Value>,
    stdout: String,
    stderr: String,
}

impl Ran {
    fn new(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        let (stdout, stderr) = (text(output.stdout), text(output.stderr));
        let events = stdout.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        Self { status: output.status.code(), events, stdout, stderr }
    }

    /// Each card's host, folder and outcome.
    fn cards(&self) -> Vec<(String, String, String)> {
        let summary = self.events.last().unwrap_or_else(|| panic!("no events: {}", self.stderr));
        let text = |value: &Value| value.as_str().unwrap_or("-").rsplit('/').next().expect("one").to_owned();
        let card = |card: &Value| (text(&card["host"]), text(&card["card"]), text(&card["outcome"]));
        let cards = summary["cards"].as_array().unwrap_or_else(|| panic!("no summary: {}", self.stderr));
        cards.iter().map(card).collect()
    }

    fn message(&self, host: &str) -> String {
        let cards = self.events.last().expect("events")["cards"].as_array().expect("cards").clone();
        let card = cards.into_iter().find(|card| card["host"] == host && card["message"].is_string());
        card.expect("a failed card")["message"].as_str().expect("text").to_owned()
    }
}

fn row(host: &str, card: &str, outcome: &str) -> (String, String, String) {
    (host.into(), card.into(), outcome.into())
}

#[test]
fn cards_of_two_hosts_are_flashed_in_one_session_each_and_not_again() {
    let Some(mut lab) = Lab::new() else { return };
    for host in ["h1", "h2"] {
        lab.host(host, "");
        for number in 0..2 {
            let good = lab.good();
            if lab.insert(host, number, good).is_none() {
                return;
            }
        }
    }
    let ran = lab.flash("h1,h2", &["--all", "--json"]);
    assert_eq!(ran.status, Some(0), "{}{}", ran.stdout, ran.stderr);
    let all = |outcome: &str| {
        [("h1", "rshim0"), ("h1", "rshim1"), ("h2", "rshim0"), ("h2", "rshim1")]
            .map(|(host, card)| row(host, card, outcome))
            .to_vec()
    };
    assert_eq!(ran.cards(), all("ready"));
    for ((host, number), card) in &lab.cards {
        let seen = card.seen();
        assert!(seen.received == lab.bench.image && seen.opens == 1, "{host} {number}");
        let name = format!("/rshim{number}");
        let own =
            |event: &&Value| event["host"] == *host && event["card"].as_str().is_some_and(|card| card.ends_with(&name));
        let kinds: Vec<_> = ran.events.iter().filter(own).map(|event| event["event"].as_str().expect("text")).collect();
        for kind in ["card", "stage", "written", "log", "end"] {
            assert!(kinds.contains(&kind), "{host} {number}: {kinds:?}");
        }
    }
    // Records are the hosts' own, and nothing else is left there.
    for host in ["h1", "h2"] {
        assert_eq!(lab.sessions(host), 1);
        let mut left: Vec<_> = fs::read_dir(&lab.hosts[host].folder)
            .expect("there")
            .map(|entry| entry.expect("one").file_name())
            .collect();
        left.sort();
        assert_eq!(left, [RECORDS, "dev", "host_key", "host_key.pub", "log", "sshd_config"]);
    }
    assert!(!lab.bench.path("cards").exists(), "nothing was recorded here");
    let ran = lab.flash("h1,h2", &["--all", "--if-different", "--json"]);
    assert_eq!((ran.status, ran.cards()), (Some(0), all("unchanged")), "{}", ran.stderr);
    let ran = lab.flash("h2,h1", &["--rshim", "dev/rshim1", "--dry-run"]);
    assert!(ran.stdout.contains("h2    dev/rshim1") || ran.stdout.contains("rshim1"), "{}", ran.stdout);
    assert!(ran.stdout.ends_with("2 done, 0 unchanged, 0 failed, 0 not started\n"), "{}{}", ran.stdout, ran.stderr);
    assert!(lab.cards.values().all(|card| card.seen().opens == 1));
}

#[test]
fn failing_host_does_not_stop_others() {
    let Some(mut lab) = Lab::new() else { return };
    lab.host("h1", "");
    // Bytes change on the way, and what changes them would read on.
    lab.host("noisy", "stdbuf -o0 tr '\\007' '\\010' |");
    lab.host("empty", "");
    lab.host("other", "");
    // Its program is another one, of a host whose session prints a message first.
    lab.host("old", "echo Welcome; printf 'line \\033[2J\\n' >&2; exit 3;");
    let good = lab.good();
    let busy = Script { open_error: Some(Errno::EBUSY), ..good.clone() };
    for (host, number, script) in [("h1", 0, &good), ("h1", 1, &busy), ("noisy", 0, &good), ("other", 0, &good)] {
        if lab.insert(host, number, script.clone()).is_none() {
            return;
        }
    }
    let ran = lab.flash("absent,h1,noisy,empty,old,other", &["--all", "--json"]);
    let expected = vec![
        row("absent", "-", "host-failed"),
        row("h1", "rshim0", "ready"),
        row("h1", "rshim1", "busy"),
        row("noisy", "-", "host-failed"),
        row("empty", "-", "host-failed"),
        row("old", "-", "host-failed"),
        row("other", "rshim0", "ready"),
    ];
    assert_eq!((ran.status, ran.cards()), (Some(1), expected), "{}", ran.stderr);
    for (host, why) in [
        ("absent", "ssh failed"),
        ("h1", "open elsewhere"),
        ("noisy", "digest differs"),
        ("empty", "no cards in dev"),
        ("old", "status 3: "),
    ] {
        let message = ran.message(host);
        assert!(message.contains(why) && ran.stderr.contains(&message), "{host}: {message}\n{}", ran.stderr);
    }
    assert!(ran.message("old").contains("line") && !ran.stderr.contains('\x1b'), "{:?}", ran.stderr);
    assert_eq!(lab.cards[&("noisy", 0)].seen().opens, 0, "nothing was written");
    let counts = &ran.events.last().expect("events")["counts"];
    assert_eq!(*counts, json!({ "done": 2, "unchanged": 0, "failed": 5, "not_started": 0 }));
}

#[test]
fn signal_here_or_end_of_the_connection_restores_the_cards_there() {
    let Some(mut lab) = Lab::new() else { return };
    lab.host("h1", "");
    for signal in [Signal::INT, Signal::KILL] {
        // Slow enough to be still writing.
        let slow = Script { write_max: 16, boot_mode: 2, ..lab.good() };
        lab.cards.clear();
        if lab.insert("h1", 0, slow).is_none() {
            return;
        }
        let mut command = lab.command("h1", &["--rshim", "dev/rshim0", "--json"]);
        let process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
        let card = &lab.cards[&("h1", 0)];
        card.wait("the first bytes", |seen| !seen.received.is_empty());
        kill_process(Pid::from_child(&process), signal).expect("sent");
        let output = process.wait_with_output().expect("ended");
        if signal == Signal::INT {
            let ran = Ran::new(output);
            assert_eq!(
                (ran.status, ran.cards()),
                (Some(130), vec![row("h1", "rshim0", "interrupted")]),
                "{}",
                ran.stderr
            );
        }
        card.wait("the end", |seen| {
            !seen.is_open && seen.resets == 1 && seen.boot_mode == 2 && seen.display_level == 0
        });
        assert!(card.seen().received.len() < lab.bench.image.len());
    }
}

#[test]
fn events_of_hosts_are_printed_as_they_happen() {
    let Some(mut lab) = Lab::new() else { return };
    lab.host("h1", "");
    let hanging = Script { hangs: Some(When::Reading(1)), ..lab.good() };
    if lab.insert("h1", 0, hanging).is_none() {
        return;
    }
    let mut command = lab.command("h1", &["--all", "--json"]);
    let mut process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
    let mut stdout = BufReader::new(process.stdout.take().expect("a pipe"));
    let mut text = String::new();
    while !text.contains("waiting for the card to boot") {
        assert_ne!(stdout.read_line(&mut text).expect("text"), 0, "{text}");
    }
    lab.cards[&("h1", 0)].release();
    stdout.read_to_string(&mut text).expect("text");
    let ran = Ran::new(Output { stdout: text.into_bytes(), ..process.wait_with_output().expect("ended") });
    assert_eq!((ran.status, ran.cards()), (Some(0), vec![row("h1", "rshim0", "ready")]), "{}", ran.stderr);
}

#[test]
fn hosts_are_refused_before_any_connection_if_the_options_are_invalid() {
    let Some(lab) = Lab::new() else { return };
    for (hosts, more, why) in [
        ("-oProxyCommand=x", &[][..], "no name of a host"),
        ("h1,h1", &[], "twice"),
        ("h1", &["--key-file", "x"], "cannot be used with"),
        ("h1", &["--follow-stdin"], "cannot be used with"),
    ] {
        let hosts = format!("--host={hosts}");
        let path = |name: &str| lab.bench.path(name).display().to_string();
        let mut command =
            lab.bench.command(&[&["flash", &path("image.bfb"), "--key", &path("pub.pem"), &hosts], more].concat());
        let output = command.output().expect("it runs");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && stderr.contains(why), "{hosts}: {stderr}");
    }
    // The image is checked here first.
    fs::write(lab.bench.path("image.bfb"), &lab.bench.image[..1000]).expect("written");
    assert_eq!(lab.flash("absent", &[]).status, Some(2));
}
