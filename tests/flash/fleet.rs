//! Several cards flashed by one command: each is tried once, none stops another, and what is done is not done again.

use super::Bench;
use super::rshim::{Script, SimulatedCard, UpTime, When};
use fuser::Errno;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

/// The limit on the peak of resident memory of `sumac flash`, in KiB.
const MEMORY_MAX_KIB: u64 = 300 << 10;

/// A host with simulated cards, which have serial numbers.
struct Fleet {
    bench: Bench,
    cards: BTreeMap<usize, SimulatedCard>,
}

/// What a run printed.
#[derive(Default)]
struct Run {
    status: Option<i32>,
    events: Vec<Value>,
    stdout: String,
    stderr: String,
    memory_kib: u64,
}

impl Fleet {
    fn new() -> Self {
        let bench = Bench::new();
        fs::create_dir(bench.path("dev")).expect("made");
        Self { bench, cards: BTreeMap::new() }
    }

    fn good(&self) -> Script {
        Script::good(self.bench.image.len())
    }

    fn folder(&self, number: usize) -> String {
        self.bench.path(&format!("dev/rshim{number}")).display().to_string()
    }

    /// Insert a card with this serial number, in the place of the one that is there; `None` without FUSE.
    fn insert(&mut self, number: usize, serial: &str, script: Script) -> Option<()> {
        self.cards.remove(&number);
        let slot = format!("0000:{:02x}:00", number + 4);
        let device = self.bench.path(&format!("sys/bus/pci/devices/{slot}.0"));
        fs::create_dir_all(&device).expect("made");
        let len = serial.len() as u8;
        let data = [&b"\x90"[..], &[len + 3, 0], b"SN", &[len], serial.as_bytes(), b"\x78"].concat();
        fs::write(device.join("vpd"), data).expect("written");
        fs::create_dir_all(self.folder(number)).expect("made");
        let name = format!("dev/rshim{number}");
        let card = self.bench.card_at(&name, Script { dev_name: format!("pcie-{slot}.2"), ..script })?;
        self.cards.insert(number, card);
        Some(())
    }

    /// Flash with these options. `see` is called with each event as it is printed.
    fn flash(&self, more: &[&str], mut see: impl FnMut(&Value)) -> Run {
        let path = |name: &str| self.bench.path(name).display().to_string();
        let (image, key, root, sysfs) = (path("image.bfb"), path("pub.pem"), path("dev"), path("sys"));
        let args = ["flash", &image, "--key", &key, "--ram", "--root", &root, "--sysfs", &sysfs, "--poll-ms", "100"];
        // Long enough for any machine; tests of time limits set their own.
        let limit: &[&str] = if more.contains(&"--timeout") { &[] } else { &["--timeout", "300"] };
        let mut command = self.bench.command(&[&args[..], limit, more].concat());
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
        let status = format!("/proc/{}/status", process.id());
        let mut stderr = process.stderr.take().expect("a pipe");
        let (mut run, stdout) = (Run::default(), process.stdout.take().expect("a pipe"));
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            stderr.read_to_string(&mut text).expect("text");
            text
        });
        for line in BufReader::new(stdout).lines().map(|line| line.expect("text")) {
            if let Ok(event) = serde_json::from_str::<Value>(&line) {
                see(&event);
                run.events.push(event);
            }
            let status = fs::read_to_string(&status).unwrap_or_default();
            let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
            run.memory_kib = run.memory_kib.max(peak.map_or(0, |peak| peak.trim().parse().expect("a number")));
            run.stdout.extend([&line, "\n"]);
        }
        run.status = process.wait().expect("ended").code();
        run.stderr = reader.join().expect("read");
        run
    }

    /// Return how often each card was opened, and how many settings were changed.
    fn touched(&self) -> Vec<(u32, usize)> {
        self.cards.values().map(|card| card.seen()).map(|seen| (seen.opens, seen.settings.len())).collect()
    }
}

impl Run {
    /// Return the numbers of cards: done, unchanged, failed, not started.
    fn counts(&self) -> [u64; 4] {
        let summary = self.events.last().unwrap_or_else(|| panic!("no events: {}", self.stderr));
        assert_eq!(summary["event"], "summary", "{summary}");
        ["done", "unchanged", "failed", "not_started"].map(|name| summary["counts"][name].as_u64().expect("a number"))
    }

    /// Return how a card ended.
    fn end(&self, number: usize) -> &Value {
        let name = format!("/rshim{number}");
        let is_end = |event: &&Value| {
            event["event"] == "end" && event["card"].as_str().is_some_and(|card| card.ends_with(&name))
        };
        let mut ends = self.events.iter().filter(is_end);
        let end = ends.next().unwrap_or_else(|| panic!("no end of {number}: {}", self.stderr));
        assert!(ends.next().is_none(), "a card ends once");
        end
    }
}

/// The cards that cannot be flashed: (number, outcome, message).
type Bad = [(usize, &'static str, &'static str); 8];

/// Insert 64 cards, of which 8 cannot be flashed, each for a reason of its own.
fn insert_64(fleet: &mut Fleet) -> Option<Bad> {
    let good = fleet.good();
    let log = |lines: &[(When, &str)]| Script::with_log(fleet.bench.image.len(), lines);
    let verify = log(&[(When::Reading(1), "ERR[BL2]: image authentication failed")]);
    let silent = log(&[(When::Written(1), "INFO[BL2]: start")]);
    let unhealthy = log(&[(When::Reading(2), "INFO[MISC]: Linux up")]);
    let bad = [
        (9, Script { open_error: Some(Errno::EBUSY), ..good.clone() }),
        (18, verify),
        (27, silent),
        (36, unhealthy),
        (45, Script { generation: 1, ..good.clone() }),
        (54, good.clone()),
        (63, Script { gone: Some((When::Written(50_000), Errno::ENODEV)), write_max: 4096, ..good.clone() }),
    ];
    for number in 1..64 {
        let script = bad.iter().find(|(bad, _)| *bad == number).map_or(&good, |(_, script)| script);
        fleet.insert(number, &format!("MT{number}"), script.clone())?;
    }
    fs::create_dir_all(fleet.bench.path("cards")).expect("made");
    let newer = r#"{"version":"9","epoch":9,"sha256":"00"}"#;
    fs::write(fleet.bench.path("cards/serial-MT54.json"), newer).expect("written");
    Some([
        (0, "not-found", "no card at"),
        (9, "busy", "open elsewhere"),
        (18, "log-error", "image authentication failed"),
        (27, "time-limit", "Linux has not come up"),
        (36, "time-limit", "Linux is up, but the awaited line"),
        (45, "refused", "no boot loader (bl2) for bluefield-1"),
        (54, "refused", "has had epoch 9"),
        (63, "gone", "has disappeared"),
    ])
}

/// Flash with growing time limits until the cards that work make it, as machines differ in speed.
fn flash_64() -> Option<(Fleet, Run, Bad)> {
    let mut stderr = String::new();
    for timeout_s in ["10", "40", "160"] {
        let mut fleet = Fleet::new();
        let bad = insert_64(&mut fleet)?;
        let names: Vec<_> = (0..64).map(|number| fleet.folder(number)).collect();
        let list = names.join(",");
        let more = ["--rshim", &list, "--parallel", "64", "--json", "--timeout", timeout_s, "--gone-polls", "30"];
        let run = fleet.flash(&more, |_| ());
        if run.counts()[0] == 56 {
            return Some((fleet, run, bad));
        }
        stderr = run.stderr;
    }
    panic!("{stderr}");
}

#[test]
fn one_of_64_cards_does_not_stop_another_and_done_ones_are_not_touched_again() {
    let Some((mut fleet, run, bad)) = flash_64() else { return };
    assert_eq!((run.status, run.counts()), (Some(1), [56, 0, 8, 0]), "{}", run.stderr);
    for (number, outcome, message) in bad {
        let end = run.end(number);
        let found = end["message"].as_str().expect("a message");
        assert!(end["outcome"] == outcome && found.contains(message), "{number}: {end}");
        assert!(run.stderr.contains(&format!("error: rshim{number}: {found}")), "{}", run.stderr);
    }
    eprintln!("64 cards, 8 of them failing: peak of {} KiB, limit {MEMORY_MAX_KIB}", run.memory_kib);
    assert!((1..MEMORY_MAX_KIB).contains(&run.memory_kib), "{} KiB", run.memory_kib);
    for (number, card) in &fleet.cards {
        let seen = card.seen();
        let is_bad = bad.iter().any(|(bad, ..)| bad == number);
        assert!(is_bad || seen.received == fleet.bench.image, "{number} has not got the image");
        let opens = u32::from(![45, 54].contains(number));
        assert_eq!(seen.opens, opens, "{number} is tried once, or not at all");
        assert!(opens == 1 || seen.settings.is_empty(), "{number} was changed");
    }
    // Other cards take the place of those that failed.
    for (number, ..) in bad {
        let good = fleet.good();
        fleet.insert(number, &format!("MT{}", 100 + number), good).expect("FUSE is there");
    }
    let before = fleet.touched();
    let more = ["--continue", "--parallel", "64", "--json"];
    let run = fleet.flash(&more, |_| ());
    assert_eq!((run.status, run.counts()), (Some(0), [8, 56, 0, 0]), "{}", run.stderr);
    for (number, (before, after)) in before.iter().zip(fleet.touched()).enumerate() {
        let is_new = bad.iter().any(|(bad, ..)| *bad == number);
        assert!(if is_new { after.0 == 1 } else { after == *before }, "{number}: {before:?}, {after:?}");
    }
    // None is left.
    let run = fleet.flash(&["--continue", "--json"], |_| ());
    assert!(run.status == Some(2) && run.stderr.contains("--continue"), "{}", run.stderr);
    let before = fleet.touched();
    let run = fleet.flash(&["--all", "--if-different", "--parallel", "64"], |_| ());
    assert_eq!((run.status, &before), (Some(0), &fleet.touched()), "{}", run.stderr);
    assert!(run.stdout.ends_with("0 done, 64 unchanged, 0 failed, 0 not started\n"), "{}", run.stdout);
    assert_eq!(run.stdout.lines().count(), 66, "a head, a line for each card, and their numbers: {}", run.stdout);
    assert!(run.stdout.contains("rshim17  MT17    unchanged"), "{}", run.stdout);
}

#[test]
fn interrupted_run_begins_no_other_card_and_goes_on_later() {
    let mut fleet = Fleet::new();
    let slow = Script { write_max: 16, ..fleet.good() };
    for number in 0..5 {
        let script = if number == 0 { fleet.good() } else { slow.clone() };
        if fleet.insert(number, &format!("MT{number}"), script).is_none() {
            return;
        }
    }
    // One at a time: the first is done, the second is being written.
    let args = [
        "flash",
        "image.bfb",
        "--key",
        "pub.pem",
        "--ram",
        "--root",
        "dev",
        "--sysfs",
        "sys",
        "--all",
        "--parallel",
        "1",
    ];
    let mut command = fleet.bench.command(&[&args[..], &["--poll-ms", "20"]].concat());
    command.current_dir(fleet.bench.folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let process = command.spawn().expect("started");
    fleet.cards[&1].wait("the first bytes", |seen| !seen.received.is_empty());
    kill_process(Pid::from_child(&process), Signal::INT).expect("sent");
    let output = process.wait_with_output().expect("ended");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stdout.ends_with("1 done, 0 unchanged, 1 failed, 3 not started\n"), "{stdout}");
    assert!(stdout.contains("interrupted before its turn"), "{stdout}");
    let opens: Vec<_> = fleet.touched().into_iter().map(|(opens, _)| opens).collect();
    assert_eq!((opens, fleet.cards[&1].seen().resets), (vec![1, 1, 0, 0, 0], 1), "{stderr}");
    for number in 1..5 {
        let good = fleet.good();
        fleet.insert(number, &format!("MT{number}"), good).expect("FUSE is there");
    }
    let run = fleet.flash(&["--continue", "--json"], |_| ());
    assert_eq!((run.status, run.counts()), (Some(0), [4, 1, 0, 0]), "{}", run.stderr);
}

/// The cards' drivers hang until the events of both were read.
#[test]
fn events_are_printed_as_they_happen() {
    let mut fleet = Fleet::new();
    for number in 0..2 {
        let script = Script { hangs: Some(When::Reading(1)), ..fleet.good() };
        if fleet.insert(number, &format!("MT{number}"), script).is_none() {
            return;
        }
    }
    let mut waits = 0;
    let run = fleet.flash(&["--all", "--json"], |event| {
        if event["event"] == "stage" && event["stage"] == "waiting for the card to boot" {
            waits += 1;
            fleet.cards.values().filter(|_| waits == 2).for_each(SimulatedCard::release);
        }
    });
    assert_eq!((run.status, waits), (Some(0), 2), "{}", run.stderr);
    for number in 0..2 {
        let name = format!("/rshim{number}");
        let own = |event: &&Value| event["card"].as_str().is_some_and(|card| card.ends_with(&name));
        let kinds: Vec<_> = run.events.iter().filter(own).map(|event| event["event"].as_str().expect("text")).collect();
        assert_eq!((kinds[0], kinds[kinds.len() - 1]), ("card", "end"), "{kinds:?}");
        for kind in ["stage", "written", "log"] {
            assert!(kinds.contains(&kind), "{kinds:?}");
        }
        let card = run.events.iter().find(own).expect("there");
        assert_eq!((&card["serial"], &card["state"]["mode"]), (&format!("MT{number}").into(), &"DPU".into()));
    }
    assert!(run.events.iter().all(|event| event["time"].as_str().is_some_and(|time| time.ends_with('Z'))));
}

#[test]
fn card_is_left_out_if_it_runs_the_image_and_flashed_again_after_a_reset() {
    let mut fleet = Fleet::new();
    let good = fleet.good();
    if fleet.insert(0, "MT0", good).is_none() {
        return;
    }
    let card = fleet.folder(0);
    let flash = |fleet: &Fleet| {
        let run = fleet.flash(&["--rshim", &card, "--if-different", "--json"], |_| ());
        assert_eq!((run.status, run.events.len()), (Some(0), 1), "{}", run.stderr);
        (run.events[0]["outcome"].as_str().expect("text").to_owned(), fleet.cards[&0].seen().opens, run.stderr)
    };
    let shows = |flashed: (String, u32, String), outcome: &str, opens: u32, why: &str| {
        assert_eq!((flashed.0.as_str(), flashed.1), (outcome, opens), "{}", flashed.2);
        assert!(flashed.2.contains(why), "{why}: {}", flashed.2);
    };
    shows(flash(&fleet), "ready", 1, "flashing it: it has no record");
    shows(flash(&fleet), "unchanged", 1, "");
    // As if the card had been ready long before its last reset.
    let path = fleet.bench.path("cards/serial-MT0.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&path).expect("there")).expect("JSON");
    let ready = record["ready_unix_s"].as_u64().expect("a time");
    record["ready_unix_s"] = (ready - 1000).into();
    fs::write(&path, record.to_string()).expect("written");
    shows(flash(&fleet), "ready", 2, "it has been reset since then");
    shows(flash(&fleet), "unchanged", 2, "");
    // A card that waits for a stream runs nothing.
    fleet.cards[&0].set_boot_mode(0);
    shows(flash(&fleet), "ready", 3, "it waits for a boot stream");
    for (up_time, why) in [
        (UpTime::None, "does not report its time since the last reset"),
        (UpTime::Fixed, "does not restart at a reset"),
    ] {
        let other = Script { up_time, ..fleet.good() };
        fleet.insert(0, "MT0", other).expect("FUSE is there");
        flash(&fleet);
        let opens = fleet.cards[&0].seen().opens;
        shows(flash(&fleet), "ready", opens + 1, why);
    }
}

#[test]
fn pinned_card_is_flashed_with_its_version_only() {
    let mut fleet = Fleet::new();
    for number in 0..2 {
        let good = fleet.good();
        if fleet.insert(number, &format!("MT{number}"), good).is_none() {
            return;
        }
    }
    let (card, sysfs) = (fleet.folder(0), fleet.bench.path("sys").display().to_string());
    let pin = |action: &[&str]| {
        let run = fleet.bench.sumac(&[&["card"][..], action, &["--rshim", &card, "--sysfs", &sysfs]].concat());
        (run.status.code(), String::from_utf8_lossy(&run.stdout).into_owned())
    };
    let (status, stdout) = pin(&["pin", "--image-version", "1.2.3", "--epoch", "2"]);
    assert!(status == Some(0) && stdout.ends_with("pinned to version 1.2.3, epoch 2\n"), "{stdout}");
    let run = fleet.flash(&["--all", "--json"], |_| ());
    assert_eq!((run.status, run.counts(), fleet.touched()[0]), (Some(1), [1, 0, 1, 0], (0, 0)), "{}", run.stderr);
    let message = run.end(0)["message"].as_str().expect("a message");
    assert!(message.contains("pinned to version 1.2.3, epoch 2, the image is version 1.2.3, epoch 3"), "{message}");
    // Any epoch.
    assert_eq!(pin(&["pin", "--image-version", "1.2.3"]).0, Some(0));
    assert_eq!(fleet.flash(&["--continue", "--json"], |_| ()).counts(), [1, 1, 0, 0]);
    assert_eq!(pin(&["pin", "--image-version", "2"]).0, Some(0));
    assert_eq!(fleet.flash(&["--rshim", &card], |_| ()).status, Some(2));
    assert_eq!(pin(&["unpin"]).0, Some(0));
    assert_eq!(fleet.flash(&["--rshim", &card], |_| ()).status, Some(0));
    // The slot alone tells no card.
    fs::remove_file(fleet.bench.path("sys/bus/pci/devices/0000:04:00.0/vpd")).expect("removed");
    assert_eq!(pin(&["pin", "--image-version", "2"]).0, Some(2));
}

#[test]
fn inventory_has_what_linux_shows_of_a_card_and_its_record() {
    let mut fleet = Fleet::new();
    let good = fleet.good();
    if fleet.insert(0, "MT0", good).is_none() {
        return;
    }
    let device = fleet.bench.path("sys/bus/pci/devices/0000:04:00.0");
    for (file, text) in [
        ("infiniband/mlx5_0/board_id", "MT_0000000884"),
        ("infiniband/mlx5_0/fw_ver", "32.39.1002"),
        ("net/eth0/address", "02:00:00:00:00:01"),
    ] {
        fs::create_dir_all(device.join(file).parent().expect("a folder")).expect("made");
        fs::write(device.join(file), format!("{text}\n")).expect("written");
    }
    let (root, sysfs) = (fleet.bench.path("dev"), fleet.bench.path("sys"));
    let list = |more: &[&str]| {
        let (root, sysfs) = (root.display().to_string(), sysfs.display().to_string());
        let listed = fleet.bench.sumac(&[&["card", "list", "--root", &root, "--sysfs", &sysfs][..], more].concat());
        assert!(listed.status.success(), "{listed:?}");
        String::from_utf8_lossy(&listed.stdout).into_owned()
    };
    let known = "serial number MT0, PSID MT_0000000884, NIC firmware 32.39.1002, MAC 02:00:00:00:00:01";
    assert!(list(&[]).ends_with(&format!("{known}, never flashed from here\n")), "{}", list(&[]));
    let run = fleet.flash(&["--all"], |_| ());
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    assert!(list(&[]).contains(&format!("{known}, last flashed from here: 1.2.3, epoch 3, sha256 ")), "{}", list(&[]));
    let json: Value = serde_json::from_str(&list(&["--json"])).expect("JSON");
    let card = &json[0];
    assert_eq!((&card["serial"], &card["psid"]), (&"MT0".into(), &"MT_0000000884".into()), "{json}");
    assert_eq!((&card["record"]["epoch"], &card["not_running"]), (&3.into(), &Value::Null), "{json}");
    assert_eq!(fleet.touched()[0].0, 1, "listing opens no boot node");
}

#[test]
fn lists_that_make_no_sense_are_refused() {
    let fleet = Fleet::new();
    let (one, path) = (fleet.folder(1), |name: &str| fleet.bench.path(name).display().to_string());
    let twice = format!("{one},{one}");
    for (more, why) in [
        (&["--rshim", &twice][..], "twice"),
        (&["--all"], "no cards in"),
        (&["--continue"], "no run with this image"),
        (&["--all", "--rshim", &one], "cannot be used with"),
        (&["--all", "--key-file", &path("key.pem")], "cannot be used with"),
        (&["--rshim", "a,b", "--key-file", &path("key.pem")], "one device"),
    ] {
        let run = fleet.flash(more, |_| ());
        assert!(run.status == Some(2) && run.stderr.contains(why), "{why}: {}", run.stderr);
    }
}
