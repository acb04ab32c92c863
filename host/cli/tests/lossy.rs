//! All-reduces of real processes over real UDP sockets, with `sumac chaos` in front of each device.
//!
//! A controller, two devices and four ranks, each a process, form a tree of two levels. Every packet between a rank and
//! its leaf and between the leaf and the root passes through a proxy that drops, duplicates, delays and corrupts some
//! of them. The ranks check every element. Nothing is timed; a hanging test ends at the ranks' deadline.

mod common;
mod proxy;

use common::{Server, TWO_LEAVES, children, serve, serve_with};
use proxy::{Counts, Lane, Proxy};
use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const RANKS: u32 = 4;

/// The number of senders that are not children.
const UNKNOWN_SENDERS: u64 = 1000;

/// The devices and the number of their children in the tree: two ranks, and for the root the other leaf.
const DEVICES: [(&str, u64); 2] = [("leaf0", 3), ("leaf1", 2)];

/// Serialises the tests, so that the devices' ports are free and all child processes belong to one cluster.
static ALONE: Mutex<()> = Mutex::new(());

/// A test's configuration.
struct Scenario {
    /// Options of the proxies.
    faults: &'static str,
    /// Whether unknown senders send to the proxies, too.
    is_crowded: bool,
    shards: u16,
    order: &'static str,
    iterations: u32,
    cases: Vec<Value>,
}

/// The results of a test.
struct Outcome {
    /// The rows of each rank.
    measured: Vec<Vec<Value>>,
    /// The counters of each device's proxy, with one link per shard.
    links: [Vec<Counts>; 2],
}

impl Scenario {
    /// Run the ranks on a cluster, end it in order, and assert that no process remains.
    fn run(&self) -> Outcome {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut controller = serve_with(&["controller", "--listen", "127.0.0.1:0", "--topology", "-"], TWO_LEAVES);
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

    /// Start device `nth` and its proxy, and wait until it has registered.
    fn device(&self, nth: usize, controller: &str) -> (Server, Proxy) {
        let (name, _) = DEVICES[nth];
        // A loopback address of this process's own: there, ports below the ephemeral range are free.
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
        let work = json!({ "Perf": { "cases": self.cases, "warmup": 0, "iterations": self.iterations, "memory": "Plain", "check": "Every", "placements": "InPlace" } });
        let (host, order) = (format!("h{rank}"), self.order);
        let job = json!({
            "controller": controller, "job": "lossy", "rank": rank, "world": RANKS, "host": host, "order": order,
            // Only packets can be dropped.
            "transport": "Udp", "deadline_ms": 60_000, "work": work,
        });
        format!("{job}\n")
    }

    /// Parse a rank's output: its transport, then one row per case, each through the tree and without wrong elements.
    fn rows(&self, lines: &[String]) -> Vec<Value> {
        let lines: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let joined = json!({ "Joined": { "transport": "Packets" } });
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

/// Send to a proxy from many addresses, once it has admitted the children of its device.
fn crowd(proxy: &mut Proxy, children: u64) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let is_known = |counts: &Counts| counts.clients == children && counts.down.received >= 16 * children;
    while !proxy.counts().iter().all(is_known) {
        assert!(Instant::now() < deadline, "{:?}", proxy.counts());
    }
    for _ in 0..UNKNOWN_SENDERS {
        let sender = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
        proxy.addrs().iter().for_each(|addr| _ = sender.send_to(&[9; 64], addr).expect("sent"));
    }
}

impl Outcome {
    /// Assert that every child used its proxy with an address of its own, and that the proxy dropped no packet except
    /// by its rules.
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

    /// Assert that these faults occurred in both directions on every link.
    fn expect_faults(&self, faults: impl Fn(Lane) -> Vec<u64>) {
        for counts in self.links.iter().flatten() {
            let all = [faults(counts.up), faults(counts.down)].concat();
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
fn proxy_without_faults_relays_every_packet() {
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
fn all_reduce_is_correct_at_5_percent_loss() {
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
    outcome.expect_faults(|lane| vec![lane.lost]);
    assert!(outcome.retransmits() > 0, "{:?}", outcome.measured);
}

#[test]
fn all_reduce_is_correct_at_20_percent_loss_with_all_other_faults() {
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
    outcome.expect_faults(|lane| vec![lane.lost, lane.duplicated, lane.reordered, lane.corrupted]);
    assert!(outcome.retransmits() > 0, "{:?}", outcome.measured);
}

#[test]
fn all_reduce_is_correct_with_all_faults_and_delay() {
    let cases = vec![all_reduce("F32", "Sum", 1), all_reduce("Bf16", "Sum", 5000), all_reduce("I64", "Sum", 1 << 16)];
    let faults = "--loss 5% --duplicate 2% --reorder 5% --corrupt 1% --delay 100us..300us";
    // So many packets that each fault occurs: only the operations themselves send any.
    let scenario = Scenario { faults, is_crowded: false, shards: 1, order: "TreePairwise", iterations: 40, cases };
    let outcome = scenario.run();
    outcome.expect_every_link_relayed();
    outcome.expect_faults(|lane| vec![lane.lost, lane.duplicated, lane.reordered, lane.corrupted]);
    assert!(outcome.retransmits() > 0, "{:?}", outcome.measured);
}

#[test]
fn unknown_senders_do_not_evict_ranks_from_the_proxy() {
    let cases = vec![all_reduce("I64", "Sum", 1 << 16)];
    let faults = "--loss 1% --clients 8";
    let scenario = Scenario { faults, is_crowded: true, shards: 1, order: "TreePairwise", iterations: 60, cases };
    let outcome = scenario.run();
    for counts in outcome.links.iter().flatten() {
        // The system may reuse a sender's port.
        assert!(counts.replaced > UNKNOWN_SENDERS / 2 && counts.up.refused == 0, "{counts:?}");
    }
}
