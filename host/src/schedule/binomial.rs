//! Binomial trees: the fewest steps for one root, whichever rank it is.
//!
//! Ranks form aligned blocks of 1, 2, 4, ... neighbours. The *holder* of a block is the root if the block contains it,
//! otherwise the block's first rank. Where two blocks join, the holder of one of them holds both, and the other sends
//! to it (or receives from it, for data moving away from the root). With root 0 these are the textbook trees. For
//! another root the textbook renumbers ranks from the root on. Here numbers stay, so that runs of blocks stay runs of
//! elements, and a reduction evaluates the same expression, pairing in rank order, for every root: that of one
//! aggregation node with all ranks as children under `Order::TreePairwise`, even if p is not a power of two.
//!
//! | | cost, root 0 | source |
//! |---|---|---|
//! | reduce | ceil(log2 p) (alpha + n beta + n gamma) | Thakur, Rabenseifner and Gropp 2005 |
//! | broadcast | ceil(log2 p) (alpha + n beta) | the same |
//! | gather, scatter | ceil(log2 p) alpha + (p-1)/p n beta | the same |
//! | all-reduce: reduce, broadcast | ceil(log2 p) (2 alpha + 2n beta + n gamma) | their sum |
//!
//! Segments do not help these trees. Through one port the root of a broadcast sends n to each of its l = ceil(log2 p)
//! children, and that of a reduction receives as much, in any order: l n beta is the path above, and the least that k
//! segments take, in k l steps. An all-reduce could send segments back while others arrive: l (k+1) steps and l n (1 +
//! 1/k) elements, of which the best k are cheaper than 2l and 2l n from n beta = 2 alpha on. But there halving-doubling
//! takes at most 2l steps and less than 4n elements. In the declared order of this expression, which halving-doubling
//! has for some p only, [`super::pairwise`] takes p-1 + l steps and less than 2n elements, and from 125 ranks on the
//! segments of [`super::tree`] are faster. That leaves 23 to 124 ranks, and n beta of 2 to 10 alpha, where segments
//! here would save at most 15 % of the model's time. It does not even count that some ranks would receive from below
//! and above in one step.

use super::{Buffer, Landing, Layout, Local, Place, Recv, Schedule, Send, Side, Span, Step};
use sumac_hal::ids::Rank;

/// Schedule a reduction of `count` elements to `root`, which alone has an output. `root` is below `place.ranks()`.
pub fn reduce(place: Place, count: usize, root: Rank) -> Schedule {
    let layout = if place.rank() == root {
        Layout::all_reduce(count)
    } else {
        let work = if joins(place, root).first().is_some_and(|join| join.holds) { count } else { 0 };
        Layout { input: count, output: 0, work, work_in_output: false, in_place_at: Some(0) }
    };
    let mut schedule = Schedule::reducing(place, layout);
    push_reduce(&mut schedule, count, root);
    schedule
}

/// Schedule an all-reduce of `count` elements: reduce to rank 0, then broadcast.
pub fn all_reduce(place: Place, count: usize) -> Schedule {
    let mut schedule = Schedule::reducing(place, Layout::all_reduce(count));
    push_reduce(&mut schedule, count, Rank(0));
    push_broadcast(&mut schedule, count, Rank(0));
    schedule
}

/// Schedule a broadcast of `count` elements from `root`, which alone has an input. `root` is below `place.ranks()`.
pub fn broadcast(place: Place, count: usize, root: Rank) -> Schedule {
    let input = if place.rank() == root { count } else { 0 };
    let mut schedule = Schedule::moving(place, Layout::moves(input, count, Some(0)));
    if place.rank() == root {
        let whole = Span::first(count);
        schedule.move_locally(&[Local::copy(Buffer::Input.at(whole), Buffer::Output.at(whole))]);
    }
    push_broadcast(&mut schedule, count, root);
    schedule
}

/// Schedule a gather of `count` elements in all to `root`, which alone has an output: rank r contributes block r of
/// p. `root` is below `place.ranks()`.
pub fn gather(place: Place, count: usize, root: Rank) -> Schedule {
    let block = Span::of_block(count, place.ranks(), place.rank().0);
    let joins = joins(place, root);
    let held = held(&joins, place, root);
    let range = Span::of_blocks(count, place.ranks(), held.0, held.1);
    let at_root = place.rank() == root;
    let layout = match at_root {
        true => Layout::moves(block.len, count, Some(block.start)),
        false if held.1 - held.0 == 1 => Layout::moves(block.len, 0, Some(0)),
        false => Layout { work: range.len, ..Layout::moves(block.len, 0, Some(0)) },
    };
    let mut schedule = Schedule::moving(place, layout);
    // The root collects in place, others at the start of `Work`.
    let collected = |span: Span| match at_root {
        true => Buffer::Output.at(span),
        false => Buffer::Work.at(Span { start: span.start - range.start, len: span.len }),
    };
    let input = Buffer::Input.at(Span::first(block.len));
    let is_leaf = !at_root && held.1 - held.0 == 1;
    if !is_leaf {
        schedule.move_locally(&[Local::copy(input, collected(block))]);
    }
    for join in &joins {
        if join.holds {
            let span = Span::of_blocks(count, place.ranks(), join.theirs.0, join.theirs.1);
            let landing = Landing::copy(collected(span));
            schedule.exchange(&[], &[Recv { peer: join.peer, sent_from: join.their_buffer(), landing }]);
        } else {
            let from = if is_leaf { input } else { collected(range) };
            schedule.exchange(&[Send { peer: join.peer, from }], &[]);
        }
    }
    schedule
}

/// Schedule a scatter of `count` elements in all from `root`, which alone has an input: rank r gets block r of p.
/// `root` is below `place.ranks()`.
pub fn scatter(place: Place, count: usize, root: Rank) -> Schedule {
    let block = Span::of_block(count, place.ranks(), place.rank().0);
    let joins = joins(place, root);
    let held = held(&joins, place, root);
    let range = Span::of_blocks(count, place.ranks(), held.0, held.1);
    let at_root = place.rank() == root;
    let layout = match at_root {
        true => Layout::moves(count, block.len, Some(block.start)),
        false if held.1 - held.0 == 1 => Layout::moves(0, block.len, Some(0)),
        false => Layout { work: range.len, ..Layout::moves(0, block.len, Some(0)) },
    };
    let mut schedule = Schedule::moving(place, layout);
    let handed_on = |span: Span| match at_root {
        true => Buffer::Input.at(span),
        false => Buffer::Work.at(Span { start: span.start - range.start, len: span.len }),
    };
    let result = Buffer::Output.at(Span::first(block.len));
    let is_leaf = !at_root && held.1 - held.0 == 1;
    for join in joins.iter().rev() {
        if join.holds {
            let span = Span::of_blocks(count, place.ranks(), join.theirs.0, join.theirs.1);
            schedule.exchange(&[Send { peer: join.peer, from: handed_on(span) }], &[]);
        } else {
            let to = if is_leaf { result } else { handed_on(range) };
            let sent_from = if join.peer == root { Buffer::Input } else { Buffer::Work };
            schedule.exchange(&[], &[Recv { peer: join.peer, sent_from, landing: Landing::copy(to) }]);
        }
    }
    if !is_leaf {
        schedule.move_locally(&[Local::copy(handed_on(block), result)]);
    }
    schedule
}

/// Append the reduction of `Input` to the root's `Output`.
fn push_reduce(schedule: &mut Schedule, count: usize, root: Rank) {
    let place = schedule.place();
    let whole = Span::first(count);
    let mut held = Buffer::Input;
    for join in joins(place, root) {
        if !join.holds {
            schedule.exchange(&[Send { peer: join.peer, from: held.at(whole) }], &[]);
            continue;
        }
        let blocks = join.mine.1 - join.mine.0 + join.theirs.1 - join.theirs.0;
        let to = if blocks == place.ranks() { Buffer::Output } else { Buffer::Work };
        let received = if join.theirs.0 > join.mine.0 { Side::Right } else { Side::Left };
        let landing = Landing::combine(held.at(whole), received, to.at(whole));
        schedule.exchange(&[], &[Recv { peer: join.peer, sent_from: join.their_buffer(), landing }]);
        held = Buffer::Work;
    }
    if place.ranks() == 1 {
        schedule.move_locally(&[Local::copy(Buffer::Input.at(whole), Buffer::Output.at(whole))]);
    }
}

/// Append the broadcast of the root's `Output`.
pub(super) fn push_broadcast(schedule: &mut Schedule, count: usize, root: Rank) {
    let whole = Buffer::Output.at(Span::first(count));
    for join in joins(schedule.place(), root).iter().rev() {
        let (send, recv) = (
            Send { peer: join.peer, from: whole },
            Recv { peer: join.peer, sent_from: Buffer::Output, landing: Landing::copy(whole) },
        );
        if join.holds {
            schedule.push(Step { sends: &[send], ..Step::default() });
        } else {
            schedule.push(Step { recvs: &[recv], ..Step::default() });
        }
    }
}

/// Append the scatter of the root's `Output`: rank r ends with block r of p in its place there.
pub(super) fn push_scatter_of_output(schedule: &mut Schedule, count: usize, root: Rank) {
    let place = schedule.place();
    let region = |(first, last): (u32, u32)| Buffer::Output.at(Span::of_blocks(count, place.ranks(), first, last));
    for join in joins(place, root).iter().rev() {
        if join.holds {
            schedule.exchange(&[Send { peer: join.peer, from: region(join.theirs) }], &[]);
        } else {
            let landing = Landing::copy(region(join.mine));
            schedule.exchange(&[], &[Recv { peer: join.peer, sent_from: Buffer::Output, landing }]);
        }
    }
}

/// A join of two blocks, one of them held by this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Join {
    /// The holder of the other block.
    peer: Rank,
    /// Whether this rank holds both afterwards.
    holds: bool,
    /// This rank's block.
    mine: (u32, u32),
    /// The other block.
    theirs: (u32, u32),
}

impl Join {
    /// Return the buffer that the peer sends its block from: `Work` once it has joined blocks.
    const fn their_buffer(&self) -> Buffer {
        if self.theirs.1 - self.theirs.0 == 1 { Buffer::Input } else { Buffer::Work }
    }
}

/// Return the joins that this rank takes part in, smallest first. After the last it holds nothing, unless it is the
/// root.
fn joins(place: Place, root: Rank) -> Vec<Join> {
    let (rank, ranks) = (place.rank(), u64::from(place.ranks()));
    let holder = |(first, last): (u32, u32)| if (first..last).contains(&root.0) { root } else { Rank(first) };
    let mut joins = Vec::new();
    let mut width: u64 = 1;
    while width < ranks {
        let start = u64::from(rank.0) / (2 * width) * (2 * width);
        let (middle, end) = (start + width, (start + 2 * width).min(ranks));
        if middle < end {
            let (left, right) = ((start as u32, middle as u32), (middle as u32, end as u32));
            let (mine, theirs) = if u64::from(rank.0) < middle { (left, right) } else { (right, left) };
            let holds = holder((left.0, right.1)) == rank;
            joins.push(Join { peer: holder(theirs), holds, mine, theirs });
            if !holds {
                break;
            }
        }
        width *= 2;
    }
    joins
}

/// Return the largest block that this rank holds.
fn held(joins: &[Join], place: Place, root: Rank) -> (u32, u32) {
    match joins.last() {
        _ if place.rank() == root => (0, place.ranks()),
        Some(last) => last.mine,
        None => (place.rank().0, place.rank().0 + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joins_for_root_3_of_6_match_hand_computation() {
        let peers = |rank| {
            let joins = joins(Place::new(Rank(rank), 6).expect("inside"), Rank(3));
            joins.iter().map(|join| (join.peer.0, join.holds)).collect::<Vec<_>>()
        };
        assert_eq!(peers(0), [(1, true), (3, false)]);
        assert_eq!(peers(1), [(0, false)]);
        assert_eq!(peers(2), [(3, false)]);
        assert_eq!(peers(3), [(2, true), (0, true), (4, true)]);
        assert_eq!(peers(4), [(5, true), (3, false)]);
    }
}
