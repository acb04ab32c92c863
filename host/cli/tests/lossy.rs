//! All-reduces of real processes over real UDP sockets, with a lossy relay before each device.
//!
//! A controller, two devices and four ranks, each a process of its own, in a tree of two levels; every packet
//! between a rank and its leaf and between the leaf and the root goes through a relay that loses, doubles, holds
//! back and damages some. The ranks check every element. Nothing is timed: a test that goes wrong ends at the ranks'
//! deadline.

mod common;
mod relay;

use common::{Server, children, serve, serve_with};
use relay::{Counts, Faults, Relay};
use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};

const RANKS: u32 = 4;

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
const DEVICES: [(&str, usize); 2] = [("leaf0", 3), ("leaf1", 2)];

/// One cluster at a time: so the ports of a device are free, and every child of this process is the cluster's.
static ALONE: Mutex<()> = Mutex::new(());

/// What to run.
struct Scenario {
    faults: Faults,
    shards: u16,
    order: &'static str,
    iterations: u32,
    cases: Vec<Value>,
}

/// What came of it.
struct Outcome {
    /// Every rank's rows.
    measured: Vec<Vec<Value>>,
    /// Every device's relays, one a shard.
    relays: [Vec<Counts>; 2],
}

impl Scenario {
    /// Start a cluster, let its ranks do their work, end it in order, and see that nothing is left.
    fn run(&self) -> Outcome {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut controller = serve_with(&["controller", "--listen", "127.0.0.1:0", "--topology", "-"], FABRIC);
        let line = controller.line();
        let addr = line.strip_prefix("listening ").expect("an address");
        let (devices, relays): (Vec<_>, Vec<_>) = (0..DEVICES.len()).map(|nth| self.device(nth, addr)).unzip();
        let ranks: Vec<Server> = (0..RANKS).map(|rank| serve_with(&["rank"], &self.job(addr, rank))).collect();
        let measured = ranks.into_iter().map(|rank| self.rows(&rank.expect_success())).collect();
        for mut server in devices.into_iter().chain([controller]) {
            server.interrupt_and_expect_success();
        }
        let left: Vec<_> = children(std::process::id()).into_iter().map(|child| child.command).collect();
        assert!(left.is_empty(), "left: {left:?}");
        let mut counts = relays.into_iter().map(|relays| relays.into_iter().map(Relay::finish).collect());
        Outcome { measured, relays: std::array::from_fn(|_| counts.next().expect("one for each device")) }
    }

    /// Start the `nth` device and its relays, and wait until the controller knows it.
    fn device(&self, nth: usize, controller: &str) -> (Server, Vec<Relay>) {
        let (name, _) = DEVICES[nth];
        // A loopback address of this process's own, where ports below those that the system gives out are free.
        let [_, a, b, c] = std::process::id().to_be_bytes();
        let bind = Ipv4Addr::new(127, 64 | a, b, c);
        let first = 7900 + 10 * nth as u16;
        let relay = |shard: u16| {
            let seed = u64::from(first + shard);
            Relay::start(SocketAddr::from((bind, first + shard)), self.faults, seed).expect("a relay")
        };
        let relays: Vec<Relay> = (0..self.shards).map(relay).collect();
        let advertise: Vec<String> = relays.iter().map(|relay| relay.addr().to_string()).collect();
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
        (device, relays)
    }

    fn job(&self, controller: &str, rank: u32) -> String {
        let perf = json!({
            "cases": self.cases, "warmup": 0, "iterations": self.iterations, "memory": "Plain", "check": "Every",
        });
        let work = json!({ "Perf": perf });
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

impl Outcome {
    /// Every child of every device came through its relay, with an address of its own.
    fn expect_every_link_relayed(&self) {
        for (relays, (device, children)) in self.relays.iter().zip(DEVICES) {
            for counts in relays {
                assert!(counts.clients == children && counts.up > 0 && counts.down > 0, "{device}: {counts:?}");
            }
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
fn a_relay_without_faults_changes_nothing() {
    let cases = vec![
        all_reduce("F32", "Sum", 0),
        all_reduce("F32", "Sum", 2),
        all_reduce("Bf16", "Max", 1001),
        all_reduce("I64", "Sum", 8192),
        all_reduce("F32", "Sum", 1 << 18),
        json!({ "collective": "Barrier", "dtype": "F32", "op": "Sum", "root": 0, "count": 0, "algo": "Tree" }),
    ];
    let scenario = Scenario { faults: Faults::default(), shards: 2, order: "Arrival", iterations: 5, cases };
    let outcome = scenario.run();
    outcome.expect_every_link_relayed();
    for counts in outcome.relays.iter().flatten() {
        assert_eq!((counts.dropped_up, counts.dropped_down, counts.corrupted), (0, 0, 0), "{counts:?}");
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
    let faults = Faults { drop: 50, ..Faults::default() };
    let scenario = Scenario { faults, shards: 1, order: "TreePairwise", iterations: 25, cases };
    let outcome = scenario.run();
    outcome.expect_every_link_relayed();
    outcome.relays.iter().flatten().for_each(|c| assert!(c.dropped_up > 0 && c.dropped_down > 0, "{c:?}"));
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
    let faults = Faults { drop: 200, duplicate: 50, delay: 100, corrupt: 50 };
    let scenario = Scenario { faults, shards: 1, order: "TreeFold", iterations: 6, cases };
    let outcome = scenario.run();
    outcome.expect_every_link_relayed();
    for c in outcome.relays.iter().flatten() {
        let done = [c.dropped_up, c.dropped_down, c.duplicated, c.delayed, c.corrupted];
        assert!(done.iter().all(|&count| count > 0), "{c:?}");
    }
    assert!(outcome.retransmits() > 0, "{:?}", outcome.measured);
}
