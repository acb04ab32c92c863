//! Pipelines: messages cut into segments, of which several are under way at once.
//!
//! A pipeline of k segments of n elements takes (f + m k) alpha + (b + c/k) n beta: f further steps and c n elements
//! fill it, and the busiest rank sends or receives m messages for each segment. A step is not all that a segment costs:
//! each of its messages has a frame and a wake-up of its own, so what a rank sends to two others is paid twice. The
//! best k is sqrt(c n beta / (m alpha)) ([`segments`]).
//!
//! Invariant: messages have times on a common clock, the same at both ends, and each rank's steps are in its order. So
//! ranks never wait in a cycle, even if each send waits for its receiver.

use super::{Local, Recv, Schedule, Send, Span, Step};
use std::collections::BTreeMap;
use std::ops::Range;

/// The ratio of a message's latency to an element's time for which the number of segments is best: between that of
/// processes on one machine and that of data sheets' links.
pub(super) const LATENCY_ELEMENTS: f64 = 16384.0;

/// The most segments: more only cost frames.
pub(super) const SEGMENTS_MAX: f64 = 512.0;

/// Return the number of segments that is best where `fill` times `count` elements fill a pipeline of one segment, and
/// each segment costs its busiest rank so many messages: a function of what all ranks know.
pub(super) fn segments(fill: f64, messages: f64, count: usize) -> u32 {
    (fill * count as f64 / (messages * LATENCY_ELEMENTS)).sqrt().round().clamp(1.0, SEGMENTS_MAX) as u32
}

/// Return segment `index` of `segments` of these elements.
pub(super) fn segment(whole: Span, segments: u32, index: u32) -> Span {
    let part = Span::of_block(whole.len, segments, index);
    Span { start: whole.start + part.start, len: part.len }
}

/// The times at which there is anything to do, in order: those of a rank's steps.
pub(super) struct BusyTimes(Vec<Range<u32>>);

impl BusyTimes {
    /// Join runs of times, which may overlap.
    pub(super) fn new(mut runs: Vec<Range<u32>>) -> Self {
        runs.sort_unstable_by_key(|run| run.start);
        let mut apart: Vec<Range<u32>> = Vec::new();
        for run in runs {
            match apart.last_mut() {
                Some(before) if run.start <= before.end => before.end = before.end.max(run.end),
                _ => apart.push(run),
            }
        }
        Self(apart)
    }

    /// Return how many times there are.
    pub(super) fn len(&self) -> usize {
        self.0.iter().map(|run| run.len()).sum()
    }

    /// Return the time of step `index`, if there is one.
    pub(super) fn at(&self, index: usize) -> Option<u32> {
        let mut index = index as u32;
        self.0.iter().find_map(|run| {
            let len = run.end - run.start;
            let found = (index < len).then(|| run.start + index);
            index = index.saturating_sub(len);
            found
        })
    }
}

/// What happens at a time.
#[derive(Default)]
pub(super) struct Moment {
    pub(super) locals: Vec<Local>,
    pub(super) sends: Vec<Send>,
    pub(super) recvs: Vec<Recv>,
}

/// What happens, by its time.
#[derive(Default)]
pub(super) struct Clock(BTreeMap<u32, Moment>);

impl Clock {
    pub(super) fn at(&mut self, time: u32) -> &mut Moment {
        self.0.entry(time).or_default()
    }

    pub(super) fn append_to(self, schedule: &mut Schedule) {
        for Moment { locals, sends, recvs } in self.0.values() {
            schedule.push(Step { locals, sends, recvs });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The time of a pipeline in latencies, as the module has it.
    fn time(fill: f64, messages: f64, count: usize, segments: u32) -> f64 {
        let k = f64::from(segments);
        messages * k + (1.0 + fill / k) * count as f64 / LATENCY_ELEMENTS
    }

    #[test]
    fn no_other_number_of_segments_is_cheaper() {
        for (fill, messages) in [(1.0, 1.0), (6.0, 1.0), (6.0, 4.0), (62.0, 2.0)] {
            for count in [0, 1, 1 << 10, 1 << 14, 1 << 20, 3 << 22] {
                let best = segments(fill, messages, count);
                let cheapest = (1..=512).map(|k| time(fill, messages, count, k)).fold(f64::MAX, f64::min);
                // Rounding to the nearest costs next to nothing.
                assert!(time(fill, messages, count, best) <= cheapest * 1.03, "{fill} {messages} {count}: {best}");
            }
        }
    }

    #[test]
    fn short_messages_and_empty_pipelines_are_whole() {
        assert_eq!([0, 1, 4000].map(|count| segments(4.0, 1.0, count)), [1, 1, 1]);
        assert_eq!(segments(0.0, 1.0, usize::MAX), 1, "nothing to fill");
        assert_eq!(segments(1e9, 1.0, usize::MAX), 512);
    }

    #[test]
    fn busy_times_are_those_of_any_run_once() {
        let times = BusyTimes::new(vec![7..9, 2..4, 3..5, 4..4, 9..10]);
        let found: Vec<_> = (0..times.len()).map(|index| times.at(index)).collect();
        assert_eq!(found, [2, 3, 4, 7, 8, 9].map(Some));
        assert_eq!((times.at(6), BusyTimes::new(Vec::new()).len()), (None, 0));
    }

    #[test]
    fn segments_tile_the_elements() {
        for (len, k) in [(0, 3), (2, 5), (17, 4)] {
            let parts = (0..k).map(|index| segment(Span { start: 5, len }, k, index));
            assert_eq!(parts.fold(5, |end, part| if part.start == end { part.end() } else { usize::MAX }), 5 + len);
        }
    }
}
