//! `sumac selftest` with real processes: good links, a lossy link behind a proxy, and a dead link.
//!
//! Nothing is timed; an operation without a reply ends at its deadline.

mod common;
mod proxy;

use common::{Server, exit_status, serve, stderr, stdout, sumac};
use proxy::Proxy;
use serde_json::Value;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};

/// A controller and its devices.
struct Cluster {
    addr: String,
    devices: Vec<Server>,
    controller: Server,
}

impl Cluster {
    fn start() -> Self {
        let mut controller = serve(&["controller", "--listen", "127.0.0.1:0"]);
        let line = controller.line();
        let addr = line.strip_prefix("listening ").expect("an address").to_owned();
        Self { addr, devices: Vec::new(), controller }
    }

    fn device(&mut self, name: &str, more: &[&str]) {
        let (name_is, controller) = (format!("--name={name}"), format!("--controller={}", self.addr));
        let mut device = serve(&[&["device", &name_is, &controller], more].concat());
        assert_eq!(device.line(), format!("ready {name}"));
        self.devices.push(device);
    }

    /// Test all links. Returns the exit status and one row per link, named by its ends.
    fn selftest(&self, more: &[&str]) -> (i32, Vec<(String, Value)>) {
        let args = ["selftest", "--json", "--controller", &self.addr, "-n", "100", "-e", "4M", "--max-loss", "1"];
        let output = sumac(&[&args[..], more].concat());
        let row = |line: &str| -> (String, Value) {
            let row: Value = serde_json::from_str(line).expect("a JSON object a line");
            (format!("{}-{}", row["from"].as_str().expect("a name"), row["to"].as_str().expect("a name")), row)
        };
        assert!(stderr(&output).is_empty(), "{}", stderr(&output));
        (exit_status(&output), stdout(&output).lines().map(row).collect())
    }

    fn end(mut self) {
        self.devices.iter_mut().chain([&mut self.controller]).for_each(Server::interrupt_and_expect_success);
    }
}

fn names(rows: &[(String, Value)], keep: impl Fn(&Value) -> bool) -> Vec<&str> {
    rows.iter().filter(|(_, row)| keep(row)).map(|(name, _)| name.as_str()).collect()
}

/// Return a port on a loopback address of this process's own, below the ephemeral range.
fn own_addr(port: u16) -> SocketAddr {
    let [_, a, b, c] = std::process::id().to_be_bytes();
    SocketAddr::from((Ipv4Addr::new(127, 64 | a, b, c), port))
}

#[test]
fn only_lossy_links_are_reported() {
    let mut cluster = Cluster::start();
    // Packets to and from b are dropped.
    let at = own_addr(7900);
    let proxy = Proxy::start(&[at], "--loss 10% --seed 7");
    let (bind, advertise) = (format!("--bind={}", at.ip()), format!("--advertise={}", proxy.addrs()[0]));
    cluster.device("a", &[]);
    cluster.device("b", &[&bind, "--data-port=7900", &advertise]);
    cluster.device("c", &[]);
    let (status, rows) = cluster.selftest(&[]);
    cluster.end();
    assert_eq!(names(&rows, |_| true), ["rank-a", "rank-b", "rank-c", "a-b", "a-c", "c-b"]);
    assert_eq!(names(&rows, |row| row["ok"] == false), ["rank-b", "a-b", "c-b"], "{rows:#?}");
    assert_eq!(status, 1);
    for (name, row) in &rows {
        let (packets, lost) = (row["packets"].as_u64().expect("counted"), row["lost"].as_u64().expect("counted"));
        assert!(packets > 200 && row["bandwidth_gbytes_s"].as_f64().is_some_and(|rate| rate > 0.0), "{row}");
        if row["ok"] == false {
            let problem = row["problem"].as_str().expect("a sentence");
            assert!(lost > 0 && problem.starts_with(&name.replace('-', " - ")), "{row}");
            assert!(problem.contains("loses") && problem.contains("check the error and drop counters"), "{row}");
        }
    }
    let counts = proxy.finish();
    assert!(counts[0].up.lost > 0 && counts[0].down.lost > 0, "{counts:?}");
}

#[test]
fn dead_link_is_reported_with_its_deadline() {
    let mut cluster = Cluster::start();
    // An open socket that nobody reads: no reply and no ICMP error.
    let nowhere = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
    let advertise = format!("--advertise={}", nowhere.local_addr().expect("bound"));
    let bind = format!("--bind={}", own_addr(0).ip());
    cluster.device("a", &[&bind, "--data-port=7910", &advertise]);
    cluster.device("b", &[]);
    let (status, rows) = cluster.selftest(&["--timeout", "1"]);
    assert_eq!(status, 1);
    // The link between a and b is tested from b, which is reachable.
    assert_eq!(names(&rows, |_| true), ["rank-a", "rank-b", "b-a"]);
    assert_eq!(names(&rows, |row| row["ok"] == true), ["rank-b"], "{rows:#?}");
    let problem = rows[0].1["problem"].as_str().expect("a sentence");
    assert!(problem.contains("rank - a does not work: no result within 1 s"), "{problem}");
    let (status, rows) = cluster.selftest(&["--device", "b"]);
    assert_eq!((status, names(&rows, |_| true)), (0, vec!["rank-b"]));
    cluster.end();
}

#[test]
fn selftest_without_controller_tests_its_own_cluster() {
    let output = sumac(&["selftest", "-n", "20", "-e", "1M", "--max-loss", "1"]);
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("# 3 links: all good"), "{text}");
    assert!(
        text.lines().any(|line| line.contains("leaf0") && line.contains("leaf1") && line.ends_with("ok")),
        "{text}"
    );
}

#[test]
fn invalid_usage_exits_with_2_and_names_the_value() {
    for (args, named) in [
        (&["selftest", "--max-loss", "101"][..], "--max-loss 101"),
        (&["selftest", "-e", "4"], "-e 4"),
        (&["selftest", "--device", "nobody", "--levels", "1"], "nobody has not registered; registered devices: leaf0"),
        (&["selftest", "--topology", "/nonexistent"], "/nonexistent"),
    ] {
        let output = sumac(args);
        assert_eq!(exit_status(&output), 2, "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(named), "{args:?}: {}", stderr(&output));
    }
    let output = sumac(&["selftest", "--controller", "127.0.0.1:1"]);
    assert_eq!(exit_status(&output), 1);
    assert!(stderr(&output).contains("no controller at 127.0.0.1:1"), "{}", stderr(&output));
}
