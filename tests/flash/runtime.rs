//! `sumac flash --runtime`: images for cards that go on running.

use super::rshim::{Script, When};
use super::success::tail;
use super::{Bench, INSTALL, Ran};
use std::fs::OpenOptions;
use std::io::Write;

/// The length of what goes to the card, and a card that installs it and goes on running.
fn running(bench: &Bench) -> (usize, Script) {
    let len = tail(bench).len();
    (len, Script::with_log(len, &[(When::Reading(2), "INFO[MISC]: Runtime upgrade finished: 1.2.3")]))
}

/// Flash with `--runtime`. What the card has received has to be a part of the payload.
fn flash(bench: &Bench, script: Script, more: &[&str]) -> Option<Ran> {
    let options = [&[INSTALL, "--runtime"], more].concat();
    let ran = bench.flash(script, &options)?;
    assert!(tail(bench).starts_with(&ran.seen.received), "the card has got something else");
    // Whatever happens: the card runs on, and the next flashing resets it.
    assert_eq!((ran.seen.boot_resets, ran.seen.resets, ran.seen.skips_reset), (0, 0, false), "{}", ran.stderr);
    ran.check_restored(1);
    Some(ran)
}

#[test]
fn running_card_gets_manifest_and_payload_and_is_not_reset() {
    let bench = Bench::new();
    let (len, script) = running(&bench);
    let Some(ran) = flash(&bench, script, &[]) else { return };
    assert_eq!((ran.status, ran.json["outcome"].as_str()), (0, Some("installed")), "{}", ran.stderr);
    assert_eq!(ran.json["seen"], "INFO[MISC]: Runtime upgrade finished: 1.2.3");
    assert_eq!((ran.seen.received.len(), ran.seen.opens), (len, 1));
    assert!(ran.stderr.contains("its next reset starts this one"), "{}", ran.stderr);
    // The record is that of an install.
    let ran = bench.flash(running(&bench).1, &[INSTALL, "--if-different"]).expect("FUSE is there");
    assert_eq!((ran.json["outcome"].as_str(), ran.seen.opens), (Some("unchanged"), 0), "{}", ran.stderr);
}

#[test]
fn failures_at_run_time_are_named_and_leave_the_card_running() {
    let bench = Bench::new();
    let (len, script) = running(&bench);
    let failed = Script::with_log(len, &[(When::Reading(2), "INFO[MISC]: Runtime upgrade failed: on trial")]);
    let full = Script { write_error: Some((4096, fuser::Errno::ETIMEDOUT)), ..script.clone() };
    let old = Script { refused_key: Some("BOOT_RESET_SKIP"), ..script };
    for (script, status, name, why) in [
        (failed, 31, "log-runtime", "on trial"),
        // Nothing on the card takes it: another system runs there.
        (full, 17, "not-draining", "--runtime"),
        (old, 25, "setting", "BOOT_RESET_SKIP"),
    ] {
        let Some(ran) = flash(&bench, script, &[]) else { return };
        assert_eq!((ran.status, ran.json["outcome"].as_str()), (status, Some(name)), "{}", ran.stderr);
        assert!(ran.stderr.contains(why) && ran.stderr.contains("what to do: "), "{why}: {}", ran.stderr);
    }
}

#[test]
fn options_for_a_card_that_is_reset_are_refused_at_run_time() {
    let bench = Bench::new();
    for other in [&["--ram"][..], &["--nic-mode"], &["--until", "ready"], &["--key-file", "k"], &["--allow-unsigned"]] {
        let image = bench.path("image.bfb").display().to_string();
        let args = [&["flash", &image, "--runtime"], other].concat();
        let output = bench.sumac(&args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && error.contains("--runtime"), "{other:?}: {error}");
    }
}

/// A run that was killed has left the setting behind.
#[test]
fn flashing_without_runtime_resets_a_card_whose_driver_was_told_not_to() {
    let bench = Bench::new();
    let Some(card) = bench.card(Script::good(bench.image.len())) else { return };
    let misc = OpenOptions::new().write(true).open(bench.path("rshim0/misc"));
    misc.and_then(|mut misc| misc.write_all(b"BOOT_RESET_SKIP 1")).expect("taken");
    assert!(card.seen().skips_reset);
    let args = bench.flash_args(&[]);
    let output = bench.sumac(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let ran = Ran::new(output, card);
    ran.check(&bench, 0, "ready");
    assert_eq!((ran.seen.boot_resets, ran.seen.skips_reset), (1, false));
}
