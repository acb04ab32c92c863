//! The parts of `rab` and `hybrid` inside servers for short messages: each is one step, in which every rank sends what
//! others need of it directly to them.
//!
//! | part | of | cost for n elements on servers of m ranks |
//! |---|---|---|
//! | [`reduce`] | [`super::rab`] | alpha + (m-1) n (beta + gamma) |
//! | [`broadcast`] | [`super::rab`] | alpha + (m-1) n beta |
//! | [`reduce_scatter`] | [`super::hybrid`] | alpha + (m-1)/m n (beta + gamma) |
//! | [`all_gather`] | [`super::hybrid`] | alpha + (m-1)/m n beta |
//!
//! They are those of [`super::one_shot`] among the ranks of a server, with the places that results have in the whole
//! operation. Such a schedule says so ([`ServerStep`]): it can run on a board of its server's ranks (`exec::board`).
//!
//! Invariant: a rank of a server that sends or receives in a step does so with every other rank that the collective
//! joins it with, also where a block is empty. So whoever receives in it hears of all that it is from.

use super::{Buffer, Landing, Layout, Local, Place, Recv, Region, Schedule, Send, Side, Span, StepBuffer};
use sumac_hal::ids::Rank;
use sumac_hal::op::Collective;

/// What a schedule of one step is among the ranks of each server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerStep {
    /// The collective. A rooted one has the first rank of a server as its root.
    pub collective: Collective,
    /// The number of ranks on each server, at least two.
    pub each: u32,
}

impl ServerStep {
    /// Return the first rank of a rank's server, its leader.
    pub(crate) const fn leader_of(self, rank: Rank) -> Rank {
        Rank(rank.0 / self.each * self.each)
    }
}

/// Schedule a reduction of `count` elements to the leader of each server of `each` ranks. The other ranks have an
/// output, too, which they get later.
pub fn reduce(place: Place, count: usize, each: u32) -> Schedule {
    let step = ServerStep { collective: Collective::Reduce, each };
    let (whole, leader) = (Span::first(count), step.leader_of(place.rank()));
    let input = Buffer::Input.at(whole);
    let work = if place.rank() == leader { count * each as usize } else { 0 };
    let layout = Layout { work, work_in_output: false, ..Layout::all_reduce(count) };
    let mut schedule = Schedule::reducing(place, layout).in_servers(step);
    if place.rank() == leader {
        collect(&mut schedule, (whole, each), |_| {});
    } else {
        schedule.exchange(&[Send { peer: leader, from: input }], &[]);
    }
    schedule
}

/// Schedule a broadcast of `count` elements from the leader of each server of `each` ranks, which has them in its
/// output.
pub fn broadcast(place: Place, count: usize, each: u32) -> Schedule {
    let step = ServerStep { collective: Collective::Broadcast, each };
    let leader = step.leader_of(place.rank());
    let all = Buffer::Output.at(Span::first(count));
    let mut schedule = Schedule::moving(place, Layout::moves(count, count, Some(0))).in_servers(step);
    if place.rank() == leader {
        schedule.compute(1, move |_, step| step.sends.extend(others(place, each).map(|peer| Send { peer, from: all })));
    } else {
        schedule.exchange(&[], &[Recv { peer: leader, sent_from: Buffer::Output, landing: Landing::copy(all) }]);
    }
    schedule
}

/// Schedule a reduce-scatter of `count` elements among the ranks of each server of `each`: each rank gets the reduction
/// of its block ([`super::hybrid::block_of`]), at its place in the output.
pub fn reduce_scatter(place: Place, count: usize, each: u32) -> Schedule {
    let step = ServerStep { collective: Collective::ReduceScatter, each };
    let own = block_of(place.rank(), count, each);
    let layout = Layout { work: own.len * each as usize, work_in_output: false, ..Layout::all_reduce(count) };
    let mut schedule = Schedule::reducing(place, layout).in_servers(step);
    collect(&mut schedule, (own, each), move |step| {
        let block = |peer| Buffer::Input.at(block_of(peer, count, each));
        step.sends.extend(others(place, each).map(|peer| Send { peer, from: block(peer) }));
    });
    schedule
}

/// Schedule an all-gather of `count` elements in all among the ranks of each server of `each`: each rank has its block
/// at its place in the output, and gets those of the others.
pub fn all_gather(place: Place, count: usize, each: u32) -> Schedule {
    let step = ServerStep { collective: Collective::AllGather, each };
    let mut schedule = Schedule::moving(place, Layout::moves(count, count, Some(0))).in_servers(step);
    schedule.compute(1, move |_, step| {
        let block = |rank| Buffer::Output.at(block_of(rank, count, each));
        step.sends.extend(others(place, each).map(|peer| Send { peer, from: block(place.rank()) }));
        let recv = |peer| Recv { peer, sent_from: Buffer::Output, landing: Landing::copy(block(peer)) };
        step.recvs.extend(others(place, each).map(recv));
    });
    schedule
}

/// The block of `count` elements of a rank on its server.
fn block_of(rank: Rank, count: usize, each: u32) -> Span {
    Span::of_block(count, each, rank.0 % each)
}

/// The other ranks of a place's server, the next one first: so no rank is everybody's first receiver.
fn others(place: Place, each: u32) -> impl Iterator<Item = Rank> {
    let (first, row) = (place.rank().0 / each * each, place.in_row(each));
    (1..each).map(move |distance| Rank(first + row.after(distance).0))
}

/// Append a step in which the contributions of the other ranks to the elements `own` arrive, and what `sends` appends
/// is sent; then the combination of all, in the order of ranks, at its place in the output.
fn collect(
    schedule: &mut Schedule,
    (own, each): (Span, u32),
    sends: impl Fn(&mut StepBuffer) + std::marker::Send + Sync + 'static,
) {
    let place = schedule.place();
    schedule.compute(2, move |index, step| {
        let staged = |rank: Rank| Buffer::Work.at(Span { start: (rank.0 % each) as usize * own.len, len: own.len });
        if index == 0 {
            sends(step);
            let recv = |peer| Recv { peer, sent_from: Buffer::Input, landing: Landing::copy(staged(peer)) };
            step.recvs.extend(others(place, each).map(recv));
            return;
        }
        step.locals.push(Local::copy(Buffer::Input.at(own), staged(place.rank())));
        let result: Region = Buffer::Output.at(own);
        for at in 1..each {
            let (sum, to) = (staged(Rank(0)), if at + 1 == each { result } else { staged(Rank(0)) });
            step.locals.push(Local { from: staged(Rank(at)), landing: Landing::combine(sum, Side::Right, to) });
        }
    });
}
