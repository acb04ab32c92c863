//! How devices and ranks find their controller: names that are taken, host names, and Ctrl-C while they dial.

mod common;

use common::{Server, exit_status, serve, stderr, stdout, sumac};
use rustix::process::{Pid, Signal, kill_process};
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use sumac::{Communicator, JoinConfig};

/// Far less than the 30 s that a device waits for its controller, on a loaded machine.
const AT_ONCE: Duration = Duration::from_secs(10);

fn controller(listen: &str) -> (Server, SocketAddr) {
    let mut controller = serve(&["controller", "--listen", listen]);
    let line = controller.line();
    let addr = line.strip_prefix("listening ").and_then(|addr| addr.parse().ok());
    (controller, addr.unwrap_or_else(|| panic!("{line}")))
}

/// Start the command and write `stdin` to it. SIGINT has its default effect there, which background processes of a
/// shell otherwise inherit as ignored.
fn start(args: &[&str], stdin: &str) -> Child {
    let mut command = Command::new("env");
    command
        .args(["--default-signal=INT", env!("CARGO_BIN_EXE_sumac")])
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("started");
    child.stdin.take().expect("piped").write_all(stdin.as_bytes()).expect("it runs");
    child
}

#[test]
fn device_with_a_taken_name_fails_at_once_and_names_the_holder() {
    let (mut controller, addr) = controller("127.0.0.1:0");
    let addr = addr.to_string();
    let mut holder = serve(&["device", "--name", "leaf0", "--controller", &addr]);
    assert_eq!(holder.line(), "ready leaf0");
    let status: serde_json::Value =
        serde_json::from_str(&stdout(&sumac(&["status", "--json", "--controller", &addr]))).expect("JSON");
    let data_addr = status["devices"][0]["data_addrs"][0]["Udp"].as_str().expect("an address").to_owned();
    let began = Instant::now();
    let second = sumac(&["device", "--name", "leaf0", "--controller", &addr]);
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
    assert_eq!(exit_status(&second), 1, "{}", stderr(&second));
    for part in ["device leaf0 ", &addr, &data_addr, "choose another --name"] {
        assert!(stderr(&second).contains(part), "{part}: {}", stderr(&second));
    }
    // The name is free again as soon as its holder has ended.
    holder.interrupt_and_expect_success();
    let mut third = serve(&["device", "--name", "leaf0", "--controller", &addr]);
    assert_eq!(third.line(), "ready leaf0");
    third.interrupt_and_expect_success();
    controller.interrupt_and_expect_success();
}

/// Return the names of the sockets and files through which ranks attach to devices of this process.
fn attach_sockets(pid: u32) -> Vec<String> {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").flatten();
    let own: Vec<_> = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok()).collect();
    let all = std::fs::read_to_string("/proc/net/unix").expect("Linux has it");
    let is_own = |line: &&str| {
        let inode = line.split_whitespace().nth(6).unwrap_or_default();
        own.iter().any(|file| file.to_str() == Some(&format!("socket:[{inode}]")))
    };
    all.lines().filter(is_own).filter_map(|line| Some(line.split_once("@sumac-")?.1.to_owned())).collect()
}

/// Interrupt a device that dials `controller`, and return how it ended.
fn interrupt_dialling_device(controller: &str) -> Output {
    let device = start(&["device", "--name", "leaf0", "--controller", controller], "");
    let limit = Instant::now() + Duration::from_secs(60);
    let sockets = loop {
        // It listens for ranks before it dials.
        match attach_sockets(device.id()) {
            sockets if sockets.is_empty() => assert!(Instant::now() < limit, "the device does not start"),
            sockets => break sockets,
        }
        std::thread::yield_now();
    };
    let began = Instant::now();
    kill_process(Pid::from_child(&device), Signal::INT).expect("it runs");
    let output = device.wait_with_output().expect("ended");
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
    let left = std::fs::read_to_string("/proc/net/unix").expect("Linux has it");
    assert!(sockets.iter().all(|name| !left.contains(name)), "{sockets:?} are left");
    output
}

#[test]
fn interrupted_device_ends_at_once_with_130_while_it_dials() {
    // Nothing listens on port 9 (discard, RFC 863); the other one accepts connections and says nothing.
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    for controller in ["127.0.0.1:9".to_owned(), silent.local_addr().expect("bound").to_string()] {
        let output = interrupt_dialling_device(&controller);
        assert_eq!(exit_status(&output), 130, "{}", stderr(&output));
        assert!(stdout(&output).is_empty(), "{}", stdout(&output));
    }
}

/// A shell reports the end by signal 2 as status 130.
#[test]
fn interrupted_rank_ends_at_once_while_its_controller_does_not_answer() {
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let work = serde_json::json!({ "Explain": { "cases": [] } });
    let job = serde_json::json!({
        "controller": silent.local_addr().expect("bound"), "job": "job", "rank": 0, "world": 2, "host": "h0",
        "order": null, "transport": "Auto", "deadline_ms": 60_000, "work": work,
    });
    let rank = start(&["rank"], &format!("{job}\n"));
    // It has dialled.
    let _connection = silent.accept().expect("the rank");
    let began = Instant::now();
    kill_process(Pid::from_child(&rank), Signal::INT).expect("it runs");
    let output = rank.wait_with_output().expect("ended");
    assert_eq!(output.status.signal(), Some(2), "{}: {}", output.status, stderr(&output));
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
}

#[test]
fn controller_is_found_by_host_name_and_ipv6_literal() {
    for listen in ["127.0.0.1:0", "[::1]:0"] {
        let (mut controller, addr) = controller(listen);
        let port = addr.port();
        let named = if addr.is_ipv4() { format!("localhost:{port}") } else { addr.to_string() };
        let mut device =
            serve(&["device", "--name", "leaf0", "--bind", &addr.ip().to_string(), "--controller", &named]);
        assert_eq!(device.line(), "ready leaf0");
        let status = sumac(&["status", "--controller", &named]);
        assert!(stdout(&status).contains("leaf0"), "{}{}", stdout(&status), stderr(&status));
        let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
        // The variable beats the others.
        command.args(["status"]).env("SUMAC_CONTROLLER", &named).env("SUMAC_PORT", "9");
        let status = command.output().expect("it runs");
        assert!(stdout(&status).contains("leaf0"), "{}{}", stdout(&status), stderr(&status));
        device.interrupt_and_expect_success();
        controller.interrupt_and_expect_success();
    }
}

/// A host name may have an address at which no controller listens.
#[test]
fn rank_joins_at_the_first_address_of_its_controller_that_listens() {
    let (mut controller, addr) = controller("127.0.0.1:0");
    let nowhere: SocketAddr = "[::1]:9".parse().expect("an address");
    let mut config = JoinConfig::new(nowhere, "job", 0, 1);
    config.controller_alternatives = vec![addr];
    let communicator = Communicator::join(config).expect("one of the addresses listens");
    communicator.leave();
    controller.interrupt_and_expect_success();
}

#[test]
fn address_that_cannot_be_resolved_is_invalid_input() {
    let board = ["image", "run", "--board", "qemu-virt", "--image", "none"];
    for args in [&["status"][..], &["selftest"], &["device", "--name", "d"], &board] {
        for (addr, named) in [("localhost:port", "localhost:port"), ("controller.invalid:7", "controller.invalid")] {
            let output = sumac(&[args, &["--controller", addr]].concat());
            assert_eq!(exit_status(&output), 2, "{args:?}: {}", stderr(&output));
            assert!(stderr(&output).contains(named) && stderr(&output).contains("--controller"), "{}", stderr(&output));
        }
    }
    let output = sumac(&[&board[..], &["--controller", "[::1]:7"]].concat());
    assert_eq!(exit_status(&output), 2, "{}", stderr(&output));
    assert!(stderr(&output).contains("boards support IPv4 only"), "{}", stderr(&output));
}
