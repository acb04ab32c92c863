//! All-reduces of real processes over real UDP sockets, with `sumac chaos` before each device.
//!
//! A controller, two devices and four ranks, each a process of its own, in a tree of two levels; every packet
//! between a rank and its leaf and between the leaf and the root goes through a proxy that loses, doubles, holds
//! back and damages some. The ranks check every element. Nothing is timed: a test that goes wrong ends at the ranks'
//! deadline.

mod common;
mod proxy;

use common::{Server, children, serve, serve_with};
use proxy::{Counts, Lane, Proxy};
use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const RANKS: u32 = 4;

/// Who sends and is no child.
const STRANGERS: u64 = 1000;

/// Two leaves of two hosts each. The planner takes one leaf for the root, as there is no device at the spine.
const FABRIC: &str = r#"
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

/// The devices, and how many children each has in the tree: two ranks, and at the root the other leaf.
const DEVICES: [(&str, u64); 2] = [("leaf0", 3), ("leaf1", 2)];

/// One cluster at a time: so the ports of a device are free, and every child of this process is the cluster's.
static ALONE: Mutex<()> = Mutex::new(());

/// What to run.
struct Scenario {
    /// Options of the proxies.
    faults: &'static str,
    /// Whether others send to the proxies as well.
    is_crowded: bool,
    shards: u16,
    order: &'static str,
    iterations: u32,
    cases: Vec<Value>,
}

/// What came of it.
struct Outcome {
    /// Every rank's rows.
    measured: Vec<Vec<Value>>,
    /// Of every device's proxy, a link a shard.
    links: [Vec<Counts>; 2],
}

impl Scenario {
    /// Start a cluster, let its ranks do their work, end it in order, and see that nothing is left.
    fn run(&self) -> Outcome {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut controller = serve_with(&["controller", "--listen", "127.0.0.1:0", "--topology", "-"], FABRIC);
        let line = controller.line();
        let addr = line.strip_prefix("listening ").expect("an address");
        let (devices, mut proxies): (Vec<_>, Vec<_>) = (0..DEVICES.len()).map(|nth| self.device(nth, addr)).unzip();
        let ranks: Vec<Server> = (0..RANKS).map(|rank| serve_with(&["rank"], &self.job(addr, rank))).collect();
        if self.is_crowded {
            proxies.iter_mut().zip(DEVICES).for_each(|(proxy, (_, children))| crowd(proxy, children));
        }
        let measured = ranks.into_iter().map(|rank| self.rows(&rank.expect_success())).collect();
        for mut server in devices.into_iter().chain([controller]) {
            server.interrupt_and_expect_success();
        }
        let mut counts = proxies.into_iter().map(Proxy::finish);
        let links = std::array::from_fn(|_| counts.next().expect("one for each device"));
        let left: Vec<_> = children(std::process::id()).into_iter().map(|child| child.command).collect();
        assert!(left.is_empty(), "left: {left:?}");
        Outcome { measured, links }
    }

    /// Start the `nth` device and its proxy, and wait until the controller knows it.
    fn device(&self, nth: usize, controller: &str) -> (Server, Proxy) {
        let (name, _) = DEVICES[nth];
        // A loopback address of this process's own, where ports below those that the system gives out are free.
        let [_, a, b, c] = std::process::id().to_be_bytes();
        let bind = Ipv4Addr::new(127, 64 | a, b, c);
        let first = 7900 + 10 * nth as u16;
        let targets: Vec<_> = (0..self.shards).map(|shard| SocketAddr::from((bind, first + shard))).collect();
        let proxy = Proxy::start(&targets, &format!("{} --seed {nth}", self.faults));
        let advertise: Vec<String> = proxy.addrs().iter().map(ToString::to_string).collect();
        let mut device = serve(&[
            "device",
            &format!("--name={name}"),
            &format!("--controller={controller}"),
            &format!("--bind={bind}"),
            &format!("--shards={}", self.shards),
            &format!("--data-port={first}"),
            &format!("--advertise={}", advertise.join(",")),
        ]);
        assert_eq!(device.line(), format!("ready {name}"));
        (device, proxy)
    }

    fn job(&self, controller: &str, rank: u32) -> String {
        let work = json!({ "Perf": { "cases": self.cases, "warmup": 0, "iterations": self.iterations, "memory": "Plain", "check": "Every" } });
        let (host, order) = (format!("h{rank}"), self.order);
        let job = json!({
            "controller": controller, "job": "lossy", "rank": rank, "world": RANKS, "host": host, "order": order,
            // Only packets can be lost.
            "attach": "Udp", "deadline_ms": 60_000, "work": work,
        });
        format!("{job}\n")
    }

    /// Read what a rank has printed: that it has joined, then a row a case, through the tree and without an error.
    fn rows(&self, lines: &[String]) -> Vec<Value> {
        let lines: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let joined = json!({ "Joined": { "attached": "ByPackets" } });
        assert_eq!((lines.first(), lines.len()), (Some(&joined), 1 + self.cases.len()), "{lines:?}");
        let rows: Vec<Value> = lines[1..].iter().map(|line| line["Measured"].clone()).collect();
        for (row, case) in rows.iter().zip(&self.cases) {
            assert_eq!(
                (&row["wrong"], &row["path"], &row["fallback"]),
                (&json!(0), &json!("Tree"), &Value::Null),
                "{case}: {row}"
            );
            assert_eq!(row["times_ns"].as_array().map(Vec::len), Some(self.iterations as usize), "{case}: {row}");
        }
        rows
    }
}

/// Send to a proxy from many addresses, when it knows the children of its device.
fn crowd(proxy: &mut Proxy, children: u64) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let is_known = |counts: &Counts| counts.clients == children && counts.down.received >= 16 * children;
    while !proxy.counts().iter().all(is_known) {
        assert!(Instant::now() < deadline, "{:?}", proxy.counts());
    }
    for _ in 0..STRANGERS {
        let stranger = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
        proxy.addrs().iter().for_each(|addr| _ = stranger.send_to(&[9; 64], addr).expect("sent"));
    }
}

impl Outcome {
    /// Every child of every device came through its proxy, with an address of its own, and no packet got lost there that
    /// was not meant to.
    fn expect_every_link_relayed(&self) {
        for (links, (device, children)) in self.links.iter().zip(DEVICES) {
            for counts in links {
                let Counts { clients, replaced, up, down, .. } = *counts;
                let is_used = clients == children && replaced == 0 && up.received > 0 && down.received > 0;
                assert!(is_used, "{device}: {counts:?}");
                let extra = [up, down].map(|lane| lane.overflowed + lane.refused + lane.stray + lane.unsent);
                assert_eq!(extra, [0, 0], "{device}: {counts:?}");
            }
        }
    }

    /// Each of these was done to packets both ways on every link.
    fn expect_done(&self, done: impl Fn(Lane) -> Vec<u64>) {
        for counts in self.links.iter().flatten() {
            let all = [done(counts.up), done(counts.down)].concat();
            assert!(all.iter().all(|&count| count > 0), "{counts:?}");
        }
    }

    fn retransmits(&self) -> u64 {
        self.measured.iter().flatten().filter_map(|row| row["retransmits"].as_u64()).sum()
    }
}

fn all_reduce(dtype: &str, op: &str, count: u64) -> Value {
    json!({ "collective": "AllReduce", "dtype": dtype, "op": op, "root": 0, "count": count, "algo": "Tree" })
}

#[test]
fn a_proxy_without_faults_changes_nothing() {
    let cases = vec![
        all_reduce("F32", "Sum", 0),
        all_reduce("F32", "Sum", 2),
        all_reduce("Bf16", "Max", 1001),
        all_reduce("I64", "Sum", 8192),
        all_reduce("F32", "Sum", 1 << 18),
        json!({ "collective": "Barrier", "dtype": "F32", "op": "Sum", "root": 0, "count": 0, "algo": "Tree" }),
    ];
    let scenario = Scenario { faults: "", is_crowded: false, shards: 2, order: "Arrival", iterations: 5, cases };
    let outcome = scenario.run();
    outcome.expect_every_link_relayed();
    for counts in outcome.links.iter().flatten() {
        let passed = [counts.up, counts.down].map(|lane| lane.received - lane.sent);
        assert_eq!(passed, [0, 0], "{counts:?}");
    }
}

#[test]
fn one_packet_in_twenty_lost_is_made_up_for() {
    let cases = vec![
        all_reduce("I32", "Sum", 2),
        all_reduce("F16", "Sum", 3001),
        all_reduce("F64", "Min", 8192),
        all_reduce("I64", "Sum", 1 << 17),
    ];
    let scenario =
        Scenario { faults: "--loss 5%", is_crowded: false, shards: 1, order: "TreePairwise", iterations: 25, cases };
    let outcome = scenario.run();
    outcome.expect_every_link_relayed();
    outcome.expect_done(|lane| vec![lane.lost]);
    assert!(outcome.retransmits() > 0, "{:?}", outcome.measured);
}

#[test]
fn every_fault_at_once_is_survived() {
    let cases = vec![
        all_reduce("F32", "Sum", 2),
        all_reduce("Bf16", "Sum", 333),
        all_reduce("I64", "Max", 4096),
        all_reduce("I32", "Sum", 1 << 15),
    ];
    let faults = "--loss 20% --duplicate 5% --reorder 10% --corrupt 5% --late 2ms";
    let scenario = Scenario { faults, is_crowded: false, shards: 1, order: "TreeFold", iterations: 6, cases };
    let outcome = scenario.run();
    outcome.expect_every_link_relayed();
    outcome.expect_done(|lane| vec![lane.lost, lane.duplicated, lane.reordered, lane.corrupted]);
    assert!(outcome.retransmits() > 0, "{:?}", outcome.measured);
}

#[test]
fn a_way_that_loses_doubles_reorders_and_damages_some_and_takes_its_time_gives_right_values() {
    let cases = vec![all_reduce("F32", "Sum", 1), all_reduce("Bf16", "Sum", 5000), all_reduce("I64", "Sum", 1 << 16)];
    let faults = "--loss 5% --duplicate 2% --reorder 5% --corrupt 1% --delay 100us..300us";
    let scenario = Scenario { faults, is_crowded: false, shards: 1, order: "TreePairwise", iterations: 5, cases };
    let outcome = scenario.run();
    outcome.expect_every_link_relayed();
    outcome.expect_done(|lane| vec![lane.lost, lane.duplicated, lane.reordered, lane.corrupted]);
    assert!(outcome.retransmits() > 0, "{:?}", outcome.measured);
}

#[test]
fn strangers_at_a_proxy_take_no_rank_its_place() {
    let cases = vec![all_reduce("I64", "Sum", 1 << 16)];
    let faults = "--loss 1% --clients 8";
    let scenario = Scenario { faults, is_crowded: true, shards: 1, order: "TreePairwise", iterations: 60, cases };
    let outcome = scenario.run();
    for counts in outcome.links.iter().flatten() {
        // A stranger's port may be given out again.
        assert!(counts.replaced > STRANGERS / 2 && counts.up.refused == 0, "{counts:?}");
    }
}
