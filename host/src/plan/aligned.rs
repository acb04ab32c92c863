//! Whether a tree evaluates the same expression as pairing all ranks.
//!
//! Pairing n operands combines neighbours, then pairs of pairs, and so on; an odd one out moves up a step unchanged.
//! Every operand of it is a block of ranks that starts at a multiple of a power of two. A tree whose nodes pair their
//! children gives the same expression exactly if every partial result in it is such a block, which is what is checked here.

use super::{Child, Plan};
use std::ops::Range;

/// Return whether the plan's tree, with nodes that pair their children in declared order, evaluates the pairing of all
/// ranks, and the number of ranks is a power of two (halving-doubling folds other numbers differently).
pub(super) fn is_aligned(plan: &Plan) -> bool {
    let ranks = plan.ranks.len();
    ranks.is_power_of_two() && block(plan, 0) == Some(0..ranks)
}

/// Return the block of ranks that a node's result is the pairing of, or `None` if it is not one.
fn block(plan: &Plan, node: usize) -> Option<Range<usize>> {
    let mut operands = Vec::with_capacity(plan.nodes[node].children.len());
    for child in &plan.nodes[node].children {
        operands.push(match *child {
            Child::Node(node) => block(plan, node)?,
            Child::Rank(rank) => rank.0 as usize..rank.0 as usize + 1,
        });
    }
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

/// Join two neighbouring blocks of one power-of-two length. That the whole is aligned follows: all ranks are one block
/// from 0, and halves of an aligned block are aligned.
fn join(left: &Range<usize>, right: &Range<usize>) -> Option<Range<usize>> {
    let halves = left.end == right.start && right.len() == left.len() && left.len().is_power_of_two();
    halves.then_some(left.start..right.end)
}
