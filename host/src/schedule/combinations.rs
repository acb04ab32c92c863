//! A declared expression in segments: each of its combinations on a rank of its own.
//!
//! The expression of a [`Tree`] over p ranks has p-1 combinations of two values, so each can have another rank, its
//! *player*, which receives what it does not have and passes the result on segment by segment, as double trees do
//! (Sanders, Speck and Träff 2009; the pipelined chain is the case of a fold). Played node by node, as [`super::tree`]
//! does for short messages, the root's rank receives every value of every node above it, one after the other, and
//! segments cannot help: it would have to receive as much.
//!
//! With D combinations on the longest path (p-1 of a fold, ceil(log2 p) of one pairwise node), k segments, and at most
//! w values of each that a rank receives or sends in either way (2; of an all-reduce 1, if all combinations are on one
//! path):
//!
//! | p > 1 | steps (bound) | path (bound) | busiest sender (bound) |
//! |---|---|---|---|
//! | reduce | D + k | w n (1 + D/k) | w n |
//! | all-reduce: reduce, and back along the same ranks | 2D + k | 2w n (1 + D/k) | 2w n |
//!
//! A subtree of r ranks has r-1 combinations, so one of its ranks plays none there and is *free* for those above it.
//! The root of a reduction stays free up to the last. Otherwise the player of a combination is a rank whose own input
//! is a side of it, if there is any, so that this input does not travel. Messages have times on a common clock
//! ([`super::pipeline`]): a combination at depth d takes its first segment at D-1-d, others one by one, so nothing
//! waits longer than for a step, and three segments' room suffice.

use super::pipeline::{self, Clock};
use super::tree::Tree;
use super::{Buffer, Landing, Local, Place, Recv, Schedule, Send, Side, Span};
use sumac_hal::ids::Rank;

/// What the time of an expression depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Profile {
    /// The steps of a reduction that is played node by node.
    pub(super) steps: u32,
    /// The combinations on the longest path.
    pub(super) depth: u32,
}

impl Profile {
    /// The most values that a rank receives or sends for each segment of a reduction.
    pub(super) const WIDTH_MAX: f64 = 2.0;

    /// Of one node with all ranks as its children, in order.
    pub(super) const fn flat(ranks: u32, is_fold: bool) -> Self {
        let steps = ranks - 1;
        let depth = if is_fold { steps } else { ranks.next_power_of_two().ilog2() };
        Self { steps, depth }
    }

    /// Return the values that a rank of an all-reduce receives or sends for each segment, in either way: one if all
    /// combinations are on one path, which is a chain.
    pub(super) const fn width(self, ranks: u32) -> f64 {
        if self.depth + 1 == ranks { 1.0 } else { Self::WIDTH_MAX }
    }

    /// Return the number of segments of a reduction of `count` elements; 1: node by node, where that is no slower, as
    /// it is for short messages.
    pub(super) fn segments(self, count: usize) -> u32 {
        self.segments_of(count, 1.0, Self::WIDTH_MAX, 0.0)
    }

    /// The same of an all-reduce over `ranks` ranks, which node by node ends with a binomial broadcast.
    pub(super) fn segments_of_all_reduce(self, ranks: u32, count: usize) -> u32 {
        self.segments_of(count, 2.0, self.width(ranks), f64::from(ranks.next_power_of_two().ilog2()))
    }

    /// The same of so many ways through the expression, against so many further steps node by node.
    fn segments_of(self, count: usize, ways: f64, width: f64, further: f64) -> u32 {
        let depth = f64::from(self.depth);
        let segments = pipeline::segments(depth, 1.0, count);
        let (k, transfer) = (f64::from(segments), count as f64 / pipeline::LATENCY_ELEMENTS);
        let by_nodes = (f64::from(self.steps) + further) * (1.0 + transfer);
        let in_segments = ways * (depth + width * k + width * (1.0 + depth / k) * transfer);
        if in_segments < by_nodes { segments } else { 1 }
    }
}

/// A side of a combination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Value {
    Input(Rank),
    /// The result of a combination, by its number.
    Combination(usize),
}

/// A combination of two values.
#[derive(Debug, Clone, Copy)]
struct Combination {
    left: Value,
    right: Value,
    /// Rank 0 until it is known.
    player: Rank,
    /// The distance from the last combination.
    depth: u32,
    /// That which takes the result.
    parent: Option<usize>,
}

/// The combinations of an expression, each behind those of its sides, as one rank sees them.
struct Combinations {
    count: usize,
    segments: u32,
    all: Vec<Combination>,
    /// One more than the largest depth.
    depth: u32,
    /// The rank that plays none.
    free: Rank,
    /// What this rank plays.
    own: Option<usize>,
    /// What takes this rank's input: its own, or another rank's.
    taking: Option<usize>,
}

/// Append a reduction of `Input` to the root's `Output`, and return the `Work` that it needs.
pub(super) fn push_reduce(schedule: &mut Schedule, count: usize, tree: &Tree, root: Rank, segments: u32) -> usize {
    let combinations = Combinations::new(schedule.place(), count, segments, tree, Some(root));
    let mut clock = Clock::default();
    combinations.reduce(&mut clock);
    clock.append_to(schedule);
    combinations.work()
}

/// Append an all-reduce of `Input` to `Output`, and return the `Work` that it needs.
pub(super) fn push_all_reduce(schedule: &mut Schedule, count: usize, tree: &Tree, segments: u32) -> usize {
    let combinations = Combinations::new(schedule.place(), count, segments, tree, None);
    let mut clock = Clock::default();
    combinations.reduce(&mut clock);
    combinations.broadcast(&mut clock);
    clock.append_to(schedule);
    combinations.work()
}

/// Return the combinations of a tree, without their players, and one more than the largest depth.
fn combinations_of(tree: &Tree) -> (Vec<Combination>, u32) {
    let mut all: Vec<Combination> = Vec::new();
    tree.evaluate(Value::Input, |left, right| {
        all.push(Combination { left, right, player: Rank(0), depth: 0, parent: None });
        Value::Combination(all.len() - 1)
    });
    let mut end = 0;
    for at in (0..all.len()).rev() {
        let Combination { left, right, depth, .. } = all[at];
        end = end.max(depth + 1);
        for side in [left, right] {
            if let Value::Combination(below) = side {
                (all[below].parent, all[below].depth) = (Some(at), depth + 1);
            }
        }
    }
    (all, end)
}

/// Return the number of combinations on the longest path of an expression.
pub(super) fn depth(tree: &Tree) -> u32 {
    combinations_of(tree).1
}

impl Combinations {
    fn new(place: Place, count: usize, segments: u32, tree: &Tree, root: Option<Rank>) -> Self {
        let (mut all, depth) = combinations_of(tree);
        // For each combination, the rank below it that plays none.
        let mut free: Vec<Rank> = Vec::with_capacity(all.len());
        for combination in &mut all {
            let Combination { left, right, parent, .. } = *combination;
            let free_of = |side| match side {
                Value::Input(rank) => rank,
                Value::Combination(below) => free[below],
            };
            let sides = [free_of(left), free_of(right)];
            // The player is one of both; the other stays free.
            let plays_left = match root {
                Some(root) if sides.contains(&root) => (sides[0] == root) == parent.is_none(),
                _ => matches!((left, right), (Value::Input(_), Value::Combination(_))),
            };
            let (player, rest) = if plays_left { (sides[0], sides[1]) } else { (sides[1], sides[0]) };
            free.push(rest);
            combination.player = player;
        }
        let free = free.last().copied().unwrap_or(place.rank());
        let own = all.iter().position(|one| one.player == place.rank());
        let taking = all.iter().position(|one| [one.left, one.right].contains(&Value::Input(place.rank())));
        Self { count, segments, all, depth, free, own, taking }
    }

    fn span(&self, segment: u32) -> Span {
        Span::of_block(self.count, self.segments, segment)
    }

    /// The length of the longest segment.
    const fn segment_len(&self) -> usize {
        self.count.div_ceil(self.segments as usize)
    }

    /// The length of `Work`.
    const fn work(&self) -> usize {
        if self.own.is_some() { 3 * self.segment_len() } else { 0 }
    }

    /// When a combination takes its first segment.
    const fn begin(&self, combination: &Combination) -> u32 {
        self.depth - 1 - combination.depth
    }

    /// The rank that sends a value to its combination's player, and the buffer there; `None` if the player has it.
    fn source(&self, value: Value, player: Rank) -> Option<(Rank, Buffer)> {
        match value {
            Value::Input(rank) => (rank != player).then_some((rank, Buffer::Input)),
            Value::Combination(below) => Some((self.all[below].player, Buffer::Work)),
        }
    }

    /// Reduce to the `Output` of the last combination's player.
    fn reduce(&self, clock: &mut Clock) {
        let elsewhere = self.taking.filter(|taking| self.own != Some(*taking)).map(|taking| &self.all[taking]);
        for segment in 0..self.segments {
            if let Some(taking) = elsewhere {
                let from = Buffer::Input.at(self.span(segment));
                clock.at(self.begin(taking) + segment).sends.push(Send { peer: taking.player, from });
            }
            if let Some(own) = self.own {
                self.combine(own, segment, clock);
            }
        }
    }

    /// Combine a segment, and pass the result on.
    fn combine(&self, own: usize, segment: u32, clock: &mut Clock) {
        let combination = &self.all[own];
        let (time, span) = (self.begin(combination) + segment, self.span(segment));
        let (input, room) = (Buffer::Input.at(span), |nth: usize| {
            Buffer::Work.at(Span { start: nth * self.segment_len(), len: span.len })
        });
        let held = room(segment as usize % 2);
        let result = if combination.parent.is_none() { Buffer::Output.at(span) } else { held };
        let mut take = |(peer, sent_from): (Rank, Buffer), landing: Landing| {
            clock.at(time).recvs.push(Recv { peer, sent_from, landing });
        };
        let sources = [combination.left, combination.right].map(|side| self.source(side, combination.player));
        match sources {
            [None, Some(right)] => take(right, Landing::combine(input, Side::Right, result)),
            [Some(left), None] => take(left, Landing::combine(input, Side::Left, result)),
            [Some(left), Some(right)] => {
                take(left, Landing::copy(held));
                take(right, Landing::copy(room(2)));
                let landing = Landing::combine(held, Side::Right, result);
                clock.at(time + 1).locals.push(Local { from: room(2), landing });
            }
            // A rank's input is in an expression once.
            [None, None] => {}
        }
        if let Some(parent) = combination.parent {
            clock.at(time + 1).sends.push(Send { peer: self.all[parent].player, from: result });
        }
    }

    /// Send the results back: those at depth d take their first segment at D-1+d, others one by one.
    fn broadcast(&self, clock: &mut Clock) {
        for segment in 0..self.segments {
            let elements = Buffer::Output.at(self.span(segment));
            let mut take = |peer: Rank, depth: u32| {
                let landing = Landing::copy(elements);
                let recv = Recv { peer, sent_from: Buffer::Output, landing };
                clock.at(self.depth - 1 + depth + segment).recvs.push(recv);
            };
            let Some(own) = self.own.map(|own| &self.all[own]) else {
                if let Some(above) = self.taking.map(|taking| &self.all[taking]) {
                    take(above.player, above.depth + 1);
                }
                continue;
            };
            if let Some(parent) = own.parent {
                take(self.all[parent].player, own.depth);
            }
            for side in [own.left, own.right] {
                let peer = match side {
                    Value::Combination(below) => self.all[below].player,
                    Value::Input(rank) if rank == self.free => rank,
                    Value::Input(_) => continue,
                };
                let send = Send { peer, from: elements };
                clock.at(self.depth + own.depth + segment).sends.push(send);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sumac_hal::ctrl::Order;

    #[test]
    fn every_rank_but_one_plays_one_combination_and_the_root_plays_the_last() {
        for ranks in 2..=40 {
            for order in [Order::TreeFold, Order::TreePairwise] {
                let tree = Tree::flat(ranks, order).expect("a tree");
                for root in (0..ranks).map(Rank).map(Some).chain([None]) {
                    let place = Place::new(Rank(0), ranks).expect("inside");
                    let combinations = Combinations::new(place, 1000, 4, &tree, root);
                    let mut players: Vec<u32> = combinations.all.iter().map(|one| one.player.0).collect();
                    assert!(root.is_none() || players.last().copied() == root.map(|root| root.0));
                    players.push(combinations.free.0);
                    players.sort_unstable();
                    assert_eq!(players, (0..ranks).collect::<Vec<_>>(), "{order:?} to {root:?}");
                }
            }
        }
    }

    #[test]
    fn fold_of_an_all_reduce_is_a_chain() {
        let tree = Tree::flat(5, Order::TreeFold).expect("a tree");
        let combinations = Combinations::new(Place::new(Rank(0), 5).expect("inside"), 100, 4, &tree, None);
        assert_eq!(combinations.all.iter().map(|one| one.player.0).collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert_eq!((combinations.free, combinations.depth), (Rank(0), 4));
    }

    #[test]
    fn profile_of_one_node_is_its_closed_form() {
        for ranks in 1..=70 {
            for (order, is_fold) in [(Order::TreeFold, true), (Order::TreePairwise, false)] {
                let tree = Tree::flat(ranks, order).expect("a tree");
                assert_eq!(*tree.profile(), Profile::flat(ranks, is_fold), "{ranks} {order:?}");
            }
        }
    }

    #[test]
    fn short_messages_are_played_node_by_node() {
        let (fold, pairs) = (Profile::flat(64, true), Profile::flat(64, false));
        assert_eq!([0, 1, 8192].map(|count| (pairs.segments(count), fold.segments(count)))[..2], [(1, 1); 2]);
        assert!(pairs.segments(1 << 20) > 1 && pairs.segments_of_all_reduce(64, 1 << 20) > 1);
        // Two ranks have one combination.
        assert_eq!(Profile::flat(2, true).segments(1 << 30), 1);
    }
}
