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

use super::tree::Tree;
use super::{Buffer, Landing, Layout, Local, Place, Recv, Schedule, Send, Span, pairwise};

/// Schedule a reduce-scatter of `count` elements that evaluates the tree's expression: rank r gets block r of p.
///
/// `tree` must be over `place.ranks()` ranks.
pub fn reduce_scatter(place: Place, count: usize, tree: &Tree) -> Schedule {
    merged(&pairwise::reduce_scatter(place, count, tree))
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
    let mut schedule = merged(&pairwise::reduce_scatter_of_all_reduce(place, count, tree));
    push_all_gather(&mut schedule, count);
    schedule
}

/// The same messages in one step, with the local moves after them.
fn merged(steps: &Schedule) -> Schedule {
    let mut schedule = Schedule::reducing(steps.place(), *steps.layout());
    let sends: Vec<Send> = steps.steps().flat_map(|step| step.sends).copied().collect();
    let recvs: Vec<Recv> = steps.steps().flat_map(|step| step.recvs).copied().collect();
    if !sends.is_empty() {
        schedule.exchange(&sends, &recvs);
    }
    let locals: Vec<Local> = steps.steps().flat_map(|step| step.locals).copied().collect();
    schedule.move_locally(&locals);
    schedule
}

/// Append the exchange of `Output`'s blocks, of which this rank has its own.
fn push_all_gather(schedule: &mut Schedule, count: usize) {
    let place = schedule.place();
    let block = |rank: sumac_hal::ids::Rank| Buffer::Output.at(Span::of_block(count, place.ranks(), rank.0));
    let own = block(place.rank());
    let sends: Vec<Send> = (1..place.ranks()).map(|step| Send { peer: place.after(step), from: own }).collect();
    let take = |step: u32| {
        let peer = place.before(step);
        Recv { peer, sent_from: Buffer::Output, landing: Landing::copy(block(peer)) }
    };
    let recvs: Vec<Recv> = (1..place.ranks()).map(take).collect();
    if !sends.is_empty() {
        schedule.exchange(&sends, &recvs);
    }
}
