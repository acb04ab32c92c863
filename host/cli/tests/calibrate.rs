//! `sumac calibrate` on small clusters: the table that it writes is read, used and checked.

mod common;

use common::{exit_status, stderr, stdout, sumac};

const CLUSTER: [&str; 9] =
    ["calibrate", "--ranks=2", "--levels=1", "--transport=udp,shm", "-e", "2K", "-f", "16", "--rounds=2"];

fn run(more: &[&str]) -> std::process::Output {
    let args: Vec<&str> = CLUSTER.iter().chain(more).copied().collect();
    let output = sumac(&args);
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    output
}

#[test]
fn written_table_is_used_and_checked() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("costs.toml");
    let file = path.to_str().expect("a name");
    let residuals = stdout(&run(&["-o", file]));
    assert!(residuals.contains("2 ranks, 2 on a host, 1 levels, shm"), "{residuals}");
    assert!(residuals.contains("calibrated 20") && residuals.contains("median error"), "{residuals}");
    let table = std::fs::read_to_string(&path).expect("a table");
    assert!(["path = \"ring\"", "transport = \"udp\"", "transport = \"shm\""].iter().all(|line| table.contains(line)));
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing half-written is left");

    let explained = sumac(&["perf", "--ranks=2", "--levels=1", "--explain", "--algo=auto", "-e", "8", "--costs", file]);
    assert_eq!(exit_status(&explained), 0, "{}", stderr(&explained));
    assert!(stdout(&explained).contains("; costs: calibrated 20"), "{}", stdout(&explained));

    let checked = stdout(&run(&["--check", file]));
    assert!(checked.contains("of 6 cells; worst"), "{checked}");
    assert_eq!(checked.matches("  lost\n").count(), 2, "{checked}");
}

#[test]
fn invalid_table_or_option_is_refused_before_anything_starts() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("costs.toml");
    let file = path.to_str().expect("a name");
    let future = folder.path().join("future.toml");
    let future_file = future.to_str().expect("a name");
    std::fs::write(&path, "format = 2\ndate = \"\"\nerror = 0.0\n[constants]\n").expect("a file");
    std::fs::write(&future, "format = 7\n").expect("a file");
    let refused = [
        (vec!["controller", "--listen=127.0.0.1:0", "--costs", file], "missing field"),
        (vec!["perf", "--costs", file, "--algo=auto"], "missing field"),
        (vec!["calibrate", "--check", file], "missing field"),
        (
            vec!["calibrate", "--check", future_file],
            "format 7 of the cost table is unknown; this release reads format 2",
        ),
        (vec!["calibrate", "--check", "/nonexistent/costs.toml"], "/nonexistent/costs.toml"),
        (vec!["calibrate", "-b", "1M", "-e", "8"], "-b 1M"),
        (vec!["calibrate", "--ranks=1"], "--ranks"),
    ];
    for (args, why) in refused {
        let output = sumac(&args);
        assert_eq!(exit_status(&output), 2, "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(why), "{args:?}: {}", stderr(&output));
    }
}
