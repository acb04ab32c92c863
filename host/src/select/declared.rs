//! The expression of a declared order, and which schedules evaluate it.

use crate::plan::Child;
use crate::schedule::check::evaluates;
use crate::schedule::tree::{Tree, TreeError};
use crate::schedule::{ALGORITHMS, Algorithm};
use sumac_hal::ctrl::Order;

/// A declared expression over the ranks of a communicator.
#[derive(Debug, Clone, PartialEq)]
pub struct Declared {
    tree: Tree,
    /// For each of [`ALGORITHMS`], how its expression differs, if it does.
    mismatches: Vec<Option<String>>,
}

/// The maximum number of ranks for which schedules are proved, and so compared.
const PROVED_RANKS_MAX: u32 = 64;

impl Declared {
    /// Create the expression of a tree from each node's children in order, root first. Without a declared order any
    /// schedule will do.
    ///
    /// # Errors
    /// [`TreeError`] if `nodes` is not a tree over `ranks` ranks.
    pub fn new(nodes: Vec<Vec<Child>>, ranks: u32, order: Order) -> Result<Self, TreeError> {
        let is_declared = order != Order::Arrival;
        let tree = Tree::new(nodes, ranks, if is_declared { order } else { Order::TreeFold })?;
        let mismatches = ALGORITHMS
            .iter()
            .map(|algorithm| match algorithm.follows_tree || !is_declared {
                true => None,
                false if ranks > PROVED_RANKS_MAX => {
                    Some(format!("equivalence is only checked for up to {PROVED_RANKS_MAX} ranks"))
                }
                false => evaluates(algorithm, &tree).err().map(|difference| difference.to_string()),
            })
            .collect();
        Ok(Self { tree, mismatches })
    }

    /// The expression of one node with all ranks.
    #[cfg(test)]
    pub(super) fn flat(ranks: u32, order: Order) -> Self {
        let children = (0..ranks).map(|rank| Child::Rank(sumac_hal::ids::Rank(rank))).collect();
        Self::new(vec![children], ranks, order).expect("a tree")
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
