//! Double binary tree: two trees over all ranks but the root, each for half of the elements, in segments.
//!
//! Every rank is inner in at most one of the trees, and a leaf in the other, so it receives and sends at full bandwidth
//! (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
//! Computing 35(12), 2009, sections 2 and 3; NCCL 2.4 uses such trees). With the root's rank as 0, the first tree is
//! the binary search tree over 1..p in which odd numbers are leaves. The second one is the same over mirrored numbers
//! if p is odd, and over numbers shifted by one if p is even: either makes even numbers of odd ones, except that the
//! shift leaves rank 1 a leaf twice.
//!
//! With h = floor(log2(p-1)), and k segments of each half ([`segments`]):
//!
//! | | steps | path (bound) | busiest sender (bound) |
//! |---|---|---|---|
//! | broadcast | h + k | n (1 + h/k) | n |
//! | reduce | h + k | n (1 + h/k) | n |
//! | all-reduce: reduce, broadcast | 2h + k + 1 | n (2 + 2h/k) | 2n |
//!
//! Messages have times on a common clock (`pipeline`), so ranks never wait in a cycle. In a step an inner rank
//! takes a segment from both children, and passes on the one before it. Partial values need room for three segments:
//! the lower child's combined with the own, of this step and of the one before, and the upper child's.

use super::pipeline::{self, BusyTimes};
use super::{Buffer, Landing, Layout, Local, Place, Recv, Schedule, Send, Side, Span, StepBuffer};
use std::ops::Range;
use sumac_hal::ids::Rank;

/// Return the number of segments of each half of `count` elements over `ranks` ranks: the one that minimises the cost
/// of an all-reduce, `(2h + 4k) alpha + (2 + 2h/k) n beta`, and that of its halves, as `pipeline` has it: in a
/// step a rank sends up to four messages, two in each tree.
pub fn segments(ranks: u32, count: usize) -> u32 {
    let height = f64::from(ranks.saturating_sub(1).max(1).ilog2());
    pipeline::segments(2.0 * height, 4.0, count)
}

/// Schedule a broadcast of `count` elements from `root`, which alone has an input.
pub fn broadcast(place: Place, count: usize, root: Rank) -> Schedule {
    let whole = Span::first(count);
    let is_root = place.rank() == root;
    let mut schedule = Schedule::moving(place, Layout::moves(if is_root { count } else { 0 }, count, Some(0)));
    if is_root {
        schedule.move_locally(&[Local::copy(Buffer::Input.at(whole), Buffer::Output.at(whole))]);
    }
    Timeline { trees: Trees::new(place, count, root), reduces: false, broadcast_at: Some(0) }.append_to(&mut schedule);
    schedule
}

/// Schedule a reduction of `count` elements to `root`, which alone has an output.
pub fn reduce(place: Place, count: usize, root: Rank) -> Schedule {
    let trees = Trees::new(place, count, root);
    let output = if place.rank() == root { count } else { 0 };
    let layout = Layout { output, ..trees.all_reduce_layout() };
    let mut schedule = Schedule::reducing(place, layout);
    push_alone(&mut schedule, count);
    Timeline { trees, reduces: true, broadcast_at: None }.append_to(&mut schedule);
    schedule
}

/// Schedule an all-reduce of `count` elements: reduce to rank 0, each segment then broadcast at once.
pub fn all_reduce(place: Place, count: usize) -> Schedule {
    let trees = Trees::new(place, count, Rank(0));
    let mut schedule = Schedule::reducing(place, trees.all_reduce_layout());
    push_alone(&mut schedule, count);
    let broadcast_at = Some(trees.height() + 1);
    Timeline { trees, reduces: true, broadcast_at }.append_to(&mut schedule);
    schedule
}

/// Append what a rank alone does.
fn push_alone(schedule: &mut Schedule, count: usize) {
    if schedule.place().ranks() == 1 {
        let whole = Span::first(count);
        schedule.move_locally(&[Local::copy(Buffer::Input.at(whole), Buffer::Output.at(whole))]);
    }
}

/// What a rank does at which times; each that has anything is a step.
struct Timeline {
    trees: Trees,
    reduces: bool,
    /// When the root sends the first segment, if it broadcasts.
    broadcast_at: Option<u32>,
}

impl Timeline {
    fn append_to(self, schedule: &mut Schedule) {
        let busy = self.busy();
        schedule.compute(busy.len(), move |index, step| {
            busy.at(index).into_iter().for_each(|time| self.append_step(time, step));
        });
    }

    fn busy(&self) -> BusyTimes {
        let (trees, segments) = (&self.trees, self.trees.segments);
        let mut all = Vec::new();
        for tree in trees.both() {
            let own = trees.own(tree);
            let is_inner = own.is_some_and(|node| node.lower.or(node.upper).is_some());
            // An inner node takes a segment one step before, or passes it on one step after.
            let (depth, more) = (own.map_or(0, |node| node.depth), u32::from(is_inner));
            if self.reduces {
                let passed = trees.height() - depth;
                all.push(passed - more..passed + segments);
            }
            all.extend(self.broadcast_at.map(|at| at + depth..at + depth + segments + more));
        }
        BusyTimes::new(all)
    }

    fn append_step(&self, time: u32, step: &mut StepBuffer) {
        for tree in self.trees.both().filter(|_| self.reduces) {
            self.trees.reduce(tree, time, step);
        }
        if let Some(time) = self.broadcast_at.and_then(|at| time.checked_sub(at)) {
            self.trees.both().for_each(|tree| self.trees.broadcast(tree, time, step));
        }
    }
}

/// Both trees, as one rank sees them.
struct Trees {
    place: Place,
    count: usize,
    root: Rank,
    segments: u32,
}

/// A node's neighbours in a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Node {
    depth: u32,
    /// `None` below the root's rank, which belongs to neither tree.
    parent: Option<u32>,
    lower: Option<u32>,
    upper: Option<u32>,
}

/// The node `number` of the binary search tree over 1..=`nodes`: its height is that of its lowest one bit.
fn node(number: u32, nodes: u32) -> Node {
    let mut at = 1 << nodes.ilog2();
    let (mut parent, mut depth) = (None, 0);
    // The number above `at` whose subtree holds those up to the end, which may lack the middle of its range.
    let upper_of = |at: u32| {
        let mut step = (at & at.wrapping_neg()) / 2;
        while step > 0 && at + step > nodes {
            step /= 2;
        }
        (step > 0).then(|| at + step)
    };
    let lower_of = |at: u32| {
        let step = (at & at.wrapping_neg()) / 2;
        (step > 0).then(|| at - step)
    };
    while at != number {
        let next = if number < at { lower_of(at) } else { upper_of(at) };
        parent = Some(at);
        depth += 1;
        let Some(next) = next else { break };
        at = next;
    }
    Node { depth, parent, lower: lower_of(number), upper: upper_of(number) }
}

impl Trees {
    fn new(place: Place, count: usize, root: Rank) -> Self {
        Self { place, count, root, segments: segments(place.ranks(), count) }
    }

    /// The number of ranks in each tree.
    const fn nodes(&self) -> u32 {
        self.place.ranks() - 1
    }

    /// The depth of the deepest node.
    const fn height(&self) -> u32 {
        if self.nodes() == 0 { 0 } else { self.nodes().ilog2() }
    }

    /// The number of the tree's node that a rank is; `None` for the root.
    fn number(&self, tree: u32) -> Option<u32> {
        let (ranks, nodes) = (self.place.ranks(), self.nodes());
        let relative = self.place.before(self.root.0 % ranks).0;
        match (tree, relative) {
            (_, 0) => None,
            (0, _) => Some(relative),
            (_, _) if nodes.is_multiple_of(2) => Some(nodes + 1 - relative),
            (_, 1) => Some(nodes),
            _ => Some(relative - 1),
        }
    }

    /// The rank that is a node of the tree.
    fn rank(&self, tree: u32, number: u32) -> Rank {
        let nodes = self.nodes();
        let relative = match tree {
            0 => number,
            _ if nodes.is_multiple_of(2) => nodes + 1 - number,
            _ => number % nodes + 1,
        };
        Rank(((u64::from(self.root.0) + u64::from(relative)) % u64::from(self.place.ranks())) as u32)
    }

    /// The rank of the tree's topmost node.
    fn top(&self, tree: u32) -> Rank {
        self.rank(tree, 1 << self.nodes().ilog2())
    }

    /// A segment of a tree's half.
    fn span(&self, tree: u32, segment: u32) -> Span {
        pipeline::segment(Span::of_block(self.count, 2, tree), self.segments, segment)
    }

    /// Both trees, if there is any other rank.
    const fn both(&self) -> Range<u32> {
        0..if self.nodes() == 0 { 0 } else { 2 }
    }

    /// The node that this rank is in a tree; `None` for the root.
    fn own(&self, tree: u32) -> Option<Node> {
        self.number(tree).map(|number| node(number, self.nodes()))
    }

    /// The rank above a node in a tree.
    fn above(&self, tree: u32, node: Node) -> Rank {
        node.parent.map_or(self.root, |parent| self.rank(tree, parent))
    }

    /// The segment of what begins at a time with the first one, and its elements.
    fn segment_at(&self, tree: u32, time: u32, begin: u32) -> Option<(u32, Span)> {
        let segment = time.checked_sub(begin).filter(|&segment| segment < self.segments)?;
        Some((segment, self.span(tree, segment)))
    }

    /// The layout of an all-reduce.
    fn all_reduce_layout(&self) -> Layout {
        let work = if self.nodes() < 2 { 0 } else { 3 * self.segment_len() };
        Layout { work, work_in_output: false, ..Layout::all_reduce(self.count) }
    }

    /// The length of the longest segment.
    const fn segment_len(&self) -> usize {
        self.count.div_ceil(2).div_ceil(self.segments as usize)
    }

    /// Broadcast from the root's `Output`: depth d receives its first segment at time d, others one by one.
    fn broadcast(&self, tree: u32, time: u32, step: &mut StepBuffer) {
        let Some(node) = self.own(tree) else {
            let first = self.segment_at(tree, time, 0);
            step.sends.extend(first.map(|(_, span)| Send { peer: self.top(tree), from: Buffer::Output.at(span) }));
            return;
        };
        if let Some((_, span)) = self.segment_at(tree, time, node.depth) {
            let (peer, landing) = (self.above(tree, node), Landing::copy(Buffer::Output.at(span)));
            step.recvs.push(Recv { peer, sent_from: Buffer::Output, landing });
        }
        if let Some((_, span)) = self.segment_at(tree, time, node.depth + 1) {
            let send = |child| Send { peer: self.rank(tree, child), from: Buffer::Output.at(span) };
            step.sends.extend([node.lower, node.upper].into_iter().flatten().map(send));
        }
    }

    /// Reduce to the root's `Output`: depth d sends its first segment at h - d, others one by one.
    fn reduce(&self, tree: u32, time: u32, step: &mut StepBuffer) {
        let room = |nth: u32, len: usize| Buffer::Work.at(Span { start: nth as usize * self.segment_len(), len });
        let Some(node) = self.own(tree) else {
            if let Some((_, span)) = self.segment_at(tree, time, self.height()) {
                let (peer, top) = (self.top(tree), 1 << self.nodes().ilog2());
                let landing = Landing::combine(Buffer::Input.at(span), self.side(peer), Buffer::Output.at(span));
                step.recvs.push(Recv { peer, sent_from: self.sent_from(top), landing });
            }
            return;
        };
        let passed = self.height() - node.depth;
        let mut children = [node.lower, node.upper].into_iter().flatten();
        let (first, second) = (children.next(), children.next());
        if let (Some(first), Some((segment, span))) = (first, self.segment_at(tree, time + 1, passed)) {
            let combined = room(segment % 2, span.len);
            let landing = Landing::combine(Buffer::Input.at(span), self.side(self.rank(tree, first)), combined);
            step.recvs.push(self.take(tree, first, landing));
            step.recvs.extend(second.map(|second| self.take(tree, second, Landing::copy(room(2, span.len)))));
        }
        if let Some((segment, span)) = self.segment_at(tree, time, passed) {
            let combined = room(segment % 2, span.len);
            step.locals.extend(second.map(|second| {
                let landing = Landing::combine(combined, self.side(self.rank(tree, second)), combined);
                Local { from: room(2, span.len), landing }
            }));
            let held = if first.is_some() { combined } else { Buffer::Input.at(span) };
            step.sends.push(Send { peer: self.above(tree, node), from: held });
        }
    }

    /// Take a child's contribution.
    fn take(&self, tree: u32, child: u32, landing: Landing) -> Recv {
        Recv { peer: self.rank(tree, child), sent_from: self.sent_from(child), landing }
    }

    /// The buffer that a node sends its contribution from.
    fn sent_from(&self, number: u32) -> Buffer {
        match node(number, self.nodes()) {
            Node { lower: None, upper: None, .. } => Buffer::Input,
            _ => Buffer::Work,
        }
    }

    /// The side of a peer's contribution: ranks keep their order where the tree has it.
    fn side(&self, peer: Rank) -> Side {
        if peer > self.place.rank() { Side::Right } else { Side::Left }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trees(rank: u32, ranks: u32, root: u32) -> Trees {
        Trees::new(Place::new(Rank(rank), ranks).expect("inside"), 1000, Rank(root))
    }

    #[test]
    fn every_rank_is_inner_in_at_most_one_tree() {
        for ranks in 2..=130 {
            for root in [0, ranks / 2, ranks - 1] {
                for rank in 0..ranks {
                    let trees = trees(rank, ranks, root);
                    let is_inner = |tree: u32| {
                        let node = trees.number(tree).map(|number| node(number, trees.nodes()));
                        node.is_some_and(|node| node.lower.is_some() || node.upper.is_some())
                    };
                    assert!(!(is_inner(0) && is_inner(1)), "{rank} of {ranks}, root {root}");
                    for tree in [0, 1] {
                        let back = trees.number(tree).map(|number| trees.rank(tree, number));
                        assert_eq!(back, (rank != root).then_some(Rank(rank)), "{rank} of {ranks}, root {root}");
                    }
                }
            }
        }
    }

    #[test]
    fn parents_and_children_agree_and_depth_is_logarithmic() {
        for nodes in 1..=200_u32 {
            for number in 1..=nodes {
                let own = node(number, nodes);
                assert!(own.depth <= nodes.ilog2());
                assert!(own.lower.is_some_and(|child| node(child, nodes).parent == Some(number)) || number % 2 == 1);
                if let Some(parent) = own.parent {
                    let above = node(parent, nodes);
                    assert_eq!(
                        if number < parent { above.lower } else { above.upper },
                        Some(number),
                        "{number} of {nodes}"
                    );
                }
            }
        }
    }

    #[test]
    fn segments_grow_with_the_root_of_the_size() {
        assert_eq!([0, 1, 1 << 14, 1 << 20, 1 << 34].map(|count| segments(17, count)), [1, 1, 1, 11, 512]);
        assert_eq!(segments(1, 1 << 20), 1, "nothing to pipeline");
    }
}
