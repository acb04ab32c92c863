//! The command line as users see it: exit statuses, messages, output.
//!
//! Tests run clusters of processes on loopback and do not depend on their speed.

mod common;

use common::{Dir, exit_status, npy_f32, read_npy_f32, stderr, stdout, sumac};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Output, Stdio};

/// Keys that other programs read, and that stay.
const PERF_KEYS: [&str; 21] = [
    "collective",
    "dtype",
    "op",
    "ranks",
    "size_bytes",
    "count",
    "algo",
    "path",
    "transport",
    "time_us",
    "p99_us",
    "algbw_gbytes_s",
    "busbw_gbytes_s",
    "wrong",
    "wire_bytes",
    "cpu_us",
    "retransmits",
    "repaired",
    "repair_bytes",
    "slowest_rank",
    "late_us",
];

fn rows(args: &[&str]) -> Vec<Value> {
    let output = sumac(args);
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    stdout(&output).lines().map(|line| serde_json::from_str(line).expect("a JSON object a line")).collect()
}

#[test]
fn perf_runs_every_path_and_counts_no_wrong_element() {
    let rows = rows(&["perf", "--json", "-b", "8", "-e", "32K", "-f", "64", "-n", "3", "-w", "1"]);
    assert_eq!(rows.len(), 3 * 3);
    for (row, algo) in rows.iter().zip(["tree", "ring", "hd"].iter().cycle()) {
        let keys: Vec<_> = row.as_object().expect("an object").keys().map(String::as_str).collect();
        // tests/perf.rs checks what has been added to these.
        assert!(PERF_KEYS.iter().all(|key| keys.contains(key)), "{keys:?}");
        assert_eq!((row["algo"].as_str(), row["path"].as_str()), (Some(*algo), Some(*algo)), "{row}");
        assert_eq!((row["wrong"].as_u64(), row["ranks"].as_u64()), (Some(0), Some(4)), "{row}");
        // Each rank sends its data at least once, unless the device's engine fetches it.
        let fetched = row["transport"] == "shm";
        assert!(fetched || row["wire_bytes"].as_u64() >= row["size_bytes"].as_u64(), "{row}");
        let (time, algbw) = (row["time_us"].as_f64(), row["algbw_gbytes_s"].as_f64());
        let (time, algbw) = (time.expect("a number"), algbw.expect("a number"));
        let size = row["size_bytes"].as_f64().expect("a number");
        assert!((size / time / 1e3 / algbw - 1.0).abs() < 1e-2, "{row}");
        assert!((row["busbw_gbytes_s"].as_f64().expect("a number") / algbw - 1.5).abs() < 1e-9, "{row}");
    }
}

#[test]
fn perf_takes_types_operators_levels_and_barriers() {
    let args = "perf --json -b 6 -e 6 -n 2 -w 0 --ranks 3 --levels 1 -d f16,i64 -o max --algo tree,auto \
                --collective all_reduce,barrier --order fold --shards 2";
    let rows = rows(&args.split_whitespace().collect::<Vec<_>>());
    let seen: Vec<_> =
        rows.iter().map(|row| (row["dtype"].as_str(), row["count"].as_u64(), row["wrong"].as_u64())).collect();
    let (halves, longs, barrier) =
        ((Some("f16"), Some(3), Some(0)), (Some("i64"), Some(0), Some(0)), (None, Some(0), Some(0)));
    assert_eq!(seen, [halves, halves, longs, longs, barrier, barrier]);
}

#[test]
fn impossible_algorithm_is_skipped_with_its_reason() {
    let args = ["perf", "--json", "-e", "8", "-n", "1", "--order", "fold", "--levels", "1"];
    let output = sumac(&args);
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    assert_eq!(stdout(&output).lines().count(), 1, "{}", stdout(&output));
    for skipped in ["ring skipped: ", "hd skipped: "] {
        assert!(stderr(&output).contains(skipped), "{}", stderr(&output));
    }
    let output = sumac(&[&args[..], &["--algo", "hd"]].concat());
    assert_eq!(exit_status(&output), 1, "{}", stderr(&output));
}

/// Every collective by `auto` and `tree`, then narrow types and operators with locations.
#[test]
fn perf_checks_every_collective() {
    let collectives = "all_reduce,reduce,broadcast,reduce_scatter,all_gather,gather,scatter,all_to_all,barrier";
    let args =
        format!("perf --json -b 96 -e 960 -f 10 -n 2 -w 1 --ranks 3 -r 2 --algo auto,tree --collective {collectives}");
    let found = rows(&args.split_whitespace().collect::<Vec<_>>());
    let of =
        |name: &str, algo: &str| found.iter().filter(|row| row["collective"] == name && row["algo"] == algo).count();
    for collective in collectives.split(',').filter(|&name| name != "barrier") {
        assert_eq!(of(collective, "auto"), 2, "{collective}");
        let offloaded = !["gather", "scatter", "all_to_all"].contains(&collective);
        assert_eq!(of(collective, "tree"), if offloaded { 2 } else { 0 }, "{collective}");
    }
    assert!(found.iter().all(|row| row["wrong"] == 0), "{found:?}");
    let args = "perf --json -b 96 -e 96 -n 2 -w 1 --ranks 3 --algo tree,ring -d u8,f8e4m3 -o avg,prod,premul_sum";
    assert_eq!(rows(&args.split_whitespace().collect::<Vec<_>>()).len(), 2 * 3 * 2);
    let args = "perf --json -b 96 -e 96 -n 2 -w 1 --ranks 3 --algo tree,hd -d i32,f64 -o minloc,maxloc";
    assert_eq!(rows(&args.split_whitespace().collect::<Vec<_>>()).len(), 2 * 2 * 2);
}

#[test]
fn row_names_the_transport_of_its_ranks() {
    let found = rows(&[
        "perf",
        "--json",
        "-e",
        "8",
        "-n",
        "1",
        "--algo",
        "tree,ring",
        "--transport",
        "udp",
        "--memory",
        "plain",
    ]);
    let transport: Vec<_> = found.iter().map(|row| row["transport"].as_str()).collect();
    assert_eq!(transport, [Some("udp"), Some("host")], "{found:?}");
    let output = sumac(&["perf", "-e", "8", "-n", "1", "--algo", "tree", "--transport", "udp"]);
    assert!(stdout(&output).contains("# transport udp, packets"), "{}", stdout(&output));
}

/// Shared memory needs a device with one shard.
#[test]
fn unavailable_explicit_transport_fails_the_run_with_the_reason() {
    let dir = Dir::new("insists");
    let input = dir.write("in.npy", &npy_f32(&[1.0; 6], "(6,)"));
    let out = dir.path("out.npy");
    let perf = sumac(&["perf", "-e", "8", "--shards", "2", "--transport", "shm"]);
    assert_eq!(exit_status(&perf), 1, "{}", stderr(&perf));
    for part in ["--transport shm", "rank 0 requires shared memory", "leaf0", "the device has 2 shards"] {
        assert!(stderr(&perf).contains(part), "{}", stderr(&perf));
    }
    assert!(stdout(&perf).is_empty(), "{}", stdout(&perf));
    let explained =
        rows(&["perf", "--json", "--explain", "-e", "8", "--shards", "2", "--transport", "shm", "--algo", "auto"]);
    let why = explained[0]["candidates"][0]["ruled_out"].as_str().expect("no tree");
    assert!(why.contains("the device has 2 shards") && explained[0]["transport"].is_null(), "{why}");
    let files = sumac(&["all-reduce", "--input", &input, "--output", &out, "--transport", "rope"]);
    assert_eq!(exit_status(&files), 2, "{}", stderr(&files));
    assert_eq!(dir.names(), ["in.npy"]);
}

#[test]
#[cfg(not(feature = "verbs"))]
fn verbs_transports_are_refused_before_anything_starts_if_not_built_in() {
    let selftest = sumac(&["selftest", "--verbs", "auto"]);
    assert_eq!(exit_status(&selftest), 2, "{}", stderr(&selftest));
    for transport in ["verbs", "rdma"] {
        let perf = sumac(&["perf", "-e", "8", "--transport", transport]);
        assert_eq!(exit_status(&perf), 2, "{}", stderr(&perf));
        assert!(stderr(&perf).contains("build with `--features verbs`"), "{}", stderr(&perf));
        let dir = Dir::new(transport);
        let (input, out) = (dir.write("in.npy", &npy_f32(&[1.0; 6], "(6,)")), dir.path("out.npy"));
        let files = sumac(&["all-reduce", "--input", &input, "--output", &out, "--transport", transport]);
        assert_eq!(exit_status(&files), 2, "{}", stderr(&files));
        assert_eq!(dir.names(), ["in.npy"]);
    }
}

#[test]
fn device_without_shared_memory_is_named_to_the_rank_that_requires_it() {
    let mut controller = common::serve(&["controller", "--listen", "127.0.0.1:0"]);
    let line = controller.line();
    let addr = line.strip_prefix("listening ").expect("an address").to_owned();
    let mut device = common::serve(&["device", "--name", "leaf7", "--no-shm", "--controller", &addr]);
    assert_eq!(device.line(), "ready leaf7");
    let report = stdout(&sumac(&["status", "--controller", &addr]));
    assert!(report.contains("leaf7") && report.contains("no zero-copy"), "{report}");
    // Rank 1 uses this transport, rank 0 any.
    let run = |transport: &str| -> Vec<Output> {
        let case =
            json!({ "collective": "AllReduce", "dtype": "F32", "op": "Sum", "root": 0, "count": 8, "algo": "Tree" });
        let work = json!({ "Perf": { "cases": [case], "warmup": 0, "iterations": 1, "memory": "Registered", "check": "Every", "placements": "InPlace" } });
        let start = |rank: u32| {
            let job = json!({
                "controller": addr, "job": format!("one-{transport}"), "rank": rank, "world": 2,
                "host": format!("host-{rank}"), "order": null, "transport": if rank == 1 { transport } else { "Auto" },
                "deadline_ms": 60_000, "work": work,
            });
            spawn_rank(&format!("{job}\n"))
        };
        let ranks = [start(0), start(1)];
        ranks.into_iter().map(|rank| rank.wait_with_output().expect("ended")).collect()
    };
    for output in run("Udp") {
        assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
        assert!(stdout(&output).contains("Packets"), "{}", stdout(&output));
    }
    let outputs = run("Shm");
    assert_eq!(exit_status(&outputs[1]), 1, "{}", stdout(&outputs[1]));
    let error = stderr(&outputs[1]);
    for part in ["rank 1 requires shared memory", "leaf7", "the device does not offer zero-copy", "`udp`"] {
        assert!(error.contains(part), "{error}");
    }
    // The other rank gets the reason, too.
    assert!(stderr(&outputs[0]).contains("the device does not offer zero-copy"), "{}", stderr(&outputs[0]));
    device.interrupt_and_expect_success();
    controller.interrupt_and_expect_success();
}

/// Start a rank and send it a job.
fn spawn_rank(job: &str) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
    command.arg("rank").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut rank = command.spawn().expect("started");
    rank.stdin.take().expect("piped").write_all(job.as_bytes()).expect("read by the rank");
    rank
}

#[test]
fn explain_lists_costs_reasons_and_overrides() {
    let dir = Dir::new("explain");
    let file = dir.path("overrides.toml");
    std::fs::write(&file, "[[override]]\npath = \"hd\"\nmin_bytes = 100\n").expect("a file");
    let args = "perf --explain --json -b 8 -e 800 -f 100 --levels 1 --algo auto --order fold --overrides";
    let found = rows(&args.split_whitespace().chain([file.as_str()]).collect::<Vec<_>>());
    assert_eq!(found.len(), 2);
    assert!(found[0]["overridden"].is_null() && found[1]["overridden"] == "hd", "{found:?}");
    let hd = found[1]["candidates"].as_array().expect("candidates").iter().find(|candidate| candidate["path"] == "hd");
    let why = hd.expect("hd")["ruled_out"].as_str().expect("its sums are paired otherwise");
    assert!(why.contains("TreeFold"), "{why}");
    assert_ne!(found[1]["chosen"], "hd", "what is not possible is not taken");
    std::fs::write(dir.path("overrides.toml"), "[[override]]\npath = \"rings\"\n").expect("a file");
    let output = sumac(&["perf", "--algo", "auto", "--overrides", &file]);
    assert_eq!(exit_status(&output), 2);
    assert!(stderr(&output).contains("rings") && stderr(&output).contains(&file), "{}", stderr(&output));
}

#[test]
fn perf_builds_a_tree_from_an_ibnetdiscover_dump() {
    let fabric = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/two-leaves.ibnetdiscover");
    let output = sumac(&["perf", "--topology", fabric, "--ranks", "2", "-e", "8", "-n", "2", "--algo", "tree"]);
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    assert!(stdout(&output).contains("0 wrong elements: OK"), "{}", stdout(&output));
}

#[test]
fn invalid_usage_exits_with_2_and_names_the_fault() {
    let fabric = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/two-leaves.ibnetdiscover");
    let cases: [(&[&str], &str); 15] = [
        (&["perf", "-b", "1M", "-e", "8"], "-b 1M"),
        (&["perf", "-b", "eight"], "eight"),
        (&["perf", "--algo", "magic"], "magic"),
        (&["perf", "--ranks", "0"], "0"),
        (&["perf", "--transport", "roce"], "auto, udp, shm"),
        (&["perf", "--memory", "stolen"], "registered, plain"),
        (&["device", "--name", "d", "--dma-profile", "fast"], "copy-only, inline-reduce, full"),
        (&["device", "--name", "d", "--no-shm", "--dma-threads", "4"], "--no-shm"),
        (&["perf", "--topology", "/nonexistent"], "/nonexistent"),
        (&["perf", "--topology", fabric, "--ranks", "99"], "99 hosts requested"),
        (&["plan", "--topology", fabric, "--hosts", "nobody"], "nobody"),
        (&["controller", "--listen", "0.0.0.0:0"], "0.0.0.0:0 is not a loopback address"),
        (&["device", "--name", "d", "--data-port", "65535", "--shards", "2"], "data port 65535"),
        (&["device", "--name", "d", "--data-port", "7900", "--advertise", "127.0.0.1:1,127.0.0.1:2"], "2 advertised"),
        (&["device", "--name", "d", "--advertise", "127.0.0.1:1"], "--data-port"),
    ];
    for (args, named) in cases {
        let output = sumac(args);
        assert_eq!(exit_status(&output), 2, "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(named), "{args:?}: {}", stderr(&output));
        assert!(stdout(&output).is_empty(), "{args:?}");
    }
}

#[test]
fn plan_prints_the_documented_keys() {
    let fabric = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/two-leaves.ibnetdiscover");
    let output = sumac(&["plan", "--topology", fabric, "--hosts", "2", "--json"]);
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    let plan: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    let keys = |value: &Value| value.as_object().expect("an object").keys().cloned().collect::<Vec<_>>().join(" ");
    let known = "aligned assumptions further_trees gap gbits levels max_children max_link_sharing nodes optimal paths \
                 ranks rate root routes selected share times tree_gbits unrated_cables";
    assert_eq!(keys(&plan), known);
    assert_eq!(keys(&plan["rate"]), "bound bound_at bound_gbits gbits limited_by");
    assert_eq!(keys(&plan["paths"][0]), "cables child node");
    let ends = plan["paths"][0]["cables"][0]["ends"].as_array().expect("ends").clone();
    let port = |end: &Value| end.as_str().and_then(|end| end.rsplit_once(':')?.1.parse::<u16>().ok());
    assert!(ends.len() == 2 && ends.iter().all(|end| port(end).is_some()), "{ends:?}");
    assert_eq!(keys(&plan["nodes"][0]), "children guid level name parent");
    assert_eq!(keys(&plan["ranks"][0]), "guid host leaf rank");
    assert_eq!((&plan["nodes"][0]["name"], plan["ranks"].as_array().map(Vec::len)), (&plan["root"], Some(2)));
    let dot = stdout(&sumac(&["plan", "--topology", fabric, "--hosts", "2", "--dot"]));
    assert!(dot.starts_with("digraph"), "{dot}");
}

#[test]
fn plan_without_a_switch_lists_what_moves() {
    let fabric = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/fabrics/four-racks.toml");
    let args = ["plan", "--topology", fabric, "--hosts", "all"];
    let plan: Value = serde_json::from_str(&stdout(&sumac(&[&args[..], &["--json"]].concat()))).expect("JSON");
    let root = plan["root"].as_str().expect("a name").to_owned();
    let output = sumac(&[&args[..], &["--without", &root]].concat());
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("children move:") && text.contains(&format!(": {root} -> ")), "{text}");
    let unknown = sumac(&[&args[..], &["--without", "nothing:7"]].concat());
    assert_eq!(exit_status(&unknown), 2);
    assert!(stderr(&unknown).contains("--without nothing:7"), "{}", stderr(&unknown));
}

#[test]
fn all_reduce_writes_the_sum_and_no_other_file() {
    let dir = Dir::new("adds");
    let inputs: Vec<_> =
        (0..3).map(|r| dir.write(&format!("r{r}.npy"), &npy_f32(&[1.5 * r as f32, 2.0, -1.0], "(3,)"))).collect();
    let out = dir.path("out.npy");
    let mut args = vec!["all-reduce", "--op", "sum", "--algo", "tree", "--output", out.as_str()];
    inputs.iter().for_each(|input| args.extend(["--input", input]));
    let output = sumac(&args);
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    assert!(stdout(&output).contains("path tree"), "{}", stdout(&output));
    assert_eq!(read_npy_f32(&out), [4.5, 6.0, -3.0]);
    assert_eq!(dir.names(), ["out.npy", "r0.npy", "r1.npy", "r2.npy"]);
}

#[test]
fn all_reduce_refuses_mismatched_inputs() {
    let dir = Dir::new("refuses");
    let good = dir.write("good.npy", &npy_f32(&[1.0; 6], "(6,)"));
    let shape = dir.write("shape.npy", &npy_f32(&[1.0; 6], "(2, 3)"));
    let short = dir.write("short.npy", &npy_f32(&[1.0; 5], "(6,)"));
    let foreign = dir.write("foreign.npy", b"not an array");
    let out = dir.path("out.npy");
    for (bad, values) in
        [(&shape, ["(2, 3)", "(6,)"]), (&short, ["20 bytes", "24"]), (&foreign, ["not a .npy file", "NUMPY"])]
    {
        let output = sumac(&["all-reduce", "--input", &good, "--input", bad, "--output", &out]);
        let error = stderr(&output);
        assert_eq!(exit_status(&output), 2, "{error}");
        assert!(error.contains(bad.as_str()) && values.iter().all(|value| error.contains(value)), "{error}");
    }
    assert_eq!(dir.names(), ["foreign.npy", "good.npy", "shape.npy", "short.npy"]);
}

#[test]
fn status_shows_registered_devices() {
    let mut controller = common::serve(&["controller", "--listen", "127.0.0.1:0"]);
    let line = controller.line();
    let addr = line.strip_prefix("listening ").expect("an address").to_owned();
    let mut device = common::serve(&["device", "--name", "leaf7", "--controller", &addr]);
    assert_eq!(device.line(), "ready leaf7");
    let output = sumac(&["status", "--controller", &addr, "--json"]);
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    let status: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!(status["devices"][0]["name"], "leaf7");
    assert!(stdout(&sumac(&["status", "--controller", &addr])).contains("leaf7"));
    device.interrupt_and_expect_success();
    controller.interrupt_and_expect_success();
    let output = sumac(&["status", "--controller", &addr]);
    assert_eq!(exit_status(&output), 1);
    assert!(stderr(&output).contains(&addr), "{}", stderr(&output));
}

#[test]
fn doctor_reports_every_capability() {
    let output = sumac(&["doctor"]);
    let text = stdout(&output);
    for what in [
        "cores",
        "vectors",
        "UDP port",
        "TCP port",
        "CUDA memory",
        "GPUDirect RDMA",
        "RDMA (verbs)",
        "shared memory",
        "pidfd",
        "inline-reduce",
        "BlueField",
    ] {
        assert!(text.contains(what), "{text}");
    }
    assert_eq!(exit_status(&output), i32::from(text.contains("BROKEN")), "{text}");
}

#[test]
fn closed_stdout_causes_no_panic() {
    let mut perf = Command::new(env!("CARGO_BIN_EXE_sumac"))
        .args(["perf", "--json", "-e", "8", "-n", "1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    let mut first = String::new();
    // The pipe is closed after the first row.
    BufReader::new(perf.stdout.take().expect("piped")).read_line(&mut first).expect("a row");
    let output = perf.wait_with_output().expect("ended");
    assert!(!stderr(&output).contains("panicked"), "{}", stderr(&output));
}

/// A closed stderr does not change the exit status.
#[test]
fn closed_stderr_causes_no_panic() {
    let mut perf = Command::new(env!("CARGO_BIN_EXE_sumac"))
        .args(["perf", "--algo", "hd", "-e", "8", "--order", "fold", "--levels", "1"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    drop(perf.stderr.take());
    assert_eq!(perf.wait().expect("ended").code(), Some(1), "no algorithm is possible: a failed run, not a panic");
}
