//! The expression of a declared order, and which schedules evaluate it.

use crate::plan::Child;
use crate::schedule::check::evaluates;
use crate::schedule::tree::{Tree, TreeError};
use crate::schedule::{ALGORITHMS, Algorithm, Shape};
use sumac_hal::ctrl::Order;

/// A declared expression over the ranks of a communicator.
#[derive(Debug, Clone, PartialEq)]
pub struct Declared {
    tree: Tree,
    /// For each of [`ALGORITHMS`], how its expression differs, if it does.
    mismatches: Vec<Option<String>>,
}

/// The maximum number of messages, further pieces included, of an algorithm that is compared: every algorithm for up to
/// 64 ranks, and those of logarithmic steps for 1024. Comparing them takes tens of milliseconds.
const COMPARED_MESSAGES_MAX: f64 = 24_576.0;

/// The messages of an algorithm as it is compared: one element for each rank.
fn messages(algorithm: &Algorithm, ranks: u32, shape: Shape) -> f64 {
    let cost = algorithm.cost(ranks, shape, ranks as usize);
    cost.messages + f64::from(ranks) * cost.extra_pieces
}

impl Declared {
    /// Create the expression of a tree from each node's children in order, root first, over ranks of this shape.
    /// Without a declared order any schedule will do.
    ///
    /// # Errors
    /// [`TreeError`] if `nodes` is not a tree over `ranks` ranks.
    pub fn new(nodes: Vec<Vec<Child>>, ranks: u32, order: Order, shape: Shape) -> Result<Self, TreeError> {
        let is_declared = order != Order::Arrival;
        let tree = Tree::new(nodes, ranks, if is_declared { order } else { Order::TreeFold })?;
        let mismatches = ALGORITHMS
            .iter()
            .map(|algorithm| {
                match algorithm.follows_tree || !algorithm.pattern.collective().reduces() || !is_declared {
                    true => None,
                    false if messages(algorithm, ranks, shape) > COMPARED_MESSAGES_MAX => {
                        let messages = messages(algorithm, ranks, shape);
                        Some(format!(
                            "equivalence is not checked for {messages} messages, of at most {COMPARED_MESSAGES_MAX}"
                        ))
                    }
                    false => evaluates(algorithm, &tree, shape).err().map(|difference| difference.to_string()),
                }
            })
            .collect();
        Ok(Self { tree, mismatches })
    }

    /// The expression of one node with all ranks.
    #[cfg(test)]
    pub(super) fn flat(ranks: u32, order: Order, shape: Shape) -> Self {
        let children = (0..ranks).map(|rank| Child::Rank(sumac_hal::ids::Rank(rank))).collect();
        Self::new(vec![children], ranks, order, shape).expect("a tree")
    }

    /// The expression as a tree.
    pub const fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Check that an algorithm evaluates the expression.
    ///
    /// # Errors
    /// How its expression differs.
    pub(super) fn check_evaluates(&self, algorithm: &Algorithm) -> Result<(), String> {
        let index = ALGORITHMS.iter().position(|known| known.name == algorithm.name);
        match index.and_then(|index| self.mismatches[index].clone()) {
            Some(why) => Err(why),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn algorithms_of_few_messages_are_compared_beyond_64_ranks() {
        let named = |name| Algorithm::named(name).expect("in the table");
        let declared = Declared::flat(128, Order::TreePairwise, Shape::Line);
        for name in ["halving_doubling::all_reduce", "recursive_doubling::all_reduce", "binomial::reduce"] {
            declared.check_evaluates(named(name)).unwrap_or_else(|why| panic!("{name}: {why}"));
        }
        let why = |name| declared.check_evaluates(named(name)).expect_err("another order");
        assert!(why("bine::all_reduce").contains("computes"), "{}", why("bine::all_reduce"));
        assert!(why("ring::all_reduce").contains("32512 messages"), "{}", why("ring::all_reduce"));
    }
}
