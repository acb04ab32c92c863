//! `--topology -` reads the fabric from stdin, in each format and each subcommand that has the option.

mod common;

use common::{Dir, exit_status, npy_f32, read_npy_f32, serve_with, stderr, stdout, sumac};
use std::io::Write;
use std::process::{Command, Output, Stdio};

const DUMP: &str = include_str!("../../tests/fixtures/two-leaves.ibnetdiscover");
const TOML: &str = include_str!("../../tests/fixtures/two-leaves.toml");

fn sumac_reading(text: &str, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().expect("started");
    process.stdin.take().expect("piped").write_all(text.as_bytes()).expect("read by the command");
    process.wait_with_output().expect("ended")
}

#[test]
fn plan_on_stdin_equals_that_on_the_file() {
    for (text, name) in [(DUMP, "two-leaves.ibnetdiscover"), (TOML, "two-leaves.toml")] {
        let file = format!("{}/../tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
        let from_file = sumac(&["plan", "--hosts", "2", "--topology", &file]);
        let from_stdin = sumac_reading(text, &["plan", "--hosts", "2", "--topology", "-"]);
        assert_eq!((exit_status(&from_stdin), exit_status(&from_file)), (0, 0), "{}", stderr(&from_stdin));
        assert_eq!(stdout(&from_stdin), stdout(&from_file), "{name}");
    }
}

#[test]
fn clusters_start_on_a_fabric_from_stdin() {
    for text in [DUMP, TOML] {
        let perf = ["perf", "--json", "--topology", "-", "--ranks", "2", "-e", "8", "-n", "1", "--algo", "tree"];
        let output = sumac_reading(text, &perf);
        assert_eq!((exit_status(&output), stdout(&output).lines().count()), (0, 1), "{}", stderr(&output));
    }
    let selftest = ["selftest", "--topology", "-", "--ranks", "2", "-n", "1", "-e", "1K"];
    let output = sumac_reading(DUMP, &selftest);
    assert_eq!(exit_status(&output), 0, "{}{}", stdout(&output), stderr(&output));
    let dir = Dir::new("stdin");
    let inputs = ["a", "b"].map(|name| dir.write(&format!("{name}.npy"), &npy_f32(&[1.0, 2.0], "(2,)")));
    let out = dir.path("out.npy");
    let reduce = ["all-reduce", "--topology", "-", "--input", &inputs[0], "--input", &inputs[1], "--output", &out];
    let output = sumac_reading(TOML, &reduce);
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    assert_eq!(read_npy_f32(&out), [2.0, 4.0]);
}

#[test]
fn controller_reads_both_formats_from_stdin() {
    for text in [DUMP, TOML] {
        let mut controller = serve_with(&["controller", "--listen", "127.0.0.1:0", "--topology", "-"], text);
        let line = controller.line();
        let addr = line.strip_prefix("listening ").expect("an address");
        let status = stdout(&sumac(&["status", "--controller", addr]));
        assert!(status.starts_with("fabric   ") && !status.starts_with("fabric   none"), "{status}");
        controller.interrupt_and_expect_success();
    }
}

#[test]
fn error_in_a_fabric_from_stdin_names_stdin() {
    for text in ["[[switch]]\nname = leaf0\n", "nonsense\n", ""] {
        let output = sumac_reading(text, &["plan", "--hosts", "2", "--topology", "-"]);
        assert_eq!(exit_status(&output), 2, "{text:?}: {}", stderr(&output));
        assert!(stderr(&output).contains("stdin"), "{text:?}: {}", stderr(&output));
    }
}
