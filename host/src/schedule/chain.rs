//! Pipelined chain: each rank passes segments on to the next one, while others follow.
//!
//! The chain of a broadcast from rank r is r, r+1, ..., p-1, 0, ..., r-1. That of a reduction is all other ranks in
//! rising order and then the root, so that each adds itself to what comes from lower ranks. An all-reduce reduces to
//! rank p-1 and sends each segment back at once: it evaluates (((0 + 1) + 2) + ...), the expression of one aggregation
//! node under `Order::TreeFold`; so does a reduction to rank p-1.
//!
//! With k segments ([`segments`]):
//!
//! | p >= 2 | steps | path | busiest sender |
//! |---|---|---|---|
//! | broadcast, reduce | p-2 + k | n (1 + (p-2)/k) | n |
//! | all-reduce | 2(p-2) + k + 1 | 2n (1 + (p-2)/k) | 2n, if p > 2 |
//!
//! (Watts and van de Geijn, "A pipelined broadcast for multidimensional meshes", Parallel Processing Letters 5(2),
//! 1995, for one dimension; Open MPI calls it a pipeline.) So large messages take little more than one message between
//! two ranks, and few links are used; but a chain fills slowly, and a double tree in logarithmic time.
//!
//! A rank holds two segments of partial values: the one that it passes on and the one that arrives.

use super::pipeline::{self, BusyTimes};
use super::{Buffer, Landing, Layout, Local, Place, Recv, Region, Schedule, Send, Side, Span, StepBuffer};
use std::ops::Range;
use sumac_hal::ids::Rank;

/// Return the number of segments of `count` elements over `ranks` ranks: the one that minimises the cost of a
/// broadcast, `(p-2 + k) alpha + (1 + (p-2)/k) n beta`, and that of an all-reduce, which is twice that.
pub fn segments(ranks: u32, count: usize) -> u32 {
    pipeline::segments(f64::from(ranks.saturating_sub(2)), 1.0, count)
}

/// Schedule a broadcast of `count` elements from `root`, which alone has an input. `root` is below `place.ranks()`.
pub fn broadcast(place: Place, count: usize, root: Rank) -> Schedule {
    let is_root = place.rank() == root;
    let mut schedule = Schedule::moving(place, Layout::moves(if is_root { count } else { 0 }, count, Some(0)));
    if is_root {
        schedule.move_locally(&[input_to_output(count)]);
    }
    let (at, ranks) = (place.before(root.0 % place.ranks()).0, place.ranks());
    let links =
        Links { at, before: (at > 0).then(|| place.before(1)), after: (at + 1 < ranks).then(|| place.after(1)) };
    Chain { reduces: false, broadcast: Some((links, 0)), ..Chain::new(place, count, root) }.append_to(&mut schedule);
    schedule
}

/// Schedule a reduction of `count` elements to `root`, which alone has an output. `root` is below `place.ranks()`.
pub fn reduce(place: Place, count: usize, root: Rank) -> Schedule {
    let output = if place.rank() == root { count } else { 0 };
    let mut schedule = Schedule::reducing(place, Layout { output, ..layout(place, count, root) });
    push_alone(&mut schedule, count);
    Chain::new(place, count, root).append_to(&mut schedule);
    schedule
}

/// Schedule an all-reduce of `count` elements: reduce to the last rank, each segment then sent back at once.
pub fn all_reduce(place: Place, count: usize) -> Schedule {
    let last = place.ranks() - 1;
    let mut schedule = Schedule::reducing(place, layout(place, count, Rank(last)));
    let rank = place.rank().0;
    let links =
        Links { at: last - rank, before: (rank < last).then(|| Rank(rank + 1)), after: rank.checked_sub(1).map(Rank) };
    push_alone(&mut schedule, count);
    Chain { broadcast: Some((links, last)), ..Chain::new(place, count, Rank(last)) }.append_to(&mut schedule);
    schedule
}

/// Append what a rank alone does.
fn push_alone(schedule: &mut Schedule, count: usize) {
    if schedule.place().ranks() == 1 {
        schedule.move_locally(&[input_to_output(count)]);
    }
}

const fn input_to_output(count: usize) -> Local {
    let whole = Span::first(count);
    Local::copy(Buffer::Input.at(whole), Buffer::Output.at(whole))
}

/// The layout of an all-reduce: those in the middle of the chain hold two segments.
fn layout(place: Place, count: usize, root: Rank) -> Layout {
    let is_inner = 0 < place_in_reduction(place, root) && place.rank() != root;
    let work = if is_inner { 2 * segment_len(place.ranks(), count) } else { 0 };
    Layout { work, work_in_output: false, ..Layout::all_reduce(count) }
}

/// The length of the longest segment.
fn segment_len(ranks: u32, count: usize) -> usize {
    count.div_ceil(segments(ranks, count) as usize)
}

/// A rank's place in a chain, and its neighbours there.
#[derive(Debug, Clone, Copy)]
struct Links {
    at: u32,
    before: Option<Rank>,
    after: Option<Rank>,
}

/// The place of a rank in the chain of a reduction: all others in order, then the root.
const fn place_in_reduction(place: Place, root: Rank) -> u32 {
    let rank = place.rank().0;
    if rank == root.0 {
        place.ranks() - 1
    } else if rank > root.0 {
        rank - 1
    } else {
        rank
    }
}

/// What a rank does at which times; each that has anything is a step.
struct Chain {
    place: Place,
    count: usize,
    root: Rank,
    /// 0 of a single rank.
    segments: u32,
    reduces: bool,
    /// The chain of a broadcast, and when its first rank sends the first segment.
    broadcast: Option<(Links, u32)>,
}

impl Chain {
    /// A reduction.
    fn new(place: Place, count: usize, root: Rank) -> Self {
        let segments = if place.ranks() == 1 { 0 } else { segments(place.ranks(), count) };
        Self { place, count, root, segments, reduces: true, broadcast: None }
    }

    fn append_to(self, schedule: &mut Schedule) {
        let busy = BusyTimes::new(self.runs());
        schedule.compute(busy.len(), move |index, step| {
            busy.at(index).into_iter().for_each(|time| self.append_step(time, step));
        });
    }

    /// The times of its messages.
    fn runs(&self) -> Vec<Range<u32>> {
        let (at, last) = (place_in_reduction(self.place, self.root), self.place.ranks() - 1);
        let mut begins = Vec::new();
        if self.reduces {
            begins.extend([(at > 0).then(|| at - 1), (at < last).then_some(at)]);
        }
        if let Some((links, begin)) = self.broadcast {
            begins.extend([links.before.map(|_| begin + links.at - 1), links.after.map(|_| begin + links.at)]);
        }
        begins.into_iter().flatten().map(|begin| begin..begin + self.segments).collect()
    }

    /// The segment of what begins at a time with the first one, and its elements.
    fn segment_at(&self, time: u32, begin: u32) -> Option<(usize, Span)> {
        let segment = time.checked_sub(begin).filter(|&segment| segment < self.segments)?;
        Some((segment as usize, Span::of_block(self.count, self.segments, segment)))
    }

    fn append_step(&self, time: u32, step: &mut StepBuffer) {
        if self.reduces {
            self.reduce(time, step);
        }
        if let Some((links, begin)) = self.broadcast {
            self.broadcast(links, begin, time, step);
        }
    }

    /// Broadcast the first rank's `Output`: place i takes its first segment at `begin` + i - 1, others one by one.
    fn broadcast(&self, links: Links, begin: u32, time: u32, step: &mut StepBuffer) {
        if let (Some(peer), Some((_, span))) = (links.before, self.segment_at(time + 1, begin + links.at)) {
            let landing = Landing::copy(Buffer::Output.at(span));
            step.recvs.push(Recv { peer, sent_from: Buffer::Output, landing });
        }
        if let (Some(peer), Some((_, span))) = (links.after, self.segment_at(time, begin + links.at)) {
            step.sends.push(Send { peer, from: Buffer::Output.at(span) });
        }
    }

    /// Reduce to the root's `Output`: place i takes its first segment at i - 1, others one by one.
    fn reduce(&self, time: u32, step: &mut StepBuffer) {
        let (at, last) = (place_in_reduction(self.place, self.root), self.place.ranks() - 1);
        let root = self.root;
        let rank_at = |at: u32| match at {
            at if at == last => root,
            at if at < root.0 => Rank(at),
            at => Rank(at + 1),
        };
        let room = segment_len(self.place.ranks(), self.count);
        let held = |nth: usize, span: Span| -> Region {
            match at {
                0 => Buffer::Input.at(span),
                at if at == last => Buffer::Output.at(span),
                _ => Buffer::Work.at(Span { start: nth % 2 * room, len: span.len }),
            }
        };
        if let Some((nth, span)) = self.segment_at(time + 1, at).filter(|_| at > 0) {
            let peer = rank_at(at - 1);
            let side = if peer > self.place.rank() { Side::Right } else { Side::Left };
            let sent_from = if at == 1 { Buffer::Input } else { Buffer::Work };
            let landing = Landing::combine(Buffer::Input.at(span), side, held(nth, span));
            step.recvs.push(Recv { peer, sent_from, landing });
        }
        if let Some((nth, span)) = self.segment_at(time, at).filter(|_| at < last) {
            step.sends.push(Send { peer: rank_at(at + 1), from: held(nth, span) });
        }
    }
}
