//! The agent as a service: it dials a controller, and a killed runtime is restarted.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;
use sumac_hal::ctrl::secure::{self, ControlReader, Key, KeyId, Responder, write_new_key};
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

/// Return an address of the loopback network that only this process uses, so that the port is free there.
fn own_ip(nth: u8) -> String {
    let [_, a, b, c] = std::process::id().to_be_bytes();
    format!("127.{}.{b}.{c}", 128 | nth << 5 | a & 31)
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
    let ip = own_ip(0);
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

const KEY: [u8; 32] = [0xa7; 32];

/// Serve as a controller with this key, and return what the device of the first connection announces over the encrypted
/// channel; `Err` is what it sends after the challenge if it does not prove that it has the key, or is not convinced.
fn accept_keyed(stream: &mut TcpStream, key: &Key) -> io::Result<Result<Announce, Vec<u8>>> {
    let mut hello = [0; secure::HELLO_LEN];
    stream.read_exact(&mut hello)?;
    assert_eq!(secure::key_id(&hello), Ok(key.id()), "it presents its key's id, and nothing before");
    let (responder, challenge) = Responder::new(&hello, key, &secure::random()?);
    stream.write_all(&challenge)?;
    let mut message = [0; secure::MESSAGE_LEN];
    stream.read_exact(&mut message)?;
    let Ok((reply, _, opener)) = responder.handle_message(&message, secure::random()?) else {
        // An impostor answers nevertheless.
        stream.write_all(&[0; secure::REPLY_LEN])?;
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        return Ok(Err(rest));
    };
    stream.write_all(&reply)?;
    match FrameReader::new(ControlReader::new(stream.try_clone()?, Some(opener))).recv::<Hello>() {
        Ok(Hello::Device(announce)) => Ok(Ok(announce)),
        other => panic!("not a device: {other:?}"),
    }
}

/// Return the words that make an agent serve the controller.
fn words(listener: &TcpListener, nth: u8) -> Vec<String> {
    let controller = listener.local_addr().expect("bound");
    vec!["name=card".into(), format!("controller={controller}"), format!("ip={}/8", own_ip(nth))]
}

#[test]
fn service_with_a_key_announces_itself_to_who_has_it_and_shows_it_to_nobody() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, store) = (folder.path().join("card.key"), folder.path().join("store"));
    let key = Key::new(KeyId(0x5a), KEY);
    write_new_key(&file, &key, "device card").expect("written");
    let enrolled = Command::new(AGENT).arg("enroll").args([&store, &file]).output().expect("an agent");
    assert!(enrolled.status.success(), "{}", String::from_utf8_lossy(&enrolled.stderr));
    let shown = String::from_utf8_lossy(&enrolled.stdout).into_owned();
    assert!(shown.contains("# key 000000000000005a") && !shown.contains("a7a7"), "{shown}");
    let sources = [format!("key-file={}", file.display()), format!("store={}", store.display())];
    for (nth, source) in (1..).zip(sources) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let words = [words(&listener, nth), vec![source.clone()]].concat();
        let agent = Command::new(AGENT).args(words).stdin(Stdio::null()).stderr(Stdio::null()).spawn();
        let agent = Agent(agent.expect("an agent"));
        let (mut stream, _) = listener.accept().expect("it dials");
        let announce = accept_keyed(&mut stream, &key).expect("a connection").expect("the key");
        assert_eq!(announce.name.as_str(), "card", "{source}");
        let runtimes = children(agent.0.id());
        assert_eq!(runtimes.len(), 1, "{runtimes:?}");
        for pid in runtimes.into_iter().chain([agent.0.id()]) {
            for file in ["cmdline", "environ"] {
                let shown = fs::read(format!("/proc/{pid}/{file}")).expect("it runs");
                assert!(!String::from_utf8_lossy(&shown).contains("a7a7"), "{file} of {pid}");
            }
        }
    }
}

#[test]
fn controller_with_another_secret_learns_nothing_but_the_id() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("card.key");
    write_new_key(&file, &Key::new(KeyId(0x5a), KEY), "device card").expect("written");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let words = [words(&listener, 3), vec![format!("key-file={}", file.display())]].concat();
    let agent = Command::new(AGENT).args(words).stdin(Stdio::null()).stderr(Stdio::null()).spawn();
    let _agent = Agent(agent.expect("an agent"));
    let (mut stream, _) = listener.accept().expect("it dials");
    let sent = accept_keyed(&mut stream, &Key::new(KeyId(0x5a), [1; 32])).expect("a connection");
    assert_eq!(sent.expect_err("another secret"), Vec::<u8>::new());
}

#[test]
fn bad_keys_of_a_service_are_named_and_not_repeated() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str, mode| {
        let path = folder.path().join(name);
        fs::write(&path, text).expect("written");
        fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("ours");
        format!("key-file={}", path.display())
    };
    let secret = "a7".repeat(32);
    let good = format!("sumac-key-v1 000000000000005a {secret}\n");
    let in_clear = format!("key={secret}");
    let absent = format!("key-file={}", Path::new("/nonexistent/card.key").display());
    for (word, says) in [
        (file("readable", &good, 0o640), "chmod 600"),
        (file("short", &good.replace("a7a7\n", ""), 0o600), "64 hexadecimal digits"),
        (absent, "cannot read"),
        (in_clear, "sumac-agent enroll"),
    ] {
        // Without a controller, so that an agent that accepted the key would fail for that reason.
        let output = Command::new(AGENT).arg("name=card").arg(&word).output().expect("an agent");
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && message.contains(says), "{word}: {message}");
        assert!(!message.contains("a7a7"), "{message}");
    }
}
