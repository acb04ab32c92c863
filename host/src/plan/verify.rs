//! Verifies a plan against its fabric. Shares no code with the planner.
//!
//! Checked: every rank and host appears once; there is one root with all other nodes below it (connected, no cycles);
//! lists of parents and children agree and are in declared order; every edge has a physical path, cable by cable; nodes
//! are at switches that can aggregate, one each, within their child limits; routes keep to the stated routing; the
//! plan's stated figures, rate and predicted times are correct.

mod price;
mod trees;

pub use trees::verify_trees;

use super::{Child, Limits, Plan, Refusal, Routing};
use crate::topo::{Device, Fabric, LinkId};
use std::collections::{BTreeSet, HashMap};

/// What is wrong with a plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// The plan has no node or no rank.
    #[error("the plan has {nodes} nodes and {ranks} ranks; both must be at least 1")]
    Empty {
        /// The number of nodes.
        nodes: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// Ranks are not numbered in order, or a host has two.
    #[error("rank entry {index} is misnumbered or repeats a host")]
    Rank {
        /// Which entry.
        index: usize,
    },
    /// A node's parent does not precede it, or its level is wrong.
    #[error("node {node} (`{name}`) has an impossible parent {parent:?} or level {level}")]
    Parent {
        /// Which node.
        node: usize,
        /// Its name.
        name: String,
        /// Its parent.
        parent: Option<usize>,
        /// Its level.
        level: usize,
    },
    /// A list of children contradicts the parents and leaves, or is out of order.
    #[error("node {node} lists the children {listed:?}, but in declared order they are {actual:?}")]
    Children {
        /// Which node.
        node: usize,
        /// The listed children.
        listed: Vec<Child>,
        /// The nodes and ranks that name it as parent or leaf.
        actual: Vec<Child>,
    },
    /// Two nodes are at one switch.
    #[error("two nodes are at `{name}`")]
    SharedSwitch {
        /// The switch.
        name: String,
    },
    /// A node is at a switch that cannot aggregate.
    #[error("`{name}` cannot be a node: {reason}")]
    Unusable {
        /// The switch.
        name: String,
        /// Why.
        reason: Refusal,
    },
    /// A node has more children than its limit.
    #[error("`{name}` has {children} children, but its limit is {limit}")]
    ChildLimit {
        /// The switch.
        name: String,
        /// Its children.
        children: usize,
        /// Its limit.
        limit: usize,
    },
    /// The cables of an edge do not connect the child to its node.
    #[error("the path of {child:?} does not lead to node {parent}")]
    Path {
        /// The child.
        child: Child,
        /// The node.
        parent: usize,
    },
    /// An edge goes up again after it went down, which the stated routing does not.
    #[error("the path of {child:?} goes down and up again between switches")]
    Valley {
        /// The child.
        child: Child,
    },
    /// An edge takes another route than the forwarding tables.
    #[error("the path of {child:?} is not that of the forwarding tables")]
    OtherRoute {
        /// The child.
        child: Child,
    },
    /// A predicted figure is wrong.
    #[error("the plan predicts {what} {stated}, but it is {actual}")]
    Predicted {
        /// The figure's name.
        what: &'static str,
        /// The stated value.
        stated: f64,
        /// The actual value.
        actual: f64,
    },
    /// A tree has other ranks than the first one.
    #[error("tree {tree} has another rank {rank} than the first tree")]
    OtherRank {
        /// The tree's index.
        tree: usize,
        /// The rank.
        rank: usize,
    },
    /// Trees together exceed the rate of a cable or port, or the slots of a device.
    #[error("the trees take {taken} of `{resource}`, which has {limit} {unit}")]
    Overbooked {
        /// The cable's ends or the device's switch.
        resource: String,
        /// What the trees take.
        taken: f64,
        /// What there is.
        limit: f64,
        /// Of what: `Gbit/s` or `slots`.
        unit: &'static str,
    },
    /// A tree in a set of trees is wrong.
    #[error("tree {tree}: {violation}")]
    Tree {
        /// The tree's index.
        tree: usize,
        /// What is wrong with it.
        violation: Box<Violation>,
    },
    /// A figure that the plan states is wrong.
    #[error("the plan states {what} {stated}, but it is {actual}")]
    Stated {
        /// The figure's name.
        what: &'static str,
        /// The stated value.
        stated: usize,
        /// The actual value.
        actual: usize,
    },
}

/// Verify a plan.
///
/// # Errors
/// The first [`Violation`].
pub fn verify(fabric: &Fabric, plan: &Plan, limits: &Limits) -> Result<(), Violation> {
    if plan.nodes.is_empty() || plan.ranks.is_empty() {
        return Err(Violation::Empty { nodes: plan.nodes.len(), ranks: plan.ranks.len() });
    }
    check_ranks(fabric, plan)?;
    check_tree(plan)?;
    check_children(plan)?;
    check_nodes(fabric, plan, limits)?;
    let edges = check_paths(fabric, plan)?;
    check_routes(fabric, plan, limits)?;
    let sharing = edges.values().max().copied().unwrap_or(0);
    let levels = plan.nodes.iter().map(|node| node.level + 1).max().unwrap_or(0);
    let children = plan.nodes.iter().map(|node| node.children.len()).max().unwrap_or(0);
    let aligned = plan.ranks.len().is_power_of_two() && expression(plan, 0) == pairing((0..plan.ranks.len()).map(leaf));
    let stated = [
        ("levels", plan.levels, levels),
        ("max_children", plan.max_children, children),
        ("max_link_sharing", plan.max_link_sharing, sharing),
        ("aligned", usize::from(plan.aligned), usize::from(aligned)),
    ];
    match stated.into_iter().find(|(_, stated, actual)| stated != actual) {
        Some((what, stated, actual)) => Err(Violation::Stated { what, stated, actual }),
        None => price::check(fabric, plan, limits, &edges),
    }
}

fn check_ranks(fabric: &Fabric, plan: &Plan) -> Result<(), Violation> {
    let mut hosts = BTreeSet::new();
    for (index, rank) in plan.ranks.iter().enumerate() {
        let known = fabric.hosts().get(rank.host.0 as usize).is_some_and(|host| host.name == rank.name);
        if rank.rank.0 as usize != index || rank.leaf >= plan.nodes.len() || !known || !hosts.insert(rank.host) {
            return Err(Violation::Rank { index });
        }
    }
    Ok(())
}

/// Node 0 is the root and every other node's parent precedes it, which rules out cycles and islands.
fn check_tree(plan: &Plan) -> Result<(), Violation> {
    for (index, node) in plan.nodes.iter().enumerate() {
        let fits = match node.parent {
            None => index == 0 && node.level == 0,
            Some(parent) => parent < index && node.level == plan.nodes[parent].level + 1,
        };
        if !fits {
            let (name, parent, level) = (node.name.clone(), node.parent, node.level);
            return Err(Violation::Parent { node: index, name, parent, level });
        }
    }
    Ok(())
}

fn check_children(plan: &Plan) -> Result<(), Violation> {
    let mut lowest = vec![u32::MAX; plan.nodes.len()];
    for rank in &plan.ranks {
        lowest[rank.leaf] = lowest[rank.leaf].min(rank.rank.0);
    }
    for (index, node) in plan.nodes.iter().enumerate().rev() {
        if let Some(parent) = node.parent {
            lowest[parent] = lowest[parent].min(lowest[index]);
        }
    }
    let mut below: Vec<Vec<(u32, Child)>> = vec![Vec::new(); plan.nodes.len()];
    for (index, node) in plan.nodes.iter().enumerate() {
        if let Some(parent) = node.parent {
            below[parent].push((lowest[index], Child::Node(index)));
        }
    }
    for rank in &plan.ranks {
        below[rank.leaf].push((rank.rank.0, Child::Rank(rank.rank)));
    }
    for (index, (node, mut actual)) in plan.nodes.iter().zip(below).enumerate() {
        actual.sort();
        let actual: Vec<Child> = actual.into_iter().map(|(_, child)| child).collect();
        // A node without a rank below it would wait forever.
        if actual != node.children || lowest[index] == u32::MAX {
            return Err(Violation::Children { node: index, listed: node.children.clone(), actual });
        }
    }
    Ok(())
}

fn check_nodes(fabric: &Fabric, plan: &Plan, limits: &Limits) -> Result<(), Violation> {
    let mut switches = BTreeSet::new();
    for node in &plan.nodes {
        let name = node.name.clone();
        if fabric.switches().get(node.switch.0 as usize).is_none_or(|switch| switch.name != name) {
            return Err(Violation::Unusable { name, reason: Refusal::NoAggregationNode });
        }
        if !switches.insert(node.switch) {
            return Err(Violation::SharedSwitch { name });
        }
        match limits.children_max(fabric, node.switch) {
            Err(reason) => return Err(Violation::Unusable { name, reason }),
            Ok(limit) if node.children.len() > limit => {
                return Err(Violation::ChildLimit { name, children: node.children.len(), limit });
            }
            Ok(_) => {}
        }
    }
    Ok(())
}

/// Walk every path and return the number of edges on each cable.
fn check_paths(fabric: &Fabric, plan: &Plan) -> Result<HashMap<LinkId, usize>, Violation> {
    let tiers = price::tiers(fabric);
    let mut edges: HashMap<LinkId, usize> = HashMap::new();
    let up =
        plan.nodes.iter().enumerate().filter_map(|(index, node)| {
            Some((Child::Node(index), Device::Switch(node.switch), &node.path, node.parent?))
        });
    let access = plan.ranks.iter().map(|rank| (Child::Rank(rank.rank), Device::Host(rank.host), &rank.path, rank.leaf));
    for (child, start, path, parent) in up.chain(access) {
        let (mut at, mut passed) = (Some(start), Vec::new());
        for link in path {
            *edges.entry(*link).or_default() += 1;
            at = at.and_then(|at| fabric.links().get(link.0 as usize)?.across(at));
            // Hosts do not forward.
            at = at.filter(|at| matches!(at, Device::Switch(_)));
            passed.extend(at);
        }
        if at != Some(Device::Switch(plan.nodes[parent].switch)) {
            return Err(Violation::Path { child, parent });
        }
        let switches = std::iter::once(start).chain(passed);
        let height = |at| if let Device::Switch(at) = at { Some(tiers[at.0 as usize]) } else { None };
        let heights: Vec<u32> = switches.filter_map(height).collect();
        let falls = heights.windows(2).position(|pair| pair[1] < pair[0]).unwrap_or(heights.len());
        let rises_again = heights[falls..].windows(2).any(|pair| pair[1] > pair[0]);
        if plan.routing == Routing::UpDown && rises_again {
            return Err(Violation::Valley { child });
        }
    }
    Ok(edges)
}

/// Every edge follows the forwarding tables from switch to switch, if there are any.
fn check_routes(fabric: &Fabric, plan: &Plan, limits: &Limits) -> Result<(), Violation> {
    let Some(tables) = &limits.pricing.routes else { return Ok(()) };
    let is_switch = |device: Device| match device {
        Device::Switch(switch) => Some(switch).filter(|switch| !fabric.switch(*switch).is_device),
        Device::Host(_) => None,
    };
    let with_hosts: BTreeSet<_> = fabric.hosts().iter().flat_map(|host| &host.uplinks).map(|up| up.switch).collect();
    let nodes =
        plan.nodes.iter().enumerate().filter_map(|(index, node)| {
            Some((Child::Node(index), Device::Switch(node.switch), &node.path, node.parent?))
        });
    let ranks = plan.ranks.iter().map(|rank| (Child::Rank(rank.rank), Device::Host(rank.host), &rank.path, rank.leaf));
    for (child, start, path, parent) in nodes.chain(ranks) {
        let mut to = plan.nodes[parent].switch;
        if fabric.switch(to).is_device && !with_hosts.contains(&to) {
            // A device beside a switch has no address in the tables.
            to = fabric.adjacent(to)[0].0;
        }
        let mut at = start;
        for link in path {
            let next = fabric.link(*link).across(at).unwrap_or(at);
            // Of cables to devices there is no choice.
            if let (Some(switch), Some(_)) = (is_switch(at), is_switch(next))
                && tables.next(switch, Device::Switch(to)) != Some(*link)
            {
                return Err(Violation::OtherRoute { child });
            }
            at = next;
        }
    }
    Ok(())
}

/// A hash of the expression that a node evaluates.
fn expression(plan: &Plan, node: usize) -> u128 {
    pairing(plan.nodes[node].children.iter().map(|child| match *child {
        Child::Node(node) => expression(plan, node),
        Child::Rank(rank) => leaf(rank.0 as usize),
    }))
}

fn leaf(rank: usize) -> u128 {
    mix(rank as u128 + 1, 0)
}

/// Combine neighbours, then pairs of pairs; an odd operand moves up.
fn pairing(operands: impl Iterator<Item = u128>) -> u128 {
    let mut operands: Vec<u128> = operands.collect();
    while operands.len() > 1 {
        operands = operands.chunks(2).map(|pair| if let [a, b] = pair { mix(*a, *b) } else { pair[0] }).collect();
    }
    operands.pop().unwrap_or_default()
}

/// Mix two hashes such that changes of order or bracketing change the result.
fn mix(left: u128, right: u128) -> u128 {
    const ODD: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
    let mixed = left.rotate_left(41).wrapping_mul(ODD) ^ right.wrapping_add(ODD).wrapping_mul(ODD | 0xff00);
    (mixed ^ (mixed >> 61)).wrapping_mul(ODD)
}
