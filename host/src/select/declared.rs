//! The expression that a declared order asks for, and which schedules evaluate it.

use crate::plan::Child;
use crate::schedule::check::evaluates;
use crate::schedule::tree::{Tree, TreeError};
use crate::schedule::{ALGORITHMS, Algorithm};
use sumac_hal::ctrl::Order;

/// A declared expression over the ranks of a communicator.
#[derive(Debug, Clone, PartialEq)]
pub struct Declared {
    tree: Tree,
    /// For each of [`ALGORITHMS`], what it computes instead.
    differs: Vec<Option<String>>,
}

/// The most ranks for which schedules are proved, and so compared.
const PROVED_RANKS: u32 = 64;

impl Declared {
    /// Describe the expression of a tree: for each node its children in order, root first. Without a declared order
    /// every expression will do; that of the tree is taken.
    ///
    /// # Errors
    /// [`TreeError`] if that is no tree over `ranks` ranks.
    pub fn new(nodes: Vec<Vec<Child>>, ranks: u32, order: Order) -> Result<Self, TreeError> {
        let is_declared = order != Order::Arrival;
        let tree = Tree::new(nodes, ranks, if is_declared { order } else { Order::TreeFold })?;
        let differs = ALGORITHMS
            .iter()
            .map(|algorithm| match algorithm.follows_tree || !is_declared {
                true => None,
                false if ranks > PROVED_RANKS => Some(format!("it is compared for up to {PROVED_RANKS} ranks only")),
                false => evaluates(algorithm, &tree).err().map(|difference| difference.to_string()),
            })
            .collect();
        Ok(Self { tree, differs })
    }

    /// Describe the expression of one node with all ranks.
    #[cfg(test)]
    pub(super) fn flat(ranks: u32, order: Order) -> Self {
        let children = (0..ranks).map(|rank| Child::Rank(sumac_hal::ids::Rank(rank))).collect();
        Self::new(vec![children], ranks, order).expect("a tree")
    }

    /// Return the tree.
    pub const fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Tell whether an algorithm evaluates the expression.
    ///
    /// # Errors
    /// What it evaluates instead.
    pub(super) fn kept_by(&self, algorithm: &Algorithm) -> Result<(), String> {
        let index = ALGORITHMS.iter().position(|known| known.name == algorithm.name);
        match index.and_then(|index| self.differs[index].clone()) {
            Some(why) => Err(why),
            None => Ok(()),
        }
    }
}
