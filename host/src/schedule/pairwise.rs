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
use super::{Buffer, Landing, Layout, Local, Place, Recv, Region, Schedule, Send, Span, Step};
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
    let taken = (0..ranks as usize).map(|from| Span { start: from * own, len: own }).collect();
    let given = (0..ranks).map(|to| Span::of_block(count, ranks, to)).collect();
    exchange(place, &Blocks { given, taken })
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
    Ok(exchange(place, &Blocks { given: packed(send_counts)?, taken: packed(recv_counts)? }))
}

/// Schedule an all-gather of blocks of any length: rank r contributes `counts[r]` elements, and every rank gets all
/// blocks in rank order.
///
/// # Errors
/// [`CountsError`] if the counts contradict the communicator or are too large.
pub fn all_gather_v(place: Place, counts: &[usize]) -> Result<Schedule, CountsError> {
    let taken = blocks_of(place, counts)?;
    let own = Span::first(taken[place.rank().0 as usize].len);
    Ok(exchange(place, &Blocks { given: vec![own; counts.len()], taken }))
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
    push_reduce_scatter(&mut schedule, |rank| blocks[rank.0 as usize], tree, Buffer::Output.at(Span::first(own.len)));
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
    let block = |rank: Rank| Span { start: rank.0 as usize * each, len: each };
    let own = block(place.rank());
    let mut landed = Local::copy(Buffer::Input.at(own), Buffer::Output.at(own));
    let swapped = Buffer::Work.at(Span::first(each));
    for t in 0..ranks {
        let peer = Rank(((u64::from(t) + u64::from(ranks) - u64::from(place.rank().0)) % u64::from(ranks)) as u32);
        if peer != place.rank() {
            let send = Send { peer, from: Buffer::Input.at(block(peer)) };
            let recv = Recv { peer, sent_from: Buffer::Input, landing: Landing::copy(swapped) };
            schedule.push(Step { locals: &[landed], sends: &[send], recvs: &[recv] });
            landed = Local::copy(swapped, Buffer::Output.at(block(peer)));
        }
    }
    schedule.move_locally(&[landed]);
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
    push_reduce_scatter(&mut schedule, even(place, count), tree, Buffer::Output.at(Span::first(own.len)));
    schedule
}

/// Return the block of each rank of `count` elements, as long as the others or an element longer.
fn even(place: Place, count: usize) -> impl Fn(Rank) -> Span {
    move |rank| Span::of_block(count, place.ranks(), rank.0)
}

/// Schedule an all-reduce of `count` elements that evaluates the tree's expression.
///
/// `tree` must be over `place.ranks()` ranks.
pub fn all_reduce(place: Place, count: usize, tree: &Tree) -> Schedule {
    let mut schedule = reduce_scatter_of_all_reduce(place, count, tree);
    push_all_gather(&mut schedule, count);
    schedule
}

/// Schedule the first half of an all-reduce: rank r has block r of p in its place in `Output`.
pub(super) fn reduce_scatter_of_all_reduce(place: Place, count: usize, tree: &Tree) -> Schedule {
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let work = own.len * place.ranks() as usize;
    let layout = Layout { input: count, output: count, work, work_in_output: false, in_place_at: Some(0) };
    let mut schedule = Schedule::reducing(place, layout);
    push_reduce_scatter(&mut schedule, even(place, count), tree, Buffer::Output.at(own));
    schedule
}

/// Collect the contributions to the own block in `Work`, in rank order, and store their value in `result`.
fn push_reduce_scatter(schedule: &mut Schedule, block: impl Fn(Rank) -> Span, tree: &Tree, result: Region) {
    let place = schedule.place();
    let block = |rank: Rank| Buffer::Input.at(block(rank));
    let own = block(place.rank());
    let staged = |rank: Rank| Buffer::Work.at(Span { start: rank.0 as usize * own.span.len, len: own.span.len });
    for distance in 1..place.ranks() {
        let (to, from) = (place.after(distance), place.before(distance));
        let send = Send { peer: to, from: block(to) };
        let recv = Recv { peer: from, sent_from: Buffer::Input, landing: Landing::copy(staged(from)) };
        schedule.exchange(&[send], &[recv]);
    }
    let mut locals = vec![Local::copy(own, staged(place.rank()))];
    push_evaluation(&mut locals, tree, staged, result);
    schedule.move_locally(&locals);
}

/// For each rank, the elements of `Input` sent to it, and those of `Output` received from it.
struct Blocks {
    given: Vec<Span>,
    taken: Vec<Span>,
}

fn exchange(place: Place, blocks: &Blocks) -> Schedule {
    let end = |spans: &[Span]| spans.last().map_or(0, |span| span.end());
    let layout = Layout::moves(end(&blocks.given), end(&blocks.taken), None);
    let mut schedule = Schedule::moving(place, layout);
    let given = |rank: Rank| Buffer::Input.at(blocks.given[rank.0 as usize]);
    let taken = |rank: Rank| Buffer::Output.at(blocks.taken[rank.0 as usize]);
    schedule.move_locally(&[Local::copy(given(place.rank()), taken(place.rank()))]);
    for distance in 1..place.ranks() {
        let (to, from) = (place.after(distance), place.before(distance));
        let recv = Recv { peer: from, sent_from: Buffer::Input, landing: Landing::copy(taken(from)) };
        schedule.exchange(&[Send { peer: to, from: given(to) }], &[recv]);
    }
    schedule
}

/// Return the spans of consecutive blocks, unless they exceed the address space.
fn packed(counts: &[usize]) -> Option<Vec<Span>> {
    let mut start = 0_usize;
    let span = |&len: &usize| {
        let span = Span { start, len };
        start = start.checked_add(len)?;
        Some(span)
    };
    counts.iter().map(span).collect()
}
