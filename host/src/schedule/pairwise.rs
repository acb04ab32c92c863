//! Pairwise exchange: every rank communicates with every other directly, one peer for each step.
//!
//! | | cost |
//! |---|---|
//! | all-to-all | (p-1) alpha + (p-1)/p n beta |
//! | all-to-all in place | p alpha + (p-1)/p n beta |
//! | all-gather of blocks of any length | (p-1) alpha + (p-1) b beta, b the longest block |
//! | reduce-scatter | (p-1) alpha + (p-1)/p n (beta + gamma) |
//! | all-reduce | (p-1 + ceil(log2 p)) alpha + (p-1)/p n (2 beta + gamma) |
//!
//! (Thakur, Rabenseifner and Gropp 2005, sections 4.4 and 4.5; the all-reduce's second half is Bruck's all-gather.)
//!
//! In the reduce-scatter the owner of a block receives every rank's contribution unreduced, and combines them once all
//! have arrived, in any declared order. So it evaluates any [`Tree`]'s expression at the bandwidth of a ring, which a
//! ring cannot; it needs staging room for p blocks.

use super::bruck::push_all_gather;
use super::tree::{Tree, push_evaluation};
use super::{Buffer, Landing, Layout, Local, Place, Recv, Region, Schedule, Send, Span, StepBuffer};
use sumac_hal::ids::Rank;
use thiserror::Error;

/// Why a collective with these counts is impossible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CountsError {
    /// The number of counts differs from the number of ranks.
    #[error("{sends} send counts and {recvs} receive counts for {ranks} ranks; pass one of each for each rank")]
    Ranks {
        /// The number of send counts.
        sends: usize,
        /// The number of receive counts.
        recvs: usize,
        /// The number of ranks.
        ranks: u32,
    },
    /// The number of counts differs from the number of ranks.
    #[error("{counts} counts for {ranks} ranks; pass one for each rank")]
    Blocks {
        /// The number of counts.
        counts: usize,
        /// The number of ranks.
        ranks: u32,
    },
    /// A rank's send and receive counts for itself differ.
    #[error("{rank} would send itself {send} elements but receive {recv}")]
    Own {
        /// The rank.
        rank: Rank,
        /// Its send count.
        send: usize,
        /// Its receive count.
        recv: usize,
    },
    /// The sum of the counts overflows.
    #[error("the counts of {rank} exceed the address space")]
    Overflow {
        /// The rank.
        rank: Rank,
    },
}

/// Schedule an all-to-all: rank r sends `count` elements in p blocks, block s to rank s, and receives block r of each.
///
/// The blocks are those of a reduce-scatter: where p does not divide `count`, they differ by one element, and the
/// output is p times the own block.
pub fn all_to_all(place: Place, count: usize) -> Schedule {
    let ranks = place.ranks();
    let own = Span::of_block(count, ranks, place.rank().0).len;
    let taken = move |from: Rank| Span { start: from.0 as usize * own, len: own };
    exchange(place, move |to| Span::of_block(count, ranks, to.0), taken)
}

/// Schedule an all-to-all of blocks of any length, packed in rank order at both ends: `send_counts[s]` elements go to
/// rank s, `recv_counts[s]` come from it.
///
/// What rank a sends and what b expects cannot be compared here; the executor does so.
///
/// # Errors
/// [`CountsError`] if the counts contradict the communicator or each other.
pub fn all_to_all_v(place: Place, send_counts: &[usize], recv_counts: &[usize]) -> Result<Schedule, CountsError> {
    let (ranks, rank) = (place.ranks(), place.rank());
    if send_counts.len() != ranks as usize || recv_counts.len() != ranks as usize {
        return Err(CountsError::Ranks { sends: send_counts.len(), recvs: recv_counts.len(), ranks });
    }
    let (send, recv) = (send_counts[rank.0 as usize], recv_counts[rank.0 as usize]);
    if send != recv {
        return Err(CountsError::Own { rank, send, recv });
    }
    let packed = |counts: &[usize]| packed(counts).ok_or(CountsError::Overflow { rank });
    let (given, taken) = (packed(send_counts)?, packed(recv_counts)?);
    Ok(exchange(place, move |to| given[to.0 as usize], move |from| taken[from.0 as usize]))
}

/// Schedule an all-gather of blocks of any length: rank r contributes `counts[r]` elements, and every rank gets all
/// blocks in rank order.
///
/// # Errors
/// [`CountsError`] if the counts contradict the communicator or are too large.
pub fn all_gather_v(place: Place, counts: &[usize]) -> Result<Schedule, CountsError> {
    let taken = blocks_of(place, counts)?;
    let own = Span::first(taken[place.rank().0 as usize].len);
    Ok(exchange(place, move |_| own, move |from| taken[from.0 as usize]))
}

/// Schedule a reduce-scatter with blocks of any length that evaluates the tree's expression: rank r gets the
/// reduction of `counts[r]` elements, behind those of the ranks before it.
///
/// `tree` must be over `place.ranks()` ranks.
///
/// # Errors
/// [`CountsError`] if the counts contradict the communicator or are too large.
pub fn reduce_scatter_v(place: Place, counts: &[usize], tree: &Tree) -> Result<Schedule, CountsError> {
    let blocks = blocks_of(place, counts)?;
    let own = blocks[place.rank().0 as usize];
    let too_long = CountsError::Overflow { rank: place.rank() };
    let layout = Layout {
        input: blocks.last().map_or(0, |span| span.end()),
        output: own.len,
        work: own.len.checked_mul(counts.len()).ok_or(too_long)?,
        work_in_output: false,
        in_place_at: None,
    };
    let mut schedule = Schedule::reducing(place, layout);
    let result = Buffer::Output.at(Span::first(own.len));
    push_reduce_scatter(&mut schedule, Contributions::new(place, move |rank| blocks[rank.0 as usize], tree, result));
    Ok(schedule)
}

/// Return the spans of the ranks' blocks, one behind the other.
fn blocks_of(place: Place, counts: &[usize]) -> Result<Vec<Span>, CountsError> {
    if counts.len() != place.ranks() as usize {
        return Err(CountsError::Blocks { counts: counts.len(), ranks: place.ranks() });
    }
    packed(counts).ok_or(CountsError::Overflow { rank: place.rank() })
}

/// Schedule an all-to-all in place: block s of p, each of `each` elements, goes to rank s, and rank s's block replaces
/// it.
///
/// In step t ranks r and s with r + s = t (mod p) swap blocks through one block of `Work`.
pub fn all_to_all_in_place(place: Place, each: usize) -> Schedule {
    let ranks = place.ranks();
    let whole = each * ranks as usize;
    let layout = Layout { work: if ranks == 1 { 0 } else { each }, ..Layout::moves(whole, whole, Some(0)) };
    let mut schedule = Schedule::moving(place, layout);
    let rank = place.rank();
    // The turn in which this rank would swap with itself.
    let own_turn = (2 * u64::from(rank.0) % u64::from(ranks)) as u32;
    let peer_at = move |step: u32| {
        let turn = u64::from(step) + u64::from(step >= own_turn);
        Rank(((turn + u64::from(ranks) - u64::from(rank.0)) % u64::from(ranks)) as u32)
    };
    // One step more than there are swaps: what a step receives goes to its place in the next one.
    schedule.compute(ranks as usize, move |index, step| {
        let index = index as u32;
        let block = |rank: Rank| Span { start: rank.0 as usize * each, len: each };
        let swapped = Buffer::Work.at(Span::first(each));
        step.locals.push(match index {
            0 => Local::copy(Buffer::Input.at(block(rank)), Buffer::Output.at(block(rank))),
            _ => Local::copy(swapped, Buffer::Output.at(block(peer_at(index - 1)))),
        });
        if index + 1 < ranks {
            let peer = peer_at(index);
            let recv = Recv { peer, sent_from: Buffer::Input, landing: Landing::copy(swapped) };
            step.exchange(Send { peer, from: Buffer::Input.at(block(peer)) }, recv);
        }
    });
    schedule
}

/// Schedule a reduce-scatter of `count` elements that evaluates the tree's expression: rank r gets block r of p.
///
/// `tree` must be over `place.ranks()` ranks.
pub fn reduce_scatter(place: Place, count: usize, tree: &Tree) -> Schedule {
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let layout = Layout {
        input: count,
        output: own.len,
        work: own.len * place.ranks() as usize,
        work_in_output: false,
        in_place_at: Some(own.start),
    };
    let mut schedule = Schedule::reducing(place, layout);
    push_reduce_scatter(
        &mut schedule,
        Contributions::even(place, count, tree, Buffer::Output.at(Span::first(own.len))),
    );
    schedule
}

/// Schedule an all-reduce of `count` elements that evaluates the tree's expression.
///
/// `tree` must be over `place.ranks()` ranks.
pub fn all_reduce(place: Place, count: usize, tree: &Tree) -> Schedule {
    let mut schedule = Schedule::reducing(place, all_reduce_layout(place, count));
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    push_reduce_scatter(&mut schedule, Contributions::even(place, count, tree, Buffer::Output.at(own)));
    push_all_gather(&mut schedule, count);
    schedule
}

/// Return the layout of an all-reduce with room for all contributions to the own block.
pub(super) fn all_reduce_layout(place: Place, count: usize) -> Layout {
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let work = own.len * place.ranks() as usize;
    Layout { input: count, output: count, work, work_in_output: false, in_place_at: Some(0) }
}

/// A reduce-scatter in which each rank collects the contributions to its block in `Work`, in rank order, and then
/// evaluates a tree's expression over them.
pub(super) struct Contributions<B> {
    place: Place,
    /// The block of each rank.
    block: B,
    tree: Tree,
    result: Region,
}

impl Contributions<()> {
    /// Blocks of `count` elements, each as long as the others or an element longer.
    pub(super) fn even(
        place: Place,
        count: usize,
        tree: &Tree,
        result: Region,
    ) -> Contributions<impl Fn(Rank) -> Span + std::marker::Send + Sync + 'static> {
        Contributions::new(place, move |rank| Span::of_block(count, place.ranks(), rank.0), tree, result)
    }
}

impl<B: Fn(Rank) -> Span> Contributions<B> {
    fn new(place: Place, block: B, tree: &Tree, result: Region) -> Self {
        Self { place, block, tree: tree.clone(), result }
    }

    /// The place of a contribution to the own block.
    fn staged(&self, rank: Rank) -> Region {
        let len = (self.block)(self.place.rank()).len;
        Buffer::Work.at(Span { start: rank.0 as usize * len, len })
    }

    /// Append the messages with the ranks at a distance.
    pub(super) fn exchange(&self, distance: u32, step: &mut StepBuffer) {
        let (to, from) = (self.place.after(distance), self.place.before(distance));
        let recv = Recv { peer: from, sent_from: Buffer::Input, landing: Landing::copy(self.staged(from)) };
        step.exchange(Send { peer: to, from: Buffer::Input.at((self.block)(to)) }, recv);
    }

    /// Append the evaluation, once all are there.
    pub(super) fn evaluate(&self, step: &mut StepBuffer) {
        let rank = self.place.rank();
        step.locals.push(Local::copy(Buffer::Input.at((self.block)(rank)), self.staged(rank)));
        push_evaluation(&mut step.locals, &self.tree, |rank| self.staged(rank), self.result);
    }
}

/// Append a reduce-scatter, with one peer for each step.
fn push_reduce_scatter(
    schedule: &mut Schedule,
    contributions: Contributions<impl Fn(Rank) -> Span + std::marker::Send + Sync + 'static>,
) {
    let ranks = schedule.place().ranks();
    schedule.compute(ranks as usize, move |index, step| match index as u32 + 1 {
        distance if distance < ranks => contributions.exchange(distance, step),
        _ => contributions.evaluate(step),
    });
}

/// Schedule the exchange of blocks: `given` is what `Input` has for a rank, `taken` where its block lands in `Output`.
fn exchange(
    place: Place,
    given: impl Fn(Rank) -> Span + std::marker::Send + Sync + 'static,
    taken: impl Fn(Rank) -> Span + std::marker::Send + Sync + 'static,
) -> Schedule {
    let last = Rank(place.ranks() - 1);
    let mut schedule = Schedule::moving(place, Layout::moves(given(last).end(), taken(last).end(), None));
    let given = move |rank: Rank| Buffer::Input.at(given(rank));
    let taken = move |rank: Rank| Buffer::Output.at(taken(rank));
    schedule.compute(place.ranks() as usize, move |distance, step| {
        let (to, from) = (place.after(distance as u32), place.before(distance as u32));
        if distance == 0 {
            step.locals.push(Local::copy(given(to), taken(from)));
            return;
        }
        let recv = Recv { peer: from, sent_from: Buffer::Input, landing: Landing::copy(taken(from)) };
        step.exchange(Send { peer: to, from: given(to) }, recv);
    });
    schedule
}

/// Return the spans of consecutive blocks, unless they exceed the address space.
pub(super) fn packed(counts: &[usize]) -> Option<Vec<Span>> {
    let mut start = 0_usize;
    let span = |&len: &usize| {
        let span = Span { start, len };
        start = start.checked_add(len)?;
        Some(span)
    };
    counts.iter().map(span).collect()
}
