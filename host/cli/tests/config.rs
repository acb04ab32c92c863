//! The configuration file of controllers, devices and ranks: what beats what, and what is refused.

mod common;

use common::{Dir, exit_status, serve, stderr, stdout};
use serde_json::Value;
use std::process::{Command, Output, Stdio};

const FILE: &str = "\
[controller]
listen = '127.0.0.77:0'
lease = 60

[device]
name = 'leaf7'
no-shm = true
bind = '127.0.0.5'

[rank]
controller = '127.0.0.1:9'
deadline = 7
transport = 'udp'
";

/// Run the command as rank 0 of one, with these variables.
fn sumac_with(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
    command.args(args).env("SUMAC_RANK", "0").env("SUMAC_WORLD", "1").envs(variables.iter().copied());
    command.stdin(Stdio::null()).output().expect("the command runs")
}

#[test]
fn controller_and_device_take_options_from_the_file_and_flags_beat_it() {
    let dir = Dir::new("config-serve");
    let path = dir.write("sumac.toml", FILE.as_bytes());
    let mut by_file = serve(&["controller", "--config", &path]);
    let line = by_file.line();
    let addr = line.strip_prefix("listening ").expect("ready");
    assert!(addr.starts_with("127.0.0.77:"), "{line}");
    let by_flag = serve(&["controller", "--config", &path, "--listen", "127.0.0.78:0"]).line();
    assert!(by_flag.starts_with("listening 127.0.0.78:"), "{by_flag}");

    let mut device = serve(&["device", "--config", &path, "--controller", addr]);
    assert_eq!(device.line(), "ready leaf7");
    let other = format!("--config={path}");
    let mut other = serve(&["device", "--name", "leaf8", &other, "--controller", addr, "--bind", "127.0.0.6"]);
    assert_eq!(other.line(), "ready leaf8");
    let status = sumac_with(&["status", "--json", "--controller", addr], &[]);
    let report: Value = serde_json::from_str(&stdout(&status)).expect("JSON");
    let addrs: Vec<_> = report["devices"].as_array().expect("devices").iter().map(|one| one.to_string()).collect();
    let has = |name: &str, ip: &str| addrs.iter().any(|one| one.contains(name) && one.contains(ip));
    assert!(has("leaf7", "127.0.0.5:") && has("leaf8", "127.0.0.6:"), "{addrs:?}");
}

#[test]
fn doctor_shows_where_each_setting_of_a_rank_comes_from() {
    let dir = Dir::new("config-doctor");
    let path = dir.write("sumac.toml", FILE.as_bytes());
    let deadline = |variables: &[(&str, &str)], args: &[&str]| {
        let output = sumac_with(&[&["doctor", "--env", "--json"], args].concat(), variables);
        assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
        let report: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
        assert_eq!((&report["config_file"], &report["controller"]), (&path.as_str().into(), &"127.0.0.1:9".into()));
        let rows = report["variables"].as_array().expect("rows").clone();
        let find = |name: &str| {
            let row = rows.iter().find(|row| row["name"] == name).cloned().unwrap_or_default();
            (row["value"].as_str().map(str::to_owned), row["source"].as_str().map(str::to_owned), row["used"].clone())
        };
        assert_eq!(find("[device] no-shm"), (Some("true".into()), Some("file".into()), true.into()));
        (find("[rank] deadline"), find("SUMAC_DEADLINE"))
    };
    let by_file = (Some("7".into()), Some("file".into()), true.into());
    let named = ("SUMAC_CONFIG", path.as_str());
    assert_eq!(deadline(&[named], &[]).0, by_file);
    // The option beats the variable.
    assert_eq!(deadline(&[("SUMAC_CONFIG", "/nonexistent")], &["--config", &path]).0, by_file);
    let overridden = deadline(&[named, ("SUMAC_DEADLINE", "8")], &[]);
    assert_eq!(overridden.0.2, false);
    assert_eq!(overridden.1, (Some("8".into()), Some("environment".into()), true.into()));
}

#[test]
fn invalid_file_is_invalid_input_that_names_file_key_and_remedy() {
    let dir = Dir::new("config-invalid");
    let controller = &["controller"][..];
    let device = &["device", "--name", "d"][..];
    let rank = &["doctor", "--env"][..];
    for (args, text, named) in [
        (controller, "[controller]\nlease = 0", "[controller] lease: invalid value '0'"),
        (controller, "[controller]\nleese = 9", "did you mean \"lease\"?"),
        (controller, "[controler]\n", "it has [controller], [device] and [rank]"),
        (controller, "[controller", ":1: "),
        (device, "[device]\nshards = 'many'", "[device] shards: invalid value 'many'"),
        (device, "[device]\nno_shm = true", "did you mean \"no-shm\"?"),
        (device, "[device]\nkey = '0707'", "name its file: key-file"),
        (rank, "[rank]\ndeadline = 'soon'", "[rank] deadline: \"soon\" is not a number of seconds"),
        (rank, "[rank]\nrank = 0", "set SUMAC_RANK"),
        (rank, "[rank]\nkey = '0707'", "name its file: key_file"),
        (rank, "[device]\nno_shm = true", "did you mean \"no-shm\"?"),
        (rank, "[controller]\nlease = 0", "[controller] lease: invalid value '0'"),
    ] {
        let path = dir.write("sumac.toml", text.as_bytes());
        let by_option = sumac_with(&[args, &["--config", &path]].concat(), &[]);
        let by_variable = sumac_with(args, &[("SUMAC_CONFIG", &path)]);
        for output in [by_option, by_variable] {
            let error = stderr(&output);
            assert_eq!(exit_status(&output), 2, "{text}: {error}");
            assert!(error.contains(named) && error.contains(&path) && !error.contains("0707"), "{text}: {error}");
        }
    }
    for args in [controller, device, rank] {
        for (path, named) in [("/nonexistent/a.toml", "cannot read"), ("/dev/zero", "longer than 65536 bytes")] {
            let output = sumac_with(&[args, &["--config", path]].concat(), &[]);
            assert_eq!(exit_status(&output), 2, "{path}: {}", stderr(&output));
            assert!(stderr(&output).contains(named) && stderr(&output).contains(path), "{}", stderr(&output));
        }
    }
}

#[test]
fn invalid_traffic_class_is_refused_with_value_limit_and_remedy() {
    let doctor = &["doctor", "--env"][..];
    for (value, named) in [("186", "multiple of 4, as 184"), ("256", "from 0 to 252"), ("EF", "from 0 to 252")] {
        let option = format!("--traffic-class={value}");
        let (controller, device) = (&["controller", &option][..], &["device", "--name", "d", &option][..]);
        let variable = &[("SUMAC_TRAFFIC_CLASS", value)][..];
        let by_variable = [(&controller[..1], variable), (&device[..3], variable), (doctor, variable)];
        for (args, variables) in [(controller, &[][..]), (device, &[][..])].into_iter().chain(by_variable) {
            let output = sumac_with(args, variables);
            let error = stderr(&output);
            assert_eq!(exit_status(&output), 2, "{args:?}: {error}");
            assert!(error.contains(value) && error.contains(named), "{args:?}: {error}");
        }
    }
}

/// The parts of a cluster that a command starts are configured by the command alone.
#[test]
fn cluster_of_a_command_ignores_the_file() {
    let dir = Dir::new("config-cluster");
    let path = dir.write("sumac.toml", b"[controller]\nleese = 1\n[device]\nshards = 'many'");
    let mut perf = Command::new(env!("CARGO_BIN_EXE_sumac"));
    perf.args(["perf", "--ranks", "2", "--levels", "1", "--algo", "tree", "-b", "8", "-e", "8"]);
    let output = perf.env("SUMAC_CONFIG", &path).stdin(Stdio::null()).output().expect("the command runs");
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
}
