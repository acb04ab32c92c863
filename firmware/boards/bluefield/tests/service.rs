//! The agent as a service: it dials a controller, and a killed runtime is restarted.

use std::fs;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;
use sumac_hal::ctrl::{Announce, FrameReader, Hello};
use sumac_hal::port::Addr;

/// How long to wait for a runtime to dial.
const LIMIT: Duration = Duration::from_secs(60);

const AGENT: &str = env!("CARGO_BIN_EXE_sumac-agent");

/// An agent that is killed with its test, along with its runtime.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Return the child processes of `parent`: each of its threads has a list.
fn children(parent: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{parent}/task")).expect("it runs").flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect()
}

#[test]
fn killed_runtime_is_restarted_with_another_boot_id() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let controller = listener.local_addr().expect("bound");
    let (sender, greetings) = channel();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let Ok(Hello::Device(announce)) = FrameReader::new(stream).recv::<Hello>() else { continue };
            if sender.send(announce).is_err() {
                return;
            }
        }
    });
    // A loopback address that only this process uses, so the port is free.
    let [_, a, b, c] = std::process::id().to_be_bytes();
    let ip = format!("127.{}.{b}.{c}", 128 | a);
    let words = ["name=card".into(), format!("controller={controller}"), format!("ip={ip}/8"), "poll=sleep".into()];
    let agent = Agent(Command::new(AGENT).args(words).stdin(Stdio::null()).spawn().expect("an agent"));
    let first: Announce = greetings.recv_timeout(LIMIT).expect("the runtime dials");
    assert_eq!(first.name.as_str(), "card");
    assert_eq!(first.data_addrs.first(), Some(&Addr::Udp(format!("{ip}:7100").parse().expect("an address"))));

    let runtimes = children(agent.0.id());
    let [runtime] = runtimes[..] else { panic!("one runtime, not {runtimes:?}") };
    assert!(Command::new("kill").args(["-KILL", &runtime.to_string()]).status().expect("kill").success());
    let second = greetings.recv_timeout(LIMIT).expect("another runtime dials");
    assert_ne!(second.boot_id, first.boot_id, "a restarted runtime has lost its groups");
    assert_eq!((second.name, second.data_addrs), (first.name, first.data_addrs));
}

#[test]
fn service_without_a_controller_fails_with_the_missing_key() {
    let output = Command::new(AGENT).arg("name=card").output().expect("an agent");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && message.contains("controller is missing"), "{message}");
}
