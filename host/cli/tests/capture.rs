//! `--pcap` of `sumac device` and `sumac perf`: the packets of a real job are in the capture, once each way.

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

/// The length of the shorter header, its magic and version, and the offset of the kind: `sumac_hal::wire`.
const HEADER_LEN: usize = 48;
const MAGIC: &[u8] = &[0xc5, 2];
const KIND: usize = 2;
const DATA: u8 = 1;
const RESULT: u8 = 4;

/// Types of blocks.
const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const ENHANCED_PACKET: u32 = 6;

/// A captured packet: its interface's name, whether it was received, and its kind.
#[derive(Debug, PartialEq)]
struct Packet {
    interface: String,
    is_received: bool,
    kind: u8,
}

/// Parse the packets of a capture; whatever is not as pcapng has it panics.
fn packets(capture: &[u8]) -> Vec<Packet> {
    let word = |at: usize| u32::from_le_bytes(capture[at..at + 4].try_into().expect("four bytes"));
    let (mut at, mut packets) = (0, Vec::new());
    let mut interfaces: Vec<String> = Vec::new();
    while at < capture.len() {
        let (kind, len) = (word(at), word(at + 4) as usize);
        assert_eq!(word(at + len - 4) as usize, len, "both lengths of the block at {at}");
        if kind == SECTION_HEADER {
            interfaces.clear();
        } else if kind == INTERFACE_DESCRIPTION {
            // Behind the option if_tsresol, which has 8 bytes: if_name.
            let (code, len) = (word(at + 24) & 0xffff, word(at + 24) >> 16);
            assert_eq!(code, 2);
            let name = capture[at + 28..][..len as usize].to_vec();
            interfaces.push(String::from_utf8(name).expect("a name"));
        } else if kind == ENHANCED_PACKET {
            let data = &capture[at + 28..][..word(at + 20) as usize];
            // Behind IPv4's and UDP's headers.
            let packet = &data[28..];
            assert!(data[0] == 0x45 && packet.len() >= HEADER_LEN && packet.starts_with(MAGIC), "{data:02x?}");
            // The option epb_flags is followed by the end of options and the second length.
            let direction = word(at + len - 12);
            let interface = interfaces[word(at + 8) as usize].clone();
            packets.push(Packet { interface, is_received: direction == 1, kind: packet[KIND] });
        }
        at += len;
    }
    packets
}

fn count(packets: &[Packet], interface: &str, is_received: bool, kind: u8) -> usize {
    let is_it =
        |packet: &&Packet| packet.interface == interface && packet.is_received == is_received && packet.kind == kind;
    packets.iter().filter(is_it).count()
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
    let count = |shard: u32, is_received, kind| count(&packets, &format!("leaf0/shard-{shard}"), is_received, kind);
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

#[test]
fn perf_captures_the_packets_of_all_devices_in_one_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.pcapng");
    let capture = format!("--pcap={}", path.display());
    let size = ["-b", "8K", "-e", "8K", "-n", "3", "-w", "0", "--buffers=in-place", "--algo=tree"];
    // Between ranks and leaf devices, then with the default transport between devices only.
    for (transport, from_ranks) in [("udp", true), ("auto", false)] {
        let output = sumac(&[&["perf", &capture, "--transport", transport], &size[..]].concat());
        assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
        let packets = packets(&fs::read(&path).expect("the capture"));
        let [of_root, of_leaf] = ["leaf0/shard-0", "leaf1/shard-0"].map(|leaf| count(&packets, leaf, true, DATA));
        let sent_up = count(&packets, "leaf1/shard-0", false, DATA);
        assert!(sent_up >= 3, "{sent_up} partial sums of a leaf");
        // The root has two ranks and the leaf below it.
        let (least_of_root, least_of_leaf) = if from_ranks { (3 * 3, 3 * 2) } else { (3, 0) };
        assert!(of_root >= least_of_root && of_leaf >= least_of_leaf, "{transport}: {of_root}, {of_leaf}");
        assert!(from_ranks || of_leaf == 0, "{transport}: {of_leaf} contributions of ranks in packets");
        let left: Vec<_> =
            fs::read_dir(folder.path()).expect("listed").flatten().map(|entry| entry.file_name()).collect();
        assert_eq!(left, ["run.pcapng"], "nothing else remains");
        assert_eq!(fs::metadata(&path).expect("the capture").permissions().mode() & 0o777, 0o600, "it contains keys");
    }
}

#[test]
fn perf_refuses_a_capture_that_would_be_empty_or_cannot_be_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.pcapng");
    let path = path.to_str().expect("text");
    let cases = [
        (&["--pcap", path, "--levels", "1"][..], "use --transport udp"),
        (&["--pcap", "/nowhere/run.pcapng"], "/nowhere/run.pcapng"),
        (&["--pcap", folder.path().to_str().expect("text")], "is a directory"),
        (&["--pcap", path, "--fault", "kill-device"], "cannot be used with"),
        (&["--pcap", path, "--explain"], "cannot be used with"),
    ];
    for (options, reason) in cases {
        let output = sumac(&[&["perf"], options].concat());
        assert_eq!(exit_status(&output), 2, "{options:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(reason), "{options:?}: {}", stderr(&output));
    }
    assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 0);
}
