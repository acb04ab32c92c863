//! The expression of an aggregation tree, and schedules in which ranks act as its nodes.
//!
//! Under `Order::TreeFold` and `Order::TreePairwise` a tree in the network fixes the order in which contributions
//! combine: the children of a node in order, node by node. [`Tree`] is that expression. [`Tree::evaluate`] defines it,
//! and the checker compares schedules with it. Any evaluation gives the same bits as the network:
//! - [`reduce`] and [`all_reduce`] follow the tree node by node: few steps, for small messages. A node is played by the
//!   root's rank if the root is below it, otherwise by the player of its first child. With levels 0..L of at most c
//!   children: at most `L (c-1) (alpha + n beta + n gamma)` up, plus a binomial broadcast down. Large messages are cut
//!   into segments, and each combination has a rank of its own (`combinations`).
//! - [`super::pairwise::reduce_scatter`] and [`super::pairwise::all_reduce`] evaluate it block by block: the fewest
//!   bytes, for large messages.
//!
//! Invariant: a player receives its children in declared order, one for each step, and combines at once what it can: a
//! fold holds one value, a pairing one for each block that waits for its neighbour (at most log2 c + 1).

use super::binomial::push_broadcast;
use super::combinations::{self, Profile};
use super::{Buffer, Landing, Layout, Local, Place, Recv, Region, Schedule, Send, Side, Span, Step};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;
use thiserror::Error;

/// A child of a node: another node, or a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Child {
    /// The node with this index among the nodes ([`Plan::nodes`](crate::plan::Plan::nodes)).
    Node(usize),
    /// A rank.
    Rank(Rank),
}

/// An aggregation tree with a declared order: an expression over ranks 0..ranks. Clones share it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    nodes: Arc<[Vec<Child>]>,
    ranks: u32,
    is_fold: bool,
    /// The nodes, parents first.
    descent: Arc<[usize]>,
    profile: Profile,
}

/// Why a description is not a tree over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TreeError {
    /// Contributions combine in order of arrival: no expression is declared.
    #[error("the order {0:?} declares no expression; a tree schedule needs TreeFold or TreePairwise")]
    Undeclared(Order),
    /// A rank does not appear exactly once.
    #[error("{rank} appears {times} times in a tree of {ranks} ranks; each must appear once")]
    Rank {
        /// The rank.
        rank: Rank,
        /// How often it appears.
        times: usize,
        /// The size of the communicator.
        ranks: u32,
    },
    /// A node is not reachable from the root (node 0), or in more than one way.
    #[error("node {node} of {nodes} has {parents} parents; the root must have none, every other node one")]
    Node {
        /// The node.
        node: usize,
        /// The number of nodes.
        nodes: usize,
        /// The number of its parents.
        parents: usize,
    },
    /// A node without children has no value.
    #[error("node {0} has no children")]
    Childless(usize),
}

impl Tree {
    /// Create a tree from the children of each node, in order; node 0 is the root.
    ///
    /// # Errors
    /// [`TreeError`] if that is not a single tree with ranks 0..`ranks` as its leaves, or `order` declares no
    /// expression.
    pub fn new(nodes: Vec<Vec<Child>>, ranks: u32, order: Order) -> Result<Self, TreeError> {
        let is_fold = match order {
            Order::TreeFold => true,
            Order::TreePairwise => false,
            other => return Err(TreeError::Undeclared(other)),
        };
        if nodes.is_empty() {
            return Err(TreeError::Childless(0));
        }
        let mut parents = vec![0_usize; nodes.len()];
        let mut times = vec![0_usize; ranks as usize];
        for (index, children) in nodes.iter().enumerate() {
            if children.is_empty() {
                return Err(TreeError::Childless(index));
            }
            for &child in children {
                match child {
                    Child::Node(node) => match parents.get_mut(node) {
                        Some(parents) => *parents += 1,
                        None => return Err(TreeError::Node { node, nodes: nodes.len(), parents: 1 }),
                    },
                    Child::Rank(rank) => match times.get_mut(rank.0 as usize) {
                        Some(times) => *times += 1,
                        None => return Err(TreeError::Rank { rank, times: 1, ranks }),
                    },
                }
            }
        }
        let wrong = parents.iter().enumerate().position(|(node, &parents)| parents != usize::from(node != 0));
        if let Some(node) = wrong {
            return Err(TreeError::Node { node, nodes: nodes.len(), parents: parents[node] });
        }
        if let Some(rank) = times.iter().position(|&times| times != 1) {
            return Err(TreeError::Rank { rank: Rank(rank as u32), times: times[rank], ranks });
        }
        let descent = descent(&nodes);
        // One parent each, yet unreachable from the root: a cycle.
        if descent.len() < nodes.len() {
            let node = (0..nodes.len()).find(|node| !descent.contains(node)).unwrap_or(0);
            return Err(TreeError::Node { node, nodes: nodes.len(), parents: 1 });
        }
        let profile = Profile { steps: 0, depth: 0 };
        let mut tree = Self { nodes: nodes.into(), ranks, is_fold, descent: descent.into(), profile };
        tree.profile = Profile { steps: tree.steps(), depth: combinations::depth(&tree) };
        Ok(tree)
    }

    /// Create a tree of one node with all ranks as its children.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn flat(ranks: u32, order: Order) -> Result<Self, TreeError> {
        Self::new(vec![(0..ranks).map(|rank| Child::Rank(Rank(rank))).collect()], ranks, order)
    }

    /// Return the number of ranks.
    pub const fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Evaluate the expression. This is the definition that everything else is compared with.
    pub fn evaluate<T>(&self, input: impl Fn(Rank) -> T, mut combine: impl FnMut(T, T) -> T) -> T {
        let mut values: Vec<Option<T>> = self.nodes.iter().map(|_| None).collect();
        for &node in self.descent.iter().rev() {
            let operand = |child: &Child| match *child {
                Child::Rank(rank) => Some(input(rank)),
                Child::Node(node) => values[node].take(),
            };
            let operands: Vec<T> = self.nodes[node].iter().filter_map(operand).collect();
            let value =
                if self.is_fold { operands.into_iter().reduce(&mut combine) } else { pair_up(operands, &mut combine) };
            values[node] = value;
        }
        values.swap_remove(0).expect("there is a root, and each node has a child: `new` has seen to that")
    }

    /// Return what the time of the expression depends on.
    pub(super) const fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Return the steps of a reduction node by node: on the longest path, the values that players receive.
    fn steps(&self) -> u32 {
        let mut done = vec![0; self.nodes.len()];
        for &node in self.descent.iter().rev() {
            let ready = |child: &Child| if let Child::Node(node) = *child { done[node] } else { 0 };
            let mut children = self.nodes[node].iter().map(ready);
            // The first child's player is the node's.
            let first = children.next().unwrap_or(0);
            done[node] = children.fold(first, |at, ready| at.max(ready) + 1);
        }
        done.first().copied().unwrap_or(0)
    }

    /// Return the player of each node in a reduction to `root`.
    fn players(&self, root: Rank) -> Vec<Rank> {
        let mut players = vec![root; self.nodes.len()];
        for &node in self.descent.iter().rev() {
            let of = |child: &Child| match *child {
                Child::Rank(rank) => rank,
                Child::Node(node) => players[node],
            };
            let mut players_below = self.nodes[node].iter().map(of);
            let first = players_below.next().unwrap_or(root);
            players[node] = if players_below.any(|player| player == root) { root } else { first };
        }
        players
    }
}

/// Return the nodes reachable from node 0, parents first. Each has one parent, so none appears twice.
fn descent(nodes: &[Vec<Child>]) -> Vec<usize> {
    let mut descent: Vec<usize> = (0..nodes.len().min(1)).collect();
    let mut next = 0;
    while let Some(&node) = descent.get(next) {
        descent.extend(nodes[node].iter().filter_map(|child| match *child {
            Child::Node(node) => Some(node),
            Child::Rank(_) => None,
        }));
        next += 1;
    }
    descent
}

/// Combine neighbours, then pairs of pairs; an odd one out moves up unchanged.
fn pair_up<T>(mut operands: Vec<T>, combine: &mut impl FnMut(T, T) -> T) -> Option<T> {
    while operands.len() > 1 {
        let mut level = Vec::with_capacity(operands.len().div_ceil(2));
        let mut rest = operands.into_iter();
        while let Some(left) = rest.next() {
            level.push(match rest.next() {
                Some(right) => combine(left, right),
                None => left,
            });
        }
        operands = level;
    }
    operands.pop()
}

/// Append the evaluation of the tree's expression over contributions that are `staged` in `Work`, which it overwrites.
pub(super) fn push_evaluation(locals: &mut Vec<Local>, tree: &Tree, staged: impl Fn(Rank) -> Region, result: Region) {
    let value = tree.evaluate(staged, |left, right| {
        locals.push(Local { from: right, landing: Landing::combine(left, Side::Right, left) });
        left
    });
    match locals.last_mut() {
        // The last combination is stored in the result's place.
        Some(last) if last.landing.with.is_some() => last.landing.to = result,
        _ => locals.push(Local::copy(value, result)),
    }
}

/// Schedule a reduction of `count` elements along the tree to `root`, which alone has an output.
///
/// `tree` must be over `place.ranks()` ranks, of which `root` is one.
pub fn reduce(place: Place, count: usize, tree: &Tree, root: Rank) -> Schedule {
    let output = if place.rank() == root { count } else { 0 };
    let layout = Layout { input: count, output, in_place_at: Some(0), ..Layout::default() };
    let mut schedule = Schedule::reducing(place, layout);
    match tree.profile().segments(count) {
        1 => push_reduce(&mut schedule, count, tree, root),
        segments => {
            let work = combinations::push_reduce(&mut schedule, count, tree, root, segments);
            schedule.set_work(work);
        }
    }
    schedule
}

/// Schedule an all-reduce of `count` elements: up along the tree, and down by a binomial broadcast or, in segments,
/// back along the same ranks.
///
/// `tree` must be over `place.ranks()` ranks.
pub fn all_reduce(place: Place, count: usize, tree: &Tree) -> Schedule {
    let layout = Layout { input: count, output: count, in_place_at: Some(0), ..Layout::default() };
    let mut schedule = Schedule::reducing(place, layout);
    match tree.profile().segments_of_all_reduce(place.ranks(), count) {
        1 => {
            // The planner orders children by their lowest rank: rank 0 plays the root node without a message.
            push_reduce(&mut schedule, count, tree, Rank(0));
            push_broadcast(&mut schedule, count, Rank(0));
        }
        segments => {
            let work = combinations::push_all_reduce(&mut schedule, count, tree, segments);
            schedule.set_work(work);
        }
    }
    schedule
}

fn push_reduce(schedule: &mut Schedule, count: usize, tree: &Tree, root: Rank) {
    let me = schedule.place().rank();
    let players = tree.players(root);
    let whole = Span::first(count);
    // Slots of the values of the nodes that this rank has played.
    let mut values: HashMap<usize, usize> = HashMap::new();
    let mut slots = 0;
    for &node in tree.descent.iter().rev() {
        let children = &tree.nodes[node];
        let player = players[node];
        if player != me {
            for child in children {
                let from = match *child {
                    Child::Rank(rank) if rank == me => Some(Buffer::Input.at(whole)),
                    Child::Node(child) => values.get(&child).map(|&value| slot(value, count)),
                    Child::Rank(_) => None,
                };
                if let Some(from) = from {
                    schedule.exchange(&[Send { peer: player, from }], &[]);
                }
            }
            continue;
        }
        // A value of this rank that is a later child stays below the ones that wait for it.
        let own = |child: &Child| match child {
            Child::Node(child) => values.get(child).copied(),
            Child::Rank(_) => None,
        };
        let first = own(&children[0]);
        let base = first.or_else(|| children.iter().find_map(own).map(|slot| slot + 1)).unwrap_or(0);
        let mut stack = Stack { base, count, is_fold: tree.is_fold, values: Vec::new(), slots: 0 };
        for child in children {
            let held = match *child {
                Child::Rank(rank) if rank == me => Some(Buffer::Input.at(whole)),
                Child::Node(child) => values.get(&child).map(|&value| slot(value, count)),
                Child::Rank(_) => None,
            };
            match (held, *child) {
                (Some(held), _) => stack.take_own(schedule, held),
                (None, Child::Rank(rank)) => stack.take_from(schedule, rank, Buffer::Input),
                (None, Child::Node(child)) => stack.take_from(schedule, players[child], Buffer::Work),
            }
        }
        stack.collapse(schedule);
        slots = slots.max(stack.slots);
        values.insert(node, base);
    }
    schedule.set_work(slots * count);
    if let Some(&value) = values.get(&0) {
        schedule.move_locally(&[Local::copy(slot(value, count), Buffer::Output.at(whole))]);
    }
}

/// Values that a player holds while it receives a node's children.
struct Stack {
    /// The slot of the first value.
    base: usize,
    count: usize,
    is_fold: bool,
    /// The number of children in each value, and its region.
    values: Vec<(usize, Region)>,
    /// The slots used.
    slots: usize,
}

impl Stack {
    /// Receive a child's value from another rank.
    fn take_from(&mut self, schedule: &mut Schedule, peer: Rank, sent_from: Buffer) {
        let landing = self.landing();
        schedule.exchange(&[], &[Recv { peer, sent_from, landing }]);
        self.settle(schedule, landing.to);
    }

    /// Use a child's value of this rank.
    fn take_own(&mut self, schedule: &mut Schedule, held: Region) {
        let landing = self.landing();
        if landing.to != held {
            schedule.move_locally(&[Local { from: held, landing }]);
        }
        self.settle(schedule, landing.to);
    }

    /// Return the landing of the next child: combined with its left neighbour, or waiting for it.
    fn landing(&mut self) -> Landing {
        match self.values.last() {
            Some(&(children, left)) if self.is_fold || children == 1 => Landing::combine(left, Side::Right, left),
            _ => {
                let at = self.base + self.values.len();
                self.slots = self.slots.max(at + 1);
                Landing::copy(slot(at, self.count))
            }
        }
    }

    /// Record the child's place, and join blocks of equal size.
    fn settle(&mut self, schedule: &mut Schedule, to: Region) {
        match self.values.last_mut() {
            Some((children, left)) if *left == to => *children += 1,
            _ => self.values.push((1, to)),
        }
        while let [.., (left, _), (right, _)] = self.values[..]
            && left == right
        {
            self.join(schedule);
        }
    }

    /// Join the remaining values, from the right.
    fn collapse(&mut self, schedule: &mut Schedule) {
        while self.values.len() > 1 {
            self.join(schedule);
        }
    }

    fn join(&mut self, schedule: &mut Schedule) {
        if let (Some((right, from)), Some((left, to))) = (self.values.pop(), self.values.last_mut()) {
            *left += right;
            let landing = Landing::combine(*to, Side::Right, *to);
            schedule.push(Step { locals: &[Local { from, landing }], ..Step::default() });
        }
    }
}

/// Return the region of a slot in `Work`.
const fn slot(index: usize, count: usize) -> Region {
    Buffer::Work.at(Span { start: index * count, len: count })
}
