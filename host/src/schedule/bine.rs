//! Bine trees and butterflies: binomial ones whose distances are negabinary numbers, so that ranks talk to nearer ones.
//!
//! Where a binomial tree or butterfly goes 2^s ranks far, these go |rho(s)| = 1, 1, 3, 5, 11, ..., about two thirds of
//! it, and alternate in direction (De Sensi et al., "Bine trees: enhancing collective operations by
//! optimizing communication locality", SC 2025, arXiv 2508.17311, sections 3 and 4). Between groups of ranks that are
//! not aligned powers of two fewer bytes go; between aligned ones, more.
//!
//! | | cost, p = 2^k |
//! |---|---|
//! | broadcast, from far to near | log2 p (alpha + n beta) |
//! | reduce, from near to far | log2 p (alpha + n beta + n gamma) |
//! | reduce-scatter, from far to near | log2 p alpha + (p-1)/p n (beta + gamma) |
//! | all-gather, from near to far | log2 p alpha + (p-1)/p n beta |
//! | all-reduce: halving from near to far, and back | 2 log2 p alpha + (p-1)/p n (2 beta + gamma) |
//!
//! Other p fold: trees take ceil(log2 p) steps, butterflies cost what those of [`super::halving_doubling`] do. From far
//! to near a position keeps 2^t blocks that lie side by side around it, so no element moves for its place's sake; a run
//! that wraps around is two pieces of a message.

use super::butterfly::{self, Butterfly, rank_from, side_of};
use super::fold::{Fold, Role};
use super::swing::Ring;
use super::{Buffer, Landing, Layout, Local, Place, Recv, Schedule, Send, Side, Span, Step};
use sumac_hal::ids::Rank;

/// Schedule an all-reduce of `count` elements by a butterfly.
pub fn all_reduce(place: Place, count: usize) -> Schedule {
    butterfly::all_reduce(place, count, &|ranks| vec![Box::new(Ring { ranks, mirrored: false }) as Box<dyn Butterfly>])
}

/// Schedule a broadcast of `count` elements from `root`, which alone has an input.
pub fn broadcast(place: Place, count: usize, root: Rank) -> Schedule {
    let whole = Span::first(count);
    let is_root = place.rank() == root;
    let mut schedule = Schedule::moving(place, Layout::moves(if is_root { count } else { 0 }, count, Some(0)));
    if is_root {
        schedule.move_locally(&[Local::copy(Buffer::Input.at(whole), Buffer::Output.at(whole))]);
    }
    let output = Buffer::Output.at(whole);
    for hop in hops(place, root).into_iter().rev() {
        match hop.is_parent {
            true => schedule
                .exchange(&[], &[Recv { peer: hop.peer, sent_from: Buffer::Output, landing: Landing::copy(output) }]),
            false => schedule.exchange(&[Send { peer: hop.peer, from: output }], &[]),
        }
    }
    schedule
}

/// Schedule a reduction of `count` elements to `root`, which alone has an output.
pub fn reduce(place: Place, count: usize, root: Rank) -> Schedule {
    let whole = Span::first(count);
    let hops = hops(place, root);
    let is_root = place.rank() == root;
    let layout = match is_root {
        true => Layout::all_reduce(count),
        false => {
            let work = if hops.len() > 1 { count } else { 0 };
            Layout { input: count, output: 0, work, work_in_output: false, in_place_at: Some(0) }
        }
    };
    let mut schedule = Schedule::reducing(place, layout);
    if hops.is_empty() {
        schedule.move_locally(&[Local::copy(Buffer::Input.at(whole), Buffer::Output.at(whole))]);
    }
    let mut held = Buffer::Input;
    for (nth, hop) in hops.iter().enumerate() {
        if hop.is_parent {
            schedule.exchange(&[Send { peer: hop.peer, from: held.at(whole) }], &[]);
            continue;
        }
        let to = if is_root && nth + 1 == hops.len() { Buffer::Output } else { Buffer::Work };
        let sent_from = if hop.peer_combines { Buffer::Work } else { Buffer::Input };
        let received = if hop.peer > place.rank() { Side::Right } else { Side::Left };
        let landing = Landing::combine(held.at(whole), received, to.at(whole));
        schedule.exchange(&[], &[Recv { peer: hop.peer, sent_from, landing }]);
        held = Buffer::Work;
    }
    schedule
}

/// A hop of the tree, as one of its ends sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Hop {
    peer: Rank,
    /// Whether the peer is nearer to the root.
    is_parent: bool,
    /// Whether the peer has children of its own.
    peer_combines: bool,
}

/// The hops of this rank in the order of a reduction: its extra, its children from near to far, its parent.
fn hops(place: Place, root: Rank) -> Vec<Hop> {
    let fold = Fold::of(place.ranks());
    let relative = Place::new(place.before(root.0), place.ranks()).unwrap_or(place);
    let rank = |position: u32| rank_from(root, place, fold.rank_at(position));
    let hop = |peer, is_parent, peer_combines| Hop { peer, is_parent, peer_combines };
    match fold.role(relative) {
        Role::Extra { survivor } => vec![hop(rank_from(root, place, survivor), true, true)],
        Role::Survivor { position, extra } => {
            let ring = Ring { ranks: fold.survivors, mirrored: false };
            let own = joined_at(&ring, position);
            let extra = extra.map(|extra| hop(rank_from(root, place, extra), false, false));
            let children = (0..own).map(|step| {
                let child = ring.partner(position, step);
                hop(rank(child), false, step > 0 || fold.has_extra(child))
            });
            let parent = (position != 0).then(|| hop(rank(ring.partner(position, own)), true, true));
            extra.into_iter().chain(children).chain(parent).collect()
        }
    }
}

/// The step in which a position is reached from position 0, if steps run from far to near; their number for itself.
///
/// Before step t runs, those are reached whose label is 0 in the bits up to t.
fn joined_at(ring: &Ring, position: u32) -> u32 {
    match position {
        0 => ring.ranks.ilog2(),
        _ => ring.label(position).trailing_zeros(),
    }
}

/// Schedule a reduce-scatter of `count` elements: rank r gets block r of p.
pub fn reduce_scatter(place: Place, count: usize) -> Schedule {
    let fold = Fold::of(place.ranks());
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let role = fold.role(place);
    let work = if place.ranks() > 2 && matches!(role, Role::Survivor { .. }) { count } else { 0 };
    let layout = Layout { input: count, output: own.len, work, work_in_output: false, in_place_at: Some(own.start) };
    let mut schedule = Schedule::reducing(place, layout);
    let result = Buffer::Output.at(Span::first(own.len));
    let whole = Span::first(count);
    let (position, extra) = match role {
        Role::Extra { survivor } => {
            schedule.exchange(&[Send { peer: survivor, from: Buffer::Input.at(whole) }], &[]);
            let landing = Landing::copy(result);
            schedule.exchange(&[], &[Recv { peer: survivor, sent_from: Buffer::Work, landing }]);
            return schedule;
        }
        Role::Survivor { .. } if fold.levels() == 0 => {
            schedule.move_locally(&[Local::copy(Buffer::Input.at(own), result)]);
            return schedule;
        }
        Role::Survivor { position, extra } => (position, extra),
    };
    if let Some(peer) = extra {
        let landing = Landing::combine(Buffer::Input.at(whole), Side::Right, Buffer::Work.at(whole));
        schedule.exchange(&[], &[Recv { peer, sent_from: Buffer::Input, landing }]);
    }
    let runs = Runs { fold, count };
    let ring = Ring { ranks: fold.survivors, mirrored: false };
    for step in (0..fold.levels()).rev() {
        let is_first = step + 1 == fold.levels();
        let operand = |at: u32| if is_first && !fold.has_extra(at) { Buffer::Input } else { Buffer::Work };
        let partner = ring.partner(position, step);
        let peer = fold.rank_at(partner);
        let sends: Vec<Send> =
            runs.kept(partner, step).map(|span| Send { peer, from: operand(position).at(span) }).collect();
        let recv = |span: Span| {
            // If an extra's block lies beside it, the own block is rounded separately.
            let to = if step == 0 && extra.is_none() { result } else { Buffer::Work.at(span) };
            let landing = Landing::combine(operand(position).at(span), side_of(partner, position), to);
            Recv { peer, sent_from: operand(partner), landing }
        };
        let recvs: Vec<Recv> = runs.kept(position, step).map(recv).collect();
        schedule.exchange(&sends, &recvs);
    }
    if let Some(peer) = extra {
        let block = Span::of_block(count, place.ranks(), peer.0);
        let locals = [Local::copy(Buffer::Work.at(own), result)];
        schedule.push(Step { locals: &locals, sends: &[Send { peer, from: Buffer::Work.at(block) }], recvs: &[] });
    }
    schedule
}

/// Schedule an all-gather of `count` elements in all: rank r contributes block r of p.
pub fn all_gather(place: Place, count: usize) -> Schedule {
    let fold = Fold::of(place.ranks());
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let mut schedule = Schedule::moving(place, Layout::moves(own.len, count, Some(own.start)));
    schedule.move_locally(&[Local::copy(Buffer::Input.at(Span::first(own.len)), Buffer::Output.at(own))]);
    let output = |span: Span| Buffer::Output.at(span);
    let take = |peer: Rank, span: Span| Recv { peer, sent_from: Buffer::Output, landing: Landing::copy(output(span)) };
    match fold.role(place) {
        Role::Extra { survivor } => {
            schedule.exchange(&[Send { peer: survivor, from: output(own) }], &[]);
            schedule.exchange(&[], &[take(survivor, Span::first(count))]);
        }
        Role::Survivor { position, extra } => {
            if let Some(peer) = extra {
                schedule.exchange(&[], &[take(peer, Span::of_block(count, place.ranks(), peer.0))]);
            }
            let runs = Runs { fold, count };
            let ring = Ring { ranks: fold.survivors, mirrored: false };
            for step in 0..fold.levels() {
                let partner = ring.partner(position, step);
                let peer = fold.rank_at(partner);
                let sends: Vec<Send> =
                    runs.kept(position, step).map(|span| Send { peer, from: output(span) }).collect();
                let recvs: Vec<Recv> = runs.kept(partner, step).map(|span| take(peer, span)).collect();
                schedule.exchange(&sends, &recvs);
            }
            if let Some(peer) = extra {
                schedule.exchange(&[Send { peer, from: output(Span::first(count)) }], &[]);
            }
        }
    }
    schedule
}

/// The runs of blocks that positions keep, if steps run from far to near.
struct Runs {
    fold: Fold,
    count: usize,
}

impl Runs {
    /// What a position keeps with `step` steps to come: 2^step positions' blocks around it, as one span or, around the
    /// end, two. Even positions reach down as far as negabinary numbers of that many digits do, odd ones up.
    fn kept(&self, position: u32, step: u32) -> impl Iterator<Item = Span> {
        let (ranks, len) = (u64::from(self.fold.survivors), 1_u64 << step);
        let negative = 0xaaaa_aaaa_u64 & (len - 1);
        let below = if position.is_multiple_of(2) { negative } else { len - 1 - negative };
        let first = (u64::from(position) + ranks - below) % ranks;
        let (last, rest) = ((first + len).min(ranks), (first + len).saturating_sub(ranks));
        let span = |(first, last): (u64, u64)| self.fold.blocks_of(self.count, (first as u32, last as u32));
        [Some((first, last)), (rest > 0).then_some((0, rest))]
            .into_iter()
            .flatten()
            .map(span)
            .collect::<Vec<_>>()
            .into_iter()
    }
}
