//! One-shot exchange: every rank sends what others need of it directly to them, all in one step, and each combines for
//! itself.
//!
//! | | cost |
//! |---|---|
//! | all-reduce | alpha + (p-1) n (beta + gamma) |
//! | reduce, root's | alpha + (p-1) n (beta + gamma) |
//! | broadcast, root's | alpha + (p-1) n beta |
//! | reduce-scatter | alpha + (p-1)/p n (beta + gamma) |
//! | all-gather | alpha + (p-1)/p n beta |
//! | barrier | alpha |
//!
//! The fewest steps that there are, for small messages between few ranks: a rank sends and receives p-1 messages in the
//! step, which the cost model charges beside it. GPU libraries call the all-reduce one-shot (TensorRT-LLM, PyTorch's
//! symmetric memory); in the literature it is the direct, or linear, algorithm (Chan, Heimlich, Purkayastha and van de
//! Geijn, "Collective communication: theory, practice, and experience", Concurrency and Computation 19(13), 2007,
//! section 4).
//!
//! A reduce-scatter and an all-gather in one step are the halves of [`super::full_mesh`], which has no names for them.
//!
//! Contributions lie beside each other in `Work`, in rank order, until all have arrived. So any [`Tree`]'s expression
//! is evaluated, on every rank alike.

use super::tree::{Tree, push_evaluation};
use super::{Buffer, Landing, Layout, Local, Place, Recv, Schedule, Send, Span, full_mesh};
use sumac_hal::ids::Rank;

/// Schedule an all-reduce of `count` elements that evaluates the tree's expression.
///
/// `tree` must be over `place.ranks()` ranks.
pub fn all_reduce(place: Place, count: usize, tree: &Tree) -> Schedule {
    let layout = Layout { input: count, output: count, in_place_at: Some(0), ..Layout::default() };
    let whole = Span::first(count);
    let mut schedule = Schedule::reducing(place, with_room(layout, place, count));
    collect(&mut schedule, whole, tree, true);
    schedule
}

/// Schedule a reduction of `count` elements to `root` that evaluates the tree's expression. Only the root has an
/// output.
///
/// `tree` must be over `place.ranks()` ranks, of which `root` is one.
pub fn reduce(place: Place, count: usize, tree: &Tree, root: Rank) -> Schedule {
    let layout = Layout { input: count, in_place_at: Some(0), ..Layout::default() };
    let own = Buffer::Input.at(Span::first(count));
    if place.rank() != root {
        let mut schedule = Schedule::reducing(place, layout);
        schedule.exchange(&[Send { peer: root, from: own }], &[]);
        return schedule;
    }
    let layout = with_room(Layout { output: count, ..layout }, place, count);
    let mut schedule = Schedule::reducing(place, layout);
    collect(&mut schedule, own.span, tree, false);
    schedule
}

/// Schedule a reduce-scatter of `count` elements that evaluates the tree's expression: rank r gets block r of p.
///
/// `tree` must be over `place.ranks()` ranks.
pub fn reduce_scatter(place: Place, count: usize, tree: &Tree) -> Schedule {
    full_mesh::reduce_scatter(place, count, tree)
}

/// Schedule a broadcast of `count` elements from `root`, which alone has an input. `root` is below `place.ranks()`.
pub fn broadcast(place: Place, count: usize, root: Rank) -> Schedule {
    let whole = Span::first(count);
    let (from, to) = (Buffer::Input.at(whole), Buffer::Output.at(whole));
    if place.rank() != root {
        let mut schedule = Schedule::moving(place, Layout::moves(0, count, Some(0)));
        schedule.exchange(&[], &[Recv { peer: root, sent_from: Buffer::Input, landing: Landing::copy(to) }]);
        return schedule;
    }
    let mut schedule = Schedule::moving(place, Layout::moves(count, count, Some(0)));
    schedule.compute(1, move |_, step| step.sends.extend(others(place).map(|peer| Send { peer, from })));
    schedule.move_locally(&[Local::copy(from, to)]);
    schedule
}

/// Schedule an all-gather of `count` elements in all: rank r contributes block r of p.
pub fn all_gather(place: Place, count: usize) -> Schedule {
    full_mesh::all_gather(place, count)
}

/// Schedule a barrier: no rank leaves before every rank has entered.
pub fn barrier(place: Place) -> Schedule {
    let mut schedule = Schedule::moving(place, Layout::moves(0, 0, Some(0)));
    schedule.compute(1, move |_, step| {
        let nothing = Buffer::Output.at(Span::EMPTY);
        let landing = Landing::copy(nothing);
        step.sends.extend(others(place).map(|peer| Send { peer, from: nothing }));
        step.recvs.extend(senders(place).map(|peer| Recv { peer, sent_from: Buffer::Output, landing }));
    });
    schedule
}

/// Return the other ranks, the next one first: so no rank is everybody's first receiver.
fn others(place: Place) -> impl Iterator<Item = Rank> {
    (1..place.ranks()).map(move |distance| place.after(distance))
}

/// Return the other ranks, in the order in which [`others`] sends to this one.
fn senders(place: Place) -> impl Iterator<Item = Rank> {
    (1..place.ranks()).map(move |distance| place.before(distance))
}

/// Return the layout with room for `each` elements of every rank.
const fn with_room(layout: Layout, place: Place, each: usize) -> Layout {
    Layout { work: each * place.ranks() as usize, ..layout }
}

/// Append a step in which all other ranks' contributions to the elements `own` arrive, and the evaluation of the tree's
/// expression. `sends` says whether all others need this rank's too.
fn collect(schedule: &mut Schedule, own: Span, tree: &Tree, sends: bool) {
    let (place, tree) = (schedule.place(), tree.clone());
    schedule.compute(2, move |index, step| {
        let staged = |rank: Rank| Buffer::Work.at(Span { start: rank.0 as usize * own.len, len: own.len });
        let input = Buffer::Input.at(own);
        if index > 0 {
            step.locals.push(Local::copy(input, staged(place.rank())));
            push_evaluation(&mut step.locals, &tree, staged, Buffer::Output.at(own));
            return;
        }
        if sends {
            step.sends.extend(others(place).map(|peer| Send { peer, from: input }));
        }
        let recv = |peer| Recv { peer, sent_from: Buffer::Input, landing: Landing::copy(staged(peer)) };
        step.recvs.extend(senders(place).map(recv));
    });
}
