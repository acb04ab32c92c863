//! Butterflies over a power of two of ranks, for which others fold in and out.
//!
//! A butterfly has log2 p' steps; in each, a position exchanges with its *partner*. Partners are not `position ^ 2^s`
//! here but what [`Butterfly::partner`] says, as in [`super::swing`] and [`super::bine`]. A position's *label* tells
//! which part it keeps: in step s it keeps the half that bit s of its label names, and its partner the other. That
//! requires, and the checker proves, that partners' labels differ in bit s and agree in those below.
//!
//! Several butterflies may run at once, each on its share of the elements, to use more links: every step then has a
//! message to each one's partner.

use super::fold::{Fold, Role};
use super::{Buffer, Landing, Layout, Local, Place, Recv, Region, Schedule, Send, Side, Span, Step};
use sumac_hal::ids::Rank;

/// Who exchanges with whom.
pub(super) trait Butterfly {
    /// The partner of a position in a step.
    fn partner(&self, position: u32, step: u32) -> u32;
    /// The label of a position.
    fn label(&self, position: u32) -> u32;
}

/// Schedule an all-reduce of `count` elements: halving with `butterflies`, then doubling.
pub(super) fn all_reduce(place: Place, count: usize, butterflies: &dyn Fn(u32) -> Vec<Box<dyn Butterfly>>) -> Schedule {
    let mut schedule = Schedule::reducing(place, Layout::all_reduce(count));
    let fold = Fold::of(place.ranks());
    let Some(position) = fold_in(&mut schedule, fold, Buffer::Work.at(Span::first(count))) else { return schedule };
    let butterflies = butterflies(fold.survivors);
    let share = |nth: usize| Span::of_block(count, butterflies.len() as u32, nth as u32);
    let kept = |nth: usize, label: u32, done: u32| {
        let range = (0..done).fold((0, fold.survivors), |(first, last), bit| {
            let middle = first + (last - first) / 2;
            if label >> bit & 1 == 0 { (first, middle) } else { (middle, last) }
        });
        let part = Span::of_blocks(share(nth).len, fold.survivors, range.0, range.1);
        Span { start: share(nth).start + part.start, len: part.len }
    };
    for done in 0..fold.levels() {
        let operand = |position: u32| match done == 0 && !fold.has_extra(position) {
            true => Buffer::Input,
            false => Buffer::Work,
        };
        let (mut sends, mut recvs) = (Vec::new(), Vec::new());
        for (nth, butterfly) in butterflies.iter().enumerate() {
            let partner = butterfly.partner(position, done);
            let (own, other) = (butterfly.label(position), butterfly.label(partner));
            let (give, keep) = (kept(nth, other, done + 1), kept(nth, own, done + 1));
            let to = if done + 1 == fold.levels() { Buffer::Output } else { Buffer::Work };
            let landing = Landing::combine(operand(position).at(keep), side_of(partner, position), to.at(keep));
            let peer = fold.rank_at(partner);
            sends.push(Send { peer, from: operand(position).at(give) });
            recvs.push(Recv { peer, sent_from: operand(partner), landing });
        }
        schedule.exchange(&sends, &recvs);
    }
    for done in (0..fold.levels()).rev() {
        let (mut sends, mut recvs) = (Vec::new(), Vec::new());
        for (nth, butterfly) in butterflies.iter().enumerate() {
            let partner = butterfly.partner(position, done);
            let (own, other) = (butterfly.label(position), butterfly.label(partner));
            let peer = fold.rank_at(partner);
            sends.push(Send { peer, from: Buffer::Output.at(kept(nth, own, done + 1)) });
            let landing = Landing::copy(Buffer::Output.at(kept(nth, other, done + 1)));
            recvs.push(Recv { peer, sent_from: Buffer::Output, landing });
        }
        schedule.exchange(&sends, &recvs);
    }
    fold_out(&mut schedule, fold, count);
    schedule
}

/// Schedule an all-reduce of `count` elements in which partners exchange all that they have, in steps from the last to
/// the first.
///
/// In that order the positions with equal labels up to a bit have combined the same contributions, and all compute the
/// same expression. In the other order each rank would round in its own way.
pub(super) fn all_reduce_whole(
    place: Place,
    count: usize,
    butterflies: &dyn Fn(u32) -> Vec<Box<dyn Butterfly>>,
) -> Schedule {
    let fold = Fold::of(place.ranks());
    let takes_part = matches!(fold.role(place), Role::Survivor { .. }) && fold.levels() > 0;
    let work = if takes_part { 2 * count } else { 0 };
    let layout = Layout { input: count, output: count, work, work_in_output: false, in_place_at: Some(0) };
    let mut schedule = Schedule::reducing(place, layout);
    let Some(position) = fold_in(&mut schedule, fold, Buffer::Work.at(Span::first(count))) else { return schedule };
    let butterflies = butterflies(fold.survivors);
    let share = |nth: usize| Span::of_block(count, butterflies.len() as u32, nth as u32);
    let half =
        |turn: usize, nth: usize| Buffer::Work.at(Span { start: turn * count + share(nth).start, len: share(nth).len });
    let is_folded = fold.has_extra(position);
    let levels = fold.levels();
    // What a position has before a step: its input, the first half after a fold, then one half after the other.
    let held = |position: u32, done: u32, nth: usize| match done == 0 && !fold.has_extra(position) {
        true => Buffer::Input.at(share(nth)),
        false => half((done as usize + usize::from(!is_folded)) % 2, nth),
    };
    for done in 0..levels {
        let step = levels - 1 - done;
        let (mut sends, mut recvs) = (Vec::new(), Vec::new());
        for (nth, butterfly) in butterflies.iter().enumerate() {
            let partner = butterfly.partner(position, step);
            let peer = fold.rank_at(partner);
            let received = match butterfly.label(position) >> step & 1 {
                0 => Side::Right,
                _ => Side::Left,
            };
            let to = half((done as usize + 1 + usize::from(!is_folded)) % 2, nth);
            sends.push(Send { peer, from: held(position, done, nth) });
            let sent_from = held(partner, done, nth).buffer;
            recvs.push(Recv { peer, sent_from, landing: Landing::combine(held(position, done, nth), received, to) });
        }
        schedule.exchange(&sends, &recvs);
    }
    if levels > 0 {
        let copy = |nth| Local::copy(held(position, levels, nth), Buffer::Output.at(share(nth)));
        let locals: Vec<Local> = (0..butterflies.len()).map(copy).collect();
        schedule.move_locally(&locals);
    }
    fold_out(&mut schedule, fold, count);
    schedule
}

/// Append what happens before an all-reduce's exchange, and return the position of a survivor that takes part in it. An
/// extra's contribution goes to `folded`.
fn fold_in(schedule: &mut Schedule, fold: Fold, folded: Region) -> Option<u32> {
    let whole = folded.span;
    let (input, output) = (Buffer::Input.at(whole), Buffer::Output.at(whole));
    match fold.role(schedule.place()) {
        Role::Extra { survivor } => {
            schedule.exchange(&[Send { peer: survivor, from: input }], &[]);
            let landing = Landing::copy(output);
            schedule.exchange(&[], &[Recv { peer: survivor, sent_from: Buffer::Output, landing }]);
            None
        }
        Role::Survivor { .. } if fold.levels() == 0 => {
            schedule.move_locally(&[Local::copy(input, output)]);
            None
        }
        Role::Survivor { position, extra } => {
            if let Some(peer) = extra {
                let landing = Landing::combine(input, Side::Right, folded);
                schedule.exchange(&[], &[Recv { peer, sent_from: Buffer::Input, landing }]);
            }
            Some(position)
        }
    }
}

/// Append the result's way to an extra.
fn fold_out(schedule: &mut Schedule, fold: Fold, count: usize) {
    if let Role::Survivor { extra: Some(peer), .. } = fold.role(schedule.place()) {
        let send = Send { peer, from: Buffer::Output.at(Span::first(count)) };
        schedule.push(Step { sends: &[send], ..Step::default() });
    }
}

/// The side of what comes from `partner`: positions are in rank order.
pub(super) const fn side_of(partner: u32, position: u32) -> Side {
    if partner > position { Side::Right } else { Side::Left }
}

/// The rank at a position of a folded communicator whose numbers begin at `root`.
pub(super) fn rank_from(root: Rank, place: Place, virtual_rank: Rank) -> Rank {
    Rank(((u64::from(root.0) + u64::from(virtual_rank.0)) % u64::from(place.ranks())) as u32)
}
