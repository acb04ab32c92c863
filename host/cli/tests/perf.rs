//! What `sumac perf` prints: the table, JSON, CSV, and the lines beside them. Each is parsed from a run of a small
//! cluster.

mod common;

use common::{exit_status, serve, stderr, stdout, sumac};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Output;

fn perf(args: &str) -> Output {
    perf_with(args, &[])
}

/// Like [`perf`], with additional arguments that may contain spaces.
fn perf_with(args: &str, more: &[&str]) -> Output {
    let output =
        sumac(&["perf"].into_iter().chain(args.split_whitespace()).chain(more.iter().copied()).collect::<Vec<_>>());
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    output
}

fn json_rows(output: &Output) -> Vec<Value> {
    stdout(output).lines().map(|line| serde_json::from_str(line).expect("a JSON object a line")).collect()
}

/// A row of the table: the cells before the figures by their heading, then the figures of each group.
struct TableRow {
    cells: BTreeMap<String, String>,
    /// time, algbw, busbw and #wrong; `None` where the table shows dashes.
    out_of_place: Option<[f64; 4]>,
    in_place: Option<[f64; 4]>,
    /// min, avg and max.
    over_ranks: [f64; 3],
}

/// Parse the rows below the line of headings.
fn table(text: &str) -> Vec<TableRow> {
    let head = text.lines().find(|line| line.contains("busbw")).expect("headings");
    let headings: Vec<&str> = head.trim_start_matches('#').split_whitespace().collect();
    let figures = ["time", "algbw", "busbw", "#wrong"];
    let before = headings.len() - 2 * figures.len() - 3;
    let expected = [&figures[..], &figures[..], &["min", "avg", "max"]].concat();
    assert_eq!(headings[before..], expected, "{head}");
    let row = |line: &str| {
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!((cells.len(), line.len()), (headings.len(), head.len()), "{line}");
        let numbers = |from: usize| {
            let cells = &cells[from..from + 4];
            (cells != ["-"; 4]).then(|| [0, 1, 2, 3].map(|nth| cells[nth].parse::<f64>().expect("a number")))
        };
        let last = cells.len() - 3;
        TableRow {
            cells: headings[..before].iter().zip(&cells).map(|(name, cell)| ((*name).into(), (*cell).into())).collect(),
            out_of_place: numbers(before),
            in_place: numbers(before + 4),
            over_ranks: [0, 1, 2].map(|nth| cells[last + nth].parse().expect("a number")),
        }
    };
    text.lines().filter(|line| line.starts_with(' ')).map(row).collect()
}

#[test]
fn table_tells_collectives_roots_and_placements_apart() {
    let args = "-b 1K -e 64K -f 64 -n 3 -w 1 --ranks 3 -r 2 --algo tree \
                --collective all_reduce,all_gather,broadcast,barrier";
    let output = perf(args);
    let text = stdout(&output);
    let rows = table(&text);
    let cells = |row: &TableRow| {
        ["collective", "size", "count", "type", "redop", "root", "algo", "path"].map(|name| row.cells[name].clone())
    };
    let expected = [
        "all_reduce 1024 256 f32 sum -1 tree tree",
        "all_reduce 65536 16384 f32 sum -1 tree tree",
        "all_gather 1024 256 f32 none -1 tree tree",
        "all_gather 65536 16384 f32 none -1 tree tree",
        "broadcast 1024 256 f32 none 2 tree tree",
        "broadcast 65536 16384 f32 none 2 tree tree",
        "barrier 0 0 none none -1 tree tree",
    ];
    assert_eq!(rows.iter().map(|row| cells(row).join(" ")).collect::<Vec<_>>(), expected, "{text}");
    let mut bus_bandwidths = Vec::new();
    for row in &rows {
        let is_barrier = row.cells["collective"] == "barrier";
        assert_eq!(row.out_of_place.is_none(), is_barrier, "{text}");
        for [time, algbw, busbw, wrong] in [row.out_of_place, row.in_place].into_iter().flatten() {
            assert!(time > 0.0 && wrong == 0.0, "{text}");
            let size: f64 = row.cells["size"].parse().expect("a number");
            // Both are printed with about three digits.
            assert!((size / time / 1e3 - algbw).abs() <= 0.05 * algbw + 1e-4, "{algbw} in {text}");
            if !is_barrier {
                bus_bandwidths.push(busbw);
            }
        }
        let [min, avg, max] = row.over_ranks;
        let time = row.in_place.expect("measured")[0];
        assert!(0.0 < min && min <= avg && avg <= max && max <= time * 1.002, "{text}");
    }
    let average = text.lines().last().and_then(|line| line.strip_prefix("# Avg bus bandwidth    : ")).expect("a line");
    let expected = bus_bandwidths.iter().sum::<f64>() / bus_bandwidths.len() as f64;
    let found: f64 = average.parse().expect("a number");
    assert!((found - expected).abs() <= 0.02 * expected + 1e-3, "{found} is not {expected}: {text}");
    assert!(text.contains("\n# 7 rows, 0 wrong elements: OK\n"), "{text}");
}

#[test]
fn buffers_option_selects_the_placement() {
    let rows = |buffers: &str| {
        table(&stdout(&perf(&format!("-e 8 -n 2 -w 0 --ranks 2 --levels 1 --algo tree --buffers {buffers}"))))
    };
    let [row] = &rows("in-place")[..] else { panic!("one row") };
    assert!(row.out_of_place.is_none() && row.in_place.is_some());
    let [row] = &rows("out-of-place")[..] else { panic!("one row") };
    assert!(row.out_of_place.is_some() && row.in_place.is_none());
}

/// Every collective and both placements are checked, back to back, too; all-to-all is out of place only.
#[test]
fn json_has_the_figures_of_both_placements() {
    let args = "--json -b 96 -e 96 -n 2 -w 1 --ranks 3 -r 1 --algo auto --check ends --memory plain \
                --collective all-reduce,reduce,broadcast,reduce-scatter,all-gather,gather,scatter,all-to-all,barrier";
    let rows = json_rows(&perf(args));
    assert_eq!(rows.len(), 9);
    for row in &rows {
        let (is_barrier, is_all_to_all) = (row["collective"] == "barrier", row["collective"] == "all_to_all");
        assert_eq!(row["in_place"].as_bool(), if is_barrier { None } else { Some(!is_all_to_all) }, "{row}");
        assert_eq!(row["out_of_place_time_us"].is_null(), is_barrier, "{row}");
        assert_eq!(row["out_of_place_wrong"].as_u64(), (!is_barrier).then_some(0), "{row}");
        assert!(row["time_us"] == row["out_of_place_time_us"] || !is_all_to_all, "{row}");
        let is_rooted = ["reduce", "broadcast", "gather", "scatter"].iter().any(|name| row["collective"] == *name);
        assert_eq!(row["root"].as_u64(), is_rooted.then_some(1), "{row}");
        assert_eq!((row["check"].as_str(), row["memory"].as_str()), (Some("ends"), Some("plain")), "{row}");
    }
}

#[test]
fn json_repeats_the_row() {
    let args = "--json -b 4K -e 4K -n 3 -w 2 --ranks 2 --levels 1 --order pairwise --algo tree --transport udp \
                --wait-policy yield";
    let output = perf_with(args, &["--chaos", "--delay 1us..2us"]);
    let [row] = &json_rows(&output)[..] else { panic!("one row: {}", stdout(&output)) };
    let expected = serde_json::json!({
        "iterations": 3, "warmup_iterations": 2, "check": "every", "buffers": "both", "memory": "registered",
        "order": "pairwise", "requested_transport": "udp", "wait_policy": "yield", "levels": 1, "devices": 1,
        "emulated_devices": 1, "shards": 1, "bind": true, "version": env!("CARGO_PKG_VERSION"),
        "command": format!("sumac perf {args} --chaos '--delay 1us..2us'").split_whitespace().collect::<Vec<_>>().join(" "),
    });
    for (key, value) in expected.as_object().expect("an object") {
        assert_eq!(&row[key], value, "{key} in {row}");
    }
    assert_eq!((row["path"].as_str(), row["transport"].as_str()), (Some("tree"), Some("udp")), "{row}");
    assert_eq!(row["cores"].as_u64(), std::thread::available_parallelism().ok().map(|cores| cores.get() as u64));
}

/// The columns, which `--help` and the guide name in this order.
#[test]
fn csv_has_the_documented_columns_of_json_and_as_many_cells() {
    let args = "-e 64 -n 2 -w 0 --ranks 2 --levels 1 --algo tree,ring";
    let text = stdout(&perf(&format!("{args} --csv")));
    let mut lines = text.lines();
    let head: Vec<&str> = lines.next().expect("a header").split(',').collect();
    let rows: Vec<Vec<&str>> = lines.map(|line| line.split(',').take(head.len()).collect()).collect();
    assert_eq!(rows.len(), 4, "{text}");
    for row in &rows {
        assert_eq!(row.len(), head.len(), "{text}");
        let cell = |name: &str| row[head.iter().position(|column| *column == name).expect("a column")];
        assert_eq!(
            (cell("collective"), cell("wrong"), cell("root"), cell("in_place")),
            ("all_reduce", "0", "", "true")
        );
        assert_eq!(cell("algo"), cell("path"), "{text}");
        assert!(cell("time_us").parse::<f64>().expect("a number") > 0.0, "{text}");
    }
    let json = &json_rows(&perf(&format!("{args} --json")))[0];
    let mut keys: Vec<&str> = json.as_object().expect("an object").keys().map(String::as_str).collect();
    let mut columns = head.clone();
    keys.sort_unstable();
    columns.sort_unstable();
    assert_eq!(columns, keys);
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/tuning.md");
    let guide = std::fs::read_to_string(guide).expect("the guide");
    for (name, text) in [("--help", stdout(&sumac(&["perf", "--help"]))), ("tuning.md", guide)] {
        let words = text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty());
        let words: Vec<&str> = words.collect();
        let mut from = words.windows(2).position(|pair| pair == &head[..2]).expect("the first columns");
        for column in &head {
            let next = words[from..].iter().position(|word| word == column);
            from += next.unwrap_or_else(|| panic!("{name} does not name {column} in order"));
        }
    }
}

#[test]
fn spellings_of_nccl_tests_do_the_same() {
    let shapes = |args: &str| {
        let rows = json_rows(&perf(&format!("--json --ranks 2 --levels 1 {args}")));
        assert!(rows.iter().all(|row| row["wrong"] == 0), "{rows:?}");
        let shape = |row: &Value| ["collective", "dtype", "op", "size_bytes", "root"].map(|key| row[key].to_string());
        rows.iter().map(shape).collect::<Vec<_>>()
    };
    let theirs = "--minbytes 16 --maxbytes 48 --stepbytes 16 --datatype float,half --op mulsum --check 1 --iters 1 \
                  --warmup_iters 0";
    let ours = "-b 16 -e 48 -i 16 -d f32,f16 -o premul_sum -c ends -n 1 --warmup-iters 0";
    assert_eq!(shapes(&format!("{theirs} --algo tree")), shapes(&format!("{ours} --algo tree")));
    assert_eq!(shapes(&format!("{ours} --algo tree")).len(), 3 * 2);
    let roots = shapes("-b 8 -e 8 -n 1 --collective reduce --algo tree -r all");
    assert_eq!(roots.iter().map(|row| row[4].clone()).collect::<Vec<_>>(), ["0", "1"]);
    let names = shapes("-b 8 -e 8 -n 1 --collective alltoall,all-gather --algo auto");
    assert_eq!([names[0][0].as_str(), names[1][0].as_str()], ["\"all_to_all\"", "\"all_gather\""]);
}

#[test]
fn all_types_and_operators_run_through_the_tree() {
    let rows = json_rows(&perf("--json -d all -o all -b 64 -e 64 -n 1 -w 0 --ranks 2 --levels 1 --algo tree"));
    let count =
        |key: &str| rows.iter().map(|row| row[key].to_string()).collect::<std::collections::BTreeSet<_>>().len();
    assert_eq!((count("dtype"), count("op")), (14, 14), "{} rows", rows.len());
    assert!(rows.iter().all(|row| row["wrong"] == 0 && row["path"] == "tree"), "{rows:?}");
}

#[test]
fn option_that_perf_cannot_serve_is_refused_with_alternatives() {
    for (args, possible) in [
        ("--algo nccl", "GPU memory only, and the buffers of this command are in host memory; use auto"),
        ("--algo bruck", "all_reduce has auto, tree, ring"),
        ("--collective all_to_all_v", "possible values: all_reduce"),
        ("-c 0", "possible values: every, ends"),
        ("-o all --collective all_gather", "all_gather has no operator"),
        ("-r all", "all_reduce has no root"),
        ("--json --csv", "cannot be used with"),
        ("--explain -n 5", "cannot be used with"),
        ("--overrides none.toml", "--algo auto"),
    ] {
        let output = sumac(&["perf"].into_iter().chain(args.split(' ')).collect::<Vec<_>>());
        assert_eq!((exit_status(&output), stdout(&output)), (2, String::new()), "{args}");
        assert!(stderr(&output).contains(possible), "{args}: {}", stderr(&output));
    }
}

#[test]
fn quiet_prints_rows_only() {
    // Rings do not evaluate a fold, which is remarked upon otherwise.
    let args = "-e 8 -n 2 -w 0 --order fold --levels 1 --algo tree,ring";
    let loud = perf(args);
    assert!(stderr(&loud).contains("ring skipped"), "{}", stderr(&loud));
    let table_of = |output: &Output| stdout(output).lines().map(str::to_owned).collect::<Vec<_>>();
    let quiet = perf(&format!("{args} --quiet"));
    let lines = table_of(&quiet);
    assert!(stderr(&quiet).is_empty(), "{}", stderr(&quiet));
    assert!(lines.len() == 4 && lines[..3].iter().all(|line| line.starts_with('#')), "{lines:?}");
    let head = table_of(&loud).into_iter().filter(|line| line.contains("busbw")).collect::<Vec<_>>();
    assert_eq!(lines[1..2], head);
    for format in ["--json", "--csv"] {
        let quiet = perf(&format!("{args} --quiet {format}"));
        assert!(stderr(&quiet).is_empty(), "{}", stderr(&quiet));
        assert_eq!(stdout(&quiet).lines().count(), if format == "--csv" { 2 } else { 1 }, "{}", stdout(&quiet));
    }
    let none = sumac(&["perf", "-e", "8", "-n", "1", "--order", "fold", "--levels", "1", "--algo", "ring", "--quiet"]);
    assert_eq!(exit_status(&none), 1);
    assert!(stderr(&none).starts_with("error: none of the requested algorithms is possible"), "{}", stderr(&none));
}

/// Every packet takes 0.6 s and an operation two of them, so that the row takes more than 3 s on any machine.
#[test]
fn long_row_prints_a_heartbeat_where_stdout_is_no_terminal() {
    let args = "-e 8 -n 3 -w 0 --ranks 2 --levels 1 --algo tree --transport udp --buffers in-place --json";
    let chaos = ["--chaos", "--delay 600ms..601ms"];
    let output = perf_with(args, &chaos);
    let text = stderr(&output);
    let beats = text.lines().filter_map(|line| line.strip_suffix(" s in all_reduce tree 8 B, row 1 of 1"));
    let seconds: Vec<u64> = beats.map(|line| line.trim_start_matches("# ").parse().expect("seconds")).collect();
    assert!(seconds.first().is_some_and(|&first| first >= 3), "{text}");
    assert_eq!(json_rows(&output).len(), 1);
    let quiet = perf_with(&format!("{args} --quiet"), &chaos);
    assert!(!stderr(&quiet).contains(" s in "), "{}", stderr(&quiet));
}

#[test]
fn named_controller_can_be_asked_while_perf_runs() {
    // The second row takes far longer than the test. What is left is killed with the server.
    let mut running = serve(&["perf", "-b", "8", "-e", "64M", "-f", "8388608", "-n", "1000", "--algo", "tree"]);
    let line = loop {
        let line = running.line();
        assert!(!line.is_empty(), "the table names the controller before its header");
        if line.starts_with("# controller ") {
            break line;
        }
    };
    let address = line.split_whitespace().nth(2).expect("an address");
    let (_, watch) = line.split_once("watch with: sumac status --watch ").expect("a command");
    assert!(watch.starts_with(&format!("--controller {address} --key-file /proc/")), "{line}");
    let status = sumac(&[&["status", "--json"], &watch.split_whitespace().collect::<Vec<_>>()[..]].concat());
    assert_eq!(exit_status(&status), 0, "{}", stderr(&status));
    let status: Value = serde_json::from_str(&stdout(&status)).expect("JSON");
    assert_eq!(status["jobs"][0]["name"], "perf", "{status}");
    running.kill();
    let output = perf("-e 8 -n 1 -w 0 --ranks 2 --algo tree --json");
    let named = stderr(&output).lines().filter(|line| line.starts_with("# controller 127.0.0.1:")).count();
    assert_eq!(named, 1, "stderr names it where stdout is for programs: {}", stderr(&output));
}
