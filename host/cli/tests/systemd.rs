//! The unit files in `host/systemd`: systemd accepts them, they are sandboxed, and the command accepts their options.

mod common;

use common::{Dir, exit_status, stderr, stdout, sumac};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The unit files, each with the exposure that `systemd-analyze security` may report at most, in tenths: 10 is "ok",
/// 100 the worst.
const UNITS: [(&str, u32); 2] = [("sumac-controller.service", 20), ("sumac-device@.service", 30)];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../systemd")
}

fn read(unit: &str) -> String {
    fs::read_to_string(folder().join(unit)).expect("a unit file")
}

/// Run systemd-analyze. Prints a message and returns `None` if this machine does not have it.
fn analyze(args: &[&str]) -> Option<Output> {
    match Command::new("systemd-analyze").args(args).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("SKIPPED: systemd-analyze is not installed");
            None
        }
        output => Some(output.expect("it runs")),
    }
}

/// Copy a unit file, with the path of the command under test, and the manual left out, which may not be installed.
fn installed(dir: &Dir, unit: &str) -> String {
    let text = read(unit).replace("/usr/bin/sumac", env!("CARGO_BIN_EXE_sumac"));
    let text: Vec<_> = text.lines().filter(|line| !line.starts_with("Documentation=")).collect();
    dir.write(&unit.replace('@', "@leaf0"), text.join("\n").as_bytes())
}

/// What systemd-analyze says about a unit file.
fn faults(path: &str) -> Option<Vec<String>> {
    let said = stderr(&analyze(&["verify", "--man=no", path])?);
    // Other units of the machine may have faults of their own.
    Some(said.lines().filter(|line| line.contains("sumac")).map(str::to_owned).collect())
}

#[test]
fn systemd_accepts_the_unit_files() {
    let dir = Dir::new("units");
    for (unit, _) in UNITS {
        let path = installed(&dir, unit);
        let Some(found) = faults(&path) else { return };
        assert!(found.is_empty(), "{unit}: {found:?}");
        let misspelled = fs::read_to_string(&path).expect("written").replace("NoNewPrivileges", "NoNewPrivilege");
        fs::write(&path, misspelled).expect("ours");
        let found = faults(&path).unwrap_or_default();
        assert!(found.iter().any(|fault| fault.contains("NoNewPrivilege")), "{unit}: {found:?}");
    }
}

#[test]
fn services_are_sandboxed() {
    let dir = Dir::new("sandbox");
    for (unit, tenths) in UNITS {
        let path = installed(&dir, unit);
        let threshold = format!("--threshold={tenths}");
        let Some(checked) = analyze(&["security", "--offline=true", "--no-pager", &threshold, &path]) else { return };
        if stderr(&checked).contains("unrecognized option") {
            eprintln!("SKIPPED: this systemd-analyze does not check files");
            return;
        }
        let overall = stdout(&checked).lines().last().unwrap_or_default().to_owned();
        assert!(checked.status.success(), "{unit}: {overall} {}", stderr(&checked));
    }
}

/// The options of a unit file are those of the command: help for them is no usage error.
#[test]
fn command_accepts_the_options_of_the_unit_files() {
    for (unit, _) in UNITS {
        let text = read(unit);
        let line = text.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/sumac ")).expect("a command");
        let args: Vec<_> = line.split_whitespace().chain(["--help"]).collect();
        let help = sumac(&args);
        assert_eq!(exit_status(&help), 0, "{unit}: {}", stderr(&help));
        let unknown: Vec<_> = args.iter().map(|arg| arg.replace("--config", "--confic")).collect();
        let unknown: Vec<_> = unknown.iter().map(String::as_str).collect();
        assert_eq!(exit_status(&sumac(&unknown)), 2, "{unit}: an option that does not exist is noticed");
    }
}

/// `doctor` checks all tables.
#[test]
fn command_accepts_the_configuration_file_of_the_units() {
    let path = folder().join("sumac.toml");
    let doctor = |path: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
        command.args(["doctor", "--env", "--config", path]).env("SUMAC_RANK", "0").env("SUMAC_WORLD", "1");
        command.output().expect("the command runs")
    };
    let accepted = doctor(path.to_str().expect("UTF-8"));
    assert_eq!(exit_status(&accepted), 0, "{}", stderr(&accepted));
    assert!(stdout(&accepted).contains("[controller] keys"), "{}", stdout(&accepted));
    let dir = Dir::new("units-config");
    let misspelled = dir.write("sumac.toml", read("sumac.toml").replace("keys", "kees").as_bytes());
    assert_eq!(exit_status(&doctor(&misspelled)), 2);
}
