//! The agent's unit file: systemd accepts it, and the agent accepts its command.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;
use sumac_agent::config::CommandLine;

fn unit() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd/sumac-agent.service");
    fs::read_to_string(path).expect("a unit file")
}

#[test]
fn agent_accepts_the_command_of_the_unit_file() {
    let unit = unit();
    let command =
        unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/sumac-agent ")).expect("a command");
    let options = unit.lines().find_map(|line| line.strip_prefix("#   SUMAC_AGENT_OPTIONS=")).expect("an example");
    let command = command.replace("$SUMAC_AGENT_OPTIONS", options);
    let line = CommandLine::parse(command.split(' '), "").expect("settings");
    assert_eq!(line.key_file.as_deref(), Some("-"), "the key is on stdin, which the unit file connects");
    assert!(unit.contains("\nStandardInput=file:/etc/sumac/agent.key\n"));
    assert_eq!(line.settings.config().map(|config| config.name).as_deref(), Ok("leaf0"));
}

#[test]
fn systemd_accepts_the_unit_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("sumac-agent.service");
    let faults = |text: String| {
        fs::write(&path, text).expect("written");
        let checked = match Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                eprintln!("SKIPPED: systemd-analyze is not installed");
                return None;
            }
            checked => checked.expect("it runs"),
        };
        // Other units of the machine may have faults of their own.
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        Some(said.lines().filter(|line| line.contains("sumac")).map(str::to_owned).collect::<Vec<_>>())
    };
    let text = unit().replace("/usr/bin/sumac-agent", env!("CARGO_BIN_EXE_sumac-agent"));
    let Some(found) = faults(text.clone()) else { return };
    assert!(found.is_empty(), "{found:?}");
    let found = faults(text.replace("NoNewPrivileges", "NoNewPrivilege")).unwrap_or_default();
    assert!(found.iter().any(|fault| fault.contains("NoNewPrivilege")), "{found:?}");
}
