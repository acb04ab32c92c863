//! Reduce-scatters and all-gathers that go along the dimensions of a grid, one after the other.
//!
//! A *sub-collective* has a share of the elements and an order of the dimensions. Along each dimension, the ranks that
//! differ there alone, a *line*, reduce what they have so far: the rank at place i of d keeps part i. After the last
//! dimension each rank has a finished part, and the all-gather takes the same way back. Several sub-collectives run at
//! once, step by step, on shares of their own, to use the links of several dimensions ([`super::torus_2d`]).
//!
//! How the ranks of a line exchange is their [`Form`]; [`super::lines`] has the steps. Along dimensions of d1, d2, ...
//! ranks, n elements become n/d1, n/(d1 d2), ..., so that all forms of d - 1 blocks each send n(p-1)/p in all.
//!
//! An all-reduce numbers parts in the order of its dimensions, so each message is one run of elements. A reduce-scatter
//! and an all-gather have rank r's part in block r: their messages have a piece for each run of ranks.
//!
//! All steps are computed, because a dimension of d ranks may have d - 1 of them.

use super::lines::{Form, Line};
use super::{Buffer, DIMENSIONS_MAX, Layout, Local, Place, Region, Schedule, Span, StepBuffer};
use std::sync::Arc;
use sumac_hal::ids::Rank;

/// The dimensions of a grid in the order of a sub-collective, each with the form of its lines.
pub(super) type Order = Vec<(usize, Form)>;

/// Schedule an all-reduce of `count` elements over a grid, with a sub-collective for each of `orders`.
pub(super) fn all_reduce(place: Place, count: usize, dims: &[u32], orders: &[Order]) -> Schedule {
    let parts = |share: usize| Parts::Contiguous(Span::of_block(count, orders.len() as u32, share as u32));
    let subs: Arc<[_]> = sub_collectives(place, dims, orders, &parts, count).into();
    let slots: usize = subs.iter().map(SubCollective::slots).sum();
    let layout = match slots {
        0 => Layout::all_reduce(count),
        _ => Layout { work: count + slots, work_in_output: false, ..Layout::all_reduce(count) },
    };
    let mut schedule = Schedule::reducing(place, layout);
    if subs.iter().all(|sub| sub.lines.is_empty()) {
        let whole = Span::first(count);
        schedule.move_locally(&[Local::copy(Buffer::Input.at(whole), Buffer::Output.at(whole))]);
    }
    push_reduce_scatter(&mut schedule, Arc::clone(&subs), 0);
    push_all_gather(&mut schedule, subs);
    schedule
}

/// Schedule a reduce-scatter of `count` elements over a grid, with a sub-collective for each of `orders`: rank r
/// gets block r of p.
pub(super) fn reduce_scatter(place: Place, count: usize, dims: &[u32], orders: &[Order]) -> Schedule {
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let parts = |share| Parts::OfRanks { count, share, shares: orders.len() };
    let subs: Arc<[_]> = sub_collectives(place, dims, orders, &parts, count).into();
    let work = if place.ranks() > 1 { count + subs.iter().map(SubCollective::slots).sum::<usize>() } else { 0 };
    let layout = Layout { input: count, output: own.len, work, work_in_output: false, in_place_at: Some(own.start) };
    let mut schedule = Schedule::reducing(place, layout);
    if subs.iter().all(|sub| sub.lines.is_empty()) {
        schedule.move_locally(&[Local::copy(Buffer::Input.at(own), Buffer::Output.at(Span::first(own.len)))]);
    }
    push_reduce_scatter(&mut schedule, subs, own.start);
    schedule
}

/// Schedule an all-gather of `count` elements in all over a grid, with a sub-collective for each of `orders`,
/// backwards: rank r contributes block r of p.
pub(super) fn all_gather(place: Place, count: usize, dims: &[u32], orders: &[Order]) -> Schedule {
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let parts = |share| Parts::OfRanks { count, share, shares: orders.len() };
    let mut schedule = Schedule::moving(place, Layout::moves(own.len, count, Some(own.start)));
    schedule.move_locally(&[Local::copy(Buffer::Input.at(Span::first(own.len)), Buffer::Output.at(own))]);
    push_all_gather(&mut schedule, sub_collectives(place, dims, orders, &parts, count).into());
    schedule
}

/// Append a ring reduce-scatter of `count` elements among the ranks of a place's row of `each` ranks.
pub(super) fn reduce_scatter_inside_of(schedule: &mut Schedule, count: usize, each: u32) {
    let inside = SubCollective::inside(schedule.place(), count, each);
    push_reduce_scatter(schedule, Arc::new([inside]), 0);
}

/// Append a ring all-gather of `count` elements in all among the ranks of a place's row of `each` ranks.
pub(super) fn all_gather_inside_of(schedule: &mut Schedule, count: usize, each: u32) {
    let inside = SubCollective::inside(schedule.place(), count, each);
    push_all_gather(schedule, Arc::new([inside]));
}

/// Append the reduce-scatters of sub-collectives: the first steps of all together, then the second ones. A rank's
/// `Output` begins at element `output_at`.
fn push_reduce_scatter(schedule: &mut Schedule, subs: Arc<[SubCollective]>, output_at: usize) {
    let steps = |sub: &SubCollective| sub.lines.iter().map(Line::reduce_scatter_steps).sum();
    let most = subs.iter().map(steps).max().unwrap_or(0);
    schedule.compute(most, move |index, step| subs.iter().for_each(|sub| sub.reduce_scatter(index, output_at, step)));
}

/// Append the all-gathers of sub-collectives, together.
fn push_all_gather(schedule: &mut Schedule, subs: Arc<[SubCollective]>) {
    let steps = |sub: &SubCollective| sub.lines.iter().map(Line::all_gather_steps).sum();
    let most = subs.iter().map(steps).max().unwrap_or(0);
    schedule.compute(most, move |index, step| subs.iter().for_each(|sub| sub.all_gather(index, step)));
}

/// Which elements a sub-collective has, and how they are divided among ranks.
#[derive(Clone, Copy)]
enum Parts {
    /// These elements, divided by the places of ranks in the order of the sub-collective.
    Contiguous(Span),
    /// A share of each rank's block.
    OfRanks { count: usize, share: usize, shares: usize },
}

/// What one rank does of a sub-collective.
struct SubCollective {
    ranks: u32,
    /// The lines through this rank, in the order of the sub-collective; none of a single rank.
    lines: Vec<Line>,
    parts: Parts,
    /// Where its slots begin in `Work`.
    slots_at: usize,
}

/// Lay out a sub-collective for each order. Their slots follow `count` elements of `Work`.
fn sub_collectives(
    place: Place,
    dims: &[u32],
    orders: &[Order],
    parts: &dyn Fn(usize) -> Parts,
    count: usize,
) -> Vec<SubCollective> {
    let mut slots_at = count;
    let sub = |(share, order): (usize, &Order)| {
        let line = |&(dim, form): &(usize, Form)| {
            let stride: u32 = dims[dim + 1..].iter().product();
            let own = place.rank().0 / stride % dims[dim];
            Line { form, len: dims[dim], own, stride, rank: place.rank() }
        };
        let lines = order.iter().map(line).filter(|line| line.len > 1).collect();
        let sub = SubCollective { ranks: place.ranks(), lines, parts: parts(share), slots_at };
        slots_at += sub.slots();
        sub
    };
    orders.iter().enumerate().map(sub).collect()
}

impl SubCollective {
    /// Lay out a ring among the ranks of a place's row, which divide all elements among themselves.
    fn inside(place: Place, count: usize, each: u32) -> Self {
        let rank = place.rank();
        let line = Line { form: Form::Ring, len: each, own: rank.0 % each, stride: 1, rank };
        Self { ranks: each, lines: vec![line], parts: Parts::Contiguous(Span::first(count)), slots_at: count }
    }

    /// The blocks of a line.
    fn blocks(&self, nth: usize) -> Blocks<'_> {
        let mut blocks = Blocks { sub: self, nth, output_at: 0, slot_len: 0 };
        if self.lines[nth].slots() > 0 {
            blocks.slot_len = blocks.pieces(self.lines[nth].own).map(|piece| piece.len).sum();
        }
        blocks
    }

    /// How many elements of `Work` the sub-collective needs beside those in place.
    fn slots(&self) -> usize {
        let of_line = |(nth, line): (usize, &Line)| self.blocks(nth).slot_len * line.slots() as usize;
        self.lines.iter().enumerate().map(of_line).max().unwrap_or(0)
    }

    /// Append a step on the way to this rank's finished part, whose `Output` begins at element `output_at`.
    fn reduce_scatter(&self, mut index: usize, output_at: usize, step: &mut StepBuffer) {
        for (nth, line) in self.lines.iter().enumerate() {
            let steps = line.reduce_scatter_steps();
            if index < steps {
                let source = if nth == 0 { Buffer::Input } else { Buffer::Work };
                return line.reduce_scatter(index, source, &Blocks { output_at, ..self.blocks(nth) }, step);
            }
            index -= steps;
        }
    }

    /// Append a step on the way from this rank's finished part to all of the sub-collective's elements.
    fn all_gather(&self, mut index: usize, step: &mut StepBuffer) {
        for (nth, line) in self.lines.iter().enumerate().rev() {
            let steps = line.all_gather_steps();
            if index < steps {
                return line.all_gather(index, &self.blocks(nth), step);
            }
            index -= steps;
        }
    }
}

/// The blocks of one line of a sub-collective: that of the rank at a place, and of those that it stands for in later
/// lines.
pub(super) struct Blocks<'a> {
    sub: &'a SubCollective,
    nth: usize,
    /// Where the `Output` of a reduce-scatter begins.
    output_at: usize,
    /// The elements of this rank's block, if it holds further copies for a time.
    slot_len: usize,
}

impl Blocks<'_> {
    /// Return the pieces of the block of the rank at place `at`.
    pub(super) fn pieces(&self, at: u32) -> impl Iterator<Item = Span> {
        let runs = self.runs(at);
        let sub = self.sub;
        (0..runs.number()).map(move |index| {
            let (first, last) = (runs.first(index), runs.first(index) + runs.len);
            match sub.parts {
                Parts::Contiguous(share) => {
                    let part = Span::of_blocks(share.len, sub.ranks, first, last);
                    Span { start: share.start + part.start, len: part.len }
                }
                Parts::OfRanks { count, share, shares } => {
                    let blocks = Span::of_blocks(count, sub.ranks, first, last);
                    let part = Span::of_block(blocks.len, shares as u32, share as u32);
                    Span { start: blocks.start + part.start, len: part.len }
                }
            }
        })
    }

    /// Return where the reduction of a piece of this rank's block goes.
    pub(super) const fn finished(&self, piece: Span) -> Region {
        match self.nth + 1 == self.sub.lines.len() {
            true => Buffer::Output.at(Span { start: piece.start - self.output_at, len: piece.len }),
            false => Buffer::Work.at(piece),
        }
    }

    /// Return where the pieces of this rank's block go that come from another rank.
    pub(super) fn slot(&self, slot: u32) -> impl Iterator<Item = Region> {
        let mut start = self.sub.slots_at + slot as usize * self.slot_len;
        self.pieces(self.sub.lines[self.nth].own).map(move |Span { len, .. }| {
            start += len;
            Buffer::Work.at(Span { start: start - len, len })
        })
    }

    /// Return where a piece of slot 0 is in another slot.
    pub(super) const fn in_slot(&self, slot: u32, first: Region) -> Region {
        let start = first.span.start + slot as usize * self.slot_len;
        first.buffer.at(Span { start, len: first.span.len })
    }

    /// Return the numbers of the parts that the rank at place `at` has.
    fn runs(&self, at: u32) -> Runs {
        let (sub, lines) = (self.sub, &self.sub.lines);
        let place = |nth: usize| if nth == self.nth { at } else { lines[nth].own };
        let (done, later) = (0..=self.nth, &lines[self.nth + 1..]);
        let shares = match sub.parts {
            Parts::Contiguous(_) => {
                // Parts are numbered in the order of the lines.
                let below = |nth: usize| lines[nth + 1..].iter().map(|line| line.len).product::<u32>();
                let first = done.map(|nth| place(nth) * below(nth)).sum();
                return Runs { base: first, len: below(self.nth), ..Runs::default() };
            }
            Parts::OfRanks { shares, .. } => shares,
        };
        let mut runs = Runs { base: done.map(|nth| place(nth) * lines[nth].stride).sum(), ..Runs::default() };
        // From near to far.
        let mut strides = [(0, 0); DIMENSIONS_MAX];
        let strides = &mut strides[..later.len()];
        strides.iter_mut().zip(later).for_each(|(stride, line)| *stride = (line.stride, line.len));
        strides.sort_unstable();
        for &(stride, len) in &*strides {
            // Whole blocks of neighbouring ranks are one run.
            if shares == 1 && stride == runs.len {
                runs.len *= len;
            } else {
                runs.strides[runs.dims] = (stride, len);
                runs.dims += 1;
            }
        }
        runs
    }
}

/// Runs of as many numbers each, in several dimensions.
struct Runs {
    /// The first one of the first.
    base: u32,
    len: u32,
    /// The distance of runs and their number along each dimension, from near to far.
    strides: [(u32, u32); DIMENSIONS_MAX],
    dims: usize,
}

impl Default for Runs {
    fn default() -> Self {
        Self { base: 0, len: 1, strides: [(0, 0); DIMENSIONS_MAX], dims: 0 }
    }
}

impl Runs {
    fn number(&self) -> u32 {
        self.strides[..self.dims].iter().map(|&(_, len)| len).product()
    }

    fn first(&self, mut index: u32) -> u32 {
        let mut first = self.base;
        for &(stride, len) in &self.strides[..self.dims] {
            first += index % len * stride;
            index /= len;
        }
        first
    }
}

impl Line {
    /// The rank at a place of the line.
    pub(super) const fn rank_at(&self, at: u32) -> Rank {
        Rank(self.rank.0 - self.own * self.stride + at * self.stride)
    }
}
