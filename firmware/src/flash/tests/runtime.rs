//! Sessions with a card that goes on running.

use super::*;

const FINISHED: (u64, &str) = (LEN_BYTES, "INFO[MISC]: Runtime upgrade finished: 1.2.3");

/// A card that reports this line three seconds after the last byte.
fn reports(line: &'static str) -> Card {
    Card { log: vec![(LEN_BYTES, line)], ..card() }
}

#[test]
fn running_card_is_never_reset_and_boot_is_opened_once_the_driver_agrees() {
    let ran = run(reports(FINISHED.1), Until::Runtime);
    assert_eq!((ran.outcome.result, ran.outcome.restored), (Ok(FINISHED.1.into()), Restored::Yes));
    let expected = [
        Setting::DisplayLevel(2),
        Setting::ClearOnRead(true),
        Setting::BootResetSkip(true),
        Setting::BootMode(1),
        Setting::BootResetSkip(false),
        Setting::ClearOnRead(false),
        Setting::DisplayLevel(1),
    ];
    assert_eq!(ran.settings, expected);
    // A driver that would reset the card anyway.
    let ran = run(Card { set: Some(("BOOT_RESET_SKIP", Errno::INVAL)), ..card() }, Until::Runtime);
    assert!(matches!(ran.failure(), Failure::Setting { key: "BOOT_RESET_SKIP", .. }), "{:?}", ran.outcome);
    assert_eq!((ran.outcome.written_bytes, ran.outcome.restored), (0, Restored::Yes));
    // Without --runtime, such a driver will do.
    let ran = run(Card { set: Some(("BOOT_RESET_SKIP", Errno::INVAL)), log: vec![READY], ..card() }, Until::Ready);
    assert_eq!(ran.outcome.result, Ok(READY.1.into()));
}

#[test]
fn failures_at_run_time_leave_the_card_running_and_the_setting_restored() {
    let cut = || Card { write: Some((300, Errno::TIMEDOUT)), ..card() };
    let interrupted = || Card { signals_at: vec![Duration::from_millis(900)], ..card() };
    let busy = || Card { open: Some(Errno::BUSY), ..card() };
    for (ran, name) in [
        (run(cut(), Until::Runtime), "not-draining"),
        (run(interrupted(), Until::Runtime), "interrupted"),
        (run(busy(), Until::Runtime), "busy"),
        (run(reports("INFO[MISC]: Runtime upgrade failed: no space"), Until::Runtime), "log-runtime"),
        (run(reports("INFO[MISC]: DPU is ready"), Until::Runtime), "time-limit"),
    ] {
        assert_eq!((ran.failure().name(), &ran.outcome.restored), (name, &Restored::Yes));
        assert!(!ran.settings.contains(&Setting::Reset), "{name}: {:?}", ran.settings);
        assert_eq!(
            ran.settings.iter().rfind(|set| set.key() == "BOOT_RESET_SKIP"),
            Some(&Setting::BootResetSkip(false))
        );
    }
    let ran = run(card(), Until::Runtime);
    let message = ran.failure().to_string();
    assert!(message.contains("waiting for the card to install the image"), "{message}");
    assert!(!message.contains("Linux"), "{message}");
    // What another agent says about such an image does not end flashing.
    let log = vec![(LEN_BYTES, "INFO[MISC]: Runtime upgrade failed: no space"), READY];
    assert_eq!(run(Card { log, ..card() }, Until::Ready).outcome.result, Ok(READY.1.into()));
}
