//! Determines whether a tree evaluates the same expression as pairwise combining of all ranks.
//!
//! Pairing n operands combines neighbours, then pairs of pairs, and so on; an odd operand moves up a step unchanged.
//! Every intermediate operand is a block of ranks aligned to a power of two. A tree whose nodes pair their children
//! evaluates the same expression exactly if each of its partial results is such a block.

use std::ops::Range;

/// A child of a node.
pub(super) enum Below {
    Node(usize),
    Rank(usize),
}

/// Whether the tree, with nodes that pair their children in declared order, evaluates the pairing of all ranks, and the
/// number of ranks is a power of two (halving-doubling folds other numbers differently).
pub(super) fn is_aligned(ranks: usize, root: usize, children: &dyn Fn(usize) -> Vec<Below>) -> bool {
    ranks.is_power_of_two() && block(root, children) == Some(0..ranks)
}

/// The block of ranks whose pairing is the node's result, or `None` if there is no such block.
fn block(node: usize, children: &dyn Fn(usize) -> Vec<Below>) -> Option<Range<usize>> {
    let operand = |child| match child {
        Below::Node(node) => block(node, children),
        Below::Rank(rank) => Some(rank..rank + 1),
    };
    let mut operands: Vec<Range<usize>> = children(node).into_iter().map(operand).collect::<Option<_>>()?;
    while operands.len() > 1 {
        let pairs = operands.chunks(2);
        operands = pairs
            .map(|pair| match pair {
                [left, right] => join(left, right),
                alone => Some(alone[0].clone()),
            })
            .collect::<Option<_>>()?;
    }
    operands.pop()
}

/// Join two neighbouring blocks of the same power-of-two length. Alignment follows: all ranks form one block from 0,
/// and halves of an aligned block are aligned.
fn join(left: &Range<usize>, right: &Range<usize>) -> Option<Range<usize>> {
    let halves = left.end == right.start && right.len() == left.len() && left.len().is_power_of_two();
    halves.then_some(left.start..right.end)
}
