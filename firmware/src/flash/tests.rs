//! Sessions against a simulated card in virtual time: every failure, every stage that can hang, and what is restored.

mod runtime;

use super::*;
use crate::rshim::{LogKind, Misc, Setting};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::time::Duration;
use sumac_hal::time::Instant;

const LEN_BYTES: u64 = 10_000;
const STEP_BYTES: u64 = 100;

/// A card that responds to each command after a tenth of a second.
#[derive(Default)]
struct Card {
    open: Option<Errno>,
    /// Writing fails after this many bytes.
    write: Option<(u64, Errno)>,
    /// Setting this key fails.
    set: Option<(&'static str, Errno)>,
    /// Each reading of `misc` from this one on, counted from 0, fails or hangs.
    misc_fails_from: Option<usize>,
    misc_hangs_from: Option<usize>,
    /// The writer hangs, and cannot be stopped.
    writer_hangs: bool,
    /// Lines that appear in the log once this many bytes were written; three seconds after the last byte.
    log: Vec<(u64, &'static str)>,
    /// The log's contents before.
    old_log: Vec<&'static str>,
    keeps_log: bool,
    /// The times at which the user sends a signal.
    signals_at: Vec<Duration>,
    /// BOOT_MODE before.
    boot_mode: u32,
    /// The driver notices that `boot` is closed, and sets BOOT_MODE, after this many readings.
    notices_after: usize,
    /// The session's goal.
    tolerates_errors: bool,
    /// The length of the images, if something follows them.
    images_bytes: Option<u64>,
}

struct RunResult {
    outcome: Outcome,
    settings: Vec<Setting>,
    took: Duration,
}

impl RunResult {
    fn failure(&self) -> &Failure {
        self.outcome.result.as_ref().expect_err("a failure")
    }
}

const LIMITS: Limits = Limits {
    total: Duration::from_secs(600),
    poll: Duration::from_secs(1),
    gone_polls: 5,
    restore: Duration::from_secs(30),
};

fn run(card: Card, until: Until) -> RunResult {
    let before = Misc::parse(&format!("DISPLAY_LEVEL 1\nBOOT_MODE {}\nDEV_INFO BlueField-3(Rev 1)\n", card.boot_mode));
    let goal = Goal { until, tolerates_errors: card.tolerates_errors, keeps_log: card.keeps_log && card.set.is_none() };
    let length = Length { images_bytes: card.images_bytes.unwrap_or(LEN_BYTES), tail_bytes: 0 };
    let length = Length { tail_bytes: LEN_BYTES - length.images_bytes, ..length };
    let mut session = Session::new(length, &before, goal, LIMITS, Instant::ZERO);
    let mut now = Instant::ZERO;
    let mut answers: VecDeque<(Instant, Event)> = VecDeque::new();
    let mut signals: VecDeque<_> = card.signals_at.iter().map(|at| Instant::ZERO + *at).collect();
    let (mut settings, mut reads, mut written, mut boot_mode) = (Vec::new(), 0, 0, card.boot_mode);
    let (mut unread, mut writing) = (card.old_log.iter().map(|line| line.to_string()).collect::<Vec<_>>(), false);
    let (mut log_lines, mut opened_at, mut booting_at, mut closed_at) = (0, None, None, None);
    for _ in 0..100_000 {
        let later = now + Duration::from_millis(100);
        while let Some(command) = session.poll_transmit() {
            match command {
                Command::Set(setting) => {
                    settings.push(setting);
                    let refused = card.set.filter(|(key, _)| *key == setting.key()).map(|(_, errno)| errno);
                    if let (Setting::BootMode(mode), None) = (setting, refused) {
                        boot_mode = mode;
                    }
                    answers.push_back((later, Event::Set(setting, refused.map_or(Ok(()), Err))));
                }
                Command::ReadMisc => {
                    reads += 1;
                    if card.misc_hangs_from.is_some_and(|from| reads > from) {
                        continue;
                    }
                    if card.misc_fails_from.is_some_and(|from| reads > from) {
                        answers.push_back((later, Event::Misc(Err(Errno::NODEV))));
                        continue;
                    }
                    let is_due = |at: u64| match at {
                        LEN_BYTES => booting_at.is_some_and(|at| now - at > Duration::from_secs(3)),
                        at => opened_at.is_some() && written >= at,
                    };
                    let due: Vec<_> = card.log[log_lines..].iter().take_while(|(at, _)| is_due(*at)).collect();
                    log_lines += due.len();
                    unread.extend(due.into_iter().map(|(_, line)| line.to_string()));
                    if closed_at.is_some_and(|at| reads > at + card.notices_after) {
                        (boot_mode, closed_at) = (1, None);
                    }
                    let mut misc = Misc::parse(&format!("BOOT_MODE {boot_mode}\n"));
                    misc.log = if card.keeps_log { unread.clone() } else { std::mem::take(&mut unread) };
                    answers.push_back((later, Event::Misc(Ok(Box::new(misc)))));
                }
                Command::Write => match card.open {
                    Some(errno) => answers.push_back((later, Event::OpenFailed(errno))),
                    None => {
                        writing = true;
                        // An open that skips the reset leaves it alone.
                        boot_mode = if settings.contains(&Setting::BootResetSkip(true)) { boot_mode } else { 0 };
                        answers.push_back((later, Event::Opened));
                    }
                },
                Command::StopWriting => {
                    if writing && !card.writer_hangs {
                        (writing, closed_at) = (false, Some(reads));
                        answers.push_back((later, Event::Closed));
                    }
                }
            }
        }
        while session.poll_event().is_some() {}
        if let Some(outcome) = session.outcome() {
            return RunResult { outcome, settings, took: now - Instant::ZERO };
        }
        let timeout = session.poll_timeout().expect("not over");
        let next = answers.front().map_or(timeout, |(at, _)| timeout.min(*at));
        now = now.max(signals.front().map_or(next, |at| next.min(*at)));
        if signals.front().is_some_and(|at| *at <= now) {
            signals.pop_front();
            session.handle(Event::Signal(2), now);
        } else if let Some((_, event)) = answers.front().filter(|(at, _)| *at <= now).cloned() {
            answers.pop_front();
            let opened = event == Event::Opened;
            session.handle(event, now);
            opened_at = opened_at.or(opened.then_some(now));
            booting_at = booting_at.or((written == LEN_BYTES).then_some(now));
            if opened || (writing && answers.is_empty()) {
                // The next piece is in flight.
                let at = now + Duration::from_millis(100);
                match card.write {
                    Some((end, errno)) if written >= end => {
                        (writing, closed_at) = (false, Some(reads));
                        answers.extend([(at, Event::WriteFailed(errno)), (at, Event::Closed)]);
                    }
                    _ if card.writer_hangs && written >= 300 => {}
                    _ if written >= LEN_BYTES => {
                        (writing, closed_at) = (false, Some(reads));
                        answers.push_back((at, Event::Closed));
                    }
                    _ => {
                        written += STEP_BYTES;
                        answers.push_back((at, Event::Wrote(STEP_BYTES)));
                    }
                }
            }
        }
        session.handle_timeout(now);
    }
    panic!("it does not end");
}

fn card() -> Card {
    Card { boot_mode: 1, ..Card::default() }
}

const READY: (u64, &str) = (LEN_BYTES, "INFO[MISC]: DPU is ready");
const LINUX_UP: (u64, &str) = (LEN_BYTES, "INFO[MISC]: Linux up");

#[test]
fn ready_line_is_success_and_settings_are_restored() {
    let ran = run(Card { log: vec![(0, "INFO[BL2]: start"), LINUX_UP, READY], ..card() }, Until::Ready);
    assert_eq!(ran.outcome.result, Ok(READY.1.into()));
    assert_eq!(ran.outcome.written_bytes, LEN_BYTES);
    assert_eq!(ran.outcome.restored, Restored::Yes);
    assert_eq!(ran.outcome.log_tail, ["INFO[BL2]: start", LINUX_UP.1, READY.1]);
    let expected = [
        Setting::DisplayLevel(2),
        Setting::ClearOnRead(true),
        // What a run with --runtime that was killed may have left.
        Setting::BootResetSkip(false),
        Setting::BootMode(1),
        Setting::ClearOnRead(false),
        Setting::DisplayLevel(1),
    ];
    assert_eq!(ran.settings, expected);
}

#[test]
fn only_the_requested_line_is_success() {
    let log = || vec![LINUX_UP, (LEN_BYTES, "INFO[MISC]: Rebooting...")];
    let result = |until, log| run(Card { log, ..card() }, until).outcome.result;
    assert_eq!(result(Until::LinuxUp, log()), Ok(LINUX_UP.1.into()));
    assert_eq!(result(Until::Rebooting, log()), Ok("INFO[MISC]: Rebooting...".into()));
    assert_eq!(result(Until::LinuxUp, vec![READY]), Ok(READY.1.into()));
    let is_up = |log| match result(Until::Ready, log) {
        Err(Failure::TimeLimit { stage: Stage::Booting, is_linux_up, .. }) => is_linux_up,
        other => panic!("{other:?}"),
    };
    // Whether the card's Linux has come up tells a card that is not healthy from one that does not boot.
    assert!(is_up(log()) && !is_up(vec![(LEN_BYTES, "INFO[UEFI]: start")]) && !is_up(vec![(0, LINUX_UP.1)]));
}

#[test]
fn lines_from_before_the_last_byte_do_not_decide() {
    let old = || vec!["INFO[MISC]: Linux up", READY.1];
    for keeps_log in [false, true] {
        // Old drivers lack CLEAR_ON_READ: the same lines appear in every reading.
        let set = keeps_log.then_some(("CLEAR_ON_READ", Errno::INVAL));
        let ran = run(Card { old_log: old(), keeps_log, set, ..card() }, Until::Ready);
        assert!(matches!(ran.failure(), Failure::TimeLimit { stage: Stage::Booting, .. }), "{:?}", ran.outcome);
        assert_eq!(ran.outcome.restored, Restored::Yes);
        let ran =
            run(Card { old_log: old(), keeps_log, set, log: vec![(LEN_BYTES, "x"), READY], ..card() }, Until::Ready);
        assert_eq!(ran.outcome.result, Ok(READY.1.into()));
    }
    // A line from before the last byte cannot be about this stream, even if it is read later.
    for at in (LEN_BYTES - 12 * STEP_BYTES..LEN_BYTES).step_by(STEP_BYTES as usize) {
        let ran = run(Card { log: vec![(at, READY.1)], ..card() }, Until::Ready);
        assert!(matches!(ran.failure(), Failure::TimeLimit { stage: Stage::Booting, .. }), "at {at}");
    }
    // An old failure does not count either.
    for keeps_log in [false, true] {
        let set = keeps_log.then_some(("CLEAR_ON_READ", Errno::INVAL));
        let old_log = vec!["PANIC(BL31): PC = 0x1"];
        let ran = run(Card { old_log, keeps_log, set, log: vec![READY], ..card() }, Until::Ready);
        assert_eq!(ran.outcome.result, Ok(READY.1.into()));
    }
}

#[test]
fn failure_line_ends_flashing_while_writing_and_while_booting() {
    for (line, kind) in [
        ("ERR[BL1]: PSC error -60", LogKind::Error),
        ("PANIC(BL31): PC = 0x1", LogKind::Panic),
        ("Exception(BL2): syndrome = 0x1", LogKind::Exception),
        ("ASSERT[BL2]: x", LogKind::Assert),
        ("INFO[MISC]: CRITICAL ERROR", LogKind::Critical),
    ] {
        for at in [0, LEN_BYTES] {
            // A success line in the same reading comes too late.
            let ran = run(Card { log: vec![(at, line), (at, READY.1)], ..card() }, Until::Ready);
            assert_eq!(*ran.failure(), Failure::Log { kind, line: line.into() });
            assert_eq!(ran.outcome.restored, Restored::Yes);
            // A partial stream cannot boot, so the card is reset; a complete one may be running.
            assert_eq!(ran.settings.contains(&Setting::Reset), at == 0, "{line} at {at}");
            assert!(ran.took < Duration::from_secs(20), "{:?}", ran.took);
        }
    }
    let ran = run(Card { log: vec![(LEN_BYTES, "INFO[MISC]: In Enhanced NIC mode")], ..card() }, Until::Ready);
    assert_eq!(*ran.failure(), Failure::NicMode);
}

#[test]
fn tolerated_errors_do_not_end_flashing_but_worse_lines_do() {
    let log = |worse: &'static str| vec![(0, "ERR[UEFI]: a fan is loud"), (LEN_BYTES, worse), READY];
    let ran = run(Card { log: log("INFO[BL31]: x"), tolerates_errors: true, ..card() }, Until::Ready);
    assert_eq!(ran.outcome.result, Ok(READY.1.into()));
    let ran = run(Card { log: log("ASSERT[BL31]: x"), tolerates_errors: true, ..card() }, Until::Ready);
    assert!(matches!(ran.failure(), Failure::Log { kind: LogKind::Assert, .. }));
}

/// Installers go on after errors of optional parts; the line is named only if success never comes.
#[test]
fn errors_of_the_cards_linux_do_not_end_flashing() {
    let error = "ERR[MISC]: no BMC firmware";
    for until in [Until::Ready, Until::LinuxUp] {
        let ran = run(Card { log: vec![(0, error), (LEN_BYTES, error), READY], ..card() }, until);
        assert_eq!(ran.outcome.result, Ok(READY.1.into()));
    }
    let ran = run(Card { log: vec![(LEN_BYTES, error), LINUX_UP], ..card() }, Until::Ready);
    assert!(matches!(ran.failure(), Failure::TimeLimit { stage: Stage::Booting, .. }), "{:?}", ran.outcome);
    assert!(ran.failure().to_string().ends_with(&format!("the card had reported: {error}")), "{}", ran.failure());
    let ran = run(Card { log: vec![(LEN_BYTES, "ERR[MISC]: CRITICAL ERROR: no disk")], ..card() }, Until::Ready);
    assert!(matches!(ran.failure(), Failure::Log { kind: LogKind::Critical, .. }), "{:?}", ran.outcome);
}

#[test]
fn kept_log_is_not_cleared_and_old_lines_do_not_count_twice() {
    let old_log = vec!["INFO[MISC]: Linux up", READY.1];
    let ran = run(Card { old_log: old_log.clone(), keeps_log: true, ..card() }, Until::Ready);
    assert!(matches!(ran.failure(), Failure::TimeLimit { stage: Stage::Booting, .. }), "{:?}", ran.outcome);
    let log = vec![(LEN_BYTES, "x"), READY];
    let ran = run(Card { old_log, keeps_log: true, log, ..card() }, Until::Ready);
    assert_eq!(ran.outcome.result, Ok(READY.1.into()));
    assert!(!ran.settings.contains(&Setting::ClearOnRead(true)), "{:?}", ran.settings);
}

#[test]
fn nic_mode_line_is_success_only_where_it_is_expected() {
    let log = || vec![LINUX_UP, (LEN_BYTES, "INFO[MISC]: In Enhanced NIC mode")];
    let ran = run(Card { log: log(), ..card() }, Until::NicMode);
    assert_eq!(ran.outcome.result, Ok("INFO[MISC]: In Enhanced NIC mode".into()));
    assert_eq!(*run(Card { log: log(), ..card() }, Until::Ready).failure(), Failure::NicMode);
}

/// The system in the images reads what follows them, and may be up before the last byte is written.
#[test]
fn success_before_the_tail_is_written_ends_flashing_after_its_last_byte() {
    let images_bytes = Some(LEN_BYTES / 2);
    for at in (LEN_BYTES / 2 + 20 * STEP_BYTES..=LEN_BYTES).step_by(10 * STEP_BYTES as usize) {
        let ran = run(Card { images_bytes, log: vec![(at, LINUX_UP.1)], ..card() }, Until::LinuxUp);
        assert_eq!((ran.outcome.result, ran.outcome.written_bytes), (Ok(LINUX_UP.1.into()), LEN_BYTES), "at {at}");
        assert!(!ran.settings.contains(&Setting::Reset));
    }
    // Before the last byte of the images it is not about this stream.
    let ran = run(Card { images_bytes, log: vec![(LEN_BYTES / 2 - STEP_BYTES, LINUX_UP.1)], ..card() }, Until::LinuxUp);
    assert!(matches!(ran.failure(), Failure::TimeLimit { stage: Stage::Booting, .. }), "{:?}", ran.outcome);
    // A tail that is not taken is no success, and the running system is not reset.
    let write = Some((LEN_BYTES * 3 / 4, Errno::TIMEDOUT));
    let log = vec![(LEN_BYTES * 5 / 8, LINUX_UP.1)];
    let ran = run(Card { images_bytes, write, log, ..card() }, Until::LinuxUp);
    assert_eq!(*ran.failure(), Failure::NotDraining);
    assert!(!ran.settings.contains(&Setting::Reset));
}

#[test]
fn failed_open_changes_no_boot_mode_and_restores_settings() {
    for (errno, failure) in [
        (Errno::BUSY, Failure::Busy),
        (Errno::NODEV, Failure::NotAttached),
        (Errno::INVAL, Failure::DropMode),
        (Errno::PERM, Failure::SecureMode),
        (Errno::ACCESS, Failure::Permission),
    ] {
        let ran = run(Card { open: Some(errno), ..card() }, Until::Ready);
        assert_eq!(*ran.failure(), failure);
        assert_eq!((&ran.outcome.restored, ran.outcome.written_bytes), (&Restored::Yes, 0));
        let expected = [2, 1].map(Setting::DisplayLevel);
        let is_harmless = |set: &&Setting| matches!(set, Setting::ClearOnRead(_) | Setting::BootResetSkip(false));
        let touched: Vec<_> = ran.settings.iter().filter(|set| !is_harmless(set)).collect();
        assert_eq!(touched, [&expected[0], &expected[1]], "{errno}");
    }
}

#[test]
fn failed_write_is_named_and_the_log_is_read_again() {
    for (errno, failure) in [
        (Errno::BUSY, Failure::OtherWriter),
        (Errno::TIMEDOUT, Failure::NotDraining),
        (Errno::NODEV, Failure::Gone),
        (Errno::NOSPC, Failure::Io { stage: Stage::Writing, error: Errno::NOSPC.to_string() }),
    ] {
        let ran = run(
            Card { write: Some((300, errno)), log: vec![(300, "ERR[BL1]: PSC error -60")], ..card() },
            Until::Ready,
        );
        let by_the_log = matches!(ran.failure(), Failure::Log { .. });
        assert!(by_the_log || *ran.failure() == failure, "{:?}", ran.outcome);
        assert_eq!(ran.outcome.log_tail, ["ERR[BL1]: PSC error -60"]);
        assert_eq!(ran.outcome.restored, Restored::Yes);
        assert!(ran.settings.contains(&Setting::Reset));
        let ran = run(Card { write: Some((300, errno)), ..card() }, Until::Ready);
        assert_eq!((ran.failure(), ran.outcome.written_bytes), (&failure, 300));
    }
}

#[test]
fn card_is_gone_only_after_several_failed_readings() {
    // The first reading is part of the preparation.
    let ran = run(Card { misc_fails_from: Some(0), ..card() }, Until::Ready);
    assert_eq!(*ran.failure(), Failure::Gone);
    assert!(!ran.settings.contains(&Setting::Reset) && ran.outcome.written_bytes == 0);
    let ran = run(Card { misc_fails_from: Some(1), ..card() }, Until::Ready);
    assert_eq!(*ran.failure(), Failure::Gone);
    assert!(ran.took >= LIMITS.poll * (LIMITS.gone_polls - 1), "one failed reading is not the end");
    assert!(matches!(ran.outcome.restored, Restored::No(_)), "restoring could not be verified");
}

#[test]
fn hanging_driver_is_abandoned_after_both_time_limits() {
    for from in [0, 1, 3] {
        let ran = run(Card { misc_hangs_from: Some(from), ..card() }, Until::Ready);
        assert!(
            matches!(ran.failure(), Failure::TimeLimit { limit, .. } if *limit == LIMITS.total),
            "{:?}",
            ran.outcome
        );
        assert!(matches!(ran.outcome.restored, Restored::No(_)));
        assert_eq!(ran.took, LIMITS.total + LIMITS.restore);
    }
    let ran = run(Card { writer_hangs: true, ..card() }, Until::Ready);
    assert!(matches!(ran.failure(), Failure::TimeLimit { stage: Stage::Writing, .. }));
    assert_eq!(ran.outcome.restored, Restored::No("the boot node cannot be closed".into()));
}

#[test]
fn signal_ends_flashing_in_order_and_a_second_one_at_once() {
    let ran = run(Card { signals_at: vec![Duration::from_millis(700)], ..card() }, Until::Ready);
    assert_eq!(*ran.failure(), Failure::Interrupted { signal: 2, stage: Stage::Writing });
    assert_eq!((ran.failure().exit_status(), &ran.outcome.restored), (130, &Restored::Yes));
    assert!(ran.settings.contains(&Setting::BootMode(1)) && ran.settings.contains(&Setting::Reset));
    let ran = run(Card { signals_at: vec![Duration::from_secs(60)], ..card() }, Until::Ready);
    assert_eq!(*ran.failure(), Failure::Interrupted { signal: 2, stage: Stage::Booting });
    assert!(!ran.settings.contains(&Setting::Reset));
    let signals_at = vec![Duration::from_secs(5), Duration::from_secs(6)];
    let ran = run(Card { signals_at, misc_hangs_from: Some(1), ..card() }, Until::Ready);
    assert_eq!(ran.outcome.restored, Restored::No("interrupted again".into()));
    assert!(ran.took < Duration::from_secs(7));
}

#[test]
fn previous_boot_mode_is_restored_except_rshim() {
    for (before, after) in [(1, 1), (2, 2), (0, 1)] {
        let ran = run(Card { boot_mode: before, log: vec![READY], ..card() }, Until::Ready);
        assert!(ran.settings.contains(&Setting::BootMode(after)), "{before}");
        assert_eq!(ran.outcome.restored, Restored::Yes);
    }
    let set = Some(("BOOT_MODE", Errno::IO));
    let ran = run(Card { set, log: vec![READY], ..card() }, Until::Ready);
    assert!(matches!(&ran.outcome.restored, Restored::No(why) if why.contains("BOOT_MODE")));
    assert!(ran.outcome.result.is_ok(), "the card is ready anyway");
}

/// The driver learns of the close later, and then overwrites what was set before.
#[test]
fn boot_mode_is_set_after_the_driver_noticed_the_close() {
    for notices_after in [0, 1, 5] {
        let card = Card { boot_mode: 2, notices_after, write: Some((300, Errno::TIMEDOUT)), ..card() };
        let ran = run(card, Until::Ready);
        assert_eq!((ran.failure(), &ran.outcome.restored), (&Failure::NotDraining, &Restored::Yes));
    }
    // If the driver never notices, the boot mode is set anyway.
    let card = Card { boot_mode: 2, notices_after: 10_000, write: Some((300, Errno::TIMEDOUT)), ..card() };
    assert_eq!(run(card, Until::Ready).settings.iter().filter(|set| **set == Setting::BootMode(2)).count(), 1);
}

#[test]
fn rejected_display_level_ends_flashing_before_the_reset() {
    let ran = run(Card { set: Some(("DISPLAY_LEVEL", Errno::INVAL)), ..card() }, Until::Ready);
    assert!(matches!(ran.failure(), Failure::Setting { key: "DISPLAY_LEVEL", .. }));
    assert!(!ran.settings.contains(&Setting::BootMode(1)) && ran.outcome.written_bytes == 0);
}

#[test]
fn failures_have_unique_names_and_exit_statuses_listed_in_the_readme() {
    let limit = Duration::from_secs(1);
    let log = |kind| Failure::Log { kind, line: String::new() };
    let all = [
        Failure::NotFound(String::new()),
        Failure::Permission,
        Failure::Locked,
        Failure::NotAttached,
        Failure::NicMode,
        Failure::SecureMode,
        Failure::DropMode,
        Failure::Busy,
        Failure::OtherWriter,
        Failure::NotDraining,
        Failure::Gone,
        Failure::TimeLimit { limit, stage: Stage::Booting, is_linux_up: false, error_line: None },
        log(LogKind::Error),
        log(LogKind::Panic),
        log(LogKind::Exception),
        log(LogKind::Assert),
        log(LogKind::Critical),
        log(LogKind::RuntimeFailed),
        Failure::Setting { key: "", error: String::new() },
        Failure::ImageChanged,
        Failure::Image(String::new()),
        Failure::Io { stage: Stage::Writing, error: String::new() },
        Failure::Interrupted { signal: 2, stage: Stage::Writing },
    ];
    let readme = include_str!("README.md");
    for (index, failure) in all.iter().enumerate() {
        assert!(failure.exit_status() > 2, "0 to 2 are reserved");
        let row = format!("| {} | {} |", failure.exit_status(), failure.name());
        assert!(readme.contains(&row) || failure.name() == "interrupted", "the table lacks {row}");
        for other in &all[..index] {
            assert_ne!((failure.exit_status(), failure.name()), (other.exit_status(), other.name()));
            assert!(failure.exit_status() != other.exit_status() && failure.name() != other.name());
        }
    }
}
