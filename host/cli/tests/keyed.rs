//! A controller with keys as processes: `sumac key`, devices, ranks and `status` with keys, and every bad key's
//! message.

mod common;

use common::{Server, exit_status, serve, stderr, stdout, sumac};
use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use sumac::controller::keys::read_key;
use sumac::controller::{ControllerAddr, status};
use sumac::{Algo, Communicator, JoinConfig, ReduceOp};

/// A folder with a store and the keys of device leaf0, tenants ml and other, and an operator.
struct Keys {
    folder: tempfile::TempDir,
}

impl Keys {
    fn new() -> Self {
        let keys = Self { folder: tempfile::tempdir().expect("a folder") };
        for (name, principal) in [
            ("leaf0", &["--device", "leaf0"][..]),
            ("ml", &["--tenant", "ml"]),
            ("other", &["--tenant", "other"]),
            ("operator", &["--operator"]),
        ] {
            let made = keys.make(name, principal);
            assert_eq!(exit_status(&made), 0, "{}", stderr(&made));
            assert!(!stdout(&made).contains(&keys.secret(name)), "{}", stdout(&made));
        }
        keys
    }

    fn path(&self, name: &str) -> String {
        let file = if name == "store" { "keys.toml".to_owned() } else { format!("{name}.key") };
        self.folder.path().join(file).to_str().expect("UTF-8").to_owned()
    }

    fn make(&self, name: &str, principal: &[&str]) -> Output {
        let (store, output) = (self.path("store"), self.path(name));
        sumac(&[&["key", "new", "--keys", &store, "--output", &output], principal].concat())
    }

    /// The secret in a key's file.
    fn secret(&self, name: &str) -> String {
        let text = fs::read_to_string(self.path(name)).expect("a key");
        text.split_ascii_whitespace().last().expect("a secret").to_owned()
    }

    fn id(&self, name: &str) -> String {
        read_key(Path::new(&self.path(name))).expect("a key").id().to_string()
    }

    fn controller(&self) -> (Server, SocketAddr) {
        let mut controller = serve(&["controller", "--listen", "127.0.0.1:0", "--keys", &self.path("store")]);
        let line = controller.line();
        let addr = line.strip_prefix("listening ").and_then(|addr| addr.parse().ok());
        (controller, addr.unwrap_or_else(|| panic!("{line}")))
    }

    fn config(&self, addr: SocketAddr, key: &str, rank: u32, world: u32) -> JoinConfig {
        let mut config = JoinConfig::new(addr, "job", rank, world);
        config.key = Some(read_key(Path::new(&self.path(key))).expect("a key"));
        config.tenant = "ml".into();
        config
    }

    fn operator(&self, addr: SocketAddr) -> ControllerAddr {
        ControllerAddr { key: Some(read_key(Path::new(&self.path("operator"))).expect("a key")), ..addr.into() }
    }
}

/// Run `sumac status` with variables and stdin.
fn status_with(addr: SocketAddr, args: &[&str], variables: &[(&str, &str)], stdin: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
    command.args(["status", "--controller", &addr.to_string()]).args(args).envs(variables.iter().copied());
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().expect("started");
    // It may end without reading.
    let _ = child.stdin.take().expect("piped").write_all(stdin.as_bytes());
    child.wait_with_output().expect("ended")
}

#[test]
fn cluster_with_keys_reduces_through_its_tree() {
    let keys = Keys::new();
    let (mut controller, addr) = keys.controller();
    let address = addr.to_string();
    let mut device = serve(&["device", "--name", "leaf0", "--controller", &address, "--key-file", &keys.path("leaf0")]);
    assert_eq!(device.line(), "ready leaf0");
    let joining: Vec<_> = (0..2).map(|rank| keys.config(addr, "ml", rank, 2)).collect();
    let ranks: Vec<_> = joining
        .into_iter()
        .map(|mut config| {
            config.algo = Algo::Tree;
            thread::spawn(move || {
                let communicator = Communicator::join(config).expect("a good key");
                let mut values = vec![1.5_f32; 1000];
                let outcome = communicator.all_reduce(&mut values, ReduceOp::Sum).expect("a tree");
                assert_eq!((values[999], outcome.path.name()), (3.0, "tree"));
                communicator
            })
        })
        .collect();
    let ranks: Vec<_> = ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect();
    let all = status_with(addr, &["--key-file", &keys.path("operator")], &[], "");
    assert!(stdout(&all).contains("leaf0") && stdout(&all).contains("job"), "{}{}", stdout(&all), stderr(&all));
    let tested =
        sumac(&["selftest", "--max-loss", "100", "--controller", &address, "--key-file", &keys.path("operator")]);
    assert_eq!(exit_status(&tested), 0, "{}{}", stdout(&tested), stderr(&tested));
    let own = status_with(addr, &["--json"], &[("SUMAC_KEY_FILE", &keys.path("ml"))], "");
    let own: serde_json::Value = serde_json::from_str(&stdout(&own)).expect("JSON");
    assert_eq!((own["jobs"][0]["name"].as_str(), own["devices"].as_array().map(Vec::len)), (Some("job"), Some(0)));
    let others = status_with(addr, &["--json", "--key-file", &keys.path("other")], &[], "");
    let others: serde_json::Value = serde_json::from_str(&stdout(&others)).expect("JSON");
    assert_eq!(others["jobs"].as_array().map(Vec::len), Some(0));
    // Neither the command lines nor the environments of the processes contain a secret.
    for server in [&controller, &device] {
        for file in ["cmdline", "environ"] {
            let shown = fs::read(format!("/proc/{}/{file}", server.pid())).expect("it runs");
            let shown = String::from_utf8_lossy(&shown).into_owned();
            assert!(["leaf0", "ml", "other", "operator"].iter().all(|name| !shown.contains(&keys.secret(name))));
        }
    }
    ranks.into_iter().for_each(Communicator::leave);
    device.interrupt_and_expect_success();
    controller.interrupt_and_expect_success();
}

#[test]
fn key_comes_from_a_file_a_variable_or_stdin() {
    let keys = Keys::new();
    let (_controller, addr) = keys.controller();
    let path = keys.path("operator");
    let text = fs::read_to_string(&path).expect("a key");
    for (args, variables, stdin) in [
        (&["--key-file", path.as_str()][..], &[][..], ""),
        (&[], &[("SUMAC_KEY_FILE", path.as_str())], ""),
        (&[], &[("SUMAC_KEY", text.as_str())], ""),
        (&["--key-file", "-"], &[], text.as_str()),
        (&[], &[("SUMAC_KEY_FILE", "-")], text.as_str()),
    ] {
        let output = status_with(addr, args, variables, stdin);
        assert_eq!(exit_status(&output), 0, "{args:?}: {}", stderr(&output));
        assert!(!stderr(&output).contains("warning"), "{}", stderr(&output));
    }
}

#[test]
fn every_bad_key_has_its_message_and_no_message_has_a_secret() {
    let keys = Keys::new();
    let made = keys.make("expiring", &["--operator", "--expires-days", "1"]);
    assert_eq!(exit_status(&made), 0, "{}", stderr(&made));
    // Two days ago.
    let store = fs::read_to_string(keys.path("store")).expect("a store");
    let line = store.lines().find(|line| line.starts_with("expires_unix_s")).expect("one that expires").to_owned();
    fs::write(keys.path("store"), store.replace(&line, "expires_unix_s = 1000000000")).expect("a store");
    assert_eq!(exit_status(&keys.make("revoked", &["--operator"])), 0);
    let revoked = sumac(&["key", "revoke", "--keys", &keys.path("store"), &keys.id("revoked")]);
    assert_eq!(exit_status(&revoked), 0, "{}", stderr(&revoked));
    let shown = stdout(&sumac(&["key", "show", "--keys", &keys.path("store")]));
    for (name, state) in [("revoked", "revoked"), ("expiring", "expired"), ("ml", "valid"), ("leaf0", "device leaf0")] {
        assert!(shown.lines().any(|line| line.starts_with(&keys.id(name)) && line.contains(state)), "{shown}");
        assert!(!shown.contains(&keys.secret(name)), "{shown}");
    }
    let write = |name: &str, text: &str, mode| {
        fs::write(keys.path(name), text).expect("a file");
        fs::set_permissions(keys.path(name), PermissionsExt::from_mode(mode)).expect("it is ours");
    };
    let good = fs::read_to_string(keys.path("operator")).expect("a key");
    write("wrong", &good.replace(&keys.secret("operator"), &"07".repeat(32)), 0o600);
    write("unknown", &good.replace(&keys.id("operator"), "0000000000000007"), 0o600);
    write("readable", &good, 0o644);
    write("malformed", &good.replace("sumac-key-v1", ""), 0o600);
    let (_controller, addr) = keys.controller();
    for (name, code, says) in [
        ("wrong", 1, "does not know this key, or has another secret"),
        ("unknown", 1, "does not know this key, or has another secret"),
        ("revoked", 1, "was revoked"),
        ("expiring", 1, "has expired"),
        ("leaf0", 1, "a key of device leaf0 is not good for reports"),
        ("readable", 2, "chmod 600"),
        ("malformed", 2, "not a key"),
        ("absent", 2, "cannot read"),
    ] {
        let path = keys.path(name);
        let output = status_with(addr, &["-vvv", "--key-file", &path], &[], "");
        assert_eq!(exit_status(&output), code, "{name}: {}", stderr(&output));
        assert!(stderr(&output).contains(says), "{name}: {}", stderr(&output));
        let secret = keys.secret("operator");
        assert!(!stderr(&output).contains(&secret) && !stderr(&output).contains("070707"), "{}", stderr(&output));
    }
    let none = sumac(&["status", "--controller", &addr.to_string()]);
    assert_eq!((exit_status(&none), stderr(&none).contains("SUMAC_KEY_FILE")), (1, true), "{}", stderr(&none));
}

#[test]
fn controller_refuses_bad_stores_and_addresses_beyond_loopback_without_keys() {
    let keys = Keys::new();
    fs::set_permissions(keys.path("store"), PermissionsExt::from_mode(0o640)).expect("it is ours");
    let absent = keys.path("absent");
    for (args, says) in [
        (&["--listen", "0.0.0.0:0"][..], "sumac key new"),
        (&["--listen", "[::]:0"], "--keys"),
        (&["--keys", &keys.path("store")], "chmod 600"),
        (&["--keys", &absent], "cannot read"),
    ] {
        let refused = sumac(&[&["controller"], args].concat());
        assert_eq!(exit_status(&refused), 2, "{args:?}: {}", stderr(&refused));
        assert!(stderr(&refused).contains(says), "{args:?}: {}", stderr(&refused));
    }
    fs::set_permissions(keys.path("store"), PermissionsExt::from_mode(0o600)).expect("it is ours");
    let mut controller = serve(&["controller", "--listen", "0.0.0.0:0", "--keys", &keys.path("store")]);
    assert!(controller.line().starts_with("listening 0.0.0.0:"));
    controller.interrupt_and_expect_success();
}

#[test]
fn key_new_changes_nothing_if_it_fails() {
    let keys = Keys::new();
    let before = fs::read_to_string(keys.path("store")).expect("a store");
    for (name, principal, says) in [
        ("ml", &["--tenant", "ml"][..], "ml.key"),
        ("new", &["--tenant", "m l"], "letters, digits"),
        ("new", &["--device", "a\nb"], "printable ASCII"),
        ("new", &[], "--operator"),
        ("new", &["--operator", "--tenant", "ml"], "cannot be used with"),
        ("no/folder", &["--operator"], "cannot write"),
    ] {
        let refused = keys.make(name, principal);
        assert_eq!(exit_status(&refused), 2, "{principal:?}: {}", stderr(&refused));
        assert!(stderr(&refused).contains(says), "{principal:?}: {}", stderr(&refused));
    }
    assert_eq!(fs::read_to_string(keys.path("store")).expect("a store"), before);
    assert!(!PathBuf::from(keys.path("new")).exists());
    let unknown = sumac(&["key", "revoke", "--keys", &keys.path("store"), "0000000000000001"]);
    assert_eq!((exit_status(&unknown), stderr(&unknown).contains("no key")), (2, true), "{}", stderr(&unknown));
}

#[test]
fn device_key_is_good_for_its_names_and_for_no_job() {
    let keys = Keys::new();
    let (_controller, addr) = keys.controller();
    let address = addr.to_string();
    let device = |name: &str, key: &str| {
        let path = keys.path(key);
        sumac(&["device", "--name", name, "--controller", &address, "--timeout", "10", "--key-file", &path])
    };
    for (name, key, says) in [("leaf1", "leaf0", "not good for this name"), ("leaf0", "ml", "not good for this name")] {
        let refused = device(name, key);
        assert_eq!(exit_status(&refused), 1, "{}", stderr(&refused));
        assert!(stderr(&refused).contains(says), "{}", stderr(&refused));
    }
    let unkeyed = sumac(&["device", "--name", "leaf0", "--controller", &address, "--timeout", "10"]);
    assert_eq!((exit_status(&unkeyed), stderr(&unkeyed).contains("--key-file")), (1, true), "{}", stderr(&unkeyed));
    let fake = fs::read_to_string(keys.path("leaf0")).expect("a key").replace(&keys.secret("leaf0"), &"07".repeat(32));
    fs::write(keys.path("fake"), fake).expect("a file");
    fs::set_permissions(keys.path("fake"), PermissionsExt::from_mode(0o600)).expect("it is ours");
    let refused = device("leaf0", "fake");
    assert_eq!(exit_status(&refused), 1, "{}", stderr(&refused));
    assert!(stderr(&refused).contains("does not know this key, or has another secret"), "{}", stderr(&refused));
    let joined = Communicator::join(keys.config(addr, "leaf0", 0, 1)).expect_err("a device's key").to_string();
    assert!(joined.contains("device leaf0"), "{joined}");
    let joined = Communicator::join(keys.config(addr, "other", 0, 1)).expect_err("another tenant's").to_string();
    assert!(joined.contains("tenant other") && joined.contains("tenant ml"), "{joined}");
}

/// Half handshakes from four threads for as long as a job runs: every operation succeeds, and new ranks get in.
#[test]
fn flood_of_half_handshakes_stops_no_job() {
    let keys = Keys::new();
    let (_controller, addr) = keys.controller();
    let address = addr.to_string();
    let mut device = serve(&["device", "--name", "leaf0", "--controller", &address, "--key-file", &keys.path("leaf0")]);
    assert_eq!(device.line(), "ready leaf0");
    let is_over = AtomicBool::new(false);
    let mut hello = Vec::from(*b"Sk\x01\0");
    hello.extend(read_key(Path::new(&keys.path("ml"))).expect("a key").id().0.to_le_bytes());
    thread::scope(|scope| {
        let floods: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let mut held = std::collections::VecDeque::new();
                    let mut count = 0_u64;
                    while !is_over.load(Ordering::Acquire) {
                        let Ok(mut half) = TcpStream::connect_timeout(&addr, Duration::from_secs(5)) else { continue };
                        // Alternately without and with a message, which is a wrong one.
                        let _ = half.write_all(&hello);
                        if count % 2 == 1 {
                            let _ = half.write_all(&[7; 48]);
                        }
                        held.push_back(half);
                        if held.len() > 64 {
                            held.pop_front();
                        }
                        count += 1;
                    }
                    count
                })
            })
            .collect();
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                let mut config = keys.config(addr, "ml", rank, 2);
                config.algo = Algo::Tree;
                scope.spawn(move || {
                    let communicator = Communicator::join(config).expect("it is not kept out");
                    for _ in 0..200 {
                        let mut values = vec![1.0_f32; 4096];
                        let outcome = communicator.all_reduce(&mut values, ReduceOp::Sum).expect("it runs on");
                        assert_eq!((values[4095], outcome.path.name()), (2.0, "tree"));
                    }
                    communicator.leave();
                })
            })
            .collect();
        ranks.into_iter().for_each(|rank| rank.join().expect("no panic"));
        assert!(status(keys.operator(addr)).is_ok());
        is_over.store(true, Ordering::Release);
        let count: u64 = floods.into_iter().map(|flood| flood.join().expect("no panic")).sum();
        assert!(count > 100, "{count} connections are no flood");
    });
    device.interrupt_and_expect_success();
}
