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

use super::lines::{Form, Line, Targets};
use super::{Buffer, Layout, Local, Place, Recv, Region, Schedule, Send, Span, Step};
use sumac_hal::ids::Rank;

/// The dimensions of a grid in the order of a sub-collective, each with the form of its lines.
pub(super) type Order = Vec<(usize, Form)>;

/// Schedule an all-reduce of `count` elements over a grid, with a sub-collective for each of `orders`.
pub(super) fn all_reduce(place: Place, count: usize, dims: &[u32], orders: &[Order]) -> Schedule {
    let parts = |share: usize| Parts::Contiguous(Span::of_block(count, orders.len() as u32, share as u32));
    let subs = sub_collectives(place, dims, orders, &parts, count);
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
    push_together(&mut schedule, subs.iter().map(|sub| sub.reduce_scatter(0)).collect());
    push_together(&mut schedule, subs.iter().map(SubCollective::all_gather).collect());
    schedule
}

/// Schedule a reduce-scatter of `count` elements over a grid, with a sub-collective for each of `orders`: rank r
/// gets block r of p.
pub(super) fn reduce_scatter(place: Place, count: usize, dims: &[u32], orders: &[Order]) -> Schedule {
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let parts = |share| Parts::OfRanks { count, share, shares: orders.len() };
    let subs = sub_collectives(place, dims, orders, &parts, count);
    let work = if place.ranks() > 1 { count + subs.iter().map(SubCollective::slots).sum::<usize>() } else { 0 };
    let layout = Layout { input: count, output: own.len, work, work_in_output: false, in_place_at: Some(own.start) };
    let mut schedule = Schedule::reducing(place, layout);
    if subs.iter().all(|sub| sub.lines.is_empty()) {
        schedule.move_locally(&[Local::copy(Buffer::Input.at(own), Buffer::Output.at(Span::first(own.len)))]);
    }
    push_together(&mut schedule, subs.iter().map(|sub| sub.reduce_scatter(own.start)).collect());
    schedule
}

/// Schedule an all-gather of `count` elements in all over a grid, with a sub-collective for each of `orders`,
/// backwards: rank r contributes block r of p.
pub(super) fn all_gather(place: Place, count: usize, dims: &[u32], orders: &[Order]) -> Schedule {
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let parts = |share| Parts::OfRanks { count, share, shares: orders.len() };
    let mut schedule = Schedule::moving(place, Layout::moves(own.len, count, Some(own.start)));
    schedule.move_locally(&[Local::copy(Buffer::Input.at(Span::first(own.len)), Buffer::Output.at(own))]);
    let subs = sub_collectives(place, dims, orders, &parts, count);
    push_together(&mut schedule, subs.iter().map(SubCollective::all_gather).collect());
    schedule
}

/// A step of a sub-collective.
#[derive(Default)]
pub(super) struct SubStep {
    pub(super) locals: Vec<Local>,
    pub(super) sends: Vec<Send>,
    pub(super) recvs: Vec<Recv>,
}

/// Append the steps of sub-collectives: the first ones of all together, then the second ones.
fn push_together(schedule: &mut Schedule, subs: Vec<Vec<SubStep>>) {
    let steps = subs.iter().map(Vec::len).max().unwrap_or(0);
    let mut subs: Vec<_> = subs.into_iter().map(Vec::into_iter).collect();
    for _ in 0..steps {
        let mut all = SubStep::default();
        for step in subs.iter_mut().filter_map(Iterator::next) {
            all.locals.extend(step.locals);
            all.sends.extend(step.sends);
            all.recvs.extend(step.recvs);
        }
        // On a mesh some ranks have nothing to do in the first steps.
        let step = Step { locals: &all.locals, sends: &all.sends, recvs: &all.recvs };
        if step != Step::default() {
            schedule.push(step);
        }
    }
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
    /// The elements of the rank at place `at` of line `nth`, and of those that it stands for in later lines.
    fn pieces(&self, nth: usize, at: u32) -> Vec<Span> {
        let (line, done) = (&self.lines[nth], &self.lines[..nth]);
        match self.parts {
            Parts::Contiguous(share) => {
                let below = |first: usize| self.lines[first..].iter().map(|line| line.len).product::<u32>();
                let before: u32 = (0..nth).map(|earlier| self.lines[earlier].own * below(earlier + 1)).sum();
                let (first, width) = (before + at * below(nth + 1), below(nth + 1));
                let part = Span::of_blocks(share.len, self.ranks, first, first + width);
                vec![Span { start: share.start + part.start, len: part.len }]
            }
            Parts::OfRanks { count, share, shares } => {
                let is_of =
                    |rank: &u32| line.place_of(*rank) == at && done.iter().all(|line| line.place_of(*rank) == line.own);
                let ranks: Vec<u32> = (0..self.ranks).filter(is_of).collect();
                // Whole blocks of neighbouring ranks are one run.
                let runs = ranks.chunk_by(|a, b| shares == 1 && a + 1 == *b);
                let piece = |run: &[u32]| {
                    let blocks = Span::of_blocks(count, self.ranks, run[0], run[run.len() - 1] + 1);
                    let part = Span::of_block(blocks.len, shares as u32, share as u32);
                    Span { start: blocks.start + part.start, len: part.len }
                };
                runs.map(piece).collect()
            }
        }
    }

    /// How many elements of `Work` the sub-collective needs beside those in place.
    fn slots(&self) -> usize {
        let of_line = |(nth, line): (usize, &Line)| {
            let own: usize = self.pieces(nth, line.own).iter().map(|piece| piece.len).sum();
            own * line.slots() as usize
        };
        self.lines.iter().enumerate().map(of_line).max().unwrap_or(0)
    }

    /// The steps to this rank's finished part, whose `Output` begins at element `output_at`.
    fn reduce_scatter(&self, output_at: usize) -> Vec<SubStep> {
        let mut steps = Vec::new();
        for (nth, line) in self.lines.iter().enumerate() {
            let source = if nth == 0 { Buffer::Input } else { Buffer::Work };
            let is_last = nth + 1 == self.lines.len();
            let finish = |piece: Span| match is_last {
                true => Buffer::Output.at(Span { start: piece.start - output_at, len: piece.len }),
                false => Buffer::Work.at(piece),
            };
            let slot = |slot: u32, piece: usize| self.slot(&self.pieces(nth, line.own), slot, piece);
            let targets = Targets { finish: &finish, slot: &slot };
            line.reduce_scatter(source, &|at| self.pieces(nth, at), targets, &mut steps);
        }
        steps
    }

    /// Where a piece of a line's slot is in `Work`: each slot has room for all of them.
    fn slot(&self, pieces: &[Span], slot: u32, piece: usize) -> Region {
        let len = |pieces: &[Span]| pieces.iter().map(|piece| piece.len).sum::<usize>();
        let start = self.slots_at + slot as usize * len(pieces) + len(&pieces[..piece]);
        Buffer::Work.at(Span { start, len: pieces[piece].len })
    }

    /// The steps from this rank's finished part to all of the sub-collective's elements.
    fn all_gather(&self) -> Vec<SubStep> {
        let mut steps = Vec::new();
        for (nth, line) in self.lines.iter().enumerate().rev() {
            line.all_gather(&|at| self.pieces(nth, at), &mut steps);
        }
        steps
    }
}

impl Line {
    /// The place in this line's dimension of any rank.
    const fn place_of(&self, rank: u32) -> u32 {
        rank / self.stride % self.len
    }

    /// The rank at a place of the line.
    pub(super) const fn rank_at(&self, at: u32) -> Rank {
        Rank(self.rank.0 - self.own * self.stride + at * self.stride)
    }
}
