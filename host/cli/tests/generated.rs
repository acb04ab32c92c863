//! What the command says about itself: completions, manual pages, `--quiet`, and `doctor`.

mod common;

use common::{Dir, exit_status, stderr, stdout, sumac};
use serde_json::Value;
use std::process::{Command, Stdio};

const SHELLS: [&str; 5] = ["bash", "elvish", "fish", "powershell", "zsh"];

/// Return the subcommands that the help lists, with those of `image` and `card`.
fn subcommands() -> Vec<String> {
    let of = |args: &[&str]| -> Vec<String> {
        let help = stdout(&sumac(&[args, &["--help"]].concat()));
        let (_, list) = help.split_once("Commands:\n").expect("a list");
        let names = list.lines().take_while(|line| !line.is_empty());
        // The texts of long names are on further lines, which are indented more.
        let names = names.filter_map(|line| line.strip_prefix("  ")).filter(|line| !line.starts_with(' '));
        let names = names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help");
        names.map(|name| [args, &[name]].concat().join("-")).collect()
    };
    let all = [of(&[]), of(&["image"]), of(&["card"]), of(&["topology"]), of(&["topology", "generate"])].concat();
    for known in ["perf", "status", "completions", "image-run", "card-list"] {
        assert!(all.iter().any(|name| name == known), "{all:?}");
    }
    all
}

#[test]
fn completions_of_every_shell_name_every_subcommand() {
    for shell in SHELLS {
        let output = sumac(&["completions", shell]);
        assert_eq!((exit_status(&output), stderr(&output)), (0, String::new()), "{shell}");
        let script = stdout(&output);
        for name in subcommands() {
            let nested = ["image-", "card-", "topology-generate-", "topology-"]
                .iter()
                .find_map(|prefix| name.strip_prefix(prefix));
            assert!(script.contains(nested.unwrap_or(&name)), "{shell} does not complete {name}");
        }
        for hidden in ["rshim-worker", "rshim__worker"] {
            assert!(!script.contains(hidden), "{shell} completes {hidden}");
        }
    }
    let unknown = sumac(&["completions", "tcl"]);
    assert_eq!(exit_status(&unknown), 2, "{}", stderr(&unknown));
    assert!(SHELLS.iter().all(|shell| stderr(&unknown).contains(shell)), "{}", stderr(&unknown));
}

/// The shell itself accepts the script. Every system that runs these tests has a bash.
#[test]
fn bash_completes_subcommands() {
    let script = stdout(&sumac(&["completions", "bash"]));
    let ask =
        format!("{script}\nCOMP_WORDS=(sumac stat) COMP_CWORD=1; _sumac sumac stat sumac; echo \"${{COMPREPLY[@]}}\"");
    // In a file: the script is longer than an argument may be.
    let dir = Dir::new("bash");
    let file = dir.write("ask", ask.as_bytes());
    let output = Command::new("bash").arg(&file).stdin(Stdio::null()).output().expect("bash");
    assert_eq!(stdout(&output).trim(), "status", "{}", stderr(&output));
}

#[test]
fn every_subcommand_has_a_manual_page() {
    let dir = Dir::new("man");
    let folder = dir.path("man/man1");
    let output = sumac(&["man", &folder]);
    assert_eq!((exit_status(&output), stderr(&output)), (0, String::new()));
    let read = |name: &str| {
        std::fs::read_to_string(format!("{folder}/{name}.1")).unwrap_or_else(|why| panic!("{name}: {why}"))
    };
    let main = read("sumac");
    for part in ["EXIT STATUS", "SUMAC_CONTROLLER", "quiet"] {
        assert!(main.contains(part), "{part}");
    }
    for name in subcommands() {
        let page = read(&format!("sumac-{name}"));
        assert!(page.contains(".TH") && page.contains(".SH SYNOPSIS"), "{page}");
    }
    assert!(!std::path::Path::new(&format!("{folder}/sumac-rank.1")).exists());
    // A folder that cannot be created.
    let file = dir.write("file", b"");
    let output = sumac(&["man", &format!("{file}/man1")]);
    assert_eq!(exit_status(&output), 1, "{}", stderr(&output));
    assert!(stderr(&output).contains(&file), "{}", stderr(&output));
}

#[test]
fn quiet_leaves_out_notes_and_warnings_but_neither_results_nor_errors() {
    let perf = ["perf", "--json", "-e", "8", "-n", "1", "--order", "fold", "--levels", "1"];
    let (loud, quiet) = (sumac(&perf), sumac(&[&perf[..], &["--quiet"]].concat()));
    assert!(stderr(&loud).contains("ring skipped: "), "{}", stderr(&loud));
    assert_eq!((exit_status(&quiet), stderr(&quiet)), (0, String::new()));
    assert_eq!(stdout(&quiet).lines().count(), stdout(&loud).lines().count());
    let deprecated = |options: &[&str]| sumac(&[options, &["devices", "--root", "/nonexistent"]].concat());
    let (loud, quiet) = (deprecated(&[]), deprecated(&["-q"]));
    assert!(stderr(&loud).starts_with("warning: "), "{}", stderr(&loud));
    assert!(!stderr(&quiet).contains("warning: "), "{}", stderr(&quiet));
    assert_eq!(exit_status(&quiet), exit_status(&loud));
    let failed = sumac(&["-q", "status", "--controller", "127.0.0.1:9"]);
    assert_eq!(exit_status(&failed), 1);
    assert!(stderr(&failed).starts_with("error: no controller at 127.0.0.1:9"), "{}", stderr(&failed));
    let both = sumac(&["-q", "-v", "doctor"]);
    assert_eq!(exit_status(&both), 2, "{}", stderr(&both));
}

#[test]
fn doctor_json_has_all_findings_and_counts_them() {
    let (table, json) = (sumac(&["doctor"]), sumac(&["doctor", "--json"]));
    let report: Value = serde_json::from_str(&stdout(&json)).expect("JSON");
    let findings = report["findings"].as_array().expect("findings");
    for finding in findings {
        let what = finding["what"].as_str().expect("a name");
        assert!(
            stdout(&table).contains(what) && finding["found"].is_string() && finding["advice"].is_string(),
            "{finding}"
        );
    }
    let summary = report["summary"].as_object().expect("counts");
    for (health, count) in summary {
        let found = findings.iter().filter(|finding| finding["health"] == health.as_str()).count();
        assert_eq!(count.as_u64(), Some(found as u64), "{health}");
    }
    assert_eq!(summary.values().filter_map(Value::as_u64).sum::<u64>(), findings.len() as u64);
    let profiles: Vec<_> = report["dma_profiles"].as_array().expect("profiles").iter().map(|p| &p["name"]).collect();
    assert_eq!(profiles, ["copy-only", "inline-reduce", "full"]);
    let is_broken = report["summary"]["broken"] != 0;
    assert_eq!((exit_status(&json), exit_status(&table)), (i32::from(is_broken), i32::from(is_broken)));
    let text = stdout(&table);
    assert!(text.lines().last().is_some_and(|line| line.contains(" not built in, ")), "{text}");
}

#[test]
#[cfg(not(feature = "verbs"))]
fn doctor_tells_what_is_not_built_in_from_what_is_missing() {
    let report: Value = serde_json::from_str(&stdout(&sumac(&["doctor", "--json"]))).expect("JSON");
    let findings = report["findings"].as_array().expect("findings");
    let verbs = findings.iter().find(|finding| finding["what"] == "RDMA (verbs)").expect("it is checked");
    assert_eq!(verbs["health"], "not_built", "{verbs}");
    let text = stdout(&sumac(&["doctor"]));
    assert!(text.lines().any(|line| line.starts_with("not built RDMA (verbs)")), "{text}");
}
