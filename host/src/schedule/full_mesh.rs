//! Full mesh: every rank uses its links to all others at once.
//!
//! | | cost | source |
//! |---|---|---|
//! | reduce-scatter | alpha + n/p beta + (p-1)/p n gamma | Thakur, Rabenseifner and Gropp 2005, section 4.4 |
//! | all-gather | alpha + n/p beta | its reverse |
//! | all-reduce | 2 alpha + 2n/p beta + (p-1)/p n gamma | their sum |
//!
//! These hold where each pair of ranks has a link of its own, as between the cards of a server. Ranks with one port
//! send n(p-1)/p through it, and each message costs their processors time: [`super::Cost`] counts both.
//!
//! The messages are those of [`super::pairwise`], all in one step. So this too evaluates any [`Tree`]'s expression.

use super::pairwise::Contributions;
use super::tree::Tree;
use super::{Buffer, Landing, Layout, Local, Place, Recv, Region, Schedule, Send, Span, pairwise};
use sumac_hal::ids::Rank;

/// Schedule a reduce-scatter of `count` elements that evaluates the tree's expression: rank r gets block r of p.
///
/// `tree` must be over `place.ranks()` ranks.
pub fn reduce_scatter(place: Place, count: usize, tree: &Tree) -> Schedule {
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let work = own.len * place.ranks() as usize;
    let layout = Layout { input: count, output: own.len, work, work_in_output: false, in_place_at: Some(own.start) };
    let mut schedule = Schedule::reducing(place, layout);
    push_reduce_scatter(&mut schedule, count, tree, Buffer::Output.at(Span::first(own.len)));
    schedule
}

/// Schedule an all-gather of `count` elements in all: rank r contributes block r of p.
pub fn all_gather(place: Place, count: usize) -> Schedule {
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let mut schedule = Schedule::moving(place, Layout::moves(own.len, count, Some(own.start)));
    schedule.move_locally(&[Local::copy(Buffer::Input.at(Span::first(own.len)), Buffer::Output.at(own))]);
    push_all_gather(&mut schedule, count);
    schedule
}

/// Schedule an all-reduce of `count` elements that evaluates the tree's expression.
///
/// `tree` must be over `place.ranks()` ranks.
pub fn all_reduce(place: Place, count: usize, tree: &Tree) -> Schedule {
    let mut schedule = Schedule::reducing(place, pairwise::all_reduce_layout(place, count));
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    push_reduce_scatter(&mut schedule, count, tree, Buffer::Output.at(own));
    push_all_gather(&mut schedule, count);
    schedule
}

/// Append the exchange of contributions, if there is any other rank, and the evaluation of the tree's expression.
fn push_reduce_scatter(schedule: &mut Schedule, count: usize, tree: &Tree, result: Region) {
    let place = schedule.place();
    let contributions = Contributions::even(place, count, tree, result);
    let steps = if place.ranks() == 1 { 1 } else { 2 };
    schedule.compute(steps, move |index, step| match index + 1 < steps {
        true => (1..place.ranks()).for_each(|distance| contributions.exchange(distance, step)),
        false => contributions.evaluate(step),
    });
}

/// Append the exchange of `Output`'s blocks, of which this rank has its own, if there is any other rank.
fn push_all_gather(schedule: &mut Schedule, count: usize) {
    let place = schedule.place();
    schedule.compute(usize::from(place.ranks() > 1), move |_, step| {
        let block = |rank: Rank| Buffer::Output.at(Span::of_block(count, place.ranks(), rank.0));
        for distance in 1..place.ranks() {
            let peer = place.before(distance);
            let recv = Recv { peer, sent_from: Buffer::Output, landing: Landing::copy(block(peer)) };
            step.exchange(Send { peer: place.after(distance), from: block(place.rank()) }, recv);
        }
    });
}
