//! Values as expressions over ranks, stored once each, with the set of ranks that each contains.
//!
//! Invariant: equal expressions have equal ids, so comparing two ranks' results is comparing two numbers.

use crate::schedule::tree::Tree;
use std::collections::HashMap;
use sumac_hal::ids::Rank;

/// An expression in an [`Expressions`] table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExprId(usize);

/// The expressions that a collective computes: a rank's input, or `left op right`.
#[derive(Debug, Default)]
pub struct Expressions {
    nodes: Vec<Node>,
    pairs: HashMap<(ExprId, ExprId), ExprId>,
}

#[derive(Debug)]
struct Node {
    operands: Option<(ExprId, ExprId)>,
    ranks: RankSet,
    in_order: bool,
}

impl Expressions {
    /// Create a table with the inputs of `ranks` ranks.
    pub(super) fn new(ranks: usize) -> Self {
        let input = |rank| Node { operands: None, ranks: RankSet::of(rank, ranks), in_order: true };
        Self { nodes: (0..ranks).map(input).collect(), pairs: HashMap::new() }
    }

    /// Return the input of `rank`.
    pub const fn input(rank: Rank) -> ExprId {
        ExprId(rank.0 as usize)
    }

    /// Return `left op right`, or the first rank whose contribution is on both sides.
    ///
    /// # Errors
    /// That rank.
    pub fn combine(&mut self, left: ExprId, right: ExprId) -> Result<ExprId, Rank> {
        if let Some(&known) = self.pairs.get(&(left, right)) {
            return Ok(known);
        }
        let (a, b) = (&self.nodes[left.0], &self.nodes[right.0]);
        if let Some(twice) = a.ranks.first_shared(&b.ranks) {
            return Err(twice);
        }
        let in_order = a.in_order && b.in_order && a.ranks.last().is_some_and(|last| b.ranks.first() == Some(last + 1));
        let mut ranks = a.ranks.clone();
        ranks.add_all(&b.ranks);
        let id = ExprId(self.nodes.len());
        self.nodes.push(Node { operands: Some((left, right)), ranks, in_order });
        self.pairs.insert((left, right), id);
        Ok(id)
    }

    /// Return whether the operands, read from left to right, are consecutive ranks in rising order.
    pub fn is_in_order(&self, id: ExprId) -> bool {
        self.nodes[id.0].in_order
    }

    /// Evaluate the expression over given values.
    pub fn evaluate<T>(&self, id: ExprId, input: &impl Fn(Rank) -> T, combine: &impl Fn(T, T) -> T) -> T {
        match self.nodes[id.0].operands {
            None => input(Rank(id.0 as u32)),
            Some((left, right)) => combine(self.evaluate(left, input, combine), self.evaluate(right, input, combine)),
        }
    }

    /// Return the expression as text: `((0+1)+(2+3))`.
    pub fn to_text(&self, id: ExprId) -> String {
        self.evaluate(id, &|rank| rank.0.to_string(), &|left, right| format!("({left}+{right})"))
    }

    /// Return the expression of a tree, or `None` if it is over more ranks than the table.
    pub fn of_tree(&mut self, tree: &Tree) -> Option<ExprId> {
        // `Tree` contains every rank once: no contribution is on both sides.
        let inputs = self.nodes.iter().take_while(|node| node.operands.is_none()).count();
        if tree.ranks() as usize > inputs {
            return None;
        }
        let combine = |left: Option<ExprId>, right: Option<ExprId>| self.combine(left?, right?).ok();
        tree.evaluate(|rank| Some(Self::input(rank)), combine)
    }

    pub(super) fn ranks(&self, id: ExprId) -> &RankSet {
        &self.nodes[id.0].ranks
    }
}

/// A set of ranks, one bit each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RankSet {
    words: Vec<u64>,
}

impl RankSet {
    /// Return the set of one rank, in a communicator of `ranks`.
    pub(super) fn of(rank: usize, ranks: usize) -> Self {
        let mut words = vec![0; ranks.div_ceil(64)];
        words[rank / 64] |= 1 << (rank % 64);
        Self { words }
    }

    pub(super) fn add_all(&mut self, other: &Self) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word |= other);
    }

    pub(super) fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Return the lowest rank below `ranks` that is not in the set.
    pub(super) fn first_missing(&self, ranks: usize) -> Option<Rank> {
        let (index, word) = self.words.iter().enumerate().find(|(_, word)| **word != u64::MAX)?;
        let rank = index * 64 + word.trailing_ones() as usize;
        (rank < ranks).then_some(Rank(rank as u32))
    }

    /// Return whether the set is this rank alone.
    pub(super) fn is_only(&self, rank: Rank) -> bool {
        self.len() == 1 && self.first() == Some(rank.0 as usize)
    }

    fn first_shared(&self, other: &Self) -> Option<Rank> {
        let shared = self.words.iter().zip(&other.words).enumerate().find(|(_, (a, b))| **a & **b != 0);
        shared.map(|(index, (a, b))| Rank(index as u32 * 64 + (a & b).trailing_zeros()))
    }

    fn first(&self) -> Option<usize> {
        let (index, word) = self.words.iter().enumerate().find(|(_, word)| **word != 0)?;
        Some(index * 64 + word.trailing_zeros() as usize)
    }

    fn last(&self) -> Option<usize> {
        let (index, word) = self.words.iter().enumerate().rfind(|(_, word)| **word != 0)?;
        Some(index * 64 + 63 - word.leading_zeros() as usize)
    }
}
