//! What a newcomer reads on stderr.

use crate::programs::{program, stderr};
use std::net::{Ipv4Addr, TcpListener};

/// Return a port on which nothing listens.
fn unused_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    listener.local_addr().expect("its address").port()
}

/// `join` returns a `Box<dyn Error>` from `main`, and `train` a `sumac::Error`.
#[test]
fn program_without_controller_prints_one_line_with_a_hint() {
    let port = unused_port().to_string();
    for role in ["join", "train"] {
        let variables = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("SUMAC_PORT", &port)];
        let output = program(role).envs(variables).output().expect("an end");
        let text = "Connection refused (os error 111); start one with `sumac controller`";
        assert_eq!(stderr(&output), format!("Error: no controller at 127.0.0.1:{port}: {text}\n"), "{role}");
        assert_eq!(output.status.code(), Some(1));
    }
}

#[test]
fn program_without_launcher_prints_the_missing_variable() {
    let output = program("train").env_remove("RANK").env_remove("WORLD_SIZE").output().expect("an end");
    let found = stderr(&output);
    let what =
        "Error: environment variable RANK: it is not set, and no launcher has set its own; start the program by ";
    assert!(found.starts_with(what) && found.lines().count() == 1, "{found}");
}
