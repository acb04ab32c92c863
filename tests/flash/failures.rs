//! Failures of flashing: each has its own exit status, message and advice, and leaves the card in its previous state.

use super::rshim::{Script, When};
use super::{Bench, Ran};
use fuser::Errno;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::fs::FileExt;
use std::process::Stdio;

/// Flash to a card that must fail; check the invariants of every failure.
fn fails(bench: &Bench, script: Script, more: &[&str], status: i32, name: &str) -> Option<Ran> {
    let boot_mode = script.boot_mode;
    let ran = bench.flash(script, more)?;
    ran.check(bench, status, name);
    ran.check_restored(boot_mode);
    Some(ran)
}

/// Check that flashing fails before it changes anything on the card.
fn refused(bench: &Bench, script: Script, status: i32, name: &str) -> Option<()> {
    let ran = fails(bench, script, &[], status, name)?;
    assert_eq!((ran.seen.opens, ran.seen.settings.len()), (0, 0), "{name}");
    Some(())
}

/// Flash with growing time limits until the run reaches this stage before the limit, as machines differ in speed.
fn timed(bench: &Bench, script: &Script, stage: &str) -> Option<Ran> {
    let mut stderr = String::new();
    for timeout_s in ["1", "5", "25", "125"] {
        let card = bench.card(script.clone())?;
        // A driver whose calls hang soon counts as gone.
        let mut more = vec!["--timeout", timeout_s];
        more.extend(script.hangs.map(|_| ["--gone-polls", "30"]).into_iter().flatten());
        let args = bench.flash_args(&more);
        let output = bench.sumac(&args.iter().map(String::as_str).collect::<Vec<_>>());
        card.release();
        let ran = Ran::new(output, card);
        if ran.stderr.contains(&format!("the last stage was: {stage}")) {
            return Some(ran);
        }
        stderr = ran.stderr;
    }
    panic!("it never came to {stage}: {stderr}");
}

#[test]
fn card_that_accepts_no_stream_is_left_unchanged() {
    let bench = Bench::new();
    let good = Script::good(bench.image.len());
    let run = || -> Option<()> {
        refused(&bench, Script { bf_mode: "NIC mode", ..good.clone() }, 12, "nic-mode")?;
        refused(&bench, Script { is_secure: true, ..good.clone() }, 13, "secure-mode")?;
        refused(&bench, Script { is_dropping: true, ..good.clone() }, 14, "drop-mode")?;
        refused(&bench, Script { gone: Some((When::Before, Errno::ENODEV)), ..good.clone() }, 18, "gone")
    };
    run();
}

#[test]
fn unopenable_boot_node_is_reported_with_its_error() {
    let bench = Bench::new();
    for (errno, status, name) in [
        (Errno::ENODEV, 11, "not-attached"),
        (Errno::EPERM, 13, "secure-mode"),
        (Errno::EINVAL, 14, "drop-mode"),
        (Errno::EBUSY, 15, "busy"),
        (Errno::EACCES, 27, "permission"),
        (Errno::ENOMEM, 30, "io"),
    ] {
        let script = Script { open_error: Some(errno), ..Script::good(bench.image.len()) };
        let Some(ran) = fails(&bench, script, &[], status, name) else { return };
        assert_eq!((ran.seen.opens, ran.seen.resets), (1, 0), "{name}");
    }
}

#[test]
fn failed_write_restores_the_previous_boot_mode() {
    let bench = Bench::new();
    for (errno, status, name) in [
        (Errno::ETIMEDOUT, 17, "not-draining"),
        (Errno::EBUSY, 16, "other-writer"),
        (Errno::ENODEV, 18, "gone"),
        (Errno::ENOSPC, 30, "io"),
    ] {
        let script = Script { write_error: Some((100_000, errno)), ..Script::good(bench.image.len()) };
        let Some(ran) = fails(&bench, script, &[], status, name) else { return };
        assert_eq!((ran.seen.received.len(), ran.seen.resets), (100_000, 1), "{name}");
    }
}

#[test]
fn stalled_stream_is_reported_with_the_boot_log() {
    let bench = Bench::new();
    let log = [(When::Written(64_000), "INFO[BL1]: start")];
    let script = Script { write_error: Some((64_000, Errno::ETIMEDOUT)), ..Script::with_log(bench.image.len(), &log) };
    let Some(ran) = fails(&bench, script, &[], 17, "not-draining") else { return };
    assert!(ran.json["boot_log"].to_string().contains("BL1"), "{}", ran.json);
}

#[test]
fn each_fatal_boot_log_line_fails_the_flash() {
    let bench = Bench::new();
    let len = bench.image.len();
    for (line, status, name) in [
        ("ERR[BL1]: PSC error -60", 20, "log-error"),
        ("PANIC(BL31): PC = 0x0000000000001234", 21, "log-panic"),
        ("Exception(BL2): syndrome = 0x96000010", 22, "log-exception"),
        ("ASSERT[BL2]: ddr.c:12", 23, "log-assert"),
        ("INFO[MISC]: Critical Error: no disk", 24, "log-critical"),
        ("INFO[MISC]: In Enhanced NIC mode", 12, "nic-mode"),
    ] {
        // Also as the first line, which bfb-install drops, and before a line of success in the same read.
        let log = [(When::Reading(2), line), (When::Reading(2), "INFO[MISC]: DPU is ready")];
        let Some(ran) = fails(&bench, Script::with_log(len, &log), &[], status, name) else { return };
        assert!(ran.stderr.contains(line) || name == "nic-mode", "{}", ran.stderr);
        assert_eq!(ran.seen.resets, 0, "a card with the whole image must not be reset");
    }
    // During the write.
    let log = [(When::Written(1), "PANIC(BL2): PC = 0x1")];
    let script = Script { write_max: 16, ..Script::with_log(len, &log) };
    let Some(ran) = fails(&bench, script, &[], 21, "log-panic") else { return };
    assert!(ran.seen.received.len() < len && ran.seen.resets == 1, "a partial stream must reset the card");
}

#[test]
fn missing_ready_line_is_no_success() {
    let bench = Bench::new();
    let len = bench.image.len();
    let scripts = [
        // From an earlier boot, with and without a driver that clears the log.
        Script::with_log(len, &[(When::Before, "INFO[MISC]: DPU is ready")]),
        Script {
            refused_key: Some("CLEAR_ON_READ"),
            ..Script::with_log(
                len,
                &[(When::Before, "INFO[MISC]: Linux up"), (When::Before, "INFO[MISC]: DPU is ready")],
            )
        },
        // Before the last byte.
        Script::with_log(len, &[(When::Written(100), "INFO[MISC]: DPU is ready")]),
        // A different line than the requested one.
        Script::with_log(
            len,
            &[(When::Reading(2), "INFO[MISC]: Linux up"), (When::Reading(3), "INFO[MISC]: Rebooting...")],
        ),
        Script::with_log(len, &[]),
    ];
    for script in scripts {
        let Some(ran) = timed(&bench, &script, "waiting for the card to boot") else { return };
        ran.check(&bench, 19, "time-limit");
        ran.check_restored(1);
        assert_eq!((ran.seen.received.len(), ran.seen.resets), (len, 0));
    }
}

#[test]
fn vanished_card_is_reported_and_not_restored() {
    let bench = Bench::new();
    let len = bench.image.len();
    for when in [When::Written(50_000), When::Written(len as u64), When::Reading(2)] {
        let script = Script { gone: Some((when, Errno::ENODEV)), ..Script::with_log(len, &[]) };
        let Some(ran) = bench.flash(script, &["--gone-polls", "30"]) else { return };
        ran.check(&bench, 18, "gone");
        assert_eq!(ran.json["restored"], false);
        assert!(ran.stderr.contains("NOT restored"), "{}", ran.stderr);
        assert!(!ran.seen.is_open);
    }
}

/// The call into the driver hangs, and its process cannot be killed; the command still ends.
#[test]
fn hanging_driver_does_not_block_the_command() {
    let bench = Bench::new();
    let len = bench.image.len();
    for (when, stage) in [
        (When::Before, "preparing"),
        (When::Written(50_000), "writing"),
        (When::Reading(1), "waiting for the card to boot"),
    ] {
        let Some(ran) = timed(&bench, &Script { hangs: Some(when), ..Script::good(len) }, stage) else { return };
        assert_eq!((ran.status, ran.json["outcome"].as_str()), (19, Some("time-limit")), "{}", ran.stderr);
        assert_eq!(ran.json["restored"] == false, when != When::Before, "{}", ran.json);
    }
}

#[test]
fn rejected_driver_setting_is_reported_before_reset() {
    let bench = Bench::new();
    let script = Script { refused_key: Some("DISPLAY_LEVEL"), ..Script::good(bench.image.len()) };
    let Some(ran) = bench.flash(script, &[]) else { return };
    ran.check(&bench, 25, "setting");
    assert_eq!((ran.seen.opens, ran.seen.boot_mode), (0, 1));
    let script = Script { refused_key: Some("BOOT_MODE"), ..Script::good(bench.image.len()) };
    let ran = bench.flash(script, &[]).expect("FUSE is there");
    ran.check(&bench, 0, "ready");
    assert_eq!(ran.json["restored"], false, "success, but that it is restored was not seen");
}

#[test]
fn absent_or_busy_card_is_reported() {
    let bench = Bench::new();
    let args = bench.flash_args(&[]);
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let none = bench.sumac(&args);
    assert_eq!(none.status.code(), Some(10), "{none:?}");
    assert!(String::from_utf8_lossy(&none.stderr).contains("sumac card list"));
    let Some(card) = bench.card(Script::good(bench.image.len())) else { return };
    let folder = fs::File::open(bench.path("rshim0")).expect("opens");
    rustix::fs::flock(&folder, rustix::fs::FlockOperation::LockExclusive).expect("free");
    let output = bench.sumac(&args);
    drop(folder);
    let ran = Ran::new(output, card);
    ran.check(&bench, 26, "locked");
    assert_eq!((ran.seen.opens, ran.seen.settings.len()), (0, 0));
}

#[test]
fn interrupt_stops_writing_and_restores_the_card() {
    let bench = Bench::new();
    for signal in [Signal::INT, Signal::TERM] {
        // Slow enough to be still writing.
        let Some(card) = bench.card(Script { write_max: 16, boot_mode: 2, ..Script::good(bench.image.len()) }) else {
            return;
        };
        let args = bench.flash_args(&[]);
        let mut command = bench.command(&args.iter().map(String::as_str).collect::<Vec<_>>());
        let process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
        card.wait("the first bytes", |seen| !seen.received.is_empty());
        kill_process(Pid::from_child(&process), signal).expect("sent");
        let output = process.wait_with_output().expect("ended");
        let ran = Ran::new(output, card);
        // The write in progress may not be counted.
        assert_eq!(
            (ran.status, ran.json["outcome"].as_str()),
            (128 + signal.as_raw(), Some("interrupted")),
            "{}",
            ran.stderr
        );
        assert!(bench.image.starts_with(&ran.seen.received) && ran.seen.received.len() < bench.image.len());
        ran.check_restored(2);
        assert_eq!(ran.seen.resets, 1);
    }
}

/// Changes to the file after its check do not affect the bytes that the card receives.
#[test]
fn image_swapped_after_its_check_sends_the_checked_bytes() {
    let bench = Bench::new();
    let len = bench.image.len();
    let Some(card) = bench.card(Script { write_max: 16, ..Script::good(len) }) else { return };
    let args = bench.flash_args(&[]);
    let mut command = bench.command(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
    card.wait("the first bytes", |seen| !seen.received.is_empty());
    let file = fs::OpenOptions::new().write(true).open(bench.path("image.bfb")).expect("opens");
    file.write_all_at(&vec![0xee; 99_000], len as u64 - 100_000).expect("written");
    file.set_len(len as u64 - 500).expect("cut");
    let ran = Ran::new(process.wait_with_output().expect("ended"), card);
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    assert!(ran.seen.received == bench.image, "the card received other bytes than were checked");
}

#[test]
fn killed_flasher_leaves_the_boot_mode_to_the_driver() {
    let bench = Bench::new();
    let Some(card) = bench.card(Script { write_max: 16, ..Script::good(bench.image.len()) }) else { return };
    let args = bench.flash_args(&[]);
    let mut command = bench.command(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let mut process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("started");
    card.wait("the first bytes", |seen| !seen.received.is_empty());
    process.kill().expect("killed");
    process.wait().expect("ended");
    card.wait("closing", |seen| !seen.is_open);
    assert_eq!((card.seen().boot_mode, card.seen().closes), (1, 1));
}

#[test]
fn unsuitable_image_is_refused_before_any_write() {
    let bench = Bench::new();
    let Some(card) = bench.card(Script { generation: 1, ..Script::good(bench.image.len()) }) else { return };
    let flash = |more: &[&str]| {
        let args = bench.flash_args(more);
        let output = bench.sumac(&args.iter().map(String::as_str).collect::<Vec<_>>());
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!((&json["outcome"], &json["exit_status"]), (&"refused".into(), &2.into()), "{json}");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, stderr) = flash(&[]);
    assert_eq!(status, Some(2));
    assert!(stderr.contains("no boot loader (bl2) for bluefield-1"), "{stderr}");
    let good = fs::read(bench.path("image.bfb")).expect("there");
    let mut bad = good.clone();
    bad[good.len() / 2] ^= 1;
    fs::write(bench.path("image.bfb"), &bad).expect("written");
    let (status, stderr) = flash(&[]);
    assert_eq!(status, Some(2));
    assert!(stderr.contains("offset 0x") && stderr.contains("image_crc"), "{stderr}");
    // Well-formed but modified, so the signature does not match.
    let path = bench.path("image.bfb").display().to_string();
    fs::write(&path, &good).expect("written");
    let changed = bench.sumac(&["image", "repack", &path, "--text", "boot-desc=x", "-o", &path]);
    assert!(changed.status.success(), "{changed:?}");
    let (status, stderr) = flash(&[]);
    assert_eq!(status, Some(2));
    assert!(stderr.contains("no manifest"), "{stderr}");
    let seen = card.seen();
    assert_eq!((seen.opens, seen.settings.len()), (0, 0));
}
