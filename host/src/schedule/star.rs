//! The star: one rank collects from every other and sends to every other. It is the baseline that the others beat.
//!
//! | | cost | busiest sender |
//! |---|---|---|
//! | reduce | (p-1) (alpha + n beta + n gamma) | n |
//! | broadcast | (p-1) (alpha + n beta) | n(p-1) |
//! | all-reduce: reduce, broadcast | (p-1) (2 alpha + 2n beta + n gamma) | n(p-1) |
//! | gather | (p-1) alpha + (p-1)/p n beta | n/p |
//! | scatter | (p-1) alpha + (p-1)/p n beta | n(p-1)/p |
//!
//! ("Flat tree" of Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and
//! experience", Concurrency and Computation 19(13), 2007, section 4.) The root takes one peer after another, in rank
//! order, and its own contribution in its place: a fold from the left, whichever rank is the root.

use super::{Buffer, Landing, Layout, Local, Place, Recv, Schedule, Send, Side, Span};
use sumac_hal::ids::Rank;

/// Schedule a reduction of `count` elements to `root`, which alone has an output.
pub fn reduce(place: Place, count: usize, root: Rank) -> Schedule {
    let layout = match place.rank() == root {
        true if root == Rank(0) => Layout::all_reduce(count),
        true => Layout { work_in_output: false, ..Layout::all_reduce(count) },
        false => Layout { input: count, in_place_at: Some(0), ..Layout::default() },
    };
    let mut schedule = Schedule::reducing(place, layout);
    push_reduce(&mut schedule, count, root);
    schedule
}

/// Schedule a broadcast of `count` elements from `root`, which alone has an input.
pub fn broadcast(place: Place, count: usize, root: Rank) -> Schedule {
    let whole = Span::first(count);
    let input = if place.rank() == root { count } else { 0 };
    let mut schedule = Schedule::moving(place, Layout::moves(input, count, Some(0)));
    if place.rank() == root {
        schedule.move_locally(&[Local::copy(Buffer::Input.at(whole), Buffer::Output.at(whole))]);
    }
    push_broadcast(&mut schedule, count, root);
    schedule
}

/// Schedule an all-reduce of `count` elements: reduce to rank 0, then broadcast.
pub fn all_reduce(place: Place, count: usize) -> Schedule {
    let layout = Layout::all_reduce(count);
    let layout = if place.rank() == Rank(0) { layout } else { Layout { work: 0, work_in_output: false, ..layout } };
    let mut schedule = Schedule::reducing(place, layout);
    push_reduce(&mut schedule, count, Rank(0));
    push_broadcast(&mut schedule, count, Rank(0));
    schedule
}

/// Schedule a gather of `count` elements in all to `root`, which alone has an output: rank r contributes block r of p.
pub fn gather(place: Place, count: usize, root: Rank) -> Schedule {
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let input = Buffer::Input.at(Span::first(own.len));
    if place.rank() != root {
        let mut schedule = Schedule::moving(place, Layout::moves(own.len, 0, Some(0)));
        schedule.exchange(&[Send { peer: root, from: input }], &[]);
        return schedule;
    }
    let mut schedule = Schedule::moving(place, Layout::moves(own.len, count, Some(own.start)));
    schedule.move_locally(&[Local::copy(input, Buffer::Output.at(own))]);
    schedule.compute(place.ranks() as usize - 1, move |index, step| {
        let peer = other(place, index);
        let landing = Landing::copy(Buffer::Output.at(Span::of_block(count, place.ranks(), peer.0)));
        step.recvs.push(Recv { peer, sent_from: Buffer::Input, landing });
    });
    schedule
}

/// Schedule a scatter of `count` elements in all from `root`, which alone has an input: rank r gets block r of p.
pub fn scatter(place: Place, count: usize, root: Rank) -> Schedule {
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let result = Buffer::Output.at(Span::first(own.len));
    if place.rank() != root {
        let mut schedule = Schedule::moving(place, Layout::moves(0, own.len, Some(0)));
        let landing = Landing::copy(result);
        schedule.exchange(&[], &[Recv { peer: root, sent_from: Buffer::Input, landing }]);
        return schedule;
    }
    let mut schedule = Schedule::moving(place, Layout::moves(count, own.len, Some(own.start)));
    schedule.compute(place.ranks() as usize - 1, move |index, step| {
        let peer = other(place, index);
        let from = Buffer::Input.at(Span::of_block(count, place.ranks(), peer.0));
        step.sends.push(Send { peer, from });
    });
    schedule.move_locally(&[Local::copy(Buffer::Input.at(own), result)]);
    schedule
}

/// Append the reduction of `Input` to the root's `Output`.
fn push_reduce(schedule: &mut Schedule, count: usize, root: Rank) {
    let place = schedule.place();
    let whole = Span::first(count);
    let (input, work, output) = (Buffer::Input.at(whole), Buffer::Work.at(whole), Buffer::Output.at(whole));
    if place.rank() != root {
        schedule.exchange(&[Send { peer: root, from: input }], &[]);
        return;
    }
    if place.ranks() == 1 {
        schedule.move_locally(&[Local::copy(input, output)]);
    }
    // A step for each rank in order, but for rank 0 if it is the root: its input is there.
    let first = u32::from(root == Rank(0));
    schedule.compute((place.ranks() - first) as usize, move |index, step| {
        let rank = Rank(index as u32 + first);
        let to = if rank.0 + 1 == place.ranks() { output } else { work };
        // What the ranks before have made.
        let held = match rank.0 {
            0 => None,
            1 if root == Rank(0) => Some(input),
            _ => Some(work),
        };
        let landing = held.map_or(Landing::copy(work), |held| Landing::combine(held, Side::Right, to));
        if rank != root {
            step.recvs.push(Recv { peer: rank, sent_from: Buffer::Input, landing });
        } else if to == output {
            // The input is the operand that its result may replace, where they share memory.
            step.locals.push(Local { from: work, landing: Landing::combine(input, Side::Left, to) });
        } else {
            step.locals.push(Local { from: input, landing });
        }
    });
}

/// Append the broadcast of the root's `Output`.
fn push_broadcast(schedule: &mut Schedule, count: usize, root: Rank) {
    let place = schedule.place();
    let whole = Buffer::Output.at(Span::first(count));
    if place.rank() != root {
        schedule.exchange(&[], &[Recv { peer: root, sent_from: Buffer::Output, landing: Landing::copy(whole) }]);
        return;
    }
    schedule.compute(place.ranks() as usize - 1, move |index, step| {
        step.sends.push(Send { peer: other(place, index), from: whole });
    });
}

/// The ranks but this one, by their index among them.
const fn other(place: Place, index: usize) -> Rank {
    let rank = index as u32;
    Rank(if rank < place.rank().0 { rank } else { rank + 1 })
}
