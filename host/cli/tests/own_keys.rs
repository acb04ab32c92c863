//! Clusters that the command starts for itself serve only those who have their keys, though every user of the machine
//! reaches their controllers.

mod common;

use common::{children, exit_status, serve, stderr, stdout, sumac};
use serde_json::Value;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use sumac::{Communicator, JoinConfig};

/// What follows a word of a line.
fn after<'a>(line: &'a str, word: &str) -> &'a str {
    let mut words = line.split_whitespace().skip_while(|found| *found != word);
    words.nth(1).unwrap_or_else(|| panic!("no {word} in {line:?}"))
}

#[test]
fn unknown_peer_on_the_port_of_perf_learns_and_changes_nothing() {
    // The second row takes far longer than the test. What is left is killed with the server.
    let mut running = serve(&["perf", "-b", "8", "-e", "64M", "-f", "8388608", "-n", "1000", "--algo", "tree"]);
    let line = loop {
        let line = running.line();
        assert!(!line.is_empty(), "the table names the controller before its header");
        if line.starts_with("# controller ") {
            break line;
        }
    };
    let (address, key_file) = (after(&line, "controller"), after(&line, "--key-file"));
    let learned = sumac(&["status", "--controller", address]);
    assert_eq!((exit_status(&learned), stdout(&learned).as_str()), (1, ""), "{}", stderr(&learned));
    assert!(stderr(&learned).contains("keys only"), "{}", stderr(&learned));
    for name in ["leaf0", "leaf9"] {
        let refused = sumac(&["device", "--name", name, "--controller", address, "--timeout", "1"]);
        assert_eq!(exit_status(&refused), 1, "{}", stderr(&refused));
    }
    let addr: SocketAddr = address.parse().expect("an address");
    for job in ["perf", "other"] {
        let refused = Communicator::join(JoinConfig::new(addr, job, 0, 1)).expect_err("it has no key").to_string();
        assert!(refused.contains("keys only"), "{refused}");
    }
    // Who started it sees that nothing has changed.
    let report = sumac(&["status", "--controller", address, "--key-file", key_file, "--json"]);
    let report: Value = serde_json::from_str(&stdout(&report)).unwrap_or_else(|_| panic!("{}", stderr(&report)));
    let (jobs, devices) = (report["jobs"].as_array().expect("a list"), report["devices"].as_array().expect("a list"));
    assert_eq!((jobs.len(), &jobs[0]["joined"], &jobs[0]["view"]), (1, &4.into(), &0.into()), "{report}");
    assert!(jobs[0]["tree"]["Ok"].is_object() && devices.len() == 2, "{report}");
    assert!(devices.iter().all(|device| device["name"] != "leaf9"), "{report}");
    // The key is in no file of others, no command line and no environment.
    assert_eq!(fs::metadata(key_file).expect("it is open").permissions().mode() & 0o777, 0o600);
    let key = fs::read_to_string(key_file).expect("ours");
    let secret = key.split_ascii_whitespace().last().expect("a secret");
    let parts = children(running.pid().as_raw_nonzero().get() as u32);
    assert_eq!(parts.len(), 1 + 2 + 4, "a controller, devices and ranks");
    for part in parts {
        for file in ["cmdline", "environ"] {
            let shown = fs::read(format!("/proc/{}/{file}", part.pid.as_raw_nonzero())).expect("it runs");
            assert!(!String::from_utf8_lossy(&shown).contains(secret), "{file}");
        }
    }
    running.kill();
    assert!(!fs::exists(key_file).expect("a path"), "it ends with the command");
}
