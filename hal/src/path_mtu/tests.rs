//! Searches over paths that lose long packets, lose packets at random, are slow, or are not there.

use super::*;
use proptest::prelude::*;
use std::vec::Vec;

/// A path: the longest packets that it carries to the peer and back, its round trip, and which packets it loses.
struct Path {
    up: usize,
    down: usize,
    rtt_us: u64,
    loses: Box<dyn FnMut() -> bool>,
    /// The peer answers from then on.
    answers_from_us: u64,
    /// The peer answers nothing in between, and what arrived then afterwards.
    stalls_us: std::ops::Range<u64>,
}

impl Path {
    fn new(up: usize, down: usize) -> Self {
        Self { up, down, rtt_us: 200, loses: Box::new(|| false), answers_from_us: 0, stalls_us: 0..0 }
    }

    /// Run a search to its end. Returns its result, the time that it took in microseconds, and the lengths probed.
    fn search(&mut self, longest: usize) -> (Option<usize>, u64, Vec<usize>) {
        let at = |us: u64| Instant::from_nanos(us * 1000);
        let (mut search, mut now, mut lens) = (PathSearch::new(longest, 7, at(0)), 0, Vec::new());
        let mut replies: Vec<(u64, PathProbe)> = Vec::new();
        loop {
            while let Some(probe) = search.poll(at(now)) {
                assert!((HEADER_LEN..=longest).contains(&probe.len_bytes));
                lens.push(probe.len_bytes);
                let arrives = probe.len_bytes <= self.up && now >= self.answers_from_us && !(self.loses)();
                if arrives && probe.len_bytes <= self.down && !(self.loses)() {
                    let answered_at = if self.stalls_us.contains(&now) { self.stalls_us.end } else { now };
                    replies.push((answered_at + self.rtt_us, probe));
                }
            }
            let timeout = search.timeout().map(|due| due.as_nanos().div_ceil(1000));
            let Some(next) = timeout else { return (search.result(), now, lens) };
            now = replies.iter().map(|(at, _)| *at).chain([next]).min().expect("a time").max(now);
            replies.retain(|(arrives, probe)| {
                let is_here = *arrives <= now;
                assert!(!is_here || search.on_reply(probe.token, probe.len_bytes, at(now)), "a reply of this search");
                !is_here
            });
        }
    }
}

#[test]
fn longest_length_that_arrives_takes_one_round_trip() {
    assert_eq!(Path::new(1472, 1472).search(1472), (Some(1472), 200, vec![HEADER_LEN, 1472]));
}

#[test]
fn length_is_found_to_a_step_whichever_direction_is_narrow() {
    for longest in [1472, 8944] {
        for narrow in [576, 1200, 1372, 1452, 1471] {
            for (up, down) in [(narrow, 9000), (9000, narrow)] {
                let (found, took_us, lens) = Path::new(up, down).search(longest);
                assert_eq!(found, Some(narrow / STEP_BYTES * STEP_BYTES), "{narrow} of {longest}");
                assert!(took_us < 300_000 && lens.len() < 80, "{took_us} us, {} probes", lens.len());
            }
        }
    }
}

#[test]
fn path_that_carries_headers_only_ends_with_their_length() {
    assert_eq!(Path::new(90, 90).search(1472).0, Some(80));
}

#[test]
fn peer_that_never_answers_says_nothing_about_lengths() {
    let mut path = Path { answers_from_us: u64::MAX, ..Path::new(1472, 1472) };
    let (found, took_us, lens) = path.search(1472);
    assert_eq!(found, None);
    assert!((1_000_000..4_000_000).contains(&took_us) && lens.len() <= 2 * usize::from(SILENT_ATTEMPTS), "{took_us}");
}

#[test]
fn peer_that_is_late_or_far_away_is_waited_for() {
    let mut late = Path { answers_from_us: 600_000, ..Path::new(1472, 1472) };
    assert_eq!(late.search(1472).0, Some(1472));
    for rtt_us in [10_000, 80_000, 300_000] {
        let mut far = Path { rtt_us, ..Path::new(1472, 1472) };
        assert_eq!(far.search(1472).0, Some(1472), "{rtt_us} us");
        let mut narrow = Path { rtt_us, ..Path::new(1300, 1472) };
        assert_eq!(narrow.search(1472).0, Some(1296), "{rtt_us} us");
    }
}

/// A busy machine stalls for longer than all attempts of a length take.
#[test]
fn peer_that_stalls_in_between_makes_no_length_fail() {
    for from in [0, 100, 250, 5_000] {
        let mut stalled = Path { stalls_us: from..from + 700_000, ..Path::new(1472, 1472) };
        assert_eq!(stalled.search(1472).0, Some(1472), "from {from} us");
        let mut narrow = Path { stalls_us: from..from + 700_000, ..Path::new(1300, 1472) };
        assert_eq!(narrow.search(1472).0, Some(1296), "from {from} us");
    }
}

#[test]
fn search_that_is_given_up_knows_only_what_it_has_found() {
    let at = |ms: u64| Instant::from_nanos(ms * 1_000_000);
    let mut search = PathSearch::new(1472, 7, at(0));
    search.give_up();
    assert_eq!(search.result(), None, "nothing");
    let mut search = PathSearch::new(1472, 7, at(0));
    let mut fails_at = None;
    for ms in 0..1000 {
        while let Some(probe) = search.poll(at(ms)) {
            fails_at = fails_at.or((probe.len_bytes != HEADER_LEN && probe.len_bytes < 1472).then_some(ms));
            if probe.len_bytes <= 700 {
                search.on_reply(probe.token, probe.len_bytes, at(ms));
            }
        }
        if fails_at.is_some() {
            break;
        }
    }
    search.give_up();
    assert_eq!(search.result(), Some(80), "the longest does not arrive, and nothing longer than a header has");
}

#[test]
fn reply_with_a_foreign_token_changes_nothing() {
    let now = Instant::ZERO;
    let mut search = PathSearch::new(1472, 7, now);
    let probe = search.poll(now).expect("the first");
    let _padded = search.poll(now).expect("the second");
    let before = search.clone();
    for token in [7, probe.token + 1, 0, u32::MAX] {
        assert!(!search.on_reply(token, 1472, now), "{token}");
    }
    assert_eq!(search, before);
    assert!(search.on_reply(probe.token, 60_000, now), "longer than was sent: clamped");
    assert_eq!(search.result(), Some(1472));
}

proptest! {
    /// Loss can make a length fail that would pass, but never the other way round, and the search ends.
    #[test]
    fn result_of_a_lossy_path_is_never_too_long(
        draws in prop::collection::vec(0_u64..100, 64),
        percent in 0_u64..40,
        narrow in 100_usize..1500,
    ) {
        let mut draws = draws.into_iter().cycle();
        let loses = Box::new(move || draws.next().is_some_and(|draw| draw < percent));
        let (found, _, lens) = Path { loses, ..Path::new(narrow, 1472) }.search(1472);
        prop_assert!(found.is_none_or(|found| found <= narrow), "{found:?} of {narrow}");
        prop_assert!(lens.len() <= 2 * ATTEMPTS_MAX as usize);
        if percent == 0 {
            prop_assert_eq!(found, Some((narrow / STEP_BYTES * STEP_BYTES).min(1472)));
        }
    }
}
