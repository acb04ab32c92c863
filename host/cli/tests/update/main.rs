//! Updates of a live agent, as processes: controller, agent and the command. Ranks are threads.
//!
//! The agent serves from two slot files as a service whose manager starts it again when it says so. The executable of
//! this test is the agent, too: a supervisor starts its own executable as the runtime.

#[path = "../common/mod.rs"]
mod common;
mod service;

use common::{Server, checked_sum, exit_status, serve, stderr, stdout, sumac};
use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::{EncodePrivateKey, EncodePublicKey};
use serde_json::Value;
use service::Service;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path as FilePath;
use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use sumac::comm::CallOptions;
use sumac::controller::keys::read_key;
use sumac::controller::proto::Transport;
use sumac::select::Algo;
use sumac::{Communicator, JoinConfig, Path, ReduceOp};
use sumac_agent::supervisor::RUNTIME;
use sumac_firmware::slots::{Event, FileBlocks, Offer, Policy, Slots, Updater};

/// The limit of every wait; a passing test never reaches it.
const LONG: Duration = Duration::from_secs(120);

const RANKS: u32 = 2;

/// Elements of an operation: enough for several chunks.
const LEN: usize = 50_000;

/// How many bytes an image's initramfs has, so that a transfer can be cut.
const INITRAMFS_LEN_BYTES: usize = 6 << 20;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some(RUNTIME) => return service::run_runtime(),
        Some(service::AGENT) => return service::run_agent(&arguments[1..]),
        _ => {}
    }
    let tests: [(&str, fn()); 4] = [
        ("live_agent_is_updated_while_its_job_goes_on", live_agent_is_updated_while_its_job_goes_on),
        ("second_operator_takes_over_once_the_first_has_gone", second_operator_takes_over_once_the_first_has_gone),
        ("transfer_survives_a_restart_of_the_controller", transfer_survives_a_restart_of_the_controller),
        ("wrong_usage_and_refusals_have_their_exit_statuses", wrong_usage_and_refusals_have_their_exit_statuses),
    ];
    // Arguments as of libtest: `--list`, and a part of a name.
    if arguments.iter().any(|argument| argument == "--list") {
        tests.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let wanted: Vec<_> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|part| name.contains(part.as_str()));
    let mut is_good = true;
    for (name, test) in tests.into_iter().filter(|(name, _)| is_wanted(name)) {
        // The panic's message has been printed.
        let passed = std::panic::catch_unwind(test).is_ok();
        println!("test {name} ... {}", if passed { "ok" } else { "FAILED" });
        is_good &= passed;
    }
    if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A controller with keys, and what is needed to build and send images.
struct Bench {
    folder: tempfile::TempDir,
    addr: SocketAddr,
    controller: Option<Server>,
}

impl Bench {
    fn new() -> Self {
        let mut bench = Self {
            folder: tempfile::tempdir().expect("a folder"),
            addr: SocketAddr::from(([127, 0, 0, 1], 0)),
            controller: None,
        };
        for (name, principal) in [
            ("leaf0", &["--device", "leaf0"][..]),
            ("leaf1", &["--device", "leaf1"]),
            ("ml", &["--tenant", "ml"]),
            ("operator", &["--operator"]),
        ] {
            let (store, file) = (bench.path("keys.toml"), bench.path(&format!("{name}.key")));
            let made = sumac(&[&["key", "new", "--keys", &store, "--output", &file], principal].concat());
            assert_eq!(exit_status(&made), 0, "{}", stderr(&made));
        }
        for (name, seed) in [("sign", 1), ("other", 2)] {
            let key = SigningKey::from_bytes(&[seed; 32]);
            let private = key.to_pkcs8_pem(Default::default()).expect("encoded");
            let public = key.verifying_key().to_public_key_pem(Default::default()).expect("encoded");
            fs::write(bench.path(&format!("{name}.pem")), private.as_bytes()).expect("written");
            fs::write(bench.path(&format!("{name}.pub.pem")), public).expect("written");
        }
        // What UEFI on arm64 starts.
        let mut kernel = vec![7; 100_000];
        kernel[..2].copy_from_slice(b"MZ");
        kernel[0x3c..0x46].copy_from_slice(b"\x40\0\0\0PE\0\0\x64\xaa");
        fs::write(bench.path("kernel"), kernel).expect("written");
        bench.start_controller();
        bench
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().expect("UTF-8").to_owned()
    }

    fn start_controller(&mut self) {
        let (listen, keys) = (self.addr.to_string(), self.path("keys.toml"));
        let mut controller = serve(&["controller", "--listen", &listen, "--keys", &keys, "--prefer-tree"]);
        let line = controller.line();
        self.addr = line.strip_prefix("listening ").and_then(|addr| addr.parse().ok()).expect("an address");
        self.controller = Some(controller);
    }

    /// Build an image, whose initramfs differs from that of every other version; returns its path.
    fn image(&self, version: &str, epoch: u64, key: &str) -> String {
        let (output, key) = (self.path(&format!("{version}-{key}.bfb")), self.path(&format!("{key}.pem")));
        let (kernel, initramfs) = (self.path("kernel"), self.path("initramfs"));
        let contents: Vec<u8> = version.bytes().cycle().take(INITRAMFS_LEN_BYTES).collect();
        fs::write(&initramfs, contents).expect("written");
        let mut args = vec!["image", "build", "--kernel", &kernel, "--initramfs", &initramfs, "-o", &output];
        let epoch = epoch.to_string();
        args.extend(["--image-version", version, "--epoch", &epoch, "--sign-key", &key]);
        let built = sumac(&args);
        assert_eq!(exit_status(&built), 0, "{}", stderr(&built));
        output
    }

    /// The agent's words, with slots of which A holds version 1.0 of epoch 1, confirmed.
    fn agent_words(&self, name: &str, nth: u8) -> Vec<String> {
        let paths = ["a", "b"].map(|slot| self.path(&format!("{name}.{slot}")));
        let blocks = paths.each_ref().map(|path| FileBlocks::create(FilePath::new(path), 16 << 20).expect("a file"));
        let mut slots = Slots::new(blocks).expect("large enough");
        let mut updater = Updater::new(Policy::default(), None, sumac_hal::time::Instant::ZERO);
        // SHA-256 of no bytes at all (FIPS 180-4).
        let digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let byte = |at: usize| u8::from_str_radix(&digest[2 * at..2 * at + 2], 16).expect("two digits");
        let offer = Offer { version: "1.0".into(), epoch: 1, len_bytes: 0, sha256: std::array::from_fn(byte) };
        for event in [Event::Begin(&offer), Event::Finish] {
            updater.handle(event, &mut slots).expect("written");
        }
        let selected = slots.select().expect("one");
        let mut updater = Updater::new(Policy::default(), Some(selected), sumac_hal::time::Instant::ZERO);
        updater.handle(Event::Healthy, &mut slots).expect("written");
        let public = fs::read_to_string(self.path("sign.pub.pem")).expect("a key");
        let [_, a, b, c] = std::process::id().to_be_bytes();
        vec![
            format!("name={name}"),
            format!("controller={}", self.addr),
            format!("ip=127.{}.{b}.{c}/8", 128 | nth << 5 | a & 31),
            format!("key-file={}", self.path(&format!("{name}.key"))),
            format!("slots={},{}", paths[0], paths[1]),
            format!("update-key={}", public.lines().nth(1).expect("three lines")),
            "confirm-after=1".into(),
        ]
    }

    /// `sumac card ...`, for leaf0 unless `args` name another.
    fn card_args(&self, args: &[&str]) -> Vec<String> {
        let own = ["--controller".into(), self.addr.to_string(), "--key-file".into(), self.path("operator.key")];
        let named = args.contains(&"--name");
        let name: &[&str] = if named { &[] } else { &["--name", "leaf0"] };
        ["card"].iter().chain(args).chain(name).map(|word| (*word).to_owned()).chain(own).collect()
    }

    fn card(&self, args: &[&str]) -> Output {
        let args = self.card_args(args);
        sumac(&args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// `sumac card ... --json`, and the last line that it prints.
    fn card_json(&self, args: &[&str]) -> (Output, Value) {
        let output = self.card(&[args, &["--json"]].concat());
        let text = stdout(&output);
        let last = text.lines().last().unwrap_or_else(|| panic!("{}", stderr(&output)));
        let value = serde_json::from_str(last).expect("JSON");
        (output, value)
    }

    fn status(&self) -> Value {
        let output = sumac(&[
            "status",
            "--json",
            "--controller",
            &self.addr.to_string(),
            "--key-file",
            &self.path("operator.key"),
        ]);
        serde_json::from_str(&stdout(&output)).unwrap_or_else(|_| panic!("{}", stderr(&output)))
    }

    /// Wait until a device is registered.
    fn wait_for_device(&self, name: &str) {
        wait_until("no device", || {
            self.status()["devices"]
                .as_array()
                .is_some_and(|devices| devices.iter().any(|device| device["name"] == name))
        });
    }
}

/// What ranks report of their calls.
#[derive(Default)]
struct Progress {
    rounds: AtomicU64,
    /// The path of each of rank 0's calls, and why it was not the tree.
    calls: Mutex<Vec<(Path, Option<String>)>>,
    /// Tells the ranks to stop; all stop after the same round.
    stops: AtomicBool,
}

/// Run rounds until all ranks are to stop; every element of every round is checked.
fn work(comm: &Communicator, progress: &Progress) {
    for round in 0.. {
        let outcome = checked_sum(comm, round, LEN).expect("a sum");
        let host_collective = CallOptions { algo: Some(Algo::RecursiveDoubling), ..CallOptions::default() };
        let mut stops = [u64::from(progress.stops.load(Ordering::SeqCst))];
        comm.all_reduce_with(&mut stops, ReduceOp::Max, &host_collective).expect("a maximum");
        if comm.rank() == 0 {
            let why = outcome.fallback.as_deref().map(str::to_owned);
            progress.calls.lock().expect("no panic").push((outcome.path, why));
            progress.rounds.fetch_add(1, Ordering::SeqCst);
        }
        if stops[0] > 0 {
            return;
        }
    }
}

/// Stops the ranks when it is dropped, also if the script fails.
struct Stop<'p>(&'p Progress);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stops.store(true, Ordering::SeqCst);
    }
}

/// Run a job, and call `script` once it reduces through the tree.
fn with_job(bench: &mut Bench, script: impl FnOnce(&mut Bench, &Progress)) {
    let progress = Progress::default();
    let addr = bench.addr;
    let key = read_key(FilePath::new(&bench.path("ml.key"))).expect("a key");
    thread::scope(|scope| {
        let stop = Stop(&progress);
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let (progress, key) = (&progress, key.clone());
                scope.spawn(move || {
                    let mut config = JoinConfig::new(addr, "job", rank, RANKS);
                    (config.key, config.tenant, config.transport) = (Some(key), "ml".into(), Transport::Udp);
                    let comm = Communicator::join(config).expect("join");
                    work(&comm, progress);
                    comm.leave();
                })
            })
            .collect();
        wait_until("no round in the tree", || last_path(&progress) == Some(Path::Tree));
        script(bench, &progress);
        drop(stop);
        ranks.into_iter().for_each(|rank| rank.join().expect("a rank panicked"));
    });
}

fn last_path(progress: &Progress) -> Option<Path> {
    progress.calls.lock().expect("no panic").last().map(|(path, _)| *path)
}

/// The job of a live agent goes on by host collectives with the reason, and is back on the tree after the update.
fn live_agent_is_updated_while_its_job_goes_on() {
    let mut bench = Bench::new();
    let agent = Service::start(bench.agent_words("leaf0", 0));
    bench.wait_for_device("leaf0");
    let image = bench.image("2.0", 2, "sign");
    let public = bench.path("sign.pub.pem");
    with_job(&mut bench, |bench, progress| {
        let before = progress.calls.lock().expect("no panic").len();
        let (output, last) = bench.card_json(&["update", &image, "--key", &public]);
        assert_eq!(exit_status(&output), 0, "{last}: {}", stderr(&output));
        assert_eq!(
            (&last["outcome"], &last["slot"], &last["version"]),
            (&"confirmed".into(), &"B".into(), &"2.0".into())
        );
        assert_eq!((&last["epoch"], &last["changed"], &last["device"]), (&2.into(), &true.into(), &"leaf0".into()));
        assert_eq!(agent.starts(), 2, "the service was started again once");
        wait_until("not back on the tree", || last_path(progress) == Some(Path::Tree));
        wait_until("the controller does not say so", || bench.status()["jobs"][0]["path"] == "tree");
        let calls = progress.calls.lock().expect("no panic").clone();
        let fallbacks: Vec<_> = calls[before..].iter().filter(|(path, _)| *path != Path::Tree).collect();
        let named = |(_, why): &&&(Path, Option<String>)| {
            why.as_deref().is_some_and(|why| why.contains("device leaf0 restarts for an update to 2.0"))
        };
        assert!(fallbacks.iter().filter(named).count() > 0, "{fallbacks:?}");
        let status = bench.status();
        assert!(status["recoveries"].to_string().contains("restarts for an update to 2.0"), "{status}");
        let slots = &status["devices"][0]["slots"];
        assert_eq!((&slots["running"], &slots["images"][1]["version"]), (&"B".into(), &"2.0".into()), "{slots}");

        // The second time nothing is to be done.
        let (output, last) = bench.card_json(&["update", &image]);
        assert_eq!((exit_status(&output), &last["changed"], agent.starts()), (0, &false.into(), 2), "{last}");
        let text =
            sumac(&["status", "--controller", &bench.addr.to_string(), "--key-file", &bench.path("operator.key")]);
        assert!(
            stdout(&text).contains("runs slot B version 2.0 epoch 2 confirmed; slot A version 1.0"),
            "{}",
            stdout(&text)
        );
    });
    // Its other slot has an older epoch.
    let refused = bench.card(&["rollback"]);
    assert_eq!(exit_status(&refused), 1);
    assert!(stdout(&refused).contains("older epochs are refused"), "{}", stdout(&refused));
    let (output, last) = bench.card_json(&["update", &bench.image("2.1", 2, "sign"), "--no-wait"]);
    assert_eq!((exit_status(&output), &last["slot"]), (0, &"A".into()), "{last}");
    let confirmed = bench.card(&["confirm"]);
    assert_eq!(exit_status(&confirmed), 0, "{}", stdout(&confirmed));
    assert!(stdout(&confirmed).contains("slot A  version 2.1  epoch 2  confirmed"), "{}", stdout(&confirmed));
    let (output, last) = bench.card_json(&["rollback"]);
    assert_eq!((exit_status(&output), &last["slot"], &last["version"]), (0, &"B".into(), &"2.0".into()), "{last}");
    assert_eq!(agent.starts(), 4);
}

/// The controller is killed in mid-transfer, and another one starts at its address.
fn transfer_survives_a_restart_of_the_controller() {
    let mut bench = Bench::new();
    let agent = Service::start(bench.agent_words("leaf0", 1));
    bench.wait_for_device("leaf0");
    let image = bench.image("2.0", 2, "sign");
    let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
    command.args(bench.card_args(&["update", &image, "--json"])).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut update = command.spawn().expect("started");
    let lines = BufReader::new(update.stdout.take().expect("piped")).lines();
    let mut lines = lines.map(|line| serde_json::from_str::<Value>(&line.expect("a line")).expect("JSON"));
    let half = lines.find(|line| line["bytes"].as_u64() > Some(INITRAMFS_LEN_BYTES as u64 / 4)).expect("progress");
    bench.controller.take().expect("it runs").kill();
    bench.start_controller();
    let rest: Vec<Value> = lines.collect();
    assert_eq!(update.wait().expect("ended").code(), Some(0), "{rest:?}");
    assert!(rest.iter().any(|line| line["event"] == "retrying"), "{rest:?}");
    // It goes on where it was.
    let next = rest.iter().find_map(|line| line["bytes"].as_u64()).expect("progress");
    assert!(next >= half["bytes"].as_u64().expect("a number"), "{half}, then {next}");
    let last = rest.last().expect("an outcome");
    assert_eq!((&last["outcome"], &last["version"]), (&"confirmed".into(), &"2.0".into()), "{last}");
    assert_eq!(agent.starts(), 2);
}

/// In mid-transfer a second operator is refused, and nothing is lost; once the first one was killed, it takes over.
fn second_operator_takes_over_once_the_first_has_gone() {
    let bench = Bench::new();
    let agent = Service::start(bench.agent_words("leaf0", 3));
    bench.wait_for_device("leaf0");
    let (first, second) = (bench.image("2.0", 2, "sign"), bench.image("2.1", 2, "sign"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
    command.args(bench.card_args(&["update", &first, "--json"])).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut update = command.spawn().expect("started");
    let mut lines = BufReader::new(update.stdout.take().expect("piped")).lines();
    lines.find(|line| line.as_ref().expect("a line").contains("progress")).expect("a transfer").expect("a line");
    // Stopped, so that it holds the card for as long as the test needs.
    signal(&update, "STOP");
    let holder = format!("process {}", update.id());
    for args in [&["update", &second][..], &["confirm"], &["rollback"]] {
        let refused = bench.card(args);
        let text = stdout(&refused);
        let is_named = text.contains("is being updated by") && text.contains(&holder);
        // What changes nothing needs no hold: there is no trial, and no other slot.
        let is_idle = text.contains("as before") || text.contains("slot B holds nothing");
        assert!(is_named || args[0] != "update" && is_idle, "{args:?}: {text}");
    }
    assert_eq!(bench.status()["devices"][0]["slots"]["images"][0]["version"], "1.0");
    signal(&update, "KILL");
    update.wait().expect("killed");
    let deadline = Instant::now() + LONG;
    let (output, last) = loop {
        let (output, last) = bench.card_json(&["update", &second]);
        // The controller has to notice that the connection has ended.
        let is_held = last["message"].as_str().is_some_and(|why| why.contains(&holder));
        if !is_held || Instant::now() >= deadline {
            break (output, last);
        }
    };
    assert_eq!((exit_status(&output), &last["version"], &last["slot"]), (0, &"2.1".into(), &"B".into()), "{last}");
    assert_eq!(agent.starts(), 2);
}

fn signal(child: &std::process::Child, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status();
    assert!(sent.expect("kill").success());
}

fn wrong_usage_and_refusals_have_their_exit_statuses() {
    let bench = Bench::new();
    let agent = Service::start(bench.agent_words("leaf0", 2));
    let plain = serve(&[
        "device",
        "--name",
        "leaf1",
        "--controller",
        &bench.addr.to_string(),
        "--key-file",
        &bench.path("leaf1.key"),
    ]);
    bench.wait_for_device("leaf0");
    bench.wait_for_device("leaf1");
    let (good, other) = (bench.image("2.0", 2, "sign"), bench.image("2.0", 2, "other"));
    let (damaged, unsigned) = (bench.path("damaged.bfb"), bench.path("unsigned.bfb"));
    let mut bytes = fs::read(&good).expect("an image");
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    fs::write(&damaged, &bytes).expect("written");
    fs::write(&unsigned, b"not a stream").expect("written");
    let public = bench.path("sign.pub.pem");
    for (status, args, says) in [
        (2, &["update", &damaged][..], "damaged"),
        (2, &["update", &unsigned], "unsigned.bfb"),
        (2, &["update", "/nonexistent"], "cannot read"),
        (2, &["update", &other, "--key", &public], "not signed by the key"),
        (2, &["update", &good, "--name", ""], "use 1 to 64 printable ASCII characters"),
        (2, &["update", &good, "--name", "leaf0,"], "use 1 to 64 printable ASCII characters"),
        (2, &["update", &good, "--parallel", "0"], "parallel"),
        (1, &["update", &good, "--name", "leaf9"], "not connected"),
        (1, &["update", &good, "--name", "leaf1"], "sumac flash"),
        (1, &["update", &other], "not signed by the key"),
        (1, &["update", &bench.image("0.9", 0, "sign")], "older epochs are refused; the card runs slot A, version 1.0"),
        (1, &["rollback"], "slot B holds nothing"),
        (0, &["confirm"], "as before"),
    ] {
        let output = bench.card(args);
        let text = format!("{}{}", stdout(&output), stderr(&output));
        assert_eq!((exit_status(&output), text.contains(says)), (status, true), "{args:?}: {text}");
    }
    // No controller hears of what cannot be a name: nothing listens there.
    for command in ["rollback", "confirm"] {
        let output = sumac(&["card", command, "--name", "x\ty", "--controller", "127.0.0.1:9"]);
        assert!(exit_status(&output) == 2 && stderr(&output).contains("printable ASCII"), "{}", stderr(&output));
    }
    // Of several cards, the failure of one stops no other.
    let several = bench.card(&["update", &good, "--name", "leaf9,leaf0,leaf1"]);
    let text = stdout(&several);
    assert_eq!(exit_status(&several), 1, "{text}");
    assert!(text.contains("leaf0  slot B  version 2.0") && text.matches("FAILED").count() == 2, "{text}");
    // A tenant's key, and none.
    let address = bench.addr.to_string();
    let tenant =
        sumac(&["card", "confirm", "--name", "leaf0", "--controller", &address, "--key-file", &bench.path("ml.key")]);
    assert_eq!(exit_status(&tenant), 1);
    assert!(stdout(&tenant).contains("tenant ml is not good for updates of devices"), "{}", stdout(&tenant));
    let keyless = sumac(&["card", "confirm", "--name", "leaf0", "--controller", &address]);
    assert_eq!(exit_status(&keyless), 1, "{}", stdout(&keyless));
    assert_eq!(agent.starts(), 2);
    drop(plain);
}
