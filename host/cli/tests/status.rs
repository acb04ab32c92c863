//! `sumac status` of a real controller: zero-copy, missing ranks, rates, and --watch until Ctrl-C.

mod common;

use common::{Server, exit_status, serve, serve_with, stderr, stdout, sumac};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(60);

/// A controller with one device.
struct Cluster {
    controller: Server,
    device: Server,
    addr: String,
}

impl Cluster {
    fn start() -> Self {
        let mut controller = serve(&["controller", "--listen", "127.0.0.1:0"]);
        let line = controller.line();
        let addr = line.strip_prefix("listening ").expect("an address").to_owned();
        let mut device = serve(&["device", "--name", "leaf0", "--controller", &addr]);
        assert_eq!(device.line(), "ready leaf0");
        Self { controller, device, addr }
    }

    fn report(&self) -> Value {
        let output = sumac(&["status", "--json", "--controller", &self.addr]);
        assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
        serde_json::from_str(&stdout(&output)).expect("JSON")
    }

    fn text(&self) -> String {
        stdout(&sumac(&["status", "--controller", &self.addr]))
    }

    /// Start a rank of a job that adds eight numbers once.
    fn rank(&self, rank: u32, world: u32, transport: &str) -> Server {
        let case =
            json!({ "collective": "AllReduce", "dtype": "F32", "op": "Sum", "root": 0, "count": 8, "algo": "Tree" });
        let work = json!({ "Perf": {
            "cases": [case], "warmup": 0, "iterations": 1, "memory": "Registered", "check": "Every", "placements": "InPlace",
        } });
        let job = json!({
            "controller": self.addr, "job": format!("job-{transport}"), "rank": rank, "world": world,
            "host": format!("host-{rank}"), "order": null, "transport": transport, "deadline_ms": 60_000, "work": work,
        });
        serve_with(&["rank"], &format!("{job}\n"))
    }

    fn end(mut self) {
        self.device.interrupt_and_expect_success();
        self.controller.interrupt_and_expect_success();
    }
}

#[test]
fn zero_copy_contributions_are_counted_beside_packets() {
    let cluster = Cluster::start();
    let counters = || cluster.report()["devices"][0]["stats"]["Ok"]["counters"].clone();
    let count = |counters: &Value, name: &str| counters[name].as_u64().expect("a counter");
    for (transport, is_zero_copy) in [("Udp", false), ("Shm", true)] {
        let before = counters();
        let ranks = [0, 1].map(|rank| cluster.rank(rank, 2, transport));
        ranks.into_iter().for_each(|rank| _ = rank.expect_success());
        let after = counters();
        let more = |name| count(&after, name) - count(&before, name);
        assert!(more("contributions") > 0, "{after}");
        let expected = if is_zero_copy { more("contributions") } else { 0 };
        assert_eq!(more("zero_copy_contributions"), expected, "{transport}: {after}");
        assert_eq!(more("packets_in") > 0, !is_zero_copy, "{transport}: {after}");
    }
    let zero_copy = count(&counters(), "zero_copy_contributions");
    assert!(cluster.text().contains(&format!(", zero-copy {zero_copy}  completed ")), "{}", cluster.text());
    cluster.end();
}

#[test]
fn ranks_that_have_not_joined_are_named() {
    let cluster = Cluster::start();
    let _rank = cluster.rank(1, 5, "Udp");
    let limit = Instant::now() + TIMEOUT;
    let job = loop {
        let job = cluster.report()["jobs"][0].clone();
        if !job.is_null() {
            break job;
        }
        assert!(Instant::now() < limit, "the rank does not join");
    };
    assert_eq!(job["missing"], json!([{ "first": 0, "last": 0 }, { "first": 2, "last": 4 }]), "{job}");
    assert!(job["path"].is_null(), "{job}");
    let text = cluster.text();
    assert!(text.contains("waiting for ranks  tenant default  ranks 1/5 (missing: 0, 2-4)"), "{text}");
    drop(_rank);
    cluster.end();
}

/// Start `sumac status --watch`.
fn watch(cluster: &Cluster, options: &[&str]) -> (Child, impl Iterator<Item = String> + use<>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
    command.args(["status", "--watch", "0.1", "--controller", &cluster.addr]).args(options);
    let mut watch = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
    let lines = BufReader::new(watch.stdout.take().expect("piped")).lines();
    (watch, lines.map(|line| line.expect("UTF-8")))
}

/// Press Ctrl-C.
fn interrupt(watch: Child) {
    kill_process(Pid::from_child(&watch), Signal::INT).expect("it runs");
    let output = watch.wait_with_output().expect("ended");
    assert_eq!((exit_status(&output), stderr(&output)), (0, String::new()));
}

#[test]
fn watched_reports_follow_each_other_with_rates_until_ctrl_c() {
    let cluster = Cluster::start();
    let (process, mut lines) = watch(&cluster, &[]);
    let reports = lines.by_ref().filter(|line| line.starts_with("--- ")).take(3).count();
    assert_eq!(reports, 3);
    assert!(lines.any(|line| line.starts_with("    per second: packets in ")));
    interrupt(process);
    cluster.end();
}

#[test]
fn watched_json_is_one_object_per_line_with_rates_from_the_second_on() {
    let cluster = Cluster::start();
    let (process, lines) = watch(&cluster, &["--json"]);
    let reports: Vec<Value> = lines.take(2).map(|line| serde_json::from_str(&line).expect("an object")).collect();
    assert!(reports[0]["interval_s"].is_null() && reports[0]["devices"][0]["rates"].is_null(), "{}", reports[0]);
    assert!(reports[1]["interval_s"].as_f64() >= Some(0.1), "{}", reports[1]);
    assert!(reports[1]["devices"][0]["rates"]["packets_in"].is_f64(), "{}", reports[1]);
    interrupt(process);
    cluster.end();
}

#[test]
fn watch_without_a_controller_fails_and_an_invalid_interval_is_refused() {
    let output = sumac(&["status", "--watch", "--controller", "127.0.0.1:9"]);
    assert_eq!(exit_status(&output), 1, "{}", stderr(&output));
    for interval in ["0", "-1", "soon", "1e9"] {
        let output = sumac(&["status", &format!("--watch={interval}")]);
        assert_eq!(exit_status(&output), 2, "{interval}: {}", stderr(&output));
    }
}
