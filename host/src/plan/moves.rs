//! What differs between two plans: the children that move to another node.

use super::Plan;
use std::collections::BTreeMap;
use std::fmt;

/// A child of a plan, and where it was and is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// The name of a host or of a node.
    pub child: String,
    /// The name of its earlier node; `None` if it was no child.
    pub from: Option<String>,
    /// The name of its node; `None` if it is no child any more.
    pub to: Option<String>,
}

impl fmt::Display for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let none = "none";
        write!(f, "{}: {} -> {}", self.child, self.from.as_deref().unwrap_or(none), self.to.as_deref().unwrap_or(none))
    }
}

impl Plan {
    /// The number of children of all nodes: the ranks, and all nodes but the root.
    pub fn children(&self) -> usize {
        self.ranks.len() + self.nodes.len() - 1
    }

    /// The children that have another node than in an earlier plan, by name.
    pub fn moves_from(&self, earlier: &Self) -> Vec<Move> {
        let (old, new) = (earlier.nodes_of_children(), self.nodes_of_children());
        let names: BTreeMap<&str, ()> = old.keys().chain(new.keys()).map(|name| (*name, ())).collect();
        let moved = names.into_keys().filter(|name| old.get(name) != new.get(name));
        let owned = |node: Option<&&str>| node.map(|name| (*name).to_owned());
        moved
            .map(|name| Move { child: name.to_owned(), from: owned(old.get(name)), to: owned(new.get(name)) })
            .collect()
    }

    fn nodes_of_children(&self) -> BTreeMap<&str, &str> {
        let ranks = self.ranks.iter().map(|rank| (rank.name.as_str(), self.nodes[rank.leaf].name.as_str()));
        let nodes =
            self.nodes.iter().filter_map(|node| Some((node.name.as_str(), self.nodes[node.parent?].name.as_str())));
        ranks.chain(nodes).collect()
    }
}
