//! Cards that become ready, and the output and settings on the way.

use super::rshim::{Script, When};
use super::{Bench, Ran};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use sumac_firmware::enrolment;
use sumac_hal::ctrl::secure::{Key, KeyId, write_new_key};

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
    let log = [(When::Reading(1), "ERR[MISC]: a fan is loud"), (When::Reading(2), "INFO[MISC]: DPU is ready")];
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
    assert!(!ran.json.to_string().contains("line 0 of"), "1 KiB holds no 200 lines");
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
