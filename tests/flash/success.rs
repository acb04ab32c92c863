//! Cards that become ready, and the output and settings on the way.

use super::rshim::{Script, When};
use super::{Bench, INSTALL, Ran};
use ed25519_dalek::SigningKey;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::sync::atomic::Ordering;
use std::time::Duration;
use sumac_agent::log::{LINUX_UP, Log};
use sumac_agent::supervisor::{Readiness, announce};
use sumac_firmware::bfb::Source;
use sumac_firmware::enrolment;
use sumac_firmware::manifest::{Manifest, Trust, envelope};
use sumac_firmware::payload;
use sumac_firmware::tail::Fifo;
use sumac_hal::ctrl::secure::{Key, KeyId, write_new_key};

/// The pause between two announcements of the agent; a card's is longer.
const PAUSE: Duration = Duration::from_millis(10);

/// Flash to a good card and check that it succeeds.
fn well(bench: &Bench, script: Script, more: &[&str]) -> Option<Ran> {
    let ran = bench.flash(script, more)?;
    ran.check(bench, 0, "ready");
    ran.check_restored(1);
    assert!(ran.seen.received == bench.image, "not the image");
    assert_eq!((ran.seen.opens, ran.seen.closes, ran.seen.resets), (1, 1, 0));
    Some(ran)
}

#[test]
fn flashed_card_receives_the_image_and_reports_ready() {
    let bench = Bench::new();
    let Some(ran) = well(&bench, Script::good(bench.image.len()), &[]) else { return };
    assert_eq!(ran.json["seen"], "INFO[MISC]: DPU is ready");
    assert_eq!(ran.json["boot_log"].as_array().map(Vec::len), Some(4), "{}", ran.json);
    for part in ["BlueField-3(Rev 1)", "pcie-0000:04:00.2", "boots from eMMC", "1.2.3", "epoch 3", "signed by"] {
        assert!(ran.stderr.contains(part), "{part} is not shown: {}", ran.stderr);
    }
}

/// The line is read before the last byte counts as written, as on a host that was too busy to notice.
#[test]
fn ready_line_that_came_too_early_counts_once_it_is_repeated() {
    let bench = Bench::new();
    let log = [(When::Reading(0), "INFO[MISC]: DPU is ready")];
    let Some(ran) = well(&bench, Script::with_log(bench.image.len(), &log), &[]) else { return };
    assert_eq!(ran.json["boot_log"].as_array().map(Vec::len), Some(2), "{}", ran.json);
}

/// Return what `sumac image tail` writes.
pub(super) fn tail(bench: &Bench) -> Vec<u8> {
    let path = |name: &str| bench.path(name).display().to_string();
    let output = bench.sumac(&["image", "tail", &path("image.bfb"), "-o", &path("tail")]);
    assert!(output.status.success(), "{output:?}");
    fs::read(bench.path("tail")).expect("written")
}

#[test]
fn install_sends_manifest_and_payload_behind_the_image() {
    let bench = Bench::new();
    let tail = tail(&bench);
    let key = Key::new(KeyId(7), [0x5a; 32]);
    let key_path = bench.path("leaf0.key");
    write_new_key(&key_path, &key, "device leaf0").expect("written");
    let image = [&bench.image[..], &enrolment::emit(&key), &tail].concat();
    let whole = Bench { image, ..bench };
    let key_file = key_path.display().to_string();
    let Some(ran) = well(&whole, Script::good(whole.image.len()), &[INSTALL, "--key-file", &key_file]) else { return };
    assert!(!ran.stderr.contains("until the next reset"), "{}", ran.stderr);
    // What the card makes of it.
    let mut fifo = Fifo::new(&whole.image[whole.image.len() - tail.len()..], |_| false);
    let announced = fifo.read_tail().expect("a tail").payload.expect("a payload");
    let trusted = SigningKey::from_bytes(&[7; 32]).verifying_key();
    let manifest = envelope::open::<Manifest>(&announced.manifest, Trust::Key(&trusted)).expect("signed");
    let offer = manifest.offer().expect("a payload");
    let mut volume = vec![0; announced.len_bytes as usize];
    fifo.read_piece(&mut volume, announced.len_bytes).expect("whole");
    assert_eq!((offer.epoch, offer.len_bytes, offer.version.as_str()), (3, announced.len_bytes, "1.2.3"));
    let source = |name: &str| Source::file(&whole.path(name)).expect("there");
    let mut built = payload::build(&source("kernel"), &source("initramfs")).expect("fits");
    let mut expected = Vec::new();
    built.file.read_to_end(&mut expected).expect("readable");
    assert!(offer.sha256 == built.sha256 && volume == expected, "another payload");
    let args = fs::read(whole.path("image.bfb")).expect("there");
    let key_argument = b"sumac.update-key=MCowBQYDK2VwAyEA";
    assert!(args.windows(key_argument.len()).any(|window| window == key_argument), "the card knows whom to trust");
}

#[test]
fn image_from_memory_is_said_to_last_until_the_next_reset() {
    let bench = Bench::new();
    let Some(ran) = well(&bench, Script::good(bench.image.len()), &[]) else { return };
    assert!(ran.stderr.contains("runs from the card's memory, until the next reset"), "{}", ran.stderr);
    // A stream without a kernel cannot be installed, and is not silently run from memory.
    let path = |name: &str| bench.path(name).display().to_string();
    let (base, key, out) = (path("base.bfb"), path("key.pem"), path("image.bfb"));
    let output = bench.sumac(&["image", "repack", &base, "--image-version", "1", "--sign-key", &key, "-o", &out]);
    assert!(output.status.success(), "{output:?}");
    let ran = bench.flash(Script::good(1), &[INSTALL]).expect("FUSE is there");
    assert_eq!((ran.status, ran.seen.opens), (2, 0), "{}", ran.stderr);
    assert!(ran.stderr.contains("--ram") && ran.stderr.contains("no payload"), "{}", ran.stderr);
}

#[test]
fn device_key_follows_the_image_and_is_shown_nowhere() {
    let bench = Bench::new();
    let key = Key::new(KeyId(7), [0x5a; 32]);
    let path = bench.path("leaf0.key");
    write_new_key(&path, &key, "device leaf0").expect("written");
    let image = [&bench.image[..], &enrolment::emit(&key)[..]].concat();
    let bench = Bench { image, ..bench };
    let key_file = path.display().to_string();
    let Some(ran) = well(&bench, Script::good(bench.image.len()), &["--key-file", &key_file]) else { return };
    assert!(ran.stderr.contains("device key 0000000000000007 follows the image"), "{}", ran.stderr);
    assert!(!format!("{}{}", ran.stderr, ran.json).contains(&"5a".repeat(8)), "{}", ran.stderr);
    let refused = |more: &[&str], why: &str| {
        let ran = bench.flash(Script::good(bench.image.len()), more).expect("FUSE is there");
        assert_eq!((ran.status, ran.seen.opens), (2, 0), "{}", ran.stderr);
        assert!(ran.stderr.contains(why), "{}", ran.stderr);
    };
    // A vendor's installer would run the key as a command.
    refused(&["--key-file", &key_file, "--allow-unsigned"], "--allow-unsigned");
    fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).expect("ours");
    refused(&["--key-file", &key_file], "chmod 600");
}

#[test]
fn slow_and_short_writes_deliver_every_byte() {
    let bench = Bench::new();
    for write_max in [1000, 4096, 8] {
        // 8 bytes are one word of the FIFO per write; a short stream suffices.
        let mut script = Script { write_max, ..Script::good(bench.image.len()) };
        if write_max == 8 {
            script.write_max = 808;
            script.write_error = Some((90_000, fuser::Errno::EINTR));
        }
        if well(&bench, script, &[]).is_none() {
            return;
        }
    }
}

#[test]
fn other_ready_lines_and_boot_modes_succeed() {
    let bench = Bench::new();
    let len = bench.image.len();
    let linux_up = [(When::Reading(2), "INFO[MISC]: Linux up")];
    let Some(ran) = well(&bench, Script::with_log(len, &linux_up), &["--until", "linux-up"]) else { return };
    assert_eq!(ran.json["seen"], "INFO[MISC]: Linux up");
    let rebooting = [(When::Reading(2), "INFO[MISC]: Rebooting...")];
    well(&bench, Script::with_log(len, &rebooting), &["--until", "rebooting"]);
    // A generation without BF_MODE and with different images.
    well(&bench, Script { generation: 2, ..Script::good(len) }, &[]);
    // Drivers without CLEAR_ON_READ keep the log.
    let kept = Script { refused_key: Some("CLEAR_ON_READ"), ..Script::good(len) };
    well(&bench, kept, &[]);
}

#[test]
fn vendor_image_and_logged_errors_need_an_option() {
    let bench = Bench::new();
    let image = bench.path("image.bfb").display().to_string();
    let info = r#"info={"Name":"a vendor's bundle"}"#;
    let repacked = bench.sumac(&["image", "repack", &image, "--text", info, "-o", &image]);
    assert!(repacked.status.success(), "{repacked:?}");
    let bench = Bench { image: fs::read(&image).expect("there"), ..bench };
    let len = bench.image.len();
    let Some(ran) = bench.flash(Script::good(len), &[]) else { return };
    assert_eq!((ran.status, ran.seen.opens), (2, 0), "{}", ran.stderr);
    // What the card's Linux logs does not end flashing.
    let log = [(When::Reading(1), "ERR[MISC]: a fan is loud"), (When::Reading(2), "INFO[MISC]: DPU is ready")];
    well(&bench, Script::with_log(len, &log), &["--allow-unsigned"]);
    let log = [(When::Reading(1), "ERR[UEFI]: a fan is loud"), (When::Reading(2), "INFO[MISC]: DPU is ready")];
    let ran = well(&bench, Script::with_log(len, &log), &["--allow-unsigned", "--tolerate-errors"]).expect("FUSE");
    assert!(ran.stderr.contains("NOT CHECKED for a signature"), "{}", ran.stderr);
}

#[test]
fn wrapped_boot_log_neither_hides_nor_fakes_success() {
    let bench = Bench::new();
    let mut script = Script::good(bench.image.len());
    let flood: Vec<_> =
        (0..200).map(|line| (When::Reading(3), format!("INFO[BL31]: line {line} of a flood"))).collect();
    // After `Linux up`, before `DPU is ready`.
    script.log.splice(3..3, flood);
    let Some(ran) = well(&bench, script, &[]) else { return };
    let shown = |line: &str| ran.json["boot_log"].to_string().contains(&format!("{line} of a flood"));
    // Four words each, with their headers.
    assert!(shown("line 30") && !shown("line 31"), "127 words hold the oldest lines: {}", ran.json);
}

/// The agent itself writes to the card's side of the log: more warnings than the log holds, while the host locks it.
#[test]
fn ready_line_of_the_agent_gets_through_a_full_and_locked_log() {
    let bench = Bench::new();
    let script = Script { locked_writes: 30, ..Script::with_log(bench.image.len(), &[]) };
    let Some(card) = bench.card(script) else { return };
    let args = bench.flash_args(&["--until", "ready"]);
    let mut command = bench.command(&args.iter().map(String::as_str).collect::<Vec<_>>());
    // Shows every line of the boot log.
    command.env("SUMAC_LOG", "info");
    let process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
    card.wait("the image", |seen| seen.received.len() == bench.image.len());
    let readings = card.seen().readings;
    // Lines of the first reading after the last byte do not count.
    card.wait("another reading", |seen| seen.readings > readings + 2);
    let log = Log::new([bench.path("rshim0/rsh_log")]);
    log.info(LINUX_UP);
    (0..8).for_each(|module| log.warn(&format!("module {module}: {}", "no such device ".repeat(10))));
    // A boot stage that fills what the limit on warnings has left.
    (0..20).for_each(|line| log.info(&format!("line {line} of a flood: {}", "x".repeat(80))));
    let readiness = Readiness::default();
    readiness.is_serving.store(true, Ordering::Relaxed);
    let pauses =
        std::iter::from_fn(|| (!card.seen().settings.iter().any(|set| set == "CLEAR_ON_READ 0")).then_some(PAUSE));
    announce(&log, &readiness, pauses);
    let ran = Ran::new(process.wait_with_output().expect("ended"), card);
    ran.check(&bench, 0, "ready");
    assert!(ran.stderr.contains("WARN[MISC]: module 0"), "{}", ran.stderr);
    assert!(!ran.stderr.contains("module 4:"), "warnings are limited: {}", ran.stderr);
}

#[test]
fn configuration_and_root_file_system_follow_a_vendors_image() {
    let bench = Bench::new();
    fs::write(bench.path("bf.cfg"), "UPDATE_ATF_UEFI=no").expect("written");
    fs::write(bench.path("root.tar.xz"), [&b"\xfd7zXZ\0"[..], &[7; 100_000]].concat()).expect("written");
    fs::write(bench.path("other"), [0; 100]).expect("written");
    let path = |name: &str| bench.path(name).display().to_string();
    let (config, rootfs, other) = (path("bf.cfg"), path("root.tar.xz"), path("other"));
    let tail = [&b"UPDATE_ATF_UEFI=no\n"[..], &fs::read(&rootfs).expect("there")].concat();
    let len = bench.image.len();
    let refused = |more: &[&str], why: &str| {
        let ran = bench.flash(Script::good(len), more)?;
        assert!(ran.status == 2 && ran.seen.opens == 0 && ran.stderr.contains(why), "{why}: {}", ran.stderr);
        Some(())
    };
    let Some(()) = refused(&["--config", &config], "--key") else { return };
    refused(&["--allow-unsigned", "--config", &other], "must be text");
    refused(&["--allow-unsigned", "--rootfs", &other], "not a file of xz");
    let whole = Bench { image: [&bench.image[..], &tail].concat(), ..bench };
    // The system that is up before the last byte reads the tail.
    let held = Some((len as u64 + 40_000, 4));
    let log = [(When::Reading(2), "INFO[MISC]: Linux up")];
    let script = Script { write_max: 4096, held, ..Script::with_log(len, &log) };
    let more = ["--allow-unsigned", "--config", &config, "--rootfs", &rootfs, "--until", "linux-up"];
    well(&whole, script, &more);
    // The same in the file, as `cat bfb bf.cfg` makes it.
    fs::write(whole.path("image.bfb"), &whole.image).expect("written");
    let ran = well(&whole, Script::good(len), &["--allow-unsigned"]).expect("FUSE is there");
    assert!(ran.stderr.contains(&format!("{} bytes follow the last image", tail.len())), "{}", ran.stderr);
    refused_with_key(&whole);
}

/// Nothing that no signature covers is sent with an image that is ours.
fn refused_with_key(bench: &Bench) {
    let ran = bench.flash(Script::good(bench.image.len()), &[]).expect("FUSE is there");
    assert!(ran.status == 2 && ran.seen.opens == 0 && ran.stderr.contains("bf.cfg"), "{}", ran.stderr);
}

#[test]
fn boot_log_is_kept_on_request() {
    let bench = Bench::new();
    let Some(ran) = well(&bench, Script::good(bench.image.len()), &["--keep-log"]) else { return };
    assert!(!ran.seen.settings.iter().any(|set| set == "CLEAR_ON_READ 1"), "{:?}", ran.seen.settings);
}

/// Folders and files stand in for the network driver's in sysfs.
#[test]
fn card_in_nic_mode_is_updated_without_the_hosts_driver() {
    let bench = Bench::new();
    let driver = bench.path("sys/bus/pci/drivers/mlx5_core");
    fs::create_dir_all(driver.join("0000:04:00.0")).expect("made");
    fs::create_dir_all(driver.join("0000:04:00.1")).expect("made");
    for file in ["bind", "unbind"] {
        fs::write(driver.join(file), "").expect("made");
    }
    let written = |file: &str| fs::read_to_string(driver.join(file)).expect("there");
    let len = bench.image.len();
    let log = [(When::Reading(2), "INFO[MISC]: Linux up"), (When::Reading(4), "INFO[MISC]: In Enhanced NIC mode")];
    let nic = Script { bf_mode: "NIC mode", ..Script::with_log(len, &log) };
    let more = ["--allow-unsigned", "--nic-mode"];
    let Some(ran) = well(&bench, nic.clone(), &more) else { return };
    assert_eq!(ran.json["seen"], "INFO[MISC]: In Enhanced NIC mode");
    assert_eq!(written("unbind"), "0000:04:00.00000:04:00.1");
    assert_eq!(written("bind"), "", "sysfs still shows the driver on the card");
    // As after an unbinding that took effect; a failure binds again, too.
    fs::write(driver.join("unbind"), "").expect("written");
    fs::remove_dir(driver.join("0000:04:00.1")).expect("removed");
    let fails = Script { open_error: Some(fuser::Errno::EBUSY), ..nic };
    let card = bench.card(fails).expect("FUSE is there");
    let args = bench.flash_args(&more);
    let mut command = bench.command(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
    while written("unbind").is_empty() {
        std::thread::yield_now();
    }
    fs::remove_dir(driver.join("0000:04:00.0")).expect("removed");
    let ran = Ran::new(process.wait_with_output().expect("ended"), card);
    ran.check(&bench, 15, "busy");
    assert_eq!((written("unbind"), written("bind")), ("0000:04:00.0".into(), "0000:04:00.0".into()));
    // A card in DPU mode is not updated like this.
    let ran = bench.flash(Script::good(len), &more).expect("FUSE is there");
    assert!(ran.status == 2 && ran.stderr.contains("DPU mode"), "{}", ran.stderr);
}

/// The advice after a panic is followed literally.
#[test]
fn advised_recovery_works_on_a_card_that_has_had_an_epoch() {
    let bench = Bench::new();
    let len = bench.image.len();
    let Some(_) = well(&bench, Script::good(len), &[]) else { return };
    let panics = Script::with_log(len, &[(When::Reading(2), "PANIC(BL31): PC = 0x1")]);
    let ran = bench.flash(panics, &[]).expect("FUSE is there");
    let advice = ran.json["advice"].as_str().expect("advice");
    let (_, options) = advice.split_once("sumac flash VENDOR.bfb ").expect("a command");
    let options: Vec<_> = options.split_whitespace().collect();
    let vendor = bench.path("image.bfb").display().to_string();
    let repacked = bench.sumac(&["image", "repack", &vendor, "--drop", "info", "-o", &vendor]);
    assert!(repacked.status.success(), "{repacked:?}");
    let ours = Bench { image: fs::read(&vendor).expect("there"), ..bench };
    let log = [(When::Reading(1), "ERR[MISC]: no BMC firmware"), (When::Reading(2), "INFO[MISC]: Rebooting...")];
    let len = ours.image.len();
    well(&ours, Script::with_log(len, &log), &options);
    // The vendor's image has no epoch, and that of the card stays.
    let ran = well(&ours, Script::with_log(len, &log), &options).expect("FUSE is there");
    assert!(ran.stderr.contains("last flashed from here: without a manifest, epoch 3"), "{}", ran.stderr);
}

#[test]
fn record_follows_the_serial_number_and_not_the_slot() {
    let bench = Bench::new();
    let device = bench.path("sys/bus/pci/devices/0000:04:00.0");
    fs::create_dir_all(&device).expect("made");
    let insert = |serial: &str| {
        let data =
            [&b"\x90"[..], &[serial.len() as u8 + 3, 0], b"SN", &[serial.len() as u8], serial.as_bytes(), b"\x78"];
        fs::write(device.join("vpd"), data.concat()).expect("written");
    };
    let shown = |ran: &Ran, text: &str| assert!(ran.stderr.contains(text), "{text}: {}", ran.stderr);
    let good = || Script::good(bench.image.len());
    insert("MT1");
    let Some(ran) = well(&bench, good(), &[]) else { return };
    shown(&ran, "serial number MT1");
    shown(&ran, "never flashed from here");
    insert("MT2");
    shown(&bench.flash(good(), &["--dry-run"]).expect("FUSE"), "never flashed from here");
    insert("MT1");
    shown(&bench.flash(good(), &["--dry-run"]).expect("FUSE"), "last flashed from here: 1.2.3, epoch 3");
    // Without a number, the device's own appearance counts.
    fs::remove_file(device.join("vpd")).expect("removed");
    let ran = well(&bench, good(), &[]).expect("FUSE");
    shown(&ran, "never flashed from here");
    shown(&bench.flash(good(), &["--dry-run"]).expect("FUSE"), "last flashed from here: 1.2.3, epoch 3");
    // Unlike sysfs, a file system may give the number of a removed folder again.
    fs::rename(&device, bench.path("removed")).expect("renamed");
    fs::create_dir_all(&device).expect("made");
    let ran = bench.flash(good(), &["--dry-run"]).expect("FUSE");
    shown(&ran, "another card may be in the slot");
    shown(&ran, "never flashed from here");
}

#[test]
fn previous_boot_mode_is_restored() {
    let bench = Bench::new();
    for (before, after) in [(2, 2), (0, 1)] {
        let script = Script { boot_mode: before, ..Script::good(bench.image.len()) };
        let Some(ran) = bench.flash(script, &[]) else { return };
        ran.check(&bench, 0, "ready");
        ran.check_restored(after);
    }
}

#[test]
fn downgrade_is_refused_unless_allowed() {
    let (new, old) = (Bench::with_epoch(5), Bench::with_epoch(4));
    fs::copy(old.path("image.bfb"), new.path("old.bfb")).expect("copied");
    let Some(_) = well(&new, Script::good(new.image.len()), &[]) else { return };
    fs::rename(new.path("old.bfb"), new.path("image.bfb")).expect("renamed");
    let bench = Bench { image: old.image.clone(), ..new };
    let ran = bench.flash(Script::good(bench.image.len()), &[]).expect("FUSE is there");
    assert_eq!((ran.status, ran.seen.opens), (2, 0));
    assert!(ran.stderr.contains("epoch 4") && ran.stderr.contains("had epoch 5"), "{}", ran.stderr);
    let ran = well(&bench, Script::good(bench.image.len()), &["--allow-rollback"]).expect("FUSE is there");
    assert!(ran.stderr.contains("last flashed from here: 1.2.3, epoch 5"), "{}", ran.stderr);
}

#[test]
fn dry_run_and_listing_change_nothing() {
    let bench = Bench::new();
    let Some(ran) = bench.flash(Script::good(bench.image.len()), &["--dry-run"]) else { return };
    assert_eq!((ran.status, ran.json["outcome"].as_str()), (0, Some("dry-run")));
    assert_eq!((ran.seen.opens, ran.seen.settings.len()), (0, 0));
    let card = bench.card(Script { generation: 2, boot_mode: 0, ..Script::good(1) }).expect("FUSE is there");
    let root = bench.folder.path().display().to_string();
    let listed = bench.sumac(&["card", "list", "--root", &root]);
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(text.contains("BlueField-2(Rev 1)") && text.contains("waits for a boot stream"), "{listed:?}");
    let listed = bench.sumac(&["card", "list", "--root", &root, "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&listed.stdout).expect("JSON");
    assert_eq!((&json[0]["generation"], &json[0]["boot_mode"]), (&"bluefield-2".into(), &0.into()));
    let seen = card.seen();
    assert_eq!((seen.opens, seen.settings.len(), seen.readings), (0, 0, 2));
}
