//! Losses, gaps and silence of a hop, one at a time and as drawn.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

const TIMERS: HopTimers = HopTimers::DEFAULT;

fn at(us: u64) -> Instant {
    Instant::from_nanos(us * 1000)
}

#[test]
fn gap_is_requested_once_after_three_later_answers() {
    let mut up = Uplink::new(TIMERS, 1);
    (0..6).for_each(|n| up.on_sent(n, at(0)));
    for n in [1, 2] {
        assert!(up.on_answer(n, at(1)));
        assert_eq!(up.next_gap(8), None);
    }
    up.on_answer(3, at(1));
    assert_eq!(up.next_gap(8), Some(0));
    assert_eq!(up.next_gap(8), None);
    assert!(!up.on_answer(3, at(1)), "a duplicate answer");
    up.on_answer(0, at(2));
    assert_eq!(up.answered_below(), 4);
}

/// A retransmission can be lost as well, and nothing else would show that before the next probe.
#[test]
fn gap_is_requested_again_after_half_a_window() {
    let mut up = Uplink::new(TIMERS, 1);
    (0..20).for_each(|n| up.on_sent(n, at(0)));
    let mut requested = Vec::new();
    for n in (1..20).filter(|n| *n != 2) {
        up.on_answer(n, at(1));
        while let Some(gap) = up.next_gap(16) {
            requested.push((n, gap));
        }
    }
    assert_eq!(requested, [(4, 0), (5, 2), (15, 0), (15, 2)]);
}

#[test]
fn status_resends_missing_chunks_not_sent_since_the_probe() {
    let mut up = Uplink::new(TIMERS, 1);
    (0..4).for_each(|n| up.on_sent(n, at(0)));
    let probe = up.poll_probe(at(100_000)).expect("due");
    assert_eq!((probe.from, probe.count, probe.held), (0, 4, 0));
    up.on_sent(2, at(200_000));
    let mut resent = Vec::new();
    assert!(!up.on_status(probe.token ^ 1, 0, (0, 0), at(300_000), |n| resent.push(n)));
    assert!(up.on_status(probe.token, 0, (0b0001, 0), at(300_000), |n| resent.push(n)));
    assert_eq!(resent, [1, 3], "0 has arrived, 2 was sent after the probe");
    assert_eq!(up.rtt().smoothed(), Some(Duration::from_millis(200)));
}

/// A rank sends a probe and, at the same instant, the chunks that a newly opened window allows.
#[test]
fn status_does_not_resend_chunks_sent_right_after_its_probe() {
    let mut up = Uplink::new(TIMERS, 1);
    (0..2).for_each(|n| up.on_sent(n, at(0)));
    let probe = up.poll_probe(at(100_000)).expect("due");
    (2..4).for_each(|n| up.on_sent(n, at(100_000)));
    let mut resent = Vec::new();
    assert!(up.on_status(probe.token, 0, (0b0001, 0), at(200_000), |n| resent.push(n)));
    assert_eq!(resent, [1]);
}

/// Answers that were sent before the Status and are not here were lost. Others may still come, in a long queue.
#[test]
fn status_has_lost_answers_requested_at_once() {
    let mut up = Uplink::new(TIMERS, 1);
    (0..6).for_each(|n| up.on_sent(n, at(0)));
    let probe = up.poll_probe(at(100_000)).expect("due");
    assert_eq!(probe.lost, 0, "an answer may be on its way");
    assert!(up.on_answer(1, at(210_000)));
    assert!(up.on_status(probe.token, 0, (0b11_1111, 0b1011), at(220_000), |n| panic!("{n} has arrived")));
    let request = up.poll_probe(at(220_000)).expect("due at once");
    assert_eq!((request.from, request.held, request.lost), (0, 0b0010, 0b1001));
    assert_ne!(request.token, probe.token);
    // Its Status was sent before what it requests.
    assert!(up.on_status(request.token, 0, (0b11_1111, 0b1011), at(310_000), |n| panic!("{n} has arrived")));
    assert_eq!(up.poll_probe(at(310_000)), None);
    // What was sent again was lost as well, and so was another answer.
    let probe = up.poll_probe(at(500_000)).expect("due");
    assert_eq!(probe.lost, 0b1001);
    assert!(up.on_status(probe.token, 0, (0b11_1111, 0b1111), at(620_000), |n| panic!("{n} has arrived")));
    assert_eq!(up.poll_probe(at(620_000)).map(|probe| probe.lost), Some(0b0100));
}

/// The Status may have been sent before the answer to the request.
#[test]
fn status_does_not_request_answers_requested_since_the_probe() {
    let mut up = Uplink::new(TIMERS, 1);
    (0..6).for_each(|n| up.on_sent(n, at(0)));
    let probe = up.poll_probe(at(100_000)).expect("due");
    for n in 1..4 {
        assert!(up.on_answer(n, at(110_000)));
    }
    assert_eq!(up.next_gap(16), Some(0));
    assert!(up.on_status(probe.token, 0, (0b11_1111, 0b1111), at(111_000), |n| panic!("{n} has arrived")));
    assert_eq!(up.poll_probe(at(111_000)), None);
}

#[test]
fn answers_that_keep_coming_do_not_delay_a_request() {
    let mut up = Uplink::new(TIMERS, 1);
    (0..6).for_each(|n| up.on_sent(n, at(0)));
    let probe = up.poll_probe(at(100_000)).expect("due");
    assert!(up.on_status(probe.token, 0, (0b11_1111, 0b0001), at(120_000), |n| panic!("{n} has arrived")));
    assert!(up.on_answer(1, at(120_000)));
    assert_eq!(up.poll_probe(at(120_000)).map(|probe| probe.lost), Some(0b0001));
}

/// A queue longer than the back-off time: the Status of the first probe comes after the last was sent.
#[test]
fn status_of_the_first_and_of_the_last_probe_are_both_taken() {
    let mut up = Uplink::new(TIMERS, 1);
    (0..2).for_each(|n| up.on_sent(n, at(0)));
    let first = up.poll_probe(at(100_000)).expect("due");
    up.on_sent(2, at(150_000));
    let [_, last] = [300_000, 500_000].map(|us| up.poll_probe(at(us)).expect("due"));
    let mut resent = Vec::new();
    assert!(up.on_status(first.token, 0, (0, 0), at(600_000), |n| resent.push(n)));
    assert_eq!(resent, [0, 1], "2 was sent after the first probe");
    assert_eq!(up.rtt().smoothed(), Some(Duration::from_millis(500)));
    assert!(!up.on_status(first.token, 0, (0, 0), at(600_000), |n| panic!("{n} once more")));
    assert!(up.on_status(last.token, 0, (0b011, 0), at(700_000), |n| resent.push(n)));
    assert_eq!(resent, [0, 1, 2]);
}

/// A timer takes longer than a round trip here, so answers that were sent would have come.
#[test]
fn timer_requests_all_answers_on_a_hop_with_a_short_round_trip() {
    let mut up = Uplink::new(TIMERS, 1);
    (0..4).for_each(|n| up.on_sent(n, at(0)));
    let probe = up.poll_probe(at(100_000)).expect("due");
    assert_eq!(probe.lost, 0, "the round trip is not known");
    assert!(up.on_answer(1, at(100_500)));
    assert!(up.on_status(probe.token, 0, (0b1111, 0b0010), at(101_000), |n| panic!("{n} has arrived")));
    let request = up.poll_probe(at(200_000)).expect("due");
    assert_eq!((request.held, request.lost), (0b0010, 0b1101));
    // Sent before the Status, but requested already.
    assert!(up.on_status(request.token, 0, (0b1111, 0b1111), at(201_000), |n| panic!("{n} has arrived")));
    assert_eq!(up.poll_probe(at(201_000)), None);
}

/// No Status has come for a probe: the queue may have become long. What was requested before is requested again.
#[test]
fn timer_requests_no_more_answers_until_a_status_comes() {
    let mut up = Uplink::new(TIMERS, 1);
    (0..2).for_each(|n| up.on_sent(n, at(0)));
    let probe = up.poll_probe(at(100_000)).expect("due");
    assert!(up.on_status(probe.token, 0, (0b11, 0), at(101_000), |n| panic!("{n} has arrived")));
    assert_eq!(up.poll_probe(at(200_000)).map(|probe| probe.lost), Some(0b11));
    (2..4).for_each(|n| up.on_sent(n, at(201_000)));
    assert_eq!(up.poll_probe(at(400_000)).map(|probe| probe.lost), Some(0b11));
}

/// Numbers take turns in the bitmaps of a window: a loss is not that of the answer one window later.
#[test]
fn lost_answer_that_came_is_not_that_of_the_next_window() {
    let mut up = Uplink::new(TIMERS, 1);
    up.on_sent(0, at(0));
    let probe = up.poll_probe(at(100_000)).expect("due");
    assert!(up.on_status(probe.token, 0, (1, 1), at(220_000), |n| panic!("{n} has arrived")));
    assert_eq!(up.poll_probe(at(220_000)).map(|probe| probe.lost), Some(1));
    assert!(up.on_answer(0, at(230_000)));
    for n in 1..=MAX_WINDOW {
        up.on_sent(n, at(240_000));
        assert!(n == MAX_WINDOW || up.take_in_order(n));
    }
    let probe = up.poll_probe(at(500_000)).expect("due");
    assert_eq!((probe.from, probe.lost), (MAX_WINDOW, 0));
}

#[test]
fn silent_hop_is_dead_only_while_answers_are_due() {
    let mut up = Uplink::new(TIMERS, 1);
    let late = Instant::ZERO + Duration::from_secs(100);
    assert!(!up.is_dead(late));
    up.on_sent(0, late);
    assert!(!up.is_dead(late + Duration::from_secs(4)));
    assert!(up.is_dead(late + Duration::from_secs(5)));
    up.on_activity(late + Duration::from_secs(5));
    assert!(!up.is_dead(late + Duration::from_secs(6)));
}

#[test]
fn child_stops_requesting_shared_results_unless_one_has_arrived() {
    let mut shared_results = SharedResults::new(true);
    assert!((1..SharedResults::UNICAST_LIMIT).all(|_| !shared_results.on_unicast() && shared_results.is_requested()));
    assert!(shared_results.on_unicast() && !shared_results.is_requested());
    assert!(!shared_results.on_unicast(), "reported once");
    shared_results.on_shared();
    assert!((0..1000).all(|_| !shared_results.on_unicast()) && shared_results.is_requested());
    assert!(!SharedResults::new(false).is_requested());
}

#[test]
fn unanswered_probes_back_off_with_jitter() {
    let mut up = Uplink::new(TIMERS, 1);
    up.on_sent(0, at(0));
    let mut last = at(0);
    let mut gaps = Vec::new();
    for _ in 0..6 {
        let due = up.timeout().expect("armed");
        gaps.push(due - last);
        assert!(up.poll_probe(due).is_some());
        last = due;
    }
    // Each is drawn from the upper half of its back-off time, which doubles up to the limit.
    let longest = |i: u32| (TIMERS.probe_min * 4 * (1 << i)).min(TIMERS.probe_max);
    for (i, &gap) in gaps.iter().enumerate() {
        let limit = longest(i as u32);
        assert!(gap <= limit && gap >= limit / 2, "{gaps:?}");
    }
    assert_eq!(gaps[0], longest(0), "the first probe has no jitter");
}

/// 256 children lose their first packets together; their probes spread out.
#[test]
fn children_that_lost_one_burst_probe_at_different_times() {
    let mut due: Vec<Instant> = (0..256_u32)
        .map(|child| {
            let mut up = Uplink::new(TIMERS, child);
            up.on_sent(0, at(0));
            for _ in 0..3 {
                let at = up.timeout().expect("armed");
                assert!(up.poll_probe(at).is_some());
            }
            up.timeout().expect("armed")
        })
        .collect();
    due.sort();
    // At most twice as dense as a uniform distribution.
    let crowd = due.windows(16).filter(|some| some[15] - some[0] < TIMERS.probe_max / 256).count();
    assert!(crowd == 0, "{crowd} times 16 of them within {:?}", TIMERS.probe_max / 256);
}

proptest! {
    /// Against an oracle of plain sets: answers in any order, with duplicates and numbers that were not sent.
    #[test]
    fn answers_match_a_set(order in prop::collection::vec(0_u64..90, 0..400)) {
        let mut up = Uplink::new(TIMERS, 1);
        let mut oracle = BTreeSet::new();
        let mut asked = BTreeSet::new();
        for (i, &n) in order.iter().enumerate() {
            let sent = (i as u64).min(80);
            if sent >= up.sent_below() { up.on_sent(sent, at(i as u64)); }
            let fresh = n < up.sent_below() && oracle.insert(n);
            prop_assert_eq!(up.on_answer(n, at(i as u64)), fresh);
            let below = (0..).find(|k| !oracle.contains(k)).unwrap();
            prop_assert_eq!(up.answered_below(), below);
            while let Some(gap) = up.next_gap(u16::MAX) {
                prop_assert!(asked.insert(gap), "requested twice");
                prop_assert!(!oracle.contains(&gap) && oracle.range(gap..).count() >= 3);
            }
        }
    }

    /// Runs of answers, in order and not, taken at once where that is allowed.
    #[test]
    fn answers_taken_in_order_leave_the_state_of_answers_one_by_one(
        runs in prop::collection::vec((0_u64..6, 0_u64..12, prop::bool::weighted(0.7)), 0..40),
    ) {
        let (mut one_by_one, mut at_once) = (Uplink::new(TIMERS, 1), Uplink::new(TIMERS, 1));
        for (i, &(gap, len, is_in_order)) in runs.iter().enumerate() {
            let now = at(100 * i as u64);
            for up in [&mut one_by_one, &mut at_once] {
                let sent_below = up.sent_below();
                let end = (sent_below + 9).min(up.answered_below() + 200);
                (sent_below..end).for_each(|n| up.on_sent(n, now));
            }
            let first = one_by_one.answered_below() + if is_in_order { 0 } else { gap };
            let takes_at_once = at_once.is_in_order();
            let mut taken = 0;
            for local in first..first + len {
                let fresh = one_by_one.on_answer(local, now);
                while one_by_one.next_gap(16).is_some() {}
                if takes_at_once && taken == local - first && at_once.take_in_order(local) {
                    prop_assert!(fresh);
                    taken += 1;
                    continue;
                }
                if taken > 0 {
                    at_once.note_answers(now);
                }
                prop_assert_eq!(at_once.on_answer(local, now), fresh);
                while at_once.next_gap(16).is_some() {}
            }
            if taken > 0 {
                at_once.note_answers(now);
            }
            prop_assert_eq!(&one_by_one, &at_once);
        }
    }
}
