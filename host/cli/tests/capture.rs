//! `sumac device --pcap`: the packets of a real job are in the capture, once each way.

mod common;

use common::{Server, exit_status, serve, serve_with, stderr, sumac};
use serde_json::json;
use std::fs;
use std::os::unix::fs::PermissionsExt;

const RANKS: u32 = 2;
const ITERATIONS: usize = 5;
const SHARDS: u32 = 2;

const FABRIC: &str = r#"
switch = [{ name = "leaf0", aggregation = true }]
host = [{ name = "h0" }, { name = "h1" }]
link = [{ ends = ["h0", "leaf0"] }, { ends = ["h1", "leaf0"] }]
"#;

/// The header's length, and the offsets of magic and kind in it: `sumac_hal::wire`.
const HEADER_LEN: usize = 96;
const MAGIC: &[u8] = b"SUMC";
const KIND: usize = 5;
const DATA: u8 = 1;
const RESULT: u8 = 4;

/// A captured packet: its interface, whether it was received, and its kind.
#[derive(Debug, PartialEq)]
struct Packet {
    interface: u32,
    is_received: bool,
    kind: u8,
}

/// Parse the packets of a capture; whatever is not as pcapng has it panics.
fn packets(capture: &[u8]) -> Vec<Packet> {
    let word = |at: usize| u32::from_le_bytes(capture[at..at + 4].try_into().expect("four bytes"));
    let (mut at, mut packets) = (0, Vec::new());
    while at < capture.len() {
        let (kind, len) = (word(at), word(at + 4) as usize);
        assert_eq!(word(at + len - 4) as usize, len, "both lengths of the block at {at}");
        if kind == 6 {
            let data = &capture[at + 28..][..word(at + 20) as usize];
            // Behind IPv4's and UDP's headers.
            let packet = &data[28..];
            assert!(data[0] == 0x45 && packet.len() >= HEADER_LEN && packet.starts_with(MAGIC), "{data:02x?}");
            // The option epb_flags is followed by the end of options and the second length.
            let direction = word(at + len - 12);
            packets.push(Packet { interface: word(at + 8), is_received: direction == 1, kind: packet[KIND] });
        }
        at += len;
    }
    packets
}

#[test]
fn capture_holds_the_packets_of_a_job() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("leaf0.pcapng");
    let mut controller = serve_with(&["controller", "--listen", "127.0.0.1:0", "--topology", "-"], FABRIC);
    let line = controller.line();
    let addr = line.strip_prefix("listening ").expect("an address");
    let mut device = serve(&[
        "device",
        "--name=leaf0",
        "--no-shm",
        &format!("--shards={SHARDS}"),
        &format!("--controller={addr}"),
        &format!("--pcap={}", path.display()),
    ]);
    assert_eq!(device.line(), "ready leaf0");
    let job = |rank: u32| {
        // 512 KiB: many chunks for each shard.
        let case = json!({ "collective": "AllReduce", "dtype": "F32", "op": "Sum", "root": 0, "count": 1 << 17, "algo": "Tree" });
        let work = json!({ "Perf": { "cases": [case], "warmup": 0, "iterations": ITERATIONS, "memory": "Plain", "check": "Every", "placements": "InPlace" } });
        let job = json!({
            "controller": addr, "job": "captured", "rank": rank, "world": RANKS, "host": format!("h{rank}"),
            "order": "Arrival", "transport": "Udp", "deadline_ms": 60_000, "work": work,
        });
        format!("{job}\n")
    };
    let ranks: Vec<Server> = (0..RANKS).map(|rank| serve_with(&["rank"], &job(rank))).collect();
    ranks.into_iter().for_each(|rank| _ = rank.expect_success());
    device.interrupt_and_expect_success();
    controller.interrupt_and_expect_success();

    let packets = packets(&fs::read(&path).expect("the capture"));
    let count = |interface, is_received, kind| {
        packets.iter().filter(|packet| **packet == Packet { interface, is_received, kind }).count()
    };
    for shard in 0..SHARDS {
        let (data, results) = (count(shard, true, DATA), count(shard, false, RESULT));
        assert!(data >= ITERATIONS * RANKS as usize, "{data} contributions to shard {shard}: {packets:?}");
        // A result for both ranks may be sent once, to their shared address.
        assert!(results >= ITERATIONS, "{results} results of shard {shard}");
        assert_eq!((count(shard, false, DATA), count(shard, true, RESULT)), (0, 0), "directions are as they were");
    }
    let mode = fs::metadata(&path).expect("the capture").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "it contains keys");
}

#[test]
fn capture_that_cannot_be_created_is_refused_by_name() {
    let output = sumac(&["device", "--name=leaf0", "--pcap=/nowhere/leaf0.pcapng"]);
    assert_eq!(exit_status(&output), 2);
    assert!(stderr(&output).contains("/nowhere/leaf0.pcapng"), "{}", stderr(&output));
}
